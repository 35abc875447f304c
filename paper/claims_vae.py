"""Claims about likelihoods of VAEs, and about estimators."""

from __future__ import annotations

import measures
import pandas as pd
import studies
from measures import (
    BOUNDS,
    COLUMN,
    Claims,
    factor,
    interval,
    leads,
    log_factors,
    row,
    rows,
    select,
    welch,
)
from scipy import stats
from studies import HEADS, TREES, vae


def likelihoods() -> Claims:
    """VAEs with Adam: likelihoods in 18 columns, beside those of the paper."""
    printed = pd.json_normalize(measures.PRINTED["vae_nll_adam"])
    theirs = printed.pivot_table("test/nll.mean", COLUMN, "head")
    ours = vae().pivot_table("test/nll", COLUMN, "head")
    for words, nll in (("the paper", theirs), ("ours", ours)):
        gaps = nll["softmax"] - nll[TREES].min(axis=1)
        yield row(f"gray, {words}"), gaps["gray"]
        yield row(f"binary, {words}"), gaps["binary"]
    printed_gaps = theirs["softmax"] - theirs[TREES].min(axis=1)
    yield "vae.paper-gaps", printed_gaps.min(), printed_gaps.max()
    excess = (ours - theirs).mean()
    yield "vae.beside-paper", excess["softmax"], -excess["sigmoid"]
    lower = nll[TREES].max(axis=1) < nll["softmax"]
    p_values = [stats.ttest_rel(nll["softmax"], nll[head]).pvalue for head in TREES]
    counts = lower.sum(), len(lower)
    yield "vae.both-lower", counts, gaps.min(), gaps.max(), p_values
    gain = nll["softmax"] - nll["sigmoid"]
    yield "vae.sigmoid-gain", gain.min(), gain.max(), (gain > 0).sum(), len(gain)
    runs = vae(head="softmax", learning_rate=[0.0005, 0.001, 0.002, 0.003])
    rates = runs.pivot_table("test/nll", COLUMN, "learning_rate")
    counts = (rates.idxmin(axis=1) == 0.001).sum(), len(rates), rates[0.0005].count()
    yield "vae.softmax-rate", counts
    runs = vae(head="sparsemax", learning_rate=[0.0003, 0.0005, 0.001])
    behind = runs.pivot_table("test/nll", COLUMN, "learning_rate").min(axis=1) - nll["softmax"]
    yield "vae.sparsemax", behind.min(), behind.max(), len(behind)
    dead = runs["test/nll"] > 150
    alive = runs[~dead].pivot_table("test/nll", COLUMN, "learning_rate").min(axis=1)
    behind = alive - nll["softmax"]
    yield "vae.sparsemax-alive", dead.sum(), behind.min(), behind.max()
    gap = nll["natural"] - nll["sigmoid"]
    p = stats.ttest_1samp(gap, 0).pvalue
    yield "vae.sigmoid-natural", (gap > 0).sum(), len(gap), gap.mean(), p
    gap = theirs["natural"] - theirs["sigmoid"]
    yield "vae.paper-natural", (gap < 0).sum(), (gap > 0).sum()


def other_vaes() -> Claims:
    """VAEs with 192,000 steps, with a rate that falls, with plain SGD, with the score function."""
    runs = measures.pair("vae/longest_curve.csv")
    gaps = measures.curves(runs[0]) - measures.curves(runs[1])
    for steps in (60000, 96000, 120000, 192000):
        yield row(f"{steps:,}"), interval(gaps[steps]), factor(log_factors(*runs, steps))
    yield "vae.after-192000", interval(gaps[steps])
    yield "vae.shrinks", interval(gaps[120000] - gaps[192000])
    for words, options in (("192,000 steps", {"max_steps": 192000}), ("decay", {"lr_decay": 0.9})):
        lead = leads(vae(**options), "test/nll", "softmax", "sigmoid")
        yield row(words), lead.loc[studies.LONGEST, BOUNDS]
        if words != "decay":
            yield "vae.longest", lead["mean"].min(), lead["mean"].max()
    runs = vae(**studies.SGD)
    yield row("plain SGD"), leads(runs, "test/nll", "softmax", "sigmoid").loc[studies.SMALL, BOUNDS]
    lead = leads(runs, "test/nll", "natural", "sigmoid").loc[studies.SMALL]
    yield "sgd.sigmoid-natural", (lead["low"] > 0).sum()
    sgd, adam = (x.pivot_table("test/nll", COLUMN, "head") for x in (runs, vae()))
    losses = (sgd - adam).loc[studies.SMALL, HEADS].stack()
    yield "sgd.adam", losses.min(), losses.max()
    runs = vae(**studies.SGD, num_latents=[20, 30], num_categories=32)
    failed = (runs["test/nll"] > 150).groupby(runs["head"]).sum()
    yield "sgd.failed", failed[["softmax", "natural", "sigmoid"]]
    unclipped = {"optimizer": "sgd", "gradient_clip": 0, "model": "vae", "stage": "final"}
    dead = select("vae/runs.csv", head="sparsemax", **unclipped)["test/nll"] > 150
    yield "sgd.sparsemax", dead.sum(), len(dead)
    runs = select("vae/runs.csv", model="mlp-vae", stage="final")
    elbo = runs.groupby([*COLUMN[1:], "head", "learning_rate"])["test/elbo"].agg(list)
    for (N, K, head, rate), values in elbo.drop("softmax", level="head").items():
        yield row(f"({N}, {K})", head, rate), welch(values, *elbo[N, K, "softmax"])[:3]
    gap = welch(elbo[10, 8, "natural", 0.0002], elbo[10, 8, "sigmoid", 0.0005])
    yield "mlp.searched-rate", gap[:3]


def estimators() -> Claims:
    """The small VAE: sigmoid's lead over softmax, each at the better one of its rates."""
    runs = select("estimators/runs.csv", stage="final", learning_rate=[0.0003, 0.001, 0.003])
    runs = measures.best(runs, runs, "val/loss", ["estimator", "head"], ["learning_rate"])
    elbo = leads(runs, "test/elbo", "sigmoid", by=["estimator"])
    nll = leads(runs, "test/nll", "softmax", "sigmoid", by=["estimator"])
    yield from rows(pd.concat([elbo[["n", *BOUNDS]], nll[BOUNDS]], axis=1))
    yield "estimators.reinmax", elbo.loc["reinmax", BOUNDS]
    p_values = 5 * elbo.loc["gumbel", "p"], 5 * nll.loc["straight-through", "p"]
    yield "estimators.holm", p_values
