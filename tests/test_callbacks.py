"""Pictures and checkpoints."""

import os
import signal
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from cases_callbacks import Memory, Small, loader
from cases_cli import run

from catnat.callbacks import AtomicCheckpointIO, GraphFigures, ProgressLines, VAEFigures
from catnat.callbacks.checkpoints import StopSignals
from catnat.callbacks.images import heat_map, tile
from catnat.callbacks.terminal import line_of_test


def test_tiles_and_heat_maps():
    images = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 3)
    grid = tile(images, 2)
    assert grid.shape == (4, 6, 1)
    assert grid[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert grid[3, :, 0].tolist() == [2, 2, 2, 3, 3, 3]
    assert torch.equal(tile(images[:, 0], 2), grid)
    picture = heat_map(torch.tensor([[0.0, 1.0]]), "gray", 0, 1, cell=2)
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


def test_a_run_without_a_terminal_prints_lines_while_it_tests(workspace, capfd, monkeypatch):
    monkeypatch.setattr(ProgressLines.__init__, "__defaults__", (0.0,))
    assert run(*workspace) == 0
    assert "test  batch 1 of 2" in capfd.readouterr().out


def test_a_failed_save_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, path)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"state_dict": {}}, path)
    assert io.load_checkpoint(path)["state_dict"]["a"].tolist() == [1, 1, 1]
    assert [p.name for p in Path(tmp_path).iterdir()] == ["a.ckpt"]


def test_a_signal_stops_one_run_and_not_the_next():
    signals = StopSignals()
    signals.listen()
    signal.raise_signal(signal.SIGTERM)
    assert signals.signum == signal.SIGTERM
    signals.give_back()
    assert signals.signum == 0
