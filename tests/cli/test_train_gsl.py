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
        ("--estimator local", "'score_function', 'local_expectation'"),
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
    assert run(*workspace) == run("--ckpt_path=last", "--theta=0.2") == 0
    assert config(FOLDER)["data"]["init_args"]["theta"] == 0.2
    before = {name: (FOLDER / name).read_bytes() for name in ("config.yaml", "metrics.json")}
    monkeypatch.setattr("catnat.lit_modules.GraphStructureLearner.step_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--ckpt_path=last", "--max_steps=9", "--theta=0.3")
    assert before == {name: (FOLDER / name).read_bytes() for name in before}


OPTIMIZERS = {  # options, and the rate that is used and recorded
    "--optimizer=AdamW": 1e-3,
    "--optimizer=AdamW --optimizer.lr=0.25 --lr_scheduler=StepLR --lr_scheduler.step_size=1": 0.25,
    "--optimizer=AdamW --learning_rate=0.5": "--learning_rate 0.5 is for the optimizer of the",
    "--optimizer=AdamW --lr_schedule=linear": "--lr_schedule linear is for the optimizer of the",
    "--optimizer=AdamW --psi_learning_rate=0.3": "--psi_learning_rate 0.3 is for the optimizer",
    "--lr_scheduler=StepLR --lr_scheduler.step_size=1": "needs an --optimizer CLASS",
    "--optimizer.lr=0.1": "optimizer",
}


@pytest.mark.filterwarnings("ignore:.*will be overridden")
@pytest.mark.parametrize("line", OPTIMIZERS)
def test_the_learning_rate_of_the_record_is_used_or_the_option_refused(line, workspace, capfd):
    rate = OPTIMIZERS[line]
    status = run(*workspace, *line.split())
    if isinstance(rate, str):
        return assert_refused(status, rate, capfd)
    assert status == 0
    state = last(FOLDER)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(rate)
    record = config(FOLDER)
    assert record["optimizer"]["init_args"]["lr"] == rate
    assert record["model"]["init_args"]["learning_rate"] == rate
    assert state["hyper_parameters"]["learning_rate"] == rate
    assert run("--ckpt_path=last", "--max_steps=7", f"--optimizer.lr={2 * rate}") == 0
    (group,) = last(FOLDER)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == pytest.approx(2 * rate)
