"""Masks of actions: in distributions and policies, in HeadPPO, and beside sb3-contrib's own PPO."""

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from cases import HEADS
from cases_sb3 import (
    BOTH,
    BOX,
    SATURATED,
    SMALL,
    Guess,
    HeadMaskablePolicy,
    Rows,
    Unmasked,
    cartpole,
    choices,
    distance,
)
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from catnat import make_head
from catnat.sb3 import HeadActorCriticPolicy, HeadPPO, MaskedPlayer
from catnat.sb3.distributions import HeadDistribution
from catnat.sb3.masks import masks_of

SPACES = {
    "discrete": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "multibinary": spaces.MultiBinary(3),
}


class Strict(Guess):
    """Raises where a forbidden action is played."""

    def step(self, action):
        assert allows(self.action_masks(), action, self.action_space), "this action is forbidden"
        return super().step(action)


def allows(mask, action, space):
    starts = np.cumsum([0, *choices(space)[:-1]])
    return bool(mask[starts + np.atleast_1d(action)].all())


def guesses(space=None, count=2, kind=Strict, **options):
    return make_vec_env(kind, count, seed=0, env_kwargs={"action_space": space, **options})


def learned(algorithm, policy, env, rollouts=4, **options):
    model = algorithm(policy, env, **SMALL | {"ent_coef": 0.01} | options)
    model.set_logger(Logger(None, [Rows()]))
    return model.learn(rollouts * model.n_steps * model.n_envs)


# -- distributions --------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("K", [2, 4, 18])
def test_masks_hold_for_saturated_scores(head, K):
    it = make_head(head, K)
    scores = torch.tensor(SATURATED)[torch.randint(len(SATURATED), (800, it.num_scores))]
    scores.requires_grad_()
    masks = torch.rand(800, K) < 0.4
    masks[torch.arange(800), torch.randint(K, (800,))] = True
    dist = HeadDistribution([it]).proba_distribution(scores)
    dist.apply_masking(masks.numpy())
    probs = dist.distribution.probs
    assert (probs[~masks] == 0).all()
    assert torch.allclose(probs.sum(-1), torch.ones(800), atol=1e-5)
    for actions in (dist.sample(), dist.mode()):
        assert masks[torch.arange(800), actions].all()
    entropy = dist.entropy()
    assert torch.allclose(entropy, -torch.special.xlogy(probs, probs).sum(-1), atol=1e-4)
    (dist.log_prob(dist.sample()).sum() + entropy.sum()).backward()
    assert scores.grad.isfinite().all()


# -- policies -------------------------------------------------------------------------------------


class Additive(Guess):
    """Gives masks that are meant to be added to scores."""

    def action_masks(self):
        return np.array([0.0, -np.inf, -np.inf, 0.0, -np.inf])


def test_masks_that_are_added_to_scores_are_refused_everywhere():
    env = guesses(kind=Additive)
    model = HeadPPO("MlpPolicy", env, **SMALL)
    theirs = MaskablePPO(HeadMaskablePolicy, env, **SMALL)
    env.reset()
    masks = Additive().action_masks()
    for use in (
        lambda: model.learn(32),
        lambda: theirs.learn(32),
        lambda: masks_of(env),
        lambda: model.predict(np.zeros(3), action_masks=masks),
        lambda: MaskedPlayer(model, env).predict(np.zeros((2, 3))),
        lambda: model.policy(torch.zeros(1, 3), action_masks=torch.tensor(masks)),
    ):
        with pytest.raises(ValueError, match=r"masks are 1 where a choice is allowed.*got -inf"):
            use()


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([2, 3])])
@pytest.mark.parametrize("head", HEADS)
def test_renormalized_masks_divide_by_the_allowed_share(head, space):
    it = HeadActorCriticPolicy(
        BOX, space, lambda _: 1e-3, head=head, mask_mode="renormalize", head_options={"mix": 0.01}
    )
    shown, mask = torch.randn(6, 3), torch.tensor([True, True, False, True, True])
    free, masked = (
        it.get_distribution(shown, **options).distribution
        for options in ({}, {"action_masks": mask.expand(6, 5)})
    )
    if isinstance(space, spaces.Discrete):
        free, masked = [free], [masked]
    for before, after, allowed in zip(free, masked, mask.split(choices(space)), strict=True):
        shares = before.probs * allowed
        assert torch.allclose(after.probs, shares / shares.sum(-1, keepdim=True), atol=1e-6)
        assert (after.probs[:, ~allowed] == 0).all() and after.logits.isfinite().all()
    _, _, log_probs = it(shown, action_masks=mask.expand(6, 5))
    log_probs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in it.parameters())


@pytest.mark.parametrize("options", [{}, {"mix": 0.01}])
@pytest.mark.parametrize("head", HEADS)
def test_a_tree_is_renormalized_unless_told_otherwise_and_flat_heads_are_pruned(head, options):
    def scores_with_a_gradient(**more):
        it = HeadActorCriticPolicy(
            BOX, spaces.Discrete(70), lambda _: 1e-3, head=head, head_options=options, **more
        )
        scores = torch.zeros(1, it.heads[0].num_scores, requires_grad=True)
        with it.action_dist.using(masks=torch.arange(70)[None] % 35 == 0):  # 2 of 70
            it.action_dist.proba_distribution(scores)
        assert torch.allclose(it.action_dist.entropy(), torch.tensor(2.0).log())
        it.action_dist.log_prob(torch.tensor([35])).sum().backward()
        return int((scores.grad.abs() > 1e-6).sum())

    is_tree = head in ("sigmoid", "natural")
    pruned = scores_with_a_gradient(mask_mode="prune")
    assert pruned == (1 if is_tree else 2), "one split is left of a tree"
    kept = scores_with_a_gradient()
    assert kept > 10 if is_tree else kept == 2, "and all splits of two paths"


def test_the_mask_mode_is_checked_and_saved(tmp_path):
    kwargs = {"head": "natural", "mask_mode": "renormalize"}
    model = learned(HeadPPO, "MlpPolicy", guesses(), 1, policy_kwargs=kwargs)
    model.policy.save(str(tmp_path / "it"))
    copy = HeadActorCriticPolicy.load(str(tmp_path / "it"))
    assert copy.action_dist.mask_mode == "renormalize"
    with pytest.raises(ValueError, match="unknown mask_mode 'cut'; choose from prune, renorm"):
        HeadActorCriticPolicy(BOX, spaces.Discrete(5), lambda _: 1e-3, mask_mode="cut")


@pytest.mark.parametrize("kind", [HeadActorCriticPolicy, HeadMaskablePolicy])
@pytest.mark.parametrize("head", HEADS)
def test_every_method_of_a_policy_takes_masks(kind, head):
    it = kind(BOX, spaces.Discrete(5), lambda _: 1e-3, head=head)
    shown, mask = torch.randn(40, 3), np.array([[False, True, False, True, True]] * 40)
    for deterministic in (True, False):
        played = it(shown, deterministic=deterministic, action_masks=mask)[0].numpy()
        predicted, _ = it.predict(shown.numpy(), deterministic=deterministic, action_masks=mask)
        assert {*played, *predicted} <= {1, 3, 4}
    _, log_probs, entropy = it.evaluate_actions(shown, torch.full((40,), 3), action_masks=mask)
    q = it.get_distribution(shown, action_masks=mask).distribution
    assert torch.equal(q.logits[:, 3], log_probs) and torch.equal(q.entropy(), entropy)
    assert (it.get_distribution(shown).distribution.probs > 0).all(), "masks hold for one call"


# -- HeadPPO --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "case"), [*product(HEADS[1:], ["discrete"]), *product(["softmax"], SPACES)]
)
def test_head_ppo_equals_maskable_ppo(head, case):
    kind = MaskableActorCriticPolicy if head == "softmax" else HeadMaskablePolicy
    options = {} if head == "softmax" else {"policy_kwargs": {"head": head}}
    theirs = learned(MaskablePPO, kind, guesses(SPACES[case]), **options)
    ours = learned(HeadPPO, "MlpPolicy", guesses(SPACES[case]), **options)
    assert distance(ours, theirs) < 2e-6
    if head != "softmax":
        return
    logged, wanted = ours.logger.name_to_value, theirs.logger.name_to_value
    tags = {tag for tag in wanted if tag.startswith(("train/", "rollout/"))}
    assert tags <= logged.keys() and "train/approx_kl" in tags
    assert all(logged[tag] == pytest.approx(wanted[tag], rel=1e-4, abs=1e-6) for tag in tags)


def test_masks_with_dict_observations_and_a_wrapper_that_gives_masks():
    def wrapped():
        inner = Guess(spaces.Discrete(4), BOTH)
        inner.action_masks = None
        return ActionMasker(inner, lambda env: np.arange(4) == env.unwrapped.count % 4)

    model = learned(HeadPPO, "MultiInputPolicy", make_vec_env(wrapped, 2, seed=0), rollouts=1)
    steps = np.arange(16) % 8 % 4
    assert (model.rollout_buffer.actions[..., 0] == steps[:, None]).all(), "one was allowed"


class Many(Guess):
    """Allows 28 of 1,400 actions, others at each step."""

    def action_masks(self):
        return (np.arange(1400) * 37 + self.count) % 50 == 0


@pytest.mark.parametrize("head", HEADS)
def test_large_masks_are_stable(head):
    env = guesses(spaces.Discrete(1400), kind=type("StrictMany", (Strict, Many), {}))
    options = {"policy_kwargs": {"head": head}, "learning_rate": 0.05, "n_epochs": 4}
    model = learned(HeadPPO, "MlpPolicy", env, 4, **options)
    assert all(weight.isfinite().all() for weight in model.policy.parameters())


def test_masks_are_used_where_there_are_masks_unless_told_otherwise():
    assert HeadPPO("MlpPolicy", guesses(), **SMALL).uses_masks
    assert not HeadPPO("MlpPolicy", cartpole(), **SMALL).uses_masks
    model = learned(HeadPPO, "MlpPolicy", guesses(kind=Guess), 1, masks=False)
    assert model.rollout_buffer.action_masks is None
    with pytest.raises(ValueError, match="masks is True, but the environment has no method act"):
        HeadPPO("MlpPolicy", cartpole(), masks=True, **SMALL)


def test_a_model_follows_its_environment():
    model = learned(HeadPPO, "MlpPolicy", guesses(count=2), 1)
    model.set_env(make_vec_env(Unmasked, 2, seed=0))
    assert not model.learn(32).uses_masks and model.rollout_buffer.action_masks is None
    model.set_env(guesses(count=2))
    assert model.learn(32).uses_masks


class Stuck(Guess):
    """Allows nothing at its fifth step."""

    def action_masks(self):
        return super().action_masks() & (self.count != 4)


def test_evaluation_without_masks_is_warned_about():
    from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback

    blind = EvalCallback(guesses(kind=Guess), eval_freq=8, n_eval_episodes=1, verbose=0)
    model = HeadPPO("MlpPolicy", guesses(), **SMALL)
    with pytest.warns(UserWarning, match="actions are not masked.*MaskableEvalCallback"):
        model.learn(32, blind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not masked")
        model.learn(32, MaskableEvalCallback(guesses(), eval_freq=8, n_eval_episodes=1, verbose=0))
        HeadPPO("MlpPolicy", guesses(kind=Guess), masks=False, **SMALL).learn(32, blind)


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiBinary(2)])
def test_an_environment_that_allows_nothing_is_named(space):
    env = DummyVecEnv([lambda: Guess(space), lambda: Stuck(space)])
    for model in (
        HeadPPO("MlpPolicy", env, **SMALL),
        MaskablePPO(HeadMaskablePolicy, env, **SMALL),
    ):
        with pytest.raises(ValueError, match="the mask of state 1 allows no action"):
            model.learn(32)


def test_environments_in_other_processes_give_their_masks():
    def alone():
        return Strict(observation_space=spaces.Box(-1, 1, (3,)))  # a space draws for one only

    apart = SubprocVecEnv([alone, alone], start_method="fork")  # much the fastest
    together = DummyVecEnv([alone, alone])
    try:
        one, other = (learned(HeadPPO, "MlpPolicy", env, 2) for env in (apart, together))
        evaluate_policy(MaskedPlayer(one, apart), apart, 2, deterministic=False, warn=False)
    finally:
        apart.close()
    assert one.uses_masks, "known without asking an environment that is closed"
    assert distance(one, other) == 0
    masks = [model.rollout_buffer.action_masks for model in (one, other)]
    assert np.array_equal(*masks) and not masks[0].all()


# -- playing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SPACES)
def test_a_masked_player_plays_allowed_actions_only(case):
    model = HeadPPO("MlpPolicy", guesses(SPACES[case]), **SMALL)
    env = guesses(SPACES[case], 3)
    evaluate_policy(MaskedPlayer(model, env), env, 4, deterministic=False, warn=False)
    evaluate_policy(MaskedPlayer(model.policy, env), env, 4, warn=False)
    with pytest.raises(AssertionError, match="this action is forbidden"):
        evaluate_policy(model, guesses(SPACES[case]), 20, deterministic=False)


# -- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [None, True, False])
def test_saving_keeps_own_options(masks, tmp_path):
    options = {"masks": masks, "value_loss": "cleanrl", "capture": False}
    model = learned(HeadPPO, "MlpPolicy", guesses(kind=Guess), 1, **options)
    model.save(tmp_path / "it")
    copy = HeadPPO.load(tmp_path / "it", guesses(kind=Guess), device="cpu")
    assert (copy.value_loss, copy.capture) == ("cleanrl", False)
    assert copy.masks is masks and copy.uses_masks is (masks is not False)
    for learner in (model, copy):
        learner.set_env(guesses(kind=Guess))
        learner.set_random_seed(3)
        learner.learn(64, reset_num_timesteps=False)
    assert distance(model, copy) < 1e-7
    alone = HeadPPO.load(tmp_path / "it", device="cpu")
    assert not alone.uses_masks, "without an environment there are no masks"
