"""The JAX heads in use: samples, the distribution, jit and vmap, errors, the example."""

import pytest

pytest.importorskip("jax", reason="needs the extra [jax]")

import math
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases import slow
from cases_fresh import one_server, run_fresh
from cases_jax import (
    QUICK,
    _precision,  # noqa: F401 - a fixture
    difference,
    scores_for,
)
from scipy import stats

import catnat
from catnat.jax import Categorical, TreeLinear, head_names, make_head
from catnat.jax.numerics import uniform as accurate_uniform

ROOT = Path(__file__).resolve().parents[2]


# -------------------------------------------------------------------- samples and distribution


@pytest.mark.parametrize("name", [*QUICK, "mixed"])
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


@pytest.mark.parametrize("name", QUICK)
def test_the_distribution_is_a_pytree(name):
    head, other = make_head(name, 5), catnat.make_head(name, 5)
    q = head(scores_for(head, np.float32))
    p = head(np.zeros((1, head.num_scores), np.float32))
    theirs = other(torch.tensor(np.asarray(q.scores)))
    flat = other(torch.zeros(1, head.num_scores))
    assert isinstance(q, Categorical)
    assert q.batch_shape == (len(q.scores),)

    @jax.jit
    def compute(p, q, key):
        likeliest = jnp.exp(q.log_prob(q.mode()))
        numbers = q.kl_divergence(p), p.kl_divergence(q), q.entropy(), q.probs, likeliest
        again = jax.tree.map(lambda x: 2 * x, q)
        draws = (
            *q.sample_and_log_prob(seed=key, sample_shape=(7,)),
            q.sample(seed=key, sample_shape=(7,)),
        )
        return numbers, again, jax.vmap(lambda q: q.entropy())(q), draws

    numbers, again, entropies, (drawn, log_prob, drawn_again) = compute(p, q, jax.random.key(3))
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
    assert np.array_equal(drawn, drawn_again)
    their_log_prob = theirs.log_prob(torch.tensor(np.asarray(drawn), dtype=torch.int64))
    assert difference(log_prob, their_log_prob) < 2e-6


PATHS = [slow("sigmoid", {}, {}), ("natural", {"tail": 0.05}, {}), ("natural", {}, {"mask": True})]


@pytest.mark.parametrize(("name", "options", "more"), PATHS)
def test_path_estimates_have_the_exact_mean_and_are_never_negative(name, options, more):
    head, other = make_head(name, 6, **options), make_head("sigmoid", 6)
    rng = np.random.default_rng(4)
    mask = np.array([1, 1, 0, 1, 1, 1], bool) if more else None
    rows = [rng.standard_normal(each.num_scores).astype(np.float32) for each in (head, other)]
    every = jnp.arange(6)

    def mean_kl(q_scores, p_scores):
        drawn_from = head(q_scores)
        weights = jax.lax.stop_gradient(drawn_from.probs)
        return (weights * drawn_from.path_kl(other(p_scores), every)).sum()

    def mean_entropy(q_scores):
        drawn_from = head(q_scores)
        return (jax.lax.stop_gradient(drawn_from.probs) * drawn_from.path_entropy(every)).sum()

    @jax.jit
    def compute(q_scores, p_scores):
        q, p = head(q_scores, mask), other(p_scores, mask)
        estimates = jax.value_and_grad(mean_kl, (0, 1))(q.scores, p.scores)
        exact = jax.value_and_grad(lambda a, b: head(a).kl_divergence(other(b)), (0, 1))
        entropy = jax.value_and_grad(mean_entropy)(q.scores)
        exact_entropy = jax.value_and_grad(lambda a: head(a).entropy())(q.scores)
        to_a_near_one = q.path_kl(head(q.scores * (1 + 1e-7), mask), every)
        terms = to_a_near_one, jnp.where(q.probs > 0, q.path_entropy(every), 0)
        return (estimates, entropy), (exact(q.scores, p.scores), exact_entropy), terms

    estimates, exact, (kl, entropy) = compute(*rows)
    assert (kl >= 0).all(), "in spite of rounding"
    assert (entropy >= -1e-6).all()
    for got, want in zip(*map(jax.tree.leaves, (estimates, exact)), strict=True):
        assert difference(got, want) < 3e-6  # values, and gradients in the scores of both


@pytest.mark.parametrize("name", QUICK)
def test_straight_through_samples_have_the_gradient_of_the_probabilities(name):
    head = make_head(name, 5)
    scores, weight = scores_for(head, np.float32)[:6], np.arange(5, dtype=np.float32)

    @jax.jit
    def compute(scores):
        def surrogate(s):
            drawn = head(s).rsample_straight_through(seed=jax.random.key(0))
            return (drawn @ weight).sum(), drawn

        gradient, drawn = jax.grad(surrogate, has_aux=True)(scores)
        want = jax.grad(lambda s: (head.probs(s) @ weight).sum())(scores)
        return gradient, want, drawn, head(scores).sample(seed=jax.random.key(0))

    gradient, want, drawn, category = map(np.asarray, compute(scores))
    assert np.array_equal(drawn.argmax(-1), category)
    assert difference(drawn.sum(-1), np.ones(6)) < 1e-6
    assert difference(gradient, want) < 1e-6


# ------------------------------------------------------------------------------ company in JAX


@pytest.mark.parametrize("name", [slow("sparsemax"), "natural"])
def test_jit_vmap_and_grad_agree_with_plain_calls(name):
    head = make_head(name, 5)
    scores = scores_for(head, np.float32)[:4]
    value = np.arange(4)

    def loss(s, v):
        return head(s).log_prob(v) + head(s).entropy()

    def draw_and_differentiate(key, s, v):
        return head.sample(key, s), jax.value_and_grad(loss)(s, v)

    keys = jax.random.split(jax.random.key(0), 4)
    drawn, (losses, gradients) = jax.jit(jax.vmap(draw_and_differentiate))(keys, scores, value)
    assert difference(losses[0], loss(scores[0], value[0])) < 2e-6
    one = jax.jit(draw_and_differentiate)
    for i in range(4):
        drawn_alone, (_, gradient) = one(keys[i], scores[i], value[i])
        assert drawn[i] == drawn_alone
        assert difference(gradients[i], gradient, by_row=True) < 2e-6
    static = jax.jit(lambda head, s: head.probs(s), static_argnums=0)
    leafless = jax.jit(lambda head, s: head.probs(s))
    assert static.lower(head, scores).as_text() == leafless.lower(head, scores).as_text()


def test_heads_are_values():
    head = make_head("natural", 5, tail=0.05, mix=0.01)
    assert head == make_head("catnat-natural", 5, tail=0.05, mix=0.01)
    assert head != make_head("natural", 5, tail=0.05)
    assert head_names() == ("softmax", "sparsemax", "sigmoid", "natural") == catnat.head_names()[:4]
    assert len({head, pickle.loads(pickle.dumps(head))}) == 1
    assert jax.tree.leaves(head) == []
    with pytest.raises(AttributeError):
        head.mix = 0.5


@pytest.mark.parametrize("name", QUICK)
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
    assert shape_of(head.log_prob, np.zeros(head.num_scores), 1) == ()
    column = np.zeros((1, 5, 1), np.uint8)
    assert shape_of(head.log_prob, np.zeros((1, 2, head.num_scores)), column) == (1, 5, 2)


def test_the_output_layer_is_that_of_torch():
    order = np.random.default_rng(5).permutation(30).tolist()
    layer = catnat.TreeLinear(4, 30, "natural", frequent=[3, 7, 9], order=order)
    ours, parameters = TreeLinear.from_state_dict(layer.state_dict(), "natural")
    assert ours == TreeLinear(30, "natural", frequent=3, order=layer.order.tolist())
    hidden, plain = torch.randn(30, 4), TreeLinear(30)

    @jax.jit
    def compute(parameters, states):
        classes = jnp.arange(30)
        outside = ours.log_prob(parameters, states[:2], jnp.array([-1, 30]))
        drawn = ours.sample(jax.random.key(0), parameters, states[0], (4000,))
        of_a_new_layer = plain.init(jax.random.key(1), in_features=4)
        total = jnp.exp(plain.log_prob(of_a_new_layer, states, classes[:, None])).sum(0)
        return ours.log_prob(parameters, states, classes), outside, drawn, total

    log_probs, outside, drawn, total = compute(parameters, jnp.asarray(hidden.numpy()))
    assert difference(log_probs, layer.log_prob(hidden, torch.arange(30)).detach()) < 2e-6
    assert np.isnan(outside).all()
    counts = np.bincount(np.asarray(drawn), minlength=30)
    probs = layer.log_probs(hidden[0]).exp().detach().double().numpy()
    assert stats.chisquare(counts, 4000 * probs / probs.sum()).pvalue > 1e-4
    assert difference(total, np.ones(30)) < 2e-6
    with pytest.raises(ValueError, match="needs a tree head"):
        TreeLinear(30, "softmax")


@pytest.mark.parametrize("frequent", [0, [3, 7, 9]])
def test_an_output_layer_of_torch_has_its_loss_gradients_and_best_classes_in_jax(frequent):
    torch.manual_seed(0)
    layer = catnat.TreeLinear(4, 30, order=torch.randperm(30), frequent=frequent)
    ours, parameters = TreeLinear.from_state_dict(layer.state_dict())
    hidden, target = torch.randn(9, 4), torch.randint(30, (9,))
    target[2] = -100
    states = jnp.asarray(hidden.numpy())

    @jax.jit
    def compute(parameters):
        loss = jax.value_and_grad(ours.nll)(parameters, states, jnp.asarray(target.numpy()))
        return loss, ours.log_probs(parameters, states), ours.topk(parameters, states, 5)

    (loss, grads), log_probs, (values, classes) = compute(parameters)
    expected = layer.nll(hidden, target)
    expected.backward()
    assert difference(loss, expected.detach()) < 2e-6
    for name, parameter in layer.named_parameters():
        assert difference(grads[name], parameter.grad) < 2e-6
    assert difference(log_probs, layer.log_probs(hidden).detach()) < 2e-6
    assert difference(values, layer.topk(hidden, 5).values.detach()) < 2e-6
    assert np.array_equal(classes, layer.topk(hidden, 5).indices)


def test_an_order_of_an_output_layer_is_hashed_once():
    order = np.random.default_rng(0).permutation(1000)
    layer, same, other = (TreeLinear(1000, order=x) for x in (order, order.tolist(), order[::-1]))
    assert layer == same and hash(layer) == hash(same) and layer != other
    traced = []

    @partial(jax.jit, static_argnums=0)
    def compute(layer, parameters):
        traced.append(layer)
        return layer.log_prob(parameters, jnp.ones((1, 2)), jnp.array([5]))

    parameters = layer.init(jax.random.key(0), 2)
    first, second, third = (compute(x, parameters) for x in (layer, same, other))
    assert first == second != third and len(traced) == 2
    with pytest.raises(ValueError, match="with 'weight', got bias"):
        TreeLinear.from_state_dict({"bias": np.zeros(3)})


def test_a_million_categories_take_a_path():
    head = make_head("natural", 10**6)

    @jax.jit
    def log_prob_of_samples(scores):
        return head.log_prob(scores, head.sample(jax.random.key(0), scores, (3,)))

    scores = np.zeros(head.num_scores, np.float32)
    text = str(jax.make_jaxpr(head.log_prob)(scores, np.arange(3)))
    assert len(text.splitlines()) < 200 and "1000000]" not in text
    assert difference(log_prob_of_samples(scores), np.full(3, -6 * math.log(10))) < 1e-5


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("softmx", 4), {}, "unknown head 'softmx'; did you mean softmax? choose from softmax, "),
        (("natural", 4), {"tail": 0.5}, "tail must be 0 or lie in [1e-30, 0.5), got 0.5"),
    ],
)
def test_wrong_options_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_head(*arguments, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tail'"):
        make_head("softmax", 4, tail=0.1)


def test_wrong_arrays_are_named():
    head = make_head("natural", 5)
    q = head(jnp.zeros(4))
    other = make_head("natural", 6)(jnp.zeros(5))
    for call, error, message in (
        (lambda: head(jnp.zeros((2, 7))), ValueError, r"scores must have 4 .* got shape \(2, 7\)"),
        (lambda: head(jnp.zeros(4), jnp.ones(5)), TypeError, "array of bool, .* got float32"),
        (lambda: q.path_kl(other, 0), ValueError, "two trees of one size"),
    ):
        with pytest.raises(error, match=message):
            call()
    outside = jax.jit(head.log_prob)(jnp.zeros(4), jnp.array([4, 5, -1]))
    assert np.isnan(outside).tolist() == [False, True, True]


@one_server
@pytest.mark.slow
def test_jax_and_torch_stay_apart():
    code = "import sys, catnat.jax; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    code = "import sys, catnat.heads.flat, catnat.losses; print('jax' in sys.modules)"
    done = run_fresh("-c", code)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
