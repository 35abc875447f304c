"""The community graph, the pairs generated with it, and what the true model scores."""

import json
from pathlib import Path

import pytest
import torch

from catnat.datamodules import CommunityGraphDataModule, community_graph
from catnat.datamodules.community_graph import community_graph as possible_edges
from catnat.datamodules.community_graph import num_nodes
from catnat.graphs import GCN

PAPER = Path(__file__).resolve().parents[2] / "paper" / "paper.json"


def ready(**options):
    data = CommunityGraphDataModule(**{"num_pairs": 100} | options)
    data.setup()
    return data


def pairs(loader):
    return [torch.cat(batches) for batches in zip(*loader, strict=True)]


@pytest.mark.parametrize("communities", [1, 4, 7])
def test_the_graph(communities):
    graph = possible_edges(communities)
    assert graph.shape == (num_nodes(communities), num_nodes(communities))
    assert torch.equal(graph, graph.T) and (graph.diagonal() == 1).all()
    inside, between = 9 * communities, communities - 1
    assert graph.sum() == 2 * (inside + between) + 6 * communities
    for c in range(communities):
        block = slice(6 * c, 6 * c + 6)
        assert torch.equal(graph[block, block], possible_edges(1))
        assert c == 0 or graph[6 * c - 1, 6 * c] == 1


def test_certain_edges_make_y_a_function_of_x():
    data = ready(theta=1.0, communities=2, in_features=3, out_features=5)
    x, y = pairs(data.val_dataloader())
    assert x.shape == (10, 12, 3)
    model = GCN(3, 5)
    model.load_state_dict({"weight": data.psi})
    assert torch.allclose(y, model(x, data.edge_probs[None])[0], atol=1e-5)
    assert data.optimal["energy_score"] == pytest.approx(0, abs=1e-4)


def test_parts_do_not_overlap_and_follow_the_seed():
    data = ready(num_pairs=105)
    (val, _), (test, _) = pairs(data.val_dataloader()), pairs(data.test_dataloader())
    assert len(val) == len(test) == 10 and len(data.parts["train"][0]) == 85
    everything = torch.cat([data.parts["train"][0], val, test]).flatten(1)
    assert len(everything.unique(dim=0)) == 105
    other, _ = pairs(ready(num_pairs=105, seed=1).test_dataloader())
    assert not torch.equal(test, other)


def test_generating_draws_nothing_from_the_noise_of_a_run():
    before = torch.get_rng_state()
    assert ready().optimal == ready().optimal
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_options():
    for options, reason in (
        ({"theta": 0.0}, r"theta must lie in \(0, 1\], got 0.0"),
        ({"communities": 0}, "communities must be positive, got 0"),
        ({"num_pairs": 9}, "at least 10, got 9"),
    ):
        with pytest.raises(ValueError, match=reason):
            CommunityGraphDataModule(**options)


# -- the paper -----------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_the_true_model_scores_what_the_papers_does(monkeypatch, theta):
    monkeypatch.setattr(community_graph, "_PASSES", 2)
    rows = json.loads(PAPER.read_text())["gsl"]
    (paper,) = (r for r in rows if r["theta"] == theta and r["head"] == "optimal")
    optimal = ready(theta=theta, num_pairs=10_000).optimal
    for name in ("energy_score_2x", "pp_mae", "pp_mse"):
        assert optimal[name] == pytest.approx(paper[f"test/{name}"]["mean"], rel=0.02)
