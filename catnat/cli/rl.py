"""Training with Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium.

A new algorithm is a subclass of :class:`Algorithm` with a method ``make``, and a name in
``options.RL_MODELS``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from jsonargparse.typing import PositiveInt
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import HParam, Logger, TensorBoardOutputFormat
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn
from torch.optim import Optimizer

from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.fisher_monitor_sb3 import write_now
from catnat.callbacks.sb3_run import EVALUATION_SEED, RunSB3, recent_return
from catnat.callbacks.tensorboard import open_writer
from catnat.checks import require_at_least, require_positive, require_within
from catnat.cli.options import Recipe
from catnat.cli.run import RunCLI
from catnat.datamodules.environments import is_atari, make_env
from catnat.sb3 import HeadA2C, HeadPPO, cleanrl_schedule
from catnat.sb3.algorithms import load_state
from catnat.sb3.distributions import MaskMode

_RUN_ARGUMENTS = {"seed", "gamma"}  # arguments of make_env that are not options of the data
# Arguments of Stable-Baselines3 that would do nothing here.
_UNUSED = {"tensorboard_log", "use_sde", "sde_sample_freq"}
_UNUSED |= {"rollout_buffer_class", "rollout_buffer_kwargs"}
_UNUSED |= {"policy", "env", "seed", "device", "_init_setup_model"}  # they follow from the others
_LONGEST_GAME = 10_000  # steps in an evaluation, where an environment has no time limit
_MOST_EVALUATED = 16  # environments of an evaluation


class NetArch(TypedDict, total=False):
    """Widths of the layers of the policy and of the value function."""

    pi: list[PositiveInt]
    vf: list[PositiveInt]


class PolicyOptions(TypedDict, total=False):
    """Arguments of the policies of Stable-Baselines3, except those of the head."""

    net_arch: list[PositiveInt] | NetArch
    activation_fn: type[nn.Module]
    ortho_init: bool
    features_extractor_class: type[BaseFeaturesExtractor]
    features_extractor_kwargs: dict[str, Any]
    share_features_extractor: bool
    normalize_images: bool
    optimizer_class: type[Optimizer]
    optimizer_kwargs: dict[str, Any]
    mask_mode: MaskMode


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
        policy_kwargs: PolicyOptions | None = None,
        learning_rate: float = 7e-4,
        anneal_lr: bool = False,
        **kwargs: Any,
    ) -> None:
        def numbers(*names: str) -> dict[str, Any]:
            return {x: kwargs[x] for x in names if isinstance(kwargs.get(x), int | float)}

        positive = ("clip_range", "clip_range_vf", "max_grad_norm", "rms_prop_eps", "target_kl")
        require_positive(learning_rate=learning_rate, **numbers(*positive))
        require_within(0, float("inf"), "[)", **numbers("ent_coef", "vf_coef"))
        require_at_least(1, **numbers("n_steps", "n_epochs", "batch_size", "stats_window_size"))
        require_within(0, 1, **numbers("gamma", "gae_lambda"))
        self.policy_kwargs = {"head": head, "head_options": head_options, **(policy_kwargs or {})}
        drops_options = kwargs.get("use_rms_prop") and "optimizer_class" not in self.policy_kwargs
        if drops_options and "optimizer_kwargs" in self.policy_kwargs:
            raise ValueError("optimizer_kwargs need an optimizer_class, or --use_rms_prop false")
        self.learning_rate = learning_rate
        self.anneal_lr = anneal_lr
        self.kwargs = kwargs


class PPO(Algorithm):
    """PPO; for Atari games with CleanRL's settings, which are the paper's."""

    # CleanRL's value loss has a factor 1/2, so that its vf_coef is 0.5.
    atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 2.5e-4,
        "anneal_lr": True,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "clip_range": 0.1,
        "ent_coef": 0.01,
        "vf_coef": 0.25,
        "value_loss": "cleanrl",
    }
    not_atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 1e-3,
        "anneal_lr": True,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gamma": 0.98,
        "gae_lambda": 0.8,
    }

    def make(self, *args: Any, **kwargs: Any) -> HeadPPO:
        """The model."""
        return HeadPPO(*args, **kwargs, **self.kwargs)


class A2C(Algorithm):
    """A2C with the defaults of Stable-Baselines3."""

    every = 100  # rollouts are short

    def make(self, *args: Any, **kwargs: Any) -> HeadA2C:
        """The model."""
        return HeadA2C(*args, **kwargs, **self.kwargs)  # type: ignore[misc]


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
        require_at_least(1, eval_games=self.eval_games)
        require_at_least(0, eval_every=self.eval_every or 0)
        if self.device != "auto":
            try:  # Stable-Baselines3 would take the CPU in place of a device that is not there
                torch.empty(0, device=self.device).cpu()
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"there is no device {self.device!r} here: {error}") from error


class RLCLI(RunCLI):
    """The command line of the algorithms of Stable-Baselines3, as that of the other models.

    ``model``, ``env``, ``eval_env`` and ``config`` are what a command line describes.
    """

    in_checkpoints: ClassVar[set[str]] = {"optimizer"}
    cli_options: ClassVar[dict[str, Any]] = {"auto_configure_optimizers": False}
    hidden: ClassVar[dict[str, set[str]]] = {"model": _UNUSED, "data": _RUN_ARGUMENTS}

    # -- from words to objects -----------------------------------------------------------------

    def find_groups(self) -> dict[str, Any]:
        """The algorithm, and what makes environments, training and monitor."""
        return {
            "model": self.model_type,
            "data": make_env,
            "trainer": Training,
            "fisher": FisherMonitorSB3,
        }

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add the groups of options."""
        parser.add_subclass_arguments(Algorithm, "model", required=False, skip=_UNUSED)
        parser.add_function_arguments(make_env, "data", skip=_RUN_ARGUMENTS)
        parser.add_class_arguments(Training, "trainer")
        parser.add_class_arguments(FisherMonitorSB3, "fisher")

    def defaults(self) -> dict[str, Any]:
        """Defaults that depend on the environment."""
        algorithm = self.model_type
        atari = is_atari(self.chosen_options.get("data.env", self.page.get_default("data.env")))
        if not atari:
            self.recipe = Recipe(self.recipe.path, steps=50_000, steps_on_cpu=50_000)
        recipe = algorithm.atari if atari else algorithm.not_atari
        options = {f"model.{name}": value for name, value in recipe.items()}
        options["trainer.eval_deterministic"] = not atari
        return options

    def complete_options(self) -> None:
        """Let the monitor look at some of many short rollouts, once in the last tenth at least.

        A default minibatch is not larger than a rollout.
        """
        config = self.config
        options = config.model.init_args
        require_at_least(1, total_steps=config.trainer.total_steps)
        rollout = max(options.n_steps * config.data.num_envs, 1)
        if self.line.command == "fit" and config.trainer.total_steps <= self.began - rollout:
            raise ValueError(
                f"the checkpoint has {self.began} steps already, more than --total_steps "
                f"{config.trainer.total_steps}"
            )
        if "batch_size" in options and "model.batch_size" not in self.chosen_options:
            options.batch_size = min(options.batch_size, rollout)
        every = self.model_type.every
        if every > 1 and "fisher.every_n_rollouts" not in self.chosen_options:
            tenth = config.trainer.total_steps // rollout // 10
            config.fisher.every_n_rollouts = max(1, min(every, tenth))

    def build(self) -> None:
        """Make environments, model and callbacks."""
        config = self.config
        objects = self.parser.instantiate(config)
        self.training = training = objects.trainer
        self.fisher = objects.fisher
        self.seed = config.seed_everything
        atari = is_atari(config.data.env)
        if isinstance(self.seed, bool):
            raise ValueError("--seed false: a run needs a seed")
        if atari:  # the emulator's seeds have 31 bits; refused now, not when everything is trained
            largest = 2**31 - EVALUATION_SEED - max(_MOST_EVALUATED, config.data.num_envs)
            require_within(0, largest, "[)", seed=self.seed)
        self.title += f" on {config.data.env}"
        self.env = self._environments()
        observations = self.env.observation_space
        device = training.device
        if isinstance(observations, spaces.Dict):
            policy = "MultiInputPolicy"
        elif is_image_space(observations):
            policy = "CnnPolicy"
        else:
            policy = "MlpPolicy"
            if device == "auto":
                device = "cpu"  # small networks are faster there
        steps = training.total_steps
        algorithm = objects.model
        rate = algorithm.learning_rate
        if algorithm.anneal_lr:
            rate = cleanrl_schedule(rate, steps, algorithm.kwargs["n_steps"] * self.env.num_envs)
        self.model: Any = algorithm.make(
            policy,
            self.env,
            learning_rate=rate,
            policy_kwargs=algorithm.policy_kwargs,
            seed=self.seed,
            device=device,
        )
        self.masked = getattr(self.model, "uses_masks", False)
        if "mask_mode" in self.model.policy_kwargs and not self.masked:
            raise ValueError("mask_mode has no effect: actions are not masked")
        self.model.set_logger(Logger(str(self.folder.path), []))
        if self.checkpoint:
            load_state(self.model, self.checkpoint)
            self.fisher.load_state_dict(self.checkpoint["fisher"])
            self.env.seed(self.seed + self.step)  # not the games that the run began with
        env_kwargs = dict(config.data.env_kwargs or {})
        is_limited = atari or self.env.env_is_wrapped(TimeLimit)[0]
        if not is_limited:
            env_kwargs["max_episode_steps"] = _LONGEST_GAME
        num_envs = min(training.eval_games, _MOST_EVALUATED)
        eval_env = self._environments(num_envs=num_envs, env_kwargs=env_kwargs)
        self.eval_env = OnPolicyAlgorithm._wrap_env(eval_env, 0)  # as the model wraps its own
        eval_every = training.eval_every
        if eval_every is None:
            eval_every = max(steps // 10, 1)
        self.callback = RunSB3(
            self.eval_env,
            n_eval_episodes=training.eval_games,
            eval_freq=eval_every,
            deterministic=training.eval_deterministic,
            verbose=training.enable_progress_bar,
            folder=self.folder.path / "checkpoints",
            hyper_parameters=self.hparams(),
            fisher=self.fisher,
            save_every=self.save_interval(max(25_000, steps // 100)),
            longest_game=None if is_limited else _LONGEST_GAME,
        )
        if self.checkpoint:
            self.callback.best_mean_reward = self.checkpoint["best"]
            self.callback.evaluated_step = self.checkpoint.get("evaluated", self.began)
        self.callback.model = self.model

    def _environments(self, **changes: Any) -> VecEnv:
        """Environments with the options of the command line; with changes, for evaluations."""
        gamma = self.config.model.init_args.gamma
        options = self.config.data.as_dict() | changes
        env = make_env(**options, seed=self.seed, gamma=gamma)
        if changes and isinstance(env, VecNormalize):
            env.training = False
            env.norm_reward = False
        return env

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps of all environments together; 0 before there is a model."""
        return int(self.model.num_timesteps) if hasattr(self, "model") else 0

    def fit(self) -> dict[str, Any]:
        """Learn, then play."""
        model = self.model
        training = self.training
        folder = self.folder.path
        if self.masked:
            print(f"actions are masked: {self.config.data.env} has action_masks()", flush=True)
        self.folder.begin(self.options)
        self.writer = open_writer(folder, model.num_timesteps + 1 if self.folder.resumed else None)
        model.logger.output_formats.append(_Output(self.writer))
        callbacks = [self.fisher, *(training.callbacks or ()), self.callback]
        model.learn(
            max(training.total_steps - model.num_timesteps, 0),
            CallbackList(callbacks),
            log_interval=self.model_type.every,
            reset_num_timesteps=False,
            progress_bar=training.enable_progress_bar and sys.stdout.isatty(),
        )
        tested = self.test()
        self.callback.keep_best(tested["test/return"])
        about = {"steps": model.num_timesteps, "actions": model.action_space}
        hparams = {
            name: value if isinstance(value, int | float) else str(value)
            for name, value in (self.hparams() | about).items()
        }
        write_now(model.logger, {"hparams": HParam(hparams, tested)} | tested, model.num_timesteps)
        return dict(tested | recent_return(model) | self.fisher.latest)

    def test(self) -> dict[str, Any]:
        """Play."""
        self.callback.signals.listen()
        return {f"test/{name}": value for name, value in self.callback.evaluate().items()}

    def close(self) -> None:
        """Give back signals, environments and the folder."""
        for name in ("callback", "eval_env", "env", "writer"):
            if name in vars(self):
                getattr(self, name).close()
        super().close()


class _Output(TensorBoardOutputFormat):
    """Stable-Baselines3's rows in one event file with the rest: TensorBoard follows one only."""

    def __init__(self, writer: Any) -> None:
        self._is_closed = False
        self.writer = writer
