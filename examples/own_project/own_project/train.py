"""Train the VAE of this project and test it: ``python -m own_project.train --help``."""

import argparse
import json
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from catnat import head_names
from catnat.callbacks import FisherMonitor
from catnat.datamodules import MNISTDataModule

from .data import BarsDataModule
from .heads import ProbitHead
from .model import PatchVAE


def main(argv: list[str] | None = None) -> None:
    """Train, test, print and write what came out."""
    parser = argparse.ArgumentParser(description="Train a VAE and test it.")
    parser.add_argument("--steps", type=int, default=2000, help="training steps (%(default)s)")
    parser.add_argument("--head", choices=head_names(), default=ProbitHead.name)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", choices=("mnist", "bars"), default="mnist")
    parser.add_argument("--root", default="data", help="folder of MNIST's files (%(default)s)")
    parser.add_argument("--nll-samples", type=int, default=64, help="per test image (%(default)s)")
    parser.add_argument("--default_root_dir", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)

    seed_everything(args.seed, verbose=False)
    model = PatchVAE(head=args.head, learning_rate=args.learning_rate, nll_samples=args.nll_samples)
    monitor = FisherMonitor()
    trainer = Trainer(
        max_steps=args.steps,
        devices=1,
        logger=TensorBoardLogger(args.default_root_dir, name=args.head),
        callbacks=[monitor],
        enable_checkpointing=False,
    )
    data = BarsDataModule() if args.data == "bars" else MNISTDataModule(args.root)
    trainer.fit(model, datamodule=data)
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    mass = monitor.latest["fim/off_diagonal_mass"]

    print(f"{type(model.head).__name__} after {trainer.global_step} steps:")
    print(f"  test NLL {tested['test/nll']:.2f} nats")
    print(f"  off-diagonal Fisher mass {mass:.3f}")
    numbers = dict(validated) | dict(tested) | {"test/fisher_mass": mass}
    (args.default_root_dir / "metrics.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
