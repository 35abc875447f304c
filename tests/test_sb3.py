"""Policies with a head inside Stable-Baselines3: its contracts, and numbers that stay numbers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_fresh import one_server, run_fresh
from cases_sb3 import BOX, PICTURE, SATURATED, SMALL, Guess, same_parameters
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

import catnat.sb3
from catnat import HeadProbe, NaturalHead, make_head
from catnat.sb3 import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMaskableActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    HeadPPO,
)
from catnat.sb3.action_distributions import HeadDistribution, draw


def policy(head, action_space=None, kind=HeadActorCriticPolicy, observation_space=BOX, **options):
    space = action_space or spaces.Discrete(5)
    return kind(observation_space, space, lambda _: 1e-3, head=head, **options)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_trains_and_evaluates(head, algorithm):
    env = make_vec_env(Guess, 2, seed=0)
    few = SMALL if algorithm is PPO else {"seed": 0, "device": "cpu"}
    model = algorithm(HeadActorCriticPolicy, env, policy_kwargs={"head": head}, **few)
    before = model.policy.action_net.weight.clone()
    model.learn(64)
    assert not torch.equal(before, model.policy.action_net.weight)
    assert all(p.isfinite().all() for p in model.policy.parameters())
    mean, _ = evaluate_policy(model, make_vec_env(Guess, 1), 2, warn=False)
    assert 0 <= mean <= 8


def test_the_test_environment_is_a_proper_one():
    check_env(Guess(spaces.MultiDiscrete([2, 3])), warn=False)


@pytest.mark.parametrize("head", HEADS)
def test_predict(head):
    model = PPO(
        HeadActorCriticPolicy, make_vec_env(Guess, 2), policy_kwargs={"head": head}, **SMALL
    )
    single, several = BOX.sample(), np.stack([BOX.sample() for _ in range(7)])
    action, state = model.predict(single, deterministic=True)
    assert action.shape == () and state is None
    actions, _ = model.predict(several, deterministic=True)
    probs = model.policy.get_distribution(torch.as_tensor(several)).distribution.probs
    assert np.array_equal(actions, probs.argmax(-1).numpy())
    drawn = np.stack([model.predict(several)[0] for _ in range(200)])
    assert drawn.shape == (200, 7) and set(np.unique(drawn)) == set(range(5))


def test_deterministic_is_the_likeliest_leaf_not_the_greedy_descent():
    wide = torch.tensor([[0.45, 0.0, 0.28, 0.27]])  # greedy: right, as 0.55 > 0.45
    for name in ("sigmoid", "natural"):
        head = make_head(name, 4)
        actions = HeadDistribution(head).proba_distribution(head.inverse(wide)).mode()
        assert actions.item() == 0


def test_softmax_draws_what_stable_baselines_draws():
    ours, theirs = (
        PPO(kind, make_vec_env(Guess, 2, seed=0), **SMALL).learn(64)
        for kind in (HeadActorCriticPolicy, ActorCriticPolicy)
    )
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["model", "policy"])
def test_saving_keeps_head_and_options(head, kind, tmp_path):
    options = {"amplitude": 5.0, "center": 0.1} if head == "natural" else {}
    kwargs = {"head": head, "head_options": options, "uniform_mix": 0.01, "net_arch": [7]}
    model = PPO(HeadActorCriticPolicy, make_vec_env(Guess, 2), policy_kwargs=kwargs, **SMALL)
    model.learn(32)
    if kind == "model":
        model.save(tmp_path / "it")
        loaded = PPO.load(tmp_path / "it", env=make_vec_env(Guess, 2), device="cpu")
        copy = loaded.policy
    else:
        model.policy.save(str(tmp_path / "it"))
        copy = HeadActorCriticPolicy.load(str(tmp_path / "it"), device="cpu")
    assert same_parameters(model.policy, copy)
    assert copy.heads[0].name == head and copy.heads[0].mix == 0.01
    obs = torch.randn(6, 3)
    one, two = (p.get_distribution(obs).distribution.logits for p in (model.policy, copy))
    assert torch.equal(one, two)
    if head == "natural":
        assert copy.heads[0].inner.split.rate == pytest.approx(np.pi / 5)
    if kind == "model":
        loaded.set_env(make_vec_env(Guess, 2))
        loaded.learn(32)


@pytest.mark.parametrize("head", HEADS)
def test_multidiscrete(head):
    space = spaces.MultiDiscrete([2, 3, 5])
    model = PPO(
        HeadActorCriticPolicy,
        make_vec_env(Guess, 2, env_kwargs={"action_space": space}),
        policy_kwargs={"head": head},
        **SMALL,
    ).learn(64)
    obs = torch.randn(4, 3)
    _, log_prob, entropy = model.policy.evaluate_actions(obs, torch.tensor([[1, 2, 4]] * 4))
    parts = model.policy.get_distribution(obs).distribution
    assert [part.probs.shape[-1] for part in parts] == [2, 3, 5]
    want = sum(part.logits[:, k] for part, k in zip(parts, (1, 2, 4), strict=True))
    assert torch.allclose(log_prob, want)
    joint = torch.einsum("bi,bj,bk->bijk", *(part.probs for part in parts)).flatten(1)
    assert torch.allclose(entropy, -torch.special.xlogy(joint, joint).sum(-1), atol=1e-5)
    assert model.predict(BOX.sample(), deterministic=True)[0].shape == (3,)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("algorithm", [PPO, HeadPPO, A2C, MaskablePPO])
@pytest.mark.parametrize("space", [spaces.Discrete(1), spaces.MultiDiscrete([3, 1, 2])])
def test_actions_with_one_choice_are_trained(space, algorithm, head, tmp_path):
    kind = HeadMaskableActorCriticPolicy if algorithm is MaskablePPO else HeadActorCriticPolicy
    few = {"seed": 0, "device": "cpu"} if algorithm is A2C else SMALL
    env = make_vec_env(Guess, 2, env_kwargs={"action_space": space})
    model = algorithm(kind, env, policy_kwargs={"head": head}, **few).learn(32)
    model.save(tmp_path / "it")
    model = algorithm.load(tmp_path / "it", env, device="cpu")
    action, _ = model.predict(BOX.sample())
    assert space.contains(action if action.ndim else int(action))
    _, log_prob, entropy = model.policy.evaluate_actions(
        torch.randn(4, 3), torch.zeros(4, *(space.shape or (1,)))
    )
    if isinstance(space, spaces.Discrete):
        assert (log_prob == 0).all() and (entropy == 0).all()
    else:
        first, only, last = model.policy.action_dist.distribution
        assert torch.equal(only.probs, torch.ones(4, 1))
        assert torch.allclose(entropy, first.entropy() + last.entropy())


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO, A2C])
def test_binary_actions_are_trained(algorithm):
    space = spaces.MultiBinary(3)
    few = {"seed": 0, "device": "cpu"} if algorithm is A2C else SMALL
    env = make_vec_env(Guess, 2, env_kwargs={"action_space": space})
    model = algorithm(HeadActorCriticPolicy, env, policy_kwargs={"head": "sigmoid"}, **few)
    model.learn(32)
    assert space.contains(model.predict(BOX.sample())[0])
    shown, actions = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
    _, log_prob, entropy = model.policy.evaluate_actions(shown, actions)
    scores = model.policy.action_net(model.policy.mlp_extractor.forward_actor(shown))
    bernoulli = torch.distributions.Bernoulli(logits=scores)
    assert torch.allclose(log_prob, bernoulli.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(entropy, bernoulli.entropy().sum(-1), atol=1e-5)


def test_cnn_and_dict_observations():
    cnn = policy("natural", kind=HeadActorCriticCnnPolicy, observation_space=PICTURE)
    assert cnn.net_arch == [] and cnn.action_net.out_features == 4
    actions, values, _ = cnn(torch.zeros(3, 4, 36, 36, dtype=torch.uint8))
    assert actions.shape == (3,) and values.shape == (3, 1)
    both = spaces.Dict({"picture": PICTURE, "numbers": BOX})
    env = make_vec_env(Guess, 2, env_kwargs={"observation_space": both})
    model = PPO(HeadMultiInputActorCriticPolicy, env, policy_kwargs={"head": "natural"}, **SMALL)
    model.learn(32)


def test_probes_see_the_head():
    it = policy("natural")
    with HeadProbe(it) as probe:
        it(torch.zeros(2, 3))
    assert [(name, scores.shape) for name, _, scores in probe] == [("heads.0", (2, 4))]


def test_a_head_with_parameters_is_trained_and_saved():
    from catnat import SoftmaxHead
    from catnat.heads import _REGISTRY

    class Scaled(SoftmaxHead, name="scaled"):
        def __init__(self, num_categories):
            super().__init__(num_categories)
            self.scale = nn.Parameter(torch.ones(()))

        def log_probs(self, scores):
            return super().log_probs(self.scale * scores)

    try:
        it = policy("scaled")
        assert any(p is it.heads[0].scale for p in it.optimizer.param_groups[0]["params"])
        assert "heads.0.scale" in it.state_dict()
    finally:
        del _REGISTRY["scaled"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.MultiBinary([2, 3]),
        spaces.MultiDiscrete([[2, 3], [2, 3]]),
    ],
)
def test_other_action_spaces_are_refused(space):
    with pytest.raises(ValueError, match=r"Discrete action space, or a one-dim.*, got "):
        policy("natural", space)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3], start=[0, 1])]
)
def test_actions_that_do_not_begin_with_0_are_refused(space):
    with pytest.raises(ValueError, match="actions must begin with 0: wrap"):
        policy("natural", space)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "hard"}, "unknown head 'hard'; choose from softmax"),
        ({"head": "natural", "head_options": {"width": 1}}, "no option 'width'; its options: amp"),
        ({"head": make_head("natural", 5)}, "head must be a name"),
        ({"head": "sparsemax", "uniform_mix": 1.0}, r"uniform_mix must lie in \[0, 1\), got 1.0"),
        ({"head": "softmax", "uniform_mix": 0.1, "head_options": {"mix": 0.1}}, "give one of the"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy(**options)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("K", [2, 4, 18])
@pytest.mark.parametrize("mix", [0.0, 1e-3])
def test_saturated_scores_never_give_nan(head, K, mix):
    if head == "sparsemax" and not mix:
        mix = 1e-6
    it = make_head(head, K, mix=mix)
    rows = torch.tensor(SATURATED)[torch.randint(len(SATURATED), (500, it.num_scores))]
    scores = rows.requires_grad_()
    dist = HeadDistribution(it).proba_distribution(scores)
    actions = dist.sample()
    log_prob, entropy = dist.log_prob(actions), dist.entropy()
    assert log_prob.isfinite().all() and entropy.isfinite().all()
    assert (log_prob > -200).all()  # what was drawn was possible
    everything = torch.stack([dist.log_prob(torch.full_like(actions, k)) for k in range(K)])
    assert torch.allclose(everything.exp().sum(0), torch.ones(500), atol=1e-4)
    (log_prob.sum() + entropy.sum()).backward()
    assert scores.grad.isfinite().all()


def test_without_sb3_contrib_one_clear_line(monkeypatch):
    monkeypatch.delattr(catnat.sb3, "masked")
    monkeypatch.delitem(sys.modules, "catnat.sb3.masked")
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    monkeypatch.setitem(sys.modules, "sb3_contrib.common.maskable.policies", None)
    with pytest.raises(ImportError, match="HeadMaskableActorCriticPolicy needs sb3-contrib"):
        _ = catnat.sb3.HeadMaskableActorCriticPolicy
    with pytest.raises(AttributeError, match="no attribute 'HeadMasked'"):
        _ = catnat.sb3.HeadMasked


@one_server
def test_without_sb3_contrib_everything_else_is_imported():
    code = (
        "import sys; sys.modules['sb3_contrib'] = None\n"
        "from catnat.sb3 import *\n"
        "print(HeadPPO.__name__, 'HeadMaskableActorCriticPolicy' in globals())"
    )
    out = run_fresh("-c", code)
    assert out.stdout.strip() == "HeadPPO False", out.stderr


def test_with_sb3_contrib_everything_is_imported():
    names: dict[str, object] = {}
    exec("from catnat.sb3 import *", names)
    assert names["HeadMaskableActorCriticPolicy"] is HeadMaskableActorCriticPolicy


def test_sparsemax_keeps_every_action_possible():
    assert policy("sparsemax").heads[0].mix == 1e-3
    assert type(policy("natural").heads[0]) is NaturalHead
    dist = policy("sparsemax").action_dist.proba_distribution(torch.tensor([[9.0, 0, 0, 0, 0]]))
    want = [0.999 + 2e-4, *[2e-4] * 4]
    assert torch.allclose(dist.distribution.probs, torch.tensor([want]))


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    drawn = draw(make_head("softmax", 4)(probs.clamp_min(1e-38).log().expand(20000, 4)))
    share = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(share, probs, atol=0.015) and share[3] == 0


def test_draws_are_those_of_multinomial():
    dist = policy("natural").action_dist.proba_distribution(torch.randn(50, 4))
    torch.manual_seed(5)
    mine = dist.sample()
    torch.manual_seed(5)
    assert torch.equal(mine, torch.multinomial(dist.distribution.probs, 1)[:, 0])
