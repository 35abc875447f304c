"""Progress of a run: bars on a terminal, a few lines of text elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bars:
    """Bars on a terminal, each with a title and the time that is left.

    Several bars can be open at once: training, and the validation within it.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._tasks: dict[str, TaskID] = {}

    def move(self, name: str, done: int, total: float, title: str) -> None:
        """Move a bar, which is begun if it is new; a bar of infinite total shows no time left."""
        most = None if math.isinf(total) else total
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(title, total=most, completed=done)
            self._progress.start()
        self._progress.update(self._tasks[name], completed=done, total=most, description=title)

    def remove(self, name: str) -> None:
        """Take a bar away, if it is there."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def stop(self) -> None:
        """Leave the bars as they are, and give the terminal back."""
        self._progress.stop()

    def print(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text)


class StepBar(ProgressBar):
    """A bar of all steps of a run with the time left of the whole run; another for evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self._bars: Bars | None = None
        self._enabled = True
        self._first, self._began = 0, 0.0
        self._total, self._title, self._titled = math.inf, "", -math.inf

    def disable(self) -> None:
        """Show nothing: on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show bars again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bars, or as usual where there are none."""
        text = kwargs.get("sep", " ").join(map(str, args))
        print(text) if self._bars is None else self._bars.print(text)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar where a resumed run stopped."""
        self._first, self._began = trainer.global_step, time.monotonic()
        self._total, self._titled = total_steps(trainer), -math.inf
        self._show_steps()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Move the bar."""
        self._show_steps()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar as it is."""
        self._titled = -math.inf
        self._show_steps()
        self._stop()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Give the terminal back."""
        self._stop()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Move the bar of a validation."""
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else (
            trainer.num_val_batches
        )  # fmt: skip
        self._show("validation", batch_idx, batches, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the bar of a validation within training away."""
        if self._bars is not None:
            self._bars.remove("validation")
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._stop()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Move the bar of a test."""
        self._show("test", batch_idx, trainer.num_test_batches, dataloader_idx)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar as it is."""
        self._stop()

    def _show_steps(self) -> None:
        """Move the bar of training to the step of the run: a model may take several at once."""
        if not self._enabled:
            return
        now = time.monotonic()
        if now - self._titled > 0.1:  # reading a metric waits for the device
            self._titled, self._title = now, self._title_at(self.trainer.global_step, now)
        self._move("steps", self.trainer.global_step, self._total, self._title)

    def _title_at(self, step: int, now: float) -> str:
        rate = (step - self._first) / max(now - self._began, 1e-9)
        of_all = "" if math.isinf(self._total) else f" of {self._total:,}"
        shown = self.get_metrics(self.trainer, self.trainer.lightning_module)
        shown.pop("v_num", None)
        metrics = "".join(f"  {name} {_short(value)}" for name, value in shown.items())
        return f"step {step:,}{of_all}  {rate_text(rate)}/s{metrics}"

    def _show(self, name: str, batch_idx: int, batches: Any, loader: int) -> None:
        if self._enabled:
            total = batches[loader] if isinstance(batches, list) else batches
            of_all = "" if math.isinf(total) else f" of {total:,}"
            title = f"{name}: batch {batch_idx + 1:,}{of_all}"
            self._move(name, batch_idx + 1, total, title)

    def _move(self, name: str, done: int, total: float, title: str) -> None:
        if self._bars is None:
            self._bars = Bars()
        self._bars.move(name, done, total, title)

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class ProgressLines(Callback):
    """Prints a line at each validation: step, speed, time left and metrics. For logs and pipes.

    During a long test it prints how many batches are done, and the time left.

    Args:
        test_seconds: time from the start of a test to its first line; a shorter test prints none.
            Each further line takes twice as long as the one before.
    """

    def __init__(self, test_seconds: float = 10.0) -> None:
        self.test_seconds = test_seconds
        self._next = 0.0  # seconds from the start of a test to its next line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._first = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line."""
        training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not training or not trainer.is_global_zero:
            return
        step = trainer.global_step
        rate = (step - self._first) / max(time.monotonic() - self._began, 1e-9)
        metrics = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        print(progress_line(step, total_steps(trainer), rate, metrics), flush=True)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._next = time.monotonic(), self.test_seconds

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Print a line if its time has come."""
        seconds = time.monotonic() - self._began
        if seconds < self._next or not trainer.is_global_zero:
            return
        self._next = 2 * seconds if self.test_seconds else 0.0
        batches = trainer.num_test_batches[dataloader_idx]
        print(line_of_test(batch_idx + 1, batches, seconds), flush=True)


def total_steps(trainer: Trainer) -> float:
    """All steps of a run; infinite if nobody can tell."""
    return trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches


def line_of_test(done: int, batches: float, seconds: float) -> str:
    """A line of text: the batches done of a test, and the time left."""
    if math.isinf(batches):
        return f"test  batch {done}"
    left = seconds * (batches - done) / done
    return f"test  batch {done} of {batches:.0f}  about {duration(left)} left"


def rate_text(rate: float) -> str:
    """Three digits or all: 1960, not 1.96e+03."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def progress_line(step: int, total: float, rate: float, metrics: Mapping[str, Any]) -> str:
    """A line of text: step of all steps, steps per second, time left and metrics."""
    left = 0 if math.isinf(total) else total - step
    words = [f"step {step}" + ("" if math.isinf(total) else f" of {total}")]
    words.append(f"{rate_text(rate)} steps/s")
    if left > 0 and rate > 0:
        words.append(f"about {duration(left / rate)} left")
    words += [f"{name} {float(value):.4g}" for name, value in metrics.items()]
    return "  ".join(words)


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> duration(0.43), duration(59.6), duration(600), duration(9000)
    ('0.4 s', '60 s', '10 min', '2.5 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds <= 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
