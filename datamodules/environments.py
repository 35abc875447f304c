"""Environments by name: Atari games, and everything else that Gymnasium knows."""

from typing import Any

import gymnasium
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from catnat.checks import did_you_mean, require_at_least
from catnat.datamodules.atari import Backend, game_name, game_names, make_atari_vec_env, say


def is_atari(name: str) -> bool:
    """Whether a name is that of an Atari game.

    Raises:
        ValueError: there is neither a game nor an environment of this name.
    """
    if name in gymnasium.registry:  # first: Blackjack-v1 is not the Atari game of that name
        return str(gymnasium.registry[name].entry_point).startswith("ale_py.")
    try:
        game_name(name)
    except ValueError:
        if ":" in name:  # module:name, of a package that registers its environments
            return False
        names = [*game_names(), *(x for x in gymnasium.registry if "ALE/" not in x)]
        raise ValueError(
            f"{name!r} is neither an Atari game nor registered with Gymnasium"
            f"{did_you_mean(name, names)}"
        ) from None
    return True


def make_env(
    env: str = "Breakout",
    num_envs: int = 8,
    backend: Backend | None = None,
    normalize: bool = False,
    env_kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    gamma: float = 0.99,
) -> VecEnv:
    """Several environments of a name.

    Args:
        env: an Atari game in any spelling, or a Gymnasium id such as CartPole-v1.
        num_envs: how many side by side.
        backend: for Atari games. sb3, the default, is Stable-Baselines3's wrappers. native is
            ale_py's C++ threads: faster, and played with HeadPPO or HeadA2C.
        normalize: scale observations and rewards by their running moments.
        env_kwargs: arguments of the environment, such as max_episode_steps.
        seed: seed of the first environment; environment i has seed + i.
        gamma: discount of the returns whose spread scales the rewards, with ``normalize``.
    """
    if is_atari(env):
        if normalize or env_kwargs:
            raise ValueError(
                f"normalize and env_kwargs are for environments other than Atari games, not {env}"
            )
        if env.startswith("ALE/"):
            say(
                f"{env} is played without sticky actions here, as {game_name(env)}NoFrameskip-v4 is"
            )
        return make_atari_vec_env(env, num_envs, backend or "sb3", seed)
    if backend is not None:
        raise ValueError(f"backend {backend} is for Atari games, not for {env}")
    require_at_least(1, num_envs=num_envs)
    try:
        envs = make_vec_env(env, num_envs, seed, env_kwargs=env_kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:  # a package, or env_kwargs
        raise ValueError(f"{env}: {error}") from error
    modes = [None, *envs.get_attr("metadata")[0].get("render_modes", ())]
    if (render_mode := (env_kwargs or {}).get("render_mode")) not in modes:
        envs.close()
        raise ValueError(f"{env} has no render_mode {render_mode!r}; choose from {modes[1:]}")
    return VecNormalize(envs, gamma=gamma) if normalize else envs
