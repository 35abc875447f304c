"""Searches by Optuna: spaces, trials that are shared, and plans that use them."""

import optuna
import pytest
from cases_sweep import (
    PLANS,
    arguments,
    do_at_once,
    run_command,
    run_sweep,
    start_sweep,
    wait_for,
    write_plan,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from catnat.sweeps import plan_file, runs, sweep
from catnat.sweeps.search import Search
from catnat.sweeps.study import SharedStudy

RATE = {"rate": {"low": 0.1, "high": 10.0, "log": True}}
TPE = {"sampler": "tpe", "trials": 6, "space": RATE, "top": 2}


def rows_of(path):
    return runs.read(path.parent / "results" / "tiny" / "runs.csv")


def searched(path):
    return [row for row in rows_of(path) if row["stage"] == "search"]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_trials_then_final_runs_of_the_best(sampler, tmp_path, capsys, monkeypatch):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, grid={"x": [1.5]}, search=TPE | {"sampler": sampler})
    assert run_sweep(path) == 0
    assert "6 of 6 trials done" in capsys.readouterr().out
    best_first = sorted(searched(path), key=lambda row: row["val/loss"])
    assert len({row["rate"] for row in best_first}) == 6
    assert all(0.1 <= float(row["rate"]) <= 10 for row in best_first)
    finals = {row["rate"] for row in rows_of(path) if row["stage"] == "final"}
    assert finals == {row["rate"] for row in best_first[:2]}
    assert run_command("tables", arguments(path)) == 0
    table = capsys.readouterr().out
    assert f"among 6 trials by {sampler}" in table
    assert f"| {float(best_first[0]['rate'])} | 2 |" in table


def losses_of(sampler, folder):
    """The losses of the last 20 of 40 trials of a parabola."""
    space = {"rate": {"low": 0.0, "high": 100.0}}
    searched = Search(space=space, sampler=sampler, trials=40)
    study = SharedStudy(folder / "journal", "cell", {}, searched)
    finished = []
    for _ in range(40):
        (drawn,) = study.open_trials(finished, 1, lambda drawn: False)
        finished.append((drawn, (drawn["rate"] - 70) ** 2))
    return sorted(loss for _, loss in finished[20:])


def test_tpe_learns_from_the_trials_before(tmp_path):
    by_tpe = losses_of("tpe", tmp_path / "tpe")
    at_random = losses_of("random", tmp_path / "random")
    assert by_tpe[10] < at_random[10] / 2


def test_a_grid_of_steps_and_choices_is_tried_once_each(tmp_path, monkeypatch):
    do_at_once(monkeypatch)
    space = {"rate": {"low": 1, "high": 3, "step": 2}, "other": {"choices": ["a", "b"]}}
    path = write_plan(tmp_path, grid={"x": [1.0]}, search={"sampler": "grid", "space": space})
    assert run_sweep(path) == 0
    tried = sorted((row["rate"], row["other"]) for row in searched(path))
    assert tried == [("1", "a"), ("1", "b"), ("3", "a"), ("3", "b")]


def test_rows_alone_continue_a_search_on_another_machine(tmp_path, monkeypatch):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, grid={"x": [1.5]}, search=TPE | {"trials": 4})
    assert run_sweep(path) == 0
    (journal,) = (tmp_path / "results" / "tiny" / ".optuna").glob("*.journal")
    journal.rename(tmp_path / "journal")
    before = searched(path)
    write_plan(tmp_path, grid={"x": [1.5]}, search=TPE)
    assert run_sweep(path) == 0
    after = searched(path)
    assert len(after) == 6 and [row for row in after if row in before] == before
    study = optuna.load_study(
        study_name=None,
        storage=JournalStorage(JournalFileBackend(str(journal))),
    )
    values = sorted(trial.value for trial in study.trials)
    assert values == pytest.approx(sorted(row["val/loss"] for row in after))


def test_two_sweeps_share_a_study(tmp_path):
    path = write_plan(tmp_path, grid={"x": [1.5]}, search=TPE)
    other = start_sweep(path, f"--runs={tmp_path / 'other'}")
    assert run_sweep(path) in (0, 1)
    assert other.wait(120) in (0, 1)
    assert len({row["rate"] for row in searched(path)}) == len(searched(path)) == 6


def test_a_trial_of_a_killed_sweep_is_done_by_the_next(tmp_path):
    gate = tmp_path / "gate"
    keys = {"grid": {"x": [1.5]}, "options": {"gate": str(gate)}}
    path = write_plan(tmp_path, **keys, search=TPE | {"trials": 1, "top": 1})
    process = start_sweep(path)
    wait_for(lambda: list((tmp_path / "runs").glob("tiny/*/calls.txt")), process)
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    process.kill()
    process.wait(60)
    gate.touch()
    assert run_sweep(path) == 0
    (row,) = searched(path)
    assert folder.name.startswith("tiny-search") and (folder / "metrics.json").is_file()
    assert row["trial"] == f'{{"rate": {row["trial"][9:-1]}}}'


def test_trials_run_side_by_side_and_cells_share_the_jobs(tmp_path):
    path = write_plan(tmp_path, search=TPE | {"parallel": 2})  # two cells
    asked = sweep.Sweep.load(str(path), sweep.build_parser().parse_args(arguments(path)))
    assert asked.pending() == []
    for jobs, count in ((1, 2), (4, 4), (16, 4)):
        asked.slots = jobs
        assert len(asked.pending()) == count


# -- spaces ----------------------------------------------------------------------------------------


def test_conditional_and_derived_values(tmp_path):
    space = Search(
        space={
            "n_steps": {"low": 32, "high": 512, "step": 32},
            "_minibatches": {"low": 2, "high": 16, "step": 4},
            "momentum": {"choices": [0.0, 0.9], "when": {"optimizer": ["sgd", "rms"]}},
            "decay": {"low": 0.0, "high": 1.0, "when": {"momentum": 0.9}},
        },
        derived={"batch_size": "n_steps * num_envs // _minibatches"},
        sampler="random",
        trials=3,
    )
    options = {"num_envs": 8, "optimizer": "adam"}
    drawn = space.example(options, "high")
    assert drawn == {"n_steps": 512, "_minibatches": 16}
    assert space.settings(drawn, options) == {"n_steps": 512, "batch_size": 256}
    sgd = space.example(options | {"optimizer": "sgd"}, "high")
    assert sgd == {"n_steps": 512, "_minibatches": 16, "momentum": 0.9, "decay": 1.0}
    study = SharedStudy(tmp_path / "journal", "cell", options, space)
    for drawn in study.open_trials([], 3, lambda drawn: True):
        assert drawn["_minibatches"] in (2, 6, 10, 14) and drawn["n_steps"] % 32 == 0
        assert set(drawn) == {"n_steps", "_minibatches"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"space": RATE, "sampler": "tpe"}, "needs a number of trials"),
        ({"sampler": "tpe", "trials": 3}, "need a space"),
        ({"sampler": "tpee", "trials": 3, "space": RATE}, "tpee"),
        ({"sampler": "grid", "space": RATE}, "a grid needs choices or steps"),
        (TPE | {"space": {"rate": {"low": 1}}}, "low and high or choices"),
        (TPE | {"space": {"rate": {"low": 3, "high": 1}}}, "low"),
        (TPE | {"space": {"rate": {"choices": [1], "low": 2}}}, "low and high or choices"),
        (TPE | {"space": {"rate": {"low": 0, "high": 9, "when": 3}}}, "when needs names"),
        (TPE | {"space": {"rate": {"low": 0.0, "high": 1.0, "log": True}}}, "low"),
        (TPE | {"space": {"x": {"choices": [1, 2]}}}, "6 trials, but the space has 2"),
        (TPE | {"space": {"x": {"low": 0.0, "high": 1.0}}}, "x appears twice"),
        (TPE | {"grid": {"y": [1]}}, "no grid and no factors"),
        (TPE | {"derived": {"y": "rates * 2"}}, "rates is not a number of the cell or the space"),
        (TPE | {"derived": {"y": "rate.real"}}, "only numbers, names, +"),
        (TPE | {"derived": {"y": "rate // 0"}}, "rate // 0"),
        (TPE | {"derived": {"y": "__import__('os')"}}, "only numbers, names, +"),
    ],
)
def test_a_wrong_space_is_one_line(keys, words, tmp_path, capsys):
    path = write_plan(tmp_path, search=keys)
    assert run_command("sweep", arguments(path)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# -- our plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["breakout", "seaquest"])
def test_ppo_is_searched_as_the_paper_s_table_8_prints_it(game):
    (path,) = (path for path in PLANS if path.stem == f"ppo_{game}")
    loaded = plan_file.load(str(path), "paper")
    assert loaded.search.sampler == "tpe" and loaded.search.trials == 160
    assert loaded.search.top == 10 and len(loaded.seeds) == 10
    assert loaded.options["total_steps"] == 8_000_000
    names = ("low", "high", "step", "log")
    space = loaded.search.space.items()
    ranges = {name: tuple(x.get(each) for each in names) for name, x in space}
    assert ranges == {
        "learning_rate": (5e-5, 1e-2, None, True),
        "n_steps": (32, 512, 32, None),
        "n_epochs": (1, 16, 2, None),
        "clip_range": (0.01, 0.9, None, None),
        "ent_coef": (0.0, 1.0, None, None),
        "num_envs": (8, 16, 2, None),
        "_minibatches": (2, 16, 4, None),
        "max_grad_norm": (0.1, 10.0, 0.1, None),
    }
    drawn = loaded.search.example(loaded.cells[0], "low")
    settings = loaded.search.settings(drawn, loaded.cells[0])
    assert settings["batch_size"] == 32 * 8 // 2
