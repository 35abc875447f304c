"""Fresh processes that need not import torch and Lightning: forks of a server that has done so.

A fork knows nothing of the package, of what other tests did, and has no threads. Where the command
line itself is the subject, or the imports of torch are, use :mod:`subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = ["torch", "torchvision", "lightning.pytorch.cli", "matplotlib.pyplot"]
PRELOADED += ["torch.utils.tensorboard"]

one_server = pytest.mark.xdist_group("fresh")
"""Marks tests that use this module: one worker runs them all, so that there is one server."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Done(NamedTuple):
    """What a process left: as :class:`subprocess.CompletedProcess` has it."""

    returncode: int | None
    stdout: str
    stderr: str


class Fresh:
    """``python WORDS``, begun: ``-c`` and a program, or a file, then arguments."""

    def __init__(self, *words: object) -> None:
        self._folder = TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, name) for name in ("out", "err"))
        self._out.touch()
        self._err.touch()
        state = (os.getcwd(), dict(os.environ), str(self._out), str(self._err))
        self.process: BaseProcess = _context.Process(target=_work, args=(*state, *map(str, words)))
        self.process.start()

    def send_signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def poll(self) -> int | None:
        """The exit code of a process that has ended."""
        return self.process.exitcode

    def wait(self, seconds: float = 600) -> Done:
        """What the process left; a process that takes longer is killed."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        with self._folder:
            return Done(self.process.exitcode, self._out.read_text(), self._err.read_text())


def run_fresh(*words: object) -> Done:
    """What ``python WORDS`` leaves, in the present folder and environment."""
    return Fresh(*words).wait()


def check_fresh(*words: object) -> None:
    """Run ``python WORDS``, which must succeed."""
    done = run_fresh(*words)
    assert done.returncode == 0, done.stderr[-3000:]


def _work(cwd: str, environment: dict[str, str], out: str, err: str, *words: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
