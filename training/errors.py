"""Errors of one line, and warnings that users can do nothing about."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_ERRORS = (
    errno.ENOSPC,  # full
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,  # something else lies where a folder or a file should be
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EPIPE,  # nobody reads the output any more
)


class UsageError(Exception):
    """Something on the command line is wrong; the message is one line."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


class RunFailed(Exception):  # noqa: N818 - reads as what it says
    """A run could not finish; the message is one line."""


def command_words() -> list[str]:
    """How the user called this program: python train.py, or the console command catnat."""
    return ["catnat"] if Path(sys.argv[0]).stem == "catnat" else ["python", "train.py"]


@contextmanager
def usage_errors(raised_in: tuple[str, ...] = ("",), own: Collection[str] = ()) -> Iterator[None]:
    """Turn errors into a :class:`UsageError` of one line: the user's values caused them.

    Args:
        raised_in: beginnings of the names of modules. Errors of other modules keep their traceback.
        own: top-level modules of the user's, whose errors keep their traceback, too.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(raised_in) or module.split(".")[0] in own:
            raise
        raise UsageError(error) from error


@contextmanager
def quiet_about_disks() -> Iterator[None]:
    """Print no traceback for a full disk in TensorBoard's thread: the main thread raises it too."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not is_disk_error(args.exc_value):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def is_disk_error(error: BaseException | None) -> bool:
    """Whether an error is about a disk, a folder or its permissions, and not a bug."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def show_page(page: str) -> int:
    """Print a page, and return the exit code 0: a reader may go before the end, as head does."""
    try:
        print(page, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
    return 0


def silence() -> None:
    """Turn off warnings that users can do nothing about."""
    import lightning.pytorch  # noqa: F401 - sets levels of its own

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers",
        ".*is smaller than the logging interval",
        ".*exists and is not empty",
        ".*LeafSpec",
        ".*dirpath has changed",
        ".*all_gather is deprecated",
        ".*You have specified a mini-batch size",
        ".*is not in the possible render_modes",
        ".*The render mode is None",
        ".*torch.jit.script. is deprecated",  # in torch-geometric
        ".*GPU available but not used",  # after --accelerator cpu
        "actions are not masked: HeadA2C",  # the command line says it in a line of its own
    ):
        warnings.filterwarnings("ignore", message)
