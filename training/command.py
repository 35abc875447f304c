"""From a command line to a report: the steps that all models share."""

from __future__ import annotations

import shlex
import time
from typing import Any

from jsonargparse import Namespace

from catnat.callbacks import Stopped, load_checkpoint
from catnat.training import options as cli
from catnat.training import resume
from catnat.training.errors import UsageError, command_words, show_page, usage_errors
from catnat.training.folders import find_checkpoint
from catnat.training.names import (
    RL_MODELS,
    Names,
    add_names_of_file,
    import_modules,
    read_yaml,
    record_beside,
)
from catnat.training.program import Program
from catnat.training.report import show_metrics


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
    program, record = load_program(names), None
    program.imported = time.monotonic()
    if names.ckpt_path is not None:
        with usage_errors():
            path = program.ckpt_path = find_checkpoint(names.home, names.ckpt_path)
            program.checkpoint = load_checkpoint(path)
        if record := record_beside(path):
            resume.check_names(path, record, names)
            add_names_of_file(names, str(record))  # the data and the imports of the run
            import_modules(names.imports)
    parser = program.build_parser(options)
    if record is not None:
        _set_required(parser, read_yaml(str(record)))
    config = cli.parse(parser, [*options, *program.chosen()])
    if program.ckpt_path is not None:
        given = cli.given(parser, options) | names.given
        with usage_errors():
            config = resume.continued(program, parser, config, given)
    config["import"] = names.imports
    return program, parser, config


def _set_required(parser: cli.Parser, record: dict[str, Any]) -> None:
    """Let a run continue without repeating arguments of model and data that have no default."""
    for name in cli.option_names(parser):
        group, _, option = name.partition(".")
        value = (record.get(group) or {}).get(option) if group in ("model", "data") else None
        if value is not None and parser.get_default(name) is None:
            parser.set_defaults({name: value})


def _remark_on_continuing(step: int, trainer: Namespace) -> str:
    """After which step of its run a checkpoint continues, and whether steps are left."""
    last = trainer.get("max_steps", trainer.get("total_steps"))
    done = step >= last > 0
    return f", continued after step {step}" + (
        ", its last: --max_steps N makes it longer" if done else ""
    )


def run(names: Names, options: list[str], began: float) -> int:
    """Train or test what the command line names, and report.

    Args:
        names: from the command line.
        options: the rest of the command line.
        began: when the command began, by the monotonic clock.
    """
    program, parser, config = configure(names, options)
    remark = program.complete(config)
    if names.print_config:
        return show_page(parser.dump(config))
    if names.command == "test" and program.ckpt_path is None:
        raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
    config.ckpt_path = None  # config.yaml says how the run began, not where it was continued
    saved = parser.dump(config)
    own = {each.split(".")[0] for each in (names.model, names.data or "", *names.imports)}
    with usage_errors(own=own):
        made = program.compose(parser, config, saved)
    fit = names.command == "fit"
    if "global_step" in program.checkpoint:
        remark = _remark_on_continuing(program.checkpoint["global_step"], config.trainer) + remark
    program.checkpoint = {}  # free the memory
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
        if line := made.time_spent(began, program.imported):
            print(line)
    return 0
