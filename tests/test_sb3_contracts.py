"""What users of Stable-Baselines3 rely on: NaN raises, zips interchange, callbacks and buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_sb3 import BOTH, BOX, SMALL, Guess, Pair, cartpole, learn, same_parameters
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy

from catnat.sb3 import (
    DeviceRolloutBuffer,
    HeadActorCriticPolicy,
    HeadMaskableActorCriticPolicy,
    HeadPPO,
    NonFinite,
    action_distributions,
)

# -- NaN ------------------------------------------------------------------------------------------


class Spoiled(Guess):
    """Shows NaN once, after its 18th step."""

    steps = 0

    def step(self, action):
        observation, *rest = super().step(action)
        self.steps += 1
        return observation * (np.nan if self.steps == 18 else 1), *rest


def spoiled_model(algorithm, head, space=None):
    maskable = algorithm is MaskablePPO
    few = {"seed": 0, "device": "cpu"} if algorithm is A2C else SMALL
    return algorithm(
        HeadMaskableActorCriticPolicy if maskable else HeadActorCriticPolicy,
        make_vec_env(Spoiled, 2, seed=0, env_kwargs={"action_space": space}),
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


def test_a_nan_observation_raises_value_error_with_several_actions():
    with pytest.raises(ValueError, match="probabilities are NaN"):
        spoiled_model(PPO, "natural", spaces.MultiDiscrete([2, 1, 3])).learn(96)


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


def test_nan_parameters_raise_in_the_next_minibatch():
    model = PPO(HeadActorCriticPolicy, cartpole(2), **SMALL)
    model.learn(32)
    model.policy.action_net.bias.data.fill_(np.nan)
    with pytest.raises(ValueError, match="probabilities are NaN in 16 of 16 states"):
        model.train()


def test_head_ppo_looks_for_nan_once_per_update_not_in_each_call(monkeypatch):
    def refuse(*distributions):
        raise AssertionError("this waits for the device")

    monkeypatch.setattr(action_distributions, "check", refuse)
    model = learn(rollouts=1)
    assert model.policy.action_dist.validate_args
    monkeypatch.undo()
    with pytest.raises(NonFinite):
        spoiled_model(HeadPPO, "natural").learn(96)


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
    assert type(other.rollout_buffer) is (
        DeviceRolloutBuffer if reader is HeadPPO else RolloutBuffer
    )
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


@pytest.mark.parametrize("overlap", [True, False])
def test_callbacks_see_joint_steps_of_halves(overlap):
    see = See()
    HeadPPO("MlpPolicy", Pair((3, 1)), overlap=overlap, **SMALL).learn(64, see)
    for step, row in enumerate(see.rows):
        numbers, before = row["obs_tensor"].T
        assert np.array_equal(numbers, np.arange(4)) and np.array_equal(before, np.full(4, step))
        assert np.array_equal(row["new_obs"], row["obs_tensor"] + [0, 1])
        assert np.array_equal(row["rewards"], 1000 * numbers + 10 * before + row["actions"])


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


# -- the buffer -----------------------------------------------------------------------------------

SPACES = {
    "box": (BOX, spaces.Discrete(4)),
    "discrete": (spaces.Discrete(6), spaces.MultiDiscrete([2, 3])),
    "dict": (BOTH, spaces.Discrete(4)),
}
ARRAYS = ("observations", "actions", "rewards", "returns", "episode_starts", "values", "log_probs",
          "advantages")  # fmt: skip


def filled(kind, observed, action):
    """A full buffer of one kind: the same transitions every time."""
    buffer = kind(10, observed, action, "cpu", gae_lambda=0.9, gamma=0.95, n_envs=3)
    observed.seed(0), action.seed(0), torch.manual_seed(0)
    random = np.random.default_rng(0)
    assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    for _ in range(10):
        shown = [observed.sample() for _ in range(3)]
        if isinstance(observed, spaces.Dict):
            shown = {key: np.stack([each[key] for each in shown]) for key in shown[0]}
        chosen = np.stack([action.sample() for _ in range(3)])
        rewards, starts = random.normal(size=3), random.random(3) < 0.3
        values, log_probs = torch.randn(3, 1), torch.randn(3)
        buffer.add(np.array(shown) if isinstance(shown, list) else shown, chosen, rewards, starts,
                   values, log_probs)  # fmt: skip
    assert (buffer.pos, buffer.full, buffer.size()) == (10, True, 10)
    buffer.compute_returns_and_advantage(torch.randn(3, 1), np.array([True, False, False]))
    return buffer


def same_arrays(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_arrays(one[k], other[k]) for k in one)
    return one.shape == other.shape and one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("case", SPACES)
def test_the_buffer_is_a_rollout_buffer_of_stable_baselines(case):
    stock = DictRolloutBuffer if case == "dict" else RolloutBuffer
    theirs, ours = (filled(kind, *SPACES[case]) for kind in (stock, DeviceRolloutBuffer))
    assert isinstance(ours, RolloutBuffer)
    for name in ARRAYS:
        assert same_arrays(getattr(ours, name), getattr(theirs, name)), name
    for size in (7, None):
        np.random.seed(1)
        wanted = list(theirs.get(size))
        np.random.seed(1)
        for mine, row in zip(ours.get(size), wanted, strict=True):
            assert type(mine) is type(row)
            for a, b in zip(mine, row, strict=True):
                pairs = [(a[k], b[k]) for k in b] if isinstance(b, dict) else [(a, b)]
                assert all(x.dtype == y.dtype for x, y in pairs)
                # A Discrete observation is (B, 1) there and (B,) here: policies take both.
                assert all(torch.equal(x.reshape(y.shape), y) for x, y in pairs)
    ours.reset()
    assert (ours.pos, ours.full, ours.size()) == (0, False, 0)


def test_stock_ppo_learns_the_same_with_our_buffer():
    one, other = (
        PPO(HeadActorCriticPolicy, cartpole(), rollout_buffer_class=kind, **SMALL).learn(128)
        for kind in (None, DeviceRolloutBuffer)
    )
    for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_arrays_of_the_buffer_are_its_memory_on_the_cpu():
    buffer = DeviceRolloutBuffer(4, BOX, spaces.Discrete(3), "cpu", n_envs=2)
    buffer.advantages[1, 0] = 5.0
    assert buffer.tensors.advantages[1, 0] == 5


# -- interrupts -----------------------------------------------------------------------------------


class Interrupt(BaseCallback):
    """Ctrl-C at the ninth step of all environments."""

    def _on_step(self):
        if self.n_calls == 9:
            raise KeyboardInterrupt
        return True


@pytest.mark.parametrize("overlap", [True, False])
def test_after_an_interrupt_training_goes_on_with_what_the_environments_show(overlap):
    env = Pair()
    model = HeadPPO("MlpPolicy", env, overlap=overlap, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        model.learn(64, Interrupt())
    assert not any(half.waiting for half in env.halves)
    shown = np.array([each.steps for half in env.halves for each in half.envs])
    assert np.array_equal(model._last_obs[:, 1], shown)
    assert np.array_equal(model._last_episode_starts, shown % 7 == 0)
    model.learn(64, reset_num_timesteps=False)
    steps = model.rollout_buffer.observations[..., 1]
    assert np.array_equal(steps[0], shown) and (np.diff(steps, axis=0) == 1).all()


def test_after_an_interrupt_amid_a_step_new_episodes_begin(monkeypatch):
    env = Pair()
    model = HeadPPO("MlpPolicy", env, **SMALL)
    second = env.halves[1]
    wait = second.step_wait

    def interrupted():
        wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(second, "step_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.learn(64)
    monkeypatch.undo()
    assert model._last_obs is None and not any(half.waiting for half in env.halves)
    model.learn(64, reset_num_timesteps=False)
    steps = model.rollout_buffer.observations[..., 1]
    assert (np.diff(steps, axis=0) == 1).all()
