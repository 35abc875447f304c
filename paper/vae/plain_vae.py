"""The recipe of ``paper/plans/vae_adam.yaml``, scale recipe, for softmax in plain torch.

Written without a line of catnat, to check it by: both should end at the same likelihoods.

    python paper/vae/plain_vae.py --root DATA --seed 1
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def read(path: Path, gray: bool) -> Tensor:
    """The images of an IDX file, (B, 1, 28, 28)."""
    pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16)
    x = torch.from_numpy(pixels.reshape(-1, 1, 28, 28).copy()).float() / 255
    return x if gray else (x > 0.5).float()


class VAE(nn.Module):
    """N latents of K categories."""

    def __init__(self, N: int, K: int) -> None:
        super().__init__()
        self.N = N
        self.K = K
        self.tau = 1.0
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(288, 128),
            nn.ReLU(),
            nn.Linear(128, N * K),
        )
        self.decoder = nn.Sequential(
            nn.Linear(N * K, 128),
            nn.ReLU(),
            nn.Linear(128, 288),
            nn.ReLU(),
            nn.Unflatten(1, (32, 3, 3)),
            nn.ConvTranspose2d(32, 16, 3, 2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 3, 2, 1, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 3, 2, 1, 1),
        )

    def log_q(self, x: Tensor) -> Tensor:
        """(B, N, K)."""
        log_q: Tensor = self.encoder(x).view(-1, self.N, self.K).log_softmax(-1)
        return log_q

    def distortion(self, z: Tensor, x: Tensor) -> Tensor:
        """-log p(x | z), (B, N, K) -> (B,)."""
        logits = self.decoder(z.flatten(1))
        return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3))

    def elbo(self, x: Tensor) -> Tensor:
        """One sample an image, (B,)."""
        log_q = self.log_q(x)
        z = F.gumbel_softmax(log_q, self.tau, hard=True)
        kl = (log_q.exp() * (log_q + math.log(self.K))).sum((1, 2))
        return -self.distortion(z, x) - kl

    def nll(self, x: Tensor, samples: int = 512) -> Tensor:
        """Importance samples from q, one image after the other."""
        nll = []
        for image, log_q in zip(x, self.log_q(x), strict=True):
            drawn = torch.multinomial(log_q.exp(), samples, replacement=True)  # (N, samples)
            z = F.one_hot(drawn.t(), self.K).float()
            weights = -self.distortion(z, image.expand(samples, 1, 28, 28))
            weights -= self.N * math.log(self.K) + (z * log_q).sum((1, 2))
            nll.append(math.log(samples) - weights.logsumexp(0))
        return torch.stack(nll)


def main() -> None:
    """Train, and print validation ELBOs and the test NLL."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of the .gz files")
    parser.add_argument("--num_latents", type=int, default=10)
    parser.add_argument("--num_categories", type=int, default=8)
    parser.add_argument("--variant", choices=("gray", "binary"), default="binary")
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gray = args.variant == "gray"
    images = read(args.root / "train-images-idx3-ubyte.gz", gray).to(device)
    test = read(args.root / "t10k-images-idx3-ubyte.gz", gray).to(device)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0)).to(device)
    train, validation = images[order[:50_000]], images[order[50_000:]]

    torch.manual_seed(args.seed)
    model = VAE(args.num_latents, args.num_categories).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        if step % 1000 == 0:
            model.tau = max(math.exp(-3e-5 * step), 0.5)
        if step % 500 == 0:
            order = torch.randperm(50_000, device=device)
        batch = train[order[step % 500 * 100 :][:100]]
        optimizer.zero_grad()
        (-model.elbo(batch).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 5000 == 0:
            model.eval()
            with torch.no_grad():
                elbo = torch.cat([model.elbo(x) for x in validation.split(1000)]).mean()
            print(f"step {step + 1}: validation ELBO {elbo:.1f}", flush=True)
            model.train()
    model.eval()
    with torch.no_grad():
        nll = torch.cat([model.nll(x) for x in test.split(100)]).mean()
    print(f"seed {args.seed}: test NLL {nll:.2f}")


if __name__ == "__main__":
    main()
