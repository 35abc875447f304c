"""Many models of one shape as one: torch.func stacks any StepModule, and one step trains all.

Each model starts with the weights of its seed and sees the batches of a run of its own; its noise
differs, as it is drawn for all models at once. Models of a group differ in seed, learning rates and
data alone. On a CUDA device a step of the whole group is one CUDA graph.
"""

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import default_collate
from torch.utils.tensorboard import SummaryWriter

from catnat.callbacks.fisher_diagnostics import histories_of
from catnat.callbacks.tensorboard import open_writer
from catnat.cli.names import RL_MODELS, Options
from catnat.cuda_graph import StepGraph
from catnat.heads.base import CategoricalHead
from catnat.heads.probe import HeadProbe
from catnat.lit_modules.cuda_graph_steps import BATCH_HOOKS
from catnat.lit_modules.step_module import StepModule
from catnat.rng import forked_random_state
from catnat.sweeps.engines import device_name
from catnat.sweeps.stack import Stack

if TYPE_CHECKING:
    from catnat.sweeps.sweep import Sweep

_DRAWS = 64  # for each row of the batch whose Fisher matrix is diagnosed at the end of a run
_LARGEST = 1024  # scores of a head that is diagnosed; its matrix costs little beside a run
_STEPS_AHEAD = 40  # of the host, before it waits for the device
_TRAINER_OPTIONS = (  # that a group follows, or that only observe; others have their defaults
    "accelerator",
    "default_root_dir",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "log_every_n_steps",
    "max_steps",
    "num_sanity_val_steps",
    "val_check_interval",
)
Metrics = dict[str, Any]


@dataclass
class Member:
    """A model with its data, as a run of its own would start.

    Attributes:
        model: with the weights that its seed gives.
        data: not yet set up; those of a group share equal data.
        seed: seed of weights and noise.
        options: options of the Trainer: max_steps, val_check_interval, accelerator.
        group: equal for models that can be trained together.
        data_key: equal for models with equal data.
        folder: folder for curves, weights and metrics; None writes nothing.
        metrics: metrics of the last validation, and of the run at its end.
        failure: why the model was given up: scores are not finite; empty if it was not.
        writer: writer of curves.
        config_text: all options, for ``config.yaml``.
    """

    model: StepModule
    data: LightningDataModule
    seed: int
    options: Options
    group: str
    data_key: str
    folder: Path | None = None
    metrics: Metrics = field(default_factory=dict)
    failure: str = ""
    writer: SummaryWriter | None = None
    config_text: str = ""


def train(sweep: "Sweep", most: int) -> None:
    """Train what can start in a sweep as groups of models, again and again until nothing can.

    Args:
        sweep: the sweep.
        most: largest number of models of a group.
    """
    program = sweep.plan.program or sweep.plan.model
    if program in (sweep.plan.program, *RL_MODELS):
        raise ValueError(f"--engine batched needs a LightningModule, not {program}")
    device = device_name()
    while runs := sweep.start():
        members = []
        for run in runs:
            folder = sweep.folder_of(run)
            members.append(build(run.arguments(folder), folder))
        run_of = {id(member): run for member, run in zip(members, runs, strict=True)}
        for group in groups(members, most):
            with ExitStack() as locks:
                free = [x for x in group if locks.enter_context(sweep.claim(run_of[id(x)]))]
                if free:
                    Group(free).train()
                outcomes = [{**x.metrics, "note": x.failure, "device": device} for x in free]
                ended = [run_of[id(member)] for member in free]
                sweep.record(zip(ended, outcomes, strict=True), "batched")


def build(arguments: Sequence[str], folder: Path | None = None) -> Member:
    """The model and the data of a command line of ``catnat``."""
    from catnat.cli import main

    cli = main.build(arguments)
    config = cli.config
    refused = [
        name
        for name, value in vars(config.trainer).items()
        if name not in _TRAINER_OPTIONS and value != cli.parser.get_default(f"trainer.{name}")
    ]
    if refused:
        raise ValueError(f"--engine batched takes no {' and no '.join(refused)}")
    options = {name: getattr(cli.trainer, name) for name in ("max_steps", "val_check_interval")}
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a number of steps, got {value}")
    options["accelerator"] = config.trainer.accelerator
    kind = type(cli.model)
    if not issubclass(kind, StepModule) or kind.training_step != StepModule.training_step:
        raise ValueError(
            f"{kind.__name__}: only a StepModule without a training_step is trained batched"
        )
    for owner in (cli.model, cli.datamodule):
        if hooks := [name for name in BATCH_HOOKS if is_overridden(name, owner)]:
            raise ValueError(f"{type(owner).__name__}: --engine batched does not call {hooks[0]}")
    model_options = config.model.init_args.as_dict()
    shape = {name: x for name, x in model_options.items() if "learning_rate" not in name}
    data = config.data
    group = str([kind, shape, data.class_path, data.get("init_args.batch_size"), options])
    member = Member(
        cli.model, cli.datamodule, config.seed_everything, options, group, str(data), folder
    )
    member.config_text = cli.config_text
    return member


def groups(members: Sequence[Member], most: int) -> list[list[Member]]:
    """Members that are trained together, at most so many at once."""
    by_group: dict[str, list[Member]] = {}
    for member in members:
        by_group.setdefault(member.group, []).append(member)
    return [all_[i : i + most] for all_ in by_group.values() for i in range(0, len(all_), most)]


# -- training --------------------------------------------------------------------------------------


class Group:
    """Members of one group, which are trained, validated and tested."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        options = members[0].options
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.trainer = Trainer(
            accelerator=options["accelerator"],
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.device = self.trainer.strategy.root_device
        self.max_steps = options["max_steps"]
        self.interval = options["val_check_interval"]
        self.data = {member.data_key: member.data for member in members}
        for member in members:
            member.data = self.data[member.data_key]
            if member.folder:
                member.writer = open_writer(_free_folder(member.folder))
        for data in self.data.values():
            data.trainer = self.trainer
            data.prepare_data()
            data.setup("fit")
        self.stack = Stack([member.model for member in members], self.device, self.max_steps)
        self.step = partial(self.stack.step, one_batch=len(self.data) == 1)

    def train(self) -> None:
        """Train to the end, then test every model."""
        torch.manual_seed(self.members[0].seed)  # the noise of a group is that of its first seed
        is_cuda = self.device.type == "cuda"
        take_step = StepGraph(self.step) if is_cuda else self.step
        batches = self.batches()
        for step in range(1, self.max_steps + 1):
            self.stack.prepare_step(step - 1)
            losses = take_step(next(batches))
            for scheduler in self.stack.schedulers:
                scheduler.step()
            if is_cuda and step % _STEPS_AHEAD == 0:
                torch.cuda.current_stream().synchronize()
            if step % self.interval == 0 or step == self.max_steps:
                text = f"{time.strftime('%H:%M:%S')} {len(self.members)} models"
                print(f"{text}: step {step} of {self.max_steps}", flush=True)
                for member, loss in zip(self.members, losses.tolist(), strict=True):
                    member.metrics = self._evaluate(self.trainer.validate, member)
                    self._log(member, step, {"train/loss": loss, **member.metrics})
                self.stack.attach()
        for member in self.members:
            member.metrics = self._test(member)

    def batches(self) -> Iterator[Any]:
        """Endless batches in the order of a single run; (M, B, *) with several data sets."""
        loaders = [chain.from_iterable(repeat(x.train_dataloader())) for x in self.data.values()]
        move = self.members[0].model.transfer_batch_to_device
        for loaded in zip(*loaders, strict=True):
            moved = [move(batch, self.device, 0) for batch in loaded]
            by_key = dict(zip(self.data, moved, strict=True))
            of_members = [by_key[member.data_key] for member in self.members]
            yield moved[0] if len(moved) == 1 else default_collate(of_members)

    # -- results -------------------------------------------------------------------------------

    def _evaluate(self, evaluate: Callable[..., Any], member: Member) -> Metrics:
        if member.failure:
            return {}
        try:
            with warnings.catch_warnings(action="ignore"):
                return evaluate(member.model, datamodule=member.data, verbose=False)[0]
        except ValueError as error:  # its scores are not finite
            member.failure = str(error).splitlines()[0]
            return {}

    def _test(self, member: Member) -> Metrics:
        """The last validation, the test and the Fisher diagnostics of a model."""
        tested = self._evaluate(self.trainer.test, member)
        if member.failure:
            return {}
        batch = next(iter(member.data.val_dataloader()))
        metrics = {name: x for name, x in member.metrics.items() if name.startswith("val/")}
        metrics |= tested | fisher_diagnostics(member.model, batch)
        self._log(member, self.max_steps, metrics)
        if source := member.data.hparams.get("source"):
            metrics["data_source"] = source
        if member.writer:
            member.writer.close()
            version = Path(member.writer.log_dir)
            self.trainer.save_checkpoint(version / "checkpoints" / "final.ckpt", weights_only=True)
            (version / "config.yaml").write_text(member.config_text)
            (version / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        return metrics

    def _log(self, member: Member, step: int, metrics: Metrics) -> None:
        """Write points of the curves at once: a group that is stopped keeps what it has seen."""
        if member.writer:
            for name, value in metrics.items():
                member.writer.add_scalar(name, value, step)
            member.writer.flush()


def _free_folder(folder: Path) -> Path:
    """A folder for the curves of a run that begins; a group that was killed has left its own."""
    number = 0
    while (folder / f"version_{number}").exists():
        number += 1
    return folder / f"version_{number}"


@torch.no_grad()
def fisher_diagnostics(model: StepModule, batch: Any) -> Metrics:
    """The Fisher diagnostics of a model's heads on a batch, as means over its rows.

    The names are those of the monitor, with several heads fim/<head>/saturated and the like. Heads
    of thousands of scores are left out.
    """
    if not any(isinstance(module, CategoricalHead) for module in model.modules()):
        return {}
    model.eval()
    batch = model.transfer_batch_to_device(batch, model.device, 0)
    with HeadProbe(model) as probe, forked_random_state(model.device, 0):
        model.step_loss(batch)
    metrics: Metrics = {}
    heads = {name: head for name, head in probe.heads.items() if head.num_scores <= _LARGEST}
    histories = histories_of(heads, draws=_DRAWS, sums={}, seed="")
    for name, scores in probe.scores.items():
        if name in histories:
            _, row, *_ = histories[name].observe(0, scores)
            metrics |= row
    return metrics
