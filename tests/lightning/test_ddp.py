"""Two processes on the CPU: same parameters on both, and what one process would compute."""

import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import slow
from cases_callbacks import quiet_trainer
from cases_fresh import check_fresh, one_server, run_fresh
from cases_mnist import write_mnist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from catnat.callbacks import Figures, FisherMonitor, LastCheckpoint
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = one_server


class Recorder:
    """Mixed into a model: each rank writes what it ended with."""

    folder = None

    def on_train_end(self):
        noise = torch.rand(3)
        values = {"parameters": dict(self.named_parameters()), "noise": noise}
        torch.save(values, self.folder / f"rank{self.global_rank}.pt")


class ConvVAE(Recorder, DiscreteVAE):
    pass


class GraphLearner(Recorder, GraphStructureLearner):
    pass


class SmoothVAE(Recorder, MLPDiscreteVAE):
    """Without noise and batch norm, so that one process and two must agree."""

    def loss(self, batch, q):
        return (self.reconstruction(batch, q.probs) + self.kl(q)).mean()


def run(model, root, folder, devices, steps=7, ckpt_path=None, save=(), data=None, **options):
    folder.mkdir(exist_ok=True)
    model.folder = folder
    data = data or MNISTDataModule(str(root), batch_size=10 // devices, download=False)
    trainer = quiet_trainer(
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        **{"callbacks": [LastCheckpoint(folder, 1000), *save]} | options,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, data


FALLING = partial(torch.optim.lr_scheduler.PolynomialLR, total_iters=6)


def work(folder):
    """All runs; the one process last, because forking after a backward pass may hang."""
    torch.set_num_threads(1)
    root = folder / "data"
    write_mnist(root, 67, 11)  # 55 to train on, 12 to validate, 11 to test

    seed_everything(1, verbose=False)
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    run(ConvVAE("natural"), root, folder / "straight", 2, save=[save])
    seed_everything(99, verbose=False)
    run(ConvVAE("natural"), root, folder / "resumed", 2, ckpt_path=folder / "step=3.ckpt")

    for name, seed, ckpt_path in (("graph", 1, None), ("graph-resumed", 99, "graph-step=3.ckpt")):
        seed_everything(seed, verbose=False)
        save = ModelCheckpoint(folder, "graph-{step}", save_top_k=-1, every_n_train_steps=3)
        model = GraphLearner(num_nodes=6, estimator="local_expectation", lr_scheduler=FALLING)
        data = CommunityGraphDataModule(communities=1, num_pairs=53, batch_size=5)
        run(
            model,
            root,
            folder / name,
            2,
            data=data,
            save=[save] if ckpt_path is None else [],
            ckpt_path=ckpt_path and folder / ckpt_path,
        )

    evaluate_one_item(folder)
    for devices in (2, 1):
        seed_everything(1, verbose=False)
        model = SmoothVAE("natural", nll_samples=2, learning_rate=1e-4)
        trainer, data = run(model, root, folder / f"on{devices}", devices)
        validated = dict(trainer.callback_metrics)
        trainer.test(model, data, verbose=False)  # 11 images: shares of 6 (5, 1) and 5 (5, 0)
        metrics = validated | trainer.callback_metrics
        torch.save(metrics, folder / f"on{devices}" / "metrics.pt")


def evaluate_one_item(folder):
    """One to validate on and one to test: nothing for the second rank, pictures included."""
    root = folder / "few"
    write_mnist(root, 6, 1)
    for name in ("few-vae", "few-graph"):
        if name == "few-vae":
            model = DiscreteVAE("natural", nll_samples=2)
            data = MNISTDataModule(str(root), batch_size=2, download=False)
        else:
            model = GraphStructureLearner(num_nodes=6, test_passes=1)
            data = CommunityGraphDataModule(communities=1, num_pairs=19, batch_size=5)
        trainer, _ = run(
            model,
            root,
            folder / name,
            2,
            data=data,
            steps=2,
            callbacks=[FisherMonitor(image_every_n_steps=1), Figures()],
            logger=CSVLogger(folder / name),
            val_check_interval=1,
            check_val_every_n_epoch=None,
        )
        validated = dict(trainer.callback_metrics)
        trainer.test(model, data, verbose=False)
        torch.save(validated | trainer.callback_metrics, folder / name / "metrics.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What :func:`work` leaves behind, done in a process of its own."""
    folder = tmp_path_factory.mktemp("ddp")
    check_fresh(__file__, folder)
    return folder


def ranks(folder, n=2):
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(n)]


def assert_equal(left, right, exactly=True):
    """Equal parameters, or, if not exactly, all but for rounding.

    Adam divides a gradient by its own size, so that rounding moves a few weights by more.
    """
    largest, average = (0, 0) if exactly else (5e-5, 1e-8)
    assert left["parameters"].keys() == right["parameters"].keys()
    for name, one in left["parameters"].items():
        apart = (one - right["parameters"][name]).abs().double()
        assert apart.max() <= largest and apart.mean() <= average, (name, apart.max(), apart.mean())


@pytest.mark.parametrize("name", ["straight", "graph"])
def test_ranks_agree_on_parameters_but_not_on_noise(folder, name):
    zero, one = ranks(folder / name)
    assert_equal(zero, one)
    assert not torch.equal(zero["noise"], one["noise"])


@pytest.mark.parametrize("names", [("straight", "resumed"), ("graph", "graph-resumed")])
def test_two_processes_resume_exactly(folder, names):
    pairs = zip(*(ranks(folder / name) for name in names), strict=True)
    for straight, resumed in pairs:
        assert_equal(straight, resumed)
        assert torch.equal(straight["noise"], resumed["noise"])


def test_two_processes_learn_what_one_learns(folder):
    (single,), pair = ranks(folder / "on1", 1), ranks(folder / "on2")
    assert_equal(*pair)
    assert_equal(single, pair[0], exactly=False)


def test_two_processes_measure_what_one_measures(folder):
    one, two = (torch.load(folder / f"on{n}" / "metrics.pt", weights_only=True) for n in (1, 2))
    assert two.keys() >= one.keys() >= {"test/nll", "test/elbo", "test/kl"}
    equal = ("kl", "perplexity", "information", "saturated", "collapsed")
    for name in ("val/kl", "val/perplexity", *(f"test/{name}" for name in equal)):
        torch.testing.assert_close(two[name], one[name])
    for name in ("val/loss", "val/elbo", "test/elbo", "test/nll"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["few-vae", "few-graph"])
def test_a_rank_may_have_nothing_to_evaluate(folder, name):
    metrics = torch.load(folder / name / "metrics.pt", weights_only=True)
    assert {"val/loss"} < metrics.keys() and any(metric.startswith("test/") for metric in metrics)
    assert all(value.isfinite() for value in metrics.values()), metrics


LATE_SIGNAL = """
import os, signal
from catnat.lit_modules import DiscreteVAE

def step(self, batch, batch_idx, original=DiscreteVAE.{step}):
    if self.global_rank == 0 and self.global_step == 3 and batch_idx == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, batch, batch_idx)

DiscreteVAE.{step} = step
"""


@pytest.mark.parametrize("step", [slow("validation_step"), slow("test_step")])
def test_a_signal_to_one_rank_after_the_last_step_stops_all(workspace, step):
    """Rank 0 alone gets it; no rank is left waiting for another."""
    Path("late_signal.py").write_text(LATE_SIGNAL.format(step=step))
    train = Path(__file__).resolve().parents[2] / "train.py"
    argv = [train, "--import=late_signal", *workspace, "--batch_size=3"]
    argv += ["--devices=2", "--strategy=ddp", "--accelerator=cpu", "--val_check_interval=3"]
    done = run_fresh(*argv)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Traceback" not in done.stderr
    assert "stopped by SIGTERM after step 3; resume with" in done.stdout.splitlines()[-1]
    assert done.stdout.count("stopped by") == done.stdout.count("loading") == 1  # by one of two
    assert not Path("runs/vae/natural/version_0/metrics.json").exists()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    work(Path(sys.argv[1]))
