"""The experiments' models, as Lightning modules."""

from .graph import GraphStructureLearner
from .mlp_vae import MLPDiscreteVAE
from .vae import DiscreteVAE

__all__ = ["DiscreteVAE", "GraphStructureLearner", "MLPDiscreteVAE"]
