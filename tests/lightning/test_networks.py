"""The networks have the shapes and sizes of the paper's codebases."""

import pytest
import torch
from torch import nn

from catnat.graphs import GCN, as_predictor
from catnat.lit_modules import networks

IMAGES, CODES = (4, 1, 28, 28), (4, 80)
KERNELS = [(8, 1, 3, 3), (16, 8, 3, 3), (32, 16, 3, 3)]


@pytest.mark.parametrize(
    ("make", "inputs", "outputs", "weights"),
    [
        (networks.conv_encoder, IMAGES, CODES, [*KERNELS, (128, 288), (80, 128)]),
        (networks.mlp_encoder, IMAGES, CODES, [(512, 784), (256, 512), (80, 256)]),
        (networks.conv_decoder, CODES, IMAGES, [(128, 80), (288, 128), *KERNELS[::-1]]),
        (networks.mlp_decoder, CODES, IMAGES, [(256, 80), (512, 256), (784, 512)]),
    ],
)
def test_networks_have_the_layers_of_the_paper(make, inputs, outputs, weights):
    net = make(80)
    assert net(torch.rand(inputs)).shape == outputs
    assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == weights


@pytest.mark.parametrize("by_fold", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_upsample_is_the_transposed_convolution(monkeypatch, by_fold, padding):
    monkeypatch.setattr(networks, "_SLOW_TRANSPOSED", by_fold)
    layer = networks.Upsample(3, 2, 3, 2, padding, output_padding=padding).double()
    plain = nn.ConvTranspose2d(3, 2, 3, 2, padding, output_padding=padding).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(plain(x))
    ours = torch.autograd.grad((layer(x) * weights).sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad((plain(x) * weights).sum(), [x, *plain.parameters()])
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(ours, theirs)


# -- graphs -------------------------------------------------------------------------------------


def graph_inputs(M=3, B=4, N=7):
    """x (B, N, 5) and asymmetric graphs (M, N, N), the first one empty."""
    graphs = (torch.rand(M, N, N, dtype=torch.float64) < 0.4).double()
    graphs[0] = 0
    return torch.randn(B, N, 5, dtype=torch.float64), graphs


def one_by_one(conv, x, graphs):
    """torch-geometric, called as its documentation says, for each graph and each input."""
    edges = [graph.nonzero().t() for graph in graphs]
    return torch.stack([torch.stack([conv(row, e) for row in x]) for e in edges])


def test_the_gcn_is_torch_geometrics():
    from torch_geometric.nn import GCNConv

    x, graphs = graph_inputs()
    ours = GCN(5, 2).double()
    theirs = GCNConv(5, 2, normalize=False, add_self_loops=False, bias=False).double()
    theirs.lin.weight.data = ours.weight.data.t().clone()
    y = ours(x, graphs)
    assert y.shape == (3, 4, 7, 2)
    assert torch.allclose(y, one_by_one(theirs, x, graphs), atol=1e-12)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GraphConv"])
def test_any_convolution_of_torch_geometric_sparse_or_dense(name):
    import torch_geometric.nn

    x, graphs = graph_inputs()
    conv = getattr(torch_geometric.nn, name)(5, 2).double()
    expected = one_by_one(conv, x, graphs)
    assert torch.allclose(as_predictor(conv)(x, graphs), expected, atol=1e-12)
    if name == "GraphConv":
        dense = torch_geometric.nn.DenseGraphConv(5, 2).double()
        dense.load_state_dict(conv.state_dict())
        assert torch.allclose(as_predictor(dense)(x, graphs), expected, atol=1e-12)
