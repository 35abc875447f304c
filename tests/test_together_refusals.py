"""What cannot be trained together is refused in one line, before anything is trained."""

import pytest
import yaml
from cases import slow
from cases_together import write_plan
from lightning.pytorch import LightningDataModule

from catnat.datamodules import MNISTDataModule
from experiments import sweep
from experiments.together.training import GroupTraining


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision=bf16-mixed"], "does not know --precision bf16-mixed"),
        slow(["--lr_decay=0.9"], "lr_decay 1, got 0.9"),
        slow(["--headd=x"], "headd"),
        (["--val_check_interval=0.5"], "--val_check_interval, got 0.5"),
        slow(["--check_val_every_n_epoch=1"], "does not know --check_val_every_n_epoch 1"),
        (["--max_steps=0"], "--max_steps, got 0"),
        (["--num_latents=-1"], "num_latents must be positive, got -1"),
        (["--ckpt_path=last"], "does not know --ckpt_path"),
        (["--accelerator=gpu"], "--accelerator gpu: there is no CUDA device"),
        (["--accelerator=mps"], "--accelerator mps; choose from auto, cpu, gpu, cuda"),
    ],
)
def test_options_that_a_group_cannot_have_are_named(
    options, says, tmp_path, data, capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = write_plan(tmp_path, "vae", data, seeds=(1,))
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path}/runs", "--engine=together", "--", *options])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert line.startswith("sweep.py: learning_rate1e-12-gray-seed1 ")  # which run it is


class OtherImages(LightningDataModule):
    """Images of the user's own, whose batches have no size."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()


@pytest.mark.parametrize("kind", ["OtherImages", "MyImages"])
def test_data_of_ones_own_are_refused(kind, tmp_path, data, capsys):
    path = write_plan(tmp_path, "vae", data, seeds=(1,))
    content = yaml.safe_load(path.read_text())
    content["options"] = {"accelerator": "cpu", "data": f"test_together_refusals.{kind}"}
    content["grid"] = {"head": ["natural"]}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path}/runs", "--engine=together"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot train on --data test_together_refusals.{kind}" in line


class MyImages(MNISTDataModule):
    """Batches of the user's own, which a group would not ask for."""

    def train_dataloader(self):
        raise NotImplementedError


def test_a_run_that_cannot_be_trained_is_refused_before_another_is_trained(
    tmp_path, capsys, monkeypatch
):
    path = write_plan(tmp_path, "gsl", tmp_path, seeds=(1,))
    content = yaml.safe_load(path.read_text())
    content["grid"] |= {"estimator": ["score_function", "local_expectation"]}
    content["options"] |= {"flip_samples": 2}
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(GroupTraining, "run", None)
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path}/runs", "--engine=together"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "local_expectation-" in line and "'score_function', got 'local_expectation'" in line


def test_a_model_that_has_no_batched_form_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        sweep.main(
            ["ppo_cartpole", "--scale=smoke", f"--runs={tmp_path}/runs", "--engine=together"]
        )
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--engine together cannot train --model ppo" in line


def test_a_program_of_ones_own_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        sweep.main(["figure_landscapes", f"--runs={tmp_path}/runs", "--engine=together"])
    assert "trains models of train.py alone" in capsys.readouterr().err


def test_options_of_other_engines_are_refused(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["gsl", "--engine=together", "--jobs_per_gpu=2"])
    assert "--jobs_per_gpu: not with --engine together" in capsys.readouterr().err
