"""What TensorBoard offers of a run: its own answers over HTTP, and what the pictures show."""

import io
import json
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
import torch
from cases_callbacks import Small, fit, quiet_trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from catnat import make_head
from catnat.callbacks import FisherMonitor
from catnat.callbacks.images import (
    add_image,
    figures_for,
    fisher_picture,
    picture_limit,
)
from catnat.callbacks.tensorboard import (
    RunWriter,
    charts,
    kind_of,
    write_layout,
)
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner


class Explained(TensorBoardLogger):
    """A logger with our writer."""

    @property
    def experiment(self):
        self._experiment = self._experiment or RunWriter(log_dir=self.log_dir)
        return self._experiment


@pytest.fixture(scope="module")
def root(tmp_path_factory, data):
    """The folder of a run of a VAE and of a graph."""
    root = tmp_path_factory.mktemp("runs")
    graphs = CommunityGraphDataModule(communities=1, num_pairs=120, root=str(root / "data"))
    graphs.batch_size = 8
    models = {
        "vae": (
            DiscreteVAE("natural", 3, 8, nll_samples=2),
            MNISTDataModule(str(data), batch_size=5, download=False),
        ),
        "graph": (GraphStructureLearner("softmax", 6, test_passes=1), graphs),
    }
    for name, (model, images) in models.items():
        logger = Explained(root / "runs", name="", version=name)
        assert kind_of(model) == name
        write_layout(logger.experiment, name)
        callbacks = [FisherMonitor(), figures_for(model)]
        trainer = quiet_trainer(
            max_steps=12, logger=logger, callbacks=callbacks, val_check_interval=6
        )
        trainer.fit(model, datamodule=images)
        trainer.test(model, datamodule=images, verbose=False)
        logger.experiment.close()
    return root / "runs"


@pytest.fixture(scope="module")
def ask(root):
    """A function that asks TensorBoard, which has read the runs."""
    board = program.TensorBoard()
    # The fast reader of TensorBoard leaves explanations out.
    argv = ["tensorboard", "--logdir", str(root), "--port", "0", "--load_fast", "false"]
    board.configure(argv=argv)
    address = board.launch()

    def ask(path):
        with urllib.request.urlopen(f"{address}data/{path}", timeout=30) as answer:
            return json.load(answer)

    until = time.monotonic() + 60
    while set(ask("plugin/scalars/tags")) != {"vae", "graph"} and time.monotonic() < until:
        time.sleep(0.1)
    return ask


@pytest.mark.parametrize("run", ["vae", "graph"])
def test_every_scalar_is_explained_and_the_mass_is_the_first_card(run, ask):
    tags = ask("plugin/scalars/tags")[run]
    unexplained = [tag for tag, about in tags.items() if not about["description"]]
    assert set(unexplained) <= {"epoch", "hp_metric"}, "what Lightning adds"
    cards = sorted(tag for tag in tags if tag.startswith("fim"))
    assert cards[0] == "fim/off_diagonal_mass"
    assert {"fim/saturated", "fim_sampled/off_diagonal_share"} <= set(cards)


@pytest.mark.parametrize("run", ["vae", "graph"])
def test_every_chart_of_a_run_shows_something(run, ask):
    layout = ask("plugin/custom_scalars/layout")["category"]
    assert [group["title"] for group in layout] == ["Fisher", "loss", "evaluation"]
    for group, titles in charts(run).items():
        for title, (pattern,) in titles.items():
            query = urllib.parse.urlencode({"run": run, "tag": pattern})
            found = ask(f"plugin/custom_scalars/scalars?{query}")
            assert found["regex_valid"] and found["tag_to_events"], (group, title)


def test_pictures_of_the_fisher_matrix_are_drawn_at_powers_of_ten_and_at_the_end(ask):
    query = urllib.parse.urlencode({"run": "vae", "tag": "fim/picture", "sample": 0})
    assert [each["step"] for each in ask(f"plugin/images/images?{query}")] == [0, 10, 11]
    about = ask("plugin/images/tags")["vae"]
    assert {"fim/picture", "images/prior", "images/reconstructions", "latents/usage"} == set(about)
    assert all(each["description"] for each in about.values())
    assert {run: list(each) for run, each in ask("plugin/text/tags").items()} == {
        "vae": ["guide/text_summary"], "graph": ["guide/text_summary"],
    }  # fmt: skip


# -- pictures -------------------------------------------------------------------------------------


def test_all_pictures_of_a_run_have_one_color_scale(tmp_path):
    head = make_head("softmax", 4)
    first, later = 0.4 * torch.eye(4), 0.1 * torch.eye(4)
    limit = picture_limit(first)
    assert limit == pytest.approx(0.4)
    assert picture_limit(later) == 0.25, "the usual scale, which heads share"
    one, other = (fisher_picture(each, head, limit, "") for each in (first, later))
    assert one.shape == other.shape == (400, 460, 3) and one.dtype == torch.uint8
    assert not torch.equal(one, other)
    assert torch.equal(one[:, -90:], other[:, -90:]), "the color bars agree"
    beyond = fisher_picture(2 * first, head, limit, "")
    assert not torch.equal(one[:, -90:], beyond[:, -90:]), "tips: an entry is beyond the scale"
    before, after = FisherMonitor(image_every_n_steps=9), FisherMonitor()
    fit(Small("sparsemax"), before)
    assert before.state_dict()["limits"]["head"] > 0.25
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict(), "also after a resumption"


def test_red_is_positive_blue_is_negative_and_no_entry_is_lost():
    G = torch.zeros(1000, 1000)
    G[500, 250], G[100, 900] = -0.25, 0.25
    pixels = fisher_picture(G, make_head("softmax", 1000), 0.25, "").int()[:, :370]
    red, blue = pixels[..., 0], pixels[..., 2]
    (below, left), *_ = (blue > red + 60).nonzero().tolist()
    (above, right), *_ = (red > blue + 60).nonzero().tolist()
    assert above < below and left < right


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_arrives_as_it_was_given(channels, tmp_path):
    logger = Explained(tmp_path, name="", version="run")
    image = torch.rand(5, 7, channels)
    add_image([logger], "fim/picture", image, 3)
    add_image([logger], "fim/picture", (image * 255).round().byte(), 4)
    logger.experiment.close()
    found = EventAccumulator(str(tmp_path / "run")).Reload().Images("fim/picture")
    assert [each.step for each in found] == [3, 4]
    want = (image.expand(5, 7, 3) * 255).round().byte().numpy()
    for each in found:
        pixels = np.array(Image.open(io.BytesIO(each.encoded_image_string)).convert("RGB"))
        assert np.array_equal(pixels, want)
