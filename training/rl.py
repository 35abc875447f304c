"""Training with Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from jsonargparse import Namespace
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tensorboard.compat.proto.summary_pb2 import Summary

from catnat import head_names
from catnat.callbacks import FisherMonitorSB3
from catnat.callbacks.dashboard import RunWriter, write_hparams, write_layout
from catnat.callbacks.run_sb3 import RunSB3, recent_return
from catnat.datamodules.atari import rom_of
from catnat.datamodules.environments import frames_of_a_game, is_atari, write_gif
from catnat.noise import forked_random_state
from catnat.sb3 import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    MaskedPlayer,
    NonFinite,
)
from catnat.sb3.masks import has_masks
from catnat.sb3.run_state import load_state
from catnat.training import options as cli
from catnat.training.algorithms import ALGORITHMS, Options
from catnat.training.errors import RunFailed, UsageError, usage_errors
from catnat.training.folders import open_run
from catnat.training.help_pages import ATARI_STEPS, ATARI_STEPS_ON_CPU, OTHER_STEPS
from catnat.training.names import Names, check_choice
from catnat.training.program import Program, Run
from catnat.training.resume import check_same
from catnat.training.rl_options import Environments, Training, build_parser, whole

MUST_AGREE = ("env", "num_actions", "normalize")  # of a checkpoint and the command line
MAX_SEED = 10**9 - 1  # evaluation has seeds of its own above it


class RLProgram(Program):
    """Training of a policy."""

    how_long = ("trainer.total_steps",)
    may_change = (
        # Where: the machine that goes on may be another one.
        "trainer.device",
        "trainer.devices",
        "model.capture",
        # What is evaluated and drawn: training is the same, whoever looks on.
        "trainer.eval_games",
        "trainer.eval_every",
        "trainer.eval_deterministic",
        "trainer.gif",
    )

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        assert names.head is not None
        check_choice("--head", names.head, head_names())
        if names.ckpt_path is not None and names.ckpt_path.endswith(".zip"):
            path = Path(names.ckpt_path)
            better = path.with_suffix(".ckpt").name
            raise UsageError(f"{path} is for Stable-Baselines3; give {better}")

    def build_parser(self, argv: list[str]) -> cli.Parser:
        """All options; defaults depend on the environment."""
        parser = build_parser(self.names.model)
        env = cli.parse(parser, argv).data.env
        if "data.env" not in cli.given(parser, argv):
            env = self.checkpoint.get("hyper_parameters", {}).get("env", env)
        with usage_errors():
            if not is_atari(env):
                parser.set_defaults(ALGORITHMS[self.names.model].not_atari)
        return parser

    def canonical(self, option: str, value: Any) -> Any:
        """An Atari game goes by many names."""
        return game_name(value) if option == "data.env" else value

    def title(self, config: Namespace) -> str:
        """The algorithm, the head and the environment."""
        return f"{super().title(config)} on {config.data.env}"

    def complete(self, config: Namespace) -> str:
        """Set the number of steps; returns a remark if that is less than the recipe's."""
        trainer, remark = config.trainer, ""
        with usage_errors():
            for name in ("total_steps", "eval_every"):
                trainer[name] = whole(name, trainer[name])
        if trainer.total_steps is None:
            on_cpu = trainer.device == "cpu" or not torch.cuda.is_available()
            trainer.total_steps = ATARI_STEPS_ON_CPU if on_cpu else ATARI_STEPS
            if not is_atari(config.data.env):
                trainer.total_steps = OTHER_STEPS
            elif on_cpu:
                few = f", {ATARI_STEPS_ON_CPU} steps on this CPU"
                remark = f"{few}; the recipe: --total_steps {ATARI_STEPS}"
        if trainer.eval_every is None:
            trainer.eval_every = max(trainer.total_steps // 10, 1)
        if config.save_every is None:
            config.save_every = max(25_000, trainer.total_steps // 100)
        return remark

    def compose(self, parser: cli.Parser, config: Namespace, saved: str) -> RLRun:
        """Environments, model and callbacks of a configuration, and the folder of the run."""
        seed, ckpt_path, checkpoint = config.seed, self.ckpt_path, self.checkpoint
        if not 0 <= seed <= MAX_SEED:
            raise UsageError(f"--seed {seed} does not lie in 0..{MAX_SEED}")
        objects = cli.instantiate(parser, config)
        options, environments, training = objects.model, objects.data, objects.trainer
        env = environments.make(environments.num_envs, seed, options.gamma)
        model = make_model(options, training, env, seed)
        hparams = asdict(options) | asdict(environments)
        kept = hparams | {"env": game_name(environments.env)}
        if ckpt_path is not None:
            same = {name: kept[name] for name in (*MUST_AGREE, "head", "head_options")}
            check_same(ckpt_path, checkpoint, same, model.policy)
            load_state(model, checkpoint)
            env.seed(seed + model.num_timesteps)  # not the games that the run began with
        folder = open_run(
            self.names.home, ckpt_path, saved if self.names.command == "fit" else None
        )
        eval_env = environments.make(min(training.eval_games, 16), seed, options.gamma)
        hparams |= {"seed": seed}
        run = RLRun(model, options, eval_env, objects.fisher, environments, training, folder, seed,
                    hparams)  # fmt: skip
        every = (config.save_every, training.eval_every)
        place = folder / "checkpoints"
        run.callback = RunSB3(place, kept, run.evaluate, *every, training.enable_progress_bar)
        run.callback.best = checkpoint.get("best", run.callback.best)
        run.callback.model = model
        return run


@dataclass
class RLRun(Run):
    """A model of Stable-Baselines3, its environments and callbacks."""

    model: OnPolicyAlgorithm
    options: Options
    eval_env: VecEnv
    fisher: FisherMonitorSB3
    environments: Environments
    training: Training
    folder: Path
    seed: int
    hparams: dict[str, Any]
    callback: RunSB3 = field(init=False)

    def fit(self) -> dict[str, float]:
        """Learn, play, write a GIF."""
        model, callback = self.model, self.callback
        self._say_masks()
        writer = RunWriter(str(self.folder))
        model.set_logger(Logger(str(self.folder), [_Output(writer)]))
        write_layout(writer, "policy")
        left = self.training.steps - model.num_timesteps
        try:
            model.learn(
                max(left, 0),
                CallbackList([self.fisher, callback]),
                log_interval=self.options.log_interval,
                reset_num_timesteps=False,
            )
        except NonFinite as error:
            callback.save()
            raise RunFailed(f"{error}; saved: {callback.last}") from error
        played = self._play()
        callback.keep_best(played["test/return"])
        metrics = played | recent_return(model) | self.fisher.latest
        for name, value in played.items():
            model.logger.record(name, value)
        model.logger.dump(model.num_timesteps)
        hparams = self.hparams | {"steps": model.num_timesteps, "actions": model.action_space}
        write_hparams(writer, hparams, list(played))
        if self.training.gif:
            self._film(writer)
        writer.flush()
        return metrics

    def test(self) -> dict[str, float]:
        """Play a checkpoint."""
        self._say_masks()
        self.callback.signals.listen()
        return self._play()

    def time_spent(self, began: float, imported: float) -> str:
        """A line that says where the seconds went."""
        return self.callback.watch.line(began, imported)

    def evaluate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Returns over a number of games: always the same games, and training is not affected."""
        self.eval_env.seed(self.seed + MAX_SEED + 1)
        share_moments(self.model, self.eval_env)
        with forked_random_state(self.model.device, self.seed):
            scores, lengths = evaluate_policy(
                self._player(self.eval_env),
                self.eval_env,
                self.training.eval_games,
                deterministic=self.training.eval_deterministic,
                callback=lambda *_: stop_if_asked(),
                return_episode_rewards=True,
            )
        mean, spread, length = np.mean(scores), np.std(scores), np.mean(lengths)
        return {"return": float(mean), "return_std": float(spread), "length": float(length)}

    def close(self) -> None:
        """Stop threads, and give signals back."""
        self.callback.close()
        self.eval_env.close()
        assert self.model.env is not None
        self.model.env.close()

    def _play(self) -> dict[str, float]:
        """The evaluation at the end."""
        with self.callback.watch.part("test"):
            metrics = self.evaluate(self.callback.stop_if_asked)
        return {f"test/{name}": value for name, value in metrics.items()}

    def _player(self, env: VecEnv) -> Any:
        """Who plays in an environment: the model, with masks if it learns with masks."""
        return MaskedPlayer(self.model, env) if self.masked else self.model

    @property
    def masked(self) -> bool:
        """Whether the masks of the environment are used; only HeadPPO can use them."""
        return getattr(self.model, "uses_masks", False)

    def _say_masks(self) -> None:
        """One line about masks, if the environment has any."""
        name = self.environments.env
        if self.masked:
            print(f"actions are masked: {name} has action_masks()", flush=True)
        elif has_masks(self.eval_env):
            why = "" if hasattr(self.model, "uses_masks") else "; --model ppo can"
            print(f"actions are not masked, though {name} has action_masks(){why}", flush=True)

    def _film(self, writer: Any) -> None:
        """A GIF of one game, in the run's folder and for TensorBoard."""
        path = self.folder / "game.gif"
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


class _Output(TensorBoardOutputFormat):
    """Stable-Baselines3's rows in one event file with the rest: TensorBoard follows one only."""

    def __init__(self, writer: RunWriter) -> None:
        self._is_closed, self.writer = False, writer


def make_model(options: Options, training: Training, env: VecEnv, seed: int) -> OnPolicyAlgorithm:
    """The algorithm, with the policy that fits the observations."""
    policy = policy_for(env.observation_space)
    small = training.device == "auto" and policy is HeadActorCriticPolicy
    device = "cpu" if small else training.device  # small networks are faster there
    return options.make(policy, env, training.steps, device=device, seed=seed)


def policy_for(space: gymnasium.Space[Any]) -> Any:
    """The policy that can look at such observations."""
    if isinstance(space, spaces.Dict):
        return HeadMultiInputActorCriticPolicy
    if is_image_space(space):
        return HeadActorCriticCnnPolicy
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return HeadActorCriticPolicy
    raise ValueError(f"no policy takes observations of {space}")


def game_name(env: str | None) -> str | None:
    """One name for an Atari game, which goes by many; other environments keep theirs."""
    return rom_of(env) if env is not None and is_atari(env) else env


def share_moments(model: OnPolicyAlgorithm, env: VecEnv) -> None:
    """Scale observations as in training, and rewards not at all."""
    learned = model.get_vec_normalize_env()
    if isinstance(env, VecNormalize) and learned is not None:
        env.training = env.norm_reward = False
        env.obs_rms = learned.obs_rms
