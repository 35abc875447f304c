import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if __name__ == "__main__":  # what pytest does for tests
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from cases_fresh import check_fresh, one_server

from catnat import Quantizer, make_head
from catnat.distributions import ESTIMATORS

pytestmark = one_server
HEADS = ("softmax", "sparsemax", "sigmoid", "natural")


def blobs(rows, seed):
    """Points around 16 centers in 8 dimensions."""
    centers = 2 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(16, (rows,), generator=rng)
    return centers[label] + 0.1 * torch.randn(rows, 8, generator=rng), centers


def trained_autoencoder(steps=200, **options):
    torch.manual_seed(0)
    quantizer = Quantizer(32, 16, kl_weight=0.05, **options)
    encoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    modules = nn.ModuleList([encoder, quantizer, decoder])
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.005)
    for step in range(steps):
        x, _ = blobs(256, seed=step + 1)
        quantized, _, loss = quantizer(encoder(x))
        loss = loss + (decoder(quantized) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    modules.eval()
    x, _ = blobs(1000, seed=9999)
    with torch.no_grad():
        quantized, tokens, _ = quantizer(encoder(x))
        error = (decoder(quantized) - x).square().mean().item()
    return quantizer, tokens, error / x.var(0).mean().item()


@pytest.mark.parametrize("head", HEADS)
def test_an_autoencoder_learns_and_uses_its_codes(head):
    options = {"tail": 0.05} if head == "natural" else None
    quantizer, tokens, share = trained_autoencoder(head=head, head_options=options)
    assert share < 0.15
    assert len(tokens.unique()) >= 10
    assert quantizer.perplexity > 10


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("head", HEADS)
def test_every_estimator_gives_the_vectors_of_its_indices_and_gradients(head, estimator):
    torch.manual_seed(0)
    quantizer = Quantizer(5, 3, head, estimator)
    x = torch.randn(4, 6, 3, requires_grad=True)
    quantized, indices, loss = quantizer(x)
    assert indices.shape == (4, 6) and indices.dtype == torch.int64
    if estimator != "relaxed":
        torch.testing.assert_close(quantized, quantizer.codebook(indices))
    (quantized.square().mean() + loss).backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
    assert quantizer.codebook.weight.grad.abs().sum() > 0


def test_the_gradients_are_those_of_the_formula():
    torch.manual_seed(0)
    quantizer = Quantizer(5, 3, "softmax", "straight-through", kl_weight=0.3).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    upstream = torch.randn(7, 3, dtype=torch.float64)
    quantized, indices, loss = quantizer(x)
    (loss + (quantized * upstream).sum()).backward()

    weight = quantizer.to_scores.weight.detach().requires_grad_()
    p = torch.softmax(x @ weight.T + quantizer.to_scores.bias.detach(), -1)
    kl = (p * (5 * p).log()).sum(-1)
    torch.testing.assert_close(loss.detach(), 0.3 * kl.mean().detach())
    through_p = (p @ quantizer.codebook.weight.detach() * upstream).sum()
    (expected,) = torch.autograd.grad(0.3 * kl.mean() + through_p, weight)
    torch.testing.assert_close(quantizer.to_scores.weight.grad, expected)
    one_hot = nn.functional.one_hot(indices, 5).double()
    torch.testing.assert_close(quantizer.codebook.weight.grad, one_hot.T @ upstream)


def test_tokens_are_the_likeliest_codes_or_samples():
    torch.manual_seed(0)
    x = torch.randn(1, 3).expand(20_000, 3)
    quantizer = Quantizer(4, 3, "natural", head_options={"mix": 0.1})
    probs = quantizer.distribution(x).probs[0]
    assert quantizer.encode(x).unique().tolist() == [probs.argmax()]
    assert quantizer.eval()(x).indices.unique().tolist() == [probs.argmax()]
    quantizer.tokens = "sample"
    for tokens in (quantizer.encode(x), quantizer(x).indices, quantizer.train()(x).indices):
        share = torch.bincount(tokens, minlength=4) / len(x)
        torch.testing.assert_close(share, probs.detach(), atol=0.015, rtol=0)


def test_images_are_quantized_channel_first():
    torch.manual_seed(0)
    last = Quantizer(9, 4).eval()
    first = Quantizer(9, 4, channel_first=True).eval()
    first.load_state_dict(last.state_dict())
    x = torch.randn(2, 4, 5, 6)
    quantized, indices, loss = first(x)
    expected = last(x.permute(0, 2, 3, 1))
    assert torch.equal(quantized, expected.quantized.permute(0, 3, 1, 2))
    assert torch.equal(indices, expected.indices) and indices.shape == (2, 5, 6)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(first.decode_indices(first.encode(x)), quantized)


def test_masked_positions_take_no_part():
    torch.manual_seed(0)
    quantizer = Quantizer(6, 4)
    x = torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.rand(3, 5) < 0.5
    quantized, indices, loss = quantizer(x, mask)
    assert torch.equal(indices == -1, ~mask)
    assert (quantized[~mask] == 0).all()
    assert torch.equal(quantizer.decode_indices(indices), quantized)
    counts = torch.bincount(indices[mask], minlength=6)
    expected = 0.99 / 6 + 0.01 * counts / counts.sum()
    torch.testing.assert_close(quantizer.usage, expected)
    (quantized.sum() + loss).backward()
    assert (x.grad[~mask] == 0).all() and (x.grad[mask] != 0).any(-1).all()
    torch.testing.assert_close(loss, quantizer(x[mask]).loss)
    usage = quantizer.usage.clone()
    nothing = quantizer(x, torch.zeros(3, 5, dtype=torch.bool))
    assert nothing.loss == 0 and torch.equal(quantizer.usage, usage)


def test_usage_is_saved_and_changes_in_training_alone():
    torch.manual_seed(0)
    quantizer = Quantizer(6, 4)
    assert quantizer.perplexity.item() == pytest.approx(6)
    x = torch.randn(10, 4)
    quantizer(x)
    assert quantizer.usage.sum().item() == pytest.approx(1) and quantizer.perplexity < 6
    restored = Quantizer(6, 4)
    restored.load_state_dict(quantizer.state_dict())
    assert torch.equal(restored.usage, quantizer.usage)
    assert torch.equal(restored.encode(x), quantizer.encode(x))
    before = quantizer.usage.clone()
    quantizer.eval()(x)
    quantizer.encode(x)
    assert torch.equal(quantizer.usage, before)


def with_dead_codes(head, **options):
    """A quantizer of 8 codes whose features hardly ever take the last three."""
    quantizer = Quantizer(8, 4, head, dead_below=0.2, **options)
    lowest = 0.0 if head == "sparsemax" else 1e-5
    probs = torch.tensor([1 / 5] * 5 + [lowest] * 3)
    with torch.no_grad():
        quantizer.to_scores.weight.mul_(0.02 if head == "sparsemax" else 0.1)
        quantizer.to_scores.bias.copy_(quantizer.head.inverse(probs / probs.sum()))
    return quantizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_every_sample(dtype):
    probs = torch.tensor([0.9, 0.06, 0.03, 0.01])
    quantizer = Quantizer(4, 2, "softmax", "straight-through")
    with torch.no_grad():
        quantizer.to_scores.weight.zero_()
        quantizer.to_scores.bias.copy_(probs.log())
    quantizer.to(dtype)
    quantizer.usage.copy_(probs)
    for _ in range(30):
        quantizer(torch.zeros(1, 5000, 2, dtype=dtype))
    torch.testing.assert_close(quantizer.usage.float(), probs, atol=0.02, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_dead_codes_are_used_again_after_a_reset(head):
    torch.manual_seed(0)
    quantizer = with_dead_codes(head, reset_every=300)
    x = torch.randn(500, 4)
    old = quantizer.codebook.weight.detach().clone()
    for _ in range(299):
        quantizer(x)
    assert quantizer.dead_codes.tolist() == [False] * 5 + [True] * 3
    assert torch.equal(quantizer.codebook.weight, old)
    with torch.no_grad():
        expected = quantizer.distribution(x).probs.mean(0)
    quantizer(x)  # resets
    assert not quantizer.dead_codes.any()
    assert torch.equal(quantizer.codebook.weight[:5], old[:5])
    distance = torch.cdist(quantizer.codebook.weight[5:], old[:5]).amin(1)
    assert (distance > 0).all() and (distance < 0.1).all()
    share = quantizer.distribution(x).probs.mean(0).detach()
    assert (share[5:] > 0.05).all() and (share[5:] < 0.2).all()
    kept = share[:5] / share[:5].sum()
    torch.testing.assert_close(kept, expected[:5] / expected[:5].sum(), atol=0.03, rtol=0)
    assert quantizer.reset_dead_codes(x) == 0


def test_a_reset_leaves_an_earlier_call_of_the_step_its_gradient():
    torch.manual_seed(0)
    quantizer = with_dead_codes("softmax", reset_every=2)
    quantizer.usage.copy_(torch.tensor([0.2] * 5 + [0.0] * 3))
    x = torch.randn(50, 4, requires_grad=True)
    first = quantizer(x).quantized
    second = quantizer(x).quantized
    assert not quantizer.dead_codes.any()
    (first.sum() + second.sum()).backward()
    assert x.grad.isfinite().all()


def test_processes_share_the_usage_and_the_reset(tmp_path):
    check_fresh(__file__, str(tmp_path))
    first, second, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("0", "1", "alone"))
    assert torch.equal(first["usage"], second["usage"])
    torch.testing.assert_close(first["usage"], alone["usage"])
    for name in ("codebook.weight", "to_scores.bias"):
        assert torch.equal(first[name], second[name])
    torch.testing.assert_close(first["to_scores.bias"], alone["to_scores.bias"])
    assert first["reset"] == second["reset"] == alone["reset"] == 3


def count_and_reset(rank, folder, world):
    """Rank 0 sees a third of the rows, rank 1 the others; one process sees all of them."""
    torch.manual_seed(0)
    quantizer = with_dead_codes("softmax")
    x = torch.randn(300, 4)
    codes = torch.randint(5, (300,))
    rows = {0: slice(100), 1: slice(100, 300)}[rank] if world > 1 else slice(300)
    torch.manual_seed(rank)
    for _ in range(300):
        quantizer._count(codes[rows], None)
    usage = quantizer.usage.clone()
    state = {"reset": quantizer.reset_dead_codes(x[rows]), **quantizer.state_dict()}
    torch.save({**state, "usage": usage}, folder / f"{rank if world > 1 else 'alone'}.pt")


def run_rank(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    count_and_reset(rank, folder, world=2)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_codes": 1}, "num_codes must be at least 2, got 1"),
        ({"estimator": "gumble"}, "unknown estimator 'gumble'; did you mean gumbel"),
        ({"tokens": "mode"}, "unknown tokens 'mode'; choose from likeliest, sample"),
        ({"dead_below": 2}, r"dead_below must lie in \[0, 1\), got 2"),
        ({"reset_every": 10}, "reset_every has no effect: dead_below is 0"),
        ({"reset_every": 0, "dead_below": 0.1}, "reset_every must be at least 1, got 0"),
        ({"head": make_head("softmax", 4)}, "head must have 5 categories, got 4"),
        (
            {"estimator": "reinmax", "temperature": 0.5},
            "the estimator 'reinmax' has no temperature, got 0.5",
        ),
        ({"kl_weight": -1}, "kl_weight must be at least 0, got -1"),
    ],
)
def test_wrong_options_are_one_line(options, said):
    with pytest.raises(ValueError, match=said):
        Quantizer(**{"num_codes": 5, "dim": 3, **options})


def test_wrong_shapes_and_codes_are_one_line():
    quantizer = Quantizer(5, 3)
    with pytest.raises(ValueError, match=r"\(B, \*, 3\) with channel_first=False.*\(2, 3, 4, 4\)"):
        quantizer(torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 4\), got torch.float32 \(2, 4\)"):
        quantizer(torch.zeros(2, 4, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="codes from 0 to 4, or -1 where masked, got 5"):
        quantizer.decode_indices(torch.tensor([0, 5]))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=2, start_method="fork")
    count_and_reset(0, folder, world=1)
