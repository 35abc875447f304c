"""The JAX heads: the same numbers as the torch heads, Fisher matrices, masks, mixes, and samples.

How two implementations are compared: a difference of values is divided by max(1, |value|), because
log-probabilities reach -1000 and float32 has seven digits. A difference of gradients is divided by
max(1, the largest gradient of the row): the gradient of a score is a sum of terms of that size.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Compiling takes the time of these tests, half of it for making code fast. So a test compiles one
# function where it can: JAX compiles every operation outside of jit alone.
# XLA ends the process at a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import leaf_path, slow
from cases_fresh import one_server, run_fresh
from scipy import stats

import catnat
from catnat.jax import Categorical, MixedHead, NaturalHead, head_names, make_head
from catnat.jax.numerics import uniform as accurate_uniform

AS_USERS_HAVE_IT = {"xla_backend_optimization_level": 3}
if version("jaxlib").startswith("0.10."):
    AS_USERS_HAVE_IT["xla_cpu_use_fusion_emitters"] = True
ROOT = Path(__file__).resolve().parent.parent
HEADS = head_names()
CATNAT = ("sigmoid", "natural")
CASES = {name: (name, {}) for name in HEADS} | {"tail": ("natural", {"tail": 0.05})}
DTYPES = (np.float32, np.float64)
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}
WIDTHS = {np.float32: (3, 18, 1000), np.float64: (5,)}
GRID = [
    (slow if K in (3, 1000) and name != "natural" else pytest.param)(name, K, dtype)
    for name in HEADS
    for dtype, some in WIDTHS.items()
    for K in some
]
GRID += [("sigmoid", 2, np.float32), ("natural", 32, np.float64), ("tail", 5, np.float64)]
SCALES = (0.1, 1.0, 3.0, 30.0)  # the last saturates natural and sparsemax


@pytest.fixture(autouse=True)
def _precision(request):
    """float64 for the tests in float64, and for no others."""
    wide = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    with jax.enable_x64(wide is np.float64):
        yield


def scores_for(head, dtype, rows=3):
    """Scores of all scales, and scores near and on the edges of natural."""
    rng = np.random.default_rng(head.num_categories)
    scores = [scale * rng.standard_normal((rows, head.num_scores)) for scale in SCALES]
    sign = rng.choice((-1.0, 1.0), (rows, head.num_scores))
    edge = math.pi - 10.0 ** rng.uniform(-7, 0, (rows, head.num_scores))
    return np.concatenate((*scores, sign * edge, sign[:1] * math.pi, 0 * sign[:1])).astype(dtype)


def difference(got, want, by_row=False):
    """Largest difference, relative as this file's first lines say."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.abs(want).max(-1, keepdims=True) if by_row else np.abs(want)
    return (np.abs(got - want) / np.maximum(1, size)).max(initial=0)


# ------------------------------------------------------------------------ against the torch heads


@pytest.mark.parametrize(("name", "K", "dtype"), GRID)
def test_the_numbers_of_torch(name, K, dtype):
    name, options = CASES[name]
    head, other = make_head(name, K, **options), catnat.make_head(name, K, **options)
    scores, rng = scores_for(head, dtype), np.random.default_rng(0)
    weight = rng.standard_normal((len(scores), K)).astype(dtype)
    value = rng.integers(0, K, len(scores))

    @partial(jax.jit, compiler_options=AS_USERS_HAVE_IT if K == 18 else None)
    def compute(scores, weight, value):
        log_probs, pull = jax.vjp(head.log_probs, scores)
        path, pull_path = jax.vjp(lambda s: head.log_prob(s, value), scores)
        return {
            "log_probs": log_probs,
            "gradient": pull(weight)[0],
            "path": path,
            "gradient of path": pull_path(weight[:, 0])[0],
            "entropy": head.entropy(scores),
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
    for key, got in compute(scores, weight, value).items():
        assert got.dtype == dtype
        by_row = key in ("gradient", "gradient of path", "fisher")
        assert difference(got, want[key].detach(), by_row) < TOLERANCE[dtype], key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_inverse_is_that_of_torch_and_gives_the_probabilities_back(name, dtype):
    head, other = make_head(name, 5), catnat.make_head(name, 5)
    inside = np.random.default_rng(0).dirichlet(np.ones(5), 20)
    probs = np.concatenate((inside, np.eye(5))).astype(dtype)

    @jax.jit
    def there_and_back(probs):
        scores = head.inverse(probs)
        return scores, head.probs(scores)

    scores, back = map(np.asarray, there_and_back(probs))
    assert difference(scores[:20], other.inverse(torch.tensor(probs[:20]))) < TOLERANCE[dtype]
    assert difference(back, probs) < TOLERANCE[dtype]
    if name != "softmax":
        assert np.array_equal(back == 0, probs == 0)


OPTIONS = [
    ("sigmoid", {"center": 0.7}),
    ("sigmoid", {"uniform_at_zero": False}),
    ("natural", {"center": math.pi, "amplitude": 3.0}),
    ("natural", {"uniform_at_zero": False, "amplitude": 100.0}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_are_those_of_torch(name, options, dtype):
    head, other = make_head(name, 5, **options), catnat.make_head(name, 5, **options)
    scores = scores_for(head, dtype)
    want = other.log_probs(torch.tensor(scores))
    assert difference(jax.jit(head.log_probs)(scores), want) < TOLERANCE[dtype]


# ------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", HEADS)
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
        return out, gradient, wide, head.probs(scores), head.entropy(scores)

    out, gradient, wide, probs, entropy = compute(rows.astype(dtype))
    assert (out.dtype, gradient.dtype) == (jnp.float32, dtype)
    assert difference(np.asarray(probs).sum(-1), np.ones(200)) < 1e-6
    for each in (out, gradient.astype(np.float32), entropy):
        assert np.isfinite(each).all()
    assert np.array_equal(out, wide)


@pytest.mark.parametrize("name", HEADS)
def test_nan_spreads_and_is_never_a_category(name):
    head = make_head(name, 5)
    scores = np.zeros((3, head.num_scores), np.float32)
    scores[1, 0] = np.nan

    @jax.jit
    def compute(scores):
        q, gradient = head(scores), jax.grad(lambda s: head.log_probs(s).sum())(scores)
        drawn = jnp.stack((q.sample(seed=0), q.mode()), -1)
        return (q.logits, gradient, q.log_prob(jnp.zeros(3, int))[:, None]), drawn

    spread, drawn = compute(scores)
    for each in spread:
        assert np.isnan(each).any(-1).tolist() == [False, True, False]
    assert np.isnan(spread[0][1]).all()
    assert ((np.asarray(drawn) < 0) == [[False], [True], [False]]).all()


@pytest.mark.parametrize("name", CATNAT)
def test_an_infinite_score_is_a_certain_split_without_gradient(name):
    head = make_head(name, 4)

    @jax.jit
    def compute(scores):
        gradient = jax.grad(lambda s: head.log_probs(s)[2] + head.entropy(s))(scores)
        return head.probs(scores), gradient, head.fisher(scores)

    probs, gradient, fisher = compute(np.array([np.inf, 0.3, -np.inf], np.float32))
    assert probs.tolist() == [0, 0, 1, 0]
    assert gradient.tolist() == [0, 0, 0]
    assert not np.asarray(fisher).any()


@pytest.mark.parametrize("dtype", [np.float64])
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name, dtype):
    name, options = CASES[name]
    head, other = make_head(name, 5, **options), catnat.make_head(name, 5, **options)
    scores = scores_for(head, dtype)[3:9]
    weight = np.linspace(-1, 1, 5).astype(dtype)
    got = jax.jit(jax.vmap(jax.hessian(lambda s: head.log_probs(s) @ weight)))(scores)
    for row, hessian in zip(scores, got, strict=True):
        want = torch.autograd.functional.hessian(
            lambda s: other.log_probs(s) @ torch.tensor(weight, dtype=torch.float64),
            torch.tensor(row, dtype=torch.float64),
        )
        assert difference(hessian.ravel(), want.flatten(), by_row=True) < 10 * TOLERANCE[dtype]


# --------------------------------------------------------------------------- the Fisher matrix


@pytest.mark.parametrize(
    ("name", "mix"),
    [(name, 0.0) for name in CASES] + [(name, 0.1) for name in ("softmax", "sparsemax", "tail")],
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


def masked_by_definition(head, scores, mask):
    """Where a mask fills scores with infinities, by loops over the definition; else NaN."""
    scores, K = np.array(scores), head.num_categories
    if head.num_scores == K:
        return np.where(mask, scores, -np.inf)
    order = range(K) if head.order is None else head.order
    sides = np.zeros((K - 1, 2), bool)  # whether a side of a node holds an allowed leaf
    for k in np.flatnonzero(mask):
        for node, bit in leaf_path(order[k], K):
            sides[node, bit] = True
    fill = {(True, False): -np.inf, (False, True): np.inf, (False, False): 0.0}
    return np.array([fill.get(tuple(s), np.nan) for s in sides])


@pytest.mark.parametrize("name", HEADS)
def test_masks(name):
    options = {"order": np.random.default_rng(1).permutation(18)} if name == "natural" else {}
    head, other = make_head(name, 18, **options), catnat.make_head(name, 18, **options)
    rng = np.random.default_rng(18)
    scores = rng.standard_normal((24, head.num_scores)).astype(np.float32)
    mask = rng.random((24, 18)) < rng.choice((0.1, 0.5, 0.9), (24, 1))
    mask[np.arange(24), rng.integers(0, 18, 24)] = True

    @jax.jit
    def compute(scores, mask):
        def objective(s):
            return (head(s, mask).logits * mask).sum() + head(s, mask).entropy().sum()

        q, gradient = head(scores, mask), jax.grad(objective)(scores)
        drawn = q.sample(seed=0, sample_shape=(200,))
        return q.scores, head.allowed(q.scores), q.logits, q.probs, drawn, gradient

    filled, allowed, logits, probs, drawn, gradient = map(np.asarray, compute(scores, mask))
    for row, s, m in zip(filled, scores, mask, strict=True):
        fill = masked_by_definition(head, s, m).astype(np.float32)
        assert np.array_equal(row[~np.isnan(fill)], fill[~np.isnan(fill)])
        assert np.isfinite(row[np.isnan(fill)]).all()
    theirs = other(torch.tensor(scores), torch.tensor(mask))
    of_torch = other.masked(torch.tensor(scores), torch.tensor(mask)).numpy()
    assert np.allclose(filled, of_torch, atol=2e-6, rtol=0)
    assert np.array_equal(head.masked(scores, np.ones_like(mask)), scores)
    assert difference(logits, theirs.logits) < 2e-6
    assert np.array_equal(allowed, mask)
    assert not probs[~mask].any() and np.isfinite(logits).all() and np.isfinite(gradient).all()
    assert difference(probs.sum(-1), np.ones(24)) < 1e-6
    assert np.take_along_axis(mask[None], drawn[..., None], -1).all()


@pytest.mark.parametrize("name", ["softmax", "natural"])
def test_a_mask_broadcasts_and_a_row_without_categories_is_no_distribution(name):
    head = make_head(name, 4)
    scores, mask = jnp.zeros((3, head.num_scores)), np.array([True, False, True, True])
    assert head(scores, mask).probs.shape == (3, 4)
    assert head(scores[0], np.stack([mask, mask])).batch_shape == (2,)
    empty = np.stack([mask, ~mask & mask])
    with pytest.raises(ValueError, match=r"mask of row \(1,\) allows no category"):
        head(scores[:2], empty)
    with pytest.raises(ValueError, match="mask allows no category"):
        head(scores[0], empty[1])
    probs = jax.jit(lambda s, m: head(s, m).probs)(scores[:2], empty)
    assert np.isnan(probs).all(-1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, np.float32) for name in CASES] + [("tail", np.float64)]
)
def test_mix(name, dtype):
    name, options = CASES[name]
    head, mixed = make_head(name, 5, **options), make_head(name, 5, mix=0.1, **options)
    other = catnat.make_head(name, 5, mix=0.1, **options)
    assert (mixed.name, mixed.num_scores) == (name, head.num_scores)
    assert make_head(name, 5, mix=0, **options) == head and isinstance(mixed, MixedHead)
    scores = np.concatenate((scores_for(head, dtype), scores_for(head, dtype)))
    mask = np.ones((len(scores), 5), bool)
    mask[len(scores) // 2 :, 1::3] = False

    @jax.jit
    def compute(scores, mask):
        filled = head.masked(scores, mask)
        log_probs, p = mixed.log_probs(filled), mixed.probs(filled)
        gradient = jax.grad(lambda s: mixed.log_probs(s).sum() + mixed.entropy(s).sum())(filled)
        return {
            "inner": head.probs(filled),
            "log_probs": log_probs,
            "probs": p,
            "path": mixed.log_prob(filled, jnp.full(len(scores), 2)),
            "gradient": gradient,
            "back": mixed.probs(mixed.inverse(p)),
        }

    got = {key: np.asarray(value) for key, value in compute(scores, mask).items()}
    want = np.where(mask, 0.9 * got["inner"] + 0.1 / mask.sum(-1, keepdims=True), 0)
    theirs = other(torch.tensor(scores), torch.tensor(mask)).logits
    assert difference(got["probs"], want) < TOLERANCE[dtype]
    assert difference(got["log_probs"], theirs) < TOLERANCE[dtype]
    assert not got["probs"][~mask].any() and np.isfinite(got["gradient"]).all()
    assert difference(got["path"], got["log_probs"][:, 2]) < TOLERANCE[dtype]
    for rows in (slice(3), slice(len(scores) // 2, len(scores) // 2 + 3)):
        assert difference(got["back"][rows], got["probs"][rows]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [0.005, 0.4])
def test_tail_is_an_exponential_that_continues_natural(tail, dtype):
    head, plain = NaturalHead(2, tail=tail), NaturalHead(2)
    angle = math.asin(math.sqrt(tail))
    joint, r = math.pi - 4 * angle, 0.5 / math.tan(angle)
    x = np.linspace(-20, 20, 401)[:, None]
    inside = np.abs(x) <= joint
    theta = (math.pi - np.minimum(np.abs(x), joint)) / 4
    beyond = math.log(tail) - r * (np.abs(x) - joint)
    log_rare = np.where(inside, 2 * np.log(np.sin(theta)), beyond)
    log_likely = np.log1p(-np.exp(log_rare))
    want = np.where(x < 0, [log_likely, log_rare], [log_rare, log_likely])[..., 0].T

    @jax.jit
    def compute(x):
        got, pull = jax.vjp(head.log_probs, x)
        slope = -pull(jnp.ones_like(got) * jnp.array([1, 0], got.dtype))[0]
        probs = head.probs(x)
        back = head.probs(head.inverse(probs))
        return got, slope, head.information(x), probs, back, plain.log_probs(x)

    got, slope, information, probs, back, middle = map(np.asarray, compute(x.astype(dtype)))
    assert difference(got, want) < TOLERANCE[dtype]
    assert difference(got[inside[:, 0]], middle[inside[:, 0]]) < TOLERANCE[dtype]
    assert (slope[x > 0] > 0).all()  # of log(1 - a), the rarer side there
    assert difference(slope[-1], r) < TOLERANCE[dtype]
    p = np.exp(log_rare)
    exact = np.where(inside, 0.25, r**2 * p / (1 - p))
    assert difference(information, exact) < TOLERANCE[dtype]
    assert difference(back[100:300], probs[100:300]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "tail"), [(3, 0.005), (18, 0.4)])
def test_a_tail_is_that_of_torch_where_a_centre_lies_in_it_too(K, tail, dtype):
    head, other = NaturalHead(K, tail=tail), catnat.make_head("natural", K, tail=tail)
    scores = scores_for(head, dtype)
    got = np.asarray(jax.jit(head.log_probs)(scores))
    assert difference(got, other.log_probs(torch.tensor(scores))) < TOLERANCE[dtype]
    assert not scores[-1].any() and difference(np.exp(got[-1]), 1 / K) < TOLERANCE[dtype]


def test_order_says_which_leaf_a_class_has():
    order = (3, 0, 4, 1, 2)
    head, plain = make_head("natural", 5, order=list(order)), make_head("natural", 5)
    other = catnat.make_head("natural", 5, order=list(order))
    assert head == make_head("natural", 5, order=np.array(order)) and head != plain
    scores = scores_for(head, np.float32)

    @jax.jit
    def compute(scores):
        log_probs, p = head.log_probs(scores), head.probs(scores)
        paths = jnp.stack([head.log_prob(scores, jnp.full(len(scores), k)) for k in range(5)], -1)
        drawn = [each(scores).sample(seed=0, sample_shape=9) for each in (head, plain)]
        return log_probs, plain.log_probs(scores), paths, p, head.probs(head.inverse(p)), *drawn

    log_probs, plainly, paths, p, back, drawn, leaves = map(np.asarray, compute(scores))
    assert difference(log_probs, plainly[:, order]) < 1e-6
    assert difference(log_probs, other.log_probs(torch.tensor(scores))) < 2e-6
    assert difference(paths, log_probs) < 1e-6
    assert np.array_equal(np.array(order)[drawn], leaves)
    assert difference(back[:3], p[:3]) < 1e-6


# -------------------------------------------------------------------- samples and distribution


@pytest.mark.parametrize("name", [*HEADS, "mixed"])
def test_samples_have_the_probabilities(name):
    head = make_head("sigmoid", 5, mix=0.2) if name == "mixed" else make_head(name, 5)
    rng = np.random.default_rng(3)
    scores = (0.7 * rng.standard_normal((2, head.num_scores))).astype(np.float32)

    @jax.jit
    def compute(scores):
        return head.sample(jax.random.key(1), scores, (20000,)), head.probs(scores)

    drawn, probs = map(np.asarray, compute(scores))
    assert drawn.shape == (20000, 2) and drawn.dtype == np.int32
    for column, p in zip(drawn.T, probs.astype(np.float64), strict=True):
        counts, possible = np.bincount(column, minlength=5), p > 0
        assert not counts[~possible].any()
        if possible.sum() > 1:
            expected = 20000 * p[possible] / p[possible].sum()
            assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


def test_rare_events_have_their_probability_in_float32():
    """jax.random.uniform alone would draw a number below 1e-9 with probability 1e-7."""
    draw = jax.jit(lambda key: accurate_uniform(key, (2**22,), jnp.float32))
    u = np.asarray(draw(jax.random.key(0)), np.float64)
    assert u.max() < 1 and not (u[u < 1e-4] % 2.0**-23 == 0).all()
    assert stats.kstest(u[:20000], "uniform").pvalue > 1e-3
    assert stats.kstest(u[u < 1e-4] / 1e-4, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", HEADS)
def test_the_distribution_is_a_pytree_with_distrax_s_interface(name):
    head, other = make_head(name, 5), catnat.make_head(name, 5)
    q = head(scores_for(head, np.float32))
    p = head(np.zeros((1, head.num_scores), np.float32))
    theirs = other(torch.tensor(np.asarray(q.scores)))
    flat = other(torch.zeros(1, head.num_scores))
    assert isinstance(q, Categorical)
    assert (q.batch_shape, q.event_shape, q.num_categories) == ((len(q.scores),), (), 5)

    @jax.jit
    def compute(p, q, key):
        numbers = q.kl_divergence(p), p.kl_divergence(q), q.entropy(), q.probs, q.prob(q.mode())
        again = jax.tree.map(lambda x: 2 * x, q)
        draws = (
            *q.sample_and_log_prob(seed=3, sample_shape=7),
            q.sample(seed=key, sample_shape=(7,)),
        )
        return numbers, again, jax.vmap(lambda q: q.entropy())(q), draws

    numbers, again, entropies, (drawn, log_prob, same) = compute(p, q, jax.random.key(3))
    wanted = (
        torch.distributions.kl_divergence(theirs, flat),
        torch.distributions.kl_divergence(flat, theirs),
        theirs.entropy(),
        theirs.probs,
        theirs.probs.max(-1).values,
    )
    for got, want in zip(numbers, wanted, strict=True):
        assert difference(got, want) < 2e-6
    assert isinstance(again, Categorical) and again.head == head
    assert np.array_equal(again.scores, 2 * np.asarray(q.scores))
    assert difference(entropies, numbers[2]) < 1e-6

    assert drawn.shape == log_prob.shape == (7, len(q.scores))
    assert np.array_equal(drawn, same)
    each = theirs.log_prob(torch.tensor(np.asarray(drawn), dtype=torch.int64))
    assert difference(log_prob, each) < 2e-6


@pytest.mark.parametrize("name", HEADS)
def test_straight_through_samples_have_the_gradient_of_the_probabilities(name):
    head = make_head(name, 5)
    scores, weight = scores_for(head, np.float32)[:6], np.arange(5, dtype=np.float32)

    @jax.jit
    def compute(scores):
        def surrogate(s):
            drawn = head(s).rsample_straight_through(seed=0)
            return (drawn @ weight).sum(), drawn

        gradient, drawn = jax.grad(surrogate, has_aux=True)(scores)
        want = jax.grad(lambda s: (head.probs(s) @ weight).sum())(scores)
        return gradient, want, drawn, head(scores).sample(seed=0)

    gradient, want, drawn, category = map(np.asarray, compute(scores))
    assert np.array_equal(drawn.argmax(-1), category)
    assert difference(drawn.sum(-1), np.ones(6)) < 1e-6
    assert difference(gradient, want) < 1e-6


# ------------------------------------------------------------------------------ company in JAX


@pytest.mark.parametrize("name", ["sparsemax", "natural"])
def test_jit_vmap_and_grad_agree_with_plain_calls(name):
    head = make_head(name, 5)
    scores = scores_for(head, np.float32)[:4]
    value = np.arange(4)

    def loss(s, v):
        return head(s).log_prob(v) + head(s).entropy()

    plain = jax.grad(loss)(scores[0], value[0])
    got = jax.jit(jax.vmap(jax.grad(loss)))(scores, value)
    assert difference(got[0], plain, by_row=True) < 2e-6
    keys = jax.random.split(jax.random.key(0), 4)
    drawn, one = jax.jit(jax.vmap(head.sample))(keys, scores), jax.jit(head.sample)
    assert drawn.tolist() == [int(one(k, s)) for k, s in zip(keys, scores, strict=True)]
    static = jax.jit(lambda head, s: head.probs(s), static_argnums=0)
    leafless = jax.jit(lambda head, s: head.probs(s))
    assert np.array_equal(static(head, scores), leafless(head, scores))


def test_heads_are_values():
    head = make_head("natural", 5, tail=0.05, mix=0.01)
    assert head == make_head("catnat-natural", 5, tail=0.05, mix=0.01)
    assert head != make_head("natural", 5, tail=0.05)
    assert len({head, pickle.loads(pickle.dumps(head))}) == 1
    assert jax.tree.leaves(head) == []
    assert repr(make_head("sigmoid", 4)) == (
        "SigmoidHead(num_categories=4, center=0.0, uniform_at_zero=True)"
    )
    with pytest.raises(AttributeError):
        head.mix = 0.5


@pytest.mark.parametrize("name", HEADS)
def test_shapes(name):
    head = make_head(name, 3)
    shape_of = lambda function, *inputs: jax.eval_shape(function, *inputs).shape  # noqa: E731
    for shape in ((), (0,), (2, 3)):
        scores, value = np.zeros((*shape, head.num_scores)), np.zeros((4, *shape), int)
        assert shape_of(head.log_probs, scores) == (*shape, 3)
        assert shape_of(head.fisher, scores) == (*shape, head.num_scores, head.num_scores)
        draw = lambda s: head.sample(jax.random.key(0), s, (4,))  # noqa: E731
        assert shape_of(draw, scores) == (4, *shape)
        assert shape_of(head.log_prob, scores, value) == (4, *shape)
    assert head.log_probs(np.zeros((0, head.num_scores))).shape == (0, 3)
    assert shape_of(head.log_prob, np.zeros(head.num_scores), 1) == ()
    column = np.zeros((1, 5, 1), np.uint8)
    assert shape_of(head.log_prob, np.zeros((1, 2, head.num_scores)), column) == (1, 5, 2)


def test_a_million_categories_take_a_path():
    head = make_head("natural", 10**6, uniform_at_zero=False)
    scores = jnp.zeros(head.num_scores)
    drawn = head.sample(jax.random.key(0), scores, (3,))
    text = str(jax.make_jaxpr(head.log_prob)(scores, drawn))
    assert len(text.splitlines()) < 200 and "1000000]" not in text
    assert difference(head.log_prob(scores, drawn), np.full(3, -20 * math.log(2))) < 0.06


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("softmx", 4), {}, "unknown head 'softmx'; choose from softmax, sparsemax"),
        (("softmax", 4), {"tail": 0.1}, "'softmax' has no option 'tail'; its options: mix"),
        (("sigmoid", 4), {"tail": 0.1}, "no option 'tail'; its options: center, uniform_at_zero"),
        (("natural", 1), {}, "num_categories must be at least 2, got 1"),
        (("natural", 2.0), {}, "num_categories must be an integer, got 2.0"),
        (("natural", 4), {"tail": 0.5}, "tail must be 0 or lie in [1e-30, 0.5), got 0.5"),
        (("natural", 4), {"tail": -0.1}, "tail must be 0 or lie in [1e-30, 0.5), got -0.1"),
        (("natural", 4), {"amplitude": 0.0}, "amplitude must lie in"),
        (("natural", 4), {"center": math.nan}, "center must be finite, got nan"),
        (("natural", 4), {"order": [0, 1, 1, 2]}, "order must be a permutation of 0..3, got [0, 1"),
        (("softmax", 4), {"mix": 1.0}, "mix must lie in [0, 1), got 1.0"),
    ],
)
def test_wrong_options_are_named(arguments, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make_head(*arguments, **options)


def test_wrong_arrays_are_named():
    head = make_head("natural", 5)
    for call, error, said in (
        (lambda: head(jnp.zeros((2, 7))), ValueError, r"takes 4 scores .* got shape \(2, 7\)"),
        (lambda: head(jnp.zeros(4, int)), ValueError, "floating point, got int32"),
        (lambda: head([0.0] * 4), TypeError, "scores must be a JAX or numpy array, got list"),
        (lambda: head(torch.zeros(4)), TypeError, "JAX or numpy array, got Tensor"),
        (lambda: head(jnp.zeros(4), jnp.ones(5)), TypeError, "array of bool, .* got float32"),
        (lambda: head(jnp.zeros(4), jnp.ones(4, bool)), ValueError, r"5 categories .* \(4,\)"),
        (lambda: head.log_prob(jnp.zeros(4), 5), ValueError, r"lie in 0\.\.4, got 5"),
        (lambda: head.log_prob(jnp.zeros(4), jnp.zeros(())), ValueError, "integers, got float32"),
        (lambda: head.inverse(jnp.ones(4) / 4), ValueError, "expected 5 probabilities"),
        (lambda: head.inverse(jnp.ones(5)), ValueError, "must sum to 1, got a sum of 5"),
        (lambda: head.inverse(jnp.array([2.0, -1, 0, 0, 0])), ValueError, "negative, got -1"),
        (
            lambda: MixedHead(head, 0.5).inverse(jnp.ones(5).at[:2].set([0.05, 1.95]) / 5),
            ValueError,
            "mix=0.5 a probability must be 0 or at least 0.1, got 0.01",
        ),
        (
            lambda: head(jnp.zeros(4)).kl_divergence(make_head("softmax", 3)(jnp.zeros(3))),
            ValueError,
            "over 5 and 3 categories",
        ),
    ):
        with pytest.raises(error, match=said):
            call()
    outside = jax.jit(head.log_prob)(jnp.zeros(4), jnp.array([4, 5, -1]))
    assert np.isnan(outside).tolist() == [False, True, True]


@one_server
def test_jax_and_torch_stay_apart():
    code = "import sys, catnat.jax; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    code = "import sys, catnat.heads, catnat.losses; print('jax' in sys.modules)"
    done = run_fresh("-c", code)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_the_names_are_those_of_torch():
    assert head_names() == ("softmax", "sparsemax", "sigmoid", "natural") == catnat.head_names()[:4]


def example(*arguments):
    command = [sys.executable, str(ROOT / "examples" / "jax_world_model.py"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_the_example_runs(tmp_path):
    out = tmp_path / "world_model.png"
    done = example("--steps=2", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["softmax", "natural"]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_example_refuses_a_bad_picture_in_one_line_before_it_trains():
    done = example("--out=no/such/folder/world.png")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("in a folder that exists, got 'no/such/folder/world.png'")
