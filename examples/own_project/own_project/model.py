"""A VAE with another encoder."""

from torch import nn

from catnat.lit_modules import DiscreteVAE


class PatchVAE(DiscreteVAE):
    """Reads an image as 4 x 4 patches of 7 x 7 pixels."""

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 28, 28) -> (B, num_scores), and the decoder as it was."""
        _, decoder = super().make_networks(num_scores, num_inputs)
        encoder = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=7, stride=7),  # (B, 32, 4, 4)
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 128),
            nn.GELU(),
            nn.Linear(128, num_scores),
        )
        return encoder, decoder
