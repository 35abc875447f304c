"""A run of Stable-Baselines3: evaluation, checkpoints, signals and progress beside learning."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from catnat.callbacks.files import AtomicCheckpointIO, write_whole
from catnat.callbacks.fisher_monitor_sb3 import FisherMonitorSB3, write_now
from catnat.callbacks.signals import Stopped, StopSignals
from catnat.callbacks.tensorboard import Progress
from catnat.sb3.algorithms import state_of

Metrics = dict[str, float]


class RunSB3(BaseCallback):
    """Evaluates, saves and stops, always between two rollouts.

    ``best.ckpt`` has the highest evaluated return, ``last.ckpt`` is what a run continues from.
    Beside each lies what Stable-Baselines3 reads: ``best.zip`` for ``PPO.load``, ``HeadPPO.load``
    and those of other algorithms, and ``best_vecnormalize.pkl`` for ``VecNormalize.load`` where
    observations are normalized. These hold pickled code, and nothing here reads them.

    On SIGINT, SIGTERM or SIGHUP ``last.ckpt`` is written, and :class:`Stopped` raised; a second
    SIGINT does not wait.

    Args:
        folder: of the checkpoints.
        hyper_parameters: options of the run, kept in each checkpoint.
        fisher: the monitor, whose state is kept there, too.
        evaluate: gives metrics, "return" among them, and calls :meth:`stop_if_asked` meanwhile.
        save_every: environment steps between checkpoints.
        eval_every: environment steps between evaluations; 0 for none.
        show: print a line at each evaluation.
    """

    def __init__(
        self,
        folder: Path,
        hyper_parameters: dict[str, Any],
        fisher: FisherMonitorSB3,
        evaluate: Callable[[], Metrics],
        save_every: int,
        eval_every: int,
        show: bool = True,
    ) -> None:
        super().__init__()
        self.folder, self.hyper_parameters, self.fisher = folder, hyper_parameters, fisher
        self.save_every, self.eval_every, self.show = save_every, eval_every, show
        self.best = -float("inf")
        self.signals = StopSignals()
        self.model: OnPolicyAlgorithm
        self._evaluate = evaluate
        self._saved = self._evaluated = self._first = 0
        self._progress = Progress(0)

    def stop_if_asked(self) -> None:
        """Raise if a signal came; to be called where the last checkpoint is up to date."""
        if self.signals.signum:
            last = str(self.folder / "last.ckpt")
            raise Stopped(self.signals.signum, self.model.num_timesteps, last)

    def save(self, name: str = "last") -> None:
        """Write a checkpoint; it is on the disk when this returns."""
        content = state_of(self.model) | {
            "hyper_parameters": self.hyper_parameters,
            "best": self.best,
            "fisher": self.fisher.state_dict(),
        }
        AtomicCheckpointIO().save_checkpoint(content, self.folder / f"{name}.ckpt")
        archive = io.BytesIO()
        self.model.save(archive)
        write_whole(self.folder / f"{name}.zip", archive.getbuffer())
        if (normalizer := self.model.get_vec_normalize_env()) is not None:
            write_whole(self.folder / f"{name}_vecnormalize.pkl", pickle.dumps(normalizer))

    def keep_best(self, value: float) -> None:
        """Save the present model as the best one if its evaluated return is the highest."""
        if value > self.best:
            self.best = value
            self.save("best")
            self.save()  # last.ckpt has the best return, too

    def _on_training_start(self) -> None:
        self._saved = self._evaluated = self._first = self.model.num_timesteps
        self._progress = Progress(self._first)
        self.signals.listen()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        """Save, stop and evaluate where that is due."""
        step = self.model.num_timesteps
        if step == self._first:
            return
        evaluation = _due(step, self._evaluated, self.eval_every)
        if self.signals.signum or evaluation or _due(step, self._saved, self.save_every):
            self._saved = step
            self.save()
        self.stop_if_asked()
        if evaluation:
            self._evaluated = step
            self._evaluate_now(step)

    def _on_training_end(self) -> None:
        if self.model.num_timesteps > self._saved:
            self.save()

    def close(self) -> None:
        """Give signals back."""
        self.signals.give_back()

    def _evaluate_now(self, step: int) -> None:
        """Evaluate, save if this is the best, print a line."""
        metrics = {f"eval/{name}": value for name, value in self._evaluate().items()}
        write_now(self.logger, metrics, step)
        self.keep_best(metrics["eval/return"])
        if self.show:
            shown = metrics | recent_return(self.model)
            print(self._progress.line(step, self.model._total_timesteps, shown), flush=True)


def _due(step: int, done: int, every: int) -> bool:
    """Whether a multiple of ``every`` was passed since ``done``."""
    return every > 0 and step // every > done // every


def recent_return(model: OnPolicyAlgorithm) -> Metrics:
    """``train/return``, the mean of the last 100 finished games; nothing before the first."""
    games = model.ep_info_buffer
    return {"train/return": float(np.mean([game["r"] for game in games]))} if games else {}
