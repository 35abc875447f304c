"""What the tests of the JAX heads share: compilation in little time, cases, and how to compare.

How two implementations are compared: a difference of values is divided by max(1, |value|), because
log-probabilities reach -1000 and float32 has seven digits. A difference of gradients is divided by
max(1, the largest gradient of the row): the gradient of a score is a sum of terms of that size.
"""

import math
import os
from importlib.metadata import version

import pytest

pytest.importorskip("jaxlib", reason="needs the extra [jax]")

# Compiling takes the time of these tests, half of it for making code fast. So a test compiles one
# function where it can: JAX compiles every operation outside of jit alone.
# XLA ends the process at a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
import numpy as np
from cases import slow

from catnat.jax import head_names

AS_USERS_HAVE_IT = {"xla_backend_optimization_level": 3}
if version("jaxlib").startswith("0.10."):
    AS_USERS_HAVE_IT["xla_cpu_use_fusion_emitters"] = True
HEADS = head_names()
# The others are like this one, and their numbers are compared with torch's in any case.
QUICK = [name if name == "natural" else slow(name) for name in HEADS]
CATNAT = ("sigmoid", "natural")
CASES = {name: (name, {}) for name in HEADS} | {"tail": ("natural", {"tail": 0.05})}
DTYPES = (np.float32, np.float64)
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}
SCALES = (0.1, 1.0, 3.0, 30.0)  # the last saturates natural and sparsemax


@pytest.fixture(autouse=True)
def _precision(request):
    """float64 for the tests in float64, and for no others."""
    wide = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    with jax.enable_x64(wide is np.float64):
        yield


def scores_for(head, dtype, rows=3):
    """Scores of all scales, and scores near and on the edges of natural."""
    rng = np.random.default_rng(head.num_categories)
    scores = [scale * rng.standard_normal((rows, head.num_scores)) for scale in SCALES]
    sign = rng.choice((-1.0, 1.0), (rows, head.num_scores))
    edge = math.pi - 10.0 ** rng.uniform(-7, 0, (rows, head.num_scores))
    return np.concatenate((*scores, sign * edge, sign[:1] * math.pi, 0 * sign[:1])).astype(dtype)


def difference(got, want, by_row=False):
    """Largest difference, relative as this file's first lines say."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.abs(want).max(-1, keepdims=True) if by_row else np.abs(want)
    return (np.abs(got - want) / np.maximum(1, size)).max(initial=0)
