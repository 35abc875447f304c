"""What users of Stable-Baselines3 rely on: NaN raises, zips interchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases_sb3 import (
    BOTH,
    BOX,
    SMALL,
    Guess,
    HeadMaskablePolicy,
    cartpole,
    every_head_with,
    same_parameters,
)
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy

from catnat.sb3 import (
    HeadActorCriticPolicy,
    HeadPPO,
)

# -- NaN ------------------------------------------------------------------------------------------


class Spoiled(Guess):
    """Shows NaN once, after its 18th step."""

    steps = 0

    def step(self, action):
        observation, *rest = super().step(action)
        self.steps += 1
        return observation * (np.nan if self.steps == 18 else 1), *rest


def spoiled_model(algorithm, head):
    maskable = algorithm is MaskablePPO
    few = {"seed": 0, "device": "cpu"} if algorithm is A2C else SMALL
    return algorithm(
        HeadMaskablePolicy if maskable else HeadActorCriticPolicy,
        make_vec_env(Spoiled, 2, seed=0),
        policy_kwargs={"head": head},
        **few,
    )


@pytest.mark.parametrize(("head", "algorithm"), every_head_with(PPO, A2C, MaskablePPO))
def test_a_nan_observation_raises_value_error_and_spoils_no_parameter(algorithm, head):
    model = spoiled_model(algorithm, head)
    with pytest.raises(ValueError, match=r"probabilities are NaN in 2 of 2 states: look for NaN"):
        model.learn(96)
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO, A2C])
@pytest.mark.parametrize("cause", ["observation", "parameter"])
def test_predict_raises_value_error_for_nan(algorithm, cause):
    model = algorithm(HeadActorCriticPolicy, make_vec_env(Guess, 1), device="cpu")
    shown = BOX.sample()
    if cause == "parameter":
        model.policy.action_net.bias.data.fill_(np.nan)
    else:
        shown[0] = np.nan
    with pytest.raises(ValueError, match="probabilities are NaN in 1 of 1 states"):
        model.predict(shown)


# -- zips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HeadActorCriticPolicy, ActorCriticPolicy])
@pytest.mark.parametrize(("writer", "reader"), [(PPO, HeadPPO), (HeadPPO, PPO)])
def test_each_loads_the_zip_of_the_other_and_goes_on_as_the_writer_would(
    writer, reader, kind, tmp_path
):
    model = writer(kind, cartpole(), **SMALL).learn(128)
    model.save(tmp_path / "it")
    same, other = (
        algorithm.load(tmp_path / "it", cartpole(), device="cpu") for algorithm in (writer, reader)
    )
    assert type(other) is reader and same_parameters(model.policy, other.policy)
    for each in (same, other):
        each.set_random_seed(3)
        each.learn(128, reset_num_timesteps=False)
        assert each.num_timesteps == 256
    for a, b in zip(same.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_dict_observations_interchange(tmp_path):
    env = make_vec_env(Guess, 2, env_kwargs={"observation_space": BOTH})
    HeadPPO("MultiInputPolicy", env, **SMALL).learn(32).save(tmp_path / "ours")
    theirs = PPO.load(tmp_path / "ours", env, device="cpu").learn(32)
    assert type(theirs.rollout_buffer) is DictRolloutBuffer
    theirs.save(tmp_path / "theirs")
    HeadPPO.load(tmp_path / "theirs", env, device="cpu").learn(32)


def test_a_buffer_of_another_kind_is_refused():
    class Own(RolloutBuffer):
        pass

    with pytest.raises(ValueError, match="cannot use Own"):
        HeadPPO("MlpPolicy", cartpole(), rollout_buffer_class=Own)
