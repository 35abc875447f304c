"""User errors: one line, an exit code, no traceback."""

import traceback
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 500  # characters


class UsageError(ValueError):
    """An error before the first batch, in one line.

    Args:
        error: the error.

    Attributes:
        code: the exit code: 1 for an error of the system, such as a full disk, 2 otherwise.
    """

    def __init__(self, error: Exception) -> None:
        cause = _innermost(error)
        place = ""
        if not isinstance(cause, ArgumentError | ValueError | OSError | ImportError):
            frame = traceback.extract_tb(cause.__traceback__)[-1]
            place = f" ({type(cause).__name__} in {Path(frame.filename).name}, line {frame.lineno})"
        super().__init__(one_line(error) + place)
        self.code = 1 if isinstance(cause, OSError) else 2


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    message = str(_innermost(error))
    # Where a value may have several types, jsonargparse lists why it is none of them.
    reasons = message.partition("Errors:")[2].partition("Given value")[0]
    if reasons:
        value = message.partition("Given value: ")[2]
        message = f"{message.splitlines()[0]} {reasons.strip()}. Got value: {value}"
    text = " ".join(message.split())
    return text if len(text) < _LONGEST else f"{text[:_LONGEST]} ..."


def _innermost(error: BaseException) -> BaseException:
    """The error that says what is wrong: jsonargparse nests those of classes within classes."""
    nested = [each for each in _contexts(error) if isinstance(each, ArgumentError)]
    if nested:
        return nested[-1]
    while error.__cause__ and _is_raised_in("jsonargparse", error):
        error = error.__cause__
    return error


def _is_raised_in(package: str, error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and package in Path(frames[-1].filename).parts


def _contexts(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
