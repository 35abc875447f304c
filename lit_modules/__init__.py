"""The experiments' models, as Lightning modules."""

from catnat.lit_modules.graph import GraphStructureLearner
from catnat.lit_modules.mlp_vae import MLPDiscreteVAE
from catnat.lit_modules.vae import DiscreteVAE

__all__ = ["DiscreteVAE", "GraphStructureLearner", "MLPDiscreteVAE"]
