"""Many models of one shape as one: torch.func stacks any StepModule, and one step trains all."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Optimizer

from catnat.cli.names import Options
from catnat.cuda_graph import make_capturable
from catnat.lightning_compat import configured_optimizers
from catnat.lit_modules.step_module import StepModule


class _Trained(nn.Module):
    """A model, and what it asks of its Trainer; forward is ``step_loss``, for functional_call."""

    def __init__(self, model: StepModule, device: torch.device, max_steps: int) -> None:
        super().__init__()
        self.model = model
        self.trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(root_device=device),
            max_steps=max_steps,
            estimated_stepping_batches=max_steps,
            optimizers=[],
            lr_scheduler_configs=[],
            world_size=1,
            global_rank=0,
            is_global_zero=True,
            precision="32-true",
        )

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        return self.model.step_loss(batch)


class Stack:
    """M models whose step is one batched step.

    The losses and gradients of all models are computed together. The parameters and buffers of each
    model are its part of the stacked ones, so its own optimizer updates them, whichever that is.

    Args:
        models: models of one class, with equal options except for learning rates.
        device: where they are trained.
        max_steps: number of steps; a schedule of the learning rate may use it.
    """

    def __init__(self, models: Sequence[StepModule], device: torch.device, max_steps: int) -> None:
        self.clip = models[0].gradient_clip
        self._trained = [_Trained(model.to(device), device, max_steps) for model in models]
        self.parameters, self.buffers = stack_module_state(self._trained)  # by name, (M, *)
        self.schedulers: list[Any] = []
        # Learning rates are read on the device where steps are captured.
        self._rates: list[tuple[Options, Tensor]] = []
        self.attach()
        for trained in self._trained:
            trained.trainer.optimizers = [self._add_optimizer(trained.model, device)]
            trained.model.on_train_start()
        first = self._trained[0]
        groups = first.trainer.optimizers[0].param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        self._names = [name for name, x in first.named_parameters() if id(x) in updated]

    def _add_optimizer(self, model: StepModule, device: torch.device) -> Optimizer:
        configured: Any = model.configure_optimizers()
        optimizers, schedulers = configured_optimizers(configured)
        kinds = {(x.interval, x.frequency, x.reduce_on_plateau) for x in schedulers}
        if len(optimizers) > 1 or kinds - {("step", 1, False)}:
            raise ValueError(
                f"batched, {type(model).__name__} may have one optimizer, and schedulers of every "
                "step that need no metric"
            )
        self.schedulers += [config.scheduler for config in schedulers]
        optimizer = optimizers[0]
        if device.type == "cuda":
            make_capturable(optimizer, device)
            self._rates += [(group, group["lr"]) for group in optimizer.param_groups]
        return optimizer

    def attach(self) -> None:
        """Make the models ready for steps, at the start and after an evaluation."""
        for number, trained in enumerate(self._trained):
            trained.model.trainer = trained.trainer
            # Lightning has moved it to the CPU.
            trained.model.to(trained.trainer.strategy.root_device).train()
            for name, parameter in trained.named_parameters():
                parameter.data = self.parameters[name].data[number]
            for name, stacked in self.buffers.items():
                module_name, _, buffer_name = name.rpartition(".")
                setattr(trained.get_submodule(module_name), buffer_name, stacked[number])

    def prepare_step(self, step: int) -> None:
        """Let every model set the numbers of a step: learning rates, temperatures and the like."""
        for trained in self._trained:
            trained.model.prepare_step(step)
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def step(self, batch: Any, one_batch: bool) -> Tensor:
        """A step of every model, on the device alone; returns the losses, (M,).

        Args:
            batch: one batch for all models, or one for each, (M, B, *).
            one_batch: whether all models get the same batch.
        """
        losses = vmap(
            partial(functional_call, self._trained[0]),
            in_dims=(0, None if one_batch else 0),
            randomness="different",
        )((self.parameters, self.buffers), (batch,))
        stacked = [self.parameters[name] for name in self._names]
        grads = torch.autograd.grad(losses.sum(), stacked, materialize_grads=True)
        grads = tuple(grad.contiguous() for grad in grads)  # as fused optimizers expect them
        if self.clip:
            norms = torch.stack([grad.reshape(len(losses), -1).norm(dim=1) for grad in grads])
            factor = (self.clip / (norms.norm(dim=0) + 1e-6)).clamp_max(1.0)  # as clip_grad_norm_
            grads = tuple(grad * factor.view(-1, *[1] * (grad.dim() - 1)) for grad in grads)
        for number, trained in enumerate(self._trained):
            for name, grad in zip(self._names, grads, strict=True):
                trained.get_parameter(name).grad = grad[number]
            trained.trainer.optimizers[0].step()
        return losses.detach()
