"""The convolutional VAE with N categorical latents, trained through samples of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from catnat.checks import plain_options, require_at_least, require_name, require_positive
from catnat.compiling import compiled_in_parts, not_compiled
from catnat.cuda_graph import DeviceScalar
from catnat.distributions import HeadCategorical
from catnat.estimator_table import TABLE, find_estimator
from catnat.estimators import score_function_surrogate
from catnat.heads.registry import make_head
from catnat.lit_modules.faults import (
    checked_scores,
    require_default_shape,
    require_images,
    require_num_scores,
)
from catnat.lit_modules.networks import conv_decoder, conv_encoder
from catnat.lit_modules.step_module import StepModule
from catnat.losses import bernoulli_nll, importance_weighted_nll, kl_to_uniform
from catnat.metrics import RowMeans

ESTIMATORS = tuple(e for e in TABLE if e.draw or e.function is score_function_surrogate)
"""The estimators of :class:`DiscreteVAE`."""

_COLLAPSED_BELOW = 0.1  # nats of information about an image, in all latents together
# A code is hardly used below this perplexity, this share of K, or this share of N log K nats.
_FEW_CATEGORIES, _FEW_OF_MANY, _LITTLE = 1.9, 0.05, 0.02
_DECODED_AT_ONCE = {"cuda": 32768}  # images, in the importance-sampled likelihood; else 512
_LEARNING_RATE = 1e-3  # of Adam


class DiscreteVAE(StepModule):
    r"""VAE for 28 x 28 images with N categorical latents z_1..z_N of K categories each.

    .. math:: \mathrm{loss} = -\log p(x \mid z) + w \, KL(q(z \mid x) \,\|\, \mathrm{uniform})

    z is a one-hot sample of q. The estimator determines its gradient. "gumbel" (the default) uses
    the gradient of the relaxed sample at temperature τ(step) = max(τ(0) exp(-rate step), min),
    updated every 1,000 steps. "gumbel-rao" uses the mean gradient of several relaxed samples.
    ``q.rsample`` describes these estimators, "straight-through", "reinmax" and "relaxed", where z
    is the relaxed sample itself. "score-function" uses two samples, and the loss of each is the
    baseline of the other. An option that the estimator does not use raises an error.

    A batch is a tensor (B, 1, 28, 28) in [0, 1], or a sequence that begins with such a tensor.
    Subclasses override :meth:`scores`, :meth:`loss`, or :meth:`make_networks`.

    Logged: train/loss, train/temperature (of estimators that have one), train/kl_weight (if it has
    a schedule); val/loss (with the final w, so that it can be compared between steps), val/elbo,
    val/kl, val/perplexity; test/nll, test/elbo, test/kl, test/perplexity (exp of the entropy of the
    mean q, a mean over latents),
    test/information (of the latents about an image, in nats: the sum over n of I(x; z_n), which is
    at least I(x; z)), test/saturated (share of scores in a flat region of the head) and
    test/collapsed (1 if the latents carry no information; KL alone does not show this, because a q
    that is equal for all images can be far from the prior). Every evaluation uses the same separate
    noise, so its frequency does not affect training.

    Args:
        head: name of the head, one of ``catnat.head_names()``. The default is the head that had the
            lowest test NLL in our runs.
        num_latents: number of latent variables (N).
        num_categories: number of categories per latent (K).
        learning_rate: learning rate of the optimizer. None: 0.001, or that of ``optimizer``.
        optimizer: function that makes the optimizer of given parameters, such as
            ``torch.optim.SGD``; None for Adam.
        lr_scheduler: function that makes a learning rate scheduler of the optimizer, which is
            stepped after every step; None for a constant learning rate.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        temperature_rate: r in τ = temperature * exp(-r step) (default 3e-5).
        min_temperature: lower limit of τ (default 0.5).
        nll_samples: importance samples per image for test/nll; fewer samples are faster, but bias
            test/nll upward.
        head_options: options of the head, such as ``amplitude`` for natural.
        estimator: estimator of the gradient through z: "gumbel", "gumbel-rao", "straight-through",
            "reinmax" (or "zgr"), "relaxed" or "score-function".
        capture: whether to replay training steps as CUDA graphs if possible.
        temperature: τ at the first step (default 1). In our runs, "gumbel-rao" was best with half
            of the paper's temperatures: ``temperature=0.5, min_temperature=0.25``.
        num_draws: relaxed samples for each image of "gumbel-rao" (default 8).
        kl_weight: weight of the KL divergence (w), or its final weight with a schedule. ELBO and
            NLL are always reported with weight 1.
        kl_start: weight at the first step. It changes linearly to ``kl_weight`` over ``kl_steps``,
            which is then required. In our tests over 5,000 steps, annealing from 0 slowed training
            with softmax and with trees.
        kl_steps: number of steps from ``kl_start`` to ``kl_weight``.
    """

    temperature_steps = 1000  # between changes of τ

    def __init__(
        self,
        head: str = "sigmoid",
        num_latents: int = 10,
        num_categories: int = 8,
        learning_rate: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip: float = 1.0,
        temperature_rate: float | None = None,
        min_temperature: float | None = None,
        nll_samples: int = 512,
        head_options: dict[str, Any] | None = None,
        estimator: str = "gumbel",
        capture: bool = False,
        temperature: float | None = None,
        num_draws: int | None = None,
        kl_weight: float = 1.0,
        kl_start: float | None = None,
        kl_steps: int | None = None,
    ) -> None:
        if learning_rate is None and optimizer is None:
            learning_rate = _LEARNING_RATE
        super().__init__(capture, gradient_clip, learning_rate, optimizer, lr_scheduler)
        if learning_rate is not None:
            require_positive(learning_rate=learning_rate)
        chosen = find_estimator(estimator, ESTIMATORS)
        chosen.refuse_unused(
            temperature=temperature,
            temperature_rate=temperature_rate,
            min_temperature=min_temperature,
            num_draws=num_draws,
        )
        first_temperature = 1.0 if temperature is None else temperature
        last_temperature = 0.5 if min_temperature is None else min_temperature
        rate = 3e-5 if temperature_rate is None else temperature_rate
        require_positive(
            num_latents=num_latents,
            temperature=first_temperature,
            min_temperature=last_temperature,
            num_draws=8 if num_draws is None else num_draws,
            nll_samples=nll_samples,
        )
        first_kl_weight = kl_weight if kl_start is None else kl_start
        require_at_least(
            0,
            gradient_clip=gradient_clip,
            temperature_rate=rate,
            kl_weight=kl_weight,
            kl_start=first_kl_weight,
        )
        if (kl_start is None) != (kl_steps is None):
            raise ValueError(
                "kl_start and kl_steps belong together, "
                f"got kl_start={kl_start}, kl_steps={kl_steps}"
            )
        if kl_steps is not None:
            require_positive(kl_steps=kl_steps)
        require_name(head=head)
        self.save_hyperparameters(ignore=["capture", "optimizer", "lr_scheduler"])
        # Hydra's dictionaries would make a checkpoint that load_from_checkpoint refuses.
        self.hparams["head_options"] = head_options = plain_options(head_options)
        self.head = make_head(head, num_categories, **(head_options or {}))
        self.num_latents = num_latents
        self.encoder, self.decoder = self.make_networks(
            num_latents * self.head.num_scores, num_latents * num_categories
        )
        self.estimator = chosen.name
        self.num_samples = 2  # of the score function
        self.baseline: float | None = None  # of the score function; None: the mean of the others
        self.num_draws = num_draws
        self.first_temperature = first_temperature
        # τ; a function of the step, so not in checkpoints
        self.temperature = DeviceScalar(self.first_temperature)
        self.temperature_rate = rate
        self.min_temperature = last_temperature
        self.first_kl_weight = first_kl_weight
        self.final_kl_weight = kl_weight
        self.kl_steps = kl_steps
        self.kl_weight = DeviceScalar(first_kl_weight)  # w; a function of the step, as τ
        self.nll_samples = nll_samples
        self.usage: Tensor | None = None  # mean q(z | x) of the latest evaluation, (N, K)
        self._code_use: tuple[float, float] | None = None  # latest perplexity and information
        self._warned_of_codes = False
        shapes = {"elbo": (), "kl": (), "usage": (num_latents, num_categories)}
        self.val_means = RowMeans({"loss": (), **shapes})
        self.test_means = RowMeans({"nll": (), "saturated": (), **shapes})

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 28, 28) -> (B, num_scores), decoder (B, num_inputs) -> pixel logits."""
        return conv_encoder(num_scores), conv_decoder(num_inputs)

    # -- the model: x -> scores -> q(z | x) -> z -> logits of x ---------------------------------

    def images(self, batch: Any) -> Tensor:
        """The images of a batch, itself or the first of a sequence, in the dtype of the weights."""
        require_images(batch)
        x = batch if isinstance(batch, Tensor) else batch[0]
        return x.to(self.dtype)

    def scores(self, batch: Any) -> Tensor:
        """Scores of the head for every latent, (B, N, S)."""
        scores = self.encoder(self.images(batch))
        require_num_scores(scores, self.num_latents, self.head.num_scores)
        return scores.reshape(len(scores), self.num_latents, self.head.num_scores)

    def forward(self, batch: Any) -> HeadCategorical:
        """q(z | x), of batch shape (B, N)."""
        return self.head(checked_scores(self, self.scores(batch), batch))

    def decode(self, z: Tensor) -> Tensor:
        """Logits of the pixels for one-hot latents, (*, N, K) -> (*, 1, 28, 28)."""
        logits = self.decoder(z.reshape(-1, z.shape[-2] * z.shape[-1]))
        return logits.reshape(*z.shape[:-2], *logits.shape[1:])

    def reconstruction(self, batch: Any, z: Tensor) -> Tensor:
        """-log p(x | z), summed over pixels, (*, B, N, K) -> (*, B)."""
        return bernoulli_nll(self.decode(z), self.images(batch), event_dims=3)

    def kl(self, q: HeadCategorical) -> Tensor:
        """KL(q(z | x) || uniform), summed over latents, (B,)."""
        return kl_to_uniform(q.logits).sum(-1)

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The loss with samples of z, a scalar; q has batch shape (B, N).

        It is the negative ELBO if the weight of the KL divergence is 1. In evaluation the weight
        is the final one.
        """
        if self.estimator == "score-function":
            z = q.one_hot_sample((self.num_samples,))  # (M, B, N, K)
            log_q = (z * q.logits).sum((-2, -1))  # (M, B)
            losses = self.reconstruction(batch, z)
            reconstruction = score_function_surrogate(losses, log_q, self.baseline)
        else:
            z = q.rsample(**self.sample_options())  # (B, N, K)
            reconstruction = self.reconstruction(batch, z)
        kl_weight = self.kl_weight() if self.training else self.final_kl_weight
        return (reconstruction + kl_weight * self.kl(q)).mean()

    def sample_options(self) -> dict[str, Any]:
        """Options of ``q.rsample`` at this step: the estimator and what it uses."""
        options: dict[str, Any] = {"estimator": self.estimator}
        estimator = find_estimator(self.estimator)
        if estimator.has_temperature:
            options["temperature"] = self.temperature()
        if estimator.has_draws:
            options["num_draws"] = self.num_draws
        return options

    # -- training --------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check the images, and prepare the step."""
        self._check(batch, batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    def prepare_step(self, step: int) -> None:
        """Set the temperature and the weight of the KL divergence of a step."""
        self.temperature.set(self.annealed_temperature(step))
        self.kl_weight.set(self.annealed_kl_weight(step))

    def annealed_temperature(self, step: int) -> float:
        """τ at an optimizer step."""
        step -= step % self.temperature_steps
        annealed = self.first_temperature * math.exp(-self.temperature_rate * step)
        return max(annealed, self.min_temperature)

    def annealed_kl_weight(self, step: int) -> float:
        """w at an optimizer step."""
        if self.kl_steps is None:
            return self.final_kl_weight
        share = min(step / self.kl_steps, 1.0)
        return self.first_kl_weight + share * (self.final_kl_weight - self.first_kl_weight)

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, a scalar."""
        return self.loss(batch, self(batch))

    def logged_settings(self) -> dict[str, float]:
        """The temperature and the weight of the KL divergence, where they have a schedule."""
        settings = {}
        if find_estimator(self.estimator).has_temperature:
            settings["train/temperature"] = float(self.temperature)
        if self.kl_steps is not None:
            settings["train/kl_weight"] = float(self.kl_weight)
        return settings

    # -- evaluation ------------------------------------------------------------------------

    @compiled_in_parts  # batch_idx changes from batch to batch
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One sample per image."""
        self._check(batch, batch_idx)
        with self.evaluation_noise(batch_idx):
            q = self(batch)
            loss = self.loss(batch, q)
            reconstruction = self.reconstruction(batch, q.one_hot_sample())
        kl = self.kl(q)
        self.val_means.add_rows(
            loss=loss.expand_as(kl), elbo=-reconstruction - kl, kl=kl, usage=q.probs
        )

    @property
    def test_work(self) -> str:
        """Work of a test, for the line that announces how long it takes."""
        return f"{self.nll_samples} samples of each image"

    @compiled_in_parts  # batch_idx changes from batch to batch
    def test_step(self, batch: Any, batch_idx: int) -> None:
        """``nll_samples`` samples per image."""
        self._check(batch, batch_idx)
        scores = checked_scores(self, self.scores(batch), batch)
        q = self.head(scores)
        log_prior = -self.num_latents * math.log(self.head.num_categories)
        reconstructions = []  # (m, B) each

        def log_weights(m: int) -> Tensor:
            z = q.one_hot_sample((m,))  # (m, B, N, K)
            reconstructions.append(self.reconstruction(batch, z))
            return log_prior - reconstructions[-1] - (z * q.logits).sum((-2, -1))

        at_once = _DECODED_AT_ONCE.get(self.device.type, 512) // max(1, q.batch_shape[0])
        with self.evaluation_noise(batch_idx):
            nll = importance_weighted_nll(log_weights, self.nll_samples, max(1, at_once))
        kl = self.kl(q)
        self.test_means.add_rows(
            nll=nll,
            elbo=-torch.cat(reconstructions).mean(0) - kl,
            kl=kl,
            usage=q.probs,
            saturated=self.head.saturated(scores).float().mean((-2, -1)),
        )

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all images, and metrics that follow from the means."""
        self.usage = means.pop("usage")
        entropies = torch.special.entr(self.usage).sum(-1)  # of the mean q of each latent, (N,)
        means["perplexity"] = entropies.exp().mean()
        # KL(q(z | x) || uniform) = I(x; z) + KL(mean q || uniform), latent by latent.
        log_categories = self.num_latents * math.log(self.head.num_categories)
        information = means["kl"] - (log_categories - entropies.sum())
        self._code_use = float(means["perplexity"]), float(information)
        if stage == "test":
            means["information"] = information
            means["collapsed"] = (information < _COLLAPSED_BELOW).float()
            self._warn_of_unused_codes()
        return means

    def on_fit_end(self) -> None:
        """Warn if few codes are in use."""
        self._warn_of_unused_codes()

    def _warn_of_unused_codes(self) -> None:
        """Warn, once for a model, if few categories or little of their capacity is used."""
        if self._code_use is None or self._warned_of_codes:
            return
        perplexity, information = self._code_use
        K = self.head.num_categories
        most = self.num_latents * math.log(K)
        reasons = []
        if perplexity < max(_FEW_CATEGORIES, K * _FEW_OF_MANY):
            reasons.append(f"its perplexity is {perplexity:.2g} of {K} categories")
        if information < most * _LITTLE:
            reasons.append(
                f"it carries {max(information, 0.0):.2g} of {most:.3g} nats about an image"
            )
        if reasons:
            self._warned_of_codes = True
            rank_zero_warn(f"the code is hardly used: {', and '.join(reasons)}")

    @not_compiled
    def _check(self, batch: Any, batch_idx: int) -> None:
        """Raise a ValueError for images that do not fit, or are not probabilities of pixels.

        On the CPU every batch is checked. On another device the first one of each epoch is, because
        the host has to wait for the device. A subclass with a :meth:`reconstruction` of its own may
        take other images. A rank's share of the last batch may be empty.
        """
        x = self.images(batch)
        has_default_networks = type(self).make_networks.__module__.startswith("catnat.lit_modules")
        if has_default_networks and type(self).scores is DiscreteVAE.scores:
            require_default_shape(x)
        may_look = batch_idx == 0 or x.device.type == "cpu"
        if may_look and len(x) and type(self).reconstruction is DiscreteVAE.reconstruction:
            low, high = x.aminmax()
            if not (low >= -1e-3 and high <= 1.001):  # NaN is not; rounding of a resized image is
                raise ValueError(f"images must lie in [0, 1], got values from {low:g} to {high:g}")

    # -- pictures ------------------------------------------------------------------------------

    def reconstruct(self, x: Tensor) -> Tensor:
        """Mean pixels at the likeliest latents of x, (B, 1, 28, 28) -> (B, 1, 28, 28)."""
        with evaluating(self):
            return self.mean_image(self._decode_categories(self(x).probs.argmax(-1)))

    def sample_prior(self, n: int) -> Tensor:
        """Mean pixels at n latents from the prior, (n, 1, 28, 28)."""
        z = torch.randint(self.head.num_categories, (n, self.num_latents), device=self.device)
        with evaluating(self):
            return self.mean_image(self._decode_categories(z))

    def mean_image(self, logits: Tensor) -> Tensor:
        """Mean of p(x | z) from the decoder's output, which has the same shape.

        A subclass whose :meth:`reconstruction` is not that of Bernoulli pixels overrides it.
        """
        return logits.sigmoid()

    def _decode_categories(self, z: Tensor) -> Tensor:
        """Decoder's output at categories, (B, N) -> (B, 1, 28, 28)."""
        return self.decode(F.one_hot(z, self.head.num_categories).to(self.dtype))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode inside the block, without gradients."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
