"""Mistakes of users end with one line and an exit code, without a traceback."""

from __future__ import annotations

import re
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Iterable, Mapping
from typing import Any

from catnat.checks import did_you_mean

# Lines of jsonargparse's messages that say nothing to a user.
_UNHELPFUL = re.compile(
    r"^(Does not validate|Subtypes:|Errors:|Given value|Expected an? <class '(NoneType|\w+\..*)'>)"
)
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |[Oo]ption )'?([\w.-]+)")
_ON_PURPOSE = ("lightning.", "stable_baselines3.", "torch.nn.modules.module", "catnat.checks",
               "catnat.sb3")  # fmt: skip
_LIBRARY = sysconfig.get_paths()["stdlib"]


def one_line(message: object, known: Iterable[str] = (), full: Mapping[str, str] = {}) -> str:
    """A message in one line, without what jsonargparse says about types that do not matter.

    Args:
        message: of an exception.
        known: names of options; the message gets the one that is closest to an unknown one.
        full: full names of options by their short ones, which files of options do not take.
    """
    lines = [line.strip().removeprefix("- ") for line in str(message).splitlines()]
    kept = dict.fromkeys(line for line in lines if line and not _UNHELPFUL.match(line))
    text = (" ".join(kept) or " ".join(lines)).partition("tensor([")[0]
    text = re.sub(r"found invalid values: *$", "found values that are not finite", text)
    text = re.sub(r'[Pp]arser key "([^"]+)":', r"--\1:", text)
    text = re.sub(r"typing\.Literal\[([^]]*)\]", r"one of \1", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    if unknown := _UNKNOWN.search(text):
        name = unknown[1].lstrip("-")
        close = did_you_mean(name, known).replace("mean ", "mean --")
        text += f"; in a file its name is {full[name]}" if name in full else close
    return text if len(text) < 500 else f"{text[:500]} ..."


def is_mistake(error: BaseException) -> bool:
    """Whether an error is about what the user typed, and not a bug of ours or of their own code."""
    frames: list[Any] = []
    each: BaseException | None = error
    while each is not None:  # jsonargparse raises an error of its own for one of the user's class
        frames = [*(frame for frame, _ in traceback.walk_tb(each.__traceback__)), *frames]
        each = each.__cause__ or each.__context__
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    files = [frame.f_code.co_filename for frame in frames]
    if any(
        not name.startswith("catnat") and not file.startswith((_LIBRARY, "<"))
        and "-packages" not in file
        for name, file in zip(names, files, strict=True)
    ):  # fmt: skip
        return False  # raised in the user's code, or below it
    if isinstance(error, (ArgumentError, ValueError, OSError)):
        return True
    # Who raises errors of other kinds on purpose.
    return names[-1].startswith(_ON_PURPOSE)


def own_error(error: BaseException) -> BaseException:
    """The error of a user's class that jsonargparse wraps in one of its own; else the error."""
    while (inner := error.__cause__ or error.__context__) is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not frames or not frames[-1].f_globals["__name__"].startswith("jsonargparse"):
            break
        error = inner
    return error
