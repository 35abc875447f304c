"""Train a model with a categorical head, then test it: ``python train.py --help``."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import warnings
from argparse import Namespace as Names
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cli
from cli import UsageError

if TYPE_CHECKING:  # everything that needs torch is imported late: it takes seconds
    from jsonargparse import ArgumentParser, Namespace
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer


@dataclass(frozen=True)
class Recipe:
    """A model, the data it learns from, and for how long."""

    model: str
    data: str
    steps: int = 60_000
    steps_on_cpu: int = 3_000
    defaults: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "vae": Recipe("lit_modules.DiscreteVAE", "datamodules.MNISTDataModule"),
    "mlp-vae": Recipe(
        "lit_modules.MLPDiscreteVAE",
        "datamodules.MNISTDataModule",
        defaults={"data.variant": "stochastic", "data.batch_size": 128},
    ),
}

HELP = """\
usage: python train.py [fit | test] --model MODEL --head HEAD [options]

Trains a model and tests it (fit, the default), or only tests a checkpoint.

  --model MODEL        {models}
  --head HEAD          {heads}
  --num_latents N --num_categories K
  --variant V          of the data: gray, binary or stochastic
  --max_steps N        {steps:,} if there is an accelerator, else {few:,}
  --seed N             of weights and noise
  --devices N --strategy ddp ...   any flag of Lightning's Trainer
  --ckpt_path PATH     continue (or test) a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file; other options win
  --print_config       print all options as such a file, and stop
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X; the first three
groups can be left out. To list them: --help model, data, trainer or fisher.
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0] in ("-h", "--help"):
            return show_help(argv[1:])
        names, options = cli.read_names(argv, MODELS)
        return show_help(options, names.model) if names.help else train(names, options)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that cannot be written
        print(f"train.py: {error} (checkpoints written before are intact)", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit):
        print("train.py: interrupted", file=sys.stderr)
        return 130


def show_help(topics: list[str], model: str = "vae") -> int:
    """Print the page, or the options of one group."""
    if topics:
        cli.check_choice("help topic", topics[0], ("model", "data", "trainer", "fisher"))
        print(cli.group_help(build_parser(model), topics[0]))
        return 0
    recipe, heads = MODELS[model], dict.fromkeys(cli.builtin_heads().values())
    names = {"models": ", ".join(MODELS), "heads": ", ".join(heads)}
    print(HELP.format(**names, steps=recipe.steps, few=recipe.steps_on_cpu), end="")
    return 0


def train(names: Names, options: list[str]) -> int:
    """Compose everything, fit, test, report."""
    silence()
    from callbacks import Stopped, report

    cli.import_modules(names.imports)
    if names.imports:
        cli.check_choice("--head", names.head, load("catnat.head_names")())
    parser = build_parser(names.model)
    chosen = [f"--model.name={names.model}", f"--model.head={names.head}"]
    config = cli.parse(parser, [*options, *chosen])
    config["import"] = names.imports
    fill_in(config, MODELS[names.model])
    if names.print_config:
        print(parser.dump(config), end="")
        return 0
    with usage_errors():
        run = compose(names.command, parser, config)
    try:
        with usage_errors(("lightning.", "datamodules.")):
            metrics = fit_and_test(run) if names.command == "fit" else test(run, run.ckpt_path)
    except Stopped as stop:
        again = f"python train.py --config {run.folder}/config.yaml --ckpt_path {stop.path}"
        if run.trainer.is_global_zero:
            print(f"{stop}; go on with: {again}")
        return 128 + stop.signum
    if run.trainer.is_global_zero:
        report(run.trainer, metrics, run.folder)
    return 0


def fit_and_test(run: Run) -> dict[str, float]:
    """Train, then test what was learned last."""
    run.trainer.fit(run.model, datamodule=run.data, ckpt_path=run.ckpt_path)
    return test(run, None)


def test(run: Run, ckpt_path: Path | None) -> dict[str, float]:
    """Test metrics of a checkpoint, or of the model as it is."""
    tested = run.trainer.test(run.model, datamodule=run.data, ckpt_path=ckpt_path, verbose=False)
    return dict(tested[0])


@dataclass
class Run:
    """Everything composed, ready to go."""

    model: LightningModule
    data: LightningDataModule
    trainer: Trainer
    folder: Path
    ckpt_path: Path | None


def build_parser(name: str) -> ArgumentParser:
    """All options of a model, its data, the monitor and the Trainer, with their types."""
    from jsonargparse import ArgumentParser
    from jsonargparse.typing import PositiveInt
    from lightning.pytorch import Trainer

    from callbacks import FisherMonitor

    recipe = MODELS[name]
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config=None)
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    parser.add_argument("--save_every", type=PositiveInt, default=500)
    parser.add_argument("--import", type=list[str], default=[])
    parser.add_argument("--model.name", type=str, default=name)
    parser.add_class_arguments(load(recipe.model), "model", fail_untyped=False)
    parser.add_class_arguments(load(recipe.data), "data", fail_untyped=False)
    parser.add_class_arguments(FisherMonitor, "fisher")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
    parser.set_defaults(recipe.defaults)
    parser.set_defaults({"trainer.devices": 1, "trainer.default_root_dir": "runs"})
    parser.set_defaults({"trainer.enable_model_summary": False})
    # Validation goes by steps, because the length of an epoch differs with the data.
    parser.set_defaults({"trainer.check_val_every_n_epoch": None})
    return parser


def fill_in(config: Namespace, recipe: Recipe) -> None:
    """Defaults that depend on the machine and on other options."""
    import torch

    trainer = config.trainer
    if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
        on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
        trainer.max_steps = recipe.steps_on_cpu if on_cpu else recipe.steps
    if isinstance(trainer.val_check_interval, float) and not trainer.check_val_every_n_epoch:
        trainer.check_val_every_n_epoch = 1  # a fraction is one of an epoch
    if trainer.val_check_interval is None and trainer.check_val_every_n_epoch is None:
        trainer.val_check_interval = 500 if trainer.max_steps < 1 else min(500, trainer.max_steps)


def compose(command: str, parser: ArgumentParser, config: Namespace) -> Run:
    """Model, data and Trainer of a configuration, and the folder of the run."""
    from lightning.pytorch import Trainer, seed_everything

    from callbacks import AtomicCheckpointIO, check_same, find_checkpoint, open_run

    seed_everything(config.seed, workers=True, verbose=False)
    saved, name = parser.dump(config), config.model.pop("name")
    # Since 4.49 jsonargparse calls it by the first name.
    objects = getattr(parser, "instantiate", parser.instantiate_classes)(config)
    options = objects.trainer.as_dict()
    Trainer(**options | {"logger": False})  # wrong flags fail here, before anything is written
    home = Path(options["default_root_dir"], name, config.model.head)
    if command == "test" and config.ckpt_path is None:
        raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
    ckpt_path = find_checkpoint(home, config.ckpt_path) if config.ckpt_path else None
    if ckpt_path is not None:
        check_same(ckpt_path, objects.model)
    objects.data.prepare_data()
    objects.data.setup("fit")  # already here, because what is wrong with it is the user's to mend
    objects.data.train_dataloader()
    folder = open_run(home, ckpt_path, saved if command == "fit" else None)
    options["logger"] = logger_of(command, options["logger"], folder)
    options["callbacks"] = callbacks_of(options, objects.fisher, folder, config.save_every)
    options["plugins"] = [AtomicCheckpointIO(), *as_list(options["plugins"])]
    trainer = Trainer(**options)
    if command == "fit" and trainer.is_global_zero:
        print(f"{name} with {config.model.head}, {trainer.max_steps:,} steps, writes to {folder}")
    return Run(objects.model, objects.data, trainer, folder, ckpt_path)


def logger_of(command: str, asked_for: Any, folder: Path) -> Any:
    """TensorBoard in the run's folder, unless another logger was asked for, or only a test."""
    from lightning.pytorch.loggers import TensorBoardLogger

    if asked_for is not None or command == "test":
        return asked_for or False
    return TensorBoardLogger(folder.parent, name="", version=folder.name, default_hp_metric=False)


def callbacks_of(
    options: dict[str, Any], fisher: Callback, folder: Path, save_every: int
) -> list[Callback]:
    """What watches a run and saves it; adjusts the options that say so."""
    from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar

    from callbacks import LastCheckpoint, ProgressLines, VAEFigures

    callbacks = [fisher, VAEFigures(), *as_list(options["callbacks"])]
    if options["enable_progress_bar"] is not False:
        options["enable_progress_bar"] = sys.stdout.isatty()
        callbacks.append(RichProgressBar() if sys.stdout.isatty() else ProgressLines())
    if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
        best = ModelCheckpoint(
            folder / "checkpoints",
            "best",
            monitor="val/loss",
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        callbacks += [best, LastCheckpoint(folder / "checkpoints", save_every)]
    return callbacks


@contextmanager
def usage_errors(raised_in: tuple[str, ...] = ("",)) -> Iterator[None]:
    """What these modules raise in here is the user's to mend: one line, not a traceback."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(raised_in):
            raise
        raise UsageError(error) from error


def silence() -> None:
    """Leave out what users can do nothing about."""
    import lightning.pytorch  # noqa: F401 - sets levels of its own

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers",
        ".*is smaller than the logging interval",
        ".*exists and is not empty",
        ".*LeafSpec",
    ):
        warnings.filterwarnings("ignore", message)


def load(path: str) -> Any:
    """The object behind a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def as_list(value: Any) -> list[Any]:
    """None is nothing, a list itself, anything else one thing."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


if __name__ == "__main__":
    sys.exit(main())
