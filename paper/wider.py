"""Claims of the newer studies: less noise, architectures, other data, and PPO with more seeds.

    python paper/wider.py  # prints their tables, and renews the rows that pages have

Factors are softmax's steps divided by a head's to the same validation loss, with 95 % intervals
over seeds. A crossing is the last step at which the mean curves of softmax and a head change
places. PPO is compared by the interquartile mean of returns, relative to softmax's mean in the same
game.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import mechanism_claims
import numpy as np
import output_layers
from measures import (
    BOTH,
    INTERVAL,
    PAPER,
    TREES,
    Claim,
    Numbers,
    Pair,
    Row,
    Runs,
    by_seed,
    curve,
    factor,
    log_factors,
    mean,
    printed,
    select,
    text_of,
    values,
)
from scipy import stats

SOFTMAX = "softmax"

UNTIL = (2500, 5000, 10000)  # steps: the losses of without_noise.yaml are softmax's after these
GAMES = ("Asterix", "Breakout", "Seaquest", "SpaceInvaders")
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
    ("frames", "frames of Breakout, 64 x 64", "32", "32", 10000),
)
Returns = dict[str, list[float]]  # by game


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


def interquartile_mean(*games: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half of all returns together."""
    together: np.ndarray = stats.trim_mean(np.concatenate(games, axis), 0.25, axis)
    return together


def iqm_interval(returns: Returns) -> list[float]:
    """Interquartile mean and 95 % bootstrap interval; seeds are drawn anew within each game."""
    return _bootstrap(list(returns.values()), interquartile_mean)


def iqm_difference(first: Returns, second: Returns) -> list[float]:
    """The interquartile mean of the first minus that of the second, with its interval."""
    games = len(first)

    def statistic(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        means = (samples[:games], samples[games:])
        ours, theirs = (interquartile_mean(*part, axis=axis) for part in means)
        difference: np.ndarray = ours - theirs
        return difference

    return _bootstrap([*first.values(), *second.values()], statistic)


def _bootstrap(samples: list[Numbers], statistic: Callable[..., np.ndarray]) -> Numbers:
    """A statistic and its 95 % interval by the percentiles of 5,000 samples."""
    arrays = [np.array(sample) for sample in samples]
    noise = np.random.default_rng(1)
    drawn = stats.bootstrap(arrays, statistic, method="percentile", n_resamples=5000, rng=noise)
    low, high = drawn.confidence_interval
    return [float(statistic(*arrays)), float(low), float(high)]


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
    """The table of data, architectures and estimators in README.md: sigmoid against softmax."""
    runs: dict[tuple[str, int], Pair] = {}
    gumbel = "straight-through Gumbel"
    for size, K in (("(10, 8)", "8"), ("(20, 16)", "16"), ("(20, 32)", "32")):
        pair = [mechanism_claims.mechanism(K, head) for head in BOTH]
        runs[f"MNIST | convolutional, {size} | {gumbel}", 60000] = pair
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
        where = f"encoder={encoder} decoder={decoder}"
        pair = [by_seed("architecture/curves.csv", f"{where} head={head}") for head in BOTH]
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
            yield Claim("README.md", sentence, [*numbers, count])


def without_noise() -> Iterator[Claim]:
    """Factors of three heads over softmax in each setting."""
    settings = (("gumbel", "1"), ("gumbel", "8"), ("gumbel", "64"), ("score-function", "64"))
    heads = ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")
    for (estimator, draws), head in product(settings, heads):
        setting = f"estimator={estimator} draws={draws}"
        pair = [by_seed("without_noise/curves.csv", f"{setting} head={x}") for x in (SOFTMAX, head)]
        words = f"{estimator}, {draws} | {head}"
        yield from factor_row("mechanism/README.md", words, pair, UNTIL)


def architecture() -> Iterator[Claim]:
    """Factors of sigmoid over softmax in each model."""
    for encoder, decoder in MODELS:
        model = f"encoder={encoder} decoder={decoder}"
        pair = [by_seed("architecture/curves.csv", f"{model} head={head}") for head in BOTH]
        words = f"{encoder} | {decoder} | {rates_of(pair)}"
        yield from factor_row("mechanism/README.md", words, pair)


def other_runs(study: str, K: str, estimator: str, head: str) -> Runs:
    """Curves of a study of other data by seed; none before its runs."""
    if not (PAPER / study / "curves.csv").is_file():
        return {}
    where = f"num_categories={K} estimator={estimator} head={head}"
    return by_seed(f"{study}/curves.csv", where)


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


def breakout_and_seaquest() -> Iterator[Claim]:
    """Returns of PPO after 8 million steps."""
    for game, rates, text in (
        (
            "Breakout",
            ("0.00025", "0.00025"),
            "softmax returns {} and natural {} (n = {}, {}; p = {})",
        ),
        (
            "Breakout",
            ("0.002", "0.001"),
            "softmax at 0.002 returns {}, natural at 0.001 {} (n = {}, {}",
        ),
        (
            "Seaquest",
            ("0.00025", "0.00025"),
            "Seaquest: softmax {}, natural {} (n = {}, {}; p = {})",
        ),
    ):
        returns = []
        for head, rate in zip(("softmax", "natural"), rates, strict=True):
            options = f"stage=final total_steps=8000000 env={game} head={head} learning_rate={rate}"
            returns.append(values(by_seed("games/runs.csv", options), "test/return"))
        p = stats.ttest_ind(*returns, equal_var=False).pvalue
        numbers = [*map(mean, returns), *map(len, returns), p]
        yield Claim("games/README.md", text, numbers[: text.count("{}")])
    reported = {}
    for row in printed()["rl_return"]:
        numbers = row["test/return"]
        reported[row["env"], row["head"]] = (numbers["mean"], numbers["std"], 10)
    p_values = []
    for game in ("Breakout", "Seaquest"):
        samples = reported[game, "softmax"] + reported[game, "natural"]
        p_values.append(stats.ttest_ind_from_stats(*samples, equal_var=False).pvalue)
    text = "the paper's own differences have p = {} (Breakout) and {} (Seaquest) if its n is 10"
    yield Claim("games/README.md", text, p_values)
    yield Claim("README.md", text, p_values)
    variance = sum(reported["Breakout", head][1] ** 2 for head in ("softmax", "natural"))
    needed = variance * (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 / 8**2
    yield Claim("games/README.md", "of 8 points needs about {} seeds a head", [round(needed, -1)])


def minatar_returns(head: str, new: bool) -> Returns:
    """Returns of a head at its rates by game, relative to softmax's mean; new seeds or all."""
    relative = {}
    for game in GAMES:
        returns = {name: _chosen(name, game, new) for name in ("softmax", head)}
        relative[game] = [value / mean(returns["softmax"]) for value in returns[head]]
    return relative


def _chosen(head: str, game: str, new: bool) -> list[float]:
    """Returns at the rate with the highest mean over seeds 1 to 3, the only one of sparsemax."""
    rows = select("minatar/runs.csv", head=head, env=f"MinAtar/{game}-v0")
    by_rate: dict[str, list[Row]] = {}
    for row in rows:
        by_rate.setdefault(row["learning_rate"], []).append(row)

    def first_seeds(rate: str) -> float:
        tried = [row for row in by_rate[rate] if int(row["seed"]) <= 3]
        return float(np.mean([float(row["test/return"]) for row in tried])) if tried else 0.0

    best = max(by_rate, key=first_seeds, default="")
    chosen = [row for row in by_rate.get(best, []) if not new or int(row["seed"]) > 3]
    return [float(row["test/return"]) for row in chosen]


def minatar() -> Iterator[Claim]:
    """Interquartile means of all heads, on seeds that chose no rate and on all."""
    for new, head in product((True, False), (SOFTMAX, *TREES, "sparsemax")):
        ours = minatar_returns(head, new)
        counts = [len(returns) for returns in ours.values()]
        if min(counts) < 2:
            continue
        words = (
            f"| {head} | {'seeds from 4 on' if new else 'all seeds'} | {{}} to {{}} | {INTERVAL} |"
        )
        numbers = [min(counts), max(counts), *iqm_interval(ours)]
        if head != SOFTMAX:
            words += f" {INTERVAL} |"
            numbers += iqm_difference(ours, minatar_returns(SOFTMAX, new))
        yield Claim("games/README.md", words, numbers)


def table_rows() -> Iterator[Claim]:
    """Rows of all tables, as far as their runs have ended."""
    for table in (without_noise, architecture, other_data, latents, output_layers.outputs, minatar):
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
    else:
        headers = [i for i, line in enumerate(lines) if line.startswith("|---")]
        before = lines.index(previous) if previous in lines else headers[-1]
        lines.insert(before + 1, row)
    path.write_text("\n".join(lines) + "\n")
    return row


if __name__ == "__main__":
    row = ""
    for claim in table_rows():
        row = write(claim, row)
