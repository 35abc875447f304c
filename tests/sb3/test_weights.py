"""Weights of a head are loaded into a policy with this head alone, and a run's state is whole."""

import copy

import numpy as np
import pytest
import torch
from cases_sb3 import SMALL, cartpole, same_parameters
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger

from catnat.sb3 import HeadActorCriticPolicy, HeadPPO
from catnat.sb3.algorithms import load_state, state_of


def model_with(head, algorithm=PPO, **options):
    kwargs = {"head": head, "head_options": options}
    return algorithm(HeadActorCriticPolicy, cartpole(1), policy_kwargs=kwargs, **SMALL)


PAIRS = [(("natural", {}), ("sigmoid", {})), (("natural", {"tail": 0.05}), ("natural", {}))]


@pytest.mark.parametrize(("saved", "own"), [*PAIRS, *(pair[::-1] for pair in PAIRS)])
@pytest.mark.parametrize("way", ["set_parameters", "custom_objects", "load_state_dict", "policy"])
def test_weights_of_another_head_are_refused(saved, own, way, tmp_path):
    writer = model_with(saved[0], **saved[1])
    reader = model_with(own[0], HeadPPO, **own[1])
    before = copy.deepcopy(reader.policy.state_dict())
    writer.save(tmp_path / "it")
    writer.policy.save(str(tmp_path / "policy"))
    message = f"the weights belong to head {saved[0]} with options .*, the policy has head {own[0]}"
    with pytest.raises(ValueError, match=message):
        if way == "set_parameters":
            reader.set_parameters(str(tmp_path / "it"))
        elif way == "custom_objects":
            kwargs = {"head": own[0], "head_options": own[1]}
            PPO.load(tmp_path / "it", custom_objects={"policy_kwargs": kwargs})
        elif way == "load_state_dict":
            reader.policy.load_state_dict(writer.policy.state_dict())
        else:
            file = torch.load(tmp_path / "policy", weights_only=False)
            reader.policy.load_state_dict(file["state_dict"])
    assert all(torch.equal(before[key], value) for key, value in reader.policy.state_dict().items())


def test_weights_of_the_same_head_load_by_every_way(tmp_path):
    writer = model_with("natural", tail=np.float64(0.05))
    reader = model_with("natural", HeadPPO, tail=0.05)
    writer.policy.action_net.bias.data.fill_(0.5)
    writer.save(tmp_path / "it")
    for source in (str(tmp_path / "it"), writer.get_parameters()):
        reader.policy.action_net.bias.data.zero_()
        reader.set_parameters(source)
        assert same_parameters(writer.policy, reader.policy)
    assert same_parameters(PPO.load(tmp_path / "it").policy, writer.policy)
    plain = dict(writer.policy.state_dict().items())
    assert all(isinstance(value, torch.Tensor) for value in plain.values())
    reader.policy.load_state_dict(plain)  # as in earlier files, which name no head


def test_successes_of_games_survive_a_resume():
    model = HeadPPO("MlpPolicy", cartpole(2), **SMALL).learn(64)
    model.ep_success_buffer.extend([True, False, np.bool_(True)])
    other = HeadPPO("MlpPolicy", cartpole(2), **SMALL)
    other.set_logger(Logger(None, []))
    load_state(other, state_of(model))
    assert list(other.ep_success_buffer) == [1.0, 0.0, 1.0]
    assert other.ep_success_buffer.maxlen == 100
