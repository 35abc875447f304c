"""StepModule: a Lightning module whose subclasses implement the loss of a step."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from catnat.compiling import not_compiled
from catnat.cuda_graph import capturable_options, keep_kernels
from catnat.lightning_compat import trainer_of
from catnat.lit_modules.cuda_graph_steps import ReplayLoop
from catnat.metrics import RowMeans
from catnat.rng import State, forked_random_state, separate_noise


class StepModule(LightningModule):
    """A module that minimizes :meth:`step_loss`, and draws reproducible noise.

    Each rank has its own noise. With the callback :class:`~catnat.callbacks.LastCheckpoint` random
    states are part of a checkpoint: a resumed run gives bit for bit the results of an uninterrupted
    run if its loader resumes exactly. The loaders of catnat.datamodules do; a shuffled DataLoader
    of torch does not.

    :meth:`step_loss` also works under ``torch.func``: many models with stacked parameters and
    buffers take a step together by ``vmap(..., randomness="different")``.

    Subclasses implement :meth:`step_loss`. They may override :meth:`parameter_groups`, or
    :meth:`configure_optimizers` as in any LightningModule. A subclass that overrides
    ``training_step``, or that optimizes manually (``automatic_optimization = False``), is an
    ordinary LightningModule.

    With ``capture=True``, a CUDA device replays the same steps as CUDA graphs, see
    :class:`~catnat.lit_modules.cuda_graph_steps.ReplayLoop`. Otherwise, steps are eager and a
    warning gives the reason: hooks between a batch and its update, several devices, or an optimizer
    other than Adam, AdamW and SGD.

    Two runs with equal seeds are equal bit for bit on a CPU, and on a GPU with
    ``Trainer(deterministic=True)``. Otherwise, many GPU kernels add numbers in an arbitrary order.

    Args:
        capture: whether to replay training steps as CUDA graphs if possible.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        learning_rate: learning rate of the optimizer; None for the optimizer's own.
        optimizer: function that makes the optimizer of given parameters, such as
            ``torch.optim.SGD`` or ``functools.partial(torch.optim.AdamW, weight_decay=0.1)``; None
            for Adam.
        lr_scheduler: function that makes the learning rate scheduler of a given optimizer, such as
            ``functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000)``. It is stepped
            after every optimizer step; a ``ReduceLROnPlateau`` after every validation, with
            val/loss or its attribute ``monitor``. None for a constant learning rate.
    """

    rate_names: tuple[str, ...] = (
        "learning_rate",
    )  # hyperparameters with the rates of the parameter groups

    def __init__(
        self,
        capture: bool = False,
        gradient_clip: float = 0.0,
        learning_rate: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        for name, function in {"optimizer": optimizer, "lr_scheduler": lr_scheduler}.items():
            if not (function is None or callable(function)):
                raise ValueError(
                    f"{name} must be a class or a function, such as torch.optim.SGD, "
                    f"got {function!r}"
                )
        self.capture = capture
        self.gradient_clip = gradient_clip
        self.learning_rate = learning_rate
        self.make_own_optimizer = optimizer
        self.make_own_scheduler = lr_scheduler
        self.val_means = RowMeans({})  # of what validation_step measures; a subclass names it
        self.test_means = RowMeans({})  # the same of test_step

    # -- what subclasses override --------------------------------------------------------------

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a step, computed on the device alone: no logging, no ``item()``."""
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer, with a learning rate ``lr`` where one is set."""
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return [{"params": list(self.parameters()), **rate}]

    def prepare_step(self, step: int) -> None:
        """Set the numbers that depend on the step; called before the step, on the host."""

    def logged_settings(self) -> dict[str, float]:
        """Numbers that are logged beside the loss."""
        return {}

    def why_host_needed(self) -> str | None:
        """Why the device cannot compute a step alone; None if it can."""
        return None

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics to log after an epoch of the stage "val" or "test".

        Args:
            stage: the stage.
            means: over all rows of all ranks that were added to ``val_means`` or ``test_means``.
        """
        return means

    # -- what subclasses use -------------------------------------------------------------------

    @property
    def replays(self) -> bool:
        """Whether the steps of the present run are replayed; known from the first batch on."""
        return ReplayLoop.of(self) is not None

    def make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: Iterable[Any], **options: Any
    ) -> Optimizer:
        """An optimizer with the fastest kernels that device and precision allow.

        Args:
            kind: a class of optimizers such as ``torch.optim.Adam``.
            parameters: parameters or parameter groups.
            options: options of the optimizer, such as ``lr``.
        """
        trainer = trainer_of(self)
        if trainer is not None and trainer.precision == "32-true":
            # Elsewhere gradients may be scaled, and fused optimizers cannot clip them then.
            device = trainer.strategy.root_device.type  # the model is moved there later
            if device in ("cpu", "cuda") and "fused" in capturable_options(kind):
                options["fused"] = True
        return keep_kernels(kind(parameters, **options))

    @not_compiled
    def evaluation_noise(self, batch_idx: int) -> AbstractContextManager[None]:
        """Noise of an evaluated batch, equal in every evaluation and separate from training."""
        seed = batch_idx * self.trainer.world_size + self.global_rank
        return forked_random_state(self.device, seed)

    # -- Lightning's hooks ---------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer, and the scheduler if there is one.

        Raises:
            ValueError: the optimizer brings another learning rate than ``learning_rate``.
        """
        groups = self.parameter_groups()
        if self.make_own_optimizer is None:
            optimizer = self.make_optimizer(torch.optim.Adam, groups)
        else:
            optimizer = keep_kernels(self.make_own_optimizer(groups))
            _check_learning_rate(optimizer, self.learning_rate)
        if self.make_own_scheduler is None:
            return optimizer
        scheduler: Any = self.make_own_scheduler(optimizer)
        plan = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = getattr(scheduler, "monitor", "val/loss")
            plan = {"scheduler": scheduler, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": plan}  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        """Check the precision, and forget the rows of a run that was cut short."""
        if self.trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(
                f"precision {self.trainer.precision!r} keeps the weights in 16 bits, where small "
                "steps are lost; choose from 32-true, 64-true, 16-mixed, bf16-mixed"
            )
        has_no_step = type(self).training_step is StepModule.training_step
        if has_no_step and not self.automatic_optimization:
            raise ValueError("automatic_optimization = False needs a training_step of its own")
        self.val_means.reset()
        self.test_means.reset()

    def on_fit_start(self) -> None:
        """Give each rank but the first noise of its own."""
        if self.global_rank:
            separate_noise(self.global_rank)

    def on_train_start(self) -> None:
        """Begin to replay steps, if that is asked for and possible."""
        ReplayLoop.start(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare the step of this batch."""
        self.prepare_step(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch, logged every ``log_every_n_steps`` steps."""
        loss = self.step_loss(batch)
        self._log_step(loss)
        return loss

    @not_compiled  # it reads the number of the step
    def _log_step(self, loss: Tensor) -> None:
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log("train/loss", loss, prog_bar=True)
            self.log_dict(self.logged_settings())

    def on_save_checkpoint(self, checkpoint: State) -> None:
        """Log the latest loss of replayed steps; save the optimizer as an eager run would."""
        self.on_validation_start()
        loop = ReplayLoop.of(self)
        if loop is not None and "optimizer_states" in checkpoint:
            states = checkpoint["optimizer_states"]
            checkpoint["optimizer_states"] = [loop.portable(state) for state in states]

    def on_validation_start(self) -> None:
        """Log the latest loss of replayed steps."""
        loop = ReplayLoop.of(self)
        if loop is not None:
            loop.log()

    on_train_end = on_validation_start

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the Trainer is configured, or to the norm ``gradient_clip``."""
        if gradient_clip_val is None:
            gradient_clip_val = self.gradient_clip
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_load_checkpoint(self, checkpoint: State) -> None:
        """Resume at the learning rates of this model, not at those of the checkpoint.

        A checkpoint of another head gets a warning: its weights may fit, but mean something else.
        """
        saved = checkpoint.get("hyper_parameters", {})
        for name in ("head", "head_options"):
            before, now = saved.get(name) or None, self.hparams.get(name) or None
            if name in saved and before != now:
                rank_zero_warn(f"the checkpoint has {name} {before!r}, this model {now!r}")
        changes = [
            self.hparams[name] / saved[name] if self.hparams.get(name) and saved.get(name) else 1.0
            for name in self.rate_names
        ]
        if all(change == 1 for change in changes):
            return
        for optimizer in checkpoint.get("optimizer_states", ()):
            groups = optimizer["param_groups"]
            for group, change in zip(groups, _for_groups(changes, len(groups)), strict=True):
                group["lr"] *= change
        for scheduler in checkpoint.get("lr_schedulers", ()):
            _change_base_rates(scheduler, changes)

    def teardown(self, stage: str) -> None:
        """Stop replaying."""
        ReplayLoop.stop(self)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all rows of all ranks, and forget the rows.

        A subclass with its own evaluation has no rows.
        """
        stage = "test" if self.trainer.testing else "val"
        rows = getattr(self, f"{stage}_means")
        if means := rows.compute():
            metrics = self.epoch_metrics(stage, means).items()
            self.log_dict({f"{stage}/{name}": x.float() for name, x in metrics}, sync_dist=True)
        rows.reset()

    on_test_epoch_end = on_validation_epoch_end


def _for_groups(changes: list[float], number: int) -> list[float]:
    """The change of each group; other groups, which a subclass may make, follow the first one."""
    return changes if number == len(changes) else changes[:1] * number


def _change_base_rates(scheduler: State, changes: list[float]) -> None:
    """Multiply the first rates in the state of a scheduler and of the schedulers inside it."""
    if rates := scheduler.get("base_lrs"):
        pairs = zip(rates, _for_groups(changes, len(rates)), strict=True)
        scheduler["base_lrs"] = [rate * change for rate, change in pairs]
    for inner in scheduler.get("_schedulers", ()):  # of SequentialLR and ChainedScheduler
        _change_base_rates(inner, changes)


def _check_learning_rate(optimizer: Optimizer, learning_rate: float | None) -> None:
    """Raise a ValueError if an optimizer was given another learning rate than the model."""
    parameter = inspect.signature(type(optimizer)).parameters.get("lr")
    own_rate = optimizer.defaults.get("lr")
    is_default = parameter is not None and own_rate == parameter.default
    if learning_rate is not None and not is_default and own_rate != learning_rate:
        raise ValueError(
            f"learning_rate is {learning_rate:g}, but lr of the optimizer "
            f"{type(optimizer).__name__} is {own_rate}: give only one of them"
        )
