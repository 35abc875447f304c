"""TreeLinear: an output layer over K classes that costs log2 K rows of its weight for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat.checks import checked_order, require_at_least, require_choice, require_within
from catnat.distributions import path_entropy, path_kl
from catnat.head import CategoricalHead
from catnat.heads import make_head
from catnat.kernels.dispatch import HAS_TRITON
from catnat.kernels.reference import constants_at, path_logs
from catnat.losses import reduced
from catnat.numerics import at_least_float32, can_branch_on, uniform
from catnat.tree import walk_down
from catnat.tree_heads import CatnatHead

_CHUNK = 2**24  # numbers that a method without gradient holds at once


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
            ``nn.Embedding(sparse=True)`` does, for ``torch.optim.SparseAdam``. That saves memory,
            and time on a CPU. On CUDA dense gradients are faster: fused kernels compute them.
        device: of the parameters.
        dtype: of the parameters.
        options: of the head, such as ``tail`` for natural.

    ``weight`` (K-1, D) and ``bias`` (K-1) have a row for each node, breadth first, and are what
    ``nn.Linear(D, K - 1)`` before the head would have. A state dict holds them, and ``order`` if
    there is one.

    Under autocast the matmuls of a GPU are in half precision; the activations are in float32. The
    layer is an ``nn.Embedding`` of its nodes, because DistributedDataParallel expects sparse
    gradients of that class alone.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        require_at_least(1, in_features=in_features)
        made = make_head(head, num_categories, **options)
        if not isinstance(made, CatnatHead):
            got = f"{made.name!r} ({type(made).__name__})"
            raise ValueError(f"TreeLinear needs a tree head, such as sigmoid or natural, got {got}")
        if made.order is not None:
            raise ValueError("the head has an order of its own; give the order to TreeLinear")
        S = made.num_scores
        self._unplaced: Tensor | None = None  # the order of a layer on the device "meta"
        super().__init__(S, in_features, sparse=sparse, device=device, dtype=dtype)
        self.head = made.to(device)
        self.in_features, self.num_categories = in_features, made.num_categories
        self.bias = nn.Parameter(torch.empty(S, device=device, dtype=dtype)) if bias else None
        self.register_buffer("order", None)
        self.register_buffer("classes", None, persistent=False)
        self.set_order(order)
        self._draw(self.bias)

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does; after ``to_empty``, restore the order."""
        self._draw(self.weight)
        self._draw(getattr(self, "bias", None))  # nn.Embedding calls this before there is one
        if self._unplaced is not None and not self.weight.is_meta:
            self.set_order(self._unplaced)

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
        hidden, value = self._checked(hidden), self.head.checked_value(value)
        shape = torch.broadcast_shapes(hidden.shape[:-1], value.shape)
        hidden = hidden.expand(*shape, -1).reshape(-1, self.in_features)
        return self._log_prob(hidden, value.expand(shape).reshape(-1)).view(shape)

    def nll(
        self,
        hidden: Tensor,
        target: Tensor,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Negative log-likelihood of the targets, as ``F.cross_entropy`` reduces it.

        Args:
            hidden: (*, D).
            target: classes, (*).
            ignore_index: targets of this value do not count.
            reduction: "mean" (over the targets that count), "sum" or "none".
        """
        require_choice(("mean", "sum", "none"), reduction=reduction)
        hidden = self._checked(hidden)
        if target.shape != hidden.shape[:-1]:
            shapes = f"{tuple(target.shape)} for hidden states {tuple(hidden.shape)}"
            raise ValueError(f"expected one target for each hidden state, got shape {shapes}")
        counts = (target != ignore_index).flatten()
        rows, target = hidden.reshape(-1, self.in_features), target.flatten()
        some = can_branch_on(counts) and not bool(counts.all())
        if some:  # rows that do not count are not even read
            rows, target = rows[counts], target[counts]
        ignored = target == ignore_index
        label = self.head.checked_value(torch.where(ignored, 0, target), "target")
        loss = torch.where(ignored, 0.0, -self._log_prob(rows, label))
        if some:
            loss = loss.new_zeros(counts.shape).masked_scatter(counts, loss)
        loss = loss.view(hidden.shape[:-1]) if reduction == "none" else loss
        return reduced(loss, counts.to(loss.dtype), reduction)

    def sample(
        self,
        hidden: Tensor,
        sample_shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Random classes, (*, D) -> (*sample_shape, *), by a walk from the root to a leaf."""
        hidden = self._checked(hidden)
        states = hidden.detach().reshape(-1, self.in_features)
        rows = torch.arange(len(states), device=states.device).repeat(math.prod(sample_shape))

        def goes_right(nodes: Tensor, level: int) -> tuple[Tensor, Tensor]:
            right = self._log_right(states, rows, nodes).double()
            return uniform(right.shape, right, generator) < right.exp(), right.isnan()

        leaf = walk_down(self.num_categories, rows, goes_right)
        broken = leaf < 0
        if can_branch_on(broken) and bool(broken.any()):
            raise ValueError("scores must be numbers to draw samples, got NaN")
        leaf = torch.where(broken, 0, leaf)
        drawn = leaf if self.classes is None else self.classes[leaf]
        return torch.where(broken, -1, drawn).view(*sample_shape, *hidden.shape[:-1])

    def path_kl(
        self, hidden: Tensor, other: Tensor, value: Tensor, layer: TreeLinear | None = None
    ) -> Tensor:
        """Estimate of a KL divergence from classes drawn at ``hidden``, (*) each, at O(D log K).

        Unbiased and never negative, see :meth:`catnat.HeadCategorical.path_kl`.

        Args:
            hidden: the states of the distribution that the classes were drawn from, (*, D).
            other: the states of the other distribution, (*, D').
            value: the classes, (*).
            layer: of the other distribution, with the same order of classes; None: this one.
        """
        layer = layer or self
        if layer.num_categories != self.num_categories:
            both = f"{self.num_categories} and {layer.num_categories}"
            raise ValueError(f"KL divergence between {both} classes")
        ours, others = self.order, layer.order
        if ours is not others and (ours is None or others is None or not torch.equal(ours, others)):
            raise ValueError("path_kl needs two layers with the same order of classes")
        return path_kl(self._path_logs(hidden, value), layer._path_logs(other, value))

    def path_entropy(self, hidden: Tensor, value: Tensor) -> Tensor:
        """Estimate of the entropy from classes drawn at ``hidden``, (*, D), (*) -> (*)."""
        return path_entropy(self._path_logs(hidden, value))

    def _path_logs(self, hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to classes, and of the other sides, (*, H) each."""
        hidden, value = self._checked(hidden), self.head.checked_value(value)
        shape = torch.broadcast_shapes(hidden.shape[:-1], value.shape)
        leaf = (value if self.order is None else self.order[value]).expand(shape).reshape(-1)
        rows = hidden.expand(*shape, -1).reshape(-1, self.in_features)
        step, aside = self._steps(rows, self.weight, self.bias, leaf, self.sparse)
        return step.view(*shape, -1), aside.view(*shape, -1)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, D) -> (*, K)."""
        leaves = self.head.log_probs(self.scores(hidden))
        return leaves if self.order is None else leaves.index_select(-1, self.order)

    def topk(self, hidden: Tensor, k: int) -> torch.return_types.topk:
        """The k likeliest classes and their log-probabilities, (*, D) -> (*, k) each, sorted.

        The result has ``values`` and ``indices``, as that of ``torch.topk``, and NaN comes first.
        All classes are computed, a few rows at a time. Without gradient.
        """
        require_within(1, self.num_categories, k=k)
        hidden = self._checked(hidden)
        rows = hidden.reshape(-1, self.in_features)
        with torch.no_grad():
            size = max(64, _CHUNK // self.num_categories)
            found = [self.log_probs(each).topk(k, -1) for each in rows.split(size)]
        shape = (*hidden.shape[:-1], k)
        values, indices = (torch.cat(each).view(shape) for each in zip(*found, strict=True))
        return torch.return_types.topk((values, indices))

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of all nodes, (*, D) -> (*, K-1): what the head takes."""
        hidden = self._checked(hidden)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return F.linear(hidden, self.weight.to(hidden.dtype), bias)

    def set_order(self, order: Tensor | Sequence[int] | None) -> None:
        """Give each class its leaf, as ``order`` of the class says; weights stay with their nodes.

        For a layer that has learned nothing yet.
        """
        if order is None:
            self.order = self.classes = self._unplaced = None
            return
        K, device = self.num_categories, self.weight.device
        leaves = torch.tensor(checked_order(order, K), device="cpu")
        self.order, self.classes = leaves.to(device), leaves.argsort().to(device)
        self._unplaced = leaves if device.type == "meta" else None

    def extra_repr(self) -> str:
        """What ``print(layer)`` shows."""
        return f"in_features={self.in_features}, bias={self.bias is not None}, sparse={self.sparse}"

    # -- the arithmetic ----------------------------------------------------------------------------

    def _log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """(M, D), (M,) -> (M,); NaN for a target that is not a class."""
        possible = (target >= 0) & (target < self.num_categories)
        leaf = torch.where(possible, target, 0)
        leaf = torch.where(possible, leaf if self.order is None else self.order[leaf], -1)
        given, fused = (hidden, self.weight, self.bias, leaf), self._fused(hidden)
        if fused is None:
            return self._by_paths(*given, self.sparse)
        constants = self.head.constants(hidden.new_empty(0, dtype=torch.float32))
        out: Tensor = fused.log_prob(*given, self.head.activation, constants, self._by_paths)
        return out

    def _fused(self, hidden: Tensor) -> ModuleType | None:
        """The module of the fused kernels, where they compute this layer's log-probabilities."""
        if self.sparse or not (hidden.is_cuda and HAS_TRITON):
            return None
        from catnat.kernels import triton_layer

        taken = triton_layer.takes(hidden, self.weight, self.bias, self.head.activation)
        return triton_layer if taken else None

    def _by_paths(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        leaf: Tensor,
        sparse: bool = False,
    ) -> Tensor:
        """Log-probabilities of leaves in plain torch, (M, D), (M,) -> (M,); NaN for leaf -1."""
        logs = self._steps(hidden, weight, bias, leaf, sparse)[0]
        return torch.where(leaf >= 0, logs.sum(-1), torch.nan)

    def _steps(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, sparse: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to leaves, and of the other sides, (M, H) each."""

        def scores_at(nodes: Tensor) -> Tensor:  # (M, H)
            with torch.autocast(hidden.device.type, enabled=False):
                rows = F.embedding(nodes, weight, sparse=sparse).to(hidden.dtype)  # (M, H, D)
                scores = at_least_float32(torch.bmm(rows, hidden[:, :, None])[:, :, 0])
                if bias is None:
                    return scores
                biases = torch.gather(bias, 0, nodes.flatten(), sparse_grad=sparse)
                return scores + biases.view_as(nodes).to(scores.dtype)

        head, K = self.head, self.num_categories
        constants = head.constants(at_least_float32(hidden[:0]))
        with torch.autocast(hidden.device.type, enabled=False):
            return path_logs(scores_at, leaf, K, head.activation, constants)

    @torch.no_grad()
    def _log_right(self, hidden: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """log a of some nodes in some rows, (P,) each -> (P,)."""
        size = max(1, _CHUNK // self.in_features)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        parts = [
            (hidden[row] * self.weight[node].to(hidden.dtype)).sum(-1, dtype=wide)
            for row, node in zip(rows.split(size), nodes.split(size), strict=True)
        ]
        scores = torch.cat(parts)
        if self.bias is not None:
            scores = scores + self.bias[nodes].to(wide)
        return self._log_activation(scores, nodes)[1]

    def _log_activation(self, scores: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - a) and log a of some nodes, from their scores in float32 or float64."""
        with torch.autocast(scores.device.type, enabled=False):
            constants = constants_at(self.head.constants(scores), nodes)
            return self.head.activation.log_activation(scores, constants)

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the order of the state dict; ``load_state_dict`` tells if it lacks one."""
        if (order := state_dict.get(f"{prefix}order")) is not None:
            self.set_order(order)
        super()._load_from_state_dict(state_dict, prefix, *rest)
