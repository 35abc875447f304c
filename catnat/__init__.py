"""Categorical heads with a diagonal Fisher matrix, and the estimators and losses to train them.

>>> import torch
>>> from catnat import make_head
>>> head = make_head("natural", num_categories=5)
>>> head(torch.zeros(head.num_scores)).probs
tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])

Heads: ``SoftmaxHead``, ``SparsemaxHead``, ``SigmoidHead``, ``NaturalHead``, and ``CatnatHead`` to
subclass; they return a ``HeadCategorical``. All can be imported from here: ``help(NaturalHead)``.

``import catnat`` alone does not import torch: the first use of one of the names below does.
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
