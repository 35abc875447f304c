"""Rollouts of HeadPPO: the buffer, halves of environments, forced actions, callbacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases_sb3 import PICTURE, SMALL, Count, Guess, Pair, learn
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from catnat.sb3 import DeviceRolloutBuffer, HeadPPO


def test_pictures_stay_bytes():
    model = learn(env=make_vec_env(Guess, 2, env_kwargs={"observation_space": PICTURE}))
    observations = model.rollout_buffer.tensors.observations
    assert observations.dtype == torch.uint8 and observations.shape == (16, 2, *PICTURE.shape)


def test_advantages_are_those_of_stable_baselines():
    space = (spaces.Box(-1, 1, (3,)), spaces.Discrete(4))
    options = {"device": "cpu", "gae_lambda": 0.9, "gamma": 0.95, "n_envs": 3}
    theirs, ours = RolloutBuffer(20, *space, **options), DeviceRolloutBuffer(20, *space, **options)
    starts = np.ones(3, bool)
    generator = np.random.default_rng(0)
    for step in range(20):
        rewards = generator.normal(size=3).astype(np.float32)
        dones = generator.random(3) < 0.2
        values, log_probs = torch.randn(3, 1), torch.randn(3)
        theirs.add(np.zeros((3, 3)), np.zeros((3, 1)), rewards, starts, values, log_probs)
        ours.write(step, slice(0, 3), torch.zeros(3), values, log_probs)
        ours.receive(rewards, starts)
        starts = dones
    last = torch.randn(3, 1)
    theirs.compute_returns_and_advantage(last, dones)
    ours.upload(dones)
    ours.estimate_advantages(last.flatten())
    assert np.array_equal(ours.advantages, theirs.advantages)
    assert np.array_equal(ours.returns, theirs.returns)


def test_minibatches_hold_every_transition_once():
    shown = spaces.Box(0, 255, (2,), np.uint8)
    buffer = DeviceRolloutBuffer(6, shown, spaces.Discrete(4), "cpu", n_envs=3)
    for step in range(6):
        places = np.arange(3) + 10 * step
        shown = buffer.send(step, slice(0, 3), np.stack([places, places], 1))
        assert torch.equal(shown[:, 0], torch.from_numpy(places).byte())
        values = torch.from_numpy(places).float()
        buffer.write(step, slice(0, 3), torch.from_numpy(places % 4), values, -values)
    for on_device in (True, False):
        buffer.on_device = on_device
        batches = [buffer.take(indices) for indices in buffer.shuffled(4)]
        assert [len(batch.values) for batch in batches] == [4, 4, 4, 4, 2]
        seen = torch.cat([batch.values for batch in batches])
        assert sorted(seen.tolist()) == [float(e + 10 * s) for s in range(6) for e in range(3)]
        for batch in batches:
            assert torch.equal(batch.observations[:, 1].float(), batch.values)
            assert torch.equal(batch.actions.float(), batch.values % 4)
            assert torch.equal(batch.log_probs, -batch.values)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1)])
def test_halves_and_forced_actions(overlap, forced, sizes):
    env = Pair(sizes, forced)
    model = learn(env=env, overlap=overlap, gamma=0.5, n_steps=16)
    buffer = model.rollout_buffer
    numbers, steps = buffer.tensors.observations.unbind(-1)  # (T, n) each
    assert torch.equal(numbers, torch.arange(sum(sizes)).float().expand(16, -1))
    assert torch.equal(steps, torch.arange(16, 32).float()[:, None].expand(16, sum(sizes)))
    played = 1000 * numbers + 10 * steps + buffer.tensors.actions
    free = buffer.tensors.continues == 1  # rewards before an end have the value of going on
    assert torch.equal(buffer.tensors.rewards[free], played[free])
    assert torch.equal(buffer.tensors.continues == 0, (steps + 1) % 7 == 0)
    assert np.array_equal(buffer.episode_starts, steps.numpy() % 7 == 0)
    every = torch.from_numpy(np.concatenate([np.arange(size) for size in sizes]))
    assert torch.equal(buffer.tensors.forced, ((steps.long() + every) % 3 == 0) & forced)
    share = (buffer.tensors.actions == 2).float().mean()
    assert share > 0.4 if forced else share < 0.4
    assert np.array_equal(model._last_obs[:, 1], np.full(sum(sizes), 32))


def test_log_probs_are_those_of_the_actions_played():
    class Keep(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer = self.model.rollout_buffer
            shown, actions = (
                buffer.tensors.observations.flatten(0, 1),
                buffer.tensors.actions.flatten(),
            )
            with torch.no_grad():
                values, log_probs, _ = self.model.policy.evaluate_actions(shown, actions)
            assert torch.allclose(buffer.tensors.log_probs.flatten(), log_probs, atol=1e-5)
            assert torch.allclose(buffer.tensors.values.flatten(), values.flatten(), atol=1e-4)
            self.model.done = True

    model = HeadPPO("MlpPolicy", Pair((2, 2), forced=True), **SMALL)
    model.learn(64, Keep())
    assert model.done


def test_forced_actions_teach_values_only():
    """However impossible the policy thinks them, and whatever comes of it."""
    model = learn(env=Pair(forced=True), rollouts=1, normalize_advantage=False, ent_coef=0.0)
    buffer = model.rollout_buffer
    forced = buffer.tensors.forced.flatten().nonzero().flatten()
    assert len(forced)
    buffer.tensors.log_probs.flatten()[forced] = -1000.0  # what a saturated head says
    model.policy.optimizer.zero_grad()
    loss, statistics = model._loss(forced)
    loss.backward()
    assert statistics.isfinite().all()
    assert not model.policy.action_net.weight.grad.any()
    assert model.policy.value_net.weight.grad.any()
    free = (~buffer.tensors.forced).flatten().nonzero().flatten()
    model._loss(free)[0].backward()
    assert model.policy.action_net.weight.grad.any()


def test_nothing_is_forced_in_the_next_environment():
    model = learn(env=Pair(forced=True), rollouts=1)
    assert model.rollout_buffer.tensors.forced.any()
    model.set_env(DummyVecEnv([lambda number=number: Count(number) for number in range(4)]))
    model.learn(64)
    assert not model.rollout_buffer.tensors.forced.any()


def test_episodes_that_are_cut_off_go_on_in_value():
    class Check(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer, policy = self.model.rollout_buffer, self.model.policy
            numbers, steps = buffer.tensors.observations.unbind(-1)
            plain = 1000 * numbers + 10 * steps + buffer.tensors.actions
            more = buffer.tensors.rewards - plain
            following = buffer.tensors.observations + torch.tensor([0.0, 1.0])
            with torch.no_grad():
                values = policy.predict_values(following.flatten(0, 1)).reshape(more.shape)
            want = torch.where(buffer.tensors.continues == 0, 0.5 * values, 0)
            assert torch.allclose(more, want, atol=1e-2) and want.any()

    for overlap in (True, False):
        HeadPPO("MlpPolicy", Pair(), overlap=overlap, gamma=0.5, **SMALL).learn(64, Check())


def test_one_half_plays_while_the_policy_looks_at_the_other():
    env = Pair()
    learn(env=env, n_steps=3, rollouts=1, batch_size=4)
    a, b = (0, "async"), (2, "async")
    a_done, b_done = (0, "wait"), (2, "wait")
    assert env.calls == [a, b, a_done, a, b_done, b, a_done, a, b_done, b, a_done, b_done]


def test_wrappers_are_not_circumvented():
    env = Pair()
    model = learn(env=VecNormalize(VecMonitor(env)), n_steps=3, rollouts=1, batch_size=4)
    assert env.calls[:4] == [(0, "async"), (2, "async"), (0, "wait"), (2, "wait")]
    assert model.rollout_buffer.tensors.observations.abs().max() < 11  # normalized


@pytest.mark.parametrize("overlap", [True, False])
def test_a_callback_may_stop_a_rollout_and_training_goes_on(overlap):
    class Stop(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 20

    env = Pair()
    model = HeadPPO("MlpPolicy", env, overlap=overlap, **SMALL)
    model.learn(64, Stop())
    assert model.num_timesteps == 20 and not any(half.waiting for half in env.halves)
    model.learn(64, reset_num_timesteps=False)
    steps = model.rollout_buffer.tensors.observations[..., 1]
    assert torch.equal(steps.diff(dim=0), torch.ones(15, 4))


def test_callbacks_see_each_step():
    seen = []

    class See(BaseCallback):
        def _on_step(self):
            seen.append({key: self.locals[key] for key in ("actions", "rewards", "dones", "infos")})
            return True

    model = HeadPPO("MlpPolicy", Pair(), **SMALL)
    model.learn(64, See())
    assert len(seen) == 16
    rewards = np.stack([each["rewards"] for each in seen])
    ends = np.stack([each["dones"] for each in seen])
    assert np.array_equal(rewards[~ends], model.rollout_buffer.rewards[~ends])
    actions = np.stack([each["actions"] for each in seen])
    assert np.array_equal(actions, model.rollout_buffer.tensors.actions.numpy())
    assert all(len(each["infos"]) == len(each["dones"]) == 4 for each in seen)
