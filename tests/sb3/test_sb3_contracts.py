"""What users of Stable-Baselines3 rely on: NaN raises, zips interchange."""

import numpy as np
import pytest
from cases_sb3 import BOTH, BOX, SMALL, Guess, cartpole, distance, same_parameters
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env

from catnat.sb3 import HeadActorCriticPolicy, HeadPPO, cleanrl_schedule

# -- NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO, A2C])
@pytest.mark.parametrize("cause", ["observation", "parameter"])
def test_predict_raises_value_error_for_nan(algorithm, cause):
    model = algorithm(HeadActorCriticPolicy, make_vec_env(Guess, 1), device="cpu")
    shown = BOX.sample()
    if cause == "parameter":
        model.policy.action_net.bias.data.fill_(np.nan)
    else:
        shown[0] = np.nan
    with pytest.raises(ValueError, match="probabilities are NaN"):
        model.predict(shown)


# -- zips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), [(PPO, HeadPPO), (HeadPPO, PPO)])
def test_each_loads_the_zip_of_the_other_and_goes_on_as_the_writer_would(writer, reader, tmp_path):
    rate = cleanrl_schedule(0.01, 1000, 32)
    model = writer(HeadActorCriticPolicy, cartpole(), learning_rate=rate, **SMALL).learn(128)
    model.save(tmp_path / "it")
    copy, other = (
        algorithm.load(tmp_path / "it", cartpole(), device="cpu") for algorithm in (writer, reader)
    )
    assert type(other) is reader and same_parameters(model.policy, other.policy)
    assert other.lr_schedule(0.5) == rate(0.5)
    for reloaded in (copy, other):
        reloaded.set_random_seed(3)
        reloaded.learn(128, reset_num_timesteps=False)
        assert reloaded.num_timesteps == 256
    assert distance(copy, other) < 1e-6


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
