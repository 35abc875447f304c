"""What TensorBoard shows of a run: values, charts in groups, a line about each tag, hparams."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams as hparam_summaries
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

Kind = Literal["vae", "graph", "policy", "other"]

# Tags that a run writes once; a run that continues writes them again.
WRITTEN_ONCE = ("_hparams_/", "custom_scalars__config__", "guide/")
_COMPARED = (
    "head", "num_latents", "num_categories", "learning_rate", "seed", "steps",
    "source", "estimator", "env",
)  # fmt: skip

# -- what every tag means, in a line ---------------------------------------------------------------

_SATURATED = "Share of the scores in a flat region of the head, where they get no gradient."
_FISHER = {
    "fim/off_diagonal_mass": "Share of the Fisher matrix off its diagonal, sum_{i≠j} |G_ij| / "
    "sum_ij |G_ij|. Exactly 0 for catnat heads. 1/2 for softmax whatever it learns, because the "
    "rows of its matrix sum to zero.",
    "fim/off_diagonal_mass_fro": "Share of the Fisher matrix off its diagonal, in Frobenius norms. "
    "Exactly 0 for catnat heads; for softmax it changes with the scores. Compare heads by it.",
    "fim/picture": "The mean Fisher matrix G in the scores: red positive, blue negative, one color "
    "scale for the run. Lines mark the levels of the tree of a catnat head.",
    "fim/saturated": _SATURATED,
    "fim_sampled/off_diagonal_mass": "The l1 share again, of a Fisher matrix estimated from the "
    "categories drawn at this step: noise keeps it above 0 for every head. Compare it with other "
    "code that draws.",
    "fim_sampled/off_diagonal_mass_fro": "The Frobenius share again, from categories drawn at "
    "every step and without the closed form: the root of the share below, 0 where that is "
    "negative.",
    "fim_sampled/off_diagonal_share": "An estimate of the squared Frobenius share from drawn "
    "categories, without a floor: two sums over the latest steps (a step counts half as much 34 "
    "steps later), divided by each other.",
    "fim_spectrum/condition_number": "Largest over smallest eigenvalue of the Fisher matrix, on "
    "its support. Follow it within one head: a tree of K categories begins at K/2, because deep "
    "nodes are rare.",
}
_TRAINING: dict[Kind, dict[str, str]] = {
    "vae": {
        "train/loss": "Loss of a training batch, which is minimized.",
        "train/temperature": "Temperature of the relaxed samples.",
    },
    "graph": {"train/loss": "Loss of a training batch, which is minimized."},
    "policy": {
        "train/entropy": "Mean entropy of the policy in the states of a rollout.",
        "train/entropy_loss": "Minus the mean entropy of the policy.",
        "train/policy_gradient_loss": "Loss of the policy.",
        "train/policy_loss": "Loss of the policy.",
        "train/value_loss": "Loss of the predicted returns.",
        "train/approx_kl": "How far an update moved the policy: an estimate of the KL divergence.",
        "train/clip_fraction": "Share of the samples whose probability ratio was clipped.",
        "train/clip_range": "How far the ratio of probabilities counts.",
        "train/explained_variance": "How much of the returns' variance the predicted values "
        "explain; 1 is all of it.",
        "train/grad_norm": "Length of the gradient before it is clipped.",
        "train/std": "Standard deviation of continuous actions.",
        "train/learning_rate": "Learning rate of the optimizer.",
        "train/n_updates": "Updates so far.",
        "train/return": "Mean return of the last 100 finished games of training.",
        "rollout/ep_rew_mean": "Mean return of the last 100 finished games of training.",
        "rollout/ep_len_mean": "Mean length of the last 100 finished games of training, in steps.",
        "time/fps": "Steps of all environments in a second.",
        "time/iterations": "Rollouts so far.",
        "time/time_elapsed": "Seconds since training began.",
        "time/total_timesteps": "Steps of all environments so far.",
    },
    "other": {"train/loss": "Loss of a training batch, which is minimized."},
}
_EVALUATED: dict[Kind, dict[str, str]] = {
    "vae": {
        "elbo": "Evidence lower bound of an image in nats; higher is better.",
        "kl": "KL divergence of q(z | x) from the uniform prior, summed over latents, in nats.",
        "nll": "Negative log-likelihood of an image in nats, importance-weighted; lower is better.",
        "saturated": _SATURATED,
        "information": "Mutual information of image and latents in nats; 0: latents say nothing.",
        "collapsed": "1 if the latents tell (almost) nothing about an image, otherwise 0.",
    },
    "graph": {
        "energy_score": "Energy score of the predictions; lower is better.",
        "energy_score_2x": "Twice the energy score, as in the paper's table.",
        "pp_mae": "Absolute error of the median prediction.",
        "pp_mse": "Squared error of the mean prediction.",
        "saturated": _SATURATED,
        "theta_mae": "Mean absolute error of the edge probabilities, against the true ones.",
        "dead_edges": "True edges whose learned probability is exactly 0.",
        "calibration": "Calibration error of the edge probabilities, over ten bins.",
        "gap_2x": "Twice the energy score, minus that of the true model; 0 is perfect.",
    },
    "policy": {
        "return": "Mean return of the evaluated games; higher is better.",
        "return_std": "Standard deviation of the return over the evaluated games.",
        "length": "Mean length of the evaluated games, in steps.",
    },
    "other": {},
}
_PICTURES: dict[Kind, dict[str, str]] = {
    "vae": {
        "images/reconstructions": "Images above, their reconstructions below.",
        "images/prior": "Images decoded from draws of the prior.",
        "latents/usage": "Mean probability of each category (columns) of each latent (rows): "
        "black never, white always.",
    },
    "graph": {
        "graph/theta": "Edge probabilities, black 0 and white 1: learned on the left, true on the "
        "right. An edge goes from the row's node to the column's.",
    },
    "policy": {"game": "A game played at the end of training."},
    "other": {},
}
_WHERE = {"val": "Validation", "test": "Test at the end", "eval": "Evaluation during training"}
_LOSS = "Mean loss; lower is better."
_ALL = _FISHER | {tag: said for group in (_TRAINING, _PICTURES) for each in group.values()
                  for tag, said in each.items()}  # fmt: skip
_ALL_EVALUATED = {"loss": _LOSS} | {
    name: said for each in _EVALUATED.values() for name, said in each.items()
}


def explanation(tag: str) -> str:
    """What a tag means, in a line; empty for a tag that is not ours."""
    group, _, rest = tag.partition("/")
    name = rest.rpartition("/")[2]  # fim/<head>/saturated, latents/<head>/usage
    if group in _WHERE:
        return f"{_WHERE[group]}. {_ALL_EVALUATED[name]}" if name in _ALL_EVALUATED else ""
    return _ALL.get(f"{group}/{name}".rstrip("/"), "")


def guide(kind: Kind) -> str:
    """A page in Markdown: the tags of a kind of model, with what each means."""
    where = "eval, test" if kind == "policy" else "val, test"
    evaluated = {} if kind == "policy" else {"loss": _LOSS}
    evaluated |= _EVALUATED[kind]
    tables = {
        "Fisher": _FISHER,
        "Training": _TRAINING[kind],
        "Evaluation": {f"({where})/{name}": said for name, said in evaluated.items()},
        "Pictures": _PICTURES[kind],
    }
    lines = [
        "# How to read this run",
        "Every tag below is a card under TIME SERIES or IMAGES. CUSTOM SCALARS shows them in "
        "groups, with all chosen runs in one chart. HPARAMS compares runs by their options. "
        "Started with `--load_fast=false`, TensorBoard shows the line of a tag on its card, too.",
    ]
    for title, table in tables.items():
        rows = [f"| `{tag}` | {said.replace('|', '&#124;')} |" for tag, said in table.items()]
        if rows:
            lines += [f"## {title}", "\n".join(["| tag | meaning |", "|---|---|", *rows])]
    return "\n\n".join(lines)


# -- charts of the CUSTOM SCALARS tab: group, title, a regular expression for the tags of each -----

_HEAD = "(.+/)?"  # the name of a head, where there are several
_FISHER_CHARTS = {
    "off-diagonal mass (l1)": [f"^fim/{_HEAD}off_diagonal_mass$"],
    "off-diagonal mass (Frobenius)": [f"^fim/{_HEAD}off_diagonal_mass_fro$"],
    "off-diagonal share, from draws": [f"^fim_sampled/{_HEAD}off_diagonal_share$"],
    "condition number": [f"^fim_spectrum/{_HEAD}condition_number$"],
    "saturated scores": [f"^fim/{_HEAD}saturated$"],
}
_EVALUATION_CHARTS: dict[Kind, dict[str, list[str]]] = {
    "vae": {
        "ELBO": ["^(val|test)/elbo$"],
        "KL": ["^(val|test)/kl$"],
        "test: negative log-likelihood": ["^test/nll$"],
    },
    "graph": {
        "energy score": ["^(val|test)/energy_score$"],
        "error of the edge probabilities": ["^(val|test)/theta_mae$"],
        "dead edges": ["^(val|test)/dead_edges$"],
        "error of the predictions": ["^(val|test)/pp_mae$"],
    },
    "policy": {
        "return": ["^rollout/ep_rew_mean$", "^(eval|test)/return$"],
        "entropy": ["^train/entropy$"],
        "length of a game": ["^rollout/ep_len_mean$", "^(eval|test)/length$"],
    },
    "other": {"metrics": ["^(val|test)/(?!loss$)"]},
}
_POLICY_LOSSES = {"policy": ["^train/policy.*loss$"], "value": ["^train/value_loss$"]}


def charts(kind: Kind) -> dict[str, dict[str, list[str]]]:
    """Charts for a kind of model: by group, by title, regular expressions of their tags."""
    losses = _POLICY_LOSSES if kind == "policy" else {"loss": ["^(train|val|test)/loss$"]}
    return {"Fisher": _FISHER_CHARTS, "loss": losses, "evaluation": _EVALUATION_CHARTS[kind]}


def kind_of(model: LightningModule) -> Kind:
    """Which charts suit a model."""
    # hasattr would compute theta, which may not be possible before the first batch.
    if isinstance(getattr(type(model), "theta", None), property):
        return "graph"
    return "vae" if hasattr(model, "sample_prior") else "other"


# -- writing ---------------------------------------------------------------------------------------


class RunWriter(SummaryWriter):
    """TensorBoard's writer; the first value of each tag says what the tag means."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _ExplainingWriter(
                self.log_dir, self.max_queue, self.flush_secs, self.filename_suffix
            )
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        writer: FileWriter = self.file_writer
        return writer


class _ExplainingWriter(FileWriter):
    _seen: frozenset[str] = frozenset()

    def add_summary(
        self, summary: Any, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        for value in summary.value:
            if value.tag not in self._seen:
                self._seen |= {value.tag}
                if said := explanation(value.tag):
                    value.metadata.summary_description = said
                    plugin = "images" if value.HasField("image") else "scalars"
                    value.metadata.plugin_data.plugin_name = plugin
        super().add_summary(summary, global_step, walltime)


def write_rows(logger: Logger, rows: dict[int, dict[str, float]]) -> None:
    """Give a logger the values of some steps, by step and then by tag."""
    if not isinstance(logger, TensorBoardLogger):
        for step, row in rows.items():
            logger.log_metrics(row, step)
        return
    writer = logger.experiment._get_file_writer()
    for step, row in rows.items():  # one event for each step, not one for each value
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
        writer.add_summary(Summary(value=values), step)


def write_layout(writer: SummaryWriter, kind: Kind) -> None:
    """Write the charts of the CUSTOM SCALARS tab, and the page that explains the tags."""
    layout = {
        group: {title: ["Multiline", tags] for title, tags in each.items()}
        for group, each in charts(kind).items()
    }
    writer.add_custom_scalars(layout)
    writer.add_text("guide", guide(kind), 0)


def write_hparams(writer: SummaryWriter, hparams: dict[str, Any], metrics: list[str]) -> None:
    """Write the row of a run in the HPARAMS tab, with the names of its metrics.

    The columns by which runs are compared are marked: TensorBoard shows marked ones first.
    """
    plain = (bool, int, float, str)
    shown = {name: v if isinstance(v, plain) else str(v) for name, v in hparams.items()}
    experiment, *others = hparam_summaries(shown, dict.fromkeys(metrics, 0.0))
    content = experiment.value[0].metadata.plugin_data
    parsed = HParamsPluginData.FromString(content.content)
    for info in parsed.experiment.hparam_infos:
        info.differs = info.name in _COMPARED
    content.content = parsed.SerializeToString()
    for summary in (experiment, *others):
        writer._get_file_writer().add_summary(summary)
