"""Callbacks for Lightning: they observe, and never change what is learned."""

from .checkpoints import (
    AtomicCheckpointIO,
    LastCheckpoint,
    Stopped,
    check_same,
    find_checkpoint,
    open_run,
)
from .figures import GraphFigures, VAEFigures
from .fisher import FisherMonitor
from .progress import ProgressLines
from .report import report
from .standard import standard_options

__all__ = [
    "AtomicCheckpointIO",
    "FisherMonitor",
    "GraphFigures",
    "LastCheckpoint",
    "ProgressLines",
    "Stopped",
    "VAEFigures",
    "check_same",
    "find_checkpoint",
    "open_run",
    "report",
    "standard_options",
]
