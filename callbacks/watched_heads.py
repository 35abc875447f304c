"""What FisherMonitor keeps of a head between two writes: scores, and then what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from catnat import CategoricalHead
from catnat.callbacks.fisher_summary import SCALARS, sampled_mean_fisher, scalars
from catnat.fisher import off_diagonal_mass
from catnat.replay import send

_MAX_SCORES = 2**24  # kept on the device before they are looked at: 64 MB
_MAX_MATRIX = 2**26  # entries of a matrix that is looked at: 256 MB

Sent = Callable[[], tuple[list[int], Tensor, list[dict[str, float]], str]]
"""Steps, ``diagnostics`` of each, scalars of each, and what went wrong."""


def width(head: CategoricalHead) -> int:
    """Numbers that ``diagnostics`` gives for a step; 1 where the matrix would be too large."""
    S = head.num_scores
    if head.fisher_is_diagonal:
        return S + 1
    return S**2 + 1 if S**2 <= _MAX_MATRIX else 1


def sampled_width(head: CategoricalHead) -> int:
    """Numbers of a sampled matrix; 1 where it would be too large."""
    S = head.num_scores
    return S**2 if S**2 <= _MAX_MATRIX else 1


class Watched:
    """Scores of one head at some steps, and then what they say."""

    def __init__(self, head: CategoricalHead) -> None:
        self.head = head
        self.exact, self.sampled = _Means(), _Means()
        self.problem = ""  # why something is NaN
        self._kept: list[tuple[int, Tensor]] = []
        self._at_once = bool(head.state_dict())  # or it would have changed

    def add(self, step: int, scores: Tensor, draws: int, generator: torch.Generator | None) -> None:
        """Keep the scores of a step; draw from them at once, in the order of steps."""
        scores = scores.reshape(-1, self.head.num_scores)
        if draws:
            sampled = self._computed(
                lambda: sampled_mean_fisher(self.head, scores, draws, generator).flatten()[None],
                (1, sampled_width(self.head)),
                scores,
            )
            self.sampled.add([step], len(scores), sampled)
        self._kept.append((step, scores))
        if self._at_once or len(self._kept) * scores.numel() > _MAX_SCORES:
            self.look()

    def look(self) -> None:
        """Look at the kept scores, all steps with equally many rows at once."""
        for rows, group in groupby(self._kept, lambda kept: len(kept[1])):
            steps, scores = zip(*group, strict=True)
            stacked = torch.stack(scores)
            exact = self._computed(
                partial(self.head.diagnostics, stacked), (len(steps), width(self.head)), stacked
            )
            self.exact.add(list(steps), rows, exact)
        self._kept = []

    def _computed(
        self, compute: Callable[[], Tensor], shape: tuple[int, int], scores: Tensor
    ) -> Tensor:
        """What the function gives, or NaN where it fails."""
        try:
            if shape[1] == 1 and self.head.num_scores > 1:
                raise ValueError(f"a matrix of {self.head.num_scores}^2 entries is too large")
            result = compute()
            if result.shape != shape:
                raise ValueError(f"expected the shape {shape}, got {tuple(result.shape)}")
            return result
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            return torch.full(shape, torch.nan, device=scores.device)

    def send(self, trainer: Trainer) -> Sent:
        """Start the way to the host; call the result for what arrives there."""
        exact, sampled = self.exact.send(trainer), self.sampled.send(trainer)

        def receive() -> tuple[list[int], Tensor, list[dict[str, float]], str]:
            observed = exact()
            rows = self._scalars(observed)
            drawn = dict(zip(self.sampled.steps, self._sampled_masses(sampled()), strict=True))
            for step, row in zip(self.exact.steps, rows, strict=True):
                if step in drawn:
                    row["off_diagonal_mass_sampled"] = drawn[step]
            return self.exact.steps, observed, rows, self.problem

        return receive

    def _scalars(self, observed: Tensor) -> list[dict[str, float]]:
        try:
            return scalars(self.head, observed)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            return [dict.fromkeys(SCALARS, math.nan) for _ in observed]

    def _sampled_masses(self, sampled: Tensor) -> list[float]:
        S = self.head.num_scores
        if sampled.numel() != len(sampled) * S**2:  # too large
            return [math.nan] * len(sampled)
        masses: list[float] = off_diagonal_mass(sampled.reshape(-1, S, S)).tolist()
        return masses


class _Means:
    """Means over the rows of a step, a vector for each, on the device."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._rows: list[int] = []
        self._means: list[Tensor] = []

    def add(self, steps: list[int], rows: int, means: Tensor) -> None:
        """Add steps that have equally many rows on this rank; means is (T, D)."""
        self.steps += steps
        self._rows += [rows] * len(steps)
        self._means.append(means)

    def send(self, trainer: Trainer) -> Callable[[], Tensor]:
        """Means over all ranks, on their way to the host."""
        if not self.steps:
            return lambda: torch.empty(0)
        means, self._means = torch.cat(self._means), []
        if trainer.world_size > 1:
            rows = torch.tensor(self._rows, dtype=means.dtype, device=means.device)[:, None]
            sums = torch.where(
                rows > 0, means * rows, 0.0
            )  # no rows: NaN means, which do not count
            sums = trainer.strategy.reduce(torch.cat([rows, sums], 1), reduce_op="sum")
            assert isinstance(sums, Tensor)
            means = sums[:, 1:] / sums[:, :1]
        return send(means)
