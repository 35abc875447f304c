"""A run of Stable-Baselines3: evaluation, checkpoints, signals and progress beside learning."""

import io
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import TensorBoardOutputFormat
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import sync_envs_normalization

from catnat.callbacks.files import AtomicCheckpointIO, write_whole
from catnat.callbacks.fisher_monitor_sb3 import FisherMonitorSB3, write_now
from catnat.callbacks.signals import Stopped, StopSignals
from catnat.callbacks.tensorboard import Progress, RunLogger
from catnat.rng import forked_random_state
from catnat.sb3 import MaskedPlayer
from catnat.sb3.algorithms import state_of

Metrics = dict[str, float]
EVALUATION_SEED = 10**9  # added to the seed of a run: evaluations play other games
_PATIENCE = 4  # seconds between two looks, after a signal, at whether environments answer


class RunSB3(EvalCallback):
    """Evaluates, saves and stops, always between two rollouts.

    ``best.ckpt`` has the highest evaluated return, ``last.ckpt`` is what a run resumes from. Beside
    each lies what Stable-Baselines3 reads: ``best.zip`` for ``PPO.load``, ``HeadPPO.load`` and
    those of other algorithms, and ``best_vecnormalize.pkl`` for ``VecNormalize.load`` where
    observations are normalized. These hold pickled code, and nothing here reads them.

    On SIGINT, SIGTERM or SIGHUP ``last.ckpt`` is written after the present rollout, and
    :class:`Stopped` raised. Where an environment does not answer any more, that happens within 8
    seconds, and the steps of the present rollout are lost. A second SIGINT does not wait.

    Args:
        args: as for ``EvalCallback``: eval_env, ...
        folder: of the checkpoints.
        hyper_parameters: options of the run, kept in each checkpoint.
        fisher: the monitor, whose state is kept there, too.
        begin: called before the first checkpoint of steps that this run has taken.
        save_every: environment steps between checkpoints.
        longest_game: steps after which an evaluation ends a game that has no end of its own; None
            if every game has one.
        kwargs: as for ``EvalCallback``. ``eval_freq`` counts steps of all environments together,
            and ``verbose`` prints a line at each evaluation.
    """

    model: OnPolicyAlgorithm

    def __init__(
        self,
        *args: Any,
        folder: Path,
        hyper_parameters: dict[str, Any],
        fisher: FisherMonitorSB3,
        begin: Callable[[], object],
        save_every: int,
        longest_game: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.folder = folder
        self.hyper_parameters = hyper_parameters
        self.fisher = fisher
        self.begin = begin
        self.began = 0  # step
        self.save_every = save_every
        self.longest_game = longest_game
        self.evaluated_step = 0  # step of the latest evaluation
        self.signals = StopSignals(self._watch)
        self._rollout_start: int | None = None  # step at which the present rollout began
        self._evaluating = False
        self._calls_before = -1  # calls of the environments at the latest look

    def evaluate(self) -> Metrics:
        """Returns over a number of games: always the same games, and training is not affected."""
        player: Any = self.model
        if getattr(player, "uses_masks", False):
            player = MaskedPlayer(player, self.eval_env)
        seed = self.model.seed or 0
        self.eval_env.seed(seed + EVALUATION_SEED)
        sync_envs_normalization(self.training_env, self.eval_env)
        self._evaluating = True
        with forked_random_state(self.model.device, seed):
            returns, lengths = evaluate_policy(
                player,
                self.eval_env,
                self.n_eval_episodes,
                deterministic=self.deterministic,
                callback=lambda *_: self.stop_if_asked(),
                return_episode_rewards=True,
            )
        self._evaluating = False
        metrics = {
            "return": float(np.mean(returns)),
            "return_std": float(np.std(returns)),
            "length": float(np.mean(lengths)),
        }
        if unfinished := np.sum(np.array(lengths) >= (self.longest_game or np.inf)):
            metrics["unfinished"] = float(unfinished)
        return metrics

    def stop_if_asked(self) -> None:
        """Raise if a signal came; to be called where the last checkpoint is up to date."""
        if self.signals.signum:
            path = str(self.folder / "last.ckpt")
            raise Stopped(self.signals.signum, self.model.num_timesteps, path)

    def save(self, name: str = "last") -> None:
        """Write a checkpoint; it is on the disk when this returns."""
        if self.model.num_timesteps > self.began:
            self.begin()
        content = state_of(self.model) | {
            "hyper_parameters": self.hyper_parameters,
            "best": self.best_mean_reward,
            "evaluated": self.evaluated_step,
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
        if value > self.best_mean_reward:
            self.best_mean_reward = value
            self.save("best")
        self.save()  # last.ckpt knows of the evaluation, too

    def _on_training_start(self) -> None:
        self.began = self._saved_step = self.model.num_timesteps
        self._progress = Progress(self._saved_step)
        self.signals.listen()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        """Save, stop and evaluate where that is due."""
        step = self.model.num_timesteps
        evaluates = _is_due(step, self.evaluated_step, self.eval_freq)
        if self.signals.signum or evaluates or _is_due(step, self._saved_step, self.save_every):
            self._saved_step = step
            self.save()
        self.stop_if_asked()
        if evaluates:
            self.evaluated_step = step
            metrics = {f"eval/{name}": value for name, value in self.evaluate().items()}
            write_now(self.logger, metrics, step)
            self.keep_best(metrics["eval/return"])
            if self.verbose:
                metrics |= recent_return(self.model)
                print(self._progress.line(step, self.model._total_timesteps, metrics), flush=True)
        self._rollout_start = step

    def _on_rollout_end(self) -> None:
        self._rollout_start = None

    def _on_training_end(self) -> None:
        if self.model.num_timesteps > self._saved_step:
            self.save()

    def _watch(self, *_: Any) -> None:
        """After a signal: stop if no environment has answered since the latest look."""
        is_stuck = self.n_calls == self._calls_before
        is_playing = self._evaluating or self._rollout_start is not None
        self._calls_before = self.n_calls
        if not (is_stuck and is_playing):
            signal.signal(signal.SIGALRM, self._watch)
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
            return
        if self._rollout_start is not None:
            self.model.num_timesteps = self._rollout_start  # since then nothing was learned
            self.save()
        self.stop_if_asked()

    def close(self) -> None:
        """Give signals back."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.signals.give_back()


def _is_due(step: int, previous_step: int, every: int) -> bool:
    """Whether a multiple of ``every`` was passed since the previous step."""
    return every > 0 and step // every > previous_step // every


def recent_return(model: OnPolicyAlgorithm) -> Metrics:
    """``train/return``, the mean of the last 100 finished games; nothing before the first."""
    games = model.ep_info_buffer
    return {"train/return": float(np.mean([game["r"] for game in games]))} if games else {}


class Rows(TensorBoardOutputFormat):
    """Stable-Baselines3's rows in one event file with the rest: TensorBoard follows one only.

    The file is opened with the first row: one of a resumed run loses rows then.

    Args:
        logger: of the run, which has the event file.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._is_closed = False
        self._logger = logger

    def write(self, *row: Any) -> None:
        """Write values of a step."""
        self.writer = self._logger.experiment
        super().write(*row)
