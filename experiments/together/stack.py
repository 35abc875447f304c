"""What all batched models share: parameters as views of one matrix, optimizers of it, and heads.

Row m of the matrix has all parameters of model m. So a clipped step of all models is a few kernels,
and each model has a learning rate of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from catnat import CategoricalHead

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
_ALIGNED = 4  # numbers


class Stack:
    r"""The parameters with some names, of M models in which their shapes are equal.

    Args:
        models: their parameters are copied.
        names: of the parameters.

    Attributes:
        flat: all of them, (M, P).
        parameters: views of ``flat`` by name, (M, \*), that require a gradient.
    """

    def __init__(self, models: Sequence[nn.Module], names: Sequence[str]) -> None:
        named = [dict(each.named_parameters()) for each in models]
        stacked = {name: torch.stack([one[name].detach() for one in named]) for name in names}
        self.flat = flattened(stacked.values())
        views = unflattened(self.flat, [each.shape for each in stacked.values()])
        self.parameters = {
            name: each.requires_grad_() for name, each in zip(stacked, views, strict=True)
        }
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)

    def adam(self, grad: Tensor, rates: Tensor, steps: Tensor) -> None:
        """Take a step of Adam: ``grad`` (M, P), ``rates`` (M, 1), ``steps`` with this one, ()."""
        self.mean.lerp_(grad, 1 - BETAS[0])
        self.square.lerp_(grad * grad, 1 - BETAS[1])
        scale = (1 - BETAS[1] ** steps).rsqrt()
        change = self.mean / (self.square.sqrt() * scale + EPS)
        self.flat -= rates / (1 - BETAS[0] ** steps) * change

    def sgd(self, grad: Tensor, rates: Tensor, steps: Tensor) -> None:
        """Take a step of SGD without momentum; see :meth:`adam`."""
        self.flat -= rates * grad

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step."""
        return {"flat": self.flat, "mean": self.mean, "square": self.square}


class Stacks:
    """Several stacks of the same models, that are clipped and stepped together.

    Args:
        stacks: each with its models, a range of all models.
        learning_rates: one for each model.
        optimizer: "adam" or "sgd".
        clip: largest norm of the gradient of a model; 0 for no limit.
    """

    def __init__(
        self,
        stacks: Sequence[tuple[Stack, slice]],
        learning_rates: Sequence[float],
        optimizer: str,
        clip: float,
    ) -> None:
        first = stacks[0][0].flat
        self.stacks, self.optimizer, self.clip = list(stacks), optimizer, clip
        self.rates = first.new_tensor(learning_rates)[:, None]
        # In float32 the correction 1 - 0.999^t would have four digits in the first steps.
        self.steps = torch.zeros((), dtype=torch.float64, device=first.device)

    def step(self, losses: Tensor) -> None:
        """Take a step of every model down the gradient of its loss, (M,)."""
        leaves = [list(stack.parameters.values()) for stack, _ in self.stacks]
        found = torch.autograd.grad(losses.sum(), [each for some in leaves for each in some])
        grads, start = [], 0
        with torch.no_grad():
            for some in leaves:
                grads.append(flattened(found[start : start + len(some)]))
                start += len(some)
            if self.clip:
                grads = self._clipped(grads)
            self.steps += 1
            for (stack, models), grad in zip(self.stacks, grads, strict=True):
                take = stack.adam if self.optimizer == "adam" else stack.sgd
                take(grad, self.rates[models], self.steps)

    def _clipped(self, grads: list[Tensor]) -> list[Tensor]:
        """As ``torch.nn.utils.clip_grad_norm_`` clips each model."""
        squares = torch.zeros_like(self.rates)
        for (_, models), grad in zip(self.stacks, grads, strict=True):
            squares[models] += torch.linalg.vector_norm(grad, dim=1, keepdim=True).square()
        factor = (self.clip / (squares.sqrt() + 1e-6)).clamp_max(1.0)
        return [grad * factor[models] for (_, models), grad in zip(self.stacks, grads, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step."""
        every = {"steps": self.steps}
        for number, (stack, _) in enumerate(self.stacks):
            every |= {f"{number}.{name}": each for name, each in stack.tensors().items()}
        return every


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors (M, ...) side by side, (M, P). Each begins at a multiple of 16 bytes."""
    parts = []
    for each in tensors:
        rows = each.flatten(1)
        parts += [rows, rows.new_zeros(len(rows), -rows.shape[1] % _ALIGNED)]
    return torch.cat([each for each in parts if each.shape[1]], 1)


def unflattened(flat: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """Views of the tensors that :func:`flattened` put together."""
    views, start = [], 0
    for shape in shapes:
        size = shape[1:].numel()
        views.append(flat[:, start : start + size].view(shape))
        start += size + -size % _ALIGNED
    return views


# -- heads -----------------------------------------------------------------------------------------


def head_key(model: Any) -> str:
    """Equal for models whose heads compute the same: of one class, with equal options."""
    head: CategoricalHead = model.head
    if next(head.parameters(), None) is not None:
        raise ValueError(f"models trained together have heads without parameters, got {head}")
    kind, options = type(head), model.hparams.get("head_options") or {}
    return json.dumps([kind.__module__, kind.__qualname__, repr(head), options], sort_keys=True)


def neighbours(models: Sequence[Any]) -> list[tuple[CategoricalHead, int]]:
    """The heads of models, with how many models in a row have equal ones."""
    groups = (list(found) for _, found in groupby(models, head_key))
    return [(each[0].head, len(each)) for each in groups]


def log_probs_of(heads: list[tuple[CategoricalHead, int]], scores: Tensor) -> Tensor:
    r"""Log-probabilities, each model's by its own head, (M, \*, S) -> (M, \*, K)."""
    parts = scores.split([count for _, count in heads])
    return joined([head.log_probs(part) for (head, _), part in zip(heads, parts, strict=True)])


def joined(parts: list[Tensor]) -> Tensor:
    """All models again, from parts of them."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
