"""ASHA for Ray Tune: stop runs of a search that are worse than most at their step."""

from __future__ import annotations

import json
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler


class AshaPerCell(FIFOScheduler):
    """ASHA among the runs of one cell's search: other cells and seeds are not compared with it."""

    def __init__(self, metric: str, mode: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._metric_name, self._mode_name = metric, mode
        self._cells: dict[str, ASHAScheduler] = {}

    def _asha(self, trial: Any) -> ASHAScheduler | None:
        if not trial.config.get("searches"):
            return None
        cell = json.dumps(trial.config["run"]["cell"])
        if cell not in self._cells:
            self._cells[cell] = ASHAScheduler(
                time_attr="validations",
                metric=self._metric_name,
                mode=self._mode_name,
                max_t=10**6,
                reduction_factor=3,
                stop_last_trials=False,
            )
        return self._cells[cell]

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        """A trial is known."""
        if (asha := self._asha(trial)) is not None:
            asha.on_trial_add(controller, trial)

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Go on, or stop."""
        asha = self._asha(trial)
        if asha is None:
            return str(TrialScheduler.CONTINUE)
        return str(asha.on_trial_result(controller, trial, result))

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial has ended."""
        if (asha := self._asha(trial)) is not None:
            asha.on_trial_complete(controller, trial, result)

    def on_trial_remove(self, controller: Any, trial: Any) -> None:
        """A trial will not start."""
        if (asha := self._asha(trial)) is not None:
            asha.on_trial_remove(controller, trial)
