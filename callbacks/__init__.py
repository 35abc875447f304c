"""Callbacks: they observe, and never change what is learned.

For Lightning, except :class:`FisherMonitorSB3`, which needs Stable-Baselines3 and is imported
when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from .checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    Stopped,
    check_same,
    check_source,
    compare,
    load_checkpoint,
)
from .figures import GraphFigures, VAEFigures
from .fisher import FisherMonitor
from .folders import closing_runs, find_checkpoint, open_run
from .progress import ProgressLines
from .record import RunLogger, RunRecord, last_validation
from .report import report, show_metrics
from .standard import check_options, standard_options

if TYPE_CHECKING:
    from .fisher_sb3 import FisherMonitorSB3

__all__ = [
    "AtomicCheckpointIO",
    "BestCheckpoint",
    "FisherMonitor",
    "FisherMonitorSB3",
    "GraphFigures",
    "LastCheckpoint",
    "ProgressLines",
    "RunLogger",
    "RunRecord",
    "Stopped",
    "VAEFigures",
    "check_options",
    "check_same",
    "check_source",
    "closing_runs",
    "compare",
    "find_checkpoint",
    "last_validation",
    "load_checkpoint",
    "open_run",
    "report",
    "show_metrics",
    "standard_options",
]


def __getattr__(name: str) -> Any:
    if name != "FisherMonitorSB3":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .fisher_sb3 import FisherMonitorSB3

    return FisherMonitorSB3
