"""Checks of arguments: each raises a ValueError with the name and the value."""

import difflib
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def require(rule: str, holds: Callable[[Any], bool], /, **values: object) -> None:
    """Raise a ValueError unless ``holds`` is true for every value; booleans are rejected."""
    for name, value in values.items():
        try:
            is_right = not isinstance(value, bool) and holds(value)
        except TypeError:  # for example, text where a number is expected
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must {rule}, got {value!r}")


def require_positive(**values: float) -> None:
    """Raise a ValueError unless every value is finite and > 0."""
    require("be positive", lambda value: 0 < value < math.inf, **values)


def require_at_least(least: float, **values: float) -> None:
    """Raise a ValueError unless every value is at least ``least``; NaN is rejected.

    >>> require_at_least(1, num_samples=0)
    Traceback (most recent call last):
    ValueError: num_samples must be at least 1, got 0
    """
    require(f"be at least {least}", lambda value: value >= least, **values)


def require_within(low: float, high: float, ends: str = "[]", **values: float) -> None:
    """Raise a ValueError unless every value lies between ``low`` and ``high``.

    Args:
        low: lower end.
        high: upper end.
        ends: ends that belong to the range, such as ``"[]"`` (both) or ``"(]"`` (the upper one).
        values: values by name.

    >>> require_within(0, 1, "(]", theta=0.0)
    Traceback (most recent call last):
    ValueError: theta must lie in (0, 1], got 0.0
    """
    shown = f"{low:g}..{high:g}" if ends == "[]" else f"{ends[0]}{low:g}, {high:g}{ends[1]}"

    def inside(value: float) -> bool:
        above = value >= low if ends[0] == "[" else value > low
        return above and (value <= high if ends[1] == "]" else value < high)

    require(f"lie in {shown}", inside, **values)


def require_integer_within(low: int, high: int, **values: int) -> None:
    """Raise a ValueError unless every value is an integer from ``low`` to ``high``."""
    require("be an integer", lambda value: hasattr(value, "__index__"), **values)
    require_within(low, high, "[]", **values)


def numbers(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Options with these names whose values are numbers."""
    return {name: options[name] for name in names if isinstance(options.get(name), int | float)}


def checked_categories(num_categories: Any) -> int:
    """Number of categories of a head (K), after checking that it is an integer >= 2."""
    if not hasattr(num_categories, "__index__"):
        raise ValueError(f"num_categories must be an integer, got {num_categories!r}")
    require_at_least(2, num_categories=num_categories)
    return operator.index(num_categories)


def checked_order(order: Any, num_categories: int) -> tuple[int, ...]:
    """Leaf of each class, after checking that every leaf occurs once."""
    leaves = order.tolist() if hasattr(order, "tolist") else order
    try:
        integers = tuple(map(operator.index, leaves))
    except TypeError:
        integers = ()
    # Sorting takes longest for a million classes, so this compares sets.
    if len(integers) != num_categories or set(integers) != set(range(num_categories)):
        shown = reprlib.repr(leaves)
        raise ValueError(f"order must be a permutation of 0..{num_categories - 1}, got {shown}")
    return integers


def require_tail(tail: float) -> None:
    """Raise a ValueError unless the tail is 0 or its steepness is finite in float32."""
    rule = "be 0 or lie in [1e-30, 0.5)"
    require(rule, lambda value: value == 0 or 1e-30 <= value < 0.5, tail=tail)


def require_choice(choices: Iterable[str], **values: str) -> None:
    """Raise a ValueError unless every value is one of the choices.

    >>> require_choice(("l1", "fro"), norm="l2")
    Traceback (most recent call last):
    ValueError: unknown norm 'l2'; choose from l1, fro
    """
    choices = tuple(choices)
    for name, value in values.items():
        if value not in choices:
            close = did_you_mean(str(value), choices)
            # The suggestion comes first: the end of a long message is cut off.
            joined = ", ".join(choices)
            raise ValueError(f"unknown {name} {value!r}{close or ';'} choose from {joined}")


def require_name(**values: str) -> None:
    """Raise a ValueError unless every value is a string, which can be saved.

    >>> require_name(head=3)
    Traceback (most recent call last):
    ValueError: head must be a name, so that it can be saved, got 3
    """
    require("be a name, so that it can be saved", lambda value: isinstance(value, str), **values)


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Suggest the closest choice; empty if no choice is close.

    >>> did_you_mean("naturl", ("softmax", "natural")), did_you_mean("VAE", ("gsl", "vae"))
    ('; did you mean natural?', '; did you mean vae?')
    """
    lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), list(lower), 1)
    return f"; did you mean {lower[close[0]]}?" if close else ""


def plain_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Options as a dictionary of Python's own lists and values, which a checkpoint can hold.

    >>> from collections import UserDict
    >>> plain_options(UserDict(tail=0.05, order=range(3)))
    {'tail': 0.05, 'order': [0, 1, 2]}
    """
    if options is None:
        return None
    return {
        name: list(x) if isinstance(x, Sequence) and not isinstance(x, str) else x
        for name, x in options.items()
    }
