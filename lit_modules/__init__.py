"""The experiments' models, as Lightning modules."""

from .mlp_vae import MLPDiscreteVAE
from .vae import DiscreteVAE

__all__ = ["DiscreteVAE", "MLPDiscreteVAE"]
