"""Two draws a row are enough to see, at every step, whether a Fisher matrix is diagonal."""

import pytest
import torch
from cases_callbacks import Memory, Small, fit

from catnat import make_head
from catnat.callbacks import FisherMonitor
from catnat.callbacks.fisher_diagnostics import SAMPLED, StepNoise
from catnat.fisher import off_diagonal_mass, off_diagonal_share, paired_mean_fishers

STEPS, ROWS = 400, 200


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "natural"])
def test_the_mean_over_steps_meets_the_exact_share(name, K):
    generator = torch.Generator().manual_seed(K)
    head = make_head(name, K)
    scores = torch.randn(ROWS, head.num_scores, generator=generator)
    levels = torch.rand(2, STEPS, ROWS, generator=generator)
    one, other = paired_mean_fishers(head, scores.expand(STEPS, -1, -1), levels)
    shares = off_diagonal_share(one, other)
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


def test_the_share_survives_tiny_and_huge_matrices_and_zeros():
    matrix = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    for scale in (1e-30, 1.0, 1e30):
        assert float(off_diagonal_share(scale * matrix, matrix / scale)) == pytest.approx(0.2)
    zero = torch.zeros(3, 3)
    assert float(off_diagonal_share(zero, zero)) == 0
    assert off_diagonal_share(matrix, matrix * torch.nan).isnan()


def test_every_step_has_its_draws_whatever_the_length_of_a_block():
    rows = []
    for block in (1, 2, 50):
        logger, model = Memory(), Small("softmax")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        fit(model, FisherMonitor(write_every_n_steps=block, seed=3), logger=logger)
        rows.append(
            {step: [row[f"fim/{tag}"] for tag in SAMPLED] for step, row in logger.rows.items()}
        )
    assert list(rows[0]) == [0, 1, 2, 3, 4]
    for other in rows[1:]:
        for step, values in rows[0].items():
            assert other[step] == pytest.approx(values, rel=1e-4)


def test_the_noise_of_a_step_does_not_depend_on_the_steps_beside_it():
    def noise(steps):
        return StepNoise("seed", torch.device("cpu"))(steps, (2, 3))

    alone = torch.cat([noise([step]) for step in range(120)])
    assert alone.unique().numel() == alone.numel() == 720
    for steps in (list(range(120)), list(range(7, 110, 3)), [0, 1, 3, 49, 50, 51, 60, 119]):
        assert torch.equal(noise(steps), alone[steps])


def test_a_negative_share_is_shown_as_mass_zero():
    logger = Memory()
    fit(Small("natural"), FisherMonitor(), logger=logger)
    for row in logger.rows.values():
        share = row["fim/off_diagonal_share_sampled"]
        mass = row["fim/off_diagonal_mass_fro_sampled"]
        assert mass == pytest.approx(max(0.0, share) ** 0.5)


def test_one_draw_cannot_be_halved():
    with pytest.raises(ValueError, match="num_samples must be 0 or at least 2, got 1"):
        FisherMonitor(num_samples=1)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "sigmoid", "natural"])
def test_two_draws_that_share_their_probabilities_are_those_of_draws_of_their_own(name):
    head = make_head(name, 5)
    scores, levels = torch.randn(3, 4, head.num_scores), torch.rand(2, 3, 4)
    both = paired_mean_fishers(head, scores, levels)
    four = torch.cat((levels[:1], levels[:1], levels[1:], levels[1:]))  # more than two: copies
    assert torch.allclose(both, paired_mean_fishers(head, scores, four), atol=1e-6)
