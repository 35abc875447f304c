"""Data for the experiments, as Lightning data modules."""

from .mnist import MNISTDataModule

__all__ = ["MNISTDataModule"]
