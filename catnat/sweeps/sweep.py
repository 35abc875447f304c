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
restart. A cell has up to three stages: a search, a refined one, then all seeds; cells do not wait
for each other.
Afterwards: ``catnat tables plan.yaml``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from catnat.sweeps import plan as plans
from catnat.sweeps import runs
from catnat.sweeps.engines import Engine, Job, Local, Outcome, Ray, Slurm, device_name
from catnat.sweeps.runs import Row, Rows, Run, read_pairs

SMOKE = "smoke"  # a scale whose rows are not results
_ENGINES_WITH = {  # an option
    "jobs": ("local", "batched", "slurm"),
    "retries": ("local", "ray", "slurm"),
    "address": ("ray",),
    "gpus_per_run": ("ray",),
    "cpus_per_run": ("ray",),
    "slurm": ("slurm",),
}
_SET_BY_SWEEP = ("seed", "seed_everything", "default_root_dir", "ckpt_path", "model", "program")


def main(words: list[str]) -> int:
    """Do what is missing; 0, 1 (runs failed or are left), 2 (wrong usage) or 130 (interrupted)."""
    split = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:split])
    for name, engines in _ENGINES_WITH.items():
        if getattr(args, name) is not None and args.engine not in engines:
            raise ValueError(f"--{name} is not an option of --engine {args.engine}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweeps = [Sweep(name, args, words[split + 1 :]) for name in args.plans]
        for sweep in sweeps:
            sweep.check()
        return min(1, sum(sweep.run(args) for sweep in sweeps))
    except KeyboardInterrupt:
        print("catnat sweep: interrupted; the same command continues", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = plan_parser("sweep", __doc__)
    add = parser.add_argument
    text = "processes of this machine, many models as one, Ray, SLURM; print shows the commands"
    engines = ("local", "batched", "ray", "slurm", "print")
    add("--engine", choices=engines, default="local", help=text)
    text = "runs side by side (local: 2 on each GPU; batched: models at once, 128)"
    add("--jobs", type=PositiveInt, help=text)
    text = "further attempts if a run fails (default 1)"
    add("--retries", type=NonNegativeInt, help=text)
    add("--retry_failed", action="store_true", help="also do runs whose row says that they failed")
    add("--address", help="of a Ray cluster; auto: the one of this machine")
    add("--gpus_per_run", type=NonNegativeFloat, help="with Ray, such as 0.1")
    add("--cpus_per_run", type=NonNegativeFloat, help="with Ray (default 1)")
    text = "parameters of submitit's executor"
    add("--slurm", action="extend", nargs="+", metavar="NAME=VALUE", help=text)
    return parser


def plan_parser(command: str, doc: str | None, count: int | str = "+") -> argparse.ArgumentParser:
    """A parser with the options of all commands about plans, for a number of plans."""
    parser = runs.make_parser(command, doc)
    add = parser.add_argument
    text = "a YAML file, or its name in this folder or in the folder plans"
    add("plans", nargs=count, metavar="PLAN", help=text)
    add("--scale", help="of the plan (default: small, or its first)")
    text = "a part of the plan: values of its grid, or seed=1,2 for final runs"
    values = "NAME=VALUE[,VALUE]"
    add("--only", action="extend", nargs="+", default=[], metavar=values, help=text)
    text = "folder of the rows (default: the plan's, else results)"
    add("--results", type=Path, help=text)
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default runs)")
    return parser


class Sweep:
    """A plan, its rows, and the part of it that was asked for.

    Args:
        name: of the plan's file.
        args: what :func:`plan_parser` reads.
        extra: words of options for every run.
    """

    def __init__(self, name: str, args: argparse.Namespace, extra: Sequence[str] = ()) -> None:
        self.plan = plans.load(name, args.scale)
        results = args.results or Path(self.plan.results or "results")
        if self.plan.scale == SMOKE and not args.results:
            results = args.runs / "results"
        self.rows_path = (results / self.plan.study / "runs.csv").resolve()
        self.folder = (args.runs / self.plan.study).resolve()
        pairs = read_pairs(args.only, "--only")
        self.only = {name: values.split(",") for name, values in pairs.items()}
        self.plan.cells(self.only)  # raises if --only is wrong
        self.failed_before: set[str] = set()  # keys of failed runs that are to be done once more
        sys.path += [folder for folder in self.plan.path if folder not in sys.path]
        self._add_options(extra)

    def _add_options(self, words: Sequence[str]) -> None:
        """Add options to every run, those of the search too."""
        pairs: list[str] = []
        for word in words:
            if word.startswith("--") or not pairs:
                pairs.append(word.removeprefix("--"))
            else:
                pairs[-1] += f"={word}"
        extra = read_pairs(pairs, "--")
        fixed = {*self.plan.cells()[0], *self.plan.searched, *_SET_BY_SWEEP}
        for name in extra:
            # Without its group; data.seed is not the seed of a run.
            plain = re.sub(r"^(model|trainer|data(?!\.seed))\.", "", name.replace("-", "_"))
            if self.plan.long(plain) in fixed:
                raise ValueError(f"--{name}: the plan sets it; --only takes a part of the plan")
        self.plan.options |= extra
        if self.plan.search:
            self.plan.search.options |= extra

    def rows(self) -> Rows:
        """The rows of runs that are done."""
        done = [
            row
            for row in runs.read(self.rows_path)
            if row.finished or row.key not in self.failed_before
        ]
        return Rows(done, [*self.plan.formerly, self.plan.name])

    def pending(self, rows: Rows) -> list[Run]:
        """The runs that can start now and have no row."""
        return [run for run in self.plan.runs(rows, self.only) if rows.find(run) is None]

    def check(self) -> None:
        """Raise a ValueError for options and heads that ``catnat`` does not know."""
        from catnat.cli.main import command_line

        checked = set()
        for run in [] if self.plan.program else self.pending(self.rows()):
            key = runs.key_of({**run.options, "seed": 0, "learning_rate": 0})
            if key not in checked:
                checked.add(key)
                command_line(run.arguments(self.folder), until="options")

    # -- doing them ----------------------------------------------------------------------------

    def run(self, args: argparse.Namespace) -> int:
        """Do what has no row; the number of runs or searches that have failed, or are left."""
        if args.retry_failed:
            self.failed_before = {x.key for x in runs.read(self.rows_path) if not x.finished}
        pending = self.pending(self.rows())
        if args.engine == "print":
            for run in pending:
                variables = [f"{name}={shlex.quote(x)}" for name, x in run.environment.items()]
                print(*variables, shlex.join(run.command(self.folder / run.name)))
            return 0
        runs.commit()  # of the rows: what is checked out now
        print(f"{self.plan.label}: {len(pending)} runs can start", flush=True)
        if args.engine == "batched":
            self._train_batched(args.jobs or 128)
        elif pending:
            self._submit(make_engine(args, self.folder), args.engine)
        rows = self.rows()
        done = [rows.find(run) for run in self.plan.runs(rows, self.only)]
        failed = sum(row is not None and not row.finished for row in done)
        left = done.count(None)
        text = f", {left} left to another sweep" if left else ""
        print(f"{self.plan.label}: {len(done) - left} runs done, {failed} failed{text}")
        stuck = [cell for cell in self.plan.cells(self.only) if not self.plan.selected(cell, rows)]
        if stuck and self.plan.search and not left:
            print(f"no setting of {stuck[0]} has a finite {self.plan.search.metric}")
        return failed + left + len(stuck)

    def _submit(self, engine: Engine, name: str) -> None:
        """Give runs to an engine until none is left; a run that ends may let others start."""
        running: dict[Future[Outcome], Run] = {}
        started: set[str] = set()
        try:
            while True:
                for run in self.pending(self.rows()):
                    if run.key not in started:
                        started.add(run.key)
                        job = Job(run, self.folder / run.name, self.rows_path)
                        running[engine.submit(job)] = run
                if not running:
                    return
                done = wait(running, return_when=FIRST_COMPLETED).done
                for future in [future for future in running if future in done]:  # in order
                    row = self.record(running.pop(future), future.result(), name, len(running))
                    self.require_metrics([row])
        finally:
            engine.stop()

    def record(self, run: Run, outcome: Outcome, engine: str, left: int) -> Row | None:
        """Write the row of a run that has ended, and print a line."""
        if outcome.stopped:
            if outcome.note:
                print(f"{run.name}: {outcome.note}", flush=True)
            return None
        row = runs.make_row(run, outcome.metrics, outcome.note, engine, outcome.device)
        runs.add(self.rows_path, row)
        runs.lock_path(run, self.rows_path).unlink(missing_ok=True)
        self.failed_before.discard(run.key)
        values = {name: row.metrics[name] for name in self.metrics if name in row.metrics}
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if not row.finished:
            text = f"FAILED: {outcome.note}"
        print(f"{time.strftime('%H:%M:%S')} {run.name}  {text}  ({left} under way)", flush=True)
        return row

    @property
    def metrics(self) -> list[str]:
        """The metrics that every run must have."""
        searched = [self.plan.search.metric] if self.plan.search else []
        return list(dict.fromkeys([*searched, *self.plan.metrics]))

    def require_metrics(self, rows: Sequence[Row | None]) -> None:
        """Stop the sweep if finished runs do not have the metrics of the plan."""
        for row, name in itertools.product(rows, self.metrics):
            if row and row.finished and name not in row.metrics:
                text = plans.choices(name, sorted(row.metrics))
                raise ValueError(f"a run has finished without {name}; {text}")

    def _train_batched(self, most: int) -> None:
        """Train what can start as groups of models, again and again until nothing can."""
        from catnat.sweeps import batched

        program = self.plan.program or self.plan.model
        if self.plan.program or program in ("ppo", "a2c"):
            raise ValueError(f"--engine batched needs a LightningModule, not {program}")
        started: set[str] = set()
        while pending := [run for run in self.pending(self.rows()) if run.key not in started]:
            started |= {run.key for run in pending}
            members = []
            for run in pending:
                folder = self.folder / run.name
                members.append(batched.build(run.arguments(folder), folder))
            run_of = dict(zip(map(id, members), pending, strict=True))
            groups = batched.groups(members, most)
            for number, group in enumerate(groups, 1):
                locks = [runs.claim(run_of[id(member)], self.rows_path) for member in group]
                free = [member for member, lock in zip(group, locks, strict=True) if lock]
                metrics = batched.Group(free).train() if free else []
                rows = []
                for member, values in zip(free, metrics, strict=True):
                    outcome = Outcome(values, member.failure, device_name())
                    left = len(groups) - number
                    rows.append(self.record(run_of[id(member)], outcome, "batched", left))
                self.require_metrics(rows)


def make_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """The engine that was asked for."""
    retries = 1 if args.retries is None else args.retries
    if args.engine == "ray":
        cpus = 1.0 if args.cpus_per_run is None else args.cpus_per_run
        return Ray(args.address, args.gpus_per_run, cpus, retries)
    if args.engine == "slurm":
        parameters: dict[str, Any] = read_pairs(args.slurm or [], "--slurm")
        numbers = {name: int(text) for name, text in parameters.items() if text.isdecimal()}
        return Slurm(folder / "slurm", args.jobs, parameters | numbers, retries)
    return Local(args.jobs, retries)
