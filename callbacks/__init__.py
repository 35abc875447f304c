"""Callbacks for Lightning and Stable-Baselines3: they observe, and never change what is learned.

Those for Stable-Baselines3 are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoints import (
    AtomicCheckpointIO,
    LastCheckpoint,
    Stopped,
    check_same,
    compare,
    find_checkpoint,
    load_checkpoint,
    open_run,
)
from .figures import VAEFigures
from .fisher import FisherMonitor
from .progress import ProgressLines
from .report import report, show_metrics
from .standard import standard_options

if TYPE_CHECKING:
    from .fisher_sb3 import FisherMonitorSB3
    from .ppo import PPORun, forked_random_state, load_state, recent_return

__all__ = [
    "AtomicCheckpointIO",
    "FisherMonitor",
    "FisherMonitorSB3",
    "LastCheckpoint",
    "PPORun",
    "ProgressLines",
    "Stopped",
    "VAEFigures",
    "check_same",
    "compare",
    "find_checkpoint",
    "forked_random_state",
    "load_checkpoint",
    "load_state",
    "open_run",
    "recent_return",
    "report",
    "show_metrics",
    "standard_options",
]
_SB3 = {
    "FisherMonitorSB3": "fisher_sb3",
    "PPORun": "ppo",
    "forked_random_state": "ppo",
    "load_state": "ppo",
    "recent_return": "ppo",
}


def __getattr__(name: str) -> Any:
    if name not in _SB3:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_SB3[name]}", __name__), name)
