"""The networks have the shapes and sizes of the paper's codebases."""

import pytest
import torch
from torch import nn

from catnat import networks
from catnat.networks import Upsample, conv_decoder, conv_encoder, mlp_decoder, mlp_encoder


@pytest.mark.parametrize(
    ("encoder", "hidden"),
    [
        (conv_encoder, [(8, 1, 3, 3), (16, 8, 3, 3), (32, 16, 3, 3), (128, 288), (70, 128)]),
        (mlp_encoder, [(512, 784), (256, 512), (70, 256)]),
    ],
)
def test_encoders(encoder, hidden):
    net = encoder(70)
    assert net(torch.rand(4, 1, 28, 28)).shape == (4, 70)
    assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == hidden


@pytest.mark.parametrize(
    ("decoder", "hidden"),
    [
        (conv_decoder, [(128, 80), (288, 128), (32, 16, 3, 3), (16, 8, 3, 3), (8, 1, 3, 3)]),
        (mlp_decoder, [(256, 80), (512, 256), (784, 512)]),
    ],
)
def test_decoders(decoder, hidden):
    net = decoder(80)
    logits = net(torch.rand(4, 80))
    assert logits.shape == (4, 1, 28, 28)
    assert logits.min() < 0, "logits, not probabilities"
    assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == hidden


def test_batch_norm_stands_where_the_original_has_it():
    def kinds(net):
        return "".join({"Conv2d": "c", "Upsample": "t", "BatchNorm2d": "b", "ReLU": "r",
                        "Linear": "l"}.get(type(layer).__name__, "") for layer in net)  # fmt: skip

    assert kinds(conv_encoder(70)) == "crcbrcrlrl"
    assert kinds(conv_decoder(80)) == "lrlrtbrtbrt"


@pytest.mark.parametrize("by_fold", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_upsample_is_the_transposed_convolution(monkeypatch, by_fold, padding):
    monkeypatch.setattr(networks, "_SLOW_TRANSPOSED", by_fold)
    layer = Upsample(3, 2, padding=padding).double()
    plain = nn.ConvTranspose2d(3, 2, 3, 2, padding, output_padding=padding).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(plain(x))
    ours = torch.autograd.grad((layer(x) * weights).sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad((plain(x) * weights).sum(), [x, *plain.parameters()])
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(ours, theirs)
