"""What TensorBoard shows of a run: every value once, also of runs that were resumed."""

import pytest
from cases_cli import FOLDER, metrics_of, one_line, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import train


@pytest.fixture
def options(workspace):
    return [*workspace, "--max_steps=5", "--val_check_interval=3", "--log_every_n_steps=1"]


def events(folder=FOLDER):
    return EventAccumulator(str(folder), {"scalars": 0, "images": 0}).Reload()


def steps(folder=FOLDER):
    """Steps of every scalar and picture, as TensorBoard shows them."""
    shown = events(folder)
    tags = shown.Tags()
    scalars = {tag: [event.step for event in shown.Scalars(tag)] for tag in tags["scalars"]}
    return scalars | {tag: [event.step for event in shown.Images(tag)] for tag in tags["images"]}


def hparams(folder=FOLDER):
    """Hyperparameters by name, and the metrics beside them."""
    content = events(folder).PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    experiment = HParamsPluginData.FromString(content["_hparams_/experiment"])
    shown = {
        name: value.string_value or value.number_value
        for name, value in start.session_start_info.hparams.items()
    }
    return shown, [info.name.tag for info in experiment.experiment.metric_infos]


def assert_once(steps_of_tags):
    assert all(len(set(x)) == len(x) for x in steps_of_tags.values()), steps_of_tags


def test_a_run_has_every_value_once(options):
    assert run(*options, "--fisher.image_every_n_steps=9") == 0
    written = steps()
    assert_once(written)
    assert written["train/loss"] == written["fim/saturated"] == [0, 1, 2, 3, 4]
    assert written["test/nll"] == [5] and written["fim/picture"] == [0, 4]
    (tested,) = events().Scalars("test/nll")
    assert tested.value == pytest.approx(metrics_of()["test/nll"])


@pytest.mark.parametrize(("every", "wanted"), [(5, [4]), (2, [1, 3, 5])])
def test_the_last_validation_is_written_once(options, every, wanted):
    """Within training at the number of its last step, which counts from 0; after it, at the end."""
    assert run(*options, f"--val_check_interval={every}") == 0
    written = steps()
    for tag in ("val/loss", "images/reconstructions", "images/prior", "latents/usage"):
        assert written[tag] == wanted, tag
    assert events().Scalars("val/loss")[-1].value == pytest.approx(metrics_of()["val/loss"])


def test_a_run_that_died_and_was_resumed_has_every_step_once(options, monkeypatch):
    from catnat.lit_modules import DiscreteVAE

    def dies(self, step, original=DiscreteVAE.prepare_step):
        if step == 6:
            raise ArithmeticError
        original(self, step)

    options = [*options, "--max_steps=8", "--save_every=4"]
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(DiscreteVAE, "prepare_step", dies)
        run(*options)
    assert steps()["train/loss"] == [0, 1, 2, 3, 4, 5]
    events_before = max(FOLDER.glob("events.*"))
    with open(events_before, "r+b") as file:
        file.truncate(events_before.stat().st_size - 5)  # killed while it wrote
    before = events_before.read_bytes()
    assert run(*options, "--ckpt_path=last") == 0
    written = steps()
    assert_once(written)
    assert written["train/loss"] == written["fim/saturated"] == list(range(8))
    assert events_before.read_bytes() == before, "a resumed run writes a file of its own"
    assert written["val/loss"] == [2, 5, 8]
    assert written["test/nll"] == [8]


def test_hparams_show_the_run(options):
    assert (
        run(*options, "--seed=7", "--num_latents=4", "--data.seed=3", "--learning_rate=.002") == 0
    )
    shown, metrics = hparams()
    wanted = {
        "seed": 7,
        "data_seed": 3,
        "steps": 5,
        "data_source": "files",
        "head": "natural",
        "num_latents": 4,
        "num_categories": 8,
        "learning_rate": 0.002,
        "variant": "gray",
        "batch_size": 10,
    }
    assert {name: shown[name] for name in wanted} == wanted
    assert "test/nll" in metrics and "val/loss" not in metrics


@pytest.mark.parametrize("every", [3, 5])  # the last validation comes after training, or in it
def test_a_run_that_has_ended_or_died_in_its_test_can_be_ended_again(every, options):
    assert run(*options, f"--val_check_interval={every}") == 0
    written, metrics = steps(), metrics_of()
    tested = {name: x for name, x in metrics.items() if name.startswith(("val/", "test/"))}
    for died in (False, False, True):
        if died:
            (FOLDER / "metrics.json").unlink()
        assert train.main(["--ckpt_path=last", "--model=vae"]) == 0
        assert steps() == written
        again = metrics_of()
        assert tested.items() <= again.items() if died else again == metrics


def test_a_record_with_an_option_that_is_not_there_is_one_line(options, capfd):
    assert run(*options) == 0
    record = FOLDER / "config.yaml"
    record.write_text(record.read_text().replace("num_latents: ", "num_latent: "))
    capfd.readouterr()
    assert run("--ckpt_path=last", "--max_steps=7") == 2
    assert "'num_latent' is not accepted" in one_line(capfd)
    record.write_text(record.read_text().replace("class_path: catnat.lit", "class: catnat.lit"))
    assert run("--ckpt_path=last", "--max_steps=7") == 2
    one_line(capfd)


def test_every_step_of_several_batches_has_one_row(options):
    more = ["--accumulate_grad_batches=3", "--val_check_interval=4", "--max_steps=5"]
    assert run(*options, *more) == 0
    assert_once(steps())
    assert steps()["fim/saturated"] == [0, 1, 2, 3, 4]
