"""What every tag of a run means, in a line each, and which charts show the tags together."""

from __future__ import annotations

from typing import Literal

Kind = Literal["vae", "graph", "policy", "other"]

_FISHER = {
    "off_diagonal_mass": "Share of the Fisher matrix off its diagonal, sum_{i≠j} |G_ij| / sum_ij "
    "|G_ij|. Exactly 0 for catnat heads, 1/2 for softmax whatever it learns.",
    "off_diagonal_mass_fro": "Share of the Fisher matrix off its diagonal, in Frobenius norms. "
    "Exactly 0 for catnat heads; for softmax it changes with the scores. Compare heads by it.",
    "off_diagonal_mass_fro_sampled": "The Frobenius share again, from categories drawn at every "
    "step and without the closed form; 0 is shown where the estimate below is negative.",
    "off_diagonal_share_sampled": "An estimate of the squared Frobenius share from drawn "
    "categories, without a floor. Smooth it: its mean over steps converges.",
    "off_diagonal_mass_sampled": "The first share again, of a Fisher matrix estimated from drawn "
    "categories: noise keeps it above 0 for every head. Compare it with other code that draws.",
    "condition_number": "Largest over smallest eigenvalue of the Fisher matrix, on its support. "
    "Follow it within one head: a tree of K categories begins at K/2, because deep nodes are rare.",
    "saturated": "Share of the scores in a flat region of the head, where they get no gradient.",
    "mean": "The mean Fisher matrix G in the scores: red positive, blue negative, one colour scale "
    "for the run. Lines mark the levels of the tree of a catnat head.",
}
_TRAINING = {
    "loss": "Loss of a training batch, which is minimized.",
    "temperature": "Temperature of the relaxed samples.",
    "entropy": "Mean entropy of the policy in the states of a rollout.",
    "entropy_loss": "Minus the mean entropy of the policy.",
    "policy_gradient_loss": "Loss of the policy.",
    "policy_loss": "Loss of the policy.",
    "value_loss": "Loss of the predicted returns.",
    "approx_kl": "How far an update moved the policy: an estimate of the KL divergence.",
    "clip_fraction": "Share of the samples whose probability ratio was clipped.",
    "clip_range": "How far the ratio of probabilities counts.",
    "explained_variance": "How much of the returns' variance the predicted values explain; 1 is "
    "all of it.",
    "grad_norm": "Length of the gradient before it is clipped.",
    "std": "Standard deviation of continuous actions.",
    "learning_rate": "Learning rate of the optimizer.",
    "n_updates": "Updates so far.",
    "return": "Mean return of the last 100 finished games of training.",
}
_ROLLOUT = {
    "ep_rew_mean": "Mean return of the last 100 finished games of training.",
    "ep_len_mean": "Mean length of the last 100 finished games of training, in steps.",
}
_TIME = {
    "fps": "Steps of all environments in a second.",
    "iterations": "Rollouts so far.",
    "time_elapsed": "Seconds since training began.",
    "total_timesteps": "Steps of all environments so far.",
}
_EVALUATED: dict[Kind, dict[str, str]] = {
    "vae": {
        "loss": "Mean loss of an image, one sample each.",
        "elbo": "Evidence lower bound of an image in nats; higher is better.",
        "kl": "KL divergence of q(z | x) from the uniform prior, summed over latents, in nats.",
        "nll": "Negative log-likelihood of an image in nats, importance-weighted; lower is better.",
        "saturated": _FISHER["saturated"],
        "information": "Mutual information of image and latents in nats; 0: latents say nothing.",
        "collapsed": "1 if the latents tell (almost) nothing about an image, otherwise 0.",
    },
    "graph": {
        "loss": "Energy score with the samples of training; lower is better.",
        "energy_score": "Energy score of the predictions; lower is better.",
        "energy_score_2x": "Twice the energy score, as in the paper's table.",
        "pp_mae": "Absolute error of the median prediction.",
        "pp_mse": "Squared error of the mean prediction.",
        "saturated": _FISHER["saturated"],
        "theta_mae": "Mean absolute error of the edge probabilities, against the true ones.",
        "dead_edges": "True edges whose learned probability is exactly 0.",
        "calibration": "Error of the edge probabilities that are neither 0 nor 1 in truth.",
        "gap_2x": "Twice the energy score, minus that of the true model; 0 is perfect.",
    },
    "policy": {
        "return": "Mean return of the evaluated games; higher is better.",
        "return_std": "Standard deviation of the return over the evaluated games.",
        "length": "Mean length of the evaluated games, in steps.",
    },
    "other": {"loss": "Mean loss; lower is better."},
}
_PICTURES = {
    "images/reconstructions": "Images above, their reconstructions below.",
    "images/prior": "Images decoded from draws of the prior.",
    "latents/usage": "Mean probability of each category (columns) of each latent (rows): black "
    "never, white always.",
    "graph/theta": "Edge probabilities, black 0 and white 1: learned on the left, true on the "
    "right. An edge goes from the row's node to the column's.",
    "game": "A game played at the end of training.",
}
_SHOWN_BY: dict[str, Kind] = {
    "images/reconstructions": "vae",
    "images/prior": "vae",
    "latents/usage": "vae",
    "graph/theta": "graph",
    "game": "policy",
}
_TESTED_ONLY = ("nll", "saturated", "information", "collapsed")  # of a VAE
_WHERE = {"val": "Validation", "test": "Test at the end", "eval": "Evaluation during training"}
# The loss of each kind of model has a text of its own: the common one stands on cards.
_ALL_EVALUATED = {name: said for names in _EVALUATED.values() for name, said in
                  names.items()}  # fmt: skip

# Charts of the CUSTOM SCALARS tab: group, title, and a regular expression for the tags of each.
_FIM = "^fim/(.+/)?"
_CHARTS = {
    "Fisher": {
        "off-diagonal mass (Frobenius)": [f"{_FIM}off_diagonal_mass_fro$"],
        "off-diagonal share, sampled": [f"{_FIM}off_diagonal_share_sampled$"],
        "off-diagonal mass (l1), exact and sampled": [f"{_FIM}off_diagonal_mass(_sampled)?$"],
        "condition number": [f"{_FIM}condition_number$"],
        "saturated scores": [f"{_FIM}saturated$"],
    }
}
_CHARTS_OF: dict[Kind, dict[str, dict[str, list[str]]]] = {
    "vae": {
        "loss": {"loss": ["^(train|val)/loss$"]},
        "evaluation": {
            "ELBO": ["^(val|test)/elbo$"],
            "KL": ["^(val|test)/kl$"],
            "test: negative log-likelihood": ["^test/nll$"],
        },
    },
    "graph": {
        "loss": {"loss": ["^(train|val)/loss$"]},
        "evaluation": {
            "energy score": ["^(val|test)/energy_score$"],
            "error of the edge probabilities": ["^(val|test)/theta_mae$"],
            "dead edges": ["^(val|test)/dead_edges$"],
            "error of the predictions": ["^(val|test)/pp_mae$"],
        },
    },
    "policy": {
        "loss": {"policy": ["^train/policy.*loss$"], "value": ["^train/value_loss$"]},
        "evaluation": {
            "return": ["^rollout/ep_rew_mean$", "^(eval|test)/return$"],
            "entropy": ["^train/entropy$"],
            "length of a game": ["^rollout/ep_len_mean$", "^(eval|test)/length$"],
        },
    },
    "other": {
        "loss": {"loss": ["^(train|val|test)/loss$"]},
        "evaluation": {"metrics": ["^(val|test)/(?!loss$)"]},
    },
}


def charts(kind: Kind) -> dict[str, dict[str, list[str]]]:
    """Charts for a kind of model: by group, by title, regular expressions of their tags."""
    return _CHARTS | _CHARTS_OF[kind]


def explanation(tag: str) -> str:
    """What a tag means, in a line; empty for a tag that is not ours."""
    group, _, name = tag.partition("/")
    name = name.rpartition("/")[2]  # fim/<head>/saturated, latents/<head>/usage
    if group in _WHERE and name in _ALL_EVALUATED:
        return f"{_WHERE[group]}. {_ALL_EVALUATED[name]}"
    tables = {"fim": _FISHER, "train": _TRAINING, "rollout": _ROLLOUT, "time": _TIME}
    return tables.get(group, {}).get(name) or _PICTURES.get(f"{group}/{name}".rstrip("/"), "")


def guide(kind: Kind) -> str:
    """A page in Markdown: the tags of a kind of model, with what each means."""
    tested = _TESTED_ONLY if kind == "vae" else ()
    evaluated = {
        f"{'test' if name in tested else '(val, test)'}/{name}": said
        for name, said in _EVALUATED[kind].items()
    }
    trained = {"train/loss": _TRAINING["loss"]}
    if kind == "vae":
        trained["train/temperature"] = _TRAINING["temperature"]
    if kind == "policy":
        evaluated = {f"(eval, test)/{name}": said for name, said in _EVALUATED[kind].items()}
        others = ("loss", "temperature")
        trained = {f"train/{name}": _TRAINING[name] for name in _TRAINING if name not in others}
        trained |= {f"rollout/{name}": said for name, said in _ROLLOUT.items()}
    tables = {
        "Fisher": {f"fim/{name}": said for name, said in _FISHER.items()},
        "Training": trained,
        "Evaluation": evaluated,
        "Pictures": {tag: said for tag, said in _PICTURES.items() if _SHOWN_BY[tag] == kind},
    }
    lines = [
        "# How to read this run",
        "Every tag below is a card under TIME SERIES or IMAGES. CUSTOM SCALARS shows them in "
        "groups, with all chosen runs in one chart. HPARAMS compares runs by their options. "
        "Started with `--load_fast=false`, TensorBoard shows the line of a tag on its card, too.",
    ]
    for title, table in tables.items():
        if not table:
            continue
        rows = [f"| `{tag}` | {said.replace('|', '&#124;')} |" for tag, said in table.items()]
        lines += [f"## {title}", "\n".join(["| tag | meaning |", "|---|---|", *rows])]
    return "\n\n".join(lines)
