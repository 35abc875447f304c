"""The MLP VAE with N categorical latents, trained by score function."""

from typing import Any, Literal

from torch import nn

from catnat.checks import require_choice, require_positive
from catnat.lit_modules.networks import mlp_decoder, mlp_encoder
from catnat.lit_modules.vae import DiscreteVAE


class MLPDiscreteVAE(DiscreteVAE):
    r"""As :class:`DiscreteVAE`, with linear layers and no relaxation.

    The encoder's gradient is that of the closed-form KL plus

    .. math:: (-\log p(x \mid z) - b) \, \nabla \log q(z \mid x), \qquad z \sim q,

    with a constant b, or b the mean over the other samples. Trained on images that are binarized
    again at every step (``MNISTDataModule(variant="stochastic", batch_size=128)``).

    Args:
        head: a name from ``catnat.head_names()``.
        num_latents: N.
        num_categories: K.
        learning_rate: of the optimizer.
        optimizer: "adam" or "sgd" (without momentum).
        gradient_clip: largest norm of the gradient; 0 for no limit.
        baseline: "constant", or "leave-one-out": of M samples, the mean of the other M - 1.
        baseline_value: b for the constant baseline.
        num_samples: M, samples per image and step; at least 2 for leave-one-out.
        nll_samples: importance samples per image for test/nll; with fewer a test takes less time,
            and test/nll is larger.
        head_options: options of the head, such as ``amplitude`` for natural.
        capture: replay training steps as CUDA graphs, many times faster for a model this small,
            with the same results. None: wherever that is possible.
    """

    def __init__(
        self,
        head: str = "natural",
        num_latents: int = 10,
        num_categories: int = 8,
        learning_rate: float = 5e-4,
        optimizer: Literal["adam", "sgd"] = "adam",
        gradient_clip: float = 0.0,
        baseline: Literal["constant", "leave-one-out"] = "constant",
        baseline_value: float = 125.0,
        num_samples: int = 1,
        nll_samples: int = 512,
        head_options: dict[str, Any] | None = None,
        capture: bool | None = None,
    ) -> None:
        require_choice(("constant", "leave-one-out"), baseline=baseline)
        require_positive(num_samples=num_samples)
        if baseline == "leave-one-out" and num_samples < 2:
            raise ValueError(
                f"the leave-one-out baseline needs num_samples >= 2, got {num_samples}"
            )
        super().__init__(
            head,
            num_latents,
            num_categories,
            learning_rate,
            optimizer,
            gradient_clip=gradient_clip,
            nll_samples=nll_samples,
            head_options=head_options,
            estimator="score-function",
            capture=capture,
        )
        # Options of DiscreteVAE that are not used here are left out.
        self.save_hyperparameters(
            ignore=[
                "capture",
                "estimator",
                "lr_decay",
                "lr_decay_steps",
                "min_temperature",
                "temperature_rate",
            ]
        )
        self.baseline = baseline_value if baseline == "constant" else None
        self.num_samples = num_samples

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 28, 28) -> (B, num_scores), decoder (B, num_inputs) -> pixel logits."""
        return mlp_encoder(num_scores), mlp_decoder(num_inputs)
