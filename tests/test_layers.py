"""Who may import whom: the arrows of the architecture, read from the source with ast.

torch -> catnat -> lit_modules, datamodules, callbacks -> catnat.cli -> train -> experiments; docs,
examples and benchmarks are users, and nothing imports them.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from cases_fresh import one_server, run_fresh

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("lit_modules", "datamodules", "callbacks")  # know catnat, and never each other
WALKED = ("catnat", *SIDES, "experiments", "benchmarks", "examples", "docs", "results")
# Programs at the root, and the programs that each of them may import.
PROGRAMS = {
    "train": set(),
    "examples": {"examples"},
    "experiments": {"experiments", "train"},
    "benchmarks": {"benchmarks", "experiments", "train"},
}

# Beyond the standard library, torch and itself, what a file of catnat/ may import.
GUESTS = {
    "catnat/metrics.py": {"torchmetrics"},
    "catnat/graphs.py": {"torch_geometric"},
    "catnat/rng.py": {"numpy"},
    "catnat/sb3/": {"stable_baselines3", "gymnasium", "numpy"},
    "catnat/kernels/": {"triton"},
    "catnat/jax/": {"jax", "numpy"},
    "catnat/sb3/contrib.py": {"sb3_contrib"},
}
ISLANDS = ("sb3", "jax", "cli")  # packages of catnat that the rest of catnat does not import


TYPING = "TYPE_CHECKING"
IMPORTERS = ("import_module", "__import__")


class Import(NamedTuple):
    line: int
    name: str  # absolute and dotted, down to the imported name
    level: int  # number of leading dots in the source


def imports(path: Path, for_types: bool = True) -> Iterator[Import]:
    """Every import in a file, at any depth; also those under TYPE_CHECKING, unless told not to."""
    tree = ast.parse(path.read_text(), str(path))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and _name(n.test) == TYPING]
    left_out = {id(n) for block in blocks for n in ast.walk(block)} if not for_types else set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = ".".join(filter(None, (node.module, alias.name)))
                yield Import(node.lineno, name, node.level)
        elif isinstance(node, ast.Call) and _name(node.func) in IMPORTERS:
            names = (each.value for each in node.args[:1] if isinstance(each, ast.Constant))
            yield from (Import(node.lineno, str(name), 0) for name in names)


def _name(function: ast.expr) -> str:
    """The last part of a dotted name: ``import_module`` of ``importlib.import_module``."""
    return getattr(function, "attr", getattr(function, "id", ""))


def reason(file: str, found: Import) -> str | None:
    """Why this import breaks a rule, or None."""
    home = file.removesuffix(".py").split("/")[0]
    top, second, *_ = (*found.name.split("."), "")
    if found.level and home != "examples":
        return "imports are absolute"
    if not found.level and top in SIDES:
        return f"it is called catnat.{top}"
    if top in PROGRAMS and top not in PROGRAMS.get(home, set()):
        return f"{home} does not know {top}"
    if file.startswith("catnat/cli/"):
        return None  # composes all layers
    if top == "catnat" and second in (*SIDES, "cli"):
        return _reason_above_the_library(home, second)
    return _reason_in_library(file, top, second) if home == "catnat" else None


def _reason_above_the_library(home: str, wanted: str) -> str | None:
    if home == "catnat":
        return f"the library does not know {wanted}"
    if home in SIDES and wanted != home:
        return f"{home} does not know {wanted}"
    return None


def _reason_in_library(file: str, top: str, second: str) -> str | None:
    if top == "catnat":
        stranger = second in ISLANDS and not file.startswith(f"catnat/{second}/")
        if stranger:
            return f"only users import catnat.{second}"
        apart = file.startswith("catnat/jax/") and second not in ("jax", "checks")
        return "catnat.jax works without torch" if apart else None
    if top == "torch" and file.startswith("catnat/jax/"):
        return "catnat.jax works without torch"
    guests = set().union(*(names for where, names in GUESTS.items() if file.startswith(where)))
    if top in {"torch", *guests} or top in sys.stdlib_module_names:
        return None
    return f"{top} has no place here"


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Every source file under root, with its path from there; a link is not followed."""
    paths = [root / "train.py", *(p for folder in WALKED for p in (root / folder).rglob("*.py"))]
    for path in sorted(path for path in paths if path.exists()):
        file = path.relative_to(root).as_posix()
        if not file.startswith(tuple(f"catnat/{home}/" for home in SIDES)):
            yield file, path


def violations(root: Path) -> list[str]:
    """One line for each import under root that breaks a rule."""
    return [
        f"{file}:{each.line}: imports {each.name}: {why}"
        for file, path in walk(root)
        for each in imports(path)
        if (why := reason(file, each))
    ]


def module_graph(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports, for all modules under root but packages."""
    paths = {}
    for file, path in walk(root):
        module = file.removesuffix(".py").replace("/", ".")
        paths[f"catnat.{module}" if module.startswith(SIDES) else module] = path
    paths = {module: path for module, path in paths.items() if not module.endswith("__init__")}

    def target(name: str) -> str:
        return name if name in paths else name.rpartition(".")[0]

    return {
        module: {target(each.name) for each in imports(path, for_types=False)} & paths.keys()
        for module, path in paths.items()
    }


def test_imports_follow_the_layers():
    assert violations(ROOT) == []


def test_every_folder_with_source_is_walked():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    files = [line for line in tracked.stdout.splitlines() if (ROOT / line).exists()]
    tops = {line.split("/")[0] for line in files}
    assert tops <= {*WALKED, "tests", "train.py", "setup.py"}


def test_no_two_modules_import_each_other():
    graph = module_graph(ROOT)
    assert {
        "catnat.flat_heads",
        "catnat.callbacks.images",
        "train",
        "experiments.plan",
    } <= graph.keys()
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the modules


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("catnat/heads.py", "import lightning"),
        ("catnat/heads.py", "def f():\n    import numpy as np"),
        ("catnat/heads.py", "import datamodules"),
        ("catnat/heads.py", "from .tree import levels"),
        ("catnat/__init__.py", "from catnat.sb3 import HeadActorCriticPolicy"),
        ("catnat/probe.py", "from catnat.callbacks import FisherMonitor"),
        ("catnat/probe.py", "import importlib\nimportlib.import_module('catnat.cli')"),
        ("catnat/sb3/policies.py", "import sb3_contrib"),
        ("catnat/jax/flat_heads.py", "import torch"),
        ("catnat/jax/flat_heads.py", "from catnat.tree import levels"),
        ("lit_modules/vae.py", "from catnat.datamodules import MNISTDataModule"),
        ("callbacks/fisher_monitor.py", "from catnat.cli.folders import RunFolder"),
        ("datamodules/mnist.py", "import train"),
        ("experiments/sweep.py", "from benchmarks import bench_vae"),
        ("examples/quickstart.py", "from experiments import sweep"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source):
    plant(tmp_path, file, source)
    (line,) = violations(tmp_path)
    assert line.startswith(f"{file}:")


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@one_server
def test_importing_catnat_stays_light():
    heavy = {
        "lightning", "pytorch_lightning", "torchvision", "torchmetrics", "torch_geometric",
        "stable_baselines3", "gymnasium", "matplotlib", "scipy",
    }  # fmt: skip
    code = (
        f"import sys\nfor name in {heavy!r}: sys.modules.pop(name, None)\n"
        f"import catnat; catnat.head_names(); print(*sorted(sys.modules.keys() & {heavy!r}))"
    )
    out = run_fresh("-c", code)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == []
