"""Fisher diagnostics of a head at some steps: computed on its device, read on the host.

Both monitors use these: :func:`exact_rows` and :class:`SampledShare` make the values of tags, and
:class:`HeadHistory` collects the scores of many steps and computes them together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from catnat import CategoricalHead
from catnat.cuda_graph import send
from catnat.fisher import (
    condition_number,
    condition_of_spectrum,
    off_diagonal_mass,
    paired_mean_fishers,
)

_MAX_SCORES = 2**24  # scores kept on the device before diagnostics are computed: 64 MB
_MAX_IN_CACHE = 2**19  # the same on a CPU: 2 MB stay in a cache, which saves a third of the time
_MEMORY = 0.98  # weight of the sums of earlier steps at each further step

Row = dict[str, float]  # values by tag


def require_pairs(num_samples: int) -> None:
    """Raise for a number of draws that cannot be divided into two halves; 0 is none at all."""
    if num_samples != 0 and num_samples < 2:
        raise ValueError(f"num_samples must be 0 or at least 2, got {num_samples}")


def exact_diagnostics(head: CategoricalHead, scores: Tensor) -> Tensor:
    """What :func:`exact_rows` reads, of T steps: (T, B, S) -> (T, D + 2).

    D numbers of the mean Fisher matrix, S if it is diagonal and S^2 otherwise; then how many
    scores of a row are saturated, and how many are free, on average. A score that a mask decides
    is infinite: it is not free, and does not count as saturated.
    """
    free = scores.isfinite()
    counts = torch.stack((head.saturated(scores) & free, free), -1).sum(-2, dtype=torch.float32)
    return torch.cat((head.step_fishers(scores), counts.mean(1)), -1)


def matrix_of(head: CategoricalHead, diagnostics: Tensor) -> Tensor:
    """The Fisher matrices in :func:`exact_diagnostics`, (*, D + 2) -> (*, S, S)."""
    exact, S = diagnostics[..., :-2], head.num_scores
    return torch.diag_embed(exact) if head.fisher_is_diagonal else exact.unflatten(-1, (S, S))


def exact_rows(head: CategoricalHead, diagnostics: Tensor) -> list[Row]:
    """The values of each of T steps from :func:`exact_diagnostics`, (T, D + 2)."""
    exact, (saturated, free) = diagnostics[:, :-2], diagnostics[:, -2:].unbind(-1)
    if head.fisher_is_diagonal:
        mass = frobenius = 0 * exact.sum(-1)  # NaN stays NaN
        condition = condition_of_spectrum(exact)
    else:
        G = matrix_of(head, diagnostics)
        mass, frobenius = off_diagonal_mass(G), off_diagonal_mass(G, "fro")
        condition = condition_number(G)
    values = {"fim/off_diagonal_mass": mass, "fim/saturated": saturated / free.clamp_min(1e-30)}
    if head.num_scores > 1:  # otherwise these are constant
        values["fim/off_diagonal_mass_fro"] = frobenius
        values["fim_spectrum/condition_number"] = condition
    columns = (column.tolist() for column in values.values())
    return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]


def sampled_sums(pairs: Tensor) -> Tensor:
    """What :class:`SampledShare` reads, from two estimates A and B of G: (*, 2, S, S) -> (*, 3).

    The l1 mass of (A + B) / 2; the sum of the products A_ij B_ij off the diagonal; the sum of all
    products.
    """
    one, other = pairs.unbind(-3)
    products = one * other
    total = products.sum((-2, -1))
    off = total - products.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.stack((off_diagonal_mass((one + other) / 2), off, total), -1)


@dataclass
class SampledShare:
    """The off-diagonal share of a run, from draws: sums over its steps are divided by each other.

    A ratio of sums of few rows is biased, a mean of such ratios too. Earlier steps count less.
    """

    off: float = 0.0
    total: float = 0.0

    def row(self, mass: float, off: float, total: float) -> Row:
        """Add the :func:`sampled_sums` of a step; the values of the tags at this step."""
        if off - total == off - total:  # a step that is NaN would spoil all steps after it
            self.off, self.total = _MEMORY * self.off + off, _MEMORY * self.total + total
            share = self.off / self.total if self.total else 0.0
        else:
            share = float("nan")
        return {
            "fim_sampled/off_diagonal_mass": mass,
            "fim_sampled/off_diagonal_mass_fro": 0.0 if share < 0 else share**0.5,
            "fim_sampled/off_diagonal_share": share,
        }


class Report(NamedTuple):
    """Diagnostics of T steps on the host."""

    steps: list[int]
    exact: Tensor  # (T, D + 2), as exact_diagnostics gives them
    rows: dict[int, Row]  # exact values by step
    drawn: dict[int, list[float]]  # sampled_sums of the steps that have draws
    problem: str  # why something is NaN; empty if that is not known


class HeadHistory:
    """Fisher diagnostics of one head at the steps that were added.

    A computation that fails gives NaN; the first reason is part of the report. Numbers for draws
    depend on the seed, the step and the shape alone, not on the steps that are observed together,
    nor on where a run was resumed.

    Args:
        head: the head. If it has parameters, diagnostics are computed after each step, because the
            next update changes them; otherwise scores are collected first.
        seed: of the draws, any text.
    """

    def __init__(self, head: CategoricalHead, seed: str) -> None:
        self.head, self.seed, self.problem = head, seed, ""
        self._exact, self._sampled = _Means(), _Means()
        self._kept: list[tuple[int, Tensor, int]] = []  # steps, scores and numbers of draws
        self._has_state = bool(head.state_dict())
        self._generator: torch.Generator | None = None

    def add(self, step: int, scores: Tensor, draws: int) -> None:
        """Keep the scores (*, S) of a batch of a step, for that many draws at each row."""
        rows = scores.reshape(-1, self.head.num_scores)
        if self._kept and self._kept[-1][0] == step:  # gradients are accumulated
            rows = torch.cat((self._kept.pop()[1], rows))
        self._kept.append((step, rows, draws))

    def end_step(self) -> None:
        """Compute with what was kept, if that cannot wait."""
        if self._kept:
            _, scores, draws = self._kept[-1]
            most = _MAX_IN_CACHE if scores.device.type == "cpu" else _MAX_SCORES
            if self._has_state or len(self._kept) * scores.numel() * max(1, draws) > most:
                self._compute()

    def send(self, trainer: Trainer) -> Callable[[], Report]:
        """Start to copy the diagnostics of all ranks to the host; call the result to get them."""
        self._compute()
        S, exact = self.head.num_scores, send(self._exact.over_ranks(trainer))
        # Three numbers of a step instead of two matrices: most of the copy, and of the host's work.
        pairs = self._sampled.over_ranks(trainer).reshape(-1, 2, S, S)
        sampled = send(sampled_sums(pairs))

        def receive() -> Report:
            found, steps = exact(), self._exact.steps
            rows = dict(zip(steps, exact_rows(self.head, found), strict=True))
            drawn = dict(zip(self._sampled.steps, sampled().tolist(), strict=True))
            return Report(steps, found, rows, drawn, self.problem)

        return receive

    def _compute(self) -> None:
        """Compute with what was kept, all steps with equally many rows and draws at once."""
        for _, group in groupby(self._kept, lambda kept: (kept[1].shape, kept[2])):
            steps, batches, draws = zip(*group, strict=True)
            self._compute_together(steps, torch.stack(batches), draws[0])
        self._kept = []

    def _compute_together(self, steps: Sequence[int], scores: Tensor, draws: int) -> None:
        """Diagnostics of T steps from scores (T, B, S) and that many draws at each row."""
        head, (T, B, S) = self.head, scores.shape
        size = S + 2 if head.fisher_is_diagonal else S**2 + 2
        exact = self._attempt((T, size), scores, lambda: exact_diagnostics(head, scores))
        self._exact.add(steps, B, exact)
        if draws:
            pairs = self._attempt((T, 2 * S**2), scores, lambda: self._pairs(steps, scores, draws))
            self._sampled.add(steps, B, pairs)

    def _pairs(self, steps: Sequence[int], scores: Tensor, draws: int) -> Tensor:
        """Two estimates of the Fisher matrix of each of T steps, (T, 2, S, S)."""
        self._generator = self._generator or torch.Generator(scores.device)
        uniforms = torch.empty(
            (len(steps), draws, scores.shape[1]), dtype=torch.float64, device=scores.device
        )
        for step, numbers in zip(steps, uniforms, strict=True):
            self._generator.manual_seed(random.Random(f"{self.seed} {step} 0").getrandbits(63))
            numbers.uniform_(generator=self._generator)
        return paired_mean_fishers(self.head, scores, uniforms.movedim(1, 0)).movedim(0, 1)

    def _attempt(
        self, shape: tuple[int, int], scores: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """The result of a computation in this shape, or NaN where it fails."""
        try:
            return compute().reshape(shape)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            return torch.full(shape, torch.nan, device=scores.device)


class _Means:
    """A vector for each step, the mean over the rows of all ranks, on the device."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._rows: list[int] = []
        self._means: list[Tensor] = []

    def add(self, steps: Sequence[int], rows: int, means: Tensor) -> None:
        """Add T steps with equally many rows on this rank, whose means are (T, D)."""
        self.steps += steps
        self._rows += [rows] * len(steps)
        self._means.append(means)

    def over_ranks(self, trainer: Trainer) -> Tensor:
        """The means of all steps, (T, D)."""
        means = torch.cat(self._means) if self.steps else torch.empty(0)
        if trainer.world_size == 1 or not self.steps:
            return means
        rows = torch.tensor(self._rows, dtype=means.dtype, device=means.device)[:, None]
        sums = torch.cat([rows, torch.where(rows > 0, means * rows, 0.0)], 1)  # no rows: NaN
        reduced = trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced[:, 1:] / reduced[:, :1]
