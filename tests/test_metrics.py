"""FisherOffDiagonalMass: matrices are summed before the ratio is taken, over batches and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from cases import HEADS

from catnat import make_head
from catnat.fisher import off_diagonal_mass
from catnat.metrics import FisherOffDiagonalMass


@pytest.mark.parametrize("norm", ["l1", "fro"])
@pytest.mark.parametrize("name", HEADS)
def test_does_not_depend_on_how_the_data_are_cut(name, norm):
    head = make_head(name, 5)
    scores = 0.4 * torch.randn(12, head.num_scores)
    whole = off_diagonal_mass(head.fisher(scores).mean(0), norm)
    cuts = ([12], [5, 7], [1] * 12)
    for cut in cuts:
        metric = FisherOffDiagonalMass(head.num_scores, norm)
        for part in scores.split(cut):
            metric.update(head.fisher(part))
        assert metric.compute() == pytest.approx(whole.item(), abs=1e-6)
    weighted = FisherOffDiagonalMass(head.num_scores, norm)
    for part in scores.split([5, 7]):
        weighted.update(head.mean_fisher(part), weight=len(part))
    assert weighted.compute() == pytest.approx(whole.item(), abs=1e-6)
    assert torch.allclose(weighted.mean().float(), head.mean_fisher(scores), atol=1e-6)


def test_reset_and_errors():
    metric = FisherOffDiagonalMass(2)
    metric.update(torch.ones(3, 2, 2))
    assert metric.compute() == 0.5
    metric.reset()
    metric.update(torch.eye(2))
    assert metric.compute() == 0
    with pytest.raises(ValueError, match=r"shape \(\*, 2, 2\), got \(3, 3\)"):
        metric.update(torch.eye(3))
    with pytest.raises(ValueError, match="unknown norm 'max'"):
        FisherOffDiagonalMass(2, "max")


def run_rank(rank: int, path: str, results: mp.Queue) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    head = make_head("sparsemax", 5)
    scores = 0.4 * torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    metric = FisherOffDiagonalMass(5)
    metric.update(head.fisher(scores[:4] if rank == 0 else scores[4:]))  # unequal shares
    results.put((rank, metric.compute().item()))
    torch.distributed.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path):
    context = mp.get_context("fork")
    results = context.Queue()
    arguments = (str(tmp_path / "store"), results)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    values = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
    scores = 0.4 * torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    alone = off_diagonal_mass(make_head("sparsemax", 5).fisher(scores).mean(0)).item()
    assert values[0] == values[1] == pytest.approx(alone, abs=1e-6)
