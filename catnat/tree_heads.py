"""The catnat heads: a tree of binary splits, whose Fisher matrix is diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from catnat.activations import Activation, CustomActivation, NaturalActivation, SigmoidActivation
from catnat.checks import (
    checked_order,
    require_finite,
    require_tail,
    require_within,
    shown_order,
)
from catnat.head import CategoricalHead
from catnat.kernels.dispatch import tree_fisher, tree_log_prob, tree_log_probs, tree_sample
from catnat.kernels.reference import tree_path_logs
from catnat.numerics import can_branch_on, exp_of_log_probs, is_plain, uniform
from catnat.tree import path_sums, subtree_sums

_OPTIONS = ("activation", "center", "uniform_at_zero", "order", "amplitude", "tail")


class CatnatHead(CategoricalHead):
    r"""A head with a diagonal Fisher matrix: a tree of binary splits, with S = K - 1 scores.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). K need not be a power of
    two: the tree is then a complete one, see :mod:`catnat.tree`. :meth:`log_prob` and
    :meth:`sample` look at the O(log K) nodes of a path alone, and so does the distribution that
    the head returns, until all log-probabilities are asked for.

    A subclass overrides :meth:`log_activation`, which says how a score splits its node; all else is
    derived from it. ``log_activation`` may use parameters of the subclass: when they change, the
    centers change with them. The built-in heads pass a :class:`~catnat.activations.Activation` with
    more closed forms instead, for which there are fused kernels.

    Args:
        num_categories: K, at least 2.
        center: the paper's C, added to every node's center. Cannot change later.
        uniform_at_zero: give each node a center such that zero scores give the uniform distribution
            for every K; otherwise they do only if K is a power of two. Cannot change later.
        order: the leaf of every class, a permutation of 0..K-1; None: class k is leaf k. Classes
            whose leaves are neighbours share most of their path. Cannot change later.
    """

    fisher_is_diagonal = True
    activation: Activation
    order: tuple[int, ...] | None

    def __init__(
        self,
        num_categories: int,
        center: float = 0.0,
        uniform_at_zero: bool = True,
        order: Sequence[int] | Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        super().__init__(num_categories)
        self.num_scores = self.num_categories - 1
        require_finite(center=center)
        if activation is not None and type(self).log_activation is not CatnatHead.log_activation:
            raise TypeError(
                f"{type(self).__name__} overrides log_activation: subclass CatnatHead for it"
            )
        self._made: dict[Any, Tensor] = {}  # constants by dtype and device; the order by device
        own = activation is None
        self.activation = activation or CustomActivation(self.log_activation)
        self.center = float(center)
        self.uniform_at_zero = bool(uniform_at_zero)
        self.order = None if order is None else checked_order(order, self.num_categories)
        self._has_paths = type(self).log_probs is CatnatHead.log_probs
        self._is_lazy = self._has_paths and not own  # a parameter of its own may change in place
        # a(0) = 1/2 exactly, and so every center is exactly 0:
        even = self.num_categories & (self.num_categories - 1) == 0 or not self.uniform_at_zero
        self._is_centered = not own and self.center == 0 and even
        self._ordering(torch.empty(0))  # before anything is traced
        for dtype in () if own else (torch.float32, torch.float64):
            self.constants(torch.empty(0, dtype=dtype))

    def log_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - a(x)) and log a(x) for x = s - C: differentiable, with a increasing in x."""
        if isinstance(self.activation, CustomActivation):
            raise NotImplementedError(f"{type(self).__name__} must override log_activation")
        return self.activation.log_activation(x, None)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        scores = self._checked(scores)
        return self._from_leaves(tree_log_probs(scores, self.activation, self.constants(scores)))

    def _masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        """A split with one empty side goes to the other; a node without leaves is never reached.

        So the Fisher matrix stays diagonal: the information of a certain split is 0, and so is
        P(node) of a node that is never reached. With ``uniform_at_zero`` the other nodes get the
        centers at which zero scores give the uniform distribution over the allowed categories. The
        centers of the whole tree would favour categories whose neighbours are forbidden.
        """
        if self.uniform_at_zero:
            # Exactly 0 if nothing changes; scores that were masked before have moved already.
            shares = [_shares(self._to_leaves(each)) for each in (mask, self.allowed(scores))]
            moved = self._at_share(shares[0]) - self._at_share(shares[1])
            scores = scores + moved.to(scores.dtype)
        return self._filled(scores, mask)

    def _filled(self, scores: Tensor, mask: Tensor) -> Tensor:
        # Whether a side allows a category: + of bools is "or".
        left, right = subtree_sums(self._to_leaves(mask))
        one_sided = torch.where(left, -torch.inf, torch.where(right, torch.inf, 0.0))
        return torch.where(left & right, scores, one_sided.to(scores.dtype))

    def allowed(self, scores: Tensor) -> Tensor:
        """The mask back from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        self._check(scores)
        blocked = path_sums(scores == torch.inf, scores == -torch.inf)[1]
        return self._from_leaves(~blocked)

    def _log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        if not self._has_paths:
            return super()._log_prob(scores, value)
        return tree_log_prob(scores, self._leaf_of(value), self.activation, self.constants(scores))

    def _path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        leaf = self._leaf_of(value)
        return tree_path_logs(scores, leaf, self.activation, self.constants(scores))

    def _sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        if not self._has_paths:
            return super()._sample(scores, sample_shape, generator)
        height = self.num_scores.bit_length()
        uniforms = uniform((*sample_shape, *scores.shape[:-1], height), scores, generator)
        leaf = tree_sample(scores, uniforms, self.activation, self.constants(scores))
        if can_branch_on(leaf) and bool((leaf < 0).any()):
            raise ValueError("there is no category to sample where a score is nan")
        return _looked_up(leaf, self._ordering(leaf)[1])

    def node_probs(self, scores: Tensor) -> Tensor:
        """Probability P(node) of passing through each internal node, (*, K-1) -> (*, K-1)."""
        scores = self._checked(scores)
        logs = self.activation.log_activation(scores, self.constants(scores))
        return exp_of_log_probs(path_sums(*logs)[0])

    def information(self, scores: Tensor) -> Tensor:
        """Fisher information a'^2 / (a (1 - a)) of each split alone, (*, S) -> (*, S)."""
        scores = self._checked(scores)
        return self.activation.information(scores, self.constants(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """The score of every node from the probabilities of its two subtrees; 0 if both are 0.

        If one of the two is 0, the nearest representable score.
        """
        left, right = subtree_sums(self._to_leaves(self._checked_probs(probs)))
        reached = ~(left + right <= 0)  # NaN passes
        scores = self.activation.inverse(left, right) + self._centers(probs.device)
        return self._settled(torch.where(reached, scores, 0.0).to(probs.dtype), left, right)

    def fisher(self, scores: Tensor) -> Tensor:
        """The diagonal matrix of :meth:`fisher_diagonal`."""
        return torch.diag_embed(self.fisher_diagonal(scores))

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        scores = self._checked(scores)
        fused = tree_fisher(scores, self.activation, self.constants(scores))
        if fused is not None:
            return fused
        return self.node_probs(scores) * self.information(scores)

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        return torch.diag_embed(self.fisher_diagonal(scores).mean(-2))

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """grad / (G_ii + damping) in O(S)."""
        divisor = self.fisher_diagonal(scores) + damping
        return torch.where(divisor == 0, 0.0, grad / divisor)

    def _settled(self, scores: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Hook of :meth:`inverse`: correct scores that rounding moved off the boundary."""
        return scores

    def extra_repr(self) -> str:
        """What ``print(head)`` shows."""
        options = f"center={self.center}, uniform_at_zero={self.uniform_at_zero}"
        if self.order is not None:
            options += f", order={shown_order(self.order)}"
        return f"{super().extra_repr()}, {options}"

    def _leaf_of(self, value: Tensor) -> Tensor:
        """The leaf of every class in ``value``, int64; a value that is no class stays as it is."""
        return _looked_up(value, self._ordering(value)[0])

    def _to_leaves(self, x: Tensor) -> Tensor:
        """Values of the classes in the order of the leaves, (*, K) -> (*, K)."""
        classes = self._ordering(x)[1]
        return x if classes is None else x.index_select(-1, classes)

    def _from_leaves(self, x: Tensor) -> Tensor:
        """Values of the leaves in the order of the classes, (*, K) -> (*, K)."""
        leaves = self._ordering(x)[0]
        return x if leaves is None else x.index_select(-1, leaves)

    def _ordering(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Leaves of the classes and classes of the leaves, on the device of x."""
        if self.order is None:
            return None, None
        leaves, classes = self._kept(x, None, self._make_ordering)
        return leaves, classes

    def _make_ordering(self, device: torch.device, _: Any) -> Tensor:
        leaves = torch.tensor(self.order, device=device)
        return torch.stack((leaves, leaves.argsort()))

    def _centers(self, device: torch.device) -> Tensor:
        """The center C of every node, (S,) in float64."""
        if not self.uniform_at_zero:
            return torch.full((self.num_scores,), self.center, dtype=torch.float64, device=device)
        everything = torch.ones(self.num_categories, dtype=torch.bool, device=device)
        return self.center - self._at_share(_shares(everything))

    def _at_share(self, shares: Tensor) -> Tensor:
        """x at which a(x) is the share, in float64."""
        x = self.activation.inverse(1 - shares, shares)
        symmetric = not isinstance(self.activation, CustomActivation)  # a(0) = 1/2 exactly
        return torch.where(shares == 0.5, 0.0, x) if symmetric else x

    def constants(self, scores: Tensor) -> Tensor | None:
        """``activation.node_constants`` in the dtype and on the device of the scores, or None."""
        if self._is_centered:
            return None
        if isinstance(self.activation, CustomActivation) and self._has_tensors():  # they change
            return self._make_constants(scores.device, scores.dtype)
        return self._kept(scores, scores.dtype, self._make_constants)

    def _make_constants(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.activation.node_constants(self._centers(device), dtype)

    def _has_tensors(self) -> bool:
        """Whether a subclass has parameters or other tensors, which its constants depend on."""
        own = (*self.parameters(), *self.buffers(), *vars(self).values())
        return any(isinstance(each, Tensor) for each in own)

    def _kept(self, x: Tensor, dtype: Any, make: Callable[[torch.device, Any], Tensor]) -> Tensor:
        """What ``make`` makes of the options, kept for each device unless x is being traced."""
        key = (dtype, x.device)
        if key in self._made:
            return self._made[key]
        if not is_plain(x):
            return make(x.device, dtype)
        with torch.inference_mode(False), torch.no_grad():
            return self._made.setdefault(key, make(x.device, dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but not an option again: constants depend on the options.

        A custom ``log_activation`` may depend on any other attribute: its constants are forgotten.
        """
        known = vars(self)
        if name in _OPTIONS and name in known:
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot change; "
                f"make another head with {name}={value!r}"
            )
        super().__setattr__(name, value)
        if isinstance(known.get("activation"), CustomActivation):
            self._made.clear()


class SigmoidHead(CatnatHead, name="sigmoid", aliases=("catnat-sigmoid",)):
    r"""catnat with a(s) = 1 / (1 + exp(-(s - C))).

    >>> SigmoidHead(4).probs(torch.zeros(3))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        num_categories: int,
        center: float = 0.0,
        uniform_at_zero: bool = True,
        order: Sequence[int] | Tensor | None = None,
    ) -> None:
        super().__init__(
            num_categories, center, uniform_at_zero, order, activation=SigmoidActivation()
        )


class NaturalHead(CatnatHead, name="natural", aliases=("catnat-natural",)):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary). Beyond the edges
    |s - C| = A/2 a score has no gradient, and its rarer side has probability 0. With a ``tail`` the
    split is the same until the rarer side has that probability, and goes on as an exponential: no
    score is without gradient, no probability is 0, and the Fisher matrix stays diagonal.

    Args:
        num_categories: K, at least 2.
        amplitude: A, the width of the region in which the split moves; 2 pi gives the sigmoid's
            slope at 0.
        center: C.
        uniform_at_zero: as in :class:`CatnatHead`.
        tail: probability of the rarer side at which the tail begins, 0 (no tail, the paper's head)
            or 1e-30 <= tail < 1/2; see :class:`~catnat.activations.NaturalActivation`.
        order: as in :class:`CatnatHead`.

    >>> NaturalHead(4).fisher(torch.zeros(3))
    tensor([[0.2500, 0.0000, 0.0000],
            [0.0000, 0.1250, 0.0000],
            [0.0000, 0.0000, 0.1250]])
    """

    activation: NaturalActivation

    def __init__(
        self,
        num_categories: int,
        amplitude: float = 2 * math.pi,
        center: float = 0.0,
        uniform_at_zero: bool = True,
        tail: float = 0.0,
        order: Sequence[int] | Tensor | None = None,
    ) -> None:
        require_within(1e-15, 1e15, amplitude=amplitude)  # float32 has no room for others
        require_tail(tail)
        activation = NaturalActivation(float(amplitude), float(tail))
        super().__init__(num_categories, center, uniform_at_zero, order, activation=activation)
        self.amplitude, self.tail = activation.amplitude, activation.tail

    def extra_repr(self) -> str:
        """What ``print(head)`` shows."""
        tail = f", tail={self.tail}" if self.tail else ""
        return f"{super().extra_repr()}, amplitude={self.amplitude}{tail}"

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores on or beyond the edges; none with a tail."""
        scores = self._checked(scores)
        distance, _ = self.activation.distance(scores, self.constants(scores))
        return (distance <= 0) if self.tail == 0 else torch.zeros_like(distance, dtype=torch.bool)

    def _settled(self, scores: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Move the score of an impossible bit onto the edge if rounding left it just inside."""
        if self.tail:
            return scores
        outward = torch.where(left <= 0, torch.inf, -torch.inf).to(scores.dtype)
        stuck = ((left <= 0) ^ (right <= 0)) & ~self.saturated(scores)
        return torch.where(stuck, torch.nextafter(scores, outward), scores)


def _shares(allowed: Tensor) -> Tensor:
    """Share of the allowed leaves below each node that are below its bit-1 child, (*, K) bool.

    1/2 where the mask decides. Computed on the device of the mask: a captured step cannot copy
    from the host.
    """
    left, right = subtree_sums(allowed.double())  # numbers of allowed leaves
    both = (left > 0) & (right > 0)
    return torch.where(both, right, 1.0) / torch.where(both, left + right, 2.0)


def _looked_up(index: Tensor, table: Tensor | None) -> Tensor:
    """Entries of a table; an index outside it stays as it is."""
    if table is None:
        return index
    valid = (index >= 0) & (index < table.shape[0])
    return torch.where(valid, table[torch.where(valid, index, 0)], index)
