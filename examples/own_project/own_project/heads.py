"""A head of this project; importing the module makes its name known."""

import torch
from torch import Tensor

from catnat import CatnatHead


class ProbitHead(CatnatHead, name="probit"):
    """catnat with a(s) = Φ(s), the normal distribution function."""

    def log_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - Φ(x)) and log Φ(x)."""
        x = x.clamp(-1e6, 1e6)  # far beyond, x² is no float32 any more
        return torch.special.log_ndtr(-x), torch.special.log_ndtr(x)
