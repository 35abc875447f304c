"""FisherMonitorSB3: the diagnostics of FisherMonitor, for Stable-Baselines3."""

from collections.abc import Mapping
from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Image, KVWriter, Logger, TensorBoardOutputFormat
from torch import Tensor
from torch.utils._pytree import tree_map

from catnat.callbacks.fisher_diagnostics import histories_of, seed_of
from catnat.callbacks.images import Draw, is_drawn
from catnat.checks import require_at_least
from catnat.heads.probe import HeadProbe
from catnat.rng import State
from catnat.sb3.distributions import OneChoice


class FisherMonitorSB3(BaseCallback):
    """Writes diagnostics of the Fisher matrix of a policy's heads, from the states of a rollout.

    The tags are those of :class:`FisherMonitor`, which explains them and their limits: ``fim/...``,
    or ``fim/<name>/...`` if a policy has several heads. Actions that share a head are averaged. A
    policy whose actions have one choice each has no scores, so the monitor writes nothing for it. A
    value that cannot be computed is NaN, with one warning per head. The monitor records rollouts
    instead of steps. G is the mean over states of the rollout, under the policy that played it. If
    actions are masked with ``mask_mode="prune"``, G belongs to the distribution over the allowed
    actions: the scores are those that :meth:`CategoricalHead.masked` returns, and G of a tree stays
    diagonal. With "renormalize", the default of trees, G belongs to the distribution without the
    mask. The monitor also writes ``train/entropy``, the mean entropy of the policy in these states.

    It draws pictures of G after rollouts 0, 10, 100, 1000 and so on, and after the last rollout.

    In TensorBoard, the values of each observed rollout have the step of this rollout, for any
    ``log_interval``. Other outputs of the model's logger show the latest values in their next row.
    The monitor uses its own random generators, so it does not affect training. Its draws depend
    only on the seed and the step, also in a resumed run.

    Args:
        every_n_rollouts: number of rollouts between observed rollouts.
        num_samples: number of draws per state (M), at least 2; 0 omits the estimated mass.
        max_states: largest number of states of a rollout to use; they are chosen at random.
        image_every_n_rollouts: number of rollouts between additional pictures of G; 0 for no
            pictures.
        seed: seed of the draws.
        details: whether to write condition numbers, l1 masses and the estimated share.
    """

    def __init__(
        self,
        every_n_rollouts: int = 1,
        num_samples: int = 2,
        max_states: int = 4096,
        image_every_n_rollouts: int = 1000,
        seed: int = 0,
        details: bool = False,
    ) -> None:
        require_at_least(1, every_n_rollouts=every_n_rollouts, max_states=max_states)
        require_at_least(0, image_every_n_rollouts=image_every_n_rollouts)
        require_at_least(2 if num_samples else 0, num_samples=num_samples)
        super().__init__()
        self.every_n_rollouts = every_n_rollouts
        self.num_samples = num_samples
        self.max_states = max_states
        self.seed = seed
        self.details = details
        self.image_every_n_rollouts = image_every_n_rollouts
        self.latest: dict[str, float] = {}  # latest value of every tag
        self._rollouts = 0
        self._sums: dict[str, list[float]] = {}  # of the sampled share, by head
        self._undrawn: dict[str, Draw] = {}  # of the latest values, by tag

    def state_dict(self) -> State:
        """The latest values, the number of rollouts, and the sums of the sampled shares."""
        return {"latest": self.latest, "rollouts": self._rollouts, "shares": self._sums}

    def load_state_dict(self, state_dict: State) -> None:
        """Resume from a state."""
        self.latest = state_dict["latest"]
        self._rollouts = state_dict["rollouts"]
        self._sums = state_dict["shares"]

    def _on_training_start(self) -> None:
        policy: Any = self.model.policy
        # Whether every action has one choice: then there are no scores.
        self._is_certain = {*map(type, getattr(policy, "heads", ()))} == {OneChoice}
        if self._is_certain:
            return
        heads = HeadProbe(policy).heads  # raises if the policy has no head
        self._histories = histories_of(
            heads, self.num_samples, self._sums, str(self.seed), self.details
        )

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        number = self._rollouts
        self._rollouts += 1
        if number % self.every_n_rollouts or self._is_certain:
            return
        self._step = self.num_timesteps
        policy: Any = self.model.policy
        # Unchecked: a probability that is NaN is for the training to report, not for the monitor.
        unchecked = policy.action_dist.using(validate_args=False)
        with torch.no_grad(), unchecked, HeadProbe(policy) as probe:
            entropy = self._distribution().entropy().mean()
        self.latest = {"train/entropy": float(entropy)}
        for name, _, scores in probe:
            if name in self._histories:  # otherwise it is too large
                _, row, picture_tag, draw = self._histories[name].observe(self._step, scores)
                self.latest |= row
                if self.image_every_n_rollouts:
                    self._undrawn[picture_tag] = draw
        write_now(self.logger, self.latest, self._step, TensorBoardOutputFormat)
        for tag, value in self.latest.items():
            self.logger.record(tag, value, exclude="tensorboard")
        if is_drawn(number, self.image_every_n_rollouts):
            self._draw()

    def _distribution(self) -> Any:
        """The policy's distribution in states of the rollout, with the masks or memory it had."""
        policy: Any = self.model.policy
        buffer = self.model.rollout_buffer  # type: ignore[attr-defined]
        count = buffer.buffer_size * buffer.n_envs
        chosen: Any = slice(None)
        if count > self.max_states:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self._step))
            chosen = torch.randperm(count, generator=generator)[: self.max_states]

        def take(values: Any) -> Tensor:  # (T, n, ...) -> (B, ...)
            return torch.as_tensor(values).flatten(0, 1)[chosen].to(self.model.device)

        states = tree_map(take, buffer.observations)
        masks = getattr(buffer, "action_masks", None)  # HeadPPO and MaskablePPO
        if masks is not None:
            return policy.get_distribution(states, action_masks=take(masks))
        if hasattr(buffer, "hidden_states_pi"):  # RecurrentPPO: (T, layers, n, ...)
            memory = tuple(
                take(state.swapaxes(1, 2)).transpose(0, 1).contiguous()
                for state in (buffer.hidden_states_pi, buffer.cell_states_pi)
            )
            return policy.get_distribution(states, memory, take(buffer.episode_starts))[0]
        return policy.get_distribution(states)

    def _draw(self) -> None:
        """Draw the latest matrices that have no picture yet, are finite and not too large."""
        for tag, draw in self._undrawn.items():
            if (picture := draw()) is not None:
                row = {tag: Image(picture, "HWC")}
                write_now(self.logger, row, self._step, TensorBoardOutputFormat)
        self._undrawn = {}

    _on_training_end = _draw


def write_now(logger: Logger, values: Mapping[str, Any], step: int, kind: type = KVWriter) -> None:
    """Write values at once, without those that wait for the next row of training."""
    for output in logger.output_formats:
        if isinstance(output, kind):
            output.write(dict(values), dict.fromkeys(values, ()), step)
