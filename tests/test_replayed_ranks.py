"""Replayed steps of two processes on the CPU: those of eager ones, and those of one process.

The ranks are forks of a process of their own: a process that has used OpenMP cannot fork. Stand-ins
take the place of CUDA graphs.
"""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cases_callbacks import quiet_trainer
from cases_fresh import one_server, run_fresh
from cases_mnist import write_mnist
from cases_replay import replay_on_the_cpu
from lightning.pytorch import Callback, seed_everything

from catnat.callbacks import FisherMonitor
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = [
    one_server,
    pytest.mark.slow,  # 12 runs, most of them of two processes
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


class SmoothVAE(MLPDiscreteVAE):
    """Without noise and batch norm, so that one process and two must agree."""

    def loss(self, batch, q):
        return (self.reconstruction(batch, q.probs) + self.kl(q)).mean()


class SameNoise(GraphStructureLearner):
    """All ranks draw the same graphs: then one process with all pairs learns the same."""

    def on_train_start(self):
        super().on_train_start()
        torch.manual_seed(5)


MODELS = {
    "vae": lambda: DiscreteVAE(num_latents=2, num_categories=4),
    "mlp-vae": lambda: MLPDiscreteVAE(num_latents=2, num_categories=4),
    "gsl": lambda: GraphStructureLearner(
        num_nodes=6, estimator="local_expectation", lr_schedule="linear", psi_warmup_steps=3
    ),
    "smooth-vae": lambda: SmoothVAE(  # not Adam, which makes much of rounding errors
        num_latents=2, num_categories=4, optimizer="sgd", learning_rate=0.1, gradient_clip=0.1
    ),
    "same-noise": lambda: SameNoise(num_nodes=6),
}


class Record(Callback):
    """Each rank writes what it validated with, what it ended with, and a checkpoint."""

    def __init__(self, folder, monitor):
        self.folder, self.monitor, self.blocks, self.buffers = folder, monitor, [], {}

    def on_train_batch_end(self, trainer, *args):
        self.blocks.append(trainer.global_step)

    def on_validation_end(self, trainer, module):
        self.buffers = {name: each.clone() for name, each in module.named_buffers()}

    def on_train_end(self, trainer, module):
        fisher = {tag: x for tag, x in self.monitor.latest.items() if "sampled" not in tag}
        logged = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        values = {
            "parameters": dict(module.named_parameters()), "buffers": self.buffers,
            "replays": module.replays, "blocks": self.blocks, "fisher": fisher, "logged": logged,
        }  # fmt: skip
        torch.save(values, self.folder / f"rank{trainer.global_rank}.pt")
        trainer.save_checkpoint(self.folder / "end.ckpt")


def run(folder, model, ranks, replayed, name, steps=17, ckpt_path=None):
    place = folder / name
    place.mkdir()
    seed_everything(1 if ckpt_path is None else 99, verbose=False)
    module = MODELS[model]()
    module.capture = None if replayed else False
    data = MNISTDataModule(str(folder / "data"), batch_size=10 // ranks, download=False)
    if isinstance(module, GraphStructureLearner):
        data = CommunityGraphDataModule(communities=1, num_pairs=60, batch_size=6 // ranks)
    monitor = FisherMonitor(write_every_n_steps=4)
    trainer = quiet_trainer(
        devices=ranks, strategy="ddp_fork" if ranks > 1 else "auto", max_steps=steps,
        max_epochs=-1, limit_val_batches=2, callbacks=[monitor, Record(place, monitor)],
        val_check_interval=7, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)


def work(folder):
    """All runs; one process last, because forking after a backward pass may hang."""
    torch.set_num_threads(1)
    replay_on_the_cpu()
    write_mnist(folder / "data", 67, 11)
    for model in ("vae", "mlp-vae", "gsl"):
        for how in ("eager", "replayed"):
            run(folder, model, 2, how == "replayed", f"{model}-{how}")
    for model in ("smooth-vae", "same-noise"):
        run(folder, model, 2, True, f"{model}-two")
    run(folder, "vae", 2, True, "first-half", steps=9)
    run(folder, "vae", 2, True, "both-halves", ckpt_path=folder / "first-half" / "end.ckpt")
    for model in ("smooth-vae", "same-noise"):
        run(folder, model, 1, False, f"{model}-one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What :func:`work` leaves behind."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_fresh(__file__, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def ranks(folder, name, n=2):
    return [torch.load(folder / name / f"rank{r}.pt", weights_only=True) for r in range(n)]


def assert_close(one, other, *keys):
    for key in keys:
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["vae", "mlp-vae", "gsl"])
def test_replayed_ranks_take_the_steps_of_eager_ranks(folder, model):
    eager, replayed = ranks(folder, f"{model}-eager"), ranks(folder, f"{model}-replayed")
    for one, other in zip(eager, replayed, strict=True):
        assert other["replays"] and not one["replays"]
        assert len(other["blocks"]) < len(one["blocks"]) == 17, "several steps for each batch"
        assert_close(one, other, "parameters", "fisher", "logged")
    assert replayed[0]["blocks"] == replayed[1]["blocks"]
    assert_close(*replayed, "parameters", "buffers", "fisher")


def test_validation_uses_the_batch_norms_of_the_first_rank(folder):
    eager, replayed = (ranks(folder, f"vae-{how}")[0] for how in ("eager", "replayed"))
    assert any("running_mean" in name for name in eager["buffers"])
    assert_close(eager, replayed, "buffers")


@pytest.mark.parametrize("model", ["smooth-vae", "same-noise"])
def test_two_replayed_ranks_take_the_steps_of_one_process(folder, model):
    """Gradients are clipped after they were averaged."""
    (one,), two = ranks(folder, f"{model}-one", 1), ranks(folder, f"{model}-two")
    for rank in two:
        assert_close(one, rank, "parameters", "fisher")


def test_replayed_ranks_resume_exactly(folder):
    halves = ranks(folder, "both-halves")
    for straight, resumed in zip(ranks(folder, "vae-replayed"), halves, strict=True):
        torch.testing.assert_close(straight["parameters"], resumed["parameters"], rtol=0, atol=0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    work(Path(sys.argv[1]))
