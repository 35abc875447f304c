"""The MLP VAE with N categorical latents, trained by score function."""

from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn

from catnat.checks import plain_options, require_choice, require_positive
from catnat.lit_modules.networks import mlp_decoder, mlp_encoder
from catnat.lit_modules.vae import DiscreteVAE

_LEARNING_RATE = 5e-4  # of Adam


class MLPDiscreteVAE(DiscreteVAE):
    r"""A :class:`DiscreteVAE` with linear layers, trained with the score function.

    The encoder's gradient is that of the closed-form KL plus

    .. math:: (-\log p(x \mid z) - b) \, \nabla \log q(z \mid x), \qquad z \sim q,

    where b is a constant, or the mean over the other samples. The paper trains it on images that
    are binarized again at every step (``MNISTDataModule(variant="stochastic", batch_size=128)``).

    Args:
        head: name of the head, one of ``catnat.head_names()``.
        num_latents: number of latent variables (N).
        num_categories: number of categories per latent (K).
        learning_rate: learning rate of the optimizer. None: 0.0005, or that of ``optimizer``.
        optimizer: function that makes the optimizer of given parameters, such as
            ``torch.optim.SGD``; None for Adam.
        lr_scheduler: function that makes a learning rate scheduler of the optimizer, which is
            stepped after every step; None for a constant learning rate.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        baseline: "constant", or "leave-one-out", the mean loss of the other M - 1 samples.
        baseline_value: b for the constant baseline.
        num_samples: number of samples per image and step (M), at least 2 for leave-one-out.
        nll_samples: importance samples per image for test/nll; fewer samples are faster, but bias
            test/nll upward.
        head_options: options of the head, such as ``amplitude`` for natural.
        kl_weight: weight of the KL divergence, or its final weight with a schedule.
        kl_start: weight at the first step. It changes linearly to ``kl_weight`` over ``kl_steps``,
            which is then required. See :class:`DiscreteVAE` on annealing from 0.
        kl_steps: number of steps from ``kl_start`` to ``kl_weight``.
        capture: whether to replay training steps as CUDA graphs if possible.
    """

    def __init__(
        self,
        head: str = "sigmoid",
        num_latents: int = 10,
        num_categories: int = 8,
        learning_rate: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip: float = 0.0,
        baseline: Literal["constant", "leave-one-out"] = "constant",
        baseline_value: float = 125.0,
        num_samples: int = 1,
        nll_samples: int = 512,
        head_options: dict[str, Any] | None = None,
        kl_weight: float = 1.0,
        kl_start: float | None = None,
        kl_steps: int | None = None,
        capture: bool = False,
    ) -> None:
        require_choice(("constant", "leave-one-out"), baseline=baseline)
        require_positive(num_samples=num_samples)
        if baseline == "leave-one-out" and num_samples < 2:
            raise ValueError(
                f"the leave-one-out baseline needs num_samples >= 2, got {num_samples}"
            )
        if learning_rate is None and optimizer is None:
            learning_rate = _LEARNING_RATE
        head_options = plain_options(head_options)
        super().__init__(
            head,
            num_latents,
            num_categories,
            learning_rate,
            optimizer,
            lr_scheduler,
            gradient_clip=gradient_clip,
            nll_samples=nll_samples,
            head_options=head_options,
            estimator="score-function",
            kl_weight=kl_weight,
            kl_start=kl_start,
            kl_steps=kl_steps,
            capture=capture,
        )
        # Options of DiscreteVAE that are not used here are left out.
        self.save_hyperparameters(
            ignore=[
                "capture",
                "estimator",
                "lr_scheduler",
                "min_temperature",
                "num_draws",
                "optimizer",
                "temperature",
                "temperature_rate",
            ]
        )
        self.baseline = baseline_value if baseline == "constant" else None
        self.num_samples = num_samples

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 28, 28) -> (B, num_scores), decoder (B, num_inputs) -> pixel logits."""
        return mlp_encoder(num_scores), mlp_decoder(num_inputs)
