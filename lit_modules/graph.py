"""Learn the structure of a random graph from predictions along its edges."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from catnat.checks import (
    plain_options,
    require_at_least,
    require_choice,
    require_name,
    require_positive,
)
from catnat.compiling import compiled_in_parts
from catnat.cuda_graph import DeviceScalar
from catnat.distributions import HeadCategorical
from catnat.graphs import (
    GCN,
    as_data,
    as_pair,
    as_predictor,
    local_expectation_direction,
    sample_graphs,
    score_function_direction,
)
from catnat.heads.registry import make_head
from catnat.lit_modules.faults import checked_scores
from catnat.lit_modules.step_module import StepModule
from catnat.losses import energy_from_terms, energy_terms
from catnat.metrics import RowMeans, edge_errors, prediction_errors

if TYPE_CHECKING:
    from torch_geometric.data import Data

# From the paper's grids, or from runs at θ* = 0.75. Softmax has half the rate of sigmoid, which
# gives equal steps in θ. Searches select this rate of natural: above 0.006 true edges often die.
_LEARNING_RATES = {
    "score_function": {"softmax": 0.0225, "sparsemax": 0.005, "sigmoid": 0.045, "natural": 0.005},
    "local_expectation": {"softmax": 0.05, "sparsemax": 0.005, "sigmoid": 0.1, "natural": 0.05},
}
_OTHER_LEARNING_RATE = 0.02  # for custom heads
_PSI_LEARNING_RATE = 0.05
_FLIP_SAMPLES = 8  # more samples reduce the noise of gradients, but steps take longer


class GraphStructureLearner(StepModule):
    r"""Learns edge probabilities θ_ji (from node j to node i) and the weights psi of a predictor.

    Each of the N^2 possible edges is a categorical variable with K = 2 (0: absent, 1: present) and
    its own scores. All pairs (x, y) of a batch share M graphs A_m. The loss compares the
    predictions f_m = f(x, A_m) with y by the energy score,

    .. math:: \frac1M \sum_m |f_m - y| - \frac1{2M(M-1)} \sum_{m \neq n} |f_m - f_n|.

    psi gets the pathwise gradient, and θ the gradient of an estimator. "score_function" has
    leave-one-out baselines in both terms and works with every predictor. "local_expectation" flips
    each edge in turn: its variance is far lower, and edges that are never sampled also get a
    gradient. It requires a predictor that is linear in the edges, such as the default
    ``catnat.graphs.GCN``. Use it with a linear ``lr_scheduler`` that ends at zero,
    ``functools.partial(torch.optim.lr_scheduler.PolynomialLR, total_iters=max_steps)``, and with
    one epoch of ``psi_warmup_steps``: an untrained psi drives all edges to zero, where saturating
    heads get no gradient.

    A batch is (x, y), x (B, N, in_features) and y (B, N, out_features), or torch-geometric's
    ``Data`` or ``Batch`` with x and y. Subclasses override :meth:`scores`, which may read the
    batch, or :meth:`loss`. With several ranks each rank draws its own graphs, which lowers the
    variance of the gradient. :meth:`graph` returns the learned graph as ``Data``, and
    :meth:`sample_graphs` returns random graphs.

    A run warns once when true edges die, because dead edges no longer get a gradient.

    Logged: train/loss; val/loss; and for val/ and test/: energy_score, energy_score_2x (the paper's
    table has twice its formula), pp_mae (of the median of M samples), pp_mse (of their mean),
    saturated (share of scores in a flat region of the head). If the data module has the true model
    (``edge_probs``, ``optimal``): theta_mae; dead_edges, the number of true edges with θ = 0;
    calibration, see :mod:`catnat.metrics`; and test/gap_2x, energy_score_2x minus that of the true
    model. Every evaluation draws the same noise.

    Args:
        head: a name from ``catnat.head_names()``.
        num_nodes: number of nodes (N).
        in_features: number of features of each node.
        out_features: number of outputs of each node.
        num_samples: number of graphs for each batch (M).
        estimator: gradient estimator for θ, "score_function" or "local_expectation",
            with underscores or hyphens.
        learning_rate: learning rate of the scores. None: a value for the head and the estimator.
        psi_learning_rate: learning rate of the predictor. None: ``learning_rate``, or 0.05 with
            local expectation, because the warm-up must train psi.
        optimizer: function that makes the optimizer of given parameter groups, such as
            ``torch.optim.SGD``; None for Adam.
        lr_scheduler: function that makes a learning rate scheduler of the optimizer, which is
            stepped after every step; None for constant learning rates.
        psi_warmup_steps: number of first steps that train only psi.
        predictor: a network of torch-geometric, or any module with the arguments of its
            convolutions, (x, edge_index[, edge_weight]). A module whose second argument is named
            ``graphs`` gets x (B, N, D) and graphs (M, N, N), and returns (M, B, N, out_features).
            None: :class:`~catnat.graphs.GCN`.
        head_options: options of the head, such as ``amplitude`` for natural.
        capture: whether to replay training steps as CUDA graphs if possible.
        test_passes: number of passes over the test pairs, each with new graphs. A single pass gives
            energy_score_2x with a noise of about 0.015.
    """

    # Options that the command line takes from the data module.
    options_of_data = ("num_nodes", "in_features", "out_features")
    rate_names = ("learning_rate", "psi_learning_rate")

    def __init__(
        self,
        head: str = "natural",
        num_nodes: int = 24,
        in_features: int = 4,
        out_features: int = 2,
        num_samples: int = 32,
        estimator: str = "score_function",
        learning_rate: float | None = None,
        psi_learning_rate: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        psi_warmup_steps: int = 0,
        predictor: nn.Module | None = None,
        head_options: dict[str, Any] | None = None,
        capture: bool = False,
        test_passes: int = 16,
    ) -> None:
        super().__init__(capture, optimizer=optimizer, lr_scheduler=lr_scheduler)
        require_name(head=head)
        self.head = make_head(head, 2, **(head_options or {}))
        estimator = str(estimator).replace("-", "_")  # both spellings are accepted
        require_choice(_LEARNING_RATES, estimator=estimator)
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
        left_out = ["capture", "optimizer", "lr_scheduler", "predictor", "test_passes"]
        self.save_hyperparameters(ignore=left_out)
        # Hydra's dictionaries would make a checkpoint that load_from_checkpoint refuses.
        self.hparams["head_options"] = head_options = plain_options(head_options)
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
        # Number of graphs that are flipped for each pair. Pairs take turns, so all graphs are used.
        self.flip_samples = min(_FLIP_SAMPLES, num_samples)
        self.test_passes = test_passes
        self.learning_rate = learning_rate
        self.psi_learning_rate = psi_learning_rate
        self.psi_warmup_steps = psi_warmup_steps
        self.edge_scores = nn.Parameter(self.initial_scores())
        self.theta_moves = DeviceScalar(1.0)  # 0 during the warm-up of psi
        errors = dict.fromkeys(("energy_score", "pp_mae", "pp_mse", "saturated"), ())
        shapes = {**errors, "theta": (num_nodes, num_nodes)}
        self.val_means = RowMeans({"loss": (), **shapes})
        self.test_means = RowMeans(shapes)
        self._latest_batch = None  # latest batch of an evaluation
        self._warned_of_dead_edges = False

    def initial_scores(self, low: float = 0.0, high: float = 0.1) -> Tensor:
        """Scores (N, N, S) of θ ~ U(low, high)."""
        theta = torch.empty(self.num_nodes, self.num_nodes).uniform_(low, high)
        scores = self.head.inverse(torch.stack([1 - theta, theta], -1))
        # Softmax and sparsemax have many scores for this θ; take the centered ones.
        centered = scores - scores.mean(-1, keepdim=True)
        keeps_theta = torch.allclose(self.head.probs(centered), self.head.probs(scores), atol=1e-6)
        return centered if keeps_theta else scores

    def scores(self, batch: Any) -> Tensor:
        """Scores of the head for every edge, (N, N, S)."""
        return self.edge_scores

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """Energy score, a scalar, with gradients for θ and psi; q has batch shape (N, N)."""
        x, y = self._pair(batch)
        theta = q.probs[..., 1]
        graphs = sample_graphs(theta, self.num_samples)
        outputs = self._predict(x, y, graphs)
        error, distance = energy_terms(outputs.flatten(2), y.flatten(1))
        score = energy_from_terms(error, distance).mean()
        if not torch.is_grad_enabled():  # theta.requires_grad is False under vmap
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
        """Distribution of the edges, of batch shape (N, N)."""
        return self.head(checked_scores(self, self.scores(batch), batch))

    @property
    def theta(self) -> Tensor:
        """Current probabilities of the edges, (N, N) without gradient.

        If :meth:`scores` reads the batch, these are the probabilities for the batch that was
        evaluated last.
        """
        batch = self.transfer_batch_to_device(self._latest_batch, self.device, 0)
        with torch.no_grad():
            return self.head.probs(self.scores(batch))[..., 1]

    def graph(self, threshold: float = 0.5) -> "Data":
        """Learned graph as torch-geometric's ``Data``, with the edges of θ >= ``threshold``.

        ``edge_weight`` is θ of these edges.
        """
        return as_data(self.theta, threshold)

    def sample_graphs(
        self, num_samples: int, generator: torch.Generator | None = None
    ) -> list["Data"]:
        """Random graphs with the learned probabilities, as torch-geometric's ``Data``."""
        return [as_data(graph) for graph in sample_graphs(self.theta, num_samples, generator)]

    # -- training --------------------------------------------------------------------------

    def step_loss(self, batch: Any) -> Tensor:
        """Loss of a training batch, a scalar; θ gets no gradient during the warm-up of psi."""
        scores = checked_scores(self, self.scores(batch), batch)
        fixed = scores.detach()
        # Adds exactly zero. The gradient is zero if theta_moves is 0.
        scores = fixed + self.theta_moves() * (scores - fixed)
        return self.loss(batch, self.head(scores))

    def why_host_needed(self) -> str | None:
        """Reason why a predictor that lists the edges of a graph needs the host."""
        if isinstance(self.predictor, GCN) or getattr(self.predictor, "capturable", False):
            return None
        return (
            "the predictor may wait for the device; if it does not, give it an attribute "
            "capturable = True"
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The scores and the predictor, each with its learning rate."""
        psi = list(self.predictor.parameters())
        of_predictor = set(psi)
        theta = [p for p in self.parameters() if p not in of_predictor]
        return [
            {"params": theta, "lr": self.learning_rate},
            {"params": psi, "lr": self.psi_learning_rate},
        ]

    def on_train_start(self) -> None:
        """Forget the warning of an earlier run."""
        super().on_train_start()
        self._warned_of_dead_edges = False

    def prepare_step(self, step: int) -> None:
        """Set whether θ moves in a step."""
        self.theta_moves.set(step >= self.psi_warmup_steps)

    # -- evaluation ------------------------------------------------------------------------

    @compiled_in_parts  # batch_idx changes from batch to batch
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one pass."""
        with self.evaluation_noise(batch_idx):
            loss = self.loss(batch, self(batch))
            self.val_means.add_rows(**self._rows(batch), loss=loss.expand(len(batch[1])))

    @property
    def test_work(self) -> str:
        """Work of a test, for the line that announces how long it takes."""
        return f"{self.test_passes} passes over the pairs"

    @compiled_in_parts  # batch_idx changes from batch to batch
    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate ``test_passes`` passes."""
        with self.evaluation_noise(batch_idx):
            for _ in range(self.test_passes):
                self.test_means.add_rows(**self._rows(batch))

    def _rows(self, batch: Any) -> dict[str, Tensor]:
        """Prediction errors of one pass for each pair of a batch, and the current θ."""
        self._latest_batch = batch
        x, y = self._pair(batch)
        scores = checked_scores(self, self.scores(batch), batch)
        theta = self.head(scores).probs[..., 1]
        graphs = sample_graphs(theta, self.num_samples)
        saturated = self.head.saturated(scores).double().mean()
        return {
            **prediction_errors(self._predict(x, y, graphs), y),
            "saturated": saturated.expand(len(y)),
            "theta": theta.double().expand(len(y), -1, -1),
        }

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """x and y of a batch, after checking their shapes."""
        x, y = as_pair(batch, self.num_nodes)
        if isinstance(self.predictor, GCN):
            N, (D, E) = self.num_nodes, self.predictor.weight.shape
            if x.shape[1:] != (N, D) or y.shape[1:] != (N, E):
                raise ValueError(
                    f"x {tuple(x.shape)} and y {tuple(y.shape)} of a batch do not fit num_nodes "
                    f"{N}, in_features {D} and out_features {E}"
                )
        elif x.dim() != 3 or x.shape[1] != self.num_nodes:
            raise ValueError(
                f"x must be (B, {self.num_nodes}, D) with num_nodes {self.num_nodes}, "
                f"got the shape {tuple(x.shape)}"
            )
        return x, y

    def _predict(self, x: Tensor, y: Tensor, graphs: Tensor) -> Tensor:
        """Outputs of the predictor, (M, B, N, out_features), after checking that they fit y."""
        outputs = self.predictor(x, graphs)
        if outputs.shape[1:] != y.shape:
            raise ValueError(
                f"the predictor returns {tuple(outputs.shape)}, but (M, B, N, out_features) must "
                f"be {(len(graphs), *y.shape)} for y {tuple(y.shape)}"
            )
        return outputs

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all pairs, and distances from the true model if the data module has it."""
        theta = means.pop("theta").float()
        means["energy_score_2x"] = 2 * means["energy_score"]
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage == "test" and hasattr(data, "optimal"):
            means["gap_2x"] = means["energy_score_2x"] - data.optimal["energy_score_2x"]
        if (truth := getattr(data, "edge_probs", None)) is not None:
            means |= edge_errors(theta, truth.to(self.device))
        if stage == "val":
            self._warn_of_dead_edges(theta)
        return means

    def on_fit_end(self) -> None:
        """Warn of dead edges in a run without validation."""
        if type(self).scores is GraphStructureLearner.scores:
            self._warn_of_dead_edges(self.theta)

    def _warn_of_dead_edges(self, theta: Tensor) -> None:
        """Warn once per run of true edges with θ = 0, which get no gradient.

        If the true edges are unknown, local expectation may set absent edges to 0 without a
        warning.
        """
        if self._warned_of_dead_edges:
            return
        dead = theta == 0
        truth = getattr(getattr(self.trainer, "datamodule", None), "edge_probs", None)
        if truth is not None:
            dead &= truth.to(theta.device) > 0
            described, total = "true edges", ""
        elif self.estimator == "local_expectation":
            return
        else:
            described, total = "edges", f" of {dead.numel()}"
        if count := int(dead.sum()):
            self._warned_of_dead_edges = True
            cure = "estimator local_expectation"
            if self.head.name == "natural":
                cure = f"a tail (tail=0.005 in head_options) or {cure}"
            elif self.estimator == "local_expectation":
                cure = "another head, or longer psi_warmup_steps"
            rank_zero_warn(
                f"dead edges: {described} with probability 0, which get no gradient any more: "
                f"{count}{total}; {cure} avoids this"
            )
