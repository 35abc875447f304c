"""The heads and models of the study, and the VAE in plain torch that catnat's is checked by."""

import copy
import runpy
import sys
import types
from pathlib import Path
from unittest.mock import patch

import gymnasium
import numpy as np
import pytest
import torch
from cases_callbacks import quiet_trainer
from torch.utils.data import DataLoader

from catnat import SigmoidHead, make_head
from catnat.cli.names import HEADS
from catnat.datamodules.environments import make_env
from catnat.heads.base import REGISTRY
from catnat.lit_modules import DiscreteVAE

PAPER = Path(__file__).parents[2] / "paper"


def test_the_exact_elbo_is_the_mean_of_many_sampled_ones():
    kind = runpy.run_path(str(PAPER / "mechanism" / "small_vae.py"))["SmallVAE"]
    torch.manual_seed(0)
    model, images = kind("sigmoid", num_latents=2, num_categories=3), torch.rand(4, 1, 28, 28)
    assert model.codes.shape == (9, 2, 3)
    with torch.no_grad():
        for weights in model.decoder.parameters():
            weights *= 5  # latents matter
        q = model(images)
        exact, model.exact = model.loss(images, q), False
        sampled = torch.stack([model.loss(images, q) for _ in range(400)])
    error = float(sampled.std()) / 400**0.5
    assert float(exact) == pytest.approx(float(sampled.mean()), abs=4 * error)
    assert sampled.std() > 1


@pytest.fixture
def mechanism():
    """The heads of the study by name, registered for the length of a test."""
    ours = {name: REGISTRY[name] for name in HEADS}  # a plan may have imported the others
    with patch.dict(REGISTRY, ours, clear=True):
        runpy.run_path(str(PAPER / "mechanism" / "mechanism_heads.py"))
        yield {name: make_head(name, 8) for name in REGISTRY if name not in ours}


def test_a_transplanted_head_begins_with_the_distributions_of_the_old_one(monkeypatch):
    program = runpy.run_path(str(PAPER / "mechanism" / "transplant.py"))
    monkeypatch.setitem(program["transplanted"].__globals__, "FITTING_STEPS", 600)
    torch.manual_seed(0)
    images = torch.rand(200, 1, 28, 28)
    data = types.SimpleNamespace(train_dataloader=lambda: images.split(100))
    model = program["VAE"]("softmax", 2, 4)
    with torch.no_grad():
        model.encoder[-1].weight *= 40
    new, left = program["transplanted"](model, "sigmoid", data, steps=10_000)
    assert isinstance(new.head, SigmoidHead) and new.encoder[-1].out_features == 2 * 3
    q = new.eval()(images)
    old = model.eval()(images)
    assert left < 0.02
    assert (q.probs - old.probs).abs().mean() < 0.03 < 0.1 < (old.probs - 0.25).abs().mean()
    for name, weights in new.decoder.state_dict().items():
        assert torch.equal(weights, model.decoder.state_dict()[name])
    assert new.annealed_temperature(0) == model.annealed_temperature(10_000) < 1


def test_a_probing_vae_gives_its_decoder_the_tree_and_charges_uneven_use_and_early_certainty():
    program = runpy.run_path(str(PAPER / "mechanism" / "probing_vae.py"))
    for decoder, first in (("tree", [3, 2, 1, 1, 0, 0, 0, 0]), ("copies", [3] + 7 * [0])):
        features = program["category_features"](decoder, 8)
        torch.testing.assert_close(3 * features[0] @ features.T, torch.tensor(first).float())
    images, losses = torch.rand(5, 1, 28, 28), []
    options = {"head": "sigmoid", "num_latents": 2, "num_categories": 8}
    for even, early in ((0.0, 1.0), (2.0, 1.0), (0.0, 3.0)):
        torch.manual_seed(0)
        model = program["ProbingVAE"]("tree", even, 3, early, **options)
        with torch.no_grad():
            model.encoder[-1].weight *= 50
        model.prepare_step(1500)  # of 3,000: half of the way
        losses.append(model.step_loss(images))
    mean_q, kl = model(images).probs.mean(0), model.kl(model(images)).mean()
    price = 2 * (mean_q * (8 * mean_q).log()).sum()
    assert price > 0.1
    torch.testing.assert_close(losses[1] - losses[0], price, atol=2e-3, rtol=0)
    torch.testing.assert_close(losses[2] - losses[0], kl, atol=2e-3, rtol=0)


def log_probs_and_gradient(head, scores, weights):
    scores = scores.clone().requires_grad_()
    log_probs = head.log_probs(scores)
    return log_probs.detach(), torch.autograd.grad((weights * log_probs).sum(), scores)[0]


def test_scales_of_the_mechanism_study_are_those_of_the_haar_basis(mechanism):
    def slope(name):
        head = mechanism[name] if name in mechanism else make_head(name, 8)
        return torch.func.jacrev(head.log_probs)(torch.zeros(head.num_scores))

    torch.testing.assert_close(slope("sigmoid-flat"), slope("softmax-haar")[:, 1:])
    for name in ("softmax-paths", "sigmoid-coupled-0.5", "sigmoid-opposed-1"):
        torch.testing.assert_close(slope("sigmoid"), slope(name))
    torch.testing.assert_close(slope("sigmoid-steep"), slope("softmax-steep"))
    norms = slope("softmax-steep").norm(dim=0)
    torch.testing.assert_close(norms, torch.tensor([2.0, 1, 1, 0.5, 0.5, 0.5, 0.5]))
    torch.testing.assert_close(slope("softmax-scaled-4"), 4 * slope("softmax"))
    torch.testing.assert_close(slope("sigmoid-scaled-2"), 2 * slope("sigmoid"))


def test_heads_of_the_mechanism_study_change_one_thing(mechanism):
    torch.manual_seed(0)
    weights = torch.randn(5, 8)
    assert len(mechanism) == 46
    for name, head in mechanism.items():
        scores = torch.randn(5, head.num_scores)
        values, gradient = log_probs_and_gradient(head, scores, weights)
        torch.testing.assert_close(values.logsumexp(-1), torch.zeros(5), atol=1e-5, rtol=0)
        assert head.saturated(scores).shape == scores.shape
        if hasattr(head, "Q"):
            torch.testing.assert_close(values, head.inner.log_probs(scores @ head.Q))
        if name in ("sigmoid-coupled-0", "sigmoid-coupled-1"):
            equal = mechanism["softmax-paths"] if head.coupling else make_head("sigmoid", 8)
            torch.testing.assert_close(values, equal.log_probs(scores), atol=1e-5, rtol=1e-4)
        if "chain" in name or hasattr(head, "Q") or hasattr(head, "coupling"):
            p = values.exp()[..., None, None]
            slopes = torch.func.vmap(torch.func.jacrev(head.log_probs))(scores)
            expected = (p * slopes[..., None] * slopes[..., None, :]).sum(1)
            if name != "softmax-paths-gated":  # whose gradient is another
                torch.testing.assert_close(head.fisher(scores), expected, atol=1e-5, rtol=1e-4)
            continue
        plain, before = log_probs_and_gradient(head.inner, scores, weights)
        torch.testing.assert_close(values, plain)
        if "ungated" in name:
            softmax = name.startswith("softmax")
            reached = plain.exp() if softmax else head.inner.node_probs(scores)
            before = before / (reached + head.damping)
        elif "levels" in name:
            before = before * torch.tensor([1.0, 2, 2, 4, 4, 4, 4])
        elif "natural-gradient" in name:
            metric = head.inner.fisher(scores) + head.damping * torch.eye(head.num_scores)
            before = torch.linalg.solve(metric, before)
        elif "gradient" in name:  # that of the other head, at the same distribution
            _, before = log_probs_and_gradient(head.other, head.other.inverse(plain.exp()), weights)
        torch.testing.assert_close(gradient, before, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_the_vae_agrees_with_the_one_in_plain_torch():
    torch.manual_seed(0)
    plain = runpy.run_path(str(PAPER / "vae" / "plain_vae.py"))["VAE"](3, 4)
    model = DiscreteVAE("softmax", 3, 4)
    for name in ("encoder", "decoder"):
        getattr(plain, name).load_state_dict(getattr(model, name).state_dict())
    images = torch.rand(16, 1, 28, 28)
    (metrics,) = quiet_trainer().test(model, DataLoader(images, 6), verbose=False)
    model.eval()
    plain.eval()
    with torch.no_grad():
        q = model(images)
        z = torch.eye(4)[torch.randint(4, (16, 3))]
        assert torch.allclose(plain.log_q(images), q.logits, atol=1e-6)
        assert torch.allclose(
            plain.distortion(z, images), model.reconstruction(images, z), rtol=1e-5
        )
        assert metrics["test/nll"] == pytest.approx(plain.nll(images).mean().item(), abs=0.2)
        elbo = torch.stack([plain.elbo(images) for _ in range(200)]).mean().item()
        assert metrics["test/elbo"] == pytest.approx(elbo, abs=0.2)


def test_episodes_are_in_one_part_and_a_vae_takes_their_frames(monkeypatch, tmp_path):
    program = runpy.run_path(str(PAPER / "frames" / "make_frames.py"))

    def short_episode(game, number):  # its frames have its number as their gray
        return np.full((2 + number % 3, 210, 160), number, np.uint8)

    monkeypatch.setitem(program["main"].__globals__, "play", short_episode)
    words = ["make_frames.py", str(tmp_path / "frames.npz"), "--episodes", "20"]
    monkeypatch.setattr(sys, "argv", words)
    program["main"]()

    module = runpy.run_path(str(PAPER / "frames" / "frames.py"))
    data = module["Frames"](str(tmp_path), batch_size=20)
    data.setup()
    episodes = {part: set(images.unique().tolist()) for part, images in data.images.items()}
    assert episodes["test"] == {0, 10} and episodes["val"] == {1, 11}
    assert episodes["train"] == set(range(20)) - episodes["test"] - episodes["val"]

    model = module["FrameVAE"]("sigmoid", 3, 4)
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == model.reconstruct(batch).shape == (20, 1, 64, 64)
    assert model.step_loss(batch).isfinite()


def test_an_episode_follows_from_game_and_seed(monkeypatch):
    program = runpy.run_path(str(PAPER / "frames" / "make_frames.py"))
    monkeypatch.setitem(program["play"].__globals__, "LONGEST", 240)
    frames = program["play"]("pong", 1)
    assert frames.shape == (10, 210, 160)
    assert np.array_equal(frames, program["play"]("pong", 1))
    assert not np.array_equal(frames, program["play"]("pong", 2))


def test_copied_actions_play_cart_pole(monkeypatch):
    monkeypatch.syspath_prepend(PAPER / "games")
    name = "copied_actions:CopiedCartPole-v1"
    copied = make_env(name, 7, env_kwargs={"num_actions": 18}, seed=5)
    env = make_env("CartPole-v1", 7, seed=5)
    assert copied.action_space == gymnasium.spaces.Discrete(18)
    assert np.array_equal(copied.reset(), env.reset())
    actions = np.array([0, 1, 2, 3, 7, 16, 17])
    assert np.array_equal(copied.step(actions)[0], env.step(actions % 2)[0])


@pytest.mark.parametrize(("changing", "visible"), [(True, False), (True, True), (False, False)])
def test_masked_ranks_pays_allowed_actions_by_their_value(monkeypatch, changing, visible):
    monkeypatch.syspath_prepend(PAPER / "masks")
    name = "masked_ranks:MaskedRanks-v0"
    env = gymnasium.make(name, changing=changing, visible=visible)
    observation, _ = env.reset(seed=0)
    values = sys.modules["masked_ranks"].VALUES
    masks = []
    for _ in range(50):
        mask, state = env.unwrapped.action_masks(), observation[:8]
        assert np.array_equal(observation[8:], mask if visible else [])
        allowed = np.flatnonzero(mask)
        rewards = {}
        for action in allowed:
            game = copy.deepcopy(env.unwrapped)
            rewards[action] = game.step(action)[1]
        with pytest.raises(ValueError, match="not allowed"):
            env.unwrapped.step(np.flatnonzero(~mask)[0])
        assert len(allowed) == 20
        assert max(rewards.values()) == pytest.approx(1)
        assert np.mean(list(rewards.values())) == pytest.approx(0, abs=1e-6)
        best = max(allowed, key=lambda action: values[action] @ state)
        assert best == max(rewards, key=rewards.__getitem__)
        masks.append(mask)
        observation = env.step(best)[0]
    assert (len({mask.tobytes() for mask in masks}) > 1) == changing
