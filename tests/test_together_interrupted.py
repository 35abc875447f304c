"""Groups of runs that were interrupted go on; what fails in one run does not stop the others."""

import errno
import fcntl
import signal

import pytest
import torch
from cases_together import run_all, write_plan
from lightning.pytorch import Trainer

from catnat.lit_modules import MLPDiscreteVAE
from experiments import plan, runs, stages, sweep
from experiments.engines import together
from experiments.together import training
from experiments.together.graphs import ManyGraphLearners
from experiments.together.vaes import ManyVAEs


def test_a_group_that_was_interrupted_goes_on_from_its_last_validation(tmp_path, data, monkeypatch):
    path = write_plan(tmp_path, "vae", data, rates=[0.01], seeds=(1,))
    whole = [runs.metrics(run) for run in run_all(path, tmp_path / "whole")]
    steps, take = [], ManyVAEs.prepare_step

    def interrupted(self, step):
        steps.append(step)
        if len(steps) == 6:
            raise KeyboardInterrupt
        take(self, step)

    monkeypatch.setattr(ManyVAEs, "prepare_step", interrupted)
    arguments = [str(path), f"--runs={tmp_path / 'parts'}", "--engine=together"]
    assert sweep.main(arguments) == 130
    parts = [runs.metrics(run) for run in run_all(path, tmp_path / "parts")]
    assert steps == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert parts == whole
    assert not list(tmp_path.rglob("together-*"))


def test_a_group_that_was_interrupted_while_it_was_tested_trains_no_more(
    tmp_path, data, monkeypatch
):
    path = write_plan(tmp_path, "mlp-vae", data, rates=[0.001])
    arguments = [str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]
    finish, tested = training.GroupTraining._finish, []

    def interrupted(self, number):
        tested.append(number)
        if len(tested) == 2:
            raise KeyboardInterrupt
        finish(self, number)

    monkeypatch.setattr(training.GroupTraining, "_finish", interrupted)
    assert sweep.main(arguments) == 130
    monkeypatch.setattr(training.GroupTraining, "_step", None)  # nothing is trained
    found = run_all(path, tmp_path / "runs")
    assert tested == [0, 1, 1, 2, 3]
    monkeypatch.undo()
    whole = run_all(path, tmp_path / "whole")
    assert [runs.metrics(run) for run in found] == [runs.metrics(run) for run in whole]
    assert not list(tmp_path.rglob("together-*"))


def test_a_group_goes_on_on_another_kind_of_device_with_new_noise(tmp_path, monkeypatch, capsys):
    path = write_plan(tmp_path, "gsl", tmp_path, rates=[0.01], seeds=(1,))
    monkeypatch.setattr(ManyGraphLearners, "prepare_step", _interrupt_fifth)
    assert sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]) == 130
    (file,) = (tmp_path / "runs").rglob("together-*.pt")
    state = torch.load(file, weights_only=True)
    torch.save(state | {"noise": {"cuda": torch.zeros(16, dtype=torch.uint8)}}, file)
    steps = []
    monkeypatch.setattr(ManyGraphLearners, "prepare_step", lambda _, step: steps.append(step))
    assert all(runs.metrics(run) for run in run_all(path, tmp_path / "runs"))
    assert steps == [3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]  # the other group has not begun before
    assert "begin anew" not in capsys.readouterr().out


def _interrupt_fifth(_, step):
    if step == 5:
        raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["options", "damage"])
def test_a_state_of_other_options_or_a_damaged_one_is_not_gone_on_from(
    change, tmp_path, monkeypatch, capsys
):
    path = write_plan(tmp_path, "gsl", tmp_path, rates=[0.01], seeds=(1,))
    take = ManyGraphLearners.prepare_step
    monkeypatch.setattr(ManyGraphLearners, "prepare_step", _interrupt_fifth)
    arguments = [str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]
    assert sweep.main(arguments) == 130
    monkeypatch.setattr(ManyGraphLearners, "prepare_step", take)
    (state,) = (tmp_path / "runs").rglob("together-*.pt")
    if change == "damage":
        state.write_bytes(state.read_bytes()[:1000])
    else:
        path = write_plan(tmp_path, "gsl", tmp_path, rates=[0.01], seeds=(1,), max_steps=3)
    found = [runs.metrics(run) for run in run_all(path, tmp_path / "runs")]
    assert found == [runs.metrics(run) for run in run_all(path, tmp_path / "whole")]
    assert ("begin anew" in capsys.readouterr().out) == (change == "damage")
    assert not list(tmp_path.rglob("together-*"))


def test_a_state_is_removed_when_another_engine_has_done_its_runs(tmp_path, monkeypatch):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    monkeypatch.setattr(training.GroupTraining, "_finish", _interrupt)
    arguments = [str(path), f"--runs={tmp_path / 'runs'}"]
    assert sweep.main([*arguments, "--engine=together"]) == 130
    assert list(tmp_path.rglob("together-*.pt"))
    for run in stages.known(plan.load(str(path), None, tmp_path / "runs")):
        runs.write_json(run.home / "version_0" / "metrics.json", {"val/loss": 1.0})
    assert sweep.main(arguments) == 0
    assert not list(tmp_path.rglob("together-*"))


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_model_whose_test_fails_is_given_up_and_the_others_end(tmp_path, data, monkeypatch):
    path = write_plan(tmp_path, "mlp-vae", data, seeds=(1,))
    take = MLPDiscreteVAE.test_step

    def failing(self, batch, number):
        if self.head.name == "natural":
            raise ValueError("scores must be finite\nas they say")
        take(self, batch, number)

    monkeypatch.setattr(MLPDiscreteVAE, "test_step", failing)
    assert sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]) == 1
    found = stages.known(plan.load(str(path), None, tmp_path / "runs"))
    assert {run.cell["head"]: runs.failure(run) for run in found} == {
        "sigmoid": None,
        "natural": "scores must be finite",
    }
    assert not list(tmp_path.rglob("together-*"))


def test_a_run_whose_checkpoint_cannot_be_written_is_not_finished(
    tmp_path, data, monkeypatch, capsys
):
    path = write_plan(tmp_path, "mlp-vae", data, seeds=(1,))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write" in line and "No space left on device" in line
    monkeypatch.undo()
    for run in run_all(path, tmp_path / "runs"):
        assert (runs.version(run) / "checkpoints" / "last.ckpt").is_file()


# -- locks -----------------------------------------------------------------------------------------


def test_a_process_that_looks_at_a_run_does_not_keep_it_from_being_trained(tmp_path, monkeypatch):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    lock, looked = fcntl.flock, set()

    def flock(file, kind):
        if file.name not in looked and "version_" not in file.name:
            looked.add(file.name)
            raise BlockingIOError
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert all(runs.metrics(run) for run in run_all(path, tmp_path / "runs"))


def test_two_processes_may_look_at_a_run_at_the_same_time(tmp_path):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    run, *_ = stages.known(plan.load(str(path), None, tmp_path / "runs"))
    run.home.mkdir(parents=True)
    (run.home / ".lock").touch()
    with (run.home / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not runs.running(run)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert runs.running(run)


def test_a_sweep_holds_a_limited_number_of_runs_at_once(tmp_path, monkeypatch):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1, 2))
    monkeypatch.setattr(together, "_CLAIMED", 3)
    train_group, sizes = training.train_group, []

    def counted(members, *rest):
        every = stages.known(plan.load(str(path), None, tmp_path / "runs"))
        sizes.append((len(members), sum(map(runs.running, every))))
        train_group(members, *rest)

    monkeypatch.setattr(training, "train_group", counted)
    found = run_all(path, tmp_path / "runs")
    assert all(map(runs.metrics, found)) and sum(count for count, _ in sizes) == len(found)
    assert max(held for _, held in sizes) == 3


def test_ctrl_c_in_a_test_is_an_interruption(tmp_path, data, monkeypatch, capsys):
    path = write_plan(tmp_path, "mlp-vae", data, seeds=(1,))
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(MLPDiscreteVAE, "test_step", _interrupt)
    assert sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]) == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    assert list(tmp_path.rglob("together-*.pt"))
