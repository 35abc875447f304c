"""PPO and A2C of the command line: which class learns, and what is refused."""

import pytest
import stable_baselines3
from cases_sb3 import Guess, Unmasked, cartpole
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor

from catnat.datamodules import environments
from catnat.datamodules.environments import make_env
from catnat.sb3 import HeadA2C, HeadPPO
from catnat.sb3.policies import HeadActorCriticPolicy
from catnat.sb3.recipes import A2C, PPO, Training

SMALL = {"n_steps": 8, "batch_size": 8}


def made(kind, env=None, **options):
    return kind("natural", **options).make(env or cartpole(1), 1000, "cpu", 0)


def test_on_a_cpu_ppo_is_the_one_of_stable_baselines_with_our_policy():
    model = made(PPO, **SMALL)
    assert type(model) is stable_baselines3.PPO and type(model.policy) is HeadActorCriticPolicy
    assert type(made(PPO, algorithm="head", **SMALL)) is HeadPPO
    assert type(made(A2C)) is HeadA2C
    assert type(made(A2C, algorithm="sb3")) is stable_baselines3.A2C


@pytest.mark.parametrize(
    ("options", "env", "reason"),
    [
        ({"value_loss": "cleanrl"}, None, "the value loss of CleanRL"),
        ({"capture": True}, None, "CUDA graphs"),
        ({}, lambda: make_vec_env(Guess, 1), "masks of actions"),
        ({}, lambda: make_env("Breakout", 1, "native"), "native Atari games force actions"),
    ],
)
def test_what_needs_head_ppo_gets_it_and_stock_ppo_refuses_it(options, env, reason):
    env = env() if env else cartpole(1)
    assert type(made(PPO, env, **SMALL, **options)) is HeadPPO
    with pytest.raises(ValueError, match=f"--algorithm sb3 does not work here: {reason}"):
        made(PPO, env, algorithm="sb3", **SMALL, **options)
    env.close()


def test_stock_a2c_refuses_native_games():
    env = make_env("Breakout", 1, "native")
    assert type(made(A2C, env)) is HeadA2C
    with pytest.raises(ValueError, match="--algorithm sb3 does not work here: native Atari games"):
        made(A2C, env, algorithm="sb3")
    env.close()


def test_masks_that_are_turned_off_need_nothing():
    assert type(made(PPO, make_vec_env(Guess, 1), masks=False, **SMALL)) is stable_baselines3.PPO
    assert type(made(PPO, make_vec_env(Unmasked, 1), **SMALL)) is stable_baselines3.PPO


@pytest.mark.parametrize(
    "name", ["gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "n_epochs", "n_steps"]
)
def test_null_for_a_number_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be a number, got null$"):
        PPO("natural", **{name: None})


def test_options_of_rmsprop_need_rmsprop():
    for options in ({"use_rms_prop": False}, {"policy_kwargs": {"optimizer_class": object}}):
        with pytest.raises(ValueError, match="rms_prop_eps has no effect"):
            A2C("natural", **{"use_rms_prop": True, "rms_prop_eps": 1e-3} | options)
    A2C("natural", use_rms_prop=True, rms_prop_eps=1e-3)
    A2C("natural", use_rms_prop=False, rms_prop_eps=1e-5)


def test_short_runs_are_evaluated_seldom():
    assert Training(total_steps=50_000).eval_every == 10_000
    assert Training(total_steps=8_000_000).eval_every == 800_000
    assert Training(total_steps=50_000, eval_every=0).eval_every == 0


def test_atari_games_are_played_by_the_wrappers_without_sticky_actions(capsys):
    environments.say.cache_clear()
    for _ in range(2):
        env = make_env("ALE/Breakout-v5", 1)
        assert env.observation_space.shape == (84, 84, 4) and env.env_is_wrapped(Monitor) == [True]
        env.close()
    assert capsys.readouterr().out == (
        "ALE/Breakout-v5 is played without sticky actions here, as BreakoutNoFrameskip-v4 is\n"
    )
