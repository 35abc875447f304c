"""Two draws a row are enough to see whether a Fisher matrix is diagonal."""

import pytest
import torch

from catnat import make_head
from catnat.fisher import off_diagonal_mass, paired_mean_fishers

STEPS, ROWS = 400, 200


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "natural"])
def test_the_mean_over_steps_meets_the_exact_share(name, K):
    generator = torch.Generator().manual_seed(K)
    head = make_head(name, K)
    scores = torch.randn(ROWS, head.num_scores, generator=generator)
    levels = torch.rand(2, STEPS, ROWS, generator=generator)
    one, other = paired_mean_fishers(head, scores.expand(STEPS, -1, -1), levels)
    products = one * other
    off = products.masked_fill(torch.eye(len(products[0]), dtype=torch.bool), 0)
    shares = off.sum((-2, -1)) / products.sum((-2, -1))
    exact = float(off_diagonal_mass(head.mean_fisher(scores), "fro")) ** 2
    error = float(shares.std()) / STEPS**0.5
    assert abs(float(shares.mean()) - exact) <= 4 * error + 1e-3 * exact
    floor = float(off_diagonal_mass((one + other) / 2, "fro").mean())
    if name != "softmax" and K > 2:
        assert floor > 0.05 > 10 * abs(float(shares.mean()))  # one estimate alone sees noise


@pytest.mark.parametrize("draws", [2, 3, 8])
def test_both_halves_estimate_the_same_matrix(draws):
    generator = torch.Generator().manual_seed(0)
    head = make_head("softmax", 3)
    scores = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    levels = torch.rand(draws, 20_000, 4, generator=generator)
    pair = paired_mean_fishers(head, scores.expand(20_000, -1, -1), levels).mean(1)
    assert torch.allclose(pair, head.mean_fisher(scores).expand_as(pair), atol=5e-3)
