"""Categorical heads with a diagonal Fisher matrix, and what it takes to train with them.

>>> import torch
>>> from catnat import make_head
>>> head = make_head("natural", num_categories=5)
>>> head(torch.zeros(head.num_scores)).probs
tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
"""

from catnat import estimators, fisher, losses
from catnat.distributions import HeadCategorical
from catnat.heads import CategoricalHead, SoftmaxHead, SparsemaxHead, head_names, make_head
from catnat.probe import HeadProbe
from catnat.tree_heads import CatnatHead, NaturalHead, SigmoidHead

__version__ = "0.1.0"
__all__ = [
    "CategoricalHead",
    "CatnatHead",
    "HeadCategorical",
    "HeadProbe",
    "NaturalHead",
    "SigmoidHead",
    "SoftmaxHead",
    "SparsemaxHead",
    "estimators",
    "fisher",
    "head_names",
    "losses",
    "make_head",
]
