"""Every number in the pages of this folder, and of README.md and docs/, computed from the rows.

    python paper/verdicts.py               # study, words of a page, numbers; 1 where they differ
    python paper/verdicts.py | grep 2.67   # which function computes a number
    python paper/verdicts.py --renew       # put computed numbers into rows of tables

A claim is some words of a page, and the numbers that follow them there. Other numbers may lie
between these, as in "K = 8"; but the first one comes at once. All pages with the words are read.
To add one, yield the last words before the first number, and the numbers, from a function below:
select() has runs by options, pair() those of two heads, leads() their differences by cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product, starmap
from typing import Any

import measures
import numpy as np
import pandas as pd
import studies
from measures import COLUMN, differences, factor, interval, leads, log_factors, select, welch
from scipy import stats
from studies import ESTIMATORS, HEADS, NETWORKS, OTHER_DATA, TREES, mechanism, networks, noise, vae

Claims = Iterator[tuple[Any, ...]]  # words, then numbers and lists of numbers
BOUNDS = ["mean", "low", "high"]


def row(*cells: object) -> str:
    """The first cells of a row."""
    return f"| {' | '.join(map(str, cells))} |"


def rows(table: pd.DataFrame) -> Claims:
    """A claim for each row of a table; its index has the first cells."""
    for cells, numbers in table.iterrows():
        yield row(*(cells if isinstance(cells, tuple) else [cells])), numbers.dropna()


def likelihoods() -> Claims:
    """VAEs with Adam: likelihoods in 18 columns, beside those of the paper."""
    printed = pd.json_normalize(measures.PRINTED["vae_nll_adam"])
    theirs = printed.pivot_table("test/nll.mean", COLUMN, "head")
    ours = vae().pivot_table("test/nll", COLUMN, "head")
    for words, nll in (("the paper", theirs), ("ours", ours)):
        gaps = nll["softmax"] - nll[TREES].min(axis=1)
        yield row(f"gray, {words}"), gaps["gray"]
        yield row(f"binary, {words}"), gaps["binary"]
    lower = nll[TREES].max(axis=1) < nll["softmax"]
    p_values = [stats.ttest_rel(nll["softmax"], nll[head]).pvalue for head in TREES]
    counts = lower.sum(), len(lower)
    yield "lower mean NLL than softmax in", counts, gaps.min(), gaps.max(), p_values
    gain = nll["softmax"] - nll["sigmoid"]
    yield "lowers the test NLL on MNIST by", gain.min(), gain.max(), (gain > 0).sum(), len(gain)
    runs = vae(head="softmax", learning_rate=[0.0005, 0.001, 0.002, 0.003])
    rates = runs.pivot_table("test/nll", COLUMN, "learning_rate")
    counts = (rates.idxmin(axis=1) == 0.001).sum(), len(rates), rates[0.0005].count()
    yield "softmax's best rate of those run to the end in", counts
    runs = vae(head="sparsemax", learning_rate=[0.0003, 0.0005, 0.001])
    behind = runs.pivot_table("test/nll", COLUMN, "learning_rate").min(axis=1) - nll["softmax"]
    yield "sparsemax is above softmax by", behind.min(), behind.max(), len(behind)
    gap = nll["natural"] - nll["sigmoid"]
    p = stats.ttest_1samp(gap, 0).pvalue
    yield "mean NLL is below natural's in", (gap > 0).sum(), len(gap), gap.mean(), p
    gap = theirs["natural"] - theirs["sigmoid"]
    yield "in the paper's own table natural is ahead in", (gap < 0).sum(), (gap > 0).sum()


def other_vaes() -> Claims:
    """VAEs with 192,000 steps, with a rate that falls, with plain SGD, with the score function."""
    runs = measures.pair("vae/longest_curve.csv")
    gaps = measures.curves(runs[0]) - measures.curves(runs[1])
    for steps in (60000, 96000, 120000, 192000):
        yield row(f"{steps:,}"), interval(gaps[steps]), factor(log_factors(*runs, steps))
    yield "after 192,000 steps softmax is", interval(gaps[steps])
    yield "120,000 and 192,000 it shrinks by", interval(gaps[120000] - gaps[192000])
    for words, options in (("192,000 steps", {"max_steps": 192000}), ("decay", {"lr_decay": 0.9})):
        lead = leads(vae(**options), "test/nll", "softmax", "sigmoid")
        yield row(words), lead.loc[studies.LONGEST, BOUNDS]
    runs = vae(**studies.SGD)
    yield row("plain SGD"), leads(runs, "test/nll", "softmax", "sigmoid").loc[studies.SMALL, BOUNDS]
    lead = leads(runs, "test/nll", "natural", "sigmoid").loc[studies.SMALL]
    yield "is significantly below natural in", (lead["low"] > 0).sum()
    sgd, adam = (x.pivot_table("test/nll", COLUMN, "head") for x in (runs, vae()))
    losses = (sgd - adam).loc[studies.SMALL, HEADS].stack()
    yield "softmax, sigmoid and natural end", losses.min(), losses.max()
    runs = vae(**studies.SGD, num_latents=[20, 30], num_categories=32)
    failed = (runs["test/nll"] > 150).groupby(runs["head"]).sum()
    yield "At K = 32 the opponent does not train:", failed[["softmax", "natural", "sigmoid"]]
    runs = select("vae/runs.csv", model="mlp-vae", stage="final")
    elbo = runs.groupby([*COLUMN[1:], "head", "learning_rate"])["test/elbo"].agg(list)
    for (N, K, head, rate), values in elbo.drop("softmax", level="head").items():
        yield row(f"({N}, {K})", head, rate), welch(values, *elbo[N, K, "softmax"])[:3]
    gap = welch(elbo[10, 8, "natural", 0.0002], elbo[10, 8, "sigmoid", 0.0005])
    yield "after the searched rate 0.0005 had ended below natural by", gap[:3]


def estimators() -> Claims:
    """The small VAE: sigmoid's lead over softmax, each at the better one of its rates."""
    runs = select("estimators/runs.csv", stage="final", learning_rate=[0.0003, 0.001, 0.003])
    runs = measures.best(runs, runs, "val/loss", ["estimator", "head"], ["learning_rate"])
    elbo = leads(runs, "test/elbo", "sigmoid", by=["estimator"])
    nll = leads(runs, "test/nll", "softmax", "sigmoid", by=["estimator"])
    yield from rows(pd.concat([elbo[["n", *BOUNDS]], nll[BOUNDS]], axis=1))
    yield "which was tried only in a small VAE:", elbo.loc["reinmax", BOUNDS]
    p_values = 5 * elbo.loc["gumbel", "p"], 5 * nll.loc["straight-through", "p"]
    yield "by Holm's method over the five estimators p =", p_values


def factors() -> Claims:
    """Factors of steps: "Does it help my latents?", and the table of interventions."""
    percent: dict[int, list[float]] = {60000: [], 20000: [], 10000: []}  # of softmax's steps
    latents = [cells for cells in studies.latents() if len(cells[-1])]
    for data, model, estimator, steps, logs in latents:
        yield row(data, model, estimator, f"{steps:,}"), factor(logs), len(logs)
        if estimator == studies.GUMBEL and (steps < 60000 or "convolutional" in model):
            percent[steps].append(100 / factor(logs)[0])
    yield "softmax's steps it needs", [(min(percent[x]), max(percent[x])) for x in (60000, 20000)]
    for words, options in studies.INTERVENTIONS.items():
        runs = mechanism(**options)
        logs = log_factors(*runs).groupby("num_categories")
        elbo = differences(*reversed(runs), "test/elbo").groupby("num_categories").mean()
        yield row(words), logs.size(), [factor(values) for _, values in logs], elbo


def factor_row(cells: list[str], runs: list[measures.Runs], *until: float) -> Claims:
    """A row of a table: seeds, the factor at each loss, and where the curves cross at last."""
    if all(map(len, runs)):
        logs = [log_factors(*runs, steps) for steps in until]
        yield row(*cells), len(logs[0]), list(map(factor, logs)), measures.crossings(*runs)[-1:]


def other_factors() -> Claims:
    """Factors with other estimators, in other networks, and on other data."""
    dense, conv, to_conv, to_dense, plain = (log_factors(*networks(*x)) for x in NETWORKS)
    pairs = (to_conv, dense), (conv, to_dense), (to_dense, dense), (conv, to_conv), (conv, plain)
    changes = [(*np.exp(change[:3]), change[3]) for change in starmap(welch, pairs)]
    yield "A convolutional decoder multiplies the factor by", changes
    crossed = [max(measures.crossings(*networks(*x))) for x in NETWORKS]
    yield "in all of them softmax is ahead at first, for", min(crossed), max(crossed)
    heads = ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")
    for setting, head in product(studies.SETTINGS, heads):
        runs = noise(*setting, "softmax", head)
        yield from factor_row(["{}, {}".format(*setting), head], runs, 2500, 5000, 10000)
    for (study, _, N, K, steps), estimator, head in product(OTHER_DATA, ESTIMATORS, TREES):
        runs = studies.other_data(study, K, estimator, head)
        rates = ", ".join(str(*pair["learning_rate"].unique()) for pair in runs)
        yield from factor_row([f"({N}, {K})", estimator, head, rates], runs, steps)
    runs = select("without_noise/runs.csv", draws=[1, 8], estimator="gumbel", max_steps=20000)
    means = runs.pivot_table(["test/nll", "test/perplexity"], "head", "draws").loc[HEADS[:2]]
    yield "eight draws for each image | test NLL", means["test/nll"]
    yield "after 20,000 steps the test perplexity is", means["test/perplexity"][1]
    runs = select("glyphs/runs.csv", stage="final", head=["softmax", "sigmoid"])
    elbo = runs.groupby(["estimator", "head", "num_categories"])["test/elbo"].mean()
    gaps = elbo["gumbel"] - elbo["straight-through"]
    yield "on letters, with 1 % unimix,", gaps.min(), gaps.max()
    runs = select("frames/runs.csv", stage="final")
    gaps = [leads(runs, "test/elbo", head, by=["estimator"])[BOUNDS] for head in TREES]
    yield "Beside softmax's, the ELBO of sigmoid and natural is", pd.concat(gaps, axis=1)


def why_a_tree_leads() -> Claims:
    """A rotation, which fills the Fisher matrix; hypotheses; the opposite coupling; noise."""
    softmax, _ = mechanism()
    mass, means = "fim/off_diagonal_mass", []
    for tree in TREES:
        rotated, plain = mechanism(first=f"{tree}-rotated-3", second=tree)
        cost, lead = (differences(plain, head, "test/elbo") for head in (rotated, softmax))
        table = rotated[[mass]].assign(cost=cost, lead=lead, log=log_factors(rotated, plain))
        means.append(table.groupby("num_categories").mean())
    table = pd.concat(means)
    dense = table.loc[[16, 32]]  # where a rotated matrix is denser than softmax's
    shares = 1 - dense["cost"] / dense["lead"]
    of_softmax = softmax.groupby("num_categories")[mass].mean()[[16, 32]]
    yield "its off-diagonal mass is", dense[mass].min(), dense[mass].max(), of_softmax
    yield "rotation that fills it keeps", shares.min(), shares.max(), interval(table["cost"])
    yield "(t over six pairs) and", factor(table["log"])
    runs = select("mechanism/runs.csv", plans="probing", max_steps=60000)
    elbo = runs.pivot_table("test/elbo", "num_categories", ["head", "decoder", "even", "draws"])
    plain, *changes = ("plain", 0.0, 1), ("tree", 0.0, 1), ("plain", 1.0, 1), ("plain", 0.0, 8)
    gaps = {x: elbo["sigmoid", *plain] - elbo["softmax", *x] for x in (plain, *changes)}
    yield "Of its distance to sigmoid softmax keeps", [gaps[x] / gaps[plain] for x in changes]
    tree, coupled = elbo["sigmoid-coupled-0"]["plain", 0.0], elbo["sigmoid-coupled-1"]["plain", 0.0]
    yield "with eight draws C = 1 keeps", (tree - coupled)[8] / (tree - coupled)[1]
    where = {"num_categories": [8, 32], "variant": ["gray", "binary"]}
    runs = mechanism(first="sigmoid-coupled-0", second="sigmoid-opposed-0.5", **where)
    tree, opposed = (head.query("4 <= seed <= 8") for head in runs)
    elbo, nll = (differences(opposed, tree, f"test/{metric}") for metric in ("elbo", "nll"))
    fewer_steps = factor(log_factors(tree, opposed))
    yield "Against C = 0,", len(elbo), interval(elbo), interval(-nll), fewer_steps
    many, unbiased = (log_factors(*noise(x, 64), 10000) for x in ("gumbel", "score-function"))
    yield "factor of steps stays above 2:", factor(many), factor(unbiased)
    one, eight = (log_factors(*noise("gumbel", draws), 20000) for draws in (1, 8))
    p = stats.ttest_rel(one, eight).pvalue
    yield "which the plan does not name, the factor is", factor(one), factor(eight), p


def graphs() -> Claims:
    """Energy scores at the rates with the lowest mean validation loss over three seeds."""
    runs, score, tailed = studies.searched_graphs(), "test/energy_score_2x", "natural, tail 0.005"
    yield from rows(runs.pivot_table(score, "theta", "head")[[*HEADS, tailed]])
    gaps = runs.pivot_table("test/gap_2x", "theta", "head")
    shares = gaps[tailed] / gaps["softmax"]
    yield "to the true model in energy score is", shares.min(), shares.max(), len(shares)
    cells = ((score, tailed), (score, "natural"), (score, "sigmoid"), ("test/theta_mae", "natural"))
    tests = [leads(runs, metric, head, by=["theta"]) for metric, head in cells]
    below = [(test["high"] < 0).sum() for test in tests]
    above = [(test["low"] > 0).sum() for test in tests]
    counts = below[0], len(shares), below[1], above[1], below[2]
    yield "natural with tail 0.005 is significantly below softmax on", counts
    counts = below[3], len(shares), above[3]
    yield "natural's error in theta is significantly below softmax's on", counts
    local = select("graphs/runs.csv", plans=["gsl_local", "gsl_local gsl_seeds"])
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
        ("settings for both heads (rate 0.00025): softmax returns", "Breakout", 0.00025, 0.00025),
        ("softmax at 0.002 returns", "Breakout", 0.002, 0.001),
        ("Seaquest: softmax", "Seaquest", 0.00025, 0.00025),
    ):
        softmax, natural = returns[game, "softmax", rate], returns[game, "natural", rate_of_natural]
        numbers = np.mean(softmax), np.mean(natural), len(softmax), len(natural)
        yield words, numbers, welch(softmax, natural)[3]
    printed = pd.json_normalize(measures.PRINTED["rl_return"])
    mean, std = (printed.pivot_table(f"test/return.{x}", "env", "head") for x in ("mean", "std"))
    softmax, natural = ((mean[head], std[head], 10) for head in ("softmax", "natural"))
    test = stats.ttest_ind_from_stats(*softmax, *natural, equal_var=False)
    yield "the paper's own differences have p =", test.pvalue
    runs = measures.read("minatar/runs.csv").assign(loss=lambda runs: -runs["test/return"])
    runs = measures.best(runs[runs.index <= 3], runs, "loss", ["head", "env"], ["learning_rate"])
    for words, first_seed in (("seeds from 4 on", 4), ("all seeds", 1)):
        returns = runs[runs.index >= first_seed].pivot_table("test/return", "env", ["head", "seed"])
        relative = returns.div(returns["softmax"].mean(axis=1), axis=0)
        for head in (*HEADS, "sparsemax"):
            sample, softmax = ([*relative[name].to_numpy()] for name in (head, "softmax"))
            difference = measures.bootstrap(sample, softmax) if head != "softmax" else []
            yield row(head, words), len(sample[0]), measures.bootstrap(sample), difference
    yield "nor on four games of MinAtar (n =", len(sample[0])


def labels_and_words() -> Claims:
    """Labels of digits, and test perplexities of output layers at equal steps and equal time."""
    runs = select("language_model/runs.csv", plans="classify").rename(columns={"output": "head"})
    runs = measures.best(runs, runs, "val/nll", ["head"], ["learning_rate"])
    yield from rows(runs.groupby(["head", "learning_rate"])[["test/nll", "test/accuracy"]].mean())
    yield "NLL is above softmax's by", leads(runs, "test/nll", "sigmoid", by=["plans"])[BOUNDS]
    layers = studies.output_layers()
    metrics = ["test", "above", "test_frequent", "test_rare", "accuracy"]
    for (text, steps, rate, head), runs in layers.groupby(["text", "steps", "rate", "head"]):
        yield row(text, f"{steps} steps, rate {rate}", head), len(runs), runs[metrics].mean()
    small = layers[layers["text"] == "small"]
    gains = [leads(small, "above", "softmax", x, ["text"]) for x in ("hybrid-4096", "adaptive-1")]
    yield "the hybrid with F = 4,096 is below softmax by", [gain[BOUNDS] for gain in gains]
    rare = measures.read("language_model/by_count.csv").query("rare")
    rare = rare.assign(seen=rare["seen"].clip(lower=1), total=rare["loss"] * rare["tokens"])
    sums = rare.groupby(["output", "seen"])[["total", "tokens"]].sum().unstack()
    losses = sums["total"] / sums["tokens"]
    yield from rows((losses - losses.loc["softmax"]).loc[["adaptive-1", "tree", "hybrid-1024"]])


def output_layers() -> Claims:
    """Quality, time and memory of output layers in README.md and docs/; times of paths."""
    above = studies.output_layers().pivot_table("above", "text", "head")
    few, many = above["hybrid-1024"], above["hybrid-4096"]
    one, two = above["adaptive-1"], above["adaptive-2"]
    texts, equal_time = ["words", "pairs", "docs"], "docs, equal time"
    large = many[texts]
    yield "After equal steps its test perplexity is", large, -many["small"]
    yield "words with a tree over the others is", large.min(), large.max(), -many["small"]
    yield "with the better of the cutoffs tried, is", -one[["words", "small"]]
    yield "with 131,072 words, its perplexity is", -many[equal_time], -two[equal_time]
    path = "speed/output_layer_frequent_h200.csv"
    time, memory = "forward + backward ms", "memory GB"
    layers = select(path, targets="zipf", commit="b533849").set_index("layer")
    ms, gb = layers[time], layers[memory]
    exact, half = "linear + cross_entropy", "linear + cross_entropy in bfloat16"
    hybrids = [f"hybrid, F = {F}" for F in (1024, 4096, 8192)]
    yield "forward and backward of the layer take", ms[[hybrids[1], half, "adaptive softmax"]]
    yield "`nn.Linear` and `cross_entropy` |", layers.loc[[half, exact], [time, memory]]
    numbers = one["words"], two["words"], one["pairs"], two["docs"], one["small"], two[equal_time]
    times = layers.loc["adaptive softmax", [time, memory]]
    yield "`nn.AdaptiveLogSoftmaxWithLoss` |", numbers, times
    numbers = *many[[*texts, "small"]], *few[[*texts, "small"]], many[equal_time]
    yield "`TreeLinear(..., frequent=4096)` |", numbers, ms[hybrids], gb[hybrids[1]]
    uniform = select(path, targets="uniform", commit="b89688e+", layer="tree sigmoid")[time]
    times = uniform, layers.loc["tree sigmoid", [time, memory]]
    yield "`TreeLinear(...)`, a tree alone |", above.loc[["words", "small"], "tree"], *times
    earlier = select(path, targets="zipf", commit="3f28ec5").set_index("layer")[[time, memory]]
    yield "cut-cross-entropy, Liger |", earlier.loc[["cut-cross-entropy", "liger"]]
    yield "where softmax in float32 took", earlier.loc[exact, time]
    columns = ["sample ms, batch 1", "MB a sample, batch 1", "sample ms, batch 64"]
    draws = layers.loc[[exact, "tree sigmoid", *hybrids[:2]], columns]
    yield "A softmax draws one class in", draws.T
    for text in ("docs", "words"):
        yield row(f'on "{text}"'), studies.step_times(text)
    yield "step of a Transformer with 131,072 words took", studies.step_times("docs")
    ms = studies.step_times("words")
    yield "adaptive softmax with one cutoff saves", 100 * (1 - ms["adaptive-1"] / ms["softmax"])
    for head in TREES:
        yield row(head), select("speed/paths_cpu.csv", K=2**20, head=head)["ratio"]


STUDIES = (
    *(likelihoods, other_vaes, estimators, factors, other_factors, why_a_tree_leads),
    *(graphs, games, labels_and_words, output_layers),
)


def claims() -> Iterator[tuple[str, str, list[float]]]:
    """The function, the words and the numbers of each claim."""
    for study in STUDIES:
        for words, *parts in study():
            numbers = np.hstack([np.ravel(part) for part in parts]).astype(float)
            yield study.__name__, words, numbers.tolist()


def main() -> int:
    """Print all claims."""
    failed = 0
    for study, words, numbers in claims():
        places = list(measures.statements(words, len(numbers)))
        wrong = [place for place in places if not place.holds(numbers)]
        failed += not places or len(wrong) > 0
        text = ", ".join(f"{number:.4g}" for number in numbers)
        print(f"{study}: {words} {text}{'' if places else '  (NO PAGE SAYS SO)'}")
        for place in wrong:
            stated = ", ".join(number[0] for number in place.numbers)
            print(f"    {place.page.relative_to(measures.PAPER.parent)} DIFFERS: {stated}")
            if "--renew" in sys.argv and place.is_row:
                measures.renew(place, numbers)
    print(f"{failed} claims differ from the rows", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
