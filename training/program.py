"""What differs between models on the command line: a :class:`Program`, which makes a :class:`Run`.

Lightning and Stable-Baselines3 each have one; ``command`` has the steps that they share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from jsonargparse import Namespace

from catnat.training import options as cli
from catnat.training.names import Names


class Run(ABC):
    """Everything that a command needs, made and ready to start."""

    folder: Path
    errors_of: ClassVar[tuple[str, ...]] = ()  # modules whose errors are the user's to mend

    @property
    def is_first_process(self) -> bool:
        """Whether this process prints and reports, of several that may train together."""
        return True

    @abstractmethod
    def fit(self) -> dict[str, float]:
        """Train, then test; returns metrics."""

    @abstractmethod
    def test(self) -> dict[str, float]:
        """Test the checkpoint; returns metrics."""

    @abstractmethod
    def time_spent(self, began: float, imported: float) -> str:
        """A line that says where the seconds went; or nothing.

        Args:
            began: when the command began, by the monotonic clock.
            imported: when all libraries were there.
        """

    def close(self) -> None:  # noqa: B027 - a run of Lightning holds nothing
        """Free what the run holds."""


class Program(ABC):
    """A model on the command line: its options, their defaults, and how it is run.

    ``ckpt_path`` and ``checkpoint`` are the file to continue from or to test, and its content.
    ``imported`` is when all libraries were there, by the monotonic clock.

    Args:
        names: from the command line; a program sets a head or data that the line leaves open.
    """

    how_long: ClassVar[tuple[str, ...]]  # options that say when a run ends
    may_change: ClassVar[tuple[str, ...]]  # options that may differ when a run continues

    def __init__(self, names: Names) -> None:
        self.names = names
        self.ckpt_path: Path | None = None
        self.checkpoint: dict[str, Any] = {}
        self.imported = 0.0

    @abstractmethod
    def build_parser(self, argv: list[str]) -> cli.Parser:
        """A parser of all options; defaults may depend on the command line argv."""

    @abstractmethod
    def complete(self, config: Namespace) -> str:
        """Set defaults that depend on the machine; returns a remark about them, or nothing."""

    @abstractmethod
    def compose(self, parser: cli.Parser, config: Namespace, saved: str) -> Run:
        """Make everything, and the folder of the run.

        Args:
            parser: of the options.
            config: all options.
            saved: the same as YAML, for the folder.
        """

    def chosen(self) -> list[str]:
        """The names as options."""
        head = [] if self.names.head is None else [f"--model.head={self.names.head}"]
        return [f"--model.name={self.names.model}", *head]

    def title(self, config: Namespace) -> str:
        """What is run, in words."""
        head = f" with {self.names.head}" if self.names.head else ""
        return f"{self.names.model}{head}"

    def canonical(self, option: str, value: Any) -> Any:
        """One spelling for values that can be spelt in several ways."""
        return value
