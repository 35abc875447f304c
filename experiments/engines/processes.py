"""The processes of runs on this machine, new ones or forks, so that they can be asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from experiments import train_interface
from experiments.engines import forks
from experiments.train_interface import ROOT


class Children:
    """The commands that run now.

    Args:
        forked: let those of train.py share their imports, where that is possible (see forks.py).
    """

    def __init__(self, forked: bool = False) -> None:
        self._processes: set[subprocess.Popen[bytes] | forks.Process] = set()
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._forked = forked
        self._servers: dict[tuple[str, ...], forks.Server] = {}
        self.stopping = False

    def call(
        self,
        command: Sequence[str],
        log: TextIO,
        lock: int,
        cwd: Path = ROOT,
        more: Mapping[str, str] | None = None,
    ) -> int:
        """Run a command, with more in its environment; its exit status.

        The command holds the lock until it is gone, whatever happens to us.
        """
        with self._starting:  # not the other lock: the first start waits for all the imports
            if self.stopping:
                return 128 + signal.SIGTERM
            process = self._start(command, log, lock, cwd, dict(more or {}))
        with self._lock:
            self._processes.add(process)
            if self.stopping:
                process.terminate()
        status = process.wait()
        with self._lock:
            self._processes.discard(process)
        return status

    def _start(
        self, command: Sequence[str], log: TextIO, lock: int, cwd: Path, more: dict[str, str]
    ) -> subprocess.Popen[bytes] | forks.Process:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if self._forked and train_interface.is_train(command) and forks.can_wait():
            modules = train_interface.imports(command)
            if modules not in self._servers:
                self._servers[modules] = forks.Server(environment, modules)
            try:
                return self._servers[modules].start(command, log, lock, cwd, more)
            except forks.Gone as error:
                print(f"no more forks ({error}): runs import torch themselves", file=sys.stderr)
                self._forked = False
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | more,
            cwd=cwd,
            pass_fds=[lock],
            preexec_fn=forks.stop_with_parent,
        )

    def stop(self) -> None:
        """Ask all to stop; they save what they have first."""
        with self._lock:
            self.stopping = True
            for process in self._processes:
                process.terminate()

    def close(self) -> None:
        """Let the processes that fork end, when all runs are done."""
        for server in self._servers.values():
            server.close()
