"""What is seen of a head: categories drawn on its device, scalars taken from it on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from catnat import CategoricalHead
from catnat.fisher import condition_number, condition_of_spectrum, off_diagonal_mass
from catnat.numerics import exp_of_log_probs

SCALARS = ("off_diagonal_mass", "off_diagonal_mass_fro", "condition_number", "saturated")


def sampled_mean_fisher(
    head: CategoricalHead, scores: Tensor, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Mean of grad log p(c) grad log p(c)^T over rows and drawn categories c, (B, S) -> (S, S)."""
    with torch.enable_grad():
        leaf = scores.detach().float().repeat(num_samples, 1).requires_grad_()
        log_probs = head.log_probs(leaf)
        # Inverse of the distribution function. torch.multinomial would make the host wait.
        reached = exp_of_log_probs(log_probs.detach()).cumsum(-1)
        level = torch.rand(leaf.shape[0], 1, generator=generator, device=leaf.device)
        drawn = (reached <= level * reached[:, -1:]).sum(-1, keepdim=True)
        drawn = drawn.clamp_max(head.num_categories - 1)
        (gradient,) = torch.autograd.grad(log_probs.gather(-1, drawn).sum(), leaf)
    with torch.autocast(gradient.device.type, enabled=False):
        return gradient.t() @ gradient / gradient.shape[0]


def summarize(head: CategoricalHead, observed: Tensor) -> tuple[Tensor, list[dict[str, float]]]:
    """The exact matrices (T, S, S), and for each of T steps its scalars by name.

    Args:
        head: the head.
        observed: ``head.diagnostics`` of T steps, (T, ...).
    """
    return matrices(head, observed), scalars(head, observed)


def matrices(head: CategoricalHead, observed: Tensor) -> Tensor:
    """The exact matrices in ``head.diagnostics`` of T steps, (T, ...) -> (T, S, S)."""
    exact, S = observed[:, :-1], head.num_scores
    return torch.diag_embed(exact) if head.fisher_is_diagonal else exact.reshape(-1, S, S)


def scalars(head: CategoricalHead, observed: Tensor) -> list[dict[str, float]]:
    """For each of T steps its scalars by name, from ``head.diagnostics``, (T, ...).

    All but the sampled mass: that is :func:`~catnat.fisher.off_diagonal_mass` of what
    :func:`sampled_mean_fisher` gives.
    """
    exact, saturated = observed[:, :-1], observed[:, -1]
    if head.fisher_is_diagonal:
        nothing = 0 * exact.sum(-1)  # NaN stays NaN
        values = {
            "off_diagonal_mass": nothing,
            "off_diagonal_mass_fro": nothing,
            "condition_number": condition_of_spectrum(exact),
        }
    else:
        exact = matrices(head, observed)
        values = {
            "off_diagonal_mass": off_diagonal_mass(exact),
            "off_diagonal_mass_fro": off_diagonal_mass(exact, "fro"),
            "condition_number": condition_number(exact),
        }
    values["saturated"] = saturated
    rows = torch.stack(list(values.values()), 1).tolist()
    return [dict(zip(values, row, strict=True)) for row in rows]
