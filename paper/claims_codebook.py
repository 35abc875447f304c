"""Claims about latents that have a codebook each; the runs with one codebook are not made."""

from __future__ import annotations

from measures import Claims, crossings, factor, log_factors, row, select, welch

HEADS = ("softmax", "sigmoid")
METRICS = ["val/loss", "test/elbo", "test/pooled_perplexity"]


def codebook() -> Claims:
    """Softmax and sigmoid, 7 x 7 latents of 32 categories."""
    finals, curves = (
        [select(f"codebook/{file}.csv", shared=False, head=head, **stage) for head in HEADS]
        for file, stage in (("runs", {"stage": "final"}), ("curves", {}))
    )
    for head, runs in zip(HEADS, finals, strict=True):
        yield row("own codebooks", head), runs["learning_rate"].unique(), runs[METRICS].mean()
    yield "codebook.factor", factor(log_factors(*curves))
    softmax, sigmoid = (runs["val/loss"] for runs in finals)
    yield "codebook.loss", welch(sigmoid, softmax)[:3]
    yield "codebook.crossing", crossings(*curves)
    searches = select("codebook/runs.csv", stage="search", shared=True)
    lowest = searches.groupby("head")["val/loss"].min()
    yield "codebook.search", [lowest[head] for head in HEADS]
