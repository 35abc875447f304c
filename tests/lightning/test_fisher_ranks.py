"""FisherMonitor and the metric over two ranks, against one process.

The ranks are forks of a process of their own: a process that has used CUDA, or OpenMP, cannot fork.
"""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch

if __name__ == "__main__":  # what pytest does for the others
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from cases_callbacks import Small, fit, loader
from cases_fresh import check_fresh, one_server

from catnat import make_head
from catnat.callbacks import FisherMonitor
from catnat.fisher import off_diagonal_mass
from catnat.metrics import FisherOffDiagonalMass

SCENES = ("softmax", "natural", "uneven", "empty")
pytestmark = one_server


class Latest(L.Callback):
    """Writes what a rank saw to a file."""

    def __init__(self, folder, monitor):
        self.folder, self.monitor = folder, monitor

    def on_train_end(self, trainer, pl_module):
        weights = {k: v.detach().cpu() for k, v in pl_module.state_dict().items()}
        torch.save((self.monitor.latest, weights), self.folder / f"{trainer.global_rank}.pt")


class Metric(L.Callback):
    """Gives the metric unequal shares on two ranks, and writes what it computes."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        scores = 0.4 * torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
        metric = FisherOffDiagonalMass(5)
        mine = scores if trainer.world_size == 1 else scores.split([4, 8])[trainer.global_rank]
        metric.update(make_head("sparsemax", 5).fisher(mine))
        torch.save(metric.compute(), self.folder / f"metric{trainer.global_rank}.pt")


def model_and_data(scene):
    torch.manual_seed(0)
    if scene in ("softmax", "natural"):
        return Small(scene, noisy=False), loader()
    model = Small("softmax")
    model.lr = 0  # the means of gradients differ, those of matrices must not
    # 2 rows on one rank and 1 on the other, or 1 and none
    return model, loader(batch_size=3 if scene == "uneven" else 1, batches=2)


def work(folder, devices):
    torch.set_num_threads(1)
    flags = {"devices": devices, "max_steps": 2}
    if devices > 1:
        flags |= {"strategy": "ddp_fork", "use_distributed_sampler": False}
    for scene in SCENES:
        place = folder / f"{scene}{devices}"
        place.mkdir()
        model, data = model_and_data(scene)
        monitor = FisherMonitor(details=True)
        fit(model, monitor, Latest(place, monitor), Metric(place), data=data, **flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What :func:`work` leaves behind, with two ranks and with one process."""
    folder = tmp_path_factory.mktemp("ranks")
    check_fresh(__file__, folder)
    return folder


def results(folder, scene):
    """(latest, weights) of both ranks and of the one process."""
    paths = (f"{scene}2/0.pt", f"{scene}2/1.pt", f"{scene}1/0.pt")
    return [torch.load(folder / path, weights_only=True) for path in paths]


@pytest.mark.parametrize("scene", SCENES)
def test_two_ranks_agree_with_one_process(folder, scene):
    (first, weights), (second, other_weights), (one, single) = results(folder, scene)
    assert first == second
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
    torch.testing.assert_close(weights, single, atol=1e-6, rtol=1e-5)
    for tag, value in one.items():
        is_drawn = tag.startswith("fim_sampled/") or tag.endswith("/off_diagonal_mass")
        if not is_drawn:  # the draws of ranks differ
            assert first[tag] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_the_metric_of_two_ranks_is_that_of_one_process(folder):
    masses = [torch.load(folder / "softmax2" / f"metric{rank}.pt") for rank in range(2)]
    scores = 0.4 * torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    alone = off_diagonal_mass(make_head("sparsemax", 5).fisher(scores).mean(0)).item()
    assert masses[0] == masses[1] == pytest.approx(alone, abs=1e-6)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    work(Path(sys.argv[1]), devices=2)  # first: forking after a backward pass may hang
    work(Path(sys.argv[1]), devices=1)
