"""Spaces of several actions: choices of one, heads that actions share, heads with weights."""

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_sb3 import BOX, SMALL, Guess, HeadMaskablePolicy, Rows, cartpole, choices
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from catnat import CategoricalHead, SoftmaxHead
from catnat.callbacks import FisherMonitorSB3
from catnat.heads.base import REGISTRY
from catnat.sb3 import HeadA2C, HeadActorCriticPolicy, HeadPPO

FEW = {A2C: {"seed": 0, "device": "cpu"}, HeadA2C: {"seed": 0, "device": "cpu"}}


def policy(space, head="natural", **options):
    return HeadActorCriticPolicy(BOX, space, lambda _: 1e-3, head=head, **options)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("space", [spaces.Discrete(1), spaces.MultiDiscrete([1, 3])])
def test_an_action_with_one_choice_is_certain(space, head):
    env = make_vec_env(Guess, 2, env_kwargs={"action_space": space})
    model = HeadPPO("MlpPolicy", env, policy_kwargs={"head": head}, masks=False, **SMALL).learn(64)
    it = model.policy
    assert it.action_net.out_features == sum(one.num_scores for one in it.action_dist.heads)
    actions, _, log_prob = it(torch.randn(6, 3))
    assert actions.shape == (6, *space.shape) and not actions.reshape(6, -1)[:, 0].any()
    entropy = it.get_distribution(torch.randn(6, 3)).entropy()
    if isinstance(space, spaces.Discrete):
        assert not log_prob.any() and not entropy.any()
    else:
        assert log_prob.exp().sub(1 / 3).abs().max() < 0.2, "the other action has three choices"
    deterministic, _ = model.predict(BOX.sample(), deterministic=True)
    assert space.contains(deterministic)


@pytest.mark.parametrize("algorithm", [PPO, A2C, HeadA2C, MaskablePPO])
@pytest.mark.parametrize("space", [spaces.Discrete(1), spaces.MultiDiscrete([1, 3, 1])])
def test_every_algorithm_learns_with_one_choice(space, algorithm, tmp_path):
    kind = HeadMaskablePolicy if algorithm is MaskablePPO else HeadActorCriticPolicy
    env = make_vec_env(Guess, 2, env_kwargs={"action_space": space})
    if algorithm is HeadA2C:
        env = make_vec_env(Lone, 2, env_kwargs={"action_space": space})
    model = algorithm(kind, env, **FEW.get(algorithm, SMALL)).learn(64)
    model.save(tmp_path / "it")
    copy = algorithm.load(tmp_path / "it", device="cpu")
    shown = BOX.sample()
    assert np.array_equal(*(m.predict(shown, deterministic=True)[0] for m in (model, copy)))


class Lone(Guess):
    action_masks = property()


def test_the_monitor_of_a_policy_without_scores_writes_nothing():
    env = make_vec_env(Lone, 2, env_kwargs={"action_space": spaces.Discrete(1)})
    model = PPO(HeadActorCriticPolicy, env, **SMALL)
    rows = Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(64, FisherMonitorSB3())
    assert not any(tag.startswith("fim") for row in rows.rows.values() for tag in row)
    env = make_vec_env(Lone, 2, env_kwargs={"action_space": spaces.MultiDiscrete([1, 3])})
    model = PPO(HeadActorCriticPolicy, env, **SMALL)
    model.set_logger(Logger(None, [rows]))
    model.learn(64, FisherMonitorSB3())
    assert any(tag.startswith("fim") for row in rows.rows.values() for tag in row)


# -- actions that share a head --------------------------------------------------------------------

MIXED = spaces.MultiDiscrete([3, 2, 3, 5, 2])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", ["prune", "renormalize"])
def test_actions_that_share_a_head_are_what_their_own_heads_give(head, masked, mode):
    it = policy(MIXED, head, mask_mode=mode)
    assert [h.num_categories for h in it.heads] == [3, 2, 5]
    dist = it.action_dist
    heads = dist.heads
    assert [h.num_categories for h in heads] == MIXED.nvec.tolist()
    assert heads[0] is heads[2] and heads[1] is heads[4]
    scores = torch.randn(64, sum(dist.widths), requires_grad=True)
    masks = torch.rand(64, 15) < 0.5
    masks[:, [0, 3, 5, 8, 13]] = True
    with dist.using(masks=masks if masked else None):
        dist.proba_distribution(scores)
    actions = dist.sample()
    log_prob, entropy, likeliest = dist.log_prob(actions), dist.entropy(), dist.mode()
    parts = dist.distribution
    assert [part.probs.shape for part in parts] == [(64, K) for K in MIXED.nvec]
    columns = scores.split(dist.widths, -1)
    own_masks = masks.split(dist.sizes, -1)
    wanted_log_prob = wanted_entropy = torch.zeros(64)
    for i, (one, part) in enumerate(zip(heads, parts, strict=True)):
        if mode == "prune" or not masked:
            own = one(columns[i], own_masks[i] if masked else None)
            assert torch.allclose(part.probs, own.probs, atol=1e-6)
        if masked:
            assert own_masks[i].gather(1, actions[:, i : i + 1]).all()
        assert torch.equal(likeliest[:, i], part.probs.argmax(-1))
        wanted_log_prob = wanted_log_prob + part.log_prob(actions[:, i])
        wanted_entropy = wanted_entropy + part.entropy()
    assert torch.allclose(log_prob, wanted_log_prob, atol=1e-5)
    assert torch.allclose(entropy, wanted_entropy, atol=1e-5)
    (log_prob.sum() + entropy.sum()).backward()
    assert scores.grad.isfinite().all() and scores.grad.any(0).sum() > 4


def test_samples_of_each_action_follow_its_own_scores():
    it = policy(MIXED, "softmax")
    probs = [torch.rand(K).add(0.1) for K in MIXED.nvec]
    probs = [p / p.sum() for p in probs]
    scores = torch.cat([p.log() for p in probs]).expand(4000, -1)
    torch.manual_seed(0)
    drawn = it.action_dist.proba_distribution(scores).sample()
    for column, p in zip(drawn.unbind(1), probs, strict=True):
        shares = torch.bincount(column, minlength=len(p)) / 4000
        assert torch.allclose(shares, p, atol=4 * 0.5 / 4000**0.5)


def test_one_call_of_a_head_serves_32_bits():
    it = policy(spaces.MultiBinary(32))
    calls = []
    it.heads[0].register_forward_hook(lambda *_: calls.append(1))
    actions, _, log_prob = it(torch.randn(5, 3))
    assert len(calls) == 1 and len(it.heads) == 1
    assert actions.shape == (5, 32) and choices(spaces.MultiBinary(32)) == [2] * 32
    assert torch.allclose(log_prob, torch.full((5,), 32 * np.log(0.5).item()), atol=0.5)


def test_bits_have_the_entropy_and_log_probabilities_of_a_bernoulli():
    it = policy(spaces.MultiBinary(7), "sigmoid").action_dist
    scores = torch.tensor([0.0, 1.0, -3.0, 20.0, -40.0, 1e4, -1e9]).expand(3, 7).clone()
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    actions = torch.randint(2, (3, 7)).float()
    it.proba_distribution(ours)
    bernoulli = torch.distributions.Bernoulli(logits=theirs[:, :5])
    assert torch.allclose(it.entropy(), bernoulli.entropy().sum(-1), atol=1e-5)
    fair = actions.clone()
    fair[:, 5], fair[:, 6] = 1, 0  # certain: neither probability has a gradient
    assert torch.allclose(it.log_prob(fair), bernoulli.log_prob(fair[:, :5]).sum(-1), rtol=1e-4)
    (it.log_prob(fair).sum() + it.entropy().sum()).backward()
    (bernoulli.log_prob(fair[:, :5]).sum() + bernoulli.entropy().sum()).backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert torch.equal(it.sample()[:, 3:], torch.tensor([[1, 0, 1, 0]] * 3))


@pytest.mark.parametrize("cause", ["scores", "weights"])
def test_nan_raises_also_where_the_scores_are_finite(cause):
    class Weighted(SoftmaxHead, name="weighted-for-nan"):
        def __init__(self, num_categories):
            super().__init__(num_categories)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def log_probs(self, scores):
            return super().log_probs(scores * self.scale)

    try:
        it = policy(spaces.MultiDiscrete([3, 3]), "weighted-for-nan")
        it(torch.randn(4, 3))
        broken = it.action_net.bias if cause == "scores" else it.heads[1].scale
        broken.data.fill_(torch.nan)
        with pytest.raises(ValueError, match="probabilities are NaN"):
            it(torch.randn(4, 3))
    finally:
        del REGISTRY["weighted-for-nan"]


def test_a_head_with_weights_is_not_shared():
    class Scaled(SoftmaxHead, name="scaled-by-a-weight"):
        def __init__(self, num_categories):
            super().__init__(num_categories)
            self.scale = torch.nn.Parameter(torch.ones(()))

    try:
        it = policy(spaces.MultiDiscrete([3, 3]), "scaled-by-a-weight")
        assert isinstance(it.heads[0], CategoricalHead) and it.heads[0] is not it.heads[1]
        assert it(torch.randn(4, 3))[0].shape == (4, 2)
    finally:
        del REGISTRY["scaled-by-a-weight"]


# -- rollouts -------------------------------------------------------------------------------------


def test_algorithms_with_heads_refuse_a_policy_without_one_when_they_are_made():
    box = make_vec_env("Pendulum-v1", 1)
    for algorithm in (HeadPPO, HeadA2C):
        with pytest.raises(ValueError, match=f"{algorithm.__name__} needs a policy with a head"):
            algorithm(PPO.policy_aliases["MlpPolicy"], box)


def test_a_rollout_can_be_collected_before_learning():
    model = HeadPPO("MlpPolicy", cartpole(), **SMALL)
    _, callback = model._setup_learn(64)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    assert model.rollout_buffer.full
    model.train()


def test_a_game_that_is_cut_off_without_a_last_observation_has_no_value():
    class Cut(Guess):
        action_masks = property()

        def step(self, action):
            shown, reward, _, _, info = super().step(action)
            return shown, reward, False, self.count == 8, info

    def learned(algorithm):
        env = make_vec_env(Cut, 2, seed=0)
        step_wait = env.step_wait

        def without_last_observations():
            *others, infos = step_wait()
            for info in infos:
                info.pop("terminal_observation", None)
            return *others, infos

        env.step_wait = without_last_observations
        return algorithm(HeadActorCriticPolicy, env, **SMALL).learn(64)

    ours, theirs = (learned(algorithm).rollout_buffer for algorithm in (HeadPPO, PPO))
    assert np.array_equal(*(np.sort(buffer.rewards, axis=None) for buffer in (ours, theirs)))
    assert (ours.rewards <= 1).all(), "no value was added"
