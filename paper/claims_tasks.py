"""Claims about graphs, games, labels, words and output layers."""

from __future__ import annotations

import measures
import numpy as np
import pandas as pd
import studies
from measures import (
    BOUNDS,
    Claims,
    leads,
    row,
    rows,
    select,
    welch,
)
from scipy import stats
from studies import HEADS, TREES

# Names of outputs and layers in the rows, and in the tables of docs/large.md.
OUTPUTS = {
    "adaptive-1": "adaptive softmax, one cutoff",
    "adaptive-2": "adaptive softmax, two cutoffs",
    "hybrid-1024": "`TreeLinear(..., frequent=1024)`",
    "hybrid-4096": "`TreeLinear(..., frequent=4096)`",
    "tree": "`TreeLinear(...)`, a tree alone",
}
HYBRIDS = [f"hybrid, F = {F}" for F in (1024, 4096, 8192)]
LAYERS = {
    "linear + cross_entropy": "softmax, float32 scores",
    "linear + cross_entropy in bfloat16": "softmax, bfloat16 scores",
    "adaptive softmax": "adaptive softmax",
    "tree sigmoid": "tree alone",
    HYBRIDS[0]: "`TreeLinear(..., frequent=1024)`",
    HYBRIDS[1]: "`TreeLinear(..., frequent=4096)`",
    HYBRIDS[2]: "`TreeLinear(..., frequent=8192)`",
}


def graphs() -> Claims:
    """Energy scores at the rates with the lowest mean validation loss over three seeds."""
    runs, score, tailed = studies.searched_graphs(), "test/energy_score_2x", "natural, tail 0.005"
    yield from rows(runs.pivot_table(score, "theta", "head")[[*HEADS, tailed]])
    gaps = runs.pivot_table("test/gap_2x", "theta", "head")
    shares = gaps[tailed] / gaps["softmax"]
    yield "graphs.gap", shares.min(), shares.max(), len(shares)
    cells = ((score, tailed), (score, "natural"), (score, "sigmoid"), ("test/theta_mae", "natural"))
    tests = [leads(runs, metric, head, by=["theta"]) for metric, head in cells]
    below = [(test["high"] < 0).sum() for test in tests]
    above = [(test["low"] > 0).sum() for test in tests]
    counts = below[0], len(shares), below[1], above[1], below[2]
    yield "graphs.verdicts", counts
    counts = below[3], len(shares), above[3]
    yield "graphs.theta", counts
    local = select("graphs/runs.csv", plans=["gsl_local", "gsl_local gsl_seeds"])
    scores = local.assign(head=local["head"] + ", local").pivot_table(score, "theta", "head")
    for theta, cells in scores.iterrows():
        yield row(f"local, {theta}"), cells
    by_score = runs.pivot_table(score, "theta", "head")[tailed]
    yield "graphs.local", (scores["softmax, local"] < by_score).sum(), len(by_score)
    one_rate = select("graphs/runs.csv", plans="gsl", stage="final", psi_learning_rate="")
    sizes = one_rate.groupby(["theta", "head", "learning_rate"])[score].agg(["mean", "size"])
    grids = sizes[sizes["size"] == 10]["mean"].unstack("head").groupby("theta").max()
    for theta, cells in grids[HEADS].iterrows():
        yield row(f"one rate, {theta}"), cells
    for estimator, finals in (("score function", runs), ("local expectation", local)):
        lost = (finals["test/dead_edges"] > 0).groupby(finals["head"] + ", " + estimator)
        yield from rows(lost.agg(["sum", "size"]))
    runs = select("graphs/runs.csv", plans="gsl_tail")
    runs = runs.assign(lost=runs["test/dead_edges"] > 0)
    cells = runs.groupby(["learning_rate", "head_options.tail"])
    yield from rows(cells.agg({"lost": ["sum", "size"], "test/gap_2x": ["mean"]}))


def games() -> Claims:
    """Returns of PPO: Atari games after 8 million steps, and MinAtar relative to softmax."""
    runs = select("games/runs.csv", stage="final", total_steps=8000000)
    returns = runs.groupby(["env", "head", "learning_rate"])["test/return"].agg(list)
    for words, game, rate, rate_of_natural in (
        ("games.breakout", "Breakout", 0.00025, 0.00025),
        ("games.breakout-rates", "Breakout", 0.002, 0.001),
        ("games.seaquest", "Seaquest", 0.00025, 0.00025),
    ):
        softmax, natural = returns[game, "softmax", rate], returns[game, "natural", rate_of_natural]
        numbers = np.mean(softmax), np.mean(natural), len(softmax), len(natural)
        yield words, numbers, welch(softmax, natural)[3]
    printed = pd.json_normalize(measures.PRINTED["rl_return"])
    mean, std = (printed.pivot_table(f"test/return.{x}", "env", "head") for x in ("mean", "std"))
    softmax, natural = ((mean[head], std[head], 10) for head in ("softmax", "natural"))
    test = stats.ttest_ind_from_stats(*softmax, *natural, equal_var=False)
    yield "games.paper", test.pvalue
    runs = measures.read("minatar/runs.csv").assign(loss=lambda runs: -runs["test/return"])
    runs = measures.best(runs[runs.index <= 3], runs, "loss", ["head", "env"], ["learning_rate"])
    for words, first_seed in (("seeds from 4 on", 4), ("all seeds", 1)):
        returns = runs[runs.index >= first_seed].pivot_table("test/return", "env", ["head", "seed"])
        relative = returns.div(returns["softmax"].mean(axis=1), axis=0)
        for head in (*HEADS, "sparsemax"):
            sample, softmax = ([*relative[name].to_numpy()] for name in (head, "softmax"))
            difference = measures.bootstrap(sample, softmax) if head != "softmax" else []
            yield row(head, words), len(sample[0]), measures.bootstrap(sample), difference
    yield "games.minatar", len(sample[0])


def masks() -> Claims:
    """Returns of PPO with masks, at the rates that are best for seed 0, and limits of policies."""
    runs = select("masks/runs.csv", plans="masks")
    visible = runs["env_kwargs.visible"].eq(True)
    kinds = {"changes, seen": visible, "changes": runs["env_kwargs.changing"]}
    runs = runs.assign(
        mask=np.select([*kinds.values()], [*kinds], "constant"),
        mode=runs["policy_kwargs.mask_mode"].replace("", "none"),
        loss=-runs["test/return"],
    )
    cell = ["mask", "head", "mode"]
    search, final = runs[runs["stage"] == "search"], runs[runs["stage"] == "final"]
    final = measures.best(search, final, "loss", cell, ["learning_rate"])
    rates = final.groupby(cell)["learning_rate"].first()
    returns = final.groupby(cell)["test/return"].agg(list)
    for (mask, head, mode), sample in returns.items():
        behind = welch(returns[mask, "softmax", "none"], sample)[:3] if head != "softmax" else []
        yield row(mask, head, mode), rates[mask, head, mode], measures.interval(sample), behind
    yield "masks.n", len(sample)
    for mask in returns.index.unique("mask"):
        for head in TREES:
            modes = returns[mask, head, "renormalize"], returns[mask, head, "prune"]
            yield row(f"{mask}, {head}"), welch(*modes)[:3]
    unseen = returns.map(np.mean)["changes"]
    trees = [unseen[:, mode].loc[TREES] for mode in ("renormalize", "prune")]
    yield "masks.unseen", unseen["softmax", "none"], trees
    limits = measures.read("masks/limits.csv").groupby(["head", "mask_mode"])["return"].mean()
    yield "masks.limits", limits["sigmoid", "prune"], limits["sigmoid", "renormalize"]


def labels_and_words() -> Claims:
    """Labels of digits, and test perplexities of output layers at equal steps and equal time."""
    runs = select("language_model/runs.csv", plans="classify").rename(columns={"output": "head"})
    runs = measures.best(runs, runs, "val/nll", ["head"], ["learning_rate"])
    yield from rows(runs.groupby(["head", "learning_rate"])[["test/nll", "test/accuracy"]].mean())
    yield "labels.nll", leads(runs, "test/nll", "sigmoid", by=["plans"])[BOUNDS]
    layers = studies.output_layers()
    metrics = ["test", "above", "test_frequent", "test_rare", "accuracy"]
    for (text, steps, rate, head), runs in layers.groupby(["text", "steps", "rate", "head"]):
        yield row(text, f"{steps} steps, rate {rate}", head), len(runs), runs[metrics].mean()
    small = layers[layers["text"] == "small"]
    gains = [leads(small, "above", "softmax", x, ["text"]) for x in ("hybrid-4096", "adaptive-1")]
    yield "words.small", [gain[BOUNDS] for gain in gains]
    rare = measures.read("language_model/by_count.csv").query("rare")
    rare = rare.assign(seen=rare["seen"].clip(lower=1), total=rare["loss"] * rare["tokens"])
    sums = rare.groupby(["output", "seen"])[["total", "tokens"]].sum().unstack()
    losses = sums["total"] / sums["tokens"]
    yield from rows((losses - losses.loc["softmax"]).loc[["adaptive-1", "tree", "hybrid-1024"]])
    runs = measures.read("language_model/row_adam_runs.csv")
    cell = ["text", "steps", "rate", "output"]
    metrics = ["val", "test", "test_frequent", "test_rare"]
    finals = {key: group for key, group in runs.groupby(cell) if len(group) > 1}
    logs = {}
    for (text, steps, rate, output), group in finals.items():
        yield row(text, f"{steps} steps, rate {rate}", output), len(group), group[metrics].mean()
        logs[steps, output] = 100 * np.log(group["test"])
    pairs = [
        (steps, logs[steps, "hybrid-1024-rowadam"], logs[steps, "hybrid-1024"])
        for steps in (400, 1500)
    ]
    yield "rowadam.test", [[*welch(by_rows, adam)[:3], steps] for steps, by_rows, adam in pairs]


def output_layers() -> Claims:
    """Quality, time and memory of output layers in README.md and docs/; times of paths."""
    above = studies.output_layers().pivot_table("above", "text", "head")
    many = above["hybrid-4096"]
    texts = ["words", "pairs", "docs"]
    large = many[texts]
    yield "words.range", large.min(), large.max(), -many["small"]
    columns = [*texts, "small", "docs, equal time"]
    yield from rows(above.rename(columns=OUTPUTS)[list(OUTPUTS.values())].loc[columns].T)
    path = "speed/output_layer_frequent_h200.csv"
    time, memory = "forward + backward ms", "memory GB"
    layers = select(path, targets="zipf", commit="b533849").set_index("layer")
    yield from rows(layers.rename(index=LAYERS).loc[list(LAYERS.values()), [time, memory]])
    uniform = select(path, targets="uniform", commit="b89688e+").set_index("layer")
    yield row("tree alone, uniform targets"), uniform.loc["tree sigmoid", [time, memory]]
    earlier = select(path, targets="zipf", commit="3f28ec5").set_index("layer")[[time, memory]]
    yield from rows(earlier.loc[["cut-cross-entropy", "liger"]])
    yield "layer.earlier", earlier.loc["linear + cross_entropy", time]
    columns = ["sample ms, batch 1", "MB a sample, batch 1", "sample ms, batch 64"]
    draws = layers.loc[["linear + cross_entropy", "tree sigmoid", *HYBRIDS[:2]], columns]
    yield from rows(draws.rename(index=LAYERS))
    steps = select("speed/output_layer_steps_h200.csv").set_index("layer")
    bfloat16, adaptive, tree = list(LAYERS.values())[1:4]
    for layer, name, optimizer in (
        ("linear + cross_entropy in bfloat16", bfloat16, "Adam"),
        ("adaptive softmax", adaptive, "Adam"),
        ("tree sigmoid", tree, "Adam"),
        ("tree sigmoid, RowAdam", tree, "RowAdam"),
        (HYBRIDS[1], LAYERS[HYBRIDS[1]], "Adam"),
        (f"{HYBRIDS[1]}, RowAdam", LAYERS[HYBRIDS[1]], "RowAdam"),
    ):
        yield row(optimizer, name), steps.loc[layer, [time, "with step ms"]]
    columns = ["topk(10) ms, batch 1", "topk(10) ms, batch 64"]
    for layer, name in (
        ("linear + cross_entropy", "softmax, float32 scores, all classes"),
        ("tree sigmoid", "tree alone, search"),
        (HYBRIDS[1], f"{LAYERS[HYBRIDS[1]]}, search"),
    ):
        yield row(f"H200: {name}"), steps.loc[layer, columns]
    million = select("speed/output_layer_million_cpu.csv").set_index("layer")[columns]
    yield row("CPU: softmax, all classes"), million.loc["linear + cross_entropy"]
    yield row("CPU: tree alone, search"), million.loc["tree sigmoid"]
    for text in ("docs", "words"):
        yield row(f'on "{text}"'), studies.step_times(text)
    yield "layer.step", studies.step_times("docs")
    ms = studies.step_times("words")
    yield "layer.saves", 100 * (1 - ms["adaptive-1"] / ms["softmax"])
    on_cpu = select("speed/output_layer_cpu.csv").set_index(["layer", "K"])
    others = ["adaptive softmax", "tree sigmoid", HYBRIDS[0]]
    for K in (2048, 8192, 32768):
        faster = [on_cpu.loc[(layer, K), "times faster with step"] for layer in others]
        linear = on_cpu.loc[("linear + cross_entropy", K), "with step ms"]
        yield row(f"`K = {K:,}`"), linear, faster
    for head in TREES:
        yield row(head), select("speed/paths_cpu.csv", K=2**20, head=head)["ratio"]
