"""What the tests of TreeLinear share: a layer with data, and what to compare it with."""

import math

import torch
import torch.nn.functional as F

from catnat import CatnatHead, TreeLinear
from catnat.ops import path_scores as ops


class CauchyHead(CatnatHead, name="cauchy"):
    """A head of one's own: a(s) = 1/2 + arctan(s) / pi."""

    def log_split(self, x):
        return torch.log(0.5 - torch.atan(x) / math.pi), torch.log(0.5 + torch.atan(x) / math.pi)


def layer_and_data(K, head="natural", rows=7, width=6, dtype=torch.float64, **options):
    torch.manual_seed(K)
    layer = TreeLinear(width, K, head, torch.randperm(K), dtype=dtype, **options)
    return layer, torch.randn(rows, width, dtype=dtype), torch.randint(K, (rows,))


def by_linear_and_head(layer, hidden):
    leaves = layer.head.log_probs(F.linear(hidden, layer.weight, layer.bias))
    return leaves if layer.order is None else leaves[..., layer.order]


def without_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_kernels", lambda: None)
