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

MAX_MATRIX = 2**26  # entries of the largest matrix that is computed: 256 MB
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


def exact_tags(head: CategoricalHead) -> tuple[str, ...]:
    """The tags of a head that need no draws; those of a 1 x 1 matrix that are not constant."""
    mass, more = "fim/off_diagonal_mass", ("fim/off_diagonal_mass_fro", "fim/saturated")
    if head.num_scores == 1:
        return (mass, "fim/saturated")
    return (mass, *more, "fim_spectrum/condition_number")


def exact_rows(head: CategoricalHead, diagnostics: Tensor) -> list[Row]:
    """The values of each of T steps from :func:`exact_diagnostics`, (T, D + 2)."""
    values = {"fim/saturated": diagnostics[:, -2] / diagnostics[:, -1].clamp_min(1e-30)}
    if head.fisher_is_diagonal:
        exact = diagnostics[:, :-2]
        values["fim/off_diagonal_mass"] = 0 * exact.sum(-1)  # NaN stays NaN
        values["fim/off_diagonal_mass_fro"] = values["fim/off_diagonal_mass"]
        values["fim_spectrum/condition_number"] = condition_of_spectrum(exact)
    else:
        exact = matrix_of(head, diagnostics)
        values["fim/off_diagonal_mass"] = off_diagonal_mass(exact)
        values["fim/off_diagonal_mass_fro"] = off_diagonal_mass(exact, "fro")
        values["fim_spectrum/condition_number"] = condition_number(exact)
    tags = exact_tags(head)
    columns = (values[tag].tolist() for tag in tags)
    return [dict(zip(tags, row, strict=True)) for row in zip(*columns, strict=True)]


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

    A computation that fails gives NaN; the first reason is kept in ``problem``. Numbers for draws
    depend on the seed, the step and the shape alone, not on the steps that are observed together,
    nor on where a run was resumed.

    Args:
        head: the head. If it has parameters, diagnostics are computed at once, because the next
            update changes them; otherwise scores are collected first.
        seed: of the draws, any text.
    """

    def __init__(self, head: CategoricalHead, seed: str) -> None:
        self.head, self.seed, self.problem = head, seed, ""
        self._exact, self._sampled = _MeansOverBatches(), _MeansOverBatches()
        self._kept: list[tuple[int, Tensor, int]] = []  # steps, scores and numbers of draws
        self._at_once = bool(head.state_dict())
        self._generator: torch.Generator | None = None
        self._batches: dict[int, int] = {}  # how many batches of a step had draws

    def add(self, step: int, scores: Tensor, draws: int) -> None:
        """Keep the scores (*, S) of a batch of a step, for that many draws at each row."""
        rows = scores.reshape(-1, self.head.num_scores)
        self._kept.append((step, rows, draws))
        most = _MAX_IN_CACHE if scores.device.type == "cpu" else _MAX_SCORES
        if self._at_once or len(self._kept) * scores.numel() * max(1, draws) > most:
            self.compute()

    def compute(self) -> None:
        """Compute with what was kept, all batches with equally many rows and draws at once."""
        for _, group in groupby(self._kept, lambda kept: (kept[1].shape, kept[2])):
            steps, batches, draws = zip(*group, strict=True)
            self._compute(steps, torch.stack(batches), draws[0])
        self._kept = []

    def _compute(self, steps: Sequence[int], scores: Tensor, draws: int) -> None:
        """Diagnostics of T batches from scores (T, B, S) and that many draws at each row."""
        head, (T, B, S) = self.head, scores.shape

        def exact() -> Tensor:
            return exact_diagnostics(head, scores)

        def pairs() -> Tensor:
            uniforms = self._uniforms(steps, draws, scores).movedim(1, 0)  # (M, T, B)
            return paired_mean_fishers(head, scores, uniforms).movedim(0, 1).flatten(1)

        size = S + 2 if head.fisher_is_diagonal else S**2 + 2
        self._exact.add(steps, B, self._attempt(exact, (T, size), scores.device))
        if draws:
            self._sampled.add(steps, B, self._attempt(pairs, (T, 2 * S**2), scores.device))

    def _uniforms(self, steps: Sequence[int], draws: int, scores: Tensor) -> Tensor:
        """Numbers in [0, 1) that decide the draws at T steps, (T, draws, B)."""
        self._generator = self._generator or torch.Generator(scores.device)
        uniforms = []
        for step in steps:
            batch = self._batches[step] = self._batches.get(step, -1) + 1
            seed = random.Random(f"{self.seed} {step} {batch}").getrandbits(63)
            self._generator.manual_seed(seed)
            size = (draws, scores.shape[1])
            drawn = torch.empty(size, dtype=torch.float64, device=scores.device)
            uniforms.append(drawn.uniform_(generator=self._generator))
        return torch.stack(uniforms)

    def _attempt(
        self, compute: Callable[[], Tensor], shape: tuple[int, int], device: torch.device
    ) -> Tensor:
        """The result of a computation, or NaN where it fails, in this shape or (T, 1)."""
        if too_large := shape[1] > 2 * MAX_MATRIX:
            shape = (shape[0], 1)
        try:
            if too_large:
                raise ValueError(f"a matrix of {self.head.num_scores}^2 entries is too large")
            return compute().reshape(shape)
        except Exception as error:
            self._remember(error)
            return torch.full(shape, torch.nan, device=device)

    def send(self, trainer: Trainer) -> Callable[[], Report]:
        """Start the copy to the host; the returned function waits for it and gives the report."""
        exact = send(self._exact.over_ranks(trainer))
        # Three numbers of a step instead of two matrices: most of the copy, and of the host's work.
        sampled = send(self._sampled_sums(self._sampled.over_ranks(trainer)))

        def receive() -> Report:
            found, steps = exact(), unique(self._exact.steps)
            drawn = dict(zip(unique(self._sampled.steps), sampled().tolist(), strict=True))
            rows = dict(zip(steps, self._rows(found), strict=True))
            return Report(steps, found, rows, drawn, self.problem)

        return receive

    def _rows(self, exact: Tensor) -> list[Row]:
        try:
            return exact_rows(self.head, exact)
        except Exception as error:
            self._remember(error)
            return [dict.fromkeys(exact_tags(self.head), torch.nan)] * len(exact)

    def _sampled_sums(self, pairs: Tensor) -> Tensor:
        S = self.head.num_scores
        try:
            return sampled_sums(pairs.reshape(len(pairs), 2, S, S))
        except Exception as error:  # the matrices were too large, or a mass cannot be computed
            self._remember(error)
            return torch.full((len(pairs), 3), torch.nan, device=pairs.device)

    def _remember(self, error: Exception) -> None:
        self.problem = self.problem or f"{type(error).__name__}: {error}"


class _MeansOverBatches:
    """A vector for each step, the mean over the rows of its batches and ranks, on the device."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # of each batch
        self._rows: list[int] = []
        self._means: list[Tensor] = []

    def add(self, steps: Sequence[int], rows: int, means: Tensor) -> None:
        """Add T batches with equally many rows on this rank, whose means are (T, D)."""
        self.steps += steps
        self._rows += [rows] * len(steps)
        self._means.append(means)

    def over_ranks(self, trainer: Trainer) -> Tensor:
        """The means of all steps, (T, D)."""
        if not self.steps:
            return torch.empty(0, 1)
        means, self._means = torch.cat(self._means), []
        batches = [len(list(group)) for _, group in groupby(self.steps)]  # of each step
        if trainer.world_size == 1 and max(batches) == 1:
            return means
        rows = torch.tensor(self._rows, dtype=means.dtype, device=means.device)[:, None]
        sums = torch.cat([rows, torch.where(rows > 0, means * rows, 0.0)], 1)  # no rows: NaN
        sums = torch.stack([each.sum(0) for each in sums.split(batches)])
        if trainer.world_size > 1:
            reduced = trainer.strategy.reduce(sums, reduce_op="sum")
            assert isinstance(reduced, Tensor)
            sums = reduced
        return sums[:, 1:] / sums[:, :1]


def unique(steps: list[int]) -> list[int]:
    """Each step once, in order."""
    return list(dict.fromkeys(steps))
