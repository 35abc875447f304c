"""Atari games as vector environments, with the usual preprocessing of PPO."""

from __future__ import annotations

import re
from typing import Literal, get_args

from ale_py import ALEInterface, LoggerMode, roms
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from catnat.checks import did_you_mean, require_at_least, require_choice
from catnat.datamodules.atari_native import FRAME_SKIP, NativeAtariVecEnv

Backend = Literal["native", "sb3"]
_FOR_TWO = {"combat", "joust", "maze_craze", "warlords"}  # these cannot be played alone


def make_atari_vec_env(
    game: str,
    num_envs: int,
    backend: Backend = "native",
    seed: int = 0,
    life_loss: bool = True,
    clip_rewards: bool = True,
    noop_max: int = 30,
    max_frames: int = 108_000,
    num_threads: int = 0,
) -> VecEnv:
    """A vector environment of Atari games: gray frames of 84 x 84, every fourth, four stacked.

    Actions are never sticky, also under a name such as "ALE/Pong-v5", which means sticky actions
    in Gymnasium. With both backends a lost life ends the learner's episode while the game
    continues, rewards are clipped to their sign, and ``info["episode"]`` has the score when a game
    is over.

    Args:
        game: "Breakout", "breakout", "ALE/Breakout-v5", "BreakoutNoFrameskip-v4": all the same.
        num_envs: how many games.
        backend: "native", ale_py's C++ threads, see :class:`NativeAtariVecEnv`; its observations
            are (4, 84, 84). Or "sb3", the wrappers of Stable-Baselines3 in one Python process,
            (84, 84, 4).
        seed: seed of the first game; game i has seed + i.
        life_loss: a lost life ends an episode.
        clip_rewards: replace rewards by their sign.
        noop_max: bounds the no-ops of a reset: 0 to noop_max - 1 of them on "native", 1 to
            noop_max on "sb3".
        max_frames: a game is cut off after this many frames.
        num_threads: threads of the native backend; 0 for as many as there are cores or games.
    """
    require_choice(get_args(Backend), backend=backend)
    require_at_least(0, seed=seed, noop_max=noop_max, num_threads=num_threads)
    require_at_least(1, num_envs=num_envs, max_frames=max_frames)
    rom = rom_of(game)
    if backend == "native":
        return NativeAtariVecEnv(
            rom,
            num_envs,
            seed=seed,
            life_loss=life_loss,
            clip_rewards=clip_rewards,
            noop_max=noop_max,
            max_frames=max_frames,
            num_threads=num_threads,
        )
    ALEInterface.setLoggerMode(LoggerMode.Error)  # ALE would print its version
    # The settings of BreakoutNoFrameskip-v4. Not every game has a name of that kind.
    raw = {
        "frameskip": 1,
        "repeat_action_probability": 0.0,
        "max_num_frames_per_episode": max_frames,
    }
    wrapping = {
        "frame_skip": FRAME_SKIP,
        "noop_max": noop_max,
        "terminal_on_life_loss": life_loss,
        "clip_reward": clip_rewards,
    }
    env = make_atari_env(
        f"ALE/{game_name(rom)}-v5", num_envs, seed, env_kwargs=raw, wrapper_kwargs=wrapping
    )
    return VecFrameStack(env, 4)


def game_names() -> list[str]:
    """All games, as Gymnasium spells them."""
    return [game_name(rom) for rom in roms.get_all_rom_ids() if rom not in _FOR_TWO]


def game_name(rom: str) -> str:
    """Gymnasium's name of a game: "ms_pacman" becomes "MsPacman"."""
    return rom.title().replace("_", "")


def rom_of(game: str) -> str:
    """ale_py's name of a game: "MsPacman" and "ALE/MsPacman-v5" become "ms_pacman"."""
    bare = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-v\d)?$", "", game)
    known = {game_name(rom): rom for rom in roms.get_all_rom_ids() if rom not in _FOR_TWO}
    for name, rom in known.items():
        if name.lower() == bare.replace("_", "").lower():
            return rom
    close = did_you_mean(bare, known)
    raise ValueError(f"{game!r} is not one of the {len(known)} Atari games{close}")
