"""Coupling, early certainty and their pairs in the mechanism study, from its rows.

python paper/coupling.py > paper/mechanism/coupling.md
"""

import csv
import math
from collections import defaultdict
from statistics import mean

import numpy as np
from leads import DRAWS, HERE, SIZES, contrast, probing, runs_of, savings, values_of
from scipy import stats


def opposites():
    """Print what the opposite coupling gains over trees with the same size and seed."""
    print("\n## The opposite coupling minus sigmoid, pairs of a size and a seed\n")
    print("Over three: the mean of sigmoid, coupled-0 and sigmoid of plan probing. Intervals over")
    print("pairs, then over seeds.\n")
    print("| head | over | K | ELBO | NLL, lower by |\n|---|---|---|---|---|")
    for head, over, sizes in (
        *((f"sigmoid-opposed-{c}", "three", SIZES) for c in ("0.5", "1")),
        *(("sigmoid-opposed-0.5", "three", (size,)) for size in SIZES),
        ("sigmoid-opposed-0.5", "sigmoid", SIZES),
        ("sigmoid-scaled-2", "three", ("8",)), ("sigmoid-scaled-2", "three", ("32",)),
        ("sigmoid", "coupled-0", ("8",)), ("sigmoid", "coupled-0", ("32",)),
    ):  # fmt: skip
        cells = []
        for name, sign in (("test/elbo", 1), ("test/nll", -1)):
            pairs = []
            for size in sizes:
                mine = {"num_categories": size, "model": "vae"}
                trees = [runs_of(head="sigmoid-coupled-0", **mine)]
                trees = [] if over == "sigmoid" else trees
                trees += [] if over == "coupled-0" else [runs_of(head="sigmoid", **mine)]
                trees += [probing(size, "sigmoid", "nothing")] if over == "three" else []
                ours = runs_of(head=head, **mine)
                for s in "123":
                    other = mean(float(each[s][name]) for each in trees)
                    pairs.append((s, sign * (float(ours[s][name]) - other)))
            low, high = stats.ttest_1samp([each for _, each in pairs], 0).confidence_interval()
            text, p, _ = by_seed(pairs)
            mid, _, over_seeds = text.partition(" ")
            cells.append(f"{mid} [{low:.2f}, {high:.2f}], {over_seeds} (p = {p})")
        print(f"| {head} | {over} | {', '.join(sizes)} | {' | '.join(cells)} |")


def by_seed(pairs):
    """Mean of the seeds' means of [(seed, difference)], its t interval and p."""
    seeds = sorted({seed for seed, _ in pairs})
    means = [mean(value for own, value in pairs if own == seed) for seed in seeds]
    test = stats.ttest_1samp(means, 0)
    low, high = test.confidence_interval()
    return f"{mean(means):.2f} [{low:.2f}, {high:.2f}]", f"{test.pvalue:.2g}", len(seeds)


def pairs_with_the_tree():
    """[(head, row, row of coupled-0)], pairs of one plan, size, data, number of draws and seed."""
    names = ("plans", "num_categories", "variant", "draws", "seed")
    found = defaultdict(dict)  # head: {values of names: row}
    with open(HERE / "mechanism" / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["val/kl_5000"]:
                found[row["head"]][tuple(row[name] for name in names)] = row
    tree = found["sigmoid-coupled-0"]
    return [
        (head, row, tree[key])
        for head, rows in found.items()
        for key, row in rows.items()
        if key in tree
    ]


def table_of_pairs(head, wanted, metrics):
    """Print lines of a table: {words: values of a pair}, differences in metrics (name, sign)."""
    for words, values in wanted.items():
        both = [(a, b) for own, a, b in pairs_with_the_tree() if own == f"sigmoid-{head}"
                and all(a[name] in each for name, each in values.items())]  # fmt: skip
        cells = []
        for name, sign in metrics:
            found = [(a["seed"], sign * (float(a[name]) - float(b[name]))) for a, b in both]
            low, high = stats.ttest_1samp([each for _, each in found], 0).confidence_interval()
            text, p, n = by_seed(found)
            cells += [text, p, f"[{low:.2f}, {high:.2f}]"]
        print(f"| {words} | {len(both)} | {n} | {' | '.join(cells)} |")


def repeated():
    """Print the gain of the opposite coupling for seeds that were not looked at before."""
    print("\n## The opposite coupling (0.5) minus coupled-0, new pairs of a seed\n")
    print("By seed: the mean of each seed first, then a t-test over seeds; last the interval of a")
    print("t-test over pairs. NLL: lower by.\n")
    print("| | pairs | seeds | ELBO, by seed | p | over pairs | NLL, by seed | p | over pairs |")
    print("|---" * 9 + "|")
    new = {"plans": ("mechanism",)}
    wanted = {"seeds 4 to 8": new}
    wanted |= {f"seeds 4 to 8, K = {K}": {**new, "num_categories": (K,)} for K in SIZES}
    for K in SIZES:
        for images in ("gray", "binary"):
            where = {"num_categories": (K,), "variant": (images,)}
            wanted[f"seeds 4 to 8, K = {K}, {images}"] = new | where
    for draws in "18":
        wanted[f"plan probing, draws {draws}"] = {"plans": ("probing",), "draws": (draws,)}
    table_of_pairs("opposed-0.5", wanted | {"all": {}}, (("test/elbo", 1), ("test/nll", -1)))


def couplings():
    """Print what the coupling costs with one and with eight draws, in nats and in steps."""
    print("\n## Coupling 1 minus 0 in ELBO: runs of both plans, by seed\n")
    for size in SIZES:
        sets = []
        for head in ("sigmoid-coupled-1", "sigmoid-coupled-0"):
            alone = runs_of(head=head, num_categories=size, model="vae")
            sets.append([alone, probing(size, head, "nothing")])
        pairs = [
            (seed, float(ours[seed]["test/elbo"]) - float(tree[seed]["test/elbo"]))
            for ours, tree in zip(*sets, strict=True)
            for seed in "123"
        ]
        text, p, _ = by_seed(pairs)
        points = {c: runs_of(head=f"sigmoid-coupled-{c}", num_categories=size, model="vae")
                  for c in ("0", "0.25", "0.5", "1", "2")}  # fmt: skip
        slopes = [
            (seed, stats.linregress([float(c) for c in points],
                                    [float(x[seed]["test/elbo"]) for x in points.values()]).slope)
            for seed in "123"
        ]  # fmt: skip
        half, whole = (values_of({s: points[c][s] for s in "123"}) for c in ("0.5", "1"))
        print(f"- K = {size}: {text} (p = {p}); slope from 0 to 2 by seed {by_seed(slopes)[0]};")
        print(f"  from 0.5 to 1 {contrast((1, whole), (-1, half))[0]}")
        three = ("softmax", "sigmoid-coupled-1", "sigmoid-coupled-0")
        softmax, coupled, tree = (values_of(probing(size, head, "nothing")) for head in three)
        alone = values_of({s: points["0"][s] for s in "123"})
        print(
            f"  plan probing: coupling 1 minus softmax {contrast((1, coupled), (-1, softmax))[0]};"
        )
        print(f"  coupled-0 there minus here {contrast((1, tree), (-1, alone))[0]}")
    heads = ("sigmoid-coupled-1", "sigmoid-opposed-0.5")
    print("\n## Coupling with one and with eight draws, ELBO minus that of coupled-0, n = 3\n")
    print("Kept: of the distance with one draw. Change: of the distance, by Welch, and by seed.\n")
    print(
        "| K | head | one draw | eight draws | kept | change | by seed (p) |\n" + "|---" * 7 + "|"
    )
    for size in SIZES:
        tree = [values_of(probing(size, "sigmoid-coupled-0", draws)) for draws in DRAWS]
        for head in heads:
            ours = [values_of(probing(size, head, draws)) for draws in DRAWS]
            both = [contrast((1, a), (-1, b))[0] for a, b in zip(ours, tree, strict=True)]
            one, eight = (mean(a) - mean(b) for a, b in zip(ours, tree, strict=True))
            change, _ = contrast((1, ours[1]), (-1, tree[1]), (-1, ours[0]), (1, tree[0]))
            each = zip("123", *ours, *tree, strict=True)
            text, p, _ = by_seed([(s, a8 - t8 - a1 + t1) for s, a1, a8, t1, t8 in each])
            kept = f"{eight / one:.3f}" if head == heads[0] else ""
            print(f"| {' | '.join((size, head, *both, kept, change, f'{text} ({p})'))} |")
    print("\nSteps saved by eight draws, to the last loss of coupled-1 with one, p by seed:\n")
    for size in SIZES:
        names = (heads[0], "sigmoid-coupled-0")
        found = {(head, draws): probing(size, head, draws) for head in names for draws in DRAWS}
        first, second = savings(found, names, "123")
        logs = [math.log(a / b) for a, b in (savings(found, names, seed) for seed in "123")]
        p = stats.ttest_1samp(logs, 0).pvalue
        print(f"- K = {size}: coupled-1 {first:.1f} times, coupled-0 {second:.1f} (p = {p:.2g})")


def certainty():
    """Print how certain coupled heads are early: KL and loss minus those of the tree."""
    print("\n## Early certainty: KL and validation loss minus those of coupled-0\n")
    print("Runs of 60,000 steps, in pairs of one plan, size, data, draws and seed.\n")
    print("| | pairs | seeds | KL, by seed | p | over pairs | loss, by seed | p | over pairs |")
    print("|---" * 9 + "|")
    for head in ("coupled-1", "opposed-0.5"):
        for step in (5000, 10000):
            where = {K: {"num_categories": (K,)} for K in SIZES} | {"8, 32": {}}
            wanted = {f"{head}, step {step:,}, K = {K}": each for K, each in where.items()}
            metrics = ((f"val/kl_{step}", 1), (f"val/loss_{step}", 1))
            table_of_pairs(head, wanted, metrics)
    print("\nRuns of certainty.csv ((20, 32), n = 3), p by Welch and by pairs of a seed.\n")
    print("| head | step | KL | p | loss | p |\n" + "|---" * 6 + "|")
    curves = defaultdict(dict)  # head: {(seed, step): (KL, loss)}
    with open(HERE / "mechanism" / "certainty.csv", newline="") as file:
        for row in csv.DictReader(file):
            values = float(row["val/kl"]), float(row["val/loss"])
            curves[row["head"]][row["seed"], int(row["step"])] = values
    every = range(500, 5500, 500)
    for steps in (every, (1500,), (2000,), (5000,)):
        for head in list(curves)[1:]:
            cells = []
            for place in (0, 1):
                first, second = (
                    [mean(curves[each][seed, step][place] for step in steps) for seed in "123"]
                    for each in (head, "sigmoid-coupled-0")
                )
                text, p = contrast((1, first), (-1, second))
                cells += [text, f"{p:.2g}, {stats.ttest_rel(first, second).pvalue:.2g}"]
            words = f"{steps[0]:,}" if len(steps) == 1 else "mean of 500 to 5,000"
            print(f"| {head} | {words} | {' | '.join(cells)} |")
    print(
        "\nOne pass alone: mean of 500 to 5,000 steps minus that of coupled-1, pairs of a seed:\n"
    )
    both = curves["sigmoid-coupled-1"]
    for head in ("softmax-paths-tree-gradient", "sigmoid-paths-gradient"):
        cells = []
        for place in (0, 1):
            pairs = [(s, curves[head][s, step][place] - both[s, step][place])
                     for s in "123" for step in every]  # fmt: skip
            text, p, _ = by_seed(pairs)
            cells.append(f"{text} (p = {p})")
        print(f"- {head}: KL {cells[0]}, loss {cells[1]}")
    print("\nKL where the mean validation loss is 150, 140 and 133.2 nats (softmax's last), and")
    print(
        "reconstruction, loss minus KL, where the mean KL is 14 nats; minus the tree's by seed:\n"
    )

    def at(head, seeds, where, of):
        kl, loss = ([mean(curves[head][s, t][place] for s in seeds) for t in every]
                    for place in (0, 1))  # fmt: skip
        if of == "loss":
            return float(np.interp(-where, [-x for x in loss], kl))
        return float(np.interp(where, kl, [x - y for x, y in zip(loss, kl, strict=True)]))

    for head in curves:
        cells = []
        for where, of in ((150, "loss"), (140, "loss"), (133.2, "loss"), (14, "kl")):
            tree = "sigmoid-coupled-0"
            text, p, _ = by_seed(
                [(s, at(head, s, where, of) - at(tree, s, where, of)) for s in "123"]
            )
            cells.append(
                f"{at(head, '123', where, of):.2f}"
                + (f" ({text}, p = {p})" if head != tree else "")
            )
        print(f"- {head}: {'; '.join(cells)}")


def held_back():
    """Print softmax's distance to sigmoid where the KL weighs more in the first steps."""
    print("\n## Certainty held back: (20, 32), 5,000 steps, n = 3\n")
    print("Weight: of the KL at the first step; it falls to 1 at step 3,000. Kept: of the distance")
    print("with weight 1, to sigmoid with the same weight, and p of the change.\n")
    print(
        "| weight | ELBO of softmax | of sigmoid | distance | kept | p | KL of softmax, sigmoid |"
    )
    print("|---" * 7 + "|")
    plain = {"plans": "probing", "decoder": "plain", "even": "0.0", "draws": "1"}
    plain["num_categories"] = "32"
    found = {}
    for weight in ("", "2.0", "4.0"):
        heads = ("softmax", "sigmoid")
        rows = [runs_of(head=x, max_steps="5000", early_kl=weight, **plain) for x in heads]
        ours, tree = found[weight] = [values_of(each) for each in rows]
        text, _ = contrast((1, tree), (-1, ours))
        first = found[""]
        kept = (mean(tree) - mean(ours)) / (mean(first[1]) - mean(first[0]))
        change = contrast((1, tree), (-1, ours), (-1, first[1]), (1, first[0]))[1] if weight else ""
        both = ", ".join(f"{mean(values_of(each, 'test/kl')):.1f}" for each in rows)
        values = [", ".join(f"{x:.1f}" for x in each) for each in (ours, tree)]
        p = f"{change:.2g}" if weight else ""
        print(f"| {weight or 1} | {' | '.join(values)} | {text} | {kept:.2f} | {p} | {both} |")
    print("\nValidation loss after 10,000 steps, softmax minus sigmoid: weight 1 (runs of 60,000")
    print("steps), then 4; seeds 1, 2, 3:\n")
    for weight, steps, name in (("", "60000", "val/loss_10000"), ("4.0", "10000", "val/loss")):
        ours, tree = (
            values_of(runs_of(head=x, max_steps=steps, early_kl=weight, **plain), name)
            for x in ("softmax", "sigmoid")
        )
        found[steps] = ours, tree
        each = ", ".join(f"{a - b:.1f}" for a, b in zip(ours, tree, strict=True))
        print(f"- {weight or 1}: {contrast((1, ours), (-1, tree))[0]} ({each}); means", end=" ")
        print(f"{mean(ours):.1f}, {mean(tree):.1f}")
    (one, first), (four, second) = found["60000"], found["10000"]
    change, p = contrast((1, four), (-1, second), (-1, one), (1, first))
    kept = (mean(four) - mean(second)) / (mean(one) - mean(first))
    print(f"- change {change}, p = {p:.2g}, kept {kept:.2f}")


if __name__ == "__main__":
    print("# Coupling, from `runs.csv` and `certainty.csv` by `python paper/coupling.py`")
    opposites()
    repeated()
    couplings()
    certainty()
    held_back()
