"""Data for the experiments: Lightning data modules, and environments.

The environments' packages are imported when they are first asked for.
"""

if __name__ != "catnat.datamodules":  # imported by the bare name of the folder
    __path__ = []  # no submodules: they would be other modules than those of catnat.datamodules

from typing import TYPE_CHECKING, Any

from catnat.datamodules.community_graph import CommunityGraphDataModule
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
    "KMNISTDataModule",
    "MNISTDataModule",
    "make_atari_vec_env",
]


def __getattr__(name: str) -> Any:
    if name == "make_atari_vec_env":
        from catnat.datamodules.atari import make_atari_vec_env

        return make_atari_vec_env
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
