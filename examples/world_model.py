"""A world model with 32 discrete latents of 32 categories that imagines a bouncing ball.

As in DreamerV3, a decoder and a dynamics network get a straight-through sample of the latents, and
each latent contains 1 % of the uniform distribution. The dynamics network predicts the next
latents. After training, the model sees one picture and imagines the next ones. Both heads use one
learning rate, so this is not a tuned comparison.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import kl_divergence

from catnat import make_head
from catnat.losses import bernoulli_nll

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="world_model.png", help="picture file")
parser.add_argument("--steps", type=int, default=500, help="updates with each head")
args = parser.parse_args()
if not (Path(args.out).parent.is_dir() and args.out.endswith((".png", ".pdf", ".svg"))):
    parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {args.out!r}")
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
torch.manual_seed(0)
FRAMES, LATENTS, K, PIXELS = 8, 32, 32, 12 * 12
# Positions of balls, (films, T + 1, 2). A picture consists of this frame and the previous one.
start, speed = torch.randint(9, (500, 1, 2)), torch.randint(2, (500, 1, 2)) * 2 - 1
ball = 10 - ((start + speed * torch.arange(FRAMES + 1).view(-1, 1)) % 18 - 9).abs()
place = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))
frames = ((ball[:, :, None] - place).square().sum(-1) < 4).float()  # (films, T + 1, pixels)
films = torch.cat([frames[:, 1:], frames[:, :-1]], -1)


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.SiLU(), nn.Linear(128, outputs))


class WorldModel(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = make_head(head, K, mix=0.01)
        s, z, x = LATENTS * self.head.num_scores, LATENTS * K, 2 * PIXELS
        self.encoder, self.dynamics, self.decoder = network(x, s), network(z, s), network(z, x)

    def latents(self, scores):
        return self.head(scores.unflatten(-1, (LATENTS, -1)))

    def loss(self, now, later):
        z = self.latents(self.encoder(now)).rsample(estimator="straight-through").flatten(-2)
        after, told = self.encoder(later), self.dynamics(z)
        of_dynamics = kl_divergence(self.latents(after.detach()), self.latents(told)).sum(-1)
        of_encoder = kl_divergence(self.latents(after), self.latents(told.detach())).sum(-1)
        seen = bernoulli_nll(self.decoder(z), now, event_dims=1)
        return (seen + of_dynamics + 0.1 * of_encoder).mean()


figure = plt.figure(figsize=(10, 3.4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
rows, chart, shown = left.subplots(3, FRAMES), right.subplots(), [*frames[0, 1:]]
for name in ("softmax", "natural"):
    model, losses = WorldModel(name), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(args.steps):
        film, time = torch.randint(1, 500, (64,)), torch.randint(FRAMES - 1, (64,))
        loss = model.loss(films[film, time], films[film, time + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    chart.semilogy(losses, label=f"{name}: {sum(losses[-50:]) / len(losses[-50:]):.0f} at the end")
    scores = model.encoder(films[0, 0])
    for _ in range(FRAMES):
        z = nn.functional.one_hot(model.latents(scores).mode, K).float().flatten()
        shown.append(model.decoder(z).sigmoid().detach()[:PIXELS])
        scores = model.dynamics(z)
for axes, picture in zip(rows.flat, shown, strict=True):
    axes.imshow(picture.reshape(12, 12), cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
for row, name in zip(rows, ("true", "softmax", "natural"), strict=True):
    row[0].set_ylabel(name)
chart.legend(title="loss (nats) over updates", fontsize=8)
figure.savefig(args.out, dpi=150)
