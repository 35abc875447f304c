r"""Do the runs of a plan that have no row in results/<study>/runs.csv yet.

    catnat sweep plan.yaml --scale small --jobs 12     # processes of this machine
    catnat sweep plan.yaml --engine batched            # many models as one
    catnat sweep plan.yaml --engine ray --address auto --gpus_per_run 0.1
    catnat sweep plan.yaml --engine slurm --slurm slurm_partition=gpu gpus_per_node=1
    catnat sweep plan.yaml --engine print | xargs -d '\n' -n 1 -P 8 sh -c
    catnat sweep plan.yaml --only head=natural,softmax N=10 -- --root DATA
    catnat status plan.yaml

The same command continues after an interruption, here or on another machine that has the rows: runs
with a row are not repeated, interrupted ones resume from their last checkpoint, and batched groups
begin anew. A cell has up to three stages: a search, a refined one, then all seeds; cells do not
wait for each other.
Afterwards: ``catnat tables plan.yaml``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from catnat.sweeps import plan as plans
from catnat.sweeps import runs
from catnat.sweeps.engines import Engine, Local, Outcome, Ray, Slurm, device_name
from catnat.sweeps.runs import Rows, Run

ENGINES = ("local", "batched", "ray", "slurm", "print")
SMOKE = "smoke"  # a scale whose rows are not results
SET = ("seed", "seed_everything", "default_root_dir", "ckpt_path", "model", "program")


def main(argv: list[str] | None = None) -> int:
    """Do what is missing; 0, 1 (runs failed or are left), 2 (wrong usage) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    parser, split = build_parser(), argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweeps = [Sweep(name, args, argv[split + 1 :]) for name in args.plans]
        for each in sweeps:
            each.check()
        failed = sum(each.run(args) for each in sweeps)
    except (OSError, ValueError) as error:
        print(f"catnat sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("catnat sweep: interrupted; the same command continues", file=sys.stderr)
        return 130
    return min(1, failed)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        "catnat sweep", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    add_plan_options(parser)
    text = "processes of this machine, many models as one, Ray, SLURM; print shows the commands"
    parser.add_argument("--engine", choices=ENGINES, default="local", help=text)
    text = "runs side by side (local: 2 on each GPU; batched: models at once, 128)"
    parser.add_argument("--jobs", type=lambda x: _at_least(1, x), help=text)
    text = "how often a run that fails is tried again (default 1)"
    parser.add_argument("--retries", type=lambda x: _at_least(0, x), default=1, help=text)
    parser.add_argument("--retry_failed", action="store_true", help="also runs that have failed")
    parser.add_argument("--address", help="of a Ray cluster; auto: the one of this machine")
    parser.add_argument("--gpus_per_run", type=float, help="with Ray, such as 0.1")
    parser.add_argument("--cpus_per_run", type=float, default=1.0, help="with Ray (default 1)")
    text = "parameters of submitit's executor"
    parser.add_argument("--slurm", nargs="+", default=[], metavar="NAME=VALUE", help=text)
    return parser


def add_plan_options(parser: argparse.ArgumentParser, count: int | str = "+") -> None:
    """The options by which so many plans, and their rows, are found."""
    text = "a YAML file, or its name in this folder or in the folder plans"
    parser.add_argument("plans", nargs=count, metavar="PLAN", help=text)
    parser.add_argument("--scale", help="of the plan (default: small, or its first)")
    text = "a part of the plan: values of its grid, or seed=1,2 for final runs"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE[,VALUE]", help=text)
    text = "folder of the rows (default: as the plan says, else results)"
    parser.add_argument("--results", type=Path, help=text)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder (default runs)")


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def read_only(words: list[str]) -> dict[str, list[str]]:
    """What --only says."""
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals:
            raise ValueError(f"--only {word}: expected name=value")
        found.setdefault(name, []).extend(values.split(","))
    return found


class Sweep:
    """A plan, where its rows lie, and which part of it was asked for.

    Args:
        name: of the plan, or its file.
        args: what :func:`add_plan_options` reads.
        extra: words of options for every run.
    """

    def __init__(self, name: str, args: argparse.Namespace, extra: Sequence[str] = ()) -> None:
        self.plan = plans.load(name, args.scale)
        results = args.results or Path(self.plan.results or "results")
        if self.plan.scale == SMOKE and not args.results:
            results = args.runs / "results"
        self.path = results / self.plan.study / "runs.csv"
        sys.path += [folder for folder in self.plan.path if folder not in sys.path]
        self.folder = (args.runs / self.plan.study).resolve()
        self.only = read_only(args.only)
        self.plan.cells(self.only)  # says what is wrong with --only
        self.again: set[str] = set()  # keys of failed runs that are to be done once more
        self._add(dict(_pair(word) for word in _joined(extra)))

    def _add(self, extra: dict[str, str]) -> None:
        """Options for every run, those of the search too."""
        search, known = self.plan.search, {*self.plan.cells()[0], *self.plan.searched, *SET}
        for name in extra:
            # Without its group; data.seed is another option than the seed of a run.
            plain = re.sub(r"^(model|trainer|data(?!\.seed))\.", "", name.replace("-", "_"))
            if self.plan.long(plain) in known:
                raise ValueError(f"--{name}: the plan sets it; --only takes a part of the plan")
        self.plan.options |= extra
        if search:
            search.options |= extra

    def rows(self) -> Rows:
        """What is done."""
        found = [x for x in runs.read(self.path) if x.finished or x.key not in self.again]
        return Rows(found, [*self.plan.formerly, self.plan.name])

    def pending(self, rows: Rows) -> list[Run]:
        """The runs that can start now and have no row."""
        return [run for run in self.plan.runs(rows, self.only) if rows.find(run) is None]

    # -- before the first run ------------------------------------------------------------------

    def check(self) -> None:
        """Raise a ValueError for options and heads that ``catnat`` does not know."""
        seen = set()
        for run in [] if self.plan.program else self.pending(self.rows()):
            shape = {**run.options, "seed": 0, "learning_rate": 0}
            if (key := runs.key_of(shape)) not in seen:
                seen.add(key)
                try:
                    check_arguments(run.arguments(self.folder))
                except ValueError as error:
                    raise ValueError(f"{self.plan.name}: {error}") from error

    # -- doing them ----------------------------------------------------------------------------

    def run(self, args: argparse.Namespace) -> int:
        """Do what has no row; how many runs or searches have failed, or are left."""
        if args.retry_failed:
            self.again = {row.key for row in runs.read(self.path) if not row.finished}
        first = self.pending(self.rows())
        if args.engine == "print":
            for run in first:
                variables = [f"{name}={shlex.quote(x)}" for name, x in run.environment.items()]
                print(*variables, shlex.join(run.command(self.folder / run.name)))
            return 0
        print(f"{self.plan.name}, {self.plan.scale}: {len(first)} runs can start", flush=True)
        if args.engine == "batched":
            self._batched(args.jobs or 128)
        elif first:
            self._submit(make_engine(args, self.folder), args.engine)
        rows = self.rows()
        found = [rows.find(run) for run in self.plan.runs(rows, self.only)]
        failed, left = sum(row is not None and not row.finished for row in found), found.count(None)
        text = f"{len(found) - left} runs done, {failed} failed"
        text += f", {left} left to another sweep" if left else ""
        print(f"{self.plan.name}, {self.plan.scale}: {text}")
        stuck = [cell for cell in self.plan.cells(self.only) if not self.plan.selected(cell, rows)]
        if stuck and self.plan.search and not left:
            print(f"no setting of {stuck[0]} has a finite {self.plan.search.metric}")
        return failed + left + len(stuck)

    def _submit(self, engine: Engine, name: str) -> None:
        """Give runs to an engine until none is left; a run that ends may let others start."""
        waiting: dict[Future[Outcome], Run] = {}
        begun: set[str] = set()
        try:
            while True:
                for run in self.pending(self.rows()):
                    if run.key not in begun:
                        begun.add(run.key)
                        waiting[engine.submit(run, self.folder / run.name)] = run
                if not waiting:
                    return
                done = wait(waiting, return_when=FIRST_COMPLETED).done
                for future in [each for each in waiting if each in done]:  # in order
                    self.record([(waiting.pop(future), future.result())], name, len(waiting))
        finally:
            engine.stop()

    def record(self, ended: list[tuple[Run, Outcome]], engine: str, left: int) -> None:
        """Write the rows of runs that have ended, and print a line for each."""
        shown = [self.plan.search.metric] if self.plan.search else []
        names, wrong = list(dict.fromkeys([*shown, *self.plan.metrics])), ""
        for run, outcome in ended:
            if outcome.stopped:
                if outcome.note:
                    print(f"{run.name}: {outcome.note}", flush=True)
                continue
            row = runs.made(run, outcome.metrics, outcome.note, engine, outcome.device)
            runs.add(self.path, [row])
            self.again.discard(run.key)
            values = [f"{name} {row.metrics[name]:.4g}" for name in names if name in row.metrics]
            said = "  ".join(values) if row.finished else f"FAILED: {outcome.note}"
            print(f"{time.strftime('%H:%M:%S')} {run.name}  {said}  ({left} under way)", flush=True)
            missing = [name for name in names if row.finished and name not in row.metrics]
            if missing:
                text = plans.choices(missing[0], sorted(row.metrics))
                wrong = f"{run.name} has finished without {missing[0]}; {text}"
        if wrong:
            raise ValueError(wrong)

    def _batched(self, most: int) -> None:
        """Train what can start as groups of models, again and again until nothing can."""
        from catnat.sweeps import batched

        if (other := self.plan.program or self.plan.model) in (self.plan.program, "ppo", "a2c"):
            raise ValueError(f"--engine batched needs a LightningModule, not {other}")
        while pending := self.pending(self.rows()):
            owners = {}
            members = []
            for run in pending:
                one = batched.build(run.arguments(self.folder / run.name))
                one.folder, owners[id(one)] = self.folder / run.name, run
                members.append(one)
            groups = batched.groups(members, most)
            for number, group in enumerate(groups):
                found = batched.Group(group).train(lambda line: print(line, flush=True))
                ended = [
                    (owners[id(one)], Outcome(metrics, one.failure, device_name()))
                    for one, metrics in zip(group, found, strict=True)
                ]
                self.record(ended, "batched", len(groups) - 1 - number)


def make_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """The engine that was asked for."""
    if args.engine == "ray":
        return Ray(args.address, args.gpus_per_run, args.cpus_per_run, args.retries)
    if args.engine == "slurm":
        parameters: dict[str, Any] = dict(_pair(word) for word in args.slurm)
        numbers = {name: int(x) for name, x in parameters.items() if x.isdigit()}
        return Slurm(folder / "slurm", args.jobs, parameters | numbers, args.retries)
    return Local(args.jobs, args.retries)


def check_arguments(arguments: list[str]) -> None:
    """Raise a ValueError if ``catnat`` would refuse these options."""
    from jsonargparse import ArgumentError

    from catnat.cli.errors import one_line
    from catnat.cli.main import command_line
    from catnat.cli.options import read_names

    try:

        class Parsed(command_line(read_names(arguments).model)):  # type: ignore[misc]
            """The options alone."""

            def instantiate_classes(self) -> None:
                """No model, no data, no Trainer, no environment."""

        Parsed(arguments, run=False)
    except (ValueError, ArgumentError) as error:
        raise ValueError(one_line(error)) from error


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.removeprefix("--").partition("=")
    return name, value


def _joined(words: Sequence[str]) -> list[str]:
    """--name value as --name=value."""
    found: list[str] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f"={word}"
    return found


if __name__ == "__main__":
    sys.exit(main())
