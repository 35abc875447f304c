"""Every number in the pages of this folder, and of README.md and docs/, computed from the rows.

    python paper/verdicts.py          # words of a page, stated, computed; 1 where they differ
    python paper/verdicts.py --renew  # put computed numbers into rows of tables

A claim is some words of a page, and the numbers that follow them there. Other numbers may lie
between these, as in "K = 8"; but the first one comes at once. All pages with the words are read.
To add a claim, write the sentence and yield its words and numbers below.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

import numpy as np
from measures import (
    PAPER,
    PRINTED,
    bootstrap,
    by_seed,
    crossing,
    curve,
    differences,
    factor,
    interquartile_mean,
    interval,
    log_factors,
    mean_curve,
    p_of,
    read,
    renew,
    select,
    statements,
    welch,
)
from scipy import stats
from studies import (
    EQUAL_TIME,
    ESTIMATORS,
    GUMBEL,
    HEADS,
    LONGEST,
    NETWORKS,
    OTHER_DATA,
    SETTINGS,
    SGD,
    SMALL,
    STEPS,
    TREES,
    Pair,
    Runs,
    heads,
    interventions,
    mechanism,
    networks,
    noise,
    other_data,
    output,
    outputs_of,
    probing,
    vae,
)

Claims = Iterator[tuple[str, Sequence[float]]]


def row(*cells: str) -> str:
    """The first cells of a row."""
    return f"| {' | '.join(cells)} |"


# -- VAEs ------------------------------------------------------------------------------------------


def likelihoods() -> Claims:
    """Likelihoods in 18 columns, beside those of the paper."""
    columns = list(product(("gray", "binary"), (10, 20, 30), (8, 16, 32)))
    names = ("head", "variant", "num_latents", "num_categories")
    nll = {tuple(x[name] for name in names): x["test/nll"]["mean"] for x in PRINTED["vae_nll_adam"]}
    theirs = {head: np.array([nll[head, *column] for column in columns]) for head in HEADS}
    ours = {
        head: np.array([vae(head, N, K, data)["test/nll"].mean() for data, N, K in columns])
        for head in HEADS
    }
    for words, table in (("the paper", theirs), ("ours", ours)):
        gaps = table["softmax"] - np.minimum(table["sigmoid"], table["natural"])
        yield row(f"gray, {words}"), gaps[:9]
        yield row(f"binary, {words}"), gaps[9:]
    lower = sum(np.maximum(ours["sigmoid"], ours["natural"]) < ours["softmax"])
    p_values = [p_of(ours["softmax"] - ours[head]) for head in TREES]
    yield "have a lower mean NLL than softmax in", [lower, 18, min(gaps), max(gaps), *p_values]
    gains = ours["softmax"] - ours["sigmoid"]
    numbers = [min(gains), max(gains), sum(gains > 0), 18]
    yield "lowers the test NLL on MNIST by", numbers
    best = 0
    for (data, N, K), nll_of_column in zip(columns, ours["softmax"], strict=True):
        tried = [vae("softmax", N, K, data, learning_rate=x) for x in (0.0005, 0.002, 0.003)]
        best += all(runs["test/nll"].mean() > nll_of_column for runs in tried if len(runs))
    yield "softmax's best rate of those run to the end in", [best, 18]
    ahead = ours["natural"] - ours["sigmoid"]
    yield "mean NLL is below natural's in", [sum(ahead > 0), 18, ahead.mean(), p_of(ahead)]
    ahead = theirs["natural"] - theirs["sigmoid"]
    yield "in the paper's own table natural is ahead in", [sum(ahead < 0), sum(ahead > 0)]


def nll_gap(first: Runs, second: Runs) -> list[float]:
    """Welch's interval of a difference in test NLL."""
    return welch(first["test/nll"], second["test/nll"])[:3]


def longer_runs() -> Claims:
    """192,000 steps: (10, 8) and (20, 32), gray and binary."""
    for steps in (60000, 96000, 120000, 192000):
        gaps, logs = [], []
        for N, K, data in LONGEST:
            size = {"num_latents": N, "num_categories": K, "variant": data}
            pair = heads("vae/longest_curve.csv", **size)
            gaps += differences(*pair, f"val/loss_{steps}")
            logs += log_factors(*pair, until=steps)
        yield row(f"{steps:,}"), [*interval(gaps), *factor(logs)]
    yield "after 192,000 steps softmax is", interval(gaps)
    pairs = [[vae(head, *x, max_steps=192000) for head in HEADS[:2]] for x in LONGEST]
    yield row("192,000 steps"), [x for pair in pairs for x in nll_gap(*pair)]


def other_optimizers() -> Claims:
    """Plain SGD, the score function, high rates."""
    runs = {(head, *x): vae(head, *x, **SGD) for head, x in product(HEADS, SMALL)}
    gaps = [nll_gap(runs["softmax", *x], runs["sigmoid", *x]) for x in SMALL]
    yield row("plain SGD"), list(chain(*gaps))
    below = sum(nll_gap(runs["natural", *x], runs["sigmoid", *x])[1] > 0 for x in SMALL)
    yield "is significantly below natural in", [below]
    losses = [runs[x]["test/nll"].mean() - vae(*x)["test/nll"].mean() for x in runs]
    yield "softmax, sigmoid and natural end", [min(losses), max(losses)]
    failed = []
    for head in ("softmax", "natural", "sigmoid"):
        columns = product((20, 30), ("gray", "binary"))
        failed.append(sum((vae(head, N, 32, x, **SGD)["test/nll"] > 150).sum() for N, x in columns))
    yield "At K = 32 the opponent does not train:", failed
    for N, K, rate in ((10, 8, 0.0002), (20, 16, 0.0005)):
        setting = {"model": "mlp-vae", "stage": "final", "num_latents": N, "learning_rate": rate}
        elbo = {x: by_seed("vae/runs.csv", head=x, **setting)["test/elbo"] for x in HEADS}
        gaps = [welch(elbo["sigmoid"], elbo[head])[:3] for head in ("softmax", "natural")]
        yield f"At ({N}, {K}), rate {rate}, sigmoid's ELBO is", list(chain(*gaps))
    rates = select("vae/runs.csv", stage="final")
    rates = rates[rates["plans"].str.contains("vae_rates")]
    cell = ["num_latents", "num_categories", "variant", "head", "seed"]
    nll = rates.pivot_table("test/nll", cell, "learning_rate").dropna(subset=0.003)
    worst = nll.max(axis=1) == nll[0.003]
    yield "0.003 is the worst rate in", [worst.sum(), len(worst)]


def estimators() -> Claims:
    """The small VAE: sigmoid's lead over softmax, each at the better one of its rates."""
    for estimator in ("exact", "score-function", "reinmax", "gumbel", "straight-through"):
        best = []
        for head in ("sigmoid", "softmax"):
            where = {"stage": "final", "estimator": estimator, "head": head}
            rates = [0.0003, 0.001, 0.003]
            tried = [by_seed("estimators/runs.csv", learning_rate=x, **where) for x in rates]
            best.append(min(filter(len, tried), key=lambda runs: runs["val/loss"].mean()))
        *lead, p = welch(*(runs["test/elbo"] for runs in best))
        yield row(estimator), [len(best[0]), *lead, *nll_gap(*best[::-1])]
        if estimator == "gumbel":
            p_values = [p_of(differences(*best, "test/elbo")), 5 * p]
            yield "in pairs of a seed its lead has p =", p_values
        if estimator == "reinmax":
            yield "nor with ReinMax, in a small VAE alone:", lead


def draws() -> Claims:
    """Several draws for each image, and how evenly categories are used."""
    nll, perplexity = [], []
    for head, count in product(("softmax", "sigmoid"), (1, 8)):
        where = {"max_steps": 20000, "stage": "final", "draws": count, "head": head}
        runs = by_seed("without_noise/runs.csv", estimator="gumbel", **where)
        nll.append(runs["test/nll"].mean())
        perplexity.append(runs["test/perplexity"].mean())
    yield "eight draws for each image | test NLL", nll
    yield "after 20,000 steps the test perplexity is", perplexity[::2]


# -- the factor of steps ---------------------------------------------------------------------------


def factors() -> Claims:
    """The table of interventions: n, factors, leads in ELBO and in NLL."""
    for words, pairs in interventions().items():
        ran = [(softmax, head) for softmax, head in pairs if len(head)]
        numbers = [len(softmax.index.intersection(head.index)) for softmax, head in ran]
        numbers += chain(*(factor(log_factors(*pair)) for pair in ran))
        numbers += [np.mean(differences(head, softmax, "test/elbo")) for softmax, head in ran]
        numbers += [np.mean(differences(softmax, head, "test/nll")) for softmax, head in ran]
        yield row(words), numbers


def factor_row(words: Sequence[str], pair: Pair, *until: float) -> Claims:
    """A row of a table: seeds, the factor at each loss, and where the curves cross."""
    if count := len(pair[0].index.intersection(pair[1].index)):
        numbers = [count, *chain(*(factor(log_factors(*pair, steps)) for steps in until))]
        yield row(*words), [*numbers, *crossing(*pair)]


def rates_of(pair: Pair) -> str:
    """The learning rates of two heads."""
    return ", ".join("/".join(map(str, sorted({*runs["learning_rate"]}))) for runs in pair)


def factor_tables() -> Claims:
    """Factors with less noise, other networks and other data."""
    for setting, head in product(SETTINGS, ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")):
        words = (f"{setting[0]}, {setting[1]}", head)
        yield from factor_row(words, noise(setting, "softmax", head), 2500, 5000, 10000)
    for model in NETWORKS:
        pair = networks(*model)
        yield from factor_row((*model, rates_of(pair)), pair, np.inf)
    for (study, _, N, K, steps), estimator, head in product(OTHER_DATA, ESTIMATORS, TREES):
        pair = other_data(study, K, estimator, head)
        words = (f"({N}, {K})", estimator, head, rates_of(pair))
        yield from factor_row(words, pair, steps)


def latents() -> Claims:
    """The table "Does it help my latents?"."""
    table: list[tuple[str, str, str, int, Pair]] = []
    for N, K in ((10, 8), (20, 16), (20, 32)):
        size = f"convolutional, ({N}, {K})"
        table += [("MNIST", size, GUMBEL, steps, mechanism(K)) for steps in (20000, 60000)]
    for N, K in ((10, 8), (20, 32)):
        size = f"convolutional, ({N}, {K})"
        where = {"num_latents": N, "num_categories": K, "variant": "binary"}
        pair = heads("vae/longest_curve.csv", **where)
        table.append(("MNIST, binary", size, GUMBEL, 60000, pair))
        table.append(("MNIST", size, f"{GUMBEL}, 8 draws", 60000, probing(K, draws=8)))
    estimators = (GUMBEL, "", f"{GUMBEL}, 64 draws", "score function, 64 draws")
    for setting, estimator in zip(SETTINGS, estimators, strict=True):
        if estimator:
            table.append(("MNIST", "convolutional, (10, 8)", estimator, 10000, noise(setting)))
    for encoder, decoder in NETWORKS:
        model = f"{encoder} encoder, {decoder} decoder, (10, 16)"
        table.append(("MNIST", model, GUMBEL, 20000, networks(encoder, decoder)))
    for (study, data, N, K, steps), estimator in product(OTHER_DATA, ESTIMATORS):
        pair = other_data(study, K, estimator)
        if all(map(len, pair)):
            size = f"convolutional, ({N}, {K})"
            table.append((data, size, ESTIMATORS[estimator], steps, pair))
    for *words, steps, pair in table:
        logs = log_factors(*pair, steps)
        yield row(*words, f"{steps:,}"), [*factor(logs), len(logs)]


def rotation() -> Claims:
    """A rotation of the scores, which fills the Fisher matrix."""
    costs, logs, shares, masses = [], [], [], []
    for K, head in product((8, 16, 32), TREES):
        rotated, plain = mechanism(K, f"{head}-rotated-3", head)
        costs.append(np.mean(differences(plain, rotated, "test/elbo")))
        logs.append(np.mean(log_factors(rotated, plain)))
        if K > 8:  # where the rotated matrix is denser than softmax's
            lead = np.mean(differences(plain, mechanism(K)[0], "test/elbo"))
            shares.append(1 - costs[-1] / lead)
            masses.append(rotated["fim/off_diagonal_mass"].mean())
    of_softmax = [mechanism(K)[0]["fim/off_diagonal_mass"].mean() for K in (16, 32)]
    yield "its off-diagonal mass is", [min(masses), max(masses), *of_softmax]
    cost = [min(shares), max(shares), *interval(costs)]
    yield "a rotation that fills it keeps", cost
    yield "The rotation keeps", [*cost, *factor(logs)]


def noise_and_coupling() -> Claims:
    """More draws of z, no bias, coupling with them, and the opposite coupling."""
    one, _, many, unbiased = (log_factors(*noise(setting), 10000) for setting in SETTINGS)
    yield "with intervals that reach below 2: it is", [*factor(many), *factor(unbiased)]
    yield "sigmoid at the third loss is", [*factor(many), *factor(unbiased)]
    changes = [np.subtract(logs, one[: len(logs)]) for logs in (many, unbiased)]
    numbers = [x for change in changes for x in (factor(change)[0], p_of(change))]
    yield "against one draw it changes times", numbers
    one, eight = (log_factors(*noise(setting), 20000) for setting in SETTINGS[:2])
    p = p_of(np.subtract(eight, one))
    yield "which the plan does not name, the factor is", [*factor(one), *factor(eight), p]
    pairs = [noise(setting, "sigmoid-coupled-1", "sigmoid") for setting in SETTINGS]
    numbers = [x for pair in pairs for x in factor(log_factors(*pair, 10000))]
    yield "to the loss that C = 1 has after 10,000 steps, C = 1 needs", numbers
    elbo, nll, logs = [], [], []
    for K, variant in product((8, 32), ("gray", "binary")):
        names = ("sigmoid-coupled-0", "sigmoid-opposed-0.5")
        tree, opposed = mechanism(K, *names, variant=variant, seed=[4, 5, 6, 7, 8])
        elbo += differences(opposed, tree, "test/elbo")
        nll += differences(tree, opposed, "test/nll")
        logs += log_factors(tree, opposed)
    numbers = [len(elbo), *interval(elbo), *interval(nll), *factor(logs)]
    yield "Against C = 0,", numbers


def architectures() -> Claims:
    """What a convolutional decoder, a convolutional encoder and batch norm do to the factor."""
    dense, conv, to_conv, to_dense, plain = (log_factors(*networks(*x)) for x in NETWORKS)
    changes = (
        (to_conv, dense),
        (conv, to_dense),
        (to_dense, dense),
        (conv, to_conv),
        (conv, plain),
    )
    numbers = []
    for larger, smaller in changes:
        *bounds, p = welch(larger, smaller)
        numbers += [*np.exp(bounds), p]
    yield "A convolutional decoder multiplies the factor by", numbers


def elsewhere() -> Claims:
    """Other data: how far straight-through is behind Gumbel; frames where their runs stopped."""
    gaps = []
    for K, head in product((16, 32), ("softmax", "sigmoid")):
        where = {"num_categories": K, "head": head, "stage": "final"}
        runs = [by_seed("glyphs/runs.csv", estimator=x, **where) for x in ESTIMATORS]
        gaps.append(runs[0]["test/elbo"].mean() - runs[1]["test/elbo"].mean())
    yield "Straight-through with unimix ends", [min(gaps), max(gaps)]
    yield "on letters, with 1 % unimix,", [min(gaps), max(gaps)]
    pair = other_data("frames", 32, "gumbel")
    gaps = differences(*pair, "val/loss_6250")
    yield "After 6,250 steps softmax's validation loss is", interval(gaps)
    yield "The KL is", [runs["val/kl_6250"].mean() for runs in pair]
    losses = [curve(run, 6250).tail(9) for runs in pair for _, run in runs.iterrows()]
    largest = max(run.diff().abs().max() for run in losses)  # in the last 2,000 steps
    ahead = np.sign((mean_curve(pair[0]) - mean_curve(pair[1])).dropna())
    yield "apart by up to", [largest, (ahead.diff().iloc[1:] != 0).sum()]
    losses = read("frames/runs.csv").pivot_table("val/loss", "head", "learning_rate")
    behind = (losses[0.001] - losses[0.003])[["softmax", "sigmoid"]]
    yield "It was chosen with seed 0, where 0.001 is", behind


# -- graphs, games ---------------------------------------------------------------------------------


def graphs() -> Claims:
    """Energy scores at the rates with the lowest mean validation loss over three seeds."""
    counts = dict.fromkeys(("tail below", "below", "above", "sigmoid", "closer", "farther"), 0)
    rates = ["learning_rate", "psi_learning_rate"]
    score, error = "test/energy_score_2x", "test/theta_mae"
    for theta in (0.1, 0.25, 0.5, 0.75, 0.9):
        runs = []
        for head, tail in (("softmax", 0), ("sigmoid", 0), ("natural", 0), ("natural", 0.005)):
            where = {"plans": "gsl", "theta": theta, "head": head, "head_options.tail": tail}
            search = select("graphs/runs.csv", stage="search", **where)
            chosen = search.groupby(rates)["val/loss"].mean().idxmin()
            where |= dict(zip(rates, chosen, strict=True))
            runs.append(by_seed("graphs/runs.csv", stage="final", **where))
        yield row(str(theta)), [x[score].mean() for x in runs]
        softmax, sigmoid, natural, tailed = runs
        _, low, high, _ = welch(natural[score], softmax[score])
        counts["below"] += high < 0
        counts["above"] += low > 0
        counts["tail below"] += welch(tailed[score], softmax[score])[2] < 0
        counts["sigmoid"] += welch(sigmoid[score], softmax[score])[2] < 0
        _, low, high, _ = welch(natural[error], softmax[error])
        counts["closer"] += high < 0
        counts["farther"] += low > 0
    *below, closer, farther = counts.values()
    below = [below[0], 5, *below[1:]]
    yield "natural with tail 0.005 is significantly below softmax on", below
    yield "natural's error in theta is significantly below softmax's on", [closer, 5, farther]
    yield "Its energy score is below softmax's on", below[:2]


def atari() -> Claims:
    """Returns of PPO after 8 million steps, and those of the paper."""
    for words, game, rates in (
        ("settings for both heads (rate 0.00025): softmax returns", "Breakout", (0.00025, 0.00025)),
        ("softmax at 0.002 returns", "Breakout", (0.002, 0.001)),
        ("Seaquest: softmax", "Seaquest", (0.00025, 0.00025)),
    ):
        returns = []
        for head, rate in zip(("softmax", "natural"), rates, strict=True):
            where = {"stage": "final", "total_steps": 8000000, "env": game, "head": head}
            runs = by_seed("games/runs.csv", learning_rate=rate, **where)
            returns.append(runs["test/return"])
        means = [returns[0].mean(), returns[1].mean()]
        p = [] if rates[0] > rates[1] else [welch(*returns)[3]]  # rates of their own
        yield words, [*means, *map(len, returns), *p]
    printed = {(x["env"], x["head"]): x["test/return"] for x in PRINTED["rl_return"]}
    p_values = []
    for game in ("Breakout", "Seaquest"):
        pair = [printed[game, head] for head in ("softmax", "natural")]
        numbers = [x for table in pair for x in (table["mean"], table["std"], 10)]
        p_values.append(stats.ttest_ind_from_stats(*numbers, equal_var=False).pvalue)
    yield "the paper's own differences have p =", p_values
    variance = sum(printed["Breakout", head]["std"] ** 2 for head in ("softmax", "natural"))
    needed = variance * (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 / 8**2
    yield "a difference of 8 points needs about", [round(needed, -1)]


def minatar() -> Claims:
    """Interquartile means of returns relative to softmax's, on seeds that chose no rate and all."""
    runs = read("minatar/runs.csv")
    cell = ["head", "env", "learning_rate"]
    searched = runs[runs["seed"] <= 3].groupby(cell)["test/return"].mean()
    chosen = searched.groupby(cell[:2]).idxmax()  # the rate of each head and game
    runs = runs[runs.set_index(cell).index.isin(chosen)]
    for words, first_seed in (("seeds from 4 on", 4), ("all seeds", 1)):
        returns = runs[runs["seed"] >= first_seed].groupby(["head", "env"])["test/return"]
        softmax = returns.mean()["softmax"]
        samples: dict[str, list[Any]] = {head: [] for head in (*HEADS, "sparsemax")}
        for (head, game), values in returns:
            samples[head].append(values.to_numpy() / softmax[game])
        for head, sample in samples.items():
            counts = [*map(len, sample)]
            numbers = [min(counts), max(counts), *bootstrap(sample, interquartile_mean)]
            if head != "softmax":
                numbers += bootstrap([*sample, *samples["softmax"]], iqm_difference)
            yield row(head, words), numbers
    counts = [len(values) for head in HEADS for values in samples[head]]
    yield "nor on four games of MinAtar (n =", [min(counts), max(counts)]


def iqm_difference(*samples: np.ndarray, axis: int = -1) -> Any:
    """The interquartile mean of the first half of the samples minus that of the second."""
    half = len(samples) // 2
    ours, theirs = (interquartile_mean(*x, axis=axis) for x in (samples[:half], samples[half:]))
    return ours - theirs


# -- labels, output layers, speed ------------------------------------------------------------------


def digits() -> Claims:
    """Labels of digits, each head at its best rate."""
    rates = {"sparsemax": "3e-05", "natural": "0.0001"}
    for head in ("softmax", "sigmoid", "natural tail 0.05", "natural", "sparsemax"):
        rate = rates.get(head, "0.001")
        where = {"plans": "classify", "output": head, "learning_rate": float(rate)}
        runs = by_seed("language_model/runs.csv", **where)
        yield row(head, rate), runs[["test/nll", "test/accuracy"]].mean()


def outputs() -> Claims:
    """Test perplexities of output layers, at equal steps and at equal time."""
    tables = {text: dict.fromkeys(outputs_of(text), STEPS[text]) for text in STEPS}
    for words, steps_of in (tables | {"docs, equal time": EQUAL_TIME}).items():
        text = words.split(",")[0]
        softmax = output(text, "softmax", steps_of["softmax"])["test"].mean()
        for name, steps in steps_of.items():
            runs = output(text, name, steps)
            mean = runs[["test", "test_frequent", "test_rare"]].astype(float).mean()
            above = 100 * (mean["test"] / softmax - 1)
            rate = f"{steps} steps, rate {runs['rate'].iloc[0]}"
            yield row(words, rate, name), [len(runs), mean["test"], above, *mean[1:]]


def quality() -> Claims:
    """Perplexities in README.md and docs/large.md."""
    names = [(text, name) for text in STEPS for name in outputs_of(text)]
    tests = {x: output(*x, STEPS[x[0]])["test"].mean() for x in names}
    above = {x: 100 * (tests[x] / tests[x[0], "softmax"] - 1) for x in tests}
    hybrid = [above["words", "hybrid-4096"], above["pairs", "hybrid-4096"]]
    below = -above["docs", "hybrid-1024"]
    adaptive = [-above["words", "adaptive-1"], above["pairs", "adaptive-1"]]
    adaptive.append(-above["docs", "adaptive-2"])
    yield "Beside softmax's, its test perplexity is", [*hybrid, below, *adaptive]
    yield "With byte pairs it is", hybrid[1:]
    ratios = [tests[x, "hybrid-1024"] / tests[x, "hybrid-4096"] for x in ("pairs", "words")]
    yield "not refuted by the rule, F = 1,024 is", [100 * (ratio - 1) for ratio in ratios]
    yield "`nn.AdaptiveLogSoftmaxWithLoss` |", adaptive
    hybrid += [above[text, "hybrid-1024"] for text in ("words", "pairs")]
    yield "`TreeLinear(..., frequent=4096)` |", [*hybrid, below]
    yield "`TreeLinear(...)`, a tree alone |", [above["words", "tree"]]


def speed() -> Claims:
    """Times and memory of output layers, of paths and of a step of the VAE."""
    step_times = select("language_model/step_times_h200.csv", text="docs")["ms"]
    yield "with the GPU to itself (", step_times
    yield "A whole training step of a Transformer with 131,072 words took", step_times
    path = "speed/output_layer_frequent_h200.csv"
    layers = select(path, targets="zipf", commit="3f28ec5").set_index("layer")
    ms, gb = layers["forward + backward ms"], layers["memory GB"]
    exact, liger, cut = "linear + cross_entropy", "liger", "cut-cross-entropy"
    adaptive, tree = "adaptive softmax", "tree sigmoid"
    small, large = (f"hybrid, F = {F}" for F in (1024, 4096))
    times = [ms[exact] / ms[layer] for layer in (large, small, adaptive)]
    yield "At 131,072 classes forward and backward are", times
    yield "not refuted at commit 3f28ec5,", [times[1], *gb[[liger, cut, exact]]]
    yield "is a small part of a step | `nn.Linear` and `cross_entropy` | |", [ms[exact], gb[exact]]
    yield "the same function |", [ms[cut], gb[cut], ms[liger], gb[liger]]
    yield "2.6 % lower (131,072 words, two) |", [ms[adaptive], gb[adaptive]]
    yield "and 3.1 % lower (131,072 words) |", [ms[large], ms[small], gb[large]]
    uniform = select(path, targets="uniform", commit="b89688e+", layer=tree)[ms.name]
    yield "7.7 % higher (32,768 words) |", [*uniform, ms[tree], gb[tree]]
    layers = select(path, targets="zipf", commit="b6f92d5+").set_index("layer")
    sample = layers["sample ms, batch 1"][[exact, tree, large, small]]
    megabytes = layers["MB a sample, batch 1"][[exact, tree, "hybrid, F = 64", large]]
    yield "To draw one class takes", [*sample, *megabytes]
    for head in TREES:
        yield row(head), select("speed/paths_cpu.csv", K=2**20, head=head)["ratio"]
    text = " ".join((PAPER / "speed/vae_speed_h200.txt").read_text().split())
    steps = []
    for how in ("replayed", "eager"):
        times = re.findall(rf"{how}, FisherMonitor every step: ([\d.]+) ms", text)
        steps.append(np.median(list(map(float, times))))
    yield "captured and replayed as CUDA graphs:", steps


STUDIES = (
    *(likelihoods, longer_runs, other_optimizers, estimators, draws),
    *(factors, factor_tables, latents, rotation, noise_and_coupling, architectures, elsewhere),
    *(graphs, atari, minatar, digits, outputs, quality, speed),
)


def main() -> int:
    """Print all claims."""
    failed = 0
    for words, numbers in chain.from_iterable(study() for study in STUDIES):
        computed = [float(number) for number in numbers]
        places = list(statements(words, len(computed)))
        wrong = [place for place in places if not place.holds(computed)]
        failed += not places or len(wrong) > 0
        text = ", ".join(f"{number:.4g}" for number in computed)
        print(f"{words} {text}{'' if places else '  (NO PAGE SAYS SO)'}")
        for place in wrong:
            stated = ", ".join(number[0] for number in place.numbers)
            print(f"    {place.page.relative_to(PAPER.parent)} DIFFERS: {stated}")
            if "--renew" in sys.argv and place.is_row:
                renew(place, computed)
    print(f"{failed} claims differ from the rows", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
