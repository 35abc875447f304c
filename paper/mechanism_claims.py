"""Numbers of mechanism/README.md: what moves the factor of steps, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from measures import (
    BOTH,
    INTERVAL,
    SIZES,
    TREES,
    Claim,
    Numbers,
    Runs,
    by_seed,
    differences,
    factor,
    log_factors,
    mean,
    t_interval,
    t_test,
    values,
)


def mechanism(K: str, head: str, options: str = "") -> Runs:
    """Gray MNIST, 60,000 steps, Adam at rate 0.001, unless the options differ."""
    setting = "optimizer=adam learning_rate=0.001 variant=gray"
    runs = f"plans=mechanism stage=final max_steps=60000 num_categories={K} head={head}"
    return by_seed("mechanism/runs.csv", f"{setting} {options} {runs}")


def probing(K: str, head: str, options: str = "") -> Runs:
    """Runs with another decoder, a price on uneven use, or more draws of z; 60,000 steps."""
    setting = "plans=probing max_steps=60000 decoder=plain even=0.0 draws=1"
    return by_seed("mechanism/runs.csv", f"{setting} {options} num_categories={K} head={head}")


HEADS = (
    *("natural", "sigmoid-rotated-3", "natural-rotated-3", "sigmoid-chain", "sigmoid-shuffled"),
    *("sigmoid-flat", "sigmoid-steep", "softmax-haar", "softmax-paths", "softmax-steep"),
    *("softmax-scaled-2", "softmax-scaled-4", "sigmoid-ungated", "natural-ungated"),
    *("sigmoid-natural-gradient-0.1", "softmax-natural-gradient-0.1"),
)
COUPLINGS = {"-1": "sigmoid-opposed-1", "-0.5": "sigmoid-opposed-0.5"}
COUPLINGS |= {C: f"sigmoid-coupled-{C}" for C in ("0", "0.25", "0.5", "1", "2")}


def factor_table() -> dict[str, list[tuple[Runs, Runs]]]:
    """Softmax and the head beside it, at K = 8, 16 and 32, for each row of the table."""

    def heads(head: str, options: str = "") -> list[tuple[Runs, Runs]]:
        return [(mechanism(K, "softmax", options), mechanism(K, head, options)) for K in SIZES]

    def probes(options: str) -> list[tuple[Runs, Runs]]:
        return [(probing(K, "softmax", options), probing(K, "sigmoid", options)) for K in SIZES]

    return {
        "Adam, rate 0.0005": heads("sigmoid", "learning_rate=0.0005"),
        "Adam, rate 0.001": heads("sigmoid"),
        "Adam, rate 0.002": heads("sigmoid", "learning_rate=0.002"),
        "plain SGD, best rates": heads("sigmoid", "optimizer=sgd learning_rate=0.003|0.01"),
        "one draw of z, again": probes("draws=1"),
        "eight draws of z": probes("draws=8"),
        "tree in the decoder": probes("decoder=tree"),
        "copies in the decoder": probes("decoder=copies"),
        "price on uneven use": probes("even=1.0"),
        **{f"coupling {C}": heads(head) for C, head in COUPLINGS.items()},
        **{head: heads(head) for head in HEADS},
    }


def factors() -> Iterator[Claim]:
    """The table of factors: n, factors with intervals, leads in ELBO and in NLL."""
    for words, pairs in factor_table().items():
        ran = [(softmax, head) for softmax, head in pairs if head]
        cells = " | ".join(INTERVAL if head else "" for _, head in pairs)
        blanks = ", ".join("{}" for _ in ran)
        numbers: Numbers = [len(softmax.keys() & head.keys()) for softmax, head in ran]
        for softmax, head in ran:
            numbers += factor(log_factors((softmax, head)))
        numbers += [mean(differences((head, softmax), "test/elbo")) for softmax, head in ran]
        numbers += [mean(differences((softmax, head), "test/nll")) for softmax, head in ran]
        sentence = f"| {words} | {blanks} | {cells} | {blanks} | {blanks} |"
        yield Claim("mechanism/README.md", sentence, numbers)


def rotation() -> Iterator[Claim]:
    """A rotation of the scores, which fills the Fisher matrix."""
    costs, log_steps, shares, masses = [], [], [], []
    for K, head in product(SIZES, TREES):
        plain = mechanism(K, head)
        rotated = mechanism(K, f"{head}-rotated-3")
        costs.append(mean(differences((plain, rotated), "test/elbo")))
        log_steps.append(mean(log_factors((rotated, plain))))
        if K != "8":  # where the rotated matrix is denser than softmax's
            lead = mean(differences((plain, mechanism(K, "softmax")), "test/elbo"))
            shares.append(1 - costs[-1] / lead)
            masses.append(mean(values(rotated, "fim/off_diagonal_mass")))
    runs_of_softmax = [mechanism(K, "softmax") for K in SIZES[1:]]
    masses_of_softmax = [mean(values(runs, "fim/off_diagonal_mass")) for runs in runs_of_softmax]
    numbers = [min(masses), max(masses), *masses_of_softmax]
    text = "its off-diagonal mass is {} to {} at K = 16 and 32, softmax's own {} and {}"
    yield Claim("mechanism/README.md", text, numbers)
    cost = [min(shares), max(shares), *t_interval(costs)]
    text = "keeps {} to {} of a tree's lead in ELBO at K = 16 and 32 and costs {} [{}, {}] nats"
    yield Claim("README.md", text, cost)
    text += " (t over six pairs) and {} [{}, {}] times the steps"
    yield Claim("mechanism/README.md", text, [*cost, *factor(log_steps)])


def noise_and_coupling() -> Iterator[Claim]:
    """Eight draws of z, coupling with eight draws, and the opposite coupling."""
    changes, slower = [], []
    for K in ("8", "32"):
        ratios = {
            draws: log_factors([probing(K, head, f"draws={draws}") for head in BOTH])
            for draws in (1, 8)
        }
        change = [first - second for first, second in zip(ratios[1], ratios[8], strict=True)]
        means = [factor(ratios[draws])[0] for draws in (1, 8)]
        changes += [*means, t_test(change)]
        for draws in (1, 8):
            heads = ("sigmoid-coupled-1", "sigmoid-coupled-0")
            pair = [probing(K, head, f"draws={draws}") for head in heads]
            slower += factor(log_factors(pair))
    text = "from {} to {} at K = 8 (p = {}) and from {} to {} at K = 32 (p = {}"
    yield Claim("mechanism/README.md", text, changes)
    text = (
        f"C = 1 needs {INTERVAL} times the steps of C = 0 with one draw and {INTERVAL} with eight"
    )
    text += f" at K = 8, {INTERVAL} and {INTERVAL} at K = 32"
    yield Claim("mechanism/README.md", text, slower)

    elbo, nll, log_steps = [], [], []
    for K, variant in product(("8", "32"), ("gray", "binary")):
        new = f"variant={variant} seed=4|5|6|7|8"
        tree = mechanism(K, "sigmoid-coupled-0", new)
        opposed = mechanism(K, "sigmoid-opposed-0.5", new)
        elbo += differences((opposed, tree), "test/elbo")
        nll += differences((tree, opposed), "test/nll")
        log_steps += log_factors((tree, opposed))
    text = (
        f"{{}} new pairs: ELBO {INTERVAL} above, NLL {INTERVAL} below, {INTERVAL} times fewer steps"
    )
    numbers = [*t_interval(elbo), *t_interval(nll), *factor(log_steps)]
    yield Claim("mechanism/README.md", text, [len(elbo), *numbers])
