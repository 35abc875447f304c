"""Training with Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium."""

import sys
from typing import Any

from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.sb3_run import EVALUATION_SEED, Rows, RunSB3, recent_return
from catnat.checks import require_within
from catnat.cli.options import Options
from catnat.cli.run import Metrics, RunCLI
from catnat.datamodules.environments import is_atari, make_env
from catnat.sb3.algorithms import load_state
from catnat.sb3.recipes import A2C, PPO, Algorithm, Training  # noqa: F401 - of earlier records

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
_LONGEST_GAME = 10_000  # steps in an evaluation, where an environment has no time limit
_MOST_EVALUATED = 16  # environments of an evaluation


class RLCLI(RunCLI):
    """The command line of the algorithms of Stable-Baselines3, as that of the other models.

    ``model``, ``env``, ``eval_env`` and ``config`` are what a command line describes.
    """

    trainer: Any  # evaluates, saves and stops
    checkpoint_key = "optimizer"
    has_optimizer = False

    # -- from words to objects -----------------------------------------------------------------

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add the options of algorithm, environments, training and monitor."""
        if parser is self.parser:
            parser.add_subclass_arguments(Algorithm, "model", required=False, skip=_UNUSED)
        else:
            parser.add_class_arguments(self.model_type, "model", skip=_UNUSED)
        parser.add_function_arguments(make_env, "data", skip=_RUN_ARGUMENTS)
        parser.add_class_arguments(Training, "trainer")
        parser.add_class_arguments(FisherMonitorSB3, "fisher")

    def defaults(self) -> Options:
        """Defaults that depend on the environment."""
        env = self.chosen_options.get("data.env", self.page.get_default("data.env"))
        if not is_atari(env):
            return self.model_type.not_atari
        return self.model_type.atari | super().defaults()

    def complete_options(self) -> None:
        """Let the monitor look at some of many short rollouts, once in the last tenth at least.

        A default minibatch is not larger than a rollout.
        """
        config = self.config
        options = config.model.init_args
        rollout = max(options.n_steps * config.data.num_envs, 1)
        self.steps_at_once = rollout
        if "batch_size" in options and "model.batch_size" not in self.chosen_options:
            options.batch_size = min(options.batch_size, rollout)
        if "fisher.every_n_rollouts" not in self.chosen_options:
            rollouts = config.trainer.total_steps // rollout
            config.fisher.every_n_rollouts = max(1, min(self.model_type.every, rollouts // 10))

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make environments, the model in them, and what evaluates and saves it."""
        config = self.config
        training = self.config_init.trainer
        fisher = self.config_init.fisher
        seed = config.seed_everything
        steps = training.total_steps
        atari = is_atari(config.data.env)
        if isinstance(seed, bool):
            raise ValueError("--seed false: a run needs a seed")
        if atari:  # the emulator's seeds have 31 bits; refused now, not when everything is trained
            largest = 2**31 - EVALUATION_SEED - max(_MOST_EVALUATED, config.data.num_envs)
            require_within(0, largest, "[)", seed=seed)
        self.title += f" on {config.data.env}"
        self.env = self._environments()
        self.model = self.model.make(self.env, steps, training.device, seed)
        self.masked = getattr(self.model, "uses_masks", False)
        if "mask_mode" in self.model.policy_kwargs and not self.masked:
            raise ValueError("mask_mode has no effect: actions are not masked")
        self.model.set_logger(Logger(str(self.folder.path), []))
        env_kwargs = dict(config.data.env_kwargs or {})
        is_limited = atari or self.env.env_is_wrapped(TimeLimit)[0]
        if not is_limited:
            env_kwargs["max_episode_steps"] = _LONGEST_GAME
        num_envs = min(training.eval_games, _MOST_EVALUATED)
        eval_env = self._environments(num_envs=num_envs, env_kwargs=env_kwargs)
        self.eval_env = OnPolicyAlgorithm._wrap_env(eval_env, 0)  # as the model wraps its own
        run = RunSB3(
            self.eval_env,
            n_eval_episodes=training.eval_games,
            eval_freq=max(steps // 10, 1) if training.eval_every is None else training.eval_every,
            deterministic=training.eval_deterministic,
            verbose=training.enable_progress_bar,
            folder=self.folder.path / "checkpoints",
            hyper_parameters=self.hparams(),
            fisher=fisher,
            begin=self._begin,
            save_every=config.save_every or max(25_000, steps // 100),
            longest_game=None if is_limited else _LONGEST_GAME,
        )
        self.at_end.callback(run.close)
        run.model = self.model
        if self.checkpoint:
            load_state(self.model, self.checkpoint)
            self.env.seed(seed + self.step)  # not the games that the run began with
            fisher.load_state_dict(self.checkpoint["fisher"])
            run.best_mean_reward = self.checkpoint["best"]
            run.evaluated_step = self.checkpoint.get("evaluated", self.began)
        return run

    def _environments(self, **changes: Any) -> VecEnv:
        """Environments with the options of the command line; with changes, for evaluations."""
        config = self.config
        options = config.data.as_dict() | changes
        env = make_env(**options, seed=config.seed_everything, gamma=config.model.init_args.gamma)
        self.at_end.callback(env.close)
        if changes and isinstance(env, VecNormalize):
            env.training = False
            env.norm_reward = False
        return env

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps of all environments together."""
        return self.model.num_timesteps

    def fit(self) -> Metrics:
        """Learn, then play."""
        model = self.model
        training = self.config_init.trainer
        fisher = self.config_init.fisher
        if self.masked:
            print(f"actions are masked: {self.config.data.env} has action_masks()", flush=True)
        if not self.folder.resumed:  # otherwise with the first checkpoint: until then it may fail
            self._begin()
        logger = self.make_logger(self.step + 1)
        self.at_end.callback(logger.finalize, "ended")
        model.logger.output_formats.append(Rows(logger))
        model.learn(
            max(training.total_steps - self.step, 0),
            CallbackList([fisher, *(training.callbacks or ()), self.trainer]),
            log_interval=self.model_type.every,
            reset_num_timesteps=False,
            progress_bar=training.enable_progress_bar and sys.stdout.isatty(),
        )
        tested = self.evaluate("test")
        self._begin()
        self.trainer.keep_best(tested["test/return"])
        self.write_hparams(logger, tested, self.step, actions=model.action_space)
        return tested | recent_return(model) | dict(fisher.latest)

    def _begin(self) -> None:
        self.folder.begin(self.config_text)

    def evaluate(self, command: str) -> Metrics:
        """Play."""
        self.trainer.signals.listen()
        return {f"test/{name}": value for name, value in self.trainer.evaluate().items()}
