"""Training with Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium.

A new algorithm is a subclass of :class:`Algorithm` with a method ``make``, and a name in
``options.RL_MODELS``.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import HParam, Logger, TensorBoardOutputFormat
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.fisher_monitor_sb3 import write_now
from catnat.callbacks.sb3_run import RunSB3, recent_return
from catnat.callbacks.tensorboard import open_writer
from catnat.checks import require_at_least, require_positive, require_within
from catnat.cli.folder import begin
from catnat.cli.options import RECIPES, Recipe, load
from catnat.cli.run import RunCLI, arguments, short_names
from catnat.datamodules.environments import is_atari, make_env
from catnat.rng import forked_random_state
from catnat.sb3 import HeadA2C, HeadPPO, MaskedPlayer, cleanrl_schedule
from catnat.sb3.algorithms import load_state

_OF_THE_RUN = {"seed", "gamma"}  # arguments of make_env that are no options of the data
_EVALUATION_SEED = 10**9  # added to the seed of a run: the games of evaluations are others
_LONGEST_GAME = 10_000  # steps in an evaluation, where an environment has no time limit


class Algorithm:
    """An algorithm of Stable-Baselines3, which is made when its environments are.

    Args:
        head: name of the head.
        head_options: options of the head.
        policy_kwargs: other arguments of the policy, such as net_arch.
        learning_rate: of the optimizer, at the beginning.
        anneal_lr: let it fall linearly to 0 at the last step.
        kwargs: options of the algorithm itself.
    """

    atari: ClassVar[dict[str, Any]] = {}  # the recipe for Atari games
    not_atari: ClassVar[dict[str, Any]] = {}  # the recipe for other environments
    # Rollouts between two rows of the log, and at most between two looks of the Fisher monitor.
    every: ClassVar[int] = 1

    def __init__(
        self,
        head: str = "natural",
        head_options: dict[str, Any] | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        learning_rate: float = 7e-4,
        anneal_lr: bool = False,
        **kwargs: Any,
    ) -> None:
        def numbers(*names: str) -> dict[str, Any]:
            given = {name: kwargs.get(name) for name in names}
            return {name: x for name, x in given.items() if isinstance(x, int | float)}

        require_positive(learning_rate=learning_rate)
        require_positive(**numbers("clip_range", "max_grad_norm", "rms_prop_eps"))
        require_at_least(0, **numbers("ent_coef", "vf_coef"))
        require_at_least(1, **numbers("n_steps", "n_epochs"))
        require_within(0, 1, **numbers("gamma", "gae_lambda"))
        layers = (policy_kwargs or {}).get("net_arch")
        if not isinstance(layers, list | dict | None):
            raise ValueError(f"net_arch is a list or a dict of widths, not {layers!r}")
        self.policy_kwargs = {"head": head, "head_options": head_options} | (policy_kwargs or {})
        self.learning_rate, self.anneal_lr = learning_rate, anneal_lr
        self.kwargs = kwargs

    def rate(self, env: VecEnv, steps: int) -> Any:
        """The learning rate, or its schedule."""
        if not self.anneal_lr:
            return self.learning_rate
        return cleanrl_schedule(self.learning_rate, steps, self.kwargs["n_steps"] * env.num_envs)


class PPO(Algorithm):
    """PPO; for Atari games with CleanRL's settings, which are the paper's."""

    # CleanRL's value loss has a factor 1/2, so that its vf_coef is 0.5.
    atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 2.5e-4, "anneal_lr": True, "n_steps": 128, "batch_size": 256,
        "n_epochs": 4, "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.25,
        "value_loss": "cleanrl",
    }  # fmt: skip
    not_atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 1e-3, "anneal_lr": True, "n_steps": 32, "batch_size": 256,
        "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
    }  # fmt: skip

    def make(self, policy: Any, env: VecEnv, steps: int, seed: int, device: str) -> HeadPPO:
        """The model, which learns for so many steps of all environments together."""
        return HeadPPO(
            policy, env, learning_rate=self.rate(env, steps), policy_kwargs=self.policy_kwargs,
            seed=seed, device=device, **self.kwargs,
        )  # fmt: skip


class A2C(Algorithm):
    """A2C with the defaults of Stable-Baselines3."""

    every = 100  # rollouts are short

    def make(self, policy: Any, env: VecEnv, steps: int, seed: int, device: str) -> HeadA2C:
        """The model, as that of PPO."""
        return HeadA2C(
            policy, env, learning_rate=self.rate(env, steps), policy_kwargs=self.policy_kwargs,
            seed=seed, device=device, **self.kwargs,
        )  # fmt: skip


@dataclass
class Training:
    """How long training takes, on which device, and how it is evaluated.

    Args:
        total_steps: steps of all environments together, also --max_steps. By default 50,000; of
            Atari games 8,000,000 with an accelerator, else 30,000.
        device: auto is CUDA for pictures, else the CPU.
        eval_games: games of an evaluation. A game that has no time limit ends after 10,000 steps.
        eval_every: steps between evaluations; by default a tenth of all, 0 for none.
        eval_deterministic: evaluate with the likeliest actions, do not sample.
        callbacks: callbacks of Stable-Baselines3.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: int | None = None
    device: str = "auto"
    eval_games: int = 10
    eval_every: int | None = None
    eval_deterministic: bool = False
    callbacks: list[BaseCallback] | None = None
    enable_progress_bar: bool = True
    default_root_dir: str = "runs"

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("eval_games", 1), ("eval_every", 0)):
            if (value := getattr(self, name)) is not None:
                require_at_least(least, **{name: value})
        # Stable-Baselines3 would take the CPU in place of a GPU that is not there.
        kind, _, number = self.device.partition(":")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {self.device!r} here")


class RLCLI(RunCLI):
    """The command line of the algorithms of Stable-Baselines3, as that of the other models.

    ``model``, ``env``, ``eval_env`` and ``config`` are what a command line describes.
    """

    in_checkpoints = "optimizer"
    of_lightning_cli: ClassVar[dict[str, Any]] = {"auto_configure_optimizers": False}

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        try:
            super().__init__(args, run)
        except (EOFError, ConnectionError) as error:
            if "multiprocessing" not in extract_tb(error.__traceback__)[-1].filename:
                raise  # what reads our output has gone
            raise ChildProcessError("the process of an environment has ended") from error

    # -- from words to objects -----------------------------------------------------------------

    def find_classes(self) -> None:
        """Find the class of the algorithm."""
        self.recipe = RECIPES[self.names.model]
        self.algorithm: type[Algorithm] = load(self.names.path, "--model")
        of_data = arguments(make_env, _OF_THE_RUN)
        self.short = short_names(arguments(self.algorithm), of_data, arguments(Training))
        self.short |= dict.fromkeys(("max_steps", "trainer.max_steps"), "trainer.total_steps")
        self.short["net_arch"] = "model.policy_kwargs.net_arch"

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add the groups of options."""
        parser.add_subclass_arguments(Algorithm, "model", required=False)
        parser.add_function_arguments(make_env, "data", skip=_OF_THE_RUN)
        parser.add_class_arguments(Training, "trainer")
        parser.add_class_arguments(FisherMonitorSB3, "fisher")

    def usual(self, given: list[str]) -> list[str]:
        """Defaults that depend on the environment and on the length of the run."""
        asked = [word for word in given if not word.startswith("--print_config")]
        first = self.parser.parse_args([*self._classes(), *asked])
        kind, atari = self.algorithm, is_atari(first.data.env)
        recipe = kind.atari if atari else kind.not_atari
        usual = {f"model.{name}": value for name, value in recipe.items()}
        usual["trainer.eval_deterministic"] = not atari
        if not atari:
            self.recipe = Recipe(steps=50_000, steps_on_cpu=50_000)
        if kind.every > 1:
            # The monitor looks at a few of many short rollouts, at one in the last tenth of a run.
            rollout = max(first.model.init_args.n_steps * first.data.num_envs, 1)
            often = int(first.trainer.total_steps or self.recipe.steps_on_cpu) // rollout // 10
            usual["fisher.every_n_rollouts"] = max(1, min(kind.every, often))
            usual["fisher.image_every_n_rollouts"] = 20 * kind.every
        return [f"--{name}={value}" for name, value in usual.items()]

    def instantiate_classes(self) -> None:
        """Make environments, model and callbacks."""
        made = self.parser.instantiate(self.config)
        self.training, self.fisher = made.trainer, made.fisher
        self.seed, training = self.config.seed_everything, made.trainer
        self.hparams = self.config.model.init_args.as_dict() | self.config.data.as_dict()
        self.title += f" on {self.config.data.env}"
        self.env = self._environments()
        seen, steps = self.env.observation_space, training.total_steps
        policy = "CnnPolicy" if is_image_space(seen) else "MlpPolicy"
        policy = "MultiInputPolicy" if isinstance(seen, spaces.Dict) else policy
        small = training.device == "auto" and policy == "MlpPolicy"
        device = "cpu" if small else training.device  # small networks are faster there
        self.model: Any = made.model.make(policy, self.env, steps, self.seed, device)
        self.masked = getattr(self.model, "uses_masks", False)  # A2C does not
        if self.checkpoint:
            load_state(self.model, self.checkpoint)
            self.fisher.load_state_dict(self.checkpoint["fisher"])
            self.env.seed(self.seed + self.step)  # not the games that the run began with
        count, limit = min(training.eval_games, 16), dict(self.config.data.env_kwargs or {})
        self.limited = not (is_atari(self.config.data.env) or self.env.env_is_wrapped(TimeLimit)[0])
        if self.limited:
            limit["max_episode_steps"] = _LONGEST_GAME
        self.eval_env = self._environments(num_envs=count, env_kwargs=limit)
        save_every, eval_every = self.config.save_every, training.eval_every
        save_every = max(25_000, steps // 100) if save_every is None else save_every
        eval_every = max(steps // 10, 1) if eval_every is None else eval_every
        require_at_least(1, save_every=save_every)
        place, show = self.folder.path / "checkpoints", training.enable_progress_bar
        self.callback = RunSB3(
            place, self.hparams, self.fisher, self.evaluate, save_every, eval_every, show
        )
        self.callback.best = self.checkpoint.get("best", self.callback.best)
        self.callback.model = self.model

    def _environments(self, **changes: Any) -> VecEnv:
        """Environments with the options of the command line; with others, to play in only."""
        gamma = self.config.model.init_args.gamma
        options = self.config.data.as_dict() | changes
        env = make_env(**options, seed=self.seed, gamma=gamma)
        if changes and isinstance(env, VecNormalize):
            env.training = env.norm_reward = False
        return env

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps of all environments together; 0 before there is a model."""
        return int(self.model.num_timesteps) if hasattr(self, "model") else 0

    def fit(self) -> dict[str, Any]:
        """Learn, then play."""
        model, training, folder = self.model, self.training, str(self.folder.path)
        if self.masked:
            print(f"actions are masked: {self.config.data.env} has action_masks()", flush=True)
        begin(self.folder.path, self.options)
        self.writer = open_writer(folder, model.num_timesteps + 1 if self.folder.resumed else None)
        model.set_logger(Logger(folder, [_Output(self.writer)]))
        left = max(training.total_steps - model.num_timesteps, 0)
        callbacks = CallbackList([self.fisher, *(training.callbacks or ()), self.callback])
        model.learn(
            left,
            callbacks,
            log_interval=self.algorithm.every,
            reset_num_timesteps=False,
            progress_bar=training.enable_progress_bar and sys.stdout.isatty(),
        )
        played = self.test()
        self.callback.keep_best(played["test/return"])
        about = {"seed": self.seed, "steps": model.num_timesteps, "actions": model.action_space}
        plain = {name: x if isinstance(x, int | float) else str(x)
                 for name, x in (self.hparams | about).items()}  # fmt: skip
        write_now(model.logger, {"hparams": HParam(plain, played)} | played, model.num_timesteps)
        return dict(played | recent_return(model) | self.fisher.latest)

    def test(self) -> dict[str, Any]:
        """Play."""
        self.callback.signals.listen()
        return {f"test/{name}": value for name, value in self.evaluate().items()}

    def close(self) -> None:
        """Give back signals, environments and the folder."""
        for each in filter(None, map(vars(self).get, ("callback", "eval_env", "env", "writer"))):
            for process in each.processes if getattr(each, "waiting", False) else ():
                process.terminate()  # in a step that did not end: closing would wait for it
            with contextlib.suppress(OSError, EOFError):  # of a process that is gone
                each.close()
        super().close()

    def evaluate(self) -> dict[str, float]:
        """Returns over a number of games: always the same games, and training is not affected."""
        self.eval_env.seed(self.seed + _EVALUATION_SEED)
        sync_envs_normalization(self.env, self.eval_env)
        lengths: Any
        with forked_random_state(self.model.device, self.seed):
            scores, lengths = evaluate_policy(
                MaskedPlayer(self.model, self.eval_env) if self.masked else self.model,
                self.eval_env,
                self.training.eval_games,
                deterministic=self.training.eval_deterministic,
                callback=lambda *_: self.callback.stop_if_asked(),
                return_episode_rewards=True,
            )
        mean, spread, length = np.mean(scores), np.std(scores), np.mean(lengths)
        found = {"return": float(mean), "return_std": float(spread), "length": float(length)}
        if self.limited and (unfinished := sum(each >= _LONGEST_GAME for each in lengths)):
            found["unfinished"] = float(unfinished)
        return found


class _Output(TensorBoardOutputFormat):
    """Stable-Baselines3's rows in one event file with the rest: TensorBoard follows one only."""

    def __init__(self, writer: Any) -> None:
        self._is_closed, self.writer = False, writer
