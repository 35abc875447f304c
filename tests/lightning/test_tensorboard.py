"""What TensorBoard shows of a run: its tags, each explained, and what the pictures show."""

import io
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_callbacks import quiet_trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from catnat import make_head
from catnat.callbacks import Figures, FisherMonitor
from catnat.callbacks.images import add_image, fisher_picture
from catnat.callbacks.tags import TAGS, description
from catnat.callbacks.tensorboard import Progress, RunLogger
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner


@pytest.mark.parametrize("kind", ["vae", "graph"])
def test_every_tag_of_a_run_is_explained_and_the_mass_is_the_first_card(kind, tmp_path, data):
    if kind == "vae":
        model = DiscreteVAE("natural", 3, 8, nll_samples=2)
        batches = MNISTDataModule(str(data), batch_size=5, download=False)
        pictures = {"fim/picture", "images/prior", "images/reconstructions", "latents/usage"}
    else:
        model = GraphStructureLearner("softmax", 6, test_passes=1)
        batches = CommunityGraphDataModule(communities=1, num_pairs=120)
        batches.batch_size = 8
        pictures = {"fim/picture", "graph/theta"}
    logger = RunLogger(tmp_path, name="", version="run", default_hp_metric=False)
    callbacks = [FisherMonitor(), Figures()]
    trainer = quiet_trainer(max_steps=12, logger=logger, callbacks=callbacks, val_check_interval=6)
    trainer.fit(model, datamodule=batches)
    trainer.test(model, datamodule=batches, verbose=False)
    logger.log_hyperparams({"capture": False, "seed": 3, **model.hparams}, {"test/score": 1.0})
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "run"), {"images": 0}).Reload()
    tags = events.Tags()
    assert set(tags["images"]) == pictures
    assert [image.step for image in events.Images("fim/picture")] == [0, 10, 11]
    shown = {*tags["scalars"], *pictures} - {"test/score"}
    assert min(tag for tag in shown if tag.startswith("fim")) == "fim/off_diagonal_mass"
    for tag in shown:
        metadata = events.SummaryMetadata(tag)
        assert metadata.summary_description == description(tag) != "", tag
        assert metadata.data_class, "or TensorBoard's fast loader ignores the description"
    content = events.SummaryMetadata(EXPERIMENT_TAG).plugin_data.content
    hparams = HParamsPluginData.FromString(content).experiment.hparam_infos
    first = {"head", "learning_rate", "num_categories", "num_latents", "seed"}
    assert {hparam.name for hparam in hparams if hparam.differs} == first & {
        hparam.name for hparam in hparams
    }


def test_the_page_of_tags_has_the_descriptions_of_the_cards():
    page = (Path(__file__).parents[2] / "docs/tags.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == [
        f"| `{tag}` | {text.replace('|', '&#124;')} |"
        for texts in TAGS.values()
        for tag, text in texts.items()
    ]


def test_lines_of_progress_say_how_long_a_run_takes(monkeypatch):
    clock = iter((0.0, 30.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress(40)
    assert progress.line(50, 200, {"val/loss": 1.25}) == (
        "step 50 of 200  ETA 0:07:30  val/loss 1.25"
    )
    assert progress.line(200, 200, {}) == "step 200 of 200"
    assert progress.line(50, -1, {}) == "step 50"


# -- pictures -------------------------------------------------------------------------------------


def test_pictures_have_one_color_scale_up_to_a_quarter():
    head = make_head("softmax", 4)
    one, other, large = (fisher_picture(x * torch.eye(4), head, "") for x in (0.2, 0.1, 0.4))
    assert one.shape == other.shape == (400, 460, 3) and one.dtype == torch.uint8
    assert not torch.equal(one, other)
    assert torch.equal(one[:, -90:], other[:, -90:]), "the color bars agree"
    assert not torch.equal(one[:, -90:], large[:, -90:]), "an entry is beyond the scale"


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_arrives_as_it_was_given(channels, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    image = torch.rand(5, 7, channels)
    add_image([logger], "fim/picture", lambda: image, 3)
    add_image([logger], "fim/picture", lambda: (image * 255).round().byte(), 4)
    add_image([CSVLogger(tmp_path)], "fim/picture", lambda: pytest.fail("nobody looks at it"), 5)
    logger.experiment.close()
    images = EventAccumulator(str(tmp_path / "run")).Reload().Images("fim/picture")
    assert [image.step for image in images] == [3, 4]
    want = (image.expand(5, 7, 3) * 255).round().byte().numpy()
    for event in images:
        pixels = np.array(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))
        assert np.array_equal(pixels, want)
