"""Train one model with several seeds: a sweep without a plan.

python train.py --model vae --head sigmoid --seeds 1..10

It ends with a table of the metrics and a picture of a curve, both with 95 % intervals over seeds.
The same command continues after an interruption: seeds with a row are not repeated.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from catnat.cli.names import Options
from catnat.sweeps import figures
from catnat.sweeps.check import check
from catnat.sweeps.plan import SET_BY_SWEEP, Metric, Plan
from catnat.sweeps.runs import Row, Run, is_finished, metrics_of
from catnat.sweeps.significance import mean_interval
from catnat.sweeps.sweep import Sweep, interruptible

# The first of these curves that the runs have is drawn.
_TAGS = ("val/loss", "eval/mean_reward", "eval/return", "train/loss", "train/return")


def main(argv: Sequence[str], seeds: Sequence[int]) -> int:
    """Train with each seed; 0, 1 (a run failed or is left) or 130 (interrupted).

    Args:
        argv: words of a command line without --seeds.
        seeds: the seeds.
    """
    sweep = make_sweep(argv, seeds)
    with interruptible():
        check(sweep.plan, sweep.rows(), sweep.folder)
        not_done = sweep.run()
        rows = sweep.rows()
        found = [(run, row) for run in sweep.plan.runs(rows) if (row := rows.get(run))]
        if done := [(run, row) for run, row in found if is_finished(row)]:
            print(table([row for _, row in done]))
            _draw(sweep, [run for run, _ in done])
        return min(1, not_done)
    return 130


def make_sweep(argv: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """The sweep of a command line: its rows and runs are in one folder beside other runs."""
    options = dict(_options(argv))
    model = options.pop("model", "vae")
    root = options.pop("default_root_dir", None) or "runs"
    for name in SET_BY_SWEEP:
        if name in options:
            raise ValueError(f"--{name} cannot be given beside --seeds")
    words = [model, options.get("head", ""), options.get("env", "")]
    name = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, ["seeds", *words])))
    plan = Plan(
        title=name,
        study=name,
        metrics={"test": Metric()},
        grid={},
        model=model,
        options=options,
        seeds=list(seeds),
    )
    plan.name = name
    plan.metrics = {}  # whatever a run measures
    folder = Path(root, name)
    return Sweep(plan, folder / "runs.csv", folder, resolves=True)


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names and values of a command line."""
    words = iter(argv)
    for word in words:
        if word == "fit":
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise ValueError(f"--seeds trains: {word!r} is not an option")
        if not equals:
            value = next(words, "")
        if not value or (not equals and value.startswith("--")):
            raise ValueError(f"--{name} needs a value")
        name = name.replace("-", "_").replace(".init_args.", ".")
        groups = r"^(model|data|trainer)\.(?=class_path$|head$|default_root_dir$)"
        yield {"class_path": "model"}.get(name, re.sub(groups, "", name)), value


def table(rows: Sequence[Row]) -> str:
    """Mean, standard deviation and interval of each metric of runs that have finished."""
    metrics = pd.DataFrame([metrics_of(row) for row in rows])
    chosen = [name for name in metrics if name.startswith(("test/", "val/"))] or list(metrics)
    lines = {}
    for name in sorted(chosen, key=lambda name: not name.startswith("test/")):
        values = metrics[name].dropna()
        low, high = mean_interval(values.tolist())
        lines[name] = {
            "mean": values.mean(),
            "std": values.std(),
            "95 % interval": f"{low:.5g} to {high:.5g}",
            "n": len(values),
        }
    return pd.DataFrame.from_dict(lines, orient="index").to_string(float_format="{:.5g}".format)


def _draw(sweep: Sweep, done: Sequence[Run]) -> None:
    """Draw the first curve that the runs have, with its interval."""
    for tag in _TAGS:
        curves = [figures.read_curve(sweep.folder_of(run), tag) for run in done]
        if any(curve.size for curve in curves):
            options: Options = sweep.plan.options
            label = str(options.get("head", sweep.plan.model))
            path = sweep.folder / f"{tag.replace('/', '_')}.png"
            figures.draw({sweep.plan.title: {label: curves}}, tag, path, band=figures.interval)
            return
