"""Sweeps on Ray: a cluster on this machine whose nodes have fake GPUs and are killed."""

import json
import os
import subprocess
import sys

import pytest
from cases_sweep import SEARCH, calls, kill, start, wait_for, write_table

from experiments import plan, runs, stages, sweep, tables

ray = pytest.importorskip("ray")
pytest.importorskip("optuna")

from experiments.engines.ray_trial import RunTrial, config_of, run_of  # noqa: E402
from experiments.engines.ray_tune import why_no_connection  # noqa: E402

# Validates three times; one that is bad then waits to be stopped.
VALIDATES = """\
import time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

writer = EventFileWriter(str(home))
for step in range(1, 4):
    value = Summary.Value(tag="val/loss", simple_value=(x - 2) ** 2)
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
writer.flush()
"""


# A head with two processors and two GPUs that are not there; a second node comes and is killed.
CLUSTER = """\
import sys
from ray.cluster_utils import Cluster

small = {"num_cpus": 2, "object_store_memory": 100_000_000}
head = {"num_gpus": 2, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=small | head)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "add":
        node = cluster.add_node(**small)
        cluster.wait_for_nodes()
    else:
        cluster.remove_node(node, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
HERE_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # everything listens on 127.0.0.1


class Cluster:
    """The cluster in its own process."""

    def __init__(self, folder):
        (folder / "cluster.py").write_text(CLUSTER)
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | HERE_ALONE,
        )
        self.address = self.process.stdout.readline().strip()

    def tell(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.process.stdin.close()
    made.process.wait(600)


def begin(cluster, path, *more):
    """Start a sweep on the cluster."""
    words = ("--engine", "ray", "--address", cluster.address, *more)
    return start(path, *words, **HERE_ALONE)


@pytest.mark.slow
def test_asha_stops_bad_runs_of_the_search_and_no_seeds(cluster, tmp_path):
    path = write_table(
        tmp_path,
        grid={"head": ["a"]},
        search=SEARCH | {"coarse": [2.0, 9.0], "early_stop": "asha"},
        seeds=[1, 2],
    )
    program = tmp_path / "program.py"
    program.write_text(program.read_text().replace("if x < 0:", f"{VALIDATES}\nif x < 0:"))
    assert begin(cluster, path, "--jobs", "1", "--gpus_per_run", "0").wait(600) == 0
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    (cell,) = experiment.cells()
    good, bad = stages.coarse(experiment, cell)
    assert runs.metrics(good) is not None
    assert runs.stopped(bad)["val/loss"] == pytest.approx(49.0)
    assert stages.selected(experiment, cell) == [{"x": 2.0}]
    assert all(runs.metrics(run) for run in stages.final(experiment, cell))
    wait_for(lambda: not runs.running(bad))  # its process is gone


@pytest.mark.slow
def test_runs_take_the_gpus_of_the_cluster(cluster, tmp_path):
    (tmp_path / "gate").touch()
    path = write_table(tmp_path, grid={"x": [1.0, 2.0]})
    program = tmp_path / "program.py"  # neither ends before both have begun
    both = "import glob\nwhile len(glob.glob(str(home.parent / '*/gpu.txt'))) < 2: time.sleep(0.05)"
    program.write_text(program.read_text().replace("if x < 0:", f"{both}\nif x < 0:"))
    assert begin(cluster, path, "--jobs_per_gpu", "1").wait(600) == 0
    found = [path.read_text() for path in (tmp_path / "runs").rglob("gpu.txt")]
    assert sorted(found) == ["0", "1"]


@pytest.mark.slow
def test_tpe_killed_and_restored(cluster, tmp_path):
    search = {"metric": "val/loss", "better": "lower", "seed": 0, "trials": 5, "top": 2}
    search["space"] = {"x": {"low": 0.0, "high": 9.0}}
    path = write_table(tmp_path, grid={"head": ["a"]}, search=search, seeds=[1, 2])
    process = begin(cluster, path, "--gpus_per_run", "0")
    wait_for(lambda: any(_x(name, path) >= 3 for name in calls(tmp_path)), process)
    state = tmp_path / "runs/tiny/smoke/.ray/tiny-smoke"
    known = lambda: any("RunTrial" in x.read_text() for x in state.glob("experiment_state*"))  # noqa: E731
    wait_for(known, process)
    kill(process)
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    wait_for(lambda: not any(map(runs.running, stages.known(experiment))))
    before, kept = calls(tmp_path), {path.name for path in state.glob("a-trial*")}
    (tmp_path / "gate").touch()
    assert begin(cluster, path, "--gpus_per_run", "0").wait(600) == 0
    (cell,) = experiment.cells()
    trials = stages.trials(experiment, cell)
    assert len({run.settings["x"] for run in trials}) == 5
    assert set(before) <= {run.folder.name for run in trials}
    best = sorted(trials, key=lambda run: (run.settings["x"] - 2) ** 2)[:2]
    assert stages.selected(experiment, cell) == [run.settings for run in best]
    after = calls(tmp_path)
    assert len(after) == 5 + 2 * 2
    assert kept and kept <= {path.name for path in state.glob("*")}  # Tune's own state was restored
    assert all(each in (["new"], ["new", "last"]) for each in after.values())


def _x(name, path):
    (record,) = (path.parent / "runs" / "tiny" / "smoke" / name).glob("trial-*.json")
    return json.loads(record.read_text())["settings"]["x"]


@pytest.mark.slow
def test_24_runs_on_two_nodes_survive_the_death_of_one(cluster, tmp_path):
    """All four that run wait when the node dies; its two go on from their checkpoints."""
    cluster.tell("add")
    waiting = [3.0, 3.25, 3.5, 3.75]
    path = write_table(tmp_path, grid={"x": waiting + [x / 10 for x in range(20)]})
    process = begin(cluster, path, "--gpus_per_run", "0")
    experiment = plan.load(str(path), "smoke", tmp_path / "runs")
    first = [run for run in stages.known(experiment) if run.cell["x"] >= 3]
    wait_for(lambda: all(map(runs.running, first)) and len(calls(tmp_path)) == 4, process)
    cluster.tell("kill")
    wait_for(lambda: sum(map(runs.running, first)) == 2, process)
    (tmp_path / "gate").touch()
    assert process.wait(600) == 0
    after = calls(tmp_path)
    again = [after.pop(run.folder.name) for run in first]
    assert sorted(again) == [["new"], ["new"], ["new", "last"], ["new", "last"]]
    assert len(after) == 20 and all(each == ["new"] for each in after.values())
    local = tmp_path / "local"
    assert sweep.main([str(path), "--scale", "smoke", "--runs", str(local)]) == 0
    assert _table(path, tmp_path / "runs") == _table(path, local)


def _table(path, folder):
    assert tables.main([str(path), "--runs", str(folder)]) == 0
    return [(folder / "tiny/smoke" / name).read_text() for name in ("tiny.csv", "tiny_runs.csv")]


# -- without a cluster ---------------------------------------------------------------------------


def test_a_checkpoint_goes_on_where_the_folders_of_runs_are_not_shared(tmp_path):
    path = write_table(tmp_path)
    (run,) = stages.known(plan.load(str(path), "smoke", tmp_path / "runs"))
    config = config_of(run, metric="val/loss", retries=0)
    assert run_of(json.loads(json.dumps(config))) == run
    saved = run.home / "version_2" / "checkpoints" / "last.ckpt"
    saved.parent.mkdir(parents=True)
    import zipfile

    with zipfile.ZipFile(saved, "w") as file:
        file.writestr("data", "x")
    (tmp_path / "storage").mkdir()
    trial = RunTrial(config)
    trial.save_checkpoint(str(tmp_path / "storage"))
    run.home.rename(tmp_path / "lost")
    trial = RunTrial(config)
    trial.load_checkpoint(str(tmp_path / "storage"))
    assert runs.interrupted(run)
    os.utime(saved, (2e9, 2e9))  # this machine has come further
    saved.write_bytes(saved.read_bytes() + b"more")
    os.utime(saved, (2e9, 2e9))
    trial.load_checkpoint(str(tmp_path / "storage"))
    assert saved.read_bytes().endswith(b"more")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Could not find any running Ray instance"), "no Ray cluster"),
        (ConnectionError("Invalid or missing authentication token"), "wants a token"),
        (ray.exceptions.AuthenticationError("Token authentication is enabled"), "wants a token"),
    ],
)
def test_the_message_tells_a_missing_token_from_a_missing_cluster(error, said):
    assert said in why_no_connection("auto", error)


def test_a_cluster_that_answers_and_refuses_is_not_said_to_be_missing():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = why_no_connection(address, ConnectionError("Failed to connect to Ray cluster"))
    assert "something answers there, but refuses us" in line and "RAY_AUTH_TOKEN" in line


def test_a_token_that_is_missing_further_down_is_found():
    try:
        try:
            raise ray.exceptions.AuthenticationError("RAY_AUTH_TOKEN is not set")
        except ray.exceptions.RayError as error:
            raise ConnectionError("Failed to connect to GCS") from error
    except ConnectionError as error:
        line = why_no_connection("10.0.0.1:6379", error)
    assert "wants a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in line
    assert "\n" not in line
