"""TreeLinear: an output layer over K classes that costs log2 K rows of its weight for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from catnat.categorical_head import CategoricalHead
from catnat.checks import require_at_least, require_choice, require_within
from catnat.heads import make_head
from catnat.numerics import at_least_float32, can_branch_on, is_plain
from catnat.ops.path_scores import fused_loss_for, path_scores
from catnat.optim import bring_up_to_date, owes_steps
from catnat.tree import subtree_sums
from catnat.tree_heads import CatnatHead
from catnat.tree_refit import refit
from catnat.tree_search import NodeLogs, TopK, best_leaves, leaf_paths, random_leaves

_CHUNK = 2**24  # scores of all nodes that are held at once


class TreeLinear(nn.Embedding):
    r"""A linear layer and a tree head in one: from hidden states (*, D) to K classes.

    ``head(linear(hidden))`` computes K - 1 scores. A class needs those on its path alone: the
    log-probability of a target, a sample and their gradients take log2 K rows of the weight here.

    Args:
        in_features: D.
        num_categories: K, at least 2.
        head: the name of a tree head (sigmoid, natural, one of your own), or such a head.
        order: the leaf of each class, a permutation of 0..K-1; None for class k on leaf k. Which
            classes share a subtree decides how well the layer learns, see :mod:`catnat.orders`.
        bias: whether nodes have a bias.
        sparse: give the weight and the bias sparse gradients with the rows in use, as
            ``nn.Embedding(sparse=True)`` does. :class:`catnat.optim.RowAdam` and
            ``torch.optim.SparseAdam`` take them.
        upper_levels: how many levels below the root are computed as one matmul.
        device: of the parameters.
        dtype: of the parameters.
        options: of the head, such as ``amplitude`` for natural.

    ``weight`` (K-1, D) and ``bias`` (K-1) have a row for each node, breadth first, and are what
    ``nn.Linear(D, K - 1)`` before the head would have. A state dict holds them, and ``order`` if
    there is one.

    Under autocast the matmuls of a GPU are in half precision; the splits are in float32. The layer
    is an ``nn.Embedding`` of its nodes, because DistributedDataParallel expects sparse gradients
    of that class alone.

    >>> layer = TreeLinear(4, 1000, head="natural")
    >>> layer(torch.zeros(3, 4), target=torch.tensor([7, 0, 999])).shape
    torch.Size([])
    >>> layer.sample(torch.zeros(3, 4)).shape
    torch.Size([3])
    """

    bias: nn.Parameter | None
    order: Tensor | None
    classes: Tensor | None  # the class on each leaf

    def __init__(
        self,
        in_features: int,
        num_categories: int,
        head: str | CategoricalHead = "sigmoid",
        order: Tensor | Sequence[int] | None = None,
        bias: bool = True,
        *,
        sparse: bool = False,
        upper_levels: int = 8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        require_at_least(1, in_features=in_features)
        require_within(0, 20, upper_levels=upper_levels)
        made = make_head(head, num_categories, **options)
        if not isinstance(made, CatnatHead):
            got = f"{made.name!r} ({type(made).__name__})"
            raise ValueError(f"TreeLinear needs a tree head, such as sigmoid or natural, got {got}")
        if getattr(made, "order", None) is not None:
            raise ValueError("the head has an order of its own; give the order to TreeLinear")
        S = made.num_scores
        super().__init__(S, in_features, sparse=sparse, device=device, dtype=dtype)
        self.head = made.to(device)
        self.in_features, self.num_categories = in_features, made.num_categories
        self.upper_levels = upper_levels
        self.bias = nn.Parameter(torch.empty(S, device=device, dtype=dtype)) if bias else None
        self.register_buffer("order", None)
        self.register_buffer("classes", None, persistent=False)
        self.set_order(order)
        self._draw(self.bias)

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does."""
        self._draw(self.weight)
        self._draw(getattr(self, "bias", None))  # nn.Embedding calls this before there is one

    def _draw(self, parameter: Tensor | None) -> None:
        bound = 1 / math.sqrt(self.embedding_dim)
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """:meth:`nll` of the targets, or without targets :meth:`log_probs`."""
        return self.log_probs(hidden) if target is None else self.nll(hidden, target)

    def log_prob(self, hidden: Tensor, value: Tensor) -> Tensor:
        """Log-probabilities of classes, (*, D), (*) -> (*) in O(D log K) each.

        ``value`` is broadcast against the leading dimensions of ``hidden``.
        """
        hidden, value = self._checked(hidden), self._checked_classes(value)
        shape = torch.broadcast_shapes(hidden.shape[:-1], value.shape)
        hidden = hidden.expand(*shape, -1).reshape(-1, self.in_features)
        return self._log_prob(hidden, value.expand(shape).reshape(-1)).view(shape)

    def nll(
        self,
        hidden: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Negative log-likelihood of the targets, with the semantics of ``F.cross_entropy``.

        Args:
            hidden: (*, D).
            target: classes, (*).
            weight: a weight for each class, (K,).
            ignore_index: targets of this value do not count.
            label_smoothing: share of the uniform distribution in the targets. More than 0 needs
                the scores of all nodes, as a full softmax would.
            reduction: "mean" (over the weights of the targets), "sum" or "none".
        """
        require_choice(("mean", "sum", "none"), reduction=reduction)
        require_within(0, 1, label_smoothing=label_smoothing)
        hidden = self._checked(hidden)
        if target.shape != hidden.shape[:-1]:
            shapes = f"{tuple(target.shape)} for hidden states {tuple(hidden.shape)}"
            raise ValueError(f"expected one target for each hidden state, got shape {shapes}")
        shape, rows, target = target.shape, hidden.reshape(-1, self.in_features), target.reshape(-1)
        if weight is None and not label_smoothing and (fused := self._fused(rows)) is not None:
            self._require_integers(target)
            given = (rows, self.weight, self.bias, target, self._for_kernels(fused, rows))
            loss: Tensor = fused.nll(*given, ignore_index, reduction)
            return loss.view(shape) if reduction == "none" else loss
        counts = target != ignore_index
        looks = self.sparse or can_branch_on(counts)  # elsewhere, looking would wait for a device
        some = looks and not bool(counts.all())
        if some:
            rows, target = rows[counts], target[counts]
        loss, share = self._losses(rows, target, weight, ignore_index, label_smoothing)
        if some:
            loss = loss.new_zeros(counts.shape).masked_scatter(counts, loss)
        if reduction == "none":
            return loss.view(shape)
        return loss.sum() if reduction == "sum" else loss.sum() / share.sum()

    def _losses(
        self, hidden: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Losses and weights of the targets, (M, D), (M,) -> (M,) each; 0 where ignored."""
        counts = target != ignored
        target = self._checked_classes(torch.where(counts, target, 0))
        loss = -self._log_prob(hidden, target)
        share = counts.to(loss.dtype)
        if weight is not None:
            weight = weight.to(loss.dtype)
            share = share * weight[target.clamp(0, self.num_categories - 1)]
        loss = torch.where(counts, loss * share, 0.0)
        if smoothing:
            others = self._sum_of_nll(hidden, weight) / self.num_categories
            loss = (1 - smoothing) * loss + smoothing * torch.where(counts, others, 0.0)
        return loss, share

    def sample(
        self,
        hidden: Tensor,
        sample_shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Random classes, (*, D) -> (*sample_shape, *), by a walk from the root to a leaf."""
        hidden = self._checked(hidden)
        shape = (*sample_shape, *hidden.shape[:-1])
        with torch.no_grad():
            rows = hidden.reshape(-1, self.in_features)
            leaves = random_leaves(self._logs(rows), math.prod(sample_shape), generator)
        return self._classes_of(leaves).view(shape)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, D) -> (*, K), some rows at a time."""
        hidden = self._checked(hidden)
        rows = hidden.reshape(-1, self.in_features)
        parts = rows.split(self._rows()) if is_plain(rows) else (rows,)  # traced: any batch size
        pieces = [self.head.log_probs(self.scores(each)) for each in parts]
        leaves = torch.cat(pieces).view(*hidden.shape[:-1], -1)
        return leaves if self.order is None else leaves.index_select(-1, self.order)

    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k likeliest classes and their log-probabilities, (*, D) -> (*, k) each, sorted.

        Exact: a subtree is left out only if all its probability is below the k-th best class
        found so far. Where too little is left out, all classes are computed. Without gradient.
        """
        require_within(1, self.num_categories, k=k)
        hidden = self._checked(hidden)
        rows = hidden.reshape(-1, self.in_features)
        with torch.no_grad():
            found = [self._topk(each, k) for each in rows.split(self._rows(least=64))]
        shape = (*hidden.shape[:-1], k)
        return TopK(*(torch.cat(each).view(shape) for each in zip(*found, strict=True)))

    def _topk(self, hidden: Tensor, k: int) -> TopK:
        found = best_leaves(self._logs(hidden), k)
        if found is None:
            best = [self.log_probs(each).topk(k, -1) for each in hidden.split(self._rows())]
            return TopK(*(torch.cat(each) for each in zip(*best, strict=True)))
        return TopK(found.values, self._classes_of(found.indices))

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of all nodes, (*, D) -> (*, K-1): what the head takes."""
        hidden = self._checked(hidden)
        self._read(None)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return F.linear(hidden, self.weight.to(hidden.dtype), bias)

    def set_order(self, order: Tensor | Sequence[int] | None) -> None:
        """Give each class its leaf, as ``order`` of the class says; weights stay with their nodes.

        For a layer that has learned nothing yet; see :meth:`reorder`.
        """
        self.order, self.classes = (None, None) if order is None else self._permutation(order)

    def reorder(self, order: Tensor | Sequence[int], hidden: Tensor, ridge: float = 1e-3) -> None:
        """Move to another order of the classes, and keep what was learned as far as possible.

        The nodes of the new tree get weights that fit the old layer's probabilities at a sample of
        hidden states, (*, D); the other arguments as in :func:`catnat.tree_refit.refit`. What an
        optimizer remembers of the old nodes is then stale: make a new optimizer.
        """
        rows = self._checked(hidden).detach().reshape(-1, self.in_features)
        require_at_least(1, hidden_states=len(rows))
        refit(self, self._permutation(order)[0], rows, ridge)

    def extra_repr(self) -> str:
        """What ``print(layer)`` shows."""
        return f"in_features={self.in_features}, bias={self.bias is not None}, sparse={self.sparse}"

    # -- the arithmetic -----------------------------------------------------------------------

    def _log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """(M, D), (M,) -> (M,)."""
        fused = self._fused(hidden)
        if fused is None:
            return self._by_paths(hidden, self.weight, self.bias, target, self.sparse, self.order)
        layer = self._for_kernels(fused, hidden)
        out: Tensor = fused.log_probs(hidden, self.weight, self.bias, target, layer)
        return out

    def _by_paths(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        sparse: bool,
        order: Tensor | None,
    ) -> Tensor:
        """:meth:`_log_prob` for any head, with these parameters and this order."""
        possible = (target >= 0) & (target < self.num_categories)
        leaf = torch.where(possible, target, 0)
        leaf = leaf if order is None else order[leaf]
        nodes, bits, inside = leaf_paths(leaf, self.num_categories)
        upper = min(self.upper_levels, nodes.shape[1])
        self._read(nodes)
        scores = path_scores(hidden, weight, bias, nodes, upper, sparse)
        left, right = self._log_split(scores, nodes)
        logs = torch.where(inside, torch.where(bits, right, left), 0.0)
        return torch.where(possible, logs.sum(-1), torch.nan)

    def _fused(self, hidden: Tensor) -> Any:
        """The module of the fused kernels, where they compute this layer's log-probabilities."""
        if self.sparse and (owes_steps(self.weight) or owes_steps(self.bias)):
            return None
        given = (hidden, self.weight, self.bias, self.upper_levels)
        return fused_loss_for(*given, self.head.split)

    def _for_kernels(self, fused: Any, hidden: Tensor) -> Any:
        """What the fused kernels know of this layer."""
        head = self.head
        constants = head.constants32
        if constants is not None and constants.device != hidden.device:
            constants = head._constants(at_least_float32(hidden[:0]))
        return fused.Layer(
            num_categories=self.num_categories,
            upper=self.upper_levels,
            split=head.split,
            constants=constants,
            order=self.order,
            sparse=self.sparse,
            plainly=partial(self._by_paths, sparse=False, order=self.order),
        )

    def _log_split(self, scores: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - a) and log a of some nodes, from their scores in float32 or float64."""
        with torch.autocast(scores.device.type, enabled=False):
            constants = self.head._constants(scores)
            known = None if constants is None else constants[:, nodes]
            return self.head.split.log_split(scores, known)

    def _sum_of_nll(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """-sum_k w_k log p_k, (M, D) -> (M,): a sum over nodes, some rows at a time."""
        of_leaf = torch.ones(self.num_categories, dtype=torch.float64, device=hidden.device)
        if weight is not None:
            of_leaf = weight.double() if self.classes is None else weight.double()[self.classes]
        below = subtree_sums(of_leaf)

        def total(rows: Tensor) -> Tensor:
            scores = at_least_float32(self.scores(rows))
            with torch.autocast(scores.device.type, enabled=False):
                logs = self.head.split.log_split(scores, self.head._constants(scores))
                left, right = (a @ b.to(a.dtype) for a, b in zip(logs, below, strict=True))
            return -(left + right)

        pieces = hidden.split(self._rows())
        return torch.cat([checkpoint(total, each, use_reentrant=False) for each in pieces])

    def _read(self, nodes: Tensor | None) -> None:
        """Before rows are read, an optimizer takes the steps that it owes them."""
        if self.sparse:
            bring_up_to_date(self.weight, nodes)
            bring_up_to_date(self.bias, nodes)

    def _logs(self, hidden: Tensor) -> NodeLogs:
        self._read(None)
        return NodeLogs(hidden, self.weight, self.bias, self._log_split, self.upper_levels)

    def _rows(self, least: int = 1) -> int:
        """How many rows have all their scores computed at once."""
        return max(least, _CHUNK // self.num_categories)

    # -- what comes in and goes out ----------------------------------------------------------------

    def _checked(self, hidden: Tensor) -> Tensor:
        """Hidden states in the dtype of the matmuls."""
        if not hidden.dim() or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"TreeLinear takes hidden states with {self.in_features} features in the last "
                f"dimension, got shape {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden states must be floating point, got {hidden.dtype}")
        device = hidden.device.type
        if device != "cpu" and torch.is_autocast_enabled(device):
            return hidden.to(torch.get_autocast_dtype(device))
        return hidden.to(self.weight.dtype)

    def _checked_classes(self, value: Tensor) -> Tensor:
        """Classes as int64. On the CPU an impossible one raises; elsewhere its result is NaN."""
        self._require_integers(value)
        K = self.num_categories
        if can_branch_on(value) and value.numel():
            for extreme in (int(value.min()), int(value.max())):
                if not 0 <= extreme < K:
                    raise ValueError(f"classes must lie in 0..{K - 1}, got {extreme}")
        return value.long()

    @staticmethod
    def _require_integers(value: Tensor) -> None:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"classes must be integers, got {value.dtype}")

    def _classes_of(self, leaves: Tensor) -> Tensor:
        return leaves if self.classes is None else torch.where(leaves < 0, -1, self.classes[leaves])

    def _permutation(self, order: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """The order and its inverse; raises for what is no permutation."""
        K, device = self.num_categories, self.weight.device
        order = torch.as_tensor(order).to(device)
        if order.shape != (K,) or order.is_floating_point() or order.dtype == torch.bool:
            shape = f"shape {tuple(order.shape)} and {order.dtype}"
            raise ValueError(f"order must hold {K} integers, the leaf of each class, got {shape}")
        order = order.long()
        classes = torch.full_like(order, -1)
        if device.type == "meta":
            return order, classes
        for extreme in (int(order.min()), int(order.max())):
            if not 0 <= extreme < K:
                raise ValueError(f"order must hold leaves 0..{K - 1}, got {extreme}")
        classes[order] = torch.arange(K, device=device)
        if bool((classes < 0).any()):
            missing = int((classes < 0).nonzero()[0])
            raise ValueError(f"order is no permutation: no class has leaf {missing}")
        return order, classes

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the order of the state dict; ``load_state_dict`` tells if it lacks one."""
        if (order := state_dict.get(f"{prefix}order")) is not None:
            self.set_order(order)
        super()._load_from_state_dict(state_dict, prefix, *rest)
