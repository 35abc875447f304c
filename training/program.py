"""From a command line to a report: the steps that all models share.

Lightning and Stable-Baselines3 each have a :class:`Program`, which says what differs.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from jsonargparse import Namespace

from catnat.callbacks import Stopped, load_checkpoint
from catnat.training import options as cli
from catnat.training import resume
from catnat.training.errors import UsageError, command_words, usage_errors
from catnat.training.folders import find_checkpoint
from catnat.training.names import (
    RL_MODELS,
    Names,
    add_names_of_file,
    import_modules,
    record_beside,
)
from catnat.training.report import show_metrics


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

    def close(self) -> None:  # noqa: B027 - a run of Lightning holds nothing
        """Free what the run holds."""


class Program(ABC):
    """A model on the command line: its options, their defaults, and how it is run.

    ``ckpt_path`` and ``checkpoint`` are the file to continue from or to test, and its content.

    Args:
        names: from the command line; a program sets a head or data that the line leaves open.
    """

    how_long: ClassVar[tuple[str, ...]]  # options that say when a run ends
    may_change: ClassVar[tuple[str, ...]]  # options that may differ when a run continues

    def __init__(self, names: Names) -> None:
        self.names = names
        self.ckpt_path: Path | None = None
        self.checkpoint: dict[str, Any] = {}

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


def load_program(names: Names) -> Program:
    """The program of the model that the command line names."""
    import_modules(names.imports)
    if names.model in RL_MODELS:
        from catnat.training.rl import RLProgram

        return RLProgram(names)
    from catnat.training.lightning import LightningProgram

    return LightningProgram(names)


def configure(names: Names, options: list[str]) -> tuple[Program, cli.Parser, Namespace]:
    """The program with its checkpoint, the parser, and all options."""
    program = load_program(names)
    if names.ckpt_path is not None:
        with usage_errors():
            path = program.ckpt_path = find_checkpoint(names.home, names.ckpt_path)
            program.checkpoint = load_checkpoint(path)
        if record := record_beside(path):
            resume.check_names(path, record, names)
            add_names_of_file(names, str(record))  # the data and the imports of the run
            import_modules(names.imports)
    parser = program.build_parser(options)
    config = cli.parse(parser, [*options, *program.chosen()])
    if program.ckpt_path is not None:
        given = cli.given(parser, options) | names.given
        with usage_errors():
            config = resume.continued(program, parser, config, given)
    config["import"] = names.imports
    return program, parser, config


def run(names: Names, options: list[str]) -> int:
    """Train or test what the command line names, and report."""
    program, parser, config = configure(names, options)
    remark = program.complete(config)
    if names.print_config:
        print(parser.dump(config), end="")
        return 0
    if names.command == "test" and program.ckpt_path is None:
        raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
    config.ckpt_path = None  # config.yaml says how the run began, not where it was continued
    saved = parser.dump(config)
    with usage_errors():
        made = program.compose(parser, config, saved)
    program.checkpoint = {}  # free the memory
    fit = names.command == "fit"
    try:
        if made.is_first_process:
            title = f"{names.command} {program.title(config)}"
            print(f"{title}: {made.folder}{remark if fit else ''}", flush=True)
        with usage_errors(made.errors_of):
            metrics = made.fit() if fit else made.test()
    except Stopped as stop:
        if made.is_first_process:
            again = ["--config", f"{made.folder}/config.yaml", "--ckpt_path", stop.path]
            print(f"{stop}; go on with: {shlex.join([*command_words(), *again])}")
        return 128 + stop.signum
    finally:
        made.close()
    if made.is_first_process:
        show_metrics(metrics, made.folder, config.trainer.default_root_dir, keep=fit)
    return 0
