"""Runs of train.py in the present folder, and what they leave."""

import json
from pathlib import Path

import torch
import yaml

import train

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("runs/vae/natural/version_0")


def run(*argv):
    return train.main(["--model=vae", "--head=natural", *map(str, argv)])


def one_line(capfd):
    """The line that a refused command prints; there is no other, and no traceback."""
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    (line,) = err.splitlines()
    return line


def assert_refused(status, reason, capfd):
    """A command was wrong usage: one line says why, and no run was begun."""
    assert status == 2
    assert reason in one_line(capfd)
    assert not Path("runs").exists()


def printed(capsys, *argv):
    """What --print_config prints."""
    assert train.main([*argv, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def config(folder=FOLDER):
    return yaml.safe_load(Path(folder, "config.yaml").read_text())


def metrics_of(folder=FOLDER):
    return json.loads(Path(folder, "metrics.json").read_text())


def last(folder=FOLDER):
    return torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)


def same_weights(one, other):
    return all(torch.equal(one["state_dict"][k], other["state_dict"][k]) for k in one["state_dict"])
