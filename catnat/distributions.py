"""Categorical distributions that heads return."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution
from torch.distributions.kl import kl_divergence, register_kl
from torch.distributions.utils import lazy_property

from catnat.checks import require_integer_within
from catnat.estimator_table import TABLE, find_estimator
from catnat.numerics import (
    at_least_float32,
    can_branch_on,
    common_shape,
    exp_of_log_probs,
    exponential,
    finite_log_probs,
    safe_log,
    take,
)

_WITH_SAMPLES = tuple(estimator for estimator in TABLE if estimator.draw is not None)
ESTIMATORS = tuple(estimator.name for estimator in _WITH_SAMPLES)
"""Estimator names that :meth:`HeadCategorical.rsample` accepts."""
SEARCH_FROM = 2**17
"""Largest K at which the mode uses all log-probabilities, which is faster than a search."""
FLOAT32_LIMIT = 2**16
"""Largest K that is sampled with float32 noise; ties are common beyond it."""


class PathHead(Protocol):
    """Operations of a head that its distribution needs.

    In a tree, the ``path_`` methods visit only the O(log K) nodes on a path. Scores (*, S) are
    checked and have dtype float32 or float64; values are int64.
    """

    num_categories: int
    tree_id: object

    def log_probs(self, scores: Tensor) -> Tensor:
        """Log-probabilities of all categories, (*, S) -> (*, K)."""

    def path_log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        """Log-probabilities of categories, (*); NaN if a value is not a category."""

    def path_sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        """Random categories, (*sample_shape, *)."""

    def path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to categories and of the other sides, (*, H) each."""

    def path_topk(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and indices of the k most likely categories, (*, k) each."""

    def path_sample_without_replacement(
        self, scores: Tensor, k: int, generator: torch.Generator | None
    ) -> Tensor:
        """k different random categories, (k, *)."""


class HeadCategorical(Categorical):
    """A ``torch.distributions.Categorical`` whose impossible categories have probability exactly 0.

    The log-probability of an impossible category is a finite floor. Impossible categories are never
    sampled, and entropy, KL divergence and all gradients stay finite.

    A tree head passes a copy of its scores instead of log-probabilities. ``log_prob`` and
    ``sample`` then visit only the O(log K) nodes on a path, and ``logits`` and ``probs`` are
    computed on first access. This access does not change the results of ``log_prob``.

    Args:
        log_probs: normalized log-probabilities, (*, K), as from :meth:`CategoricalHead.log_probs`.
            Half precision becomes float32, and -inf becomes the finite floor.
        validate_args: whether to check the log-probabilities, and later the arguments of
            ``log_prob``. The default is torch's
            (``Distribution.set_default_validate_args``) on the CPU. On other devices, and under
            torch.compile, torch.func and other tracers, it is False.
        normalized: whether the caller guarantees that the log-probabilities are finite and the
            probabilities sum to 1. They are then not checked.
        source: a head and its checked scores; replaces ``log_probs``.

    >>> from catnat import make_head
    >>> make_head("natural", 4)(torch.zeros(3)).entropy()
    tensor(1.3863)
    """

    scores: Tensor  # input of the head after masks; only set by heads
    # The batch shape of these scores broadcasts to the batch shape of the distribution.
    _source: tuple[PathHead, Tensor] | None = None

    def __init__(
        self,
        log_probs: Tensor | None,
        validate_args: bool | None = None,
        *,
        normalized: bool = False,
        source: tuple[PathHead, Tensor] | None = None,
    ) -> None:
        if source is not None:
            head, scores = source
            parameter = scores.clone()  # optimizers change parameters in place
            self._source = head, parameter
            self._num_events = head.num_categories
        else:
            assert log_probs is not None
            parameter = at_least_float32(log_probs)
            self._num_events = parameter.shape[-1]
            self.logits = parameter if normalized else finite_log_probs(parameter)
        if validate_args is None:
            validate_args = Distribution._validate_args and can_branch_on(parameter)
        if validate_args and bool(parameter.isnan().any()):
            raise ValueError("scores and log-probabilities must be numbers, got nan")
        if validate_args and log_probs is not None and not normalized:
            sums = self.probs.detach().sum(-1)
            wrong = (sums - 1).abs() > 1e-3 + 16 * torch.finfo(log_probs.dtype).eps
            if bool(wrong.any()):
                raise ValueError(
                    "log_probs must be normalized, got probabilities that sum to "
                    f"{sums[wrong][0].item()}"
                )
        Distribution.__init__(self, parameter.shape[:-1], validate_args=False)
        self._validate_args = validate_args

    @lazy_property
    def logits(self) -> Tensor:
        """Log-probabilities, (*, K), finite."""
        assert self._source is not None
        head, scores = self._source
        return head.log_probs(scores).expand(*self._batch_shape, self._num_events)

    def __repr__(self) -> str:
        """Batch shape and number of categories; computes no probabilities."""
        batch = tuple(self.batch_shape)
        K = self._num_events
        return f"{type(self).__name__}(batch_shape={batch}, num_categories={K})"

    @property
    def _param(self) -> Tensor:  # type: ignore[override]
        """Torch's name for the parameter of a distribution."""
        return self.logits

    @lazy_property
    def probs(self) -> Tensor:
        """Probabilities, (*, K), exactly 0 for impossible categories."""
        return exp_of_log_probs(self.logits)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "HeadCategorical":
        """Expand the batch shape.

        As in torch, a subclass with its own ``__init__`` must override ``expand``.
        """
        new = self._get_checked_instance(  # type: ignore[no-untyped-call]
            HeadCategorical, _instance
        )
        batch_shape = torch.Size(batch_shape)
        new._source = self._source
        new._num_events = self._num_events
        if "logits" in vars(self):
            new.logits = self.logits.expand(*batch_shape, self._num_events)
        Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def entropy(self) -> Tensor:
        """-sum_k p_k log p_k with 0 log 0 = 0, (*)."""
        return -(self.probs * self.logits).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities of categories, which broadcast with the batch shape.

        A value that is not a category raises a ValueError if arguments are validated, and gives NaN
        otherwise.
        """
        if self._validate_args:
            self._validate_sample(value)
        value = value.long()
        if self._source is None:
            return pick(self.logits, value, checked=bool(self._validate_args))
        head, scores = self._source
        return head.path_log_prob(
            scores, value.expand(common_shape(value.shape, self._batch_shape))
        )

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Random categories, (*sample_shape, *) int64; never a category of probability 0."""
        sample_shape = torch.Size(sample_shape)
        if self._source is None:
            return draw(self.probs.detach(), sample_shape, generator)
        head, scores = self._source
        scores = scores.detach().expand(*self._batch_shape, -1)
        return head.path_sample(scores, sample_shape, generator)

    def sample_without_replacement(
        self, k: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """k different categories in the order of their draws, and their log-probabilities, (k, *).

        The log-probabilities have a gradient. A tree needs O(k log K) time, see
        :meth:`catnat.CategoricalHead.sample_without_replacement`. If fewer than k categories are
        possible, impossible categories come last.

        Args:
            k: number of draws, 1 to K.
            generator: random number generator (default: torch's).

        >>> from catnat import make_head
        >>> q = make_head("natural", 4)(torch.zeros(3))
        >>> q.sample_without_replacement(4)[0].sort().values
        tensor([0, 1, 2, 3])
        """
        require_integer_within(1, self._num_events, k=k)
        if self._source is None:
            values = draw_different(self.logits.detach(), k, generator)
            return values, pick(self.logits, values, checked=True)
        head, scores = self._source
        scores = scores.expand(*self._batch_shape, -1)
        values = head.path_sample_without_replacement(scores.detach(), k, generator)
        return values, head.path_log_prob(scores, values)

    def topk(self, k: int) -> torch.return_types.topk:
        """The k most likely categories and their log-probabilities, (*, k) each, sorted.

        Like ``torch.topk``, it returns ``values`` (with a gradient) and ``indices``. Large trees
        are searched, see :meth:`catnat.CategoricalHead.topk`.
        """
        require_integer_within(1, self._num_events, k=k)
        if self._source is None or "logits" in vars(self):
            return self.logits.topk(k, -1)
        head, scores = self._source
        values, categories = head.path_topk(scores.expand(*self._batch_shape, -1), k)
        return torch.return_types.topk((values, categories))

    @property
    def mode(self) -> Tensor:
        """The most likely category, (*).

        In a tie, it is the first of these categories, except in trees with K > 131072, which are
        searched.
        """
        if self._num_events <= SEARCH_FROM or "logits" in vars(self):
            return self.probs.argmax(-1)
        return self.topk(1).indices[..., 0]

    def one_hot_sample(
        self, sample_shape: Any = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Samples as one-hot vectors, (*sample_shape, *, K), without a gradient."""
        index = self.sample(sample_shape, generator)
        dtype = (self.logits if self._source is None else self._source[1]).dtype
        # new_zeros instead of zeros: inside vmap, it is batched like the index.
        zeros = index.new_zeros((*index.shape, self._num_events), dtype=dtype)
        return zeros.scatter(-1, index[..., None], 1)

    def path_kl(self, other: "HeadCategorical", value: Tensor) -> Tensor:
        r"""Estimate of KL(self || other) from samples of this distribution, (*) -> (*).

        The estimate sums the binary divergences along the path to each sample, in O(log K) time:

        .. math:: KL(q \| p) = E_{c \sim q} \sum_{h \text{ above } c} KL(a_h^q \| a_h^p)

        It is unbiased, never negative, and has far less variance than log q(c) - log p(c). If the
        distributions are not trees with the same leaves, the result is the exact divergence.

        Gradients in the scores of both distributions are unbiased: a score-function term accounts
        for the effect of each node on the terms below it.

        Args:
            other: distribution over the same categories (p).
            value: samples of this distribution; their shape broadcasts with the batch shape.

        >>> from catnat import make_head
        >>> head = make_head("natural", 4)
        >>> q, p = head(torch.zeros(3)), head(torch.tensor([1.0, 0.0, 0.0]))
        >>> q.path_kl(p, q.sample()), torch.distributions.kl_divergence(q, p)
        (tensor(0.1306), tensor(0.1306))
        """
        value = checked_value(value, self._num_events)
        ours = self._source
        theirs = getattr(other, "_source", None)
        if ours is None or theirs is None or ours[0].tree_id != theirs[0].tree_id:
            return self._for_each(value, _kl(self, other))
        logs = [head.path_logs(scores, value) for head, scores in (ours, theirs)]
        return self._for_each(value, path_kl(*logs))

    def path_entropy(self, value: Tensor) -> Tensor:
        """Estimate of the entropy from samples of this distribution, (*) -> (*).

        The estimate sums the binary entropies along the path to each sample, in O(log K) time. The
        value and its gradients are unbiased, see :meth:`path_kl`. Without a tree, the result is the
        exact entropy.
        """
        value = checked_value(value, self._num_events)
        if self._source is None:
            return self._for_each(value, self.entropy())
        head, scores = self._source
        return self._for_each(value, path_entropy(head.path_logs(scores, value)))

    def _for_each(self, value: Tensor, result: Tensor) -> Tensor:
        """The result for each value; NaN if a value is not a category."""
        is_category = (value >= 0) & (value < self._num_events)
        return torch.where(is_category, result, torch.nan)

    def rsample(
        self,
        sample_shape: Any = (),
        estimator: str = "",
        temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
        num_draws: int | None = None,
    ) -> Tensor:
        """Samples with a gradient, (*sample_shape, *, K).

        An option that the estimator does not use raises an error.

        Args:
            sample_shape: shape of the samples from each distribution of the batch.
            estimator: a name from ``ESTIMATORS``: ``"straight-through"`` (one-hot, with the
                gradient of the probabilities), ``"reinmax"`` or ``"zgr"`` (one-hot,
                :func:`~catnat.estimators.reinmax`), ``"gumbel"`` (one-hot, with the gradient of the
                relaxed sample), ``"gumbel-rao"`` (one-hot, with the mean gradient of ``num_draws``
                relaxed samples, :func:`~catnat.estimators.gumbel_rao`) or ``"relaxed"`` (a point
                of the simplex). Names accept hyphens or underscores.
            temperature: temperature of the relaxed samples, > 0 (default: 1), for ``"gumbel"``,
                ``"gumbel-rao"`` and ``"relaxed"``. Relaxed samples approach one-hot vectors as the
                temperature approaches 0.
            generator: random number generator (default: torch's).
            num_draws: number of relaxed samples per sample, for ``"gumbel-rao"`` (default: 8).
        """
        if not estimator:
            raise ValueError(f"rsample needs an estimator; choose from {', '.join(ESTIMATORS)}")
        chosen = find_estimator(estimator, _WITH_SAMPLES)
        options = chosen.options(temperature=temperature, num_draws=num_draws)
        assert chosen.draw is not None
        return chosen.draw(self, torch.Size(sample_shape), generator, **options)


def checked_value(value: Tensor, num_categories: int, name: str = "value") -> Tensor:
    """Categories as int64, checked if that does not wait for a device."""
    index = value.long()
    if can_branch_on(value):
        wrong = index.clamp(0, num_categories - 1) != index
        if value.is_floating_point():
            wrong |= index != value
        if bool(wrong.any()):
            got = value[wrong][0].item()
            raise ValueError(f"{name} must be a category from 0 to {num_categories - 1}, got {got}")
    return index


def pick(log_probs: Tensor, value: Tensor, checked: bool) -> Tensor:
    """Log-probabilities of categories: (*, K) and (*) int64, which broadcast -> (*).

    The result is NaN if a value is not a category, unless the values are already checked.
    """
    value = value.expand(common_shape(value.shape, log_probs.shape[:-1]))
    if checked:
        return take(log_probs, value[..., None])[..., 0]
    is_category = (value >= 0) & (value < log_probs.shape[-1])
    chosen = take(log_probs, torch.where(is_category, value, 0)[..., None])[..., 0]
    return chosen * torch.where(is_category, 1.0, torch.nan).to(chosen.dtype)


def draw(probs: Tensor, sample_shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Random categories, (*, K) -> (*sample_shape, *) int64; never a category of probability 0.

    Several draws from a row use cumulative sums of its probabilities. In float32, these would lose
    categories with a probability below 3e-8. On CUDA, the order of these sums is not fixed, so
    deterministic algorithms draw the minimum of K exponential variables with rates p instead.
    """
    shape = sample_shape + probs.shape[:-1]
    K = probs.shape[-1]
    rows = probs.reshape(-1, K)
    count = sample_shape.numel()
    if not count:
        return probs.new_empty(shape, dtype=torch.long)
    if K > FLOAT32_LIMIT or count > 1:
        rows = rows.double()
    if count > 1 and rows.is_cuda and torch.are_deterministic_algorithms_enabled():
        clocks = rows.new_empty(count, *rows.shape).exponential_(generator=generator)
        drawn = (rows / clocks.clamp_min_(torch.finfo(rows.dtype).tiny)).argmax(-1)
    else:
        drawn = torch.multinomial(rows, count, True, generator=generator).T
    return drawn.reshape(shape)


def draw_different(log_probs: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """k different random categories by Gumbel top-k, (*, K) -> (k, *), in the order of the draws.

    On the CPU, NaN raises a ValueError.
    """
    if can_branch_on(log_probs) and bool(log_probs.isnan().any()):
        raise ValueError("there is no category to sample where a score is nan")
    return gumbel(log_probs, generator).topk(k, -1).indices.movedim(-1, 0)


def gumbel(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Log-probabilities plus independent Gumbel noise, in float64."""
    clocks = exponential(log_probs.shape, log_probs, generator)
    return log_probs.double() - clocks.log()


def path_kl(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Sum of the binary divergences along a path, from two results of ``path_logs``."""
    terms = _binary_mean(ours, [a - b for a, b in zip(ours, theirs, strict=True)])
    return _path_sum(terms.clamp_min(0), ours[0])  # rounding may go below 0


def path_entropy(logs: Sequence[Tensor]) -> Tensor:
    """Sum of the binary entropies along a path, from a result of ``path_logs``."""
    return _path_sum(-_binary_mean(logs, logs), logs[0])


def _binary_mean(logs: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Mean of two values at every node, weighted by their probabilities."""
    one, other = (exp_of_log_probs(log) * x for log, x in zip(logs, values, strict=True))
    return one + other


def _path_sum(terms: Tensor, steps: Tensor) -> Tensor:
    """Sum along a path, (*, H) -> (*), with the gradient of the mean over all paths.

    Entries are ordered from the leaf to the root, so earlier entries belong to lower nodes.
    """
    below = (terms.cumsum(-1) - terms).detach()
    return (terms + below * (steps - steps.detach())).sum(-1)


def _kl(p: Categorical, q: Categorical) -> Tensor:
    """KL(p || q), finite even if q_k = 0 < p_k, because log 0 is a finite floor."""
    log_p = _log_probs(p)
    log_q = _log_probs(q)
    if log_p.shape[-1] != log_q.shape[-1]:
        raise ValueError(
            f"KL divergence between {log_p.shape[-1]} and {log_q.shape[-1]} categories"
        )
    return (exp_of_log_probs(log_p) * (log_p - log_q)).sum(-1)


def _log_probs(q: Categorical) -> Tensor:
    """Finite log-probabilities, with a floor for probability 0.

    If q was created from probabilities, its ``logits`` are not exact: torch replaces 0 by 1e-7.
    """
    by_probs = "probs" in q.__dict__ and q._param is q.probs
    logs = safe_log(q.probs) if by_probs else finite_log_probs(q.logits)
    return at_least_float32(logs)


_OURS = HeadCategorical(torch.zeros(1))
_TORCHS = Categorical(logits=torch.zeros(1))
_PAIRS = ((_OURS, _OURS), (_OURS, _TORCHS), (_TORCHS, _OURS))
for _p, _q in _PAIRS:
    register_kl(type(_p), type(_q))(_kl)
# torch looks up the KL function of a pair of classes at its first use, and torch.compile cannot
# trace the look-up. So all pairs are used once here.
for _p, _q in _PAIRS:
    kl_divergence(_p, _q)
