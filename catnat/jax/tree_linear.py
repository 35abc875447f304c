"""TreeLinear in JAX: losses, log-probabilities and samples of an output layer over many classes.

The parameters are those of :class:`catnat.TreeLinear`, as a dictionary of arrays.
"""

import hashlib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import checked_categories, checked_order, require_at_least, require_within
from catnat.heads.natural import DEFAULT_TAIL
from catnat.jax.distribution import Categorical
from catnat.jax.flat_heads import SoftmaxHead, make_head
from catnat.jax.head import checked_value
from catnat.jax.numerics import at_least_float32, floored_sums
from catnat.jax.tree_heads import CatnatHead

Parameters = Mapping[str, Array]


class Order:
    """The place of each class, (K,), hashed once: jax looks up compiled functions by the hash."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = np.array(places, np.int32)
        self.places.setflags(write=False)
        self._digest = hashlib.sha256(self.places.tobytes()).digest()

    @property
    def classes(self) -> np.ndarray:
        """The class at each place, (K,)."""
        return np.argsort(self.places).astype(np.int32)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"Order({reprlib.repr(self.places.tolist())})"


@jax.tree_util.register_static
@dataclass(frozen=True)
class TreeLinear:
    """From hidden states (*, D) to K classes: a softmax over frequent ones, a tree over the others.

    p(k) = softmax(k) for one of the first F places, and p(k) = softmax(rare) tree(k) for another.
    The object holds options alone; methods take the parameters. :meth:`from_state_dict` makes both
    from a torch layer.

    Args:
        num_categories: number of classes (K), at least 2.
        head: the name of a tree head. ``"natural"`` has a tail of 0.05.
        frequent: number of places in the softmax (F), 0 to K - 2.
        order: the place of each class, a permutation of 0..K-1 in which the frequent classes have
            the places 0..F-1: ``layer.order`` of a torch layer; None for class k at place k.

    >>> layer = TreeLinear(1000, frequent=100)
    >>> parameters = layer.init(jax.random.key(0), in_features=4)
    >>> layer.log_prob(parameters, jnp.zeros((3, 4)), jnp.array([7, 0, 999])).shape
    (3,)
    """

    num_categories: int
    head: str = "sigmoid"
    frequent: int = 0
    order: Order | Sequence[int] | None = None

    def __post_init__(self) -> None:
        K = checked_categories(self.num_categories)
        require_within(0, K - 2, frequent=self.frequent)
        if self.order is not None and not isinstance(self.order, Order):
            vars(self).update(order=Order(checked_order(self.order, K)))
        if not isinstance(self.tree, CatnatHead):
            raise ValueError(f"TreeLinear needs a tree head, sigmoid or natural, got {self.head!r}")

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], head: str = "sigmoid"
    ) -> tuple[Self, dict[str, Array]]:
        """A layer and its parameters from the ``state_dict()`` of a torch layer.

        Args:
            state_dict: tensors or arrays by name.
            head: the name of the torch layer's head, which a state dict does not hold.
        """
        arrays = {name: np.asarray(value) for name, value in state_dict.items()}
        if "weight" not in arrays:
            names = ", ".join(arrays)
            raise ValueError(f"expected the state dict of a TreeLinear with 'weight', got {names}")
        frequent = len(arrays.get("shortlist.weight", " ")) - 1
        K = len(arrays["weight"]) + 1 + frequent
        order: Any = arrays.pop("order", None)
        if order is not None and np.array_equal(order, np.arange(K)):
            order = None
        layer = cls(K, head, frequent, order)
        return layer, {name: jnp.asarray(value) for name, value in arrays.items()}

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
            place = jnp.asarray(self._order.places)[place]
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
        classes = jnp.asarray(self._order.classes)
        return jnp.where(place < 0, -1, classes[place])

    def nll(
        self, parameters: Parameters, hidden: Array, target: Array, ignore_index: int = -100
    ) -> Array:
        """Mean negative log-likelihood of targets, (*, D), (*) -> ().

        Args:
            parameters: weights and biases.
            hidden: (*, D).
            target: classes, (*).
            ignore_index: targets of this value do not count.
        """
        target = jnp.asarray(target)
        counts = target != ignore_index
        losses = -self.log_prob(parameters, hidden, jnp.where(counts, target, 0))
        return jnp.where(counts, losses, 0.0).sum() / counts.sum()

    def log_probs(self, parameters: Parameters, hidden: Array) -> Array:
        """Log-probabilities of all classes, (*, D) -> (*, K)."""
        hidden = jnp.asarray(hidden)
        scores = at_least_float32(hidden @ parameters["weight"].T)
        if "bias" in parameters:
            scores = scores + parameters["bias"]
        places = self.tree.log_probs(scores)
        if self.frequent:
            block = self._shortlist(parameters, hidden).logits
            places = jnp.concatenate((block[..., :-1], places + block[..., -1:]), -1)
        return places if self.order is None else places[..., self._order.places]

    def topk(self, parameters: Parameters, hidden: Array, k: int) -> tuple[Array, Array]:
        """The k largest log-probabilities and their classes, (*, D) -> (*, k) each, sorted."""
        require_within(1, self.num_categories, k=k)
        values, indices = jax.lax.top_k(self.log_probs(parameters, hidden), k)
        return values, indices

    @property
    def _order(self) -> Order:
        assert isinstance(self.order, Order)
        return self.order

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
