"""Compare the natural gradient with Adam and plain gradient descent.

A table of scores learns to predict the next letter of the English text that comes with Python. The
natural gradient is the gradient times the inverse Fisher matrix. For a tree head, this is a
division of each entry by G_ii. Each method uses the best of three learning rates, which decrease to
0. With softmax and sigmoid, the natural gradient and Adam end with similar losses, ahead of plain
gradient descent. With natural, Adam's larger rates saturate scores, so the natural gradient leads.
"""

# %%
import argparse
import re
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch

from catnat import make_head

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="natural_gradient.png", help="picture file")
parser.add_argument("--steps", type=int, default=300, help="updates in each run")
args = parser.parse_args()
if not (Path(args.out).parent.is_dir() and args.out.endswith((".png", ".pdf", ".svg"))):
    parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {args.out!r}")
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")

K, BATCH, DAMPING = 27, 256, 1e-3  # the space and 26 letters
RATES = {
    "gradient descent": (3.0, 10.0, 30.0),
    "Adam": (0.03, 0.1, 0.3),
    "natural gradient": (0.01, 0.03, 0.1),
}
text = re.sub("[^a-z]+", " ", " ".join(topics.values()).lower())
letters = torch.tensor([max(ord(each) - 96, 0) for each in text])
train, test = letters.tensor_split([len(letters) * 9 // 10])


def count(of: torch.Tensor) -> torch.Tensor:
    """Number of times each letter follows each letter, (K, K)."""
    pairs = of[:-1] * K + of[1:]
    return torch.bincount(pairs, minlength=K * K).view(K, K).double()


seen, tested = count(train) + 0.1, count(test)
best = -(tested * (seen / seen.sum(1, keepdim=True)).log()).sum() / tested.sum()


# %%
def learn(head_name: str, method: str, rate: float) -> list[float]:
    """Excess test loss over the counted frequencies every ten updates, in nats per letter."""
    torch.manual_seed(0)
    head, excess = make_head(head_name, K), []
    scores = torch.zeros(K, head.num_scores, requires_grad=True)
    optimizer = (torch.optim.Adam if method == "Adam" else torch.optim.SGD)([scores], rate)
    for step in range(args.steps):
        at = torch.randint(len(train) - 1, (BATCH,))
        loss = -head(scores[train[at]]).log_prob(train[at + 1]).mean()
        (scores.grad,) = torch.autograd.grad(loss, scores)
        if method == "natural gradient":  # per row, without its share of the batch
            share = torch.bincount(train[at], minlength=K).clamp_min(1)[:, None] / BATCH
            scores.grad = head.natural_gradient(scores.detach(), scores.grad / share, DAMPING)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / args.steps)
        optimizer.step()
        if step % 10 == 9 or step == args.steps - 1:
            logs = head.log_probs(scores.detach())
            excess.append(float(-(tested * logs).sum() / tested.sum() - best))
    return excess


# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
for axes, head_name in zip(panels, ("softmax", "sigmoid", "natural"), strict=True):
    for method, rates in RATES.items():
        curves = {rate: learn(head_name, method, rate) for rate in rates}
        rate = min(curves, key=lambda rate: curves[rate][-1])
        axes.semilogy(range(10, 10 * len(curves[rate]) + 1, 10), curves[rate])
        axes.lines[-1].set_label(f"{method}, rate {rate:g}")
    axes.set(title=head_name, xlabel="update")
    axes.legend(fontsize=7)
panels[0].set_ylabel("excess test loss (nats)")
figure.savefig(args.out, dpi=150)
