"""Compare runs: grouped by the options that differ, with means over seeds.

catnat compare runs/vae/*/version_*                        # folders of runs
catnat compare results/mine/runs.csv --only num_latents=10     # or rows of a sweep
catnat compare runs/vae/*/version_* --plot curves.png --tag val/loss
"""

import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from catnat.checks import require_choice
from catnat.cli.request import newest, read_options
from catnat.sweeps.runs import (
    ABOUT,
    OBSERVING,
    Row,
    by_key,
    is_finished,
    read,
    read_metrics,
    short_name,
    text_of,
)
from catnat.sweeps.significance import interval, marked, mean_and_spread
from catnat.sweeps.words import make_parser, read_pairs

_HIGHER = r".*(elbo|return|accuracy)$"  # metrics of which higher values are better
_DIRECTED = rf"{_HIGHER}|.*(loss|nll|mae|mse|gap|energy_score)(_2x)?$"
_IGNORED = {*ABOUT, *OBSERVING, "folder", "seed", "default_root_dir", "download", "verbose"}
_LEGEND = """\
Mean ± standard deviation over n runs; beside it the difference from the best mean with its 95 %
interval (Welch's t-test). *: the best, and those that do not differ significantly from it (p ≥ 0.05
after Holm's method over the table), which `catnat tables` prints bold."""
# Options that say what is learned: values of a metric are comparable within one of each.
_TASK = ("env", "env_kwargs", "data", "variant", "backend", "theta", "communities", "data_source")
Key = tuple[str, ...]  # values of the options that differ
Groups = dict[Key, list[Row]]


def main(words: list[str]) -> int:
    """Print a table, and draw curves if asked for."""
    parser = make_parser("compare", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or files of rows")
    add("--metric", nargs="+", help="metrics (default: test metrics with a better direction)")
    add("--plot", type=Path, metavar="FILE", help="draw curves to a file")
    add("--tag", help="tag of the curves (default: val/loss)")
    args = parser.parse_args(words)
    if args.tag and not args.plot:
        raise ValueError(f"--tag {args.tag} needs --plot FILE")
    paths = {path.resolve(): path for path in args.runs}  # a run that is named twice is one run
    rows = [row for path in paths.values() for row in rows_of(path)]
    for name, values in read_pairs(args.only, "--only").items():
        rows = [row for row in rows if row.get(name) in values.split(",")]
    if not rows:
        raise ValueError(" ".join(["no finished run to compare", *args.only]))
    columns = dict.fromkeys(name for row in rows for name in row)
    possible = [x for x in columns if any(isinstance(row.get(x), float) for row in rows)]
    ignored = _IGNORED.union(possible)
    names = [x for x in columns if x not in ignored and len({row.get(x) for row in rows}) > 1]
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(name, "") for name in names)].append(row)
    directed = [x for x in possible if re.match(f"test({_DIRECTED})", x)]
    metrics = args.metric or directed or possible
    if not metrics:
        raise ValueError("the runs have no metrics to compare")
    for metric in metrics:
        require_choice(possible, metric=metric)
    tasks = [name for name in names if name.partition(".")[0] in _TASK]
    by_task: dict[Key, Groups] = defaultdict(dict)
    for key, group in groups.items():
        task = tuple(value for name, value in zip(names, key, strict=True) if name in tasks)
        by_task[task][key] = group
    places = marked(
        (
            {(metric, key): values for key, values in samples_of(metric, task_groups).items()},
            better_of(metric),
        )
        for metric in metrics
        for task_groups in by_task.values()
    )
    entries = []
    for metric in metrics:
        texts: dict[Key, str] = {}
        for task_groups in by_task.values():
            texts |= column(metric, task_groups, places)
        entries.append(texts)
    lines = [[*names, "n", *metrics]]
    for key in dict.fromkeys([*entries[0], *groups]):
        lines.append([*key, str(len(groups[key])), *(texts.get(key, "-") for texts in entries)])
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print(_LEGEND)
    if tasks:
        print(f"The runs differ in {', '.join(tasks)}: each is compared with runs that do not.")
    if args.plot:
        plot(names, groups, args.tag or "val/loss", args.plot)
    return 0


def rows_of(path: Path) -> list[Row]:
    """The final rows of a file, or the row of a folder; none of a run that has not finished."""
    if path.is_file():
        final = [row for row in read(path) if is_finished(row) and row.get("stage") != "search"]
        return list(by_key(final).values())
    files = [path / name for name in ("config.yaml", "metrics.json", ".lock", "checkpoints")]
    if not any(file.exists() for file in files):
        folders = sorted({file.parent for file in path.glob("**/config.yaml")})
        is_of_sweep = (path / "log.txt").is_file()  # a run of a sweep, which may have begun anew
        if not folders and not is_of_sweep:
            raise ValueError(f"{path} is neither a file of rows nor the folder of a run")
        if not folders:
            print(f"{path} has not finished and is left out")
        if is_of_sweep and (finished := newest(path, "**/metrics.json")):
            folders = [finished.parent]
        return [row for folder in folders for row in rows_of(folder)]
    if not all(file.is_file() for file in files[:2]):
        print(f"{path} has not finished and is left out")
        return []
    config = read_options(path / "config.yaml")
    row = {}
    for name, value in config.items():
        group, _, option = name.partition(".")
        if option == "class_path":
            row[group] = value.rpartition(".")[2]
        elif group in ("model", "data", "trainer") and value is not None:
            row[short_name(name)] = text_of(value)
    row |= {"seed": text_of(config["seed_everything"]), "folder": str(path)}
    return [row | read_metrics(path / "metrics.json")]


def samples_of(metric: str, groups: Groups) -> dict[Key, list[float]]:
    """The values of a metric in each group."""
    return {key: [row[metric] for row in rows if metric in row] for key, rows in groups.items()}


def better_of(metric: str) -> str | None:
    """Whether lower or higher values of a metric are better; None if that is not known."""
    if not re.match(_DIRECTED, metric):
        return None
    return "higher" if re.match(_HIGHER, metric) else "lower"


def column(metric: str, groups: Groups, places: set[tuple[str, Key]]) -> dict[Key, str]:
    """Mean ± standard deviation of each group, and its difference from the best; best first."""
    samples = samples_of(metric, groups)
    means = {key: fmean(values) for key, values in samples.items() if values}
    has_best = len(means) > 1 and better_of(metric)
    sign = -1 if better_of(metric) == "higher" else 1
    order = sorted(means, key=lambda key: (math.isnan(means[key]), sign * means[key]))
    best = order[0] if order else ()
    texts = {}
    for key in order:
        values = samples[key]
        texts[key] = mean_and_spread(values, ".5g", ".2g")
        if has_best and key == best:
            texts[key] += "  * best"
        elif has_best:
            texts[key] += f"  {means[key] - means[best]:+.3g}"
            if min(len(values), len(samples[best])) > 1:
                texts[key] += " ({:+.3g} to {:+.3g})".format(*interval(values, samples[best]))
            if (metric, key) in places:
                texts[key] += " *"
    return texts


def plot(names: list[str], groups: Groups, tag: str, path: Path) -> None:
    """Draw the mean curve of each group, and one standard deviation around it."""
    from catnat.sweeps import figures

    panel = {}
    for key, rows in groups.items():
        if any("folder" not in row for row in rows):
            raise ValueError("--plot needs folders of runs; rows have no curves")
        label = ", ".join(map(" ".join, zip(names, key, strict=True)))
        panel[label] = [figures.read_curve(Path(row["folder"]), tag) for row in rows]
    figures.draw({"": panel}, tag, path)
