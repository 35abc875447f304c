r"""A tree from a softmax: the weights of a :class:`catnat.TreeLinear` from a trained linear layer.

A softmax with logits l_k(h) = w_k h + b_k is a tree whose node n, with the leaves L_n and R_n on
its two sides, has the score s_n(h) = logsumexp_{R_n} l(h) - logsumexp_{L_n} l(h). This score is not
linear in h, so no layer with linear scores equals the softmax. The linear scores here approximate
it at given hidden states. The weight of a hidden state is P(n | h) a_n (1 - a_n), the Fisher
information of the score.

- All nodes take the first-order expansion of s_n at their own weighted mean of hidden states.
- The first nodes, which all classes share, and the event "rare" are then fitted to s_n by weighted
  least squares, with a ridge around the expansion.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from catnat.heads.nodes import levels, subtree_sums
from catnat.numerics import at_least_float32

if TYPE_CHECKING:
    from catnat.output_layer.tree_linear import TreeLinear

_CHUNK = 2**26  # numbers that a step holds at once
_RIDGE = 1.0  # in hidden states of full information
_SMALLEST = 1e-30  # of a probability: a node that no hidden state reaches keeps finite scores


class Scores(NamedTuple):
    """Linear scores of nodes: weights (S, D) and biases (S,)."""

    weight: Tensor
    bias: Tensor


def likeliest(linear: nn.Linear, hidden: Tensor, number: int) -> Tensor:
    """The classes with the largest mean probability at hidden states, (number,)."""
    weight, bias = _rows(linear)
    total = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    for states in _split(hidden.to(weight), len(weight)):
        total += torch.addmm(bias, states, weight.T).softmax(-1).sum(0)
    return total.topk(number).indices


@torch.no_grad()
def follow_softmax(layer: "TreeLinear", linear: nn.Linear, hidden: Tensor, fitted: int) -> None:
    """Give a layer with sigmoid splits the weights that are near a softmax at hidden states.

    Args:
        layer: an output layer with its order and frequent classes.
        linear: the softmax over the same classes.
        hidden: hidden states that the softmax sees, (N, D).
        fitted: number of nodes that are fitted by least squares.
    """
    F = layer.num_frequent
    weight, bias = (x[layer.classes.to(linear.weight.device)] for x in _rows(linear))
    hidden = hidden.to(weight)
    log_rare = torch.cat(
        [_log_rare(weight, bias, states, F) for states in _split(hidden, len(weight))]
    )
    reach = log_rare.sigmoid()  # the probability of a rare class
    scores = expanded(weight[F:], bias[F:], reach, hidden)
    scores = refined(scores, weight[F:], bias[F:], reach, hidden, fitted)
    centers = layer.head._centers.of_nodes(scores.bias).to(scores.bias)
    layer.weight.copy_(scores.weight)
    assert layer.bias is not None
    layer.bias.copy_(scores.bias + centers)
    if layer.shortlist is not None:
        rare = _event_rare(weight, bias, reach, hidden, F)
        layer.shortlist.weight.copy_(torch.cat((weight[:F], rare.weight)))
        layer.shortlist.bias.copy_(torch.cat((bias[:F], rare.bias)))


def expanded(weight: Tensor, bias: Tensor, reach: Tensor, hidden: Tensor) -> Scores:
    """First-order expansion of the score of each node at its mean hidden state.

    Args:
        weight: rows of a softmax in the order of the leaves, (K, D).
        bias: their biases, (K,).
        reach: probability that a hidden state reaches the root of the tree, (N,).
        hidden: hidden states, (N, D).
    """
    K, D = weight.shape
    total = weight.new_zeros(K - 1)
    mean = weight.new_zeros(K - 1, D)
    for states, reached in zip(_split(hidden, K), _split(reach, K), strict=True):
        left, right = _sides(weight, bias, states)
        information = reached[:, None] * (left * right / (left + right))
        total += information.sum(0)
        mean += information.T @ states
    mean /= total.clamp_min(_SMALLEST)[:, None]
    slopes = torch.empty_like(mean)
    scores = torch.empty_like(total)
    leaves = torch.arange(K, device=weight.device)
    for level, (first, last) in enumerate(levels(K)):
        child = _children(leaves, K, level)
        inside = leaves[child >= 0]
        child = child[inside]
        logits = torch.cat(
            [
                (weight[leaf] * mean[first - 1 + side // 2]).sum(-1) + bias[leaf]
                for leaf, side in zip(_split(inside, D), _split(child, D), strict=True)
            ]
        )
        sides = logits.new_full((2 * (last - first),), -torch.inf)
        largest = sides.scatter_reduce(0, child, logits, "amax")
        shares = (logits - largest[child]).exp()
        sums = torch.zeros_like(sides).index_add_(0, child, shares)
        shares = shares / sums[child]
        means = weight.new_zeros(len(sides), D)
        for leaf, side, share in zip(*(_split(x, D) for x in (inside, child, shares)), strict=True):
            means.index_add_(0, side, share[:, None] * weight[leaf])
        slopes[first - 1 : last - 1] = means[1::2] - means[::2]
        logs = largest + sums.log()
        scores[first - 1 : last - 1] = logs[1::2] - logs[::2]
    return Scores(slopes, scores - (slopes * mean).sum(-1))


def refined(
    scores: Scores, weight: Tensor, bias: Tensor, reach: Tensor, hidden: Tensor, fitted: int
) -> Scores:
    """The scores, with those of the first nodes fitted by weighted least squares.

    Args:
        scores: where the ridge pulls to.
        weight: rows of a softmax in the order of the leaves, (K, D).
        bias: their biases, (K,).
        reach: probability that a hidden state reaches the root of the tree, (N,).
        hidden: hidden states, (N, D).
        fitted: number of nodes, breadth first.
    """
    fitted = min(fitted, len(scores.bias))
    if not fitted:
        return scores
    targets = []
    information = []
    for states, reached in zip(
        _split(hidden, len(weight)), _split(reach, len(weight)), strict=True
    ):
        left, right = (side[:, :fitted] for side in _sides(weight, bias, states))
        targets.append(right.log() - left.log())
        information.append(reached[:, None] * (left * right / (left + right)))
    start = Scores(scores.weight[:fitted], scores.bias[:fitted])
    found = _least_squares(start, hidden, torch.cat(targets), torch.cat(information))
    return Scores(*(torch.cat((new, old[fitted:])) for new, old in zip(found, scores, strict=True)))


def _event_rare(weight: Tensor, bias: Tensor, reach: Tensor, hidden: Tensor, F: int) -> Scores:
    """The logit of the event "rare": its weight (1, D) and bias (1,)."""
    information = reach * (1 - reach)
    slope = torch.zeros_like(weight[0])
    target = []
    rows, of_rows = weight[F:], bias[F:]
    for states, worth in zip(
        _split(hidden, len(rows)), _split(information, len(rows)), strict=True
    ):
        logits = torch.addmm(of_rows, states, rows.T)
        target.append(logits.logsumexp(-1))
        slope += (worth @ logits.softmax(-1)) @ rows
    logit = torch.cat(target)
    total = information.sum().clamp_min(_SMALLEST)
    slope /= total
    offset = (information * (logit - hidden @ slope)).sum() / total
    start = Scores(slope[None], offset[None])
    return _least_squares(start, hidden, logit[:, None], information[:, None])


def _least_squares(start: Scores, hidden: Tensor, target: Tensor, information: Tensor) -> Scores:
    """Linear scores that fit targets (N, S) by weights (N, S), with a ridge around a start."""
    D = hidden.shape[1]
    center = hidden.mean(0)
    points = torch.cat((hidden - center, torch.ones_like(hidden[:, :1])), 1)
    strength = _RIDGE * max(float(points[:, :D].square().mean()), 1e-9)
    ridge = torch.full((D + 1,), strength, dtype=torch.float64)
    ridge[D] = 1e-3  # the bias is nearly free
    residual = target - hidden @ start.weight.T - start.bias
    forces = (points.T @ (information * residual)).T.double()  # (S, D + 1)
    moves = []
    for weights, force in zip(information.T, forces, strict=True):
        square = ((points * weights[:, None]).T @ points).double()
        square.diagonal().add_(ridge.to(square.device))
        moves.append(torch.linalg.solve(square, force).to(hidden.dtype))
    move = torch.stack(moves)
    return Scores(start.weight + move[:, :D], start.bias + move[:, D] - move[:, :D] @ center)


def _rows(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer, in float32 or float64."""
    weight = at_least_float32(linear.weight.detach())
    if linear.bias is None:
        return weight, weight.new_zeros(len(weight))
    return weight, linear.bias.detach().to(weight.dtype)


def _log_rare(weight: Tensor, bias: Tensor, hidden: Tensor, F: int) -> Tensor:
    """Log-odds of a rare class, (N, D) -> (N,); infinite without frequent classes."""
    logits = torch.addmm(bias, hidden, weight.T)
    return logits[:, F:].logsumexp(-1) - logits[:, :F].logsumexp(-1)


def _sides(weight: Tensor, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the two sides of each node under the softmax, (N, D) -> (N, S) each."""
    left, right = subtree_sums(torch.addmm(bias, hidden, weight.T).softmax(-1))
    return left.clamp_min(_SMALLEST), right.clamp_min(_SMALLEST)


def _children(leaf: Tensor, num_categories: int, level: int) -> Tensor:
    """The child above each leaf at the level below a node, from 0; -1 where there is no node."""
    heap = leaf + num_categories
    deepest = (2 * num_categories - 1).bit_length() - 1
    depth = torch.where(heap >= 2**deepest, deepest, deepest - 1)
    child = (heap >> (depth - level - 1).clamp_min(0)) - 2 ** (level + 1)
    return torch.where(depth > level, child, -1)


def _split(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Parts of rows that may each become ``width`` numbers wide."""
    return x.split(max(1, _CHUNK // width))
