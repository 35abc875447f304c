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
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import SGD, Adam, Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from catnat import CategoricalHead
from catnat.cuda_graph import DeviceScalar, StepGraph
from catnat.fisher import condition_number, off_diagonal_mass
from catnat.lit_modules.step_module import StepModule
from catnat.probe import HeadProbe
from catnat.rng import forked_random_state

_PLAIN = {"weight_decay": 0, "momentum": 0, "amsgrad": False, "maximize": False, "nesterov": False}
_STEPS_AHEAD = 40  # of the host, before it waits for the device
Metrics = dict[str, float]
Curve = list[tuple[int, Metrics]]  # metrics by step


@dataclass
class Member:
    """A model with its data, as ``train.py`` would begin it.

    Attributes:
        model: with the weights that its seed gives.
        data: not yet set up.
        seed: of weights and noise.
        trainer: options of the Trainer.
        group: equal for models that can be trained together.
        same_data: equal for models with equal data.
        folder: where curves, weights and metrics are written; None: nowhere.
        curve: what was seen in training.
        failure: why the model was given up; empty if it was not.
    """

    model: StepModule
    data: LightningDataModule
    seed: int
    trainer: dict[str, Any]
    group: str
    same_data: str
    folder: Path | None = None
    curve: Curve = field(default_factory=list)
    failure: str = ""


def build(arguments: Sequence[str]) -> Member:
    """The model and the data of a command line of ``train.py``."""
    from catnat.cli.lightning import CatnatCLI

    cli = CatnatCLI(list(arguments), run=False)
    trainer = {name: getattr(cli.trainer, name) for name in ("max_steps", "val_check_interval")}
    trainer["accelerator"] = cli.config.trainer.accelerator
    of_model, of_data = (cli.config[name].init_args.as_dict() for name in ("model", "data"))
    seed = cli.config.seed_everything
    return member(cli.model, cli.datamodule, seed, trainer, of_model, of_data)


def member(
    model: Any,
    data: LightningDataModule,
    seed: int,
    trainer: dict[str, Any],
    of_model: dict[str, Any],
    of_data: dict[str, Any],
) -> Member:
    """A model with what it may be grouped by: all options but seed, learning rates and data."""
    if not isinstance(model, StepModule) or type(model).training_step != StepModule.training_step:
        raise ValueError(
            f"{type(model).__name__} has no step_loss: only a StepModule is trained batched"
        )
    for name in ("max_steps", "val_check_interval"):
        if not isinstance(trainer.get(name), int) or trainer[name] < 1:
            raise ValueError(f"{name} must be a number of steps, got {trainer.get(name)}")
    same = {name: value for name, value in of_model.items() if "learning_rate" not in name}
    kinds = [f"{type(each).__module__}.{type(each).__qualname__}" for each in (model, data)]
    group = [kinds, same, of_data.get("batch_size"), trainer["max_steps"]]
    group += [trainer["val_check_interval"], trainer.get("accelerator")]
    return Member(
        model,
        data,
        seed,
        trainer,
        json.dumps(group, sort_keys=True, default=str),
        json.dumps([kinds[1], of_data], sort_keys=True, default=str),
    )


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

    def __init__(self, optimizer: Optimizer, max_steps: int) -> None:
        self.optimizers = [optimizer]
        self.lr_scheduler_configs: list[Any] = []
        self.estimated_stepping_batches = self.max_steps = max_steps


class Stack:
    """M models whose step is one batched step.

    Args:
        models: of one class, with equal options but for their learning rates.
        device: where they are trained.
        max_steps: of the run, which a schedule of the learning rate may depend on.

    Attributes:
        parameters: of all models by name, (M, *).
        buffers: the same.
    """

    def __init__(self, models: Sequence[StepModule], device: torch.device, max_steps: int) -> None:
        self.models = [each.to(device).train() for each in models]
        made: list[Any] = [each.configure_optimizers() for each in self.models]
        self.schedulers = [
            each["lr_scheduler"]["scheduler"] for each in made if isinstance(each, dict)
        ]
        optimizers = [each["optimizer"] if isinstance(each, dict) else each for each in made]
        self.alone = [_Alone(each, max_steps) for each in optimizers]
        self.base = _StepLoss(self.models[0])
        scalars = [name for name, m in self.models[0].named_modules() if type(m) is DeviceScalar]
        self.parameters, self.buffers = stack_module_state(list(self.models))
        for name in scalars:
            del self.buffers[f"{name}.tensor"]
        self.optimizer = make_optimizer(self.models, optimizers, self.parameters)
        self.clip = self.models[0].gradient_clip
        # Numbers that the host sets before a step: learning rates, temperatures and the like.
        self._scalars: list[list[Any]] = [
            [each.get_submodule(name) for name in scalars] for each in self.models
        ]
        self._settings: list[list[float]] = []
        self._values = torch.zeros(len(scalars), len(models), device=device)
        for name, row in zip(scalars, self._values, strict=True):
            self.buffers[f"{name}.tensor"] = row
        self.attach()
        for each in self.models:
            each.on_train_start()

    def attach(self) -> None:
        """Make the models ready for steps, at the start and after an evaluation."""
        for model, alone in zip(self.models, self.alone, strict=True):
            model.trainer = alone  # type: ignore[assignment]
            model.train()

    def prepare_step(self, step: int) -> None:
        """Let every model set the numbers of a step, and bring those that changed to the device."""
        settings = []
        for model, alone, scalars in zip(self.models, self.alone, self._scalars, strict=True):
            model.prepare_step(step)
            rates = [float(group["lr"]) for group in alone.optimizers[0].param_groups]
            settings.append([*rates, *(float(each) for each in scalars)])
        if settings != self._settings:
            self._settings = settings
            table = torch.tensor(settings, dtype=torch.float64).T
            groups = len(table) - len(self._values)
            self.optimizer.set_rates(table[:groups])
            self._values.copy_(table[groups:])
        with warnings.catch_warnings():  # the optimizers themselves take no step
            warnings.simplefilter("ignore")
            for each in self.schedulers:
                each.step()

    def step(self, batch: Any, one_batch: bool) -> Tensor:
        """A step of every model, on the device alone; returns the losses, (M,).

        Args:
            batch: of all models together, or of each model, (M, B, *).
            one_batch: whether it is the same for all.
        """
        losses = vmap(self._loss, in_dims=(0, 0, None if one_batch else 0), randomness="different")(
            self.parameters, self.buffers, batch
        )
        self.optimizer.step(losses, self.clip)
        return losses.detach()

    def _loss(self, parameters: Any, buffers: Any, batch: Any) -> Tensor:
        state = {f"model.{name}": each for name, each in {**parameters, **buffers}.items()}
        loss: Tensor = functional_call(self.base, state, (batch,))
        return loss

    def load_into(self, number: int) -> StepModule:
        """One of the models, with what it has learned."""
        model = self.models[number]
        known = model.state_dict()
        both = {**self.parameters, **self.buffers}
        model.load_state_dict({name: both[name][number] for name in known})
        return model

    def schedules(self) -> list[Any]:
        """What knows the learning rates: optimizers, which take no step themselves, schedulers."""
        return [*(each.optimizers[0] for each in self.alone), *self.schedulers]

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step: written back in place, the models are what they were."""
        return {
            **{f"model.{name}": each.data for name, each in self.parameters.items()},
            **{f"model.{name}": each for name, each in self.buffers.items()},
            **self.optimizer.tensors(),
        }


class BatchedSGD:
    """SGD without momentum, for M models with learning rates of their own.

    Args:
        parameters: of all models, (M, *) each.
        places: which parameter group of its optimizer each parameter belongs to.
        options: of these groups.
    """

    def __init__(
        self, parameters: list[Tensor], places: list[int], options: list[dict[str, Any]]
    ) -> None:
        self.parameters, self.places, self.options = parameters, places, options
        self.rates = [each.new_zeros(len(each), *[1] * (each.dim() - 1)) for each in parameters]

    def set_rates(self, rates: Tensor) -> None:
        """Set the learning rates, (groups, M)."""
        for mine, place in zip(self.rates, self.places, strict=True):
            mine.copy_(rates[place].view_as(mine))

    def step(self, losses: Tensor, clip: float) -> None:
        """Go down the gradients of the losses (M,), clipped to a norm for each model if not 0."""
        found = torch.autograd.grad(losses.sum(), self.parameters, materialize_grads=True)
        grads = list(found)
        with torch.no_grad():
            if clip:
                norms = torch.stack([each.flatten(1).norm(dim=1) for each in grads]).norm(dim=0)
                factor = (clip / (norms + 1e-6)).clamp_max(1.0)  # as clip_grad_norm_ does
                grads = [g * factor.view(-1, *[1] * (g.dim() - 1)) for g in grads]
            torch._foreach_sub_(
                self.parameters, torch._foreach_mul(self.directions(grads), self.rates)
            )

    def directions(self, grads: list[Tensor]) -> list[Tensor]:
        """What is multiplied by the learning rates."""
        return grads

    def tensors(self) -> dict[str, Tensor]:
        """The state."""
        return {}


class BatchedAdam(BatchedSGD):
    """Adam; the arguments are those of :class:`BatchedSGD`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.means = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        # In float32 the correction 1 - 0.999^t would have four digits in the first steps.
        self.steps = torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)
        for name in ("betas", "eps"):
            if len({str(each[name]) for each in self.options}) > 1:
                raise ValueError(f"{name} of all parameters must be equal to train batched")

    def directions(self, grads: list[Tensor]) -> list[Tensor]:
        """mean / (sqrt(square) + eps), both without their bias."""
        (first, second), eps = self.options[0]["betas"], self.options[0]["eps"]
        self.steps += 1
        torch._foreach_lerp_(self.means, grads, 1 - first)
        torch._foreach_mul_(self.squares, second)
        torch._foreach_addcmul_(self.squares, grads, grads, 1 - second)
        down = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(down, (1 - second**self.steps).sqrt().to(down[0].dtype))
        torch._foreach_add_(down, eps)
        found = torch._foreach_div(self.means, down)
        torch._foreach_div_(found, (1 - first**self.steps).to(down[0].dtype))
        return list(found)

    def tensors(self) -> dict[str, Tensor]:
        """The state."""
        state = {"steps": self.steps}
        for number, pair in enumerate(zip(self.means, self.squares, strict=True)):
            state[f"mean.{number}"], state[f"square.{number}"] = pair
        return state


def make_optimizer(
    models: Sequence[StepModule], optimizers: Sequence[Optimizer], parameters: dict[str, Tensor]
) -> BatchedSGD:
    """The batched form of the models' own optimizers."""
    kinds: dict[type, type[BatchedSGD]] = {Adam: BatchedAdam, SGD: BatchedSGD}
    first = optimizers[0]
    kind = kinds.get(type(first))
    if kind is None:
        raise ValueError(f"batched models have Adam or SGD, got {type(first).__name__}")
    for group in first.param_groups:
        for name, value in _PLAIN.items():
            if group.get(name, value) != value:
                raise ValueError(f"batched models have {name} {value}, got {group[name]}")
    place = {id(p): i for i, group in enumerate(first.param_groups) for p in group["params"]}
    names = {name: place[id(p)] for name, p in models[0].named_parameters() if id(p) in place}
    trained = [parameters[name] for name in names]
    return kind(trained, list(names.values()), first.param_groups)


# -- training --------------------------------------------------------------------------------------


class Group:
    """Members of one group, which are trained, validated and tested.

    Args:
        members: their ``curve`` gets what is seen in training, ``failure`` why a model was given
            up: its scores are not finite.
        state: a file that keeps the group from validation to validation; a group that finds it
            there continues from it.
    """

    def __init__(self, members: Sequence[Member], state: Path | None = None) -> None:
        self.members, self.state, first = members, state, members[0]
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        where = first.trainer.get("accelerator") or "auto"
        self.trainer = Trainer(
            accelerator=where,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.device = self.trainer.strategy.root_device
        self.max_steps, self.interval = (
            first.trainer[name] for name in ("max_steps", "val_check_interval")
        )
        self.data = {each.same_data: each.data for each in members}
        for each in self.data.values():
            each.trainer = self.trainer
            each.prepare_data()
            each.setup("fit")
        places = list(self.data)
        which = [places.index(each.same_data) for each in members]
        self.which = torch.tensor(which, device=self.device)
        self.stack = Stack([each.model for each in members], self.device, self.max_steps)

    def train(self, say: Callable[[str], None]) -> list[Metrics]:
        """Train to the end, then test every model; the metrics of each, none of one given up."""
        torch.manual_seed(self.members[0].seed)  # the noise of a group is that of its first seed
        cuda, begun = self.device.type == "cuda", self._restore()
        take: Callable[[Any], Tensor] = StepGraph(self._step) if cuda else self._step
        batches, since, spent = self._batches(), begun, time.monotonic()
        for step in range(begun, self.max_steps):
            self.stack.prepare_step(step)
            losses = take(next(batches))
            done = step + 1
            if cuda and done % _STEPS_AHEAD == 0:
                torch.cuda.current_stream().synchronize()
            if done % self.interval == 0 or done == self.max_steps:
                seen = losses.tolist()
                rate = len(self.members) * (done - since) / (time.monotonic() - spent)
                models = f"{len(self.members)} models: step {done} of {self.max_steps}"
                say(f"{models}, {rate:,.0f} model-steps/s")
                self._validate(done, seen)
                self._save(done)
                since, spent = done, time.monotonic()
        return [self._tested(number) for number in range(len(self.members))]

    def _step(self, batch: Any) -> Tensor:
        one = len(self.data) == 1
        return self.stack.step(batch if one else tree_map(lambda x: x[self.which], batch), one)

    def _batches(self) -> Iterator[Any]:
        """Batches without end, in the order of ``train.py``; of D > 1 data sets, (D, B, *)."""

        def endless(loader: Any) -> Iterator[Any]:
            while True:
                yield from loader

        loaders = [endless(each.train_dataloader()) for each in self.data.values()]
        move = self.members[0].model.transfer_batch_to_device
        for found in zip(*loaders, strict=True):
            batches = [move(each, self.device, 0) for each in found]
            yield batches[0] if len(batches) == 1 else default_collate(batches)

    # -- results -------------------------------------------------------------------------------

    def _validate(self, step: int, losses: list[float]) -> None:
        for number, one in enumerate(self.members):
            found = self._evaluated(self.trainer.validate, number)
            one.curve.append((step, {"train/loss": losses[number], **found}))
        self.stack.attach()

    def _evaluated(self, evaluate: Callable[..., Any], number: int) -> Metrics:
        one = self.members[number]
        if one.failure:
            return {}
        model, data = self.stack.load_into(number), self.data[one.same_data]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return dict(evaluate(model, datamodule=data, verbose=False)[0])
        except ValueError as error:  # its scores are not finite
            one.failure = str(error).splitlines()[0]
            return {}

    def _tested(self, number: int) -> Metrics:
        """The last validation, the test and the Fisher diagnostics of a model."""
        one = self.members[number]
        tested = self._evaluated(self.trainer.test, number)
        if one.failure:
            return {}
        batch = next(iter(self.data[one.same_data].val_dataloader()))
        last = {name: x for name, x in one.curve[-1][1].items() if name.startswith("val/")}
        found = last | tested | fisher_diagnostics(one.model, batch)
        if one.folder is not None:
            self._write(one, one.folder, found)
        return found

    def _write(self, one: Member, folder: Path, metrics: Metrics) -> None:
        """What ``train.py`` would leave of a run: curves, weights and metrics."""
        from torch.utils.tensorboard import SummaryWriter

        version = folder / "version_0"
        with SummaryWriter(str(version)) as writer:
            for step, values in (*one.curve, (self.max_steps, metrics)):
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
        path = version / "checkpoints" / "final.ckpt"
        path.parent.mkdir(exist_ok=True)
        self.trainer.save_checkpoint(path, weights_only=True)
        (version / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")

    # -- interruptions -------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        if self.state is None:
            return
        cuda = self.device.type == "cuda"
        state = {
            "step": step,
            "tensors": self.stack.tensors(),
            "schedules": [each.state_dict() for each in self.stack.schedules()],
            "data": [each.state_dict() for each in self.data.values()],
            "noise": torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state(),
            "seen": [(each.curve, each.failure) for each in self.members],
        }
        self.state.parent.mkdir(parents=True, exist_ok=True)
        partial = self.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.state)

    def _restore(self) -> int:
        """Continue from the file, if there is one; returns the number of steps taken before."""
        if self.state is None or not self.state.is_file():
            return 0
        state = torch.load(self.state, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, each in self.stack.tensors().items():
                each.copy_(state["tensors"][name])
        known = [*self.stack.schedules(), *self.data.values()]
        for each, saved in zip(known, [*state["schedules"], *state["data"]], strict=True):
            each.load_state_dict(saved)
        for one, (curve, failure) in zip(self.members, state["seen"], strict=True):
            one.curve, one.failure = curve, failure
        cuda = self.device.type == "cuda"
        (torch.cuda.set_rng_state if cuda else torch.set_rng_state)(state["noise"])
        return int(state["step"])


@torch.no_grad()
def fisher_diagnostics(model: StepModule, batch: Any) -> Metrics:
    """What the Fisher matrices of a model's heads look like on a batch, as means over its rows.

    The names are those of the monitor: fim/off_diagonal_mass, fim/off_diagonal_mass_fro,
    fim_spectrum/condition_number and fim/saturated; with several heads fim/<head>/saturated ...
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
        matrix = head.fisher(scores.reshape(-1, head.num_scores)).double().mean(0)
        own = "" if len(seen) == 1 else f"{name}/"
        found[f"fim/{own}off_diagonal_mass"] = float(off_diagonal_mass(matrix))
        found[f"fim/{own}off_diagonal_mass_fro"] = float(off_diagonal_mass(matrix, "fro"))
        found[f"fim_spectrum/{own}condition_number"] = float(condition_number(matrix))
        found[f"fim/{own}saturated"] = float(head.saturated(scores).float().mean())
    return found
