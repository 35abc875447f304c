"""Monitored metrics: a name that the model does not log is found before the first step."""

import re
from collections.abc import Iterator

from lightning.pytorch import Trainer


def check_monitors(trainer: Trainer) -> None:
    """Raise a ValueError if a callback or a scheduler monitors a metric that is not logged.

    Call it after the sanity check, which validates before the first step. A name that does not
    begin like a metric of the validation ("val" of "val/loss" and "val_loss") may be logged in
    training, and is not refused.
    """
    logged = sorted(trainer.callback_metrics)
    stages = {_stage(name) for name in logged}
    for owner, monitor in _monitors(trainer):
        if monitor not in logged and _stage(monitor) in stages:
            raise ValueError(
                f"{owner} monitors {monitor!r}, which the model does not log; it logs "
                f"{', '.join(logged)}"
            )


def _monitors(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Who monitors which metric, and needs it: a callback may tolerate that it is missing."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and getattr(callback, "strict", True):
            yield type(callback).__name__, monitor
    for plan in trainer.lr_scheduler_configs:
        if plan.reduce_on_plateau and plan.monitor and plan.strict:
            yield type(plan.scheduler).__name__, plan.monitor


def _stage(name: str) -> str:
    """The first word of a name."""
    return re.split("[^A-Za-z0-9]", name, maxsplit=1)[0]
