"""What TensorBoard shows of a run: its tags, each explained, and what the pictures show."""

import io
import runpy
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_callbacks import quiet_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from catnat import make_head
from catnat.callbacks import Figures, FisherMonitor, signals
from catnat.callbacks.images import add_image, fisher_picture
from catnat.callbacks.tags import TAGS, description
from catnat.callbacks.tensorboard import Progress, RunLogger, open_writer
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner


@pytest.mark.parametrize("kind", ["vae", "graph"])
def test_every_tag_of_a_run_is_explained(kind, tmp_path, data):
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
    assert {tag for tag in tags["scalars"] if tag.startswith("fim")} == {
        "fim/exact_off_diagonal_mass",
        "fim/off_diagonal_mass",
        "fim/saturated",
    }
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_named_whether_the_event_file_is_new_or_not(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    def values():
        for step in range(10_000):
            logger.log_metrics({"train/loss": step + 0.39}, step)

    place = r"No space left on device: '.*run/events.out.tfevents.\*'$"
    logger = RunLogger(tmp_path, name="", version="run")
    with monkeypatch.context() as full:
        full.setattr(RecordWriter, "write", fail)
        with pytest.raises(OSError, match=place):
            values()
    logger = RunLogger(tmp_path, name="", version="run")
    logger.log_metrics({"train/loss": 1.0}, 0)
    with pytest.raises(ValueError, match="you tried to log text"):
        logger.log_metrics({"train/loss": "text"}, 0)
    monkeypatch.setattr(RecordWriter, "write", fail)
    with pytest.raises(OSError, match=place):
        values()


# -- pictures -------------------------------------------------------------------------------------


def test_a_fisher_picture_names_its_head_mass_and_scale(monkeypatch):
    texts = []
    for kind, name in ((Axes, "set_title"), (Colorbar, "set_label")):
        monkeypatch.setattr(kind, name, lambda _, text, **__: texts.append(text))
    fisher_picture(torch.tensor([[0.3, -0.4], [-0.4, 0.3]]), make_head("softmax", 2), "step 7")
    assert list(filter(None, texts)) == [
        "softmax, step 7\noff-diagonal mass 0.800",
        "entry $G_{ij}$",
    ]


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


def shown(folder, tag):
    """Steps and values of a tag, as TensorBoard shows them."""
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_resumed_run_writes_a_new_file_and_changes_none(tmp_path):
    def log(resumed_at, steps, value):
        logger = RunLogger(tmp_path, "", "run", default_hp_metric=False)
        logger.resumed_at = resumed_at
        for step in steps:
            logger.log_metrics({"loss": value, "epoch": 0.0}, step)
        logger.finalize("success")

    log(None, range(6), 1.0)
    (first,) = (tmp_path / "run").glob("events.*")
    before = first.read_bytes()
    log(3, range(3, 5), 2.0)
    assert first.read_bytes() == before
    wanted = [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert shown(tmp_path / "run", "loss") == wanted
    log(5, (), 3.0)  # a run that fails before its first value
    assert len(list((tmp_path / "run").glob("events.*"))) == 2
    assert shown(tmp_path / "run", "loss") == wanted


def test_a_test_after_the_training_writes_to_the_same_file(tmp_path):
    """A second file of the same second could be read first, and its values be left out."""
    open_writer(tmp_path / "run").close()
    logger = RunLogger(tmp_path, "", "run", default_hp_metric=False)
    logger.resumed_at = 5
    logger.log_metrics({"loss": 1.0}, 5)
    logger.finalize("success")
    assert shown(tmp_path / "run", "loss") == [(5, 1.0)]  # nothing waits in memory
    logger.log_metrics({"test/nll": 2.0}, 5)
    logger.finalize("success")
    logger.close()
    assert len(list((tmp_path / "run").glob("events.*"))) == 2
    assert shown(tmp_path / "run", "test/nll") == [(5, 2.0)]


def test_a_run_that_starts_again_in_its_folder_is_shown_once(tmp_path):
    for value in (1.0, 2.0):
        writer = open_writer(tmp_path)
        writer.add_scalar("loss", value, 0)
        writer.close()
    assert shown(tmp_path, "loss") == [(0, 2.0)]


def test_a_run_that_resumes_within_a_second_is_shown_once(tmp_path):
    """Names of files begin with the second; the process of an earlier one may sort last."""
    writer = open_writer(tmp_path)
    for step in range(4):
        writer.add_scalar("loss", 1.0, step)
    writer.close()
    (first,) = tmp_path.glob("events.*")
    first.rename(first.with_name(f"events.out.tfevents.{int(time.time()):010d}.zzz.9999999.0"))
    writer = open_writer(tmp_path, resumed_at=2)
    writer.add_scalar("loss", 2.0, 2)
    writer.close()
    assert shown(tmp_path, "loss") == [(0, 1.0), (1, 1.0), (2, 2.0)]


def test_a_callback_that_fails_before_the_first_step_changes_nothing(tmp_path, data):
    class Fails(Callback):
        def on_train_start(self, *args):
            raise ValueError("not like this")

    def run(steps, *callbacks, ckpt_path=None, resumed_at=None):
        logger = RunLogger(tmp_path, "", "run", default_hp_metric=False)
        logger.resumed_at = resumed_at
        logger.begun = False  # as on the command line
        begin = LambdaCallback(on_train_start=lambda *_: setattr(logger, "begun", True))
        callbacks = [begin, FisherMonitor(image_every_n_steps=0), *callbacks]
        trainer = quiet_trainer(max_steps=steps, logger=logger, callbacks=callbacks)
        model = DiscreteVAE("natural", 2, 3, nll_samples=2)
        images = MNISTDataModule(str(data), batch_size=5, download=False)
        trainer.fit(model, datamodule=images, ckpt_path=ckpt_path)
        trainer.test(model, datamodule=images, verbose=False)
        logger.finalize("success")
        return trainer

    run(3).save_checkpoint(tmp_path / "a.ckpt")
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    tested = shown(tmp_path / "run", "test/nll")
    with pytest.raises(ValueError, match="not like this"):
        run(6, Fails(), ckpt_path=tmp_path / "a.ckpt", resumed_at=3)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files
    assert shown(tmp_path / "run", "test/nll") == tested and len(tested) == 1


def test_signals_that_a_system_does_not_have_are_left_out(monkeypatch):
    """Windows has no SIGHUP."""
    monkeypatch.delattr(signal, "SIGHUP")
    names = runpy.run_path(signals.__file__)
    assert names["_STOPPING"] == (signal.SIGINT, signal.SIGTERM)
