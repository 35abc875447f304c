"""FisherMonitor: how far from diagonal the Fisher matrix of a head is while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from catnat import HeadProbe
from catnat.transfer import send

from .figures import add_image, heat_map
from .observe import observe, summarize

_Found = dict[int, tuple[Tensor, dict[str, float]]]  # step -> mean G, scalars by name
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
        sampled_every_n_steps: how often to draw them: that costs four times what the rest does.
        image_every_n_steps: how often to draw G; 0 for never.
        write_every_n_steps: how many observed steps are written at once, up to 200.
        seed: of the draws.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        num_samples: int = 1,
        sampled_every_n_steps: int = 50,
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
        self._records: dict[tuple[str, int], _Records] = {}  # by head and draws a row
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
            self._replayed = _OnDevice(self, self._probe, self._generator)
            observers.append(self._replayed)
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
        if self.draws_at(step) is not None:
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
            observers.remove(self._replayed)
            generators.remove(self._generator)
            self._replayed = None

    def draws_at(self, step: int) -> int | None:
        """How many categories are drawn per row at a step; None if it is not observed at all."""
        if step % self.every_n_steps:
            return None
        return 0 if step % self.sampled_every_n_steps else self.num_samples

    def _observe(self, step: int) -> None:
        assert self._probe is not None
        draws = self.draws_at(step) or 0
        for name, head, scores in self._probe:
            flat = scores.reshape(-1, head.num_scores)
            records = self._records.setdefault((name, draws), _Records())
            records.steps.append(step)
            records.rows.append(flat.shape[0])
            records.observed.append(observe(head, flat, draws, self._generator))

    def _write(self, trainer: Trainer, all_of_it: bool = False) -> None:
        """Write what has come together; of replayed steps only what has reached the host."""
        found: dict[str, _Found] = {}
        if self._replayed is not None:
            for name, steps, observed in self._replayed.take(all_of_it):
                self._find(found, name, steps, observed)
        for (name, _), records in self._records.items():
            if records.steps:
                self._find(found, name, records.steps, self._gather(trainer, records))
                records.clear()
        for name, each in found.items():
            self._write_rows(trainer, name, each)

    def _find(self, found: dict[str, _Found], name: str, steps: list[int], seen: Tensor) -> None:
        """Add what was observed at some steps to what there is to be written of a head."""
        assert self._probe is not None
        exact, rows = summarize(self._probe.heads[name], seen)
        found.setdefault(name, {}).update(
            (step, (matrix, row)) for step, matrix, row in zip(steps, exact, rows, strict=True)
        )

    def _write_rows(self, trainer: Trainer, name: str, found: _Found) -> None:
        assert self._probe is not None
        prefix = "fim" if len(self._probe.scores) == 1 else f"fim/{name}"
        steps = sorted(found)
        rows = [{f"{prefix}/{tag}": v for tag, v in found[step][1].items()} for step in steps]
        for row in rows:
            self.latest |= row
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                write_scalars(logger, steps, rows)
            self._draw(trainer, f"{prefix}/mean", found)

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

    def _draw(self, trainer: Trainer, tag: str, found: _Found) -> None:
        every = self.image_every_n_steps
        for step, (matrix, _) in found.items():
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
        self, monitor: FisherMonitor, probe: HeadProbe, generator: torch.Generator | None
    ) -> None:
        self.kind = monitor.draws_at  # steps of one kind are replays of one graph
        self.probe, self.generator = probe, generator
        self.steps: list[int] = []
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._next: dict[int, Tensor] = {}
        self._travelling: list[tuple[str, list[int], Callable[[], Tensor]]] = []

    def observe(self, kind: int | None) -> None:
        """Add a row for each head; device work alone."""
        if kind is None:
            return
        for name, head, scores in self.probe:
            row = observe(head, scores.reshape(-1, head.num_scores), kind, self.generator)
            if (name, kind) not in self._buffers:
                self._buffers[name, kind] = row.new_zeros(self.ROWS, len(row))
            if kind not in self._next:
                self._next[kind] = torch.zeros(1, dtype=torch.int64, device=row.device)
            self._buffers[name, kind].index_copy_(0, self._next[kind], row[None])
        self._next[kind].add_(1)

    def take(self, all_of_it: bool) -> Iterator[tuple[str, list[int], Tensor]]:
        """Name, steps and rows of what was sent before; send what is there now."""
        if all_of_it:
            self._send()
        arrived, self._travelling = self._travelling, []
        if not all_of_it:
            self._send()
        for name, steps, receive in arrived:
            yield name, steps, receive()

    def _send(self) -> None:
        for (name, kind), buffer in self._buffers.items():
            steps = [step for step in self.steps if self.kind(step) == kind]
            if steps:
                self._travelling.append((name, steps, send(buffer[: len(steps)])))
        for place in self._next.values():
            place.zero_()
        self.steps = []


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
