"""Curves as SVG, for a page that needs no other file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape

from catnat.training.recorded_run import Curve, thinned

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 30  # margins around the curves


@dataclass
class Chart:
    """A chart of one tag, with a line for each run.

    Args:
        tag: what is shown.
        said: what the tag means, in a line.
        curves: by the number of the run.
    """

    tag: str
    said: str
    curves: dict[int, Curve]

    def html(self) -> str:
        """The chart as a ``<figure>``; its ``data-curves`` are what the mouse reads."""
        curves = {run: thinned(curve) for run, curve in self.curves.items()}
        values = [value for curve in curves.values() for _, value in curve]
        steps = [step for curve in curves.values() for step, _ in curve]
        if not values:
            return ""
        log = min(values) > 0 and max(values) > 1000 * min(values)
        x, y = Scale(min(steps), max(steps)), Scale(min(values), max(values), log)
        parts = [*_grid(x, y)]
        parts += [_line(run, curve, x, y) for run, curve in curves.items()]
        content = {
            "x": [x.low, x.high],
            "runs": [{"run": run, "points": curve} for run, curve in curves.items()],
        }
        data = escape(json.dumps(content), quote=True)
        note = " (logarithmic)" if log else ""
        return (
            f'<figure class="chart" data-curves="{data}">'
            f"<figcaption><b>{escape(self.tag)}</b>{note}<small>{escape(self.said)}</small></figcaption>"
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.tag)}">'
            f"{''.join(parts)}</svg></figure>"
        )


class Scale:
    """From values to the share of an axis, 0 to 1."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        self.log = log
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        self.low, self.high = low, high

    def share(self, value: float) -> float:
        """Where a value lies."""
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """A few round numbers on the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1, max(1, (last - first) // 5))]
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * next(n for n in (1, 2, 5, 10) if n * unit >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def _across(x: Scale, step: float) -> float:
    return _LEFT + x.share(step) * (_WIDTH - _LEFT - _RIGHT)


def _down(y: Scale, value: float) -> float:
    return _TOP + (1 - y.share(value)) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x: Scale, y: Scale) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in y.ticks():
        at = _down(y, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in x.ticks():
        at = _across(x, value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        text = f"{value:,.0f}" if value == round(value) else ""
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    return parts


def _line(run: int, curve: Curve, x: Scale, y: Scale) -> str:
    points = [(_across(x, step), _down(y, value)) for step, value in curve]
    colour = COLOURS[run % len(COLOURS)]
    if len(points) == 1:
        (across, down), *_ = points
        return (
            f'<circle class="run-{run}" cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"/>'
        )
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    return f'<polyline class="run-{run}" points="{path}" stroke="{colour}"/>'
