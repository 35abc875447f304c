"""Every test starts from the same seed, on one thread, with deterministic hypothesis.

Slow tests are left out, except with ``-m`` (``-m slow`` runs them alone) and where the command
names them: ``pytest tests/test_x.py::test_y``. Tests marked ``gpu`` are skipped where there is no
CUDA device; ``pytest -m gpu`` runs them alone. Tests that share a fixture of their file (a wheel, a
Ray cluster) run in one worker, so that the fixture is made once.
"""

import atexit
import gc

import numpy as np
import pytest
import torch
from cases_mnist import write_mnist
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The imports make a million objects that stay: Python does not search them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries complain of objects that are never freed


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)  # a doctest may have none
        defined = fixtures.name2fixturedefs.values() if fixtures else ()
        shared = any(each[-1].scope == "module" for each in defined)
        if shared and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    _leave_out_slow_ones(config, items)
    if hasattr(config, "workerinput"):
        _write_groups(items)


def _leave_out_slow_ones(config, items):
    if config.option.markexpr:
        return
    named = tuple(word.partition("::")[2] for word in config.args if "::" in word)

    def left_out(item):
        name = item.nodeid.partition("::")[2]
        return item.get_closest_marker("slow") and not name.startswith(named)

    config.hook.pytest_deselected(items=list(filter(left_out, items)))
    items[:] = [item for item in items if not left_out(item)]


def _write_groups(items):
    """Groups stand in the ids of tests, where pytest-xdist reads them in its main process.

    pytest-xdist 3.8 writes them to an attribute that pytest 9.2 no longer reads.
    """
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group and hasattr(item, "_id"):
            item._id = item.parent.id.child(f"{item.name}@{group.args[0]}")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _validation():
    """Distributions check what they are given: torch.compile in another test turned that off."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A root folder with 72 training and 20 test images of noise, in MNIST's format."""
    pixels = np.random.default_rng(0).integers(0, 256, (92, 28, 28), dtype=np.uint8)
    images = torch.from_numpy(pixels)  # a generator of its own: no test's draws depend on this
    return write_mnist(tmp_path_factory.mktemp("data"), images[:72], images[72:])


@pytest.fixture
def workspace(tmp_path, monkeypatch, data):
    """An empty working directory, and the options of a run of a second, on the CPU everywhere."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch_size=10", "--max_steps=3", "--nll_samples=2"]
    sizes += ["--fisher.image_every_n_steps=0"]  # pictures take half of such a run
    return [f"--data.root={data}", "--accelerator=cpu", *sizes]
