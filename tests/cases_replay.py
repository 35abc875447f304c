"""Replayed training steps where there is no CUDA, and short runs."""

import lightning.pytorch as pl
import pytest
import torch
from cases_callbacks import Memory, quiet_trainer
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from catnat import cuda_graph as graphs
from catnat.callbacks import FisherMonitor
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import cuda_graph_steps as replay

cuda = pytest.mark.gpu


class EagerGraph:
    """Stands in for a StepGraph where there is no CUDA: later calls use the memory of the first."""

    def __init__(self, step):
        self.step, self.inputs, self.output, self.resets = step, None, None, 0

    def __call__(self, batch):
        if self.inputs is None:
            self.inputs = tree_map(torch.clone, batch)
        if [x.shape for x in tree_leaves(batch)] != [x.shape for x in tree_leaves(self.inputs)]:
            return self.step(batch)
        tree_map(lambda mine, new: mine.copy_(new), self.inputs, batch)
        output = self.step(self.inputs)
        if self.output is None:
            self.output = tree_map(torch.clone, output)
        return tree_map(lambda mine, new: mine.copy_(new), self.output, output)

    def reset(self):
        self.resets += 1


class Watch(pl.Callback):
    """Notes whether steps are replayed, and the steps at which batches end and validation comes."""

    def __init__(self):
        self.replayed, self.ends, self.validated, self.epochs = None, [], [], []

    sees_blocks = True

    def on_train_batch_end(self, trainer, module, *args):
        self.replayed = module.replays
        self.ends.append(trainer.global_step)

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.global_step)

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


def train(
    model_class,
    replayed,
    steps,
    root,
    accelerator="cpu",
    monitor=None,
    batch_size=2,
    precision="32-true",
    log_every_n_steps=1000,
    **options,
):
    pl.seed_everything(1, verbose=False)
    model = model_class(num_latents=3, num_categories=4, capture=replayed, **options)
    data = MNISTDataModule(str(root), batch_size=batch_size, download=False)
    logger, watch = Memory(), Watch()
    monitor = monitor or FisherMonitor(write_every_n_steps=7, details=True)
    trainer = quiet_trainer(
        max_steps=steps,
        accelerator=accelerator,
        precision=precision,
        logger=logger,
        callbacks=[monitor, watch],
        limit_val_batches=1,
        log_every_n_steps=log_every_n_steps,
    )
    trainer.fit(model, datamodule=data)
    assert watch.replayed is replayed
    return model, trainer, logger


def replay_eagerly(decides, replays, fused, monkeypatch):
    """Replay steps without CUDA: the modules of the code that decide so, and that replay."""
    captured = lambda capture, *_: "no" if capture is False else None  # noqa: E731
    monkeypatch.setattr(decides, "why_not_captured", captured)
    monkeypatch.setattr(replays, "StepGraph", EagerGraph)
    monkeypatch.setattr(graphs, "CAPTURABLE", {"fused": fused})


@pytest.fixture
def without_cuda(monkeypatch):
    """Replay the steps of Lightning modules."""

    def captured(capture, device, obstacles):
        return next((reason for reason, applies in obstacles.items() if applies), None)

    monkeypatch.setattr(replay, "why_not_captured", captured)
    monkeypatch.setattr(replay, "StepGraph", EagerGraph)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
