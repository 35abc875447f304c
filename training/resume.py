"""Going on from a checkpoint: the run keeps its configuration, except for what may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catnat.training import options as cli
from catnat.training.names import read_yaml, record_beside

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

HOW_LONG = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")

# Options that may differ from those the run was started with; a group's name stands for all of it.
MAY_CHANGE = (
    # How long: a longer run begins like a shorter one.
    *HOW_LONG,
    "trainer.min_steps",
    "trainer.min_epochs",
    # Where: the machine that goes on may be another one. The same data may lie elsewhere.
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.default_root_dir",
    "trainer.benchmark",
    "trainer.deterministic",
    "model.capture",
    "data.root",
    "data.download",
    # What is watched, written and tested: training is the same, whoever looks on.
    "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch",
    "trainer.callbacks",
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.enable_checkpointing",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "trainer.detect_anomaly",
    "trainer.inference_mode",
    "trainer.limit_val_batches",
    "trainer.limit_test_batches",
    "trainer.limit_predict_batches",
    "trainer.num_sanity_val_steps",
    "model.nll_samples",
    "model.test_passes",
    "fisher",
    "save_every",
    "import",
    "config",
    "ckpt_path",
)


def continued(
    parser: ArgumentParser,
    config: Namespace,
    given: set[str],
    path: Path,
    checkpoint: dict[str, Any],
    strict: bool,
) -> Namespace:
    """The configuration with which a checkpoint's run was started, changed by the command line.

    It is read from the ``config.yaml`` of the run; for a file that lies elsewhere, as far as they
    go, from the hyperparameters inside.

    Args:
        parser: of all options.
        config: what the command line says, with defaults.
        given: names of the options that the command line sets.
        path: of the checkpoint.
        checkpoint: its content.
        strict: refuse what may not change: a ``ValueError`` of one line names the option.
    """
    record = record_beside(path)
    inside = _hyperparameters(checkpoint, parser)
    if record is None:
        before = config.clone()
        for name, value in inside.items():
            before[name] = value
    else:
        _check_model(path, record, config.model.name)
        before = cli.parse(parser, [f"--config={record}"])
        for name in inside if strict else ():  # somebody may have edited the file
            _check(path, name, inside[name], before[name], str(record))
    if given.intersection(HOW_LONG):  # who says one of them leaves the others open
        for name in HOW_LONG:
            before[name] = config[name]
    for name in sorted(given):
        if strict:
            _check(path, name, before[name], config[name], "the command line")
        if not strict or may_change(name):
            before[name] = config[name]
    before["ckpt_path"] = config.ckpt_path
    return before


def may_change(name: str) -> bool:
    """Whether an option may differ from what the run was started with."""
    return any(name == each or name.startswith(f"{each}.") for each in MAY_CHANGE)


def _hyperparameters(checkpoint: dict[str, Any], parser: ArgumentParser) -> dict[str, Any]:
    groups = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters"}
    known = set(cli.option_names(parser))
    found = {
        f"{group}.{name}": value
        for group, key in groups.items()
        for name, value in checkpoint.get(key, {}).items()
    }
    return {name: value for name, value in found.items() if name in known}


def _check_model(path: Path, record: Path, name: str) -> None:
    made = (read_yaml(str(record)).get("model") or {}).get("name")
    if made != name:
        raise ValueError(f"checkpoint {path} is one of another model: {made}, not {name}")


def _check(path: Path, name: str, made: Any, said: Any, where: str) -> None:
    if not may_change(name) and not _agrees(said, made):
        short = cli.short_name(name)
        raise ValueError(f"checkpoint {path} has {short} {made}, {where} {said}")


def _agrees(said: Any, made: Any) -> bool:
    """Whether a value says nothing else: None leaves it open, a dictionary what it does not have.

    Lists and tuples are one: YAML knows no tuples.
    """
    if said is None:
        return True
    if isinstance(said, Mapping):
        return isinstance(made, Mapping) and all(
            key in made and _agrees(value, made[key]) for key, value in said.items()
        )
    if isinstance(said, list | tuple) and isinstance(made, list | tuple):
        return list(said) == list(made)
    return bool(said == made)
