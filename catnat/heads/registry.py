"""The registry of heads: :func:`make_head` builds a head by its name."""

import inspect
from typing import Any

from catnat.checks import require_choice, require_within
from catnat.heads.base import ALIASES, REGISTRY, CategoricalHead
from catnat.heads.flat import SoftmaxHead, SparsemaxHead
from catnat.heads.mixed import MixedHead
from catnat.heads.tree import NaturalHead, SigmoidHead

_BUILT_IN = (SoftmaxHead.name, SparsemaxHead.name, SigmoidHead.name, NaturalHead.name)


def head_names() -> tuple[str, ...]:
    """Names of all registered heads: the paper's four, then all others in order of definition.

    >>> from catnat import head_names
    >>> head_names()[:4]
    ('softmax', 'sparsemax', 'sigmoid', 'natural')
    """
    return tuple(dict.fromkeys((*_BUILT_IN, *REGISTRY)))


def make_head(
    head: str | CategoricalHead, num_categories: int, mix: float = 0.0, **options: Any
) -> CategoricalHead:
    """Build a head by name, or check the number of categories of an existing head.

    Args:
        head: a name from :func:`head_names`, an alias such as ``"catnat-natural"``, or a head.
        num_categories: number of categories (K), at least 2.
        mix: share of the uniform distribution in [0, 1), for any head. Above 0 the result is a
            :class:`~catnat.heads.mixed.MixedHead`.
        options: options of the named head, such as ``amplitude`` for natural.

    >>> from catnat import make_head
    >>> make_head("softmax", 8)
    SoftmaxHead(num_categories=8, num_scores=8)
    """
    require_within(0, 1, "[)", mix=mix)
    if isinstance(head, CategoricalHead):
        if options:
            raise ValueError(
                f"options {sorted(options)} cannot be set on the existing head {head!r}"
            )
        if head.num_categories != num_categories:
            got = head.num_categories
            raise ValueError(f"head must have {num_categories} categories, got {got}")
    else:
        name = ALIASES.get(head, head)
        require_choice(head_names(), head=name)
        parameters = inspect.signature(REGISTRY[name]).parameters
        takes_any = any(option.kind == option.VAR_KEYWORD for option in parameters.values())
        _, *names = parameters  # the first is num_categories
        unknown = sorted(set(options) - set(names))
        if unknown and not takes_any:
            choices = ", ".join([*names, "mix"])
            raise ValueError(f"head {head!r} has no option {unknown[0]!r}; choose from {choices}")
        head = REGISTRY[name](num_categories, **options)
    return MixedHead(head, mix) if mix else head
