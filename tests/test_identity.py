"""One class has one identity, by whatever name its folder is imported."""

import pytest
from cases_fresh import one_server, run_fresh


@one_server
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
    done = run_fresh("-c", code)
    assert done.returncode == 0, done.stderr
