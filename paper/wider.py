"""Claims of the newer studies, less noise, architectures, other data, and rows of all tables.

    python paper/wider.py  # prints their tables, and renews the rows that pages have

Factors are softmax's steps divided by a head's to the same validation loss, with 95 % intervals
over seeds. A crossing is the last step at which the mean curves of softmax and a head change
places.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import games_claims
import mechanism_claims
import numpy as np
import output_layers
from measures import (
    BOTH,
    INTERVAL,
    PAPER,
    SIZES,
    TREES,
    Claim,
    Numbers,
    Pair,
    Runs,
    by_seed,
    curve,
    differences,
    factor,
    log_factors,
    mean,
    select,
    t_interval,
    t_test,
    text_of,
    values,
)
from scipy import stats

SOFTMAX = "softmax"

SETTINGS = (("gumbel", "1"), ("gumbel", "8"), ("gumbel", "64"), ("score-function", "64"))
UNTIL = (2500, 5000, 10000)  # steps: the losses of without_noise.yaml are softmax's after these
LATENTS_PAGE = "../docs/discrete_latents.md"  # has some rows of the table of README.md
MODELS = (  # encoder, decoder
    *(("dense", "dense"), ("conv", "conv"), ("dense", "conv"), ("conv", "dense")),
    ("conv-plain", "conv-plain"),
)
OTHER_ESTIMATORS = {  # of the studies of other data
    "gumbel": "straight-through Gumbel",
    "straight-through": "straight-through, 1 % unimix",
}
OTHER_DATA = (  # study, words, N, K, steps
    ("glyphs", "letters of free fonts", "20", "16", 20000),
    ("glyphs", "letters of free fonts", "20", "32", 20000),
    ("frames", "frames of Breakout, 64 x 64, stopped early", "32", "32", 6250),
)


def crossing(pair: Pair) -> float:
    """The last step at which the mean curves change places, interpolated; NaN if they never do."""
    common = sorted(pair[0].keys() & pair[1].keys())
    steps = [curve(runs[seed])[0] for runs in pair for seed in common]
    length = min(len(log_steps) for log_steps in steps)
    means = [np.mean([curve(runs[seed])[1][:length] for seed in common], 0) for runs in pair]
    ahead = means[0] - means[1]  # above 0 where the second has the lower loss
    changes = np.flatnonzero(np.sign(ahead[:-1]) != np.sign(ahead[1:]))
    if not len(changes):
        return float("nan")
    before = changes[-1]
    share = ahead[before] / (ahead[before] - ahead[before + 1])
    log_step = steps[0][before] + share * (steps[0][before + 1] - steps[0][before])
    return float(np.exp(log_step))


# -- claims ----------------------------------------------------------------------------------------


def numbers_and_cells(pair: Pair, until: int) -> tuple[Numbers, str]:
    """The factor with its interval, or alone if there is one seed."""
    ratios = log_factors(pair, until)
    if len(ratios) == 1:
        return [float(np.exp(ratios[0]))], "{}"
    return factor(ratios), INTERVAL


def factor_row(page: str, words: str, pair: Pair, until: tuple[int, ...] = (10**9,)) -> list[Claim]:
    """A row of a table: seeds, the factor at each loss, and where the curves cross."""
    count = len(pair[0].keys() & pair[1].keys())
    if count == 0:
        return []
    numbers: Numbers = [count]
    cells = ["{}"]
    for steps in until:
        factors, cell = numbers_and_cells(pair, steps)
        numbers += factors
        cells.append(cell)
    where = crossing(pair)
    cells.append("{}" if np.isfinite(where) else "none")
    if np.isfinite(where):
        numbers.append(int(round(where, -2)))
    return [Claim(page, f"| {words} | {' | '.join(cells)} |", numbers)]


def latents() -> Iterator[Claim]:
    """The table of data, architectures and estimators: sigmoid against softmax."""
    runs: dict[tuple[str, int], Pair] = {}
    gumbel = "straight-through Gumbel"
    for size, K in (("(10, 8)", "8"), ("(20, 16)", "16"), ("(20, 32)", "32")):
        pair = [mechanism_claims.mechanism(K, head) for head in BOTH]
        for steps in (20000, 60000):
            runs[f"MNIST | convolutional, {size} | {gumbel}", steps] = pair
    for N, K in (("10", "8"), ("20", "32")):
        size = f"num_latents={N} num_categories={K} variant=binary"
        pair = [by_seed("vae/longest_curve.csv", f"{size} head={head}") for head in BOTH]
        runs[f"MNIST, binary | convolutional, ({N}, {K}) | {gumbel}", 60000] = pair
        pair = [mechanism_claims.probing(K, head, "draws=8") for head in BOTH]
        runs[f"MNIST | convolutional, ({N}, {K}) | {gumbel}, 8 draws", 60000] = pair
    settings = {
        gumbel: "estimator=gumbel draws=1",
        f"{gumbel}, 64 draws": "estimator=gumbel draws=64",
        "score function, 64 draws": "estimator=score-function draws=64",
    }
    for words, where in settings.items():
        pair = [by_seed("without_noise/curves.csv", f"{where} head={head}") for head in BOTH]
        runs[f"MNIST | convolutional, (10, 8) | {words}", 10000] = pair
    for encoder, decoder in MODELS:
        pair = crossed_runs(encoder, decoder)
        runs[f"MNIST | {encoder} encoder, {decoder} decoder, (10, 16) | {gumbel}", 20000] = pair
    for study, data, N, K, steps in OTHER_DATA:
        for estimator, words in OTHER_ESTIMATORS.items():
            pair = [other_runs(study, K, estimator, head) for head in BOTH]
            runs[f"{data} | convolutional, ({N}, {K}) | {words}", steps] = pair
    for (words, steps), compared in runs.items():
        count = len(compared[0].keys() & compared[1].keys())
        if count:
            numbers, cell = numbers_and_cells(compared, steps)
            sentence = f"| {words} | {steps:,} | {cell} | {{}} |"
            for page in ("README.md", LATENTS_PAGE):
                yield Claim(page, sentence, [*numbers, count])


def first_steps(runs: Runs, until: int) -> Runs:
    """Runs without the validations after a step."""

    def is_kept(column: str) -> bool:
        step = column.removeprefix("val/loss_")
        return not step.isdecimal() or int(step) <= until

    return {
        seed: {column: text for column, text in run.items() if is_kept(column)}
        for seed, run in runs.items()
    }


def factor_table() -> dict[str, list[Pair]]:
    """Softmax and sigmoid at K = 8, 16 and 32 (empty where not run), for the figure of factors."""
    none: Pair = ({}, {})
    table: dict[str, list[Pair]] = {}
    for estimator, draws in SETTINGS:
        where = f"estimator={estimator} draws={draws}"
        pair = [by_seed("without_noise/curves.csv", f"{where} head={head}") for head in BOTH]
        until = [first_steps(runs, UNTIL[-1]) for runs in pair]
        table[f"{estimator}, draws: {draws}"] = [until, none, none]
    for encoder, decoder in MODELS:
        table[f"{encoder} to {decoder}"] = [none, crossed_runs(encoder, decoder), none]
    for study, estimator in product(("glyphs", "frames"), OTHER_ESTIMATORS):
        pairs = [[other_runs(study, K, estimator, head) for head in BOTH] for K in SIZES]
        if any(pair[0] for pair in pairs):
            table[f"{study}, {estimator}"] = pairs
    return table


def without_noise() -> Iterator[Claim]:
    """Factors of three heads over softmax in each setting."""
    heads = ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")
    for (estimator, draws), head in product(SETTINGS, heads):
        setting = f"estimator={estimator} draws={draws}"
        pair = [by_seed("without_noise/curves.csv", f"{setting} head={x}") for x in (SOFTMAX, head)]
        words = f"{estimator}, {draws} | {head}"
        yield from factor_row("mechanism/README.md", words, pair, UNTIL)


def noise_verdicts() -> Iterator[Claim]:
    """What less noise and no bias do to the factor of sigmoid, and to that of the coupling."""
    page = "mechanism/README.md"

    def ratios(estimator: str, draws: str, *heads: str, until: int = UNTIL[-1]) -> Numbers:
        setting = f"estimator={estimator} draws={draws}"
        pair = [by_seed("without_noise/curves.csv", f"{setting} head={head}") for head in heads]
        return log_factors(pair, until)

    gumbel_1, gumbel_64 = ratios("gumbel", "1", *BOTH), ratios("gumbel", "64", *BOTH)
    unbiased = ratios("score-function", "64", *BOTH)
    text = f"{INTERVAL} with 64 draws of Gumbel and {INTERVAL} with the score function"
    for place in (page, "README.md"):
        yield Claim(place, text, [*factor(gumbel_64), *factor(unbiased)])
    text = "times {} with 64 draws (p = {}) and times {} with the score function (p = {}"
    numbers: Numbers = []
    for log_ratios in (gumbel_64, unbiased):
        pairs = zip(log_ratios, gumbel_1, strict=False)  # seeds 1 to 3 of 5
        changes = [less_noise - one_draw for less_noise, one_draw in pairs]
        numbers += [factor(changes)[0], t_test(changes)]
    yield Claim(page, text, numbers)
    one_draw, eight_draws = (ratios("gumbel", draws, *BOTH, until=20000) for draws in ("1", "8"))
    changes = [eight - one for eight, one in zip(eight_draws, one_draw, strict=True)]
    text = f"{INTERVAL} with one draw and {INTERVAL} with eight (p = {{}}"
    yield Claim(page, text, [*factor(one_draw), *factor(eight_draws), t_test(changes)])
    text = f"C = 1 needs {INTERVAL} times the steps of C = 0 with one draw of Gumbel, {INTERVAL}"
    text += f" with eight, {INTERVAL} with 64 and {INTERVAL} with the score function"
    numbers = []
    for setting in SETTINGS:
        numbers += factor(ratios(*setting, "sigmoid-coupled-1", "sigmoid"))
    yield Claim(page, text, numbers)


def architecture() -> Iterator[Claim]:
    """Factors of sigmoid over softmax in each model."""
    for encoder, decoder in MODELS:
        pair = crossed_runs(encoder, decoder)
        words = f"{encoder} | {decoder} | {rates_of(pair)}"
        yield from factor_row("mechanism/README.md", words, pair)


def crossed_runs(encoder: str, decoder: str) -> Pair:
    """Curves of softmax and sigmoid with an encoder and a decoder."""
    model = f"encoder={encoder} decoder={decoder}"
    return [by_seed("architecture/curves.csv", f"{model} head={head}") for head in BOTH]


def architecture_verdicts() -> Iterator[Claim]:
    """What a convolutional decoder, a convolutional encoder and batch norm do to the factor."""
    part = f"{INTERVAL} (p = {{}})"
    text = f"A convolutional decoder multiplies the factor by {part} beside a dense encoder and by"
    text += f" {part} beside a convolutional one; a convolutional encoder by {part} beside a dense"
    text += f" decoder and by {part} beside a convolutional one; batch norm by {part}"
    numbers: Numbers = []
    for larger, smaller in (
        (("dense", "conv"), ("dense", "dense")),
        (("conv", "conv"), ("conv", "dense")),
        (("conv", "dense"), ("dense", "dense")),
        (("conv", "conv"), ("dense", "conv")),
        (("conv", "conv"), ("conv-plain", "conv-plain")),
    ):
        samples = [log_factors(crossed_runs(*model)) for model in (larger, smaller)]
        test = stats.ttest_ind(*samples, equal_var=False)
        bounds = test.confidence_interval()
        ratios = np.exp([mean(samples[0]) - mean(samples[1]), *bounds])
        numbers += [*ratios.tolist(), float(test.pvalue)]
    yield Claim("mechanism/README.md", text, numbers)


def estimators_on_letters() -> Iterator[Claim]:
    """How far straight-through with unimix ends behind Gumbel."""
    gaps = []
    for K, head in product(("16", "32"), BOTH):
        where = f"num_categories={K} head={head} stage=final"
        pair = [by_seed("glyphs/runs.csv", where, estimator=name) for name in OTHER_ESTIMATORS]
        gaps.append(mean(values(pair[0], "test/elbo")) - mean(values(pair[1], "test/elbo")))
    for page in ("glyphs/README.md", LATENTS_PAGE):
        yield Claim(page, "{} to {} nats of ELBO below Gumbel", [min(gaps), max(gaps)])


def frames_at_the_stop() -> Iterator[Claim]:
    """Losses of softmax minus those of sigmoid, and their KL, where the runs of frames stopped."""
    pair = [other_runs("frames", "32", "gumbel", head) for head in BOTH]
    text = f"softmax's validation loss is {INTERVAL} nats above sigmoid's"
    yield Claim("frames/README.md", text, t_interval(differences(pair, "val/loss_6250")))
    text = "The KL is {} nats with softmax and {} with sigmoid"
    numbers = [mean(values(runs, "val/kl_6250")) for runs in pair]
    yield Claim("frames/README.md", text, numbers)
    losses = [curve(run)[1][-9:] for runs in pair for run in runs.values()]  # the last 2,000 steps
    largest = max(float(np.abs(np.diff(run)).max()) for run in losses)
    mean_losses = [np.mean([curve(run)[1] for run in runs.values()], 0) for runs in pair]
    ahead = np.sign(mean_losses[0] - mean_losses[1])
    text = "apart by up to {} nats, and the mean curves change places {} times"
    yield Claim("frames/README.md", text, [largest, int(np.sum(ahead[1:] != ahead[:-1]))])
    behind = []
    for head in BOTH:
        search = [
            select("frames/runs.csv", f"stage=search head={head} learning_rate={rate}")
            for rate in ("0.001", "0.003")
        ]
        lower, best = (float(rows[0]["val/loss"]) for rows in search)
        behind.append(lower - best)
    text = "0.001 is {} (softmax) and {} (sigmoid) nats behind"
    yield Claim("frames/README.md", text, behind)


def other_runs(study: str, K: str, estimator: str, head: str) -> Runs:
    """Curves of a study of other data by seed, until the last step that all of its runs have."""
    (until,) = {steps for name, *_, steps in OTHER_DATA if name == study}
    where = f"num_categories={K} estimator={estimator} head={head}"
    return first_steps(by_seed(f"{study}/curves.csv", where), until)


def other_data() -> Iterator[Claim]:
    """Factors of trees over softmax on other data, with each estimator."""
    for (study, _, N, K, _), estimator, head in product(OTHER_DATA, OTHER_ESTIMATORS, TREES):
        pair = [other_runs(study, K, estimator, name) for name in (SOFTMAX, head)]
        words = f"({N}, {K}) | {estimator} | {head} | {rates_of(pair)}"
        yield from factor_row(f"{study}/README.md", words, pair)


def rates_of(pair: Pair) -> str:
    """The learning rates of two heads."""
    rates = [sorted({run["learning_rate"] for run in runs.values()}) for runs in pair]
    return ", ".join("/".join(names) for names in rates)


def table_rows() -> Iterator[Claim]:
    """Rows of all tables, as far as their runs have ended."""
    tables = (without_noise, architecture, other_data, latents)
    for table in (*tables, output_layers.outputs, games_claims.minatar):
        yield from table()


def claims() -> Iterator[Claim]:
    """The rows that pages have already; pages of runs that go on may lack some."""
    for claim in table_rows():
        words = claim.sentence.partition("{}")[0]
        if words in text_of(claim.page):
            yield claim


def write(claim: Claim, previous: str) -> str:
    """Print a row and put it into its page; return it.

    It takes the place of the row that has the same words. A new row follows the previous one, or is
    the first one of the last table of its page.
    """
    numbers = [f"{n:,}" if isinstance(n, int) else f"{n:.2f}" for n in claim.computed]
    row = claim.sentence.format(*numbers).replace("-0.00", "0.00")
    print(row)
    path = PAPER / claim.page
    lines = path.read_text().splitlines()
    words = claim.sentence.partition("{}")[0]
    places = [i for i, line in enumerate(lines) if line.startswith(words)]
    if places:
        lines[places[0]] = row
    elif claim.page != LATENTS_PAGE:
        headers = [i for i, line in enumerate(lines) if line.startswith("|---")]
        before = lines.index(previous) if previous in lines else headers[-1]
        lines.insert(before + 1, row)
    path.write_text("\n".join(lines) + "\n")
    return row


if __name__ == "__main__":
    row = ""
    for claim in table_rows():
        row = write(claim, row)
