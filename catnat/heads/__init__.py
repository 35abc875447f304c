"""Heads: modules that turn scores into a categorical distribution.

:mod:`~catnat.heads.base` defines the interface, :mod:`~catnat.heads.flat` softmax and sparsemax,
:mod:`~catnat.heads.tree` the tree heads, and :mod:`~catnat.heads.registry` builds a head by name.

>>> from catnat.heads import make_head
>>> make_head("softmax", num_categories=8)
SoftmaxHead(num_categories=8, num_scores=8)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catnat.heads.base import CategoricalHead
    from catnat.heads.flat import SoftmaxHead, SparsemaxHead
    from catnat.heads.mixed import MixedHead
    from catnat.heads.probe import HeadProbe
    from catnat.heads.registry import head_names, make_head
    from catnat.heads.tree import CatnatHead, NaturalHead, SigmoidHead

_MODULES = {
    "CategoricalHead": "base",
    "SoftmaxHead": "flat",
    "SparsemaxHead": "flat",
    "MixedHead": "mixed",
    "HeadProbe": "probe",
    "head_names": "registry",
    "make_head": "registry",
    "CatnatHead": "tree",
    "NaturalHead": "tree",
    "SigmoidHead": "tree",
}
__all__ = [
    "CategoricalHead",
    "CatnatHead",
    "HeadProbe",
    "MixedHead",
    "NaturalHead",
    "SigmoidHead",
    "SoftmaxHead",
    "SparsemaxHead",
    "head_names",
    "make_head",
]


def __getattr__(name: str) -> object:
    # Lazy: kernels import catnat.heads.activations, and the heads import the kernels.
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
