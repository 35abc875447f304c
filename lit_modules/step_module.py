"""StepModule: a Lightning module of which a subclass says the loss of a step."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from catnat.cuda_graph import (
    capturable_options,
    keep_kernels,
    set_learning_rate,
    why_not_captured,
)
from catnat.lit_modules.cuda_graph_steps import ReplayedSteps
from catnat.metrics import RowMeans
from catnat.rng import State, forked_random_state, separate_noise

# Of replayed steps: others change weights, or scale losses on the host.
_PRECISIONS = ("32-true", "bf16-mixed")


class StepModule(LightningModule):
    """A module that minimizes :meth:`step_loss`, and draws reproducible noise.

    Every rank has noise of its own. With the callback :class:`~catnat.callbacks.LastCheckpoint`
    random states are part of a checkpoint: a resumed run learns the same bit for bit as a run
    without interruption, if its loader resumes exactly, as those of catnat.datamodules do. A
    shuffled DataLoader of torch does not.

    :meth:`step_loss` also works under ``torch.func``: many models with stacked parameters and
    buffers take a step together by ``vmap(..., randomness="different")``.

    A subclass has :meth:`step_loss`, and makes its optimizer with :meth:`make_optimizer`. A
    subclass with a ``training_step`` of its own, or that optimizes by hand
    (``automatic_optimization = False``), is an ordinary LightningModule.

    On a CUDA device the steps are replayed as CUDA graphs, see :class:`ReplayedSteps`; they are the
    same steps. Hooks of single batches and optimizer steps are then not called for every step. That
    is for one GPU; strategies for several take eager steps.

    Two runs of one seed are the same bit for bit on a CPU, and on a GPU with
    ``Trainer(deterministic=True)``. Without it many kernels add up numbers in any order.

    Args:
        capture: replay steps as CUDA graphs. None: wherever that is possible. False: never. True:
            as None, with a warning that says why where it is not possible.
        gradient_clip: largest norm of the gradient; 0 for no limit.
    """

    def __init__(self, capture: bool | None = None, gradient_clip: float = 0.0) -> None:
        super().__init__()
        self.capture = capture
        self.gradient_clip = gradient_clip
        self.val_means = RowMeans({})  # of what validation_step measures; a subclass names it
        self.test_means = RowMeans({})  # the same of test_step
        self.step_observers: list[Any] = []  # of replayed steps, see ReplayedSteps
        self._replay: ReplayedSteps | None = None  # only during a run whose steps are replayed

    # -- what a subclass says ------------------------------------------------------------------

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a step, computed on the device alone: no logging, no ``item()``."""
        raise NotImplementedError

    def prepare_step(self, step: int) -> None:
        """Set the numbers that depend on the step; called before the step, on the host."""

    def logged_settings(self) -> dict[str, float]:
        """Numbers that are logged beside the loss."""
        return {}

    def why_host_needed(self) -> str | None:
        """Why the device cannot compute a step alone; None if it can."""
        return None

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is logged after an epoch of the stage "val" or "test".

        Args:
            stage: the stage.
            means: over all rows of all ranks that were added to ``val_means`` or ``test_means``.
        """
        return means

    # -- what a subclass uses ------------------------------------------------------------------

    @property
    def replays(self) -> bool:
        """Whether the steps of the present run are replayed; known from ``setup`` on."""
        return self._replay is not None

    def make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: Iterable[Any], **options: Any
    ) -> Optimizer:
        """An optimizer with the fastest kernels that device and precision allow.

        Args:
            kind: a class of optimizers such as ``torch.optim.Adam``.
            parameters: parameters or parameter groups.
            options: of the optimizer, such as ``lr``.
        """
        if self.replays:
            options |= capturable_options(kind)
        elif self._trainer is not None and self.trainer.precision == "32-true":
            # Elsewhere gradients may be scaled, and fused optimizers cannot clip them then.
            device = self.trainer.strategy.root_device.type  # the model is moved there later
            if device in ("cpu", "cuda") and "fused" in capturable_options(kind):
                options["fused"] = True
        return keep_kernels(kind(parameters, **options))

    def set_learning_rates(self, *rates: float) -> None:
        """Set the learning rate of each parameter group."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            set_learning_rate(group, rate, self.device if self.replays else None)

    def evaluation_noise(self, batch_idx: int) -> AbstractContextManager[None]:
        """Noise of an evaluated batch: the same each time, and without effect on training."""
        seed = batch_idx * self.trainer.world_size + self.global_rank
        return forked_random_state(self.device, seed)

    # -- Lightning's hooks ---------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check the precision, and decide whether steps are replayed; forget a run cut short."""
        if self.trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(
                f"precision {self.trainer.precision!r} keeps the weights in 16 bits, where small "
                "steps are lost; choose from 32-true, 64-true, 16-mixed, bf16-mixed"
            )
        self.val_means.reset()
        self.test_means.reset()
        if stage == "fit":
            StepModule.teardown(self, stage)
            reason = self._why_eager()
            if type(self).training_step is not StepModule.training_step:
                reason = f"{type(self).__name__} has a training_step"
            elif not self.automatic_optimization:
                raise ValueError("automatic_optimization = False needs a training_step of its own")
            on_cuda = self.trainer.strategy.root_device.type == "cuda"
            if reason is None:
                self._replay = ReplayedSteps(self)
                self.automatic_optimization = False
            elif self.capture or (self.capture is None and on_cuda):
                rank_zero_warn(f"steps are not replayed as CUDA graphs: {reason}")

    def on_fit_start(self) -> None:
        """Give each rank but the first noise of its own."""
        if self.global_rank:
            separate_noise(self.global_rank)

    def on_train_start(self) -> None:
        """Begin to replay steps, if they are replayed."""
        if self._replay is not None:
            self._replay.start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare the step of this batch."""
        self.prepare_step(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch, logged every ``log_every_n_steps`` steps."""
        if self._replay is not None:
            return self._replay.take(batch)
        loss = self.step_loss(batch)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log("train/loss", loss, prog_bar=True)
            self.log_dict(self.logged_settings())
        return loss

    def on_save_checkpoint(self, checkpoint: State | None = None) -> None:
        """Log the latest loss of replayed steps."""
        if self._replay is not None:
            self._replay.log()

    on_validation_start = on_train_end = on_save_checkpoint

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the Trainer says, otherwise to the norm ``gradient_clip``."""
        if gradient_clip_val is None:
            gradient_clip_val = self.gradient_clip
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_load_checkpoint(self, checkpoint: State) -> None:
        """Resume at the ``learning_rate`` of this model, not at that of the checkpoint."""
        rate = self.hparams.get("learning_rate")
        saved_rate = checkpoint.get("hyper_parameters", {}).get("learning_rate")
        if not rate or not saved_rate:
            return
        change = rate / saved_rate
        for optimizer in checkpoint.get("optimizer_states", ()):
            for group in optimizer["param_groups"]:
                group["lr"] *= change
        for scheduler in checkpoint.get("lr_schedulers", ()):
            scheduler["base_lrs"] = [base * change for base in scheduler.get("base_lrs", ())]

    def teardown(self, stage: str) -> None:
        """End replaying."""
        if self._replay is not None:
            self._replay = None
            self.automatic_optimization = True

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all rows of all ranks, and forget the rows.

        There are no rows where a subclass evaluates in its own way.
        """
        stage = "test" if self.trainer.testing else "val"
        rows = getattr(self, f"{stage}_means")
        if means := rows.compute():
            metrics = self.epoch_metrics(stage, means).items()
            self.log_dict({f"{stage}/{name}": x.float() for name, x in metrics}, sync_dist=True)
        rows.reset()

    on_test_epoch_end = on_validation_epoch_end

    def _why_eager(self) -> str | None:
        """Why steps are eager ones; None if they are replayed."""
        trainer = self.trainer
        strategy = trainer.strategy
        obstacles = {
            f"the strategy is {type(strategy).__name__}, not one device": (
                not isinstance(strategy, SingleDeviceStrategy)
            ),
            f"the precision is {trainer.precision}, not {' or '.join(_PRECISIONS)}": (
                trainer.precision not in _PRECISIONS
            ),
            "gradients are accumulated over batches": trainer.accumulate_grad_batches > 1,
            "the Trainer clips gradients; use the model's gradient_clip": (
                trainer.gradient_clip_val is not None
            ),
        }
        reason = why_not_captured(self.capture, strategy.root_device, obstacles)
        return reason or self.why_host_needed()
