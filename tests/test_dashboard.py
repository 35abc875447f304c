"""What TensorBoard offers of a run: its own answers over HTTP, and what the pictures show."""

import io
import json
import random
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_callbacks import Small, fit
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from catnat import make_head
from catnat.callbacks import FisherMonitor, RunLogger
from catnat.callbacks.dashboard import use_fast_checksums
from catnat.callbacks.fisher_picture import fisher_picture, is_drawn, limit_of
from catnat.callbacks.images import add_image
from catnat.callbacks.tags import charts, explanation, guide

RUNS = {"vae/natural/version_0", "ppo/softmax/version_0", "gsl/natural/version_0"}


@pytest.fixture(scope="module")
def root(tmp_path_factory, data):
    """The folder of a run of a VAE, a policy and a graph."""
    root = tmp_path_factory.mktemp("runs")
    lines = [
        f"--model=vae --data.root={data} --accelerator=cpu --batch_size=10 --max_steps=12 "
        "--nll_samples=2 --val_check_interval=6 --log_every_n_steps=1 --num_latents=3 --seed=7",
        "--model=ppo --head=softmax --env=CartPole-v1 --num_envs=2 --num_steps=8 "
        "--update_epochs=1 --total_steps=48 --eval_games=1 --gif=false",
        "--model=gsl --num_pairs=60 --batch_size=8 --communities=1 --max_steps=2 --test_passes=1 "
        "--accelerator=cpu --log_every_n_steps=1",
    ]
    for line in lines:
        assert train.main([*line.split(), f"--default_root_dir={root}"]) == 0
    return root


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
    while set(ask("plugin/scalars/tags")) != RUNS and time.monotonic() < until:
        time.sleep(0.1)
    return ask


SCALARS = {
    "vae/natural/version_0": {
        "fim/off_diagonal_mass", "fim/off_diagonal_mass_fro", "fim/condition_number",
        "fim/off_diagonal_mass_sampled", "fim/saturated", "train/loss", "val/loss", "val/elbo",
        "val/kl", "test/nll", "test/elbo", "test/information",
    },
    "ppo/softmax/version_0": {
        "fim/off_diagonal_mass_fro", "train/entropy", "eval/return", "test/return",
        "train/value_loss",
    },
    "gsl/natural/version_0": {
        "fim/off_diagonal_mass_fro", "train/loss", "val/energy_score", "test/theta_mae",
    },
}  # fmt: skip


@pytest.mark.parametrize("run", SCALARS)
def test_a_run_has_the_promised_scalars_with_explanations_and_no_epoch(run, ask):
    tags = ask("plugin/scalars/tags")[run]
    assert tags.keys() >= SCALARS[run]
    assert "epoch" not in tags
    assert [tag for tag, about in tags.items() if not about["description"]] == []


def test_custom_scalars_have_groups_with_charts(ask):
    layout = ask("plugin/custom_scalars/layout")["category"]
    titles = {group["title"]: [chart["title"] for chart in group["chart"]] for group in layout}
    assert list(titles) == ["Fisher", "loss", "evaluation"]
    assert "off-diagonal mass (Frobenius)" in titles["Fisher"]
    assert {"ELBO", "return", "energy score"} <= set(titles["evaluation"])
    assert all(len(set(each)) == len(each) for each in titles.values()), "a chart came twice"


@pytest.mark.parametrize(("run", "kind"), [("vae/natural", "vae"), ("gsl/natural", "graph")])
def test_every_chart_of_a_run_shows_something(run, kind, ask):
    for group, titles in charts(kind).items():
        for title, (pattern,) in titles.items():
            query = urllib.parse.urlencode({"run": f"{run}/version_0", "tag": pattern})
            found = ask(f"plugin/custom_scalars/scalars?{query}")
            assert found["regex_valid"] and found["tag_to_events"], (group, title)


def test_pictures_of_the_fisher_matrix_are_drawn_at_powers_of_ten_and_at_the_end(ask):
    def steps(run):
        query = urllib.parse.urlencode({"run": run, "tag": "fim/mean", "sample": 0})
        return [each["step"] for each in ask(f"plugin/images/images?{query}")]

    assert steps("vae/natural/version_0") == [0, 10, 11]
    assert steps("ppo/softmax/version_0") == [16, 48]
    about = ask("plugin/images/tags")["vae/natural/version_0"]
    assert {"fim/mean", "images/prior", "images/reconstructions", "latents/usage"} <= set(about)
    assert all(each["description"] for each in about.values())


def test_text_explains_the_tags(ask):
    tags = ask("plugin/text/tags")
    assert {run: list(each) for run, each in tags.items()} == {
        run: ["guide/text_summary"] for run in RUNS
    }


def test_hparams_have_the_columns_by_which_runs_are_compared(root):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    wanted = {
        "vae/natural": {"head": "natural", "num_latents": 3, "num_categories": 8, "seed": 7,
                        "steps": 12, "learning_rate": 0.001, "source": "files"},
        "ppo/softmax": {"head": "softmax", "seed": 0, "steps": 48, "env": "CartPole-v1",
                        "actions": "Discrete(2)"},
        "gsl/natural": {"head": "natural", "seed": 0, "steps": 2, "learning_rate": 0.005,
                        "data": "CommunityGraphDataModule"},
    }  # fmt: skip
    for run, values in wanted.items():
        events = EventAccumulator(str(root / run / "version_0")).Reload()
        content = events.PluginTagToContent("hparams")
        start = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
        shown = {
            name: value.string_value or value.number_value
            for name, value in start.session_start_info.hparams.items()
        }
        assert {name: shown.get(name) for name in values} == values
        about = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment
        assert all(each.name.tag.startswith("test/") for each in about.metric_infos)
        first = {each.name for each in about.hparam_infos if each.differs}
        assert {"head", "seed", "steps", "learning_rate"} <= first


def test_final_values_are_written_once(root):
    for run in RUNS:
        events = EventAccumulator(str(root / run), {"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            steps = [each.step for each in events.Scalars(tag)]
            assert len(set(steps)) == len(steps), (run, tag)
            assert not tag.startswith("test/") or len(steps) == 1


# -- pictures -------------------------------------------------------------------------------------


def test_when_a_picture_is_drawn():
    drawn = [n for n in range(2001) if is_drawn(n, 10_000)]
    assert drawn == [0, 10, 100, 1000]
    assert [n for n in range(12) if is_drawn(n, 4)] == [0, 4, 8, 10]
    assert not any(is_drawn(n, 0) for n in range(11))


def test_all_pictures_of_a_run_have_one_colour_scale():
    head = make_head("softmax", 4)
    first, later = 0.4 * torch.eye(4), 0.1 * torch.eye(4)
    limit = limit_of(first)
    assert limit == pytest.approx(0.4)
    assert limit_of(later) == 0.25, "the usual scale, which heads share"
    one, other = (fisher_picture(each, head, limit, "") for each in (first, later))
    assert one.shape == other.shape and one.ndim == 3 and one.shape[-1] == 3
    assert not torch.equal(one, other)
    assert torch.equal(one[:, -90:], other[:, -90:]), "the colour bars agree"


def test_the_colour_scale_is_that_of_the_first_picture_also_after_a_resumption():
    before, after = FisherMonitor(), FisherMonitor()
    fit(Small("sparsemax"), before)
    assert before.state_dict()["limits"]["head"] > 0.25
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()


def test_tree_levels_are_marked_for_catnat_heads():
    catnat, other = make_head("natural", 5), make_head("softmax", 4)
    G = torch.zeros(4, 4)  # both have four scores
    assert not torch.equal(fisher_picture(G, catnat, 1, ""), fisher_picture(G, other, 1, ""))


def matrix_of(picture):
    """The part of a picture that shows the matrix, without the frame: found by its black corner."""
    black = (picture == 0).all(-1)
    frame = (black.sum(1) > 200).nonzero().flatten()
    column = (black.sum(0) > 200).nonzero().flatten()
    return picture[frame[0] + 1 : frame[-1], column[0] + 1 : column[1]]


RED, WHITE, BLUE = [0x67, 0, 0x1F], [0xF7, 0xF7, 0xF7], [0x05, 0x30, 0x61]


def test_a_picture_shows_every_entry_in_its_colour():
    G = torch.tensor([[0.25, 0.0, -0.25], [0.0, 0.025, 0.0], [-1.0, 0.0, 1.0]])
    square = matrix_of(fisher_picture(G, make_head("softmax", 3), 0.25, "title"))
    side = len(square)
    assert square.shape == (side, side, 3)
    middles = square[side // 6 :: side // 3, side // 6 :: side // 3].tolist()
    assert middles[0] == [RED, WHITE, BLUE]
    assert middles[2] == [BLUE, WHITE, RED], "beyond the limit"
    red, green, blue = middles[1][1]
    assert red > 0x67 and 0 < green < 0xF7 and 0x1F < blue < 0xF7, "between white and red"
    assert square.flatten(0, 1).unique(dim=0).shape[0] == 4, "and nothing else"


def test_a_picture_of_more_entries_than_pixels_loses_none_of_them():
    G = torch.zeros(1000, 1000)
    G[500, 250] = -0.25
    square = matrix_of(fisher_picture(G, make_head("softmax", 1000), 0.25, ""))
    ((i, j),) = (square == torch.tensor(BLUE)).all(-1).nonzero().tolist()
    assert (i, j) == (len(square) // 2, len(square) // 4)


def test_the_title_and_what_is_beyond_the_scale_are_shown():
    head, G = make_head("softmax", 3), 0.2 * torch.eye(3)
    one, other = (fisher_picture(G, head, 0.25, title) for title in ("step 0", "step 10"))
    changed = (one != other).any(-1).any(-1).nonzero()
    assert 0 < len(changed) < 20 and changed.max() < 62, "the title, above the matrix"
    beyond = fisher_picture(2 * G, head, 0.25, "step 0")
    assert (beyond[:61, 360:] != one[:61, 360:]).any(), "the colour bar has a tip"


def test_no_run_imports_matplotlib_to_draw():
    folder = Path(FisherMonitor.__init__.__code__.co_filename).parent
    imports = re.compile(r"^ *(from|import) matplotlib", re.MULTILINE)
    assert [p.name for p in folder.glob("*.py") if imports.search(p.read_text())] == []


@pytest.mark.parametrize("kind", [RunLogger, TensorBoardLogger])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_reads_like_one_that_tensorboard_wrote(kind, channels, tmp_path):
    logger = kind(tmp_path, name="", version="run")
    image = torch.rand(5, 7, channels)
    add_image([logger], "fim/mean", image, 3)
    add_image([logger], "fim/mean", (image * 255).round().byte(), 4)
    logger.experiment.add_image("theirs", (image * 255).round().byte(), 3, dataformats="HWC")
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    found = [*events.Images("fim/mean"), *events.Images("theirs")]
    assert [each.step for each in found] == [3, 4, 3]
    assert {(each.width, each.height) for each in found} == {(7, 5)}
    ours, bytes_, theirs = (
        np.array(Image.open(io.BytesIO(each.encoded_image_string)).convert("RGB")) for each in found
    )
    assert np.array_equal(ours, theirs) and np.array_equal(bytes_, theirs)


def test_a_run_without_pictures_draws_none(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(Small(), FisherMonitor(image_every_n_steps=0), logger=logger)
    assert EventAccumulator(str(tmp_path / "run")).Reload().Tags()["images"] == []


# -- explanations ---------------------------------------------------------------------------------


def test_tags_are_explained_in_a_line():
    assert explanation("fim/heads.0/saturated") == explanation("fim/saturated") != ""
    assert explanation("val/elbo") != explanation("test/elbo")
    assert explanation("val/loss") == "Validation. Mean loss; lower is better."  # of every model
    assert explanation("mine/own") == explanation("loss") == explanation("val/own") == ""


@pytest.mark.parametrize("kind", ["vae", "graph", "policy", "other"])
def test_the_guide_lists_the_tags(kind):
    text = guide(kind)
    assert "fim/off_diagonal_mass_fro" in text and "train/" in text
    assert ("eval, test" in text) == (kind == "policy")


def test_a_resumed_run_has_one_layout(workspace):
    line = ["--model=vae", *workspace]
    assert train.main(line) == 0
    assert train.main([*line, "--max_steps=5", "--ckpt_path=last"]) == 0
    events = EventAccumulator(str(Path("runs/vae/natural/version_0")), {"tensors": 0}).Reload()
    for tag in ("custom_scalars__config__", "guide/text_summary"):
        assert len(events.Tensors(tag)) == 1


def test_checksums_of_event_files_are_those_of_tensorboard():
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

    from catnat.ops import checksums

    if not use_fast_checksums():
        pytest.skip("the C kernels were not built")
    draws = random.Random(0)
    for length in (0, 1, 7, 8, 300, 5000):
        data = draws.randbytes(length)
        assert checksums.masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)
