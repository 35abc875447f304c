"""Who may import whom: the arrows of the architecture, read from the source with ast.

torch -> catnat -> lit_modules, datamodules, callbacks -> catnat.cli -> catnat.sweeps -> train;
docs, examples, benchmarks and paper are users, and nothing imports them.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from cases_fresh import check_fresh, one_server

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("lit_modules", "datamodules", "callbacks")  # links make them packages of catnat
WALKED = ("catnat", *SIDES, "benchmarks", "examples", "docs", "paper")

# The rooms of the house, and the rooms that each may import from.
TORCHLESS = {"catnat.checks", "catnat.heads.natural"}
LIBRARY = {"catnat", *TORCHLESS, "catnat.sb3", "catnat.jax", "catnat.integrations"}
CATNAT = LIBRARY | {f"catnat.{side}" for side in SIDES} | {"catnat.cli", "catnat.sb3.train"}
KNOWS = {
    "catnat": {"catnat", *TORCHLESS},
    **{room: set() for room in TORCHLESS},
    "catnat.sb3": {"catnat", *TORCHLESS, "catnat.sb3"},
    "catnat.sb3.train": {*LIBRARY, "catnat.callbacks", "catnat.datamodules"},  # a whole run
    "catnat.jax": {*TORCHLESS, "catnat.jax"},  # which works without torch
    "catnat.integrations": {"catnat", *TORCHLESS, "catnat.integrations"},
    **{f"catnat.{side}": {*LIBRARY, f"catnat.{side}"} for side in SIDES},
    "catnat.cli": {*CATNAT, "catnat.sweeps"},  # the command dispatches to both
    "catnat.sweeps": {*CATNAT, "catnat.sweeps"},
    "catnat.__main__": {"catnat.cli"},
    "train": CATNAT,
    "benchmarks": {*CATNAT, "catnat.sweeps", "benchmarks", "train"},
    "examples": {*CATNAT, "examples"},
    "docs": CATNAT,
    "paper": {*CATNAT, "catnat.sweeps", "paper"},
    **{side: set() for side in SIDES},  # a second name of catnat.callbacks and the like
}
# Beyond the standard library, what a file of the library may import: the longest beginning counts.
SB3 = {"torch", "stable_baselines3", "gymnasium", "numpy"}
GUESTS = {
    "catnat": {"torch"},
    **{room: set() for room in TORCHLESS},
    "catnat.metrics": {"torch", "torchmetrics"},
    "catnat.lightning_compat": {"torch", "lightning"},
    "catnat.graphs": {"torch", "torch_geometric"},
    "catnat.rng": {"torch", "numpy"},
    "catnat.kernels": {"torch", "triton"},
    "catnat.sb3": SB3,
    "catnat.sb3.policies": {*SB3, "sb3_contrib"},
    "catnat.sb3.train": {*SB3, "yaml"},
    "catnat.sb3.recipes": {*SB3, "jsonargparse"},  # they say what options are
    "catnat.jax": {"jax", "numpy"},
    "catnat.integrations.transformers": {"torch", "transformers"},
}


def imports(path, for_types=True):
    """(line, dotted name) of every import in a file, at any depth; a relative one has its dots.

    Also those under TYPE_CHECKING, unless told not to.
    """
    tree = ast.parse(path.read_text(), str(path))
    blocks = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and _name(n.test) == "TYPE_CHECKING"
    ]
    left_out = {id(n) for block in blocks for n in ast.walk(block)} if not for_types else set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((node.lineno, start + alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            names = (
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )
            yield from ((node.lineno, str(name)) for name in names)


def _name(function):
    """The last part of a dotted name: ``import_module`` of ``importlib.import_module``."""
    return getattr(function, "attr", getattr(function, "id", ""))


def beginning(module, names):
    """The longest of the names that a module has, or begins with; or nothing."""
    beginnings = [name for name in names if f"{module}.".startswith(f"{name}.")]
    return max(beginnings, key=len, default="")


def allowed(module, name):
    """Whether a module may import a name."""
    home = beginning(module, KNOWS)
    room = beginning(name, KNOWS)
    if name.startswith("."):
        return home == "examples"
    if room:
        return room in KNOWS[home]
    if home not in LIBRARY:
        return True
    return name.split(".")[0] in GUESTS[beginning(module, GUESTS)] | sys.stdlib_module_names


def modules(root):
    """Every source file under root by the name of its module; a link is not followed."""
    paths = [root / "train.py", *(p for folder in WALKED for p in (root / folder).rglob("*.py"))]
    paths_by_module = {}
    for path in sorted(path for path in paths if path.exists()):
        first, *inner = path.relative_to(root).with_suffix("").parts
        if first != "catnat" or inner[0] not in SIDES:
            paths_by_module[".".join(("catnat",) * (first in SIDES) + (first, *inner))] = path
    return paths_by_module


def violations(root):
    """One line for each import under root that breaks a rule."""
    return [
        f"{path.relative_to(root)}:{line}: imports {name}"
        for module, path in modules(root).items()
        for line, name in imports(path)
        if not allowed(module, name)
    ]


def test_imports_follow_the_layers():
    assert violations(ROOT) == []


def test_every_folder_with_source_is_walked():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    files = [line for line in tracked.stdout.splitlines() if (ROOT / line).exists()]
    tops = {line.split("/")[0] for line in files}
    assert tops <= {*WALKED, "tests", "conftest.py", "train.py", "setup.py"}


def test_no_two_modules_import_each_other():
    paths = {name: path for name, path in modules(ROOT).items() if not name.endswith("__init__")}
    assert {"catnat.heads.flat", "catnat.callbacks.images", "train"} <= paths.keys()
    graph = {}
    for module, path in paths.items():
        names = [name for _, name in imports(path, for_types=False)]
        targets = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = targets & paths.keys()
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the modules


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("catnat/heads/registry.py", "import lightning"),
        ("catnat/heads/registry.py", "def f():\n    import numpy as np"),
        ("catnat/heads/registry.py", "from .tree import levels"),
        ("catnat/__init__.py", "from catnat.sb3 import HeadActorCriticPolicy"),
        ("catnat/heads/probe.py", "import importlib\nimportlib.import_module('catnat.cli')"),
        ("catnat/sb3/masks.py", "import sb3_contrib"),
        ("catnat/jax/flat_heads.py", "import torch"),
        ("lit_modules/vae.py", "from catnat.datamodules import MNISTDataModule"),
        ("datamodules/mnist.py", "import train"),
        ("examples/quickstart.py", "from benchmarks import bench_vae"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (line,) = violations(tmp_path)
    assert line.startswith(f"{file}:")


# What the extras of pyproject.toml bring: pip install catnat has torch and numpy alone.
WITHOUT_EXTRAS = """
import sys

EXTRAS = {
    "lightning", "pytorch_lightning", "torchvision", "torchmetrics", "torch_geometric", "yaml",
    "stable_baselines3", "gymnasium", "tensorboard", "matplotlib", "scipy", "rich", "jsonargparse",
}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if name.partition(".")[0] in EXTRAS]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())

import torch
import catnat
from catnat.losses import HeadNLL

for name in catnat.head_names():
    loss = HeadNLL(name, 5)
    scores = torch.zeros(3, loss.head.num_scores, requires_grad=True)
    loss(scores, torch.tensor([0, 1, 4])).backward()
    loss.head(scores).sample()
    loss.head.fisher(scores)
layer = catnat.TreeLinear(4, 10)
layer.nll(torch.zeros(3, 4), torch.tensor([0, 1, 9])).mean().backward()
"""


@one_server
def test_heads_losses_and_the_output_layer_need_torch_and_numpy_alone():
    check_fresh("-c", WITHOUT_EXTRAS)


ONE_IDENTITY = """
import callbacks, datamodules, lit_modules
import catnat.callbacks, catnat.datamodules, catnat.lit_modules

assert callbacks.FisherMonitor is catnat.callbacks.FisherMonitor
assert datamodules.MNISTDataModule is catnat.datamodules.MNISTDataModule
assert lit_modules.DiscreteVAE is catnat.lit_modules.DiscreteVAE

from callbacks.checkpoints import LastCheckpoint
from datamodules.atari import make_atari_vec_env
from lit_modules.vae import DiscreteVAE
import callbacks.files, lit_modules.networks, pickle
import catnat.callbacks.files, catnat.lit_modules.networks, catnat.datamodules.atari

assert LastCheckpoint is catnat.callbacks.LastCheckpoint
assert make_atari_vec_env is catnat.datamodules.atari.make_atari_vec_env
assert DiscreteVAE is catnat.lit_modules.DiscreteVAE
assert callbacks.files is catnat.callbacks.files
assert lit_modules.networks is catnat.lit_modules.networks
assert lit_modules.networks.__spec__.name == "catnat.lit_modules.networks"
assert pickle.loads(pickle.dumps(DiscreteVAE)) is DiscreteVAE
try:
    import lit_modules.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'lit_modules.nothing'", error
else:
    raise AssertionError("lit_modules.nothing is found")
"""


@one_server
def test_a_bare_name_gives_the_same_modules_and_classes():
    check_fresh("-c", ONE_IDENTITY)
