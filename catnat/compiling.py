"""Parts of a step that ``torch.compile`` leaves to Python: those that count steps and rows."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def not_compiled(function: Function) -> Function:
    """Leave a function and all that it calls to Python.

    A compiled function that reads a number which changes is compiled again for each value.
    """
    return cast(Function, torch.compiler.disable(function))


def compiled_in_parts(function: Function) -> Function:
    """Leave a function to Python, and compile what it calls."""
    return cast(Function, torch.compiler.disable(function, recursive=False))
