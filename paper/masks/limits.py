"""Writes limits.csv: returns that policies can express if they see the state but not the mask.

Scores of single states are fitted directly, without a network, to the mean return over many masks.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from masked_ranks import NUM_ACTIONS, NUM_ALLOWED, NUM_FEATURES, VALUES
from torch import Tensor

from catnat import make_head
from catnat.sb3.distributions import HeadDistribution, MaskMode
from catnat.sweeps.runs import commit

NUM_STATES = 16
MASKS_PER_STEP = 32  # of each state
STEPS = 1200
POLICIES: tuple[tuple[str, MaskMode | None], ...] = (
    ("softmax", None),
    ("sigmoid", "renormalize"),
    ("sigmoid", "prune"),
)


def rewards(values: Tensor, masks: Tensor) -> Tensor:
    """The reward of each allowed action, 0 for the others, (B, K)."""
    mean = (values * masks).sum(-1, keepdim=True) / NUM_ALLOWED
    best = values.masked_fill(~masks, -torch.inf).amax(-1, keepdim=True)
    return (values - mean) / (best - mean) * masks


def returns(distribution: HeadDistribution, scores: Tensor, values: Tensor) -> Tensor:
    """Mean return of each state over random masks, from its scores and the values of actions."""
    scores, values = (x.repeat(MASKS_PER_STEP, 1) for x in (scores, values))
    masks = torch.rand(values.shape).argsort(-1) < NUM_ALLOWED
    distribution.proba_distribution(scores)
    distribution.apply_masking(masks)
    expected = (distribution.distribution.probs * rewards(values, masks)).sum(-1)
    return 100 * expected.view(MASKS_PER_STEP, NUM_STATES).mean(0)


def fitted_returns(head_name: str, mask_mode: MaskMode | None) -> np.ndarray:
    """Mean return of each state after its scores were fitted."""
    torch.manual_seed(0)
    head = make_head(head_name, NUM_ACTIONS)
    distribution = HeadDistribution([head], mask_mode)
    states = torch.randn(NUM_STATES, NUM_FEATURES)
    values = states @ torch.tensor(VALUES.T, dtype=states.dtype)
    scores = torch.zeros(NUM_STATES, head.num_scores, requires_grad=True)
    optimizer = torch.optim.Adam([scores], 0.1)
    for step in range(STEPS):
        if step == STEPS * 3 // 4:
            optimizer.param_groups[0]["lr"] = 0.02
        optimizer.zero_grad()
        (-returns(distribution, scores, values).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        samples = [returns(distribution, scores, values).numpy() for _ in range(50)]
    return np.mean(samples, axis=0)


def main() -> None:
    """Fit each policy."""
    rows = [
        {"commit": commit(), "head": head, "mask_mode": mode, "state": state, "return": value}
        for head, mode in POLICIES
        for state, value in enumerate(fitted_returns(head, mode))
    ]
    path = Path(__file__).with_name("limits.csv")
    pd.DataFrame(rows).round(3).to_csv(path, index=False)


if __name__ == "__main__":
    main()
