"""Train a model with a categorical head, then test it: ``python train.py --help``."""

import sys

from catnat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
