"""Rollouts: actions that an environment forces, callbacks that stop or edit, bytes."""

import numpy as np
import pytest
import torch
from cases_sb3 import PICTURE, SMALL, Count, Forcing, Guess, Unmasked, cartpole, distance, learn
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from catnat.sb3 import HeadA2C, HeadActorCriticPolicy, HeadPPO

FEW = {HeadPPO: SMALL, HeadA2C: {"n_steps": 16, "seed": 0, "device": "cpu"}}


def played(algorithm, env, **options):
    """A model after one rollout in environments that force actions, and which it was forced to."""
    model = algorithm("MlpPolicy", env, **FEW[algorithm] | options)
    model.learn(16 * env.num_envs)
    forced = (np.arange(16)[:, None] + np.arange(env.num_envs)) % 3 == 0
    return model, forced


def test_pictures_stay_bytes():
    model = learn(env=make_vec_env(Guess, 2, env_kwargs={"observation_space": PICTURE}))
    observations = model._rollout["observations"]
    assert observations.dtype == torch.uint8 and observations.shape == (32, *PICTURE.shape)


@pytest.mark.parametrize("wrapper", [lambda env: env, VecMonitor])
@pytest.mark.parametrize("algorithm", [HeadPPO, HeadA2C])
def test_the_actions_that_are_played_are_the_ones_stored(algorithm, wrapper):
    model, forced = played(algorithm, wrapper(Forcing()))
    buffer = model.rollout_buffer
    shown, actions = buffer.observations, buffer.actions
    if algorithm is HeadA2C:  # its buffer is flat after an update, environment by environment
        shown, actions = (x.reshape(4, 16, -1).swapaxes(0, 1) for x in (shown, actions))
    numbers, steps = np.moveaxis(shown, -1, 0)
    actions = actions[..., 0]
    free = (steps + 1) % 7 != 0  # rewards before an end have the value of going on
    rewards = 1000 * numbers + 10 * steps + actions
    assert np.array_equal(buffer.rewards[free], rewards[free])
    assert (actions[forced] == 2).all() and (actions[~forced] != 2).any()


class Alternating(DummyVecEnv):
    """Shows two states by turns, and forces actions in the second one."""

    action_space = spaces.Discrete(3)

    def __init__(self):
        super().__init__([lambda: Unmasked(self.action_space, spaces.Box(0, 1, (2,)))] * 2)
        self.steps = 0

    def reset(self):
        super().reset()
        return np.eye(2, dtype=np.float32)[[self.steps % 2] * 2]

    def step_wait(self):
        self.steps += 1
        return self.reset(), *super().step_wait()[1:]

    @property
    def forced_actions(self):
        return np.full(2, 1 if self.steps % 2 else -1)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("algorithm", [HeadPPO, HeadA2C])
def test_nothing_is_learned_about_actions_in_a_state_where_all_are_forced(algorithm, normalize):
    options = FEW[algorithm] | {"normalize_advantage": normalize, "learning_rate": 0.1}
    model = algorithm("MlpPolicy", Alternating(), policy_kwargs={"net_arch": []}, **options)
    before = model.policy.action_net.weight.detach().clone()
    values = model.policy.value_net.weight.detach().clone()
    model.learn(64)
    moved = (model.policy.action_net.weight - before).abs().amax(0)
    assert moved[0] > 1e-3 and moved[1] == 0
    assert (model.policy.value_net.weight != values).all()


@pytest.mark.parametrize("algorithm", [HeadPPO, HeadA2C])
@pytest.mark.parametrize("name", ["halves", "forced_actions", "masks"])
def test_attributes_of_the_users_own_environment_mean_nothing(algorithm, name):
    env = cartpole(2)
    setattr(env, name, 3)
    algorithm("MlpPolicy", env, **FEW[algorithm]).learn(32)


def test_a_callback_may_stop_a_rollout_and_training_goes_on():
    class Stop(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 20

    model = HeadPPO("MlpPolicy", DummyVecEnv([lambda: Count(0), lambda: Count(1)]), **SMALL)
    model.learn(64, Stop())
    assert model.num_timesteps == 20
    model.learn(32, reset_num_timesteps=False)
    assert model.rollout_buffer.full


@pytest.mark.parametrize("env", [lambda: make_vec_env(Unmasked, 2, seed=0), lambda: Forcing(2)])
@pytest.mark.parametrize("algorithm", [HeadPPO, HeadA2C])
def test_a_callback_may_call_the_policy(algorithm, env):
    class Ask(BaseCallback):
        def _on_step(self):
            with torch.random.fork_rng(), torch.no_grad():
                shown = torch.as_tensor(self.model._last_obs)
                assert len(self.model.policy(shown)) == 3
                self.model.policy(shown[:1], deterministic=True)
            return True

        _on_rollout_start = _on_rollout_end = _on_step

    one, other = (
        algorithm("MlpPolicy", env(), **FEW[algorithm]).learn(64, callback)
        for callback in (None, Ask())
    )
    assert distance(one, other) == 0


def test_advantages_that_a_callback_assigns_are_the_ones_learned_from():
    class Replace(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer = self.model.rollout_buffer
            buffer.advantages = np.sign(buffer.rewards * buffer.values) * (buffer.actions[..., 0])

    one, other, plain = (
        kind(HeadActorCriticPolicy, cartpole(), **SMALL).learn(128, callback)
        for kind, callback in ((PPO, Replace()), (HeadPPO, Replace()), (HeadPPO, None))
    )
    assert distance(one, other) < 1e-6 and distance(one, plain) > 1e-4
