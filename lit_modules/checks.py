"""Checks of what users pass in."""

from __future__ import annotations

import math


def require_positive(or_zero: bool = False, **values: float) -> None:
    """Raise a ValueError that names the first value not > 0 (or < 0 with ``or_zero``)."""
    for name, value in values.items():
        if not (value > 0 or (or_zero and value == 0)) or math.isinf(value):
            raise ValueError(f"{name} must be {'>= 0' if or_zero else 'positive'}, got {value}")
