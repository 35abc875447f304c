"""Runs of train.py in the present folder, and what they leave."""

from pathlib import Path

import torch

import train

ROOT = Path(__file__).resolve().parent.parent


def run(*argv):
    return train.main(["--model=vae", "--head=natural", *map(str, argv)])


def one_line(capfd):
    """The line that a refused command prints; there is no other, and no traceback."""
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    (line,) = err.splitlines()
    return line


def last(folder="runs/vae/natural/version_0"):
    return torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)


def same_weights(one, other):
    return all(torch.equal(one["state_dict"][k], other["state_dict"][k]) for k in one["state_dict"])
