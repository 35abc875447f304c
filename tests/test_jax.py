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
from pathlib import Path

# Most of the time goes into compiling, where most of the time goes into making code fast.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import CATEGORIES, CATNAT, HEADS, leaf_path
from scipy import stats

import catnat
from catnat.jax import Categorical, MixedHead, NaturalHead, head_names, make_head
from catnat.jax.numerics import LOG_ZERO
from catnat.jax.numerics import uniform as accurate_uniform

ROOT = Path(__file__).resolve().parent.parent
GRID = (*CATEGORIES, 1000)
DTYPES = (np.float32, np.float64)
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}
COMPILED = {np.float32: {"xla_backend_optimization_level": 3}, np.float64: {}}  # as users have it
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", GRID)
@pytest.mark.parametrize("name", HEADS)
def test_the_numbers_of_torch(name, K, dtype):
    head, other = make_head(name, K), catnat.make_head(name, K)
    scores, rng = scores_for(head, dtype), np.random.default_rng(0)
    weight = rng.standard_normal((len(scores), K)).astype(dtype)
    value = rng.integers(0, K, len(scores))

    @partial(jax.jit, compiler_options=COMPILED[dtype])
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
@pytest.mark.parametrize("K", [5])
@pytest.mark.parametrize("name", HEADS)
def test_inverse_is_that_of_torch_and_gives_the_probabilities_back(name, K, dtype):
    head, other = make_head(name, K), catnat.make_head(name, K)
    rng = np.random.default_rng(0)
    inside = rng.dirichlet(np.ones(K), 20).astype(dtype)
    got = head.inverse(jnp.asarray(inside))
    assert difference(got, other.inverse(torch.tensor(inside))) < TOLERANCE[dtype]
    assert difference(head.probs(got), inside) < TOLERANCE[dtype]
    corners = np.eye(K, dtype=dtype)
    back = np.asarray(head.probs(head.inverse(corners)))
    assert difference(back, corners) < TOLERANCE[dtype]
    if name != "softmax":
        assert np.array_equal(back == 0, corners == 0)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", HEADS)
def test_every_finite_score_gives_finite_numbers(name, dtype):
    head = make_head(name, 5)
    limit = float(jnp.finfo(dtype).max)
    values = np.array([0, -0.0, 1e-30, math.pi, -math.pi, 50, -104, limit, -limit, 1e4])
    rows = np.random.default_rng(0).choice(values, (200, head.num_scores))
    scores = jnp.asarray(rows).astype(dtype)
    out, pull = jax.vjp(head.log_probs, scores)
    assert out.dtype == jnp.float32 and jnp.isfinite(out).all()
    assert difference(head.probs(scores).sum(-1), jnp.ones(200)) < 1e-6
    (gradient,) = pull(jnp.broadcast_to(jnp.linspace(-1, 1, 5), out.shape))
    assert gradient.dtype == dtype and jnp.isfinite(gradient).all()
    assert jnp.isfinite(head.entropy(scores)).all()
    if dtype == jnp.bfloat16:
        assert jnp.array_equal(out, head.log_probs(scores.astype(jnp.float32)))


@pytest.mark.parametrize("name", HEADS)
def test_nan_spreads_and_is_never_a_category(name):
    head = make_head(name, 5)
    scores = np.zeros((3, head.num_scores), np.float32)
    scores[1, 0] = np.nan
    q, gradient = head(scores), jax.grad(lambda s: head.log_probs(s).sum())(jnp.asarray(scores))
    assert np.isnan(q.logits).all(-1).tolist() == [False, True, False]
    assert np.isnan(gradient).any(-1).tolist() == [False, True, False]
    for drawn in (q.sample(seed=0), q.mode()):
        assert (np.asarray(drawn) < 0).tolist() == [False, True, False]
    assert np.isnan(q.log_prob(jnp.zeros(3, int))).tolist() == [False, True, False]


@pytest.mark.parametrize("name", CATNAT)
def test_an_infinite_score_is_a_certain_split_without_gradient(name):
    head = make_head(name, 4)
    scores = jnp.array([jnp.inf, 0.3, -jnp.inf])
    assert head.probs(scores).tolist() == [0, 0, 1, 0]
    gradient = jax.grad(lambda s: head.log_probs(s)[2] + head.entropy(s))(scores)
    assert gradient.tolist() == [0, 0, 0]
    assert not head.fisher(scores).any()


@pytest.mark.parametrize("dtype", [np.float64])
@pytest.mark.parametrize("name", [*HEADS, "tail"])
def test_second_derivatives(name, dtype):
    head = make_head("natural", 5, tail=0.1) if name == "tail" else make_head(name, 5)
    scores = scores_for(head, np.float64)[3:6].astype(dtype)
    other = catnat.make_head(head.name, 5)
    if name == "tail" and np.abs(scores).max() > 1.5:
        scores = scores / 3  # torch's heads may not have a tail: stay where there is none
    weight = np.linspace(-1, 1, 5).astype(dtype)
    got = jax.jit(jax.vmap(jax.hessian(lambda s: head.log_probs(s) @ weight)))(scores)
    for row, hessian in zip(scores, got, strict=True):
        want = torch.autograd.functional.hessian(
            lambda s: other.log_probs(s) @ torch.tensor(weight, dtype=torch.float64),
            torch.tensor(row, dtype=torch.float64),
        )
        assert difference(hessian.ravel(), want.flatten(), by_row=True) < 10 * TOLERANCE[dtype]


# --------------------------------------------------------------------------- the Fisher matrix


@pytest.mark.parametrize("options", [{}, {"mix": 0.1}])
@pytest.mark.parametrize("K", [5])
@pytest.mark.parametrize("name", [*HEADS, "tail"])
@pytest.mark.parametrize("dtype", [np.float64])
def test_fisher_is_that_of_automatic_differentiation(name, K, options, dtype):
    more = {"tail": 0.1} if name == "tail" else {}
    head = make_head("natural" if name == "tail" else name, K, **more, **options)
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((4, head.num_scores)) * (0.3 if name == "sparsemax" else 2.0)
    mask = rng.random((4, K)) < 0.7
    mask[:, 0] = True
    filled = head.masked(scores, mask)

    @jax.jit
    @jax.vmap
    def both(row):
        p, J = head.probs(row), jax.jacfwd(head.probs)(row)
        weighted = jnp.where(p[:, None] > 0, J / jnp.where(p > 0, p, 1)[:, None], 0)
        return head.fisher(row), head.fisher_diagonal(row), J.T @ weighted

    for rows in (scores, filled):
        fisher, diagonal, want = both(rows)
        assert difference(fisher, want) < 1e-12
        assert difference(diagonal, jnp.diagonal(want, axis1=1, axis2=2)) < 1e-12
        if name in (*CATNAT, "tail") and not options:
            assert not (np.asarray(fisher) * ~np.eye(K - 1, dtype=bool)).any()


# ---------------------------------------------------------------------- masks, mix, tail, order


def masked_by_definition(head, scores, mask):
    """Scores that a mask fills with infinities, by loops over the definition."""
    scores, K = np.array(scores), head.num_categories
    if head.num_scores == K:
        return np.where(mask, scores, -np.inf)
    order = range(K) if head.order is None else head.order
    sides = np.zeros((K - 1, 2), bool)  # whether a side of a node holds an allowed leaf
    for k in np.flatnonzero(mask):
        for node, bit in leaf_path(order[k], K):
            sides[node, bit] = True
    fill = {(True, False): -np.inf, (False, True): np.inf, (False, False): 0.0}
    return np.array([fill.get(tuple(s), x) for s, x in zip(sides, scores, strict=True)])


@pytest.mark.parametrize("K", [5, 18])
@pytest.mark.parametrize("name", HEADS)
def test_masks(name, K):
    options = {"order": np.random.default_rng(1).permutation(K)} if name == "natural" else {}
    head, rng = make_head(name, K, **options), np.random.default_rng(K)
    scores = rng.standard_normal((6, head.num_scores)).astype(np.float32)
    mask = rng.random((6, K)) < 0.5
    mask[np.arange(6), rng.integers(0, K, 6)] = True
    filled = head.masked(scores, mask)
    for row, s, m in zip(filled, scores, mask, strict=True):
        assert np.array_equal(row, masked_by_definition(head, s, m).astype(np.float32))
    other = catnat.make_head(name, K)
    if hasattr(other, "masked") and not options:
        assert np.array_equal(filled, other.masked(torch.tensor(scores), torch.tensor(mask)))
    assert jnp.array_equal(head.allowed(filled), mask)
    q = head(scores, mask)
    assert not q.probs[~mask].any() and jnp.isfinite(q.logits).all()
    assert difference(q.probs.sum(-1), np.ones(6)) < 1e-6
    drawn = np.asarray(q.sample(seed=0, sample_shape=(200,)))
    assert np.take_along_axis(mask[None], drawn[..., None], -1).all()

    @jax.jit
    @jax.grad
    def gradient(s):
        return (head(s, mask).logits * mask).sum() + head(s, mask).entropy().sum()

    assert jnp.isfinite(gradient(jnp.asarray(scores))).all()


@pytest.mark.parametrize("name", HEADS)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [5])
@pytest.mark.parametrize("name", HEADS)
def test_mix(name, K, dtype):
    head, mixed = make_head(name, K), make_head(name, K, mix=0.1)
    assert (mixed.name, mixed.num_scores) == (name, head.num_scores)
    assert make_head(name, K, mix=0) == head and isinstance(mixed, MixedHead)
    scores = scores_for(head, dtype)
    mask = np.arange(K) % 3 != 1
    for filled, allowed in ((scores, np.ones(K, bool)), (head.masked(scores, mask), mask)):
        want = np.where(allowed, 0.9 * np.asarray(head.probs(filled)) + 0.1 / allowed.sum(), 0)
        assert difference(mixed.probs(filled), want) < TOLERANCE[dtype]
        assert (np.asarray(mixed.log_probs(filled))[..., ~allowed] == LOG_ZERO).all()
    value = jnp.full(len(scores), 2)
    assert jnp.array_equal(mixed.log_prob(scores, value), mixed.log_probs(scores)[:, 2])
    gradient = jax.grad(lambda s: mixed.log_probs(s).sum() + mixed.entropy(s).sum())(scores)
    assert jnp.isfinite(gradient).all()
    if hasattr(catnat, "MixedHead"):
        other = catnat.make_head(name, K, mix=0.1).log_probs(torch.tensor(scores))
        assert difference(mixed.log_probs(scores), other) < TOLERANCE[dtype]
    p = mixed.probs(scores[:3])
    assert difference(mixed.probs(mixed.inverse(p)), p) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [0.005, 0.05, 0.4])
def test_tail_is_an_exponential_that_continues_natural(tail, dtype):
    head, plain = NaturalHead(2, tail=tail), NaturalHead(2)
    angle = math.asin(math.sqrt(tail))
    joint, r = math.pi - 4 * angle, 0.5 / math.tan(angle)
    x = np.linspace(-20, 20, 401)[:, None]
    inside = np.abs(x) <= joint
    log_rare = np.where(inside, 0, math.log(tail) - r * (np.abs(x) - joint))
    theta = (math.pi - np.minimum(np.abs(x), joint)) / 4
    log_rare = np.where(inside, 2 * np.log(np.sin(theta)), log_rare)
    log_likely = np.log1p(-np.exp(log_rare))
    want = np.where(x < 0, [log_likely, log_rare], [log_rare, log_likely])[..., 0].T
    got, pull = jax.vjp(head.log_probs, jnp.asarray(x, dtype))
    assert difference(got, want) < TOLERANCE[dtype]
    assert difference(got[inside[:, 0]], plain.log_probs(x.astype(dtype))[inside[:, 0]]) < 1e-6
    slope = np.asarray(pull(jnp.ones_like(got) * jnp.array([-1, 0], dtype))[0])
    assert (slope[x > 0] > 0).all()  # of log(1 - a), the rarer side there
    assert difference(slope[-1], r) < TOLERANCE[dtype]
    information = np.asarray(head.information(x.astype(dtype)))
    p = np.exp(log_rare)
    exact = np.where(inside, 0.25, r**2 * p / (1 - p))
    assert difference(information, exact) < TOLERANCE[dtype]
    back = head.inverse(head.probs(x[100:300].astype(dtype)))
    assert difference(head.probs(back), head.probs(x[100:300].astype(dtype))) < TOLERANCE[dtype]
    for K in (3, 5, 18):  # zero scores are uniform even where a centre lies in the tail
        head = NaturalHead(K, tail=tail)
        assert difference(head.probs(np.zeros(K - 1, dtype)), np.full(K, 1 / K)) < TOLERANCE[dtype]
        try:
            other = catnat.make_head("natural", K, tail=tail)
        except ValueError:  # torch's head may have no tail
            continue
        scores = scores_for(head, dtype)
        want = other.log_probs(torch.tensor(scores))
        assert difference(head.log_probs(scores), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CATNAT)
def test_order_says_which_leaf_a_class_has(name):
    order = (3, 0, 4, 1, 2)
    head, plain = make_head(name, 5, order=list(order)), make_head(name, 5)
    assert head == make_head(name, 5, order=np.array(order)) and head != plain
    scores = scores_for(head, np.float32)
    log_probs = head.log_probs(scores)
    assert jnp.array_equal(log_probs, plain.log_probs(scores)[:, order])
    for k in range(5):
        path = head.log_prob(scores, jnp.full(len(scores), k))
        assert difference(path, log_probs[:, k]) < 1e-6
    key = jax.random.key(0)
    drawn, plainly = head.sample(key, scores, (9,)), plain.sample(key, scores, (9,))
    assert jnp.array_equal(jnp.array(order)[drawn], plainly)
    p = head.probs(scores[:3])
    assert difference(head.probs(head.inverse(p)), p) < 1e-6


# -------------------------------------------------------------------- samples and distribution


@pytest.mark.parametrize("K", [5])
@pytest.mark.parametrize("name", [*HEADS, "mixed"])
def test_samples_have_the_probabilities(name, K):
    head = make_head("sigmoid", K, mix=0.2) if name == "mixed" else make_head(name, K)
    rng = np.random.default_rng(3)
    scores = (0.7 * rng.standard_normal((2, head.num_scores))).astype(np.float32)
    drawn = np.asarray(head.sample(jax.random.key(1), scores, (20000,)))
    assert drawn.shape == (20000, 2) and drawn.dtype == np.int32
    for column, p in zip(drawn.T, np.asarray(head.probs(scores), np.float64), strict=True):
        counts, possible = np.bincount(column, minlength=K), p > 0
        assert not counts[~possible].any()
        if possible.sum() > 1:
            expected = 20000 * p[possible] / p[possible].sum()
            assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


def test_rare_events_have_their_probability_in_float32():
    """jax.random.uniform alone would draw a number below 1e-9 with probability 1e-7."""
    u = np.asarray(accurate_uniform(jax.random.key(0), (2**22,), jnp.float32), np.float64)
    assert u.max() < 1 and not (u[u < 1e-4] % 2.0**-23 == 0).all()
    assert stats.kstest(u[:20000], "uniform").pvalue > 1e-3
    assert stats.kstest(u[u < 1e-4] / 1e-4, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", HEADS)
def test_the_distribution_is_a_pytree_with_distrax_s_interface(name):
    head = make_head(name, 5)
    q = head(scores_for(head, np.float32))
    p = head(jnp.zeros((1, head.num_scores)))
    other = catnat.make_head(name, 5)(torch.tensor(np.asarray(q.scores)))
    flat = catnat.make_head(name, 5)(torch.zeros(1, head.num_scores))
    assert isinstance(q, Categorical)
    assert (q.batch_shape, q.event_shape, q.num_categories) == ((len(q.scores),), (), 5)
    for got, want in (
        (q.kl_divergence(p), torch.distributions.kl_divergence(other, flat)),
        (p.kl_divergence(q), torch.distributions.kl_divergence(flat, other)),
        (q.entropy(), other.entropy()),
        (q.probs, other.probs),
        (q.prob(q.mode()), other.probs.max(-1).values),
    ):
        assert difference(got, want) < 2e-6
    drawn, log_prob = q.sample_and_log_prob(seed=3, sample_shape=7)
    assert drawn.shape == log_prob.shape == (7, len(q.scores))
    assert jnp.array_equal(drawn, q.sample(seed=jax.random.key(3), sample_shape=(7,)))
    assert jnp.array_equal(log_prob, q.log_prob(drawn))

    again = jax.jit(lambda q: jax.tree.map(lambda x: 2 * x, q))(q)
    assert isinstance(again, Categorical) and again.head == head
    assert jnp.array_equal(again.scores, 2 * q.scores)
    entropies = jax.vmap(lambda q: q.entropy())(q)
    assert difference(entropies, q.entropy()) < 1e-6


@pytest.mark.parametrize("name", HEADS)
def test_straight_through_samples_have_the_gradient_of_the_probabilities(name):
    head = make_head(name, 5)
    scores, weight = scores_for(head, np.float32)[:6], jnp.arange(5.0)

    def surrogate(s):
        return (head(s).rsample_straight_through(seed=0) @ weight).sum()

    drawn = head(scores).rsample_straight_through(seed=0)
    assert jnp.array_equal(drawn.argmax(-1), head(scores).sample(seed=0))
    assert difference(drawn.sum(-1), jnp.ones(6)) < 1e-6
    want = jax.grad(lambda s: (head.probs(s) @ weight).sum())(scores)
    assert difference(jax.grad(surrogate)(scores), want) < 1e-6


# ------------------------------------------------------------------------------ company in JAX


@pytest.mark.parametrize("name", HEADS)
def test_jit_vmap_and_grad_agree_with_plain_calls(name):
    head = make_head(name, 5)
    scores = scores_for(head, np.float32)[:12]
    value = jnp.arange(12) % 5

    def loss(s, v):
        return head(s).log_prob(v) + head(s).entropy()

    plain = jnp.stack([jax.grad(loss)(s, v) for s, v in zip(scores[:2], value, strict=False)])
    got = jax.jit(jax.vmap(jax.grad(loss)))(scores, value)
    assert difference(got[:2], plain, by_row=True) < 2e-6
    keys = jax.random.split(jax.random.key(0), 12)
    drawn = jax.vmap(head.sample)(keys, scores)
    assert drawn.tolist() == [int(head.sample(k, s)) for k, s in zip(keys, scores, strict=True)]
    static = jax.jit(lambda head, s: head.probs(s), static_argnums=0)
    leafless = jax.jit(lambda head, s: head.probs(s))
    assert jnp.array_equal(static(head, scores), leafless(head, scores))


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
    for shape in ((), (0,), (2, 3)):
        scores = jnp.zeros((*shape, head.num_scores))
        assert head.log_probs(scores).shape == (*shape, 3)
        assert head.fisher(scores).shape == (*shape, head.num_scores, head.num_scores)
        assert head.sample(jax.random.key(0), scores, (4,)).shape == (4, *shape)
        assert head.log_prob(scores, jnp.zeros((4, *shape), int)).shape == (4, *shape)
    assert head.log_prob(jnp.zeros(head.num_scores), 1).shape == ()
    column = jnp.zeros((5, 1), jnp.uint8)
    assert head.log_prob(jnp.zeros((1, 2, head.num_scores)), column[None]).shape == (1, 5, 2)


@pytest.mark.parametrize("name", CATNAT)
def test_a_million_categories_take_a_path(name):
    head = make_head(name, 10**6, uniform_at_zero=False)
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
        (("natural", 4), {"tail": 0.5}, "tail must lie in [1e-30, 0.5), got 0.5"),
        (("natural", 4), {"tail": -0.1}, "tail must lie in [1e-30, 0.5), got -0.1"),
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
            lambda: head(jnp.zeros(4)).kl_divergence(make_head("softmax", 3)(jnp.zeros(3))),
            ValueError,
            "over 5 and 3 categories",
        ),
    ):
        with pytest.raises(error, match=said):
            call()
    outside = jax.jit(head.log_prob)(jnp.zeros(4), jnp.array([4, 5, -1]))
    assert np.isnan(outside).tolist() == [False, True, True]


def test_jax_and_torch_stay_apart():
    code = "import sys, catnat.jax; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    code = "import sys, catnat.heads, catnat.losses; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_the_names_are_those_of_torch():
    assert head_names() == HEADS


def test_the_example_runs(tmp_path):
    out, script = tmp_path / "world_model.png", ROOT / "examples" / "jax_world_model.py"
    command = [sys.executable, str(script), "--steps=2", f"--out={out}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["softmax", "natural"]
    assert out.read_bytes().startswith(b"\x89PNG")
