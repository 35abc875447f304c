"""Many models of one shape as one: torch.func stacks any StepModule, and one step trains all.

Each model begins with the weights of its seed and sees the batches that ``train.py`` would show it;
its noise is another, drawn for all models at once. Models of a group differ in seed, learning rates
and data alone. On a CUDA device a step of the whole group is one CUDA graph.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.core import optimizer as lightnings
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from catnat import CategoricalHead
from catnat.callbacks.fisher_diagnostics import exact_diagnostics, exact_rows
from catnat.cuda_graph import StepGraph, make_capturable
from catnat.lit_modules.step_module import StepModule
from catnat.probe import HeadProbe
from catnat.rng import forked_random_state

_STEPS_AHEAD = 40  # of the host, before it waits for the device
# Options of the Trainer that would change what is learned or measured; a group knows none of them.
_USUAL = {"precision": "32-true", "accumulate_grad_batches": "1", "gradient_clip_val": "None",
          "num_devices": "1"}  # fmt: skip
_USUAL |= dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), "1.0")
Metrics = dict[str, Any]
Curve = list[tuple[int, Metrics]]  # metrics by step


@dataclass
class Member:
    """A model with its data, as ``train.py`` would begin it.

    Attributes:
        model: with the weights that its seed gives.
        data: not yet set up.
        seed: of weights and noise.
        options: of the Trainer: max_steps, val_check_interval, accelerator.
        group: equal for models that can be trained together.
        same_data: equal for models with equal data.
        folder: where curves, weights and metrics are written; None: nowhere.
        curve: what was seen in training.
        failure: why the model was given up: scores are not finite; empty if it was not.
    """

    model: StepModule
    data: LightningDataModule
    seed: int
    options: dict[str, Any]
    group: str
    same_data: str
    folder: Path | None = None
    curve: Curve = field(default_factory=list)
    failure: str = ""


def build(arguments: Sequence[str]) -> Member:
    """The model and the data of a command line of ``train.py``."""
    from catnat.cli.lightning import CatnatCLI

    cli = CatnatCLI(list(arguments), run=False)
    options = {name: getattr(cli.trainer, name) for name in ("max_steps", "val_check_interval")}
    options["accelerator"] = cli.config.trainer.accelerator
    other = [name for name, usual in _USUAL.items() if str(getattr(cli.trainer, name)) != usual]
    other += [name for name in ("callbacks", "max_time", "max_epochs") if cli.config.trainer[name]]
    if other:
        raise ValueError(f"--engine batched takes no {' and no '.join(other)}")
    of_model, of_data = (cli.config[name].init_args.as_dict() for name in ("model", "data"))
    seed = cli.config.seed_everything
    return member(cli.model, cli.datamodule, seed, options, of_model, of_data)


def member(
    model: Any,
    data: LightningDataModule,
    seed: int,
    options: dict[str, Any],
    of_model: dict[str, Any],
    of_data: dict[str, Any],
) -> Member:
    """A model with what it may be grouped by: all options but seed, learning rates and data."""
    if not isinstance(model, StepModule) or type(model).training_step != StepModule.training_step:
        raise ValueError(
            f"{type(model).__name__}: only a StepModule without a training_step is trained batched"
        )
    for name in ("max_steps", "val_check_interval"):
        if not isinstance(options.get(name), int) or options[name] < 1:
            raise ValueError(f"{name} must be a number of steps, got {options.get(name)}")
    same = {name: value for name, value in of_model.items() if "learning_rate" not in name}
    kinds = [f"{type(each).__module__}.{type(each).__qualname__}" for each in (model, data)]
    group, same_data = (
        json.dumps(each, sort_keys=True, default=str)
        for each in ([kinds, same, of_data.get("batch_size"), options], [kinds[1], of_data])
    )
    return Member(model, data, seed, options, group, same_data)


def groups(members: Sequence[Member], most: int) -> list[list[Member]]:
    """Members that are trained together, at most so many at once."""
    found: dict[str, list[Member]] = {}
    for each in members:
        found.setdefault(each.group, []).append(each)
    return [some[i : i + most] for some in found.values() for i in range(0, len(some), most)]


# -- the models as one -----------------------------------------------------------------------------


class _StepLoss(nn.Module):
    """``step_loss`` as forward, which functional_call calls."""

    def __init__(self, model: StepModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        return self.model.step_loss(batch)


class _Alone:
    """What a model asks of its Trainer while it is trained."""

    world_size, global_rank, is_global_zero, log_every_n_steps = 1, 0, True, 0
    precision, overfit_batches = "32-true", 0

    def __init__(self, device: torch.device, max_steps: int) -> None:
        self.strategy = SimpleNamespace(root_device=device)
        self.estimated_stepping_batches = self.max_steps = max_steps
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []


class Stack:
    """M models whose step is one batched step.

    The losses and gradients of all models are computed together. The parameters and buffers of each
    model are its part of the stacked ones, so its own optimizer updates them, whichever that is.

    Args:
        models: of one class, with equal options but for their learning rates.
        device: where they are trained.
        max_steps: of the run, which a schedule of the learning rate may depend on.
    """

    def __init__(self, models: Sequence[StepModule], device: torch.device, max_steps: int) -> None:
        self.models = [each.to(device) for each in models]
        self.base, self.clip = _StepLoss(self.models[0]), self.models[0].gradient_clip
        self.parameters, self.buffers = stack_module_state(list(self.models))  # by name, (M, *)
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        # Learning rates are read on the device where steps are captured.
        self._rates: list[tuple[dict[str, Any], Tensor]] = []
        self.alone = [_Alone(device, max_steps) for _ in models]
        self.attach()
        for model, alone in zip(self.models, self.alone, strict=True):
            given: Any = model.configure_optimizers()
            (made, *more), plans, monitor = lightnings._configure_optimizers(given)
            steps = lightnings._configure_schedulers_automatic_opt(plans, monitor)
            kinds = {(each.interval, each.frequency, each.reduce_on_plateau) for each in steps}
            if more or kinds - {("step", 1, False)}:
                can = "one optimizer, and schedulers of every step that need no metric"
                raise ValueError(f"batched, {type(model).__name__} may have {can}")
            self.schedulers += [each.scheduler for each in steps]
            if device.type == "cuda":
                make_capturable(made, device)
                self._rates += [(group, group["lr"]) for group in made.param_groups]
            self.optimizers.append(made)
            alone.optimizers = [made]
            model.on_train_start()
        updated = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
        self._trained = [n for n, p in self.models[0].named_parameters() if id(p) in updated]

    def attach(self) -> None:
        """Make the models ready for steps, at the start and after an evaluation."""
        for number, (model, alone) in enumerate(zip(self.models, self.alone, strict=True)):
            model.trainer = alone  # type: ignore[assignment]
            model.to(alone.strategy.root_device).train()  # Lightning has moved it to the CPU
            for name, parameter in model.named_parameters():
                parameter.data = self.parameters[name].data[number]
            for name, stacked in self.buffers.items():
                place, _, own = name.rpartition(".")
                setattr(model.get_submodule(place), own, stacked[number])

    def prepare_step(self, step: int) -> None:
        """Let every model set the numbers of a step: learning rates, temperatures and the like."""
        for model in self.models:
            model.prepare_step(step)
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def step(self, batch: Any, one_batch: bool) -> Tensor:
        """A step of every model, on the device alone; returns the losses, (M,).

        Args:
            batch: of all models together, or of each model, (M, B, *).
            one_batch: whether it is the same for all.
        """
        losses = vmap(self._loss, in_dims=(0, 0, None if one_batch else 0), randomness="different")(
            self.parameters, self.buffers, batch
        )
        stacked = [self.parameters[name] for name in self._trained]
        found = torch.autograd.grad(losses.sum(), stacked, materialize_grads=True)
        grads = [each.contiguous() for each in found]  # fused kernels take them to lie like weights
        if self.clip:
            norms = torch.stack([each.reshape(len(losses), -1).norm(dim=1) for each in grads])
            factor = (self.clip / (norms.norm(dim=0) + 1e-6)).clamp_max(1.0)  # as clip_grad_norm_
            grads = [each * factor.view(-1, *[1] * (each.dim() - 1)) for each in grads]
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for name, each in zip(self._trained, grads, strict=True):
                model.get_parameter(name).grad = each[number]
            optimizer.step()
        return losses.detach()

    def _loss(self, parameters: Any, buffers: Any, batch: Any) -> Tensor:
        state = {f"model.{name}": each for name, each in {**parameters, **buffers}.items()}
        loss: Tensor = functional_call(self.base, state, (batch,))
        return loss


# -- training --------------------------------------------------------------------------------------


class Group:
    """Members of one group, which are trained, validated and tested."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members, first = members, members[0]
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.trainer = Trainer(
            accelerator=first.options["accelerator"],
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.device = self.trainer.strategy.root_device
        self.max_steps = first.options["max_steps"]
        self.interval = first.options["val_check_interval"]
        self.data = {each.same_data: each.data for each in members}
        for each in self.data.values():
            each.trainer = self.trainer
            each.prepare_data()
            each.setup("fit")
        which = [list(self.data).index(each.same_data) for each in members]
        self.which = torch.tensor(which, device=self.device)
        self.stack = Stack([each.model for each in members], self.device, self.max_steps)
        self._writers: dict[Path, Any] = {}  # of event files, by the folder of a run

    def train(self, say: Callable[[str], None]) -> list[Metrics]:
        """Train to the end, then test every model; the metrics of each, none of one given up."""
        torch.manual_seed(self.members[0].seed)  # the noise of a group is that of its first seed
        cuda = self.device.type == "cuda"
        take: Callable[[Any], Tensor] = StepGraph(self._step) if cuda else self._step
        batches, since, spent = self._batches(), 0, time.monotonic()
        for step in range(self.max_steps):
            self.stack.prepare_step(step)
            losses = take(next(batches))
            for each in self.stack.schedulers:
                each.step()
            done = step + 1
            if cuda and done % _STEPS_AHEAD == 0:
                torch.cuda.current_stream().synchronize()
            if done % self.interval == 0 or done == self.max_steps:
                rate = len(self.members) * (done - since) / (time.monotonic() - spent)
                models = f"{len(self.members)} models: step {done} of {self.max_steps}"
                say(f"{models}, {rate:,.0f} model-steps/s")
                for one, loss in zip(self.members, losses.tolist(), strict=True):
                    found = self._evaluated(self.trainer.validate, one)
                    one.curve.append((done, {"train/loss": loss, **found}))
                    self._log(one, done, one.curve[-1][1])
                self.stack.attach()
                since, spent = done, time.monotonic()
        return [self._tested(one) for one in self.members]

    def _step(self, batch: Any) -> Tensor:
        one = len(self.data) == 1
        return self.stack.step(batch if one else tree_map(lambda x: x[self.which], batch), one)

    def _batches(self) -> Iterator[Any]:
        """Batches without end, in the order of ``train.py``; of D > 1 data sets, (D, B, *)."""
        loaders = [chain.from_iterable(repeat(x.train_dataloader())) for x in self.data.values()]
        move = self.members[0].model.transfer_batch_to_device
        for found in zip(*loaders, strict=True):
            batches = [move(each, self.device, 0) for each in found]
            yield batches[0] if len(batches) == 1 else default_collate(batches)

    # -- results -------------------------------------------------------------------------------

    def _evaluated(self, evaluate: Callable[..., Any], one: Member) -> Metrics:
        if one.failure:
            return {}
        data = self.data[one.same_data]
        try:
            with warnings.catch_warnings(action="ignore"):
                return dict(evaluate(one.model, datamodule=data, verbose=False)[0])
        except ValueError as error:  # its scores are not finite
            one.failure = str(error).splitlines()[0]
            return {}

    def _tested(self, one: Member) -> Metrics:
        """The last validation, the test and the Fisher diagnostics of a model."""
        tested = self._evaluated(self.trainer.test, one)
        if one.failure:
            return {}
        batch = next(iter(self.data[one.same_data].val_dataloader()))
        last = {name: x for name, x in one.curve[-1][1].items() if name.startswith("val/")}
        found = last | tested | fisher_diagnostics(one.model, batch)
        if one.folder is not None:
            self._write(one, one.folder, found)
            self._writers.pop(one.folder).close()
        source = getattr(self.data[one.same_data], "hparams", {}).get("source")
        return found | ({"data_source": source} if source else {})

    def _log(self, one: Member, step: int, values: Metrics) -> None:
        """Write points of the curves at once: a group that is stopped keeps what it has seen."""
        from torch.utils.tensorboard import SummaryWriter

        if one.folder is None:
            return
        if one.folder not in self._writers:
            self._writers[one.folder] = SummaryWriter(str(one.folder / "version_0"))
        for name, value in values.items():
            self._writers[one.folder].add_scalar(name, value, step)
        self._writers[one.folder].flush()

    def _write(self, one: Member, folder: Path, metrics: Metrics) -> None:
        """What ``train.py`` would leave of a run that has ended: weights and metrics."""
        self._log(one, self.max_steps, metrics)
        version = folder / "version_0"
        path = version / "checkpoints" / "final.ckpt"
        path.parent.mkdir(exist_ok=True)
        self.trainer.save_checkpoint(path, weights_only=True)
        (version / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


@torch.no_grad()
def fisher_diagnostics(model: StepModule, batch: Any) -> Metrics:
    """What the Fisher matrices of a model's heads look like on a batch, as means over its rows.

    The names are those of the monitor, without fim_sampled; with several heads fim/<head>/saturated
    and the like.
    """
    if not any(isinstance(each, CategoricalHead) for each in model.modules()):
        return {}
    model.eval()
    batch = model.transfer_batch_to_device(batch, model.device, 0)
    with HeadProbe(model) as probe, forked_random_state(model.device, 0):
        model.step_loss(batch)
    found: Metrics = {}
    seen = list(probe)
    for name, head, scores in seen:
        scores = scores.reshape(1, -1, head.num_scores)
        (row,) = exact_rows(head, exact_diagnostics(head, scores))
        middle = "/" if len(seen) == 1 else f"/{name}/"
        found |= {tag.replace("/", middle): value for tag, value in row.items()}
    return found
