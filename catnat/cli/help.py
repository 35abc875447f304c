"""The help pages."""

from __future__ import annotations

from typing import Any

from catnat.cli.names import DATA, MODELS, command_words, read_names

_PAGE = """\
usage: {command} [fit|validate|test|predict] --model MODEL --head HEAD ...

Trains a model and tests it (fit, the default), or only evaluates a checkpoint.
It is a LightningCLI: what you know of one works here.

  --model MODEL        {models}; or my_module.MyModel
  --head HEAD          softmax, sparsemax, sigmoid, natural; or your own
  --data DATA          {data};
                       or my_module.MyData
  --max_steps N        how long; also --max_epochs N, --max_time DD:HH:MM:SS
  --seed N             of weights and noise
  --ckpt_path PATH     resume or test a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file, as --print_config prints one
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X, --checkpoint.X; the
first three groups can be left out. ppo and a2c have --env and others. To list
the options of a model and its data: {command} --model vae --help
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs"""


def help_page(argv: list[str]) -> str:
    """The page of the program; with --model also all options of that model."""
    page = _PAGE.format(command=command_words(), models=", ".join(MODELS), data=", ".join(DATA))
    words = [word for word in argv if word not in ("-h", "--help")]
    if not any(word.startswith("--model") for word in words):
        return page
    names = read_names(words)
    from jsonargparse import ArgumentParser

    if names.is_rl:
        from catnat.cli.rl import groups
    else:
        from catnat.cli.lightning import groups
    parser: Any = ArgumentParser(usage="", add_help=False, print_config=None)
    for group, cls in groups(names).items():
        parser.add_class_arguments(cls, group, fail_untyped=False)
    return f"{page}\n\n{parser.format_help().strip()}"
