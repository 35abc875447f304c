"""Every number in the pages of this folder, computed again from the rows.

    python paper/verdicts.py  # sentence, stated, computed; exit code 1 where they differ

A claim is a page, a sentence of it with {} for each number, and these numbers, computed. What the
page states is read from the page. To add a claim, write the sentence and yield a Claim below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, product

import games_claims
import measures
import mechanism_claims
import numpy as np
import output_layers
import wider
from measures import (
    BOTH,
    INTERVAL,
    SIZES,
    TREES,
    Claim,
    Numbers,
    by_seed,
    differences,
    mean,
    select,
    values,
    welch,
)

SMALL = (("10", "8"), ("20", "16"))  # N, K


def vae_claims() -> Iterator[Claim]:
    """Likelihoods in 18 columns, beside those of the paper."""
    columns = [
        (N, K, data) for data, N, K in product(("gray", "binary"), ("10", "20", "30"), SIZES)
    ]
    options = ("head", "num_latents", "num_categories", "variant")
    printed = {
        tuple(str(row[name]) for name in options): row["test/nll"]["mean"]
        for row in measures.printed()["vae_nll_adam"]
    }
    ours, theirs = {}, {}
    for head in ("softmax", *TREES):
        ours[head] = np.array(
            [mean(values(measures.vae(head, *column), "test/nll")) for column in columns]
        )
        theirs[head] = np.array([printed[head, *column] for column in columns])
    for words, table in (("ours", ours), ("the paper", theirs)):
        gaps = table["softmax"] - np.minimum(table["sigmoid"], table["natural"])
        blanks = " | ".join(["{}"] * 9)
        yield Claim("vae/README.md", f"| gray, {words} | {blanks} |", list(gaps[:9]))
        yield Claim("vae/README.md", f"| binary, {words} | {blanks} |", list(gaps[9:]))
    gaps = ours["softmax"] - np.minimum(ours["sigmoid"], ours["natural"])
    lower = sum(np.maximum(ours["sigmoid"], ours["natural"]) < ours["softmax"])
    pooled = [measures.t_test(list(ours["softmax"] - ours[head])) for head in TREES]
    numbers = [lower, len(columns), min(gaps), max(gaps), *pooled]
    text = "lower mean NLL than softmax in {} of {} columns, the better one by {} to {} nats"
    text += " (t-test over columns: p = {} for sigmoid, {} for natural"
    yield Claim("vae/README.md", text, numbers)
    yield Claim("README.md", text, numbers)
    gains = ours["softmax"] - ours["sigmoid"]
    text = "lowers the test NLL on MNIST by {} to {} nats in {} of {} settings"
    yield Claim("../README.md", text, [min(gains), max(gains), sum(gains > 0), len(columns)])
    best = 0
    for column, nll in zip(columns, ours["softmax"], strict=True):
        tried = [
            measures.vae("softmax", *column, f"learning_rate={rate}")
            for rate in (0.0005, 0.002, 0.003)
        ]
        best += all(mean(values(runs, "test/nll")) > nll for runs in tried if runs)
    text = "0.001 is softmax's best rate of those run to the end in {} of {} columns"
    yield Claim("vae/README.md", text, [best, len(columns)])
    ahead = ours["natural"] - ours["sigmoid"]
    numbers = [sum(ahead > 0), ahead.mean(), measures.t_test(list(ahead))]
    text = (
        "sigmoid's mean NLL is below natural's in {} of 18 columns, by {} nats on average (p = {})"
    )
    yield Claim("vae/README.md", text, numbers)
    yield Claim("README.md", text, numbers)
    ahead = theirs["natural"] - theirs["sigmoid"]
    text = "in the paper's own table natural is ahead in {} columns, sigmoid in {}"
    yield Claim("README.md", text, [sum(ahead < 0), sum(ahead > 0)])


def longer_vae_claims() -> Iterator[Claim]:
    """192,000 steps: (10, 8) and (20, 32), gray and binary."""
    columns = [(N, K, data) for N, K in (("10", "8"), ("20", "32")) for data in ("gray", "binary")]
    for steps in (60000, 96000, 120000, 192000):
        gaps, ratios = [], []
        for N, K, data in columns:
            size = f"num_latents={N} num_categories={K} variant={data}"
            pair = [by_seed("vae/longest_curve.csv", f"{size} head={head}") for head in BOTH]
            gaps += differences(pair, f"val/loss_{steps}")
            ratios += measures.log_factors(pair, until=steps)
        numbers = [*measures.t_interval(gaps), *measures.factor(ratios)]
        yield Claim("vae/README.md", f"| {steps:,} | {INTERVAL} | {INTERVAL} |", numbers)
    text = f"after 192,000 steps softmax is {INTERVAL} nats of validation loss behind"
    yield Claim("README.md", text, measures.t_interval(gaps))
    numbers = []
    for column in columns:
        pair = [measures.vae(head, *column, "max_steps=192000") for head in BOTH]
        numbers += welch(pair, "test/nll")
    yield Claim("vae/README.md", f"| 192,000 steps | {' | '.join([INTERVAL] * 4)} |", numbers)


def other_vae_claims() -> Iterator[Claim]:
    """Plain SGD, the score function, high rates."""
    sgd = "optimizer=sgd gradient_clip=0 learning_rate=0.001|0.003|0.01|0.03"
    numbers = []
    for size, data in product(SMALL, ("gray", "binary")):
        pair = [measures.vae(head, *size, data, sgd) for head in BOTH]
        numbers += welch(pair, "test/nll")
    yield Claim("vae/README.md", f"| plain SGD | {' | '.join([INTERVAL] * 4)} |", numbers)
    below = 0
    for size, data in product(SMALL, ("gray", "binary")):
        trees = [measures.vae(head, *size, data, sgd) for head in ("natural", "sigmoid")]
        below += welch(trees, "test/nll")[1] > 0
    yield Claim("vae/README.md", "is significantly below natural in {} of them", [below])
    yield Claim("README.md", "sigmoid is significantly below natural in {} of 4 columns", [below])
    losses = []
    for head, size, data in product(("softmax", *TREES), SMALL, ("gray", "binary")):
        adam = values(measures.vae(head, *size, data), "test/nll")
        losses.append(mean(values(measures.vae(head, *size, data, sgd), "test/nll")) - mean(adam))
    text = "softmax, sigmoid and natural end {} to {} nats above Adam at K < 32"
    yield Claim("vae/README.md", text, [min(losses), max(losses)])
    yield Claim("README.md", text, [min(losses), max(losses)])
    failed = []
    for head in ("softmax", "natural", "sigmoid"):
        columns = [
            measures.vae(head, N, "32", data, sgd)
            for N, data in product(("20", "30"), ("gray", "binary"))
        ]
        failed.append(sum(loss > 150 for runs in columns for loss in values(runs, "test/nll")))
    text = "{} of 12 softmax runs do not learn (NLL above 150), {} of natural, {} of sigmoid"
    yield Claim("vae/README.md", text, failed)

    for N, rate, words in ((10, 0.0002, "(10, 8)"), (20, 0.0005, "(20, 16)")):
        where = f"model=mlp-vae stage=final num_latents={N} learning_rate={rate}"
        runs = {
            head: by_seed("vae/runs.csv", f"{where} head={head}") for head in ("softmax", *TREES)
        }
        text = (
            f"At {words}, rate {rate}, sigmoid's ELBO is {INTERVAL} above softmax's and {INTERVAL}"
        )
        numbers = [
            bound
            for head in ("softmax", "natural")
            for bound in welch((runs["sigmoid"], runs[head]), "test/elbo")
        ]
        yield Claim("vae/README.md", f"{text} above natural's", numbers)

    names = ("num_latents", "num_categories", "variant", "head", "seed")
    nll: dict[tuple[str, ...], dict[str, float]] = {}
    for row in select("vae/runs.csv", stage="final"):
        if "vae_rates" in row["plans"]:
            cell = nll.setdefault(tuple(row[name] for name in names), {})
            cell[row["learning_rate"]] = float(row["test/nll"])
    cells = [cell for cell in nll.values() if "0.003" in cell]
    worse = sum(cell["0.003"] == max(cell.values()) for cell in cells)
    yield Claim("vae/README.md", "0.003 is the worst rate in {} of {} cells", [worse, len(cells)])


def graph_claims() -> Iterator[Claim]:
    """Energy scores at the rates with the lowest mean validation loss over three seeds."""
    heads = ("softmax 0.0", "sigmoid 0.0", "natural 0.0", "natural 0.005")
    below, above = dict.fromkeys(heads, 0), dict.fromkeys(heads, 0)
    closer, farther = 0, 0
    for theta in ("0.1", "0.25", "0.5", "0.75", "0.9"):
        runs = {}
        for name in heads:
            head, tail = name.split()
            where = f"plans=gsl theta={theta} head={head} head_options.tail={tail}"
            losses: dict[tuple[str, str], Numbers] = {}
            for row in select("graphs/runs.csv", f"{where} stage=search"):
                setting = row["learning_rate"], row["psi_learning_rate"]
                losses.setdefault(setting, []).append(float(row["val/loss"]))
            rate, psi_rate = min(losses, key=lambda rates: mean(losses[rates]))
            rates_chosen = f"learning_rate={rate} psi_learning_rate={psi_rate}"
            runs[name] = by_seed("graphs/runs.csv", f"{where} stage=final {rates_chosen}")
            _, low, high = welch((runs[name], runs["softmax 0.0"]), "test/energy_score_2x")
            below[name] += high < 0
            above[name] += low > 0
        _, low, high = welch((runs["natural 0.0"], runs["softmax 0.0"]), "test/theta_mae")
        closer += high < 0
        farther += low > 0
        scores = [mean(values(runs[name], "test/energy_score_2x")) for name in heads]
        yield Claim("graphs/README.md", f"| {theta} | {{}} | {{}} | {{}} | {{}} |", scores)
    text = "natural with tail 0.005 is significantly below softmax on {} of 5 data sets, natural"
    text += " without a tail on {} and above on {}, sigmoid on {}"
    numbers = [
        below["natural 0.005"],
        below["natural 0.0"],
        above["natural 0.0"],
        below["sigmoid 0.0"],
    ]
    yield Claim("graphs/README.md", text, numbers)
    yield Claim("README.md", text, numbers)
    text = "natural's error in theta is significantly below softmax's on {} of 5, above on {}"
    yield Claim("graphs/README.md", text, [closer, farther])
    yield Claim("README.md", text, [closer, farther])
    text = "Its energy score is below softmax's on {} of 5 data sets"
    yield Claim("../README.md", text, [below["natural 0.005"]])


def estimator_claims() -> Iterator[Claim]:
    """The small VAE: sigmoid's lead over softmax, each at the better one of its rates."""
    for estimator in ("exact", "score-function", "reinmax", "gumbel", "straight-through"):
        best = []
        for head in ("sigmoid", "softmax"):
            where = f"stage=final estimator={estimator} head={head}"
            tried = [
                by_seed("estimators/runs.csv", where, learning_rate=rate)
                for rate in ("0.0003", "0.001", "0.003")
            ]
            best.append(min(filter(None, tried), key=lambda runs: mean(values(runs, "val/loss"))))
        lead = welch(best, "test/elbo")
        numbers = [len(best[0]), *lead, *welch(best[::-1], "test/nll")]
        yield Claim(
            "estimators/README.md", f"| {estimator} | {{}} | {INTERVAL} | {INTERVAL} |", numbers
        )
        if estimator == "gumbel":
            p_values = [measures.t_test(differences(best, "test/elbo"))]
            p_values.append(5 * measures.p_value(best, "test/elbo"))
            text = "in pairs of a seed its lead has p = {}, and by Holm's method over the five"
            yield Claim("estimators/README.md", f"{text} estimators Welch's p is {{}}", p_values)
        if estimator == "reinmax":
            yield Claim(
                "README.md", f"ReinMax, in a small VAE alone: {INTERVAL} nats of ELBO", lead
            )


def draws_claims() -> Iterator[Claim]:
    """Several draws for each image, and how evenly categories are used."""
    page = "../docs/discrete_latents.md"
    nll, perplexity = [], []
    for head in BOTH:
        for draws in (1, 8):
            where = f"estimator=gumbel max_steps=20000 stage=final draws={draws} head={head}"
            runs = by_seed("without_noise/runs.csv", where)
            nll.append(mean(values(runs, "test/nll")))
            perplexity.append(mean(values(runs, "test/perplexity")))
    text = "test NLL {} becomes {} with softmax, {} becomes {} with sigmoid"
    yield Claim(page, text, nll)
    text = "the test perplexity is {} of 8 with softmax and {} with sigmoid"
    yield Claim(page, text, perplexity[::2])


def label_claims() -> Iterator[Claim]:
    """Digits, words of a language model, and the time of a tree over all words."""
    page, path = "language_model/README.md", "language_model/runs.csv"
    rates = {"sparsemax": "3e-05", "natural": "0.0001", "tree, cooccurrence, natural": "0.004"}
    for output in sorted({row["output"] for row in select(path, plans="classify")}):
        rate = rates.get(output, "0.001")
        runs = by_seed(path, f"plans=classify learning_rate={rate}", output=output)
        numbers = [mean(values(runs, metric)) for metric in ("test/nll", "test/accuracy")]
        yield Claim(page, f"| {output} | {rate} | {{}} | {{}} |", numbers)
    for output in sorted({row["output"] for row in select(path, plans="language_model")}):
        rate = rates.get(output, "0.008")
        runs = by_seed(
            path, f"plans=language_model learning_rate={rate} max_steps=1000", output=output
        )
        numbers = [mean(values(runs, metric)) for metric in ("val/perplexity", "test/perplexity")]
        yield Claim(page, f"| {output} | {rate} | {{}} | {{}} |", numbers)
    layers = select("speed/output_layer_h200.csv", "K=131072 commit=f57b353")
    times = {row["layer"]: float(row["forward + backward ms"]) for row in layers}
    numbers = [times["linear + cross_entropy"], times["tree natural"], times["tree sigmoid"]]
    text = "softmax takes {} ms forward and backward, a tree {} (natural) and {} (sigmoid)"
    yield Claim("speed/README.md", text, numbers)


CLAIMS = (
    *(mechanism_claims.factors, mechanism_claims.rotation, mechanism_claims.noise_and_coupling),
    *(vae_claims, longer_vae_claims, other_vae_claims),
    *(graph_claims, estimator_claims, draws_claims, label_claims),
    *(output_layers.quality, output_layers.speed, output_layers.speed_page),
    *(wider.noise_verdicts, wider.architecture_verdicts, wider.estimators_on_letters),
    wider.frames_at_the_stop,
    *(games_claims.breakout_and_seaquest, games_claims.minatar_counts, wider.claims),
)


def main() -> int:
    """Print all claims."""
    failed = 0
    print("| page | sentence | stated | computed |\n|---|---|---|---|")
    for claim in chain.from_iterable(study() for study in CLAIMS):
        numbers = measures.stated(claim)
        holds = len(numbers) == len(claim.computed) and all(
            map(measures.agrees, numbers, claim.computed)
        )
        failed += not holds
        cells = [claim.page, claim.sentence.replace("|", "/"), ", ".join(numbers)]
        cells.append(", ".join(f"{number:.4g}" for number in claim.computed))
        print(f"| {' | '.join(cells)} |{'' if holds else ' differs'}")
    print(f"{failed} claims differ from the rows", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
