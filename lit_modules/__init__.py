"""The built-in models as Lightning modules."""

if __name__ != "catnat.lit_modules":  # imported by the bare name of the folder
    from catnat.bare_names import use_catnat

    use_catnat(__name__)

from catnat.lit_modules.graph import GraphStructureLearner
from catnat.lit_modules.mlp_vae import MLPDiscreteVAE
from catnat.lit_modules.vae import DiscreteVAE

__all__ = ["DiscreteVAE", "GraphStructureLearner", "MLPDiscreteVAE"]
