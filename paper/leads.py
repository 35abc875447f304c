"""Leads of the mechanism study from its rows, by csv and scipy alone: every column, every head.

python paper/leads.py > paper/mechanism/leads.md
"""

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, variance

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
PAIRS = (  # trees and softmax with the same factors; factors; passes; P(node); a chain
    *(("sigmoid-flat", "softmax-haar"), ("sigmoid", "softmax-paths")),
    *(("sigmoid-steep", "softmax-steep"), ("softmax-steep", "softmax-paths")),
    *(("softmax-paths", "softmax-haar"), ("softmax-paths-tree-gradient", "softmax-paths")),
    *(("sigmoid-paths-gradient", "sigmoid"), ("sigmoid-paths-gradient", "softmax-paths")),
    *(("softmax-paths-gated", "softmax-paths"), ("sigmoid-ungated-0.4", "sigmoid")),
    *(("sigmoid-levels", "sigmoid"), ("sigmoid-chain", "sigmoid")),
    *(
        (f"sigmoid-{head}", "sigmoid-coupled-0")
        for head in ("opposed-1", "opposed-0.5", *(f"coupled-{c}" for c in (0.25, 0.5, 1, 2)))
    ),
    *(("sigmoid-opposed-1", "sigmoid-coupled-1"), ("sigmoid-coupled-1", "softmax-paths")),
)
METRICS = ("test/nll", "test/elbo", "test/information", "test/kl", "fim/off_diagonal_mass")
STEPS = tuple(f"val/loss_{step}" for step in range(5000, 65000, 5000))
SHOWN = (1, 3, 7, 11)  # of STEPS


def apart(row):
    """Whether a row is in a table of its own: few steps, or a pair of coupling.py."""
    coupled = row["head"].startswith(("sigmoid-coupled", "sigmoid-opposed"))
    return row["max_steps"] != "60000" or (coupled and row["seed"] not in "123")


def columns():
    """{column: {head: [values of METRICS and STEPS]}} of the final runs; None where unknown."""
    found = defaultdict(lambda: defaultdict(list))
    with open(HERE / "mechanism" / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] == "final" and row["model"] == "vae" and not apart(row):
                rate = row["learning_rate"] if row["optimizer"] == "adam" else "own rates"
                size = f"({row['num_latents']}, {row['num_categories']})"
                values = [row.get(name) for name in (*METRICS, *STEPS)]
                values = [float(value) if value else None for value in values]
                found[f"{size}, {row['optimizer']}, {rate}"][row["head"]].append(values)
    return found


def main():
    """Print a table for each column."""
    print("# Leads over softmax, from `runs.csv` by `python paper/leads.py`\n")
    print("With Welch's 95 % intervals. Share: of sigmoid's lead in ELBO; own: of the lead of the")
    print(
        "head that a variant is made from, with p of the difference in ELBO from that head. Uneven:"
    )
    print("KL minus information. Mass: off-diagonal, Frobenius, of the mean Fisher matrix. Bound:")
    print("the lead in ELBO minus that in NLL, a tighter bound. There at:")
    print("the first of the steps 5,000, 10,000, ... with softmax's last validation loss or less.")
    for column, heads in sorted(columns().items()):
        nll, elbo, information, kl, mass, *losses = (
            {head: [row[place] for row in found] for head, found in heads.items()}
            for place in range(len(METRICS) + len(STEPS))
        )
        print(
            f"\n## {column}\n\n| head | n | NLL | ELBO | bound | share | own (p) | information ",
            end="",
        )
        steps = "10, 20, 40, 60 thousand steps"
        print(f"| uneven | mass | lead in validation loss after {steps} | there at |")
        print("|---" * 12 + "|")
        for head in sorted(heads):
            cells = []
            bound = {name: [-a - b for a, b in zip(nll[name], elbo[name], strict=True)]
                     for name in ("softmax", head)}  # fmt: skip
            for better, worse in (
                (nll["softmax"], nll[head]),
                (elbo[head], elbo["softmax"]),
                (bound["softmax"], bound[head]),
            ):
                low, high = stats.ttest_ind(better, worse, equal_var=False).confidence_interval()
                cells.append(f"{mean(better) - mean(worse):.2f} [{low:.2f}, {high:.2f}]")
            base = head.split("-")[0]
            lead, first, own = (
                mean(elbo[name]) - mean(elbo["softmax"]) for name in (head, "sigmoid", base)
            )
            p = stats.ttest_ind(elbo[head], elbo[base], equal_var=False).pvalue
            of_own = f"{lead / own:.2f} ({p:.2g})" if own else f"({p:.2g})"
            known, uneven = mean(information[head]), mean(kl[head]) - mean(information[head])
            cells += [f"{lead / first:.2f}", of_own, f"{known:.2f}", f"{uneven:.2f}"]
            cells += ["" if None in mass[head] else f"{mean(mass[head]):.2f}"]
            if None in losses[0][head]:
                cells += ["", ""]
            else:
                curve = [mean(loss[head]) for loss in losses]
                softmax = [mean(loss["softmax"]) for loss in losses]
                cells += [", ".join(f"{softmax[place] - curve[place]:.1f}" for place in SHOWN)]
                places = [place for place, loss in enumerate(curve) if loss <= softmax[-1]]
                cells += [f"{5000 * (places[0] + 1):,}" if places else ""]
            print(f"| {head} | {len(nll[head])} | " + " | ".join(cells) + " |")
        pairs = [pair for pair in PAIRS if all(head in heads for head in pair)]
        if pairs:
            print("\n| ELBO of | minus that of | | p |\n|---|---|---|---|")
        for pair in pairs:
            first, second = (elbo[head] for head in pair)
            found = stats.ttest_ind(first, second, equal_var=False)
            low, high = found.confidence_interval()
            lead = f"{mean(first) - mean(second):.2f} [{low:.2f}, {high:.2f}]"
            print(f"| {' | '.join(pair)} | {lead} | {found.pvalue:.2g} |")


def transplants():
    """Print the table of ``transplant.csv``, seed by seed."""
    with open(HERE / "mechanism" / "transplant.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = sorted({row["seed"] for row in rows})
    found = {(row["seed"], row["source"], row["head"], row["step"]): row for row in rows}

    def values(source, head, step, name="val/elbo"):
        each = (abs(float(found[seed, source, head, step][name])) for seed in seeds)
        sign = "-" * (name == "val/elbo")
        return ", ".join(f"{sign}{value:.{1 + (name == 'fit/kl')}f}" for value in each)

    print(f"\n## Transplants at (10, 8), seeds {', '.join(seeds)}\n")
    print("| first | then | ELBO at the end of the first part | new layer | KL | at the end |")
    print("|---" * 6 + "|")
    for first in ("softmax", "sigmoid"):
        for then in ("softmax", "sigmoid"):
            new = values(first, then, "0"), values(first, then, "0", "fit/kl")
            ends = values("", first, "10000"), values(first, then, "10000")
            print(f"| {first} | {then} | {ends[0]} | {new[0]} | {new[1]} | {ends[1]} |")


SIZES = ("8", "32")  # categories of (10, 8) and (20, 32)
KINDS = {  # of probing_vae.py: decoder, price of uneven use, draws
    "nothing": ("plain", "0.0", "1"),
    "tree": ("tree", "0.0", "1"),
    "copies": ("copies", "0.0", "1"),
    "even": ("plain", "1.0", "1"),
    "8 draws": ("plain", "0.0", "8"),
}
DRAWS = ("nothing", "8 draws")


def runs_of(**wanted):
    """{seed: row} of the runs of 60,000 steps with Adam, rate 0.001, and these values."""
    wanted = {"max_steps": "60000", "learning_rate": "0.001", "variant": "gray"} | wanted
    with open(HERE / "mechanism" / "runs.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["optimizer"] != "sgd"]
    return {row["seed"]: row for row in rows if wanted.items() <= row.items()}


def probing(size, head, kind):
    """{seed: row} of a head with one of KINDS."""
    names = ("decoder", "even", "draws")
    wanted = dict(zip(names, KINDS[kind], strict=True))
    return runs_of(num_categories=size, head=head, plans="probing", **wanted)


def values_of(rows, name="test/elbo"):
    """A metric, by seed."""
    return [float(rows[seed][name]) for seed in sorted(rows)]


def contrast(*parts):
    """Sum of factor times mean, its 95 % interval and p, with variances of their own (Welch)."""
    total = sum(factor * mean(values) for factor, values in parts)
    shares = [(factor**2 * variance(values) / len(values), len(values)) for factor, values in parts]
    error = sum(share for share, _ in shares) ** 0.5
    freedom = error**4 / sum(share**2 / (n - 1) for share, n in shares)
    width = stats.t.ppf(0.975, freedom) * error
    p = 2 * stats.t.sf(abs(total) / error, freedom)
    return f"{total:.2f} [{total - width:.2f}, {total + width:.2f}]", p


def kinds():
    """Print how far softmax is behind, with everything that probing_vae.py gives it."""
    print("\n## Softmax behind sigmoid in ELBO, 60,000 steps, plan probing\n")
    print("Kept: of its distance to plain sigmoid, with p against one half of it. Uneven: KL minus")
    print("information, of softmax and sigmoid.\n")
    print("| K | softmax with | behind plain sigmoid | kept (p) | behind the same | uneven |")
    print("|---" * 6 + "|")
    for size in SIZES:
        sigmoid, softmax = (values_of(probing(size, x, "nothing")) for x in ("sigmoid", "softmax"))
        for kind in KINDS:
            rows = [probing(size, head, kind) for head in ("softmax", "sigmoid")]
            ours, same = (values_of(each) if each else None for each in rows)
            behind = contrast((1, sigmoid), (-1, ours))[0]
            kept = (mean(sigmoid) - mean(ours)) / (mean(sigmoid) - mean(softmax))
            _, p = contrast((0.5, sigmoid), (0.5, softmax), (-1, ours))
            other = contrast((1, same), (-1, ours))[0] if same else "not run"
            both = [
                mean(values_of(each, "test/kl")) - mean(values_of(each, "test/information"))
                for each in rows
                if each
            ]
            uneven = ", ".join(f"{each:.2f}" for each in both)
            print(f"| {size} | {kind} | {behind} | {kept:.2f} ({p:.2g}) | {other} | {uneven} |")


def steps_to(rows, loss):
    """When the mean curve of some runs reaches a validation loss."""
    curve = [-mean(float(row[name]) for row in rows) for name in STEPS]
    return float(np.interp(-loss, curve, range(5000, 65000, 5000)))


def steps_of(found, slow, seeds):
    """Steps of each head with one and with eight draws to a slow head's last loss with one."""
    last = mean(float(found[slow, "nothing"][seed]["val/loss_60000"]) for seed in seeds)
    return {key: steps_to([rows[seed] for seed in seeds], last) for key, rows in found.items()}


def savings(found, heads, seeds):
    """How many times fewer steps two heads need with eight draws, to the first one's last loss."""
    at = steps_of(found, heads[0], seeds)
    return [at[head, "nothing"] / at[head, "8 draws"] for head in heads]


def speeds():
    """Print how many steps eight draws save, to the loss that softmax has at last with one."""
    print("\n## Eight draws in place of one: steps to softmax's last validation loss with one\n")
    print("p: of a t-test over seeds of the logarithm of softmax's saving divided by sigmoid's;")
    print("change: of softmax's distance in ELBO, with p over seeds.\n")
    print("| K | softmax saves | sigmoid saves | p | softmax's / sigmoid's steps | change (p) |")
    print("|---" * 6 + "|")
    for size in SIZES:
        heads = ("softmax", "sigmoid")
        found = {(head, draws): probing(size, head, draws) for head in heads for draws in DRAWS}
        logs = [math.log(a / b) for a, b in (savings(found, heads, seed) for seed in "123")]
        at = steps_of(found, "softmax", "123")
        ratios = ", ".join(f"{at['softmax', x] / at['sigmoid', x]:.1f}" for x in DRAWS)
        elbo = {key: np.array(values_of(rows)) for key, rows in found.items()}
        one, eight = (elbo["sigmoid", x] - elbo["softmax", x] for x in DRAWS)
        p, of_change = (stats.ttest_1samp(each, 0).pvalue for each in (logs, one - eight))
        cells = [
            size,
            *(f"{each:.1f}" for each in savings(found, heads, "123")),
            f"{p:.2f}",
            ratios,
        ]
        print(f"| {' | '.join(cells)} | {(one - eight).mean():.1f} ({of_change:.2f}) |")


if __name__ == "__main__":
    main()
    transplants()
    kinds()
    speeds()
