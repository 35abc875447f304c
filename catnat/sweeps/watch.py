"""Run a command that ends when the process that started it ends, however that ends.

    python watch.py LOCK COMMAND ...

Standard input is a pipe whose other end only the sweep holds: it is closed when the sweep is gone.
The lock file is locked while the command runs, so that nothing else runs in its folder. The exit
code is that of the command, or 128 + signal. This file imports nothing of catnat: it starts fast.
"""

import os
import signal
import subprocess
import sys
from threading import Thread
from types import FrameType

from filelock import FileLock

SECONDS_TO_SAVE = 60  # after SIGTERM, before SIGKILL


def main(lock_path: str, *command: str) -> int:
    """Run the command, and return its exit code."""
    with FileLock(lock_path):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

        def terminate(signum: int, frame: FrameType | None) -> None:
            process.terminate()

        signal.signal(signal.SIGTERM, terminate)
        Thread(target=_end_with_sweep, args=[process], daemon=True).start()
        code = process.wait()
        return code if code >= 0 else 128 - code


def _end_with_sweep(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):  # empty when the sweep has closed the pipe
        pass
    process.terminate()
    try:
        process.wait(SECONDS_TO_SAVE)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
