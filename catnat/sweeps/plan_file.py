"""Plans are YAML files, whose keys are the attributes of :class:`catnat.sweeps.plan.Plan`.

``base`` names the file of a plan that it changes, at the same scale (null takes a key away);
``scales`` has versions of the plan by name. Files and folders are relative to the plan's folder.
"""

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader

from catnat.checks import require_choice
from catnat.cli.names import Options
from catnat.sweeps.plan import Plan


def scales(name: str) -> list[str]:
    """The scales of a plan."""
    try:
        content = _read(Path(name))
    except RecursionError:
        raise ValueError(f"{name}: its base leads back to itself") from None
    return list(content.get("scales") or {"": {}})


def load(name: str, scale: str | None = None) -> Plan:
    """A plan by its file, at a scale (default: small, else its first).

    A ValueError says what is wrong.
    """
    path = Path(name)
    scale_names = scales(name)
    if scale and scale_names == [""]:
        raise ValueError(f"{path.name} has no scales, {scale!r} is not one")
    scale = scale or ("small" if "small" in scale_names else scale_names[0])
    require_choice(scale_names, **{f"scale of {path.name}": scale})
    content = _read(path, scale)
    content.pop("scales", None)
    for part in ("metrics", "grid", "options", "search", "names"):
        try:
            _mapping(content.get(part))
        except ValueError as error:
            raise ValueError(f"{path.name}, {part}: {error}") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Plan, "plan")
    try:
        plan = parser.instantiate(parser.parse_object({"plan": content})).plan
    except (ValueError, ArgumentError) as error:
        raise ValueError(f"{path.name}, scale {scale}: {error}") from error
    plan.name = path.stem
    plan.scale = scale
    plan.folders = [plan.path, str(path.parent.resolve())]
    return plan


def _read(path: Path, scale: str = "") -> Options:
    """A file at a scale, laid over its base at that scale."""
    try:
        content = _mapping(get_loader("yaml")(path.read_text()))
        layer = _mapping(_mapping(content.get("scales")).get(scale))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    base = content.pop("base", None)
    result = {} if base is None else _read(path.parent / str(base), scale)
    for above in (content, layer):
        for key in above.keys() & {"path", "results"}:
            above[key] = above[key] and str((path.parent / str(above[key])).resolve())
        result = merged(result, above)
    return result


def _mapping(value: Any) -> Options:
    if not isinstance(value or {}, dict) or not all(isinstance(key, str) for key in value or ()):
        raise ValueError(f"expected keys and values, got {value!r}")
    return value or {}


def merged(below: Options, above: Options) -> Options:
    """Mappings laid over each other at every depth; None takes a key away."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result
