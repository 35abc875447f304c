"""With ``--trainer.deterministic true`` two runs on a GPU are the same bit for bit."""

import sys
from pathlib import Path

import torch
from cases_callbacks import quiet_trainer
from cases_fresh import check_fresh, one_server
from cases_replay import Watch, cuda
from lightning.pytorch import seed_everything
from torch.utils._pytree import tree_flatten

from catnat.callbacks import FisherMonitor, LastCheckpoint
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = one_server
SIZES = {"num_latents": 3, "num_categories": 8, "nll_samples": 4, "capture": True}
MODELS = {
    "vae": lambda: DiscreteVAE("natural", **SIZES),
    "vae-softmax": lambda: DiscreteVAE("softmax", **SIZES),
    "vae-score-function": lambda: DiscreteVAE("softmax", estimator="score-function", **SIZES),
    "mlp-vae": lambda: MLPDiscreteVAE("sparsemax", **SIZES),
    "graph": lambda: GraphStructureLearner(
        "natural", num_nodes=6, estimator="local_expectation", test_passes=1, capture=True
    ),
}


@cuda
def test_two_runs_on_a_gpu_are_equal_bit_for_bit(data, tmp_path):
    for number in (1, 2):
        check_fresh(__file__, data, tmp_path / str(number), "gpu")
    for name in MODELS:
        one, other = (results(tmp_path / str(number) / name) for number in (1, 2))
        assert one == other, name


def results(folder):
    """All numbers of a run, bit by bit: its checkpoint and its metrics."""
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    metrics = torch.load(folder / "metrics.pt", weights_only=True)
    leaves, structure = tree_flatten((checkpoint, metrics))
    bits = [x.cpu().numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return bits, str(structure)


def main(data, folder, accelerator):
    """Train and test every model, in a process of its own."""
    for name, make_model in MODELS.items():
        seed_everything(1, verbose=False)
        model = make_model()
        batches = MNISTDataModule(data, batch_size=20, download=False)
        if name == "graph":
            batches = CommunityGraphDataModule(communities=1, num_pairs=500)
        trainer = quiet_trainer(
            max_steps=60,
            accelerator=accelerator,
            deterministic=True,
            enable_checkpointing=True,
            callbacks=[FisherMonitor(), LastCheckpoint(Path(folder) / name), watch := Watch()],
        )
        trainer.fit(model, datamodule=batches)
        assert watch.replayed == (accelerator == "gpu")
        metrics = trainer.test(model, datamodule=batches, verbose=False)
        torch.save(metrics, Path(folder) / name / "metrics.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
