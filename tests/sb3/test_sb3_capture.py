"""HeadPPO with CUDA graphs: on the CPU the bookkeeping, on CUDA the graphs themselves."""

import pytest
import torch
from cases import HEADS
from cases_replay import replay_eagerly
from cases_sb3 import BOTH, Forcing, Guess, cartpole, choices, distance, learn, same_parameters
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from catnat.cuda_graph import WARM_UP
from catnat.sb3 import HeadPPO, cleanrl_schedule, ppo

cuda = pytest.mark.gpu


@pytest.fixture
def without_cuda(monkeypatch):
    replay_eagerly(ppo, ppo, False, monkeypatch)


def guesses(**options):
    return make_vec_env(Guess, 2, seed=0, env_kwargs=options)


CASES = {
    "plain": {},
    "odd batches": {"batch_size": 24},
    "falling": {
        "learning_rate": cleanrl_schedule(0.01, 192, 64),
        "clip_range": lambda remaining: 0.1 * remaining + 0.01,
        "value_loss": "cleanrl",
        "ent_coef": 0.01,
    },
}


# What makes environments, and the policy for them.
ENVIRONMENTS = {
    "forced": (Forcing, "MlpPolicy"),
    "dict": (lambda: guesses(observation_space=BOTH), "MultiInputPolicy"),
    "multidiscrete": (lambda: guesses(action_space=spaces.MultiDiscrete([2, 3])), "MlpPolicy"),
}


def assert_near(eager, replayed, atol):
    assert replayed._captured and not eager._captured
    assert distance(eager, replayed) < atol


@pytest.mark.parametrize(
    ("case", "head", "env"),
    [
        *((case, head, "cartpole") for case in CASES for head in ("sparsemax", "natural")),
        *(("plain", "natural", env) for env in ENVIRONMENTS),
    ],
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_replayed_steps_are_the_same(case, head, env, without_cuda):
    make_env, kind = ENVIRONMENTS.get(env, (cartpole, "MlpPolicy"))
    options = {"rollouts": 3, "head": head, "kind": kind} | CASES[case]
    eager, replayed = (learn(env=make_env(), capture=x, **options) for x in (False, None))
    assert_near(eager, replayed, 1e-6)
    logged, wanted = replayed.logger.name_to_value, eager.logger.name_to_value
    assert logged.keys() == wanted.keys()
    assert all(logged[tag] == pytest.approx(wanted[tag], abs=1e-5, rel=1e-4) for tag in wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"max_grad_norm": 0.1},
        {"normalize_advantage": False},
        {"value_loss": "cleanrl"},
        {"clip_range_vf": lambda _: 0.2},
        {"target_kl": 0.01},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_callback_changes_is_captured_anew(change, without_cuda):
    model = learn(rollouts=1)
    update = model._optimize
    model.ent_coef = 0.1  # lives on the device
    model.train()
    assert model._optimize is update and model._numbers[4] == pytest.approx(0.1)
    vars(model).update(change)
    model.train()
    assert model._optimize is not update


def test_checkpoints_fit_any_device(without_cuda, tmp_path, monkeypatch):
    model = learn()
    model.save(tmp_path / "it")
    assert isinstance(model.policy.optimizer.param_groups[0]["lr"], Tensor)  # still captured
    group = model.get_parameters()["policy.optimizer"]["param_groups"][0]
    assert group["lr"] == pytest.approx(3e-4) and not isinstance(group["lr"], Tensor)
    assert not group["capturable"] and group["fused"] is None
    monkeypatch.undo()
    copy = HeadPPO.load(tmp_path / "it", env=cartpole(), device="cpu")
    assert same_parameters(copy.policy, model.policy)
    copy.learn(64)
    assert not isinstance(copy.policy.optimizer.param_groups[0]["lr"], Tensor)


def test_capturing_can_be_switched_off_in_between(without_cuda):
    model = learn()
    model.capture = False
    model.learn(64)
    assert not isinstance(model.policy.optimizer.param_groups[0]["lr"], Tensor)


class Waiting(TorchDispatchMode):
    """Refuses what makes the host wait for the device, and graphs impossible."""

    BAD = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "multinomial")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.BAD, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("head", HEADS)
def test_captured_work_never_waits(head):
    for env in (cartpole(2), guesses(action_space=spaces.MultiDiscrete([3, 5]))):
        model = learn(env=env, head=head, rollouts=1, value_loss="cleanrl")
        arguments = {"obs": model._rollout["observations"][:2]}
        if model.uses_masks:
            arguments["action_masks"] = model._rollout["action_masks"][:2]
        with Waiting():
            model._forward(arguments)
            *_, loss = model._loss(torch.arange(16))
            loss.backward()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Waiting():
        loss.detach().item()


@cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_graphs_take_the_steps_of_eager_training(case, head):
    options = {"rollouts": 3, "head": head, "device": "cuda", "learning_rate": 3e-3} | CASES[case]
    eager = learn(capture=False, **options)
    replayed = learn(capture=True, **options)
    assert replayed._optimize._graph is not None
    assert_near(eager, replayed, 1e-3)


@cuda
@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 2, 4])])
@pytest.mark.parametrize("head", HEADS)
def test_graphs_with_masks_take_the_steps_of_eager_training(head, space):
    options = {"rollouts": 3, "head": head, "device": "cuda", "learning_rate": 3e-3}
    eager, replayed = (
        learn(env=guesses(action_space=space), capture=x, **options) for x in (False, True)
    )
    assert replayed.uses_masks and replayed._optimize._graph is not None
    rollout = replayed._rollout
    masks = rollout["action_masks"].split(choices(space), -1)
    for mask, actions in zip(masks, rollout["actions"].unbind(-1), strict=True):
        assert mask.gather(-1, actions[..., None]).all()
    assert_near(eager, replayed, 1e-3)


@cuda
def test_nothing_waits_for_the_device_in_an_update():
    model = learn(device="cuda", rollouts=1, capture=True)
    indices = torch.arange(16, device="cuda")
    for _ in range(WARM_UP + 1):
        model._optimize(indices)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model._optimize(indices)
        model._minimize(indices)  # eagerly, too
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda
def test_cuda_checkpoints_go_on_without_cuda(tmp_path):
    model = learn(device="cuda", rollouts=3, capture=True)
    model.save(tmp_path / "it")
    for device in ("cpu", "cuda"):
        copy = HeadPPO.load(tmp_path / "it", env=cartpole(), device=device)
        copy.learn(128)
        assert all(p.isfinite().all() for p in copy.policy.parameters())
