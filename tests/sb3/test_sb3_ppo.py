"""HeadPPO: the steps of Stable-Baselines3, the options of CleanRL, and lost numbers."""

import math

import pytest
import torch
from cases_sb3 import (
    BOTH,
    PICTURE,
    SMALL,
    Spoil,
    Unmasked,
    cartpole,
    distance,
    every_head_with,
    learn,
)
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy

from catnat.sb3 import HeadPPO, NonFinite, cleanrl_schedule

STEPS = {
    "plain": {},
    "clipped values": {"clip_range_vf": 0.01, "ent_coef": 0.1, "normalize_advantage": False},
    "target kl": {"target_kl": 1e-5, "learning_rate": 0.01},
    "odd batches, falling rate": {"batch_size": 24, "learning_rate": lambda left: 0.01 * left},
    "falling clip": {"clip_range": lambda left: 0.01 + 0.1 * left, "gae_lambda": 0.5},
}


@pytest.mark.parametrize(("head", "options"), every_head_with(*STEPS))
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_takes_the_steps_of_stable_baselines(head, options):
    options = {"n_steps": 32, "n_epochs": 3} | STEPS[options]
    theirs, ours = (learn(kind, head=head, **options) for kind in (PPO, HeadPPO))
    assert ours.num_timesteps == theirs.num_timesteps == 256
    assert distance(ours, theirs) < 1e-6
    logged, wanted = ours.logger.name_to_value, theirs.logger.name_to_value
    assert logged.keys() == wanted.keys() | {"train/grad_norm"}
    for tag, value in wanted.items():
        assert logged[tag] == pytest.approx(value, abs=1e-4, rel=1e-3), tag


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        ("CnnPolicy", {"observation_space": PICTURE}),
        ("MultiInputPolicy", {"observation_space": BOTH}),
        ("MlpPolicy", {"action_space": spaces.MultiDiscrete([2, 3])}),
        ("MlpPolicy", {"observation_space": spaces.Discrete(6)}),
    ],
)
def test_takes_their_steps_in_every_space(kind, env):
    theirs, ours = (
        learn(algorithm, make_vec_env(Unmasked, 2, seed=0, env_kwargs=env), kind)
        for algorithm in (PPO, HeadPPO)
    )
    assert distance(ours, theirs) < 1e-6


def test_value_losses():
    values = torch.tensor([0.0, 0.5, 3.0, -2.0], requires_grad=True)
    old = torch.full((4,), 0.1)
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0])
    losses = {}
    for kind in ("sb3", "cleanrl"):
        model = HeadPPO("MlpPolicy", cartpole(), value_loss=kind, clip_range_vf=0.2, **SMALL)
        batch = {"values": old, "returns": returns}
        losses[kind] = model._value_loss(values, batch, torch.tensor(0.2))
    clipped = (values.detach().clamp(-0.1, 0.3) - returns).square()
    plain = (values.detach() - returns).square()
    assert losses["sb3"].item() == pytest.approx(clipped.mean().item())
    assert losses["cleanrl"].item() == pytest.approx(torch.max(plain, clipped).mean().item())
    # A value that was moved too far, away from its target, finds back with CleanRL's loss only.
    (stuck,), (free,) = (torch.autograd.grad(loss, values) for loss in losses.values())
    assert stuck[3] == 0 and free[3] < 0


def test_cleanrl_clips_values_as_it_clips_the_policy():
    one, other = (
        learn(value_loss="cleanrl", clip_range=0.02, clip_range_vf=clip) for clip in (None, 0.02)
    )
    assert distance(one, other) == 0
    assert one.logger.name_to_value["train/clip_range_vf"] == 0.02
    assert distance(one, learn(clip_range=0.02, clip_range_vf=0.02)) > 0


@pytest.mark.parametrize(
    ("total", "batch", "updates"), [(2048, 256, 8), (2000, 256, 8), (50_000, 256, 196), (9, 10, 1)]
)
def test_the_rate_falls_also_where_the_batch_does_not_divide_the_total(total, batch, updates):
    rate = cleanrl_schedule(1.0, total, batch)
    for update in range(1, updates + 2):  # one more than there are
        assert rate(1 - update * batch / total) == pytest.approx(1 - (update - 1) / updates)
    assert rate(1.0) == 1


LOST = {
    "log_probs": (-math.inf, "(policy_gradient_loss|approx_kl|grad_norm) is (inf|nan)"),
    "returns": (math.nan, "value_loss is nan"),
    "advantages": (math.inf, "policy_gradient_loss is nan"),
    "values": (0.0, None),
}


@pytest.mark.parametrize(("head", "name"), every_head_with(*LOST))
def test_lost_numbers_stop_training(head, name):
    value, what = LOST[name]
    options = SMALL | {"batch_size": 8, "policy_kwargs": {"head": head}}
    model = HeadPPO("MlpPolicy", cartpole(2), **options)
    spoil = Spoil(name, value)
    if what is None:
        model.learn(160, spoil)
        return
    with pytest.raises(NonFinite, match=rf"{what} in the update after 96 steps"):
        model.learn(160, spoil)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="unknown value_loss 'mse'; choose from sb3, cleanrl"):
        HeadPPO("MlpPolicy", cartpole(), value_loss="mse")
    with pytest.raises(ValueError, match="needs a policy with a head, got"):
        HeadPPO(ActorCriticPolicy, cartpole())
    with pytest.raises(ValueError, match="needs a Discrete"):
        HeadPPO("MlpPolicy", make_vec_env("Pendulum-v1"))
    with pytest.warns(UserWarning, match="nothing is replayed.*not a CUDA device"):
        learn(capture=True)


def test_learns():
    env = make_vec_env("CartPole-v1", 8, seed=0)
    rate = cleanrl_schedule(1e-3, 50_000, 256)
    model = HeadPPO(
        "MlpPolicy",
        env,
        rate,
        n_steps=32,
        batch_size=256,
        n_epochs=12,
        gae_lambda=0.8,
        gamma=0.98,
        value_loss="cleanrl",
        policy_kwargs={"head": "natural"},
        seed=0,
        device="cpu",
    )
    test = make_vec_env("CartPole-v1", 4, seed=9)
    before, _ = evaluate_policy(model, test, 8, deterministic=False)
    after, _ = evaluate_policy(model.learn(4096), test, 8, deterministic=False)
    assert before < 30 and after > 45
