"""Noise of ranks: each has its own, and a resumed run draws what it would have drawn."""

import random

import numpy as np
import pytest
import torch

from catnat.rng import forked_random_state, random_states, separate_noise, set_random_states

CPU = torch.device("cpu")


def saved(seed, ranks):
    """The state that a run on so many ranks saves."""
    states = []
    for rank in range(ranks):
        torch.manual_seed(seed)
        separate_noise(rank)
        torch.rand(7)  # some steps
        states += random_states(CPU)
    return states


def draws(states, ranks, seed=99):
    """What each rank of a resumed run draws first; all of them were seeded alike before."""
    drawn = []
    for rank in range(ranks):
        torch.manual_seed(seed)
        set_random_states(states, CPU, rank)
        drawn.append(torch.rand(4).tolist())
    return drawn


@pytest.mark.parametrize(("before", "now"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1)])
def test_every_rank_of_a_resumed_run_has_noise_of_its_own(before, now):
    drawn = draws(saved(5, before), now)
    assert len({tuple(numbers) for numbers in drawn}) == now


@pytest.mark.parametrize("before", [1, 2])
def test_new_ranks_draw_the_same_whenever_a_checkpoint_is_loaded(before):
    states = saved(5, before)
    assert draws(states, 4, seed=99) == draws(states, 4, seed=1)
    assert draws(saved(6, before), 4)[3] != draws(states, 4)[3], "it follows from the checkpoint"


def test_ranks_that_were_there_go_on():
    states = saved(5, 2)
    for rank in range(2):
        torch.manual_seed(5)
        separate_noise(rank)
        torch.rand(7)
        assert torch.rand(4).tolist() == draws(states, 4)[rank]


@pytest.mark.gpu
def test_a_forked_state_of_a_gpu_is_that_of_manual_seed():
    for device in (torch.device("cuda"), torch.device("cuda", 0)):
        before = torch.cuda.get_rng_state(device)
        with forked_random_state(device, seed=3):
            drawn = torch.rand(4, device=device), torch.rand(4)
        assert torch.equal(torch.cuda.get_rng_state(device), before)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4, device=device), drawn[0])
        assert torch.equal(torch.rand(4), drawn[1])


def test_a_fork_draws_from_its_seed_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with forked_random_state(CPU, seed=3):
            drawn.append(torch.rand(4).tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1]
    with pytest.raises(ArithmeticError), forked_random_state(CPU, seed=3):
        raise ArithmeticError
    assert torch.equal(torch.get_rng_state(), before), "also after an error"


def test_a_restored_state_is_that_of_all_generators():
    def numbers():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    states = random_states(CPU)
    first = numbers()
    assert numbers() != first
    set_random_states(states, CPU)
    assert numbers() == first
