"""Fisher information: in score space, pulled back to network parameters, and its diagnostics.

Three different things, never to be confused:

- *exact*: the expectation over categories taken in closed form, from the head;
- *sampled*: the same expectation estimated from categories drawn from the head's own distribution.
  Unbiased, but with few samples it shows off-diagonal mass that is only noise;
- averaging either over a batch of inputs is the *empirical* expectation over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp, vmap

from catnat.heads import CategoricalHead

Parameters = dict[str, Tensor]
ScoreFunction = Callable[[Parameters], Tensor]


def score_fisher(
    head: CategoricalHead,
    scores: Tensor,
    kind: str = "exact",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fisher matrix in score space, (*, S) -> (*, S, S).

    Args:
        head: the head that turns the scores into a distribution.
        scores: (*, S).
        kind: ``"exact"`` or ``"sampled"``.
        num_samples: M, categories drawn per row where sampled.
        generator: source of the draws, so that observing need not disturb the global one.

    >>> from catnat import make_head
    >>> score_fisher(make_head("softmax", 2), torch.zeros(2))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    if kind == "exact":
        return head.fisher(scores)
    if kind != "sampled":
        raise ValueError(f"unknown kind {kind!r}; choose from exact, sampled")
    gradients = sampled_scores(head, scores, num_samples, generator)  # (M, *, S)
    return torch.einsum("m...i,m...j->...ij", gradients, gradients) / num_samples


def sampled_scores(
    head: CategoricalHead,
    scores: Tensor,
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """grad_s log p(c) for M categories c drawn from the head at each row, (*, S) -> (M, *, S)."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    with torch.inference_mode(False), torch.enable_grad():
        leaf = scores.detach().expand(num_samples, *scores.shape).clone().requires_grad_()
        log_probs = head.log_probs(leaf)
        flat = log_probs.detach().exp().flatten(0, -2)
        drawn = torch.multinomial(flat, 1, generator=generator).view(*log_probs.shape[:-1], 1)
        # Rows are independent, so one backward pass gives every row's own gradient.
        (gradients,) = torch.autograd.grad(log_probs.gather(-1, drawn).sum(), leaf)
    return gradients.to(log_probs.dtype)


def pullback_fisher(jacobian: Tensor, fisher: Tensor) -> Tensor:
    """J^T G J, the Fisher matrix in the parameters, from J (*, S, P) and G (*, S, S)."""
    with torch.autocast(fisher.device.type, enabled=False):
        return jacobian.transpose(-1, -2) @ fisher @ jacobian


def module_scores(module: torch.nn.Module, *inputs: Any) -> tuple[ScoreFunction, Parameters]:
    """A network as a function of its trainable parameters, for the two functions below.

    In evaluation mode, whatever mode the network is in: the function is evaluated more than once
    and must give the same scores each time, which dropout would not.

    >>> function, parameters = module_scores(torch.nn.Linear(2, 3), torch.ones(5, 2))
    >>> function(parameters).shape
    torch.Size([5, 3])
    """
    parameters = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    def function(values: Parameters) -> Tensor:
        modes = [(m, m.training) for m in module.modules()]
        module.eval()
        try:
            scores: Tensor = functional_call(module, values, inputs)
        finally:
            for m, training in modes:
                m.training = training
        return scores

    return function, parameters


def fisher_vector_product(
    head: CategoricalHead,
    function: ScoreFunction,
    parameters: Mapping[str, Tensor],
    vector: Mapping[str, Tensor],
) -> Parameters:
    """(1/B) sum_b J_b^T G_b J_b v over B rows of scores, without forming J.

    Args:
        head: the head behind the scores.
        function: parameters -> scores (*, S), such as :func:`module_scores` gives; deterministic.
        parameters: where to evaluate, by name.
        vector: v, by name, in the shapes of the parameters.
    """
    parameters = dict(parameters)
    scores, direction = jvp(function, (parameters,), (dict(vector),))[:2]
    pull = vjp(function, parameters)[1]
    rows = scores.numel() // scores.shape[-1]
    (product,) = pull(_times_fisher(head, scores, direction) / rows)
    return dict(product)


def fisher_trace(
    head: CategoricalHead,
    function: ScoreFunction,
    parameters: Mapping[str, Tensor],
    chunk_size: int = 64,
) -> Tensor:
    """tr (1/B) sum_b J_b^T G_b J_b, exactly, holding ``chunk_size`` gradients at a time.

    Arguments as in :func:`fisher_vector_product`.
    """
    parameters = dict(parameters)
    scores, pull = vjp(function, parameters)[:2]
    flat = scores.reshape(-1, scores.shape[-1])
    roots = _fisher_root(head, flat)  # (B, S, R) with G_b = root root^T
    rows: int = flat.shape[0]

    def squared_norm(row: Tensor, root: Tensor) -> Tensor:
        cotangent = torch.zeros_like(flat).index_add(0, row[None], root[None])
        (gradient,) = pull(cotangent.view_as(scores))
        return torch.stack([g.square().sum() for g in gradient.values()]).sum()

    row = torch.arange(rows, device=flat.device).repeat_interleave(roots.shape[-1])
    columns = roots.transpose(-1, -2).reshape(-1, flat.shape[-1])
    norms: Tensor = vmap(squared_norm, chunk_size=chunk_size)(row, columns)
    return norms.sum() / rows


def off_diagonal_mass(fisher: Tensor, norm: str = "l1") -> Tensor:
    """Share of a matrix that lies off its diagonal, (*, S, S) -> (*), between 0 and 1.

    ``l1``: sum_{i!=j} |G_ij| / sum_ij |G_ij|. For softmax this is 1/2 whatever the scores, because
    the rows of its G sum to zero; so look at ``fro`` too, the same ratio of Frobenius norms.
    A zero matrix has mass 0, and so has a 1 x 1 one.

    >>> off_diagonal_mass(torch.tensor([[0.25, -0.25], [-0.25, 0.25]]))
    tensor(0.5000)
    """
    if norm not in ("l1", "fro"):
        raise ValueError(f"unknown norm {norm!r}; choose from l1, fro")
    size = fisher.abs() if norm == "l1" else fisher.square()
    total = size.sum((-2, -1))
    diagonal = torch.eye(size.shape[-1], dtype=torch.bool, device=size.device)
    off = size.masked_fill(diagonal, 0).sum((-2, -1))
    share = off / torch.where(total == 0, 1.0, total)
    return share if norm == "l1" else share.sqrt()


def condition_number(fisher: Tensor, rtol: float = 1e-6) -> Tensor:
    """Largest over smallest eigenvalue on the support of G, (*, S, S) -> (*).

    Eigenvalues up to ``rtol`` times the largest count as zero: softmax's G always has one, and
    unreachable nodes and impossible categories give more. A zero matrix has condition number 1, one
    that is not finite NaN.
    """
    finite = fisher.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], fisher, 0.0))
    return condition_of_spectrum(torch.where(finite[..., None], values, torch.nan), rtol)


def condition_of_spectrum(eigenvalues: Tensor, rtol: float = 1e-6) -> Tensor:
    """:func:`condition_number` of matrices with these eigenvalues, (*, S) -> (*)."""
    largest = eigenvalues.amax(-1)
    inside = eigenvalues > rtol * largest[..., None]
    smallest = torch.where(inside, eigenvalues, torch.inf).amin(-1)
    return torch.where(largest <= 0, 1.0, largest / smallest)


def natural_gradient(
    head: CategoricalHead, scores: Tensor, grad: Tensor, damping: float = 1e-8
) -> Tensor:
    """G(s)^+ grad, the natural gradient in score space, (*, S) -> (*, S).

    O(S) for all built-in heads: a division for catnat, where ``damping`` bounds the divisor at
    nodes that are hardly ever reached; a closed form of the pseudo-inverse for the others.
    """
    if grad.shape != scores.shape:
        raise ValueError(f"grad {tuple(grad.shape)} and scores {tuple(scores.shape)} differ")
    return head.natural_gradient(scores, grad, damping)


def _times_fisher(head: CategoricalHead, scores: Tensor, direction: Tensor) -> Tensor:
    """G v for every row: sum_k p_k (grad log p_k . v) grad log p_k, in O(K) memory per row."""

    def log_probs(s: Tensor) -> Tensor:
        return head.log_probs(s)

    value, along = jvp(log_probs, (scores,), (direction.to(scores.dtype),))[:2]  # (*, K)
    pull = vjp(log_probs, scores)[1]
    (product,) = pull(value.exp() * along)
    result: Tensor = product
    return result


def _fisher_root(head: CategoricalHead, scores: Tensor) -> Tensor:
    """R with R R^T = G: columns sqrt(p_k) grad log p_k, (B, S) -> (B, S, K)."""
    jacobian = vmap(torch.func.jacrev(head.log_probs))(scores)  # (B, K, S)
    root: Tensor = head.probs(scores).sqrt()[..., None] * jacobian
    return root.transpose(-1, -2)
