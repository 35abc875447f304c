"""An output layer for many classes: a softmax over the frequent ones, a tree over the rare ones.

>>> from catnat.output_layer import TreeLinear
>>> layer = TreeLinear(in_features=16, num_categories=1000, frequent=100)
"""

from catnat.output_layer.tree_linear import TreeLinear

__all__ = ["TreeLinear"]
