"""Shared base of all runs: folder, messages and metrics."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from catnat.callbacks.files import write_whole
from catnat.callbacks.signals import Stopped
from catnat.callbacks.tags import warnings_of
from catnat.callbacks.tensorboard import RunLogger
from catnat.cli.errors import UsageError, one_line
from catnat.cli.folder import RunFolder
from catnat.cli.names import Options, program_name
from catnat.cli.request import Request

Metrics = dict[str, Any]  # by name; the source of the data is text
print_once: Callable[..., None] = rank_zero_only(print)


class Run(Protocol):
    """A run that is built and has not started.

    Attributes:
        request: the command line.
        folder: the folder of the run.
        keeps: whether the run leaves a folder.
        title: such as "fit vae with natural".
        remark: text printed behind the folder at the start.
        in_batches: whether batches are computed: an error is then not one of usage.
        began: the step from which the run resumes.
        step: the number of steps done.
    """

    request: Request
    folder: RunFolder
    keeps: bool
    title: str
    remark: str
    in_batches: bool
    began: int

    @property
    def step(self) -> int: ...  # noqa: D102

    def fit(self) -> Metrics:
        """Train, then test."""
        ...

    def evaluate(self, command: str) -> Metrics:
        """Validate, test or predict."""
        ...

    def close(self) -> None:
        """Release what the run holds."""
        ...


def execute(run: Run) -> None:
    """Do what the command line asks for, in the folder of the run.

    Raises:
        UsageError: an error occurred before the first batch.
    """
    command = run.request.command
    with ExitStack() as at_end:
        at_end.callback(run.close)
        try:
            folder = run.folder.path if run.keeps or run.folder.resumed else None
            remark = run.remark if command == "fit" else ""
            print_once(f"{run.title}{f': {folder}' if folder else ''}{remark}", flush=True)
            metrics = run.fit() if command == "fit" else run.evaluate(command)
        except Stopped as stop:
            again = f"{program_name()} --ckpt_path {stop.path}"
            print_once(f"{stop}; resume with: {again}", flush=True)
            raise SystemExit(128 + stop.signum) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            if not run.in_batches and run.step <= run.began:
                raise UsageError(error) from error
            last = run.folder.path / "checkpoints" / "last.ckpt"
            saved = f"; the latest checkpoint is {last}" if last.is_file() else ""
            ended = f"{run.title} ended after step {run.step}: {one_line(error)}{saved}"
            print_once(f"catnat: {ended}", file=sys.stderr)
            if isinstance(error, OSError | FloatingPointError):  # not a bug
                raise SystemExit(1) from error
            raise
        if metrics or run.keeps:
            _finish(metrics, folder, run.keeps)


@rank_zero_only
def _finish(metrics: Metrics, folder: Path | None, keeps: bool) -> None:
    """Print the metrics of a run and where to look further; write the metrics of training.

    The file metrics.json marks a run as finished: the test of a checkpoint writes none.
    """
    if folder and keeps:
        write_whole(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
    table = Table(show_header=False)
    for name, value in metrics.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.4g}")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for sentence in warnings_of(metrics):
        console.print(sentence)
    if folder:  # runs/<model>/<head>/version_<k>
        console.print(f"run: {folder}")
        console.print(f"compare runs: catnat compare {folder.parent.parent}/*/version_*")
        if any(folder.glob("events.*")):
            console.print(f"tensorboard --logdir {folder.parent.parent}")


def make_logger(folder: RunFolder, first_step: int) -> RunLogger:
    """The logger of the run's event file; a resumed run writes from the first step on."""
    logger = RunLogger(folder.path.parent, "", folder.path.name, default_hp_metric=False)
    logger.resumed_at = first_step if folder.resumed else None
    return logger


@rank_zero_only
def write_hparams(logger: TensorBoardLogger, hparams: Options, metrics: Metrics, step: int) -> None:
    """Fill TensorBoard's tab HPARAMS; warnings go to TEXT."""
    tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
    logger.log_hyperparams(hparams, tested, step)
    for sentence in warnings_of(metrics):
        logger.experiment.add_text("warnings", sentence, step)
    logger.save()


def hparams_of(options: Options) -> Options:
    """The options of model and data by their short names, and the seeds."""
    hparams = {
        name.partition(".")[2]: value
        for group in ("data.", "model.")  # the class_path is the model's
        for name, value in options.items()
        if name.startswith(group)
    }
    return hparams | {"data_seed": options.get("data.seed"), "seed": options["seed_everything"]}
