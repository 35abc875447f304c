"""Checks of what users pass in."""

from __future__ import annotations

import math

_SIXTEEN_BITS = ("16-true", "bf16-true")


def require_positive(or_zero: bool = False, **values: float) -> None:
    """Raise a ValueError that names the first value not > 0 (or < 0 with ``or_zero``)."""
    for name, value in values.items():
        if not (value > 0 or (or_zero and value == 0)) or math.isinf(value):
            raise ValueError(f"{name} must be {'>= 0' if or_zero else 'positive'}, got {value}")


def require_precision(precision: object) -> None:
    """Raise a ValueError if weights themselves would have 16 bits: small steps are lost there."""
    if precision in _SIXTEEN_BITS:
        raise ValueError(
            f"precision {precision!r} keeps the weights in 16 bits, where small steps are lost; "
            "choose from 32-true, 64-true, 16-mixed, bf16-mixed"
        )
