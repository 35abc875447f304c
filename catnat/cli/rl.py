"""Training with Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat, make_output_format
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tensorboard.compat.proto.summary_pb2 import Summary

from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.checkpoints import load_checkpoint
from catnat.callbacks.sb3_run import RunSB3, recent_return
from catnat.callbacks.tensorboard import open_writer, write_hparams
from catnat.checks import require_at_least
from catnat.cli import report, resume
from catnat.cli.errors import RunFailed, UsageError
from catnat.cli.folders import RunFolder
from catnat.cli.names import Names, import_module, load, read_names
from catnat.cli.options import FullNames, Parser, canonical_head
from catnat.cli.rl_options import Algorithm, Environments, Training
from catnat.datamodules.environments import frames_of_a_game, is_atari, write_gif
from catnat.rng import forked_random_state
from catnat.sb3 import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    MaskedPlayer,
    NonFinite,
)
from catnat.sb3.masks import has_masks
from catnat.sb3.run_state import load_state

ATARI_STEPS, ATARI_STEPS_ON_CPU, OTHER_STEPS = 8_000_000, 30_000, 50_000
MAX_SEED = 10**9 - 1  # evaluation has seeds of its own above it
_NO_TIME_LIMIT = 10_000  # steps of an evaluation where an environment has no time limit


def groups(names: Names) -> dict[str, Any]:
    """The classes behind the options of an algorithm."""
    return {"model": load(names.path, "--model"), "data": Environments, "trainer": Training,
            "fisher": FisherMonitorSB3}  # fmt: skip


class RLCLI:
    """The command line of the algorithms of Stable-Baselines3, as that of the other models.

    ``model``, ``env``, ``eval_env`` and ``config`` are what a command line describes.

    Args:
        args: the words of a command line, such as ``["--model", "ppo", "--env", "CartPole-v1"]``.
        run: do what the command line says. Otherwise only the objects are made, and no folder.
    """

    def __init__(self, args: list[str], run: bool = True) -> None:
        report.silence()
        self.names = names = read_names(args)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # --env my_module:Mine-v0 may lie here
        for each in names.imports:
            import_module(each)
        if names.command not in ("fit", "test"):
            raise UsageError(f"{names.model} has the commands fit and test, not {names.command}")
        if names.ckpt_path and names.ckpt_path.suffix == ".zip":
            raise UsageError(
                f"{names.ckpt_path} is for Stable-Baselines3; give the .ckpt beside it"
            )
        self.algorithm: type[Algorithm] = load(names.path, "--model")
        self.checkpoint = {} if names.ckpt_path is None else load_checkpoint(names.ckpt_path)
        self.parser = self._make_parser()
        self.config = self._parse(names)
        self.metrics: dict[str, Any] = {}
        self.remark = self._complete()
        self._make()
        if run:
            self._run()

    # -- from words to objects -----------------------------------------------------------------

    def _make_parser(self) -> Parser:
        parser = Parser()
        parser.add_argument("-c", "--config", action="config")
        parser.add_argument("--seed_everything", type=int, default=0, help="seed of the run")
        parser.add_argument("--import", type=list[str], default=[], help="modules to import first")
        parser.add_argument("--ckpt_path", type=str | None, default=None,
                            help="resume or test a checkpoint: a file, last or best")  # fmt: skip
        parser.add_argument("--save_every", type=int | None, default=None,
                            help="steps between checkpoints")  # fmt: skip
        parser.add_subclass_arguments(Algorithm, "model", required=False)
        parser.add_class_arguments(Environments, "data")
        parser.add_class_arguments(Training, "trainer")
        parser.add_class_arguments(FisherMonitorSB3, "fisher", fail_untyped=False)
        return parser

    def _parse(self, names: Names) -> Any:
        """All options; defaults depend on the environment."""
        steps = dict.fromkeys(("max_steps", "trainer.max_steps"), "trainer.total_steps")
        full = FullNames(groups(names), {}, steps)
        model = f"--model={names.path}"
        words = list(full(names.words))
        files = [f"--config={names.record}"] if names.record else []
        files += [word for word in words if word.startswith("--config=")]
        given = [*files, model, *(word for word in words if not word.startswith("--config="))]
        given += [f"--trainer.default_root_dir={names.root}"]
        given += [f"--import={json.dumps(names.imports)}"]
        given += [f"--model.head={canonical_head(names.head)}"] if names.head else []
        asked = [word for word in given if not word.startswith("--print_config")]
        first = full.parse(self.parser, [model, *asked])
        usual = {} if is_atari(first.data.env) else dict(self.algorithm.not_atari)
        if (most := self.algorithm.monitor_every) > 1:
            # The monitor looks at a few of many short rollouts, at one in the last tenth of a run.
            rollout = max(first.model.init_args.num_steps * first.data.num_envs, 1)
            often = int(first.trainer.total_steps or OTHER_STEPS) // rollout // 10
            usual["fisher.every_n_rollouts"] = max(1, min(most, often))
            usual["fisher.image_every_n_rollouts"] = 20 * most
        defaults = [f"--{name}={value}" for name, value in usual.items()]
        return full.parse(self.parser, [model, *defaults, *given])

    def _complete(self) -> str:
        """Set defaults that depend on others; returns a remark about them, or nothing."""
        trainer, config, remark = self.config.trainer, self.config, ""
        if trainer.total_steps is None:
            on_cpu = trainer.device == "cpu" or not torch.cuda.is_available()
            trainer.total_steps = ATARI_STEPS_ON_CPU if on_cpu else ATARI_STEPS
            if not is_atari(config.data.env):
                trainer.total_steps = OTHER_STEPS
            elif on_cpu:
                few = f", {ATARI_STEPS_ON_CPU} steps on this CPU"
                remark = f"{few}; the recipe: --total_steps {ATARI_STEPS}"
        self.head = config.model.init_args.head
        home = Path(self.names.root, self.names.model, self.head)
        self.folder = RunFolder(home, self.names.ckpt_path, self.names.command == "fit")
        if self.checkpoint:
            remark = resume.remark(self.names, self.checkpoint, self.parser, config)
        if not 0 <= config.seed_everything <= MAX_SEED:
            raise UsageError(f"--seed {config.seed_everything} does not lie in 0..{MAX_SEED}")
        return remark

    def _make(self) -> None:
        """Environments, model and callbacks."""
        # Since 4.49 jsonargparse calls it by the first name.
        make = getattr(self.parser, "instantiate", self.parser.instantiate_classes)
        made = make(self.config)
        self.options, self.environments, self.training = made.model, made.data, made.trainer
        training, steps = self.training, int(self.training.total_steps)
        self.seed, self.fisher = self.config.seed_everything, made.fisher
        self.env = self.environments.make(self.environments.num_envs, self.seed, self.options.gamma)
        policy = policy_for(self.env.observation_space)
        small = training.device == "auto" and policy is HeadActorCriticPolicy
        device = "cpu" if small else training.device  # small networks are faster there
        self.model = self.options.make(policy, self.env, steps, device=device, seed=self.seed)
        self.hparams = asdict(self.options) | asdict(self.environments)
        if self.checkpoint:
            self._load()
        games = min(training.eval_games, 16)
        self.eval_env = self.environments.make(games, self.seed, self.options.gamma)
        save_every = self.config.save_every
        if save_every is None:
            save_every = max(25_000, steps // 100)
        require_at_least(1, save_every=save_every)
        eval_every = training.eval_every
        if eval_every is None:
            eval_every = max(steps // 10, 1)
        place = self.folder.path / "checkpoints"
        show = training.enable_progress_bar
        self.callback = RunSB3(place, self.hparams, self.evaluate, save_every, eval_every, show)
        self.callback.best = self.checkpoint.get("best", self.callback.best)
        self.callback.model = self.model

    def _load(self) -> None:
        """Put the model into the state of the checkpoint, if the two fit."""
        made, here = (
            {name: value.shape for name, value in state.items()}
            for state in (self.checkpoint["state_dict"], self.model.policy.state_dict())
        )
        kept = self.checkpoint.get("hyper_parameters", {})
        other = [name for name in ("num_actions", "normalize")
                 if kept.get(name, "missing") != self.hparams[name]]  # fmt: skip
        if made != here or other:
            raise UsageError(f"checkpoint {self.names.ckpt_path} is one of another model")
        load_state(self.model, self.checkpoint)
        self.env.seed(self.seed + self.model.num_timesteps)  # not the games that the run began with

    # -- commands ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Train or play what the command line says."""
        fit = self.names.command == "fit"
        if not fit and self.names.ckpt_path is None:
            raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
        began = self.model.num_timesteps
        try:
            if fit:
                self.config.ckpt_path = None  # how the run began, not where it was resumed
                self.folder.open(resume.dump(self.parser, self.config))
            title = f"{self.names.command} {self.names.model} with {self.head}"
            remark = self.remark if fit else ""
            print(f"{title} on {self.environments.env}: {self.folder.path}{remark}", flush=True)
            self._say_masks()
            self.metrics = self.fit() if fit else self.test()
            report.show_metrics(self.metrics, self.folder.path, keep=fit)
        finally:
            self.callback.close()
            self.eval_env.close()
            self.env.close()
            self.folder.close(self.model.num_timesteps > began)

    def fit(self) -> dict[str, Any]:
        """Learn, play, write a GIF."""
        model, training, folder = self.model, self.training, str(self.folder.path)
        resumed_at = model.num_timesteps + 1 if self.folder.resumed else None
        writer = open_writer(folder, resumed_at)
        others = [make_output_format(each, folder) for each in training.log_formats or ()]
        model.set_logger(Logger(folder, [_Output(writer), *others]))
        left = max(int(training.total_steps) - model.num_timesteps, 0)
        callbacks = CallbackList([self.fisher, *(training.callbacks or ()), self.callback])
        try:
            model.learn(
                left,
                callbacks,
                log_interval=self.options.log_interval,
                reset_num_timesteps=False,
                progress_bar=training.enable_progress_bar and sys.stdout.isatty(),
            )
        except NonFinite as error:
            self.callback.save()
            raise RunFailed(f"{error}; saved: {self.callback.last}") from error
        played = self.test()
        self.callback.keep_best(played["test/return"])
        for name, value in played.items():
            model.logger.record(name, value)
        model.logger.dump(model.num_timesteps)
        about = {"seed": self.seed, "steps": model.num_timesteps, "actions": model.action_space}
        write_hparams(writer, self.hparams | about, list(played))
        if training.gif:
            self._film(writer)
        writer.flush()
        return dict(played | recent_return(model) | self.fisher.latest)

    def test(self) -> dict[str, float]:
        """Play."""
        self.callback.signals.listen()
        metrics = self.evaluate(self.callback.stop_if_asked)
        return {f"test/{name}": value for name, value in metrics.items()}

    def evaluate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Returns over a number of games: always the same games, and training is not affected."""
        self.eval_env.seed(self.seed + MAX_SEED + 1)
        share_moments(self.model, self.eval_env)
        most = self.training.eval_max_steps or most_steps(self.eval_env)
        games = _Games(stop_if_asked, most)
        with forked_random_state(self.model.device, self.seed):
            try:
                evaluate_policy(
                    self._player(self.eval_env),
                    self.eval_env,
                    self.training.eval_games,
                    deterministic=self.training.eval_deterministic,
                    callback=games,
                    return_episode_rewards=True,
                )
            except _TooLong:
                print(f"after {most} steps of an evaluation {games.unfinished()} games were not "
                      "finished; they count as they are (--eval_max_steps)")  # fmt: skip
        scores, lengths = games.results()
        mean, spread, length = np.mean(scores), np.std(scores), np.mean(lengths)
        found = {"return": float(mean), "return_std": float(spread), "length": float(length)}
        return found | ({"unfinished": float(games.unfinished())} if games.too_long else {})

    def _player(self, env: VecEnv) -> Any:
        """Who plays in an environment: the model, with masks if it learns with masks."""
        return MaskedPlayer(self.model, env) if self._masked else self.model

    @property
    def _masked(self) -> bool:
        return getattr(self.model, "uses_masks", False)

    def _say_masks(self) -> None:
        """One line about masks, if the environment has any."""
        name = self.environments.env
        if self._masked:
            print(f"actions are masked: {name} has action_masks()", flush=True)
        elif has_masks(self.eval_env):
            why = "" if hasattr(self.model, "uses_masks") else "; --model ppo can"
            print(f"actions are not masked, though {name} has action_masks(){why}", flush=True)

    def _film(self, writer: Any) -> None:
        """A GIF of one game, in the run's folder and for TensorBoard."""
        path = self.folder.path / "game.gif"
        # Games in C++ threads cannot be drawn.
        env = self.environments.make(1, self.seed, self.model.gamma, backend="sb3")
        share_moments(self.model, env)
        deterministic = self.training.eval_deterministic
        try:
            with forked_random_state(self.model.device, self.seed):
                frames = frames_of_a_game(self._player(env), env, deterministic)
                drawn = write_gif(frames, path)
            missing = None if drawn else "this environment cannot be drawn"
        except gymnasium.error.DependencyNotInstalled as error:
            missing = str(error)
        finally:
            env.close()
        if missing:
            print(f"no GIF of a game: {missing}")
            return
        picture = Summary.Image(colorspace=3, encoded_image_string=path.read_bytes())
        value = Summary.Value(tag="game", image=picture)
        writer._get_file_writer().add_summary(Summary(value=[value]), self.model.num_timesteps)


class _TooLong(Exception):  # noqa: N818 - not an error
    """An evaluation has taken its most steps."""


class _Games:
    """Follows an evaluation of Stable-Baselines3, and ends it after a number of steps."""

    def __init__(self, stop_if_asked: Callable[[], None], most: float) -> None:
        self._stop, self._most = stop_if_asked, most
        self._calls, self.too_long = 0, False
        self._seen: dict[str, Any] = {}

    def __call__(self, seen: dict[str, Any], _: dict[str, Any]) -> None:
        """Called for each environment after each step, with evaluate_policy's variables."""
        self._stop()
        self._seen, self._calls = seen, self._calls + 1
        if self._calls > self._most * seen["n_envs"]:
            self.too_long = True
            raise _TooLong

    def unfinished(self) -> int:
        """The games that were being played when the evaluation was ended."""
        return len(self._playing())

    def results(self) -> tuple[list[float], list[float]]:
        """Returns and lengths of all games; of unfinished ones, so far."""
        scores, lengths = list(self._seen["episode_rewards"]), list(self._seen["episode_lengths"])
        for game in self._playing():
            scores.append(self._seen["current_rewards"][game])
            lengths.append(self._seen["current_lengths"][game])
        return scores, lengths

    def _playing(self) -> list[int]:
        counts, targets = self._seen["episode_counts"], self._seen["episode_count_targets"]
        return [n for n in range(len(counts)) if self.too_long and counts[n] < targets[n]]


def most_steps(env: VecEnv) -> float:
    """The most steps of an evaluation: infinite if its games end by themselves."""
    try:
        limits = [getattr(spec, "max_episode_steps", None) for spec in env.get_attr("spec")]
    except AttributeError:  # games in C++ threads, which have a time limit
        return np.inf
    return _NO_TIME_LIMIT if None in limits else np.inf


class _Output(TensorBoardOutputFormat):
    """Stable-Baselines3's rows in one event file with the rest: TensorBoard follows one only."""

    def __init__(self, writer: Any) -> None:
        self._is_closed, self.writer = False, writer


def policy_for(space: gymnasium.Space[Any]) -> Any:
    """The policy that can look at such observations."""
    if isinstance(space, spaces.Dict):
        return HeadMultiInputActorCriticPolicy
    if is_image_space(space):
        return HeadActorCriticCnnPolicy
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return HeadActorCriticPolicy
    raise ValueError(f"no policy takes observations of {space}")


def share_moments(model: OnPolicyAlgorithm, env: VecEnv) -> None:
    """Scale observations as in training, and rewards not at all."""
    learned = model.get_vec_normalize_env()
    if isinstance(env, VecNormalize) and learned is not None:
        env.training = env.norm_reward = False
        env.obs_rms = learned.obs_rms
