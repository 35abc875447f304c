"""Mistakes of users end with one line and an exit code, without a traceback."""

import re
import traceback
from argparse import ArgumentError
from collections.abc import Mapping
from pathlib import Path

from catnat.checks import did_you_mean

# Lines of jsonargparse's messages that say nothing to a user.
_UNHELPFUL = re.compile(
    r"^(Does not validate|Subtypes:|Errors:|Given value type|Given value: N\w+\(|"
    r"Expected an? <class '(NoneType|\w+\..*)'>)"
)
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |[Oo]ption )'?([\w.-]+)")
_SHORTENED = (
    (r"found invalid values: *$", "found values that are not finite"),
    (r"^(\S+) is not in bounds, numpy accepts", r"--seed \1 is not in bounds: choose one"),
    (r"Not of type \w+: (\S+ )?does not conform to restriction v", r"\1must be "),
    (r"Not of type (\w+): invalid literal for int.*: '[^']*'", r"Expected a \1"),
    (r'[Pp]arser key "([^"]+)":', r"--\1:"),
    (r"--\w+: Problem with given class_path '[^']*': (?=--)", ""),
    (r"an? typing\.Literal\[([^]]*)\]", r"one of \1"),
    (r"\.? (?:Got|Given) value: ", ", got "),
    (r", got {'class_path'.*", ""),
    (r"<class '(?:\w+\.)*(\w+)'>", r"\1"),
    (r"\ba int\b", "an int"),
    (r"(?<=[a-z']) Expected (?=an? |one of )", " or "),
)


class UsageError(ValueError):
    """An error while options were read or objects were built; the message is one line.

    Args:
        error: the error.
        full_names: full names of options, by all their names. An unknown option gets the closest
            name, or the full one, which files of options take.
    """

    def __init__(self, error: Exception, full_names: Mapping[str, str] = {}) -> None:
        text = one_line(error)
        cause: BaseException = error
        while cause.__cause__ and not isinstance(error, ArgumentError):
            cause = cause.__cause__  # jsonargparse raises an error of its own for one of a class
        if not isinstance(cause, (ArgumentError, ValueError, OSError, ImportError)):
            frame = traceback.extract_tb(cause.__traceback__)[-1]
            file = Path(frame.filename).name
            text = f"{text} ({type(cause).__name__} in {file}, line {frame.lineno})"
        if unknown := _UNKNOWN.search(text):
            name = unknown[1].lstrip("-")
            close = did_you_mean(name, full_names).replace("mean ", "mean --")
            text += f"; in a file its name is {full_names[name]}" if name in full_names else close
        super().__init__(text)
        self.code = 1 if isinstance(error, OSError) else 2


def one_line(message: object) -> str:
    """A message in one line, without what jsonargparse says about types that do not matter."""
    bullets = str(message).splitlines()
    # Of several types that a value may have, the class that was named says what is wrong.
    margins = {line.partition("- Problem")[0] for line in bullets if "- Problem" in line}
    bullets = [line for line in bullets if line.partition("- Expected")[0] not in margins]
    lines = [line.strip().removeprefix("- ") for line in bullets]
    helpful = dict.fromkeys(line for line in lines if line and not _UNHELPFUL.match(line))
    text = (" ".join(helpful) or " ".join(lines)).partition("tensor([")[0]
    for pattern, replacement in _SHORTENED:
        text = re.sub(pattern, replacement, text)
    for name in re.findall(r"NestedArg\(key='([\w.]+)'", str(message)):  # as it was typed
        text = text.replace(f"--{name.partition('.')[0]}:", f"--{name}:")
    return text if len(text) < 500 else f"{text[:500]} ..."
