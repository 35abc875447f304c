"""Runs of train.py as forks of a process that has already imported torch.

A fork does the same as a new process with the same command line, without the seconds that the
imports take. Its code is that of the moment when the sweep began.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from experiments.train_interface import ROOT

_LONGEST = 1 << 17  # bytes of a command

# Looked up here: a process that was just forked must not.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_SET_SIGNAL_OF_PARENTS_DEATH = 1


def stop_with_parent() -> None:
    """In a process about to begin: be told to save and stop, should the parent be killed."""
    if _PRCTL is not None:
        _PRCTL(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)


class Gone(Exception):  # noqa: N818 - reads as what it says
    """The process that forks cannot start a run."""


@cache
def can_wait() -> bool:
    """Whether the system can tell by a descriptor that a process has ended: Linux 5.3."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Server:
    """The process that forks; it ends with us.

    Args:
        environment: of the runs.
        imported: modules to import first.
    """

    def __init__(self, environment: Mapping[str, str], imported: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "experiments.engines.forks",
                    str(theirs.fileno()),
                    *imported,
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Modules that ask whether there is CUDA do not initialise it then.
                env={**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self,
        command: Sequence[str],
        log: TextIO,
        lock: int,
        cwd: Path = ROOT,
        more: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a command that writes to log and holds the lock; may raise :class:`Gone`."""
        start = {"command": list(command), "cwd": str(cwd), "environment": dict(more or {})}
        mine, theirs = socket.socketpair()
        with mine, theirs:
            fds = [log.fileno(), lock, theirs.fileno()]
            try:
                socket.send_fds(self._control, [json.dumps(start).encode()], fds)
                theirs.close()
                return Process(mine)
            except OSError as error:
                raise Gone(str(error)) from error

    def close(self) -> None:
        """Let it end."""
        self._control.close()
        self._process.wait()


class Process:
    """A run, with the methods of ``subprocess.Popen`` that are needed."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile()
        pid = self._lines.readline()
        if not pid:
            raise Gone("no answer")
        self._pid = int(pid)

    def terminate(self) -> None:
        """Ask it to stop."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """Its exit status; that of a stopped run if the process that forks was killed."""
        with self._lines:
            return int(self._lines.readline() or -signal.SIGTERM)


# -- in the server ---------------------------------------------------------------------------------


def main() -> None:
    """Import, fork for every command that comes, and run the command in the fork."""
    status: list[int] = []
    atexit.register(_leave, status)  # first, to be the last that is called
    preload(sys.argv[2:])
    command = serve(socket.socket(fileno=int(sys.argv[1])), cuda_has_begun())
    sys.argv, sys.path[0] = command[1:], str(Path(command[1]).parent)
    try:
        runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            status.append(end.code)
        raise


def _leave(status: list[int]) -> None:
    """Spare a run that ends as it should the seconds in which Python takes modules apart."""
    if status:
        os._exit(status[0])


def preload(names: Sequence[str]) -> None:
    """Import modules; what is wrong with one, a run that needs it will say."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def cuda_has_begun() -> bool:
    """Whether CUDA is initialised here, by torch or anybody: it does not survive a fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def serve(control: socket.socket, afresh: bool) -> list[str]:
    """Fork for every command that comes. Returns in the forks alone: the command.

    Args:
        control: where they come from, each with its log, its lock and a connection; that is told
            the process and, in the end, its exit status.
        afresh: start the forks as new programs, because of what imports have done here.
    """
    server = os.getpid()
    running: dict[int, tuple[int, int]] = {}  # by a descriptor that is ready when it has ended
    stops = (signal.SIGINT, signal.SIGTERM)  # to all of a group, for instance: the runs' to heed
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    while True:
        ready, _, _ = select.select([control.fileno(), *running], [], [])
        for ended in [fd for fd in running if fd in ready]:
            pid, connection = running.pop(ended)
            _tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(connection)
            os.close(ended)
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, _LONGEST, 3)
        if not message:  # the sweep has ended; whatever still runs is told so
            os._exit(0)
        log, lock, connection = fds
        try:
            pid = os.fork()
        except OSError:  # no room: who asked sees the connection closed
            for fd in fds:
                os.close(fd)
            continue
        if pid == 0:
            break
        os.close(log)
        os.close(lock)
        _tell(connection, pid)
        running[os.pidfd_open(pid)] = pid, connection
    # Of all that is open here, only the lock is the run's.
    os.dup2(log, 1)
    os.dup2(log, 2)
    control.close()
    for fd in (log, connection, *running, *(each for _, each in running.values())):
        os.close(fd)
    stop_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if os.getppid() != server:  # it was too late to be told
        os.kill(os.getpid(), signal.SIGTERM)
    start: dict[str, Any] = json.loads(message)
    command: list[str] = start["command"]
    os.chdir(start["cwd"])
    os.environ.update(start["environment"])
    if afresh:
        os.execv(command[0], command)
    return command


def _tell(connection: int, number: int) -> None:
    os.write(connection, b"%d\n" % number)


if __name__ == "__main__":
    main()
