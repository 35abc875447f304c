"""The experiments' models, as Lightning modules."""

if __name__ != "catnat.lit_modules":  # imported by the bare name of the folder
    __path__ = []  # no submodules: they would be other modules than those of catnat.lit_modules

from catnat.lit_modules.graph import GraphStructureLearner
from catnat.lit_modules.mlp_vae import MLPDiscreteVAE
from catnat.lit_modules.vae import DiscreteVAE

__all__ = ["DiscreteVAE", "GraphStructureLearner", "MLPDiscreteVAE"]
