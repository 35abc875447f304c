"""Graph structure learning through train.py: right and wrong command lines, runs, resumption."""

from pathlib import Path

import pytest
from cases import HEADS
from cases_cli import assert_refused, config, last

import train

FOLDER = Path("runs/gsl/natural/version_0")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """An empty working directory, and the options of a run of a second, on the CPU everywhere."""
    monkeypatch.chdir(tmp_path)
    return [
        "--num_pairs=200",
        "--batch_size=20",
        "--max_steps=6",
        "--test_passes=1",
        "--communities=2",
        "--accelerator=cpu",
        "--fisher.image_every_n_steps=0",
    ]


def run(*argv, head="natural"):
    return train.main(["--model=gsl", f"--head={head}", *argv])


@pytest.mark.parametrize(
    ("head", "estimator"),
    [*((head, "score_function") for head in HEADS), ("natural", "local_expectation")],
)
def test_every_head_trains(head, estimator, workspace, capfd):
    assert run(*workspace, f"--estimator={estimator}", head=head) == 0
    out, err = capfd.readouterr()
    assert "test/gap_2x" in out and "test/dead_edges" in out
    assert err == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--estimator local", "choose from score_function, local_expectation"),
        ("--model.out_features 1", "follows from --data.out_features: set that"),
        ("--num_nodes 5", "--model.num_nodes follows from --data.communities"),
        ("--val_check_interval 0", "val_check_interval must be positive"),
    ],
)
def test_a_wrong_command_line_gets_one_line(line, reason, workspace, capfd):
    assert_refused(run(*workspace, *line.split()), reason, capfd)


def test_dimensions_of_data_and_model_are_one(workspace, capsys):
    options = ["--in_features=3", "--out_features=1"]
    assert run(*workspace, *options) == 0
    weights = last(FOLDER)["state_dict"]
    assert weights["edge_scores"].shape == (12, 12, 1)
    assert weights["predictor.weight"].shape == (3, 1)
    capsys.readouterr()
    assert run(*options, "--print_config") == 0
    printed = capsys.readouterr().out
    assert "in_features: 3" in printed
    Path("c.yaml").write_text(printed)
    assert train.main(["--config=c.yaml", "--print_config"]) == 0
    assert capsys.readouterr().out == printed


def test_a_length_of_another_kind_replaces_that_of_the_resumed_run(workspace):
    lengths = [word for word in workspace if "max_steps" not in word]
    assert run(*lengths, "--max_epochs=1", head="catnat-natural") == 0  # 8 steps
    assert run(*lengths, "--ckpt_path=last", "--max_steps=9", head="catnat-natural") == 0
    assert last(FOLDER)["global_step"] == 9


def test_a_resume_that_fails_at_once_leaves_the_record_as_it_was(workspace, monkeypatch):
    """And one that only tests, with other options, leaves these."""
    assert run(*workspace) == 0
    assert train.main(["test", "--model=gsl", "--ckpt_path=last", "--theta=0.2"]) == 0
    assert config(FOLDER)["data"]["init_args"]["theta"] == 0.75
    before = {name: (FOLDER / name).read_bytes() for name in ("config.yaml", "metrics.json")}
    monkeypatch.setattr("catnat.lit_modules.GraphStructureLearner.step_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--ckpt_path=last", "--max_steps=9")
    assert before == {name: (FOLDER / name).read_bytes() for name in before}


OPTIMIZERS = {  # options, and the rates that are used; or why they are refused
    "--optimizer=AdamW --learning_rate=0.5": (0.5, 0.5),
    "--optimizer=AdamW --optimizer.weight_decay=0.1 --psi_learning_rate=0.3": (0.005, 0.3),
    "--learning_rate=0.5 --lr_scheduler=StepLR --lr_scheduler.step_size=2": (0.0005, 0.0005),
    "--learning_rate=0.5 --lr_scheduler=PolynomialLR --lr_scheduler.total_iters=6": (0.0, 0.0),
    "--optimizer=AdamW --optimizer.lr=0.25": "lr of the optimizer AdamW is 0.25: give only one",
    "--optimizer.lr=0.1": "optimizer",
}


@pytest.mark.filterwarnings("ignore:.*will be overridden")
@pytest.mark.parametrize("line", OPTIMIZERS)
def test_an_optimizer_takes_the_rates_of_the_model_or_is_refused(line, workspace, capfd):
    rates = OPTIMIZERS[line]
    status = run(*workspace, *line.split())
    if isinstance(rates, str):
        return assert_refused(status, rates, capfd)
    assert status == 0
    groups = last(FOLDER)["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx(list(rates))
