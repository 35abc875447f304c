r"""Run a table of the paper: every run is one train.py command, done once, wherever it was done.

    python experiments/sweep.py vae_adam --scale small --jobs 12       # on this machine
    python experiments/sweep.py vae_adam --scale small --engine ray --gpus_per_run 0.08
    python experiments/sweep.py gsl --scale paper --engine ray --address auto      # on a cluster
    python experiments/sweep.py gsl --engine print | xargs -d '\n' -P 8 -I{} sh -c '{}'
    python experiments/sweep.py all --scale smoke
    python experiments/sweep.py vae_adam --only head=natural,softmax N=10 -- --data.root DATA

The same command continues after an interruption: finished runs (those with a metrics.json) are not
repeated, interrupted ones go on from their last checkpoint. Runs are known by their place in the
table, settings and seed: other options after ``--`` call for another ``--runs`` folder.

A table has up to three stages: a coarse search, a refined one, then all seeds; ``print`` prints the
first that is not done, to be run in the folder of the checkout.
Runs side by side share a GPU by NVIDIA's MPS where that is installed; for several sweeps at a time,
start nvidia-cuda-mps-control before them.
Afterwards: ``python experiments/tables.py vae_adam --scale small``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import plan, runs
from experiments.engines import mps
from experiments.engines.local import Progress, run_local, sigterm_interrupts
from experiments.plan import Experiment
from experiments.stages import Stage, names, open_stage, stages

JOBS = 2  # side by side on this machine, unless told otherwise


class Parser(argparse.ArgumentParser):
    """Answers bad input with one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message alone, without the usage, and leave with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run what is missing. Returns 0, 1 (runs failed), 2 (wrong usage) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    parser, split = build_parser(), argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    if (args.jobs is not None and args.jobs < 1) or args.retries < 0:
        parser.error(f"--jobs {args.jobs} --retries {args.retries}: at least 1 and 0")
    wanted = plan.names() if args.tables == ["all"] else args.tables
    try:
        tables = [load(name, args, tuple(argv[split + 1 :])) for name in wanted]
        local = args.engine in ("auto", "local") and (args.jobs or JOBS) > 1 and not args.no_mps
        with sigterm_interrupts(), mps.shared_gpu() if local else nullcontext():
            return min(1, sum(sweep(table, args, argv) for table in tables))
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:
        if args.engine != "print":  # into head
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for what Python flushes at its end
    except KeyboardInterrupt:
        print("sweep.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def build_parser() -> Parser:
    """The options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE", help=f"{', '.join(plan.names())}; all"
    )
    parser.add_argument("--scale", choices=plan.SCALES, default="small")
    parser.add_argument(
        "--engine",
        choices=("auto", "local", "print", "ray"),
        default="auto",
        help="auto: ray for a search by TPE, else local",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        help=f"runs side by side (default {JOBS}; with Ray all there is room for)",
    )
    parser.add_argument("--retries", type=int, default=1, help="of a run that fails (default 1)")
    parser.add_argument("--retry_failed", action="store_true", help="also runs given up before")
    parser.add_argument("--address", help="of a Ray cluster; auto: the one of this machine")
    parser.add_argument("--gpus_per_run", type=float, default=0.0, help="for Ray, such as 0.08")
    parser.add_argument(
        "--no_mps", action="store_true", help="do not start NVIDIA's MPS for runs side by side"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder (default runs)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE[,VALUE]")
    return parser


def load(name: str, args: argparse.Namespace, extra: tuple[str, ...]) -> Experiment:
    """A table, or the part of it that was asked for."""
    only: dict[str, list[str]] = {}
    short = {each: option for option, each in plan.load(name, args.scale).names.items()}
    for word in args.only:
        key, equals, values = word.partition("=")
        if not equals:
            raise ValueError(f"--only {word}: expected key=value")
        only[short.get(key, key)] = values.split(",")
    return plan.load(name, args.scale, args.runs, only=only, extra=extra)


def sweep(table: Experiment, args: argparse.Namespace, argv: list[str]) -> int:
    """Run the stages of a table in order; the number of runs given up."""
    if args.retry_failed:
        runs.forget_failures(run for stage in stages(table) for run in stage.runs)
    if args.engine == "print":
        return print_stage(table, open_stage(table))
    note_command(table, argv)
    before: tuple[str, int] | None = None
    while (stage := open_stage(table)) is not None:
        todo = len(stage.pending) + sum(stage.trials)
        if before == (stage.name, todo):
            raise ValueError(
                f"{table.name}: nothing has come to {table.folder}: do all machines share it?"
            )
        before = (stage.name, todo)
        print(f"{table.name}, {table.scale}: {stage.name}, {todo} runs to do", flush=True)
        run_stage(table, stage, args)
    every = [run for stage in stages(table) for run in stage.runs]
    given_up = [run for run in every if runs.failure(run)]
    for run in given_up:
        print(f"failed: {run.name}: {runs.failure(run)} (see {run.home}/log.txt)")
    summary = f"{len(every) - len(given_up)} runs finished, {len(given_up)} failed"
    print(f"{table.name}, {table.scale}: {summary}, in {table.folder}", flush=True)
    return len(given_up)


def run_stage(table: Experiment, stage: Stage, args: argparse.Namespace) -> None:
    """Run what is left of a stage."""
    shown = list(dict.fromkeys([(table.search or {}).get("metric", ""), *table.metrics]))[:3]
    progress = Progress(len(stage.pending) + sum(stage.trials), args.jobs or JOBS, shown)
    if args.engine == "local" and any(stage.trials):
        raise ValueError(f"{table.name} searches by TPE, trial after trial: use --engine ray")
    if args.engine == "ray" or any(stage.trials):
        run_stage_on_ray(table, stage, args, progress)
    else:
        run_local(stage.pending, args.jobs or JOBS, args.retries, progress)
    if progress.counts["interrupted"]:
        raise KeyboardInterrupt


def run_stage_on_ray(
    table: Experiment, stage: Stage, args: argparse.Namespace, progress: Progress
) -> None:
    """Known runs first, then those that TPE still has to draw."""
    from experiments.engines.ray_tune import Cluster, run_ray, search_ray  # an extra

    cluster = Cluster(args.address, args.jobs or 0, args.gpus_per_run, args.retries)
    if stage.pending:
        run_ray(table, stage.pending, cluster, progress)
    for cell, number in zip(table.cells(), stage.trials, strict=False):
        if number:
            search_ray(table, cell, number, cluster, progress)


def print_stage(table: Experiment, stage: Stage | None) -> int:
    """Print the commands left of the first stage that is not done; 1 if they cannot be known."""
    if stage is None:
        print(f"{table.name}, {table.scale}: all is done", file=sys.stderr)
        return 0
    if any(stage.trials):
        print(f"{table.name} searches by TPE, trial after trial: use --engine ray", file=sys.stderr)
        return 1
    for run in stage.pending:
        resume = ["--ckpt_path=last"] if runs.interrupted(run) else []
        print(shlex.join([*run.command, *resume]))
    every = names(table)
    later = every[every.index(stage.name) + 1 :]
    then = f"; then again, for: {', '.join(later)}" if later else ", the last stage"
    count = f"{len(stage.pending)} of {len(stage.runs)} runs"
    print(f"{table.name}, {table.scale}: {stage.name}, {count}{then}", file=sys.stderr)
    return 0


def note_command(table: Experiment, argv: list[str]) -> None:
    """Keep the command beside the runs, for whoever makes a table of them."""
    table.folder.mkdir(parents=True, exist_ok=True)
    line = shlex.join(["python", "experiments/sweep.py", *argv])
    path = table.folder / "commands.txt"
    before = path.read_text().splitlines() if path.is_file() else []
    if line not in before:
        path.write_text("\n".join([*before, line]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
