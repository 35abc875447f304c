"""One class has one identity, by whatever name its folder is imported."""

from cases_fresh import one_server, run_fresh

CODE = """
import callbacks, datamodules, lit_modules
import catnat.callbacks, catnat.datamodules, catnat.lit_modules

assert callbacks.FisherMonitor is catnat.callbacks.FisherMonitor
assert datamodules.MNISTDataModule is catnat.datamodules.MNISTDataModule
assert lit_modules.DiscreteVAE is catnat.lit_modules.DiscreteVAE
for name in ("callbacks.checkpoints", "datamodules.mnist", "lit_modules.vae"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"a second {name}")
"""


@one_server
def test_a_bare_name_gives_the_same_class_or_an_import_error():
    done = run_fresh("-c", CODE)
    assert done.returncode == 0, done.stderr
