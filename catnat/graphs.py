r"""Random graphs, gradients of the energy score of their predictions, and graph convolutions.

A graph is a matrix A of 0 and 1. A_ji = 1 is an edge from node j to node i. It is present with
probability θ_ji, independently of the other edges. All rows of a batch share M sampled graphs. The
outputs with graph A_m are f_m, and the loss is the mean over the batch of

.. math:: \frac1M \sum_m |f_m - y| - \frac1{2M(M-1)} \sum_{m \neq n} |f_m - f_n|.
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from catnat.checks import require_within
from catnat.numerics import at_least_float32, can_branch_on, uniform, without_autocast

if TYPE_CHECKING:
    from torch_geometric.data import Data

_FLIPPED_AT_ONCE = 2**22  # most distances that the local expectation computes at once


def sample_graphs(
    theta: Tensor, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Sample M graphs with edge probabilities θ, without a gradient, (N, N) -> (M, N, N).

    >>> sample_graphs(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 1)
    tensor([[[0., 1.],
             [1., 0.]]])
    """
    dtype = at_least_float32(theta).dtype  # half precision has too few numbers near 0
    noise = uniform((num_samples, *theta.shape), theta, generator, dtype)
    return (noise < theta.detach()).to(theta.dtype)


def score_function_direction(error: Tensor, distance: Tensor, graphs: Tensor) -> Tensor:
    r"""Unbiased score-function gradient of the expected energy score in the log-odds of θ.

    .. math:: \sum_m c_m \nabla \log p(A_m), \quad
        c_m = \frac1M \left[ |f_m - y| - b_m - \left( \frac{r_m}{M-1} - p_m \right) \right]

    r_m is the sum of the distances |f_m - f_n|. The baselines come from the other graphs: b_m is
    their mean error, and p_m is the mean distance (S - 2 r_m) / ((M-1)(M-2)) of the pairs without
    m, where S is the sum of all distances. The c_m sum to zero, so the gradient is sum_m c_m A_m.
    If all graphs agree on an edge, its gradient is exactly zero instead of a rounding error that
    Adam would amplify.

    To train θ, minimize ``(direction * (log θ - log(1 - θ))).sum()``.

    Shapes: ``error`` (M, B) and ``distance`` (B, M, M) from
    :func:`~catnat.losses.energy_terms`, ``graphs`` (M, N, N), result (N, N). Half precision
    is computed and returned in float32, also under autocast.
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
    r"""Unbiased local expectation gradient of the expected energy score in θ.

    If y_i = sum_j A_ji z_j with messages z, flipping the edge j -> i of a sampled graph adds ±z_j
    to the output of node i and changes no other output. The differences between the losses with and
    without an edge are therefore available for all N^2 edges at once. Their mean is the gradient in
    θ_ji, including edges that are never sampled.

    To train θ, minimize ``(direction * θ).sum()``.

    Shapes: ``messages`` (B, N, D), ``outputs`` (M, B, N, D), ``target`` (B, N, D), ``graphs``
    (M, N, N), result (N, N). Half precision is computed and returned in float32, also under
    autocast.

    Args:
        messages: messages of the nodes (z).
        outputs: predictions (f_m).
        target: observations (y).
        graphs: sampled graphs (A_m).
        num_flips: number of graphs whose edges are flipped for each pair (x, y), 1 to M. The pairs
            of a batch use different graphs in turn. In the second term of the energy score, each
            graph is compared with the next graph.

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

    Shapes: ``messages`` (B, N, D), ``residual`` r (F, B, N, D), ``sign`` (F, B, N, N) with 1 for
    absent edges and -1 for present edges, result (N, N).
    """
    squared = residual.square().sum((-2, -1))[..., None, None]  # (F, B, 1, 1)
    with without_autocast(messages):
        change = messages @ residual.mT.contiguous()  # z_j . r_i, (F, B, N, N)
    change.mul_(sign).mul_(2).add_(messages.square().sum(-1, keepdim=True))
    flipped = (change + squared).clamp_min_(0).sqrt_()
    flipped.add_(squared.sqrt()).clamp_min_(torch.finfo(change.dtype).tiny)
    # |r'| - |r| = (|r'|^2 - |r|^2) / (|r'| + |r|) avoids cancellation.
    return change.div_(flipped).mul_(sign).sum((0, 1))


# -- predictors: networks on M graphs at once ------------------------------------------------------


class GCN(nn.Module):
    r"""One linear graph convolution without normalization, y = Aᵀ x W, on M graphs at once.

    A_ji = 1 is an edge from j to i. The result equals torch-geometric's
    ``GCNConv(normalize=False, add_self_loops=False, bias=False)``, but one matrix product computes
    it for all pairs of an input and a graph. The dense convolutions of torch-geometric compute
    other functions: ``DenseGCNConv`` normalizes, ``DenseGraphConv`` has a root weight, and both use
    one graph per input.

    Args:
        in_features: number of features of each node.
        out_features: number of outputs of each node.

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
        """Message of each node, x W; y_i is the sum of the messages that node i receives."""
        return x @ self.weight

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        messages = self.messages(x)
        B, N, D = messages.shape
        M = graphs.shape[0]
        # Both are contiguous: on ARM processors, transposed operands are a hundred times slower.
        rows = graphs.mT.reshape(M * N, N)
        columns = messages.transpose(0, 1).reshape(N, B * D)
        return (rows @ columns).reshape(M, N, B, D).transpose(1, 2)


class GraphConvolution(nn.Module):
    """Applies a network of torch-geometric to M graphs at once.

    It replaces :class:`GCN`. A sparse network is called as ``conv(x, edge_index)``, with the B M
    graphs as one graph of B M components, as in a torch-geometric ``Batch``. If its ``forward``
    requires ``edge_weight``, all weights are 1. If it accepts ``batch``, it receives the component
    of each node. A dense network is called as ``conv(x, adj)``, with the graphs as a batch.

    Args:
        conv: a convolution, or any module with the arguments of a convolution.
        sparse: whether ``conv`` expects ``edge_index`` instead of an adjacency matrix.

    Shapes: as in :class:`GCN`.
    """

    def __init__(self, conv: nn.Module, sparse: bool) -> None:
        super().__init__()
        self.conv = conv
        self.sparse = sparse
        further = list(_forward_arguments(conv).items())[2:] if sparse else []
        required = [name for name, is_required in further if is_required]
        self.passes_weights = "edge_weight" in required
        self.passes_batch = "batch" in dict(further)
        if unknown := sorted(set(required) - {"edge_weight", "batch"}):
            raise ValueError(
                f"predictor {type(conv).__name__} requires {unknown[0]!r}; a predictor takes "
                "(x, edge_index), and edge_weight and batch if it needs them"
            )

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        B, N, _ = x.shape
        M = graphs.shape[0]
        every_x = x.repeat(M, 1, 1)  # (M B, N, D), graph by graph
        if self.sparse:
            graph, source, target = graphs.repeat_interleave(B, 0).nonzero(as_tuple=True)
            edges = torch.stack([source, target]) + graph * N
            further = {}
            if self.passes_weights:
                further["edge_weight"] = x.new_ones(edges.shape[1])
            if self.passes_batch:
                further["batch"] = torch.arange(M * B, device=x.device).repeat_interleave(N)
            y = self.conv(every_x.flatten(0, 1), edges, **further)
        else:  # dense convolutions have targets in rows
            y = self.conv(every_x, graphs.mT.repeat_interleave(B, 0)).flatten(0, 1)
        if y.shape[:1] != (M * B * N,):
            raise ValueError(
                f"predictor {type(self.conv).__name__} must return one row for each of the "
                f"{M * B * N} nodes, got the shape {tuple(y.shape)}"
            )
        return y.reshape(M, B, N, -1)


def as_predictor(module: nn.Module) -> nn.Module:
    """Return a module that accepts x and M graphs at once: the module itself or a wrapper.

    The name of the second argument of ``module.forward`` selects the kind of network. As in
    torch-geometric, ``edge_index`` means a sparse network and ``adj`` a dense network. With
    ``graphs``, the module is called directly with (x, graphs). With any other name, the module is
    treated as a sparse network if it contains a convolution of torch-geometric.
    """
    if isinstance(module, GCN | GraphConvolution):
        return module
    second = [*_forward_arguments(module), "", ""][1]
    if second == "graphs":
        return module
    if second == "adj":
        return GraphConvolution(module, sparse=False)
    geometric = sys.modules.get(
        "torch_geometric.nn"
    )  # imported if the module contains one of its layers
    is_geometric = geometric is not None and any(
        isinstance(part, geometric.MessagePassing) for part in module.modules()
    )
    if second.startswith("edge") or is_geometric:
        return GraphConvolution(module, sparse=True)
    return module


def _forward_arguments(module: nn.Module) -> dict[str, bool]:
    """Names of the arguments of ``module.forward``, and whether they are required."""
    declared = getattr(getattr(module, "signature", None), "param_dict", None)
    if declared is not None:  # torch_geometric.nn.Sequential, whose forward has *args
        return dict.fromkeys(declared, True)
    parameters = inspect.signature(module.forward).parameters.values()
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


# -- torch-geometric's Data ------------------------------------------------------------------------


def as_pair(batch: Any, num_nodes: int) -> tuple[Tensor, Tensor]:
    """x (B, N, D) and y (B, N, E) of a batch of B pairs.

    Args:
        batch: a pair (x, y), or a ``Data`` or ``Batch`` of torch-geometric with one row of x and y
            per node. Its ``edge_index`` is ignored, because the graph is learned.
        num_nodes: number of nodes of every graph (N).
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    x, y = (getattr(batch, name, None) for name in ("x", "y"))
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise ValueError(
            "a batch must be a pair (x, y), or torch-geometric's Data with x and y, "
            f"got {type(batch).__name__}{_missing(batch, x=x, y=y)}"
        )
    B = getattr(batch, "num_graphs", 1)
    starts = getattr(batch, "ptr", None)
    sizes = starts.diff() if starts is not None and can_branch_on(starts) else None
    if sizes is not None and not bool((sizes == num_nodes).all()):
        wrong = sizes[sizes != num_nodes][0].item()
        raise ValueError(f"every graph must have num_nodes {num_nodes} nodes, got one with {wrong}")
    for name, values in (("x", x), ("y", y)):
        if len(values) != B * num_nodes:
            raise ValueError(
                f"{name} must have a row for each of {B} x {num_nodes} nodes, "
                f"got the shape {tuple(values.shape)}"
            )
    return x.reshape(B, num_nodes, -1), y.reshape(B, num_nodes, -1)


def _missing(batch: Any, **values: Any) -> str:
    """Missing attributes of a ``Data``; empty for other objects."""
    absent = [name for name, value in values.items() if value is None]
    return f" without {' and '.join(absent)}" if hasattr(batch, "edge_index") else ""


def as_data(edges: Tensor, threshold: float = 0.5) -> "Data":
    """Convert edge probabilities, or a matrix of 0 and 1, to torch-geometric's ``Data``.

    ``edge_index`` (2, E) contains the edges whose entry is at least the threshold, with sources in
    the first row. ``edge_weight`` (E,) contains these entries.

    Args:
        edges: matrix (N, N) with the edge from node j to node i in row j, column i.
        threshold: smallest entry that counts as an edge, in (0, 1].

    >>> as_data(torch.tensor([[0.0, 0.9], [0.2, 0.6]])).edge_index.tolist()
    [[0, 1], [1, 1]]
    """
    from torch_geometric.data import Data

    require_within(0, 1, "(]", threshold=threshold)
    edge_index = (edges.detach() >= threshold).nonzero().t().contiguous()
    weights = edges.detach()[edge_index[0], edge_index[1]]
    return Data(edge_index=edge_index, edge_weight=weights, num_nodes=len(edges))
