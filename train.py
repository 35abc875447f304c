"""Train a model with a categorical head, then test it: ``python train.py --help``."""

import sys

from catnat.training.main import main, program

__all__ = ["main"]  # for those who call it in a process of their own

if __name__ == "__main__":
    sys.exit(program())
