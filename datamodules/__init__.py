"""Lightning data modules and environments.

The packages of the environments are imported on first use.
"""

if __name__ != "catnat.datamodules":  # imported by the bare name of the folder
    from catnat.bare_names import use_catnat

    use_catnat(__name__)

from typing import TYPE_CHECKING, Any

from catnat.datamodules.community_graph import CommunityGraphDataModule
from catnat.datamodules.graph_data import GraphDataModule
from catnat.datamodules.mnist import (
    FashionMNISTDataModule,
    KMNISTDataModule,
    MNISTDataModule,
)

if TYPE_CHECKING:
    from catnat.datamodules.atari import make_atari_vec_env

__all__ = [
    "CommunityGraphDataModule",
    "FashionMNISTDataModule",
    "GraphDataModule",
    "KMNISTDataModule",
    "MNISTDataModule",
    "make_atari_vec_env",
]


def __getattr__(name: str) -> Any:
    if name == "make_atari_vec_env":
        from catnat.datamodules.atari import make_atari_vec_env

        return make_atari_vec_env
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
