r"""Execute the runs of a plan that have no row in results/<study>/runs.csv yet.

    catnat sweep plan.yaml --scale small --jobs 12     # processes on this machine
    catnat sweep plan.yaml --engine batched            # many models as one
    catnat sweep plan.yaml --engine ray --resources num_gpus=0.1
    catnat sweep plan.yaml --engine slurm --resources slurm_partition=gpu gpus_per_node=1
    catnat sweep plan.yaml --only head=natural,softmax N=10 -- --root=DATA
    catnat status plan.yaml

After an interruption, the same command continues the sweep, on this machine or on another machine
that has the rows. Runs with a row are not repeated, interrupted runs resume from their last
checkpoint, and batched groups restart. A cell has up to three stages: a search, a refined search,
and the runs with all seeds. Cells do not wait for each other. ``catnat tables plan.yaml`` prints
the results.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from threading import Event

import yaml
from filelock import Timeout
from jsonargparse.typing import PositiveInt

from catnat.checks import require_choice
from catnat.cli.names import Options
from catnat.sweeps import plan_file, runs
from catnat.sweeps.check import check
from catnat.sweeps.defaults import Defaults, Rows
from catnat.sweeps.engines import Engine, make_engine
from catnat.sweeps.plan import Plan
from catnat.sweeps.runs import Row, Run
from catnat.sweeps.study import SharedStudy
from catnat.sweeps.words import plan_parser, read_pairs

SMOKE = "smoke"  # a scale whose rows are not results


def main(words: list[str]) -> int:
    """Do what is missing; 0, 1 (runs failed or are left), 2 (wrong usage) or 130 (interrupted)."""
    split = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:split])
    if args.jobs and args.engine == "ray":
        raise ValueError("--jobs is not an option of --engine ray, whose resources limit the jobs")
    if args.resources and args.engine not in ("ray", "slurm"):
        raise ValueError(f"--resources is not an option of --engine {args.engine}")
    texts = read_pairs(args.resources, "--resources")
    resources = {name: yaml.safe_load(text) for name, text in texts.items()}
    with interruptible():
        sweeps = [Sweep.load(name, args, words[split + 1 :], resolves=True) for name in args.plans]
        for sweep in sweeps:
            check(sweep.plan, sweep.rows(), sweep.folder)
        options = (args.engine, args.jobs, resources, args.retry_failed)
        return min(1, sum(sweep.run(*options) for sweep in sweeps))
    return 130


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = plan_parser("sweep", __doc__)
    add = parser.add_argument
    add(
        "--engine",
        choices=("local", "batched", "ray", "slurm"),
        default="local",
        help="where to run: processes on this machine, many models as one, Ray, or SLURM",
    )
    add(
        "--jobs",
        type=PositiveInt,
        help="simultaneous runs (default: 2 per GPU; with batched, 128 models at once)",
    )
    add("--retry_failed", action="store_true", help="repeat runs that failed")
    add(
        "--resources",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="resources per run: options of ray.remote, or of submitit's executor",
    )
    return parser


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals that end a process interrupt it, so that its runs save a checkpoint."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("catnat: interrupted; the same command continues", file=sys.stderr)


class Sweep:
    """A plan, its rows, and the runs of it that this process does.

    Args:
        plan: the plan.
        rows_path: file of the rows.
        folder: folder of the runs.
        resolves: whether rows are compared with the defaults of classes now; otherwise with the
            defaults of the latest rows, which are known at once.
    """

    def __init__(self, plan: Plan, rows_path: Path, folder: Path, resolves: bool = False) -> None:
        self.plan = plan
        self.rows_path = rows_path.resolve()
        self.folder = folder.resolve()
        self.defaults = Defaults(self.rows_path.with_name("defaults.yaml"), resolves)
        self.slots = 0  # runs that the engine does at a time; 0: no engine has begun
        self._retried: set[str] = set()  # keys of failed runs that are to be done once more
        self._started: set[str] = set()  # keys of runs
        self._stopping = Event()
        self._studies: dict[str, SharedStudy] = {}  # by cell
        self._read: tuple[Row, ...] | None = None
        self._rows = Rows()
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
        plan = plan_file.load(name, args.scale)
        results = args.results or Path(plan.results or "results")
        if plan.scale == SMOKE and not args.results:
            results = args.runs / "results"
        plan.restrict(read_pairs(args.only, "--only"))
        plan.add_options(read_pairs([word.removeprefix("--") for word in extra], "--"))
        return cls(plan, results / plan.study / "runs.csv", args.runs / plan.study, resolves)

    # -- what is done and what is left ---------------------------------------------------------

    def rows(self) -> Rows:
        """The rows of runs that are done; the same object as long as the file is unchanged."""
        read = runs.read(self.rows_path)
        if read is not self._read:
            self._read = read
            self._rows = Rows(read, self.plan.name, self.defaults, self._retried)
        return self._rows

    def folder_of(self, run: Run) -> Path:
        """The folder of the files of a run."""
        return self.folder / run.name(self.defaults.family(run.options).changed)

    def pending(self) -> list[Run]:
        """The runs that can start now: without a row, and not started before."""
        rows = self.rows()
        return [
            run
            for run in self._trial_runs(rows) + self.plan.runs(rows)
            if rows.get(run) is None and self.defaults.key(run) not in self._started
        ]

    def _trial_runs(self, rows: Rows) -> list[Run]:
        """The runs of the trials that this process does now; it asks for as many as it can do."""
        search = self.plan.search
        if not search.is_sampled or not self.slots:
            return []
        searching = [cell for cell in self.plan.cells if not self._study(cell).is_done]
        wanted = min(search.parallel, math.ceil(self.slots / max(1, len(searching))))
        trial_runs: list[Run] = []
        for cell in searching:
            finished = self.plan.finished_trials(cell, rows)

            def is_free(drawn: Options, cell: Options = cell) -> bool:
                return any(map(self._is_free, self.plan.trial_runs(cell, drawn)))

            for drawn in self._study(cell).open_trials(finished, wanted, is_free):
                trial_runs += self.plan.trial_runs(cell, drawn)
        return trial_runs

    def _study(self, cell: Options) -> SharedStudy:
        """The study of a cell."""
        name = json.dumps(cell, sort_keys=True)
        if name not in self._studies:
            file = "-".join(filter(None, [self.plan.name, self.plan.scale]))
            journal = self.rows_path.parent / ".optuna" / f"{file}.journal"
            options = self.plan.options | cell
            self._studies[name] = SharedStudy(journal, name, options, self.plan.search)
        return self._studies[name]

    def progress(self) -> tuple[str, int]:
        """Such as "plan: 3 of 5 final runs finished, 1 failed", and how many are not finished."""
        rows = self.rows()
        parts = []
        not_done = 0
        for stage, all_runs in groupby(self.plan.runs(rows), lambda run: run.stage):
            done = [rows.get(run) for run in all_runs]
            finished = [runs.is_finished(row) for row in done if row]
            failed = f", {finished.count(False)} failed" if not all(finished) else ""
            parts.append(f"{sum(finished)} of {len(done)} {stage} runs finished{failed}")
            not_done += len(done) - sum(finished)
        cells = self.plan.cells
        if self.plan.search.is_sampled:
            trials = sum(len(self.plan.finished_trials(cell, rows)) for cell in cells)
            parts.append(f"{trials} of {(self.plan.search.trials or 0) * len(cells)} trials done")
        if searching := sum(not self.plan.selected(cell, rows) for cell in cells):
            parts.append(f"the searches of {searching} of {len(cells)} cells have no result")
        return f"{self.plan.label}: {'; '.join(parts)}", not_done + searching

    @contextmanager
    def claim(self, run: Run) -> Iterator[bool]:
        """Lock a run while it is done and its row is written.

        Yields False if another sweep does it, or has done it.
        """
        try:
            lock = runs.lock(self.rows_path, self.folder_of(run).name).acquire(blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            row = self.rows().get(run)
            yield not (row and runs.is_finished(row))

    def _is_free(self, run: Run) -> bool:
        """Whether no other sweep does a run, or has done it."""
        if self.defaults.key(run) in self._started:
            return True
        with self.claim(run) as is_free:
            return is_free

    # -- doing it ------------------------------------------------------------------------------

    def run(
        self,
        engine: str = "local",
        jobs: int | None = None,
        resources: Options | None = None,
        retry_failed: bool = False,
    ) -> int:
        """Do what has no row; the number of runs or searches that have failed, or are left."""
        if retry_failed:
            all_runs = [(run, self.rows().get(run)) for run in self.plan.runs(self.rows())]
            failed = [run for run, row in all_runs if row and not runs.is_finished(row)]
            self._retried |= set(map(self.defaults.key, failed))
        runs.commit()  # of the rows: what is checked out now
        self.slots = jobs or (128 if engine == "batched" else 1)
        pending = self.pending()
        print(f"{self.plan.label}: {len(pending)} runs can start", flush=True)
        if engine == "batched":
            from catnat.sweeps import batched

            batched.train(self, self.slots)
        elif pending:
            chosen = make_engine(engine, jobs, resources or {}, self.folder)
            self.slots = chosen.jobs
            self.use(chosen, engine)
        text, not_done = self.progress()
        print(text)
        return not_done

    def start(self) -> list[Run]:
        """The runs that can start now, which then count as started."""
        pending = self.pending()
        self._started |= set(map(self.defaults.key, pending))
        return pending

    def use(self, engine: Engine, name: str) -> None:
        """Give runs to an engine until none is left; a run that ends may let others start."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(engine.jobs) as pool:
            try:
                while True:
                    running |= {pool.submit(self.do, run, engine, name) for run in self.start()}
                    if not running:
                        return
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        future.result()
            finally:
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                engine.stop()

    def do(self, run: Run, engine: Engine, name: str) -> None:
        """Let an engine do a run; its row is written before another sweep can claim it."""
        with self.claim(run) as is_free:
            outcome = engine.execute(run, self.folder_of(run)) if is_free else {}
            if is_free and self._stopping.is_set() and not runs.metrics_of(outcome):
                return
            self.record([(run, outcome)], name)

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
                defaults = self.defaults.record(run.options)
                row = run.row({**outcome, "engine": engine}, defaults)
                runs.add(self.rows_path, row)
                self._retried.discard(self.defaults.key(run))
                text = f"FAILED: {row.get('note', 'no metrics')} ({self.folder_of(run)}/log.txt)"
                if runs.is_finished(row):
                    finished.append(row)
                    text = "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)
            print(f"{time.strftime('%H:%M:%S')} {self.plan.describe(run)}: {text}", flush=True)
        for row, name in product(finished, names):
            require_choice(runs.metrics_of(row), **{"metric of the plan": name})
