"""HeadProbe: observes the latest scores of every head in a model."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from catnat.distributions import HeadCategorical
from catnat.heads.base import CategoricalHead


class HeadProbe:
    """Keeps the scores of the latest call of every :class:`CategoricalHead` inside a module.

    The probe uses forward hooks and does not change the module. It copies the scores, because an
    update may change them in place. It sees calls of the head itself (``head(scores)``), but not of
    ``head.log_probs``. With a mask it keeps ``head.masked(scores, mask)``. A head inside another
    head, as in :class:`~catnat.heads.mixed.MixedHead`, is part of the outer head. Attach the probe
    before the first call of a compiled model: a hook registered later never fires. Iterating over
    the probe raises an error if no head was called.

    Args:
        module: the model, or a head.

    >>> import torch
    >>> from catnat import make_head
    >>> head = make_head("natural", 4)
    >>> with HeadProbe(head) as probe:
    ...     _ = head(torch.zeros(2, 3))
    >>> [(name, scores.shape) for name, _, scores in probe]
    [('', torch.Size([2, 3]))]
    """

    def __init__(self, module: nn.Module) -> None:
        self.heads = {}
        inside: set[nn.Module] = set()
        for name, part in module.named_modules():  # a head comes before the heads inside it
            if isinstance(part, CategoricalHead) and part not in inside:
                self.heads[name] = part
                inside.update(part.modules())
        if not self.heads:
            raise ValueError(f"{type(module).__name__} contains no CategoricalHead")
        self.scores: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> "HeadProbe":
        """Start observing, discard earlier scores and return the probe."""
        if not self._handles:
            self.scores = {}
            self._handles = [
                head.register_forward_hook(partial(self._remember, name))
                for name, head in self.heads.items()
            ]
        return self

    def detach(self) -> None:
        """Stop observing and keep the scores."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __iter__(self) -> Iterator[tuple[str, CategoricalHead, Tensor]]:
        """(name, head, latest scores without gradient) of every head that was called."""
        if not self.scores:
            raise RuntimeError(
                "no head was called since the probe was attached; call the head itself "
                "(head(scores)), and attach before the first call of a compiled model"
            )
        for name, scores in self.scores.items():
            yield name, self.heads[name], scores

    __enter__ = attach

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _remember(
        self, name: str, head: nn.Module, inputs: tuple[Tensor, ...], output: HeadCategorical
    ) -> None:
        self.scores[name] = output.scores.detach().clone()
