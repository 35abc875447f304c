"""Claims about factors of steps, and about why a tree leads."""

from __future__ import annotations

from itertools import product, starmap

import measures
import numpy as np
import pandas as pd
import studies
from measures import (
    BOUNDS,
    Claims,
    differences,
    factor,
    interval,
    leads,
    log_factors,
    row,
    select,
    welch,
)
from scipy import stats
from studies import ESTIMATORS, HEADS, NETWORKS, OTHER_DATA, TREES, mechanism, networks, noise


def factors() -> Claims:
    """Factors of steps: "Does it help my latents?", and the table of interventions."""
    percent: dict[int, list[float]] = {60000: [], 20000: [], 10000: []}  # of softmax's steps
    slower: list[float] = []  # with eight draws, and the dense VAE
    latents = [cells for cells in studies.latents() if len(cells[-1])]
    for data, model, estimator, steps, logs in latents:
        yield row(data, model, estimator, f"{steps:,}"), factor(logs), len(logs)
        if estimator == studies.GUMBEL and (steps < 60000 or "convolutional" in model):
            percent[steps].append(100 / factor(logs)[0])
        if steps == 60000 and (estimator == studies.SETTINGS["gumbel", 8] or "dense" in model):
            slower.append(100 / factor(logs)[0])
    yield "factors.percent", [(min(percent[x]), max(percent[x])) for x in (60000, 20000)]
    yield "factors.slower", min(slower), max(slower)
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
    yield "architecture.decoder", changes
    crossed = [max(measures.crossings(*networks(*x))) for x in NETWORKS]
    yield "architecture.crossing", min(crossed), max(crossed)
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
    yield "draws.nll", means["test/nll"]
    yield "draws.perplexity", means["test/perplexity"][1]
    runs = select("glyphs/runs.csv", stage="final", head=["softmax", "sigmoid"])
    elbo = runs.groupby(["estimator", "head", "num_categories"])["test/elbo"].mean()
    gaps = elbo["gumbel"] - elbo["straight-through"]
    yield "glyphs.unimix", gaps.min(), gaps.max()
    runs = select("frames/runs.csv", stage="final")
    gaps = [leads(runs, "test/elbo", head, by=["estimator"])[BOUNDS] for head in TREES]
    yield "frames.elbo", pd.concat(gaps, axis=1)


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
    yield "rotation.mass", dense[mass].min(), dense[mass].max(), of_softmax
    yield "rotation.keeps", shares.min(), shares.max(), interval(table["cost"])
    yield "rotation.factor", factor(table["log"])
    runs = select("mechanism/runs.csv", plans="probing", max_steps=60000)
    elbo = runs.pivot_table("test/elbo", "num_categories", ["head", "decoder", "even", "draws"])
    plain, *changes = ("plain", 0.0, 1), ("tree", 0.0, 1), ("plain", 1.0, 1), ("plain", 0.0, 8)
    gaps = {x: elbo["sigmoid", *plain] - elbo["softmax", *x] for x in (plain, *changes)}
    path, even, draws = (gaps[x] / gaps[plain] for x in changes)
    yield "probing.keeps", path, even
    yield "probing.plan", draws
    eight = elbo["sigmoid", *changes[-1]] - elbo["softmax", *changes[-1]]
    yield "probing.draws", eight / gaps[plain]
    moved = measures.read("mechanism/transplant.csv").query("source == 'softmax'")
    tree, flat = (moved[moved["head"] == head] for head in ("sigmoid", "softmax"))
    first, last = (differences(tree, flat, f"val/elbo_{step}") for step in (0, 10000))
    yield "transplant.sigmoid", -first.mean(), interval(last)
    tree, coupled = elbo["sigmoid-coupled-0"]["plain", 0.0], elbo["sigmoid-coupled-1"]["plain", 0.0]
    yield "probing.coupled", (tree - coupled)[8] / (tree - coupled)[1]
    where = {"num_categories": [8, 32], "variant": ["gray", "binary"]}
    runs = mechanism(first="sigmoid-coupled-0", second="sigmoid-opposed-0.5", **where)
    tree, opposed = (head.query("4 <= seed <= 8") for head in runs)
    elbo, nll = (differences(opposed, tree, f"test/{metric}") for metric in ("elbo", "nll"))
    fewer_steps = factor(log_factors(tree, opposed))
    yield "coupling.opposed", len(elbo), interval(elbo), interval(-nll), fewer_steps
    many, unbiased = (log_factors(*noise(x, 64), 10000) for x in ("gumbel", "score-function"))
    yield "noise.factor", factor(many), factor(unbiased)
    one, eight = (log_factors(*noise("gumbel", draws), 20000) for draws in (1, 8))
    p = stats.ttest_rel(one, eight).pvalue
    yield "noise.eight", factor(one), factor(eight), p
