"""Categorical heads, and estimators and losses to train them.

>>> import torch
>>> from catnat import make_head
>>> head = make_head("natural", num_categories=5)
>>> head(torch.zeros(head.num_scores)).probs
tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])

The heads are ``SoftmaxHead``, ``SparsemaxHead``, ``SigmoidHead`` and ``NaturalHead``. They return a
``HeadCategorical``. For your own tree head, subclass ``CatnatHead``. This module exports all names
in ``__all__``.

``import catnat`` does not import torch. The first use of a name from ``__all__`` imports it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from catnat import estimators, fisher, losses
    from catnat.distributions import HeadCategorical
    from catnat.heads.base import CategoricalHead
    from catnat.heads.flat import SoftmaxHead, SparsemaxHead
    from catnat.heads.mixed import MixedHead
    from catnat.heads.probe import HeadProbe
    from catnat.heads.registry import head_names, make_head
    from catnat.heads.tree import CatnatHead, NaturalHead, SigmoidHead
    from catnat.output_layer.tree_linear import TreeLinear
    from catnat.quantizer import Quantizer

__version__ = "0.1.0"
__all__ = [
    "CategoricalHead",
    "CatnatHead",
    "HeadCategorical",
    "HeadProbe",
    "MixedHead",
    "NaturalHead",
    "Quantizer",
    "SigmoidHead",
    "SoftmaxHead",
    "SparsemaxHead",
    "TreeLinear",
    "estimators",
    "fisher",
    "head_names",
    "losses",
    "make_head",
]
_SUBMODULES = ("estimators", "fisher", "losses")
_MODULES = {
    "HeadCategorical": "distributions",
    "Quantizer": "quantizer",
    "TreeLinear": "output_layer.tree_linear",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'catnat' has no attribute {name!r}")
    if name in _SUBMODULES:
        return import_module(f"catnat.{name}")
    value = globals()[name] = getattr(import_module(f"catnat.{_MODULES.get(name, 'heads')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
