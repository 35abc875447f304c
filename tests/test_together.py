"""Sweeps that train many runs as one batched model leave what train.py would have left."""

import fcntl

import pytest
import torch
import yaml
from cases_together import MODELS, STILL, run_all, write_plan
from lightning.pytorch import Trainer

import train
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE
from experiments import plan, runs, stages, sweep
from experiments.together import training
from experiments.together.graphs import ManyGraphLearners
from experiments.together.training import validated


@pytest.mark.parametrize("model", MODELS)
def test_a_run_begins_with_the_weights_of_its_seed_and_ends_as_train_py_does(model, tmp_path, data):
    root = data if model != "gsl" else tmp_path
    found = run_all(write_plan(tmp_path, model, root), tmp_path / "together")
    assert len(found) == (4 if model == "mlp-vae" else 8)
    run = found[-1]
    assert train.main([*run.command[2:-1], f"--default_root_dir={tmp_path}/single"]) == 0
    ours, theirs = runs.version(run), next(tmp_path.glob("single/*/*/version_0"))
    configs = [yaml.safe_load((each / "config.yaml").read_text()) for each in (ours, theirs)]
    for each in configs:
        each["trainer"].pop("default_root_dir")
    assert configs[0] == configs[1]
    states = [
        torch.load(each / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for each in (ours, theirs)
    ]
    assert set(states[0]) == set(states[1])
    for name, value in states[0].items():
        # Batch norms of the decoder saw draws of the latents.
        if not (name.startswith("decoder") and "running" in name):
            assert torch.allclose(value, states[1][name], rtol=1e-4, atol=1e-6), name
    numbers = runs.metrics(run)
    single = yaml.safe_load((theirs / "metrics.json").read_text())
    assert list(numbers) == list(single)
    if model != "vae":
        assert numbers == pytest.approx(single, rel=1e-5)
    curve = [(each["step"], each["value"]) for each in runs.curves(run, ["val/loss"])]
    assert [step for step, _ in curve] == [3, 6, 7]
    assert curve[-1][1] == pytest.approx(numbers["val/loss"], rel=1e-6)


def test_runs_that_another_process_holds_are_left_and_the_sweep_says_how_many(
    tmp_path, capsys, monkeypatch
):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    arguments = [str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]
    first, second, *others = stages.known(plan.load(str(path), None, tmp_path / "runs"))
    first.home.mkdir(parents=True)
    second.home.mkdir(parents=True)
    train_group = training.GroupTraining.run
    with (first.home / ".lock").open("w") as lock, (second.home / ".lock").open("w") as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)

        def meanwhile(self):
            train_group(self)
            other.close()  # the other process gives one run back

        monkeypatch.setattr(training.GroupTraining, "run", meanwhile)
        assert sweep.main(arguments) == 1
    out, err = capsys.readouterr()
    assert "1 run held by another process: the same command goes on later" in out
    (line,) = (line for line in out.splitlines() if "HELD by another process" in line)
    assert line.startswith("[3/4]")  # ended, of all
    assert "interrupted" not in out + err and "nothing could be selected" not in out
    assert all(map(runs.done, [second, *others])) and not runs.done(first)
    assert sweep.main(arguments) == 0
    assert runs.done(first)


def test_data_of_different_sizes_go_through_their_own_epochs(tmp_path):
    path = write_plan(tmp_path, "gsl", tmp_path, rates=[0.01], seeds=(1,), batch_size=16)
    content = yaml.safe_load(path.read_text())
    content["grid"] |= {"theta": [0.5], "head": ["natural"], "num_pairs": [40, 100]}
    content["options"].pop("num_pairs")
    path.write_text(yaml.safe_dump(content))
    assert all(runs.metrics(run) for run in run_all(path, tmp_path / "runs"))


def test_groups_are_no_larger_than_asked_for_and_models_do_not_touch_each_other(
    tmp_path, data, capsys
):
    path = write_plan(tmp_path, "mlp-vae", data, rates=[0.001, 1e30], seeds=(1,))
    arguments = [str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]
    assert sweep.main([*arguments, "--jobs=3"]) == 1
    found = stages.known(plan.load(str(path), None, tmp_path / "runs"))
    assert {run.name for run in found if runs.failure(run)} == {
        run.name for run in found if run.cell["learning_rate"] > 1
    }
    assert all(runs.metrics(run)["val/loss"] < 1e4 for run in found if not runs.failure(run))
    assert capsys.readouterr().out.count("2 models together: step 7 of 7") == 2


def test_the_checkpoint_can_be_tested_and_not_continued(tmp_path, data, capsys):
    (run, *_) = run_all(write_plan(tmp_path, "mlp-vae", data), tmp_path / "runs")
    path = runs.version(run) / "checkpoints" / "last.ckpt"
    words = [*run.command[2:-1], f"--default_root_dir={tmp_path}/again", f"--ckpt_path={path}"]
    assert train.main(["test", *words]) == 0
    capsys.readouterr()
    assert train.main(words) == 2
    assert "has weights alone: it can be tested, not continued" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [DiscreteVAE, MLPDiscreteVAE, GraphStructureLearner])
def test_validation_gives_what_the_trainer_gives(kind, data, tmp_path):
    if kind is GraphStructureLearner:
        model, source = kind(num_nodes=6), CommunityGraphDataModule(communities=1, num_pairs=50)
        source.root = str(tmp_path)
    else:
        model, source = kind(num_latents=2), MNISTDataModule(str(data), batch_size=5)
    source.prepare_data()
    source.setup("fit")
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    (theirs,) = Trainer(accelerator="cpu", **quiet).validate(model, source, verbose=False)
    assert validated(model, source, torch.device("cpu")) == theirs


@pytest.mark.parametrize("heads", [("natural", "natural", "sigmoid"), ("softmax", "sparsemax")])
def test_graph_learners_that_are_validated_at_once_get_what_each_gets_alone(heads, tmp_path):
    source = CommunityGraphDataModule(communities=1, num_pairs=700, root=str(tmp_path))
    source.prepare_data()
    source.setup("fit")
    torch.manual_seed(0)
    models = [GraphStructureLearner(each, num_nodes=6, theta_init=(0, 0.6)) for each in heads]
    batches = list(source.make_loader("val", torch.device("cpu")))
    assert [len(y) for _, y in batches] == [64, 6]
    some = list(range(len(models)))[::-1][:2]
    before = torch.get_rng_state()
    errors = ManyGraphLearners(models).errors(some, batches)
    assert torch.equal(torch.get_rng_state(), before)
    for place, number in enumerate(some):
        known = batches[-1], {name: each[place] for name, each in errors.items()}
        ours = validated(models[number], source, torch.device("cpu"), known)
        alone = validated(models[number], source, torch.device("cpu"))
        assert list(ours) == list(alone)
        assert ours == pytest.approx(alone, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("method", ["__init__", "step", "errors"])
def test_too_little_memory_for_models_a_step_or_a_validation_gets_one_line(
    method, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ManyGraphLearners, method, full)
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 models at once do not fit into the memory" in line


def test_a_group_of_graph_learners_is_validated_at_once_without_those_that_failed(
    tmp_path, monkeypatch, capsys
):
    path = write_plan(tmp_path, "gsl", tmp_path, rates=[STILL, 1e38], seeds=(1,))
    monkeypatch.setattr(GraphStructureLearner, "validation_step", None)
    assert sweep.main([str(path), f"--runs={tmp_path / 'runs'}", "--engine=together"]) == 1
    found = stages.known(plan.load(str(path), None, tmp_path / "runs"))
    lost = [run for run in found if runs.failure(run) is not None]
    assert lost and {run.cell["learning_rate"] for run in lost} == {1e38}
    for run in found:
        assert (run in lost) == (runs.metrics(run) is None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_a_group_under_a_graph_takes_the_steps_of_an_eager_group(
    model, tmp_path, data, monkeypatch
):
    root = data if model != "gsl" else tmp_path
    path = write_plan(tmp_path, model, root, rates=[0.001, 0.003], accelerator="gpu")
    replayed = [runs.metrics(run) for run in run_all(path, tmp_path / "replayed")]
    monkeypatch.setattr(training, "StepGraph", lambda step: step)
    eager = [runs.metrics(run) for run in run_all(path, tmp_path / "eager")]
    for one, other in zip(replayed, eager, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
