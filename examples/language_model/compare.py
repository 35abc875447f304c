"""Compare outputs of the language model: python compare.py --path TEXT --out FOLDER --jobs 2."""

import argparse
import contextlib
import json
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compare_table import draw, write_table
from language_model import TextData
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from catnat.cli.main import main as catnat

TREES = {"sigmoid": ["--head=sigmoid"], "natural": ["--head=natural", "--tail=0"]}
TREES["natural, tail"] = ["--head=natural", "--tail=0.05"]
OUTPUTS = {"softmax": ["--head=softmax"], "adaptive softmax": ["--output=adaptive"]}
OUTPUTS["adaptive softmax, one cutoff"] = ["--output=adaptive", "--cutoffs=[{quarter}]"]
for _head, _options in TREES.items():
    for _order in ("frequency", "cooccurrence"):
        OUTPUTS[f"tree, {_order}, {_head}"] = [*_options, f"--order={_order}"]


class Run(NamedTuple):
    """What tells a run from others."""

    output: str
    rate: float
    seed: int
    steps: int

    def folder(self, out: Path) -> Path:
        """Where the run writes."""
        name = self.output.replace(", ", "-").replace(" ", "-")
        return out / "runs" / f"{name}-{self.rate:g}-{self.seed}-{self.steps}"


def command(run: Run, given: argparse.Namespace) -> list[str]:
    """The words after ``catnat`` for a run."""
    every, quarter = max(1, run.steps // 20), given.vocabulary // 4
    return [
        *("--model=language_model.LanguageModel", "--data=language_model.TextData"),
        *(each.format(quarter=quarter) for each in OUTPUTS[run.output]),
        *(f"--learning_rate={run.rate}", f"--seed={run.seed}", f"--max_steps={run.steps}"),
        *(f"--warmup={max(1, run.steps // 10)}", f"--val_check_interval={every}"),
        *("--limit_val_batches=8", "--num_sanity_val_steps=0", "--enable_checkpointing=false"),
        *("--fisher.num_samples=0", f"--fisher_every_n_steps={2 * run.steps}"),
        *(f"--path={given.path}", f"--vocabulary={given.vocabulary}", f"--width={given.width}"),
        *(f"--layers={given.layers}", f"--batch_size={given.rows}", f"--length={given.length}"),
        *(f"--cache={given.out / 'tokens'}", f"--accelerator={given.accelerator}"),
        f"--default_root_dir={run.folder(given.out)}",
    ]


def train(run: Run, given: argparse.Namespace, *more: str) -> Run:
    """Run the command ``catnat`` in this process; what it says goes to a file."""
    torch.set_float32_matmul_precision("high")  # TF32 for all, where the device has it
    folder = run.folder(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "log.txt", "w"))
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        code = catnat([*command(run, given), *more])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if code:
        raise RuntimeError(f"exit code {code}, see {folder / 'log.txt'}")
    return run


def result(run: Run, out: Path) -> dict[str, Any] | None:
    """Metrics and the curve of the validation perplexity; None if the run has not finished."""
    found = sorted(run.folder(out).rglob("metrics.json"))
    if not found:
        return None
    kept = found[-1].with_name("curve.json")
    if not kept.is_file():
        kept.write_text(json.dumps(curves(found[-1].parent)))
    return {**json.loads(found[-1].read_text()), "curves": json.loads(kept.read_text())}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars in a run's event files by tag, as (step, value)."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


class Comparison:
    """The runs of a comparison, those done and those to do."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.results = given, dict[Run, dict[str, Any]]()
        self.ends = time.monotonic() + 60 * given.minutes

    def do(self, runs: Iterable[Run]) -> None:
        """Do the runs that are not done, several at a time."""
        todo = [run for run in dict.fromkeys(runs) if not self._read(run)]
        context = multiprocessing.get_context("spawn")
        if not todo:
            return
        with ProcessPoolExecutor(min(self.given.jobs, len(todo)), context) as pool:
            try:
                doing: dict[Future[Run], Run] = {
                    pool.submit(train, run, self.given): run for run in todo
                }
                for done in as_completed(doing, max(0.0, self.ends - time.monotonic())):
                    failed = done.exception()
                    known = failed is None and self._read(doing[done])
                    print(doing[done], f"{known['val/perplexity']:.2f}" if known else failed)
                    sys.stdout.flush()
            except BaseException:  # time is up, or a key was pressed: do not wait for the others
                pool.shutdown(wait=False, cancel_futures=True)
                for each in multiprocessing.active_children():
                    each.kill()  # the Trainer keeps SIGTERM for itself
                raise
            finally:
                write_table(self)

    def _read(self, run: Run) -> dict[str, Any] | None:
        if run not in self.results and (found := result(run, self.given.out)):
            self.results[run] = found
        return self.results.get(run)

    def best(self, output: str) -> float:
        """The rate with the smallest validation perplexity of the first seed."""
        known = {
            run.rate: each["val/perplexity"]
            for run, each in self.results.items()
            if (run.output, run.seed, run.steps) == (output, 0, self.given.steps)
        }
        return min(known, key=lambda rate: known[rate], default=0.0)

    def all(self) -> None:
        """One seed of everything, rates beyond an edge that is best, more seeds, equal time."""
        given, seeds = self.given, range(self.given.seeds)
        rates = sorted(given.rates)
        middle = statistics.median_low(rates)
        first = sorted(rates, key=lambda rate: max(rate / middle, middle / rate))
        self.do(Run(o, rate, 0, given.steps) for rate in first for o in given.outputs)
        tried = {output: list(rates) for output in given.outputs}
        for _ in range(3):
            more = []
            for output, each in tried.items():
                at = {min(each): min(each) / 2, max(each): max(each) * 2}.get(self.best(output))
                if at is not None and len(each) > 1:
                    each.append(at)
                    more.append(Run(output, at, 0, given.steps))
            self.do(more)
        chosen = {output: self.best(output) for output in given.outputs}
        self.do(Run(o, r, seed, given.steps) for seed in seeds for o, r in chosen.items() if r)
        steps = self.steps_in_equal_time()
        self.do(Run(o, chosen[o], seed, n) for seed in seeds for o, n in steps.items() if n)

    def speeds(self) -> dict[str, dict[str, float]]:
        """What --speed has measured: seconds of a step, and tokens a second."""
        path = self.given.out / "speed.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def steps_in_equal_time(self) -> dict[str, int]:
        """How many steps each output takes while the fastest one takes all of its steps."""
        known = {o: each for o, each in self.speeds().items() if o in self.given.outputs}
        if len(known) < len(self.given.outputs):
            return {}
        fastest = min(each["step"] for each in known.values())
        return {o: int(self.given.steps * fastest / each["step"]) for o, each in known.items()}

    def speed(self) -> None:
        """Measure the time of steps, one output after the other, in this process."""
        found, tokens = self.speeds(), self.given.rows * self.given.length
        given = argparse.Namespace(**vars(self.given) | {"out": self.given.out / "speed"})
        short = ("--limit_val_batches=1", "--limit_test_batches=1", "--log_every_n_steps=20")
        for output in self.given.outputs:
            run = Run(output, min(self.given.rates), 0, self.given.speed)
            if result(run, given.out) is None:
                train(run, given, f"--cache={self.given.out / 'tokens'}", *short)
            curve = result(run, given.out)["curves"]["train/tokens_per_second"]
            seconds = [20 * tokens / rate for _, rate in curve[1:]]  # the first steps are slower
            usual = statistics.median(seconds)
            found[output] = {"step": usual / 20, "tokens/s": 20 * tokens / usual}
            print(
                output, {name: float(f"{x:.4g}") for name, x in found[output].items()}, flush=True
            )
            (self.given.out / "speed.json").write_text(json.dumps(found, indent=1))


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    """Options of the comparison; the defaults are those of the results that are shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="a text file or a folder of text files")
    parser.add_argument("--out", type=Path, required=True, help="what is done there is kept")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many minutes")
    parser.add_argument("--speed", type=int, default=0, metavar="STEPS", help="only measure speed")
    parser.add_argument("--outputs", nargs="+", default=list(OUTPUTS), choices=OUTPUTS)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.002, 0.004, 0.008, 0.016, 0.032]
    )
    parser.add_argument("--accelerator", default="auto")
    sizes = {"seeds": 3, "steps": 1000, "vocabulary": 32768, "width": 512, "layers": 2}
    for name, default in (sizes | {"rows": 256, "length": 32}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Do what is not done yet, and write the table; returns an exit code."""
    given = read_arguments(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    data = TextData(given.path, "words", given.vocabulary, given.length, given.rows)
    data.hparams.cache = str(given.out / "tokens")
    data.setup()
    data.order()  # once here, and not in each of the runs
    comparison = Comparison(given)
    try:
        comparison.speed() if given.speed else comparison.all()
        return 0
    except (KeyboardInterrupt, TimeoutError) as stopped:
        print(f"stopped ({type(stopped).__name__}); the same command resumes")
        return 130
    finally:
        write_table(comparison)
        draw(comparison)


if __name__ == "__main__":
    sys.exit(main())
