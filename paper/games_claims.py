"""Claims about PPO: returns of Atari games, and interquartile means of MinAtar's.

Returns of MinAtar are compared by their interquartile mean, relative to softmax's mean in the same
game.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from measures import INTERVAL, TREES, Claim, Numbers, Row, by_seed, mean, printed, select, values
from scipy import stats

GAMES = ("Asterix", "Breakout", "Seaquest", "SpaceInvaders")
SOFTMAX = "softmax"
Returns = dict[str, list[float]]  # by game


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


def minatar_counts() -> Iterator[Claim]:
    """Seeds a game of the heads that the paper compares."""
    returns = [minatar_returns(head, new=False) for head in (SOFTMAX, *TREES)]
    counts = [len(seeds) for by_game in returns for seeds in by_game.values()]
    text = "nor on four games of MinAtar (n = {} to {})"
    yield Claim("README.md", text, [min(counts), max(counts)])


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
