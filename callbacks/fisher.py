"""FisherMonitor: how far from diagonal the Fisher matrix of a head is while it trains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from catnat import CategoricalHead, HeadProbe
from catnat.fisher import off_diagonal_mass
from catnat.transfer import send

from .figures import add_image, heat_map
from .observe import sampled_mean_fisher, summarize

_MAX_SCORES = 2**24  # kept on the device before they are looked at: 64 MB
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
        self._watched: dict[str, _Watched] = {}  # by the head's name
        self._kept = 0  # steps that are in no block yet
        self._seen = False  # whether any head was called
        self._blocks: list[dict[str, _Watched]] = []  # to be sent
        self._sent: list[dict[str, _Sent]] = []

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
        S, draws = head.num_scores, self.num_samples > 0
        return (S if head.fisher_is_diagonal else S**2) + draws * S**2 / self.sampled_every_n_steps

    def _keep(self, step: int, scores: dict[str, Tensor]) -> None:
        """Keep the scores of a step; the last step of a block has all of them looked at."""
        assert self._probe is not None
        draws = 0 if step % self.sampled_every_n_steps else self.num_samples
        for name, each in scores.items():
            if name not in self._watched:
                self._watched[name] = _Watched(self._probe.heads[name])
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

    def _write_rows(self, trainer: Trainer, name: str, sent: _Sent) -> None:
        assert self._probe is not None
        prefix = "fim" if len(self._probe.heads) == 1 else f"fim/{name}"
        steps, matrices, rows = sent()
        tagged = [{f"{prefix}/{tag}": value for tag, value in row.items()} for row in rows]
        for row in tagged:
            self.latest |= row
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            write_scalars(logger, steps, tagged)
        for step, matrix in zip(steps, matrices, strict=True):
            if self.image_every_n_steps and step % self.image_every_n_steps == 0:
                largest = float(matrix.abs().max())
                picture = heat_map(matrix, "RdBu_r", -largest, largest)
                add_image(trainer.loggers, f"{prefix}/mean", picture, step)


_Sent = Callable[[], tuple[list[int], Tensor, list[dict[str, float]]]]  # steps, mean G, scalars


class _Watched:
    """Scores of one head at some steps, and then what they say."""

    def __init__(self, head: CategoricalHead) -> None:
        self.head = head
        self.exact, self.sampled = _Means(), _Means()
        self._kept: list[tuple[int, Tensor]] = []
        self._at_once = bool(head.state_dict())  # or it would have changed

    def add(self, step: int, scores: Tensor, draws: int, generator: torch.Generator | None) -> None:
        """Keep the scores of a step; draw from them at once, in the order of steps."""
        scores = scores.reshape(-1, self.head.num_scores)
        if draws:
            sampled = sampled_mean_fisher(self.head, scores, draws, generator)
            self.sampled.add([step], len(scores), sampled.flatten()[None])
        self._kept.append((step, scores))
        if self._at_once or len(self._kept) * scores.numel() > _MAX_SCORES:
            self.look()

    def look(self) -> None:
        """Look at the kept scores, all steps with equally many rows at once."""
        for rows, group in groupby(self._kept, lambda kept: len(kept[1])):
            steps, scores = zip(*group, strict=True)
            self.exact.add(list(steps), rows, self.head.diagnostics(torch.stack(scores)))
        self._kept = []

    def send(self, trainer: Trainer) -> _Sent:
        """Start the way to the host; call the result for what arrives there."""
        exact, sampled = self.exact.send(trainer), self.sampled.send(trainer)

        def receive() -> tuple[list[int], Tensor, list[dict[str, float]]]:
            matrices, scalars = summarize(self.head, exact())
            S = self.head.num_scores
            if self.sampled.steps:
                masses = off_diagonal_mass(sampled().reshape(-1, S, S)).tolist()
                drawn = dict(zip(self.sampled.steps, masses, strict=True))
                for step, row in zip(self.exact.steps, scalars, strict=True):
                    if step in drawn:
                        row["off_diagonal_mass_sampled"] = drawn[step]
            return self.exact.steps, matrices, scalars

        return receive


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
            sums = trainer.strategy.reduce(torch.cat([rows, means * rows], 1), reduce_op="sum")
            assert isinstance(sums, Tensor)
            means = sums[:, 1:] / sums[:, :1]
        return send(means)


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
