"""Sweeps do what has no row, once, and continue after interruptions."""

import functools
import sys
import threading

import pytest
import yaml
from cases_sweep import (
    ROOT,
    arguments,
    do_at_once,
    run_command,
    run_sweep,
    start_sweep,
    wait_for,
    write_plan,
)
from filelock import FileLock

from catnat.sweeps import engines, plan_file, runs, sweep
from catnat.sweeps.defaults import Rows

SEARCH = {"grid": {"rate": [0.0, 1.0, 4.0]}, "seeds": [0]}


def rows_of(path):
    return runs.read(path.parent / "results" / "tiny" / "runs.csv")


def calls(path):
    return [file.read_text().split() for file in (path.parent / "runs").glob("tiny/*/calls.txt")]


def test_every_run_is_one_row_with_its_options_metrics_and_origin(tmp_path):
    path = write_plan(tmp_path)
    assert run_sweep(path) == 0
    rows = rows_of(path)
    assert [(row["x"], row["seed"]) for row in rows] == [
        ("1.0", "1"),
        ("2.0", "1"),
        ("1.0", "2"),
        ("2.0", "2"),
    ]
    assert runs.metrics_of(rows[1]) == {"val/loss": 1.001, "test/nll": 2.001}
    about = rows[0]
    assert about["plans"] == "tiny" and about["stage"] == "final" and about["device"]
    assert about["status"] == "finished" and about["commit"]


def test_runs_with_a_row_are_not_repeated_and_rows_alone_are_enough(tmp_path, capsys):
    path = write_plan(tmp_path)
    assert run_sweep(path) == 0
    first = rows_of(path)
    for folder in (tmp_path / "runs").glob("tiny/*"):
        folder.rename(tmp_path / folder.name)  # another machine has the rows alone
    assert run_sweep(path) == 0
    assert rows_of(path) == first and not calls(path)
    assert "0 runs can start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("x", "change", "count"),
    [(1.0, {"steps": 5}, 4), (1.0000001, {}, 4), (1, {"save_every": 9}, 2)],
)
def test_an_edited_plan_does_not_count_old_runs_unless_it_only_observes(
    tmp_path, x, change, count, monkeypatch
):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, grid={"x": [1.0]}, options={"steps": 3, "save_every": 10})
    assert run_sweep(path) == 0
    write_plan(tmp_path, grid={"x": [x]}, options={"steps": 3} | change)
    assert run_sweep(path) == 0
    assert len({runs.key_of(row) for row in rows_of(path)}) == len(rows_of(path)) == count


def test_large_seeds_and_close_floats_are_different_runs():
    def run(**options):
        return runs.Run({"model": "vae", "seed": 1, **options}, "p", "final")

    seeds = [10**6, 10**6 + 1, 10**6 + 2]
    assert len({run(seed=seed).name() for seed in seeds}) == 3
    rates = [run(learning_rate=rate) for rate in (0.1, 0.1 + 1e-12)]
    assert len({run.name() for run in rates}) == 2
    assert "--seed=1000001" in run(seed=1000001).arguments(ROOT)
    assert run(x=125.0).name() == run(x=125).name()
    words = run(**{"import": ["heads", "models"]}).arguments(ROOT)
    assert "--import=heads --import=models" in " ".join(words)


@pytest.mark.parametrize("env", ["../../outside", "ALE/Pong-v5", "..", "a b;c"])
def test_a_run_s_folder_stays_inside_that_of_the_runs(env, tmp_path):
    name = runs.Run({"env": env, "seed": 1}, "plan", "final").name()
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert "/" not in name and " " not in name


def test_search_then_refined_then_all_seeds_with_the_best(tmp_path, monkeypatch):
    do_at_once(monkeypatch)
    search = SEARCH | {"factors": [0.5, 2.0]}
    path = write_plan(tmp_path, grid={"x": [1.9]}, search=search)
    assert run_sweep(path) == 0
    stages = [(r["stage"], r["rate"], r["seed"]) for r in rows_of(path)]
    assert stages[:3] == [("search", rate, "0") for rate in ("0.0", "1.0", "4.0")]
    assert sorted(stages[3:5]) == [("search", "0.5", "0"), ("search", "2.0", "0")]
    assert stages[5:] == [("final", "2.0", "1"), ("final", "2.0", "2")]


def test_of_several_finalists_the_best_after_the_final_runs_is_in_the_table(tmp_path, monkeypatch):
    do_at_once(monkeypatch)
    grid = {"rate": [1.0, 2.0, 9.0], "other": [3]}
    search = {"grid": grid, "options": {"x": 1.6}, "seeds": [0, 7], "top": 2}
    path = write_plan(tmp_path, grid={"y": [1]}, options={"x": 1.4}, search=search)
    assert run_sweep(path) == 0
    loaded, rows = plan_file.load(str(path)), Rows(rows_of(path))
    assert [x["rate"] for x in loaded.selected({"y": 1}, rows)] == [2.0, 1.0]
    assert loaded.table_settings({"y": 1}, rows) == {"rate": 1.0, "other": 3}


def test_a_search_that_failed_between_two_others_does_not_disturb_their_order(tmp_path):
    search = {"grid": {"rate": [2.0, 3.0, 1.0]}}
    loaded = plan_file.load(str(write_plan(tmp_path, grid={"y": [1]}, search=search)))
    losses = {2.0: {"val/loss": 2.0}, 3.0: {}, 1.0: {"val/loss": 1.0}}
    searches = [run for run in loaded.runs(Rows()) if run.stage == "search"]
    rows = Rows(run.row(losses[run.options["rate"]]) for run in searches)
    assert loaded.selected({"y": 1}, rows) == [{"rate": 1.0}]


def test_a_failing_run_is_tried_again_then_a_row_says_why(tmp_path, capsys):
    path = write_plan(tmp_path, grid={"x": [-1.0, 1.0]}, seeds=[1])
    assert run_sweep(path) == 1
    (failed,) = (row for row in rows_of(path) if not runs.is_finished(row))
    assert failed["note"] == "exit code 3: the number is below zero"
    assert sorted(map(len, calls(path))) == [1, 2]
    assert "FAILED" in capsys.readouterr().out
    assert run_command("status", arguments(path)) == 0
    assert "1 of 2 final runs finished, 1 failed" in capsys.readouterr().out
    assert run_sweep(path) == 1  # not tried again
    assert sorted(map(len, calls(path))) == [1, 2]
    assert run_sweep(path, "--retry_failed") == 1
    assert sorted(map(len, calls(path))) == [1, 4] and len(rows_of(path)) == 2
    alone = ["--retry_failed", "--only", "x=-1.0", f"--results={tmp_path}"]
    assert [run_sweep(path, *alone) for _ in range(2)] == [1, 1]


def test_wrong_usage_is_not_tried_again_and_settings_that_failed_are_not_selected(tmp_path):
    search = {"grid": {"x": [-9.0, 1.0]}}
    path = write_plan(tmp_path, grid={"rate": [1]}, search=search, seeds=[1])
    assert run_sweep(path) == 1
    assert sorted(map(len, calls(path))) == [1, 1, 1]
    assert [row["x"] for row in rows_of(path) if runs.is_finished(row)] == ["1.0", "1.0"]


def start_gated(tmp_path):
    """The gate for which the one run of a sweep waits, the plan, and the process of the sweep."""
    gate = tmp_path / "gate"
    path = write_plan(tmp_path, grid={"x": [1.0]}, options={"gate": str(gate)}, seeds=[1])
    process = start_sweep(path)
    wait_for(lambda: calls(path))
    return gate, path, process


def test_an_interrupted_sweep_stops_its_runs_and_the_same_command_resumes_them(tmp_path):
    gate, path, process = start_gated(tmp_path)
    process.terminate()
    assert process.wait(60) == 130
    assert not rows_of(path)
    gate.touch()
    assert run_sweep(path) == 0
    (times,) = calls(path)
    assert times[0] == "new" and times[1].endswith("last.ckpt")


def test_a_run_that_another_sweep_does_is_left_to_it(tmp_path, capsys):
    gate, path, process = start_gated(tmp_path)
    for runs_folder in ("runs", "other"):
        words = arguments(path, f"--runs={tmp_path / runs_folder}")
        assert run_command("sweep", words) == 1
    assert "another sweep does it" in capsys.readouterr().out and calls(path) == [["new"]]
    gate.touch()
    assert process.wait(60) == 0 and len(rows_of(path)) == 1


def test_runs_end_with_a_sweep_that_is_killed_and_the_same_command_resumes_them(tmp_path):
    gate, path, process = start_gated(tmp_path)
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    process.kill()
    process.wait(60)
    with FileLock(folder / ".run.lock", timeout=60):  # held as long as the run lives
        assert not list(folder.glob("metrics.json"))
    gate.touch()
    assert run_sweep(path) == 0
    (times,) = calls(path)
    assert times[0] == "new" and times[1].endswith("last.ckpt") and len(rows_of(path)) == 1


class Never:
    """An engine that must not do a run."""

    def execute(self, run, folder):
        raise AssertionError(run)


def test_a_run_is_not_repeated_that_another_sweep_has_done_meanwhile(tmp_path, capsys):
    path = write_plan(tmp_path, grid={"x": [1.0]}, seeds=[1])
    waiting = sweep.Sweep.load(str(path), sweep.build_parser().parse_args(arguments(path)))
    (run,) = waiting.pending()
    assert run_sweep(path) == 0
    waiting.do(run, Never(), "test")
    assert "another sweep does it" in capsys.readouterr().out and len(rows_of(path)) == 1


def test_a_row_is_written_before_the_run_is_free_for_another_sweep(tmp_path):
    path = write_plan(tmp_path, grid={"x": [1.0]}, seeds=[1])
    first, second = (
        sweep.Sweep.load(str(path), sweep.build_parser().parse_args(arguments(path)))
        for _ in range(2)
    )
    (run,) = first.pending()
    record = first.record

    def record_while_another_tries(outcomes, engine):
        second.do(run, Never(), "test")  # still locked: there is no row yet
        record(outcomes, engine)

    first.record = record_while_another_tries
    first.do(run, engines.local_engine(1), "test")
    second.do(run, Never(), "test")
    assert len(rows_of(path)) == 1


DAMAGED = {
    "a column twice": ("seed,status,seed,a/b\n1,finished,1,2\n", "'seed' appears twice"),
    "a byte order mark": ("\ufeffseed,status,a/b\n1,finished,2\n", "byte order mark"),
    "a carriage return": ('seed,status,a/b,x\n1,finished,2,"a\rb"\n', "line 2: a carriage return"),
    "a bare carriage return": ("seed,status,a/b\r1,finished,2\r", "line 1: a carriage return"),
    "no metrics": ("seed,status,a/b\n1,finished,\n", "line 2: the run has finished"),
    "too many values": ("seed,status,a/b\n1,finished,2,3\n", "the number of values"),
}


@pytest.mark.parametrize("name", [*DAMAGED, "binary"])
@pytest.mark.parametrize("command", ["sweep", "status", "tables"])
def test_a_damaged_file_of_rows_is_refused_and_stays_as_it_is(name, command, tmp_path, capsys):
    text, words = DAMAGED.get(name, ("", "is not a file of rows"))
    content = text.encode() or bytes(range(256))
    path = write_plan(tmp_path)
    rows_path = tmp_path / "results" / "tiny" / "runs.csv"
    rows_path.parent.mkdir(parents=True)
    rows_path.write_bytes(content)
    assert run_command(command, arguments(path)) == 2
    error = capsys.readouterr().err
    assert words in error and str(rows_path) in error and error.count("\n") == 1
    assert rows_path.read_bytes() == content


def test_only_does_a_part(tmp_path, capsys, monkeypatch):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, names={"x": "short"})
    assert run_sweep(path, "--only", "short=1.0", "seed=2") == 0
    assert [(r["x"], r["seed"]) for r in rows_of(path)] == [("1.0", "2")]
    for word, text in (("x=7", "x '7'; "), ("y=1", "'y'; "), ("x", "name=")):
        assert run_sweep(path, "--only", word) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1


def test_options_after_two_dashes_belong_to_every_run(tmp_path, monkeypatch):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, seeds=[1])
    assert run_sweep(path, "--", "--rate=2", "--more=3") == 0
    assert {(r["rate"], r["more"]) for r in rows_of(path)} == {("2", "3")}
    for word in ("--x=1", "--model.x=1", "--ckpt_path=last"):  # its grid, and what a sweep sets
        assert run_sweep(path, "--", word) == 2


def test_a_line_names_the_run_by_what_varies(tmp_path, monkeypatch, capsys):
    do_at_once(monkeypatch)
    fixed = {"rate": {"a": 1.0, "b": 2.0}, "other": 5}
    path = write_plan(tmp_path, grid={"x": [1.0], "head": ["a", "b"]}, search={"fixed": fixed})
    assert run_sweep(path, "--only", "seed=1") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "final head" in line]
    names = [line.partition(" ")[2].partition(":")[0] for line in lines]
    assert names == ["final head=a rate=1.0 seed=1", "final head=b rate=2.0 seed=1"]


def test_runs_are_dealt_out_to_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    path = write_plan(tmp_path)
    assert run_sweep(path, "--jobs", "2") == 0
    files = (tmp_path / "runs").glob("tiny/*/gpu.txt")
    assert {file.read_text() for file in files} == {"4", "6"}


def test_a_metric_that_a_run_does_not_have_stops_the_sweep(tmp_path, capsys, monkeypatch):
    do_at_once(monkeypatch)
    path = write_plan(tmp_path, metrics={"test/nl": {}})
    assert run_sweep(path) == 2
    error = capsys.readouterr().err
    assert "metric of the plan 'test/nl'; " in error and "did you mean test/nll?" in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"max_stepz": 3}}, "max_steps"),
        ({"grid": {"head": ["naturl"]}}, "natural"),
    ],
)
def test_a_misspelt_option_or_head_is_found_before_the_first_run(change, words, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    base = str(ROOT / "paper/plans/vae_adam.yaml")
    path.write_text(yaml.safe_dump({"base": base, "scales": {"smoke": change}}))
    assert run_sweep(path, "--scale", "smoke") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# -- other engines ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_gives_the_same_rows(tmp_path):
    pytest.importorskip("ray")
    path = write_plan(tmp_path, grid={"x": [1.0]}, search=SEARCH)
    assert run_sweep(path, "--engine", "ray", "--resources", "num_cpus=0.5") == 0
    finals = [row for row in rows_of(path) if row["stage"] == "final"]
    assert [row["rate"] for row in finals] == ["1.0", "1.0"]
    assert {row["engine"] for row in rows_of(path)} == {"ray"}


def test_slurm_jobs_are_submitit_s(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    executor = functools.partial(submitit.AutoExecutor, cluster="debug")  # jobs of this process
    monkeypatch.setattr(submitit, "AutoExecutor", executor)
    path = write_plan(tmp_path, grid={"x": [-1.0, 1.0]}, seeds=[1])
    words = ["--engine", "slurm", "--resources", "slurm_partition=gpu", "timeout_min=5"]
    words += ["--jobs=1"]  # debug jobs change the environment of this process
    assert run_sweep(path, *words) == 1
    assert sorted(runs.is_finished(row) for row in rows_of(path)) == [False, True]


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("ray", "catnat[sweep]"),
        ("slurm", "catnat[sweep]"),
        ("batched", "needs a LightningModule"),
        ("local --resources num_cpus=1", "--resources is not an option of --engine local"),
    ],
)
def test_an_engine_that_cannot_do_it_is_one_line(name, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray" if name == "ray" else "submitit", None)
    assert run_sweep(write_plan(tmp_path), "--engine", *name.split()) == 2
    assert extra in capsys.readouterr().err


def test_a_run_that_ends_lets_others_start_before_all_have_ended(tmp_path):
    """Cells do not wait for each other."""
    path = write_plan(tmp_path, grid={"x": [1.0, 2.0]}, search=SEARCH | {"grid": {"rate": [1.0]}})
    begun = []
    finals = threading.Semaphore(0)

    class Engine:
        """Ends runs at once, but a search only when final runs of the other cell have begun."""

        jobs = 4

        def execute(self, run, folder):
            begun.append((run.stage, run.options["x"]))
            if run.stage == "final":
                finals.release()
            elif run.options["x"] == 2.0:
                assert finals.acquire(timeout=60) and finals.acquire(timeout=60)
            return {"val/loss": 1.0, "test/nll": 1.0}

        def stop(self):
            pass

    args = sweep.build_parser().parse_args(arguments(path))
    sweep.Sweep.load(str(path), args).use(Engine(), "test")
    assert sorted(begun[:2]) == [("search", 1.0), ("search", 2.0)]
    assert begun[2:4] == [("final", 1.0), ("final", 1.0)]
    assert len(rows_of(path)) == 6
