"""Every number in the pages of this folder, and of README.md and docs/, computed from the rows.

    python paper/verdicts.py               # study, words of a page, numbers; 1 where they differ
    python paper/verdicts.py | grep 2.67   # which function computes a number
    python paper/verdicts.py --renew       # put computed numbers into rows of tables

A claim is some words of a page, and the numbers that follow them there. Other numbers may lie
between these, as in "K = 8"; but the first one comes at once. All pages with the words are read.
To add a claim, write its sentence on a page. Then yield the last words before the first number,
and the numbers, each alone or in lists, from a function below: select() has rows of a file by their
options, pair() those of softmax and a head, measures.py the statistics. A function of its own goes
into STUDIES.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product, starmap
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from measures import (
    PAPER,
    PRINTED,
    Runs,
    best,
    bootstrap,
    by_cell,
    crossings,
    curves,
    differences,
    factor,
    interquartile_mean,
    interval,
    iqm_difference,
    log_factors,
    p_of,
    read,
    renew,
    select,
    statements,
    welch,
    welch_p,
)
from scipy import stats
from studies import (
    COLUMN,
    ESTIMATORS,
    GUMBEL,
    HEADS,
    INTERVENTIONS,
    LONGEST,
    NETWORKS,
    OTHER_DATA,
    PROBING,
    SETTINGS,
    SGD,
    SIZES,
    SMALL,
    STEPS,
    TREES,
    at_equal_time,
    long_convolutional,
    longest,
    mechanism,
    networks,
    noise,
    other_data,
    output_layers,
    searched_graphs,
    step_times,
    vae,
)

Claims = Iterator[tuple[Any, ...]]  # words, then numbers and lists of numbers


def row(*cells: object) -> str:
    """The first cells of a row."""
    return f"| {' | '.join(map(str, cells))} |"


# -- VAEs ------------------------------------------------------------------------------------------


def likelihoods() -> Claims:
    """Likelihoods in 18 columns, beside those of the paper."""
    printed = pd.json_normalize(PRINTED["vae_nll_adam"])
    theirs = printed.pivot_table("test/nll.mean", COLUMN, "head")
    ours = vae().pivot_table("test/nll", COLUMN, "head")
    for words, nll in (("the paper", theirs), ("ours", ours)):
        gaps = nll["softmax"] - nll[TREES].min(axis=1)
        yield row(f"gray, {words}"), gaps["gray"]
        yield row(f"binary, {words}"), gaps["binary"]
    lower = nll[TREES].max(axis=1) < nll["softmax"]
    gains = {head: nll["softmax"] - nll[head] for head in TREES}
    p_values = [p_of(gains[head]) for head in TREES]
    words = "have a lower mean NLL than softmax in"
    yield words, lower.sum(), len(lower), gaps.min(), gaps.max(), p_values
    gain = gains["sigmoid"]
    yield "lowers the test NLL on MNIST by", gain.min(), gain.max(), (gain > 0).sum(), len(gain)
    rates = vae(head="softmax", learning_rate=[0.0005, 0.001, 0.002, 0.003])
    means = rates.pivot_table("test/nll", COLUMN, "learning_rate")
    is_best = means.idxmin(axis=1) == 0.001
    words = "softmax's best rate of those run to the end in"
    yield words, is_best.sum(), 18, means[0.0005].count()
    rates = vae(head="sparsemax", learning_rate=[0.0003, 0.0005, 0.001])
    behind = rates.pivot_table("test/nll", COLUMN, "learning_rate").min(axis=1) - ours["softmax"]
    yield "sparsemax is above softmax by", behind.min(), behind.max(), len(behind)
    ahead = nll["natural"] - nll["sigmoid"]
    yield "mean NLL is below natural's in", (ahead > 0).sum(), 18, ahead.mean(), p_of(ahead)
    ahead = theirs["natural"] - theirs["sigmoid"]
    yield "in the paper's own table natural is ahead in", (ahead < 0).sum(), (ahead > 0).sum()


def longer_runs() -> Claims:
    """192,000 steps: (10, 8) and (20, 32), gray and binary."""
    pairs = [longest(*column) for column in LONGEST]
    for steps in (60000, 96000, 120000, 192000):
        gaps = interval([differences(*runs, f"val/loss_{steps}") for runs in pairs])
        yield row(f"{steps:,}"), gaps, factor([log_factors(*runs, steps) for runs in pairs])
    yield "after 192,000 steps softmax is", gaps
    last = [
        differences(*runs, "val/loss_120000") - differences(*runs, "val/loss_192000")
        for runs in pairs
    ]
    yield "between steps 120,000 and 192,000 it shrinks by", interval(last)
    for words, options in (("192,000 steps", {"max_steps": 192000}), ("decay", {"lr_decay": 0.9})):
        nll = by_cell(vae(**options), "test/nll", ["head", *COLUMN])
        yield row(words), [welch(nll["softmax", *x], nll["sigmoid", *x]) for x in LONGEST]


def other_optimizers() -> Claims:
    """Plain SGD, the score function, high rates."""
    nll = by_cell(vae(**SGD), "test/nll", ["head", *COLUMN])
    adam = by_cell(vae(), "test/nll", ["head", *COLUMN])
    yield row("plain SGD"), [welch(nll["softmax", *x], nll["sigmoid", *x]) for x in SMALL]
    ahead = [welch(nll["natural", *x], nll["sigmoid", *x]) for x in SMALL]
    yield "is significantly below natural in", sum(low > 0 for _, low, _ in ahead)
    losses = [nll[head, *x].mean() - adam[head, *x].mean() for head, x in product(HEADS, SMALL)]
    yield "softmax, sigmoid and natural end", min(losses), max(losses)
    failed = vae(**SGD, num_latents=[20, 30], num_categories=32, head=HEADS)
    counts = (failed["test/nll"] > 150).groupby(failed["head"]).sum()
    yield "At K = 32 the opponent does not train:", counts[["softmax", "natural", "sigmoid"]]
    runs = select("vae/runs.csv", model="mlp-vae", stage="final")
    elbo = by_cell(runs, "test/elbo", ["num_latents", "head", "learning_rate"])
    for N, K, others, rate in (
        (10, 8, 0.0002, 0.0005),
        (10, 8, 0.0002, 0.0002),
        (20, 16, 0.0005, 0.0005),
    ):
        softmax, natural = elbo[N, "softmax", others], elbo[N, "natural", others]
        sigmoid = elbo[N, "sigmoid", rate]
        gaps = welch(natural, softmax), welch(sigmoid, softmax), welch(sigmoid, natural)
        yield row(f"({N}, {K})", rate), gaps
    gap = welch(elbo[10, "natural", 0.0002], elbo[10, "sigmoid", 0.0005])
    yield "after the searched rate 0.0005 had ended below natural by", gap
    rates = select("vae/runs.csv", stage="final")
    rates = rates[rates["plans"].str.contains("vae_rates")]
    nll = rates.pivot_table("test/nll", [*COLUMN, "head", "seed"], "learning_rate")
    nll = nll.dropna(subset=0.003)
    yield "0.003 is the worst rate in", (nll.idxmax(axis=1) == 0.003).sum(), len(nll)


def estimators() -> Claims:
    """The small VAE: sigmoid's lead over softmax, each at the better one of its rates."""
    runs = select("estimators/runs.csv", stage="final", learning_rate=[0.0003, 0.001, 0.003])
    runs = best(runs, runs, "val/loss", ["estimator", "head"], ["learning_rate"])
    elbo = by_cell(runs, "test/elbo", ["estimator", "head"])
    nll = by_cell(runs, "test/nll", ["estimator", "head"])
    for estimator in ("exact", "score-function", "reinmax", "gumbel", "straight-through"):
        softmax, sigmoid = (estimator, "softmax"), (estimator, "sigmoid")
        lead = welch(elbo[sigmoid], elbo[softmax])
        yield row(estimator), len(elbo[sigmoid]), lead, welch(nll[softmax], nll[sigmoid])
        if estimator == "reinmax":
            yield "which was tried only in a small VAE:", lead
    softmax, sigmoid = elbo["gumbel", "softmax"], elbo["gumbel", "sigmoid"]
    of_holm = 5 * welch_p(sigmoid, softmax)
    yield "in pairs of a seed its lead has p =", p_of(sigmoid - softmax), of_holm
    softmax, sigmoid = nll["straight-through", "softmax"], nll["straight-through", "sigmoid"]
    yield "by Holm's method over five p =", 5 * welch_p(sigmoid, softmax)


def saturation() -> Claims:
    """What happens to learners in which scores of natural saturate."""
    shares = 100 * vae(head="natural")["test/saturated"]
    yield row("VAE, straight-through Gumbel"), shares.min(), shares.max()
    runs = select("vae/runs.csv", model="mlp-vae", stage="final", learning_rate=[0.0002, 0.0005])
    means = runs.groupby(["head", "num_latents", "learning_rate"]).mean(numeric_only=True)
    shares = 100 * means.loc["natural", "test/saturated"]
    lead = means.loc[("natural", 10), "test/elbo"] - means.loc[("softmax", 10), "test/elbo"]
    yield row("VAE, score function, (10, 8)"), shares[10], lead
    yield "in a VAE trained by score function ends with", shares
    runs = select("games/runs.csv", head="natural")
    runs = runs[runs["plans"].str.contains("ppo_seeds")]
    shares, won = 100 * runs["fim/saturated"], runs["test/return"] == 500
    yield row("CartPole, PPO"), shares.min(), shares.max(), won.sum(), len(won)


def draws() -> Claims:
    """Several draws for each image, and how evenly categories are used."""
    where = {"max_steps": 20000, "stage": "final", "estimator": "gumbel", "draws": [1, 8]}
    runs = select("without_noise/runs.csv", head=["softmax", "sigmoid"], **where)
    means = runs.groupby(["head", "draws"])[["test/nll", "test/perplexity"]].mean().unstack()
    means = means.loc[["softmax", "sigmoid"]]
    yield "eight draws for each image | test NLL", means["test/nll"]
    yield "after 20,000 steps the test perplexity is", means["test/perplexity"][1]


# -- the factor of steps ---------------------------------------------------------------------------


def factors() -> Claims:
    """The table of interventions: n, factors, leads in ELBO and in NLL."""
    for words, options in INTERVENTIONS.items():
        pairs = [mechanism(K, **options) for _, K in SIZES]
        ran = [(softmax, head) for softmax, head in pairs if len(head)]
        counts = [len(softmax.index.intersection(head.index)) for softmax, head in ran]
        ratios = [factor(log_factors(*runs)) for runs in ran]
        elbo = [differences(head, softmax, "test/elbo").mean() for softmax, head in ran]
        nll = [differences(softmax, head, "test/nll").mean() for softmax, head in ran]
        yield row(words), counts, ratios, elbo, nll


def factor_row(cells: Sequence[object], runs: list[Runs], *until: float) -> Claims:
    """A row of a table: seeds, the factor at each loss, and where the curves cross at last."""
    if all(map(len, runs)):
        logs = [log_factors(*runs, steps) for steps in until]
        yield row(*cells), len(logs[0]), list(map(factor, logs)), crossings(*runs)[-1:]


def rates_of(runs: list[Runs]) -> str:
    """The learning rates of two heads."""
    return ", ".join("/".join(map(str, head["learning_rate"].unique())) for head in runs)


def latent_row(data: str, model: str, estimator: str, steps: int, logs: list[float]) -> Claims:
    """A row of the table "Does it help my latents?": the factor and n."""
    if logs:
        yield row(data, model, estimator, f"{steps:,}"), factor(logs), len(logs)


def less_noise() -> Claims:
    """Factors with several draws, and without bias."""
    for setting, head in product(SETTINGS, ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")):
        cells = ["{}, {}".format(*setting), head]
        yield from factor_row(cells, noise(*setting, "softmax", head), 2500, 5000, 10000)
    for estimator, setting in (
        (GUMBEL, ("gumbel", 1)),
        (f"{GUMBEL}, 64 draws", ("gumbel", 64)),
        ("score function, 64 draws", ("score-function", 64)),
    ):
        model = "convolutional, (10, 8)"
        logs = log_factors(*noise(*setting), 10000)
        yield from latent_row("MNIST", model, estimator, 10000, logs)


def other_networks() -> Claims:
    """Factors in other networks, and on other data."""
    for encoder, decoder in NETWORKS:
        runs = networks(encoder, decoder)
        yield from factor_row([encoder, decoder, "20,000", rates_of(runs)], runs, 20000)
        model = f"{encoder} encoder, {decoder} decoder, (10, 16)"
        yield from latent_row("MNIST", model, GUMBEL, 20000, log_factors(*runs))
        runs = networks(encoder, decoder, 60000)
        yield from factor_row([encoder, decoder, "60,000", rates_of(runs)], runs, 60000)
        if encoder == decoder and len(runs[0]):
            logs = long_convolutional() if encoder == "conv" else log_factors(*runs)
            yield from latent_row("MNIST", model, GUMBEL, 60000, logs)
    yield "To the loss with which softmax ends there at 0.001 it is", factor(long_convolutional())
    for (study, data, N, K, steps), estimator in product(OTHER_DATA, ESTIMATORS):
        for head in TREES:
            runs = other_data(study, K, estimator, head)
            yield from factor_row([f"({N}, {K})", estimator, head, rates_of(runs)], runs, steps)
        model = f"convolutional, ({N}, {K})"
        logs = log_factors(*other_data(study, K, estimator), steps)
        yield from latent_row(data, model, ESTIMATORS[estimator], steps, logs)


def longer_latents() -> Claims:
    """Rows of "Does it help my latents?" about MNIST and convolutional networks."""
    shares: dict[int, list[float]] = {20000: [], 60000: []}  # percent of softmax's steps
    for N, K in SIZES:
        model = f"convolutional, ({N}, {K})"
        for steps in (20000, 60000):
            logs = log_factors(*mechanism(K), steps)
            yield from latent_row("MNIST", model, GUMBEL, steps, logs)
            shares[steps].append(100 / factor(logs)[0])
        if K != 16:
            logs = log_factors(*mechanism(K, **PROBING | {"draws": 8}))
            yield from latent_row("MNIST", model, f"{GUMBEL}, 8 draws", 60000, logs)
            logs = log_factors(*longest("binary", N, K), 60000)
            yield from latent_row("MNIST, binary", model, GUMBEL, 60000, logs)
            shares[60000].append(100 / factor(logs)[0])
    others = [*starmap(networks, NETWORKS), *(other_data("glyphs", K, "gumbel") for K in (16, 32))]
    shares[20000] += [100 / factor(log_factors(*runs))[0] for runs in others]
    yield "softmax's steps it needs", [(min(x), max(x)) for x in (shares[60000], shares[20000])]


def rotation() -> Claims:
    """A rotation of the scores, which fills the Fisher matrix."""
    costs, logs, shares, masses = [], [], [], []
    for (_, K), head in product(SIZES, TREES):
        rotated, plain = mechanism(K, first=f"{head}-rotated-3", second=head)
        costs.append(differences(plain, rotated, "test/elbo").mean())
        logs.append(np.mean(log_factors(rotated, plain)))
        if K > 8:  # where the rotated matrix is denser than softmax's
            softmax, _ = mechanism(K)
            shares.append(1 - costs[-1] / differences(plain, softmax, "test/elbo").mean())
            masses.append(rotated["fim/off_diagonal_mass"].mean())
    of_softmax = [mechanism(K)[0]["fim/off_diagonal_mass"].mean() for K in (16, 32)]
    yield "its off-diagonal mass is", min(masses), max(masses), of_softmax
    cost = [min(shares), max(shares), *interval(costs)]
    yield "a rotation that fills it keeps", cost
    yield "The rotation keeps", cost, factor(logs)


def hypotheses() -> Claims:
    """KL in the first 5,000 steps; the shares of softmax's distance to a tree that are left."""
    rows = read("mechanism/certainty.csv")
    kl = dict(iter(curves(rows, "val/kl").mean(axis=1).groupby(rows["head"])))
    heads = ("sigmoid-coupled-1", "softmax", "sigmoid-opposed-0.5")
    p_values = [welch_p(kl[head], kl["sigmoid-coupled-0"]) for head in heads]
    yield "refuted by its rule (Welch: p =", p_values
    runs = select("mechanism/runs.csv", plans="probing", max_steps=60000)
    cell = ["num_categories", "head", "decoder", "even", "draws"]
    elbo = runs.groupby(cell)["test/elbo"].mean().unstack(cell[2:])
    softmax, sigmoid, C_0, C_1 = (
        elbo.xs(head, level="head")
        for head in ("softmax", "sigmoid", "sigmoid-coupled-0", "sigmoid-coupled-1")
    )
    plain, many = ("plain", 0.0, 1), ("plain", 0.0, 8)
    for words, change in (
        ("with the path of a category in its decoder it keeps", ("tree", 0.0, 1)),
        ("paid for even use it keeps", ("plain", 1.0, 1)),
        ("with eight draws it keeps", many),
    ):
        yield words, (sigmoid[plain] - softmax[change]) / (sigmoid[plain] - softmax[plain])
    yield "with eight draws C = 1 keeps", (C_0[many] - C_1[many]) / (C_0[plain] - C_1[plain])


def noise_and_coupling() -> Claims:
    """More draws of z, no bias, coupling with them, and the opposite coupling."""
    one, _, many, unbiased = (log_factors(*noise(*setting), 10000) for setting in SETTINGS)
    words = "because sigmoid's factor of steps stays above 2:"
    yield words, factor(many), factor(unbiased)
    changes = [np.subtract(logs, one[: len(logs)]) for logs in (many, unbiased)]
    words = "against one draw it changes times"
    yield words, [(factor(change)[0], p_of(change)) for change in changes]
    one, eight = (log_factors(*noise(*setting), 20000) for setting in SETTINGS[:2])
    words = "which the plan does not name, the factor is"
    yield words, factor(one), factor(eight), p_of(np.subtract(eight, one))
    pairs = [noise(*setting, "sigmoid-coupled-1", "sigmoid") for setting in SETTINGS]
    prices = [factor(log_factors(*runs, 10000)) for runs in pairs]
    yield "to the loss that C = 1 has after 10,000 steps, C = 1 needs", prices
    names = {"first": "sigmoid-coupled-0", "second": "sigmoid-opposed-0.5"}
    pairs = [
        [runs.loc[4:8] for runs in mechanism(K, **names, variant=variant)]
        for K, variant in product((8, 32), ("gray", "binary"))
    ]
    elbo = np.hstack([differences(opposed, tree, "test/elbo") for tree, opposed in pairs])
    nll = [differences(tree, opposed, "test/nll") for tree, opposed in pairs]
    fewer_steps = factor([log_factors(*runs) for runs in pairs])
    yield "Against C = 0,", len(elbo), interval(elbo), interval(nll), fewer_steps


def architectures() -> Claims:
    """What a convolutional decoder, a convolutional encoder and batch norm do to the factor."""
    dense, conv, to_conv, to_dense, plain = (log_factors(*networks(*x)) for x in NETWORKS)
    of_decoder = [(to_conv, dense), (conv, to_dense)]
    of_encoder = [(to_dense, dense), (conv, to_conv)]
    changes = [*of_decoder, *of_encoder, (conv, plain)]
    numbers = [(*np.exp(welch(*logs)), welch_p(*logs)) for logs in changes]
    yield "A convolutional decoder multiplies the factor by", numbers
    crossed = [max(crossings(*networks(*x))) for x in NETWORKS]
    glyphs = max(crossings(*other_data("glyphs", 16, "gumbel")))
    yield "softmax has the lower loss in the first", min(*crossed, glyphs), max(*crossed, glyphs)
    yield "and in all of them softmax is ahead at first, for", min(crossed), max(crossed)
    kl = [[curves(runs, "val/kl").dropna(axis=1) for runs in networks(*x)] for x in NETWORKS[:3]]
    more = [(softmax - sigmoid).mean() for softmax, sigmoid in kl]
    yield "Softmax's KL is above sigmoid's by", [(gaps.min(), gaps.max()) for gaps in more]


def elsewhere() -> Claims:
    """Other data: how far straight-through is behind Gumbel; frames of games."""
    runs = select("glyphs/runs.csv", stage="final", head=["softmax", "sigmoid"])
    elbo = runs.groupby(["estimator", "head", "num_categories"])["test/elbo"].mean()
    gaps = elbo["gumbel"] - elbo["straight-through"]
    for words in ("Straight-through with unimix ends", "on letters, with 1 % unimix,"):
        yield words, gaps.min(), gaps.max()
    runs = select("frames/runs.csv", stage="final")
    kl = runs[runs["head"] == "softmax"].groupby("estimator")["val/kl"].mean()
    yield "Softmax's validation KL is", kl
    changes = [len(crossings(*other_data("frames", 32, *x))) for x in product(ESTIMATORS, TREES)]
    yield "The mean curves of two heads change places", min(changes), max(changes)
    losses = select("frames/curves.csv", estimator=list(ESTIMATORS))
    ends = losses["val/loss_10000"] - curves(losses).min(axis=1)
    yield "above its lowest validation loss by at most", ends.groupby(losses["estimator"]).max()
    elbo = by_cell(runs, "test/elbo", ["estimator", "head"])
    gaps = [
        welch(elbo[estimator, head], elbo[estimator, "softmax"])
        for estimator, head in product(ESTIMATORS, TREES)
    ]
    yield "Beside softmax's, the ELBO of sigmoid and natural is", gaps
    search = select("frames/runs.csv", stage="search", estimator="gumbel")
    losses = search.pivot_table("val/loss", "head", "learning_rate")
    yield "natural is lower at 0.003 than at 0.001 by", (losses[0.001] - losses[0.003])[HEADS]
    yield "worse there than at 0.003 by", (losses[0.01] - losses[0.003])["softmax"]


# -- graphs, games ---------------------------------------------------------------------------------


def graphs() -> Claims:
    """Energy scores at the rates with the lowest mean validation loss over three seeds."""
    final = searched_graphs()
    thetas = final["theta"].unique()
    cell = ["theta", "head", "head_options.tail"]
    scores = by_cell(final, "test/energy_score_2x", cell)
    errors = by_cell(final, "test/theta_mae", cell)
    gaps = final.groupby([*cell[1:], cell[0]])["test/gap_2x"].mean()
    shares = gaps["natural", 0.005] / gaps["softmax", 0]
    yield "to the true model in energy score is", shares.min(), shares.max(), len(thetas)
    heads = (("softmax", 0), ("sigmoid", 0), ("natural", 0), ("natural", 0.005))
    for theta in thetas:
        yield row(theta), [scores[theta, *head].mean() for head in heads]

    def below_and_above(values: dict[Any, Any], *head: object) -> tuple[int, int]:
        """On how many data sets a head is significantly below softmax, and above it."""
        gaps = [welch(values[theta, *head], values[theta, "softmax", 0]) for theta in thetas]
        return sum(high < 0 for _, _, high in gaps), sum(low > 0 for _, low, _ in gaps)

    tailed, _ = below_and_above(scores, "natural", 0.005)
    natural = below_and_above(scores, "natural", 0)
    sigmoid, _ = below_and_above(scores, "sigmoid", 0)
    words = "natural with tail 0.005 is significantly below softmax on"
    yield words, tailed, len(thetas), natural, sigmoid
    closer, farther = below_and_above(errors, "natural", 0)
    words = "natural's error in theta is significantly below softmax's on"
    yield words, closer, len(thetas), farther


def lost_edges() -> Claims:
    """Runs in which true edges reach probability 0."""
    local = read("graphs/runs.csv")
    local = local[local["plans"].str.contains("gsl_local")]
    for estimator, runs in (("score function", searched_graphs()), ("local expectation", local)):
        for (head, tail), edges in runs.groupby(["head", "head_options.tail"])["test/dead_edges"]:
            name = f"{head}, tail {tail}, {estimator}" if tail else f"{head}, {estimator}"
            yield row(name), sum(edges > 0), len(edges)
    for rate, runs in select("graphs/runs.csv", plans="gsl_tail").groupby("learning_rate"):
        cells = [
            (sum(tailed["test/dead_edges"] > 0), len(tailed), tailed["test/gap_2x"].mean())
            for _, tailed in runs.groupby("head_options.tail")
        ]
        yield row(f"rate {rate}"), cells


def atari() -> Claims:
    """Returns of PPO after 8 million steps, and those of the paper."""
    runs = select("games/runs.csv", stage="final", total_steps=8000000)
    returns = by_cell(runs, "test/return", ["env", "head", "learning_rate"])
    for words, game, rate, rate_of_natural in (
        ("settings for both heads (rate 0.00025): softmax returns", "Breakout", 0.00025, 0.00025),
        ("softmax at 0.002 returns", "Breakout", 0.002, 0.001),
        ("Seaquest: softmax", "Seaquest", 0.00025, 0.00025),
    ):
        softmax = returns[game, "softmax", rate]
        natural = returns[game, "natural", rate_of_natural]
        counts = len(softmax), len(natural)
        yield words, softmax.mean(), natural.mean(), counts, welch_p(softmax, natural)
    printed = pd.json_normalize(PRINTED["rl_return"]).set_index(["env", "head"])
    p_values = []
    for game in ("Breakout", "Seaquest"):
        mean, std = (printed.loc[game, f"test/return.{part}"] for part in ("mean", "std"))
        test = stats.ttest_ind_from_stats(
            mean["softmax"], std["softmax"], 10, mean["natural"], std["natural"], 10, False
        )
        p_values.append(test.pvalue)
    yield "the paper's own differences have p =", p_values
    variance = (printed.loc["Breakout", "test/return.std"] ** 2).sum()
    needed = variance * (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 / 8**2
    yield "a difference of 8 points needs about", round(needed, -1)


def minatar() -> Claims:
    """Interquartile means of returns relative to softmax's, on seeds that chose no rate and all."""
    runs = read("minatar/runs.csv")
    runs = runs.assign(loss=-runs["test/return"])
    runs = best(runs[runs.index <= 3], runs, "loss", ["head", "env"], ["learning_rate"])
    for words, first_seed in (("seeds from 4 on", 4), ("all seeds", 1)):
        returns = by_cell(runs[runs.index >= first_seed], "test/return", ["head", "env"])
        samples: dict[str, list[Any]] = {head: [] for head in (*HEADS, "sparsemax")}
        for (head, game), values in returns.items():
            samples[head].append(values.to_numpy() / returns["softmax", game].mean())
        for head, sample in samples.items():
            counts = {*map(len, sample)}  # one, as all games have equally many runs
            numbers = [*counts, *bootstrap(sample, interquartile_mean)]
            if head != "softmax":
                numbers += bootstrap([*sample, *samples["softmax"]], iqm_difference)
            yield row(head, words), numbers
    rates = runs[runs["head"].isin(HEADS)].groupby(["head", "env"])["learning_rate"].first()
    yield "the larger of the two rates, is best in", (rates == 0.003).sum(), len(rates)
    counts = {len(values) for sample in samples.values() for values in sample}
    yield "nor on four games of MinAtar (n =", sorted(counts)


# -- labels, output layers, speed ------------------------------------------------------------------


def digits() -> Claims:
    """Labels of digits, each head at its best rate."""
    runs = select("language_model/runs.csv", plans="classify")
    runs = best(runs, runs, "val/nll", ["output"], ["learning_rate"])
    means = runs.groupby(["output", "learning_rate"])[["test/nll", "test/accuracy"]].mean()
    for cells, numbers in means.iterrows():
        yield row(*cells), numbers
    losses = by_cell(runs, "test/nll", "output")
    yield "Sigmoid's test NLL is above softmax's by", welch(losses["sigmoid"], losses["softmax"])


def output_rows(words: str, layers: Runs) -> Claims:
    """Rows of output layers: n, perplexity, % above softmax's, of frequent and rare, accuracy."""
    softmax = layers.loc[layers["output"] == "softmax", "test"].mean()
    for (name, steps, rate), runs in layers.groupby(["output", "steps", "rate"]):
        test, *parts = runs[["test", "test_frequent", "test_rare", "accuracy"]].mean()
        cells = row(words, f"{steps} steps, rate {rate}", name)
        yield cells, len(runs), test, 100 * (test / softmax - 1), parts


def outputs() -> Claims:
    """Test perplexities of output layers, at equal steps and at equal time."""
    layers = output_layers()
    full = layers[layers["steps"] == layers["text"].map(STEPS)]
    for text, runs in full[full["text"] != "docs-before"].groupby("text"):
        yield from output_rows(text, runs)
    tests = full.pivot_table("test", "output", "text")
    above = 100 * (tests / tests.loc["softmax"] - 1)
    faster = {}
    for text in ("words", "docs"):
        runs = at_equal_time(layers, text)
        yield from output_rows(f"{text}, equal time", runs)
        means = runs.groupby("output")["test"].mean()
        faster[text] = 100 * (1 - means / means["softmax"])
    ahead = 100 * (1 - means / means["adaptive-2"])  # on "docs"
    texts = ["words", "pairs", "docs"]
    few, many = (above.loc[f"hybrid-{F}", [*texts, "small"]] for F in (1024, 4096))
    one, two = (above.loc[f"adaptive-{cutoffs}"] for cutoffs in (1, 2))
    gains = faster["docs"][["hybrid-4096", "adaptive-2"]]
    yield "After equal steps its test perplexity is", many[texts], -many["small"]
    large = many[texts].min(), many[texts].max()
    yield "frequent words with a tree over the others is", large, -many["small"]
    yield "missed on two of three texts (table:", many[texts]
    yield "with the better of the cutoffs tried, is", -one[["words", "small"]]
    yield "of training with 131,072 words, its perplexity is", gains
    adaptive = one["words"], two["words"], one["pairs"], two["docs"], one["small"]
    yield "`nn.AdaptiveLogSoftmaxWithLoss` |", adaptive, -gains["adaptive-2"]
    yield "`TreeLinear(..., frequent=4096)` |", many, few, -gains["hybrid-4096"]
    yield "`TreeLinear(...)`, a tree alone |", above.loc["tree", ["words", "small"]]
    test = by_cell(full[full["text"] == "small"], "test", "output")
    softmax, layers_below = test["softmax"], ("hybrid-4096", "adaptive-1")
    below = [np.divide(welch(softmax, test[x]), 0.01 * softmax.mean()) for x in layers_below]
    yield "the hybrid with F = 4,096 is below softmax by", below
    yield "was below softmax at equal steps, by", -above.loc["hybrid-1024", "docs-before"]
    yield 'on "docs" at equal time it is ahead (', ahead[["hybrid-1024", "hybrid-4096"]]
    ratios = tests.loc["hybrid-1024"] / tests.loc["hybrid-4096"]
    words = "not refuted, F = 1,024 is"
    yield words, 100 * (ratios[["pairs", "words"]] - 1)
    yield 'F = 4,096 brings on "docs"', 100 * (1 - 1 / ratios["docs"])
    ratios = tests.loc["hybrid-8192"] / tests.loc["adaptive-1"]
    yield "the same shortlist has a mean higher by", 100 * (ratios["words"] - 1)
    leads = tests.loc["softmax", "small"] - tests["small"]
    kept = leads["adaptive-wide"] / leads["adaptive-1"]
    yield "without it adaptive softmax keeps", kept


def by_count() -> Claims:
    """How often a rare class was trained on, and its loss beside softmax's."""
    rows = read("language_model/by_count.csv").query("rare")
    rows = rows.assign(bin=rows["seen"].clip(lower=1))  # never seen, and seen one to three times
    rows = rows.assign(total=rows["loss"] * rows["tokens"])
    sums = rows.groupby(["output", "bin"])[["total", "tokens"]].sum()
    losses = (sums["total"] / sums["tokens"]).unstack()
    for output in ("adaptive-1", "tree", "hybrid-1024"):
        yield row(output, "nats above softmax"), losses.loc[output] - losses.loc["softmax"]


def speed() -> Claims:
    """Times and memory of output layers, of paths and of a step of the VAE."""
    for text in ("docs", "words"):
        yield row(f'on "{text}"'), step_times(text)
        rates = 8192 / step_times(text)  # thousands of tokens a second
        yield row(f'tokens on "{text}"'), rates
    yield "A whole training step of a Transformer with 131,072 words took", step_times("docs")
    saved = 1 - step_times("words")["adaptive-1"] / step_times("words")["softmax"]
    yield "adaptive softmax with one cutoff saves", 100 * saved
    path = "speed/output_layer_frequent_h200.csv"
    layers = select(path, targets="zipf", commit="b533849").set_index("layer")
    ms, gb = layers["forward + backward ms"], layers["memory GB"]
    exact, half = "linear + cross_entropy", "linear + cross_entropy in bfloat16"
    adaptive, tree = "adaptive softmax", "tree sigmoid"
    hybrids = [f"hybrid, F = {F}" for F in (1024, 4096, 8192)]
    yield "forward and backward of the layer take", ms[[hybrids[1], half, adaptive]]
    softmax = [ms[half], gb[half], ms[exact], gb[exact]]
    yield "in bfloat16 the layer alone is", ms[exact] - ms[half]
    yield "is a small part of a step | `nn.Linear` and `cross_entropy` | | |", softmax
    yield "tokens) | -17.3 % |", ms[adaptive], gb[adaptive]
    yield "and -4.3 % | -18.9 % |", ms[hybrids], gb[hybrids[1]]
    sample = layers["sample ms, batch 1"][[exact, tree, *hybrids[:2]]]
    megabytes = layers["MB a sample, batch 1"][[exact, tree, *hybrids[:2]]]
    sample_64 = layers["sample ms, batch 64"][[exact, tree, *hybrids[:2]]]
    yield "A softmax draws one class in", sample, megabytes, sample_64
    earlier = select(path, targets="zipf", commit="3f28ec5").set_index("layer")
    others = ["cut-cross-entropy", "liger"]
    yield "the same function | |", earlier.loc[others, [ms.name, gb.name]]
    yield "where softmax in float32 took", earlier.loc[exact, ms.name]
    uniform = select(path, targets="uniform", commit="b89688e+", layer=tree)[ms.name]
    yield "equally frequent classes were not measured | |", uniform, ms[tree], gb[tree]
    for head in TREES:
        yield row(head), select("speed/paths_cpu.csv", K=2**20, head=head)["ratio"]
    text = " ".join((PAPER / "speed/vae_speed_h200.txt").read_text().split())
    steps = []
    for how in ("replayed", "eager"):
        times = re.findall(rf"{how}, FisherMonitor every step: ([\d.]+) ms", text)
        steps.append(np.median(list(map(float, times))))
    yield "captured and replayed as CUDA graphs:", steps


STUDIES = (
    *(likelihoods, longer_runs, other_optimizers, estimators, saturation, draws),
    *(factors, less_noise, other_networks, longer_latents),
    *(rotation, hypotheses, noise_and_coupling, architectures, elsewhere),
    *(graphs, lost_edges, atari, minatar, digits, outputs, by_count, speed),
)


class Claim(NamedTuple):
    """Words of a page and the numbers behind them, by the function that computes them."""

    study: str
    words: str
    numbers: list[float]


def claims() -> Iterator[Claim]:
    """All of them."""
    for study in STUDIES:
        for words, *parts in study():
            numbers = np.hstack([np.ravel(part) for part in parts]).astype(float)
            yield Claim(study.__name__, words, numbers.tolist())


def main() -> int:
    """Print all claims."""
    failed = 0
    for study, words, numbers in claims():
        places = list(statements(words, len(numbers)))
        wrong = [place for place in places if not place.holds(numbers)]
        failed += not places or len(wrong) > 0
        text = ", ".join(f"{number:.4g}" for number in numbers)
        print(f"{study}: {words} {text}{'' if places else '  (NO PAGE SAYS SO)'}")
        for place in wrong:
            stated = ", ".join(number[0] for number in place.numbers)
            print(f"    {place.page.relative_to(PAPER.parent)} DIFFERS: {stated}")
            if "--renew" in sys.argv and place.is_row:
                renew(place, numbers)
    print(f"{failed} claims differ from the rows", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
