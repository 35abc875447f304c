"""What users of Stable-Baselines3 rely on: NaN raises, zips interchange, callbacks and buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_sb3 import BOTH, BOX, SMALL, Guess, cartpole, same_parameters
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy

from catnat.sb3 import (
    HeadActorCriticPolicy,
    HeadMaskableActorCriticPolicy,
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
        HeadMaskableActorCriticPolicy if maskable else HeadActorCriticPolicy,
        make_vec_env(Spoiled, 2, seed=0),
        policy_kwargs={"head": head},
        **few,
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
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


# -- callbacks ------------------------------------------------------------------------------------

SEEN = ("new_obs", "obs_tensor", "actions", "clipped_actions", "values", "log_probs", "rewards",
        "dones", "n_steps", "n_rollout_steps")  # fmt: skip


def copied(value):
    return value.numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)


class See(BaseCallback):
    """Keeps what callbacks are shown."""

    def __init__(self):
        super().__init__()
        self.rows, self.ends = [], []

    def _on_step(self):
        assert {"self", "env", "callback", "rollout_buffer", "infos"} <= self.locals.keys()
        assert self.locals["rollout_buffer"].pos == self.locals["n_steps"]
        self.rows.append({key: copied(self.locals[key]) for key in SEEN})
        self.rows[-1]["last_obs"] = np.array(self.model._last_obs)
        return True

    def _on_rollout_end(self):
        assert self.locals["rollout_buffer"].full
        self.ends.append((copied(self.locals["values"]), self.locals["n_steps"]))


def test_callbacks_see_the_local_variables_of_stable_baselines():
    seen = []
    for algorithm in (PPO, HeadPPO):
        seen.append(See())
        algorithm(HeadActorCriticPolicy, cartpole(), **SMALL).learn(128, seen[-1])
    theirs, ours = seen
    assert len(ours.rows) == len(theirs.rows) == 32
    for mine, row in zip(ours.rows, theirs.rows, strict=True):
        for key, value in row.items():
            assert mine[key].shape == value.shape and mine[key].dtype == value.dtype, key
            assert np.allclose(mine[key], value, atol=1e-5), key
    for (mine, count), (values, steps) in zip(ours.ends, theirs.ends, strict=True):
        assert mine.shape == values.shape == (4, 1) and count == steps == 16
        assert np.allclose(mine, values, atol=1e-5)


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO])
def test_rewards_that_a_callback_changes_are_the_ones_learned_from(algorithm):
    class Double(BaseCallback):
        def _on_step(self):
            self.locals["rewards"] += 1
            return True

        def _on_rollout_end(self):
            rewards = self.model.rollout_buffer.rewards
            assert set(np.unique(rewards)) <= {1.0, 2.0}

    env = make_vec_env(Guess, 2, seed=0)
    algorithm(HeadActorCriticPolicy, env, **SMALL).learn(64, Double())
