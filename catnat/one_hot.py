"""HeadOneHotCategorical: a head's distribution over one-hot vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, OneHotCategorical
from torch.distributions.kl import kl_divergence, register_kl

if TYPE_CHECKING:
    from catnat.distributions import HeadCategorical


class HeadOneHotCategorical(OneHotCategorical):
    """The distribution of a :class:`~catnat.distributions.HeadCategorical` as one-hot vectors.

    ``q.one_hot()`` makes one. It is torch's ``OneHotCategorical``, for ``Independent`` and the
    like, with ``rsample``: a one-hot sample that has the gradient of the probabilities.

    Args:
        categorical: the distribution over the indices of the categories, with batch shape (*).

    Shapes: values (*, K).

    >>> from catnat import make_head
    >>> q = make_head("natural", 4)(torch.zeros(32, 3)).one_hot()
    >>> torch.distributions.Independent(q, 1).rsample().shape
    torch.Size([32, 4])
    """

    has_rsample = True
    _categorical: HeadCategorical

    def __init__(self, categorical: HeadCategorical) -> None:
        self._categorical = categorical
        event_shape = torch.Size((categorical._num_events,))
        Distribution.__init__(self, categorical.batch_shape, event_shape, validate_args=False)
        self._validate_args = categorical._validate_args

    def expand(self, batch_shape: Any, _instance: Any = None) -> HeadOneHotCategorical:
        """The same distribution with a larger batch shape."""
        return HeadOneHotCategorical(self._categorical.expand(batch_shape))

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """One-hot vectors, (*sample_shape, *, K), without gradient."""
        return self._categorical.one_hot_sample(sample_shape, generator)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """One-hot vectors with the gradient of the probabilities, (*sample_shape, *, K)."""
        return self._categorical.rsample_straight_through(sample_shape, generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities of one-hot vectors, whose batch shape broadcasts: (*, K) -> (*)."""
        if self._validate_args:
            self._validate_sample(value)
        return self._categorical.log_prob(value.argmax(-1))


def _kl(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    return kl_divergence(p._categorical, q._categorical)


for _pair in (
    (HeadOneHotCategorical, HeadOneHotCategorical),
    (HeadOneHotCategorical, OneHotCategorical),
    (OneHotCategorical, HeadOneHotCategorical),
):
    register_kl(*_pair)(_kl)
