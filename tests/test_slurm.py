"""Sweeps as SLURM array jobs, with an sbatch that runs the tasks of an array on this machine."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases_sweep import SEARCH, arguments, calls, start, wait_for, write_table

from experiments import plan, runs, stages, sweep, tables
from experiments.engines.commands import line

# Understands what is asked of it and no more: --wait, --parsable, an array, and one signal.
SBATCH = """\
#!/usr/bin/env python3
import os, re, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

*words, script = sys.argv[1:]
text = Path(script).read_text()
with open(Path(__file__).parent / "submitted.txt", "a") as file:
    file.write(" ".join(words) + "\\n")
if "--partition=none" in words:
    sys.exit("sbatch: error: invalid partition specified: none")
print(len(list(Path(script).parent.glob("*.sh"))), flush=True)
last, at_once = re.search(r"--array=0-(\\d+)(?:%(\\d+))?", text).groups()
output = re.search(r"--output=(.*)", text)[1].replace("%A", "1")

def task(index):
    env = os.environ | {"SLURM_ARRAY_TASK_ID": str(index)}
    with open(output.replace("%a", str(index)), "a") as log:
        return subprocess.run(["bash", script], env=env, stdout=log, stderr=log).returncode

with ThreadPoolExecutor(int(at_once or 4)) as pool:
    sys.exit(max(map(abs, pool.map(task, range(int(last) + 1)))))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Puts the stand-in in the path; gives what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("experiments.engines.slurm.Slurm.poll", 0.2)
    return lambda: (folder / "submitted.txt").read_text().splitlines()


def test_one_array_for_each_stage(cluster, tmp_path):
    (tmp_path / "gate").touch()
    path = write_table(tmp_path, grid={"head": ["a"]}, search=SEARCH | {"factors": [2.0]})
    assert sweep.main(arguments(path, "--engine", "slurm", "--sbatch=--partition=gpu")) == 0
    assert cluster() == ["--wait --parsable --partition=gpu"] * 3
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    assert len(calls(tmp_path)) == len(stages.known(experiment)) == 2 + 1 + 1
    assert sweep.main(arguments(path, "--engine", "slurm")) == 0
    assert len(cluster()) == 3  # nothing was left


def test_a_dry_run_prints_the_job_and_submits_nothing(cluster, tmp_path, capsys):
    path = write_table(tmp_path, grid={"x": [1.0, 2.0]})
    assert sweep.main(arguments(path, "--engine", "slurm", "--dry_run", "--jobs", "1")) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-1%1" in out and "# sbatch --wait --parsable" in out
    (lines,) = (tmp_path / "runs").rglob("array*.txt")
    assert len(lines.read_text().splitlines()) == 2 and "run_one.py" in lines.read_text()
    assert not calls(tmp_path) and not (tmp_path / "bin" / "submitted.txt").exists()
    assert not [*(tmp_path / "runs").rglob("commands.txt")], "the command has made nothing"


def test_failures_are_recorded_as_on_any_machine(cluster, tmp_path, capsys):
    path = write_table(tmp_path, grid={"x": [-1.0, 1.0]})
    assert sweep.main(arguments(path, "--engine", "slurm")) == 1
    assert calls(tmp_path) == {"x-1-seed1": ["new", "last"], "x1-seed1": ["new"]}
    assert "failed: x-1-seed1: the number is below zero" in capsys.readouterr().out
    assert len(cluster()) == 1


def test_what_sbatch_refuses_gets_one_line(cluster, tmp_path, monkeypatch, capsys):
    path = write_table(tmp_path)
    for words, said in ((["--sbatch=--partition=none"], "invalid partition"), ([], "no sbatch")):
        with pytest.raises(SystemExit) as stop:
            sweep.main(arguments(path, "--engine", "slurm", *words))
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        assert not [*(tmp_path / "runs").rglob("commands.txt")], "the command has made nothing"
        monkeypatch.setenv("PATH", str(tmp_path))


def test_a_job_that_always_dies_is_given_up(cluster, tmp_path):
    path = write_table(tmp_path)
    lethal = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)\n"
    (tmp_path / "program.py").write_text(lethal)
    assert sweep.main(arguments(path, "--engine", "slurm", "--retries", "1")) == 1
    (run,) = stages.known(plan.load(str(path), "smoke", tmp_path / "runs"))
    assert "its job ended 3 times without" in runs.failure(run)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells the runs")
@pytest.mark.slow
def test_a_killed_worker_loses_nothing(cluster, tmp_path):
    """8 runs; the worker of one that waits is killed. Its run goes on from its checkpoint."""
    grid = {"x": [0.0, 0.1, 0.2, 3.0], "head": ["a", "b"]}
    path = write_table(tmp_path, grid=grid)
    process = start(path, "--engine", "slurm", "--jobs", "4")
    wait_for(lambda: "x3-a-seed1" in calls(tmp_path), process)
    worker = _worker(tmp_path / "runs/tiny/smoke/x3-a-seed1")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), process)
    (tmp_path / "gate").touch()
    assert process.wait(600) == 0
    after = calls(tmp_path)
    assert len(after) == 8 and after.pop("x3-a-seed1") == ["new", "last"]
    assert all(each == ["new"] for each in after.values())
    assert _table(path, tmp_path / "runs", tmp_path / "slurm") == _local_table(path, tmp_path)


def test_a_worker_whose_time_is_up_stops_its_run_and_records_no_failure(tmp_path):
    path = write_table(tmp_path, grid={"x": [3.0]})
    (run,) = stages.known(plan.load(str(path), "smoke", tmp_path / "runs"))
    worker = subprocess.Popen(shlex.split(line(run, retries=1)), stdout=subprocess.DEVNULL)
    wait_for(lambda: calls(tmp_path), worker)
    worker.terminate()
    assert worker.wait(600) == 128 + signal.SIGTERM
    assert not runs.running(run) and not runs.done(run) and runs.interrupted(run)


def _worker(home):
    """The process of run_one.py that does a run."""
    said = subprocess.run(["pgrep", "-f", f"run_one.py {home} "], capture_output=True, text=True)
    pids = [int(each) for each in said.stdout.split()]
    return next(pid for pid in pids if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()[:80])


def _table(path, folder, out):
    assert tables.main([str(path), "--runs", str(folder), "--out", str(out)]) == 0
    return [(out / name).read_text() for name in ("tiny.csv", "tiny_runs.csv")]


def _local_table(path, tmp_path):
    again = tmp_path / "again"
    assert sweep.main([str(path), "--scale", "smoke", "--runs", str(again)]) == 0
    return _table(path, again, tmp_path / "local")
