"""The catnat heads: a tree of binary splits, whose Fisher matrix is diagonal."""

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from catnat.checks import checked_order, require, require_choice, require_tail, require_within
from catnat.distributions import SEARCH_FROM
from catnat.heads.activations import (
    Activation,
    CustomActivation,
    NaturalActivation,
    SigmoidActivation,
)
from catnat.heads.base import CategoricalHead
from catnat.heads.centers import Centers, DeviceCache
from catnat.heads.nodes import Sides, path_sums, subtree_sums
from catnat.heads.search import FEW, SearchTree, best_leaves, draw_leaves
from catnat.kernels.dispatch import tree_fisher, tree_log_prob, tree_log_probs, tree_sample
from catnat.kernels.reference import tree_path_logs
from catnat.numerics import (
    can_branch_on,
    exp_of_log_probs,
    floored_sums,
    is_plain,
    uniform,
)

_WALK_FROM = 2**18  # number of scores; below it, noise for every category is faster
_OPTIONS = ("activation", "center", "uniform_at_zero", "order", "amplitude", "tail")


class CatnatHead(CategoricalHead):
    r"""A head with a diagonal Fisher matrix: a tree of binary splits, with S = K - 1 scores.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). If K is not a power of two,
    the tree is a complete one, see :mod:`catnat.heads.nodes`. :meth:`log_prob` and :meth:`sample`
    compute only the O(log K) nodes of a path, and so does the distribution that the head returns,
    until all log-probabilities are used.

    A subclass overrides :meth:`log_activation`, which defines how a score splits its node.
    ``log_activation`` may use parameters of the subclass and other values that change, because the
    centers are computed at every call. The built-in heads have an
    :class:`~catnat.heads.activations.Activation` with more closed forms and fused kernels instead.

    Args:
        num_categories: number of categories (K), at least 2.
        center: the paper's C, added to every node's center. It cannot change later.
        uniform_at_zero: whether to give each node a center such that zero scores give the uniform
            distribution for every K. Without these centers, this holds only if K is a power of two.
            It cannot change later.
        order: leaf of every class, a permutation of 0..K-1; None: class k is leaf k. Classes on
            neighboring leaves share most of their path. It cannot change later.
    """

    activation: Activation
    order: tuple[int, ...] | None

    def __init__(
        self,
        num_categories: int,
        center: float = 0.0,
        uniform_at_zero: bool = True,
        order: Sequence[int] | Tensor | None = None,
    ) -> None:
        super().__init__(num_categories)
        K = self.num_categories
        self.num_scores = K - 1
        require("be finite", math.isfinite, center=center)
        flag = str(uniform_at_zero)  # accepts NumPy's booleans, too
        require_choice(("True", "False"), uniform_at_zero=flag)
        activation = self._make_activation()
        is_own = type(self).log_activation is not CatnatHead.log_activation
        if activation.is_fused and is_own:
            raise TypeError(
                f"{type(self).__name__} overrides log_activation: subclass CatnatHead for it"
            )
        self.activation = activation
        self.center = float(center)
        self.uniform_at_zero = flag == "True"
        self._cache = DeviceCache()
        self._centers = Centers(K, activation, self.center, self.uniform_at_zero, self._cache)
        self.order = None if order is None else checked_order(order, K)
        self.tree_id = (K, self.order)
        self._has_paths = type(self).log_probs is CatnatHead.log_probs
        # A custom log_activation may change before the distribution uses it.
        self._is_lazy = self._has_paths and activation.is_fused
        self._fill_cache()

    def _fill_cache(self) -> None:
        """Compute tensors for the default device before the head is traced."""
        self._ordering(torch.empty(0))
        for dtype in (torch.float32, torch.float64) if self.activation.is_fused else ():
            self.constants(torch.empty(0, dtype=dtype))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill the cache again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fill_cache()

    def _make_activation(self) -> Activation:
        return CustomActivation(self.log_activation)

    def log_activation(self, x: Tensor) -> Sides:
        """log(1 - a(x)) and log a(x) for x = s - C, where a is differentiable and increasing."""
        raise NotImplementedError(f"{type(self).__name__} must override log_activation")

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        scores = self._checked(scores)
        log_probs = tree_log_probs(scores, self.activation, self.constants(scores))
        return arranged(log_probs, self._ordering(scores)[0])

    def _masked(self, scores: Tensor, mask: Tensor, before: Tensor | None) -> Tensor:
        """Make a split with one empty side certain; a node without leaves is never reached.

        The Fisher matrix therefore stays diagonal: a certain split has no information, and a node
        that is never reached has P(node) = 0. With ``uniform_at_zero`` the other nodes get the
        centers at which zero scores give the uniform distribution over the allowed categories. The
        centers of the whole tree would favor categories whose neighbors are forbidden.
        """
        leaves = self._subtree_sums(mask.to(scores.dtype))
        if self.uniform_at_zero:
            if before is None:
                old_leaves = self._centers.leaves(scores)
            else:  # an earlier mask has moved the scores already
                old_leaves = self._subtree_sums(before.to(scores.dtype))
            scores = scores + self._centers.shift(leaves, old_leaves).to(scores.dtype)
        has_left, has_right = (number > 0 for number in leaves)
        one_sided = torch.where(has_left, -torch.inf, torch.where(has_right, torch.inf, 0.0))
        return torch.where(has_left & has_right, scores, one_sided.to(scores.dtype))

    def allowed(self, scores: Tensor) -> Tensor:
        """Recover the mask from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        scores = self._checked(scores)
        blocked = path_sums(scores == torch.inf, scores == -torch.inf)[1]
        return arranged(~blocked, self._ordering(scores)[0])

    def path_log_prob(self, scores: Tensor, value: Tensor) -> Tensor:
        """:meth:`log_prob` of checked scores and values."""
        if not self._has_paths:
            return super().path_log_prob(scores, value)
        return tree_log_prob(scores, self._leaf_of(value), self.activation, self.constants(scores))

    def path_logs(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the taken and the other branches on the paths, (*, H) each."""
        leaf = self._leaf_of(value)
        taken, other = tree_path_logs(scores, leaf, self.activation, self.constants(scores))
        return floored_sums(taken), floored_sums(other)

    def path_sample(
        self, scores: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
    ) -> Tensor:
        """:meth:`sample` of checked scores."""
        if not self._has_paths:
            return super().path_sample(scores, sample_shape, generator)
        height = self.num_scores.bit_length()
        uniforms = uniform((*sample_shape, *scores.shape[:-1], height), scores, generator)
        leaf = tree_sample(scores, uniforms, self.activation, self.constants(scores))
        if can_branch_on(leaf) and bool((leaf < 0).any()):
            raise ValueError("there is no category to sample where a score is nan")
        return looked_up(leaf, self._ordering(leaf)[1])

    def path_topk(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """:meth:`topk` of checked scores, by search if that is faster than all categories."""
        few = FEW * k <= self.num_categories and self.num_categories > SEARCH_FROM
        if not (self._has_paths and few and is_plain(scores)):
            return super().path_topk(scores, k)
        with torch.no_grad():
            tree, rows = self._search_tree(scores.detach())
            leaves = best_leaves(tree, rows, k)[1].view(*scores.shape[:-1], k)
            classes = looked_up(leaves, self._ordering(leaves)[1])
        values = self.path_log_prob(scores, classes.movedim(-1, 0)).movedim(0, -1)
        ranked = values.sort(dim=-1, descending=True, stable=True)  # rounding differs
        return ranked.values, classes.gather(-1, ranked.indices)

    def path_sample_without_replacement(
        self, scores: Tensor, k: int, generator: torch.Generator | None
    ) -> Tensor:
        """The categories of :meth:`sample_without_replacement`, from checked scores."""
        if not self._has_paths or scores.numel() < _WALK_FROM:
            return super().path_sample_without_replacement(scores, k, generator)
        with torch.no_grad():
            tree, rows = self._search_tree(scores)
            leaves, perturbed = draw_leaves(tree, rows, k, generator)
        if can_branch_on(perturbed) and bool(perturbed.isnan().any()):
            raise ValueError("there is no category to sample where a score is nan")
        leaves = torch.where(perturbed.isnan(), -1, leaves)
        classes = looked_up(leaves, self._ordering(leaves)[1])
        return classes.T.reshape(k, *scores.shape[:-1])

    def _search_tree(self, scores: Tensor) -> tuple[SearchTree, Tensor]:
        """Search tree of these scores, (*, S), and the indices of all rows."""
        flat = scores.reshape(-1, self.num_scores)
        tree = SearchTree(flat, self.num_categories, self.activation, self.constants(scores))
        return tree, torch.arange(len(flat), device=scores.device)

    def node_probs(self, scores: Tensor) -> Tensor:
        """Probability P(node) of passing through each internal node, (*, K-1) -> (*, K-1)."""
        scores = self._checked(scores)
        logs = self.activation.log_activation(scores, self.constants(scores))
        return exp_of_log_probs(path_sums(*logs)[0])

    def information(self, scores: Tensor) -> Tensor:
        """Fisher information a'^2 / (a (1 - a)) of each split, (*, S) -> (*, S)."""
        scores = self._checked(scores)
        return self.activation.information(scores, self.constants(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """Score of every node from the probabilities of its two subtrees; 0 if both are 0.

        If one of them is 0, the result is the nearest representable score.
        """
        left, right = self._subtree_sums(self._checked_probs(probs))
        reached = ~(left + right <= 0)  # keeps NaN
        scores = self.activation.inverse(left, right) + self._centers.of_nodes(probs)
        scores = torch.where(reached, scores, 0.0).to(probs.dtype)
        # The next number, because rounding may leave the score of a certain split inside an edge.
        outward = torch.where(left <= 0, torch.inf, -torch.inf).to(scores.dtype)
        is_certain = (left <= 0) ^ (right <= 0)
        return torch.where(is_certain, torch.nextafter(scores, outward), scores)

    @property
    def fisher_is_diagonal(self) -> bool:
        """Whether each split depends on the score of its node alone, as the theorem requires.

        A ``log_activation`` of a subclass is tried out once.
        """
        return self.activation.is_fused or self._cache.get(
            torch.empty(0), "is split by split", self._is_split_by_split
        )

    @torch.no_grad()
    def _is_split_by_split(self, _: torch.device) -> bool:
        """Whether log_activation at a node does not change with the scores of the other nodes."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.num_scores, dtype=torch.float64, generator=generator).to(device)
        before = torch.stack(self.log_activation(x))
        is_normalized = torch.allclose(before.exp().sum(0), torch.ones_like(x), atol=1e-5)
        moves = torch.arange(self.num_scores, device=device) % 2 == 0
        for moved in (moves, ~moves):
            after = torch.stack(self.log_activation(torch.where(moved, x + 0.5, x)))
            if not torch.allclose(before[:, ~moved], after[:, ~moved], rtol=1e-9, atol=1e-12):
                return False
        return is_normalized

    def fisher(self, scores: Tensor) -> Tensor:
        """Diagonal matrix of :meth:`fisher_diagonal`."""
        if not self.fisher_is_diagonal:
            return self._differentiated_fisher(scores)
        return torch.diag_embed(self.fisher_diagonal(scores))

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        if not self.fisher_is_diagonal:
            return super().fisher_diagonal(scores)
        scores = self._checked(scores)
        fused = tree_fisher(scores, self.activation, self.constants(scores))
        if fused is not None:
            return fused
        return self.node_probs(scores) * self.information(scores)

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        if not self.fisher_is_diagonal:
            return super()._mean_fisher(scores)
        return torch.diag_embed(self.fisher_diagonal(scores).mean(-2))

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """grad / (G_ii + damping) in O(S)."""
        if not self.fisher_is_diagonal:
            return super()._natural_gradient(scores, grad, damping)
        divisor = self.fisher_diagonal(scores) + damping
        return torch.where(divisor == 0, 0.0, grad / divisor)

    def extra_repr(self) -> str:
        """Sizes and options shown by ``print(head)``."""
        options = f"center={self.center}, uniform_at_zero={self.uniform_at_zero}"
        if self.order is not None:
            options += f", order={reprlib.repr(self.order)}"
        return f"{super().extra_repr()}, {options}"

    def _leaf_of(self, value: Tensor) -> Tensor:
        """Leaf of every class, int64; a value that is not a class is returned unchanged."""
        return looked_up(value, self._ordering(value)[0])

    def _subtree_sums(self, x: Tensor) -> Sides:
        """Sums of the values of classes below the two children of each node, (*, K) -> (*, S)."""
        return subtree_sums(arranged(x, self._ordering(x)[1]))

    def _ordering(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Leaf of each class and class of each leaf, on the device of x."""
        if self.order is None:
            return None, None

        def make(device: torch.device) -> Sides:
            leaves = torch.tensor(self.order, device=device)
            return leaves, leaves.argsort()

        ordering: tuple[Tensor, Tensor] = self._cache.get(x, "order", make)
        return ordering

    def constants(self, scores: Tensor) -> Tensor | None:
        """``activation.node_constants`` in the dtype and on the device of the scores.

        None where the center of every node is 0.
        """
        return self._centers.constants(scores)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; options cannot change, because cached constants depend on them."""
        if name in _OPTIONS and name in vars(self):
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot change; "
                f"make another head with {name}={value!r}"
            )
        super().__setattr__(name, value)


class SigmoidHead(CatnatHead, name="sigmoid", aliases=("catnat-sigmoid",)):
    r"""catnat with a(s) = 1 / (1 + exp(-(s - C))).

    >>> SigmoidHead(4).probs(torch.zeros(3))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def _make_activation(self) -> Activation:
        return SigmoidActivation()


class NaturalHead(CatnatHead, name="natural", aliases=("catnat-natural",)):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary). Beyond the edges
    |s - C| = A/2, a score has no gradient, and its rarer side has probability 0. With a ``tail``,
    the probability of the rarer side decays exponentially once it is below ``tail``. Every score
    then has a gradient, no probability is 0, and the Fisher matrix stays diagonal.

    Args:
        num_categories: K, at least 2.
        amplitude: width of the region in which the split moves (A); 2 pi gives the slope of the
            sigmoid at 0.
        center: the paper's C.
        uniform_at_zero: as in :class:`CatnatHead`.
        tail: probability of the rarer side at which the tail begins, 0 (no tail, the paper's head)
            or 1e-30 <= tail < 1/2; see :class:`~catnat.heads.activations.NaturalActivation`.
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
        require_within(1e-15, 1e15, amplitude=amplitude)  # range of float32
        require_tail(tail)
        self.amplitude = float(amplitude)
        self.tail = float(tail)
        super().__init__(num_categories, center, uniform_at_zero, order)

    def _make_activation(self) -> Activation:
        return NaturalActivation(self.amplitude, self.tail)

    def extra_repr(self) -> str:
        """Sizes and options shown by ``print(head)``."""
        tail = f", tail={self.tail}" if self.tail else ""
        return f"{super().extra_repr()}, amplitude={self.amplitude}{tail}"

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores on or beyond the edges; none with a tail."""
        scores = self._checked(scores)
        distance, _ = self.activation.distance(scores, self.constants(scores))
        return (distance <= 0) & (self.tail == 0)


def arranged(x: Tensor, order: Tensor | None) -> Tensor:
    """Reorder the entries of x, (*, K) -> (*, K)."""
    return x if order is None else x.index_select(-1, order)


def looked_up(index: Tensor, table: Tensor | None) -> Tensor:
    """Entries of a table; an index outside it is returned unchanged."""
    if table is None:
        return index
    valid = (index >= 0) & (index < table.shape[0])
    return torch.where(valid, table[torch.where(valid, index, 0)], index)
