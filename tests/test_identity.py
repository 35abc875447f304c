"""One class has one identity, by whatever name its folder is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("folder", "name", "submodule"),
    [
        ("lit_modules", "DiscreteVAE", "vae"),
        ("callbacks", "FisherMonitor", "checkpoints"),
        ("datamodules", "MNISTDataModule", "mnist"),
    ],
)
def test_a_bare_name_gives_the_same_class_or_an_import_error(folder, name, submodule):
    code = f"""
import {folder}, catnat.{folder}
assert {folder}.{name} is catnat.{folder}.{name}
try:
    import {folder}.{submodule}
except ImportError:
    pass
else:
    raise AssertionError("a second {submodule}")
"""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
