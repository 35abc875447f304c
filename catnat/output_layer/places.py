"""The places of classes in an output layer: the rows of a softmax first, then the leaves of a tree.

>>> from catnat import TreeLinear
>>> TreeLinear(4, 5, frequent=[3]).order.tolist()
[1, 2, 3, 0, 4]
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from catnat.checks import checked_order
from catnat.heads.tree import looked_up
from catnat.numerics import can_branch_on


class PlacedClasses(nn.Module):
    """The buffer ``order``, the place of each class, and what follows from it.

    Loaders write parameters and buffers in different ways: some copy into them, some replace them,
    and only ``load_state_dict`` calls the module. So everything here is derived from the buffer
    at each use.
    """

    num_categories: int
    num_frequent: int
    order: Tensor

    def _place_classes(self, frequent: list[int], device: torch.device) -> None:
        """Add the buffer: frequent classes first, all others sorted."""
        places = torch.arange(self.num_categories, device="cpu")
        if frequent != list(range(len(frequent))):
            keys = places.clone()
            keys[frequent] = torch.arange(-len(frequent), 0, device="cpu")
            places = keys.argsort().argsort()
        self._chosen_order = places  # on the CPU: a layer on the device "meta" has no values
        self._inverse: Tensor | None = None
        self.register_buffer("order", places.to(device))

    def set_order(self, order: Tensor | Sequence[int] | None) -> None:
        """Give class k the leaf ``order[k]``; None for sorted classes. Weights stay with nodes.

        Frequent classes stay in the shortlist. For a layer that has learned nothing yet.
        """
        K, F = self.num_categories, self.num_frequent
        keys = torch.arange(K, device="cpu")
        if order is not None:
            keys = torch.tensor(checked_order(order, K), device="cpu")
        if F:
            current = self._chosen_order if self.order.is_meta else self.order.cpu()
            is_frequent = current < F
            keys[is_frequent] = current[is_frequent] - F
            keys = keys.argsort().argsort()
        self._choose_order(keys)

    def _choose_order(self, places: Tensor) -> None:
        """Take the place of each class, (K,) on the CPU."""
        self._chosen_order = places
        self.order = places.to(self.order.device)

    @property
    def classes(self) -> Tensor:
        """The class at each place, (K,)."""
        inverse = torch.empty_like(self.order)
        return inverse.scatter_(0, self.order, torch.arange(len(inverse), device=inverse.device))

    def _classes_at(self, place: Tensor) -> Tensor:
        """The classes at places; a place that does not exist stays as it is."""
        if not (can_branch_on(place) and can_branch_on(self.order)):
            return looked_up(place, self.classes)
        if self._inverse is not None:
            found = looked_up(place, self._inverse)
            if torch.equal(looked_up(found, self.order), place):  # nothing was loaded since
                return found
        self._inverse = self.classes
        return looked_up(place, self._inverse)

    def _places(self, target: Tensor) -> Tensor:
        """The places of classes, (M,) -> (M,); -1 for a target that is not a class."""
        possible = (target >= 0) & (target < self.num_categories)
        return torch.where(possible, looked_up(target, self.order), -1)

    def _is_placed_like(self, other: "PlacedClasses") -> bool:
        """Whether all classes have the same places in another layer."""
        if (self.num_frequent, self.num_categories) != (other.num_frequent, other.num_categories):
            return False
        if self.order is other.order or self.order.is_meta or other.order.is_meta:
            return True
        return torch.equal(self.order, other.order.to(self.order.device))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *rest: Any,
    ) -> None:
        """Check the order; a state dict without one is that of sorted classes."""
        name = f"{prefix}order"
        loaded = state_dict.get(name)
        if loaded is not None and not loaded.is_meta:
            places = checked_order(loaded, self.num_categories)
            self._chosen_order = torch.tensor(places, device="cpu")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *rest
        )
        is_sorted = torch.equal(self._chosen_order, torch.arange(len(self._chosen_order)))
        if loaded is None and is_sorted and name in missing_keys:
            missing_keys.remove(name)
