"""Fisher information in score space, its pullback to network parameters, and diagnostics.

There are three kinds of matrices:

- The *exact* matrix is the expectation over categories, in closed form.
- The *sampled* matrix estimates this expectation from categories drawn from the head. It is
  unbiased, but with few samples its noise adds off-diagonal mass.
- The *empirical* matrix is the mean of exact or sampled matrices over a batch of inputs.
"""

import torch
from torch import Tensor

from catnat.checks import require_at_least, require_choice
from catnat.heads.base import CategoricalHead
from catnat.numerics import at_least_float32, exp_of_log_probs, uniform, without_autocast


def score_fisher(
    head: CategoricalHead,
    scores: Tensor,
    kind: str = "exact",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fisher matrix in score space, (*, S) -> (*, S, S).

    Args:
        head: the head of the scores.
        scores: scores, (*, S).
        kind: ``"exact"`` or ``"sampled"``.
        num_samples: number of categories drawn per row for ``"sampled"`` (M).
        generator: random number generator (default: torch's).

    >>> from catnat import make_head
    >>> score_fisher(make_head("softmax", 2), torch.zeros(2))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    require_choice(("exact", "sampled"), kind=kind)
    if kind == "exact":
        return head.fisher(scores)
    require_at_least(1, num_samples=num_samples)
    uniforms = uniform((num_samples, *scores.shape[:-1]), scores, generator)
    gradients = _scores_at(head, scores, uniforms)  # (M, *, S)
    with without_autocast(gradients):
        return torch.einsum("m...i,m...j->...ij", gradients, gradients) / num_samples


def paired_mean_fishers(head: CategoricalHead, scores: Tensor, uniforms: Tensor) -> Tensor:
    """Two independent estimates of the mean Fisher matrix over B rows, from M draws per row.

    The first estimate uses the first M // 2 draws, and the second estimate uses the remaining
    draws. Products of their entries are unbiased estimates of products of entries of the true
    matrix, and :func:`off_diagonal_mass` uses such products. The square of one estimate would add
    the variance of its noise.

    Shapes: ``scores`` (*, B, S); ``uniforms`` (M, *, B), M >= 2, numbers in [0, 1) that determine
    the draws, in float64 if categories with a probability below 1e-7 matter; result (2, *, S, S).
    """
    draws = _scores_at(head, scores, uniforms).tensor_split((len(uniforms) // 2,))
    with without_autocast(scores):
        halves = [part.movedim(0, -3).flatten(-3, -2) for part in draws]  # (*, M / 2 B, S)
        return torch.stack([rows.mT @ rows / rows.shape[-2] for rows in halves])


def _scores_at(head: CategoricalHead, scores: Tensor, uniforms: Tensor) -> Tensor:
    """grad_s log p(c), where c is the category at a quantile in [0, 1).

    Shapes: ``scores`` (*, S), ``uniforms`` (M, *), result (M, *, S).
    """
    with torch.inference_mode(False), torch.enable_grad():
        wide = at_least_float32(scores.detach())
        leaf = wide.expand(*uniforms.shape, scores.shape[-1]).clone().requires_grad_()
        log_probs = head.log_probs(leaf)
        drawn = _category_at(log_probs.detach(), uniforms[..., None])  # (M, *, 1)
        # Rows are independent, so one backward pass gives every row's own gradient.
        one_hots = torch.zeros_like(log_probs).scatter(-1, drawn, 1.0)
        return torch.autograd.grad(log_probs, leaf, one_hots)[0]


def _category_at(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Category at a quantile, (M, *, K) and (M, *, 1) -> (M, *, 1).

    The computation uses float64, so that rare categories have the correct frequency.
    ``torch.multinomial`` would make the host wait for the device.
    """
    probs = exp_of_log_probs(log_probs).double()
    if probs.is_cuda:
        # CUDA sums columns faster than short rows. Sums of integers do not depend on the order.
        parts = (probs * 2**52).long().movedim(-1, 0).contiguous()
        reached = parts.cumsum(0).movedim(0, -1).double()
    else:
        reached = probs.cumsum(-1)
    drawn = (reached <= uniforms * reached[..., -1:]).sum(-1, keepdim=True)
    return drawn.clamp_max(log_probs.shape[-1] - 1)


def pullback_fisher(jacobian: Tensor, fisher: Tensor) -> Tensor:
    """J^T G J, the Fisher matrix in the parameters, from J (*, S, P) and G (*, S, S).

    ``torch.func.jacrev`` computes J. ``torch.func.jvp`` and ``vjp`` compute J v and J^T v without
    J.
    """
    dtype = torch.promote_types(jacobian.dtype, fisher.dtype)
    with without_autocast(fisher):
        return jacobian.mT.to(dtype) @ fisher.to(dtype) @ jacobian.to(dtype)


def off_diagonal_terms(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    r"""Sum over i != j, and over all i and j, of A_ij B_ij, (*, S, S) each -> (*) each.

    If A and B are independent estimates of a matrix G, the results are unbiased estimates of the
    sums of G_ij^2.
    """
    products = one * other
    total = products.sum((-2, -1))
    return total - products.diagonal(dim1=-2, dim2=-1).sum(-1), total


def mass_of_terms(off: Tensor, total: Tensor) -> Tensor:
    """Off-diagonal mass from :func:`off_diagonal_terms` or sums of them; 0 if not positive."""
    share = off / torch.where(total == 0, 1.0, total)
    return torch.where(share <= 0, 0.0, share).sqrt()  # NaN stays NaN


def off_diagonal_mass(fisher: Tensor, norm: str = "fro", other: Tensor | None = None) -> Tensor:
    """Share of a matrix that lies off its diagonal, (*, S, S) -> (*), between 0 and 1.

    With ``"fro"``, it is the Frobenius norm of the off-diagonal entries divided by the Frobenius
    norm of the matrix. With ``"l1"``, it is the ratio of the sums of |G_ij|. For softmax, this
    ratio is 1/2 for all scores, because the rows of its G sum to zero. A zero matrix and a 1 x 1
    matrix have mass 0.

    Args:
        fisher: Fisher matrices.
        norm: ``"fro"`` or ``"l1"``.
        other: a second, independent estimate of the matrix, only for ``"fro"``. Products of the two
            estimates replace squares, so that noise does not add off-diagonal mass.

    >>> off_diagonal_mass(torch.tensor([[0.25, -0.25], [-0.25, 0.25]]))
    tensor(0.7071)
    """
    require_choice(("l1", "fro"), norm=norm)
    if other is not None:
        require_choice(("fro",), norm=norm)
        return mass_of_terms(*off_diagonal_terms(fisher, other))
    size = fisher.abs()
    largest = size.amax((-2, -1), keepdim=True)
    size = size / torch.where(largest == 0, 1.0, largest)  # squares and sums stay in range
    size = size if norm == "l1" else size.square()
    total = size.sum((-2, -1))
    diagonal = torch.eye(size.shape[-1], dtype=torch.bool, device=size.device)
    off = size.masked_fill(diagonal, 0).sum((-2, -1))
    share = off / torch.where(total == 0, 1.0, total)
    return share if norm == "l1" else share.sqrt()


def condition_number(fisher: Tensor) -> Tensor:
    """Largest over smallest eigenvalue on the support of G, (*, S, S) -> (*).

    Eigenvalues up to 1e-6 times the largest eigenvalue count as zero. Softmax's G always has a zero
    eigenvalue, and unreachable nodes and impossible categories add more. A zero matrix has
    condition number 1. The result is NaN if the matrix is not finite or the eigenvalue solver
    fails.
    """
    fisher = at_least_float32(fisher)
    finite = fisher.isfinite().all(-1).all(-1)
    size = fisher.abs().amax((-2, -1))
    usable = (finite & (size > 0))[..., None, None]
    scaled = torch.where(usable, fisher / size[..., None, None], 0.0)
    try:  # float64: LAPACK fails in float32 for some matrices with many rows of zeros
        values = torch.linalg.eigvalsh(scaled.double()).to(fisher.dtype)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values = torch.full_like(scaled[..., 0], torch.nan)
    return condition_of_spectrum(torch.where(finite[..., None], values, torch.nan))


def condition_of_spectrum(eigenvalues: Tensor) -> Tensor:
    """:func:`condition_number` of matrices with these eigenvalues, (*, S) -> (*)."""
    largest = eigenvalues.amax(-1)
    inside = eigenvalues > 1e-6 * largest[..., None]
    smallest = torch.where(inside, eigenvalues, torch.inf).amin(-1)
    return torch.where(largest <= 0, 1.0, largest / smallest)
