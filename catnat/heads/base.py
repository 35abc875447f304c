"""Categorical heads: strategies that turn scores into a categorical distribution.

A head is an ``nn.Module`` whose ``forward`` maps scores (*, S) to a
:class:`~catnat.distributions.HeadCategorical` over K categories. Softmax and sparsemax are in
:mod:`catnat.heads.flat`, and the tree heads are in :mod:`catnat.heads.tree`. A new head is one
class::

    class MyHead(CategoricalHead, name="mine"): ...
"""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from catnat.checks import checked_categories, require_at_least, require_integer_within
from catnat.distributions import (
    HeadCategorical,
    checked_value,
    draw,
    draw_different,
    pick,
)
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
_MAX_NUMBERS = 2**22  # entries of the matrices that mean_fisher holds at a time
# Methods that a class may derive for its own log_probs.
_CLOSED_FORMS = ("fisher_diagonal", "_mean_fisher", "_natural_gradient")


class CategoricalHead(nn.Module, ABC):
    """Maps S scores to a distribution over K categories.

    Subclasses implement :meth:`log_probs`, :meth:`inverse` and :meth:`fisher`. All other methods
    derive from these three; a subclass overrides a method if it has a cheaper closed form.

    Args:
        num_categories: number of categories (K), at least 2. The number of scores (S) is K, unless
            a subclass sets ``self.num_scores`` afterwards.

    Shapes:
        scores (*, S); probabilities (*, K); Fisher matrices (*, S, S).
    """

    name: str  # name of the class, if it has one; that of the inner head for a MixedHead
    num_categories: int
    num_scores: int
    tree_id: object  # equal for two heads whose trees have equal leaves
    validate_args: bool | None = None  # passed to HeadCategorical by forward
    _knows_masks: bool = False  # whether a score of -inf is known to make a category impossible
    _is_lazy: bool = False  # whether its distribution may ask for all log-probabilities later

    if TYPE_CHECKING:  # torch declares that calling a module returns Any

        def __call__(self, scores: Tensor, mask: Tensor | None = None) -> HeadCategorical:
            """Distribution of these scores over the allowed categories."""

    def __init_subclass__(
        cls, name: str | None = None, aliases: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls._knows_masks = cls.log_probs.__module__.startswith("catnat.")
        own = vars(cls)
        if "log_probs" in own and not own.get("fisher_is_diagonal"):
            cls._forget_closed_forms()
        if name is None:
            return
        for new_name in (name, *aliases):
            registered = REGISTRY.get(ALIASES.get(new_name, new_name))
            # Defining the class again is not an error: a notebook cell may run twice.
            if registered is not None and _identity(registered) != _identity(cls):
                raise ValueError(f"head name {new_name!r} is taken by {_identity(registered)}")
        cls.name = name
        REGISTRY[name] = cls
        ALIASES.update(dict.fromkeys(aliases, name))

    @classmethod
    def _forget_closed_forms(cls) -> None:
        """Replace inherited closed forms, which were derived for other log-probabilities."""
        own = vars(cls)
        if "fisher" not in own and not getattr(cls.fisher, "__isabstractmethod__", False):
            cls.fisher = CategoricalHead._differentiated_fisher  # type: ignore[method-assign]
        for name in (*_CLOSED_FORMS, "fisher_is_diagonal"):
            if name not in own:
                setattr(cls, name, vars(CategoricalHead)[name])

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

    @property
    def fisher_is_diagonal(self) -> bool:
        """Whether :meth:`fisher` is known to be diagonal; see :meth:`_differentiated_fisher`."""
        return False

    @torch.no_grad()
    def _differentiated_fisher(self, scores: Tensor) -> Tensor:
        """The definition of :meth:`fisher`: sum_k p_k grad log p_k (grad log p_k)^T.

        It replaces the closed form of a class whose subclass has another :meth:`log_probs`. K
        backward passes; without a gradient of its own.
        """
        K = self.num_categories
        scores = at_least_float32(scores.detach())
        with torch.inference_mode(False), torch.enable_grad():
            leaf = scores.expand(K, *scores.shape).clone().requires_grad_()
            log_probs = self._finite_log_probs(leaf)  # (K, *, K)
            each = torch.eye(K, dtype=log_probs.dtype, device=log_probs.device)
            each = each.view(K, *[1] * (scores.dim() - 1), K).expand_as(log_probs)
            gradients = torch.autograd.grad(log_probs, leaf, each)[0]  # (K, *, S)
        probs = exp_of_log_probs(log_probs[0].detach()).movedim(-1, 0)[..., None]  # (K, *, 1)
        gradients = torch.where(probs > 0, gradients, 0.0)
        with without_autocast(gradients):
            return torch.einsum("k...i,k...j->...ij", probs * gradients, gradients)

    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities, (*, S) -> (*, K); exactly 0 where a category is impossible."""
        return exp_of_log_probs(self.log_probs(scores))

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Scores that make forbidden categories impossible, (*, S) -> (*, S).

        All other methods accept the result as scores. A forbidden category has probability exactly
        0 and is never drawn; scores that no longer matter get no gradient.

        Args:
            scores: (*, S).
            mask: (*, K) bool, True where a category is allowed; its batch shape broadcasts with
                that of the scores. Every row must allow a category. If reading the mask would wait
                for a device, a row without an allowed category becomes NaN.

        Scores in half precision are converted to float32.
        """
        scores = self._checked(scores)
        require_tensor(mask, "mask", self.num_categories)
        before = None
        if not (can_branch_on(scores) and math.isfinite(scores.detach().sum())):
            before = self.allowed(scores)  # mask of scores that are already masked
            mask = mask & before
        filled = self._masked(scores, mask, before)
        has_category = mask.any(-1)
        if not can_branch_on(mask):
            return torch.where(has_category[..., None], filled, torch.nan)
        if not bool(has_category.all()):
            raise ValueError("a row of the mask allows no category")
        return filled

    def _masked(self, scores: Tensor, mask: Tensor, before: Tensor | None) -> Tensor:
        """:meth:`masked` without its checks; ``before`` is the mask of the scores, or None."""
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
        """Raise a ValueError unless log_probs treats a score of -inf as an impossible category."""
        probe = scores.new_zeros(self.num_scores)
        probe[0] = -torch.inf
        share = self.probs(probe)[0].item()
        if share != 0:
            raise ValueError(
                f"{type(self).__name__} gives a forbidden category the probability {share:g}: for "
                "masks, log_probs must treat a score of -inf as an impossible category"
            )
        self._knows_masks = True

    def allowed(self, scores: Tensor) -> Tensor:
        """Recover the mask from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        scores = self._checked(scores)
        if self.num_scores != self.num_categories:  # no mask: see _masked
            return scores.new_ones((*scores.shape[:-1], self.num_categories), dtype=torch.bool)
        return scores != -torch.inf

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> HeadCategorical:
        """Distribution of these scores over the allowed categories.

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

        A value that is not a category raises a ValueError on the CPU. On other devices, and under
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

        A category of probability 0 is never drawn. On the CPU, a NaN score on a path raises an
        error. On other devices, the sample of a tree is then -1.
        """
        scores = self._checked(scores.detach())
        return self.path_sample(scores, torch.Size(sample_shape), generator)

    def path_sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        """:meth:`sample` of checked scores."""
        return draw(self.probs(scores), sample_shape, generator)

    def topk(self, scores: Tensor, k: int) -> torch.return_types.topk:
        """The k likeliest categories with their log-probabilities, (*, S) -> (*, k) each, sorted.

        Like ``torch.topk``, it returns ``values``, with a gradient in the scores, and ``indices``,
        and sorts NaN first. Forbidden categories come last. In a tree over more than 131072
        categories, an exact search computes few nodes.
        """
        require_integer_within(1, self.num_categories, k=k)
        values, categories = self.path_topk(self._checked(scores), k)
        return torch.return_types.topk((values, categories))

    def path_topk(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """:meth:`topk` of checked scores."""
        values, categories = self._finite_log_probs(scores).topk(k, -1)
        return values, categories

    def sample_without_replacement(
        self, scores: Tensor, k: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """k different categories and their log-probabilities, (*, S) -> (k, *) each.

        The categories are in the order of their draws. Each draw uses the probabilities of the
        remaining categories. A large tree needs O(k log K) time (Kool, van Hoof and Welling, 2019);
        other heads perturb all log-probabilities. If fewer than k categories are possible,
        impossible categories come last. On the CPU, a NaN score on a path raises an error. On other
        devices, the categories of a tree are then -1.

        Args:
            scores: (*, S).
            k: number of draws, 1 to K.
            generator: random number generator; None is torch's own.

        Returns:
            The categories, int64, and their log-probabilities, with a gradient in the scores.
        """
        require_integer_within(1, self.num_categories, k=k)
        scores = self._checked(scores)
        values = self.path_sample_without_replacement(scores.detach(), k, generator)
        return values, self.path_log_prob(scores, values)

    def path_sample_without_replacement(
        self, scores: Tensor, k: int, generator: torch.Generator | None
    ) -> Tensor:
        """The categories of :meth:`sample_without_replacement`, from checked scores."""
        return draw_different(self._finite_log_probs(scores), k, generator)

    def path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the taken and the other branches on the paths, (*, H) each."""
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

        If ``fisher_is_diagonal`` is true, the result contains only the diagonals, (T, S). It is
        float32. The host does not wait for the device, so that a monitor can observe every step.
        """
        if self.fisher_is_diagonal:
            return self.fisher_diagonal(scores).mean(1).float()
        return self._mean_fisher(scores).flatten(1).float()

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 0.0) -> Tensor:
        """(G + damping I)^-1 grad: the gradient in the metric of :meth:`fisher`, (*, S) -> (*, S).

        Without damping, the result is G^+ grad, with the pseudo-inverse of G. Half precision is
        computed and returned in float32.
        """
        require_at_least(0, damping=damping)
        if grad.shape != scores.shape:
            raise ValueError(f"grad {tuple(grad.shape)} and scores {tuple(scores.shape)} differ")
        with without_autocast(scores):
            scores = self._checked(scores)
            return self._natural_gradient(scores, grad.to(scores.dtype), damping)

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """Computed in float64: in float32 solvers fail for matrices with tiny entries."""
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
        """Sizes and options shown by ``print(head)``."""
        return f"num_categories={self.num_categories}, num_scores={self.num_scores}"

    def _checked(self, scores: Tensor) -> Tensor:
        """Scores in float32 or float64, after checking their shape and dtype."""
        require_tensor(scores, "scores", self.num_scores)
        wide = at_least_float32(scores)
        if wide is scores or not wide.requires_grad or not is_plain(scores) or scores.is_meta:
            return wide
        # A GradScaler must see that gradients overflow.
        scaled = scores.dtype == torch.float16 and torch.is_autocast_enabled(scores.device.type)
        if not scaled:
            largest = torch.finfo(scores.dtype).max  # a steep gradient must not become infinite
            wide.register_hook(lambda grad: grad.clamp(-largest, largest))
        return wide

    def _checked_probs(self, probs: Tensor) -> Tensor:
        """Probabilities in float64, after checking their shape, signs and sums.

        Invalid probabilities become NaN if reading them would wait for a device.
        """
        require_tensor(probs, "probabilities", self.num_categories)
        wide = probs.double()
        eps = torch.finfo(probs.dtype).eps
        lowest = wide.amin(-1, keepdim=True)
        total = wide.sum(-1, keepdim=True)
        wrong = (lowest < -eps) | ((total - 1).abs() > 1e-3 + 16 * eps)  # not where NaN
        if can_branch_on(probs) and bool(wrong.any()):
            raise ValueError(
                "probabilities must be >= 0 and sum to 1, got a row with minimum "
                f"{lowest[wrong][0].item():g} and sum {total[wrong][0].item():g}"
            )
        return torch.where(wrong, torch.nan, wide.clamp_min(0))


def require_tensor(x: object, name: str, size: int) -> None:
    """Raise an error unless x is a floating-point tensor (*, size), or a bool one for a mask."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    if not x.dim() or x.shape[-1] != size:
        entries = "entries of the mask" if name == "mask" else name
        raise ValueError(f"expected {size} {entries} in the last dimension, got {tuple(x.shape)}")
    is_right = x.dtype == torch.bool if name == "mask" else x.is_floating_point()
    if not is_right:
        kind = "bool, True = allowed" if name == "mask" else "floating point"
        raise ValueError(f"{name} must be {kind}, got {x.dtype}")


def _identity(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
