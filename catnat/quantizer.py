"""A layer that quantizes features with a codebook and the distribution of a head."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from catnat.checks import (
    require_at_least,
    require_choice,
    require_positive,
    require_within,
)
from catnat.distributions import HeadCategorical
from catnat.estimator_table import TABLE, find_estimator
from catnat.heads.base import CategoricalHead
from catnat.heads.registry import make_head
from catnat.losses import kl_to_uniform
from catnat.numerics import can_branch_on

Tokens = Literal["likeliest", "sample"]

_DECAY = 0.99  # of the moving average of the usage
_ESTIMATORS = tuple(each for each in TABLE if each.draw is not None)
_RARE = 1e-8  # smallest mean probability that a reset assumes: it bounds the change of a score
_NOISE = 0.01  # relative size of the noise on the vector of a code that is reset


class Quantized(NamedTuple):
    """Output of :class:`Quantizer`.

    Attributes:
        quantized: vectors of the codes, with the shape of the input.
        indices: codes (int64), with the shape of the input without ``dim``; -1 at masked positions.
        loss: weighted divergence from the uniform distribution, a scalar. Add it to your loss.
    """

    quantized: Tensor
    indices: Tensor
    loss: Tensor


class Quantizer(nn.Module):
    r"""Replaces each feature vector with one of K vectors of a codebook.

    A linear layer computes scores from the features, and a head turns them into the distribution q
    of the code. In training mode, the code is a sample of q with the gradient of the estimator. The
    vector of a code is a row of the codebook, which the loss of your model trains. The layer uses
    no nearest neighbors, commitment loss or moving average of the codebook. Instead, its loss

    .. math:: \mathrm{loss} = w \cdot \mathrm{mean}\, KL(q \,\|\, \mathrm{uniform}),

    in nats per position, keeps codes in use.

    The tokens of an input are the most likely codes, or samples of q with ``tokens="sample"``.
    :meth:`encode` and calls in eval mode return tokens. A call in training mode returns the sampled
    codes and their vectors. With ``estimator="relaxed"``, the vectors in training are mixtures, and
    the indices are the codes with the largest weight.

    :attr:`usage` is a moving average of the fraction of training samples with each code, over all
    processes of ``torch.distributed``.

    Shapes: x (B, \*, dim), or (B, dim, \*) with ``channel_first``; indices (B, \*).

    Args:
        num_codes: number of codes (K).
        dim: width of the features and of the vectors in the codebook.
        head: a name from ``catnat.head_names()``, or a head with K categories.
        estimator: gradient estimator, see
            :meth:`~catnat.distributions.HeadCategorical.rsample`.
        temperature: temperature for "gumbel", "gumbel-rao" and "relaxed" (default: 0.5). A schedule
            may set the attribute ``temperature`` to a number or a tensor.
        num_draws: number of relaxed samples per sample, for "gumbel-rao" (default: 8).
        kl_weight: weight of the divergence (w).
        channel_first: whether the features are in dimension 1, as in convolutional networks.
        tokens: ``"likeliest"`` or ``"sample"``; the kind of tokens.
        dead_below: threshold for dead codes, as a fraction of uniform usage. Codes with a usage
            below ``dead_below / num_codes`` are reset every ``reset_every`` training calls. With 0,
            codes are never reset.
        reset_every: number of training calls between resets; None: 100. It needs ``dead_below``.
        head_options: options of the head, such as ``mix``.

    Example:
        >>> quantizer = Quantizer(num_codes=512, dim=64, channel_first=True)
        >>> quantized, indices, loss = quantizer(torch.randn(2, 64, 8, 8))
        >>> quantized.shape, indices.shape
        (torch.Size([2, 64, 8, 8]), torch.Size([2, 8, 8]))
    """

    usage: Tensor

    def __init__(
        self,
        num_codes: int,
        dim: int,
        head: str | CategoricalHead = "sigmoid",
        estimator: str = "gumbel-rao",
        temperature: float | None = None,
        num_draws: int | None = None,
        kl_weight: float = 5e-4,
        channel_first: bool = False,
        tokens: Tokens = "likeliest",
        dead_below: float = 0.0,
        reset_every: int | None = None,
        head_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require_at_least(2, num_codes=num_codes)
        require_at_least(1, dim=dim)
        require_at_least(0, kl_weight=kl_weight)
        require_within(0, 1, "[)", dead_below=dead_below)
        if reset_every is None:
            reset_every = 100
        elif not dead_below:
            raise ValueError("reset_every has no effect: dead_below is 0")
        require_at_least(1, reset_every=reset_every)
        chosen = find_estimator(estimator, _ESTIMATORS)
        chosen.refuse_unused(temperature=temperature, num_draws=num_draws)
        require_choice(get_args(Tokens), tokens=tokens)
        self.num_codes = num_codes
        self.dim = dim
        self.head = make_head(head, num_codes, **(head_options or {}))
        self.estimator = chosen.name
        if temperature is None:
            temperature = 0.5
        require_positive(temperature=temperature)
        if num_draws is None:
            num_draws = 8
        require_at_least(1, num_draws=num_draws)
        self.temperature: float | Tensor = temperature
        self.num_draws = num_draws
        self.kl_weight = kl_weight
        self.channel_first = channel_first
        self.tokens = tokens
        self.dead_below = dead_below
        self.reset_every = reset_every
        self.to_scores = nn.Linear(dim, self.head.num_scores)
        self.codebook = nn.Embedding(num_codes, dim)
        self.register_buffer("usage", torch.full((num_codes,), 1 / num_codes))
        self._calls = 0  # in training mode, since the last reset

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Quantized:
        """Quantize features.

        Args:
            x: features, (B, *, dim), or (B, dim, *) with ``channel_first``.
            mask: positions to use, (B, *) bool. Masked positions have zero vectors and index -1,
                and do not contribute to the loss and the usage.
        """
        features = self._channels_last(x)
        q = self.head(self.to_scores(features))
        if mask is not None and (mask.dtype != torch.bool or mask.shape != q.batch_shape):
            expected = tuple(q.batch_shape)
            raise ValueError(f"mask must be bool {expected}, got {mask.dtype} {tuple(mask.shape)}")
        if self.training:
            if self._reset_is_due() and self._reset(q, mask):
                q = self.head(self.to_scores(features))
            one_hot = q.rsample(estimator=self.estimator, **self._estimator_options())
            indices = one_hot.detach().argmax(-1)
            vectors = one_hot.to(self.codebook.weight.dtype) @ self.codebook.weight
            self._count(indices, mask)
        else:
            indices = self._tokens(q)
            vectors = self.codebook(indices)
        kl = kl_to_uniform(q.logits)
        if mask is None:
            mean_kl = kl.mean()
        else:
            mean_kl = torch.where(mask, kl, 0.0).sum() / mask.sum().clamp_min(1)
            indices = torch.where(mask, indices, -1)
            vectors = torch.where(mask[..., None], vectors, 0.0)
        return Quantized(self._as_input(vectors), indices, self.kl_weight * mean_kl)

    def distribution(self, x: Tensor) -> HeadCategorical:
        """Distribution of the code at each position, with batch shape (B, *)."""
        return self.head(self.to_scores(self._channels_last(x)))

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Tokens of the features, (B, *) int64, in training and eval mode alike."""
        return self._tokens(self.distribution(x))

    def decode_indices(self, indices: Tensor) -> Tensor:
        """Vectors of codes, (B, *) -> (B, *, dim), or (B, dim, *) with ``channel_first``.

        Index -1, which marks a masked position, gives a zero vector.
        """
        if can_branch_on(indices) and indices.numel():
            low, high = indices.aminmax()
            if low < -1 or high >= self.num_codes:
                wrong = low if low < -1 else high
                raise ValueError(
                    f"indices must be codes from 0 to {self.num_codes - 1}, or -1 where masked, "
                    f"got {wrong.item()}"
                )
        vectors = self.codebook(indices.clamp_min(0))
        return self._as_input(torch.where((indices >= 0)[..., None], vectors, 0.0))

    @property
    def perplexity(self) -> Tensor:
        """Exponential of the entropy of :attr:`usage`, a scalar from 1 to K."""
        return torch.special.entr(self.usage).sum().exp()

    @property
    def dead_codes(self) -> Tensor:
        """Codes with a usage below ``dead_below / num_codes``, (K,) bool."""
        return self.usage * self.num_codes < self.dead_below

    @torch.no_grad()
    def reset_dead_codes(self, x: Tensor, mask: Tensor | None = None) -> int:
        """Reset dead codes, and return their number.

        A reset changes the bias of the scores so that each dead code has probability 1 / K on
        average over these features. The vector of the code becomes a copy of the vector of a code
        in use, with 1 % noise. The state of optimizers does not change. If you use several
        processes, call this method on all of them.

        Args:
            x: features, as in a call of the layer.
            mask: as in a call of the layer.
        """
        return self._reset(self.distribution(x), mask)

    def extra_repr(self) -> str:
        """Sizes and estimator, for ``print(quantizer)``."""
        return f"num_codes={self.num_codes}, dim={self.dim}, estimator={self.estimator!r}"

    def _estimator_options(self) -> dict[str, Any]:
        chosen = find_estimator(self.estimator)
        options: dict[str, Any] = {}
        if chosen.has_temperature:
            options["temperature"] = self.temperature
        if chosen.has_draws:
            options["num_draws"] = self.num_draws
        return options

    def _tokens(self, q: HeadCategorical) -> Tensor:
        return q.mode if self.tokens == "likeliest" else q.sample()

    def _channels_last(self, x: Tensor) -> Tensor:
        """Features (B, *, dim), after checking the shape."""
        axis = 1 if self.channel_first else -1
        if x.dim() < 2 or x.shape[axis] != self.dim:
            expected = f"(B, {self.dim}, *)" if self.channel_first else f"(B, *, {self.dim})"
            raise ValueError(
                f"expected features {expected} with channel_first={self.channel_first}, "
                f"got {tuple(x.shape)}"
            )
        return x.movedim(axis, -1)

    def _as_input(self, vectors: Tensor) -> Tensor:
        return vectors.movedim(-1, 1) if self.channel_first else vectors

    @torch.no_grad()
    def _count(self, indices: Tensor, mask: Tensor | None) -> None:
        """Add the samples of one call to the usage."""
        weights = torch.ones_like(indices) if mask is None else mask.long()
        counts = torch.zeros_like(self.usage, dtype=torch.long)  # bfloat16 counts up to 256
        counts.index_add_(0, indices.flatten(), weights.flatten())
        _sum_over_processes(counts)
        total = counts.sum()
        share = (counts / total.clamp_min(1)).to(self.usage)
        self.usage.lerp_(share, (1 - _DECAY) * (total > 0))  # an empty batch changes nothing

    def _reset_is_due(self) -> bool:
        if not self.dead_below:
            return False
        self._calls += 1
        return self._calls % self.reset_every == 0

    @torch.no_grad()
    def _reset(self, q: HeadCategorical, mask: Tensor | None) -> int:
        """:meth:`reset_dead_codes` with the distribution of the features."""
        dead = self.dead_codes
        count = int(dead.sum())
        if not count:
            return 0
        weights = torch.ones(q.batch_shape) if mask is None else mask
        weights = weights.to(dtype=torch.float64, device=dead.device)[..., None]
        sums = (q.probs.double() * weights).flatten(0, -2).sum(0)
        _sum_over_processes(sums)
        before = sums.clamp_min(_RARE * sums.sum())
        before = before / before.sum()
        after = torch.where(dead, before.clamp_min(1 / self.num_codes), before)
        after = after / after.sum()
        shift = self.head.inverse(after) - self.head.inverse(before)
        # .data: an earlier call of this layer in the same step may still need the old values.
        self.to_scores.bias.data += shift.to(self.to_scores.bias)
        self.codebook.weight.data[dead] = self._vectors_in_use(~dead, count)
        self.usage[dead] = 1 / self.num_codes
        self.usage /= self.usage.sum()
        return count

    def _vectors_in_use(self, in_use: Tensor, count: int) -> Tensor:
        """Vectors of codes drawn by usage, with noise, equal on all processes."""
        codes = torch.multinomial(self.usage * in_use, count, replacement=True)
        vectors = self.codebook.weight[codes]
        vectors = vectors + _NOISE * self.codebook.weight.std() * torch.randn_like(vectors)
        if _num_processes() > 1:
            dist.broadcast(vectors, 0)
        return vectors


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _sum_over_processes(values: Tensor) -> None:
    if _num_processes() > 1:
        dist.all_reduce(values)
