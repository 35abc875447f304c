"""The model and the data of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cli
import train


def load_run(folder: Path) -> tuple[Any, Any]:
    """The trained module on the CPU, in eval mode, and its data module, set up."""
    config_file = folder / "config.yaml"
    names, options = cli.read_names([f"--config={config_file}"], train.MODELS)
    parser = train.build_parser(names.model)
    config = cli.parse(parser, options)
    config.model.pop("name")
    objects = getattr(parser, "instantiate", parser.instantiate_classes)(config)
    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    objects.model.load_state_dict(saved["state_dict"])
    objects.data.prepare_data()
    objects.data.setup("test")
    return objects.model.eval(), objects.data
