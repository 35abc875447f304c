"""Policies with a head inside Stable-Baselines3: its contracts, and numbers that stay numbers."""

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_sb3 import BOX, SMALL, Guess, distance, every_head_with, same_parameters
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy

from catnat import NaturalHead, make_head
from catnat.sb3 import HeadActorCriticPolicy, HeadPPO
from catnat.sb3.distributions import HeadDistribution


def policy(head, action_space=None, kind=HeadActorCriticPolicy, observation_space=BOX, **options):
    space = action_space or spaces.Discrete(5)
    return kind(observation_space, space, lambda _: 1e-3, head=head, **options)


def test_deterministic_is_the_likeliest_leaf_not_the_greedy_descent():
    wide = torch.tensor([[0.45, 0.0, 0.28, 0.27]])  # greedy: right, as 0.55 > 0.45
    for name in ("sigmoid", "natural"):
        head = make_head(name, 4)
        actions = HeadDistribution([head]).proba_distribution(head.inverse(wide)).mode()
        assert actions.item() == 0


def test_softmax_draws_what_stable_baselines_draws():
    ours, theirs = (
        PPO(kind, make_vec_env(Guess, 2, seed=0), **SMALL).learn(64)
        for kind in (HeadActorCriticPolicy, ActorCriticPolicy)
    )
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize(("head", "kind"), every_head_with("model", "policy"))
def test_saving_keeps_head_and_options(head, kind, tmp_path):
    options = {"amplitude": 5.0, "center": 0.1} if head == "natural" else {}
    kwargs = {"head": head, "head_options": options | {"mix": 0.01}, "net_arch": [7]}
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
        assert copy.heads[0].inner.activation.rate == pytest.approx(np.pi / 5)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "natural", "action_space": spaces.Box(-1, 1, (2,))}, "Discrete action space, or"),
        ({"head": "natural", "action_space": spaces.Discrete(3, start=5)}, "must begin with 0"),
        ({"head": "natural", "head_options": {"width": 1}}, "no option 'width'; choose from amp"),
        ({"head": "sparsemax", "head_options": {"mix": 1.0}}, r"mix must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy(**options)


def test_sparsemax_keeps_every_action_possible():
    assert policy("sparsemax").heads[0].mix == 1e-3
    assert type(policy("natural").heads[0]) is NaturalHead
    dist = policy("sparsemax").action_dist.proba_distribution(torch.tensor([[9.0, 0, 0, 0, 0]]))
    want = [0.999 + 2e-4, *[2e-4] * 4]
    assert torch.allclose(dist.distribution.probs, torch.tensor([want]))
