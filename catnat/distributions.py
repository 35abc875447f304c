"""The distribution a head returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints
from torch.distributions.kl import kl_divergence, register_kl
from torch.distributions.utils import lazy_property

from catnat.estimators import straight_through_gumbel
from catnat.numerics import (
    at_least_float32,
    can_branch_on,
    exp_of_log_probs,
    finite_log_probs,
    safe_log,
)

if TYPE_CHECKING:
    from catnat.one_hot import HeadOneHotCategorical


class HeadCategorical(Categorical):
    """A categorical distribution given by normalized, finite log-probabilities.

    Unlike torch's ``Categorical`` it keeps impossible categories: their probability is exactly 0,
    their log-probability a finite floor, so they are never sampled, and entropy, KL divergence
    and all gradients stay finite.

    Args:
        log_probs: (*, K), normalized, as from :meth:`CategoricalHead.log_probs`. Half precision
            becomes float32.
        validate_args: check the log-probabilities, and later the values given to ``log_prob``. The
            default is that of all torch distributions (``Distribution.set_default_validate_args``;
            torch.compile turns it off), but on the CPU only, where checking waits for no device,
            and not under torch.compile, torch.func and other tracers.
        normalized: the caller guarantees that the probabilities sum to 1, as every head does; the
            sums are then not checked.

    >>> from catnat import make_head
    >>> make_head("natural", 4)(torch.zeros(3)).entropy()
    tensor(1.3863)
    """

    arg_constraints = {"logits": constraints.real_vector}

    def __init__(
        self, log_probs: Tensor, validate_args: bool | None = None, *, normalized: bool = False
    ) -> None:
        if log_probs.ndim == 0 or log_probs.shape[-1] == 0:
            raise ValueError(f"log_probs need categories last, got shape {tuple(log_probs.shape)}")
        if validate_args is None:
            validate_args = Distribution._validate_args and can_branch_on(log_probs)
        validate_args = validate_args and log_probs.numel() > 0  # torch cannot check nothing
        self.logits = self._param = at_least_float32(log_probs)
        self._num_events = log_probs.shape[-1]
        # If the sum of all values is not NaN, no value is NaN. The sum is much cheaper than
        # torch's check of every value, which is left to find and report the NaN.
        suspicious = validate_args and bool(self.logits.detach().sum().isnan())
        Distribution.__init__(self, log_probs.shape[:-1], validate_args=suspicious)
        self._validate_args = validate_args
        if validate_args and not normalized:
            self._check_sums(1e-3 + 16 * torch.finfo(log_probs.dtype).eps)

    def _check_sums(self, tolerance: float) -> None:
        sums = self.probs.detach().sum(-1)
        worst = sums.flatten()[(sums - 1).abs().argmax()].item()
        if abs(worst - 1) > tolerance:
            raise ValueError(f"log_probs must be normalized, got probabilities that sum to {worst}")

    @lazy_property
    def probs(self) -> Tensor:
        """Probabilities, (*, K), exactly 0 for impossible categories."""
        return exp_of_log_probs(self.logits)

    def expand(self, batch_shape: Any, _instance: Any = None) -> HeadCategorical:
        """The same distribution with a larger batch shape.

        A subclass with its own ``__init__`` overrides ``expand``, as everywhere in torch.
        """
        new: HeadCategorical = self._get_checked_instance(  # type: ignore[no-untyped-call]
            HeadCategorical, _instance
        )
        batch_shape = torch.Size(batch_shape)
        new.logits = new._param = self.logits.expand(batch_shape + self._param.shape[-1:])
        new._num_events = self._num_events
        Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def entropy(self) -> Tensor:
        """-sum_k p_k log p_k with 0 log 0 = 0, (*)."""
        return -(self.probs * self.logits).sum(-1)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Random categories, (*sample_shape, *) int64; never one of probability 0."""
        shape = torch.Size(sample_shape)
        rows = self.probs.detach().reshape(-1, self._num_events)
        drawn = torch.multinomial(rows, shape.numel(), True, generator=generator).T
        return drawn.reshape(shape + self._batch_shape)

    def one_hot_sample(
        self, sample_shape: Any = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """A sample as one-hot vectors, (*sample_shape, *, K), without gradient."""
        index = self.sample(sample_shape, generator)
        return torch.zeros(
            *index.shape, self._num_events, dtype=self.logits.dtype, device=index.device
        ).scatter_(-1, index[..., None], 1)

    def rsample_relaxed(
        self, temperature: float | Tensor, hard: bool = False, sample_shape: Any = ()
    ) -> Tensor:
        """A Gumbel-softmax sample, (*sample_shape, *, K), with gradient.

        Args:
            temperature: > 0; towards 0 the sample becomes one-hot.
            hard: return an exact one-hot sample with the gradient of the relaxed sample.
            sample_shape: as in ``sample``.
        """
        log_probs = self.logits.expand(torch.Size(sample_shape) + self.logits.shape)
        return straight_through_gumbel(log_probs, temperature, hard=hard)

    def rsample_straight_through(
        self, sample_shape: Any = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """One-hot samples with the gradient of the probabilities p, (*sample_shape, *, K).

        The value is exactly one-hot: one-hot + p - stop(p) (Bengio, Léonard and Courville, 2013).
        """
        return self.one_hot_sample(sample_shape, generator) + (self.probs - self.probs.detach())

    def one_hot(self) -> HeadOneHotCategorical:
        """The same distribution over one-hot vectors, with ``rsample``: for ``Independent``."""
        from catnat.one_hot import HeadOneHotCategorical

        return HeadOneHotCategorical(self)


def _kl(p: Categorical, q: Categorical) -> Tensor:
    """sum_k p_k (log p_k - log q_k); finite, with log 0 at its floor, even where q_k = 0 < p_k."""
    log_p = _log_probs(p)
    return (exp_of_log_probs(log_p) * (log_p - _log_probs(q))).sum(-1)


def _log_probs(q: Categorical) -> Tensor:
    """Finite log-probabilities, at the floor where a probability is 0.

    ``q.logits`` does not serve where q was given by probabilities: torch makes 1e-7 of a 0 there.
    """
    given_probs = "probs" in vars(q) and q._param is q.probs
    logs = safe_log(q.probs) if given_probs else finite_log_probs(q.logits)
    return at_least_float32(logs)


for _pair in (
    (HeadCategorical, HeadCategorical),
    (HeadCategorical, Categorical),
    (Categorical, HeadCategorical),
):
    register_kl(*_pair)(_kl)

# torch looks up the KL function of a pair of classes at its first use, and torch.compile cannot
# trace the look-up. So all pairs are used once here.
_HEAD, _PLAIN = HeadCategorical(torch.zeros(1)), Categorical(logits=torch.zeros(1))
for _p, _q in ((_HEAD, _HEAD), (_HEAD, _PLAIN), (_PLAIN, _HEAD)):
    kl_divergence(_p, _q)
