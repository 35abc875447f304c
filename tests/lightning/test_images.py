"""Pictures of models: tiles, latents, edges."""

import lightning.pytorch as L
import pytest
import torch
from cases_callbacks import Memory, Small, fit, loader, quiet_trainer

from catnat.callbacks import Figures


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
    trainer = quiet_trainer(max_steps=1, val_check_interval=1, logger=logger, callbacks=[Figures()])
    trainer.fit(Module("softmax"), datamodule=Data())
    picture = logger.images["graph/theta"]
    assert picture.shape == (24, 60, 3)
    middles = picture[6::12, 6::12, 0].tolist()  # two columns, a strip between, two columns
    assert [row[:2] + row[3:] for row in middles] == [[0, 255, 255, 255], [128, 0, 0, 0]]
    logger.images.clear()
    Figures().on_validation_end(trainer, Small("softmax"))
    assert not logger.images, "a model without theta"


class Coloured(Small):
    """Reconstructs its input as it is, and dreams of red."""

    def validation_step(self, batch, batch_idx):
        self.head(torch.zeros(len(batch[0]), 2, self.head.num_scores))

    def reconstruct(self, x):
        return x

    def sample_prior(self, n):
        return torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(n, 3, 32, 32)


def drawn(model, images, steps):
    """The logger and the trainer of a run that validates these images after every step."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4)
    figures, logger = Figures(), Recording()
    figures.num_images = 2
    return logger, fit(
        model, figures, logger=logger, val=data, max_steps=steps, val_check_interval=1
    )


def test_colour_images_keep_their_colours():
    images = torch.rand(4, 3, 32, 32)
    logger, _ = drawn(Coloured("softmax"), images, steps=1)
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


class Undecided(Coloured):
    """Its edges cannot be computed."""

    @property
    def theta(self):
        raise RuntimeError("no batch so far")


@pytest.mark.parametrize(
    ("kind", "tag", "reason"),
    [
        (Conditional, "images/reconstructions", "TypeError: .*reconstruct"),
        (Undecided, "graph/theta", "RuntimeError: no batch so far"),
    ],
)
def test_a_method_or_an_attribute_that_fails_costs_its_image_only(kind, tag, reason):
    with pytest.warns(UserWarning, match=f"no {tag}: .*{reason}"):
        logger, trainer = drawn(kind("softmax"), torch.rand(4, 3, 32, 32), steps=2)
    assert trainer.global_step == 2
    assert "images/prior" in logger.images and tag not in logger.images
