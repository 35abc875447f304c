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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catnat import estimators, fisher, losses
    from catnat.distributions import HeadCategorical as HeadCategorical
    from catnat.heads import CategoricalHead, head_names, make_head
    from catnat.heads import SoftmaxHead as SoftmaxHead
    from catnat.heads import SparsemaxHead as SparsemaxHead
    from catnat.mixed_head import MixedHead as MixedHead
    from catnat.one_hot import HeadOneHotCategorical as HeadOneHotCategorical
    from catnat.probe import HeadProbe
    from catnat.tree_heads import CatnatHead as CatnatHead
    from catnat.tree_heads import NaturalHead as NaturalHead
    from catnat.tree_heads import SigmoidHead as SigmoidHead
    from catnat.tree_linear import TreeLinear as TreeLinear

__version__ = "0.1.0"
# What help(catnat) explains at full length. Every name of _HOMES can be imported from catnat.
__all__ = [
    "CategoricalHead",
    "HeadProbe",
    "estimators",
    "fisher",
    "head_names",
    "losses",
    "make_head",
]
_HOMES = {
    "distributions": ("HeadCategorical",),
    "heads": ("CategoricalHead", "SoftmaxHead", "SparsemaxHead", "head_names", "make_head"),
    "mixed_head": ("MixedHead",),
    "one_hot": ("HeadOneHotCategorical",),
    "probe": ("HeadProbe",),
    "tree_heads": ("CatnatHead", "NaturalHead", "SigmoidHead"),
    "tree_linear": ("TreeLinear",),
}


def __getattr__(name: str) -> Any:
    if name in ("estimators", "fisher", "losses"):
        return import_module(f"catnat.{name}")
    home = next((each for each, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'catnat' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"catnat.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for names in _HOMES.values() for name in names)})
