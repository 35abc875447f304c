"""Heads between softmax and catnat, each of which changes one thing: why does catnat help?

Import this module, and ``--head`` takes names such as ``sigmoid-rotated-3`` or ``softmax-paths``:

- ``B-rotated-A``: head B of scores that an orthogonal matrix exp(A X) has rotated, X skew. The set
  of distributions and the eigenvalues of the Fisher matrix stay, its zeros go.
- ``softmax-haar``: softmax of scores in the orthonormal Haar basis, the nodes of a tree.
- ``softmax-paths``: softmax of sums of +-s/2 along the paths of a tree: to first order at 0 the
  sigmoid tree, with one normalization for all.
- ``softmax-scaled-C``, ``sigmoid-scaled-C``: the head at C times the scores.
- ``sigmoid-flat``: the sigmoid tree at scores times 2 / sqrt(leaves under the node): to first order
  at 0 it is softmax-haar, as sigmoid is softmax-paths.
- ``softmax-steep``, ``sigmoid-steep``: softmax-paths and sigmoid at scores times
  sqrt(leaves under the node) / 2: a step moves coarse choices even further than fine ones.
- ``sigmoid-coupled-C``: the sigmoid tree whose log-odds at each node are 1 - C times its score plus
  C times the log-odds of softmax-paths there, which depend on all scores below: the sigmoid tree at
  C = 0, softmax-paths at C = 1. ``sigmoid-opposed-C``: the same with -C.
- ``softmax-paths-gated``: softmax-paths; the gradient of each node is multiplied by P(node).
- ``B-ungated``, ``B-ungated-D``: tree head B; the gradient of each node is divided by P(node) + D,
  0.01 without a number. Tree, distribution and Fisher matrix stay as they are.
- ``softmax-ungated``: softmax; the gradient of score k is divided by p_k + 0.01.
- ``B-levels``: tree head B; the gradient of a node at depth h is multiplied by 2^h, which is
  1 / P(node) of the uniform distribution.
- ``softmax-paths-tree-gradient``: the values of softmax-paths; its scores get the gradient that the
  sigmoid tree has at the same distribution.
- ``sigmoid-paths-gradient``: the reverse.
- ``B-chain``: stick breaking, K - 1 choices in a row. The Fisher matrix is diagonal, too.
- ``B-shuffled``: tree head B with its leaves in a random order.
- ``B-natural-gradient-D``: head B; the gradient g in the scores becomes (G + D I)^-1 g.
"""

from __future__ import annotations

import random
import types
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from catnat import CategoricalHead, make_head
from catnat.heads.activations import NaturalActivation, SigmoidActivation


def rotation(size: int, angle: float) -> Tensor:
    """A fixed orthogonal matrix: the identity at angle 0, dense from about 1 on."""
    rng = torch.Generator().manual_seed(0)
    skew = torch.randn(size, size, generator=rng, dtype=torch.float64)
    skew = (skew - skew.T) / (2 * size) ** 0.5
    return torch.matrix_exp(angle * skew).float()


def paths(num_categories: int) -> Tensor:
    """(K-1, K): -1/2 and +1/2 for leaves left and right of a node, 0 elsewhere; K = 2^H."""
    if num_categories & (num_categories - 1):
        raise ValueError(f"num_categories must be a power of 2 here, got {num_categories}")
    rows = []
    width = num_categories
    while width > 1:
        for start in range(0, num_categories, width):
            row = torch.zeros(num_categories)
            row[start : start + width // 2] = -0.5
            row[start + width // 2 : start + width] = 0.5
            rows.append(row)
        width //= 2
    return torch.stack(rows)


def haar(num_categories: int) -> Tensor:
    """(K, K), orthonormal: a constant row, then a row for each node of a tree."""
    nodes = paths(num_categories)
    constant = torch.full((1, num_categories), num_categories**-0.5)
    return torch.cat([constant, nodes / nodes.norm(dim=1, keepdim=True)])


def scaled_gradient(scores: Tensor, factor: Tensor) -> Tensor:
    """The scores themselves; their gradient is multiplied by the factor."""
    moving = factor.detach() * scores
    return moving + (scores - moving).detach()


class Wrapped(CategoricalHead):
    """A head around a base head; subclasses override what differs."""

    base: ClassVar[str]

    def __init__(self, num_categories: int) -> None:
        super().__init__(num_categories)
        self.inner = self.make_inner()
        self.num_scores = self.inner.num_scores

    def make_inner(self) -> CategoricalHead:
        """The base head."""
        return make_head(self.base, self.num_categories)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Those of the base head."""
        return self.inner.log_probs(scores)

    def inverse(self, probs: Tensor) -> Tensor:
        """That of the base head."""
        return self.inner.inverse(probs)

    def fisher(self, scores: Tensor) -> Tensor:
        """That of the base head."""
        return self.inner.fisher(scores)

    def saturated(self, scores: Tensor) -> Tensor:
        """Those of the base head."""
        return self.inner.saturated(scores)


class Linear(Wrapped):
    """The base head at ``scores @ Q``."""

    angle: ClassVar[float] = 0.0
    Q: Tensor
    back: Tensor

    def __init__(self, num_categories: int) -> None:
        super().__init__(num_categories)
        self.register_buffer("Q", self.make_matrix(), persistent=False)
        self.register_buffer("back", torch.linalg.pinv(self.Q), persistent=False)
        self.num_scores = len(self.Q)

    def make_matrix(self) -> Tensor:
        """Q, scores of this head by scores of the base head."""
        return rotation(self.inner.num_scores, self.angle)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Those of the base head at scores @ Q."""
        return self.inner.log_probs(scores @ self.Q)

    def inverse(self, probs: Tensor) -> Tensor:
        """By the pseudo-inverse of Q."""
        return self.inner.inverse(probs) @ self.back

    def fisher(self, scores: Tensor) -> Tensor:
        """Q G Q^T."""
        return self.Q @ self.inner.fisher(scores @ self.Q) @ self.Q.mT

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores of the base head."""
        return self.inner.saturated(scores @ self.Q)[..., : self.num_scores]


class Haar(Linear, name="softmax-haar"):
    """Softmax in the Haar basis."""

    base = "softmax"

    def make_matrix(self) -> Tensor:
        """The basis, (K, K)."""
        return haar(self.num_categories)


class Paths(Linear, name="softmax-paths"):
    """Softmax of sums along paths."""

    base = "softmax"

    def make_matrix(self) -> Tensor:
        """The paths, (K-1, K)."""
        return paths(self.num_categories)


class Scaled(Linear):
    """The base head at a multiple of each score."""

    power: ClassVar[float]  # of sqrt(leaves under the node) / 2
    factor: ClassVar[float] = 1.0

    def make_matrix(self) -> Tensor:
        """A diagonal matrix, or the paths with scaled rows."""
        if self.power == 0:
            return self.factor * torch.eye(self.inner.num_scores)
        nodes = paths(self.num_categories)
        scales = nodes.norm(dim=1) ** self.power
        return scales[:, None] * nodes if self.base == "softmax" else scales.diag()


class Coupled(Wrapped):
    """The sigmoid tree with log-odds between those of the tree and those of softmax-paths."""

    coupling: ClassVar[float]
    base = "sigmoid"
    paths: Tensor

    def __init__(self, num_categories: int) -> None:
        super().__init__(num_categories)
        self.register_buffer("paths", paths(num_categories), persistent=False)

    def log_odds(self, scores: Tensor) -> Tensor:
        """Of right against left at every node."""
        leaves = scores @ self.paths
        log_odds = []
        nodes = 1
        while nodes < self.num_categories:
            left, right = leaves.unflatten(-1, (nodes, 2, -1)).logsumexp(-1).unbind(-1)
            log_odds.append(right - left)
            nodes *= 2
        return torch.lerp(scores, torch.cat(log_odds, -1), self.coupling)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Those of the tree with these log-odds."""
        return self.inner.log_probs(self.log_odds(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """Not needed by a VAE."""
        raise NotImplementedError("a coupled tree has no inverse here")

    def fisher(self, scores: Tensor) -> Tensor:
        """J^T G J, J the Jacobian of the log-odds."""
        jacobian = vmap(jacrev(self.log_odds))(scores.reshape(-1, self.num_scores))
        jacobian = jacobian.reshape(*scores.shape, self.num_scores)
        return jacobian.mT @ self.inner.fisher(self.log_odds(scores)) @ jacobian

    def saturated(self, scores: Tensor) -> Tensor:
        """No score, as in the sigmoid tree."""
        return self.inner.saturated(scores)


class GatedPaths(Paths, name="softmax-paths-gated"):
    """Softmax of sums along paths; P(node) multiplies the gradient of a node."""

    def log_probs(self, scores: Tensor) -> Tensor:
        """The same values; another gradient."""
        reached = super().log_probs(scores).exp() @ (2 * self.Q.abs()).mT  # P(node)
        return super().log_probs(scaled_gradient(scores, reached))


class Ungated(Wrapped):
    """A head; the gradient of a score is divided by P(node), or p_k of softmax, plus a damping."""

    damping: ClassVar[float] = 0.01

    def log_probs(self, scores: Tensor) -> Tensor:
        """The same values; another gradient."""
        reached = scores.softmax(-1) if self.base == "softmax" else self.inner.node_probs(scores)
        return self.inner.log_probs(scaled_gradient(scores, 1 / (reached + self.damping)))


class Levels(Wrapped):
    """A tree head; the gradient of a node at depth h is multiplied by 2^h."""

    def log_probs(self, scores: Tensor) -> Tensor:
        """The same values; another gradient."""
        nodes = torch.arange(1, self.num_categories, device=scores.device)
        return self.inner.log_probs(scaled_gradient(scores, 2.0 ** nodes.log2().floor()))


class Swapped(Wrapped):
    """The values of one head, with the gradient of another one at the same distribution."""

    gradient_of: ClassVar[str]

    def __init__(self, num_categories: int) -> None:
        super().__init__(num_categories)
        self.other = make_head(self.gradient_of, num_categories)

    def log_probs(self, scores: Tensor) -> Tensor:
        """The same values; another gradient."""
        values = self.inner.log_probs(scores)
        at = self.other.inverse(values.detach().exp())
        moving = self.other.log_probs(at + (scores - scores.detach()))
        return moving + (values - moving).detach()


class Shuffled(Wrapped):
    """A tree head with its leaves in a random order."""

    def make_inner(self) -> CategoricalHead:
        """The base head with a fixed random order."""
        order = list(range(self.num_categories))
        random.Random(7).shuffle(order)
        return make_head(self.base, self.num_categories, order=order)


class NaturalGradient(Wrapped):
    """A head whose gradient in the scores is (G + damping I)^-1 g."""

    damping: ClassVar[float]

    def log_probs(self, scores: Tensor) -> Tensor:
        """The same values; another gradient."""
        moving = self._solve(scores.detach(), scores)
        return self.inner.log_probs(moving + (scores - moving).detach())

    def _solve(self, at: Tensor, x: Tensor) -> Tensor:
        """(G + damping I)^-1 x with G at given scores: a symmetric matrix, in O(S)."""
        if self.base != "softmax":
            return x / (self.inner.fisher_diagonal(at) + self.damping)
        p = at.softmax(-1)  # G = diag(p) - p p^T, by the formula of Sherman and Morrison
        u = x / (p + self.damping)
        v = p / (p + self.damping)
        correction = (p * u).sum(-1, keepdim=True) / (self.damping * v.sum(-1, keepdim=True))
        return u + v * correction


class Chain(CategoricalHead):
    """Stick breaking: category k is taken with probability a(s_k) if none before it was.

    Zero scores give the uniform distribution.
    """

    base: ClassVar[str]
    constants: Tensor

    def __init__(self, num_categories: int) -> None:
        super().__init__(num_categories)
        self.num_scores = num_categories - 1
        self.activation = SigmoidActivation() if self.base == "sigmoid" else NaturalActivation()
        share = 1 / torch.arange(num_categories, 1, -1, dtype=torch.float64)
        center = -self.activation.inverse(1 - share, share)
        constants = self.activation.node_constants(center, torch.float32)
        self.register_buffer("constants", constants, persistent=False)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Sums along the chain."""
        no, yes = self.activation.log_activation(scores, self.constants)
        end = torch.zeros_like(no[..., :1])
        return torch.cat([end, no.cumsum(-1)], -1) + torch.cat([yes, end], -1)

    def inverse(self, probs: Tensor) -> Tensor:
        """Not needed by a VAE."""
        raise NotImplementedError("a chain has no inverse here")

    def fisher(self, scores: Tensor) -> Tensor:
        """P(node) times the information of a node, on the diagonal."""
        no, _ = self.activation.log_activation(scores, self.constants)
        reached = torch.cat([torch.zeros_like(no[..., :1]), no.cumsum(-1)[..., :-1]], -1).exp()
        return torch.diag_embed(reached * self.activation.information(scores, self.constants))

    def saturated(self, scores: Tensor) -> Tensor:
        """Beyond the edges of natural."""
        if isinstance(self.activation, NaturalActivation):
            return self.activation.distance(scores, self.constants)[0] <= 0
        return torch.zeros_like(scores, dtype=torch.bool)


def define(name: str, kind: type[CategoricalHead], **attributes: Any) -> None:
    """Register a variant under its name."""
    types.new_class("Variant", (kind,), {"name": name}, lambda body: body.update(attributes))


for _base in ("softmax", "sigmoid", "natural"):
    for _angle in (0.3, 1.0, 3.0):
        define(f"{_base}-rotated-{_angle:g}", Linear, base=_base, angle=_angle)
    for _damping in (0.1, 0.01):
        _name = f"{_base}-natural-gradient-{_damping:g}"
        define(_name, NaturalGradient, base=_base, damping=_damping)
for _base in ("sigmoid", "natural"):
    for _kind in (Ungated, Shuffled, Chain, Levels):
        define(f"{_base}-{_kind.__name__.lower()}", _kind, base=_base)
    for _damping in (0.4, 0.04):
        define(f"{_base}-ungated-{_damping:g}", Ungated, base=_base, damping=_damping)
define("softmax-ungated", Ungated, base="softmax")
for _name in ("softmax-scaled-2", "softmax-scaled-4", "sigmoid-scaled-2"):
    define(_name, Scaled, base=_name[:7], power=0, factor=float(_name[-1]))
define("sigmoid-flat", Scaled, base="sigmoid", power=-1)
define("sigmoid-steep", Scaled, base="sigmoid", power=1)
define("softmax-steep", Scaled, base="softmax", power=1)
define("softmax-paths-tree-gradient", Swapped, base="softmax-paths", gradient_of="sigmoid")
define("sigmoid-paths-gradient", Swapped, base="sigmoid", gradient_of="softmax-paths")
for _coupling in (0.0, 0.25, 0.5, 1.0, 2.0):
    define(f"sigmoid-coupled-{_coupling:g}", Coupled, coupling=_coupling)
for _coupling in (0.5, 1.0):
    define(f"sigmoid-opposed-{_coupling:g}", Coupled, coupling=-_coupling)
