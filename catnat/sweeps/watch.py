"""Run a command that ends when the process that started it ends, however that ends.

    python watch.py LOCK COMMAND ...

Standard input is a pipe that the sweep alone holds open: it is closed when the sweep is gone. The
lock file is locked while the command runs, so that nothing else runs in its folder. The exit code
is that of the command, or 128 + signal. This file imports nothing of catnat: it starts fast.
"""

import os
import signal
import subprocess
import sys
from threading import Thread

from filelock import FileLock

SECONDS_TO_SAVE = 60  # after SIGTERM, before SIGKILL


def end_with_sweep(process: subprocess.Popen[bytes]) -> None:
    """Wait until the sweep closes the pipe, then end the process."""
    while os.read(0, 1):  # empty when the pipe is closed
        pass
    process.terminate()
    try:
        process.wait(SECONDS_TO_SAVE)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    lock_path, *command = sys.argv[1:]
    with FileLock(lock_path):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        Thread(target=end_with_sweep, args=[process], daemon=True).start()
        code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)
