"""The verdicts of the mechanism study, for ``recompute.py``."""

import itertools

import numpy as np
from rows import HEADS, cells, mean, p_value, rows
from scipy import stats


def first_runs():
    """Adam at rate 0.001, without the pairs of seeds 4 to 8 that repeat a comparison."""
    same = {"learning_rate": "0.001", "optimizer": "adam", "max_steps": "60000"}
    for row in rows("mechanism", stage="final", **same):
        coupled = row["head"].startswith(("sigmoid-coupled", "sigmoid-opposed"))
        if row["seed"] in "123" or not coupled:
            yield row


def mechanism_verdicts():
    """Shares of sigmoid's lead over softmax in ELBO: three sizes, then SGD at own rates."""
    names = ("num_latents", "num_categories", "head")
    adam = list(first_runs())
    found = cells(adam, names, "test/elbo")
    sizes = (("10", "8"), ("20", "16"), ("20", "32"))

    def share(head, size, of):
        base, best = mean(of[*size, "softmax"]), mean(of[*size, "sigmoid"])
        return (mean(of[*size, head]) - base) / (best - base)

    for head, said in (
        ("sigmoid-rotated-3", "rotated sigmoid keeps 0.93, 0.85, 0.97 of the lead in ELBO"),
        (
            "sigmoid-ungated",
            "without P(node) sigmoid keeps 0.19, -0.07, -0.09 (p = 0.0003, 0.0009, 0.0006)",
        ),
        ("softmax-paths", "softmax over path sums has 0.18, 0.27, 0.46 of it"),
    ):
        p = [f"{p_value(found[*size, head], found[*size, 'sigmoid']):.1g}" for size in sizes]
        shares = ", ".join(f"{share(head, size, found):.2f}" for size in sizes)
        yield said, f"{shares}; against sigmoid p = {', '.join(p)}"
    costs = [mean(found[*size, head]) - mean(found[*size, f"{head}-rotated-3"])
             for size in sizes for head in HEADS[1:]]  # fmt: skip
    test = stats.ttest_1samp(costs, 0)
    low, high = test.confidence_interval()
    yield (
        "a rotation costs 0.30 [0.09, 0.51] nats on average over six pairs (p = 0.015)",
        f"{mean(costs):.2f} [{low:.2f}, {high:.2f}], p = {test.pvalue:.3f}",
    )
    steps = [f"val/loss_{step}" for step in (5000, 10000, 20000)]
    early = [cells(adam, names, step) for step in steps]
    heads = [key for key in early[0] if key[:2] == sizes[2] and mean(found[key]) > -130]
    final = [mean(found[key]) for key in heads]
    matches = [stats.pearsonr([-mean(loss[key]) for key in heads], final)[0] for loss in early]
    yield (
        "K = 32, 28 heads: the lead after 5, 10 and 20 thousand steps has a correlation of "
        "0.80, 0.91 and 0.97 with the final lead in ELBO",
        f"{len(heads)} heads: " + ", ".join(f"{each:.2f}" for each in matches),
    )
    nll = cells(adam, names, "test/nll")
    parts = []
    for size in sizes:
        lead, closer = (mean(found[*size, "sigmoid"]) - mean(found[*size, "softmax"]),
                        mean(nll[*size, "sigmoid"]) - mean(nll[*size, "softmax"]))  # fmt: skip
        parts.append(f"{(lead + closer) / lead:.2f}")
    yield "0.43 to 0.47 of sigmoid's lead in ELBO is a tighter bound", ", ".join(parts)
    ends = sizes[0], sizes[2]
    for head, said in (
        ("sigmoid-flat", "without its factors the tree keeps 0.80 and 0.91 (K = 8, 32)"),
        ("softmax-steep", "softmax with steeper ones has 0.35 and 0.61"),
        ("softmax-scaled-4", "softmax with larger scores has -0.12 and -0.06"),
    ):
        yield said, ", ".join(f"{share(head, size, found):.2f}" for size in ends)
    kl, known = (cells(adam, names, f"test/{name}") for name in ("kl", "information"))
    of = [(*size, head) for head in ("softmax", "sigmoid") for size in sizes[1:]]
    yield (
        "K = 16, 32: information of softmax's latents 17.7, 17.7, of sigmoid's 17.7, 17.8; "
        "KL minus information 0.82, 1.10 and 0.35, 0.49",
        ", ".join(f"{mean(known[key]):.1f}" for key in of)
        + "; "
        + ", ".join(f"{mean(kl[key]) - mean(known[key]):.2f}" for key in of),
    )
    first = rows("mechanism", plans="probing", max_steps="5000", early_kl=None)
    early = cells(first, ("decoder", "head"), "test/elbo")
    behind = [mean(early["plain", "sigmoid"]) - mean(early[decoder, "softmax"])
              for decoder in ("plain", "tree", "copies")]  # fmt: skip
    yield (
        "5,000 steps: softmax is 4.2 behind sigmoid, 5.0 with the tree in its decoder, 6.1 with "
        "copies",
        ", ".join(f"{each:.2f}" for each in behind),
    )
    sgd = cells(rows("mechanism", stage="final", optimizer="sgd"), names, "test/elbo")
    shares = [share(f"sigmoid-{kind}", sizes[0], sgd) for kind in ("rotated-3", "ungated")]
    yield (
        "with plain SGD rotated sigmoid keeps 1.08 of its lead, without P(node) -0.32 of it",
        ", ".join(f"{each:.2f}" for each in shares),
    )


def coupling_verdicts():
    """Trees whose splits are coupled as those of softmax (1), more, less, or the other way."""
    chosen = list(first_runs())
    names = ("num_latents", "num_categories", "head")
    elbo = cells(chosen, names, "test/elbo")
    heads = {0: "sigmoid-coupled-0", 0.25: "sigmoid-coupled-0.25", 0.5: "sigmoid-coupled-0.5",
             1: "sigmoid-coupled-1", 2: "sigmoid-coupled-2"}  # fmt: skip
    points = [(c, value) for c, head in heads.items() for value in elbo["20", "32", head]]
    line = stats.linregress(*zip(*points, strict=True))
    means = ", ".join(f"{mean(elbo['20', '32', head]):.1f}" for head in heads.values())
    yield (
        "K = 32, coupling 0, 0.25, 0.5, 1, 2: ELBO -103.8, -104.4, -104.4, -107.2, -108.0, "
        "-2.2 for each unit (p < 0.001)",
        f"{means}; {line.slope:.1f}, p = {line.pvalue:.1g}",
    )
    plain = [row for row in rows("mechanism", plans="probing", max_steps="60000", draws="1")
             if row["decoder"] == "plain" and row["even"] == "0.0"]  # fmt: skip
    for coupling, said in (
        ("0.5", "coupled the other way, -0.5, the tree gains 0.72 [0.37, 1.07] in ELBO and 0.26 "
                "[0.01, 0.51] in NLL over the mean of three sigmoid runs with its size and seed"),
        ("1", "and -1: 0.54 [0.21, 0.88], 0.18 [-0.13, 0.49]"),
    ):  # fmt: skip
        texts = []
        for sign, name in ((1, "test/elbo"), (-1, "test/nll")):
            found = cells([*chosen, *plain], ("num_categories", "plans", "head", "seed"), name)
            each = []
            for K, seed in itertools.product(("8", "32"), "123"):
                trees = [value for key, values in found.items() for value in values
                         if key in ((K, "mechanism", "sigmoid", seed),
                                    (K, "mechanism", "sigmoid-coupled-0", seed),
                                    (K, "probing", "sigmoid", seed))]  # fmt: skip
                (value,) = found[K, "mechanism", f"sigmoid-opposed-{coupling}", seed]
                each.append(sign * (value - mean(trees)))
            low, high = stats.ttest_1samp(each, 0).confidence_interval()
            texts.append(f"{mean(each):.2f} [{low:.2f}, {high:.2f}]")
        yield said, f"{', '.join(texts)}, {len(each)} pairs, {len(trees)} runs each"


def draws_verdicts():
    """Eight draws of z for each image in place of one: distances, and steps that are saved."""
    steps = range(5000, 65000, 5000)
    names = ("num_categories", "draws", "head")
    chosen = list(
        rows("mechanism", plans="probing", max_steps="60000", decoder="plain", even="0.0")
    )
    elbo = cells(chosen, names, "test/elbo")
    losses = [cells(chosen, names, f"val/loss_{step}") for step in steps]
    distances, saved = [], []
    for K in ("8", "32"):
        for draws in ("1", "8"):
            better, worse = (mean(elbo[K, draws, head]) for head in ("sigmoid", "softmax"))
            distances.append(f"{better - worse:.1f}")
        last = mean(losses[-1][K, "1", "softmax"])
        for head in ("softmax", "sigmoid"):
            curves = ([-mean(loss[K, draws, head]) for loss in losses] for draws in ("1", "8"))
            one, eight = (np.interp(-last, curve, steps) for curve in curves)
            saved.append(f"{one / eight:.1f}")
    yield (
        "1 and 8 draws: softmax is 3.4 and 1.8 nats behind at K = 8, 5.1 and 2.1 at K = 32; eight "
        "save softmax and sigmoid 2.7, 1.8 times the steps to one loss, 3.6 and 2.4 at K = 32",
        f"{', '.join(distances)}; {', '.join(saved)}",
    )


def difference(first, second):
    """Means of pairs minus each other, with the interval of a t-test and its p."""
    test = stats.ttest_rel(first, second)
    low, high = test.confidence_interval()
    return f"{mean(first) - mean(second):.2f} [{low:.2f}, {high:.2f}], p = {test.pvalue:.1g}"


def certainty_verdicts():
    """New pairs of the opposite coupling, coupling with less noise, and early certainty."""
    tree, against = "sigmoid-coupled-0", "sigmoid-opposed-0.5"
    new = [row for row in rows("mechanism", plans="mechanism", max_steps="60000")
           if row["seed"] in "45678" and row["head"] in (tree, against)]  # fmt: skip
    names = ("num_categories", "variant", "seed", "head")
    texts = []
    for name in ("test/elbo", "test/nll"):
        found = cells(new, names, name)
        keys = sorted(key[:3] for key in found if key[3] == tree)
        texts.append(difference(*([found[*key, head][0] for key in keys]
                                  for head in (against, tree))))  # fmt: skip
    yield (
        "opposite coupling, seeds 4 to 8, gray and binary: ELBO 0.32 [0.14, 0.50] above the tree "
        "(p = 0.001), NLL 0.08 [-0.04, 0.19] below (p = 0.2)",
        f"{'; '.join(texts)}; {len(keys)} pairs",
    )
    long = list(rows("mechanism", plans="probing", max_steps="60000"))
    elbo = cells(long, ("num_categories", "decoder", "even", "draws", "head"), "test/elbo")
    behind = {(K, draws): mean(elbo[K, "plain", "0.0", draws, tree])
              - mean(elbo[K, "plain", "0.0", draws, "sigmoid-coupled-1"])
              for K in ("8", "32") for draws in ("1", "8")}  # fmt: skip
    yield (
        "coupling 1 costs 3.0 and 3.8 nats with one draw (K = 8, 32), 2.0 and 1.9 with eight",
        ", ".join(f"{behind[K, draws]:.1f}" for draws in ("1", "8") for K in ("8", "32")),
    )
    known = [row for row in rows("mechanism", max_steps="60000") if row["val/kl_5000"]]
    names = ("plans", "num_categories", "variant", "draws", "seed", "head")
    for head, said in (
        ("sigmoid-coupled-1", "after 5,000 steps coupling 1 has 0.92 [0.39, 1.44] more KL than "
                              "the tree and a loss 5.0 higher (means of three seeds)"),
        (against, "coupling -0.5 has 0.27 [0.13, 0.42] less, and a loss 1.2 lower (eight seeds)"),
    ):  # fmt: skip
        texts = []
        for name in ("val/kl_5000", "val/loss_5000"):
            found = cells(known, names, name)
            keys = [key[:5] for key in found if key[5] == head and (*key[:5], tree) in found]
            seeds = sorted({key[4] for key in keys})
            texts.append(difference(*(
                [mean([found[*key, each][0] for key in keys if key[4] == seed]) for seed in seeds]
                for each in (head, tree))))  # fmt: skip
        yield said, f"{'; '.join(texts)}; {len(seeds)} seeds"
