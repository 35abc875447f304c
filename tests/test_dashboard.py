"""What TensorBoard offers of a run: its own answers over HTTP, and what the pictures show."""

import json
import random
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from cases_callbacks import Small, fit
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from catnat import make_head
from catnat.callbacks import FisherMonitor
from catnat.callbacks.dashboard import use_fast_checksums
from catnat.callbacks.fisher_picture import fisher_picture, is_drawn, limit_of
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


def test_a_run_without_pictures_draws_none(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(Small(), FisherMonitor(image_every_n_steps=0), logger=logger)
    assert EventAccumulator(str(tmp_path / "run")).Reload().Tags()["images"] == []


# -- explanations ---------------------------------------------------------------------------------


def test_tags_are_explained_in_a_line():
    assert explanation("fim/heads.0/saturated") == explanation("fim/saturated") != ""
    assert explanation("val/elbo") != explanation("test/elbo")
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
