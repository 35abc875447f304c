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
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import groupby, product
from pathlib import Path

import yaml
from jsonargparse.typing import PositiveInt

from catnat.checks import require_choice
from catnat.cli.options import RL_MODELS
from catnat.sweeps import plan as plans
from catnat.sweeps import runs
from catnat.sweeps.engines import Engine, Job, Local, Ray, Slurm, device_name
from catnat.sweeps.runs import Row, Rows, Run, read_pairs

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
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
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
    """A plan, its rows, and the part of it that was asked for.

    Args:
        name: of the plan's file.
        args: what :func:`plan_parser` reads.
        extra: options for every run, as words such as --root=DATA.
    """

    def __init__(self, name: str, args: argparse.Namespace, extra: Sequence[str] = ()) -> None:
        self.plan = plans.load(name, args.scale)
        results = args.results or Path(self.plan.results or "results")
        if self.plan.scale == SMOKE and not args.results:
            results = args.runs / "results"
        self.rows_path = (results / self.plan.study / "runs.csv").resolve()
        self.folder = (args.runs / self.plan.study).resolve()
        self.plan.restrict(read_pairs(args.only, "--only"))
        self.failed_before: set[str] = set()  # keys of failed runs that are to be done once more
        self._started: set[str] = set()  # keys of runs
        sys.path += [folder for folder in self.plan.folders if folder not in sys.path]
        added = read_pairs([word.removeprefix("--") for word in extra], "--")
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
        rows = runs.by_key(runs.read(self.rows_path), self.plan.name)
        return {key: row for key, row in rows.items() if key not in self.failed_before}

    def pending(self) -> list[Run]:
        """The runs that can start now: without a row, and not started before."""
        rows = self.rows()
        begun = rows.keys() | self._started
        return [run for run in self.plan.runs(rows) if run.key not in begun]

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
        if searching := sum(not self.plan.selected(cell, rows) for cell in cells):
            parts.append(f"the searches of {searching} of {len(cells)} cells have no result")
        return f"{self.plan.label}: {'; '.join(parts)}", not_done + searching

    def check(self) -> None:
        """Raise a ValueError for options and heads that ``catnat`` does not know."""
        from catnat.cli.main import command_line

        if self.plan.program:
            return
        distinct = {
            runs.key_of({**run.options, "seed": 0, "learning_rate": 0}): run
            for run in self.pending()
        }
        for run in distinct.values():
            command_line(run.arguments(self.folder), until="options")

    # -- doing them ----------------------------------------------------------------------------

    def run(self, args: argparse.Namespace) -> int:
        """Do what has no row; the number of runs or searches that have failed, or are left."""
        if args.retry_failed:
            rows = self.rows()
            self.failed_before = {key for key, row in rows.items() if not runs.is_finished(row)}
        runs.commit()  # of the rows: what is checked out now
        pending = self.pending()
        print(f"{self.plan.label}: {len(pending)} runs can start", flush=True)
        if args.engine == "batched":
            self._train_batched(args.jobs or 128)
        elif pending:
            engine: Engine
            if args.engine == "ray":
                engine = Ray(args.resources)
            elif args.engine == "slurm":
                engine = Slurm(self.folder / "slurm", args.jobs, args.resources)
            else:
                engine = Local(args.jobs)
            self._submit(engine, args.engine)
        text, not_done = self.progress()
        print(text)
        return not_done

    def _submit(self, engine: Engine, name: str) -> None:
        """Give runs to an engine until none is left; a run that ends may let others start."""
        running = {}
        with ThreadPoolExecutor(engine.jobs) as pool:
            try:
                while True:
                    for run in self.pending():
                        self._started.add(run.key)
                        job = Job(run, self.folder / run.name, self.rows_path)
                        running[pool.submit(engine.execute, job)] = run
                    if not running:
                        return
                    done = wait(running, return_when=FIRST_COMPLETED).done
                    ended = [future for future in running if future in done]  # in order
                    self.record(((running.pop(x), x.result()) for x in ended), name)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                engine.stop()

    def _train_batched(self, most: int) -> None:
        """Train what can start as groups of models, again and again until nothing can."""
        from catnat.sweeps import batched

        program = self.plan.program or self.plan.model
        if program in (self.plan.program, *RL_MODELS):
            raise ValueError(f"--engine batched needs a LightningModule, not {program}")
        while pending := {self.folder / run.name: run for run in self.pending()}:
            self._started |= {run.key for run in pending.values()}
            members = [batched.build(run.arguments(path), path) for path, run in pending.items()]
            for group in batched.groups(members, most):
                claims = [(x, runs.claim(pending[x.folder], self.rows_path)) for x in group]
                free = [member for member, lock in claims if lock]
                if free:
                    batched.Group(free).train()
                ended = (
                    (pending[x.folder], {**x.metrics, "note": x.failure, "device": device_name()})
                    for x in free
                )
                self.record(ended, "batched")

    def record(self, outcomes: Iterable[tuple[Run, Row]], engine: str) -> None:
        """Write the rows of runs that have ended, and print a line for each.

        Then stop the sweep by a ValueError if one has finished without the metrics of the plan.
        """
        searched = [self.plan.search.metric] if self.plan.search.grid else []
        names = dict.fromkeys([*searched, *self.plan.metrics])
        finished = []
        for run, outcome in outcomes:
            text = "another sweep does it"
            if outcome:
                row = runs.make_row(run, {**outcome, "engine": engine})
                runs.add(self.rows_path, row)
                runs.lock_path(run, self.rows_path).unlink(missing_ok=True)
                self.failed_before.discard(run.key)
                text = f"FAILED: {row.get('note', 'no metrics')}"
                if runs.is_finished(row):
                    finished.append(row)
                    text = "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)
            print(f"{time.strftime('%H:%M:%S')} {run.name}  {text}", flush=True)
        for row, name in product(finished, names):
            require_choice(runs.metrics_of(row), **{"metric of the plan": name})
