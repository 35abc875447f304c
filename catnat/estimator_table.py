"""The table of estimators that ``rsample``, models, tests and docs use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from catnat.checks import require_choice
from catnat.estimators import (
    gumbel_rao,
    reinmax,
    score_function_surrogate,
    straight_through,
    straight_through_gumbel,
    unordered_set_surrogate,
)


class Sampled(Protocol):
    """Operations of a distribution over K categories that an estimator needs."""

    @property
    def logits(self) -> Tensor:
        """Log-probabilities, (*, K)."""

    @property
    def probs(self) -> Tensor:
        """Probabilities, (*, K)."""

    def one_hot_sample(self, sample_shape: Any, generator: torch.Generator | None) -> Tensor:
        """Samples as one-hot vectors, (*sample_shape, *, K)."""


@dataclass(frozen=True)
class Estimator:
    """A gradient estimator, as one row of a table.

    Attributes:
        name: name in :meth:`~catnat.HeadCategorical.rsample` and in options of models.
        function: its function in :mod:`catnat.estimators`.
        value: value of the sample or of the surrogate, in words.
        gradient: description of the gradient, in one line.
        reference: authors and year.
        has_temperature: whether it uses ``temperature``.
        has_draws: whether it uses ``num_draws``.
        unbiased: whether its expectation is the exact gradient for every loss.
        draw: function that draws samples with this gradient; None for a surrogate of losses.
        aliases: other names.
    """

    name: str
    function: Callable[..., Tensor]
    value: str
    gradient: str
    reference: str
    has_temperature: bool = False
    has_draws: bool = False
    unbiased: bool = False
    draw: Callable[..., Tensor] | None = None
    aliases: tuple[str, ...] = ()

    def options(self, **given: Any) -> dict[str, Any]:
        """The given options, with defaults in place of None.

        An option that the estimator does not use raises a ValueError.

        >>> find_estimator("gumbel-rao").options(temperature=0.5, num_draws=None)
        {'temperature': 0.5, 'num_draws': 8}
        >>> find_estimator("reinmax").options(temperature=0.5)
        Traceback (most recent call last):
        ValueError: the estimator 'reinmax' has no temperature, got 0.5
        """
        self.refuse_unused(**given)
        defaults = {"temperature": 1.0} if self.has_temperature else {}
        if self.has_draws:
            defaults["num_draws"] = 8
        return defaults | {name: value for name, value in given.items() if value is not None}

    def refuse_unused(self, **given: Any) -> None:
        """Raise a ValueError for an option that is not None and that the estimator does not use."""
        for name, value in given.items():
            is_used = self.has_draws if name == "num_draws" else self.has_temperature
            if value is not None and not is_used:
                raise ValueError(f"the estimator {self.name!r} has no {name}, got {value!r}")


def _draw_gumbel(
    q: Sampled, shape: torch.Size, generator: torch.Generator | None, temperature: float | Tensor
) -> Tensor:
    log_probs = q.logits.expand(shape + q.logits.shape)
    return straight_through_gumbel(log_probs, temperature, True, generator)


def _draw_relaxed(
    q: Sampled, shape: torch.Size, generator: torch.Generator | None, temperature: float | Tensor
) -> Tensor:
    log_probs = q.logits.expand(shape + q.logits.shape)
    return straight_through_gumbel(log_probs, temperature, False, generator)


def _draw_gumbel_rao(
    q: Sampled,
    shape: torch.Size,
    generator: torch.Generator | None,
    temperature: float | Tensor,
    num_draws: int,
) -> Tensor:
    one_hot = q.one_hot_sample(shape, generator)
    return gumbel_rao(q.logits, one_hot, temperature, num_draws, generator)


def _draw_straight_through(
    q: Sampled, shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    return straight_through(q.probs, q.one_hot_sample(shape, generator))


def _draw_reinmax(q: Sampled, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    return reinmax(q.logits, q.one_hot_sample(shape, generator))


TABLE = (
    Estimator(
        "gumbel",
        straight_through_gumbel,
        value="one-hot",
        gradient="gradient of a relaxed sample",
        reference="Jang, Gu and Poole, 2017",
        has_temperature=True,
        draw=_draw_gumbel,
    ),
    Estimator(
        "gumbel-rao",
        gumbel_rao,
        value="one-hot",
        gradient="mean gradient of relaxed samples that agree with the sample",
        reference="Paulus, Maddison and Krause, 2021",
        has_temperature=True,
        has_draws=True,
        draw=_draw_gumbel_rao,
    ),
    Estimator(
        "straight-through",
        straight_through,
        value="one-hot",
        gradient="gradient of the probabilities",
        reference="Bengio, Léonard and Courville, 2013",
        draw=_draw_straight_through,
    ),
    Estimator(
        "reinmax",
        reinmax,
        value="one-hot",
        gradient="exact to second order",
        reference="Liu et al., 2023; ZGR: Shekhovtsov, 2023",
        draw=_draw_reinmax,
        aliases=("zgr",),
    ),
    Estimator(
        "relaxed",
        straight_through_gumbel,
        value="point of the simplex",
        gradient="exact for the relaxed loss",
        reference="Maddison, Mnih and Teh, 2017",
        has_temperature=True,
        draw=_draw_relaxed,
    ),
    Estimator(
        "score-function",
        score_function_surrogate,
        value="mean of losses",
        gradient="log-probabilities weighted by losses of independent samples",
        reference="Williams, 1992; Kool, van Hoof and Welling, 2019",
        unbiased=True,
    ),
    Estimator(
        "unordered-set",
        unordered_set_surrogate,
        value="weighted sum of losses",
        gradient="as score-function, from samples without replacement",
        reference="Kool, van Hoof and Welling, 2020",
        unbiased=True,
    ),
)
"""All estimators."""


def find_estimator(name: str, among: tuple[Estimator, ...] = TABLE) -> Estimator:
    """Find an estimator by its name or alias, with hyphens or underscores.

    >>> find_estimator("score_function").name, find_estimator("zgr").name
    ('score-function', 'reinmax')
    """
    by_name = {
        each: estimator for estimator in among for each in (estimator.name, *estimator.aliases)
    }
    spelled = name.replace("_", "-") if isinstance(name, str) else name
    for each in TABLE:
        if each.name == spelled and each not in among:
            raise ValueError(
                f"the estimator {each.name!r} needs losses instead of a gradient through samples: "
                f"call catnat.estimators.{each.function.__name__}"
            )
    if spelled not in by_name:
        require_choice([estimator.name for estimator in among], estimator=name)
    return by_name[spelled]


def markdown_table() -> str:
    """The table of the docs, in Markdown."""
    lines = [
        "| `estimator` | value | gradient | options | reference |",
        "|---|---|---|---|---|",
    ]
    for each in TABLE:
        names = ", ".join(f"`{name}`" for name in (each.name, *each.aliases))
        uses = {"temperature": each.has_temperature, "num_draws": each.has_draws}
        options = ", ".join(f"`{option}`" for option, is_used in uses.items() if is_used)
        bias = "unbiased" if each.unbiased else "biased"
        call = "" if each.draw else f"; call `{each.function.__name__}`"
        lines.append(
            f"| {names} | {each.value}{call} | {bias}: {each.gradient} | {options} "
            f"| {each.reference} |"
        )
    return "\n".join(lines) + "\n"
