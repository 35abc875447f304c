"""Who may import whom: the arrows of the architecture, read from the source with ast."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("lit_modules", "datamodules", "callbacks")
OURS = {"catnat", *SIDES, "train", "train_ppo", "experiments"}

# Beyond the standard library, torch and itself, what a file of catnat/ may import.
GUESTS = {
    "catnat/metrics.py": {"torchmetrics"},
    "catnat/networks.py": {"torch_geometric"},
    "catnat/sb3/": {"stable_baselines3", "gymnasium", "numpy"},
    "catnat/sb3/masked.py": {"sb3_contrib"},
    "catnat/ops/": {"triton"},
}


class Import(NamedTuple):
    line: int
    name: str  # absolute and dotted, down to the imported name
    level: int  # number of leading dots in the source


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, at any depth, relative ones resolved against root."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = (*base, *(node.module or "").split("."))
            for alias in node.names:
                yield Import(node.lineno, ".".join(filter(None, (*stem, alias.name))), node.level)


def reason(file: str, found: Import) -> str | None:
    """Why this import breaks a rule, or None."""
    home = file.removesuffix(".py").split("/")[0]
    top, second, *_ = (*found.name.split("."), "")
    if top == "catnat" and second in SIDES:  # the installed name of a side folder
        top = second
    if top == "experiments" and home != "experiments":
        return "nothing imports experiments"
    if home == "catnat":
        return _reason_in_library(file, top, second)
    if home in SIDES:
        return _reason_in_side(home, top, found.level)
    return None


def _reason_in_library(file: str, top: str, second: str) -> str | None:
    if top == "catnat":
        stranger = second == "sb3" and not file.startswith("catnat/sb3/")
        return "only users import catnat.sb3" if stranger else None
    if top in OURS:
        return f"the library does not know {top}"
    guests = set().union(*(names for where, names in GUESTS.items() if file.startswith(where)))
    if top in {"torch", *guests} or top in sys.stdlib_module_names:
        return None
    return f"{top} has no place here"


def _reason_in_side(home: str, top: str, level: int) -> str | None:
    if top == home:
        return None if level else f"files of {home} import each other relatively"
    if level:
        return f"a relative import leaves {home}"
    return f"{home} does not know {top}" if top in OURS - {"catnat"} else None


def violations(root: Path) -> list[str]:
    """One line for each import under root that breaks a rule."""
    folders = ("catnat", *SIDES, "experiments")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    mains = [root / name for name in ("train.py", "train_ppo.py", "ppo_options.py")]
    paths += [path for path in mains if path.exists()]
    found = []
    for path in paths:
        file = path.relative_to(root).as_posix()
        for each in imports(path, root):
            if why := reason(file, each):
                found.append(f"{file}:{each.line}: imports {each.name}: {why}")
    return found


def test_imports_follow_the_layers():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("catnat/heads.py", "import lightning"),
        ("catnat/heads.py", "from torchmetrics import Metric"),
        ("catnat/heads.py", "def f():\n    import numpy as np"),
        ("catnat/heads.py", "import datamodules"),
        ("catnat/__init__.py", "from . import sb3"),
        ("catnat/__init__.py", "from .sb3 import HeadActorCriticPolicy"),
        ("catnat/probe.py", "from catnat.callbacks import FisherMonitor"),
        ("catnat/ops/tree.py", "from .. import sb3"),
        ("catnat/sb3/policies.py", "import sb3_contrib"),
        ("catnat/sb3/policies.py", "import lightning"),
        ("lit_modules/vae.py", "from datamodules import MNISTDataModule"),
        ("lit_modules/vae.py", "from lit_modules.graph import GraphStructureLearner"),
        ("lit_modules/vae.py", "from ..catnat import make_head"),
        ("callbacks/fisher.py", "from catnat.lit_modules import DiscreteVAE"),
        ("datamodules/mnist.py", "import train"),
        ("train.py", "from experiments import sweep"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source):
    plant(tmp_path, file, source)
    (line,) = violations(tmp_path)
    assert line.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("catnat/heads.py", "import math\nfrom torch import nn\nfrom ._tree import Tree"),
        ("catnat/metrics.py", "from torchmetrics import Metric"),
        ("catnat/ops/tree.py", "import triton\nfrom .._numerics import safe_log"),
        ("catnat/sb3/policies.py", "import gymnasium\nfrom .distributions import draw"),
        ("catnat/sb3/masked.py", "import sb3_contrib"),
        ("lit_modules/mlp_vae.py", "import lightning\nfrom catnat import make_head"),
        ("lit_modules/mlp_vae.py", "from .vae import DiscreteVAE"),
        ("train.py", "from lit_modules import DiscreteVAE\nfrom callbacks import FisherMonitor"),
        ("experiments/sweep.py", "import train"),
    ],
)
def test_what_the_layers_allow_passes(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert violations(tmp_path) == []


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def test_importing_catnat_stays_light():
    heavy = {
        "lightning", "pytorch_lightning", "torchvision", "torchmetrics", "torch_geometric",
        "stable_baselines3", "gymnasium", "matplotlib", "scipy",
    }  # fmt: skip
    code = (
        "import sys, torch; before = set(sys.modules); import catnat; catnat.head_names();"
        f"print(*sorted((set(sys.modules) - before) & {heavy!r}))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == []
