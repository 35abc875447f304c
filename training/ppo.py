"""Training with PPO: a policy with a categorical head, on Atari games and in Gymnasium."""

from __future__ import annotations

import re
import sys
from argparse import Namespace as Names
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from jsonargparse import ArgumentParser, Namespace
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import HParam, Logger, TensorBoardOutputFormat
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tensorboard.compat.proto.summary_pb2 import Summary

from catnat import head_names
from catnat.callbacks import FisherMonitorSB3, Stopped, compare, load_checkpoint
from catnat.callbacks.run_sb3 import PPORun, load_state, recent_return
from catnat.datamodules.atari import rom_of
from catnat.datamodules.environments import frames_of_a_game, is_atari, write_gif
from catnat.noise import forked_random_state
from catnat.sb3 import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    HeadPPO,
    NonFinite,
    cleanrl_schedule,
)
from catnat.training import options as cli
from catnat.training.errors import UsageError, usage_errors
from catnat.training.folders import find_checkpoint, open_run
from catnat.training.names import builtin_heads, check_choice, import_modules
from catnat.training.ppo_options import (
    ELSEWHERE,
    GROUPS,
    HELP,
    STEPS,
    STEPS_ELSEWHERE,
    STEPS_ON_CPU,
    Algorithm,
    Environments,
    Training,
    build_parser,
    whole,
)
from catnat.training.report import show_metrics

MUST_AGREE = ("env", "num_actions", "normalize")  # of a checkpoint and the command line
MAX_SEED = 10**9 - 1  # evaluation has seeds of its own above it


def main(names: Names, options: list[str]) -> int:
    """Run a command line whose names are known; see training.main for what it returns."""
    import_modules(names.imports)
    check_choice("--head", names.head, head_names())
    parser, config, note = parse(names, options)
    if names.print_config:
        print(parser.dump(config), end="")
        return 0
    with usage_errors():
        run = compose(names.command, parser, config)
    game = f"{names.command} ppo with {names.head} on {config.data.env}"
    print(f"{game}: {run.folder}{note if names.command == 'fit' else ''}", flush=True)
    try:
        return train(run) if names.command == "fit" else test(run)
    except Stopped as stop:
        print(f"{stop}; go on with: {cli.how_to_go_on(run.folder, stop.path)}")
        return 128 + stop.signum
    finally:
        run.close()


def show_help(topics: list[str]) -> int:
    """Print the page, or the options of one group."""
    if topics:
        check_choice("help topic", topics[0], GROUPS)
        print(cli.group_help(build_parser(), topics[0]))
        return 0
    heads = ", ".join(dict.fromkeys(builtin_heads().values()))
    steps = {"steps": STEPS, "few": STEPS_ON_CPU, "elsewhere": STEPS_ELSEWHERE}
    print(HELP.format(heads=heads, **steps), end="")
    return 0


def parse(names: Names, options: list[str]) -> tuple[ArgumentParser, Namespace, str]:
    """Parser, options and what there is to say; defaults depend on environment and machine."""
    parser = build_parser()
    named = [re.sub(r"^--(trainer\.)?max[-_]steps(?==|$)", "--total_steps", x) for x in options]
    argv = [*named, "--model.name=ppo", f"--model.head={names.head}"]
    config = cli.parse(parser, argv)
    with usage_errors():
        atari = is_atari(config.data.env)
    if not atari:
        parser.set_defaults(ELSEWHERE)
        config = cli.parse(parser, argv)
    config["import"] = names.imports
    trainer, note = config.trainer, ""
    with usage_errors():
        for name in ("total_steps", "eval_every"):
            trainer[name] = whole(name, trainer[name])
    if trainer.total_steps is None:
        on_cpu = trainer.device == "cpu" or not torch.cuda.is_available()
        trainer.total_steps = STEPS_ELSEWHERE if not atari else STEPS_ON_CPU if on_cpu else STEPS
        if trainer.total_steps == STEPS_ON_CPU:
            note = f", {STEPS_ON_CPU} steps on this CPU; the recipe: --total_steps {STEPS}"
    if trainer.eval_every is None:
        trainer.eval_every = max(trainer.total_steps // 10, 1)
    return parser, config, note


# -- compose --------------------------------------------------------------------------------------


@dataclass
class Run:
    """Everything composed, ready to go."""

    model: HeadPPO
    eval_env: VecEnv
    fisher: FisherMonitorSB3
    environments: Environments
    training: Training
    folder: Path
    seed: int
    hparams: dict[str, Any]
    callback: PPORun = field(init=False)

    def evaluate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Returns over a number of games; always the same ones, and training never notices."""
        self.eval_env.seed(self.seed + MAX_SEED + 1)
        share_moments(self.model, self.eval_env)
        with forked_random_state(self.model.device, self.seed):
            scores, lengths = evaluate_policy(
                self.model,
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


def compose(command: str, parser: ArgumentParser, config: Namespace) -> Run:
    """Environments, model and callbacks of a configuration, and the folder of the run."""
    wanted, config.ckpt_path = config.ckpt_path, None  # not part of what is saved
    saved, seed = parser.dump(config), config.seed
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {seed} does not lie in 0..{MAX_SEED}")
    config.model.pop("name")
    # Since 4.49 jsonargparse calls it by the first name.
    objects = getattr(parser, "instantiate", parser.instantiate_classes)(config)
    algorithm, environments, training = objects.model, objects.data, objects.trainer
    home = Path(training.default_root_dir, "ppo", algorithm.head)
    if command == "test" and wanted is None:
        raise UsageError("test needs a checkpoint: --ckpt_path FILE, last or best")
    path = find_checkpoint(home, wanted) if wanted else None
    if path is not None and path.suffix == ".zip":
        raise UsageError(f"{path} is for Stable-Baselines3; give {path.with_suffix('.ckpt').name}")
    checkpoint = load_checkpoint(path) if path is not None else {}
    env = environments.make(environments.num_envs, seed, algorithm.gamma)
    model = make_model(algorithm, training, env, seed)
    same = {name: value for name, value in asdict(environments).items() if name in MUST_AGREE}
    same |= {"head": algorithm.head, "head_options": algorithm.head_options}
    if is_atari(environments.env):
        same["env"] = rom_of(environments.env)  # a game goes by many names
    if path is not None:
        compare(path, checkpoint, same, model.policy)
        load_state(model, checkpoint)
        env.seed(seed + model.num_timesteps)  # not the games that the run began with
    folder = open_run(home, path, saved if command == "fit" else None)
    eval_env = environments.make(min(training.eval_games, 16), seed, algorithm.gamma)
    hparams = asdict(algorithm) | asdict(environments) | {"seed": seed}
    run = Run(model, eval_env, objects.fisher, environments, training, folder, seed, hparams)
    every = (config.save_every, training.eval_every)
    run.callback = PPORun(
        folder / "checkpoints", same, run.evaluate, *every, training.enable_progress_bar
    )
    run.callback.best = checkpoint.get("best", run.callback.best)
    run.callback.model = model
    return run


def make_model(algorithm: Algorithm, training: Training, env: VecEnv, seed: int) -> HeadPPO:
    """PPO with the head, and the policy that fits the observations."""
    batch = algorithm.num_steps * env.num_envs
    if batch // algorithm.num_minibatches < 2:
        raise ValueError(
            f"num_minibatches {algorithm.num_minibatches} leaves less than two steps to each: a "
            f"rollout has {batch} (num_envs times num_steps)"
        )
    rate: Any = algorithm.learning_rate
    if algorithm.anneal_lr:
        rate = cleanrl_schedule(algorithm.learning_rate, training.steps, batch)
    policy = policy_for(env.observation_space)
    small = training.device == "auto" and policy is HeadActorCriticPolicy
    return HeadPPO(
        policy,
        env,
        learning_rate=rate,
        n_steps=algorithm.num_steps,
        batch_size=batch // algorithm.num_minibatches,
        n_epochs=algorithm.update_epochs,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        clip_range=algorithm.clip_coef,
        ent_coef=algorithm.ent_coef,
        vf_coef=algorithm.vf_coef / 2,
        max_grad_norm=algorithm.max_grad_norm,
        value_loss=algorithm.value_loss,
        capture=algorithm.capture,
        policy_kwargs={"head": algorithm.head, "head_options": algorithm.head_options},
        device="cpu" if small else training.device,  # small networks are faster there
        seed=seed,
    )


def policy_for(space: gymnasium.Space[Any]) -> Any:
    """The policy that can look at such observations."""
    if isinstance(space, spaces.Dict):
        return HeadMultiInputActorCriticPolicy
    if is_image_space(space):
        return HeadActorCriticCnnPolicy
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return HeadActorCriticPolicy
    raise ValueError(f"no policy takes observations of {space}")


def share_moments(model: HeadPPO, env: VecEnv) -> None:
    """Scale observations as in training, and rewards not at all."""
    learned = model.get_vec_normalize_env()
    if isinstance(env, VecNormalize) and learned is not None:
        env.training = env.norm_reward = False
        env.obs_rms = learned.obs_rms


# -- run ------------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Learn, play, report."""
    model, callback = run.model, run.callback
    output = TensorBoardOutputFormat(str(run.folder))  # one file: TensorBoard follows one only
    model.set_logger(Logger(str(run.folder), [output]))
    left = run.training.steps - model.num_timesteps
    try:
        model.learn(max(left, 0), CallbackList([run.fisher, callback]), reset_num_timesteps=False)
    except NonFinite as error:
        callback.save()
        print(f"train.py: {error}; saved: {callback.last}", file=sys.stderr)
        return 1
    played = play(run)
    callback.keep_best(played["test/return"])
    metrics = played | recent_return(model) | run.fisher.latest
    record(run, metrics)
    if run.training.gif:
        film(run, output.writer)
    show_metrics(metrics, run.folder, run.training.default_root_dir)
    return 0


def test(run: Run) -> int:
    """Play a checkpoint, and report."""
    run.callback.signals.listen()
    show_metrics(play(run), run.folder, run.training.default_root_dir, keep=False)
    return 0


def play(run: Run) -> dict[str, float]:
    """The last evaluation."""
    metrics = run.evaluate(run.callback.stop_if_asked)
    return {f"test/{name}": value for name, value in metrics.items()}


def record(run: Run, metrics: dict[str, float]) -> None:
    """Give TensorBoard the last metrics, and the hyperparameters beside them."""
    logger = run.model.logger
    for name, value in metrics.items():
        logger.record(name, value)
    plain = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in run.hparams.items()}
    logger.record("hparams", HParam(plain, metrics))
    logger.dump(run.model.num_timesteps)


def film(run: Run, writer: Any) -> None:
    """A GIF of one game, in the run's folder and for TensorBoard."""
    path = run.folder / "game.gif"
    gamma = run.model.gamma
    env = run.environments.make(1, run.seed, gamma, backend="sb3")  # C++ games cannot be drawn
    share_moments(run.model, env)
    deterministic = run.training.eval_deterministic
    try:
        with forked_random_state(run.model.device, run.seed):
            drawn = write_gif(frames_of_a_game(run.model, env, deterministic), path)
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
    writer._get_file_writer().add_summary(Summary(value=[value]), run.model.num_timesteps)
