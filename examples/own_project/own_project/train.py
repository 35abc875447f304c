"""Train the VAE of this project and test it: ``python -m own_project.train --help``."""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from catnat import head_names
from catnat.callbacks import FisherMonitor
from catnat.datamodules import MNISTDataModule

from .heads import ProbitHead
from .model import PatchVAE


def main(argv: list[str] | None = None) -> None:
    """Train, test, and print what came out."""
    parser = argparse.ArgumentParser(description="Train a VAE on MNIST and test it.")
    parser.add_argument("--steps", type=int, default=2000, help="training steps (%(default)s)")
    parser.add_argument("--head", choices=head_names(), default=ProbitHead.name)
    parser.add_argument("--root", default="data", help="folder of MNIST's files (%(default)s)")
    parser.add_argument("--nll-samples", type=int, default=64, help="per test image (%(default)s)")
    args = parser.parse_args(argv)

    seed_everything(0, verbose=False)
    model = PatchVAE(head=args.head, nll_samples=args.nll_samples)
    monitor = FisherMonitor()
    trainer = Trainer(
        max_steps=args.steps,
        devices=1,
        logger=TensorBoardLogger("runs", name=args.head),
        callbacks=[monitor],
        enable_checkpointing=False,
    )
    data = MNISTDataModule(args.root)
    trainer.fit(model, datamodule=data)
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)

    print(f"{type(model.head).__name__} after {trainer.global_step} steps:")
    print(f"  test NLL {metrics['test/nll']:.2f} nats")
    print(f"  off-diagonal Fisher mass {monitor.latest['fim/off_diagonal_mass']:.3f}")


if __name__ == "__main__":
    main()
