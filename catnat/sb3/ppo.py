"""HeadPPO: the PPO of Stable-Baselines3 with rollout, policy and update on the device.

It also provides CleanRL's value loss and learning rate schedule.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map

from catnat.checks import require_choice
from catnat.cuda_graph import (
    StepGraph,
    make_capturable,
    make_portable,
    portable_state,
    set_learning_rate,
    why_not_captured,
)
from catnat.sb3.algorithms import HeadAlgorithm, NonFinite, normalized
from catnat.sb3.masks import masks_of

ValueLoss = Literal["sb3", "cleanrl"]
STATISTICS = (
    "policy_gradient_loss",
    "value_loss",
    "entropy_loss",
    "approx_kl",
    "clip_fraction",
    "loss",
    "grad_norm",
)
# What an update reads of the buffer; there are no masks where they are not used.
ROLLOUT = (
    "observations",
    "actions",
    "action_masks",
    "forced",
    "values",
    "log_probs",
    "advantages",
    "returns",
)


class HeadPPO(HeadAlgorithm, PPO):
    """PPO for policies with a categorical head.

    With the default options, it takes the same steps as ``stable_baselines3.PPO``. Each of the two
    classes loads models that the other has saved (``stable_baselines3.PPO`` ignores
    ``value_loss``). HeadPPO is optimized for GPUs: it copies the rollout once, with images as
    bytes, reads logged values once per update, and replays the policy and the update as CUDA
    graphs.

    A loss, KL divergence or gradient that is not finite raises :class:`NonFinite` at the end of
    the update; resume from a checkpoint. An action that was played and has become impossible does
    not raise: its term in the KL divergence is 1000.

    Args:
        args: as for ``stable_baselines3.PPO``: policy, env, learning_rate, n_steps, batch_size,
            n_epochs, gamma, gae_lambda, clip_range, clip_range_vf, normalize_advantage, ent_coef,
            vf_coef, max_grad_norm, target_kl, stats_window_size, tensorboard_log, policy_kwargs,
            verbose, seed, device. The policies "MlpPolicy", "CnnPolicy" and "MultiInputPolicy" are
            here those with a head.
        value_loss: "sb3", or "cleanrl" for the larger one of the errors of clipped and unclipped
            values, where ``clip_range_vf`` is ``clip_range`` unless given. Neither has a factor
            1/2: CleanRL's ``vf_coef`` of 0.5 is 0.25 here.
        capture: whether to replay the policy and the update as CUDA graphs. None: if possible.
            False: never. True: if possible, and otherwise with a warning that gives the reason.
        masks: whether to use the masks from the environment's ``action_masks()``, as sb3-contrib's
            MaskablePPO does, see :mod:`catnat.sb3.masks`. None: if the environment has masks. True:
            an environment without masks raises an error. False: never.
        kwargs: as ``args``, by name.
    """

    not_saved = (
        "_play",
        "_optimize",
        "_rollout",
        "_numbers",
        "_captured",
        "_prepared_for",
        "_too_far",
        "uses_masks",
        "rollout_buffer_class",
    )
    policy: Any
    _rollout: Any  # tensors (T n, ...) on the device, or dicts of them

    def __init__(
        self,
        *args: Any,
        value_loss: ValueLoss = "sb3",
        capture: bool | None = None,
        masks: bool | None = None,
        **kwargs: Any,
    ) -> None:
        require_choice(get_args(ValueLoss), value_loss=value_loss)
        self.value_loss = value_loss
        self.capture = capture
        self.masks = masks
        super().__init__(*args, **kwargs)

    # -- rollouts --------------------------------------------------------------------------------

    def _act(self, env: VecEnv, obs_tensor: Any) -> Any:
        arguments = {"obs": obs_tensor}
        if self.uses_masks:
            masks = masks_of(env)
            buffer = self.rollout_buffer
            if buffer.action_masks is None:
                buffer.action_masks = np.empty((self.n_steps, *masks.shape), bool)
            buffer.action_masks[buffer.pos] = masks
            arguments["action_masks"] = masks.to(self.device)
        # Copies, because a graph writes its output to the same place at each step.
        return [output.clone() for output in self._play(arguments)]

    def _forward(self, arguments: dict[str, Any]) -> Any:
        """Actions, values and log-probabilities, without any work on the host."""
        with self.policy.action_dist.using(validate_args=False):  # a check would wait
            return self.policy(**arguments)

    # -- updates ---------------------------------------------------------------------------------

    def train(self) -> None:
        """Learn from the rollout."""
        if self._prepared_for != self._constants:
            self._prepare()
        self.policy.set_training_mode(True)
        self._set_numbers()
        self._upload()
        rows: list[Tensor] = []
        for _ in range(self.n_epochs):
            number_of_updates = self.count_update()
            first_row = len(rows)
            for indices in self._minibatches():
                rows.append(self._optimize(indices).clone())  # replays write to the same place
                if self._too_far:
                    break
            if self._too_far:
                break
        table = torch.stack(rows).cpu()  # waits here, once
        wrong = (~table.isfinite()).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise NonFinite(
                f"{STATISTICS[column]} is {table[row, column].item()} in the update after "
                f"{self.num_timesteps} steps"
            )
        columns = dict(zip(STATISTICS, table.double().unbind(1), strict=True))
        columns["approx_kl"] = columns["approx_kl"][first_row:]  # of the last epoch
        columns["loss"] = columns["loss"][-1:]
        for name, column in columns.items():
            self.logger.record(f"train/{name}", float(column.mean()))
        buffer = self.rollout_buffer
        explained = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        self.logger.record("train/explained_variance", float(explained))
        self.logger.record("train/n_updates", number_of_updates, exclude="tensorboard")

    def _upload(self) -> None:
        """Copy the rollout to the device; graphs that were captured look for it in one place."""
        buffer = self.rollout_buffer
        arrays = {name: x for name in ROLLOUT if (x := getattr(buffer, name)) is not None}
        flat = tree_map(lambda x: torch.as_tensor(x).flatten(0, 1), arrays)  # (T n, ...)
        if self._captured and self._rollout:
            tree_map(lambda place, x: place.copy_(x), self._rollout, flat)
        else:
            self._rollout = tree_map(lambda x: x.to(self.device), flat)

    def _minibatches(self) -> list[Tensor]:
        """Indices of minibatches, (B,) each, on the device: every transition once.

        The order is that of Stable-Baselines3, whose buffer copies each minibatch to the device.
        """
        order = np.random.permutation(self.n_steps * self.n_envs)
        envs, steps = np.divmod(order, self.n_steps)  # its buffer sorts by environments
        indices = torch.from_numpy(steps * self.n_envs + envs).to(self.device)
        return list(indices.split(self.batch_size))

    def _minimize(self, indices: Tensor) -> Tensor:
        """One step of the optimizer, on the device alone; returns ``STATISTICS``.

        The step is left out if the policy has moved farther than ``target_kl``.
        """
        statistics = self._loss(indices)
        *_, kl, _, loss = statistics
        norm = loss.new_zeros(())
        self._too_far = self.target_kl is not None and bool(kl > 1.5 * self.target_kl)
        if not self._too_far:
            self.policy.optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        return torch.stack([*statistics, norm]).detach()

    def _loss(self, indices: Tensor) -> tuple[Tensor, ...]:
        """All ``STATISTICS`` of a minibatch but the last one; the loss has a gradient.

        The policy's loss is -E min(r A, clip(r) A), r the new probability of an action over the
        old one. The KL divergence is E (r - 1 - log r).
        """
        batch = tree_map(lambda x: x.index_select(0, indices), self._rollout)
        low, high, clip, clip_value, entropy_share, value_share = self._numbers.unbind()
        actions = batch["actions"].long().reshape(-1, *(self.action_space.shape or ()))
        with self.policy.action_dist.using(validate_args=False):  # a check would wait
            values, log_prob, entropy = self.policy.evaluate_actions(
                batch["observations"], actions, action_masks=batch.get("action_masks")
            )
        advantages = batch["advantages"]
        if self.normalize_advantage and len(advantages) > 1:
            advantages = normalized(advantages)
        # A forced action was not chosen by the policy, so it has no part in the ratios.
        log_ratio = torch.where(batch["forced"], 0.0, log_prob - batch["log_probs"])
        ratio = log_ratio.exp()
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(low, high)).mean()
        value_loss = self._value_loss(values.flatten(), batch, clip_value)
        entropy_loss = -entropy.mean()
        loss = policy_loss + entropy_share * entropy_loss + value_share * value_loss
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()
            clipped = ((ratio - 1).abs() > clip).float().mean()
        return policy_loss, value_loss, entropy_loss, kl, clipped, loss

    def _value_loss(self, values: Tensor, batch: dict[str, Tensor], clip: Tensor) -> Tensor:
        """Mean squared error of the values (B,), without a factor 1/2.

        Where values are clipped, those that differ by more than ``clip`` from the values of the
        rollout count as clipped. "sb3" takes the error of the clipped values; "cleanrl" the larger
        one of both errors, so that a clipped value still gets a gradient towards its target.
        """
        error = (batch["returns"] - values).square()
        if not self._clips_values:
            return error.mean()
        clipped = batch["values"] + (values - batch["values"]).clamp(-clip, clip)
        clipped_error = (batch["returns"] - clipped).square()
        if self.value_loss == "cleanrl":
            clipped_error = torch.max(error, clipped_error)
        return clipped_error.mean()

    def _set_numbers(self) -> None:
        """Set and log the numbers that may change between updates; captured steps find them."""
        remaining = self.remaining
        rate = self.lr_schedule(remaining)
        for group in self.policy.optimizer.param_groups:
            set_learning_rate(group, rate, self.device if self._captured else None)
        clip = self.clip_range(remaining)  # type: ignore[operator]
        clip_value = (self.clip_range_vf or self.clip_range)(remaining)  # type: ignore[operator]
        numbers = (1 - clip, 1 + clip, clip, clip_value, self.ent_coef, self.vf_coef)
        self._numbers.copy_(torch.tensor(numbers))
        self.logger.record("train/learning_rate", rate)
        self.logger.record("train/clip_range", clip)
        if self._clips_values:
            self.logger.record("train/clip_range_vf", clip_value)

    @property
    def _constants(self) -> tuple[Any, ...]:
        """Options that are constants of a captured update."""
        return (
            self.max_grad_norm,
            self.normalize_advantage,
            self.value_loss,
            self._clips_values,
            self.target_kl,
        )

    @property
    def _clips_values(self) -> bool:
        return self.clip_range_vf is not None or self.value_loss == "cleanrl"

    # -- setting up, saving, playing -------------------------------------------------------------

    def before_setup(self) -> None:
        """Check the class of the buffer."""
        buffer_class = self.rollout_buffer_class  # a zip of stable_baselines3.PPO has one
        if buffer_class not in (None, RolloutBuffer, DictRolloutBuffer):
            raise ValueError(
                f"HeadPPO makes minibatches by itself, it cannot use {buffer_class.__name__}"
            )
        self.rollout_buffer_class = None

    def after_setup(self) -> None:
        """Make what is not saved."""
        super().after_setup()
        self._numbers = torch.zeros(6, device=self.device)
        self._captured = False
        self._play: Any = self._forward  # learn() decides whether it is replayed
        self._prepared_for: Any = None  # the options of captured steps; None: parameters are new
        self.uses_masks = self._decide_masks()

    def learn(self, *args: Any, **kwargs: Any) -> Self:
        """As in Stable-Baselines3, with the model's device as the current one."""
        with torch.cuda.device_of(self._numbers):
            self.uses_masks = self._decide_masks()  # there may be another environment
            self._prepare()
            return super().learn(*args, **kwargs)

    def _prepare(self) -> None:
        """Decide whether CUDA graphs are replayed, and begin with new graphs."""
        optimizer = self.policy.optimizer
        obstacles = {
            "target_kl looks at each minibatch before the step": self.target_kl is not None,
            f"{type(optimizer).__name__} cannot be captured": "capturable"
            not in optimizer.defaults,
        }
        reason = why_not_captured(self.capture, self.device, obstacles)
        if self.capture and reason:
            warnings.warn(f"nothing is replayed as a CUDA graph: {reason}", stacklevel=2)
        self._captured = reason is None
        self._prepared_for = self._constants
        self._rollout = {}
        self._play = self._forward
        self._optimize: Any = self._minimize
        if self._captured:
            make_capturable(optimizer, self.device)
            self._play = StepGraph(self._forward)
            self._optimize = StepGraph(self._minimize)
        else:
            make_portable(optimizer)

    def _decide_masks(self) -> bool:
        """Whether masks are used, decided when a model is made and when it begins to learn.

        Asking the environment later would fail: it may be closed, or in the middle of a step.
        """
        if self.env is None or self.masks is False:
            return False
        has_masks = self.env.has_attr("action_masks")
        if self.masks and not has_masks:
            raise ValueError("masks is True, but the environment has no method action_masks()")
        return has_masks

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in Stable-Baselines3; also takes ``action_masks``, see :class:`MaskedPlayer`."""
        if self.uses_masks and kwargs.get("action_masks") is None:
            warnings.warn(
                "actions are not masked: predict got no action_masks; play with MaskedPlayer, or "
                "evaluate with sb3-contrib's MaskableEvalCallback",
                stacklevel=2,
            )
        return self.policy.predict(*args, **kwargs)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """All parameters, those of the optimizer in a form that any device understands."""
        parameters = super().get_parameters()
        parameters["policy.optimizer"] = portable_state(parameters["policy.optimizer"])
        return parameters

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Load parameters; the next update forgets graphs that were captured."""
        super().set_parameters(*args, **kwargs)
        self._prepared_for = None


def cleanrl_schedule(
    learning_rate: float, total_timesteps: int, batch: int
) -> Callable[[float], float]:
    """A learning rate that decreases linearly to 0 with each update, as in CleanRL.

    Stable-Baselines3 counts a rollout as progress before it learns from it. With this schedule, the
    first update has the full rate, and the last update has the smallest rate above 0. If ``batch``
    does not divide ``total_timesteps``, Stable-Baselines3 makes one more update than CleanRL, and
    the schedule includes it.

    Args:
        learning_rate: rate of the first update.
        total_timesteps: steps of the run, as given to ``learn``.
        batch: steps of all environments per update, ``n_steps * n_envs``.

    >>> rate = cleanrl_schedule(1.0, total_timesteps=400, batch=100)
    >>> [rate(1 - steps / 400) for steps in (100, 200, 300, 400)]
    [1.0, 0.75, 0.5, 0.25]
    """
    rollouts = total_timesteps / batch
    updates = -(-total_timesteps // batch)  # rounded up

    def rate(remaining: float) -> float:
        number = round((1 - remaining) * rollouts)  # number of the update, counted from 1
        return learning_rate * min(1.0, max(0.0, 1 - (number - 1) / updates))

    return rate
