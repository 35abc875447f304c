r"""Run a table of the paper: every run is one train.py command, done once, wherever it was done.

    python experiments/sweep.py vae_adam --scale small --jobs_per_gpu 12       # on this machine
    python experiments/sweep.py path/to/mine.yaml                              # a plan of your own
    python experiments/sweep.py vae_adam --engine together                     # one batched model
    python experiments/sweep.py gsl --scale paper --engine ray --address auto --jobs_per_gpu 12
    python experiments/sweep.py gsl --engine slurm --sbatch="--partition=gpu --gres=gpu:1"
    python experiments/sweep.py gsl --engine print | xargs -d '\n' -n 1 -P 8 sh -c
    python experiments/sweep.py all --scale smoke
    python experiments/sweep.py vae_adam --only head=natural,softmax N=10 -- --data.root DATA
    python experiments/sweep.py vae_adam --only seed=2,3                       # after the searches
    python experiments/sweep.py status vae_adam --scale small

The same command continues after an interruption: finished runs (those with a metrics.json) are not
repeated, interrupted ones go on from their last checkpoint. Runs are known by their place in the
table, settings and seed: other options after ``--`` call for another ``--runs`` folder.

A cell has up to three stages: a coarse search, a refined one, then all seeds. Cells do not wait for
each other. ``print`` prints the commands that can start now.
Runs are dealt out to all GPUs of this machine (CUDA_VISIBLE_DEVICES limits them). Those that share
one do so by NVIDIA's MPS where that is installed; for several sweeps at a time, start
nvidia-cuda-mps-control before them.
Afterwards: ``python experiments/tables.py vae_adam --scale small``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import plan, runs, stages, status
from experiments.command_line import Parser, add_table_options, load, wanted
from experiments.engines import Engine
from experiments.engines.commands import DRAWS, Print
from experiments.engines.execute import sigterm_interrupts
from experiments.engines.local import JOBS, Local
from experiments.engines.slurm import Slurm
from experiments.engines.together import MOST, Together
from experiments.plan import Experiment
from experiments.progress import Progress
from experiments.schedule import Schedule
from experiments.together import states

ENGINES = ("local", "together", "print", "ray", "slurm")


def main(argv: list[str] | None = None) -> int:
    """Run what is missing.

    Returns 0, 1 (runs failed, or another process holds them), 2 (wrong usage) or 130 (interrupted).
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["status"]:
        return show_status(argv[1:])
    parser, split = build_parser(), argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    with parser.one_line_errors():
        check_numbers(args)
        tables = [load(name, args, extra=tuple(argv[split + 1 :])) for name in wanted(args.tables)]
        try:
            with sigterm_interrupts():
                engine = make_engine(args)
                return min(1, sum(sweep(table, engine, args, argv) for table in tables))
        except BrokenPipeError:
            if args.engine != "print":  # into head
                raise
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for what Python flushes at its end
        except KeyboardInterrupt:
            jobs = "its jobs go on; " if args.engine == "slurm" else ""
            print(f"sweep.py: interrupted; {jobs}the same command goes on", file=sys.stderr)
            return 130
    return 0


def build_parser() -> Parser:
    """The options."""
    parser = Parser("sweep.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    names = f"{', '.join(plan.names())}; all; a YAML file; or first: status"
    parser.add_argument("tables", nargs="+", metavar="TABLE", help=names)
    add_table_options(parser, "small, or the first of the plan")
    where = "processes of this machine (local, the default), one batched model (together), a Ray "
    where += "cluster, SLURM jobs; print shows the commands"
    parser.add_argument("--engine", choices=ENGINES, default="local", help=where)
    many = f"runs side by side (default: {JOBS} on each GPU; with Ray and SLURM all there is room; "
    many += f"together: models at once, {MOST})"
    parser.add_argument("--jobs", type=int, help=many)
    parser.add_argument("--jobs_per_gpu", type=int, help="runs that share a GPU (default 2)")
    share = "such as 2 or 0.08; wins over --jobs_per_gpu"
    parser.add_argument("--gpus_per_run", type=float, help=share)
    parser.add_argument("--retries", type=int, default=1, help="of a run that fails (default 1)")
    parser.add_argument("--retry_failed", action="store_true", help="also runs given up before")
    parser.add_argument("--no_mps", action="store_true", help="do not start NVIDIA's MPS")
    ray = parser.add_argument_group("--engine ray")
    ray.add_argument("--address", help="of a cluster; auto: the one of this machine")
    ray.add_argument("--cpus_per_run", type=float, default=1.0, help="default 1")
    ray.add_argument("--storage", help="of checkpoints, for all machines (default: the runs)")
    slurm = parser.add_argument_group("--engine slurm")
    slurm.add_argument("--sbatch", default="", metavar="WORDS", help="options for sbatch")
    slurm.add_argument("--dry_run", action="store_true", help="print the job, submit nothing")
    return parser


def check_numbers(args: argparse.Namespace) -> None:
    """Raise for numbers that make no sense."""
    least = {"jobs": 1, "jobs_per_gpu": 1, "retries": 0, "gpus_per_run": 0, "cpus_per_run": 0}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ValueError(f"--{name} {value:g}: at least {low}")
    for name in ("jobs_per_gpu", "gpus_per_run"):
        if args.engine == "together" and getattr(args, name) is not None:
            raise ValueError(
                f"--{name}: not with --engine together, which is one process; use --jobs"
            )
    if args.dry_run and args.engine != "slurm":
        raise ValueError(f"--dry_run: only with --engine slurm, not {args.engine}")


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that was asked for."""
    if args.engine == "print":
        return Print(args.retries)
    if args.engine == "slurm":
        return Slurm(args.jobs, args.retries, tuple(shlex.split(args.sbatch)), args.dry_run)
    if args.engine == "together":
        return Together(args.jobs or MOST)
    if args.engine == "local":
        return Local(args.jobs, args.jobs_per_gpu, args.gpus_per_run, args.retries, not args.no_mps)
    from experiments.engines.ray_tune import RayTune  # an extra

    return RayTune(
        address=args.address,
        jobs=args.jobs,
        gpus_per_run=args.gpus_per_run,
        jobs_per_gpu=args.jobs_per_gpu,
        cpus_per_run=args.cpus_per_run,
        retries=args.retries,
        storage=args.storage,
        share=not args.no_mps,
    )


def sweep(table: Experiment, engine: Engine, args: argparse.Namespace, argv: list[str]) -> int:
    """Do what is left of a table; the number of runs given up, or left to another process."""
    if args.retry_failed:
        runs.forget_failures(stages.known(table))
    command = shlex.join(["python", "experiments/sweep.py", *argv])
    draws = {"print": args.jobs or DRAWS, "slurm": args.jobs or DRAWS, "together": DRAWS}
    schedule = Schedule(table, draws=draws.get(args.engine))
    if args.engine == "print" or args.dry_run:
        if args.engine == "print":  # whoever runs the printed commands makes the runs
            status.note_commands(table, [command])
        engine.run(schedule, Progress(schedule, live=False))
        return 0
    print(f"{table.name}, {table.scale}: {runs.counted(schedule.left)} to do", flush=True)
    if table.search and table.search.early_stop and args.engine != "ray":
        print(f"{table.name}: only --engine ray stops runs early: all go to their end", flush=True)
    if not schedule.finished:
        with status.noted(table, command, schedule), Progress(schedule) as progress:
            engine.run(schedule, progress)
    if schedule.counts["interrupted"]:
        raise KeyboardInterrupt
    states.forget_done(table.folder)
    return report(table, schedule.counts["held"])


def report(table: Experiment, held: int) -> int:
    """Print how a table has ended; the number of runs given up, or left to another process."""
    found = status.survey(table)
    for run, why in found.failed:
        print(f"failed: {run.name}: {why} (see {run.home}/log.txt)")
    for cell in table.cells():
        if not stages.selected(table, cell) and stages.present(table, cell) is None:
            print(f"nothing could be selected for {cell}: no run of its search has a finite metric")
    if held:
        text = f"{runs.counted(held)} held by another process: the same command goes on later"
        print(f"{table.name}, {table.scale}: {text}")
    counts = f"{runs.counted(len(found.finished))} finished, {len(found.failed)} failed"
    early = f", {len(found.stopped)} stopped early" if found.stopped else ""
    print(f"{table.name}, {table.scale}: {counts}{early}, in {table.folder}", flush=True)
    return len(found.failed) + held


def show_status(argv: list[str]) -> int:
    """Print how far tables are."""
    parser = Parser("sweep.py status", description="How far tables are.", allow_abbrev=False)
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="names, all, or YAML files")
    add_table_options(parser, "small, or the first of the plan")
    args = parser.parse_args(argv)
    with parser.one_line_errors():
        found = [status.survey(load(name, args)) for name in wanted(args.tables)]
        if sys.stdout.isatty():
            from rich.console import Console

            Console().print(status.table(found))
        else:
            print("\n".join(text for each in found for text in status.lines(each)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
