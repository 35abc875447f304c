"""Categorical heads: strategies that turn scores into a categorical distribution.

A head is an ``nn.Module`` whose ``forward`` maps scores (*, S) to a
:class:`~catnat.distributions.HeadCategorical` over K categories. Four are built in: softmax and
sparsemax in :mod:`catnat.flat_heads`, the catnat heads in :mod:`catnat.tree_heads`. A new one is
one class::

    class MyHead(CategoricalHead, name="mine"): ...
"""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from catnat.checks import checked_categories, require_at_least
from catnat.distributions import HeadCategorical, checked_value, draw, pick
from catnat.numerics import (
    at_least_float32,
    can_branch_on,
    exp_of_log_probs,
    finite_log_probs,
    is_plain,
    without_autocast,
)

REGISTRY: dict[str, type["CategoricalHead"]] = {}
ALIASES: dict[str, str] = {}
_MAX_NUMBERS = 2**22  # of the matrices that mean_fisher holds at a time


class CategoricalHead(nn.Module, ABC):
    """Maps S scores to a distribution over K categories.

    Subclasses implement :meth:`log_probs`, :meth:`inverse` and :meth:`fisher`. All other methods
    are derived from these three; a subclass overrides those for which it has a cheaper closed form.

    Args:
        num_categories: K, at least 2. The number of scores S is K, unless a subclass sets
            ``self.num_scores`` afterwards.

    Shapes:
        scores (*, S); probabilities (*, K); Fisher matrices (*, S, S).
    """

    name: str  # of the class, if it has one; of the inner head for a MixedHead
    fisher_is_diagonal: ClassVar[bool] = False
    num_categories: int
    num_scores: int
    tree_id: object  # equal for two heads if their trees have equal leaves
    validate_args: bool | None = None  # passed to HeadCategorical by forward
    _knows_masks: bool = False  # whether a score of -inf is known to make a category impossible
    _is_lazy: bool = False  # whether its distribution may ask for all log-probabilities later

    if TYPE_CHECKING:  # torch declares that calling a module returns Any

        def __call__(self, scores: Tensor, mask: Tensor | None = None) -> HeadCategorical:
            """The distribution these scores stand for, over the allowed categories."""

    def __init_subclass__(
        cls, name: str | None = None, aliases: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls._knows_masks = cls.log_probs.__module__.startswith("catnat.")
        if name is None:
            return
        for new_name in (name, *aliases):
            registered = REGISTRY.get(ALIASES.get(new_name, new_name))
            # The same class again is not an error: a cell of a notebook may run twice.
            if registered is not None and _identity(registered) != _identity(cls):
                raise ValueError(f"head name {new_name!r} is taken by {_identity(registered)}")
        cls.name = name
        REGISTRY[name] = cls
        ALIASES.update(dict.fromkeys(aliases, name))

    def __init__(self, num_categories: int) -> None:
        super().__init__()
        self.num_categories = self.num_scores = checked_categories(num_categories)
        self.tree_id = self.num_categories

    @abstractmethod
    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, S) -> (*, K): finite for every finite score."""

    @abstractmethod
    def inverse(self, probs: Tensor) -> Tensor:
        """Scores that give these probabilities, (*, K) -> (*, S)."""

    @abstractmethod
    def fisher(self, scores: Tensor) -> Tensor:
        """Exact Fisher information matrix in the scores, (*, S) -> (*, S, S)."""

    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities, (*, S) -> (*, K); exactly 0 where a category is impossible."""
        return exp_of_log_probs(self.log_probs(scores))

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Scores under which a category that the mask forbids is impossible, (*, S) -> (*, S).

        All other methods take the result like any scores: a forbidden category has probability
        exactly 0 and is never drawn, and scores that no longer matter get no gradient.

        Args:
            scores: (*, S).
            mask: (*, K) bool, True where a category is allowed; its batch shape broadcasts with
                that of the scores. Every row allows a category. Where a row does not, and looking
                at the mask would wait for a device, the row becomes NaN.

        Scores in half precision become float32.
        """
        scores = self._checked(scores)
        require_tensor(mask, "mask", self.num_categories)
        before = None
        if not (can_branch_on(scores) and math.isfinite(scores.detach().sum())):
            before = self.allowed(scores)  # of scores that were masked before
            mask = mask & before
        filled = self._masked(scores, mask, before)
        has_category = mask.any(-1)
        if not can_branch_on(mask):
            return torch.where(has_category[..., None], filled, torch.nan)
        if not bool(has_category.all()):
            raise ValueError("a row of the mask allows no category")
        return filled

    def _masked(self, scores: Tensor, mask: Tensor, before: Tensor | None) -> Tensor:
        """:meth:`masked` without its checks; ``before``: the mask of the scores, None for none."""
        if self.num_scores != self.num_categories:
            raise NotImplementedError(
                f"{type(self).__name__} has {self.num_scores} scores for {self.num_categories} "
                "categories: it must override _masked and allowed for masks"
            )
        if not self._knows_masks and is_plain(scores):
            self._check_masks(scores)
        return torch.where(mask, scores, -torch.inf)

    @torch.no_grad()
    def _check_masks(self, scores: Tensor) -> None:
        """Raise an error unless log_probs reads a score of -inf as an impossible category."""
        probe = scores.new_zeros(self.num_scores)
        probe[0] = -torch.inf
        share = self.probs(probe)[0].item()
        if share != 0:
            raise ValueError(
                f"{type(self).__name__} gives a forbidden category the probability {share:g}: for "
                "masks, log_probs must read a score of -inf as an impossible category"
            )
        self._knows_masks = True

    def allowed(self, scores: Tensor) -> Tensor:
        """The mask back from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        scores = self._checked(scores)
        if self.num_scores != self.num_categories:  # no mask: see _masked
            return scores.new_ones((*scores.shape[:-1], self.num_categories), dtype=torch.bool)
        return scores != -torch.inf

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> HeadCategorical:
        """The distribution these scores stand for, over the categories that :meth:`masked` leaves.

        Args:
            scores: (*, S).
            mask: as in :meth:`masked`; None allows all categories.
        """
        if mask is not None:
            scores = self.masked(scores, mask)
        scores = self._checked(scores)
        if self._is_lazy:
            q = HeadCategorical(None, self.validate_args, source=(self, scores))
        else:
            log_probs = self._finite_log_probs(scores)
            q = HeadCategorical(log_probs, self.validate_args, normalized=True)
        q.scores = scores
        return q

    def _finite_log_probs(self, scores: Tensor) -> Tensor:
        """:meth:`log_probs`, finite also where a mask made scores infinite."""
        log_probs = self.log_probs(scores)
        return log_probs if type(self)._knows_masks else finite_log_probs(log_probs)

    def log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        """Log-probability of given categories: (*, S) and (*), which broadcast -> (*).

        A value that is not a category is a ValueError on the CPU. Elsewhere, and under
        torch.compile and torch.func, its log-probability is NaN.
        """
        return self.path_log_prob(self._checked(scores), checked_value(value, self.num_categories))

    def path_log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        """:meth:`log_prob` of checked scores and values."""
        return pick(self.log_probs(scores), value, checked=False)

    def sample(
        self, scores: Tensor, sample_shape: Any = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Random categories, (*, S) -> (*sample_shape, *) int64.

        A category of probability 0 is never drawn. A NaN score that matters is an error on the CPU;
        elsewhere the sample of a tree is then -1, which is not a category.
        """
        scores = self._checked(scores.detach())
        return self.path_sample(scores, torch.Size(sample_shape), generator)

    def path_sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        """:meth:`sample` of checked scores."""
        return draw(self.probs(scores), sample_shape, generator)

    def path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to categories and of the turns not taken, (*, H) each."""
        raise NotImplementedError(f"{type(self).__name__} is not a tree")

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """Diagonal of :meth:`fisher`, (*, S) -> (*, S)."""
        return self.fisher(scores).diagonal(dim1=-2, dim2=-1)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """:meth:`fisher` averaged over all leading dimensions, (*, S) -> (S, S)."""
        return self._mean_fisher(scores.reshape(-1, self.num_scores))

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        """:meth:`fisher` averaged over B rows, a few rows at a time, (*, B, S) -> (*, S, S)."""
        numbers = max(1, scores[..., :1, :].numel() * self.num_scores)  # in matrices of one row
        parts = scores.split(max(1, _MAX_NUMBERS // numbers), -2)
        return torch.stack([self.fisher(part).sum(-3) for part in parts]).sum(0) / scores.shape[-2]

    def step_fishers(self, scores: Tensor) -> Tensor:
        """Mean Fisher matrix over B rows at each of T steps, as vectors, (T, B, S) -> (T, S^2).

        (T, S), the diagonals alone, if ``fisher_is_diagonal``. In float32. Made for observing every
        step of a run: the host does not wait for the device.
        """
        if self.fisher_is_diagonal:
            return self.fisher_diagonal(scores).mean(1).float()
        return self._mean_fisher(scores).flatten(1).float()

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 0.0) -> Tensor:
        """(G + damping I)^-1 grad: the gradient in the metric of :meth:`fisher`, (*, S) -> (*, S).

        Without damping G^+ grad, with the pseudo-inverse of G. Half precision is computed, and
        returned, in float32.
        """
        require_at_least(0, damping=damping)
        if grad.shape != scores.shape:
            raise ValueError(f"grad {tuple(grad.shape)} and scores {tuple(scores.shape)} differ")
        with without_autocast(scores):
            scores = self._checked(scores)
            return self._natural_gradient(scores, grad.to(scores.dtype), damping)

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """In float64: in float32 solvers give up on matrices with tiny entries."""
        fisher = self.fisher(scores.double())
        broken = ~fisher.isfinite().all(-1).all(-1)[..., None]
        fisher = torch.where(broken[..., None], 0.0, fisher)
        fisher = fisher + damping * torch.eye(self.num_scores).to(fisher)
        size = fisher.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
        # An eigenvalue that should be 0 is above S eps where a category is nearly certain.
        lowest = max(self.num_scores * torch.finfo(scores.dtype).eps, 1e-10)
        rtol = 0.0 if damping else lowest
        inverse = torch.linalg.pinv(fisher / size, rtol=rtol, hermitian=True)
        solved = (inverse @ grad.double()[..., None] / size)[..., 0]
        largest = torch.finfo(grad.dtype).max
        return torch.where(broken, torch.nan, solved.clamp(-largest, largest)).to(grad.dtype)

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores in a flat region, where they get no gradient, (*, S) -> (*, S) bool."""
        return torch.zeros_like(scores, dtype=torch.bool)

    def extra_repr(self) -> str:
        """What ``print(head)`` shows."""
        return f"num_categories={self.num_categories}, num_scores={self.num_scores}"

    def _checked(self, scores: Tensor) -> Tensor:
        """Scores in float32 or float64, after checking their shape and dtype."""
        require_tensor(scores, "scores", self.num_scores)
        wide = at_least_float32(scores)
        if wide is scores or not wide.requires_grad or not is_plain(scores) or scores.is_meta:
            return wide
        # A GradScaler, which may have scaled the loss, has to see that gradients overflow.
        scaled = scores.dtype == torch.float16 and torch.is_autocast_enabled(scores.device.type)
        if not scaled:
            largest = torch.finfo(scores.dtype).max  # a steep gradient must not become infinite
            wide.register_hook(lambda grad: grad.clamp(-largest, largest))
        return wide

    def _checked_probs(self, probs: Tensor) -> Tensor:
        """Probabilities in float64, after checking their shape, signs and sums.

        Wrong ones are NaN where looking at the values would wait for a device.
        """
        require_tensor(probs, "probabilities", self.num_categories)
        wide = probs.double()
        eps = torch.finfo(probs.dtype).eps
        lowest = wide.amin(-1, keepdim=True)
        total = wide.sum(-1, keepdim=True)
        wrong = (lowest < -eps) | ((total - 1).abs() > 1e-3 + 16 * eps)  # not where NaN
        if can_branch_on(probs) and bool(wrong.any()):
            raise ValueError(
                "probabilities must be >= 0 and sum to 1, got a row with the lowest "
                f"{lowest[wrong][0].item():g} and the sum {total[wrong][0].item():g}"
            )
        return torch.where(wrong, torch.nan, wide.clamp_min(0))


def require_tensor(x: object, name: str, size: int) -> None:
    """Raise an error unless x is a tensor (*, size) of floating point, or of bool if a mask."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    if not x.dim() or x.shape[-1] != size:
        raise ValueError(f"expected {size} {name} in the last dimension, got {tuple(x.shape)}")
    is_right = x.dtype == torch.bool if name == "mask" else x.is_floating_point()
    if not is_right:
        kind = "bool, True = allowed" if name == "mask" else "floating point"
        raise ValueError(f"{name} must be {kind}, got {x.dtype}")


def _identity(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
