"""Runs that can be trained together: how train.py would begin them, and what it would leave."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.tensorboard import SummaryWriter

from catnat.callbacks.dashboard import write_hparams
from catnat.datamodules.in_memory import InMemoryDataModule
from catnat.files import write_whole
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE
from catnat.training import options as cli
from catnat.training.command import configure
from catnat.training.errors import UsageError, usage_errors
from catnat.training.folders import closing_runs, open_run
from catnat.training.lightning import set_validation_interval
from catnat.training.names import DATA, RL_MODELS, read_names
from catnat.training.report import hparams_of
from experiments.plan import Run
from experiments.together.graphs import ManyGraphLearners
from experiments.together.stack import head_key
from experiments.together.vaes import ManyMLPVAEs, ManyVAEs
from experiments.train_interface import is_train

# What may differ between the models of a group, besides seeds and data.
_OWN = ("head", "head_options", "learning_rate", "num_latents", "num_categories", "nll_samples")
# Options of the Trainer that are obeyed, or change nothing that is learned.
_KNOWN = {"max_steps", "val_check_interval", "default_root_dir", "accelerator", "log_every_n_steps"}
_KNOWN |= {"enable_progress_bar", "enable_model_summary"}
_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")

Curve = list[tuple[int, dict[str, float]]]  # metrics by step
Model = DiscreteVAE | GraphStructureLearner
KINDS: dict[type, Any] = {  # by the class of a model: the class of many
    DiscreteVAE: ManyVAEs,
    MLPDiscreteVAE: ManyMLPVAEs,
    GraphStructureLearner: ManyGraphLearners,
}


@dataclass
class Member:
    """A run with its model, as ``train.py`` would begin it.

    Attributes:
        run: of the sweep.
        model: with the weights that its seed gives.
        data: not yet set up.
        seed: of weights and noise.
        trainer: options of the Trainer.
        home: the folder of the run's versions.
        config: the options as text, for config.yaml.
        group: equal for runs that can be trained together.
        same_data: equal for runs with equal data.
    """

    run: Run
    model: Model
    data: InMemoryDataModule
    seed: int
    trainer: dict[str, Any]
    home: Path
    config: str
    group: str
    same_data: str


def member(run: Run) -> Member:
    """Read the command of a run; a ValueError says why the run cannot be trained with others."""
    try:
        return _member(run)
    except (UsageError, ValueError) as error:
        raise ValueError(f"{run.name}: {error}") from error


def _member(run: Run) -> Member:
    if not is_train(run.command):
        raise ValueError("--engine together trains models of train.py alone")
    names, options = read_names(list(run.command[2:]))
    if names.model in RL_MODELS:
        raise ValueError(f"--engine together cannot train --model {names.model}")
    if names.ckpt_path is not None:
        raise ValueError("--engine together does not know --ckpt_path; --engine local does")
    program, parser, config = configure(names, options)
    program.complete(config)
    _check_trainer(parser, config)
    seed_everything(config.seed, workers=True, verbose=False)
    with usage_errors():
        objects = cli.instantiate(parser, config)
    kind = KINDS.get(type(objects.model))
    if kind is None:
        raise ValueError(f"--engine together cannot train --model {names.model}")
    if names.data not in DATA:
        raise ValueError(f"--engine together cannot train on --data {names.data}")
    kind.check([objects.model])
    of_model, of_data = (
        json.loads(json.dumps(config[group].as_dict(), default=str)) for group in ("model", "data")
    )
    common = {name: value for name, value in of_model.items() if name not in _OWN}
    scores = objects.model.head.num_scores if names.model == "gsl" else None
    trainer = config.trainer.as_dict()
    text = parser.dump(config)
    set_validation_interval(trainer)
    steps = trainer["max_steps"], trainer["val_check_interval"]
    group = [common, of_data["batch_size"], scores, steps, trainer["accelerator"]]
    return Member(
        run,
        objects.model,
        objects.data,
        config.seed,
        trainer,
        names.home,
        text,
        json.dumps(group),
        json.dumps(of_data),
    )


def _check_trainer(parser: cli.Parser, config: Any) -> None:
    for name in cli.option_names(parser):
        group, _, option = name.partition(".")
        value = config.get(name)
        if group == "trainer" and option not in _KNOWN and value != parser.get_default(name):
            raise ValueError(
                f"--engine together does not know --{option} {value}; --engine local does"
            )
    trainer = config.trainer
    for option in ("max_steps", "val_check_interval"):
        value = trainer[option]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(
                f"--engine together needs a number of steps for --{option}, got {value}"
            )
    if trainer.accelerator not in _ACCELERATORS:
        known = ", ".join(_ACCELERATORS)
        raise ValueError(
            f"--engine together does not know --accelerator {trainer.accelerator}; "
            f"choose from {known}"
        )
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"--accelerator {trainer.accelerator}: there is no CUDA device")


def write_run(
    one: Member, trainer: Trainer, curve: Curve, steps: int, tested: dict[str, float], log: str
) -> None:
    """Write the folder of a run that has ended. Its checkpoint has the weights alone.

    Args:
        one: the run.
        trainer: that has tested its model.
        curve: what was seen in training; the last validation is that of the final weights.
        steps: of the run.
        tested: metrics of the test.
        log: a line for log.txt, the file of what a run has printed.
    """
    validated = {name: x for name, x in curve[-1][1].items() if name.startswith("val/")}
    with closing_runs():
        folder = open_run(one.home, None, one.config)
        hparams = hparams_of(trainer, one.seed) | {"steps": steps}
        with SummaryWriter(str(folder)) as writer:
            write_hparams(writer, hparams, list(tested))
            for step, metrics in (*curve, (steps, tested)):
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)
        (one.home / "log.txt").write_text(log)
        path = folder / "checkpoints" / "last.ckpt"
        path.parent.mkdir(exist_ok=True)
        # Under its name only afterwards: a run without metrics would be continued from it.
        partial = path.with_name(".last.ckpt.partial")
        trainer.save_checkpoint(partial, weights_only=True)
        text = json.dumps(validated | tested, indent=1) + "\n"
        write_whole(folder / "metrics.json", text.encode())
        partial.rename(path)


def order(one: Member) -> tuple[str, ...]:
    """Models of one size and one head stand next to each other."""
    head = one.model.head
    size = one.model.num_latents if isinstance(one.model, DiscreteVAE) else 0
    return f"{size}-{head.num_categories}-{head.num_scores}", head_key(one.model)


def groups(members: Iterable[Member], most: int) -> list[list[Member]]:
    """Members that are trained together, at most so many at once."""
    found: dict[str, list[Member]] = {}
    for each in members:
        found.setdefault(each.group, []).append(each)
    parts = []
    for some in found.values():
        count = -(-len(some) // most)  # groups of nearly equal size
        some.sort(key=order)
        cuts = [len(some) * number // count for number in range(count + 1)]
        parts += [some[start:end] for start, end in pairwise(cuts)]
    return parts
