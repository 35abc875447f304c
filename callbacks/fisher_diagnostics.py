"""Fisher diagnostics of a head over several steps: computed on its device, read on the host.

``head.diagnostics`` gives one vector for each step: the mean Fisher matrix of the step (its
diagonal alone where ``head.fisher_is_diagonal``) and the share of saturated scores.
:func:`matrices_of` and :func:`scalars_of` read these vectors; :class:`HeadHistory` collects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from catnat import CategoricalHead
from catnat.fisher import (
    condition_number,
    condition_of_spectrum,
    off_diagonal_mass,
    sampled_mean_fisher,
)
from catnat.replay import send

SCALARS = ("off_diagonal_mass", "off_diagonal_mass_fro", "condition_number", "saturated")
_MAX_SCORES = 2**24  # scores kept on the device before diagnostics are computed: 64 MB
_MAX_MATRIX = 2**26  # entries of the largest matrix that is computed: 256 MB


def matrices_of(head: CategoricalHead, diagnostics: Tensor) -> Tensor:
    """The Fisher matrices in ``head.diagnostics`` of T steps, (T, ...) -> (T, S, S)."""
    exact, S = diagnostics[:, :-1], head.num_scores
    return torch.diag_embed(exact) if head.fisher_is_diagonal else exact.reshape(-1, S, S)


def scalars_of(head: CategoricalHead, diagnostics: Tensor) -> list[dict[str, float]]:
    """The :data:`SCALARS` of each of T steps by name, from ``head.diagnostics``, (T, ...)."""
    exact, saturated = diagnostics[:, :-1], diagnostics[:, -1]
    if head.fisher_is_diagonal:
        mass = mass_fro = 0 * exact.sum(-1)  # NaN stays NaN
        condition = condition_of_spectrum(exact)
    else:
        exact = matrices_of(head, diagnostics)
        mass, mass_fro = off_diagonal_mass(exact), off_diagonal_mass(exact, "fro")
        condition = condition_number(exact)
    rows = torch.stack((mass, mass_fro, condition, saturated), 1).tolist()
    return [dict(zip(SCALARS, row, strict=True)) for row in rows]


def diagnostics_size(head: CategoricalHead) -> int:
    """Numbers in ``head.diagnostics`` of a step; 1 where the matrix would be too large."""
    return head.num_scores + 1 if head.fisher_is_diagonal else _matrix_size(head, 1)


def sampled_size(head: CategoricalHead) -> int:
    """Numbers in a sampled Fisher matrix; 1 where the matrix would be too large."""
    return _matrix_size(head, 0)


def _matrix_size(head: CategoricalHead, more: int) -> int:
    entries = head.num_scores**2
    return entries + more if entries <= _MAX_MATRIX else 1


class Report(NamedTuple):
    """Diagnostics of T steps on the host."""

    steps: list[int]
    diagnostics: Tensor  # (T, ...), as ``head.diagnostics`` gives them
    scalars: list[dict[str, float]]  # of each step, by name
    problem: str  # why something is NaN; empty if that is not known


class HeadHistory:
    """Fisher diagnostics of one head at the steps that were added.

    A computation that fails gives NaN; the first reason is kept in ``problem``.

    Args:
        head: the head. If it has parameters, diagnostics are computed at once, because the next
            update changes them; otherwise scores are collected first.
    """

    def __init__(self, head: CategoricalHead) -> None:
        self.head = head
        self.problem = ""
        self._exact, self._sampled = _MeansOverRanks(), _MeansOverRanks()
        self._scores: list[tuple[int, Tensor]] = []  # by step, not yet computed with
        self._at_once = bool(head.state_dict())

    def add(self, step: int, scores: Tensor, draws: int, generator: torch.Generator | None) -> None:
        """Keep the scores (*, S) of a step, and draw that many categories for each row."""
        scores = scores.reshape(-1, self.head.num_scores)
        if draws:
            sampled = self._attempt(
                lambda: sampled_mean_fisher(self.head, scores, draws, generator).flatten()[None],
                (1, sampled_size(self.head)),
                scores,
            )
            self._sampled.add([step], len(scores), sampled)
        self._scores.append((step, scores))
        if self._at_once or len(self._scores) * scores.numel() > _MAX_SCORES:
            self.compute()

    def compute(self) -> None:
        """Compute the diagnostics of the kept scores, all steps with equally many rows at once."""
        for rows, group in groupby(self._scores, lambda kept: len(kept[1])):
            steps, scores = zip(*group, strict=True)
            stacked = torch.stack(scores)
            size = (len(steps), diagnostics_size(self.head))
            exact = self._attempt(partial(self.head.diagnostics, stacked), size, stacked)
            self._exact.add(list(steps), rows, exact)
        self._scores = []

    def _attempt(
        self, compute: Callable[[], Tensor], shape: tuple[int, int], scores: Tensor
    ) -> Tensor:
        """The result of a computation, or NaN in its shape where it fails."""
        try:
            if shape[1] == 1 and self.head.num_scores > 1:
                raise ValueError(f"a matrix of {self.head.num_scores}^2 entries is too large")
            result = compute()
            if result.shape != shape:
                raise ValueError(f"expected the shape {shape}, got {tuple(result.shape)}")
            return result
        except Exception as error:
            self._remember(error)
            return torch.full(shape, torch.nan, device=scores.device)

    def send(self, trainer: Trainer) -> Callable[[], Report]:
        """Start the copy to the host; the returned function waits for it and gives the report."""
        exact, sampled = self._exact.send(trainer), self._sampled.send(trainer)

        def receive() -> Report:
            diagnostics = exact()
            scalars = self._scalars(diagnostics)
            masses = dict(zip(self._sampled.steps, self._sampled_masses(sampled()), strict=True))
            for step, row in zip(self._exact.steps, scalars, strict=True):
                if step in masses:
                    row["off_diagonal_mass_sampled"] = masses[step]
            return Report(self._exact.steps, diagnostics, scalars, self.problem)

        return receive

    def _scalars(self, diagnostics: Tensor) -> list[dict[str, float]]:
        try:
            return scalars_of(self.head, diagnostics)
        except Exception as error:
            self._remember(error)
            return [dict.fromkeys(SCALARS, math.nan) for _ in diagnostics]

    def _remember(self, error: Exception) -> None:
        self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _sampled_masses(self, sampled: Tensor) -> list[float]:
        S = self.head.num_scores
        if sampled.numel() != len(sampled) * S**2:  # the matrices were too large
            return [math.nan] * len(sampled)
        masses: list[float] = off_diagonal_mass(sampled.reshape(-1, S, S)).tolist()
        return masses


class _MeansOverRanks:
    """One vector for each step, the mean over the rows of all ranks, on the device."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._rows: list[int] = []
        self._means: list[Tensor] = []

    def add(self, steps: list[int], rows: int, means: Tensor) -> None:
        """Add T steps with equally many rows on this rank, whose means are (T, D)."""
        self.steps += steps
        self._rows += [rows] * len(steps)
        self._means.append(means)

    def send(self, trainer: Trainer) -> Callable[[], Tensor]:
        """Average over ranks and start the copy to the host; call the result to wait for it."""
        if not self.steps:
            return lambda: torch.empty(0)
        means, self._means = torch.cat(self._means), []
        if trainer.world_size > 1:
            rows = torch.tensor(self._rows, dtype=means.dtype, device=means.device)[:, None]
            sums = torch.where(rows > 0, means * rows, 0.0)  # a mean over no rows is NaN
            sums = trainer.strategy.reduce(torch.cat([rows, sums], 1), reduce_op="sum")
            assert isinstance(sums, Tensor)
            means = sums[:, 1:] / sums[:, :1]
        return send(means)
