"""Make frames.npz: Atari games that trained agents play, 64 x 64 gray, for the plan frames.

    python train.py --model ppo --head softmax --env Breakout --num_envs 64 --total_steps 1000000
    python paper/frames/make_frames.py data/frames.npz runs/ppo/softmax/version_0 --sheet sheet.png

Agents sample their actions. One frame in six is kept (24 frames of the emulator), the latest one of
those that the agent sees, scaled from 84 x 84. Games, not frames, are split into train, val and
test (8 : 1 : 1 of the games in the order of their beginnings). The seed of games and actions is
fixed; the frames depend on the agents, and so on the machine that trained them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from PIL import Image

from catnat.datamodules.atari import make_atari_vec_env
from catnat.sb3 import HeadPPO

SIZE = 64
NUM_ENVS = 16
KEPT_EVERY = 6  # steps of the agent
SEED = 1
SHOWN = 32  # frames of a part on the sheet
PARTS = ("test", "val", *["train"] * 8)  # of games 0 to 9, 10 to 19, ...


def scale(frames: np.ndarray) -> np.ndarray:
    """Frames (n, 84, 84) to (n, 64, 64)."""
    images = torch.from_numpy(frames)[:, None].float()
    scaled = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", antialias=True)
    return scaled[:, 0].round().clamp(0, 255).byte().numpy()


def play(run: Path, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames of the games of one agent, (n, 64, 64), and the number of the game of each."""
    game = yaml.safe_load((run / "config.yaml").read_text())["data"]["env"]
    agent = HeadPPO.load(run / "checkpoints" / "last.zip", device="cpu")
    agent.set_random_seed(SEED)
    env = make_atari_vec_env(game, NUM_ENVS, seed=SEED)
    observations = env.reset()
    playing = np.arange(NUM_ENVS)  # the number of the game of each environment
    num_games = NUM_ENVS
    scores = []
    frames: list[np.ndarray] = []
    games: list[np.ndarray] = []
    while len(frames) * NUM_ENVS < num_frames:
        for _ in range(KEPT_EVERY):
            actions, _ = agent.predict(observations, deterministic=False)
            observations, _, _, infos = env.step(actions)
            for i, info in enumerate(infos):
                if "episode" in info:  # the observation is the first one of the next game
                    scores.append(info["episode"]["r"])
                    playing[i] = num_games
                    num_games += 1
        frames.append(scale(observations[:, -1]))
        games.append(playing.copy())
    env.close()
    print(f"{game}: {num_games} games, {len(scores)} of them to the end", end="")
    print(f" with a mean score of {np.mean(scores):.1f}" if scores else "")
    return np.concatenate(frames)[:num_frames], np.concatenate(games)[:num_frames]


def main() -> None:
    """Write the file, and a sheet of frames to look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, an agent each")
    parser.add_argument("--frames", type=int, default=12000, help="of all agents together")
    parser.add_argument("--sheet", type=Path, help="a picture of some frames of each part")
    args = parser.parse_args()
    images: dict[str, list[np.ndarray]] = {part: [] for part in sorted(set(PARTS))}
    for run in args.runs:
        frames, games = play(run, args.frames // len(args.runs))
        part_of_frame = np.array(PARTS)[games % len(PARTS)]
        for part in images:
            images[part].append(frames[part_of_frame == part])
    parts = {part: np.concatenate(lists) for part, lists in images.items()}
    if min(map(len, parts.values())) < SHOWN:
        parser.error(f"{args.frames} frames are too few: a part has less than {SHOWN}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, **parts)
    for part, frames in parts.items():
        print(f"{part}: {len(frames)} frames")
    if args.sheet:
        shown = [frames[:: len(frames) // SHOWN][:SHOWN] for frames in parts.values()]
        rows = [np.concatenate(list(row), 1) for part in shown for row in np.split(part, 2)]
        Image.fromarray(np.concatenate(rows)).save(args.sheet)


if __name__ == "__main__":
    main()
