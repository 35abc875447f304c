"""The program behind ``python train.py`` and the command ``catnat``."""

from __future__ import annotations

import sys
from argparse import Namespace

from catnat.training.errors import UsageError, is_disk_error, quiet_about_disks, silence
from catnat.training.names import read_names


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0] in ("-h", "--help"):
            return show_help("vae", argv[1:])
        names, options = read_names(argv)
        return show_help(names.model, options) if names.help else run(names, options)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not is_disk_error(error):
            raise
        print(f"train.py: {error} (checkpoints written before are intact)", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as stop:
        if getattr(stop, "code", None) == 0:  # --trainer.logger.help CSVLogger
            return 0
        print("train.py: interrupted", file=sys.stderr)
        return 130


def show_help(model: str, topics: list[str]) -> int:
    """Print the page of a model, or the options of one group."""
    if model == "ppo":
        from catnat.training import ppo

        return ppo.show_help(topics)
    from catnat.training import lightning

    return lightning.show_help(topics, model)


def run(names: Namespace, options: list[str]) -> int:
    """Run a command line whose names are known, with Lightning or with Stable-Baselines3."""
    silence()
    from catnat.training.folders import closing_runs

    with closing_runs(), quiet_about_disks():
        if names.model == "ppo":
            from catnat.training import ppo

            return ppo.main(names, options)
        from catnat.training import lightning

        return lightning.train(names, options)
