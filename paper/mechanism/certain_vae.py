"""The VAE with a record of its certainty, and a controller that sets its KL to another head's.

    catnat sweep paper/plans/certainty.yaml --engine batched
    python paper/collect_curves.py paper/plans/certainty.yaml --values information largest
    catnat sweep paper/plans/certainty.yaml --scale held --engine batched

Every validation also has val/information (of the latents about an image, in nats: the sum over n of
I(x; z_n)) and val/largest (the largest probability of q, a mean over images and latents).

With ``--like HEAD`` a controller sets the weight of the KL in the first steps. After each step it
compares the loss and the KL of recent batches with the mean curve of that head in the file
``--curves``. Where the KL is above the one that the head has at the same loss, the weight rises,
otherwise it falls. The loss is the negative ELBO, whatever the weight is. From step ``--until`` on
the weight is 1.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from catnat import HeadCategorical
from catnat.checks import require_positive
from catnat.cuda_graph import DeviceScalar
from catnat.lit_modules import DiscreteVAE
from catnat.metrics import RowMeans

CURVES = Path(__file__).parents[1] / "certainty" / "curves.csv"
_MEMORY = 0.98  # of the running means, for each step
_GAIN = 0.005  # change of the log-weight for each step and unit of the log-ratio of KLs
_LIGHTEST, _HEAVIEST = 0.1, 10.0  # weights

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


class CertainVAE(DiscreteVAE):
    """As DiscreteVAE, with a record of certainty and a controller of the KL.

    Logged in addition: val/information and val/largest, and with ``like`` train/held_weight.

    Args:
        like: name of the head whose KL at the same loss the controller aims at; empty for none.
        until: number of steps with the controller.
        curves: file with the columns head, like, step, val/loss and val/kl; empty for that of the
            study, paper/certainty/curves.csv.
        options: those of DiscreteVAE.
    """

    curve_losses: Tensor
    curve_kls: Tensor
    held_weight: Tensor
    recent: Tensor

    def __init__(self, like: str = "", until: int = 5000, curves: str = "", **options: Any) -> None:
        super().__init__(**options)
        require_positive(until=until)
        self.like = like
        self.until = until
        self.is_held = DeviceScalar(1.0)
        self.certainty = RowMeans({"largest": ()})
        if like:
            losses, kls = mean_curve(Path(curves or CURVES), like)
            self.register_buffer("curve_losses", losses, persistent=False)
            self.register_buffer("curve_kls", kls, persistent=False)
            self.register_buffer("held_weight", torch.ones(()))
            self.register_buffer("recent", torch.zeros(3))  # sums of loss, KL and 1; decaying

    # -- the controller ------------------------------------------------------------------------

    def prepare_step(self, step: int) -> None:
        """Set the temperature and weights, and whether the controller is on."""
        super().prepare_step(step)
        self.is_held.set(float(step < self.until))

    def step_loss(self, batch: Any) -> Tensor:
        """The negative ELBO, with the KL weighted by the controller."""
        q = self(batch)
        loss = self.loss(batch, q)
        if not self.like:
            return loss
        kl = self.kl(q).mean()
        weight = 1 + self.is_held() * (self.held_weight.clone() - 1)
        self._adapt(loss.detach(), kl.detach())
        return loss + (weight - 1) * kl

    def _adapt(self, loss: Tensor, kl: Tensor) -> None:
        """Move the weight for the next step, on the device alone."""
        self.recent.mul_(_MEMORY).add_(torch.stack([loss, kl, torch.ones_like(kl)]))
        mean_loss, mean_kl = self.recent[0] / self.recent[2], self.recent[1] / self.recent[2]
        surplus = (mean_kl / self.expected_kl(mean_loss)).log()
        surplus = torch.where(mean_loss < self.curve_losses[0], surplus, 0.0)  # not before
        moved = self.held_weight * (_GAIN * surplus).exp()
        self.held_weight.copy_(moved.clamp(_LIGHTEST, _HEAVIEST))

    def expected_kl(self, loss: Tensor) -> Tensor:
        """The KL of the other head at a loss, linear between its validations."""
        steps = self.curve_losses[:-1] - self.curve_losses[1:]
        passed = ((self.curve_losses[:-1] - loss) / steps).clamp(0, 1)
        return self.curve_kls[0] + (passed * self.curve_kls.diff()).sum()

    def logged_settings(self) -> dict[str, float]:
        """The settings of DiscreteVAE, and the weight that the controller has set."""
        held = {"train/held_weight": float(self.held_weight)} if self.like else {}
        return super().logged_settings() | held

    # -- the record ----------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Forget the rows of a run that was cut short."""
        super().setup(stage)
        self.certainty.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """As DiscreteVAE, and the largest probabilities."""
        super().validation_step(batch, batch_idx)
        q: HeadCategorical = self(batch)
        self.certainty.add_rows(largest=q.probs.amax(-1).mean(-1))

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all images, and metrics that follow from the means."""
        means = super().epoch_metrics(stage, means)
        if stage == "val":
            assert self.usage is not None
            mean_q = self.usage
            uneven = (mean_q.xlogy(mean_q) + mean_q * torch.tensor(mean_q.shape[1]).log()).sum()
            means["information"] = means["kl"] - uneven  # KL(mean q || uniform) is not about x
            means |= self.certainty.compute()
            self.certainty.reset()
        return means


def mean_curve(path: Path, head: str) -> tuple[Tensor, Tensor]:
    """Falling losses and the KLs at them, means over the runs of a head without a controller."""
    if not path.is_file():
        raise ValueError(f"there is no {path}: run the plan's first scale, then collect_curves.py")
    by_step: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["head"] == head and not row.get("like"):
                by_step[int(row["step"])].append((float(row["val/loss"]), float(row["val/kl"])))
    points: list[tuple[float, float]] = []
    for _, values in sorted(by_step.items()):
        loss, kl = (fmean(column) for column in zip(*values, strict=True))
        if not points or loss < points[-1][0]:
            points.append((loss, kl))
    if len(points) < 2:
        raise ValueError(f"{path} has no curve of head {head}")
    losses, kls = torch.tensor(points).unbind(1)
    return losses.contiguous(), kls.contiguous()
