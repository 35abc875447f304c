"""Fisher diagnostics of a head over several steps: computed on its device, read on the host.

``head.diagnostics`` gives one vector for each step: the mean Fisher matrix of the step (its
diagonal alone where ``head.fisher_is_diagonal``) and the share of saturated scores.
:func:`matrices_of` and :func:`scalars_of` read these vectors; :class:`HeadHistory` collects them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    off_diagonal_share,
    paired_mean_fishers,
)
from catnat.replay import send

SCALARS = ("off_diagonal_mass", "off_diagonal_mass_fro", "condition_number", "saturated")
SAMPLED = (
    "off_diagonal_mass_sampled",
    "off_diagonal_mass_fro_sampled",
    "off_diagonal_share_sampled",
)
_MAX_SCORES = 2**24  # scores kept on the device before diagnostics are computed: 64 MB
_MAX_IN_CACHE = 2**19  # the same on a CPU: 2 MB stay in a cache, which saves a third of the time
_MAX_NOISE = 2**22  # numbers that are drawn at once: 16 MB
_MAX_MATRIX = 2**26  # entries of the largest matrix that is computed: 256 MB


def require_pairs(num_samples: int) -> None:
    """Raise for a number of draws that cannot be divided into two halves; 0 is none at all."""
    if num_samples != 0 and num_samples < 2:
        raise ValueError(f"num_samples must be 0 or at least 2, got {num_samples}")


def matrices_of(head: CategoricalHead, diagnostics: Tensor) -> Tensor:
    """The Fisher matrices in ``head.diagnostics`` of T steps, (T, ...) -> (T, S, S)."""
    exact, S = diagnostics[:, :-1], head.num_scores
    return torch.diag_embed(exact) if head.fisher_is_diagonal else exact.reshape(-1, S, S)


def scalars_of(head: CategoricalHead, diagnostics: Tensor) -> Tensor:
    """The :data:`SCALARS` of each of T steps, (T, 4), from ``head.diagnostics``, (T, ...)."""
    exact, saturated = diagnostics[:, :-1], diagnostics[:, -1]
    if head.fisher_is_diagonal:
        mass = mass_fro = 0 * exact.sum(-1)  # NaN stays NaN
        condition = condition_of_spectrum(exact)
    else:
        exact = matrices_of(head, diagnostics)
        mass, mass_fro = off_diagonal_mass(exact), off_diagonal_mass(exact, "fro")
        condition = condition_number(exact)
    return torch.stack((mass, mass_fro, condition, saturated), 1)


def sampled_scalars_of(pairs: Tensor) -> Tensor:
    """The :data:`SAMPLED` of T steps, (T, 3), from their ``paired_mean_fishers``, (T, 2, S, S)."""
    one, other = pairs.unbind(1)
    share = off_diagonal_share(one, other)
    mass = off_diagonal_mass((one + other) / 2)
    return torch.stack((mass, torch.where(share < 0, 0.0, share).sqrt(), share), 1)


def diagnostics_size(head: CategoricalHead) -> int:
    """Numbers in ``head.diagnostics`` of a step; 1 where the matrix would be too large."""
    return head.num_scores + 1 if head.fisher_is_diagonal else _matrix_size(head, 1)


def sampled_size(head: CategoricalHead) -> int:
    """Numbers in two sampled Fisher matrices; 1 where a matrix would be too large."""
    return 2 * size if (size := _matrix_size(head, 0)) > 1 or head.num_scores == 1 else 1


def _matrix_size(head: CategoricalHead, more: int) -> int:
    entries = head.num_scores**2
    return entries + more if entries <= _MAX_MATRIX else 1


class Table(NamedTuple):
    """Values (T, n) of n scalars at T steps."""

    names: tuple[str, ...]
    steps: list[int]
    values: Tensor


def rows_of(tables: list[Table]) -> dict[int, dict[str, float]]:
    """The values of every step in some tables: by step, and then by name."""
    rows: dict[int, dict[str, float]] = {}
    for names, steps, values in tables:
        for step, row in zip(steps, values.tolist(), strict=True):
            rows.setdefault(step, {}).update(zip(names, row, strict=True))
    return rows


class Report(NamedTuple):
    """Diagnostics of T steps on the host."""

    steps: list[int]
    diagnostics: Tensor  # (T, ...), as ``head.diagnostics`` gives them
    tables: list[Table]  # of all scalars; two where draws were made at some of the steps only
    problem: str  # why something is NaN; empty if that is not known


class StepNoise:
    """Uniform numbers for the draws of a step: they depend on seed, step and shape alone.

    So they do not depend on how many steps are observed together, or on where a run was resumed.
    The numbers of many steps are drawn with one call, because calls cost a GPU's host time.

    Args:
        seed: any text; different texts give different numbers.
        device: where the numbers are made.
    """

    def __init__(self, seed: str, device: torch.device) -> None:
        self.seed, self._generator = seed, torch.Generator(device)
        self._drawn: tuple[int, tuple[int, ...], Tensor] | None = None  # first step, shape, numbers

    def __call__(self, steps: Sequence[int], shape: tuple[int, ...]) -> Tensor:
        """Numbers in [0, 1) for T steps in ascending order, of this shape each: (T, *shape)."""
        at_once = max(1, min(50, _MAX_NOISE // max(1, math.prod(shape))))
        parts = []
        for number, group in groupby(steps, lambda step: step // at_once):
            drawn = self._draw(number * at_once, at_once, shape)
            places = [step - number * at_once for step in group]
            every = places[1] - places[0] if len(places) > 1 else 1
            chosen = range(places[0], places[-1] + 1, every)
            if places == list(chosen):
                parts.append(drawn[chosen.start : chosen.stop : every])
            else:
                parts += [drawn[place][None] for place in places]
        return torch.cat(parts)

    def _draw(self, first: int, at_once: int, shape: tuple[int, ...]) -> Tensor:
        """The numbers of the steps from this one on."""
        if self._drawn is None or self._drawn[:2] != (first, shape):
            self._generator.manual_seed(random.Random(f"{self.seed} {first}").getrandbits(63))
            device = self._generator.device
            numbers = torch.rand(at_once, *shape, generator=self._generator, device=device)
            self._drawn = (first, shape, numbers)
        return self._drawn[2]


class HeadHistory:
    """Fisher diagnostics of one head at the steps that were added.

    A computation that fails gives NaN; the first reason is kept in ``problem``.

    Args:
        head: the head. If it has parameters, diagnostics are computed at once, because the next
            update changes them; otherwise scores are collected first.
        noise: for the draws.
    """

    def __init__(self, head: CategoricalHead, noise: StepNoise) -> None:
        self.head, self.noise = head, noise
        self.problem = ""
        self._exact, self._sampled = _MeansOverRanks(), _MeansOverRanks()
        self._kept: list[tuple[int, Tensor, int]] = []  # steps, scores and numbers of draws
        self._at_once = bool(head.state_dict())

    def add(self, step: int, scores: Tensor, draws: int) -> None:
        """Keep the scores (*, S) of a step, for that many draws at each row."""
        self._kept.append((step, scores, draws))
        most = _MAX_IN_CACHE if scores.device.type == "cpu" else _MAX_SCORES
        if self._at_once or len(self._kept) * scores.numel() * max(1, draws) > most:
            self.compute()

    def compute(self) -> None:
        """Compute with what was kept, all steps with equally many rows and draws at once."""
        for (shape, draws), group in groupby(self._kept, lambda kept: (kept[1].shape, kept[2])):
            steps, scores, _ = zip(*group, strict=True)
            rows = math.prod(shape[:-1])
            stacked = torch.stack(scores).reshape(len(steps), rows, self.head.num_scores)
            self._compute(list(steps), stacked, draws)
        self._kept = []

    def _compute(self, steps: list[int], scores: Tensor, draws: int) -> None:
        """Diagnostics of T steps from scores (T, B, S) and that many draws at each row."""
        head, rows, both = self.head, scores.shape[1], None
        if draws:
            levels = self.noise(steps, (draws, rows)).movedim(1, 0)  # (M, T, B)
            both = self._both(scores, levels)
        size = (len(steps), diagnostics_size(head))
        exact = self._attempt(lambda: both[0] if both else head.diagnostics(scores), size, scores)
        self._exact.add(steps, rows, exact)
        if draws:

            def pairs() -> Tensor:
                found = both[1] if both else paired_mean_fishers(head, scores, levels)
                return found.movedim(0, 1).flatten(1)

            size = (len(steps), sampled_size(head))
            self._sampled.add(steps, rows, self._attempt(pairs, size, scores))

    def _both(self, scores: Tensor, levels: Tensor) -> tuple[Tensor, Tensor] | None:
        """The exact and the drawn in one pass; None if that is impossible, or fails."""
        if sampled_size(self.head) == 1:
            return None
        with suppress(Exception):  # two passes follow, and what fails there is remembered
            return self.head._observe(scores, levels)
        return None

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
        exact = send(self._exact.over_ranks(trainer))
        # Three numbers of a step instead of two matrices: most of the copy, and of the host's work.
        sampled = send(self._sampled_masses(self._sampled.over_ranks(trainer)))

        def receive() -> Report:
            diagnostics, steps = exact(), self._exact.steps
            scalars = self._scalars(diagnostics)
            tables = [Table(SCALARS, steps, scalars)]
            if drawn := self._sampled.steps:
                masses = sampled()
                if drawn == steps:
                    tables = [Table(SCALARS + SAMPLED, steps, torch.cat((scalars, masses), 1))]
                else:
                    tables.append(Table(SAMPLED, drawn, masses))
            return Report(steps, diagnostics, tables, self.problem)

        return receive

    def _scalars(self, diagnostics: Tensor) -> Tensor:
        try:
            return scalars_of(self.head, diagnostics)
        except Exception as error:
            self._remember(error)
            return torch.full((len(diagnostics), len(SCALARS)), torch.nan)

    def _remember(self, error: Exception) -> None:
        self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _sampled_masses(self, sampled: Tensor) -> Tensor:
        S = self.head.num_scores
        try:
            return sampled_scalars_of(sampled.reshape(-1, 2, S, S))
        except Exception as error:  # the matrices were too large, or a mass cannot be computed
            self._remember(error)
            return torch.full((len(sampled), len(SAMPLED)), torch.nan, device=sampled.device)


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

    def over_ranks(self, trainer: Trainer) -> Tensor:
        """The means of T steps, (T, D)."""
        if not self.steps:
            return torch.empty(0)
        means, self._means = torch.cat(self._means), []
        if trainer.world_size > 1:
            rows = torch.tensor(self._rows, dtype=means.dtype, device=means.device)[:, None]
            sums = torch.where(rows > 0, means * rows, 0.0)  # a mean over no rows is NaN
            sums = trainer.strategy.reduce(torch.cat([rows, sums], 1), reduce_op="sum")
            assert isinstance(sums, Tensor)
            means = sums[:, 1:] / sums[:, :1]
        return means
