"""M VAEs as one batched model: every layer works on all models at once.

Sizes N and K and heads may differ: only the last layer of the encoder and the first of the decoder
depend on them. These two layers, and the latents between them, are batched over the models of one
size; all other layers over all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat import CategoricalHead
from catnat.estimators import gumbel_like, score_function_surrogate
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE
from catnat.losses import kl_to_uniform
from experiments.together.layers import conv, linear, norm, upsample
from experiments.together.stack import Stack, Stacks, joined, log_probs_of, neighbours

_MOMENTUM = 0.1  # of batch norms' running statistics


def shape_of(model: DiscreteVAE) -> tuple[int, int, int]:
    """N, K and S: models of one size stand next to each other."""
    return model.num_latents, model.head.num_categories, model.head.num_scores


@dataclass
class _Size:
    """The models of one size: which they are, their heads with how many models have each."""

    models: slice
    latents: int
    categories: int
    scores: int
    heads: list[tuple[CategoricalHead, int]]
    stack: Stack


class ManyVAEs:
    """M models of :class:`~catnat.lit_modules.DiscreteVAE`, trained by straight-through Gumbel.

    Args:
        models: ordered by :func:`shape_of` and head. Their parameters are copied. They must agree
            in optimizer, clipping and temperature, and have a constant learning rate.
    """

    last_of_encoder: ClassVar[str] = "encoder.10"
    first_of_decoder: ClassVar[str] = "decoder.0"
    scored: ClassVar[bool] = False  # whether the loss reads log q(z | x)

    @classmethod
    def check(cls, models: Sequence[Any]) -> None:
        """Raise a ValueError if these models cannot be trained together."""
        agreed = ("optimizer_name", "gradient_clip", "temperature_rate", "min_temperature")
        for name in (*agreed, "temperature_steps", "lr_decay"):
            values = {getattr(each, name) for each in models}
            if len(values) > 1:
                raise ValueError(f"models trained together have one {name}, got {sorted(values)}")
        if models[0].lr_decay != 1:
            raise ValueError(f"models trained together have lr_decay 1, got {models[0].lr_decay:g}")

    def __init__(self, models: Sequence[DiscreteVAE]) -> None:
        self.check(models)
        self.first = first = models[0]
        inner = (f"{self.last_of_encoder}.", f"{self.first_of_decoder}.")
        names = [name for name, _ in first.named_parameters()]
        self.outer = Stack(models, [each for each in names if not each.startswith(inner)])
        own = [each for each in names if each.startswith(inner)]
        self.sizes: list[_Size] = []
        for shape, found in groupby(range(len(models)), lambda i: shape_of(models[i])):
            some = list(found)
            part = slice(some[0], some[-1] + 1)
            heads = neighbours(models[part])
            self.sizes.append(_Size(part, *shape, heads, Stack(models[part], own)))
        buffers = [dict(each.named_buffers()) for each in models]
        self.statistics = {
            name: torch.stack([one[name] for one in buffers])
            for name in buffers[0]
            if name.endswith(("running_mean", "running_var"))
        }
        self.counters = [name for name in buffers[0] if name.endswith("num_batches_tracked")]
        self.optimizer = Stacks(
            [
                (self.outer, slice(0, len(models))),
                *((each.stack, each.models) for each in self.sizes),
            ],
            [each.learning_rate for each in models],
            first.optimizer_name,
            first.gradient_clip,
        )
        self.temperature = self.outer.flat.new_ones(())

    def noise(self, batch: int) -> list[Tensor]:
        """Gumbel noise of a step, (m, B, N, K) for the m models of each size."""
        new = self.outer.flat.new_empty
        return [
            gumbel_like(
                new(each.models.stop - each.models.start, batch, each.latents, each.categories)
            )
            for each in self.sizes
        ]

    def prepare_step(self, step: int) -> None:
        """Set the temperature of a step."""
        self.temperature.fill_(self.first.annealed_temperature(step))

    def step(self, images: Tensor, noise: list[Tensor] | None = None) -> Tensor:
        """One step of every model.

        Args:
            images: each model's own batch, (M, B, 1, 28, 28).
            noise: see :meth:`noise`; drawn anew if not given.

        Returns:
            The losses, (M,).
        """
        seen: dict[str, Tensor] = {}
        losses = self.losses(images[:, :, 0], noise or self.noise(images.shape[1]), seen)
        self.optimizer.step(losses)
        with torch.no_grad():
            for name, value in seen.items():
                self.statistics[name].lerp_(value, _MOMENTUM)
        return losses.detach()

    def losses(self, images: Tensor, noise: list[Tensor], seen: dict[str, Tensor]) -> Tensor:
        """Negative ELBO of every model, (M,); keeps what its batch norms saw."""
        x = self.encode(images, seen)
        kls, logs, decoded = [], [], []
        for size, own in zip(self.sizes, noise, strict=True):
            w, part = size.stack.parameters, x[size.models]
            scores = linear(part, w, self.last_of_encoder).unflatten(-1, (size.latents, -1))
            log_probs = log_probs_of(size.heads, scores)
            z = self.sample(log_probs, own)
            kls.append(kl_to_uniform(log_probs).sum(-1))
            if self.scored:
                logs.append((z * log_probs).sum((-2, -1)))
            decoded.append(linear(z.flatten(2), w, self.first_of_decoder).relu())
        logits = self.decode(joined(decoded), seen)
        nll = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum((2, 3))
        if self.scored:
            nll = self.with_score(nll, joined(logs))
        return (nll + joined(kls)).mean(1)

    def sample(self, log_probs: Tensor, noise: Tensor) -> Tensor:
        """As :func:`catnat.estimators.straight_through_gumbel`, with given noise."""
        scores = log_probs + noise
        y = (scores / self.temperature).softmax(-1)
        return _one_hot_of_largest(scores) + (y - y.detach())

    def with_score(self, nll: Tensor, log_q: Tensor) -> Tensor:
        """The reconstruction term, (M, B), with the gradient that it has in log q(z | x)."""
        raise NotImplementedError

    def encode(self, images: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """The encoder without its last layer, (M, B, 28, 28) -> (M, B, D)."""
        w = self.outer.parameters
        x = conv(images[..., None], w, "encoder.0", 1).relu()
        x = norm(conv(x, w, "encoder.2", 1), w, "encoder.3", seen).relu()
        x = conv(x, w, "encoder.5", 0).relu()
        return linear(x.movedim(-1, 2).flatten(2), w, "encoder.8").relu()

    def decode(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """The decoder without its first layer, (M, B, D) -> logits (M, B, 28, 28)."""
        w = self.outer.parameters
        x = linear(x, w, "decoder.2").relu()
        x = x.unflatten(-1, (32, 3, 3)).movedim(2, -1)
        x = norm(upsample(x, w, "decoder.5", 0), w, "decoder.6", seen).relu()
        x = norm(upsample(x, w, "decoder.8", 1), w, "decoder.9", seen).relu()
        return upsample(x, w, "decoder.11", 1)[..., 0]

    def state_of(self, model: int) -> dict[str, Tensor]:
        """Parameters and statistics of one model, for ``load_state_dict(..., strict=False)``."""
        every = {name: each[model] for name, each in self.outer.parameters.items()}
        every |= {name: each[model] for name, each in self.statistics.items()}
        every |= dict.fromkeys(self.counters, self.optimizer.steps.long())
        for size in self.sizes:
            if size.models.start <= model < size.models.stop:
                own = size.stack.parameters.items()
                every |= {name: each[model - size.models.start] for name, each in own}
        return {name: each.detach().clone() for name, each in every.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step: written back in place, the models are what they were."""
        return self.statistics | self.optimizer.tensors()


class ManyMLPVAEs(ManyVAEs):
    """M models of :class:`~catnat.lit_modules.MLPDiscreteVAE`, trained by score function.

    The arguments are those of :class:`ManyVAEs`. The models draw one sample, with a constant
    baseline.
    """

    last_of_encoder = "encoder.5"
    scored = True

    @classmethod
    def check(cls, models: Sequence[Any]) -> None:
        """Raise a ValueError if these models cannot be trained together."""
        for each in models:
            if each.baseline is None or each.num_samples != 1:
                raise ValueError(
                    "models trained together draw one sample and have a constant baseline, got "
                    f"num_samples {each.num_samples} and baseline {each.baseline}"
                )
        super().check(models)

    def __init__(self, models: Sequence[MLPDiscreteVAE]) -> None:
        super().__init__(models)
        baselines = [each.baseline for each in models]
        self.baseline = self.outer.flat.new_tensor(baselines)[:, None]

    def sample(self, log_probs: Tensor, noise: Tensor) -> Tensor:
        """One-hot samples, without gradient."""
        return _one_hot_of_largest(log_probs.detach() + noise)

    def with_score(self, nll: Tensor, log_q: Tensor) -> Tensor:
        """The reconstruction term with the gradient of the score function."""
        return score_function_surrogate(nll[None], log_q[None], self.baseline)

    def encode(self, images: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """The encoder without its last layer, (M, B, 28, 28) -> (M, B, 256)."""
        x = linear(images.flatten(2), self.outer.parameters, "encoder.1").relu()
        return linear(x, self.outer.parameters, "encoder.3").relu()

    def decode(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """The decoder without its first layer, (M, B, 256) -> logits (M, B, 28, 28)."""
        x = linear(x, self.outer.parameters, "decoder.2").relu()
        return linear(x, self.outer.parameters, "decoder.4").reshape(*x.shape[:2], 28, 28)


def _one_hot_of_largest(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
