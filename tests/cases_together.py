"""Small tables for tests of runs that are trained together."""

from __future__ import annotations

import yaml

from experiments import plan, stages, sweep

STILL = 1e-12  # a learning rate at which no weight moves
VAE = {
    "options": {"num_latents": 2, "num_categories": 3, "batch_size": 10, "nll_samples": 2},
    "grid": {"variant": ["gray", "binary"], "head": ["softmax", "natural"]},
}
MODELS = {
    "vae": VAE,
    "mlp-vae": VAE | {"grid": {"variant": ["stochastic"], "head": ["sigmoid", "natural"]}},
    "gsl": {
        "options": {"communities": 1, "num_pairs": 100, "num_samples": 4, "test_passes": 1},
        "grid": {"theta": [0.5, 0.75], "head": ["sparsemax", "natural"]},
    },
}


def write_plan(folder, model, data, rates=(STILL,), seeds=(1, 2), **options):
    steps = {"accelerator": "cpu", "max_steps": 7, "val_check_interval": 3, "data.root": str(data)}
    content = {
        "title": "A few steps",
        "model": model,
        "options": MODELS[model]["options"] | steps | options,
        "grid": MODELS[model]["grid"] | {"learning_rate": list(rates)},
        "seeds": list(seeds),
        "metrics": {"val/loss": {"label": "loss"}},
        "differences": [],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run_all(path, folder, *options):
    arguments = [str(path), f"--runs={folder}", "--engine=together", *options]
    assert sweep.main(arguments) == 0
    return stages.known(plan.load(str(path), None, folder))
