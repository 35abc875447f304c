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
    from catnat.flat_heads import SoftmaxHead, SparsemaxHead
    from catnat.head import CategoricalHead
    from catnat.heads import head_names, make_head
    from catnat.mixed_head import MixedHead
    from catnat.probe import HeadProbe
    from catnat.tree_heads import CatnatHead, NaturalHead, SigmoidHead
    from catnat.tree_linear import TreeLinear

__version__ = "0.1.0"
__all__ = [
    "CategoricalHead",
    "CatnatHead",
    "HeadCategorical",
    "HeadProbe",
    "MixedHead",
    "NaturalHead",
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
_HOMES = ("heads", "head", "flat_heads", "tree_heads", "distributions", "probe", "tree_linear")


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in ("estimators", "fisher", "losses"):
        return import_module(f"catnat.{name}")
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"catnat.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'catnat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
