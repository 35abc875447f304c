"""The convolutional VAE with N categorical latents, trained through samples of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from catnat.checks import require_at_least, require_choice, require_name, require_positive
from catnat.cuda_graph import DeviceScalar
from catnat.distributions import HeadCategorical
from catnat.estimators import score_function_surrogate
from catnat.heads import make_head
from catnat.lit_modules.networks import conv_decoder, conv_encoder
from catnat.lit_modules.step_module import StepModule
from catnat.losses import bernoulli_nll, importance_weighted_nll, kl_to_uniform
from catnat.metrics import RowMeans

Estimator = Literal["gumbel", "straight-through", "reinmax", "relaxed", "score-function"]

_COLLAPSED_BELOW = 0.1  # nats of information about an image, in all latents together
_DECODED_AT_ONCE = {"cuda": 32768}  # images, in the importance-sampled likelihood; else 512
_OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class DiscreteVAE(StepModule):
    r"""VAE on 28 x 28 images with latents z = (z_1..z_N), each one of K categories.

    .. math:: \mathrm{loss} = -\log p(x \mid z) + KL(q(z \mid x) \,\|\, \mathrm{uniform})

    z is a sample of q, one-hot, whose gradient is that of an estimator: the default "gumbel" takes
    that of its relaxation at temperature τ(step) = max(exp(-rate step), min), renewed every
    1,000 steps; the others are those of ``q.rsample`` (with "relaxed", z itself is
    the relaxation) and "score-function", with two samples that are each other's baseline.

    A batch is (B, 1, 28, 28) in [0, 1], or a sequence that begins with that. Subclasses override
    :meth:`scores`, :meth:`loss`, or :meth:`make_networks`.

    Logged: train/loss, train/temperature; val/loss, val/elbo, val/kl, val/perplexity; test/nll,
    test/elbo, test/kl, test/perplexity (exp of the entropy of the mean q, a mean over latents),
    test/information (of the latents about an image, in nats: the sum over n of I(x; z_n), which is
    at least I(x; z)), test/saturated (share of scores in a flat region of the head) and
    test/collapsed (1 if the latents carry no information; KL alone does not show that, as a q that
    is the same for all images can be far from the prior). Evaluation draws noise of its own, the
    same each time: how often a model is evaluated does not change what it learns.

    Args:
        head: a name from ``catnat.head_names()``.
        num_latents: N.
        num_categories: K.
        learning_rate: of the optimizer.
        optimizer: "adam" or "sgd" (without momentum).
        lr_decay: factor on the learning rate every ``lr_decay_steps`` steps; 1 keeps it constant.
        lr_decay_steps: see ``lr_decay``.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        temperature_rate: r in τ = exp(-r step).
        min_temperature: lower limit of τ.
        nll_samples: importance samples per image for test/nll; with fewer a test takes less time,
            and test/nll is larger.
        head_options: options of the head, such as ``amplitude`` for natural.
        estimator: of the gradient through z: "gumbel", "straight-through", "reinmax", "relaxed" or
            "score-function".
        capture: replay training steps as CUDA graphs, many times faster for a model this small,
            with the same results. None: wherever that is possible.
    """

    temperature_steps = 1000  # between changes of τ

    def __init__(
        self,
        head: str = "natural",
        num_latents: int = 10,
        num_categories: int = 8,
        learning_rate: float = 1e-3,
        optimizer: Literal["adam", "sgd"] = "adam",
        lr_decay: float = 1.0,
        lr_decay_steps: int = 1000,
        gradient_clip: float = 1.0,
        temperature_rate: float = 3e-5,
        min_temperature: float = 0.5,
        nll_samples: int = 512,
        head_options: dict[str, Any] | None = None,
        estimator: Estimator = "gumbel",
        capture: bool | None = None,
    ) -> None:
        super().__init__(capture, gradient_clip)
        require_choice(_OPTIMIZERS, optimizer=optimizer)
        require_choice(get_args(Estimator), estimator=estimator)
        require_positive(
            num_latents=num_latents,
            learning_rate=learning_rate,
            lr_decay=lr_decay,
            lr_decay_steps=lr_decay_steps,
            min_temperature=min_temperature,
            nll_samples=nll_samples,
        )
        require_at_least(0, gradient_clip=gradient_clip, temperature_rate=temperature_rate)
        require_name(head=head)
        self.save_hyperparameters(ignore="capture")
        self.head = make_head(head, num_categories, **(head_options or {}))
        self.num_latents = num_latents
        self.encoder, self.decoder = self.make_networks(
            num_latents * self.head.num_scores, num_latents * num_categories
        )
        self.estimator = estimator
        self.num_samples = 2  # of the score function
        self.baseline: float | None = None  # of the score function; None: the mean of the others
        self.learning_rate = learning_rate
        self.optimizer_kind = _OPTIMIZERS[optimizer]
        self.lr_decay = lr_decay
        self.lr_decay_steps = lr_decay_steps
        self.temperature = DeviceScalar(1.0)  # τ; a function of the step, so not in checkpoints
        self.temperature_rate = temperature_rate
        self.min_temperature = min_temperature
        self.nll_samples = nll_samples
        self.usage: Tensor | None = None  # mean q(z | x) of the latest evaluation, (N, K)
        shapes = {"elbo": (), "kl": (), "usage": (num_latents, num_categories)}
        self.val_means = RowMeans({"loss": (), **shapes})
        self.test_means = RowMeans({"nll": (), "saturated": (), **shapes})

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 28, 28) -> (B, num_scores), decoder (B, num_inputs) -> pixel logits."""
        return conv_encoder(num_scores), conv_decoder(num_inputs)

    # -- the model: x -> scores -> q(z | x) -> z -> logits of x ---------------------------------

    def images(self, batch: Any) -> Tensor:
        """The images of a batch, itself or the first of a sequence, in the dtype of the weights."""
        x = batch if isinstance(batch, Tensor) else batch[0]
        return x.to(self.dtype)

    def scores(self, batch: Any) -> Tensor:
        """Scores of the head for every latent, (B, N, S)."""
        scores = self.encoder(self.images(batch))
        return scores.reshape(len(scores), self.num_latents, self.head.num_scores)

    def forward(self, batch: Any) -> HeadCategorical:
        """q(z | x), of batch shape (B, N)."""
        return self.head(self.scores(batch))

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
        """The negative ELBO with samples of z, a scalar; q has batch shape (B, N)."""
        if self.estimator == "score-function":
            z = q.one_hot_sample((self.num_samples,))  # (M, B, N, K)
            log_q = (z * q.logits).sum((-2, -1))  # (M, B)
            losses = self.reconstruction(batch, z)
            reconstruction = score_function_surrogate(losses, log_q, self.baseline)
        else:
            z = q.rsample(estimator=self.estimator, temperature=self.temperature())  # (B, N, K)
            reconstruction = self.reconstruction(batch, z)
        return (reconstruction + self.kl(q)).mean()

    # -- training --------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check the images, and prepare the step."""
        self._check(batch, batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    def prepare_step(self, step: int) -> None:
        """Set the temperature of a step."""
        self.temperature.set(self.annealed_temperature(step))

    def annealed_temperature(self, step: int) -> float:
        """τ at an optimizer step."""
        step -= step % self.temperature_steps
        return max(math.exp(-self.temperature_rate * step), self.min_temperature)

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, a scalar."""
        return self.loss(batch, self(batch))

    def logged_settings(self) -> dict[str, float]:
        """The temperature, logged beside the loss; the score function has none."""
        if self.estimator == "score-function":
            return {}
        return {"train/temperature": float(self.temperature)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam or SGD, with a decaying learning rate if asked for."""
        parameters = self.parameters()
        optimizer = self.make_optimizer(self.optimizer_kind, parameters, lr=self.learning_rate)
        if self.lr_decay == 1:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.lr_decay_steps, self.lr_decay)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    # -- evaluation ------------------------------------------------------------------------

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

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """``nll_samples`` samples per image."""
        self._check(batch, batch_idx)
        scores = self.scores(batch)
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
        if stage == "test":
            # KL(q(z | x) || uniform) = I(x; z) + KL(mean q || uniform), latent by latent.
            log_categories = self.num_latents * math.log(self.head.num_categories)
            means["information"] = means["kl"] - (log_categories - entropies.sum())
            means["collapsed"] = (means["information"] < _COLLAPSED_BELOW).float()
        return means

    def _check(self, batch: Any, batch_idx: int) -> None:
        """Raise a ValueError for images that are not probabilities of pixels.

        On the CPU every batch is checked. On another device the first one of each epoch is, because
        the host has to wait for the device. A subclass with a :meth:`reconstruction` of its own may
        take other images. A rank's share of the last batch may be empty.
        """
        x = self.images(batch)
        may_look = batch_idx == 0 or x.device.type == "cpu"
        if may_look and len(x) and type(self).reconstruction is DiscreteVAE.reconstruction:
            low, high = x.aminmax()
            if not (low >= -1e-3 and high <= 1.001):  # NaN is not; rounding of a resized image is
                raise ValueError(f"images must lie in [0, 1], got values from {low:g} to {high:g}")

    # -- pictures ------------------------------------------------------------------------------

    def reconstruct(self, x: Tensor) -> Tensor:
        """Mean pixels at the likeliest latents of x, (B, 1, 28, 28) -> (B, 1, 28, 28)."""
        with evaluating(self):
            return self._mean_pixels(self(x).probs.argmax(-1))

    def sample_prior(self, n: int) -> Tensor:
        """Mean pixels at n latents from the prior, (n, 1, 28, 28)."""
        z = torch.randint(self.head.num_categories, (n, self.num_latents), device=self.device)
        with evaluating(self):
            return self._mean_pixels(z)

    def _mean_pixels(self, z: Tensor) -> Tensor:
        """Mean pixels at categories, (B, N) -> (B, 1, 28, 28)."""
        return self.decode(F.one_hot(z, self.head.num_categories).to(self.dtype)).sigmoid()


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
