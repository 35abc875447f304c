"""The arithmetic of an output layer: scores on paths, and what comes in and goes out."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from catnat.distributions import checked_value
from catnat.heads.base import require_tensor
from catnat.heads.tree import CatnatHead
from catnat.kernels.dispatch import HAS_TRITON
from catnat.kernels.reference import path_logs
from catnat.numerics import (
    LOG_ZERO,
    at_least_float32,
    can_branch_on,
    floored_sums,
    without_autocast,
)
from catnat.output_layer.places import PlacedClasses
from catnat.output_layer.shortlist import capped, shortlist_logits, shortlist_nll

if TYPE_CHECKING:
    from catnat.kernels.triton_layer import FusedTree


class PathArithmetic(PlacedClasses):
    """Parameters of a softmax over frequent classes and of a tree, and what single paths need."""

    in_features: int
    sparse: bool
    soft_cap: float | None
    head: CatnatHead
    weight: nn.Parameter
    bias: nn.Parameter | None
    shortlist: nn.Linear | None

    def _log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """(M, D), (M,) -> (M,); NaN for a target that is not a class."""
        of_tree = self._tree_log_prob(hidden, target)
        if self.shortlist is None:
            return of_tree
        column = self._places(target).clamp(0, self.num_frequent)
        return of_tree - shortlist_nll(self.shortlist, hidden, column, self.soft_cap)

    def _tree_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Terms of the tree in log-probabilities, (M, D), (M,) -> (M,); 0 for frequent classes."""
        fused = None if self.sparse else self._fused(hidden)
        if fused is None:
            return self._by_paths(hidden, self.weight, self.bias, target)
        return fused.log_prob(hidden, target, self.order, self.num_frequent, self._by_paths)

    def _block(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the frequent classes and of "rare", (*, D) -> (*, F+1)."""
        return self._logits(hidden).log_softmax(-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the frequent classes and of "rare", (*, D) -> (*, F+1)."""
        assert self.shortlist is not None
        return capped(shortlist_logits(self.shortlist, hidden), self.soft_cap)

    def _linear(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer in the dtype of the hidden states, whatever autocast says."""
        with without_autocast(hidden):
            bias = None if bias is None else bias.to(hidden.dtype)
            return nn.functional.linear(hidden, weight.to(hidden.dtype), bias)

    def _fused(self, hidden: Tensor) -> "FusedTree | None":
        """The tree for the fused kernels, where they take this layer."""
        if not (hidden.is_cuda and HAS_TRITON):
            return None
        from catnat.kernels.triton_layer import FusedTree

        tree = FusedTree(self.weight, self.bias, self.head.activation, self._constants(hidden))
        return tree if tree.takes(hidden) else None

    def _constants(self, hidden: Tensor) -> Tensor | None:
        """The constants of the nodes, for scores of these hidden states."""
        return self.head.constants(at_least_float32(hidden[:0]))

    def _by_paths(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> Tensor:
        """Terms of the tree in the log-probabilities of classes, in plain torch, (M, D) -> (M,).

        0 for frequent classes, and NaN for what is not a class.
        """
        place = self._places(target)
        leaf = place - self.num_frequent
        rare = leaf >= 0
        if can_branch_on(rare) and not bool(rare.all()):  # rows of other classes are not read
            steps = self._steps(hidden[rare], weight, bias, leaf[rare])[0]
            logs = steps.new_zeros(rare.shape).masked_scatter(rare, floored_sums(steps.sum(-1)))
        else:
            steps = self._steps(hidden, weight, bias, leaf)[0]
            logs = torch.where(rare, floored_sums(steps.sum(-1)), 0.0)
        return torch.where(place >= 0, logs, torch.nan)

    def _steps(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to leaves, and of the other sides, (M, H) each."""

        def scores_at(nodes: Tensor) -> Tensor:
            rows = nn.functional.embedding(nodes, weight, sparse=self.sparse).to(hidden.dtype)
            scores = at_least_float32(torch.bmm(rows, hidden[:, :, None])[:, :, 0])
            if bias is None:
                return scores
            biases = torch.gather(bias, 0, nodes.flatten(), sparse_grad=self.sparse)
            # The product keeps the values of the sparse gradient apart from the scores' gradient:
            # all-reduce changes them in place while the latter is still in use.
            return scores + (biases * 1.0).view_as(nodes).to(scores.dtype)

        head = self.head
        constants = self._constants(hidden)
        with without_autocast(hidden):
            return path_logs(scores_at, leaf, head.num_categories, head.activation, constants)

    def _broadcast(self, hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
        """Rows of hidden states and classes, (M, D) and (M,), and the shape that they stand for."""
        hidden = self._checked(hidden)
        classes = checked_value(value, self.num_categories)
        shape = torch.broadcast_shapes(hidden.shape[:-1], classes.shape)
        rows = hidden.expand(*shape, -1).reshape(-1, self.in_features)
        return rows, classes.expand(shape).reshape(-1), torch.Size(shape)

    def _checked(self, hidden: Tensor) -> Tensor:
        """Hidden states in the dtype of the matmuls."""
        require_tensor(hidden, "features of hidden states", self.in_features)
        device = hidden.device.type
        if device not in ("cpu", "meta") and torch.is_autocast_enabled(device):
            return hidden.to(torch.get_autocast_dtype(device))
        return hidden.to(self.weight.dtype)

    def _of_rare(self, estimates: Tensor, block: Tensor) -> Tensor:
        """Estimates below the event "rare", with the gradient of the event's probability.

        They are 0 for frequent classes.
        """
        log_rare = block[..., -1]
        return estimates + estimates.detach() * (log_rare - log_rare.detach())

    def _path_logs(self, hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities of the steps to classes, and of the other sides, (*, H) each.

        The third are the log-probabilities of the softmax, (*, F+1), if there is one. The steps to
        a frequent class are certain.
        """
        rows, classes, shape = self._broadcast(hidden, value)
        leaf = self._places(classes) - self.num_frequent
        step, aside = map(floored_sums, self._steps(rows, self.weight, self.bias, leaf))
        block = None
        if self.shortlist is not None:
            block = self._block(rows).view(*shape, -1)
            rare = (leaf >= 0)[:, None]
            step = torch.where(rare, step, 0.0)
            aside = torch.where(rare, aside, LOG_ZERO)
        return step.view(*shape, -1), aside.view(*shape, -1), block
