"""What users see when something goes wrong, and what they are spared."""

from __future__ import annotations

import errno
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def usage_errors(raised_in: tuple[str, ...] = ("",)) -> Iterator[None]:
    """What these modules raise in here is the user's to mend: one line, not a traceback."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(raised_in):
            raise
        raise UsageError(error) from error


@contextmanager
def quiet_about_disks() -> Iterator[None]:
    """A full disk in TensorBoard's thread has no traceback: the main thread raises it again."""
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
    """Whether a disk, a folder or its permissions are to blame, and not a program."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def silence() -> None:
    """Leave out what users can do nothing about."""
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
    ):
        warnings.filterwarnings("ignore", message)
