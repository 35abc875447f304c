"""Sweeps on this machine: every run once, whatever happens in between."""

import fcntl
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases_sweep import SEARCH, arguments, calls, kill, start, wait_for, write_table

from experiments import plan, runs, stages, status, sweep, tables
from experiments.engines import forks
from experiments.schedule import Schedule


@pytest.fixture(params=["program.py", "train.py"])  # as a new process, as a fork (see forks.py)
def table(tmp_path, request):
    """Writes a table whose runs are calls of the stand-in, and gives its file."""
    return lambda **content: write_table(tmp_path, request.param, **content)


def test_a_killed_sweep_goes_on_without_repeating(table, tmp_path):
    path = table(grid={"x": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]})
    process = start(path, "--engine", "local", "--jobs", "2")
    wait_for(lambda: {"x3-seed1", "x4-seed1"} <= set(calls(tmp_path)), process)
    kill(process)
    before = calls(tmp_path)
    assert before == {f"x{i}-seed1": ["new"] for i in range(5)}
    (tmp_path / "gate").touch()
    assert sweep.main(arguments(path, "--engine", "local")) == 0
    after = calls(tmp_path)
    again = {name for name, each in after.items() if each == ["new", "last"]}  # from checkpoints
    assert again == {"x3-seed1", "x4-seed1"}
    assert all(after[f"x{i}-seed1"] == ["new"] for i in (0, 1, 2, 5))
    assert sweep.main(arguments(path, "--engine", "local")) == 0
    assert calls(tmp_path) == after


def test_sigterm_stops_the_runs_too(table, tmp_path):
    path = table(grid={"x": [3.0, 4.0, 5.0]})
    process = start(path, "--engine", "local", "--jobs", "2")
    wait_for(lambda: {"x3-seed1", "x4-seed1"} <= set(calls(tmp_path)), process)
    process.terminate()
    assert process.wait(600) == 130
    assert set(calls(tmp_path)) == {"x3-seed1", "x4-seed1"}
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    assert not any(runs.done(run) for run in stages.known(experiment))


def test_a_run_that_outlives_its_sweep_is_waited_for_and_not_doubled(table, tmp_path):
    path = table(grid={"x": [3.0]}, options={"gate": str(tmp_path / "gate"), "busy": 1})
    process = start(path, "--engine", "local")
    wait_for(lambda: "x3-seed1" in calls(tmp_path), process)
    process.kill()  # the sweep alone
    process.wait()
    again = start(path, "--engine", "local")
    time.sleep(1.0)
    assert calls(tmp_path) == {"x3-seed1": ["new"]}
    (tmp_path / "gate").touch()
    assert again.wait(600) == 0
    assert calls(tmp_path) == {"x3-seed1": ["new"]}


def test_a_run_that_another_process_holds_comes_last(tmp_path, capfd):
    path = write_table(tmp_path, grid={"x": [0.0, 1.0, 2.0]})
    first, *others = stages.known(plan.load(str(path), "smoke", tmp_path / "runs"))
    first.home.mkdir(parents=True)
    with (first.home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(path, "--jobs", "1")
        wait_for(lambda: all(map(runs.done, others)), process)
        wait_for(lambda: "x0-seed1: another process is at work" in capfd.readouterr().err, process)
        assert not runs.done(first)
    assert process.wait(600) == 0
    assert calls(tmp_path) == {f"x{x}-seed1": ["new"] for x in range(3)}


def test_a_search_that_another_process_holds_is_not_said_to_have_failed(tmp_path, capsys):
    path = write_table(tmp_path, grid={"head": ["a"]}, search=SEARCH)
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    assert sweep.report(experiment, held=2) == 2
    (held, _) = capsys.readouterr().out.splitlines()
    assert held.endswith("2 runs held by another process: the same command goes on later")
    for run in stages.known(experiment):
        run.home.mkdir(parents=True)
        runs.record_failure(run, 1, "boom")
    assert sweep.report(experiment, held=0) == 2
    assert "nothing could be selected for {'head': 'a'}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells them")
def test_runs_stop_when_their_sweep_is_killed(table, tmp_path):
    path = table(grid={"x": [3.0]})
    process = start(path, "--engine", "local")
    wait_for(lambda: "x3-seed1" in calls(tmp_path), process)
    process.kill()
    process.wait()
    lock = (tmp_path / "runs/tiny/smoke/x3-seed1/.lock").open()
    fcntl.flock(lock, fcntl.LOCK_EX)  # the run holds it as long as it lives
    lock.close()
    assert not list((tmp_path / "runs").rglob("metrics.json"))


def test_a_failing_run_is_tried_again_then_given_up(table, tmp_path, capsys):
    path = table(grid={"x": [-1.0, 1.0]})
    assert sweep.main(arguments(path, "--retries", "1")) == 1
    assert calls(tmp_path) == {"x-1-seed1": ["new", "last"], "x1-seed1": ["new"]}
    assert "failed: x-1-seed1: the number is below zero" in capsys.readouterr().out
    record = json.loads((tmp_path / "runs/tiny/smoke/x-1-seed1/failed.json").read_text())
    assert (record["attempts"], record["line"]) == (2, "the number is below zero")
    assert sweep.main(arguments(path)) == 1
    assert len(calls(tmp_path)["x-1-seed1"]) == 2  # known to fail
    assert sweep.main(arguments(path, "--retry_failed", "--retries", "0")) == 1
    assert len(calls(tmp_path)["x-1-seed1"]) == 3


def test_wrong_usage_is_not_tried_again(table, tmp_path):
    assert sweep.main(arguments(table(grid={"x": [-9.0]}), "--retries", "3")) == 1
    assert calls(tmp_path) == {"x-9-seed1": ["new"]}


def test_a_run_that_is_killed_takes_no_other_with_it(table, tmp_path):
    path = table(grid={"x": [-4.0, 0.0, 1.0]})
    assert sweep.main(arguments(path, "--retries", "2")) == 1
    killed = calls(tmp_path).pop("x-4-seed1")
    assert killed == ["new", "last", "last"]
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2


@pytest.mark.skipif(not forks.can_wait(), reason="nothing is forked here")
@pytest.mark.parametrize("table", ["train.py"], indirect=True)
def test_without_the_process_that_forks_runs_go_on(table, tmp_path, capfd):
    path = table(grid={"x": [-3.0, 0.0, 1.0]})
    assert sweep.main(arguments(path, "--jobs", "1")) == 130  # one run was interrupted
    assert capfd.readouterr().err.count("no more forks") == 1
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2


def test_stages_run_in_order(table, tmp_path):
    path = table(grid={"head": ["a"]}, search=SEARCH | {"factors": [1.5, 2.0, 2.5]})
    (tmp_path / "gate").touch()
    assert sweep.main(arguments(path, "--jobs", "3")) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    assert stages.selected(experiment, cell) == [{"x": 2.0}]
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2 + 3 + 1


@pytest.mark.parametrize(
    "words", (["head=a,b"], ["head=a", "head=b"], ["head=a", "--only", "head=b"]), ids=str
)
def test_values_that_only_is_given_for_an_option_add_up(words, tmp_path):
    grid = {"head": ["a", "b", "c"], "x": [1]}
    path = write_table(tmp_path, grid=grid, search=None, seeds=[1])
    (tmp_path / "gate").touch()
    assert sweep.main(arguments(path, "--only", *words)) == 0
    assert set(calls(tmp_path)) == {"a-x1-seed1", "b-x1-seed1"}


def test_only_seed_does_all_of_the_search_and_these_seeds_alone(tmp_path, capsys):
    path = write_table(tmp_path, grid={"head": ["a"]}, search=SEARCH, seeds=[1, 2, 3])
    (tmp_path / "gate").touch()
    assert sweep.main(arguments(path, "--only", "seed=2,3")) == 0
    assert set(calls(tmp_path)) == {"a-x1-seed0", "a-x4-seed0", "a-x1-seed2", "a-x1-seed3"}
    assert "4 runs to do" in capsys.readouterr().out
    assert sweep.main(["status", *arguments(path, "--only", "seed=2,3")]) == 0
    assert "4 of 4 runs done" in capsys.readouterr().out
    assert tables.main(arguments(path, "--only", "seed=3")) == 0
    assert "seeds 3." in (out := capsys.readouterr().out) and "1 of 1 runs finished" in out
    assert "--scale smoke --only seed=3`" in out  # the command that made this table
    assert sweep.main(arguments(path)) == 0
    assert set(calls(tmp_path)) == {f"a-x{x}" for x in ("1-seed0", "4-seed0")} | {
        f"a-x1-seed{seed}" for seed in (1, 2, 3)
    }
    assert all(each == ["new"] for each in calls(tmp_path).values())


def test_print_prints_commands_with_a_lock_a_log_and_a_record(table, tmp_path, capsys):
    path = table(grid={"x": [1.0, 2.0, -1.0]})
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    done = experiment.run(experiment.cells()[0], {}, 1)
    done.home.mkdir(parents=True)
    (done.home / "metrics.json").write_text('{"val/loss": 1}')
    assert sweep.main(arguments(path, "--engine", "print", "--", "--note=two words")) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 2 and all("--note=two words" in shlex.split(line) for line in lines)
    assert "2 runs, the last" in err
    statuses = [subprocess.run(["sh", "-c", line], check=False).returncode for line in lines]
    assert statuses == [0, 1]
    _, good, bad = (experiment.run(cell, {}, 1) for cell in experiment.cells())
    assert runs.metrics(good) is not None and (good.home / "log.txt").is_file()
    assert runs.failure(bad) == "the number is below zero"
    assert calls(tmp_path)["x-1-seed1"] == ["new", "last"]
    assert (good.home / ".lock").is_file()


def test_print_says_how_many_come_later(tmp_path, capsys):
    words = ["vae_adam", "--scale", "smoke", "--runs", str(tmp_path), "--engine", "print"]
    assert sweep.main(words) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    assert "4 runs, then again, for 6 more" in err


def test_all_tables_can_be_swept_in_one_go(tmp_path, capsys):
    pytest.importorskip("optuna")
    words = ["all", "--scale", "smoke", "--runs", str(tmp_path), "--engine", "print"]
    assert sweep.main(words) == 0
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in err.splitlines()] == plan.names()
    assert {
        Path(shlex.split(line)[2]).relative_to(tmp_path).parts[0] for line in out.splitlines()
    } == set(plan.names())


def test_a_run_that_crashes_after_its_checkpoint_goes_on_from_it_every_time(table, tmp_path):
    assert sweep.main(arguments(table(grid={"x": [-1.0]}), "--retries", "3")) == 1
    assert calls(tmp_path) == {"x-1-seed1": ["new", "last", "last", "last"]}


def test_a_damaged_checkpoint_is_left_for_a_new_beginning(tmp_path):
    experiment = plan.load(str(write_table(tmp_path)), "smoke", tmp_path / "runs")
    run = experiment.run(experiment.cells()[0], {}, 1)
    (run.home / "checkpoints").mkdir(parents=True)
    path = run.home / "checkpoints" / "last.ckpt"
    path.write_bytes(b"PK half of a file")
    assert not runs.interrupted(run)
    import zipfile

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", "x" * 1000)
    assert runs.interrupted(run)


def test_the_message_names_the_signal_that_killed_a_run(table, tmp_path, capsys):
    assert sweep.main(arguments(table(grid={"x": [-4.0]}), "--retries", "0")) == 1
    record = json.loads((tmp_path / "runs/tiny/smoke/x-4-seed1/failed.json").read_text())
    assert record["line"] == "killed by SIGKILL; its last line: the number is below zero"
    assert "killed by SIGKILL" in capsys.readouterr().out


def test_a_misspelt_search_metric_stops_the_sweep_with_one_line(table, tmp_path, capsys):
    path = table(grid={"head": ["a"]}, search=SEARCH | {"metric": "val/los", "coarse": [1.0, 2.0]})
    with pytest.raises(SystemExit) as stop:
        sweep.main(arguments(path, "--jobs", "1"))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "search.metric: 'val/los' is no number of" in line and "val/loss, test/loss" in line


def test_a_cell_goes_on_to_its_seeds_while_another_still_searches(tmp_path):
    """The search of head b waits at the gate; head a does not wait for it."""
    search = SEARCH | {"coarse": [1.0, 2.0], "options": {"slow": 0}}
    grid = {"head slow": [["a", 0], ["b", 1]]}
    path = write_table(tmp_path, grid=grid, search=search, seeds=[1, 2])
    program = tmp_path / "program.py"
    # Runs of head b wait for the gate.
    text = program.read_text().replace("while x >= 3 and", 'while options["head"] == "b" and')
    program.write_text(text)
    process = start(path, "--jobs", "2")
    wait_for(lambda: sum("a-" in name for name in calls(tmp_path)) == 4, process)
    assert not list((tmp_path / "runs").rglob("b-*/metrics.json"))
    (tmp_path / "gate").touch()
    assert process.wait(600) == 0
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 8


@pytest.mark.parametrize(
    ("end", "chosen", "calls_of_seeds"),
    [
        ("9.0 if x == 2 else 0.0", 2.5, 4),
        ("float('nan') if x == 2 else 0.0", 2.5, 4),
        ("0.0", 2.0, 2),
        ("{1.0: 50.0, 2.0: 900.0, 2.5: 1.6}[x]", 2.5, 6),  # all worse: the best of them
        ("sys.exit(2)", 2.0, 2),  # a run that failed says nothing about its rate
    ],
)
def test_a_rate_that_ends_worse_than_its_search_gives_way_to_the_next_best(
    tmp_path, end, chosen, calls_of_seeds
):
    search = {**SEARCH, "coarse": [1.0, 2.0, 2.5], "confirm": True}
    path = write_table(tmp_path, grid={"head": ["a"]}, search=search, seeds=[1, 2])
    program = tmp_path / "program.py"
    later = f'if options["seed"] != "0": found["val/loss"] = {end}'
    text = program.read_text().replace('(home / "metrics', f'{later}\n(home / "metrics')
    program.write_text(text)
    assert sweep.main(arguments(path)) == ("exit" in end)
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    assert stages.selected(experiment, cell) == [{"x": chosen}]
    assert len(calls(tmp_path)) == 3 + calls_of_seeds


def test_tpe_needs_no_ray(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "gate").touch()
    search = {"metric": "val/loss", "better": "lower", "seed": 0, "trials": 6, "top": 2}
    search["space"] = {"x": {"low": 0.0, "high": 9.0}}
    path = write_table(tmp_path, grid={"head": ["a"]}, search=search, seeds=[1, 2])
    assert sweep.main(arguments(path)) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    trials = stages.trials(experiment, cell)
    best = sorted(trials, key=lambda run: (run.settings["x"] - 2) ** 2)[:2]
    assert len(trials) == 6
    assert stages.selected(experiment, cell) == [run.settings for run in best]
    assert len(calls(tmp_path)) == 6 + 2 * 2


def test_tpe_tries_each_point_of_a_small_space_once(tmp_path):
    pytest.importorskip("optuna")
    search = {"metric": "val/loss", "better": "lower", "seed": 0, "trials": 50}
    search["space"] = {"x": {"low": 0, "high": 2}}
    path = write_table(tmp_path, grid={"head": ["a"]}, search=search)
    assert sweep.main(arguments(path)) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    trials = stages.trials(experiment, experiment.cells()[0])
    assert sorted(run.settings["x"] for run in trials) == [0, 1, 2]


# -- status --------------------------------------------------------------------------------------


def test_status_says_what_is_done_running_failed_and_to_do(tmp_path, capsys):
    path = write_table(tmp_path, grid={"x": [1.0, -9.0, 3.0, 4.0]})
    process = start(path, "--jobs", "1")
    wait_for(lambda: "x3-seed1" in calls(tmp_path), process)
    assert sweep.main(["status", *arguments(path)]) == 0
    head, running, failed = capsys.readouterr().out.splitlines()
    assert "2 of 4 runs done (1 finished, 1 failed), 1 running, 1 to do" in head
    assert "runs an hour done in 0:" in head
    assert running.strip() == "running: x3-seed1"
    assert failed.strip().startswith("failed: x-9-seed1: the number is below zero (see ")
    (tmp_path / "gate").touch()
    assert process.wait(600) == 1
    assert sweep.main(["status", *arguments(path)]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 runs done" in out and "nothing else is left to do; --retry_failed" in out


def test_a_refused_sweep_leaves_the_commands_of_others(tmp_path):
    path = write_table(tmp_path)
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    status.note_commands(experiment, ["a"])
    for ended, left in ((0, ["a"]), (1, ["a", "b"])):
        schedule = Schedule(experiment)
        schedule.counts["finished"] = ended
        with pytest.raises(ValueError, match="no"), status.noted(experiment, "b", schedule):
            raise ValueError("no")
        assert (experiment.folder / "commands.txt").read_text().splitlines() == left


def test_status_counts_runs_that_are_not_yet_known(tmp_path):
    path = write_table(tmp_path, grid={"head": ["a", "b"]}, search=SEARCH, seeds=[1, 2, 3])
    found = status.survey(plan.load(str(path), "smoke", tmp_path / "runs"))
    assert (found.done, found.todo, found.seconds_left) == (0, 2 * (2 + 3), None)


def test_a_terminal_sees_a_live_table(tmp_path, capsys):
    from experiments.progress import Progress

    path = write_table(tmp_path, grid={"x": [1.0, 2.0]})
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    schedule = Schedule(experiment)
    with Progress(schedule, live=True) as progress:
        run = schedule.take()
        runs.record_failure(run, 1, "boom")
        progress.ended(run, "failed")
    out = capsys.readouterr().out
    assert "to do" in out and "tiny" in out and "FAILED: boom" in out


# -- extras --------------------------------------------------------------------------------------


def test_ray_is_asked_for_only_when_needed(table, monkeypatch, capsys):
    for name in ("ray", "optuna"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "experiments.engines.ray_tune", raising=False)
    path = table()
    with pytest.raises(SystemExit) as stop:
        sweep.main(arguments(path, "--engine", "ray"))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'catnat[sweep]'" in line
    assert sweep.main(arguments(path)) == 0
    search = {"metric": "val/loss", "better": "lower", "seed": 0, "trials": 1}
    path = table(grid={"head": ["a"]}, search=search | {"space": {"x": {"low": 0, "high": 2}}})
    with pytest.raises(SystemExit) as stop:
        sweep.main(arguments(path))
    assert stop.value.code == 2
    assert "needs Optuna" in capsys.readouterr().err
