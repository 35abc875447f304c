"""Every test starts from the same seed, on one thread, with deterministic hypothesis."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
