"""Runs of ``catnat.sb3.train`` without a command line."""

import numpy as np
import pytest
from jsonargparse import ArgumentParser
from stable_baselines3.common.logger import KVWriter
from stable_baselines3.common.monitor import load_results

from catnat.callbacks.files import load_checkpoint
from catnat.sb3.recipes import A2C, PPO, Algorithm, Training
from catnat.sb3.train import Config, Run, add_arguments, complete, evaluate, train

PLAIN = {"env": "CartPole-v1", "num_envs": 4, "env_kwargs": {"max_episode_steps": 30}}


def config(model=None, steps=256, **options):
    model = model or PPO("natural", n_steps=16, batch_size=16, n_epochs=1)
    training = Training(steps, "cpu", eval_games=2, eval_every=64, enable_progress_bar=False)
    return Config(model, PLAIN, training, **options)


def test_a_run_leaves_the_files_of_stable_baselines_and_resumes(tmp_path):
    metrics = train(config(), tmp_path)
    assert 5 < metrics["test/return"] <= 30
    games = load_results(str(tmp_path))
    assert {"r", "l", "t"} <= {*games} and games["l"].le(30).all() and len(games) > 8
    with np.load(tmp_path / "evaluations.npz") as file:
        assert file["timesteps"].tolist() == [64, 128, 192]
        assert file["results"].shape == file["ep_lengths"].shape == (3, 2)
    last = tmp_path / "checkpoints/last.ckpt"
    assert evaluate(config(), last)["test/return"] == metrics["test/return"]
    rows = len(games)
    train(config(steps=512), tmp_path, last)
    with np.load(tmp_path / "evaluations.npz") as file:
        assert file["timesteps"].tolist() == [64, 128, 192, 256, 320, 384, 448]
    assert len(load_results(str(tmp_path))) > rows


def test_rows_of_a_resumed_run_stay_at_the_same_steps(tmp_path):
    class Steps(KVWriter, list):
        def write(self, values, excluded, step=0):
            if "time/fps" in values:
                self.append(step)

        def close(self):
            pass

    def rows(steps, checkpoint=None):
        model = A2C("natural", n_steps=5)
        model.every = 10
        run = Run(config(model, steps), tmp_path, checkpoint=checkpoint)
        written = Steps()
        try:
            run.learn(written)
        finally:
            run.close()
        return written

    assert rows(500) == [200, 400]
    checkpoint = load_checkpoint(tmp_path / "checkpoints/last.ckpt")
    assert rows(1000, checkpoint) == [600, 800, 1000]


@pytest.mark.parametrize("kind", [PPO, A2C])
def test_options_are_parsed_and_completed(kind):
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser, Algorithm)
    path = f"catnat.sb3.recipes.{kind.__name__}"
    words = [f"--model={path}", "--data.env=CartPole-v1", "--model.gamma=0.9"]
    parsed = parser.parse_args(words)
    complete(parsed, kind, {"model.gamma"})
    assert parsed.trainer.total_steps == 50_000 and parsed.model.init_args.gamma == 0.9
    assert parsed.fisher.every_n_rollouts == kind.fisher_every
    assert type(parser.instantiate(parsed).model) is kind
