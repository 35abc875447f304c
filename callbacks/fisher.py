"""FisherMonitor: how far from diagonal the Fisher matrix of a head is while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from catnat import CategoricalHead, HeadProbe
from catnat.fisher import condition_number, off_diagonal_mass
from catnat.transfer import send

from .figures import add_image, heat_map

SCALARS = (
    "off_diagonal_mass",
    "off_diagonal_mass_fro",
    "off_diagonal_mass_sampled",
    "condition_number",
    "saturated",
)
_MAX_BUFFERED = 2**22  # numbers kept on the device before they are written out: 16 MB


class FisherMonitor(Callback):
    """Writes diagnostics of the score-space Fisher matrix of every head in a model.

    G is the mean over the batch (all ranks together) and over the latents of each step:

    - ``fim/off_diagonal_mass``: sum_{i!=j} |G_ij| / sum_ij |G_ij|, with the expectation over
      categories in closed form and over the data empirical. Exactly 0 for catnat; 1/2 for softmax
      whatever the scores, because the rows of its G sum to zero;
    - ``fim/off_diagonal_mass_fro``: the same ratio of Frobenius norms, which does tell;
    - ``fim/off_diagonal_mass_sampled``: the first one from ``num_samples`` categories drawn per
      row. Its noise gives even a diagonal G a floor, which falls with the number of draws (rows
      times samples): about 0.24 at 1 draw a row, 0.034 at 64, 0.004 at 4096, for natural with
      K = 8 and a hundred rows of zero scores. Compare heads with the exact ones, and
      implementations with this one;
    - ``fim/condition_number``: largest over smallest eigenvalue of G on its support;
    - ``fim/saturated``: share of the scores in a flat region, where they get no gradient;
    - ``fim/mean``: G as a picture, red positive, blue negative.

    A model with several heads gets the head's name in the tag, ``fim/<name>/...``. Scores are
    those of the latest call of a head in the step. Draws come from a generator of the monitor's
    own, so that a run with it and one without learn the same. Results stay on the device and go
    to the loggers in one transfer every ``write_every_n_steps``, each under its own step.

    Args:
        every_n_steps: observe each n-th optimizer step.
        num_samples: M, draws per row for the sampled mass; 0 leaves it out.
        sampled_every_n_steps: how often to draw them: they cost as much as all the rest.
        image_every_n_steps: how often to draw G; 0 for never.
        write_every_n_steps: how many observed steps are written at once, up to 200.
        seed: of the draws.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        num_samples: int = 1,
        sampled_every_n_steps: int = 10,
        image_every_n_steps: int = 1000,
        write_every_n_steps: int = 50,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("num_samples", num_samples, 0),
            ("sampled_every_n_steps", sampled_every_n_steps, 1),
            ("image_every_n_steps", image_every_n_steps, 0),
            ("write_every_n_steps", write_every_n_steps, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if write_every_n_steps > 200:
            raise ValueError(f"write_every_n_steps must be at most 200, got {write_every_n_steps}")
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.sampled_every_n_steps = sampled_every_n_steps
        self.image_every_n_steps = image_every_n_steps
        self.write_every_n_steps = write_every_n_steps
        self.seed = seed
        self.latest: dict[str, float] = {}  # what was written last, by tag; the same on all ranks
        self._probe: HeadProbe | None = None
        self._generator: torch.Generator | None = None
        self._records: dict[str, _Records] = {}
        self._replayed: _OnDevice | None = None
        self._trained: dict[str, Tensor] = {}
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call: a hook on a compiled model never fires if it is later."""
        self._probe = HeadProbe(pl_module).attach()
        self._generator = torch.Generator(pl_module.device)
        self._generator.manual_seed(self.seed + trainer.global_rank)
        self._records = {}
        self._replayed = None
        observers, generators = _replayed_by(pl_module)
        if observers is not None:
            self._replayed = _OnDevice(self._probe, self.num_samples, self._generator)
            observers.append(self._replayed.observe)
            generators.append(self._generator)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steps count from where a resumed run stopped."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Observe, and write once enough has come together."""
        if trainer.global_step == self._step:  # gradients are still accumulating
            return
        if self._replayed is not None:
            self._replayed.steps += range(self._step, trainer.global_step)
            self._step = trainer.global_step
            if len(self._replayed.steps) >= self.write_every_n_steps:
                self._write(trainer)
            return
        self._step = trainer.global_step
        step = self._step - 1  # counted from 0, like Lightning's own metrics
        if step % self.every_n_steps == 0:
            self._observe(step)
        if any(records.full(self.write_every_n_steps) for records in self._records.values()):
            self._write(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation calls the heads too; what training showed must stay."""
        if self._probe is not None:
            self._trained = dict(self._probe.scores)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training's scores, which a replayed CUDA graph refreshes without any hook."""
        if self._probe is not None:
            self._probe.scores = self._trained

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A run that resumes from here has lost no step."""
        self._write(trainer, all_of_it=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the rest."""
        self._write(trainer, all_of_it=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None
        observers, generators = _replayed_by(pl_module)
        if self._replayed is not None:
            observers.remove(self._replayed.observe)
            generators.remove(self._generator)
            self._replayed = None

    def _observe(self, step: int) -> None:
        assert self._probe is not None
        for name, head, scores in self._probe:
            flat = scores.reshape(-1, head.num_scores)
            records = self._records.setdefault(name, _Records())
            records.steps.append(step)
            records.rows.append(flat.shape[0])
            num_samples = self.num_samples if self._is_sampled(step) else 0
            observed = observe(head, flat, num_samples, self._generator)
            missing = head.num_scores**2 if self.num_samples and not num_samples else 0
            records.observed.append(F.pad(observed, (0, missing)))

    def _is_sampled(self, step: int) -> bool:
        return self.num_samples > 0 and step % self.sampled_every_n_steps == 0

    def _write(self, trainer: Trainer, all_of_it: bool = False) -> None:
        """Write what has come together; of replayed steps only what has reached the host."""
        if self._replayed is not None:
            for name, steps, observed in self._replayed.take(self.every_n_steps, all_of_it):
                self._write_rows(trainer, name, steps, observed)
        for name, records in self._records.items():
            if records.steps:
                self._write_rows(trainer, name, records.steps, self._gather(trainer, records))
                records.clear()

    def _write_rows(self, trainer: Trainer, name: str, steps: list[int], observed: Tensor) -> None:
        assert self._probe is not None
        prefix = "fim" if len(self._probe.scores) == 1 else f"fim/{name}"
        exact, values = summarize(observed, self.num_samples > 0)
        tags = [f"{prefix}/{scalar}" for scalar in SCALARS]
        rows = [dict(zip(tags, row, strict=True)) for row in values]
        for step, row in zip(steps, rows, strict=True):
            if not self._is_sampled(step):
                del row[f"{prefix}/off_diagonal_mass_sampled"]
        for row in rows:
            self.latest |= row
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                write_scalars(logger, steps, rows)
            self._draw(trainer, f"{prefix}/mean", steps, exact)

    def _gather(self, trainer: Trainer, records: _Records) -> Tensor:
        """What was observed at each step, summed over rows and ranks, on the CPU: (T, 1 + ...)."""
        observed = torch.stack(records.observed)
        rows = torch.tensor(records.rows, dtype=observed.dtype).to(
            observed.device, non_blocking=True
        )
        summed = torch.cat([rows[:, None], observed * rows[:, None]], 1)
        if trainer.world_size > 1:
            reduced = trainer.strategy.reduce(summed, reduce_op="sum")
            assert isinstance(reduced, Tensor)
            summed = reduced
        summed = summed.cpu()
        return summed[:, 1:] / summed[:, :1]

    def _draw(self, trainer: Trainer, tag: str, steps: list[int], exact: Tensor) -> None:
        every = self.image_every_n_steps
        for step, matrix in zip(steps, exact, strict=True):
            if every and step % every == 0:
                largest = float(matrix.abs().max())
                picture = heat_map(matrix, "RdBu_r", -largest, largest)
                add_image(trainer.loggers, tag, picture, step)


@dataclass
class _Records:
    """Observations of one head that wait to be written."""

    steps: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    observed: list[Tensor] = field(default_factory=list)  # of observe(), on the device

    def full(self, wanted: int) -> bool:
        size = sum(each.numel() for each in self.observed[:1]) * len(self.observed)
        return len(self.steps) >= wanted or size >= _MAX_BUFFERED

    def clear(self) -> None:
        self.steps, self.rows, self.observed = [], [], []


def _replayed_by(module: LightningModule) -> tuple[Any, Any]:
    """Lists of what a module calls and draws from in its replayed steps; None if it has none."""
    if module.automatic_optimization:
        return None, None
    return getattr(module, "step_observers", None), getattr(module, "step_generators", None)


class _OnDevice:
    """Observes from within a step that is replayed as a CUDA graph, where no Python runs.

    Each step writes its row into a buffer on the device, at a place that is counted there too.
    Full ones travel to the host while training goes on, and are read when they have arrived.
    """

    ROWS = 256  # more than are written at once, plus those of a batch of several steps

    def __init__(
        self, probe: HeadProbe, num_samples: int, generator: torch.Generator | None
    ) -> None:
        self.probe, self.num_samples, self.generator = probe, num_samples, generator
        self.steps: list[int] = []
        self._buffers: dict[str, Tensor] = {}
        self._next: Tensor | None = None
        self._travelling: list[tuple[list[int], dict[str, Callable[[], Tensor]]]] = []

    def observe(self) -> None:
        """Add a row for each head; device work alone."""
        for name, head, scores in self.probe:
            row = observe(
                head, scores.reshape(-1, head.num_scores), self.num_samples, self.generator
            )
            if name not in self._buffers:
                self._buffers[name] = row.new_zeros(self.ROWS, len(row))
            if self._next is None:
                self._next = torch.zeros(1, dtype=torch.int64, device=row.device)
            self._buffers[name].index_copy_(0, self._next, row[None])
        assert self._next is not None
        self._next.add_(1).remainder_(self.ROWS)

    def take(self, every_n_steps: int, all_of_it: bool) -> Iterator[tuple[str, list[int], Tensor]]:
        """Name, steps and rows of what was sent before; send what is there now."""
        if all_of_it:
            self._send()
        arrived, self._travelling = self._travelling, []
        if not all_of_it:
            self._send()
        for steps, buffers in arrived:
            kept = [k for k, step in enumerate(steps) if step % every_n_steps == 0]
            for name, receive in buffers.items():
                if kept:
                    yield name, [steps[k] for k in kept], receive()[kept]

    def _send(self) -> None:
        if not self.steps or self._next is None:
            return
        sent = {name: send(buffer[: len(self.steps)]) for name, buffer in self._buffers.items()}
        self._next.zero_()
        self._travelling.append((self.steps, sent))
        self.steps = []


def observe(
    head: CategoricalHead, scores: Tensor, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Saturated share, mean exact G and, if asked for, mean sampled G, in one vector.

    Runs on the device without waiting for it, so it may be captured in a CUDA graph.

    Args:
        head: the head.
        scores: (B, S).
        num_samples: M draws a row; 0 for none.
        generator: where they come from.
    """
    parts = [
        head.saturated(scores).float().mean()[None],
        head.mean_fisher(scores).float().flatten(),
    ]
    if num_samples:
        parts.append(_sampled_mean_fisher(head, scores, num_samples, generator).flatten())
    return torch.cat(parts)


def _sampled_mean_fisher(
    head: CategoricalHead, scores: Tensor, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Mean of grad log p(c) grad log p(c)^T over rows and drawn categories c, (B, S) -> (S, S)."""
    with torch.enable_grad():
        leaf = scores.detach().float().repeat(num_samples, 1).requires_grad_()
        log_probs = head.log_probs(leaf)
        # Inverse of the distribution function. torch.multinomial would make the host wait.
        reached = log_probs.detach().exp().cumsum(-1)
        level = torch.rand(leaf.shape[0], 1, generator=generator, device=leaf.device)
        drawn = (reached <= level * reached[:, -1:]).sum(-1, keepdim=True)
        drawn = drawn.clamp_max(head.num_categories - 1)
        (gradient,) = torch.autograd.grad(log_probs.gather(-1, drawn).sum(), leaf)
    return gradient.t() @ gradient / gradient.shape[0]


def summarize(observed: Tensor, sampled: bool) -> tuple[Tensor, list[list[float]]]:
    """The exact matrices (T, S, S), and for each of T steps the values of ``SCALARS``.

    Args:
        observed: (T, 1 + S^2) or, where sampled, (T, 1 + 2 S^2), see :func:`observe`.
        sampled: whether the sampled matrices are there.
    """
    saturated, matrices = observed[:, 0], observed[:, 1:]
    size = round((matrices.shape[1] / (1 + sampled)) ** 0.5)
    both = matrices.reshape(len(matrices), 1 + sampled, size, size)
    exact = both[:, 0]
    values = [
        off_diagonal_mass(exact),
        off_diagonal_mass(exact, "fro"),
        off_diagonal_mass(both[:, -1]),
        _condition_number(exact),
        saturated,
    ]
    return exact, torch.stack(values, 1).tolist()


def _condition_number(matrices: Tensor) -> Tensor:
    """Condition numbers (T, S, S) -> (T); a diagonal is its own spectrum, and sorting is cheap."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    if not torch.equal(matrices, torch.diag_embed(diagonal)):
        return condition_number(matrices)
    largest = diagonal.amax(-1)
    inside = diagonal > 1e-6 * largest[:, None]
    smallest = torch.where(inside, diagonal, torch.inf).amin(-1)
    return torch.where(largest > 0, largest / smallest, 1.0)


def write_scalars(logger: Logger, steps: list[int], rows: list[dict[str, float]]) -> None:
    """Give a logger one row of scalars for each step."""
    if isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event a step, not one a scalar: five times cheaper, and this runs at every step.
        writer = logger.experiment._get_file_writer()
        for step, row in zip(steps, rows, strict=True):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
            writer.add_summary(Summary(value=values), step)
        return
    for step, row in zip(steps, rows, strict=True):
        logger.log_metrics(row, step)
