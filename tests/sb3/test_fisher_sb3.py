"""FisherMonitorSB3: right numbers under the right tags and steps, and no influence."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cases import HEADS, autograd_fisher
from cases_callbacks import TAGS
from cases_sb3 import (
    SMALL,
    Guess,
    HeadLstmPolicy,
    HeadMaskablePolicy,
    Rows,
    Spoil,
    same_parameters,
)
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from catnat.callbacks import FisherMonitor, FisherMonitorSB3, fisher_diagnostics
from catnat.fisher import off_diagonal_mass
from catnat.heads.flat import SoftmaxHead
from catnat.sb3 import HeadActorCriticPolicy, HeadMultiInputActorCriticPolicy, HeadPPO, NonFinite


class Kept(FisherMonitorSB3):
    """Remembers the states and the weights of each rollout, and draws no pictures."""

    def __init__(self, **options):
        super().__init__(image_every_n_rollouts=0, details=True, **options)
        self.seen = []

    def _distribution(self):
        policy = self.model.policy
        weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
        get_distribution = policy.get_distribution

        def watched(states, *args, **kwargs):
            self.seen.append((states, weights))
            return get_distribution(states, *args, **kwargs)

        with patch.object(policy, "get_distribution", watched):
            return super()._distribution()


def logged(model, steps, monitor):
    """What a run logs, by step."""
    rows = Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(steps, monitor, log_interval=1)
    return rows.rows


def scores_of(model, states, weights):
    """What the policy's head got in these states while the policy had these weights."""
    model.policy.load_state_dict(weights)
    with torch.no_grad():
        latent = model.policy.mlp_extractor.forward_actor(states)
        return model.policy.action_net(latent).double()


def run(head="natural", algorithm=PPO, monitor=None, env=None, steps=96):
    few = {"seed": 0, "device": "cpu", "n_steps": 16} if algorithm is A2C else SMALL
    few = few | ({"masks": False} if algorithm is HeadPPO else {})
    model = algorithm(
        HeadActorCriticPolicy,
        make_vec_env(Guess, 2, seed=0, env_kwargs=env or {}),
        policy_kwargs={"head": head},
        **few,
    )
    return model, logged(model, steps, monitor)


@pytest.mark.parametrize(
    ("head", "algorithm"),
    [*((head, PPO) for head in HEADS), ("natural", HeadPPO), ("softmax", A2C)],
)
def test_numbers_are_those_of_the_rollout(head, algorithm):
    monitor = Kept()
    model, rows = run(head, algorithm, monitor, steps=64)
    assert list(rows) == [32, 64]
    for (states, weights), step in zip(monitor.seen, rows, strict=True):
        assert states.shape == (32, 3)
        scores = scores_of(model, states, weights)
        with torch.no_grad():
            entropy = model.policy.get_distribution(states).entropy().mean()
        it = model.policy.heads[0]
        exact = torch.stack([autograd_fisher(it, row) for row in scores]).mean(0)
        row = rows[step]
        assert row.keys() >= set(TAGS)
        assert row["fim/off_diagonal_mass_l1"] == pytest.approx(
            off_diagonal_mass(exact, "l1").item(), abs=1e-4
        )
        frobenius = off_diagonal_mass(exact).item()
        assert row["fim/exact_off_diagonal_mass"] == pytest.approx(frobenius, abs=1e-4)
        assert row["fim/saturated"] == pytest.approx(it.saturated(scores).double().mean().item())
        assert row["train/entropy"] == pytest.approx(entropy.item(), abs=1e-5)
    assert "train/explained_variance" in rows[64]
    assert algorithm is A2C or "train/approx_kl" in rows[64]


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO])
def test_what_is_learned_stays_the_same(algorithm):
    alone, watched = (
        run("sigmoid", algorithm, x)[0] for x in (None, FisherMonitorSB3(details=True))
    )
    assert same_parameters(alone.policy, watched.policy)


def test_tensorboard_and_csv_take_it(tmp_path):
    from stable_baselines3.common.logger import configure

    model = PPO(HeadActorCriticPolicy, make_vec_env(Guess, 2), **SMALL)
    model.set_logger(configure(str(tmp_path), ["tensorboard", "csv"]))
    model.learn(96, FisherMonitorSB3(every_n_rollouts=2, details=True), log_interval=3)
    header, *rows = (tmp_path / "progress.csv").read_text().splitlines()
    assert all(row.strip(",") for row in rows), "an empty row"
    assert "fim_spectrum/condition_number" in header and "fim/picture" not in header
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("fim/exact_off_diagonal_mass")] == [32, 96]
    assert [e.step for e in events.Images("fim/picture")] == [32, 96], "the first and the last"


def test_no_more_states_than_asked_for():
    monitor = Kept(max_states=10)
    run(monitor=monitor)
    states = [states for states, _ in monitor.seen]
    assert [len(batch) for batch in states] == [10, 10, 10]
    assert len(np.unique(states[0].numpy(), axis=0)) == 10


def test_dict_observations():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(4)})
    for algorithm in (PPO, HeadPPO):
        env = make_vec_env(Guess, 2, env_kwargs={"observation_space": space})
        model = algorithm(HeadMultiInputActorCriticPolicy, env, **SMALL)
        monitor = Kept(max_states=20)
        model.learn(64, monitor)
        assert monitor.latest["fim/off_diagonal_mass_l1"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("head", ["sparsemax", "natural"])
def test_the_monitor_does_not_end_a_run_whose_observations_are_nan(head):
    monitor = FisherMonitorSB3(details=True)
    env = make_vec_env(Guess, 2)
    model = HeadPPO("MlpPolicy", env, policy_kwargs={"head": head}, **SMALL)
    with pytest.raises(NonFinite):  # from HeadPPO, after the monitor has looked
        model.learn(96, CallbackList([Spoil("observations", math.nan), monitor]))
    assert math.isnan(monitor.latest["train/entropy"])


def test_a_head_that_fails_or_is_too_large_does_not_end_a_run(monkeypatch):
    def tags():
        monitor = FisherMonitorSB3(details=True)
        run("softmax", HeadPPO, monitor)
        return {tag for tag, value in monitor.latest.items() if math.isfinite(value)}

    monkeypatch.setattr(SoftmaxHead, "step_fishers", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="not be computed: ZeroDivisionError") as warned:
        assert tags() == {"train/entropy"}
    assert sum("not be computed" in str(x.message) for x in warned) == 1
    monkeypatch.setattr(fisher_diagnostics, "LARGEST", 1)
    assert tags() == {"train/entropy"}


# -- masks and memory -----------------------------------------------------------------------------


class Few(Guess):
    """Allows the actions 0, 4, 8, ... of each space."""

    def action_masks(self):
        sizes = getattr(self.action_space, "nvec", [getattr(self.action_space, "n", 0)])
        return np.concatenate([np.arange(n) % 4 == 0 for n in sizes])


def run_masked(head, space, monitor=None, algorithm=MaskablePPO):
    env = make_vec_env(Few, 2, seed=0, env_kwargs={"action_space": space})
    kind = HeadActorCriticPolicy if algorithm is HeadPPO else HeadMaskablePolicy
    kwargs = {"head": head, "mask_mode": "prune"}
    model = algorithm(kind, env, policy_kwargs=kwargs, **SMALL)
    return model, logged(model, 32, monitor or FisherMonitorSB3(num_samples=512, details=True))[32]


@pytest.mark.parametrize(
    ("head", "algorithm"),
    [*((head, MaskablePPO) for head in HEADS), ("softmax", HeadPPO), ("natural", HeadPPO)],
)
def test_the_fisher_matrix_is_that_of_the_allowed_actions(head, algorithm):
    monitor = Kept(num_samples=512)
    model, row = run_masked(head, spaces.Discrete(9), monitor=monitor, algorithm=algorithm)
    ((states, weights),) = monitor.seen
    scores = scores_of(model, states, weights)
    it, allowed = model.policy.heads[0], torch.arange(9) % 4 == 0

    def log_probs(each):
        return it.log_probs(it.masked(each, allowed))[..., allowed]

    gradients = torch.func.vmap(torch.func.jacrev(log_probs))(scores)
    exact = torch.einsum("bk,bki,bkj->ij", log_probs(scores).exp(), gradients, gradients) / 32
    want = off_diagonal_mass(exact, "l1").item()
    assert row["fim/off_diagonal_mass_l1"] == pytest.approx(want, abs=1e-4)
    assert row["fim_sampled/off_diagonal_mass_l1"] == pytest.approx(want, abs=0.1)
    frobenius = off_diagonal_mass(exact).item()
    assert row["fim/exact_off_diagonal_mass"] == pytest.approx(frobenius, abs=1e-4)
    assert row["fim_sampled/off_diagonal_share"] == pytest.approx(frobenius**2, abs=0.05)
    if head in ("sigmoid", "natural"):
        assert row["fim/off_diagonal_mass"] == pytest.approx(0, abs=0.25), "it stays diagonal"
    assert row["fim/saturated"] == 0, "splits that a mask decides do not count"
    assert row["train/entropy"] == pytest.approx(math.log(3), abs=0.05)


def test_masks_of_several_actions_go_to_their_heads_which_have_names():
    _, row = run_masked("softmax", spaces.MultiDiscrete([5, 2, 9]))
    assert {"fim/heads.0/saturated", "fim/heads.2/saturated"} <= row.keys()
    assert row["train/entropy"] == pytest.approx(math.log(2) + math.log(3), abs=0.05)
    one_choice_each = spaces.MultiDiscrete([4, 3, 2])
    _, alone = run_masked("natural", one_choice_each, Kept(num_samples=512))
    assert alone["train/entropy"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("head", ["softmax", "natural"])
def test_recurrent_policies_are_observed_with_the_memory_they_played_with(head):
    env = make_vec_env(Guess, 2, seed=0)
    model = RecurrentPPO(HeadLstmPolicy, env, policy_kwargs={"head": head}, **SMALL)
    played = []

    class Play(BaseCallback):
        def _on_step(self):
            distribution = self.model.policy.action_dist
            played.append(distribution.entropy().mean().item())
            return True

    rows = logged(model, 64, CallbackList([Play(), Kept()]))
    for number, step in enumerate((32, 64)):
        assert rows[step].keys() >= set(TAGS)
        want = np.mean(played[16 * number : 16 * number + 16])
        assert rows[step]["train/entropy"] == pytest.approx(want, abs=1e-5)


def test_a_policy_without_a_head_is_refused():
    model = PPO("MlpPolicy", make_vec_env(Guess, 2), **SMALL)
    with pytest.raises(ValueError, match="contains no CategoricalHead"):
        model.learn(32, FisherMonitorSB3(details=True))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (FisherMonitorSB3, "every_n_rollouts", 0),
        (FisherMonitorSB3, "max_states", 0),
        (FisherMonitorSB3, "num_samples", 1),
        (FisherMonitor, "every_n_steps", 0),
        (FisherMonitor, "write_every_n_steps", 0),
        (FisherMonitor, "num_samples", 1),
    ],
)
def test_bad_options_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        kind(**{name: value})
