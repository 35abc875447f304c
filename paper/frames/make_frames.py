"""Make frames.npz: frames of Breakout, 64 x 64 gray, for the plan frames.

    python paper/frames/make_frames.py data/frames.npz --sheet sheet.png  # three minutes

The games are played by a rule, not by a trained agent, so that everyone can make the same data: the
paddle follows the ball, whose place is read from the console's memory. It aims at another part of
the paddle after each hit, and sometimes moves at random, so that games differ and are lost. One
frame in 24 of the emulator is kept and scaled from 210 x 160. Games, not frames, are split into
train, val and test (8 : 1 : 1). The seeds of the games are their numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ale_py
import numpy as np
import torch
import torch.nn.functional as F
from ale_py import Action, ALEInterface, roms
from PIL import Image

SIZE = 64
KEPT_EVERY = 24  # frames of the emulator
ACTION_FRAMES = 2
LONGEST = 18_000  # frames of a game: five minutes
PARTS = ("test", "val", *["train"] * 8)  # of games 0 to 9, 10 to 19, ...
SHOWN = 32  # frames of a part on the sheet
BALL_X, BALL_Y, PADDLE_X = 99, 101, 72  # places in the memory; BALL_Y is 0 if there is no ball
PADDLE_CENTER = 8  # from PADDLE_X
AIM = 4  # largest distance from the paddle's center
NEAR = 3  # the paddle rests if the ball is as near as that
RANDOM = 0.01  # share of actions that begin some random ones, up to LAPSE of them
LAPSE = 20
MOVES = (Action.NOOP, Action.LEFT, Action.RIGHT)


def play(seed: int) -> tuple[np.ndarray, int]:
    """Frames of a game, (n, 210, 160), and its score."""
    emulator = ALEInterface()
    emulator.setInt("random_seed", seed)
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.loadROM(roms.get_rom_path("breakout"))
    rng = np.random.default_rng(seed)
    frames = []
    score = 0
    aim = 0
    num_random = 0  # random actions to come
    action = Action.NOOP
    for frame in range(0, LONGEST, ACTION_FRAMES):
        if emulator.game_over():
            break
        memory = emulator.getRAM().astype(int)
        distance = memory[BALL_X] + aim - memory[PADDLE_X] - PADDLE_CENTER
        if num_random > 0:
            num_random -= 1
        elif rng.random() < RANDOM:
            num_random = int(rng.integers(LAPSE))
            action = MOVES[rng.integers(len(MOVES))]
        elif memory[BALL_Y] == 0:
            action = Action.FIRE
        else:
            direction = 0 if abs(distance) <= NEAR else np.sign(distance)
            action = (Action.NOOP, Action.RIGHT, Action.LEFT)[direction]
        reward = sum(emulator.act(action) for _ in range(ACTION_FRAMES))
        score += reward
        if reward > 0 or memory[BALL_Y] == 0:
            aim = int(rng.integers(-AIM, AIM + 1))
        if frame % KEPT_EVERY == 0:
            frames.append(emulator.getScreenGrayscale())
    return np.stack(frames), score


def scale(frames: np.ndarray) -> np.ndarray:
    """Frames (n, 210, 160) to (n, 64, 64)."""
    images = torch.from_numpy(frames)[:, None].float()
    scaled = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", antialias=True)
    return scaled[:, 0].round().clamp(0, 255).byte().numpy()


def main() -> None:
    """Write the file, and a sheet of frames to look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--games", type=int, default=140, help="at least 10")
    parser.add_argument("--sheet", type=Path, help="a picture of some frames of each part")
    args = parser.parse_args()
    if args.games < len(PARTS):
        parser.error(f"--games {args.games}: expected at least {len(PARTS)}, for all parts")
    ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # it would print its version
    images: dict[str, list[np.ndarray]] = {part: [] for part in sorted(set(PARTS))}
    scores = []
    for number in range(args.games):
        frames, score = play(number)
        images[PARTS[number % len(PARTS)]].append(scale(frames))
        scores.append(score)
    parts = {part: np.concatenate(games) for part, games in images.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, **parts)
    for part, frames in parts.items():
        print(f"{part}: {len(images[part])} games, {len(frames)} frames")
    print(f"scores from {min(scores)} to {max(scores)}, mean {np.mean(scores):.1f}")
    if args.sheet:
        shown = [frames[:: len(frames) // SHOWN][:SHOWN] for frames in parts.values()]
        rows = [np.concatenate(list(row), 1) for part in shown for row in np.split(part, 2)]
        Image.fromarray(np.concatenate(rows)).save(args.sheet)


if __name__ == "__main__":
    main()
