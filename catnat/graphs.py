r"""Random graphs, gradients of the energy score of predictions with them, and graph convolutions.

A graph is a matrix A of 0 and 1, A_ji = 1 for an edge from node j to node i, each entry drawn on
its own with probability θ_ji. M graphs are drawn and used for the whole batch; A_m gives the
outputs f_m, and the loss is the mean over the batch of

.. math:: \frac1M \sum_m |f_m - y| - \frac1{2M(M-1)} \sum_{m \neq n} |f_m - f_n|.
"""

import sys

import torch
from torch import Tensor, nn

from catnat.numerics import at_least_float32, uniform, without_autocast

_FLIPPED_AT_ONCE = 2**22  # distances, in the local expectation


def sample_graphs(
    theta: Tensor, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """M graphs with edge probabilities θ, without gradient, (N, N) -> (M, N, N).

    >>> sample_graphs(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 1)
    tensor([[[0., 1.],
             [1., 0.]]])
    """
    dtype = at_least_float32(theta).dtype  # half precision has too few numbers near 0
    noise = uniform((num_samples, *theta.shape), theta, generator, dtype)
    return (noise < theta.detach()).to(theta.dtype)


def score_function_direction(error: Tensor, distance: Tensor, graphs: Tensor) -> Tensor:
    r"""Unbiased gradient of the expected energy score in the log-odds of θ, by score function.

    .. math:: \sum_m c_m \nabla \log p(A_m), \quad
        c_m = \frac1M \left[ |f_m - y| - b_m - \left( \frac{r_m}{M-1} - p_m \right) \right]

    r_m is the sum of the distances |f_m - f_n|. The baselines come from the other graphs: b_m is
    their mean error, p_m the mean distance (S - 2 r_m) / ((M-1)(M-2)) of the pairs without m, where
    S is the sum of all distances. The c_m sum to zero, so the gradient is sum_m c_m A_m; and an
    edge on which all graphs agree gets exactly zero, not a rounding error that Adam would take for
    a gradient.

    To train θ, minimize ``(direction * (log θ - log(1 - θ))).sum()``.

    Shapes: ``error`` (M, B) and ``distance`` (B, M, M) from
    :func:`~catnat.losses.energy_terms`, ``graphs`` (M, N, N), result (N, N), in float32 also
    where the arguments are in half precision or autocast is on.
    """
    M = error.shape[0]
    if M < 3:
        raise ValueError(f"the leave-one-out baseline of pairs needs M >= 3 samples, got M = {M}")
    error = at_least_float32(error.detach()).mean(1)  # (M,)
    distance = at_least_float32(distance.detach()).mean(0)  # (M, M)
    b = (error.sum() - error) / (M - 1)
    r = distance.sum(1)
    p = (distance.sum() - 2 * r) / ((M - 1) * (M - 2))
    weight = (error - b - r / (M - 1) + p) / M  # c_m
    with without_autocast(weight):
        direction = torch.tensordot(weight, (graphs - graphs[0]).to(weight.dtype), 1)
    return direction


@torch.no_grad()
def local_expectation_direction(
    messages: Tensor, outputs: Tensor, target: Tensor, graphs: Tensor, num_flips: int
) -> Tensor:
    r"""Unbiased gradient of the expected energy score in θ, with every edge flipped in turn.

    Where y_i = sum_j A_ji z_j with messages z, the loss with an edge j -> i present minus the
    loss with it absent, all other edges of a sampled graph as they are, is known for all N^2
    edges at once: a flip adds ±z_j to node i's output alone. Its mean is the gradient in θ_ji,
    also for edges that are never sampled.

    To train θ, minimize ``(direction * θ).sum()``.

    Shapes: ``messages`` (B, N, D), ``outputs`` (M, B, N, D), ``target`` (B, N, D), ``graphs``
    (M, N, N), result (N, N), in float32 also where the arguments are in half precision or autocast
    is on.

    Args:
        messages: z.
        outputs: f_m.
        target: y.
        graphs: A_m.
        num_flips: how many of the M graphs are flipped for each pair (x, y), from 1 to M. Pairs
            take turns, so that all graphs count; in the second term of the energy score the partner
            of each graph is the next one.

    References:
        Titsias and Lázaro-Gredilla, Local Expectation Gradients for Black Box Variational
        Inference, 2015.
    """
    M, B, N, _ = outputs.shape
    messages = at_least_float32(messages)
    outputs = at_least_float32(outputs)
    target = target.to(outputs.dtype)
    graphs = graphs.to(outputs.dtype)
    row = torch.arange(B, device=outputs.device)
    turn = torch.arange(num_flips, device=outputs.device)[:, None]
    chosen = (row * num_flips + turn) % M  # graphs of each pair, (F, B)
    at_once = max(1, _FLIPPED_AT_ONCE // (B * N * N))
    total = torch.zeros_like(graphs[0])
    for flipped in chosen.split(at_once):
        predicted = outputs[flipped, row]
        sign = 1 - 2 * graphs[flipped]
        total += flip_gains(messages, predicted - target, sign)
        # The factor 1/2 of the second term cancels: both graphs of a pair have that edge.
        total -= flip_gains(messages, predicted - outputs[(flipped + 1) % M, row], sign)
    return total / (num_flips * B)


def flip_gains(messages: Tensor, residual: Tensor, sign: Tensor) -> Tensor:
    """|r| with an edge present minus |r| with it absent, summed over F graphs of B pairs each.

    Shapes: ``messages`` (B, N, D), ``residual`` r (F, B, N, D), ``sign`` (F, B, N, N), which is
    1 for edges that are absent and -1 for those that are present, result (N, N).
    """
    squared = residual.square().sum((-2, -1))[..., None, None]  # (F, B, 1, 1)
    with without_autocast(messages):
        change = messages @ residual.mT.contiguous()  # z_j . r_i, (F, B, N, N)
    change.mul_(sign).mul_(2).add_(messages.square().sum(-1, keepdim=True))
    flipped = (change + squared).clamp_min_(0).sqrt_()
    flipped.add_(squared.sqrt()).clamp_min_(torch.finfo(change.dtype).tiny)
    # |r'| - |r| = (|r'|^2 - |r|^2) / (|r'| + |r|), which does not cancel.
    return change.div_(flipped).mul_(sign).sum((0, 1))


# -- predictors: networks on M graphs at once ------------------------------------------------------


class GCN(nn.Module):
    r"""One linear graph convolution without normalization, y = Aᵀ x W, on M graphs at once.

    A_ji = 1 is an edge from j to i. The result is that of torch-geometric's
    ``GCNConv(normalize=False, add_self_loops=False, bias=False)``, as one matrix product for all
    pairs of an input and a graph.

    Args:
        in_features: of a node's x.
        out_features: of a node's y.

    Shapes: x (B, N, in_features), graphs (M, N, N), result (M, B, N, out_features).

    References:
        Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, 2017.

    Example:
        >>> GCN(4, 2)(torch.zeros(5, 24, 4), torch.ones(3, 24, 24)).shape
        torch.Size([3, 5, 24, 2])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.xavier_uniform_(self.weight)

    def messages(self, x: Tensor) -> Tensor:
        """The message of each node, x W; y_i is the sum of the messages that arrive at node i."""
        return x @ self.weight

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        messages = self.messages(x)
        B, N, D = messages.shape
        M = graphs.shape[0]
        # Both contiguous: on ARM processors a transposed operand is a hundred times slower.
        rows = graphs.mT.reshape(M * N, N)
        columns = messages.transpose(0, 1).reshape(N, B * D)
        return (rows @ columns).reshape(M, N, B, D).transpose(1, 2)


class GraphConvolution(nn.Module):
    """Any convolution of torch-geometric, on M graphs at once, in place of :class:`GCN`.

    A sparse convolution, called as ``conv(x, edge_index)``, gets the B M graphs as one graph with
    B M parts; a dense one, called as ``conv(x, adjacency)``, gets them as a batch.

    Args:
        conv: the convolution.
        sparse: whether it is a sparse one.

    Shapes: as in :class:`GCN`.
    """

    def __init__(self, conv: nn.Module, sparse: bool) -> None:
        super().__init__()
        self.conv = conv
        self.sparse = sparse

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        B, N, _ = x.shape
        M = graphs.shape[0]
        every_x = x.repeat(M, 1, 1)  # (M B, N, D), graph by graph
        if self.sparse:
            graph, source, target = graphs.repeat_interleave(B, 0).nonzero(as_tuple=True)
            edges = torch.stack([source, target]) + graph * N
            y = self.conv(every_x.flatten(0, 1), edges)
        else:  # in dense convolutions the row is the target
            y = self.conv(every_x, graphs.mT.repeat_interleave(B, 0))
        return y.reshape(M, B, N, -1)


def as_predictor(module: nn.Module) -> nn.Module:
    """The module itself, or wrapped to take M graphs at once if it is one of torch-geometric's."""
    geometric = sys.modules.get("torch_geometric.nn")  # imported, if the module is one of its
    is_sparse = geometric is not None and isinstance(module, geometric.MessagePassing)
    if is_sparse or type(module).__module__.startswith("torch_geometric.nn.dense."):
        return GraphConvolution(module, is_sparse)
    return module
