"""Do categories that are neighbours in the tree mean similar images?

    python neighbours.py --root data CHECKPOINT...

Takes models of probing_vae.py. For each test image one latent is given another category, whose
lowest common ancestor with the true one lies 1, 2, ... levels up: 1 is the sibling in the tree. The
table has the nats by which the image's loss grows, means over images and models. Softmax knows
nothing of the tree, so that its numbers should not depend on the level.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import mean

import torch
import torch.nn.functional as F
from probing_vae import ProbingVAE
from torch import Tensor

from catnat.datamodules import MNISTDataModule


@torch.no_grad()
def prices(model: ProbingVAE, images: Tensor) -> list[float]:
    """Mean growth of -log p(x | z) if one latent moves to a category of each level, in nats."""
    K, z = model.head.num_categories, model(images).sample()  # (B, N)
    before = model.reconstruction(images, F.one_hot(z, K).float())
    rows, found = torch.arange(len(z)), []
    for level in range(1, K.bit_length()):
        moved = z.clone()
        latent = torch.randint(z.shape[1], (len(z),))
        moved[rows, latent] ^= torch.randint(2 ** (level - 1), 2**level, (len(z),))
        after = model.reconstruction(images, F.one_hot(moved, K).float())
        found.append(float((after - before).mean()))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--root", default="data")
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = MNISTDataModule(root=args.root, eval_batch_size=args.images)
    data.prepare_data()
    data.setup("test")
    images = next(iter(data.test_dataloader()))[: args.images]
    found = defaultdict(list)
    for path in args.checkpoints:
        model = ProbingVAE.load_from_checkpoint(path, map_location="cpu").eval()
        kind = model.hparams.head, model.hparams.decoder, model.hparams.even, model.hparams.draws
        found[kind].append(prices(model, images))
    levels = len(next(iter(found.values()))[0])
    columns = ["head", "decoder", "even", "draws", "n", *range(1, levels + 1)]
    print("| " + " | ".join(map(str, columns)) + " |\n" + "|---" * len(columns) + "|")
    for kind, values in found.items():
        cells = [f"{mean(each):.1f}" for each in zip(*values, strict=True)]
        print("| " + " | ".join(map(str, [*kind, len(values), *cells])) + " |")


if __name__ == "__main__":
    main()
