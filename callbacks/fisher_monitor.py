"""FisherMonitor: how far the Fisher matrix of a head is from diagonal, while a model trains."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from catnat.callbacks.fisher_diagnostics import LARGEST, HeadHistory, Observation, histories_of
from catnat.callbacks.images import Draw, add_image, is_drawn
from catnat.callbacks.tensorboard import write_row
from catnat.checks import require_at_least
from catnat.heads.probe import HeadProbe
from catnat.rng import State

_MAX_RESULTS = 2**24  # numbers kept on the device before they are copied to the host


class FisherMonitor(Callback):
    """Writes diagnostics of the score-space Fisher matrix of every head in a model.

    G is the mean of the Fisher matrices over the latents and over the batch of a step. The batch
    includes all ranks and all batches whose gradients are accumulated. The monitor writes these
    tags:

    - ``fim/off_diagonal_mass``: sqrt(sum_{i!=j} G_ij^2 / sum_ij G_ij^2), the share of G's Frobenius
      norm off the diagonal. It is estimated from ``num_samples`` categories drawn for each row at
      every step, without a closed form. Half of the draws give an estimate A of G, and the other
      half give an independent estimate B. Products A_ij B_ij replace G_ij^2 in both sums, so there
      is no noise floor. Both are running sums, in which the weight of a step halves every 34
      observed steps. The mass is 0 if their ratio is negative. For sparsemax it is too small,
      because rare categories contribute most of its G but are hardly ever drawn.
    - ``fim/exact_off_diagonal_mass``: this share for the exact G of the step. It uses the closed
      form of the head, or differentiation if a subclass overrides the methods that the closed form
      assumes.
    - ``fim/saturated``: share of the scores in a flat region, where they get no gradient. It does
      not count scores that a mask fixes.
    - ``fim/picture``: the exact G as a picture, with positive entries in red, negative entries in
      blue, and lines for the levels of a tree. The monitor draws it at steps 0, 10, 100, 1000 and
      so on, and after the last step. All pictures share one color scale, unless an entry is larger
      than 1/4.

    With ``details=True``, it also writes:

    - ``fim_spectrum/condition_number``: largest over smallest eigenvalue of G on its support.
    - ``fim_sampled/off_diagonal_share``: the ratio whose root is ``fim/off_diagonal_mass``. It can
      be negative, and converges to the square of the exact mass.
    - ``fim/off_diagonal_mass_l1``: sum_{i!=j} |G_ij| / sum_ij |G_ij| of the exact G. It is 1/2 for
      softmax with any scores, because the rows of its G sum to zero, so it does not describe what
      the model learned.
    - ``fim_sampled/off_diagonal_mass_l1``: the l1 share of the mean of A and B of this step. The
      noise of the draws adds off-diagonal mass even to a diagonal G. This noise floor decreases
      with the number of draws (rows times samples): for natural with K = 8 and a hundred rows of
      zero scores, it is about 0.2 with 2 draws per row, 0.034 with 64, and 0.004 with 4096. Use
      this tag to compare with other implementations that draw.

    A 1 x 1 matrix has a mass of 0 and no other values. In a model with several heads, the tag
    contains the name of the head, ``fim/<name>/...``.

    The monitor uses the scores of the latest call of a head in a batch, and omits heads that were
    not called. It evaluates a head that has parameters after the update of the step. It uses its
    own random generator, so it does not affect training. It keeps scores on the device. After
    ``write_every_n_steps`` observed steps, it computes the diagnostics of all these steps and
    writes each under its own step. If an exception ends a run on one rank, the monitor writes the
    steps before it.

    The latest values are also metrics of the Trainer: ``EarlyStopping("fim/saturated")`` works.

    A value that cannot be computed is NaN, so the monitor never ends a run. If an error is the
    cause, the monitor warns once per head. For a head with more than 8192 scores it draws no
    categories, and if G is not diagonal it writes no tags, because the matrices would be too large.

    Args:
        every_n_steps: number of optimizer steps between observed steps.
        num_samples: number of draws per row (M), at least 2; 0 omits the estimated mass.
        image_every_n_steps: number of steps between additional pictures of G; 0 for no pictures.
            Pictures need a logger that supports images.
        write_every_n_steps: number of observed steps that are written at once. It is smaller if G
            is very large.
        details: whether to write condition numbers, l1 masses and the estimated share.
    """

    sees_blocks = True  # of replayed steps: look and note are called for each of them

    def __init__(
        self,
        every_n_steps: int = 1,
        num_samples: int = 2,
        image_every_n_steps: int = 10_000,
        write_every_n_steps: int = 50,
        details: bool = False,
    ) -> None:
        require_at_least(1, every_n_steps=every_n_steps, write_every_n_steps=write_every_n_steps)
        require_at_least(0, image_every_n_steps=image_every_n_steps)
        require_at_least(2 if num_samples else 0, num_samples=num_samples)
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.image_every_n_steps = image_every_n_steps
        self.write_every_n_steps = write_every_n_steps
        self.details = details
        self.latest: dict[str, float] = {}  # latest value of every tag; the same on all ranks
        self._attached = ExitStack()  # to be undone when a run ends
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, list[float]] = {}  # of the sampled share, by head
        self._histories: dict[str, HeadHistory] = {}  # of each head that is observed
        self._sent: list[Callable[[], list[Observation]]] = []  # on their way to the host
        self._steps_to_write = 0
        self._silent = True  # no head was called so far, and no warning says so
        self._accumulates = False  # within a step of several batches
        self._pictures: dict[str, tuple[int, Draw]] = {}  # of a head's latest step, by tag

    # -- Lightning's hooks -------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The latest values, and the sums of the sampled shares."""
        return deepcopy({"shares": self._sums, "latest": self.latest})

    def load_state_dict(self, state_dict: State) -> None:
        """Restore values and sums."""
        self.latest = state_dict["latest"]
        self._sums = state_dict["shares"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint restores the state of this run."""
        if stage == "fit":
            self._reset()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call: a hook that a compiled model gets later never fires."""
        self._probe = self._attached.enter_context(HeadProbe(pl_module))
        heads = self._probe.heads
        seed = f"0 {trainer.global_rank}"
        self._histories = histories_of(heads, self.num_samples, self._sums, seed, self.details)
        limit = _MAX_RESULTS // sum(3 * head.num_scores**2 for head in heads.values())
        self._steps_at_once = max(1, min(self.write_every_n_steps, limit))  # on all ranks

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Forget scores that the heads saw outside of training, such as in validation."""
        self._probe.scores = {}
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Keep the scores of a batch, and write once there are enough steps."""
        self._accumulates = trainer.global_step == self._step
        is_replayed = getattr(pl_module, "replays", False)
        if not is_replayed:
            self.note(self._step, self.look())
        ends_epoch = trainer.is_last_batch  # callbacks such as EarlyStopping look there
        if self._steps_to_write >= self._steps_at_once or (ends_epoch and self._steps_to_write):
            self._write(trainer, wait=ends_epoch or not is_replayed)
            for tag, value in self.latest.items():
                pl_module.log(tag, value, logger=False)

    def look(self) -> dict[str, Tensor]:
        """Scores that the heads saw in this batch, by the head's name."""
        return dict(self._probe.scores)

    def note(self, step: int, seen: dict[str, Tensor]) -> None:
        """Keep a copy of the scores of a step: the next replayed step overwrites them."""
        if step % self.every_n_steps:
            return
        for name in seen.keys() & self._histories.keys():
            self._histories[name].add(step, seen[name])
            self._silent = False
        if not self._accumulates:
            self._steps_to_write += 1
            for history in self._histories.values():
                history.end_step()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Write all complete steps, so that a run that resumes from this checkpoint loses none.

        A part of a step is not written, because its gradients are not in the checkpoint.
        """
        if not self._accumulates:
            self._write_everything(trainer)
        if "callbacks" in checkpoint:  # Lightning took the state before
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the steps before the exception; several ranks would wait for each other."""
        if trainer.world_size == 1:
            with suppress(Exception):  # the exception itself is what the user has to see
                self._write_everything(trainer)
        self._attached.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write everything, with a picture of the last step."""
        self._write_everything(trainer)
        for tag, (step, draw) in self._pictures.items():
            if self.image_every_n_steps and not is_drawn(step, self.image_every_n_steps):
                add_image(trainer.loggers, tag, draw, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        self._attached.close()

    def _write(self, trainer: Trainer, wait: bool) -> None:
        """Write the steps that were kept, which are the same on every rank.

        Without waiting, earlier steps are written: the latest are still on their way to the host
        while further steps are replayed.
        """
        if self._steps_to_write and self._silent:
            self._silent = False
            reason = f"no head of at most {LARGEST} scores was called in training as head(scores)"
            warnings.warn(f"FisherMonitor observes nothing: {reason}", stacklevel=2)
        self._steps_to_write = 0
        arrived = self._sent
        self._sent = [history.send(trainer) for history in self._histories.values()]
        if wait:
            arrived, self._sent = arrived + self._sent, []
        for receive in arrived:
            for step, row, picture_tag, draw in receive():
                self.latest |= row
                if trainer.is_global_zero:
                    self._pictures[picture_tag] = (step, draw)
                    for logger in trainer.loggers:
                        write_row(logger, row, step)
                    if is_drawn(step, self.image_every_n_steps):
                        add_image(trainer.loggers, picture_tag, draw, step)

    def _write_everything(self, trainer: Trainer) -> None:
        self._write(trainer, wait=True)
        for logger in trainer.loggers:
            logger.save()  # TensorBoard's writer keeps values for two minutes
