"""One contract for each private name of Stable-Baselines3 in ``catnat/sb3/sb3_compat.py``."""

import inspect
import re
from pathlib import Path

import pytest
import stable_baselines3
from cases_sb3 import PICTURE, SMALL, Guess, cartpole
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.vec_env import VecTransposeImage

import catnat
from catnat.sb3 import sb3_compat
from catnat.sb3.sb3_compat import set_counts, total_steps_of, updates_of, wrap_env

VERSION = stable_baselines3.__version__
ROOT = Path(catnat.__file__).parents[1]
METHODS = [
    (ActorCriticPolicy, "_build"),
    (BasePolicy, "_get_constructor_parameters"),
    (OnPolicyAlgorithm, "_setup_model"),
    (OnPolicyAlgorithm, "_excluded_save_params"),
    (OnPolicyAlgorithm, "_update_info_buffer"),
    (OnPolicyAlgorithm, "_wrap_env"),
]


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_methods_are_where_they_were(owner, name):
    assert callable(getattr(owner, name, None)), (
        f"Stable-Baselines3 {VERSION} moved {owner.__name__}.{name}: adapt catnat/sb3/sb3_compat.py"
    )


@pytest.mark.parametrize(
    "name",
    [
        "_last_obs",
        "_last_episode_starts",
        "_current_progress_remaining",
        "_n_updates",
        "_stats_window_size",
        "_total_timesteps",
    ],
)
def test_attributes_are_where_they_were(name):
    model = PPO("MlpPolicy", cartpole(2), **SMALL).learn(32)
    assert hasattr(model, name), (
        f"Stable-Baselines3 {VERSION} moved {name}: adapt catnat/sb3/sb3_compat.py"
    )


def test_what_the_names_mean():
    model = PPO("MlpPolicy", cartpole(2), **SMALL).learn(64)
    assert model._last_obs.shape == (2, 4) and model._last_episode_starts.shape == (2,)
    assert model._current_progress_remaining == 0 and total_steps_of(model) == 64
    assert updates_of(model) == 2 * SMALL["n_epochs"]
    set_counts(model, 7, [{"r": 1.0, "l": 2, "t": 0.1}], [True])
    assert updates_of(model) == 7 and list(model.ep_success_buffer) == [True]
    assert model.ep_info_buffer.maxlen == model._stats_window_size == 100
    games = len(model.ep_info_buffer)
    model._update_info_buffer([{"episode": {"r": 3.0, "l": 4, "t": 0.2}}, {}])
    assert len(model.ep_info_buffer) == games + 1
    assert {"policy", "env"} <= {*model._excluded_save_params()}
    assert {"observation_space", "net_arch"} <= model.policy._get_constructor_parameters().keys()
    pictures = make_vec_env(Guess, 1, env_kwargs={"observation_space": last_channel()})
    assert isinstance(wrap_env(pictures), VecTransposeImage)


def last_channel():
    return type(PICTURE)(0, 255, (36, 36, 3), PICTURE.dtype)


def test_a_policy_is_built_when_its_distribution_was_made():
    order = []

    class Watched(ActorCriticPolicy):
        def _build(self, lr_schedule):
            order.append(self.action_dist is not None)
            super()._build(lr_schedule)
            order.append(hasattr(self, "optimizer"))

    PPO(Watched, cartpole(1), **SMALL)
    assert order == [True, True]


def test_the_rest_of_catnat_uses_no_private_name_of_stable_baselines():
    names = {name for _, name in METHODS} | {
        *re.findall(r"(?:self|model)\.(_[a-z]\w+)", inspect.getsource(sb3_compat))
    }
    files = [*(ROOT / "catnat/sb3").glob("*.py"), *(ROOT / "callbacks").glob("*sb3*.py")]
    for path in files:
        if path.name == "sb3_compat.py":
            continue
        used = names & {*re.findall(r"(?:self|model|super\(\))\.(_[a-z]\w+)", path.read_text())}
        assert not used, f"{path.name} uses {used}: put it into catnat/sb3/sb3_compat.py"


def test_the_versions_have_an_upper_bound():
    text = (ROOT / "pyproject.toml").read_text()
    for package in ("stable-baselines3", "sb3-contrib"):
        assert re.search(rf'"{package}>=[\d.]+,<[\d.]+"', text), package
