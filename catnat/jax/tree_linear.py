"""TreeLinear in JAX: log-probabilities and samples of an output layer over many classes.

The parameters are those of :class:`catnat.TreeLinear`, as a dictionary of arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import checked_categories, checked_order, require_at_least, require_within
from catnat.jax.distribution import Categorical
from catnat.jax.flat_heads import SoftmaxHead, make_head
from catnat.jax.head import checked_value
from catnat.jax.numerics import at_least_float32, floored_sums
from catnat.jax.tree_heads import CatnatHead
from catnat.natural import DEFAULT_TAIL

Parameters = Mapping[str, Array]


@jax.tree_util.register_static
@dataclass(frozen=True)
class TreeLinear:
    """From hidden states (*, D) to K classes: a softmax over frequent ones, a tree over the others.

    p(k) = softmax(k) for one of the first F places, and p(k) = softmax(rare) tree(k) for another.
    The object holds options alone; methods take the parameters. Those of a torch layer:
    ``{name: jnp.asarray(tensor) for name, tensor in layer.state_dict().items()}``.

    Args:
        num_categories: K, at least 2.
        head: the name of a tree head. ``"natural"`` has a tail of 0.05.
        frequent: F, the number of places in the softmax, 0 to K - 2.
        order: the place of each class, a permutation of 0..K-1, which begins with the frequent
            ones: ``layer.order`` of a torch layer; None for class k at place k.

    >>> layer = TreeLinear(1000, frequent=100)
    >>> parameters = layer.init(jax.random.key(0), in_features=4)
    >>> layer.log_prob(parameters, jnp.zeros((3, 4)), jnp.array([7, 0, 999])).shape
    (3,)
    """

    num_categories: int
    head: str = "sigmoid"
    frequent: int = 0
    order: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        K = checked_categories(self.num_categories)
        require_within(0, K - 2, frequent=self.frequent)
        if self.order is not None:
            vars(self).update(order=checked_order(self.order, K))
        if not isinstance(self.tree, CatnatHead):
            raise ValueError(f"TreeLinear needs a tree head, sigmoid or natural, got {self.head!r}")

    @property
    def tree(self) -> Any:
        """The head over the rare classes."""
        options = {"tail": DEFAULT_TAIL} if self.head in ("natural", "catnat-natural") else {}
        return make_head(self.head, self.num_categories - self.frequent, **options)

    def init(self, key: Array, in_features: int) -> dict[str, Array]:
        """Weights and biases, drawn as ``torch.nn.Linear`` does."""
        require_at_least(1, in_features=in_features)
        rows = {"": self.tree.num_scores}
        if self.frequent:
            rows["shortlist."] = self.frequent + 1
        bound = 1 / math.sqrt(in_features)
        parameters = {}
        for prefix, count in rows.items():
            for name, shape in (("weight", (count, in_features)), ("bias", (count,))):
                key, part = jax.random.split(key)
                numbers = jax.random.uniform(part, shape, minval=-bound, maxval=bound)
                parameters[prefix + name] = numbers
        return parameters

    def log_prob(self, parameters: Parameters, hidden: Array, value: Array) -> Array:
        """Log-probabilities of classes, (*, D), (*) -> (*), along their paths; NaN for others."""
        place, is_class = checked_value(value, self.num_categories)
        if self.order is not None:
            place = jnp.asarray(np.array(self.order))[place]
        leaf = jnp.maximum(place - self.frequent, 0)
        taken, _ = self.tree.path_logs_by(partial(_scores, parameters, hidden), leaf)
        log_prob = floored_sums(taken.sum(-1))
        if self.frequent:
            column = jnp.minimum(place, self.frequent)
            log_prob = jnp.where(place < self.frequent, 0.0, log_prob)
            log_prob = log_prob + self._shortlist(parameters, hidden).log_prob(column)
        return jnp.where(is_class, log_prob, jnp.nan)

    def sample(
        self, key: Array, parameters: Parameters, hidden: Array, sample_shape: tuple[int, ...] = ()
    ) -> Array:
        """Random classes, (*, D) -> (*sample_shape, *) in int32; -1 where a score is NaN."""
        hidden = jnp.asarray(hidden)
        shape = (*sample_shape, *hidden.shape[:-1])
        tree_key, block_key = jax.random.split(key)
        dtype = at_least_float32(hidden).dtype
        scores_at = partial(_scores, parameters, hidden)
        leaf = self.tree.sample_by(tree_key, scores_at, shape, dtype)
        place = jnp.where(leaf < 0, -1, leaf + self.frequent)
        if self.frequent:
            shortlist = self._shortlist(parameters, hidden)
            column = shortlist.sample(seed=block_key, sample_shape=sample_shape)
            place = jnp.where(column < self.frequent, column, place)  # -1 where a score is NaN
        if self.order is None:
            return place
        classes = jnp.asarray(np.argsort(self.order).astype(np.int32))
        return jnp.where(place < 0, -1, classes[place])

    def _shortlist(self, parameters: Parameters, hidden: Array) -> Categorical:
        """The softmax over the frequent classes and "rare", (*, D) -> (*)."""
        scores = at_least_float32(hidden @ parameters["shortlist.weight"].T)
        if "shortlist.bias" in parameters:
            scores = scores + parameters["shortlist.bias"]
        return SoftmaxHead(self.frequent + 1)(scores)


def _scores(parameters: Parameters, hidden: Array, node: Array) -> Array:
    """The scores of nodes, (*, D) and (*, H) -> (*, H)."""
    rows = parameters["weight"][node]
    scores = at_least_float32(jnp.einsum("...d,...hd->...h", hidden, rows))
    if "bias" in parameters:
        scores = scores + parameters["bias"][node]
    return scores
