"""Data modules and Lightning modules of the user's own on the command line."""

import os
import sys
from pathlib import Path

import pytest
import torch
from cases_cli import assert_refused, config, last, one_line, same_weights

import train

MODULE = '''
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, TensorDataset

from catnat.lit_modules import DiscreteVAE


class Noise(LightningDataModule):
    """Images of noise.

    Args:
        count: how many.
        batch_size: B.
    """

    def __init__(self, count: int = 20, batch_size: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.count, self.batch_size = count, batch_size

    def _loader(self):
        images = torch.rand(self.count, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Untyped(Noise):
    def __init__(self, folder, count: int = 20):
        super().__init__(count)
        assert folder is not None


class Broken(DiscreteVAE):
    def __init__(self, head: str = "natural"):
        super().__init__(head)
        self.sum = None + 1


class Pairs(LightningDataModule):
    def __init__(self, num_nodes: int):
        super().__init__()
        self.num_nodes = num_nodes

    def _loader(self):
        x = torch.rand(20, self.num_nodes, 4)
        return DataLoader(TensorDataset(x, x[..., :2].clone()), 10)

    train_dataloader = val_dataloader = test_dataloader = _loader


class Wide(DiscreteVAE):
    def __init__(self, width: int = 3, head: str = "sigmoid", **kwargs):
        super().__init__(head=head, **kwargs)
        self.width = width

    def configure_optimizers(self):
        return self.make_optimizer(torch.optim.RMSprop, self.parameters())  # which has no "fused"


class Plain(LightningModule):
    def __init__(self, size: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(784, size)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1)).square().mean()

    def test_step(self, batch, batch_idx):
        name = f"loss of {self.trainer.state.stage.value}"  # it need not begin with val or test
        self.log(name, self.training_step(batch, batch_idx))

    validation_step = test_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Writer(BasePredictionWriter):
    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        torch.save(torch.cat(predictions), "predictions.pt")


class Late(Plain):
    def __init__(self):
        LightningModule.__init__(self)
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            self.layer = torch.nn.Linear(784, 2)

    def get_extra_state(self):
        return {"note": "anything"}

    def set_extra_state(self, state):
        assert state == {"note": "anything"}


'''
QUICK = ["--max_steps=4", "--enable_progress_bar=false"]
VAE = ["--head=natural", *QUICK, "--nll_samples=2", "--fisher.image_every_n_steps=0"]


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    """A working directory with the module own_classes, which is found without --import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != os.getcwd()])
    Path("own_classes.py").write_text(MODULE)
    sys.modules.pop("own_classes", None)


def run(*argv):
    return train.main([str(word) for word in argv])


def test_a_data_module_of_the_users_own_trains_and_resumes():
    classes = ["--data=own_classes.Noise", "--data.count=30"]
    assert run("--model=vae", *classes, *VAE) == 0
    options = {"count": 30, "batch_size": 10}
    assert config()["data"] == {"class_path": "own_classes.Noise", "init_args": options}
    assert run("--ckpt_path=last", "--max_steps=6") == 0, "the run knows its data"
    assert last()["global_step"] == 6
    assert run("test", "--ckpt_path=last") == 0
    small = ["--data=mnist", "--data.download=false", "--limit_test_batches=1"]
    assert run("test", "--ckpt_path=last", *small) == 0
    assert config()["data"]["class_path"] == "own_classes.Noise"


def test_data_of_the_users_own_give_a_graph_its_size():
    assert run("--model=gsl", "--data=own_classes.Pairs", "--num_nodes=5", *QUICK) == 0
    assert last("runs/gsl/natural/version_0")["state_dict"]["edge_scores"].shape[:2] == (5, 5)


def test_a_subclass_of_our_model_takes_its_recipe_and_its_own_head(workspace):
    options = ["--import=own_classes", *workspace, "--limit_test_batches=1"]
    assert run("--model=own_classes.Wide", "--width=5", *options) == 0
    folder = "runs/own_classes.Wide/sigmoid/version_0"
    model = config(folder)["model"]["init_args"]
    wanted = {"width": 5, "head": "sigmoid", "num_latents": 10}
    assert model | wanted == model
    assert config(folder)["data"]["class_path"] == "catnat.datamodules.MNISTDataModule"
    assert (
        run("--model=own_classes.Wide", "--head=sigmoid", "--ckpt_path=last", "--max_steps=5") == 0
    )
    assert last(folder)["global_step"] == 5
    assert run("--model=own_classes.Wide", "--head=softmax", *options, "--max_steps=1") == 0
    assert Path("runs/own_classes.Wide/softmax/version_0").is_dir()


def test_a_lightning_module_without_a_head_trains_and_resumes(capfd):
    assert run("--model=own_classes.Plain", "--data=own_classes.Noise", "--size=3", *QUICK) == 0
    assert "loss of validate" in (said := capfd.readouterr().out) and "loss of test" in said
    folder = "runs/own_classes.Plain/no_head/version_0"
    assert last(folder)["state_dict"]["layer.weight"].shape == (3, 784)
    longer = ["--max_steps=8", "--default_root_dir=whole"]
    assert run("--model=own_classes.Plain", "--data=own_classes.Noise", "--size=3", *longer) == 0
    assert run("--model=own_classes.Plain", "--ckpt_path=last", "--max_steps=8") == 0
    assert same_weights(last(folder), last("whole/own_classes.Plain/no_head/version_0"))
    capfd.readouterr()
    assert run(f"--ckpt_path={folder}/checkpoints/last.ckpt", "--size=4") == 2
    assert "--model.size cannot change when" in one_line(capfd)


def test_a_checkpoint_predicts_and_a_callback_takes_the_predictions():
    classes = ["--model=own_classes.Plain", "--data=own_classes.Noise"]
    assert run(*classes, *QUICK) == 0
    writer = ["--callbacks+=own_classes.Writer", "--callbacks.write_interval=epoch"]
    assert run("predict", "--model=own_classes.Plain", "--ckpt_path=last", *writer) == 0
    predicted = torch.load("predictions.pt")
    state = last("runs/own_classes.Plain/no_head/version_0")["state_dict"]
    images = torch.rand(20, 784, generator=torch.Generator().manual_seed(0))
    expected = images @ state["layer.weight"].T + state["layer.bias"]
    torch.testing.assert_close(predicted, expected)
    assert len(list(Path("runs/own_classes.Plain/no_head").iterdir())) == 1


WRONG = {
    "--data own_classes.Nois": "own_classes has no class Nois; did you mean Noise?",
    "--data own_classes.Plain": "not a subclass of LightningDataModule",
    "--model gsl --data mnist": "unknown data 'mnist'; choose from community-graph",
    "--model gsl --data own_classes.Pairs": "num_nodes",
    "--model ppo --data mnist": "ppo learns from an environment; see --env",
    "--model own_classes.Wid": "did you mean Wide?",
    "--model own_classes.Noise": "not a subclass of LightningModule",
    "--model own_classes.Plain --data own_classes.Noise --head softmax": "'head'",
    "--data own_classes.Noise --cont 3": "did you mean --count?",
    "--data own_classes.Noise --variant gray": "unknown option --variant",
    "--data fashion-mnist --download false": "no FashionMNIST in data/FashionMNIST/raw",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_class_or_data_set_gets_one_line(line, capfd):
    assert_refused(run(*line.split()), WRONG[line], capfd)


def test_a_run_resumes_without_repeating_a_required_argument_also_one_without_a_type():
    assert run("--data=own_classes.Untyped", "--folder=here", *VAE) == 0
    assert run("--ckpt_path=last", "--max_steps=6") == 0
    assert last()["global_step"] == 6


def test_data_without_a_batch_to_train_on_get_one_line(capfd):
    assert run("--data=own_classes.Noise", "--count=0", "--limit_val_batches=0", *QUICK) == 2
    assert "the data have no training batch: nothing was learned" in capfd.readouterr().err
    assert not [*Path("runs").rglob("metrics.json")]


def test_layers_made_late_and_extra_state_are_resumed():
    classes = ["--model=own_classes.Late", "--data=own_classes.Noise"]
    assert run(*classes, *QUICK) == 0
    assert run("--model=own_classes.Late", "--ckpt_path=last", "--max_steps=8") == 0
    assert last("runs/own_classes.Late/no_head/version_0")["global_step"] == 8


def test_the_error_of_an_own_class_is_one_line_with_its_place(capfd):
    assert run("--model=own_classes.Broken", "--data=own_classes.Noise", *QUICK) == 2
    assert "unsupported operand" in (line := one_line(capfd)) and "own_classes.py, line" in line
