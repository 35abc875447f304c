"""FisherMonitor: how far the Fisher matrix of a head is from diagonal, while a model trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from catnat import CategoricalHead, HeadProbe
from catnat.callbacks.fisher_diagnostics import (
    HeadHistory,
    Report,
    StepNoise,
    Table,
    diagnostics_size,
    matrices_of,
    require_pairs,
    rows_of,
    sampled_size,
)
from catnat.callbacks.fisher_picture import MAX_PICTURE, fisher_picture, is_drawn, limit_of
from catnat.callbacks.images import add_image
from catnat.checks import require_at_least, require_at_most

_MOST_STEPS = 200  # that are written at once
_MAX_RESULTS = 2**24  # numbers kept on the device before they are copied to the host


class FisherMonitor(Callback):
    """Writes diagnostics of the score-space Fisher matrix of every head in a model.

    G is the mean of the exact Fisher matrices over the batch (all ranks together) and over the
    latents of a step. The tags:

    - ``fim/off_diagonal_mass``: sum_{i!=j} |G_ij| / sum_ij |G_ij|, with the expectation over
      categories in closed form and over the data empirical. Exactly 0 for catnat; 1/2 for softmax
      whatever the scores, because the rows of its G sum to zero;
    - ``fim/off_diagonal_mass_fro``: the same ratio of Frobenius norms, which differs between
      scores for softmax, too;
    - ``fim/off_diagonal_mass_fro_sampled``: the Frobenius ratio again, from ``num_samples``
      categories drawn at each row of every step, without the closed form. Half of the draws give
      one estimate A of G, the others another one B, and sum_{i!=j} A_ij B_ij / sum_ij A_ij B_ij
      estimates the square of the ratio without the floor that noise gives a single estimate.
      Where it is negative, 0 is shown;
    - ``fim/off_diagonal_share_sampled``: that estimate itself, which can be negative. Its mean over
      steps is what converges: to 0 for catnat, to the square of the exact ratio for softmax. For
      sparsemax it is too small: rare categories make up most of its G, and are hardly ever drawn;
    - ``fim/off_diagonal_mass_sampled``: the l1 ratio of the mean of A and B. The noise of the draws
      gives even a diagonal G a floor, which falls with the number of draws (rows times samples):
      about 0.2 at 2 draws a row, 0.034 at 64, 0.004 at 4096, for natural with K = 8 and a hundred
      rows of zero scores. Use it to compare with other implementations that draw;
    - ``fim/condition_number``: largest over smallest eigenvalue of G on its support;
    - ``fim/saturated``: share of the scores in a flat region, where they get no gradient;
    - ``fim/mean``: G as a picture, red positive, blue negative, with the levels of the tree of a
      catnat head. It is drawn at steps 0, 10, 100, 1000 and so on, and after the last step; all
      pictures of a run have one colour scale.

    A model with several heads gets the head's name in the tag, ``fim/<name>/...``. Scores are
    those of the latest call of a head in the step; a head that was not called is left out. A head
    with parameters of its own is evaluated as it is after the step's update. The monitor draws
    from a random generator of its own, so that a run with the monitor learns the same as a run
    without. Scores are kept on the device; after ``write_every_n_steps`` observed steps the
    diagnostics of all these steps are computed and written, each under its own step.

    A number that cannot be computed is NaN, with one warning for each head: observing never ends
    a run.

    Args:
        every_n_steps: observe each n-th optimizer step.
        num_samples: M, draws per row for the sampled masses, at least 2; 0 leaves them out.
        sampled_every_n_steps: how often to draw, counted in steps.
        image_every_n_steps: draw G at each n-th step, too; 0 for no pictures at all.
        write_every_n_steps: how many observed steps are written at once, up to 200; fewer where G
            is very large. None: 200 where steps are replayed as CUDA graphs, 50 elsewhere.
        seed: seed of the draws.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        num_samples: int = 2,
        sampled_every_n_steps: int = 1,
        image_every_n_steps: int = 10_000,
        write_every_n_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        at_once = _MOST_STEPS if write_every_n_steps is None else write_every_n_steps
        require_at_least(
            1,
            every_n_steps=every_n_steps,
            sampled_every_n_steps=sampled_every_n_steps,
            write_every_n_steps=at_once,
        )
        require_at_least(0, image_every_n_steps=image_every_n_steps)
        require_pairs(num_samples)
        require_at_most(_MOST_STEPS, write_every_n_steps=at_once)
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.sampled_every_n_steps = sampled_every_n_steps
        self.image_every_n_steps = image_every_n_steps
        self.write_every_n_steps = write_every_n_steps
        self.seed = seed
        self.latest: dict[str, float] = {}  # latest value of every tag; the same on all ranks
        self._probe: HeadProbe | None = None
        self._noise: dict[str, StepNoise] = {}  # of each head's draws, by the head's name
        self._step = 0
        self._steps_per_block = at_once
        self._limits: dict[str, float] = {}  # the colour scale of each head's pictures
        self._start_anew()

    def _start_anew(self) -> None:
        # A block is a number of steps that are written together: a history for each head, by name.
        self._block: dict[str, HeadHistory] = {}
        self._steps_in_block = 0
        self._seen = False  # whether a head was called, or its absence told
        self._complete: list[dict[str, HeadHistory]] = []  # blocks not yet copied to the host
        self._on_the_way: list[dict[str, Callable[[], Report]]] = []  # blocks being copied
        self._warned: set[str] = set()  # heads for which a warning was given
        self._undrawn: dict[str, tuple[int, Tensor]] = {}  # latest diagnostics without a picture

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the colour scale of an earlier run; a checkpoint restores that of this run."""
        if stage == "fit":
            self._limits = {}

    def state_dict(self) -> dict[str, Any]:
        """The colour scale of the pictures."""
        return {"limits": dict(self._limits)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the colour scale of the pictures."""
        self._limits = dict(state_dict["limits"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call: a hook that a compiled model gets later never fires."""
        self._detach(pl_module)  # an earlier run that was cut short may have left a probe
        self._probe = HeadProbe(pl_module).attach()
        self._noise = {
            name: StepNoise(f"{self.seed} {trainer.global_rank} {name}", pl_module.device)
            for name in self._probe.heads
        }
        self._start_anew()
        observers = _observers(pl_module)
        usual = 50 if observers is None else _MOST_STEPS  # a replayed step waits for the host
        at_once = self.write_every_n_steps or usual
        room = int(_MAX_RESULTS / sum(map(self._numbers_per_step, self._probe.heads.values())))
        self._steps_per_block = max(1, min(at_once, room))  # equal on all ranks
        if observers is not None:
            observers.append(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count steps on from where a resumed run stopped."""
        self._step = trainer.global_step

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Forget scores that the heads saw outside of training, such as in validation."""
        assert self._probe is not None
        self._probe.scores = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Keep the scores of a step, and write once a block of steps is complete."""
        # The batch's first step, counted from 0: with two optimizers all last ones are odd.
        step, self._step = self._step, trainer.global_step
        stepped = self._step > step  # not while gradients accumulate
        if stepped and _observers(pl_module) is None and step % self.every_n_steps == 0:
            self._keep(step, self.look())
        if self._complete:
            self._write(trainer)

    def look(self) -> dict[str, Tensor]:
        """Scores that the heads saw in this step, by the head's name."""
        assert self._probe is not None
        return dict(self._probe.scores)

    def note(self, step: int, seen: dict[str, Tensor]) -> None:
        """Keep a copy of the scores of a replayed step: the next step overwrites them."""
        if step % self.every_n_steps == 0:
            self._keep(step, {name: scores.clone() for name, scores in seen.items()})

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write everything: a run that resumes from this checkpoint has then lost no step."""
        self._write_everything(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write everything, with a picture of the last step."""
        self._write_everything(trainer)
        for name, (step, diagnostics) in self._undrawn.items():
            self._draw(trainer, name, step, diagnostics)
        self._undrawn = {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        self._detach(pl_module)

    def _detach(self, pl_module: LightningModule) -> None:
        if self._probe is not None:
            self._probe.detach()
            self._probe = None
        observers = getattr(pl_module, "step_observers", [])
        if self in observers:
            observers.remove(self)

    def _numbers_per_step(self, head: CategoricalHead) -> float:
        """How many numbers of a head are kept on the device for a step, on average."""
        draws = self.num_samples > 0
        return diagnostics_size(head) + draws * sampled_size(head) / self.sampled_every_n_steps

    def _keep(self, step: int, scores: dict[str, Tensor]) -> None:
        """Add the scores of a step to the block, and end a block that has all its steps."""
        assert self._probe is not None
        draws = 0 if step % self.sampled_every_n_steps else self.num_samples
        for name, each in scores.items():
            if name not in self._block:
                self._block[name] = HeadHistory(self._probe.heads[name], self._noise[name])
            self._block[name].add(step, each, draws)
        self._steps_in_block += 1
        if self._steps_in_block == self._steps_per_block:
            self._end_block()

    def _end_block(self) -> None:
        """Compute the diagnostics of the block; a block has the same steps on every rank."""
        if not self._steps_in_block:
            return
        if not self._seen and not self._block:
            assert self._probe is not None
            try:
                list(self._probe)  # raises, and says why no head was seen
            except RuntimeError as error:
                warnings.warn(f"FisherMonitor observes nothing: {error}", stacklevel=2)
        self._seen = True  # one warning is enough
        for history in self._block.values():
            history.compute()
        if self._block:
            self._complete.append(self._block)
        self._block, self._steps_in_block = {}, 0

    def _write_everything(self, trainer: Trainer) -> None:
        self._end_block()
        self._write(trainer, wait=True)

    def _write(self, trainer: Trainer, wait: bool = False) -> None:
        """Start to copy complete blocks to the host, and write the blocks copied before.

        Args:
            trainer: the trainer, with the loggers.
            wait: wait for the copies that start now, and write these blocks as well.
        """
        arrived, self._on_the_way = self._on_the_way, []
        for block in self._complete:
            self._on_the_way.append({name: block[name].send(trainer) for name in sorted(block)})
        self._complete = []
        if wait or not _copies_take_time(trainer):
            arrived, self._on_the_way = arrived + self._on_the_way, []
        for reports in arrived:
            for name, receive in reports.items():
                self._write_report(trainer, name, receive())

    def _write_report(self, trainer: Trainer, name: str, report: Report) -> None:
        assert self._probe is not None
        prefix, steps = self._prefix(name), report.steps
        tables = [
            table._replace(names=tuple(f"{prefix}/{each}" for each in table.names))
            for table in report.tables
        ]
        for table in tables:
            self.latest |= zip(table.names, table.values[-1].tolist(), strict=True)
        if not trainer.is_global_zero:
            return
        self._warn_of_nan(name, tables, report.problem)
        for logger in trainer.loggers:
            write_scalars(logger, tables)
        if not self.image_every_n_steps:
            return
        drawn = [i for i, step in enumerate(steps) if is_drawn(step, self.image_every_n_steps)]
        for i in drawn:
            self._draw(trainer, name, steps[i], report.diagnostics[i])
        self._undrawn[name] = (steps[-1], report.diagnostics[-1])
        if drawn[-1:] == [len(steps) - 1]:
            del self._undrawn[name]

    def _prefix(self, name: str) -> str:
        """How the tags of a head begin."""
        assert self._probe is not None
        return "fim" if len(self._probe.heads) == 1 else f"fim/{name}"

    def _draw(self, trainer: Trainer, name: str, step: int, diagnostics: Tensor) -> None:
        """Give the loggers a picture of G, unless G is not finite or too large."""
        assert self._probe is not None
        head = self._probe.heads[name]
        if head.num_scores**2 > MAX_PICTURE or not diagnostics.isfinite().all():
            return
        (matrix,) = matrices_of(head, diagnostics[None])
        limit = self._limits.setdefault(name, limit_of(matrix))
        picture = fisher_picture(matrix, head, limit, f"mean Fisher matrix, step {step}")
        add_image(trainer.loggers, f"{self._prefix(name)}/mean", picture, step)

    def _warn_of_nan(self, name: str, tables: list[Table], problem: str) -> None:
        """Warn once for each head that a number could not be computed, and why if known."""
        if name in self._warned or not any(bool(each.values.isnan().any()) for each in tables):
            return
        self._warned.add(name)
        lost = {
            step: [tag for tag, value in row.items() if value != value]
            for step, row in rows_of(tables).items()
        }
        step, tags = next((step, tags) for step, tags in lost.items() if tags)
        reason = f": {problem}" if problem else ""
        message = f"{', '.join(tags)} at step {step} could not be computed{reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _copies_take_time(trainer: Trainer) -> bool:
    """Whether a copy to the host arrives later: waiting for the copy would idle the device."""
    return trainer.strategy.root_device.type != "cpu"


def _observers(module: LightningModule) -> list[Any] | None:
    """The list of observers that a module calls at each replayed step; None if it replays none."""
    replays = getattr(module, "replays", False)
    return getattr(module, "step_observers", None) if replays else None


def write_scalars(logger: Logger, tables: list[Table]) -> None:
    """Give a logger all values of some tables."""
    if isinstance(logger, TensorBoardLogger):
        from catnat.callbacks import dashboard

        writer = logger.experiment._get_file_writer()
        for table in tables:
            dashboard.write_scalars(writer, *table)
        return
    for step, row in rows_of(tables).items():
        logger.log_metrics(row, step)
