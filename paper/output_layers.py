"""Claims about output layers of language models (perplexity, time, memory), and about speed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from measures import Claim, Runs, by_seed, mean, select, text_of, values

BENCHMARK = "targets=zipf commit=3f28ec5"  # the run of bench_output_layer.py that pages state
GENERATION = "targets=zipf commit=b6f92d5+"  # the last run with --generate
LAYERS = "speed/output_layer_frequent_h200.csv"
UNIFORM = "speed/output_layer_h200.csv"  # older runs, uniform targets
STEP_TIMES = "language_model/step_times_h200.csv"
LARGE = "../docs/large.md"
TIME = "forward + backward ms"
MEMORY = "memory GB"
DOCS_STEPS = {"softmax": 427, "adaptive-2": 646, "hybrid-1024": 800}  # at equal time


def outputs() -> Iterator[Claim]:
    """Output layers at equal steps; and at equal time, by the milliseconds of a training step."""
    path = "language_model/outputs.csv"
    for text, steps in (("words", 1000), ("pairs", 1000), ("docs", 800)):
        names = dict.fromkeys(row["output"] for row in select(path, text=text))
        yield from at_best_rates(text, text, dict.fromkeys(names, steps))
        times = {row["output"]: float(row["ms"]) for row in select(STEP_TIMES, text=text)}
        fewer_steps = {name: int(steps * min(times.values()) / times[name]) for name in times}
        yield from at_best_rates(text, f"{text}, equal time", fewer_steps)


def at_best_rate(text: str, output: str, steps: int) -> Runs:
    """All seeds of an output, at the rate with the best validation of seed 0."""
    path = "language_model/outputs.csv"
    setting = f"text={text} output={output} steps={steps}"
    first_seed = select(path, f"{setting} seed=0")
    if not first_seed:
        return {}
    best = min(first_seed, key=lambda run: float(run["val"]))
    return by_seed(path, f"{setting} rate={best['rate']}")


def at_best_rates(text: str, label: str, steps_of: dict[str, int]) -> Iterator[Claim]:
    """Test perplexity, each output at its best rate; softmax first."""
    softmax = 0.0
    for output, steps in steps_of.items():
        runs = at_best_rate(text, output, steps)
        if not runs:
            continue
        rate = runs["0"]["rate"]
        test = mean(values(runs, "test"))
        softmax = softmax or test
        numbers = [len(runs), test, 100 * (test / softmax - 1)]
        numbers += [mean(values(runs, "test_frequent")), round(mean(values(runs, "test_rare")))]
        cells = " | ".join(["{}"] * len(numbers))
        sentence = f"| {label} | {steps} steps, rate {rate} | {output} | {cells} |"
        yield Claim("language_model/README.md", sentence, numbers)


def test_perplexity(text: str, output: str, steps: int) -> float:
    """Mean over seeds."""
    return mean(values(at_best_rate(text, output, steps), "test"))


def quality() -> Iterator[Claim]:
    """Perplexities in README.md and docs/large.md."""
    names = (
        "softmax",
        "adaptive-1",
        "tree",
        "hybrid-64",
        "hybrid-256",
        "hybrid-1024",
        "hybrid-4096",
    )
    words = {name: test_perplexity("words", name, 1000) for name in names}
    pairs = {
        name: test_perplexity("pairs", name, 1000)
        for name in ("softmax", "adaptive-1", "hybrid-1024", "hybrid-4096")
    }
    docs = {name: test_perplexity("docs", name, 800) for name in DOCS_STEPS}
    shorter = [test_perplexity("docs", name, steps) for name, steps in DOCS_STEPS.items()]
    above = {name: 100 * (words[name] / words["softmax"] - 1) for name in words}
    above_pairs = {name: 100 * (pairs[name] / pairs["softmax"] - 1) for name in pairs}
    below = {name: 100 * (1 - docs[name] / docs["softmax"]) for name in docs}
    text = "{} % higher (32,768 words), {} % higher (32,768 byte pairs) and {} % lower"
    text += " (131,072 words); adaptive softmax's is {} % lower, {} % higher and {} % lower"
    numbers = [above["hybrid-4096"], above_pairs["hybrid-4096"], below["hybrid-1024"]]
    numbers += [-above["adaptive-1"], above_pairs["adaptive-1"], below["adaptive-2"]]
    yield Claim("../README.md", text, numbers)
    text = "In the same training time softmax reaches {} on the last text instead of"
    text += " `TreeLinear`'s {}, at its rate for longer runs"
    yield Claim("../README.md", text, [shorter[0], docs["hybrid-1024"]])
    text = (
        "softmax ended at a test perplexity of {}, adaptive softmax with one cutoff at {}, a tree"
    )
    text += " at {}, and a tree with 64, 256, 1,024 and 4,096 frequent words at {}, {}, {} and {}:"
    yield Claim(LARGE, text, list(words.values()))
    text = "softmax ended at {}, adaptive softmax at {}, and a tree with 1,024 and 4,096 frequent"
    text += " pairs at {} and {}."
    yield Claim(LARGE, text, list(pairs.values()))
    text = "With byte pairs it is {} % worse than softmax."
    yield Claim("language_model/README.md", text, [above_pairs["hybrid-4096"]])
    text = "F = 1,024 is {} % above F = 4,096 (on words {} %)"
    numbers = [100 * (tests["hybrid-1024"] / tests["hybrid-4096"] - 1) for tests in (pairs, words)]
    yield Claim("language_model/README.md", text, numbers)
    text = (
        "softmax ended at {}, adaptive softmax at {} and the layer with 1,024 frequent words at {},"
    )
    text += " and in the same training time at {}, {} and {}"
    yield Claim(LARGE, text, [*docs.values(), *shorter])
    text = (
        "| {} % lower (32,768 words, one cutoff), {} % higher (32,768 byte pairs, one), {} % lower"
    )
    numbers = [-above["adaptive-1"], above_pairs["adaptive-1"], below["adaptive-2"]]
    yield Claim(LARGE, text + " (131,072 words, two) |", numbers)
    text = "| {} % higher (32,768 words), {} % higher (32,768 byte pairs); with 1,024 frequent {} %"
    text += " and {} % higher, and {} % lower (131,072 words) |"
    numbers = [percent[f"hybrid-{F}"] for F in (4096, 1024) for percent in (above, above_pairs)]
    yield Claim(LARGE, text, [*numbers, below["hybrid-1024"]])
    yield Claim(LARGE, "| {} % higher (32,768 words) |", [above["tree"]])


def speed() -> Iterator[Claim]:
    """Times and memory in README.md, docs/large.md and the page of the runs."""
    step_times = [float(row["ms"]) for row in select(STEP_TIMES, text="docs")]
    text = "with the GPU to itself ({}, {} and {} ms)"
    yield Claim("language_model/README.md", text, step_times)
    text = "took {} ms with softmax, {} with adaptive softmax and {} with `TreeLinear`"
    yield Claim(LARGE, text, step_times)
    rows = {row["layer"]: row for row in select(LAYERS, BENCHMARK)}
    exact, liger, cut, adaptive, tree, small, large = (
        rows[layer]
        for layer in (
            "linear + cross_entropy",
            "liger",
            "cut-cross-entropy",
            "adaptive softmax",
            "tree sigmoid",
            "hybrid, F = 1024",
            "hybrid, F = 4096",
        )
    )
    text = "forward and backward are {} to {} times faster than linear + cross entropy;"
    text += " with adaptive softmax {} times"
    times = [float(exact[TIME]) / float(row[TIME]) for row in (large, small, adaptive)]
    yield Claim("../README.md", text, times)
    text = (
        "{} times faster than linear + cross_entropy. Liger and cut-cross-entropy are slower than"
    )
    text += " that, and need {} and {} GB instead of {}."
    numbers = [times[1], *(float(row[MEMORY]) for row in (liger, cut, exact))]
    yield Claim("language_model/README.md", text, numbers)
    rows = {row["layer"]: row for row in select(LAYERS, GENERATION)}
    names = ["linear + cross_entropy", "tree sigmoid", "hybrid, F = 4096", "hybrid, F = 1024"]
    names += ["linear + cross_entropy", "tree sigmoid", "hybrid, F = 64", "hybrid, F = 4096"]
    columns = ["sample ms, batch 1"] * 4 + ["MB a sample, batch 1"] * 4
    text = "takes {} ms with a softmax, {} ms with a tree and {} to {} ms with a tree and frequent"
    text += " classes, which read {} MB, {} MB and {} to {} MB of the weight"
    numbers = [float(rows[name][column]) for name, column in zip(names, columns, strict=True)]
    yield Claim(LARGE, text, numbers)
    (uniform,) = select(LAYERS, "targets=uniform commit=b89688e+", layer="tree sigmoid")
    for text, cells in (
        ("`nn.Linear` and `cross_entropy` | | {} ms, {} GB |", [exact[TIME], exact[MEMORY]]),
        (
            "{} ms, {} GB (cut-cross-entropy), {} ms, {} GB (Liger) |",
            [cut[TIME], cut[MEMORY], liger[TIME], liger[MEMORY]],
        ),
        ("{} ms, {} GB (two cutoffs) |", [adaptive[TIME], adaptive[MEMORY]]),
        (
            "{} ms with 4,096 frequent classes, {} ms with 1,024; {} GB |",
            [large[TIME], small[TIME], large[MEMORY]],
        ),
        ("{} ms (uniform targets), {} ms; {} GB |", [uniform[TIME], tree[TIME], tree[MEMORY]]),
    ):
        yield Claim(LARGE, text, list(map(float, cells)))
    for words, layer in (
        ("linear layer, `cross_entropy`", "linear + cross_entropy"),
        ("cut-cross-entropy", "cut-cross-entropy"),
        ("adaptive softmax", "adaptive softmax"),
        ("`TreeLinear`, natural", "tree natural, dense gradient"),
    ):
        pair = select(UNIFORM, "commit=4fe9f1d", layer=layer)
        numbers = [float(row[name]) for row in pair for name in (TIME, "with step ms", MEMORY)]
        yield Claim(LARGE, f"| {words} | {' | '.join(['{}'] * 6)} |", numbers)


def speed_page() -> Iterator[Claim]:
    """docs/speed.md: paths of a tree, and steps of the VAE."""
    page = "../docs/speed.md"
    for head in ("sigmoid", "natural"):
        rows = select("speed/paths_cpu.csv", f"K=1048576 head={head}")
        yield Claim(
            page, f"| {head} | {{}} | {{}} | {{}} | {{}} |", [float(r["ratio"]) for r in rows]
        )
    text = text_of("speed/vae_speed_h200.txt")
    steps = [
        median(map(float, re.findall(rf"{how}, FisherMonitor every step: ([\d.]+) ms", text)))
        for how in ("replayed", "eager")
    ]
    yield Claim(page, "{} ms instead of {} for a step of the VAE on an H200", steps)
