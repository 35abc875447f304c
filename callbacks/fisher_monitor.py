"""FisherMonitor: how far from diagonal the Fisher matrix of a head is while it trains."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from catnat import CategoricalHead, HeadProbe
from catnat.callbacks.fisher_summary import matrices
from catnat.callbacks.images import add_image, heat_map
from catnat.callbacks.watched_heads import Sent, Watched, sampled_width, width

_MAX_PICTURE = 2**22  # entries of a matrix that is drawn
_MAX_RESULTS = 2**24  # numbers kept on the device before they are sent


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
    those of the latest call of a head in the step; a head that was not called is left out. A head
    with parameters of its own is looked at as it is after the step's update. Draws come from a
    generator of the monitor's own, so that a run with it and one without learn the same. Scores
    are kept on the device, and looked at and sent to the loggers ``write_every_n_steps`` at a time,
    each under its own step.

    What cannot be computed is NaN, with one warning for each head: observing never ends a run.

    Args:
        every_n_steps: observe each n-th optimizer step.
        num_samples: M, draws per row for the sampled mass; 0 leaves it out.
        sampled_every_n_steps: how often to draw them; that is done step by step.
        image_every_n_steps: how often to draw G; 0 for never.
        write_every_n_steps: how many observed steps are written at once, up to 200; fewer where G
            is very large.
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
        self._step = 0
        self._steps_per_block = write_every_n_steps
        self._forget()

    def _forget(self) -> None:
        self._watched: dict[str, Watched] = {}  # by the head's name
        self._kept = 0  # steps that are in no block yet
        self._seen = False  # whether any head was called
        self._blocks: list[dict[str, Watched]] = []  # to be sent
        self._sent: list[dict[str, Sent]] = []
        self._warned: set[str] = set()  # heads of which something was NaN

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call: a hook on a compiled model never fires if it is later."""
        self._detach(pl_module)  # of a run that was cut short
        self._probe = HeadProbe(pl_module).attach()
        self._generator = torch.Generator(pl_module.device)
        self._generator.manual_seed(self.seed + trainer.global_rank)
        self._forget()
        room = int(_MAX_RESULTS / sum(map(self._results_of, self._probe.heads.values())))
        self._steps_per_block = max(1, min(self.write_every_n_steps, room))  # on every rank
        observers = _observers(pl_module)
        if observers is not None:
            observers.append(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steps count from where a resumed run stopped."""
        self._step = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forget what the heads saw elsewhere, such as in validation."""
        assert self._probe is not None
        self._probe.scores = {}

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the scores of a step, and write once enough have come together."""
        stepped = trainer.global_step > self._step  # else gradients are still accumulating
        self._step = trainer.global_step
        step = self._step - 1  # counted from 0, like Lightning's own metrics
        if stepped and _observers(pl_module) is None and step % self.every_n_steps == 0:
            self._keep(step, self.look())
        if self._blocks:
            self._write(trainer)

    def look(self) -> dict[str, Tensor]:
        """What the heads saw in this step."""
        assert self._probe is not None
        return dict(self._probe.scores)

    def note(self, step: int, seen: dict[str, Tensor]) -> None:
        """Keep the scores of a replayed step, which the next one will overwrite."""
        if step % self.every_n_steps == 0:
            self._keep(step, {name: scores.clone() for name, scores in seen.items()})

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
        self._detach(pl_module)

    def _detach(self, pl_module: LightningModule) -> None:
        if self._probe is not None:
            self._probe.detach()
            self._probe = None
        observers = getattr(pl_module, "step_observers", [])
        if self in observers:
            observers.remove(self)

    def _results_of(self, head: CategoricalHead) -> float:
        """How many numbers are kept of a step."""
        draws = self.num_samples > 0
        return width(head) + draws * sampled_width(head) / self.sampled_every_n_steps

    def _keep(self, step: int, scores: dict[str, Tensor]) -> None:
        """Keep the scores of a step; the last step of a block has all of them looked at."""
        assert self._probe is not None
        draws = 0 if step % self.sampled_every_n_steps else self.num_samples
        for name, each in scores.items():
            if name not in self._watched:
                self._watched[name] = Watched(self._probe.heads[name])
            self._watched[name].add(step, each, draws, self._generator)
        self._kept += 1
        if self._kept == self._steps_per_block:
            self._end_block()

    def _end_block(self) -> None:
        """Look at what was kept: the same steps on every rank."""
        if not self._kept:
            return
        self._seen = self._seen or bool(self._watched)
        if not self._seen:
            assert self._probe is not None
            list(self._probe)  # says what is wrong
        for watched in self._watched.values():
            watched.look()
        if self._watched:
            self._blocks.append(self._watched)
        self._watched, self._kept = {}, 0

    def _write(self, trainer: Trainer, all_of_it: bool = False) -> None:
        """Send what there is. Write what was sent before, which has arrived, or all of it."""
        if all_of_it:
            self._end_block()
        arrived, self._sent = self._sent, []
        for block in self._blocks:
            self._sent.append({name: block[name].send(trainer) for name in sorted(block)})
        self._blocks = []
        if all_of_it or not _takes_time(trainer):
            arrived, self._sent = arrived + self._sent, []
        for sent in arrived:
            for name, each in sent.items():
                self._write_rows(trainer, name, each)

    def _write_rows(self, trainer: Trainer, name: str, sent: Sent) -> None:
        assert self._probe is not None
        prefix = "fim" if len(self._probe.heads) == 1 else f"fim/{name}"
        head = self._probe.heads[name]
        steps, observed, rows, problem = sent()
        tagged = [{f"{prefix}/{tag}": value for tag, value in row.items()} for row in rows]
        for row in tagged:
            self.latest |= row
        if not trainer.is_global_zero:
            return
        self._warn_of_nan(name, steps, tagged, problem)
        for logger in trainer.loggers:
            write_scalars(logger, steps, tagged)
        if not self.image_every_n_steps or head.num_scores**2 > _MAX_PICTURE:
            return
        for step, each in zip(steps, observed, strict=True):
            if step % self.image_every_n_steps == 0 and each.isfinite().all():
                (matrix,) = matrices(head, each[None])
                largest = float(matrix.abs().max())
                picture = heat_map(matrix, "RdBu_r", -largest, largest)
                add_image(trainer.loggers, f"{prefix}/mean", picture, step)

    def _warn_of_nan(
        self, name: str, steps: list[int], rows: list[dict[str, float]], problem: str
    ) -> None:
        """Say once for each head that something could not be computed, and why if that is known."""
        for step, row in zip(steps, rows, strict=True):
            tags = [tag for tag, value in row.items() if math.isnan(value)]
            if tags and name not in self._warned:
                self._warned.add(name)
                reason = f": {problem}" if problem else ""
                message = f"{', '.join(tags)} at step {step} could not be computed{reason}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)


def _takes_time(trainer: Trainer) -> bool:
    """Whether what is sent arrives later: waiting for it would idle the device."""
    return trainer.strategy.root_device.type != "cpu"


def _observers(module: LightningModule) -> list[Any] | None:
    """What a module that replays its steps tells of each of them; None for any other."""
    replays = getattr(module, "replays", False)
    return getattr(module, "step_observers", None) if replays else None


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
