"""Data for the experiments, as Lightning data modules."""

from .community_graph import CommunityGraphDataModule
from .mnist import MNISTDataModule

__all__ = ["CommunityGraphDataModule", "MNISTDataModule"]
