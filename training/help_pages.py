"""The help pages that fit a screen. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

from catnat.training.errors import command_words
from catnat.training.names import LIGHTNING_MODELS, MODELS, RL_MODELS, builtin_heads

# How long a run takes if nobody says: with an accelerator, and on a CPU.
STEPS = {"vae": (60_000, 2_000), "mlp-vae": (60_000, 2_000), "gsl": (5_000, 5_000)}
ATARI_STEPS, ATARI_STEPS_ON_CPU, OTHER_STEPS = 8_000_000, 30_000, 50_000

_LIGHTNING = """\
usage: {command} [fit | test] --model MODEL --head HEAD [options]

Trains a model and tests it (fit, the default), or only tests a checkpoint.

  --model MODEL        {models}; or my_module.MyVAE
  --head HEAD          {heads}
  --data DATA          {data}; or my_module.MyData
  --num_latents N --num_categories K   of vae and mlp-vae
  --variant V          of their data: gray, binary or stochastic
  --theta P --estimator E   of gsl: edge probability, gradient estimator
  --max_steps N        {steps}
  --seed N             of weights and noise
  --devices N --strategy ddp ...   any flag of Lightning's Trainer
  --ckpt_path PATH     continue (or test) a checkpoint: a file, last or best
  --save_every N       steps between checkpoints, and --val_check_interval N
                       between validations: 500, or a 30th of a longer run
  --config FILE        options from a YAML file, as --print_config prints one
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X; the first three
groups can be left out. To list them: --help model, data, trainer or fisher.
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs
One HTML page about runs: {command} report RUN [RUN ...] --out FILE
ppo and a2c have other options: --model ppo --help
"""

_RL = """\
usage: {command} [fit | test] --model {model} --head HEAD [options]

Trains a policy and plays (fit, the default), or only plays a checkpoint.

  --head HEAD          {heads}
  --env ENV            an Atari game (Breakout), or a Gymnasium id (CartPole-v1)
  --total_steps N      of Atari {steps:,} if there is an accelerator, else
                       {few:,}; of other environments {elsewhere:,}
  --num_envs N --num_steps N       games side by side, steps in a rollout
  --learning_rate X --ent_coef X --max_grad_norm X ...
  --eval_games N       to play at the end, and ten times on the way
  --device D           auto, cpu, cuda, cuda:1 ...
  --seed N             of weights, actions and games
  --ckpt_path PATH     continue (or play) a checkpoint: a file, last or best
  --save_every N       steps between checkpoints: 25,000, or a 100th of a
                       longer run
  --config FILE        options from a YAML file; other options win
  --print_config       print all options as such a file, and stop
  --import MODULE      import it first: heads and environments it defines

Full names are --model.X, --data.X, --trainer.X, --fisher.X; the first three
groups can be left out. To list them: --help model, data, trainer or fisher.
Runs lie in runs/{model}/<head>/version_<k>: tensorboard --logdir runs
One HTML page about runs: {command} report RUN [RUN ...] --out FILE
"""


def help_page(model: str) -> str:
    """The page of a model; those of the user's own share one with the VAE."""
    heads = ", ".join(dict.fromkeys(builtin_heads().values()))
    command = " ".join(command_words())
    if model in RL_MODELS:
        steps = {"steps": ATARI_STEPS, "few": ATARI_STEPS_ON_CPU, "elsewhere": OTHER_STEPS}
        return _RL.format(command=command, model=model, heads=heads, **steps)
    many, few = STEPS.get(model, STEPS["vae"])
    said = f"{many:,}" + (f" if there is an accelerator, else {few:,}" if few != many else "")
    data = ", ".join(LIGHTNING_MODELS.get(model, LIGHTNING_MODELS["vae"]))
    models = ", ".join(MODELS)
    return _LIGHTNING.format(command=command, models=models, heads=heads, data=data, steps=said)
