"""The distribution that a head returns."""

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
"""Names of the gradients that :meth:`HeadCategorical.rsample` can give its samples."""
SEARCH_FROM = 2**17
"""Largest K at which a head computes all log-probabilities to find the largest: it is faster."""
FLOAT32_LIMIT = 2**16
"""Largest K that is sampled with float32 noise: with more, equal numbers are common."""


class PathHead(Protocol):
    """Operations of a head for its distribution: single categories, or all if needed.

    The methods of a tree look at the O(log K) nodes of a path alone. Scores (*, S) are checked, in
    float32 or float64, and values int64.
    """

    num_categories: int
    tree_id: object

    def log_probs(self, scores: Tensor) -> Tensor:
        """Log-probabilities of all categories, (*, S) -> (*, K)."""

    def path_log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        """Log-probabilities of categories, (*); NaN for a value that is not a category."""

    def path_sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        """Random categories, (*sample_shape, *)."""

    def path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to categories and of the turns not taken, (*, H) each."""

    def path_topk(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the k likeliest categories, and these, (*, k) each."""

    def path_sample_without_replacement(
        self, scores: Tensor, k: int, generator: torch.Generator | None
    ) -> Tensor:
        """k different random categories, (k, *)."""


class HeadCategorical(Categorical):
    """A categorical distribution given by normalized, finite log-probabilities.

    Unlike torch's ``Categorical`` it keeps impossible categories: their probability is exactly 0,
    their log-probability a finite floor, so they are never sampled, and entropy, KL divergence
    and all gradients stay finite.

    A catnat head gives a copy of its scores instead: ``log_prob`` and ``sample`` then look at the
    O(log K) nodes of a path alone, and ``logits`` and ``probs`` are computed when they are first
    used. ``log_prob`` is the same to the last bit, whether they were used or not.

    Args:
        log_probs: (*, K), normalized, as from :meth:`CategoricalHead.log_probs`. Half precision
            becomes float32, and -inf the finite floor.
        validate_args: check the log-probabilities, and later the values given to ``log_prob``. The
            default is that of all torch distributions (``Distribution.set_default_validate_args``;
            torch.compile turns it off), but on the CPU only, where checking waits for no device,
            and not under torch.compile, torch.func and other tracers.
        normalized: the caller guarantees that the log-probabilities are finite and the
            probabilities sum to 1, as every head does; this is then not checked.
        source: a head and its checked scores, in place of ``log_probs``.

    >>> from catnat import make_head
    >>> make_head("natural", 4)(torch.zeros(3)).entropy()
    tensor(1.3863)
    """

    scores: Tensor  # that the head was called with, after masks; from a head alone
    # A head and scores that give the log-probabilities; their batch shape broadcasts to ours.
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
            parameter = scores.clone()  # of the moment: parameters change in place later
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
        """Shapes, which are there before probabilities are computed."""
        batch = tuple(self.batch_shape)
        K = self._num_events
        return f"{type(self).__name__}(batch_shape={batch}, num_categories={K})"

    @property
    def _param(self) -> Tensor:  # type: ignore[override]
        """Torch's name for what a distribution was given."""
        return self.logits

    @lazy_property
    def probs(self) -> Tensor:
        """Probabilities, (*, K), exactly 0 for impossible categories."""
        return exp_of_log_probs(self.logits)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "HeadCategorical":
        """The same distribution with a larger batch shape.

        A subclass with its own ``__init__`` overrides ``expand``, as everywhere in torch.
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

        A value that is not a category is a ValueError if arguments are validated, and NaN if not.
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
        """Random categories, (*sample_shape, *) int64; never one of probability 0."""
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

        The log-probabilities have a gradient. A tree is walked down at O(k log K), see
        :meth:`catnat.CategoricalHead.sample_without_replacement`. Where fewer than k categories are
        possible, impossible ones come last.

        Args:
            k: number of draws, 1 to K.
            generator: random number generator; None is torch's own.

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
        """The k likeliest categories with their log-probabilities, (*, k) each, sorted.

        The result has ``values``, with a gradient, and ``indices``, as that of ``torch.topk``.
        A tree over many categories is searched, see :meth:`catnat.CategoricalHead.topk`.
        """
        require_integer_within(1, self._num_events, k=k)
        if self._source is None or "logits" in vars(self):
            return self.logits.topk(k, -1)
        head, scores = self._source
        values, categories = head.path_topk(scores.expand(*self._batch_shape, -1), k)
        return torch.return_types.topk((values, categories))

    @property
    def mode(self) -> Tensor:
        """The likeliest category, (*).

        The first one of several in rounded probabilities; any of them in a tree over so many
        categories (K > 131072) that it is searched.
        """
        if self._num_events <= SEARCH_FROM or "logits" in vars(self):
            return self.probs.argmax(-1)
        return self.topk(1).indices[..., 0]

    def one_hot_sample(
        self, sample_shape: Any = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """A sample as one-hot vectors, (*sample_shape, *, K), without gradient."""
        index = self.sample(sample_shape, generator)
        dtype = (self.logits if self._source is None else self._source[1]).dtype
        # new_zeros, not zeros: inside vmap they are then batched like the index.
        zeros = index.new_zeros((*index.shape, self._num_events), dtype=dtype)
        return zeros.scatter(-1, index[..., None], 1)

    def path_kl(self, other: "HeadCategorical", value: Tensor) -> Tensor:
        r"""Estimate of KL(self || other) from categories drawn from this distribution, (*) -> (*).

        The sum of the binary divergences along the path to each category, at O(log K):

        .. math:: KL(q \| p) = E_{c \sim q} \sum_{h \text{ above } c} KL(a_h^q \| a_h^p)

        It is unbiased and never negative, with far less variance than log q(c) - log p(c). Where
        the two are not trees with the same leaves, it is the exact divergence.

        Gradients are unbiased in the scores of both distributions: the terms below a node also
        move with the probability of the step there, by the score function.

        Args:
            other: p, over the same categories.
            value: categories drawn from this distribution, whose shape broadcasts with the batch.

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
        """Estimate of the entropy from categories drawn from this distribution, (*) -> (*).

        The sum of the binary entropies along the path to each category: unbiased, with unbiased
        gradients, at O(log K), see :meth:`path_kl`. The exact entropy where there is no tree.
        """
        value = checked_value(value, self._num_events)
        if self._source is None:
            return self._for_each(value, self.entropy())
        head, scores = self._source
        return self._for_each(value, path_entropy(head.path_logs(scores, value)))

    def _for_each(self, value: Tensor, result: Tensor) -> Tensor:
        """A number for each value; NaN for a value that is not a category."""
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
        """Samples with a gradient, (*sample_shape, *, K); a category itself has no derivative.

        An option that the estimator does not use must not be given.

        Args:
            sample_shape: shape of the draws from each distribution of the batch.
            estimator: one of ``ESTIMATORS``: ``"straight-through"`` (one-hot, the gradient of the
                probabilities), ``"reinmax"`` or ``"zgr"`` (one-hot,
                :func:`~catnat.estimators.reinmax`), ``"gumbel"`` (one-hot, the gradient of the
                relaxed sample), ``"gumbel-rao"`` (one-hot, the mean gradient of ``num_draws``
                relaxed samples, :func:`~catnat.estimators.gumbel_rao`) or ``"relaxed"`` (a point
                of the simplex). Hyphens and underscores are equal.
            temperature: temperature of relaxed samples, > 0 (default 1); towards 0 they are
                one-hot. For ``"gumbel"``, ``"gumbel-rao"`` and ``"relaxed"``.
            generator: random number generator; None is torch's own.
            num_draws: relaxed samples for each sample of ``"gumbel-rao"`` (default 8).
        """
        chosen = find_estimator(estimator, _WITH_SAMPLES)
        options = chosen.options(temperature=temperature, num_draws=num_draws)
        assert chosen.draw is not None
        return chosen.draw(self, torch.Size(sample_shape), generator, **options)


def checked_value(value: Tensor, num_categories: int, name: str = "value") -> Tensor:
    """Categories as int64, after checking them where that does not wait for a device."""
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

    NaN for a value that is not a category, unless the values were checked.
    """
    value = value.expand(common_shape(value.shape, log_probs.shape[:-1]))
    if checked:
        return take(log_probs, value[..., None])[..., 0]
    is_category = (value >= 0) & (value < log_probs.shape[-1])
    chosen = take(log_probs, torch.where(is_category, value, 0)[..., None])[..., 0]
    return chosen * torch.where(is_category, 1.0, torch.nan).to(chosen.dtype)


def draw(probs: Tensor, sample_shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Random categories, (*, K) -> (*sample_shape, *) int64; never one of probability 0.

    Many draws of a row go through sums of its probabilities: in float32 they would lose categories
    below 3e-8. On CUDA the order of these sums is not fixed. Where algorithms have to be
    deterministic, a draw is the first of K exponential clocks with rates p to ring.
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

    On the CPU a NaN is an error.
    """
    if can_branch_on(log_probs) and bool(log_probs.isnan().any()):
        raise ValueError("there is no category to sample where a score is nan")
    return gumbel(log_probs, generator).topk(k, -1).indices.movedim(-1, 0)


def gumbel(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Log-probabilities plus independent Gumbel noise, in float64."""
    clocks = exponential(log_probs.shape, log_probs, generator)
    return log_probs.double() - clocks.log()


def path_kl(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Sum of the binary divergences along a path: of each, log of the step and of the other."""
    terms = _binary_mean(ours, [a - b for a, b in zip(ours, theirs, strict=True)])
    return _path_sum(terms.clamp_min(0), ours[0])  # rounding may go below 0


def path_entropy(logs: Sequence[Tensor]) -> Tensor:
    """Sum of the binary entropies along a path."""
    return _path_sum(-_binary_mean(logs, logs), logs[0])


def _binary_mean(logs: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Mean of two values with these two log-probabilities, at every node."""
    one, other = (exp_of_log_probs(log) * x for log, x in zip(logs, values, strict=True))
    return one + other


def _path_sum(terms: Tensor, steps: Tensor) -> Tensor:
    """Sum along a path, (*, H) -> (*), with the gradient of the mean over all paths.

    Entries go from the leaf up: those before an entry are below its node.
    """
    below = (terms.cumsum(-1) - terms).detach()
    return (terms + below * (steps - steps.detach())).sum(-1)


def _kl(p: Categorical, q: Categorical) -> Tensor:
    """sum_k p_k (log p_k - log q_k); finite, with log 0 at its floor, even where q_k = 0 < p_k."""
    log_p = _log_probs(p)
    log_q = _log_probs(q)
    if log_p.shape[-1] != log_q.shape[-1]:
        raise ValueError(
            f"KL divergence between {log_p.shape[-1]} and {log_q.shape[-1]} categories"
        )
    return (exp_of_log_probs(log_p) * (log_p - log_q)).sum(-1)


def _log_probs(q: Categorical) -> Tensor:
    """Finite log-probabilities, at the floor where a probability is 0.

    ``q.logits`` does not serve where q was given by probabilities: torch makes 1e-7 of a 0 there.
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
