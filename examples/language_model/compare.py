"""Compare outputs of a language model: python compare.py --path TEXT --out FOLDER --jobs 2.

Each output gets its own learning rate: one seed of each rate of the grid, rates beyond an edge that
is best, then the other seeds of the best rate. With --speed the time of a step is measured first,
one output after the other, and each output also runs for the steps that fit into the time which
the fastest one needs, at a rate that is tuned for these steps. A row goes to FOLDER/runs.csv as
soon as a run ends; the same command resumes.
"""

import argparse
import contextlib
import csv
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from language_model import TextData
from language_model.data import Windows
from language_model.model import AdaptiveOutput, LinearOutput, TreeOutput
from torch import Tensor, nn

from catnat.optim import RowAdam

FREQUENT = 1024  # words whose perplexity is reported apart, whatever the output
NUMBERS = ("val", "test", "test_frequent", "test_rare", "accuracy", "tokens_per_s", "seconds")
SEEN = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)  # least counts of the bins of by_count.csv
OUTPUTS = ("softmax", "adaptive-1", "adaptive-2", "adaptive-wide", "tree", "tree-apart")
OUTPUTS += ("hybrid-64", "hybrid-256", "hybrid-1024", "hybrid-4096")
MORE_OUTPUTS = ("hybrid-8192", "softmax-bfloat16")  # the last one trains on bfloat16 logits
BY_ROWS = "-rowadam"  # ending of an output that RowAdam trains, the rest of the model by Adam
MORE_OUTPUTS += ("tree-rowadam", "hybrid-1024-rowadam", "hybrid-4096-rowadam")
Searches = dict[str, tuple[int, list[float]]]  # by output: steps, and rates to begin with


class Run(NamedTuple):
    """The settings that identify a run."""

    output: str
    rate: float
    seed: int
    steps: int


class Recurrent(nn.Module):
    """An LSTM that keeps its state from batch to batch."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.memory: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (B * T, width) of tokens (B, T)."""
        hidden, memory = self.lstm(self.dropout(self.embedding(tokens)), self.memory)
        self.memory = [state.detach() for state in memory]
        return self.dropout(hidden).flatten(0, 1)


class Transformer(nn.Module):
    """A causal Transformer, without a state from the previous batch."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        heads = max(1, width // 64)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, **options)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.memory: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (B * T, width) of tokens (B, T)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        return self.blocks(hidden, mask, is_causal=True).flatten(0, 1)


def make_output(name: str, data: TextData, width: int) -> Any:
    """An output layer that starts from the frequencies of the words."""
    K = data.hparams.vocabulary
    name = name.removesuffix(BY_ROWS)
    kind, _, number = name.partition("-")
    output: Any
    if kind == "softmax":
        output = LinearOutput(width, K, "softmax", keep_precision=number == "bfloat16")
    elif kind == "adaptive":
        cutoffs = [K // 16, K // 4] if number == "2" else [K // 4]
        output = AdaptiveOutput(width, K, cutoffs, 1.0 if number == "wide" else 4.0)
    elif name == "tree-apart":
        output = TreeOutput(width, K, "sigmoid", frequent_apart(data))
    else:
        frequent = int(number or 0)
        output = TreeOutput(width, K, "sigmoid", data.order(frequent), frequent=frequent)
    output.start_from_counts(data.counts())
    return output


def frequent_apart(data: TextData) -> Tensor:
    """An order by co-occurrence in which the frequent words have a subtree of their own."""
    K = data.hparams.vocabulary
    rank = data.order()
    rank = torch.where(torch.arange(K) < FREQUENT, rank - K, rank)
    return rank.argsort().argsort()


class Trained:
    """A model with its training and evaluation."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.data = read_data(options)
        torch.manual_seed(run.seed)
        torch.set_float32_matmul_precision("high")  # TF32 for all, where the device has it
        kind = Recurrent if options.model == "lstm" else Transformer
        K = options.vocabulary
        trunk = kind(K, options.width, options.layers, options.length)
        output = make_output(run.output, self.data, options.width)
        self.model = nn.ModuleDict({"trunk": trunk, "output": output}).to(options.device)
        self.optimizers = self.make_optimizers()
        warmup = max(1, run.steps // 10)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min((step + 1) / warmup, max(0.0, 1 - step / run.steps))
            )
            for optimizer in self.optimizers
        ]
        self.batches = {
            name: Windows(stream.to(options.device), options.rows, options.length)
            for name, stream in self.data.stream.items()
        }
        self.seen = torch.zeros(K, dtype=torch.int64, device=options.device)  # of each token

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for all parameters, or RowAdam for those of the output."""
        rate = self.run.rate
        on_cuda = self.options.device == "cuda"
        if not self.run.output.endswith(BY_ROWS):
            return [torch.optim.Adam(self.model.parameters(), rate, fused=on_cuda)]
        of_trunk = torch.optim.Adam(self.model["trunk"].parameters(), rate, fused=on_cuda)
        return [of_trunk, RowAdam(self.model["output"].parameters(), rate)]

    def train(self, steps: int, look_every: int) -> Iterator[tuple[int, float]]:
        """Train, and stop at times: the steps done, and the seconds spent on them."""
        seconds = 0.0
        start = self.clock()
        for step in range(steps):
            place = step % len(self.batches["train"])
            if place == 0:
                self.model["trunk"].memory = None
            batch = self.batches["train"][place]
            with self.precision():
                hidden = self.model["trunk"](batch[:, :-1])
                loss = self.model["output"].nll(hidden, batch[:, 1:].flatten())
            self.seen += batch[:, 1:].flatten().bincount(minlength=len(self.seen))
            self.model.zero_grad()
            loss.backward()
            if self.options.model == "transformer":
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
            if (step + 1) % look_every == 0 or step + 1 == steps:
                seconds += self.clock() - start
                yield step + 1, seconds
                start = self.clock()

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Autocast to bfloat16 if requested."""
        half = self.options.precision == "bfloat16"
        return torch.autocast(self.options.device, torch.bfloat16, enabled=half)

    def look(self, split: str, most: int, accuracy_rows: int = 0) -> dict[str, float]:
        """Perplexity per word of a split, of frequent and rare tokens, and accuracy."""
        loss, target, hits = self.losses(split, most, accuracy_rows)
        rare = target >= FREQUENT
        words = self.data.words_per_token[split]
        return {
            split: math.exp(loss.mean().item() / words),
            f"{split}_frequent": math.exp(loss[~rare].mean().item()),
            f"{split}_rare": math.exp(loss[rare].mean().item()),
            "accuracy": hits.mean().item() if len(hits) else math.nan,
        }

    def by_count(self, most: int) -> Iterator[tuple[int, bool, int, float]]:
        """The mean test loss of tokens by how often they were trained on, rare ones apart.

        The least count of a bin, whether its tokens are rare, their number, and their mean loss.
        """
        loss, target, _ = self.losses("test", most)
        bins = torch.bucketize(
            self.seen[target], torch.tensor(SEEN, device=target.device), right=True
        )
        for place, rare in itertools.product(range(1, len(SEEN) + 1), (False, True)):
            inside = loss[(bins == place) & ((target >= FREQUENT) == rare)]
            if len(inside):
                yield SEEN[place - 1], rare, len(inside), inside.mean().item()

    @torch.no_grad()
    def losses(
        self, split: str, most: int, accuracy_rows: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and targets of a split, and whether some of the likeliest tokens are right."""
        self.model.eval()
        trunk, output = self.model["trunk"], self.model["output"]
        memory, trunk.memory = trunk.memory, None
        losses, targets, hits = [], [], []
        windows = self.batches[split]
        for place in range(min(most, len(windows))):
            batch = windows[place]
            target = batch[:, 1:].flatten()
            with self.precision():
                hidden = trunk(batch[:, :-1])
                losses.append(output.nll(hidden, target, reduction="none").double())
                if accuracy_rows:
                    right = output.best(hidden[:accuracy_rows]) == target[:accuracy_rows]
                    hits.append(right.double())
            targets.append(target)
        trunk.memory = memory
        self.model.train()
        return torch.cat(losses), torch.cat(targets), torch.cat(hits) if hits else torch.empty(0)

    def clock(self) -> float:
        """Seconds, after the device has done its work."""
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def read_data(options: argparse.Namespace) -> TextData:
    """The text, with cached tokens and orders."""
    sizes = (options.vocabulary, options.length, options.rows)
    data = TextData(options.path, options.tokens, *sizes, cache=str(options.out / "cache"))
    data.setup()
    return data


def do_run(
    run: Run, options: argparse.Namespace
) -> tuple[dict[str, float], list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Train one model; its numbers, its validation perplexity over time, its losses by count."""
    trained = Trained(run, options)
    curve = []
    for step, seconds in trained.train(run.steps, max(1, run.steps // 20)):
        curve.append((step, seconds, trained.look("val", 8)["val"]))
    tokens = run.steps * options.rows * options.length
    numbers = {"tokens_per_s": tokens / curve[-1][1], "seconds": curve[-1][1]}
    numbers |= trained.look("val", 32) | trained.look("test", options.test_batches, 256)
    by_count = list(trained.by_count(options.test_batches))
    del trained
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return numbers, curve, by_count


def measure_speed(options: argparse.Namespace) -> None:
    """The seconds of a step, one output after the other in this process, to speed.json."""
    path = options.out / "speed.json"
    speeds = json.loads(path.read_text()) if path.is_file() else {}
    for output in options.outputs:
        if output in speeds:
            continue
        trained = Trained(Run(output, min(options.rates), 0, options.speed), options)
        every = max(1, options.speed // 6)
        marks = [seconds for _, seconds in trained.train(options.speed, every)]
        parts = [(b - a) / every for a, b in itertools.pairwise(marks)]
        speeds[output] = statistics.median(parts[1:])  # the first steps compile kernels
        print(output, f"{speeds[output] * 1e3:.2f} ms a step", flush=True)
        path.write_text(json.dumps(speeds, indent=1))
        del trained
    if options.device == "cuda":
        torch.cuda.empty_cache()


class Comparison:
    """The runs of a comparison, those done and those to do."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = options.out / "runs.csv"
        self.results: dict[Run, dict[str, float]] = {}
        if self.path.is_file():
            with open(self.path, newline="") as file:
                for row in csv.DictReader(file):
                    key = (float(row["rate"]), int(row["seed"]), int(row["steps"]))
                    self.results[Run(row["output"], *key)] = {n: float(row[n]) for n in NUMBERS}

    def wanted(self) -> Iterator[Run]:
        """All runs that are known to be needed by now, those that tell most first."""
        options = self.options
        middle = statistics.median_low(options.rates)
        rates = sorted(options.rates, key=lambda rate: max(rate / middle, middle / rate))
        searches: Searches = dict.fromkeys(options.outputs, (options.steps, rates))
        yield from self.tune(searches)
        at_equal_time: Searches = {}
        for output, steps in self.steps_in_equal_time().items():
            if steps < options.steps and not self.rates_to_try(output, *searches[output]):
                rate = self.best(output, options.steps)  # shorter runs may want a higher one
                at_equal_time[output] = steps, [rate, 2 * rate]
        yield from self.tune(at_equal_time)

    def tune(self, searches: Searches) -> Iterator[Run]:
        """The first seed of each rate to try; all seeds where no rate is left to try."""
        to_try = {output: self.rates_to_try(output, *search) for output, search in searches.items()}
        columns = ([*rates, *to_try[output]] for output, (_, rates) in searches.items())
        for rates_by_output in itertools.zip_longest(*columns):
            for output, rate in zip(searches, rates_by_output, strict=True):
                if rate is not None:
                    yield Run(output, rate, 0, searches[output][0])
        for seed in range(1, self.options.seeds):
            for output, (steps, _) in searches.items():
                if not to_try[output]:
                    yield Run(output, self.best(output, steps), seed, steps)

    def rates_to_try(self, output: str, steps: int, rates: list[float]) -> list[float]:
        """The rates that are missing, then at most two beyond an edge that is best."""
        tried = self.tried(output, steps)
        missing = [rate for rate in rates if rate not in tried]
        if missing:
            return missing
        best = self.best(output, steps)
        if len(tried) < len(rates) + 2:
            if best == min(tried):
                return [best / 2]
            if best == max(tried):
                return [best * 2]
        return []

    def tried(self, output: str, steps: int) -> dict[float, float]:
        """Validation perplexity of the first seed by rate."""
        return {
            run.rate: numbers["val"]
            for run, numbers in self.results.items()
            if (run.output, run.seed, run.steps) == (output, 0, steps)
        }

    def best(self, output: str, steps: int) -> float:
        """The rate with the smallest validation perplexity of the first seed."""
        tried = self.tried(output, steps)
        finite = {rate: value for rate, value in tried.items() if not math.isnan(value)}
        return min(finite, key=lambda rate: finite[rate], default=0.0)

    def speeds(self) -> dict[str, float]:
        """Seconds of a step, as --speed measured them."""
        path = self.options.out / "speed.json"
        speeds: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        return speeds

    def steps_in_equal_time(self) -> dict[str, int]:
        """How many steps fit into the time of the fastest output, if all have been measured."""
        speeds, outputs = self.speeds(), self.options.outputs
        if not set(speeds) >= set(outputs):
            return {}
        fastest = min(speeds[output] for output in outputs)
        return {output: int(self.options.steps * fastest / speeds[output]) for output in outputs}

    def do_all(self) -> None:
        """Do what is wanted, several runs at a time, until nothing is or time is up."""
        ends = time.monotonic() + 60 * self.options.minutes
        doing: dict[Future[Any], Run] = {}
        failed: set[Run] = set()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.options.jobs, context) as pool:
            while True:
                busy = {*self.results, *doing.values(), *failed}
                todo = [run for run in dict.fromkeys(self.wanted()) if run not in busy]
                for run in todo[: self.options.jobs - len(doing)]:
                    doing[pool.submit(do_run, run, self.options)] = run
                left = ends - time.monotonic()
                if not doing or left <= 0:
                    break
                for future in wait(doing, left, FIRST_COMPLETED).done:
                    run = doing.pop(future)
                    if future.exception() is None:
                        self.keep(run, *future.result())
                    else:
                        print(run, repr(future.exception()), flush=True)
                        failed.add(run)
            if doing:
                print("time is up; the same command resumes")
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.kill()

    def keep(
        self,
        run: Run,
        numbers: dict[str, float],
        curve: list[tuple[Any, ...]],
        by_count: list[tuple[Any, ...]],
    ) -> None:
        """Write the row of a run, its curve and its losses by count, and print it."""
        self.results[run] = numbers
        append(self.path, (*Run._fields, *NUMBERS), [(*run, *(numbers[n] for n in NUMBERS))])
        header = (*Run._fields, "step", "seconds", "val")
        append(self.options.out / "curves.csv", header, [(*run, *point) for point in curve])
        header = (*Run._fields, "seen", "rare", "tokens", "loss")
        append(self.options.out / "by_count.csv", header, [(*run, *losses) for losses in by_count])
        print(*run, *(f"{name} {numbers[name]:.4g}" for name in NUMBERS), flush=True)

    def write_table(self) -> None:
        """The best rate of each output, with mean and standard deviation over seeds."""
        speeds = self.speeds()
        shorter = self.steps_in_equal_time()
        columns = ("output", "rate", "n", *NUMBERS[:5], "ms a step", "steps in equal time", "test")
        lines = [columns, ["---"] * len(columns)]
        for output in self.options.outputs:
            rate = self.best(output, self.options.steps)
            runs = self.runs_of(output, rate, self.options.steps)
            cells = [spread(numbers[name] for numbers in runs) for name in NUMBERS[:5]]
            steps = shorter.get(output, 0)
            ending = [f"{1e3 * speeds[output]:.2f}" if output in speeds else "", steps or ""]
            runs_at_equal_time = self.runs_of(output, self.best(output, steps), steps)
            ending.append(spread(numbers["test"] for numbers in runs_at_equal_time))
            lines.append([output, f"{rate:g}", len(runs), *cells, *ending])
        text = "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
        (self.options.out / "table.md").write_text(text)
        print(text)

    def runs_of(self, output: str, rate: float, steps: int) -> list[dict[str, float]]:
        """The numbers of all seeds of an output."""
        return [
            numbers
            for run, numbers in self.results.items()
            if (run.output, run.rate, run.steps) == (output, rate, steps)
        ]


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return ""
    deviation = f" ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.4g}{deviation}"


def append(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Add rows to a csv file, which gets its header first."""
    is_new = not path.is_file()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(header)
        writer.writerows(rows)


def read_options(words: list[str] | None) -> argparse.Namespace:
    """Options of the comparison; the defaults are those of the LSTM in the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="a text, or tokens that TextData.save wrote")
    parser.add_argument("--out", type=Path, required=True, help="what is done there is kept")
    parser.add_argument("--tokens", choices=("words", "bpe"), default="words")
    parser.add_argument("--model", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--outputs", nargs="+", default=OUTPUTS, choices=OUTPUTS + MORE_OUTPUTS)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.004, 0.008, 0.016])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many minutes")
    parser.add_argument("--speed", type=int, default=0, metavar="STEPS", help="measure speed first")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    sizes = {"seeds": 3, "steps": 1000, "vocabulary": 32768, "width": 512, "layers": 2}
    for name, default in (sizes | {"rows": 256, "length": 32, "test_batches": 1000}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Do what is not done yet, and write the table; returns an exit code."""
    options = read_options(words)
    options.out.mkdir(parents=True, exist_ok=True)
    data = read_data(options)
    for output in options.outputs:  # orders are made once here, and not in each of the runs
        kind, _, number = output.removesuffix(BY_ROWS).partition("-")
        if kind in ("tree", "hybrid"):
            data.order(int(number) if kind == "hybrid" else 0)
    if options.speed:
        measure_speed(options)
    comparison = Comparison(options)
    comparison.do_all()
    comparison.write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
