"""Environments by name: Atari games, and everything else that Gymnasium knows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete
from gymnasium.wrappers import TransformAction
from PIL import Image
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from catnat.checks import did_you_mean, require_at_least
from catnat.datamodules.atari import Backend, game_name, game_names, make_atari_vec_env


def modulo_actions(env: gymnasium.Env[Any, Any], num_actions: int) -> gymnasium.Env[Any, Any]:
    """An environment with more actions than it has of its own: action a plays a mod n.

    Args:
        env: with n discrete actions.
        num_actions: how many actions there are with the copies.
    """
    space = env.action_space
    if not isinstance(space, Discrete):
        raise ValueError(f"num_actions is for Discrete action spaces, not for {space}")
    require_at_least(int(space.n), num_actions=num_actions)
    return TransformAction(env, lambda action: action % space.n, Discrete(num_actions))


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
        known = [*game_names(), *(each for each in gymnasium.registry if "ALE/" not in each)]
        close = did_you_mean(name, known)
        raise ValueError(
            f"{name!r} is neither an Atari game nor registered with Gymnasium{close}"
        ) from None
    return True


def make_env(
    name: str,
    num_envs: int,
    backend: Backend = "native",
    seed: int = 0,
    num_actions: int | None = None,
    **options: Any,
) -> VecEnv:
    """Several environments of a name.

    Args:
        name: an Atari game in any spelling, or a Gymnasium id such as "CartPole-v1".
        num_envs: how many.
        backend: of Atari games, see :func:`make_atari_vec_env`.
        seed: of the first environment; the others count on from it.
        num_actions: if given, actions are taken modulo the environment's own number of them.
        options: of Stable-Baselines3's make_vec_env; not for Atari games.
    """
    if is_atari(name):
        if num_actions is not None:
            raise ValueError(f"num_actions is for environments other than Atari games, not {name}")
        return make_atari_vec_env(name, num_envs, backend, seed)
    require_at_least(1, num_envs=num_envs)
    wrapper = None if num_actions is None else partial(modulo_actions, num_actions=num_actions)
    try:
        return make_vec_env(name, num_envs, seed, wrapper_class=wrapper, **options)
    except (gymnasium.error.Error, ImportError) as error:  # a package that is not installed
        raise ValueError(f"{name}: {error}") from error


def write_gif(player: Any, env: VecEnv, path: Path, deterministic: bool, most: int = 2000) -> bool:
    """Write an animation of one game, 40 ms a step; False if the environment cannot be drawn.

    Args:
        player: chooses the actions by ``predict``, as models of Stable-Baselines3 do.
        env: one environment.
        path: the file.
        deterministic: play the likeliest actions.
        most: steps after which the pictures end, even if the game continues.
    """
    observations, images = env.reset(), []
    for _ in range(most):
        (frame,) = env.get_images()
        if frame is None:
            return False
        images.append(Image.fromarray(frame).convert("P", palette=Image.Palette.ADAPTIVE))
        actions, _ = player.predict(observations, deterministic=deterministic)
        observations, _, _, infos = env.step(actions)
        if "episode" in infos[0]:  # a lost life is not an end
            break
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, loop=0)
    return True
