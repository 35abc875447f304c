"""Runs of PPO and A2C: their options, and the objects that learn, evaluate and save.

A command line makes a :class:`Config` by jsonargparse: :func:`add_arguments` adds the options to a
parser, :func:`complete` fills those that depend on others. A script writes the config itself::

    config = Config(model=PPO("natural", n_steps=32), data={"env": "CartPole-v1"})
    metrics = train(config, Path("runs/mine"))
"""

import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.files import load_checkpoint
from catnat.callbacks.sb3_run import EVALUATION_SEED, Metrics, RunSB3, recent_return
from catnat.checks import require_within
from catnat.datamodules.environments import is_atari, make_env
from catnat.sb3.algorithms import load_state
from catnat.sb3.recipes import Algorithm, Training
from catnat.sb3.sb3_compat import wrap_env

_RECIPES = Path(__file__).parents[1] / "recipes"
_RUN_ARGUMENTS = {"seed", "gamma"}  # arguments of make_env that are not options of the data
# Arguments of Stable-Baselines3 that follow from others, or would do nothing here.
_UNUSED = {
    "policy",
    "env",
    "seed",
    "device",
    "_init_setup_model",
    "rollout_buffer_class",
    "rollout_buffer_kwargs",
    "tensorboard_log",
    "use_sde",
    "sde_sample_freq",
}
_STEPS = 8_000_000  # of an Atari game
_STEPS_ON_CPU = 30_000
_LONGEST_GAME = 10_000  # steps in an evaluation, where an environment has no time limit
_MOST_EVALUATED = 16  # environments of an evaluation


@dataclass
class Config:
    """Configuration of a run.

    Args:
        model: algorithm with its options, such as ``PPO("natural", n_steps=32)``.
        data: arguments of :func:`~catnat.datamodules.environments.make_env`.
        trainer: length, device and evaluation.
        fisher: monitor of the Fisher matrix.
        seed: random seed of weights, actions and environments.
        save_every: steps between checkpoints; None: a hundredth of all and at least 25,000.
    """

    model: Algorithm
    data: dict[str, Any] = field(default_factory=dict)
    trainer: Training = field(default_factory=lambda: Training(50_000))
    fisher: FisherMonitorSB3 = field(default_factory=FisherMonitorSB3)
    seed: int = 0
    save_every: int | None = None


def add_arguments(parser: Any, model_type: type[Algorithm] = Algorithm) -> None:
    """Add the options of algorithm, environments, training and monitor to a parser.

    Args:
        parser: a jsonargparse.ArgumentParser.
        model_type: class of the algorithm; ``Algorithm`` lets the options choose it.
    """
    if model_type is Algorithm:
        parser.add_subclass_arguments(Algorithm, "model", skip=_UNUSED)
    else:
        parser.add_class_arguments(model_type, "model", skip=_UNUSED)
    parser.add_function_arguments(make_env, "data", skip=_RUN_ARGUMENTS)
    parser.add_class_arguments(Training, "trainer")
    parser.add_class_arguments(FisherMonitorSB3, "fisher")


def complete(
    config: Any, model_type: type[Algorithm], given: Collection[str], is_new: bool = True
) -> str:
    """Fill options that depend on the environment and on other options.

    Args:
        config: namespace of the options of :func:`add_arguments`.
        model_type: class of the algorithm.
        given: full names of the options that the user gave.
        is_new: whether the run is new; a resumed one keeps what it began with.

    Returns:
        a remark about the length of the run, empty if there is nothing to remark.
    """
    options, training = config.model.init_args, config.trainer
    remark = ""
    if is_new:
        recipe = read_recipe(model_type, config.data.env)
        for group, target in (("model", options), ("trainer", training)):
            for name, value in recipe[group].items():
                if f"{group}.{name}" not in given:
                    target[name] = value
        if training.total_steps is None:
            on_cpu = training.device == "cpu" or not torch.accelerator.is_available()
            training.total_steps = _STEPS_ON_CPU if on_cpu else _STEPS
            if on_cpu:
                steps = f"--max_steps {_STEPS_ON_CPU}"
                remark = f", {steps} on a CPU; the recipe: --max_steps {_STEPS}"
    rollout = max(options.n_steps * config.data.num_envs, 1)
    if "batch_size" in options and "model.batch_size" not in given:
        options.batch_size = min(options.batch_size, rollout)
    if "fisher.every_n_rollouts" not in given and is_new:
        rollouts = training.total_steps // rollout
        every = max(model_type.fisher_every, 1)
        config.fisher.every_n_rollouts = max(1, min(every, rollouts // 10))
    return remark


def read_recipe(model_type: type[Algorithm], env: str) -> dict[str, dict[str, Any]]:
    """The settings of an algorithm in an environment: options of "model" and of "trainer"."""
    folder = _RECIPES / "atari" if is_atari(env) else _RECIPES
    recipe = yaml.safe_load((folder / f"{model_type.name}.yaml").read_text())
    return {"model": recipe["model"].get("init_args", {}), "trainer": recipe["trainer"]}


class Run:
    """A run that is built: environments, the model in them, and what evaluates and saves it.

    Args:
        config: configuration of the run.
        folder: folder of the run; checkpoints are in its folder ``checkpoints``.
        hyper_parameters: options that every checkpoint keeps.
        checkpoint: content of the checkpoint to resume from; empty for a new run.
        begin: called before the first checkpoint of steps that this run has taken.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        hyper_parameters: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config
        self._at_end = ExitStack()
        try:
            self._make(folder, hyper_parameters or {}, checkpoint or {}, begin)
        except BaseException:
            self.close()
            raise

    def _make(
        self,
        folder: Path,
        hyper_parameters: dict[str, Any],
        checkpoint: dict[str, Any],
        begin: Callable[[], object],
    ) -> None:
        config, training = self.config, self.config.trainer
        self.steps = training.total_steps or _STEPS_ON_CPU
        name = config.data.get("env", "Breakout")
        atari = is_atari(name)
        if atari:  # the emulator's seeds have 31 bits; refused now, not when everything is trained
            num_envs = config.data.get("num_envs", 8)
            largest = 2**31 - EVALUATION_SEED - max(_MOST_EVALUATED, num_envs)
            require_within(0, largest, "[)", seed=config.seed)
        self.env = self._environments()
        self.model = config.model.make(self.env, self.steps, training.device, config.seed)
        self.masked = getattr(self.model, "uses_masks", False)
        if "mask_mode" in self.model.policy_kwargs and not self.masked:
            raise ValueError("mask_mode has no effect: actions are not masked")
        self.model.set_logger(Logger(str(folder), []))
        env_kwargs = dict(config.data.get("env_kwargs") or {})
        is_limited = atari or self.env.env_is_wrapped(TimeLimit)[0]
        if not is_limited:
            env_kwargs["max_episode_steps"] = _LONGEST_GAME
        num_envs = min(training.eval_games, _MOST_EVALUATED)
        self.eval_env = wrap_env(self._environments(num_envs=num_envs, env_kwargs=env_kwargs))
        self.callback = RunSB3(
            self.eval_env,
            n_eval_episodes=training.eval_games,
            eval_freq=training.eval_every or 0,
            deterministic=training.eval_deterministic,
            verbose=training.enable_progress_bar,
            folder=folder / "checkpoints",
            hyper_parameters=hyper_parameters,
            fisher=config.fisher,
            begin=begin,
            save_every=config.save_every or max(25_000, self.steps // 100),
            longest_game=None if is_limited else _LONGEST_GAME,
            log_every=config.model.every,
            env_id=name,
        )
        self._at_end.callback(self.callback.close)
        self.callback.model = self.model
        if checkpoint:
            load_state(self.model, checkpoint)
            self.env.seed(config.seed + self.step)  # not the games that the run began with
            config.fisher.load_state_dict(checkpoint["fisher"])
            self.callback.best_mean_reward = checkpoint["best"]
            self.callback.evaluated_step = checkpoint.get("evaluated", self.step)

    def _environments(self, **changes: Any) -> VecEnv:
        """Environments of the config; with changes, those of evaluations."""
        options = self.config.data | changes
        gamma = self.config.model.kwargs.get("gamma", 0.99)
        env = make_env(**options, seed=self.config.seed, gamma=gamma)
        self._at_end.callback(env.close)
        if changes and isinstance(env, VecNormalize):
            env.training = False
            env.norm_reward = False
        return env

    @property
    def step(self) -> int:
        """The number of steps of all environments together."""
        return self.model.num_timesteps

    def learn(self, *outputs: KVWriter) -> Metrics:
        """Learn, then play; the rows of training go to outputs of Stable-Baselines3's logger."""
        training = self.config.trainer
        self.model.logger.output_formats.extend(outputs)
        self.model.learn(
            max(self.steps - self.step, 0),
            CallbackList([self.config.fisher, *(training.callbacks or ()), self.callback]),
            log_interval=None,  # the callback writes rows, by step
            reset_num_timesteps=False,
            progress_bar=training.enable_progress_bar and sys.stdout.isatty(),
        )
        tested = self.evaluate()
        self.callback.keep_best(tested["test/return"])
        return tested | recent_return(self.model) | dict(self.config.fisher.latest)

    def evaluate(self) -> Metrics:
        """Play the games of an evaluation."""
        self.callback.signals.listen()
        return {f"test/{name}": value for name, value in self.callback.evaluate().items()}

    def close(self) -> None:
        """Close environments, and give signals back."""
        self._at_end.close()


def train(config: Config, folder: Path, ckpt_path: Path | None = None) -> Metrics:
    """Train a policy; checkpoints, ``monitor.csv`` and ``evaluations.npz`` are in the folder.

    Args:
        config: configuration of the run.
        folder: folder of the run.
        ckpt_path: checkpoint of this run to resume from.
    """
    run = Run(config, folder, checkpoint=load_checkpoint(ckpt_path) if ckpt_path else None)
    try:
        return run.learn()
    finally:
        run.close()


def evaluate(config: Config, ckpt_path: Path) -> Metrics:
    """Play the games of an evaluation with a checkpoint."""
    run = Run(config, ckpt_path.parent.parent, checkpoint=load_checkpoint(ckpt_path))
    try:
        return run.evaluate()
    finally:
        run.close()
