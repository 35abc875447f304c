"""Claims about color photographs with one codebook for all latents."""

from __future__ import annotations

from measures import Claims, Runs, curves, factor, log_factors, row, select, welch

ESTIMATORS = {"gumbel": 1.0, "gumbel-rao": 0.5, "reinmax": ""}  # and the first temperature
HEADS = ("softmax", "sigmoid")
QUANTIZERS = {"vq": "VectorQuantize", "fsq": "FSQ"}
METRICS = ["test/bits", "test/bits_fitted", "test/psnr", "test/pooled_perplexity"]


def runs(file: str = "runs", **options: object) -> Runs:
    """Final runs, or their curves."""
    if file == "runs":
        options["stage"] = "final"
    return select(f"photographs/{file}.csv", num_categories=512, **options).sort_index()


def photographs() -> Claims:
    """Heads and estimators at K = 512, and two quantizers in the same networks."""
    for estimator, temperature in ESTIMATORS.items():
        for head in HEADS:
            finals = runs(estimator=estimator, head=head)
            cells = (head, estimator, temperature or "none")
            yield row(*cells), finals["learning_rate"].unique(), finals[METRICS].mean()
    quantized = {}
    for quantizer, name in QUANTIZERS.items():
        finals = quantized[quantizer] = runs(quantizer=quantizer)
        yield row(name, "", ""), finals["learning_rate"].unique(), finals[METRICS].mean()
    # With each head, Gumbel has the lowest mean validation loss.
    softmax, sigmoid = (runs(estimator="gumbel", head=head) for head in HEADS)
    of_steps = log_factors(*(runs("curves", estimator="gumbel", head=head) for head in HEADS))
    yield "photographs.factor", factor(of_steps)
    model = "residual, (64, 512), one codebook, own rates"
    data = "color photographs, 64 x 64"
    yield row(data, model, "straight-through Gumbel", "5,000"), factor(of_steps), len(of_steps)
    of_sigmoid = curves(runs("curves", estimator="gumbel", head="sigmoid")).mean()
    yield "photographs.turn", of_sigmoid.idxmin() + 1
    yield "photographs.bits", welch(sigmoid["test/bits"], softmax["test/bits"])[:3]
    for quantizer, finals in quantized.items():
        for metric in ("bits", "psnr"):
            name = f"test/{metric}"
            yield f"photographs.{quantizer}-{metric}", welch(finals[name], softmax[name])[:3]
