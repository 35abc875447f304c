"""Tables of the newer studies: less noise, architectures, other data, and PPO with more seeds.

    python paper/wider.py

Factors are softmax's steps divided by a head's to the same validation loss, with 95 % intervals
over seeds. A crossing is the last step at which the mean curves of softmax and a head change
places. PPO is compared by the interquartile mean of returns, relative to softmax's mean in the same
game.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from measures import PAPER, Row, Runs, by_seed, curve, factor, log_factors, select
from scipy import stats

UNTIL = (2500, 5000, 10000)  # steps: the losses of without_noise.yaml are softmax's after these
GAMES = ("Asterix", "Breakout", "Seaquest", "SpaceInvaders")
Returns = dict[str, list[float]]  # by game


def crossing(slow: Runs, fast: Runs) -> float:
    """The last step at which the mean curves change places, interpolated; NaN if they never do."""
    common = sorted(slow.keys() & fast.keys())
    steps = [curve(runs[seed], 10**9)[0] for runs in (slow, fast) for seed in common]
    length = min(len(log_steps) for log_steps in steps)
    means = [
        np.mean([curve(runs[seed], 10**9)[1][:length] for seed in common], 0)
        for runs in (slow, fast)
    ]
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
        return ours - theirs

    return _bootstrap([*first.values(), *second.values()], statistic)


def _bootstrap(samples: list[list[float]], statistic) -> list[float]:  # type: ignore[no-untyped-def]
    arrays = [np.array(sample) for sample in samples]
    noise = np.random.default_rng(1)
    drawn = stats.bootstrap(arrays, statistic, method="percentile", n_resamples=5000, rng=noise)
    low, high = drawn.confidence_interval
    return [float(statistic(*arrays)), float(low), float(high)]


# -- the tables ------------------------------------------------------------------------------------


def show_factors(title: str, slow: Runs, fast: Runs, until: tuple[int, ...] = (10**9,)) -> None:
    """A line: how many seeds, the factor at each loss, the crossing."""
    common = slow.keys() & fast.keys()
    if len(common) < 2:
        print(f"{title:54} n = {len(common)}")
        return
    cells = []
    for steps in until:
        middle, low, high = factor(log_factors((slow, fast), steps))
        cells.append(f"{middle:5.2f} [{low:.2f}, {high:.2f}]")
    where = crossing(slow, fast)
    print(f"{title:54} n = {len(common)}  {'  '.join(cells)}  crossing {where:.0f}")


def without_noise() -> None:
    """Factors of three heads over softmax in each setting."""
    path = "without_noise/curves.csv"
    settings = (("gumbel", "1"), ("gumbel", "8"), ("gumbel", "64"), ("score-function", "64"))
    for (estimator, draws), head in product(
        settings, ("sigmoid-coupled-1", "sigmoid", "sigmoid-opposed-0.5")
    ):
        slow, fast = (
            by_seed(path, estimator=estimator, draws=draws, head=name) for name in ("softmax", head)
        )
        show_factors(f"{estimator}, {draws} draws, {head}", slow, fast, UNTIL)


def architecture() -> None:
    """Factors of sigmoid over softmax in each model."""
    kinds = (("dense", "dense"), ("conv", "conv"), ("dense", "conv"), ("conv", "dense"))
    for encoder, decoder in (*kinds, ("conv-plain", "conv-plain")):
        slow, fast = (
            by_seed("architecture/curves.csv", encoder=encoder, decoder=decoder, head=head)
            for head in ("softmax", "sigmoid")
        )
        rates = ", ".join(_rate(runs) for runs in (slow, fast))
        show_factors(f"encoder {encoder}, decoder {decoder}, rates {rates}", slow, fast)


def glyphs() -> None:
    """Factors of trees over softmax at each size, with each estimator."""
    estimators = ("gumbel", "straight-through")
    for K, estimator, head in product(("16", "32"), estimators, ("sigmoid", "natural")):
        slow, fast = (
            by_seed("glyphs/curves.csv", num_categories=K, estimator=estimator, head=name)
            for name in ("softmax", head)
        )
        rates = ", ".join(_rate(runs) for runs in (slow, fast))
        show_factors(f"K = {K}, {estimator}, {head}, rates {rates}", slow, fast)


def _rate(runs: Runs) -> str:
    return "/".join(sorted({run["learning_rate"] for run in runs.values()})) or "none"


def minatar_returns(head: str, new: bool) -> Returns:
    """Returns of a head at its rates by game, relative to softmax's mean; new seeds or all."""
    relative = {}
    for game in GAMES:
        returns = {name: _chosen(name, game, new) for name in ("softmax", head)}
        relative[game] = [value / np.mean(returns["softmax"]) for value in returns[head]]
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


def minatar() -> None:
    """Interquartile means of all heads."""
    for new, head in product((True, False), ("softmax", "sigmoid", "natural", "sparsemax")):
        ours, softmax = minatar_returns(head, new), minatar_returns("softmax", new)
        counts = ", ".join(str(len(ours[game])) for game in GAMES)
        seeds = "new seeds" if new else "all seeds"
        if min(len(ours[game]) for game in GAMES) < 2:
            print(f"{head:10} {seeds}  n = {counts}")
            continue
        middle, low, high = iqm_interval(ours)
        gap, gap_low, gap_high = iqm_difference(ours, softmax)
        interval = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        behind = f"minus softmax {gap:.2f} [{gap_low:.2f}, {gap_high:.2f}]"
        print(f"{head:10} {seeds}  n = {counts}  {interval}  {behind}")


if __name__ == "__main__":
    for table in (without_noise, architecture, glyphs, minatar):
        print(f"\n{(table.__doc__ or '').strip()}")
        study = table.__name__
        if any((PAPER / study / name).is_file() for name in ("curves.csv", "runs.csv")):
            table()
