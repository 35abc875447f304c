"""Learn from your own data which nodes of a graph influence each other.

Each of twelve nodes sends messages to itself, to the next node and to a node further back. A
message arrives with probability 0.8. From pairs (x, y) of sent and received messages, the learner
estimates the probability of each of the 144 possible edges. To use your own data, replace x and y,
with shapes (pairs, nodes, features).
"""

# %%
import argparse
import logging
import warnings
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader, TensorDataset

from catnat.lit_modules import GraphStructureLearner

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="own_graph.png", help="picture file")
parser.add_argument("--steps", type=int, default=1000, help="training steps")
args = parser.parse_args()
if not (Path(args.out).parent.is_dir() and args.out.endswith((".png", ".pdf", ".svg"))):
    parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {args.out!r}")
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
seed_everything(0, verbose=False)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %% [markdown]
# In `truth`, row j, column i is the probability of an edge from node j to node i.

# %%
NODES, PAIRS = 12, 4000
ring = torch.roll(torch.eye(NODES), 1, dims=1)
truth = 0.8 * (torch.eye(NODES) + ring + ring.T.roll(2, dims=0))
x = torch.randn(PAIRS, NODES, 3)
psi = torch.tensor([[1.0, 0.3], [-0.5, 0.8], [0.2, -1.0]])
arrived = (torch.rand(PAIRS, NODES, NODES) < truth).float()
y = arrived.mT @ (x @ psi)

# %% [markdown]
# Local expectation gradients reach edges that were not sampled. The first steps train only the
# predictor.

# %%
learner = GraphStructureLearner(
    head="natural",
    num_nodes=NODES,
    in_features=3,
    out_features=2,
    estimator="local_expectation",
    lr_scheduler=partial(PolynomialLR, total_iters=args.steps),
    psi_warmup_steps=min(100, args.steps // 2),
)
trainer = Trainer(
    max_steps=args.steps,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(learner, DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

# %%
found = learner.theta.detach()
print(f"mean error of the probabilities {float((found - truth).abs().mean()):.4f}")
figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
for axes, title, theta in zip(panels, ("true", "found"), (truth, found), strict=True):
    shown = axes.imshow(theta, vmin=0, vmax=1, cmap="viridis")
    axes.set(title=title, xlabel="to node", ylabel="from node")
figure.colorbar(shown, ax=panels, label="probability of the edge")
figure.savefig(args.out, dpi=150)
