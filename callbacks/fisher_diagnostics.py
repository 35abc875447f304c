"""Fisher diagnostics of a head at some steps: computed on its device, read on the host.

Both monitors use :class:`HeadHistory`, which collects the scores of many steps and computes them
together; :func:`exact_rows` and :func:`sampled_row` make the values of tags.
"""

import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from catnat.callbacks.images import MAX_PICTURE, Draw, fisher_picture
from catnat.cuda_graph import send
from catnat.fisher import (
    condition_number,
    condition_of_spectrum,
    mass_of_terms,
    off_diagonal_mass,
    off_diagonal_terms,
    paired_mean_fishers,
)
from catnat.heads.base import CategoricalHead

LARGEST = 2**13  # scores of the largest head whose matrix is computed: 256 MB
_MAX_SCORES = 2**19  # collected before diagnostics are computed: 2 MB stay in a CPU's cache
_MEMORY = 0.98  # weight of the sums of earlier steps at each further step

Row = dict[str, float]  # values by tag
# A step, its values, and the tag of its picture with what draws it.
Observation = tuple[int, Row, str, Draw]


def exact_diagnostics(head: CategoricalHead, scores: Tensor) -> Tensor:
    """Return the input of :func:`exact_rows` for T steps: (T, B, S) -> (T, D + 2).

    D numbers of the mean Fisher matrix, S if it is diagonal and S^2 otherwise; then how many
    scores of a row are saturated, and how many are free, on average. A score that a mask decides
    is infinite: it is not free, and does not count as saturated.
    """
    free = scores.isfinite()
    counts = torch.stack((head.saturated(scores) & free, free), -1).sum(-2, dtype=torch.float32)
    return torch.cat((head.step_fishers(scores), counts.mean(1)), -1)


def exact_rows(head: CategoricalHead, diagnostics: Tensor, details: bool) -> list[Row]:
    """The values of each of T steps from :func:`exact_diagnostics`, (T, D + 2)."""
    exact = diagnostics[:, :-2]
    saturated, free = diagnostics[:, -2:].unbind(-1)
    is_diagonal = head.fisher_is_diagonal
    G = exact if is_diagonal else exact.unflatten(-1, (head.num_scores, head.num_scores))
    mass = 0 * exact.sum(-1) if is_diagonal else off_diagonal_mass(G)  # NaN stays NaN
    values = {
        "fim/exact_off_diagonal_mass": mass,
        "fim/saturated": saturated / free.clamp_min(1e-30),
    }
    if details and head.num_scores > 1:  # otherwise these are constant
        condition = condition_of_spectrum(G) if is_diagonal else condition_number(G)
        values["fim_spectrum/condition_number"] = condition
        values["fim/off_diagonal_mass_l1"] = mass if is_diagonal else off_diagonal_mass(G, "l1")
    rows = torch.stack([*values.values()], -1).tolist()
    return [dict(zip(values, row, strict=True)) for row in rows]


def sampled_sums(pairs: Tensor) -> Tensor:
    """Return the input of :func:`sampled_row` from two estimates of G: (*, 2, S, S) -> (*, 3).

    The l1 mass of (A + B) / 2; the sum of the products A_ij B_ij off the diagonal; the sum of all
    products.
    """
    one, other = pairs.unbind(-3)
    off, total = off_diagonal_terms(one, other)
    return torch.stack((off_diagonal_mass((one + other) / 2, "l1"), off, total), -1)


def sampled_row(sums: list[float], details: bool, mass_l1: float, off: float, total: float) -> Row:
    """Add the :func:`sampled_sums` of a step to the sums of a run; the values of the step's tags.

    The off-diagonal share is the ratio of the sums of all steps, where earlier ones count less. A
    ratio of sums of few rows is biased, a mean of such ratios too.
    """
    share = off - total
    if not math.isnan(share):  # a step that is NaN would spoil all steps after it
        sums[:] = _MEMORY * sums[0] + off, _MEMORY * sums[1] + total
        share = sums[0] / sums[1] if sums[1] else 0.0
    mass = mass_of_terms(torch.tensor(share, dtype=torch.float64), torch.ones(()))
    row = {"fim/off_diagonal_mass": float(mass)}
    if details:
        row["fim_sampled/off_diagonal_share"] = share
        row["fim_sampled/off_diagonal_mass_l1"] = mass_l1
    return row


def seed_of(*words: object) -> int:
    """A seed derived only from these words."""
    return random.Random(" ".join(map(str, words))).getrandbits(63)


@dataclass
class HeadHistory:
    """Fisher diagnostics of one head at the steps that were added.

    If a computation fails, its steps are NaN, and there is one warning. Numbers for draws depend on
    the seed, the step and the shape alone, not on the steps that are observed together, nor on
    where a run was resumed.

    Attributes:
        head: the head. If it has parameters, diagnostics are computed after each step, because the
            next update changes them; otherwise scores are collected first.
        middle: text between the two parts of a tag, "/" or "/<name of the head>/".
        draws: at each row; 0 for none. There are none either if G has one entry, or too many.
        sums: those of the steps before, which :func:`sampled_row` adds to; at first zeros.
        seed: seed of the draws (any text).
        details: whether there are further values: condition numbers, l1 masses and the share.
    """

    head: CategoricalHead
    middle: str
    draws: int
    sums: list[float]
    seed: str
    details: bool = False

    def __post_init__(self) -> None:
        """Begin without steps."""
        S = self.head.num_scores
        if not 1 < S <= LARGEST:
            self.draws = 0
        self._is_diagonal = self.head.fisher_is_diagonal
        self._size = (S if self._is_diagonal else S**2) + 2  # of the exact diagnostics
        self._max_scores = 0 if self.head.state_dict() else _MAX_SCORES // max(1, self.draws)
        self._scores: dict[int, Tensor] = {}  # of steps, not computed yet
        self._rows: dict[int, int] = {}  # their number at each step that is computed, not sent yet
        self._means: list[Tensor] = []  # over these rows, (T, D)
        self._failed = False

    def add(self, step: int, scores: Tensor) -> None:
        """Collect a copy of the scores (*, S) of a batch of a step."""
        rows = scores.reshape(-1, self.head.num_scores)
        earlier_rows = self._scores.get(step, rows[:0])  # where gradients are accumulated
        self._scores[step] = torch.cat((earlier_rows, rows))

    def observe(self, step: int, scores: Tensor) -> Observation:
        """The values of a step, at once."""
        self.add(step, scores)
        (observation,) = self.send()()
        return observation

    def end_step(self) -> None:
        """Compute with the collected scores, if that cannot wait."""
        if sum(map(Tensor.numel, self._scores.values())) > self._max_scores:
            self._compute()

    def send(self, trainer: Trainer | None = None) -> Callable[[], list[Observation]]:
        """Start to copy the values of all steps since the last call to the host.

        The result, once called, gives them. They are of all ranks of the trainer, if there is one.
        """
        self._compute()
        if not self._means:
            return lambda: []
        S = self.head.num_scores
        steps = [*self._rows]
        means = torch.cat(self._means)
        if trainer is not None and trainer.world_size > 1:
            rows = means.new_tensor([*self._rows.values()])[:, None]
            sums = torch.cat([rows, torch.where(rows > 0, means * rows, 0.0)], 1)  # no rows: NaN
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
            means = sums[:, 1:] / sums[:, :1]
        sampled = send(sampled_sums(means[:, self._size :].reshape(-1, 2, S, S)))
        exact = send(means[:, : self._size])
        self._rows = {}
        self._means = []

        def receive() -> list[Observation]:
            rows = exact_rows(self.head, exact(), self.details)
            if S == 1:  # there is nothing off the diagonal
                for row in rows:
                    row["fim/off_diagonal_mass"] = row["fim/exact_off_diagonal_mass"]
            for row, step_sums in zip(rows, sampled().tolist(), strict=False):  # or without draws
                row |= sampled_row(self.sums, self.details, *step_sums)
            return [
                (
                    step,
                    {tag.replace("/", self.middle): value for tag, value in row.items()},
                    f"fim{self.middle}picture",
                    partial(self._picture, step, diagnostics),
                )
                for step, row, diagnostics in zip(steps, rows, exact(), strict=True)
            ]

        return receive

    def _picture(self, step: int, diagnostics: Tensor) -> Tensor | None:
        """The matrix of a step's :func:`exact_diagnostics`; None if not finite, or too large."""
        S = self.head.num_scores
        if S**2 > MAX_PICTURE or not diagnostics.isfinite().all():
            return None
        exact = diagnostics[:-2]
        matrix = exact.diag() if self._is_diagonal else exact.view(S, S)
        return fisher_picture(matrix, self.head, f"mean Fisher matrix, step {step}")

    def _compute(self) -> None:
        """Compute with the collected scores, all steps with equally many rows at once."""
        for shape, group in groupby(self._scores.items(), lambda item: item[1].shape):
            steps, batches = zip(*group, strict=True)
            self._rows |= dict.fromkeys(steps, shape[0])
            self._means.append(self._means_of(steps, torch.stack(batches)))
        self._scores = {}

    def _means_of(self, steps: Sequence[int], scores: Tensor) -> Tensor:
        """:func:`exact_diagnostics` of T steps, and two drawn Fisher matrices; NaN if that fails.

        Shapes: scores (T, B, S), result (T, D).
        """
        count, rows, S = scores.shape
        try:
            means = exact_diagnostics(self.head, scores)
            if not self.draws:
                return means
            generator = torch.Generator(scores.device)
            uniforms = scores.new_empty((count, self.draws, rows), dtype=torch.float64)
            for step, numbers in zip(steps, uniforms, strict=True):
                generator.manual_seed(seed_of(self.seed, step))
                numbers.uniform_(generator=generator)
            pairs = paired_mean_fishers(self.head, scores, uniforms.movedim(1, 0))  # (2, T, S, S)
            return torch.cat((means, pairs.movedim(0, 1).reshape(count, -1)), 1)
        except Exception as error:
            if not self._failed:
                self._failed = True
                warnings.warn(
                    f"Fisher diagnostics could not be computed: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
            size = self._size + (2 * S**2 if self.draws else 0)
            return scores.new_full((count, size), torch.nan)


def histories_of(
    heads: dict[str, CategoricalHead],
    draws: int,
    sums: dict[str, list[float]],
    seed: str,
    details: bool = False,
) -> dict[str, HeadHistory]:
    """A history of each head whose Fisher matrix is diagonal, or small enough to be computed."""
    return {
        name: HeadHistory(
            head,
            "/" if len(heads) == 1 else f"/{name}/",
            draws,
            sums.setdefault(name, [0.0, 0.0]),
            f"{seed} {name}",
            details,
        )
        for name, head in heads.items()
        if head.fisher_is_diagonal or head.num_scores <= LARGEST
    }
