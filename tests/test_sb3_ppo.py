"""HeadPPO: Stable-Baselines3's steps, CleanRL's options, halves, forced actions, lost numbers."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from cases import HEADS
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from test_fisher_sb3 import Rows
from test_sb3 import PICTURE, SMALL, Guess, same_parameters

from catnat.sb3 import DeviceRolloutBuffer, HeadPPO, NonFinite, cleanrl_schedule, objective, ppo

BOTH = spaces.Dict({"picture": PICTURE, "number": spaces.Discrete(3)})


def cartpole(count=4):
    return make_vec_env("CartPole-v1", count, seed=0, env_kwargs={"max_episode_steps": 30})


def learn(algorithm=HeadPPO, env=None, kind="MlpPolicy", head="natural", rollouts=2, **options):
    policy = HeadPPO.policy_aliases[kind]
    arguments = SMALL | {"policy_kwargs": {"head": head}} | options
    model = algorithm(policy, env or cartpole(), **arguments)
    rows = Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(rollouts * model.n_steps * model.n_envs)
    return model


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_range_vf": 0.01, "ent_coef": 0.1, "normalize_advantage": False},
        {"target_kl": 1e-5, "learning_rate": 0.01},
        {"batch_size": 24, "learning_rate": lambda remaining: 0.01 * remaining},
        {"clip_range": lambda remaining: 0.01 + 0.1 * remaining, "gae_lambda": 0.5},
    ],
    ids=["plain", "clipped values", "target kl", "odd batches, falling rate", "falling clip"],
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_takes_the_steps_of_stable_baselines(head, options):
    options = {"n_steps": 32, "n_epochs": 3} | options
    theirs, ours = (learn(kind, head=head, **options) for kind in (PPO, HeadPPO))
    assert ours.num_timesteps == theirs.num_timesteps == 256
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
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
        learn(algorithm, make_vec_env(Guess, 2, seed=0, env_kwargs=env), kind)
        for algorithm in (PPO, HeadPPO)
    )
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_pictures_stay_bytes():
    model = learn(env=make_vec_env(Guess, 2, env_kwargs={"observation_space": PICTURE}))
    observations = model.rollout_buffer.observations
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
        ours.host_rewards[step], ours.host_dones[step] = rewards, dones
        starts = dones
    last = torch.randn(3, 1)
    theirs.compute_returns_and_advantage(last, dones)
    ours.upload()
    ours.estimate_advantages(last.flatten())
    assert np.array_equal(ours.advantages.numpy(), theirs.advantages)
    assert np.array_equal(ours.returns.numpy(), theirs.returns)


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


def test_value_losses():
    values = torch.tensor([0.0, 0.5, 3.0, -2.0], requires_grad=True)
    old, returns = torch.tensor([0.1, 0.1, 0.1, 0.1]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    clip = torch.tensor(0.2)
    near = values.detach().clamp(old - 0.2, old + 0.2)
    clipped = (near - returns).square()
    plain = (values.detach() - returns).square()
    got = {
        kind: objective.value_loss(values, old, returns, clip, kind) for kind in ("sb3", "cleanrl")
    }
    assert got["sb3"].item() == pytest.approx(clipped.mean().item())
    assert got["cleanrl"].item() == pytest.approx(torch.max(plain, clipped).mean().item())
    # A value that was moved too far, away from its target, finds back with CleanRL's loss only.
    (stuck,), (free,) = (torch.autograd.grad(loss, values) for loss in got.values())
    assert stuck[3] == 0 and free[3] < 0
    whatever = objective.value_loss(values, old, returns, None, "cleanrl")
    assert whatever.item() == pytest.approx(plain.mean().item())


def test_cleanrl_clips_values_as_it_clips_the_policy():
    one, other = (
        learn(value_loss="cleanrl", clip_range=0.02, clip_range_vf=own) for own in (None, 0.02)
    )
    assert same_parameters(one.policy, other.policy)
    assert one.logger.name_to_value["train/clip_range_vf"] == 0.02
    assert not same_parameters(one.policy, learn(clip_range=0.02, clip_range_vf=0.02).policy)


def test_policy_loss_against_its_definition():
    advantages, ratios = torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.tensor([1.5, 1.5, 0.5, 0.5])
    loss = objective.policy_loss(ratios.log(), advantages, torch.tensor(0.9), torch.tensor(1.1))
    assert loss.item() == pytest.approx(-np.mean([1.1, -1.5, 1.0, -1.8]))
    kl = objective.approximate_kl(ratios.log())
    assert kl.item() == pytest.approx(np.mean([r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5)]))


def test_the_learning_rate_falls_as_cleanrls():
    batch, updates = 32, 5
    rates = []

    class Watch(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            rates.append(self.model.policy.optimizer.param_groups[0]["lr"])

        _on_training_end = _on_rollout_start

    rate = cleanrl_schedule(0.01, updates * batch, batch)
    model = HeadPPO("MlpPolicy", cartpole(2), learning_rate=rate, **SMALL)
    model.learn(updates * batch, Watch())
    want = [(1 - (update - 1) / updates) * 0.01 for update in range(1, updates + 1)]
    assert rates[1:] == pytest.approx(want)


@pytest.mark.parametrize(("total", "batch"), [(0, 1), (100, 0)])
def test_a_schedule_of_nothing_is_refused(total, batch):
    with pytest.raises(ValueError, match=r"must be at least 1, got 0"):
        cleanrl_schedule(1e-3, total, batch)


class Spoil(BaseCallback):
    """Puts a number that is none into a transition of the last rollout."""

    def __init__(self, name, value):
        super().__init__()
        self.name, self.value, self.before = name, value, None

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        if self.num_timesteps == 96:
            getattr(self.model.rollout_buffer, self.name)[3, 1] = self.value
            self.before = {k: v.clone() for k, v in self.model.policy.state_dict().items()}
            self.moments = [x["exp_avg"].clone() for x in self._states()]

    def _states(self):
        return self.model.policy.optimizer.state.values()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("returns", math.nan, "value_loss is nan"),
        ("advantages", math.inf, "policy_gradient_loss is nan"),
        ("log_probs", -math.inf, "(policy_gradient_loss|approx_kl) is (inf|nan)"),
        ("values", 0.0, None),
    ],
)
def test_lost_numbers_stop_training(head, name, value, what, tmp_path):
    model = HeadPPO(
        "MlpPolicy", cartpole(2), policy_kwargs={"head": head}, **(SMALL | {"batch_size": 8})
    )
    spoil = Spoil(name, value)
    if what is None:
        model.learn(160, spoil)
        return
    where = rf"{what} in the update after 96 steps, epoch 1, minibatch [1-4]; the policy is as it"
    with pytest.raises(NonFinite, match=where):
        model.learn(160, spoil)
    kept = model.policy.state_dict()
    assert all(torch.equal(kept[key], spoil.before[key]) for key in kept)
    assert all(
        torch.equal(x["exp_avg"], old)
        for x, old in zip(spoil._states(), spoil.moments, strict=True)
    )
    model.save(tmp_path / "it")
    HeadPPO.load(tmp_path / "it", cartpole(2), device="cpu").learn(64)


def test_the_place_of_a_lost_number_is_counted_right():
    model = learn(rollouts=1)
    table = torch.zeros(7, len(ppo.STATISTICS))
    table[5, 3] = table[6, 0] = math.inf
    assert "approx_kl is inf" in model._where(table, [3, 4])
    assert "epoch 2, minibatch 3;" in model._where(table, [3, 4])


def test_saving_keeps_everything(tmp_path):
    rate = cleanrl_schedule(0.01, 1000, 32)
    options = {"value_loss": "cleanrl", "capture": False, "overlap": False, "learning_rate": rate}
    model = learn(**options)
    model.save(tmp_path / "it")
    copy = HeadPPO.load(tmp_path / "it", env=cartpole(), device="cpu")
    assert (copy.value_loss, copy.capture, copy.overlap) == ("cleanrl", False, False)
    assert same_parameters(model.policy, copy.policy) and copy.policy.heads[0].name == "natural"
    assert copy.num_timesteps == model.num_timesteps
    assert copy.lr_schedule(0.5) == rate(0.5)
    one, other = (m.policy.optimizer.state_dict()["state"] for m in (model, copy))
    assert all(torch.equal(one[k]["exp_avg"], other[k]["exp_avg"]) for k in one)
    copy.set_env(cartpole())
    copy.learn(64, reset_num_timesteps=False)
    assert copy.num_timesteps == model.num_timesteps + 64
    evaluate_policy(HeadPPO.load(tmp_path / "it", device="cpu"), cartpole(1), 1, warn=False)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="unknown value_loss 'mse'; choose from sb3, cleanrl"):
        HeadPPO("MlpPolicy", cartpole(), value_loss="mse")
    with pytest.raises(ValueError, match="needs a Discrete"):
        HeadPPO("MlpPolicy", make_vec_env("Pendulum-v1"))
    with pytest.warns(UserWarning, match="nothing is replayed.*not a CUDA device"):
        learn(capture=True)


class Count(gym.Env):
    """Shows (number, steps); the reward tells the number, the step and the action played."""

    action_space, observation_space = spaces.Discrete(4), spaces.Box(0, 1e4, (2,))

    def __init__(self, number, length=7):
        self.number, self.steps, self.length = number, 0, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.number, self.steps], np.float32), {}

    def step(self, action):
        reward = 1000.0 * self.number + 10 * self.steps + action
        self.steps += 1
        cut = self.steps % self.length == 0
        return np.array([self.number, self.steps], np.float32), reward, False, cut, {}


class Half(DummyVecEnv):
    """Forces an action now and then, and notes who is called when."""

    def __init__(self, numbers, calls, forced):
        super().__init__([lambda number=number: Count(number) for number in numbers])
        self.first, self.calls, self.forced, self.waiting = numbers[0], calls, forced, False
        self.count = 0

    @property
    def forced_actions(self):
        every = self.count + np.arange(self.num_envs)
        return np.where(every % 3 == 0, 2, -1) if self.forced else np.full(self.num_envs, -1)

    def step_async(self, actions):
        assert not self.waiting
        self.waiting = True
        self.calls.append((self.first, "async"))
        forced = self.forced_actions
        super().step_async(np.where(forced >= 0, forced, actions))

    def step_wait(self):
        assert self.waiting
        self.waiting = False
        self.count += 1
        self.calls.append((self.first, "wait"))
        return super().step_wait()


class Pair(DummyVecEnv):
    """Two halves of which only one may be asked at a time."""

    def __init__(self, sizes=(2, 2), forced=False):
        super().__init__([lambda number=number: Count(number) for number in range(sum(sizes))])
        self.calls = []
        first = Half(list(range(sizes[0])), self.calls, forced)
        self.halves = (first, Half(list(range(sizes[0], sum(sizes))), self.calls, forced))

    def reset(self):
        return np.concatenate([half.reset() for half in self.halves])

    @property
    def forced_actions(self):
        return np.concatenate([half.forced_actions for half in self.halves])

    def step_async(self, actions):
        for half, part in zip(
            self.halves, np.split(actions, [self.halves[0].num_envs]), strict=True
        ):
            half.step_async(part)

    def step_wait(self):
        one, other = (half.step_wait() for half in self.halves)
        return *(np.concatenate(x) for x in list(zip(one, other, strict=True))[:3]), one[3] + other[
            3
        ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1)])
def test_halves_and_forced_actions(overlap, forced, sizes):
    env = Pair(sizes, forced)
    model = learn(env=env, overlap=overlap, gamma=0.5, n_steps=16)
    buffer = model.rollout_buffer
    numbers, steps = buffer.observations.unbind(-1)  # (T, n) each
    assert torch.equal(numbers, torch.arange(sum(sizes)).float().expand(16, -1))
    assert torch.equal(steps, torch.arange(16, 32).float()[:, None].expand(16, sum(sizes)))
    played = 1000 * numbers + 10 * steps + buffer.actions
    assert np.array_equal(buffer.host_rewards, played.numpy())
    assert np.array_equal(buffer.host_dones, (steps.numpy() + 1) % 7 == 0)
    assert torch.equal(buffer.continues == 0, torch.from_numpy(buffer.host_dones))
    every = torch.from_numpy(np.concatenate([np.arange(size) for size in sizes]))
    assert torch.equal(buffer.forced, ((steps.long() + every) % 3 == 0) & forced)
    share = (buffer.actions == 2).float().mean()
    assert share > 0.4 if forced else share < 0.4
    assert np.array_equal(model._last_obs[:, 1], np.full(sum(sizes), 32))


def test_log_probs_are_those_of_the_actions_played():
    class Keep(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer = self.model.rollout_buffer
            shown, actions = buffer.observations.flatten(0, 1), buffer.actions.flatten()
            with torch.no_grad():
                values, log_probs, _ = self.model.policy.evaluate_actions(shown, actions)
            assert torch.allclose(buffer.log_probs.flatten(), log_probs, atol=1e-5)
            assert torch.allclose(buffer.values.flatten(), values.flatten(), atol=1e-4)
            self.model.done = True

    model = HeadPPO("MlpPolicy", Pair((2, 2), forced=True), **SMALL)
    model.learn(64, Keep())
    assert model.done


def test_forced_actions_teach_values_only():
    """However impossible the policy thinks them, and whatever comes of it."""
    model = learn(env=Pair(forced=True), rollouts=1, normalize_advantage=False, ent_coef=0.0)
    buffer = model.rollout_buffer
    forced = buffer.forced.flatten().nonzero().flatten()
    assert len(forced)
    buffer.log_probs.flatten()[forced] = -1000.0  # what a saturated head says
    model.policy.optimizer.zero_grad()
    loss, statistics = model._loss(forced)
    loss.backward()
    assert statistics.isfinite().all()
    assert not model.policy.action_net.weight.grad.any()
    assert model.policy.value_net.weight.grad.any()
    free = (~buffer.forced).flatten().nonzero().flatten()
    model._loss(free)[0].backward()
    assert model.policy.action_net.weight.grad.any()


def test_episodes_that_are_cut_off_go_on_in_value():
    class Check(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer, policy = self.model.rollout_buffer, self.model.policy
            more = buffer.rewards - torch.from_numpy(buffer.host_rewards)
            following = buffer.observations + torch.tensor([0.0, 1.0])
            with torch.no_grad():
                values = policy.predict_values(following.flatten(0, 1)).reshape(more.shape)
            want = torch.where(torch.from_numpy(buffer.host_dones), 0.5 * values, 0)
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
    assert model.rollout_buffer.observations.abs().max() < 11  # normalized


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
    steps = model.rollout_buffer.observations[..., 1]
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
    assert np.array_equal(rewards, model.rollout_buffer.host_rewards)
    actions = np.stack([each["actions"] for each in seen])
    assert np.array_equal(actions, model.rollout_buffer.actions.numpy())
    assert all(len(each["infos"]) == len(each["dones"]) == 4 for each in seen)


@pytest.mark.parametrize("head", ["softmax", "natural"])
def test_learns(head):
    env = make_vec_env("CartPole-v1", 8, seed=0)
    model = HeadPPO(
        "MlpPolicy",
        env,
        learning_rate=cleanrl_schedule(1e-3, 50_000, 256),
        n_steps=32,
        batch_size=256,
        n_epochs=12,
        gae_lambda=0.8,
        gamma=0.98,
        value_loss="cleanrl",
        policy_kwargs={"head": head},
        seed=0,
        device="cpu",
    )
    test = make_vec_env("CartPole-v1", 4, seed=9)
    before, _ = evaluate_policy(model, test, 8, deterministic=False)
    after, _ = evaluate_policy(model.learn(8192), test, 8, deterministic=False)
    assert before < 40 and after > 60
