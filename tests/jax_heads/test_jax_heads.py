"""The JAX heads: the same numbers as the torch heads, Fisher matrices, masks, mixes, tails."""

import pytest

pytest.importorskip("jax", reason="needs the extra [jax]")

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases import slow
from cases_jax import (
    AS_USERS_HAVE_IT,
    CASES,
    CATNAT,
    DTYPES,
    HEADS,
    QUICK,
    TOLERANCE,
    _precision,  # noqa: F401 - a fixture
    difference,
    scores_for,
)

import catnat
from catnat.jax import make_head

WIDTHS = {np.float32: (3, 18, 1000), np.float64: (5,)}
GRID = [
    (slow if K in (3, 1000) else pytest.param)(name, K, dtype)
    for name in HEADS
    for dtype, widths in WIDTHS.items()
    for K in widths
]
GRID += [("sigmoid", 2, np.float32), ("tail", 5, np.float64)]


# ------------------------------------------------------------------------ against the torch heads


@pytest.mark.parametrize(("name", "K", "dtype"), GRID)
def test_the_numbers_of_torch(name, K, dtype):
    name, options = CASES[name]
    head, other = make_head(name, K, **options), catnat.make_head(name, K, **options)
    scores, rng = scores_for(head, dtype), np.random.default_rng(0)
    weight = rng.standard_normal((len(scores), K)).astype(dtype)
    value = rng.integers(0, K, len(scores))

    as_users_have_it = (name, K) in (("natural", 18), ("softmax", 18))

    @partial(jax.jit, compiler_options=AS_USERS_HAVE_IT if as_users_have_it else None)
    def compute(scores, weight, value):
        log_probs, pull = jax.vjp(head.log_probs, scores)
        path, pull_path = jax.vjp(lambda s: head.log_prob(s, value), scores)
        return {
            "log_probs": log_probs,
            "gradient": pull(weight)[0],
            "path": path,
            "gradient of path": pull_path(weight[:, 0])[0],
            "entropy": head(scores).entropy(),
            "fisher": head.fisher_diagonal(scores),
        }

    leaf = torch.tensor(scores, requires_grad=True)
    log_probs = other.log_probs(leaf)
    path = log_probs.gather(-1, torch.tensor(value)[:, None])[:, 0]
    pulled = [
        torch.autograd.grad((out * by).sum(), leaf, retain_graph=True)[0]
        for out, by in ((log_probs, torch.tensor(weight)), (path, torch.tensor(weight[:, 0])))
    ]
    want = {
        "log_probs": log_probs,
        "gradient": pulled[0],
        "path": path,
        "gradient of path": pulled[1],
        "entropy": other(leaf).entropy(),
        "fisher": other.fisher_diagonal(leaf.detach()),
    }
    tolerance = TOLERANCE[dtype] * max(1, K / 500)  # both round a sum of K numbers
    got = compute(scores, weight, value)
    if name == "sparsemax":  # of a small probability, a difference of scores, few digits are left
        p = log_probs.exp().detach()
        assert difference(np.exp(got["log_probs"]), p) < tolerance
        assert difference(got["entropy"], want["entropy"].detach()) < 10 * tolerance
        clear = ((p == 0) | (p > 0.05)).all(-1).numpy()  # here both have the same support
        got = {key: array[clear] for key, array in got.items()}
        want = {key: tensor[clear] for key, tensor in want.items()}
        tolerance *= 20
    for key, array in got.items():
        assert array.dtype == dtype
        by_row = key in ("gradient", "gradient of path", "fisher")
        assert difference(array, want[key].detach(), by_row) < tolerance, key


OPTIONS = [
    (5, {"amplitude": 3.0}),
    (5, {"amplitude": 100.0}),
    (3, {"tail": 0.005}),
    (18, {"tail": 0.4}),  # here centers lie in the tail, too
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "options"), OPTIONS)
def test_options_are_those_of_torch(K, options, dtype):
    head, other = make_head("natural", K, **options), catnat.make_head("natural", K, **options)
    scores = scores_for(head, dtype)
    got = np.asarray(jax.jit(head.log_probs)(scores))
    assert difference(got, other.log_probs(torch.tensor(scores))) < TOLERANCE[dtype]
    if "tail" in options:  # the last scores are 0
        assert difference(np.exp(got[-1]), 1 / K) < TOLERANCE[dtype]


# ------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", QUICK)
def test_every_finite_score_gives_finite_numbers(name, dtype):
    head = make_head(name, 5)
    limit = float(jnp.finfo(dtype).max)
    values = np.array([0, -0.0, 1e-30, math.pi, -math.pi, 50, -104, limit, -limit, 1e4])
    rows = np.random.default_rng(0).choice(values, (200, head.num_scores))

    @jax.jit
    def compute(scores):
        out, pull = jax.vjp(head.log_probs, scores)
        (gradient,) = pull(jnp.broadcast_to(jnp.linspace(-1, 1, 5), out.shape))
        wide = head.log_probs(scores.astype(jnp.float32))
        return out, gradient, wide, head.probs(scores), head(scores).entropy()

    out, gradient, wide, probs, entropy = compute(rows.astype(dtype))
    assert (out.dtype, gradient.dtype) == (jnp.float32, dtype)
    assert difference(np.asarray(probs).sum(-1), np.ones(200)) < 1e-6
    for numbers in (out, gradient.astype(np.float32), entropy):
        assert np.isfinite(numbers).all()
    assert np.array_equal(out, wide)


@pytest.mark.parametrize("name", QUICK)
def test_nan_spreads_and_is_never_a_category(name):
    head = make_head(name, 5)
    scores = np.zeros((3, head.num_scores), np.float32)
    scores[1, 0] = np.nan

    @jax.jit
    def compute(scores):
        q, gradient = head(scores), jax.grad(lambda s: head.log_probs(s).sum())(scores)
        drawn = jnp.stack((q.sample(seed=jax.random.key(0)), q.mode()), -1)
        return (q.logits, gradient, q.log_prob(jnp.zeros(3, int))[:, None]), drawn

    spread, drawn = compute(scores)
    for numbers in spread:
        assert np.isnan(numbers).any(-1).tolist() == [False, True, False]
    assert np.isnan(spread[0][1]).all()
    assert ((np.asarray(drawn) < 0) == [[False], [True], [False]]).all()


@pytest.mark.parametrize("name", CATNAT)
def test_an_infinite_score_is_a_certain_decision_without_gradient(name):
    head = make_head(name, 4)

    @jax.jit
    def compute(scores):
        gradient = jax.grad(lambda s: head.log_probs(s)[2] + head(s).entropy())(scores)
        return head.probs(scores), gradient, head.fisher(scores)

    probs, gradient, fisher = compute(np.array([np.inf, 0.3, -np.inf], np.float32))
    assert probs.tolist() == [0, 0, 1, 0]
    assert gradient.tolist() == [0, 0, 0]
    assert not np.asarray(fisher).any()


# --------------------------------------------------------------------------- the Fisher matrix


@pytest.mark.parametrize(
    ("name", "mix"),
    [(name, 0.0) for name in CASES] + [("sparsemax", 0.1), ("tail", 0.1)],
)
@pytest.mark.parametrize("dtype", [np.float64])
def test_fisher_is_that_of_automatic_differentiation(name, mix, dtype):
    kind, options = CASES[name]
    head, rng = make_head(kind, 5, mix=mix, **options), np.random.default_rng(0)
    scores = rng.standard_normal((8, head.num_scores)) * (0.3 if name == "sparsemax" else 2.0)
    mask = np.ones((8, 5), bool)
    mask[4:, 1:] = rng.random((4, 4)) < 0.7  # the first four rows are not masked

    @jax.jit
    @jax.vmap
    def compute(row, mask):
        row = head.masked(row, mask)
        p, J = head.probs(row), jax.jacfwd(head.probs)(row)
        weighted = jnp.where(p[:, None] > 0, J / jnp.where(p > 0, p, 1)[:, None], 0)
        return head.fisher(row), head.fisher_diagonal(row), J.T @ weighted

    fisher, diagonal, want = map(np.asarray, compute(scores, mask))
    assert difference(fisher, want) < 1e-12
    assert difference(diagonal, np.diagonal(want, axis1=1, axis2=2)) < 1e-12
    if name in (*CATNAT, "tail") and not mix:
        assert not (fisher * ~np.eye(4, dtype=bool)).any()


# ---------------------------------------------------------------------- masks, mix, tail, order


@pytest.mark.parametrize("name", QUICK)
def test_masks(name):
    head = make_head(name, 18)
    other = catnat.make_head(name, 18)
    rng = np.random.default_rng(18)
    scores = rng.standard_normal((24, head.num_scores)).astype(np.float32)
    mask = rng.random((24, 18)) < rng.choice((0.1, 0.5, 0.9), (24, 1))
    mask[np.arange(24), rng.integers(0, 18, 24)] = True

    @jax.jit
    def compute(scores, mask):
        def objective(s):
            return (head(s, mask).logits * mask).sum() + head(s, mask).entropy().sum()

        q, gradient = head(scores, mask), jax.grad(objective)(scores)
        drawn = q.sample(seed=jax.random.key(0), sample_shape=(200,))
        unmasked = head.masked(scores, jnp.ones_like(mask))
        return q.scores, head.allowed(q.scores), q.logits, q.probs, drawn, gradient, unmasked

    arrays = map(np.asarray, compute(scores, mask))
    filled, allowed, logits, probs, drawn, gradient, unmasked = arrays
    theirs = other(torch.tensor(scores), torch.tensor(mask))
    of_torch = other.masked(torch.tensor(scores), torch.tensor(mask)).numpy()
    assert np.allclose(filled, of_torch, atol=2e-6, rtol=0)
    assert np.array_equal(unmasked, scores)
    assert difference(probs, theirs.probs) < 2e-6
    assert name == "sparsemax" or difference(logits, theirs.logits) < 2e-6
    assert np.array_equal(allowed, mask)
    assert not probs[~mask].any() and np.isfinite(logits).all() and np.isfinite(gradient).all()
    assert difference(probs.sum(-1), np.ones(24)) < 1e-6
    assert np.take_along_axis(mask[None], drawn[..., None], -1).all()


@pytest.mark.parametrize("name", QUICK)
def test_a_mask_can_be_applied_again_and_a_narrower_one_after_it(name):
    head = make_head(name, 5)
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((6, head.num_scores)).astype(np.float32)
    scores[0] = 0
    wide, narrow = np.array([1, 1, 0, 1, 1], bool), np.array([1, 0, 0, 1, 1], bool)

    @jax.jit
    def compute(scores):
        once, least = head.masked(scores, wide), head.masked(scores, narrow)
        again, other = head.masked(once, wide), head.masked(once, ~wide)
        return once, again, least, head.masked(once, narrow), head.probs(again), other

    once, again, least, after, probs, other = map(np.asarray, compute(scores))
    for got, want in ((again, once), (after, least)):
        assert np.array_equal(np.isinf(got), np.isinf(want))
        assert np.allclose(got, want, atol=1e-6)
    assert np.allclose(probs[0], wide / 4, atol=1e-6)
    assert np.isnan(other).all()


def test_a_mask_broadcasts_and_a_row_without_categories_is_no_distribution():
    head = make_head("natural", 4)
    scores, mask = np.zeros((3, head.num_scores)), np.array([True, False, True, True])
    probs_of = lambda s, m: head(s, m).probs  # noqa: E731
    assert jax.eval_shape(probs_of, scores, mask).shape == (3, 4)
    assert jax.eval_shape(head, scores[0], np.stack([mask, mask])).batch_shape == (2,)
    empty = np.stack([mask, ~mask & mask])
    probs = jax.jit(probs_of)(scores[:2], empty)
    assert np.isnan(probs).all(-1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, np.float32) for name in HEADS] + [("tail", np.float64)]
)
def test_mix(name, dtype):
    name, options = CASES[name]
    head, mixed = make_head(name, 5, **options), make_head(name, 5, mix=0.1, **options)
    other = catnat.make_head(name, 5, mix=0.1, **options)
    assert (mixed.name, mixed.num_scores) == (name, head.num_scores)
    assert make_head(name, 5, mix=0, **options) == head
    scores = np.concatenate((scores_for(head, dtype), scores_for(head, dtype)))
    mask = np.ones((len(scores), 5), bool)
    mask[len(scores) // 2 :, 1::3] = False

    @jax.jit
    def compute(scores, mask):
        filled = head.masked(scores, mask)
        log_probs = mixed.log_probs(filled)
        gradient = jax.grad(lambda s: mixed.log_probs(s).sum() + mixed(s).entropy().sum())(filled)
        return {
            "inner": head.probs(filled),
            "log_probs": log_probs,
            "probs": mixed.probs(filled),
            "path": mixed.log_prob(filled, jnp.full(len(scores), 2)),
            "gradient": gradient,
        }

    got = {key: np.asarray(value) for key, value in compute(scores, mask).items()}
    want = np.where(mask, 0.9 * got["inner"] + 0.1 / mask.sum(-1, keepdims=True), 0)
    theirs = other(torch.tensor(scores), torch.tensor(mask)).logits
    assert difference(got["probs"], want) < TOLERANCE[dtype]
    assert difference(got["log_probs"], theirs) < TOLERANCE[dtype]
    assert not got["probs"][~mask].any() and np.isfinite(got["gradient"]).all()
    assert difference(got["path"], got["log_probs"][:, 2]) < TOLERANCE[dtype]


def test_small_probabilities_of_sparsemax_have_the_relative_accuracy_of_torch():
    scores = (0.01 * np.random.default_rng(0).standard_normal((300, 64))).astype(np.float32)
    got = np.asarray(jax.jit(make_head("sparsemax", 64).probs)(scores), np.float64)
    want = catnat.make_head("sparsemax", 64).probs(torch.from_numpy(scores)).double().numpy()
    assert want[want > 0].min() < 1e-5
    assert ((got > 0) == (want > 0)).all()
    assert (np.abs(got - want) <= 5e-6 * want).all()
