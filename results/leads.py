"""Leads of the mechanism study from its rows, by csv and scipy alone: every column, every head.

python results/leads.py > results/mechanism/leads.md
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from scipy import stats

HERE = Path(__file__).resolve().parent
METRICS = ("test/nll", "test/elbo", "test/information", "test/kl")


def columns():
    """{column: {head: [(NLL, ELBO, information, KL)]}} of the final runs."""
    found = defaultdict(lambda: defaultdict(list))
    with open(HERE / "mechanism" / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] == "final":
                rate = row["learning_rate"] if row["optimizer"] == "adam" else "own rates"
                size = f"({row['num_latents']}, {row['num_categories']})"
                values = tuple(float(row[name]) for name in METRICS)
                found[f"{size}, {row['optimizer']}, {rate}"][row["head"]].append(values)
    return found


def main():
    """Print a table for each column."""
    print("# Leads over softmax, from `runs.csv` by `python results/leads.py`\n")
    print("With Welch's 95 % intervals. Share: of sigmoid's lead in ELBO; own: of the lead of the")
    print("head that a variant is made from, with p of the difference in ELBO from that head.")
    for column, heads in sorted(columns().items()):
        nll, elbo, information, kl = (
            {head: [row[place] for row in found] for head, found in heads.items()}
            for place in range(4)
        )
        print(
            f"\n## {column}\n\n| head | n | NLL | ELBO | share | own (p) | information | uneven |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for head in sorted(heads):
            cells = []
            for better, worse in ((nll["softmax"], nll[head]), (elbo[head], elbo["softmax"])):
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
            print(f"| {head} | {len(nll[head])} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
