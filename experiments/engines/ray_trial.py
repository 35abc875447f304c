"""A run as a trial of Ray Tune: it reports validation metrics and saves to Tune's storage."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.result import SHOULD_CHECKPOINT

from experiments import runs
from experiments.engines.devices import VISIBLE
from experiments.engines.execute import execute
from experiments.engines.processes import Children
from experiments.plan import Run

_KEPT = ("checkpoints/last.*", "config.yaml", "hparams.yaml", "events.*")
_MOMENT = "saved_at.json"
_PATHS = ("folder", "home", "cwd")  # of a run, as text in a configuration


def config_of(run: Run, **more: Any) -> dict[str, Any]:
    """A run as the configuration of a trial: plain values, for Tune to write down."""
    return {
        **{f"cell/{option}": value for option, value in run.cell.items()},
        **run.settings,
        "seed": run.seed,
        "run": asdict(run)
        | {name: str(getattr(run, name)) for name in _PATHS}
        | {"command": list(run.command)},
        **more,
    }


def run_of(config: dict[str, Any]) -> Run:
    """The run of a trial."""
    words: dict[str, Any] = config["run"]
    paths = {name: Path(words[name]) for name in _PATHS}
    return Run(**words | paths | {"command": tuple(words["command"])})


class RunTrial(tune.Trainable):
    """Does a run. A step ends with a new validation metric, a new checkpoint, or the run.

    The configuration has besides the run: metric (to report), retries, and environments (of runs on
    each GPU).
    """

    poll = 0.5  # seconds

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare; the run starts with the first step, when its checkpoint is back."""
        self.run_, self.metric, self.retries = run_of(config), config["metric"], config["retries"]
        device = os.environ.get(VISIBLE, "")
        self.environment = config.get("environments", {}).get(device, {})
        self.children = Children()
        self.thread: threading.Thread | None = None
        self.outcome: str = "interrupted"
        self.values: list[float] = []  # of the metric, one for each validation
        self.saved, self.validations, self.size = 0.0, 0, 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Let this process do another run."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Wait for something to report."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._execute, daemon=True)
            self.thread.start()
        while True:
            alive = self.thread.is_alive()
            found = self._news()
            if found:
                return found
            if not alive:
                break
            self.thread.join(self.poll)
        if self.outcome == "interrupted":  # Tune starts the trial again, here or elsewhere
            raise RuntimeError(f"{self.run_.name} was interrupted")
        return self._end()

    def _execute(self) -> None:
        self.outcome = execute(self.run_, self.retries, self.children, self.environment)

    def _news(self) -> dict[str, Any]:
        """A validation metric or a checkpoint that was not yet reported."""
        found: dict[str, Any] = {}
        value = self._validation()
        if value is not None:
            found = {self.metric: value, "validations": self.validations}
        if self._checkpoint_time() > self.saved:
            found[SHOULD_CHECKPOINT] = True
        return found

    def _validation(self) -> float | None:
        """The next validation metric that was not yet reported; each one counts for ASHA."""
        files = [path for folder in runs.versions(self.run_) for path in folder.glob("events.*")]
        size = sum(path.stat().st_size for path in files)
        if self.metric and size != self.size:
            self.size = size
            points = runs.curves(self.run_, [self.metric], points=0, unfinished=True)
            self.values = [float(point["value"]) for point in points]
        if len(self.values) <= self.validations:
            return None
        self.validations += 1
        return self.values[self.validations - 1]

    def _end(self) -> dict[str, Any]:
        """The last report: everything that the folder of the run says."""
        numbers = runs.metrics(self.run_) or {}
        line = runs.failure(self.run_)
        found: dict[str, Any] = {"done": True, "outcome": self.outcome, "numbers": numbers}
        if self.metric in numbers:
            found |= {self.metric: numbers[self.metric], "validations": self.validations + 1}
        return found | ({} if line is None else {"line": line})

    def _checkpoint_time(self) -> float:
        path = runs.checkpoint(self.run_)
        return path.stat().st_mtime if path else 0.0

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the newest version of the run, as far as it is needed to go on."""
        path, place = runs.checkpoint(self.run_), Path(checkpoint_dir)
        self.saved = self._checkpoint_time()
        (place / _MOMENT).write_text(json.dumps(self.saved))
        if path is None:
            return
        folder = path.parent.parent
        target = place / "home" / folder.relative_to(self.run_.home)
        for each in (each for pattern in _KEPT for each in folder.glob(pattern)):
            copy = target / each.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(each, copy)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Put a copy back, unless the folder of the run is as new: machines may share it."""
        place = Path(checkpoint)
        self.saved = float(json.loads((place / _MOMENT).read_text()))
        if self._checkpoint_time() < self.saved and (place / "home").is_dir():
            shutil.copytree(place / "home", self.run_.home, dirs_exist_ok=True)

    def cleanup(self) -> None:
        """Stop the run, which saves what it has."""
        self.children.stop()
        if self.thread is not None:
            self.thread.join()
