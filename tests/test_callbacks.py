"""Pictures and checkpoints."""

import io
import os
import re
import signal
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from cases_callbacks import Memory, Small, loader
from cases_cli import run
from rich.console import Console

from catnat.callbacks import AtomicCheckpointIO, GraphFigures, ProgressLines, VAEFigures
from catnat.callbacks.checkpoints import StopSignals
from catnat.callbacks.images import heat_map, tile
from catnat.callbacks.stopwatch import Stopwatch
from catnat.callbacks.terminal import Bars, StepBar, line_of_test, progress_line
from catnat.callbacks.time_spent import TimeSpent


def test_tiles_and_heat_maps():
    images = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 3)
    grid = tile(images, 2)
    assert grid.shape == (4, 6, 1)
    assert grid[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert grid[3, :, 0].tolist() == [2, 2, 2, 3, 3, 3]
    assert torch.equal(tile(images[:, 0], 2), grid)
    picture = heat_map(torch.tensor([[0.0, 1.0]]), cell=2)
    assert picture.shape == (2, 4, 3)
    assert picture[0, :, 0].tolist() == [0, 0, 1, 1]


class Recording(Memory):
    """Keeps the pictures, too."""

    def __init__(self):
        super().__init__()
        self.images = {}

    @property
    def experiment(self):
        return self

    def add_image(self, tag, image, step, dataformats):
        self.images[tag] = image


def test_graph_figures_show_what_is_learned_beside_the_truth():
    class Module(Small):
        theta = torch.tensor([[0.0, 1.0], [0.5, 0.0]])

    class Data(L.LightningDataModule):
        edge_probs = torch.tensor([[1.0, 1.0], [0.0, 0.0]])

        def train_dataloader(self):
            return loader()

        val_dataloader = train_dataloader

    logger = Recording()
    trainer = L.Trainer(
        max_steps=1, val_check_interval=1, limit_val_batches=1, logger=logger,
        callbacks=[GraphFigures()], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module("softmax"), datamodule=Data())
    picture = logger.images["graph/theta"]
    assert picture.shape == (24, 60, 3)
    middles = picture[6::12, 6::12, 0].tolist()  # two columns, a strip between, two columns
    assert [row[:2] + row[3:] for row in middles] == [[0, 255, 255, 255], [128, 0, 0, 0]]
    logger.images.clear()
    GraphFigures().on_validation_end(trainer, Small("softmax"))
    assert not logger.images, "a model without theta"


class Coloured(Small):
    """Reconstructs its input as it is, and dreams of red."""

    def validation_step(self, batch, batch_idx):
        self.head(torch.zeros(len(batch[0]), 2, self.head.num_scores))

    def reconstruct(self, x):
        return x

    def sample_prior(self, n):
        return torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(n, 3, 32, 32)


def test_colour_images_keep_their_colours():
    logger, images = Recording(), torch.rand(4, 3, 32, 32)
    trainer = L.Trainer(
        max_steps=1, val_check_interval=1, limit_val_batches=1, logger=logger,
        callbacks=[VAEFigures(num_images=2)], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4)
    trainer.fit(Coloured("softmax"), loader(), data)
    picture = logger.images["images/reconstructions"]
    assert picture.shape == (64, 64, 3)
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for row in (slice(0, 32), slice(32, 64)):  # inputs above, reconstructions below
        assert (picture[row, :32] == pixels[0]).all() and (picture[row, 32:] == pixels[1]).all()
    prior = logger.images["images/prior"]
    assert prior.shape == (32, 64, 3)
    assert prior.reshape(-1, 3).tolist() == [[255, 0, 0]] * (32 * 64)


class Conditional(Coloured):
    """Its reconstructions need more than images."""

    def reconstruct(self, x, label):
        return x


def test_a_method_that_fails_costs_its_image_and_one_warning_only():
    logger, images = Recording(), torch.rand(4, 3, 32, 32)
    trainer = L.Trainer(
        max_steps=2, val_check_interval=1, limit_val_batches=1, logger=logger,
        callbacks=[VAEFigures(num_images=2)], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4)
    with pytest.warns(UserWarning, match="Conditional.reconstruct failed with TypeError") as told:
        trainer.fit(Conditional("softmax"), loader(), data)
    assert trainer.global_step == 2 and trainer.fit_loop.epoch_loop.val_loop._has_run
    assert sum("no images/reconstructions: " in str(each.message) for each in told) == 1
    assert "images/prior" in logger.images and "images/reconstructions" not in logger.images


def test_images_of_other_channels_are_shown_in_gray():
    images = torch.stack([torch.zeros(2, 2), torch.ones(2, 2)])[None].expand(3, 2, 2, 2)
    assert torch.equal(tile(images, 3), torch.full((2, 6, 1), 0.5))


def test_figures_count_the_categories():
    logger = Recording()
    trainer = L.Trainer(
        max_steps=1, val_check_interval=1, limit_val_batches=2, logger=logger,
        callbacks=[VAEFigures()], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Small("softmax"), loader(), loader())
    usage = logger.images["latents/usage"]
    assert usage.shape == (24, 72, 3)  # 2 latents, 6 categories, zero scores: uniform
    assert abs(int(usage.mean()) - 255 // 6) <= 1


class Tested(Small):
    __test__ = False  # pytest would take it for a test

    def test_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize(("seconds", "lines"), [(0, 5), (1000, 0)])
def test_a_long_test_says_how_far_it_has_come(seconds, lines, capsys):
    trainer = L.Trainer(
        logger=False, callbacks=[ProgressLines(test_seconds=seconds)], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    trainer.test(Tested("softmax"), loader(), verbose=False)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    assert all(f"test  batch {n} of 5" in line for n, line in enumerate(printed, 1))


def test_the_line_of_a_test():
    assert line_of_test(20, 100, 30.0) == "test  batch 20 of 100  about 120 s left"
    assert line_of_test(20, float("inf"), 30.0) == "test  batch 20"


def test_lines_of_a_test_become_rare(capsys, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("catnat.callbacks.terminal.time.monotonic", lambda: next(now))
    lines = ProgressLines(test_seconds=10)

    class Run:
        is_global_zero, num_test_batches = True, [500]

    lines.on_test_start(Run, None)
    for batch in range(500):
        lines.on_test_batch_end(Run, None, None, None, batch)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in said] == [
        f"batch {n} of 500" for n in (10, 20, 40, 80, 160, 320)
    ]


def test_the_line_of_progress():
    metrics = {"val/loss": torch.tensor(1.23456)}
    line = progress_line(500, 2000, 10.0, metrics)
    assert line == "step 500 of 2000  10 steps/s  about 2 min left  val/loss 1.235"
    assert progress_line(2000, 2000, 10.0, {}) == "step 2000 of 2000  10 steps/s"
    assert progress_line(5, float("inf"), 10.0, {}) == "step 5  10 steps/s"
    assert progress_line(9, 9, 1958.3, {}) == "step 9 of 9  1958 steps/s"


class Evaluated(Tested):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, prog_bar=True)
        return loss


def bars_of(monkeypatch, **flags):
    """What the bars of a run show: (name, done, total, title), and those taken away."""
    shown = []
    monkeypatch.setattr(Bars, "move", lambda self, *args: shown.append(args))
    monkeypatch.setattr(Bars, "remove", lambda self, name: shown.append((name, "removed")))
    trainer = L.Trainer(
        logger=False, callbacks=[StepBar()], enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=False, num_sanity_val_steps=0, **flags,
    )  # fmt: skip
    trainer.fit(Evaluated("softmax"), loader(), loader(batches=2))
    trainer.test(Evaluated("softmax"), loader(), verbose=False)
    return shown


def test_the_bar_counts_all_steps_of_the_run_and_not_those_of_an_epoch(monkeypatch):
    shown = bars_of(monkeypatch, max_epochs=3)  # of 5 batches
    steps = [each for each in shown if each[0] == "steps"]
    assert [done for _, done, *_ in steps] == [*range(16), 15]
    assert {total for *_, total, _ in steps} == {15}
    title = steps[-1][-1]
    assert title.startswith("step 15 of 15  ") and "/s  train/loss " in title


def test_validations_and_tests_have_bars(monkeypatch):
    shown = bars_of(monkeypatch, max_steps=5)
    validation = [each for each in shown if each[0] == "validation"]
    assert validation == [("validation", 1, 2, "validation: batch 1 of 2"),
                          ("validation", 2, 2, "validation: batch 2 of 2"),
                          ("validation", "removed")]  # fmt: skip
    tests = [each[1:3] for each in shown if each[0] == "test"]
    assert tests == [(n, 5) for n in range(1, 6)]


def test_bars_on_a_terminal(monkeypatch):
    bars, console = Bars(), Console(file=io.StringIO(), force_terminal=True, width=70)
    bars._progress.live.console = console
    bars.move("steps", 2, 8, "step 2 of 8")
    bars.move("validation", 1, float("inf"), "validation: batch 1")
    bars.remove("validation")
    bars.remove("validation")
    bars.move("steps", 8, 8, "step 8 of 8")
    bars.print("hello")
    bars.stop()
    said = console.file.getvalue()
    assert "step 8 of 8" in said and "hello" in said


def test_a_run_says_where_its_seconds_went():
    now = [0.0]
    spent = TimeSpent(lambda: now[0])

    class Run:
        sanity_checking = False

        class strategy:  # noqa: N801
            checkpoint_io = AtomicCheckpointIO()

    def passes(seconds):
        now[0] += seconds

    passes(100)
    spent.on_train_start(Run, None)
    passes(20)
    spent.on_validation_start(Run, None)
    passes(5)
    spent.on_validation_end(Run, None)
    passes(3)  # two of them for a checkpoint
    Run.strategy.checkpoint_io.seconds += 2
    spent.on_train_end(Run, None)
    Run.strategy.checkpoint_io.seconds += 1
    spent.teardown(Run, None, "fit")
    spent.on_test_start(Run, None)
    passes(180)
    spent.on_test_end(Run, None)
    parts = (
        "imports 7.0 s, start 3.0 s, steps 21 s, validation 5.0 s, checkpoints 3.0 s, test 3 min"
    )
    assert spent.watch.line(began=90.0, imported=97.0) == f"time: {parts}"


def test_parts_of_a_stopwatch_add_up_and_one_that_had_not_begun_adds_nothing():
    now = [0.0]
    watch = Stopwatch("updates", "test", clock=lambda: now[0])
    now[0] = 5.0
    watch.end("updates")
    for seconds in (2.0, 3.0):
        with watch.part("updates"):
            now[0] += seconds
        now[0] += 100.0
    watch.end("updates")
    assert watch.seconds == {"updates": 5.0, "test": 0.0} and watch.first == 5.0
    assert watch.line(began=1.0, imported=4.0) == "time: imports 3.0 s, start 1.0 s, updates 5.0 s"


def test_the_command_line_ends_with_where_the_seconds_went(workspace, capfd):
    assert run(*workspace) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"time: imports \S+ \w+, start \S+ \w+, steps .*, validation .*, test .*", last
    ), last


def test_a_run_without_a_terminal_prints_lines_while_it_tests(workspace, capfd, monkeypatch):
    monkeypatch.setattr(ProgressLines.__init__, "__defaults__", (0.0,))
    assert run(*workspace) == 0
    assert "test  batch 1 of 2" in capfd.readouterr().out


def test_a_failed_save_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, path)
    io.finish()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"state_dict": {}}, path)
        io.finish()
    assert io.load_checkpoint(path)["state_dict"]["a"].tolist() == [1, 1, 1]
    assert [p.name for p in Path(tmp_path).iterdir()] == ["a.ckpt"]


def test_a_signal_stops_one_run_and_not_the_next():
    signals = StopSignals()
    signals.listen()
    signal.raise_signal(signal.SIGTERM)
    assert signals.signum == signal.SIGTERM
    signals.give_back()
    assert signals.signum == 0
