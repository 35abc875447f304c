"""M graph structure learners of one shape as one batched model: one step trains all of them.

Each model has its own scores, predictor, learning rates and batches. Its steps are those of a
:class:`~catnat.lit_modules.GraphStructureLearner` that is trained alone; the noise of all models
comes from one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from catnat.graphs import GCN, leave_one_out_weights, sample_graphs
from catnat.lit_modules import GraphStructureLearner
from catnat.losses import energy_from_terms, energy_score, energy_terms
from catnat.metrics import prediction_errors
from catnat.noise import forked_random_state
from catnat.numerics import exp_of_log_probs
from catnat.ops.dispatch import kernels_for
from experiments.together.stack import Stack, flattened, log_probs_of, neighbours

_NAMES = ("edge_scores", "predictor.weight")
_TRITON_LIMIT = 8192  # numbers of all samples of a pair, which a program holds in registers


class ManyGraphLearners:
    """M models, trained with Adam by the score-function estimator.

    Args:
        models: of equal sizes, with the default predictor, a constant learning rate and no warm-up
            of psi. Their heads may differ; models with equal heads should stand next to each other,
            because each run of equal heads is computed at once. Their parameters are copied.
    """

    @staticmethod
    def check(models: Sequence[GraphStructureLearner]) -> None:
        """Raise a ValueError if these models cannot be trained together."""
        if not models:
            raise ValueError("models must be one or more, got none")
        for each in models:
            if type(each) is not GraphStructureLearner:
                raise ValueError(
                    f"models must be GraphStructureLearners, got {type(each).__name__}"
                )
            if type(each.predictor) is not GCN or not each.predictor.is_dense(each.num_nodes):
                got = f"{type(each.predictor).__name__} with {each.num_nodes} nodes"
                raise ValueError(f"predictor of every model must be a dense GCN, got {got}")
            found: dict[str, tuple[Any, Any]] = {  # by name: what it is, what it must be
                "estimator": (each.estimator, "score_function"),
                "lr_schedule": (each.lr_schedule, "constant"),
                "psi_warmup_steps": (each.psi_warmup_steps, 0),
                "gradient_clip": (each.gradient_clip, 0),
                "num_samples": (each.num_samples, models[0].num_samples),
                "names of the parameters": (sorted(_shapes(each)), sorted(_NAMES)),
                "shapes of the parameters": (_shapes(each), _shapes(models[0])),
            }
            for name, (is_now, must_be) in found.items():
                if is_now != must_be:
                    raise ValueError(f"{name} of every model must be {must_be!r}, got {is_now!r}")

    def __init__(self, models: Sequence[GraphStructureLearner]) -> None:
        self.check(models)
        self.num_graphs = models[0].num_samples
        self.heads = neighbours(models)
        self.stacks = [Stack(models, [name]) for name in _NAMES]
        self.scores, self.psi = (  # (M, N, N, S), (M, in_features, out_features)
            stack.parameters[name] for stack, name in zip(self.stacks, _NAMES, strict=True)
        )
        rates = [each.learning_rates for each in models]  # of scores and psi
        self.rates = self.scores.new_tensor(rates).T[..., None].contiguous()  # (2, M, 1)
        # In float32 the correction 1 - 0.999^t would have four digits in the first steps.
        self.steps = torch.zeros((), dtype=torch.float64, device=self.scores.device)

    def prepare_step(self, step: int) -> None:
        """Nothing depends on the step."""

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One step of every model, on the device alone.

        Args:
            batch: each model's own x (M, B, N, in_features) and y (M, B, N, out_features).

        Returns:
            The losses, (M,).
        """
        x, y = batch
        log_probs = log_probs_of(self.heads, self.scores)  # (M, N, N, 2)
        theta = exp_of_log_probs(log_probs.detach())[..., 1]
        graphs = sample_graphs(theta, self.num_graphs)  # (G, M, N, N)
        graphs = graphs.permute(1, 2, 0, 3).contiguous()  # (M, N, G, N)
        outputs = _outputs(x, self.psi, graphs)
        losses, error, own, of_outputs = mean_energy(outputs.detach(), y.mT)
        weight = leave_one_out_weights(error, own, own.sum(1, keepdim=True))  # (M, G)
        # Exactly 0 where all graphs agree, as in score_function_direction.
        of_odds = torch.einsum("mg, mjgi -> mji", weight, graphs - graphs[:, :, :1])
        odds = log_probs[..., 1] - log_probs[..., 0]
        grads = torch.autograd.grad((odds, outputs), (self.scores, self.psi), (of_odds, of_outputs))
        with torch.no_grad():
            self.steps += 1
            for stack, rates, grad in zip(self.stacks, self.rates, grads, strict=True):
                stack.adam(flattened([grad]), rates, self.steps)
        return losses

    @torch.inference_mode()
    def errors(
        self, models: list[int], batches: Iterable[tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Loss and :func:`~catnat.metrics.prediction_errors` of some models, (m, pairs) each.

        The noise of each model is that of its own ``validation_step``.

        Args:
            models: their numbers.
            batches: the same x (B, N, in_features) and y (B, N, out_features) for all of them.
        """
        theta = exp_of_log_probs(log_probs_of(self.heads, self.scores))[models, ..., 1]
        psi, G, parts = self.psi[models], self.num_graphs, []
        for number, (x, y) in enumerate(batches):
            inputs = x.expand(len(models), *x.shape)
            targets = y.mT.expand(len(models), *y.mT.shape).flatten(0, 1)  # (m B, D, N)
            samples = []
            with forked_random_state(x.device, number):
                for _ in ("loss", "prediction"):
                    noise = torch.rand(G, *theta.shape[1:], dtype=theta.dtype, device=x.device)
                    graphs = (noise[:, None] < theta).to(theta.dtype)  # (G, m, N, N)
                    graphs = graphs.permute(1, 2, 0, 3).contiguous()
                    outputs = _outputs(inputs, psi, graphs)
                    samples.append(outputs.movedim(3, 0).flatten(1, 2))  # (G, m B, D, N)
            loss = energy_score(samples[0].flatten(2), targets.flatten(1))
            parts.append({"loss": loss} | prediction_errors(samples[1], targets))
        return {
            name: torch.cat([each[name].view(len(models), -1) for each in parts], 1)
            for name in parts[0]
        }

    def state_of(self, model: int) -> dict[str, Tensor]:
        """Parameters of one model, for ``load_state_dict(..., strict=False)``."""
        parameters = zip(_NAMES, (self.scores, self.psi), strict=True)
        return {name: each[model].detach().clone() for name, each in parameters}

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step: written back in place, the models are what they were."""
        every = {"steps": self.steps}
        for name, stack in zip(_NAMES, self.stacks, strict=True):
            every |= {f"{name}.{key}": each for key, each in stack.tensors().items()}
        return every


def add_errors(
    model: GraphStructureLearner, batch: tuple[Tensor, Tensor], errors: dict[str, Tensor]
) -> None:
    """Give a model what its own validation steps would have given it.

    Args:
        model: with the parameters that made the errors.
        batch: the last one.
        errors: of the model on all pairs, see :meth:`ManyGraphLearners.errors`.
    """
    scores = model.scores(batch)
    q = model.head(scores)  # raises if the scores are not finite
    model._prediction.add_rows(**{name: x for name, x in errors.items() if name != "loss"})
    model._add(batch, scores, q, loss=errors["loss"].double().mean())


def _outputs(x: Tensor, psi: Tensor, graphs: Tensor) -> Tensor:
    """Outputs of every model in its own graphs.

    Shapes: ``x`` (M, B, N, in_features), ``psi`` (M, in_features, D), ``graphs`` (M, N, G, N),
    result (M, B, D, G, N).
    """
    (M, B, N, _), G = x.shape, graphs.shape[2]
    messages = (x.flatten(1, 2) @ psi).view(M, B, N, -1).mT  # (M, B, D, N)
    # A matrix product that leaves all outputs of a pair side by side: nothing is moved again.
    return (messages.flatten(1, 2) @ graphs.flatten(2)).view(M, B, -1, G, N)


def mean_energy(samples: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The energy score of G samples x_g, and what its gradients need, as means over B pairs.

    Shapes: ``samples`` (M, B, D, G, N), ``target`` y (M, B, D, N).

    Returns:
        The scores (M,); the errors |x_g - y| (M, G); the sums of the distances |x_g - x_h| over h
        (M, G); the gradients of the scores in the samples (M, B, D, G, N).
    """
    B, G = samples.shape[1], samples.shape[3]
    if kernels_for(samples, samples[0, 0].numel(), _TRITON_LIMIT) == "triton":
        from experiments.together import triton_energy

        error, own, gradient = triton_energy.energy(samples, target, 1 / B)
    else:
        samples = samples.requires_grad_()
        x = samples.movedim(3, 0).flatten(3)  # (G, M, B, D N)
        error, distance = energy_terms(x, target.flatten(2))  # (G, M, B), (M, B, G, G)
        scores = energy_from_terms(error, distance).mean(1)
        (gradient,) = torch.autograd.grad(scores.sum(), samples)
        error, own = error.detach().movedim(0, 2), distance.detach().sum(3)
    error, own = error.mean(1), own.mean(1)
    return error.mean(1) - own.sum(1) / (2 * G * (G - 1)), error, own, gradient


def _shapes(model: GraphStructureLearner) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in model.named_parameters()}
