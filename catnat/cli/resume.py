"""Resuming a run: the options it began with, and a line about those that differ now."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import yaml

from catnat.cli.errors import UsageError
from catnat.cli.names import Names, read_yaml

# Options that say how a run is watched, or where it runs: it learns the same whatever they are.
_MAY_DIFFER = ("config", "ckpt_path", "trainer.default_root_dir", "trainer.enable_progress_bar",
               "trainer.callbacks", "trainer.logger", "trainer.log_formats", "trainer.profiler",
               "save_every", "fisher", "import", "data.init_args.root",
               "data.init_args.download")  # fmt: skip
_LENGTHS = ("max_steps", "total_steps")


def remark(names: Names, checkpoint: Mapping[str, Any], parser: Any, config: Any) -> str:
    """A remark about a run that is resumed: its step, and options that differ from the first ones.

    Args:
        names: from the command line.
        checkpoint: that is resumed.
        parser: of the options.
        config: all options.

    Raises:
        UsageError: the checkpoint is one of another model or another head.
    """
    here = config.model.get("init_args") or {}
    made = checkpoint.get("hyper_parameters", {})
    for name in ("head", "head_options"):
        if name in made and (made[name] or None) != (_plain(here.get(name)) or None):
            given = here.get(name)
            raise UsageError(f"checkpoint {names.ckpt_path} has {name} {made[name]}, not {given}")
    said = f", resumed after step {checkpoint.get('global_step')}"
    if names.record is None:
        return said
    began = read_yaml(str(names.record))
    if began["model"]["class_path"] != config.model.class_path:
        of = began["model"]["class_path"]
        raise UsageError(f"checkpoint {names.ckpt_path} is one of another model: {of}")
    found = differences(began, yaml.safe_load(dump(parser, config)))
    if not found:
        return said
    listed = ", ".join(f"{name} {then} -> {now}" for name, (then, now) in found.items())
    said += f", with other options than it began with: {listed}"
    anneals = here.get("anneal_lr") or here.get("lr_schedule", "constant") != "constant"
    if anneals and any(name in found for name in _LENGTHS):
        said += "; the learning rate falls until the new last step, so it is higher now"
    return said


def dump(parser: Any, config: Any) -> str:
    """All options as YAML, also those that are None."""
    new = tuple(map(int, version("jsonargparse").split(".")[:2])) >= (4, 49)
    text: str = parser.dump(config, **{"skip_unset" if new else "skip_none": False})
    return text


def differences(began: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ from those a run began with, by short name: then and now."""
    before, after = _flat(began), _flat(now)
    return {
        name.replace("init_args.", "").partition(".")[2] or name: (before.get(name), after[name])
        for name in after
        if before.get(name) != after[name] and not name.startswith(_MAY_DIFFER)
    }


def _flat(options: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Options by full name; a dictionary's items count one by one."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def _plain(value: Any) -> Any:
    """A namespace as a dictionary."""
    return value.as_dict() if hasattr(value, "as_dict") else value
