"""Leads of the mechanism study from its rows, by csv and scipy alone: every column, every head.

python results/leads.py > results/mechanism/leads.md
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from scipy import stats

HERE = Path(__file__).resolve().parent
PAIRS = (  # trees and softmax with the same factors; factors; passes; P(node); a chain
    *(("sigmoid-flat", "softmax-haar"), ("sigmoid", "softmax-paths")),
    *(("sigmoid-steep", "softmax-steep"), ("softmax-steep", "softmax-paths")),
    *(("softmax-paths", "softmax-haar"), ("softmax-paths-tree-gradient", "softmax-paths")),
    *(("sigmoid-paths-gradient", "sigmoid"), ("sigmoid-paths-gradient", "softmax-paths")),
    *(("softmax-paths-gated", "softmax-paths"), ("sigmoid-ungated-0.4", "sigmoid")),
    *(("sigmoid-levels", "sigmoid"), ("sigmoid-chain", "sigmoid")),
)
METRICS = ("test/nll", "test/elbo", "test/information", "test/kl", "fim/off_diagonal_mass_fro")
STEPS = tuple(f"val/loss_{step}" for step in range(5000, 65000, 5000))
SHOWN = (1, 3, 7, 11)  # of STEPS


def columns():
    """{column: {head: [values of METRICS and STEPS]}} of the final runs; None where unknown."""
    found = defaultdict(lambda: defaultdict(list))
    with open(HERE / "mechanism" / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] == "final" and row["model"] == "vae":
                rate = row["learning_rate"] if row["optimizer"] == "adam" else "own rates"
                size = f"({row['num_latents']}, {row['num_categories']})"
                values = [row.get(name) for name in (*METRICS, *STEPS)]
                values = [float(value) if value else None for value in values]
                found[f"{size}, {row['optimizer']}, {rate}"][row["head"]].append(values)
    return found


def main():
    """Print a table for each column."""
    print("# Leads over softmax, from `runs.csv` by `python results/leads.py`\n")
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


if __name__ == "__main__":
    main()
    transplants()
