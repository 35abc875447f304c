"""Sweeps: every run once, whatever happens in between, on this machine and on Ray."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from experiments import plan, runs, stages, sweep
from experiments.engines import forks as warm

ROOT = Path(__file__).resolve().parent.parent

# Stands in for train.py, in a tenth of a second: a checkpoint, perhaps a wait, then the numbers.
PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path

options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if "busy" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
home = Path(options["default_root_dir"])
with (home / "calls.txt").open("a") as file:
    file.write(options.get("ckpt_path", "new") + "\\n")
(home / "checkpoints").mkdir(exist_ok=True)
(home / "checkpoints" / "last.txt").write_text("")
x, gate = float(options["x"]), Path(options["gate"])
if x < 0:
    print("the number is below zero")
    if x == -4:
        os.kill(os.getpid(), signal.SIGKILL)
    if x == -3 and "experiments.engines.forks" in Path(f"/proc/{os.getppid()}/cmdline").read_text():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    sys.exit(2 if x < -5 else 3)
while x >= 3 and not gate.exists():
    time.sleep(0.05)
(home / "metrics.json").write_text(json.dumps({"val/loss": (x - 2) ** 2, "test/loss": x}))
"""


@pytest.fixture(params=["program.py", "train.py"])  # as a new process, as a fork (see warm.py)
def table(tmp_path, request):
    """Writes a table whose runs are calls of the program above, and gives its file."""

    def write(**content):
        program = tmp_path / request.param
        program.write_text(PROGRAM)
        content = {
            "title": "x",
            "program": str(program),
            "options": {"gate": str(tmp_path / "gate")},
            "grid": {"x": [1.0]},
            "seeds": [1],
            "metrics": {"test/loss": {"label": "loss", "better": "lower"}},
            "scales": {"smoke": {}},
        } | content
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def arguments(path, *more):
    return [str(path), "--scale", "smoke", "--runs", str(path.parent / "runs"), *more]


def start(path, *more):
    command = [sys.executable, str(ROOT / "experiments" / "sweep.py"), *arguments(path, *more)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)


def calls(folder):
    """What each run was called with, by the run's name."""
    found = (folder / "runs" / "tiny" / "smoke").glob("*/calls.txt")
    return {path.parent.name: path.read_text().split() for path in found}


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the sweep ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(process):
    """kill -9 for the sweep and everything it has started in its session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    assert process.wait(30) == 130
    assert set(calls(tmp_path)) == {"x3-seed1", "x4-seed1"}
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    assert not any(runs.done(run) for run in stages.open_stage(experiment).runs)


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
    assert again.wait(60) == 0
    assert calls(tmp_path) == {"x3-seed1": ["new"]}


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
    assert killed == ["new", "last", "new"]
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2


@pytest.mark.skipif(not warm._can_wait(), reason="nothing is forked here")
@pytest.mark.parametrize("table", ["train.py"], indirect=True)
def test_without_the_process_that_forks_runs_go_on(table, tmp_path, capfd):
    path = table(grid={"x": [-3.0, 0.0, 1.0]})
    assert sweep.main(arguments(path, "--jobs", "1")) == 130  # one run was interrupted
    assert capfd.readouterr().err.count("no more forks") == 1
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2


def test_stages_run_in_order(table, tmp_path):
    search = {
        "metric": "val/loss",
        "better": "lower",
        "seed": 0,
        "option": "x",
        "coarse": [1.0, 4.0],
    }
    path = table(grid={"head": ["a"]}, search=search | {"factors": [1.5, 2.0, 2.5]})
    (tmp_path / "gate").touch()
    assert sweep.main(arguments(path, "--jobs", "3")) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    assert stages.selected(experiment, cell) == [{"x": 2.0}]
    assert len(list((tmp_path / "runs").rglob("metrics.json"))) == 2 + 3 + 1


def test_print_prints_what_is_left(table, tmp_path, capsys):
    path = table(grid={"x": [1.0, 2.0, 3.0]}, options={"gate": "no such file"})
    first, second, third = plan.load(str(path), "smoke", tmp_path / "runs").cells()
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    done = experiment.run(first, {}, 1)
    done.home.mkdir(parents=True)
    (done.home / "metrics.json").write_text('{"val/loss": 1}')
    half = experiment.run(second, {}, 1)
    (half.home / "checkpoints").mkdir(parents=True)
    (half.home / "checkpoints" / "last.txt").touch()
    assert sweep.main(arguments(path, "--engine", "print", "--", "--note=two words")) == 0
    out, err = capsys.readouterr()
    lines = [shlex.split(line) for line in out.splitlines()]
    (program,) = tmp_path.glob("*.py")
    assert [line[:2] for line in lines] == [[sys.executable, str(program)]] * 2
    assert "--gate=no such file" in lines[0] and "--note=two words" in lines[0]
    assert ["--ckpt_path=last" in line for line in lines] == [True, False]
    assert "seeds, 2 of 3 runs, the last stage" in err
    assert str(experiment.run(third, {}, 1).folder) in out


def test_print_says_what_comes_next(tmp_path, capsys):
    assert (
        sweep.main(["vae_adam", "--scale", "smoke", "--runs", str(tmp_path), "--engine", "print"])
        == 0
    )
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    assert "coarse search, 4 of 4 runs; then again, for: refined search, seeds" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("vae_adm",), "no experiment 'vae_adm'; choose from"),
        (("gsl", "--only", "head"), "expected key=value"),
        (("gsl", "--only", "hed=natural"), "choose from head, theta"),
        (("gsl", "--scale", "tiny"), "smoke"),
        (("gsl", "--jobs", "0"), "--jobs 0"),
        (("ppo_breakout", "--scale", "smoke", "--engine", "local"), "use --engine ray"),
    ],
)
def test_bad_input_gets_one_line(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.main([*words, "--runs", str(tmp_path)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


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


@pytest.mark.parametrize("table", ["program.py"], indirect=True)  # Ray forks nothing
def test_tpe_on_ray_killed_and_resumed(table, tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    search = {"metric": "val/loss", "better": "lower", "seed": 0, "trials": 5, "top": 2}
    search["space"] = {"x": {"low": 0.0, "high": 9.0}}
    path = table(grid={"head": ["a"]}, search=search, seeds=[1, 2])
    process = start(path, "--engine", "ray", "--jobs", "2")
    waits = lambda: any(float_of(name, path) >= 3 for name in calls(tmp_path))  # noqa: E731
    wait_for(waits, process)
    kill(process)
    before = calls(tmp_path)
    (tmp_path / "gate").touch()
    assert start(path, "--engine", "ray", "--jobs", "2").wait(120) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    trials = stages.trials(experiment, cell)
    assert len({run.settings["x"] for run in trials}) == 5
    assert set(before) <= {run.folder.name for run in trials}
    best = sorted(trials, key=lambda run: (run.settings["x"] - 2) ** 2)[:2]
    assert stages.selected(experiment, cell) == [run.settings for run in best]
    assert stages.open_stage(experiment) is None
    after = calls(tmp_path)
    assert len(after) == 5 + 2 * 2
    assert all(each in (["new"], ["new", "last"]) for each in after.values())


def float_of(name, path):
    (record,) = (path.parent / "runs" / "tiny" / "smoke" / name).glob("trial-*.json")
    return json.loads(record.read_text())["settings"]["x"]
