"""Make frames.npz: frames of 26 Atari games, 64 x 64 gray, for the plan frames.

    python paper/frames/make_frames.py data/frames.npz --sheet sheet.png  # some minutes

The games are those of the benchmark Atari 100k. They are played at random, not by a trained agent,
so that everyone can make the same data; but an action is held for up to a second, so that players
get around. One frame in 24 of the emulator is kept, and scaled to 64 x 64. Episodes, not frames,
are split into train, val and test (8 : 1 : 1). The seeds of the episodes are their numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ale_py
import numpy as np
import torch
import torch.nn.functional as F
from ale_py import ALEInterface, roms
from PIL import Image

GAMES = (
    *("alien", "amidar", "assault", "asterix", "bank_heist", "battle_zone", "boxing", "breakout"),
    *("chopper_command", "crazy_climber", "demon_attack", "freeway", "frostbite", "gopher", "hero"),
    *("jamesbond", "kangaroo", "krull", "kung_fu_master", "ms_pacman", "pong", "private_eye"),
    *("qbert", "road_runner", "seaquest", "up_n_down"),
)
SIZE = 64
KEPT_EVERY = 24  # frames of the emulator
LONGEST_ACTION = 60  # frames for which an action is held: a second
LONGEST = 3_000  # frames of an episode
PARTS = ("test", "val", *["train"] * 8)  # of episodes 0 to 9, 10 to 19, ...
SHOWN = 32  # frames of a part on the sheet


def play(game: str, seed: int) -> np.ndarray:
    """Frames of an episode, (n, H, W), with H and W of the game."""
    emulator = ALEInterface()
    emulator.setInt("random_seed", seed)
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.loadROM(roms.get_rom_path(game))
    actions = emulator.getMinimalActionSet()
    rng = np.random.default_rng([GAMES.index(game), seed])
    frames = []
    action = actions[0]
    held_until = 0
    for frame in range(LONGEST):
        if emulator.game_over():
            break
        if frame == held_until:
            action = actions[rng.integers(len(actions))]
            held_until += int(rng.integers(1, LONGEST_ACTION + 1))
        emulator.act(action)
        if frame % KEPT_EVERY == 0:
            frames.append(emulator.getScreenGrayscale())
    return np.stack(frames)


def scale(frames: np.ndarray) -> np.ndarray:
    """Frames (n, H, W) to (n, 64, 64)."""
    images = torch.from_numpy(frames)[:, None].float()
    scaled = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", antialias=True)
    return scaled[:, 0].round().clamp(0, 255).byte().numpy()


def main() -> None:
    """Write the file, and a sheet of frames to look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--episodes", type=int, default=10, help="of each game, at least 3")
    parser.add_argument("--sheet", type=Path, help="a picture of some frames of each part")
    args = parser.parse_args()
    if args.episodes < 3:
        parser.error(f"--episodes {args.episodes}: expected at least 3, for all parts")
    ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # it would print its version
    images: dict[str, list[np.ndarray]] = {part: [] for part in sorted(set(PARTS))}
    for game in GAMES:
        for number in range(args.episodes):
            images[PARTS[number % len(PARTS)]].append(scale(play(game, number)))
    parts = {part: np.concatenate(episodes) for part, episodes in images.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, **parts)
    for part, frames in parts.items():
        print(f"{part}: {len(images[part])} episodes, {len(frames)} frames")
    if args.sheet:
        shown = [frames[:: len(frames) // SHOWN][:SHOWN] for frames in parts.values()]
        rows = [np.concatenate(list(row), 1) for part in shown for row in np.split(part, 2)]
        Image.fromarray(np.concatenate(rows)).save(args.sheet)


if __name__ == "__main__":
    main()
