"""What the tests of TreeLinear share: a layer with data, and what to compare it with."""

import torch
import torch.nn.functional as F

from catnat import TreeLinear


def layer_and_data(K, head="natural", rows=7, width=6, dtype=torch.float64, **options):
    torch.manual_seed(K)
    layer = TreeLinear(width, K, head, torch.randperm(K), dtype=dtype, **options)
    return layer, torch.randn(rows, width, dtype=dtype), torch.randint(K, (rows,))


def by_linear_and_head(layer, hidden):
    places = layer.head.log_probs(F.linear(hidden, layer.weight, layer.bias))
    if layer.shortlist is not None:
        block = layer.shortlist(hidden).log_softmax(-1)
        places = torch.cat((block[..., :-1], places + block[..., -1:]), -1)
    return places[..., layer.order]
