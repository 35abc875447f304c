"""What experiments know of train.py: its command line, imports, and loading a run.

Runs that are trained together know more: ``together/members.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.schema import PlanError

if TYPE_CHECKING:
    from experiments.plan import Experiment

ROOT = Path(__file__).resolve().parent.parent
_SCRIPT = ROOT / "train.py"

# Modules that train.py imports late. Not torch_geometric: it asks for CUDA devices when imported.
_LIGHTNING = (
    "catnat.training.lightning",
    "catnat.lit_modules",
    "catnat.datamodules",
    "torch.utils.tensorboard",
)
_KERNELS = "catnat.ops.triton_sparsemax"


def models() -> tuple[str, ...]:
    """The names that --model takes."""
    from catnat.training.names import MODELS

    return MODELS


def command(experiment: Experiment, options: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """The command line of a run."""
    if experiment.program:
        words, first = program_words(experiment.program, experiment.file), []
    else:
        words = [str(_SCRIPT)]
        first = [("model", experiment.model), *(("import", each) for each in experiment.imports)]
    pairs = [*first, *options.items(), ("default_root_dir", folder)]
    given = [f"--{option}={_text(value)}" for option, value in pairs]
    return (sys.executable, *words, *given, *experiment.extra)


def program_words(program: str, plan: Path) -> list[str]:
    """A program and its first words; a script lies beside the plan, or in the checkout."""
    script, *words = program.split()
    if script == "-m":
        return [script, *words]
    found = next((each / script for each in (plan.parent, ROOT) if (each / script).is_file()), None)
    if found is None:
        raise PlanError(f"program: there is no {script} in {plan.parent} or {ROOT}")
    return [str(found), *words]


def is_train(words: Sequence[str]) -> bool:
    """Whether a command is one of train.py."""
    return Path(words[1]).name == _SCRIPT.name


def imports(words: Sequence[str]) -> tuple[str, ...]:
    """The modules that a command will import."""
    from catnat.training.names import RL_MODELS

    models = [word.removeprefix("--model=") for word in words if word.startswith("--model=")]
    if not models:
        return ()
    return ("catnat.training.rl", _KERNELS) if models[-1] in RL_MODELS else (*_LIGHTNING, _KERNELS)


def load_run(folder: Path) -> tuple[Any, Any]:
    """The trained module of a run, on the CPU in eval mode, and its data module, set up."""
    import torch

    from catnat.training.command import configure
    from catnat.training.errors import UsageError
    from catnat.training.names import read_names
    from catnat.training.options import instantiate

    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ValueError(
            f"there is no checkpoint {path}; runs that restore.py made again have none"
        )
    try:
        names, options = read_names([f"--config={folder / 'config.yaml'}"])
        _, parser, config = configure(names, options)
    except UsageError as error:
        raise ValueError(f"{folder}: {error}") from error
    objects = instantiate(parser, config)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    objects.model.load_state_dict(saved["state_dict"])
    objects.data.prepare_data()
    objects.data.setup("test")
    return objects.model.eval(), objects.data


def _text(value: Any) -> str:
    """A value as train.py reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
