"""Lightning callbacks that observe a run and do not affect training.

:class:`FisherMonitorSB3` is a callback for Stable-Baselines3. It is imported on first use.
"""

if __name__ != "catnat.callbacks":  # imported by the bare name of the folder
    from catnat.bare_names import use_catnat

    use_catnat(__name__)

from typing import TYPE_CHECKING, Any

from catnat.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from catnat.callbacks.fisher_monitor import FisherMonitor
from catnat.callbacks.images import Figures
from catnat.callbacks.progress import RunProgressBar, TestTime

if TYPE_CHECKING:
    from catnat.callbacks.fisher_monitor_sb3 import FisherMonitorSB3

__all__ = [
    "BestCheckpoint",
    "Figures",
    "FisherMonitor",
    "FisherMonitorSB3",
    "LastCheckpoint",
    "RunProgressBar",
    "TestTime",
]


def __getattr__(name: str) -> Any:
    if name != "FisherMonitorSB3":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from catnat.callbacks.fisher_monitor_sb3 import FisherMonitorSB3

    return FisherMonitorSB3
