"""Learning the structure of a random graph from predictions that are made with it."""

from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from catnat.checks import require_at_least, require_choice, require_name, require_positive
from catnat.cuda_graph import DeviceScalar
from catnat.distributions import HeadCategorical
from catnat.graphs import (
    GCN,
    as_predictor,
    local_expectation_direction,
    sample_graphs,
    score_function_direction,
)
from catnat.heads import make_head
from catnat.lit_modules.step_module import StepModule
from catnat.losses import energy_from_terms, energy_terms
from catnat.metrics import RowMeans, edge_errors, prediction_errors

Estimator = Literal["score_function", "local_expectation"]
Schedule = Literal["constant", "linear"]

# Within the paper's grids, or tried at θ* = 0.75; softmax's half of sigmoid's: the same in θ.
# Natural's with the score function is what searches select: above 0.006 true edges often die.
_LEARNING_RATES = {
    "score_function": {"softmax": 0.0225, "sparsemax": 0.005, "sigmoid": 0.045, "natural": 0.005},
    "local_expectation": {"softmax": 0.05, "sparsemax": 0.005, "sigmoid": 0.1, "natural": 0.05},
}
_OTHER_LEARNING_RATE = 0.02  # of heads defined elsewhere
_PSI_LEARNING_RATE = 0.05
_FLIP_SAMPLES = 8  # with more, gradients have less noise and steps take longer


class GraphStructureLearner(StepModule):
    r"""Learns θ_ji, the probability of an edge from node j to node i, and psi of the predictor.

    Each of the N^2 possible edges is a categorical variable of K = 2 (0: absent, 1: present) with
    scores of its own. M graphs A_m are drawn and shared by a batch of pairs (x, y). The predictions
    f_m = f(x, A_m) are compared with y by the energy score,

    .. math:: \frac1M \sum_m |f_m - y| - \frac1{2M(M-1)} \sum_{m \neq n} |f_m - f_n|.

    psi gets the pathwise gradient, θ the gradient of an estimator. "score_function", with
    leave-one-out baselines in both terms, works with every predictor. "local_expectation" flips
    each edge in turn: its variance is far lower, and edges that are never sampled get a gradient,
    too. It needs a predictor that is linear in the edges, such as the default,
    ``catnat.graphs.GCN``. The recipe for local expectation: ``lr_schedule="linear"`` and an epoch
    of ``psi_warmup_steps`` (a wrong psi would drive all edges to zero, where saturating heads
    stay).

    A batch is (x, y), x (B, N, in_features) and y (B, N, out_features). Subclasses override
    :meth:`scores`, which may read the batch, or :meth:`loss`. With several ranks each rank draws
    its own graphs: the expected gradient is the same as with shared graphs, and its variance lower.

    Logged: train/loss; val/loss; and for val/ and test/: energy_score, energy_score_2x (the
    paper's table has twice its formula), pp_mae (of the median of M samples), pp_mse (of their
    mean), saturated (share of scores in a flat region of the head). Where the data module knows
    the truth (``edge_probs``, ``optimal``): theta_mae; dead_edges, the number of true edges with
    θ = 0; calibration, see :mod:`catnat.metrics`; and test/gap_2x, energy_score_2x minus that of
    the true model. Evaluation draws noise of its own, the same each time.

    Args:
        head: a name from ``catnat.head_names()``.
        num_nodes: N.
        in_features: of a node's x.
        out_features: of a node's y.
        num_samples: M, graphs per batch.
        estimator: of the gradient in θ, "score_function" or "local_expectation".
        learning_rate: of the scores. None: a value that suits the head and the estimator.
        psi_learning_rate: of the predictor. None: as ``learning_rate``; 0.05 with local
            expectation, where psi must be right when the warm-up ends.
        lr_schedule: "constant", or "linear", to zero at the end of the run, also of a resumed one.
        psi_warmup_steps: steps that train psi alone, at the beginning.
        predictor: any module that takes x (B, N, D) and graphs (M, N, N) and gives
            (M, B, N, out_features), or any convolution of torch-geometric. None: a GCN.
        head_options: options of the head, such as ``amplitude`` for natural.
        capture: replay training steps as CUDA graphs, faster and with the same results. None:
            wherever that is possible, and the predictor is the default one.
        test_passes: passes over the test pairs, each with new graphs; the energy_score_2x of one
            pass has a noise of about 0.015.
    """

    options_of_data = ("num_nodes", "in_features", "out_features")  # on the command line

    def __init__(
        self,
        head: str = "natural",
        num_nodes: int = 24,
        in_features: int = 4,
        out_features: int = 2,
        num_samples: int = 32,
        estimator: Estimator = "score_function",
        learning_rate: float | None = None,
        psi_learning_rate: float | None = None,
        lr_schedule: Schedule = "constant",
        psi_warmup_steps: int = 0,
        predictor: nn.Module | None = None,
        head_options: dict[str, Any] | None = None,
        capture: bool | None = None,
        test_passes: int = 16,
    ) -> None:
        super().__init__(capture)
        require_name(head=head)
        self.head = make_head(head, 2, **(head_options or {}))
        require_choice(get_args(Estimator), estimator=estimator)
        require_choice(get_args(Schedule), lr_schedule=lr_schedule)
        if learning_rate is None:
            learning_rate = _LEARNING_RATES[estimator].get(self.head.name, _OTHER_LEARNING_RATE)
        if psi_learning_rate is None:
            local = estimator == "local_expectation"
            psi_learning_rate = _PSI_LEARNING_RATE if local else learning_rate
        require_positive(
            num_nodes=num_nodes,
            in_features=in_features,
            out_features=out_features,
            learning_rate=learning_rate,
            psi_learning_rate=psi_learning_rate,
            test_passes=test_passes,
        )
        require_at_least(0, psi_warmup_steps=psi_warmup_steps)
        require_at_least(3, num_samples=num_samples)
        self.save_hyperparameters(ignore=["capture", "predictor", "test_passes"])
        predictor = GCN(in_features, out_features) if predictor is None else predictor
        self.predictor = as_predictor(predictor)
        if estimator == "local_expectation" and not hasattr(self.predictor, "messages"):
            raise ValueError(
                "estimator 'local_expectation' needs a predictor that is linear in the edges, with "
                f"a method messages(x) like catnat.graphs.GCN; {type(predictor).__name__} has "
                "none: choose estimator 'score_function'"
            )
        self.num_nodes = num_nodes
        self.num_samples = num_samples
        self.estimator = estimator
        # Graphs flipped edge by edge for each pair, which take turns, so that all graphs count.
        self.flip_samples = min(_FLIP_SAMPLES, num_samples)
        self.test_passes = test_passes
        self.learning_rates = (learning_rate, psi_learning_rate)
        self.lr_schedule = lr_schedule
        self.psi_warmup_steps = psi_warmup_steps
        self.edge_scores = nn.Parameter(self.initial_scores())
        self.theta_moves = DeviceScalar(1.0)  # 0 while psi is trained alone
        self._sets_rates = False  # not those of an optimizer that is not our own
        errors = dict.fromkeys(("energy_score", "pp_mae", "pp_mse", "saturated"), ())
        shapes = {**errors, "theta": (num_nodes, num_nodes)}
        self.val_means = RowMeans({"loss": (), **shapes})
        self.test_means = RowMeans(shapes)
        self._latest_batch = None  # of an evaluation

    def initial_scores(self, low: float = 0.0, high: float = 0.1) -> Tensor:
        """Scores (N, N, S) of θ ~ U(low, high)."""
        theta = torch.empty(self.num_nodes, self.num_nodes).uniform_(low, high)
        scores = self.head.inverse(torch.stack([1 - theta, theta], -1))
        # Softmax and sparsemax have many scores with this θ: take those with mean zero.
        centered = scores - scores.mean(-1, keepdim=True)
        keeps_theta = torch.allclose(self.head.probs(centered), self.head.probs(scores), atol=1e-6)
        return centered if keeps_theta else scores

    def scores(self, batch: Any) -> Tensor:
        """Scores of the head for every edge, (N, N, S)."""
        return self.edge_scores

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The energy score, a scalar, with gradients for θ and psi; q has batch shape (N, N)."""
        x, y = self._pair(batch)
        theta = q.probs[..., 1]
        graphs = sample_graphs(theta, self.num_samples)
        outputs = self.predictor(x, graphs)  # (M, B, N, out_features)
        error, distance = energy_terms(outputs.flatten(2), y.flatten(1))
        score = energy_from_terms(error, distance).mean()
        if not torch.is_grad_enabled():  # of theta it is not known under vmap
            return score
        if self.estimator == "score_function":
            direction = score_function_direction(error, distance, graphs)
            surrogate = (direction * (q.logits[..., 1] - q.logits[..., 0])).sum()
        else:
            messages = self.predictor.messages(x)  # type: ignore[operator]
            direction = local_expectation_direction(messages, outputs, y, graphs, self.flip_samples)
            surrogate = (direction * theta).sum()
        return score + (surrogate - surrogate.detach())  # plus exactly zero

    def forward(self, batch: Any) -> HeadCategorical:
        """The distribution of the edges, of batch shape (N, N)."""
        return self.head(self.scores(batch))

    @property
    def theta(self) -> Tensor:
        """Probabilities of the edges as they are now, (N, N) without gradient.

        Where :meth:`scores` reads the batch, these are the probabilities for the batch that was
        evaluated last.
        """
        batch = self.transfer_batch_to_device(self._latest_batch, self.device, 0)
        with torch.no_grad():
            return self.head.probs(self.scores(batch))[..., 1]

    # -- training --------------------------------------------------------------------------

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, a scalar; no gradient for θ while psi is trained alone."""
        scores = self.scores(batch)
        fixed = scores.detach()
        # Plus exactly zero; its gradient is zero too where theta_moves is 0.
        scores = fixed + self.theta_moves() * (scores - fixed)
        return self.loss(batch, self.head(scores))

    def why_host_needed(self) -> str | None:
        """A predictor that lists the edges of a graph needs the host."""
        if isinstance(self.predictor, GCN) or self.capture:
            return None
        return "the predictor may wait for the device"

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, with one learning rate for the scores and one for the predictor."""
        psi = set(self.predictor.parameters())
        theta_rate, psi_rate = self.learning_rates
        groups = [
            {"params": [p for p in self.parameters() if p not in psi], "lr": theta_rate},
            {"params": self.predictor.parameters(), "lr": psi_rate},
        ]
        self._sets_rates = True
        return self.make_optimizer(torch.optim.Adam, groups)

    def on_train_start(self) -> None:
        """Find out how many steps a linear schedule has; set the learning rates of a constant one.

        Those of a checkpoint may be others.
        """
        super().on_train_start()
        self._num_steps = self.trainer.estimated_stepping_batches
        has_end = 0 < self._num_steps < torch.inf
        if self.lr_schedule == "linear" and not (has_end and self._sets_rates):
            raise ValueError("lr_schedule 'linear' needs max_steps, and the model's own optimizer")
        if self._sets_rates:
            self.set_learning_rates(*self.learning_rates)

    def prepare_step(self, step: int) -> None:
        """Set the learning rates of a step, and whether θ moves in it."""
        if self.lr_schedule == "linear":
            factor = max(1 - step / self._num_steps, 0.0)
            self.set_learning_rates(*(rate * factor for rate in self.learning_rates))
        self.theta_moves.set(step >= self.psi_warmup_steps)

    # -- evaluation ------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One pass."""
        with self.evaluation_noise(batch_idx):
            loss = self.loss(batch, self(batch))
            self.val_means.add_rows(**self._rows(batch), loss=loss.expand(len(batch[1])))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """``test_passes`` passes."""
        with self.evaluation_noise(batch_idx):
            for _ in range(self.test_passes):
                self.test_means.add_rows(**self._rows(batch))

    def _rows(self, batch: Any) -> dict[str, Tensor]:
        """Errors of the predictions of one pass for each pair of a batch, and the present θ."""
        self._latest_batch = batch
        x, y = self._pair(batch)
        scores = self.scores(batch)
        theta = self.head(scores).probs[..., 1]
        graphs = sample_graphs(theta, self.num_samples)
        saturated = self.head.saturated(scores).double().mean()
        return {
            **prediction_errors(self.predictor(x, graphs), y),
            "saturated": saturated.expand(len(y)),
            "theta": theta.double().expand(len(y), -1, -1),
        }

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """x and y, after checking the shapes that the default predictor needs."""
        x, y = batch
        if isinstance(self.predictor, GCN):
            N, (D, E) = self.num_nodes, self.predictor.weight.shape
            if x.shape[1:] != (N, D) or y.shape[1:] != (N, E):
                raise ValueError(
                    f"x {tuple(x.shape)} and y {tuple(y.shape)} of a batch do not fit num_nodes "
                    f"{N}, in_features {D} and out_features {E}"
                )
        return x, y

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all pairs, and the distance from the truth where it is known."""
        theta = means.pop("theta").float()
        means["energy_score_2x"] = 2 * means["energy_score"]
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage == "test" and hasattr(data, "optimal"):
            means["gap_2x"] = means["energy_score_2x"] - data.optimal["energy_score_2x"]
        if (truth := getattr(data, "edge_probs", None)) is not None:
            means |= edge_errors(theta, truth.to(self.device))
        return means
