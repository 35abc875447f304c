"""What a terminal shows of a run: one bar of all its steps, and how long a test takes."""

import re

import pytest
import torch
from cases_callbacks import Memory, Small, loader, quiet_trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from catnat.callbacks import progress
from catnat.callbacks.progress import RunProgressBar, TestTime
from catnat.lit_modules import DiscreteVAE


class Bar(RunProgressBar):
    """Keeps the steps, the total and the rate's first step at the end of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, *args, **kwargs):
        super().on_train_batch_end(*args, **kwargs)
        bar = self.train_progress_bar
        self.seen.append((bar.n, bar.total, bar.initial))


class Named(Memory):
    version = "version_0"


@pytest.mark.parametrize(
    ("limits", "total"),
    [({"max_steps": 8}, 8), ({"max_epochs": 2}, 10), ({"max_epochs": 9, "max_steps": 7}, 7)],
)
def test_one_bar_counts_the_steps_of_all_epochs(limits, total, capsys):
    bar = Bar()
    trainer = quiet_trainer(**limits, logger=Named(), enable_progress_bar=True, callbacks=[bar])
    trainer.fit(Small(), loader())  # five batches
    assert bar.seen == [(step, total, 0) for step in range(1, total + 1)]
    shown = capsys.readouterr().out
    assert f" {total}/{total} [" in shown and "Epoch 1:" in shown
    assert "v_num" not in shown and "-2" not in shown


def test_the_bar_of_a_resumed_run_begins_where_the_run_stopped(tmp_path, capsys):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    saving = quiet_trainer(max_steps=3, enable_checkpointing=True, callbacks=[save])
    saving.fit(Small(), loader())
    bar = Bar()
    trainer = quiet_trainer(max_steps=7, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(Small(), loader(), ckpt_path=tmp_path / "step=3.ckpt")
    assert bar.seen == [(step, 7, 3) for step in (4, 5, 6, 7)]


def test_the_bar_of_an_endless_run_has_no_end(capsys):
    bar = Bar()
    stop = LambdaCallback(on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", 1))
    endless = {"max_steps": -1, "max_epochs": -1, "enable_progress_bar": True}
    quiet_trainer(**endless, callbacks=[bar, stop]).fit(Small(), loader())
    assert bar.seen == [(step, None, 0) for step in range(1, 6)]


@pytest.mark.parametrize("bars", [[], [RunProgressBar()]])
def test_a_long_test_is_announced(bars, capsys, monkeypatch):
    images = torch.utils.data.DataLoader(torch.rand(30, 1, 28, 28), batch_size=10)
    model = DiscreteVAE(num_latents=2, num_categories=3, nll_samples=4)
    options = {"enable_progress_bar": bool(bars), "callbacks": [TestTime(), *bars]}
    quiet_trainer(**options).test(model, images, verbose=False)
    assert "testing:" not in capsys.readouterr().out, "a short test needs no line"
    monkeypatch.setattr(progress, "_LONG", 0.0)
    quiet_trainer(**options).test(model, images, verbose=False)
    line = r"testing: 3 batches, 4 samples of each image, about \d+:\d\d:\d\d"
    assert len(re.findall(line, capsys.readouterr().out)) == 1
