"""The private names of Lightning that catnat.lightning_compat uses: what each of them must do.

A test that fails here names what a release of Lightning has moved. Mend ``lightning_compat.py``,
the only file that uses these names, or lower the bound of ``lightning`` in ``pyproject.toml``.
"""

import re
from pathlib import Path

import lightning
import pytest
import torch
from cases_callbacks import Memory, Small, loader, quiet_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim.lr_scheduler import StepLR

from catnat import lightning_compat as compat

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(compat.__file__).parents[1]


def fit(callback=None, model=None, **options):
    """A run of three epochs of five batches; its trainer."""
    callbacks = [] if callback is None else [callback]
    options = {"max_epochs": 3, "callbacks": callbacks} | options
    trainer = quiet_trainer(**options)
    trainer.fit(model or Small(), loader(), loader(batches=1))
    return trainer


def moved(name):
    """The sentence of a test that fails."""
    return f"Lightning {lightning.__version__} has moved or changed {name}: see lightning_compat.py"


class At(Callback):
    """Calls a function at the end of each batch, and keeps the results."""

    def __init__(self, function):
        self.function, self.results = function, []

    def on_train_batch_end(self, trainer, module, *args):
        self.results.append(self.function(trainer, module))


def test_no_other_file_uses_private_names_of_lightning():
    private = re.compile(
        r"lightning\.\w[\w.]* import \(?[^\n]*\b_[a-z]\w*"
        r"|\b(trainer|fit_loop|epoch_loop|strategy|launcher|loop)\._[a-z]\w*"
        r"|pl_module\._[a-z]\w*|module\._(trainer|current_fx_name|results)\b"
    )
    folders = ("catnat", "callbacks", "lit_modules", "datamodules")
    files = {path.resolve() for name in folders for path in (ROOT / name).rglob("*.py")}
    lines = [
        f"{path.name}: {line.strip()}"
        for path in sorted(files)
        if path.name != "lightning_compat.py"
        for line in path.read_text().splitlines()
        if private.search(line)
    ]
    assert not lines, "use a function of lightning_compat.py in place of these"


def test_every_function_of_the_file_is_tested_here():
    tests = Path(__file__).read_text()
    assert all(f"compat.{name}" in tests for name in compat.__all__)


def test_pyproject_bounds_the_releases_that_were_tested():
    assert re.search(r'"lightning>=2\.6\.1,<2\.7"', (ROOT / "pyproject.toml").read_text())


def test_module_trainer():
    model = Small()
    assert compat.trainer_of(model) is None, moved("LightningModule._trainer")
    trainer = fit(model=model, max_epochs=1)
    assert compat.trainer_of(model) is trainer, moved("LightningModule._trainer")


def test_detect_anomaly():
    for wanted in (True, False):
        trainer = quiet_trainer(detect_anomaly=wanted)
        assert compat.detects_anomalies(trainer) is wanted, moved("Trainer._detect_anomaly")


def test_automatic_optimization_takes_every_step_and_has_the_counts():
    """A loop of one's own is run for every batch, and its counts are those of the trainer."""

    class Own(compat.AutomaticOptimization):
        steps = 0

        def run(self, optimizer, batch_idx, kwargs):
            assert kwargs["batch"][0].shape == (8, 4), moved("kwargs of _AutomaticOptimization.run")
            Own.steps += 1
            compat.count_step(self)
            return {"loss": torch.zeros(())}

    class Install(Callback):
        def on_train_start(self, trainer, module):
            before = compat.optimization_loop(trainer)
            assert type(before) is compat.AutomaticOptimization
            compat.set_optimization_loop(trainer, Own(trainer))

    name = moved("epoch_loop.automatic_optimization, or _AutomaticOptimization.run")
    trainer = fit(Install())
    assert Own.steps == 15, name
    assert trainer.global_step == 15, moved("optim_progress.optimizer.step")
    eager = fit()
    states = [compat.optimization_loop(each).state_dict() for each in (trainer, eager)]
    assert states[0] == states[1], moved("the counts of _OptimizationProgress")


def test_batches_that_lightning_did_not_fetch_are_counted():
    """One of two batches is skipped, and the counts are those of all batches."""

    class Skip(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 1:
                next(trainer.fit_loop._data_fetcher.iterator)
                compat.count_batch(trainer)
                compat.count_step(compat.optimization_loop(trainer))

    name = moved("_data_fetcher.fetched, batch_progress.increment_by or _batches_that_stepped")
    trainer, eager = fit(Skip(), max_epochs=1), fit(max_epochs=1)
    loops = [each.fit_loop.epoch_loop for each in (trainer, eager)]
    assert loops[0].batch_progress == loops[1].batch_progress, name
    assert trainer.global_step == eager.global_step == 5, name
    assert compat.logged_step(trainer) == compat.logged_step(eager) == 5, name


def test_logged_step_is_the_step_of_metrics():
    logger = Memory()
    logged = At(lambda trainer, module: compat.logged_step(trainer))

    class Logs(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    trainer = fit(logged, Logs(), logger=logger)
    assert logged.results == list(logger.series("loss")) == list(range(15)), moved(
        "epoch_loop._batches_that_stepped"
    )
    compat.set_logged_step(trainer, 40)
    assert compat.logged_step(trainer) == 40


def test_metrics_of_a_step_are_written_before_lightning_does():
    logger = Memory()

    class Logs(Small):
        def on_train_batch_start(self, batch, batch_idx):
            self.log("early", 1.0)

    written = At(
        lambda trainer, module: [compat.log_step_now(trainer), "early" in logger.rows.get(0, {})]
    )
    fit(written, Logs(), logger=logger, max_epochs=1)
    assert written.results[0][1], moved("_logger_connector.update_train_step_metrics")


def test_a_module_logs_as_in_a_hook():
    def log(trainer, module):
        with compat.logging_in(module, "training_step"):
            module.log("loss", torch.ones(()), prog_bar=True)
        return trainer.callback_metrics.get("loss")

    late = At(log)
    trainer = fit(late, logger=Memory(), max_epochs=1)
    name = moved("LightningModule._current_fx_name")
    assert trainer.callback_metrics["loss"] == 1, name
    assert trainer.lightning_module._current_fx_name is None, name


def test_accumulates_says_which_batches_have_no_step():
    seen = At(lambda trainer, module: (compat.accumulates(trainer), trainer.global_step))
    fit(seen, accumulate_grad_batches=2, max_epochs=1)
    assert seen.results == [(True, 0), (False, 1), (True, 1), (False, 2), (False, 3)], moved(
        "epoch_loop._should_accumulate"
    )


def test_validates_now_says_which_batches_are_followed_by_a_validation():
    seen = At(lambda trainer, module: compat.validates_now(trainer))
    fit(seen, val_check_interval=2, max_epochs=1)
    assert seen.results == [False, True, False, True, False], moved(
        "epoch_loop._should_check_val_fx"
    )


def test_schedulers_of_steps_are_stepped():
    class Scheduled(Small):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plan = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
            return [optimizer], [plan, StepLR(optimizer, 1, 0.1)]

    again = At(lambda trainer, module: compat.step_schedulers(trainer))
    trainer = fit(again, Scheduled(), max_epochs=1)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.5 * 0.5**10 * 0.1), moved("epoch_loop.update_lr_schedulers")


def test_save_interval_is_that_of_a_model_checkpoint(tmp_path):
    every = ModelCheckpoint(tmp_path, every_n_train_steps=7)
    assert compat.save_interval(every) == 7, moved("ModelCheckpoint._every_n_train_steps")
    assert compat.save_interval(ModelCheckpoint(tmp_path, every_n_epochs=1)) == 0
    assert compat.save_interval(Callback()) == 0


def test_start_method_is_that_of_a_strategy_that_starts_processes():
    assert compat.start_method(quiet_trainer()) is None
    trainer = quiet_trainer(strategy="ddp_spawn", devices=2)
    assert compat.start_method(trainer) == "spawn", moved("_MultiProcessingLauncher")


def test_configured_optimizers_reads_what_configure_optimizers_returns():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    plan = {"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 3}
    name = moved("_configure_optimizers or _configure_schedulers_automatic_opt")
    returned = (optimizer, [optimizer], {"optimizer": optimizer, "lr_scheduler": plan})
    for configured, count in zip(returned, (0, 0, 1), strict=True):
        optimizers, schedulers = compat.configured_optimizers(configured)
        assert optimizers == [optimizer] and len(schedulers) == count, name
    assert (schedulers[0].interval, schedulers[0].frequency) == ("step", 3), name
    assert schedulers[0].reduce_on_plateau is False, name


def test_a_dummy_experiment_takes_every_call(tmp_path):
    experiment = compat.DummyExperiment()
    experiment.add_scalar("a", 1.0, 2)
    assert hasattr(experiment, "add_image"), moved("_DummyExperiment")
    assert not isinstance(TensorBoardLogger(tmp_path).experiment, compat.DummyExperiment)
