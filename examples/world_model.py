"""A world model with 32 discrete latents of 32 categories, which imagines a bouncing ball.

As in DreamerV3, an encoder gives the scores of 32 latents, a straight-through sample of one-hot
vectors goes to a decoder and to the dynamics, which predict the next latents, and each distribution
has 1 % of the uniform one mixed in. After training, the model sees one picture and imagines the
next ones. All heads have the same learning rate: this is no tuned comparison.
"""

# %%
import argparse

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence

from catnat import HeadCategorical, make_head
from catnat.losses import bernoulli_nll

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="world_model.png", help="picture file")
parser.add_argument("--steps", type=int, default=400, help="updates with each head")
args = parser.parse_args()
torch.manual_seed(0)
FRAMES, LATENTS, K, PIXELS = 8, 32, 32, 12 * 12

# Balls that walls reflect, (films, T + 1, 2). A picture has this frame and the last one.
path = torch.rand(500, 1, 2) * 9 + (torch.rand(500, 1, 2) * 3 - 1.5) * torch.arange(FRAMES + 1.0).view(-1, 1)
ball = 10 - (path % 18 - 9).abs()
place = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))
frames = ((ball[:, :, None] - place).square().sum(-1) < 4).float()  # (films, T + 1, pixels)
films = torch.cat([frames[:, 1:], frames[:, :-1]], -1)


# %%
class WorldModel(nn.Module):
    """Encoder, decoder and dynamics, with one head for all latents."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = make_head(head, K, mix=0.01)
        scores, z = LATENTS * self.head.num_scores, LATENTS * K
        self.encoder = nn.Sequential(nn.Linear(2 * PIXELS, 128), nn.SiLU(), nn.Linear(128, scores))
        self.dynamics = nn.Sequential(nn.Linear(z, 128), nn.SiLU(), nn.Linear(128, scores))
        self.decoder = nn.Sequential(nn.Linear(z, 128), nn.SiLU(), nn.Linear(128, 2 * PIXELS))

    def latents(self, scores: Tensor) -> HeadCategorical:
        """The distribution of the 32 latents."""
        return self.head(scores.unflatten(-1, (LATENTS, -1)))

    def loss(self, now: Tensor, later: Tensor) -> Tensor:
        """Reconstruction; the dynamics learn from the encoder, and the encoder a little from them."""
        z = self.latents(self.encoder(now)).rsample_straight_through().flatten(-2)
        seen, predicted = self.encoder(later), self.dynamics(z)
        learn = kl_divergence(self.latents(seen.detach()), self.latents(predicted)).sum(-1)
        yield_ = kl_divergence(self.latents(seen), self.latents(predicted.detach())).sum(-1)
        unseen = bernoulli_nll(self.decoder(z), now, event_dims=1)
        return (unseen + learn + 0.1 * yield_).mean()


# %%
heads = ("softmax", "natural")
figure = plt.figure(figsize=(10, 3.4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
rows, chart, shown = left.subplots(3, FRAMES), right.subplots(), {"true": frames[0, 1:]}
for name in heads:
    model, losses = WorldModel(name), []
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(args.steps):
        film, time = torch.randint(1, 500, (64,)), torch.randint(FRAMES - 1, (64,))
        loss = model.loss(films[film, time], films[film, time + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    chart.semilogy(losses, label=f"{name}: {sum(losses[-50:]) / len(losses[-50:]):.0f} at the end")
    with torch.no_grad():
        scores, shown[name] = model.encoder(films[0, 0]), []
        for _ in range(FRAMES):
            z = model.latents(scores).mode.eq(torch.arange(K).view(-1, 1)).T.float().flatten()
            shown[name].append(model.decoder(z).sigmoid()[:PIXELS])
            scores = model.dynamics(z)
for row, (name, pictures) in zip(rows, shown.items(), strict=True):
    for axes, picture in zip(row, pictures, strict=True):
        axes.imshow(picture.reshape(12, 12), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
    row[0].set_ylabel(name)
chart.set(xlabel="update", ylabel="loss (nats)")
chart.legend(fontsize=8)
figure.savefig(args.out, dpi=150)
