"""A run of Stable-Baselines3: evaluation, checkpoints, signals and progress beside learning."""

import io
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import TensorBoardOutputFormat
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import sync_envs_normalization

from catnat.callbacks.files import AtomicCheckpointIO, write_whole
from catnat.callbacks.fisher_monitor_sb3 import FisherMonitorSB3, write_now
from catnat.callbacks.signals import Stopped, StopSignals
from catnat.callbacks.tensorboard import Progress, RunLogger
from catnat.rng import forked_random_state
from catnat.sb3 import MaskedPlayer
from catnat.sb3.algorithms import require_finite, require_finite_weights, state_of
from catnat.sb3.sb3_compat import total_steps_of

Metrics = dict[str, float]
EVALUATION_SEED = 10**9  # added to the seed of a run: evaluations play other games
_PATIENCE = 4  # seconds between two looks, after a signal, at whether environments answer


class RunSB3(EvalCallback):
    """Evaluates, saves and stops, always between two rollouts.

    The folder of the run also contains the files of Stable-Baselines3: ``monitor.csv``, with a row
    for each finished game of training, and ``evaluations.npz``. ``best.ckpt`` has the highest
    evaluated return, and a run resumes from ``last.ckpt``. Next to each checkpoint is a file for
    Stable-Baselines3, such as ``best.zip`` for ``PPO.load`` and ``HeadPPO.load``, and
    ``best_vecnormalize.pkl`` for ``VecNormalize.load`` if observations are normalized. These files
    contain pickled code; catnat never reads them.

    On SIGINT, SIGTERM or SIGHUP, the callback writes ``last.ckpt`` after the current rollout and
    raises :class:`Stopped`. If an environment does not respond, the run ends within 8 seconds and
    loses the current rollout. A second SIGINT does not wait.

    Args:
        args: as for ``EvalCallback``: eval_env, ...
        folder: folder of the checkpoints.
        hyper_parameters: options of the run, kept in each checkpoint.
        fisher: the monitor, whose state is kept there, too.
        begin: called before the first checkpoint of steps that this run has taken.
        save_every: environment steps between checkpoints.
        longest_game: steps after which an evaluation ends a game that has no end of its own; None
            if every game has one.
        log_every: rollouts between two rows of the log, counted from the first step of the run
            also where it is resumed; 0: rows are written by ``learn(log_interval=...)``.
        env_id: name of the environment, for ``monitor.csv``.
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
        log_every: int = 0,
        env_id: str = "",
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
        self.log_every = log_every
        self.env_id = env_id
        self._monitor: ResultsWriter | None = None
        self._began_at = time.monotonic()
        self._calls_before = -1  # calls of the environments at the latest look

    def evaluate(self) -> Metrics:
        """Return and length of a number of games, always the same; training is not affected."""
        returns, lengths = self._play()
        names = ("return", "return_std", "length", "unfinished")
        return self._metrics(names, returns, lengths)

    def _metrics(self, names: tuple[str, ...], returns: list[float], lengths: list[int]) -> Metrics:
        """Mean and deviation of returns, mean length, and how many games did not end, if any."""
        values = [float(np.mean(returns)), float(np.std(returns)), float(np.mean(lengths))]
        if unfinished := sum(length >= (self.longest_game or np.inf) for length in lengths):
            values.append(unfinished)
        return dict(zip(names, map(float, values), strict=False))

    def _play(self) -> tuple[list[float], list[int]]:
        """Returns and lengths of the games of an evaluation."""
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
        return returns, lengths  # type: ignore[return-value]

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
        """Keep finished games in ``monitor.csv``, and check what environments return."""
        games = [info["episode"] for info in self.locals["infos"] if "episode" in info]
        if games:
            self._write_games(games)
        require_finite(
            self.model, rewards=self.locals["rewards"], observations=self.locals["new_obs"]
        )
        return True

    def _write_games(self, games: list[dict[str, Any]]) -> None:
        """Add rows to ``monitor.csv``, which Stable-Baselines3's ``load_results`` reads."""
        if self._monitor is None:
            path = self.folder.parent / "monitor.csv"
            is_new = not path.exists()
            header: dict[str, float | str] = {"t_start": time.time(), "env_id": self.env_id}
            self._monitor = ResultsWriter(str(path), header, override_existing=is_new)
        for game in games:
            seconds = game.get("t", round(time.monotonic() - self._began_at, 6))
            row = {"r": game["r"], "l": game["l"], "t": seconds}
            self._monitor.write_row({name: float(x) for name, x in row.items()})

    def _evaluate_now(self, step: int) -> Metrics:
        """Evaluate, and add the games to ``evaluations.npz`` as ``EvalCallback`` does."""
        returns, lengths = self._play()
        path = self.folder.parent / "evaluations.npz"
        rows: dict[str, list[Any]] = {"timesteps": [], "results": [], "ep_lengths": []}
        if path.exists():  # of the run that is resumed; what came after its checkpoint is replaced
            with np.load(path) as earlier:
                kept = earlier["timesteps"] < step
                rows = {name: [*earlier[name][kept]] for name in rows}
        for name, value in zip(rows, (step, returns, lengths), strict=True):
            rows[name].append(value)
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: np.array(values) for name, values in rows.items()}
        np.savez(content, **arrays)
        write_whole(path, content.getbuffer())
        names = ("mean_reward", "std_reward", "mean_ep_length", "unfinished")
        return self._metrics(tuple(f"eval/{name}" for name in names), returns, lengths)

    def _on_rollout_start(self) -> None:
        """Save, stop and evaluate where that is due."""
        step = self.model.num_timesteps
        require_finite_weights(self.model)
        evaluates = _is_due(step, self.evaluated_step, self.eval_freq)
        if self.signals.signum or evaluates or _is_due(step, self._saved_step, self.save_every):
            self._saved_step = step
            self.save()
        self.stop_if_asked()
        if evaluates:
            self.evaluated_step = step
            metrics = self._evaluate_now(step)
            write_now(self.logger, metrics, step)
            self.keep_best(metrics["eval/mean_reward"])
            if self.verbose:
                metrics |= recent_return(self.model)
                print(self._progress.line(step, total_steps_of(self.model), metrics), flush=True)
        self._rollout_start = step

    def _on_rollout_end(self) -> None:
        self._rollout_start = None
        rollouts = self.num_timesteps // (self.model.n_steps * self.model.n_envs)
        if self.log_every and rollouts % self.log_every == 0:
            self.model.dump_logs(rollouts)

    def _on_training_end(self) -> None:
        require_finite_weights(self.model)
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
        """Close ``monitor.csv``, and give signals back."""
        if self._monitor is not None:
            self._monitor.close()
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
    """Writes the rows of Stable-Baselines3 to the run's event file.

    TensorBoard follows only one file.

    The file is opened with the first row: one of a resumed run loses rows then.

    Args:
        logger: logger of the run; it owns the event file.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._is_closed = False
        self._logger = logger

    def write(self, *row: Any) -> None:
        """Write values of a step."""
        self.writer = self._logger.experiment
        super().write(*row)
