"""FisherMonitorSB3: the diagnostics of FisherMonitor, for Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Image, KVWriter
from torch import Tensor

from catnat import HeadProbe
from catnat.fisher import off_diagonal_mass
from catnat.sb3.buffers import map_observations

from .figures import heat_map
from .observe import sampled_mean_fisher, summarize


class FisherMonitorSB3(BaseCallback):
    """Writes diagnostics of the Fisher matrix of a policy's heads, from the states of a rollout.

    The tags are those of :class:`FisherMonitor`, which says what they mean: ``fim/...``, with the
    head's name in it where a policy has several. G is the mean over states of the rollout, under
    the policy that played it. Beside them stands ``train/entropy``, the mean entropy of the
    policy in these states; Stable-Baselines3 itself logs ``train/approx_kl`` and
    ``train/explained_variance``.

    Everything goes to the model's logger and is written with the logger's next row, or in a row
    of its own where that one belongs to a later step. What is learned does not change: states and
    draws come from generators of the monitor's own.

    Args:
        every_n_rollouts: observe each n-th rollout.
        num_samples: M, draws per state for the sampled mass; 0 leaves it out.
        max_states: take that many states of a rollout, at random, if it has more.
        image_every_n_rollouts: how often to draw G; 0 for never.
        seed: of the draws.
        verbose: as in Stable-Baselines3.
    """

    def __init__(
        self,
        every_n_rollouts: int = 1,
        num_samples: int = 1,
        max_states: int = 4096,
        image_every_n_rollouts: int = 50,
        seed: int = 0,
        verbose: int = 0,
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1),
            ("num_samples", num_samples, 0),
            ("max_states", max_states, 1),
            ("image_every_n_rollouts", image_every_n_rollouts, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        super().__init__(verbose)
        self.every_n_rollouts, self.num_samples = every_n_rollouts, num_samples
        self.max_states, self.seed = max_states, seed
        self.image_every_n_rollouts = image_every_n_rollouts
        self.latest: dict[str, float] = {}  # what was written last, by tag
        self._rollouts = 0
        self._step = 0  # of what was recorded last
        self._generator: torch.Generator | None = None
        self._chooser = torch.Generator()

    def _on_training_start(self) -> None:
        HeadProbe(self.model.policy)  # says so if there is no head
        if self._generator is None:
            self._generator = torch.Generator(self.model.device).manual_seed(self.seed)
            self._chooser.manual_seed(self.seed)

    def _on_rollout_start(self) -> None:
        self._write_late()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        number, self._rollouts = self._rollouts, self._rollouts + 1
        if number % self.every_n_rollouts:
            return
        self.latest, self._step = {}, self.num_timesteps
        every = self.image_every_n_rollouts
        with torch.no_grad(), HeadProbe(self.model.policy) as probe:
            policy: Any = self.model.policy
            entropy = policy.get_distribution(self._states()).entropy().mean()
        for name, head, scores in probe:
            prefix = "fim" if len(probe.heads) == 1 else f"fim/{name}"
            matrix, (values,) = summarize(head, head.diagnostics(scores)[None].cpu())
            if self.num_samples:
                sampled = sampled_mean_fisher(head, scores, self.num_samples, self._generator)
                values["off_diagonal_mass_sampled"] = float(off_diagonal_mass(sampled))
            self.latest |= {f"{prefix}/{scalar}": value for scalar, value in values.items()}
            if every and number % every == 0:
                self._record_image(f"{prefix}/mean", matrix[0])
        self.latest["train/entropy"] = float(entropy)
        for tag, value in self.latest.items():
            self.logger.record(tag, value)

    def _on_training_end(self) -> None:
        self._write_late()

    def _states(self) -> Any:
        """States of the rollout on the model's device, at most ``max_states``: (B, ...)."""
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        count = buffer.buffer_size * buffer.n_envs
        chosen = torch.arange(count)
        if count > self.max_states:
            chosen = torch.randperm(count, generator=self._chooser)[: self.max_states]

        def take(values: Any) -> Tensor:
            flat = torch.as_tensor(values).flatten(0, 1)
            return flat[chosen.to(flat.device)].to(self.model.device)

        return map_observations(take, buffer.observations)

    def _record_image(self, tag: str, matrix: Tensor) -> None:
        largest = float(matrix.abs().max())
        picture = heat_map(matrix, "RdBu_r", -largest, largest)
        no_pictures = ("stdout", "log", "json", "csv")
        self.logger.record(tag, Image(picture, "HWC"), exclude=no_pictures)

    def _write_late(self) -> None:
        """Write what the logger did not write at its step, as its next row has a later one."""
        recorded, excluded = self.logger.name_to_value, self.logger.name_to_excluded
        tags = [tag for tag in recorded if tag in self.latest or tag.startswith("fim/")]
        values = {tag: recorded.pop(tag) for tag in tags}
        hidden = {tag: excluded.pop(tag) for tag in tags}
        for output in self.logger.output_formats if values else ():
            if isinstance(output, KVWriter):
                output.write(values, hidden, self._step)
