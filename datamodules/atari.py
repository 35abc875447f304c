"""Atari games as vector environments, with the usual preprocessing of PPO."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from catnat.checks import did_you_mean, require_at_least, require_choice, require_within

Backend = Literal["native", "sb3"]
_FRAME_SKIP = 4
_NOOP_MAX = 30
_MAX_FRAMES = 108_000  # a game is cut off after so many


_NATIVE_DIFFERENCES = (
    "native games differ from Stable-Baselines3's wrappers: frames become gray before their "
    "maximum, a reset plays 0 to 29 no-ops and FIRE for one frame, a lost life forces FIRE and "
    "its frames stay stacked; train with HeadPPO or HeadA2C, which store forced actions"
)


@cache
def say(line: str) -> None:
    """Print a line once."""
    print(line, flush=True)


def make_atari_vec_env(game: str, num_envs: int, backend: Backend = "sb3", seed: int = 0) -> VecEnv:
    """A vector environment of Atari games: gray frames of 84 x 84, every fourth, four stacked.

    Actions are never sticky, not even for a name such as "ALE/Pong-v5", which has sticky actions in
    Gymnasium. With both backends, a lost life ends the learner's episode while the game continues,
    rewards are clipped to their sign, and ``info["episode"]`` contains the score when a game is
    over.

    Args:
        game: name of the game. "Breakout", "breakout", "ALE/Breakout-v5" and
            "BreakoutNoFrameskip-v4" are equivalent.
        num_envs: number of games.
        backend: "sb3", the wrappers of Stable-Baselines3 in one Python process; observations are
            (84, 84, 4). "native" uses ale_py's C++ threads with observations (4, 84, 84). It is
            faster, but the games differ slightly. It prints the differences once, see
            :class:`NativeAtariVecEnv`.
        seed: seed of the first game; game i has seed + i.
    """
    require_choice(get_args(Backend), backend=backend)
    require_at_least(1, num_envs=num_envs)
    name = game_name(game)
    if backend == "native":
        say(_NATIVE_DIFFERENCES)
        return NativeAtariVecEnv(game_names()[name], num_envs, seed)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # ALE would print its version
    # The settings of BreakoutNoFrameskip-v4. Not every game has a name of that kind.
    raw = {
        "frameskip": 1,
        "repeat_action_probability": 0.0,
        "max_num_frames_per_episode": _MAX_FRAMES,
    }
    return VecFrameStack(make_atari_env(f"ALE/{name}-v5", num_envs, seed, env_kwargs=raw), 4)


def game_names() -> dict[str, str]:
    """All games, as Gymnasium spells them and as ale_py does: "MsPacman" and "ms_pacman"."""
    return {
        spec.name: spec.kwargs["game"]
        for spec in gymnasium.registry.values()
        if spec.namespace == "ALE"
    }


def game_name(game: str) -> str:
    """Gymnasium's name of a game: "ms_pacman" and "ALE/MsPacman-v5" become "MsPacman"."""
    bare = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-v\d)?$", "", game)
    names = game_names()
    for name in names:
        if name.lower() == bare.replace("_", "").lower():
            return name
    raise ValueError(
        f"{game!r} is not one of the {len(names)} Atari games{did_you_mean(bare, names)}"
    )


class NativeAtariVecEnv(VecEnv):
    """Several games of Atari, played by C++ threads.

    Frames are like those of the usual wrappers: gray, 84 x 84, the pixelwise maximum of the last
    two of four skipped frames, four of them stacked; no sticky actions. Where the two differ:

    - frames become gray before their maximum is taken; the wrappers do it the other way around,
      and some pixels differ where sprites flicker;
    - a reset plays 0 to 29 no-ops, the wrappers 1 to 30;
    - in games that know FIRE, a reset plays FIRE for one frame in the place of the last no-op; the
      wrappers play FIRE and then the action after it, four frames each, after the no-ops;
    - after a lost life the learner's next step is FIRE; the wrappers play a no-op, FIRE and the
      action after it, and the learner sees none of these steps;
    - frames stacked across a lost life belong to both lives.

    A lost life ends the learner's episode, but not the game. The next action is then FIRE in games
    that know it, because some, such as Breakout, wait for it. The attribute ``forced_actions`` has
    the actions that the next step plays instead of the given actions, -1 where the learner chooses.
    Transitions must be stored with these. HeadPPO and HeadA2C do so; other algorithms do not: use
    ``backend="sb3"`` for them.

    ``info["episode"]`` comes at the end of a game only, with the score (not the clipped rewards)
    and the length in frames.

    Args:
        rom: the game, as ale_py spells it: "ms_pacman".
        num_envs: number of games.
        seed: seed of the first game, from 0; game i has seed + i, all below 2^31.

    Shapes:
        observations (n, 4, 84, 84) uint8, a fresh array at each step.
    """

    def __init__(self, rom: str, num_envs: int, seed: int = 0) -> None:
        self._engine = AtariVectorEnv(
            rom,
            num_envs,
            max_num_frames_per_episode=_MAX_FRAMES,
            noop_max=_NOOP_MAX,
            frameskip=_FRAME_SKIP,
            repeat_action_probability=0.0,
            autoreset_mode=AutoresetMode.SAME_STEP,
            episodic_life=False,  # True would reset the whole game at a lost life
            reward_clipping=False,  # step_wait clips, after it has added up the score
            use_fire_reset=True,
        )
        self.render_mode = None
        super().__init__(
            num_envs, self._engine.single_observation_space, self._engine.single_action_space
        )
        meanings = list(self._engine.ale.get_action_set())
        self._fire = meanings.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in meanings else -1
        self._pending = False
        self.forced_actions = np.full(num_envs, -1)
        self.seed(seed)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the next reset: game i gets seed + i; None draws a seed."""
        most = 2**31 - self.num_envs  # the emulator's seeds have 31 bits
        first = np.random.randint(most) if seed is None else int(seed)
        require_within(0, most, "[)", seed=first)
        return super().seed(first)

    def reset(self) -> NDArray[np.uint8]:
        """Begin new games."""
        self._drain()
        observations, info = self._engine.reset(seed=self._seeds[0])  # the others count on
        self._reset_seeds()
        self._scores = np.zeros(self.num_envs)
        self.lives = info["lives"]
        self._frames = info["episode_frame_number"]
        self.forced_actions = np.full(self.num_envs, -1)
        return np.asarray(observations)

    def step_async(self, actions: Any) -> None:
        """Let the threads begin a step; this does not wait for them.

        Raises:
            ValueError: an action is not one of the game's; the threads would hang.
        """
        chosen = np.asarray(actions)
        if chosen.dtype.kind not in "iu" or chosen not in self._engine.action_space:
            raise ValueError(
                f"{self.num_envs} games need as many of {self.action_space}, got {actions!r}"
            )
        forced = self.forced_actions
        self._engine.send(np.where(forced >= 0, forced, chosen.astype(np.int64)))
        self._pending = True

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step. Finished games have restarted."""
        self._pending = False  # before recv: an interrupt arrives when the step has been taken
        observations, rewards, terminated, truncated, info = self._engine.recv()
        self._scores += rewards
        over = terminated | truncated
        lives = info["lives"]
        # A game can be at 0 lives some steps before it is over (Qbert): that is not a lost life.
        lost = (lives < self.lives) & (lives > 0) & ~over
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(over | lost):
            infos[i]["terminal_observation"] = (info["final_obs"] if over[i] else observations)[i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            if over[i]:
                length = int(self._frames[i]) + _FRAME_SKIP  # the last step counts as a whole
                infos[i]["episode"] = {"r": float(self._scores[i]), "l": length}  # as Monitor's
        self._scores[over] = 0
        self.lives = lives
        self._frames = info["episode_frame_number"]
        self.forced_actions = np.where(lost, self._fire, -1)
        return observations, np.sign(rewards).astype(np.float32), over | lost, infos

    def close(self) -> None:
        """Stop the threads."""
        self._drain()
        self._engine.__dict__.pop("ale", None)

    def _drain(self) -> None:
        """Wait for a step that was begun: a second step before that would hang."""
        if self._pending:
            self._pending = False
            self._engine.recv()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute that all games share, once for each game."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute that all games share."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *_: Any, **__: Any) -> list[Any]:
        """Games in C++ have no methods of their own."""
        raise AttributeError(f"native Atari games have no method {method_name!r}")

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """True for Monitor, so that evaluation counts games and not lives; False for others."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]
