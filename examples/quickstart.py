"""Compare heads by gradient descent to a uniform distribution.

All heads start from one distribution over three categories and minimize the cross-entropy by
gradient descent. The learning rate decides which head needs the fewest steps. Sparsemax converges
only at the smallest rate, where it is the fastest head. Up to rate 3, softmax needs fewer steps
than the tree heads. At rate 5, it needs more. Above rate 5, only sigmoid converges.
"""

# %%
import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from catnat import head_names, make_head
from catnat.fisher import off_diagonal_mass

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="quickstart.png", help="picture file")
parser.add_argument("--steps", type=int, default=300, help="largest number of steps")
args = parser.parse_args()
if not (Path(args.out).parent.is_dir() and args.out.endswith((".png", ".pdf", ".svg"))):
    parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {args.out!r}")
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")

K = 3
TARGET = torch.full((K,), 1 / K, dtype=torch.float64)
START = torch.tensor([0.85, 0.10, 0.05], dtype=torch.float64)
RATES = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)


# %% [markdown]
# `head.inverse` computes scores for a distribution. The KL divergence from the target is the
# cross-entropy minus the entropy of the target, log K.


# %%
def divergences(name: str, rate: float) -> list[float]:
    """KL(target || head) after 0, 1, 2, ... steps, up to the first value below 1e-6."""
    head = make_head(name, K)
    scores, found = head.inverse(START), []
    while len(found) <= args.steps:
        scores = scores.detach().requires_grad_()
        loss = -(TARGET * head.log_probs(scores)).sum()
        found.append(max(loss.item() - math.log(K), 0.0))
        if found[-1] < 1e-6:
            break
        (gradient,) = torch.autograd.grad(loss, scores)
        scores = scores - rate * gradient
    return found


# %% [markdown]
# The off-diagonal mass of each head's Fisher matrix at the start, and the steps that it needs.

# %%
needed = {}
for name in head_names():
    fisher = make_head(name, K).fisher(make_head(name, K).inverse(START))
    paths = [divergences(name, rate) for rate in RATES]
    needed[name] = [len(path) - 1 if path[-1] < 1e-6 else math.nan for path in paths]
    mass = float(off_diagonal_mass(fisher))
    taken = [f"over {args.steps}" if math.isnan(n) else n for n in needed[name]]
    steps = ", ".join(f"{n} at {rate:g}" for rate, n in zip(RATES, taken, strict=True))
    print(f"{name:10} off-diagonal mass {mass:.2f}, steps {steps}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for name, steps in needed.items():
    left.semilogy(divergences(name, 5.0)[:40], ".-", label=name)
    right.plot(RATES, steps, "o-", label=name)
left.set(title="learning rate 5", xlabel="step", ylabel="KL divergence")
right.set(title="steps to KL < 1e-6", xlabel="learning rate", xscale="log", yscale="log")
right.set_xticks(RATES[::2], [f"{rate:g}" for rate in RATES[::2]])
right.minorticks_off()
right.legend()
figure.savefig(args.out, dpi=150)
