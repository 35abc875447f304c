"""``python -m catnat`` is the command ``catnat``."""

import sys

from catnat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
