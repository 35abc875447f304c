"""Centers of the nodes of a tree, with which zero scores give the uniform distribution."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from catnat.heads.activations import Activation
from catnat.heads.nodes import Sides, subtree_sums
from catnat.numerics import is_plain, takes_real_tensors

_TABLE_LIMIT = 1024  # largest K whose centers under masks come from a table


class DeviceCache:
    """Tensors that follow from options which cannot change, made once for each device.

    A copy starts empty, because ``torch.load`` may move tensors to another device.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, torch.device], Any] = {}

    def get(self, x: Tensor, key: object, make: Callable[[torch.device], Any]) -> Any:
        """Result of ``make`` for the device of x, kept unless x is being traced."""
        device_key = (key, x.device)
        if not is_plain(x) and not (device_key in self._made and takes_real_tensors(x)):
            return make(x.device)
        if device_key not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                self._made[device_key] = make(x.device)
        return self._made[device_key]

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": {}}


class Centers:
    """The center C of every node: a(s) is computed from s - C.

    Args:
        num_categories: number of categories (K).
        activation: how a score divides the probability of its node.
        center: added to the center of every node.
        uniform_at_zero: whether zero scores give the uniform distribution for every K.
        cache: where constants are kept.
    """

    def __init__(
        self,
        num_categories: int,
        activation: Activation,
        center: float,
        uniform_at_zero: bool,
        cache: DeviceCache,
    ) -> None:
        self.num_categories = num_categories
        self.activation = activation
        self.center = center
        self.uniform_at_zero = uniform_at_zero
        self._cache = cache
        is_even = num_categories & (num_categories - 1) == 0 or not uniform_at_zero
        self.are_zero = activation.is_fused and center == 0 and is_even

    def constants(self, scores: Tensor) -> Tensor | None:
        """``activation.node_constants`` in the dtype and on the device of the scores.

        None where the center of every node is 0.
        """
        if self.are_zero:
            return None

        def make(_: torch.device) -> Tensor:
            return self.activation.node_constants(self.of_nodes(scores), scores.dtype)

        if not self.activation.is_fused:  # parameters of log_activation may have changed
            return make(scores.device)
        constants: Tensor = self._cache.get(scores, scores.dtype, make)
        return constants

    def of_nodes(self, like: Tensor) -> Tensor:
        """Center of every node, (S,) in float64."""
        num_nodes = self.num_categories - 1
        if not self.uniform_at_zero:
            return torch.full((num_nodes,), self.center, dtype=torch.float64, device=like.device)
        # x at which a node divides its leaves evenly: a(x) is the share of its bit-1 child.
        is_traced = like.is_meta or not is_plain(like)
        if self.activation.is_fused or is_traced or not self._is_elementwise(like):
            return self.center - self._at_share(_shares(*self._make_leaves(like.device)))

        def make(device: torch.device) -> Any:
            return _shares(*self._make_leaves(device)).unique(return_inverse=True)

        shares, index = self._cache.get(like, "shares", make)
        return self.center - self._at_share(shares)[index]  # searches only the few different shares

    def leaves(self, like: Tensor) -> Sides:
        """Numbers of leaves below the two children of each node, (S,) each."""
        numbers: Sides = self._cache.get(like, "numbers of leaves", self._make_leaves)
        return numbers

    def shift(self, leaves: Sides, old_leaves: Sides) -> Tensor:
        """Change of the centers if the numbers of allowed leaves change; otherwise exactly 0."""
        if self.activation.is_fused and self.num_categories <= _TABLE_LIMIT:
            table = self._cache.get(leaves[0], "table", self._make_table)
            index, old_index = (
                torch.add(right, left, alpha=len(table)).long()
                for left, right in (leaves, old_leaves)
            )
            entries: Tensor = table.flatten()
            return entries[index] - entries[old_index]
        unchanged = (leaves[0] == old_leaves[0]) & (leaves[1] == old_leaves[1])
        shift = self._at_share(_shares(*leaves)) - self._at_share(_shares(*old_leaves))
        return torch.where(unchanged, 0.0, shift)

    def _make_leaves(self, device: torch.device) -> Sides:
        return subtree_sums(torch.ones(self.num_categories, dtype=torch.float64, device=device))

    def _make_table(self, device: torch.device) -> Tensor:
        """x at which a node divides its leaves evenly, for all numbers of leaves on both sides."""
        most = 2 ** ((self.num_categories - 1).bit_length() - 1)
        numbers = torch.arange(most + 1, device=device, dtype=torch.float32)
        return self._at_share(_shares(numbers[:, None], numbers))

    def _at_share(self, shares: Tensor) -> Tensor:
        """x at which a(x) is the share, in float64."""
        x = self.activation.inverse(1 - shares, shares)
        return torch.where(shares == 0.5, 0.0, x) if self.activation.is_fused else x

    def _is_elementwise(self, like: Tensor) -> bool:
        """Whether the activation accepts any number of nodes, without a parameter for each."""
        x = torch.zeros(self.num_categories + 1, dtype=torch.float64, device=like.device)
        try:
            return self.activation.log_activation(x, None)[0].shape == x.shape
        except RuntimeError:
            return False


def _shares(left: Tensor, right: Tensor) -> Tensor:
    """Share of the allowed leaves below each node that are below its bit-1 child, in float64.

    It is 1/2 where the mask decides. It is computed on the device of the mask, because a captured
    step cannot copy from the host.
    """
    is_open = (left > 0) & (right > 0)
    return torch.where(is_open, right.double() / (left + right), 0.5)
