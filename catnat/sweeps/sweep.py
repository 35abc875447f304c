r"""Do the runs of a plan that have no row in results/<study>/runs.csv yet.

    catnat sweep plan.yaml --scale small --jobs 12     # processes of this machine
    catnat sweep plan.yaml --engine batched            # many models as one
    catnat sweep plan.yaml --engine ray --resources num_gpus=0.1
    catnat sweep plan.yaml --engine slurm --resources slurm_partition=gpu gpus_per_node=1
    catnat sweep plan.yaml --only head=natural,softmax N=10 -- --root=DATA
    catnat status plan.yaml

The same command continues after an interruption, here or on another machine that has the rows: runs
with a row are not repeated, interrupted ones resume from their last checkpoint, and batched groups
restart. A cell has up to three stages: a search, a refined one, then all seeds; cells do not wait
for each other.
Afterwards: ``catnat tables plan.yaml``.
"""

import argparse
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby, product
from pathlib import Path
from threading import Event

import yaml
from jsonargparse.typing import PositiveInt

from catnat.checks import require_choice
from catnat.cli.names import RL_MODELS, Options
from catnat.sweeps import plan as plans
from catnat.sweeps import runs
from catnat.sweeps.defaults import Defaults, resolve
from catnat.sweeps.engines import Engine, Job, device_name, make_engine
from catnat.sweeps.runs import Row, Rows, Run, read_pairs
from catnat.sweeps.search import SharedStudy

SMOKE = "smoke"  # a scale whose rows are not results


def main(words: list[str]) -> int:
    """Do what is missing; 0, 1 (runs failed or are left), 2 (wrong usage) or 130 (interrupted)."""
    split = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:split])
    if args.jobs and args.engine == "ray":
        raise ValueError("--jobs is not an option of --engine ray, whose resources limit the jobs")
    if args.resources and args.engine not in ("ray", "slurm"):
        raise ValueError(f"--resources is not an option of --engine {args.engine}")
    resources = read_pairs(args.resources, "--resources")
    args.resources = {name: yaml.safe_load(text) for name, text in resources.items()}
    listen_to_signals()
    try:
        sweeps = [Sweep.load(name, args, words[split + 1 :], resolves=True) for name in args.plans]
        for sweep in sweeps:
            sweep.check()
        options = (args.engine, args.jobs, args.resources, args.retry_failed)
        return min(1, sum(sweep.run(*options) for sweep in sweeps))
    except KeyboardInterrupt:
        print("catnat sweep: interrupted; the same command continues", file=sys.stderr)
        return 130


def listen_to_signals() -> None:
    """Let signals that end a process interrupt it, so that its runs save a checkpoint."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = plan_parser("sweep", __doc__)
    add = parser.add_argument
    add(
        "--engine",
        choices=("local", "batched", "ray", "slurm"),
        default="local",
        help="processes of this machine, many models as one, Ray, SLURM",
    )
    add(
        "--jobs",
        type=PositiveInt,
        help="runs side by side (local: 2 on each GPU; batched: models at once, 128)",
    )
    add("--retry_failed", action="store_true", help="also do runs whose row says that they failed")
    add(
        "--resources",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="of each run: options of ray.remote, or parameters of submitit's executor",
    )
    return parser


def plan_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all commands about plans."""
    parser = runs.make_parser(command, doc)
    add = parser.add_argument
    add("plans", nargs="+", metavar="PLAN", help="a YAML file")
    add("--scale", help="of the plan (default: small, or its first)")
    add("--results", type=Path, help="folder of the rows (default: the plan's, else results)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default runs)")
    return parser


class Sweep:
    """A plan, its rows, and the runs of it that this process does.

    Args:
        plan: the plan.
        rows_path: file of the rows.
        folder: folder of the runs.
        resolves: whether rows are compared with the defaults of classes now; otherwise with the
            defaults of the latest rows, which are known at once.
    """

    def __init__(
        self, plan: plans.Plan, rows_path: Path, folder: Path, resolves: bool = False
    ) -> None:
        self.plan = plan
        self.rows_path = rows_path.resolve()
        self.folder = folder.resolve()
        self.slots = 0  # runs that the engine does at a time; 0: no engine has begun
        self.failed_before: set[str] = set()  # keys of failed runs that are to be done once more
        self._started: set[str] = set()  # keys of runs
        self._stopping = Event()
        self._studies: dict[str, SharedStudy] = {}  # by cell
        self._indexed: tuple[tuple[Row, ...] | None, Rows] = (None, {})  # rows, and by key
        plan.defaults = Defaults(self.rows_path.with_name("defaults.yaml"), resolves)
        sys.path += [name for name in self.plan.folders if name not in sys.path]

    @classmethod
    def load(
        cls,
        name: str,
        args: argparse.Namespace,
        extra: Sequence[str] = (),
        resolves: bool = False,
    ) -> "Sweep":
        """The sweep of a plan's file, or of the part of it that was asked for.

        Args:
            name: name of the file.
            args: result of :func:`plan_parser`.
            extra: options for every run, as words such as --root=DATA.
            resolves: see :class:`Sweep`.
        """
        plan = plans.load(name, args.scale)
        results = args.results or Path(plan.results or "results")
        if plan.scale == SMOKE and not args.results:
            results = args.runs / "results"
        plan.restrict(read_pairs(args.only, "--only"))
        sweep = cls(plan, results / plan.study / "runs.csv", args.runs / plan.study, resolves)
        sweep._add_options(extra)
        return sweep

    def _add_options(self, words: Sequence[str]) -> None:
        added = read_pairs([word.removeprefix("--") for word in words], "--")
        fixed = {*self.plan.cells[0], *self.plan.searched, *plans.SET_BY_SWEEP}
        for name in added:
            # Without its group; data.seed is not the seed of a run.
            plain = re.sub(r"^(model|trainer|data(?!\.seed))\.", "", name.replace("-", "_"))
            if self.plan.long(plain) in fixed:
                raise ValueError(f"--{name}: the plan sets it; --only takes a part of the plan")
        self.plan.options |= added
        self.plan.search.options |= added

    def rows(self) -> Rows:
        """The rows of runs that are done."""
        read = runs.read_once(self.rows_path)
        if read is not self._indexed[0]:
            for cell in self.plan.cells:  # so that the defaults of all runs are known
                self.plan.run(cell, {}, 0, "final")
            key = self.plan.defaults.key if self.plan.defaults else None
            self._indexed = read, runs.by_key(read, self.plan.name, key)
        rows = self._indexed[1]
        return {key: row for key, row in rows.items() if key not in self.failed_before}

    def pending(self) -> list[Run]:
        """The runs that can start now: without a row, and not started before."""
        rows = self.rows()
        begun = rows.keys() | self._started
        all_runs = self._trials(rows) + self.plan.runs(rows)
        return [run for run in all_runs if run.key not in begun]

    def _trials(self, rows: Rows) -> list[Run]:
        """The runs of the trials that this process does now; it asks for as many as it can do."""
        search = self.plan.search
        if not search.space or not self.slots:
            return []
        searching = [cell for cell in self.plan.cells if not self._study(cell).is_done]
        wanted = min(search.parallel, math.ceil(self.slots / max(1, len(searching))))
        trial_runs: list[Run] = []
        for cell in searching:
            study = self._study(cell)
            opened = study.open_trials(
                self.plan.finished_trials(cell, rows), wanted, partial(self._is_abandoned, cell)
            )
            for drawn in opened:
                trial_runs += self.plan.trial_runs(cell, drawn)
        return trial_runs

    def _study(self, cell: Options) -> SharedStudy:
        """The study of a cell."""
        name = json.dumps(cell, sort_keys=True)
        if name not in self._studies:
            search = self.plan.search
            file = "-".join(filter(None, [self.plan.name, self.plan.scale]))
            self._studies[name] = SharedStudy(
                self.rows_path.parent / ".optuna" / f"{file}.journal",
                name,
                self.plan.options | cell,
                search.sampled,
                search.sampler,
                search.trials or 0,
                search.better,
            )
        return self._studies[name]

    def _is_abandoned(self, cell: Options, drawn: Options) -> bool:
        """Whether no sweep does the runs of a trial, which one has begun."""
        for run in self.plan.trial_runs(cell, drawn):
            with self._claim(run) as is_free:
                if is_free:
                    return True
        return False

    def progress(self) -> tuple[str, int]:
        """Such as "plan: 3 of 5 final runs finished, 1 failed", and how many are not finished."""
        rows = self.rows()
        parts = []
        not_done = 0
        for stage, all_runs in groupby(self.plan.runs(rows), lambda run: run.stage):
            done = [rows.get(run.key) for run in all_runs]
            finished = [runs.is_finished(row) for row in done if row]
            failed = f", {finished.count(False)} failed" if not all(finished) else ""
            parts.append(f"{sum(finished)} of {len(done)} {stage} runs finished{failed}")
            not_done += len(done) - sum(finished)
        cells = self.plan.cells
        if self.plan.search.space:
            trials = sum(len(self.plan.finished_trials(cell, rows)) for cell in cells)
            parts.append(f"{trials} of {(self.plan.search.trials or 0) * len(cells)} trials done")
        if searching := sum(not self.plan.selected(cell, rows) for cell in cells):
            parts.append(f"the searches of {searching} of {len(cells)} cells have no result")
        return f"{self.plan.label}: {'; '.join(parts)}", not_done + searching

    def check(self) -> None:
        """Raise a ValueError for options and heads that ``catnat`` does not know.

        Of runs that differ in numbers alone, one is checked.
        """
        if self.plan.program:
            return
        rows = self.rows()
        checked: set[tuple[str, ...]] = set()
        for run in [*self.plan.examples(), *self.plan.runs(rows)]:
            if run.key in rows:
                continue
            kinds = _kinds(run.options)
            if not kinds <= checked:
                checked |= kinds
                resolve(run.arguments(self.folder))

    @contextmanager
    def _claim(self, run: Run) -> Iterator[bool]:
        """Lock a run; yields False if another sweep does it, or has done it."""
        with runs.claimed(run, self.rows_path) as is_locked:
            row = self.rows().get(run.key)
            yield is_locked and not (row and runs.is_finished(row))

    # -- doing them ----------------------------------------------------------------------------

    def run(
        self,
        engine: str = "local",
        jobs: int | None = None,
        resources: Options | None = None,
        retry_failed: bool = False,
    ) -> int:
        """Do what has no row; the number of runs or searches that have failed, or are left."""
        if retry_failed:
            rows = self.rows()
            self.failed_before = {key for key, row in rows.items() if not runs.is_finished(row)}
        with runs.lock(self.rows_path, "defaults"):
            self.rows()
            if self.plan.defaults:
                self.plan.defaults.save()
        runs.commit()  # of the rows: what is checked out now
        self.slots = jobs or (128 if engine == "batched" else 1)
        pending = self.pending()
        print(f"{self.plan.label}: {len(pending)} runs can start", flush=True)
        if engine == "batched":
            self._train_batched(self.slots)
        elif pending:
            chosen = make_engine(engine, jobs, resources or {}, self.folder)
            self.slots = chosen.jobs
            self._submit(chosen, engine)
        text, not_done = self.progress()
        print(text)
        return not_done

    def _submit(self, engine: Engine, name: str) -> None:
        """Give runs to an engine until none is left; a run that ends may let others start."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(engine.jobs) as pool:
            try:
                while True:
                    for run in self.pending():
                        self._started.add(run.key)
                        running.add(pool.submit(self._execute, run, engine, name))
                    if not running:
                        return
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        future.result()
            finally:
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                engine.stop()

    def _execute(self, run: Run, engine: Engine, name: str) -> None:
        """Let an engine do a run; its row is written before another sweep can claim it."""
        with self._claim(run) as is_free:
            outcome = engine.execute(Job(run, self.folder / run.name)) if is_free else {}
            if is_free and self._stopping.is_set() and not runs.metrics_of(outcome):
                return
            self.record([(run, outcome)], name)

    def _train_batched(self, most: int) -> None:
        """Train what can start as groups of models, again and again until nothing can."""
        from catnat.sweeps import batched

        program = self.plan.program or self.plan.model
        if program in (self.plan.program, *RL_MODELS):
            raise ValueError(f"--engine batched needs a LightningModule, not {program}")
        device = device_name()
        while pending := {self.folder / run.name: run for run in self.pending()}:
            self._started |= {run.key for run in pending.values()}
            members = [batched.build(run.arguments(path), path) for path, run in pending.items()]
            run_of = {id(x): run for x, run in zip(members, pending.values(), strict=True)}
            for group in batched.groups(members, most):
                with ExitStack() as locks:
                    free = []
                    for member in group:
                        claim = self._claim(run_of[id(member)])
                        if locks.enter_context(claim):
                            free.append(member)
                    if free:
                        batched.Group(free).train()
                    outcomes = [{**x.metrics, "note": x.failure, "device": device} for x in free]
                    ended = [run_of[id(member)] for member in free]
                    self.record(zip(ended, outcomes, strict=True), "batched")

    def record(self, outcomes: Iterable[tuple[Run, Row]], engine: str) -> None:
        """Write the rows of runs that have ended, and print a line for each.

        Then stop the sweep by a ValueError if one has finished without the metrics of the plan.
        """
        searched = [self.plan.search.metric] if self.plan.search.is_search else []
        names = dict.fromkeys([*searched, *self.plan.metrics])
        finished = []
        for run, outcome in outcomes:
            text = "another sweep does it"
            if outcome:
                row = runs.make_row(run, {**outcome, "engine": engine})
                runs.add(self.rows_path, row)
                self.failed_before.discard(run.key)
                log = self.folder / run.name / "log.txt"
                text = f"FAILED: {row.get('note', 'no metrics')} ({log})"
                if runs.is_finished(row):
                    finished.append(row)
                    text = "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)
            print(f"{time.strftime('%H:%M:%S')} {self.plan.describe(run)}: {text}", flush=True)
        for row, name in product(finished, names):
            require_choice(runs.metrics_of(row), **{"metric of the plan": name})


def _kinds(options: Options) -> set[tuple[str, ...]]:
    """Return a key of options to check: text by value, other options by type."""
    names = sorted(name for name, value in options.items() if value is not None)
    kinds = {(str(options.get("head")), *names)}
    for name in names:
        value = options[name]
        is_number = isinstance(value, int | float)
        kinds.add((name, type(value).__name__ if is_number else str(value)))
    return kinds
