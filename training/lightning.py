"""Training with Lightning: a model, its data and a Trainer, composed from a command line."""

from __future__ import annotations

import importlib
from argparse import Namespace as Names
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catnat.training import options as cli
from catnat.training import resume
from catnat.training.errors import UsageError, usage_errors
from catnat.training.names import check_choice, help_page, import_modules
from catnat.training.options import group_help

if TYPE_CHECKING:  # everything that needs torch is imported late: it takes seconds
    from jsonargparse import ArgumentParser, Namespace
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer


@dataclass(frozen=True)
class Recipe:
    """A model, the data it learns from, and for how long."""

    model: str
    data: str
    steps: int = 60_000
    steps_on_cpu: int = 2_000
    defaults: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str, str | None], ...] = ()  # from, to, a function between them


MODELS = {
    "vae": Recipe("catnat.lit_modules.DiscreteVAE", "catnat.datamodules.MNISTDataModule"),
    "mlp-vae": Recipe(
        "catnat.lit_modules.MLPDiscreteVAE",
        "catnat.datamodules.MNISTDataModule",
        defaults={"data.variant": "stochastic", "data.batch_size": 128},
    ),
    "gsl": Recipe(
        "catnat.lit_modules.GraphStructureLearner",
        "catnat.datamodules.CommunityGraphDataModule",
        steps=5_000,
        steps_on_cpu=5_000,
        links=(
            ("data.communities", "model.num_nodes", "catnat.datamodules.community_graph.num_nodes"),
            ("data.in_features", "model.in_features", None),
            ("data.out_features", "model.out_features", None),
        ),
    ),
}


def show_help(topics: list[str], model: str = "vae") -> int:
    """Print the page, or the options of one group."""
    if topics:
        check_choice("help topic", topics[0], ("model", "data", "trainer", "fisher"))
        print(group_help(build_parser(model), topics[0]))
        return 0
    recipe = MODELS[model]
    print(help_page(recipe.steps, recipe.steps_on_cpu), end="")
    return 0


def train(names: Names, options: list[str]) -> int:
    """Compose everything, fit, test, report."""
    from catnat.callbacks import Stopped
    from catnat.training.report import report

    import_modules(names.imports)
    if names.imports:
        check_choice("--head", names.head, load("catnat.head_names")())
    parser = build_parser(names.model)
    chosen = [f"--model.name={names.model}", f"--model.head={names.head}"]
    config = cli.parse(parser, [*options, *chosen])
    ckpt_path = None
    if config.ckpt_path is not None:
        given = cli.given(parser, options) | ({"model.head"} if names.head_given else set())
        with usage_errors():
            ckpt_path, config = go_on(parser, config, given, names.command == "fit")
    config["import"] = names.imports
    note = fill_in(config, MODELS[names.model])
    if names.print_config:
        print(parser.dump(config), end="")
        return 0
    with usage_errors():
        run = compose(names.command, parser, config, ckpt_path)
    if run.trainer.is_global_zero:
        head = config.model.head
        print(f"{names.command} {names.model} with {head}: {run.folder}{note}", flush=True)
    try:
        with usage_errors(("lightning.", "catnat.datamodules.", "catnat.lit_modules.")):
            metrics = fit_and_test(run) if names.command == "fit" else test(run, run.ckpt_path)
    except Stopped as stop:
        if run.trainer.is_global_zero:
            print(f"{stop}; go on with: {cli.how_to_go_on(run.folder, stop.path)}")
        return 128 + stop.signum
    if run.trainer.is_global_zero:
        report(run.trainer, metrics, run.folder, config.seed, keep=names.command == "fit")
    return 0


def go_on(
    parser: ArgumentParser, config: Namespace, given: set[str], strict: bool
) -> tuple[Path, Namespace]:
    """The checkpoint that the command line names, and the configuration that goes on from it."""
    from catnat.callbacks import load_checkpoint
    from catnat.training.folders import find_checkpoint

    home = Path(config.trainer.default_root_dir, config.model.name, config.model.head)
    path = find_checkpoint(home, config.ckpt_path)
    return path, resume.continued(parser, config, given, path, load_checkpoint(path), strict)


def fit_and_test(run: Run) -> dict[str, float]:
    """Train, then validate (to select by) and test what was learned last."""
    from catnat.callbacks import last_validation

    run.trainer.fit(run.model, datamodule=run.data, ckpt_path=run.ckpt_path)
    validated = last_validation(run.trainer)
    if not validated and run.trainer.limit_val_batches:  # training did not end with a validation
        found = run.trainer.validate(run.model, datamodule=run.data, verbose=False)
        validated = dict(found[0])
    return validated | test(run, None)


def test(run: Run, ckpt_path: Path | None) -> dict[str, float]:
    """Test metrics of a checkpoint, or of the model as it is."""
    tested = run.trainer.test(run.model, datamodule=run.data, ckpt_path=ckpt_path, verbose=False)
    return dict(tested[0]) if tested else {}  # --limit_test_batches 0


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
    from lightning.pytorch import Trainer

    from catnat.callbacks import FisherMonitor

    recipe = MODELS[name]
    parser = cli.base_parser(name, save_every=500)
    parser.add_class_arguments(load(recipe.model), "model", fail_untyped=False)
    parser.add_class_arguments(load(recipe.data), "data", fail_untyped=False)
    parser.add_class_arguments(FisherMonitor, "fisher")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
    for source, target, function in recipe.links:
        parser.link_arguments(source, target, compute_fn=load(function) if function else None)
    parser.set_defaults(recipe.defaults)
    parser.set_defaults({"trainer.devices": 1, "trainer.default_root_dir": "runs"})
    parser.set_defaults({"trainer.enable_model_summary": False})
    # Validation goes by steps, because the length of an epoch differs with the data.
    parser.set_defaults({"trainer.check_val_every_n_epoch": None})
    return parser


def fill_in(config: Namespace, recipe: Recipe) -> str:
    """Set defaults that depend on the machine and on other options; what there is to say of it."""
    import torch

    trainer, note = config.trainer, ""
    check_numbers(trainer)
    if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
        on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
        trainer.max_steps = recipe.steps_on_cpu if on_cpu else recipe.steps
        if trainer.max_steps < recipe.steps:
            note = (
                f", {recipe.steps_on_cpu} steps on this CPU; the recipe: --max_steps {recipe.steps}"
            )
    return note


def say_when_to_validate(options: dict[str, Any]) -> None:
    """Set what nobody said of validation; a longer run gets another interval than a short one."""
    interval, most = options["val_check_interval"], options["max_steps"]
    if isinstance(interval, float) and not options["check_val_every_n_epoch"]:
        options["check_val_every_n_epoch"] = 1  # a fraction is one of an epoch
    if interval is None and options["check_val_every_n_epoch"] is None:
        options["val_check_interval"] = 500 if most < 1 else min(500, most)


def check_numbers(trainer: Namespace) -> None:
    """Raise for numbers that Lightning takes and fails on later, or takes for something else."""
    for name in ("val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches"):
        value = trainer[name]
        if isinstance(value, int | float) and value <= 0:
            off = "; --limit_val_batches 0 turns validation off" if "val_" in name else ""
            raise UsageError(f"--{name} must be positive, got {value}{off}")
    for name in ("log_every_n_steps", "gradient_clip_val"):
        if (trainer[name] or 0) < 0:
            raise UsageError(f"--{name} must not be negative, got {trainer[name]}")


def compose(command: str, parser: ArgumentParser, config: Namespace, ckpt_path: Path | None) -> Run:
    """Model, data and Trainer of a configuration, and the folder of the run."""
    import torch
    from lightning.pytorch import Trainer, seed_everything

    from catnat.callbacks import check_same, check_source
    from catnat.checks import require_precision
    from catnat.training.folders import open_run
    from catnat.training.trainer_options import check_options, standard_options

    if str(config.trainer.strategy).endswith("fork"):
        torch.set_num_threads(1)  # forked processes hang if OpenMP has begun threads before
    seed_everything(config.seed, workers=True, verbose=False)
    config.ckpt_path = None  # not part of what is saved
    saved, name = parser.dump(config), config.model.pop("name")
    # Since 4.49 jsonargparse calls it by the first name.
    objects = getattr(parser, "instantiate", parser.instantiate_classes)(config)
    options = objects.trainer.as_dict()
    say_when_to_validate(options)
    check_options(options)  # before anything is written
    require_precision(options["precision"])
    home = Path(options["default_root_dir"], name, config.model.head)
    if command == "test" and ckpt_path is None:
        raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
    if ckpt_path is not None:
        check_same(ckpt_path, objects.model)
    objects.data.prepare_data()
    objects.data.setup("fit")  # already here, because what is wrong with it is the user's to mend
    objects.data.train_dataloader()
    if ckpt_path is not None and command == "fit":
        check_source(ckpt_path, objects.data.hparams.get("source"))
    folder = open_run(home, ckpt_path, saved if command == "fit" else None)
    if command == "test":
        options["logger"] = options["logger"] or False  # only what was asked for is written
    standard = (objects.model, objects.fisher, folder, config.save_every)
    trainer = Trainer(**standard_options(options, *standard))
    return Run(objects.model, objects.data, trainer, folder, ckpt_path)


def load(path: str) -> Any:
    """The object behind a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
