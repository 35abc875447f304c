"""Encoders that end in scores and decoders that begin at samples: of 28 x 28 images, of graphs."""

from __future__ import annotations

import platform
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SHAPE = (1, 28, 28)
_SLOW_TRANSPOSED = platform.machine() in {"aarch64", "arm64"}


def conv_encoder(num_outputs: int) -> nn.Sequential:
    """Three strided convolutions and two linear layers.

    Shapes: images (B, 1, 28, 28), result (B, num_outputs).

    Example:
        >>> conv_encoder(70)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 70])
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),  # 14 x 14
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),  # 7 x 7
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),  # 3 x 3
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 128),
        nn.ReLU(),
        nn.Linear(128, num_outputs),
    )


def conv_decoder(num_inputs: int) -> nn.Sequential:
    """Mirror of :func:`conv_encoder`: two linear layers and three transposed convolutions.

    Shapes: latents (B, num_inputs), result the logits of the pixels (B, 1, 28, 28).

    Example:
        >>> conv_decoder(80)(torch.zeros(2, 80)).shape
        torch.Size([2, 1, 28, 28])
    """
    return nn.Sequential(
        nn.Linear(num_inputs, 128),
        nn.ReLU(),
        nn.Linear(128, 288),
        nn.ReLU(),
        nn.Unflatten(1, (32, 3, 3)),
        Upsample(32, 16),  # 7 x 7
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Upsample(16, 8, padding=1),  # 14 x 14
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Upsample(8, 1, padding=1),  # 28 x 28
    )


def mlp_encoder(num_outputs: int) -> nn.Sequential:
    """784 - 512 - 256 - num_outputs with ReLU.

    Shapes: images (B, 1, 28, 28), result (B, num_outputs).
    """
    return nn.Sequential(nn.Flatten(), *_mlp(784, 512, 256, num_outputs))


def mlp_decoder(num_inputs: int) -> nn.Sequential:
    """Mirror of :func:`mlp_encoder`: num_inputs - 256 - 512 - 784 with ReLU.

    Shapes: latents (B, num_inputs), result the logits of the pixels (B, 1, 28, 28).
    """
    return nn.Sequential(*_mlp(num_inputs, 256, 512, 784), nn.Unflatten(1, IMAGE_SHAPE))


def _mlp(*sizes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


class Upsample(nn.ConvTranspose2d):
    """Transposed convolution with kernel 3 and stride 2, (B, C, n, n) -> (B, C', m, m).

    m = 2n + 1 without padding, 2n with it. On ARM processors oneDNN takes up to five times as
    long for these as one matrix product and a fold.
    """

    def __init__(self, in_channels: int, out_channels: int, padding: int = 0) -> None:
        super().__init__(
            in_channels, out_channels, 3, stride=2, padding=padding, output_padding=padding
        )

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of x."""
        if not (_SLOW_TRANSPOSED and x.device.type == "cpu") or output_size is not None:
            return super().forward(x, output_size)
        assert self.bias is not None
        padding = int(self.padding[0])
        size = (2 * x.shape[-2] + 1 - padding, 2 * x.shape[-1] + 1 - padding)
        columns = self.weight.flatten(1).t() @ x.flatten(2)  # (B, 9 C', n n)
        image = F.fold(columns, size, kernel_size=3, padding=padding, stride=2)
        return image + self.bias[:, None, None]


class GCN(nn.Module):
    r"""One linear graph convolution without normalization, y = Aᵀ x W, on M graphs at once.

    A_ji = 1 is an edge from j to i, as in torch-geometric, whose ``GCNConv(normalize=False,
    add_self_loops=False, bias=False)`` this equals. The graphs are multiplied as dense matrices
    up to ``sparse_from`` nodes; from there on torch-geometric passes messages along the edges.

    Args:
        in_features: of a node's x.
        out_features: of a node's y.
        sparse_from: number of nodes from which on edges are listed.

    Shapes: x (B, N, in_features), graphs (M, N, N), result (M, B, N, out_features).

    References:
        Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, 2017.

    Example:
        >>> GCN(4, 2)(torch.zeros(5, 24, 4), torch.ones(3, 24, 24)).shape
        torch.Size([3, 5, 24, 2])
    """

    def __init__(self, in_features: int, out_features: int, sparse_from: int = 1024) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.xavier_uniform_(self.weight)
        self.sparse_from = sparse_from

    def messages(self, x: Tensor) -> Tensor:
        """What each node sends along its edges, x W; y_i is the sum of what arrives at i."""
        return x @ self.weight

    def is_dense(self, num_nodes: int) -> bool:
        """Whether graphs of this size are multiplied as dense matrices."""
        return num_nodes < self.sparse_from

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        messages = self.messages(x)
        if self.is_dense(graphs.shape[-1]):
            return _dense_sums(messages, graphs)
        return _sparse_sums(messages, graphs)


def _dense_sums(messages: Tensor, graphs: Tensor) -> Tensor:
    """One matrix product for all pairs of an input and a graph."""
    (B, N, D), M = messages.shape, graphs.shape[0]
    # Both contiguous: on ARM processors a transposed operand takes a path a hundred times slower.
    rows = graphs.mT.reshape(M * N, N)
    columns = messages.transpose(0, 1).reshape(N, B * D)
    return (rows @ columns).reshape(M, N, B, D).transpose(1, 2)


def _sparse_sums(messages: Tensor, graphs: Tensor) -> Tensor:
    """From the N nodes of the inputs to the M N nodes of the graphs, along all edges."""
    from torch_geometric.nn import SimpleConv  # slow to import

    (B, N, D), M = messages.shape, graphs.shape[0]
    graph, source, target = graphs.nonzero(as_tuple=True)
    edges = torch.stack([source, graph * N + target])
    # The targets send nothing; they are there to say how many they are.
    sums: Tensor = SimpleConv(aggr="sum")((messages, messages.new_empty(B, M * N, 0)), edges)
    return sums.reshape(B, M, N, D).transpose(0, 1)


class GraphConvolution(nn.Module):
    """Any convolution of torch-geometric, on M graphs at once, in place of :class:`GCN`.

    Sparse ones, called as ``conv(x, edge_index)``, get the B M graphs as one with B M parts;
    dense ones, called as ``conv(x, adjacency)``, get them as a batch.

    Args:
        conv: the convolution.

    Shapes: as in :class:`GCN`.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        from torch_geometric.nn import MessagePassing

        self.conv = conv
        self.sparse = isinstance(conv, MessagePassing)

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of all nodes in every graph."""
        (B, N, _), M = x.shape, graphs.shape[0]
        every_x = x.repeat(M, 1, 1)  # (M B, N, D), graph by graph
        if self.sparse:
            graph, source, target = graphs.repeat_interleave(B, 0).nonzero(as_tuple=True)
            edges = torch.stack([source, target]) + graph * N
            y: Tensor = self.conv(every_x.flatten(0, 1), edges)
        else:  # there the row is the target
            y = self.conv(every_x, graphs.mT.repeat_interleave(B, 0))
        return y.reshape(M, B, N, -1)


def as_predictor(module: nn.Module) -> nn.Module:
    """The module itself, made to take M graphs at once if it is one of torch-geometric's."""
    known: Any = sys.modules.get("torch_geometric.nn")  # if it is not there, nothing is from it
    dense = type(module).__module__.startswith("torch_geometric.nn.dense.")
    if dense or (known is not None and isinstance(module, known.MessagePassing)):
        return GraphConvolution(module)
    return module
