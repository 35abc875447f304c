"""M VAEs of one shape as one batched model: every layer works on all models at once.

Parameters have the names of :class:`~catnat.lit_modules.DiscreteVAE` and one more dimension in
front, the model. They are views of one (M, P) tensor, so that clipping and Adam are a few kernels.
Activations are (M, B, n, n, C). A convolution is a gather of 3 x 3 patches and a batched matrix
product, a transposed convolution a batched matrix product and the adjoint of that gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from patches import Patches, Spread
from torch import Tensor

from catnat import CategoricalHead
from catnat.estimators import gumbel_like
from catnat.lit_modules import DiscreteVAE
from catnat.losses import kl_to_uniform

BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0
_ALIGNED = 4  # numbers
_PARTS = 10  # of the rows of a long sum: one model's sum alone would keep one multiprocessor busy


class ManyVAEs:
    """M models, trained with Adam by the straight-through Gumbel estimator.

    Args:
        models: of equal N, K and S; models with equal heads stand next to each other. Their
            parameters are copied.
        learning_rates: one for each model.
    """

    def __init__(self, models: Sequence[DiscreteVAE], learning_rates: Sequence[float]) -> None:
        first = models[0]
        self.latents, self.categories = first.num_latents, first.head.num_categories
        self.scores = first.head.num_scores
        self.heads = _runs_of_equal_heads([each.head for each in models])
        named = [dict(each.named_parameters()) for each in models]
        stacked = {name: torch.stack([one[name].detach() for one in named]) for name in named[0]}
        self.flat = flattened(stacked.values())
        views = unflattened(self.flat, [each.shape for each in stacked.values()])
        self.parameters = {
            name: each.requires_grad_() for name, each in zip(stacked, views, strict=True)
        }
        buffers = [dict(each.named_buffers()) for each in models]
        self.statistics = {
            name: torch.stack([one[name] for one in buffers])
            for name in buffers[0]
            if name.endswith(("running_mean", "running_var"))
        }
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.rates = self.flat.new_tensor(learning_rates)[:, None]
        self.temperature = self.flat.new_ones(())
        self.steps = self.flat.new_zeros(())

    def noise(self, batch: int) -> Tensor:
        """Gumbel noise of a step, (M, B, N, K)."""
        shape = (len(self.flat), batch, self.latents, self.categories)
        return gumbel_like(self.flat.new_empty(shape))

    def step(self, images: Tensor, noise: Tensor) -> Tensor:
        """One step of every model.

        Args:
            images: each model's own batch, (M, B, 28, 28).
            noise: see :meth:`noise`.

        Returns:
            The losses, (M,).
        """
        losses, statistics = self.losses(images, noise)
        grads = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        with torch.no_grad():
            for name, value in statistics.items():
                self.statistics[name].lerp_(value, 0.1)
            self.update(flattened(grads))
        return losses.detach()

    def update(self, grad: Tensor) -> None:
        """Clip the gradient of every model, (M, P), and take a step of Adam."""
        adam(grad, self.flat, self.mean, self.square, self.steps, self.rates)

    def losses(self, images: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative ELBO of every model, (M,), and the statistics of its batch norms."""
        w, M, B = self.parameters, images.shape[0], images.shape[1]
        seen: dict[str, Tensor] = {}
        x = conv(images[..., None], w, "encoder.0", 1).relu()
        x = norm(conv(x, w, "encoder.2", 1), w, "encoder.3", seen).relu()
        x = conv(x, w, "encoder.5", 0).relu()
        x = linear(x.movedim(-1, 2).reshape(M, B, -1), w, "encoder.8").relu()
        scores = linear(x, w, "encoder.10").reshape(M, B, self.latents, self.scores)
        log_probs = self.log_probs(scores)
        z = one_hot_gumbel(log_probs, noise, self.temperature)
        x = linear(z.reshape(M, B, -1), w, "decoder.0").relu()
        x = linear(x, w, "decoder.2").relu()
        x = x.reshape(M, B, 32, 3, 3).movedim(2, -1)
        x = norm(upsample(x, w, "decoder.5", 0), w, "decoder.6", seen).relu()
        x = norm(upsample(x, w, "decoder.8", 1), w, "decoder.9", seen).relu()
        logits = upsample(x, w, "decoder.11", 1)[..., 0]
        nll = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum((2, 3))
        kl = kl_to_uniform(log_probs).sum(-1)
        return (nll + kl).mean(1), seen

    def log_probs(self, scores: Tensor) -> Tensor:
        """Log-probabilities, each model's by its own head, (M, B, N, S) -> (M, B, N, K)."""
        parts = scores.split([count for _, count in self.heads])
        out = [head.log_probs(part) for (head, _), part in zip(self.heads, parts, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out)

    def state_of(self, model: int) -> dict[str, Tensor]:
        """Parameters and statistics of one model, for ``load_state_dict(..., strict=False)``."""
        return {
            name: each[model].detach().clone()
            for name, each in (self.parameters | self.statistics).items()
        }


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


def adam(
    grad: Tensor, flat: Tensor, mean: Tensor, square: Tensor, steps: Tensor, rates: Tensor
) -> None:
    """Clip rows of the gradient to norm CLIP and take a step of Adam: (M, P) each, rates (M, 1)."""
    steps += 1
    size = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    grad = grad * (CLIP / (size + 1e-6)).clamp_max(1.0)
    mean.lerp_(grad, 1 - BETAS[0])
    square.lerp_(grad * grad, 1 - BETAS[1])
    scale = (1 - BETAS[1] ** steps).rsqrt()
    flat -= rates / (1 - BETAS[0] ** steps) * mean / (square.sqrt() * scale + EPS)


def _runs_of_equal_heads(heads: list[CategoricalHead]) -> list[tuple[CategoricalHead, int]]:
    runs: list[tuple[CategoricalHead, int]] = []
    for head in heads:
        if runs and repr(runs[-1][0]) == repr(head):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return runs


# -- layers: w has the parameters of all models by name --------------------------------------------


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """(M, B, D) -> (M, B, D')."""
    return torch.baddbmm(w[f"{name}.bias"][:, None], x, w[f"{name}.weight"].mT)


def conv(x: Tensor, w: dict[str, Tensor], name: str, padding: int) -> Tensor:
    """A convolution with kernel 3 and stride 2, (M, B, n, n, C) -> (M, B, m, m, C')."""
    weight = w[f"{name}.weight"]  # (M, C', C, 3, 3)
    columns = Patches.apply(x, padding)  # (M, B, m, m, 9 C)
    matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # (M, 9 C, C')
    out = _Product.apply(columns.flatten(1, 3), matrix).view(*columns.shape[:-1], -1)
    return out + w[f"{name}.bias"][:, None, None, None]


def upsample(x: Tensor, w: dict[str, Tensor], name: str, padding: int) -> Tensor:
    """A transposed convolution with kernel 3 and stride 2, (M, B, n, n, C) -> (M, B, m, m, C')."""
    weight = w[f"{name}.weight"]  # (M, C, C', 3, 3)
    matrix = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (M, C, 9 C')
    columns = _Product.apply(x.flatten(1, 3), matrix).view(*x.shape[:-1], -1)
    return Spread.apply(columns, padding) + w[f"{name}.bias"][:, None, None, None]


def norm(x: Tensor, w: dict[str, Tensor], name: str, seen: dict[str, Tensor]) -> Tensor:
    """Batch norm of each model's channels, (M, B, n, n, C) -> same; keeps what it saw."""
    variance, mean = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
    count = x[0, ..., 0].numel()
    seen[f"{name}.running_mean"] = mean.detach().flatten(1)
    seen[f"{name}.running_var"] = variance.detach().flatten(1) * (count / (count - 1))
    scale = w[f"{name}.weight"][:, None, None, None] * torch.rsqrt(variance + 1e-5)
    return torch.addcmul(w[f"{name}.bias"][:, None, None, None] - mean * scale, x, scale)


def one_hot_gumbel(log_probs: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    """As :func:`catnat.estimators.straight_through_gumbel`, with given noise."""
    scores = log_probs + noise
    y = (scores / temperature).softmax(-1)
    one_hot = torch.zeros_like(y).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return one_hot + (y - y.detach())


class _Product(torch.autograd.Function):
    """Batched product (M, R, C) @ (M, C, D) of many rows; the sum over rows goes by parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return torch.bmm(x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, matrix = ctx.saved_tensors
        of_x = torch.bmm(grad, matrix.mT) if ctx.needs_input_grad[0] else None
        M, R, _ = x.shape
        parts = _PARTS if R % _PARTS == 0 else 1
        x, grad = (each.reshape(M * parts, R // parts, -1) for each in (x, grad))
        return of_x, torch.bmm(x.mT, grad).view(M, parts, *matrix.shape[1:]).sum(1)
