"""Move an output layer to another tree: new node weights from the old layer's probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from catnat.tree_linear import TreeLinear

_SHRINK = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_CHUNK = 2**24  # probabilities of all classes that are held at once


@torch.no_grad()
def refit(layer: TreeLinear, order: Tensor, hidden: Tensor, ridge: float) -> None:
    """Give a layer the order, and weights with which it tells nearly what it told before.

    The probabilities of all classes for each of the hidden states are sums over subtrees of the
    new tree, and so have exact scores there. The weights are the linear least-squares fit to
    these scores. A natural split is flat beyond its edges, where a fit may land: of some factors
    that shrink the fit, the one is taken that changes the probabilities least.

    Args:
        layer: the layer.
        order: the leaf of each class.
        hidden: a sample of hidden states, (N, D); better many times D of them.
        ridge: how much large weights cost, relative to the mean square of the hidden states.
    """
    few = hidden[: _rows(layer)][:256]
    before = layer.log_probs(few).exp()
    fit = _least_squares(layer, order, hidden, ridge)
    layer.set_order(order)
    losses = []
    for factor in _SHRINK:
        _set_weights(layer, factor * fit)
        losses.append(-float((before * layer.log_probs(few)).sum()))
    _set_weights(layer, _SHRINK[losses.index(min(losses))] * fit)


def _least_squares(layer: TreeLinear, order: Tensor, hidden: Tensor, ridge: float) -> Tensor:
    """Weights and, where the layer has them, biases of all nodes, (D or D + 1, K-1) in float64."""
    width = layer.in_features + (layer.bias is not None)
    products = hidden.new_zeros(width, width, dtype=torch.float64)
    fitted = hidden.new_zeros(width, layer.num_categories - 1, dtype=torch.float64)
    for rows in hidden.split(_rows(layer)):
        probs = layer.log_probs(rows).exp()
        leaves = torch.empty_like(probs).index_copy_(-1, order, probs)
        x = _with_one(layer, rows)
        products += x.mT @ x
        fitted += x.mT @ layer.head.inverse(leaves.double())
    products.diagonal().add_(ridge * products.diagonal().mean())
    solution: Tensor = torch.linalg.solve(products, fitted)
    return solution


def _rows(layer: TreeLinear) -> int:
    return max(1, _CHUNK // layer.num_categories)


def _with_one(layer: TreeLinear, hidden: Tensor) -> Tensor:
    x = hidden.double()
    return x if layer.bias is None else torch.cat((x, torch.ones_like(x[:, :1])), 1)


def _set_weights(layer: TreeLinear, fit: Tensor) -> None:
    layer.weight.copy_(fit[: layer.in_features].T)
    if layer.bias is not None:
        layer.bias.copy_(fit[-1])
