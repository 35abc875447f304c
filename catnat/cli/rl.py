"""Runs of Stable-Baselines3: a policy with a categorical head, in Atari and Gymnasium."""

from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.seed import seed_everything

from catnat.callbacks.files import load_checkpoint
from catnat.callbacks.sb3_run import Rows
from catnat.cli.folder import RunFolder
from catnat.cli.names import Options, program_name
from catnat.cli.parsing import find_class, import_module, parse, print_config_if_asked
from catnat.cli.request import Request, flat, recipe_file
from catnat.cli.resume import check_options, resumed_text
from catnat.cli.run import Metrics, hparams_of, make_logger, write_hparams
from catnat.sb3.recipes import Algorithm
from catnat.sb3.train import Config, Run, add_arguments, complete


class SB3Run:
    """A run with an algorithm of Stable-Baselines3; see :class:`catnat.cli.run.Run`.

    Args:
        request: the command line.
        until: "options": parse them. "objects": build model and environments, too. "end": also
            open the folder of the run.
    """

    in_batches = False
    keeps = False

    def __init__(self, request: Request, until: str = "end") -> None:
        self.request = request
        self.run: Any = None
        self.began = 0
        self.remark = ""
        for module in request.imports:
            import_module(module, "--import")
        self.model_type = find_class(request.model_path, Algorithm, "--model")
        self.parser = self._make_parser(Algorithm)
        page = self._make_parser(self.model_type)
        choices = {"model": request.model_path}
        names = {"max_steps": "trainer.total_steps"}
        recipe = recipe_file(request.model, request.recipe)
        parsed = parse(self.parser, page, request, recipe, choices, other_names=names)
        self.config, self.typed, self.given = parsed
        is_new = not request.record
        self.remark = complete(self.config, self.model_type, self.given, is_new)
        self.rollout = self.config.model.init_args.n_steps * self.config.data.num_envs
        print_config_if_asked(request, self.parser, self.config)
        self._resume()
        if until == "options":
            return
        try:
            if until == "end" and self.keeps:
                self.folder.open()
            seed_everything(self.config.seed_everything, verbose=False)
            self.config_init = self.parser.instantiate(self.config)
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close environments, give signals back, and release the folder."""
        if self.run is not None:
            self.run.close()
        self.folder.close()

    # -- options -------------------------------------------------------------------------------

    def _make_parser(self, model_type: type) -> ArgumentParser:
        """A parser of any algorithm, or of one of them."""
        parser = ArgumentParser(exit_on_error=False, usage=f"{program_name()} --model MODEL ...")
        add = parser.add_argument
        add("-c", "--config", action=ActionConfigFile, help="YAML file of options")
        add("--seed_everything", type=int, default=0, help="random seed of weights and noise")
        add("--import", type=list[str] | str, default=[], help="modules to import")
        add("--ckpt_path", type=str | None, help="checkpoint: a file, last or best")
        add("--save_every", type=PositiveInt | None, help="steps between saves")
        add_arguments(parser, model_type)
        return parser

    def _resume(self) -> None:
        """Check the checkpoint of a run that is resumed or tested."""
        request, config = self.request, self.config
        options = config.model.init_args
        self.title = f"{request.command} {request.model} with {options.head} on {config.data.env}"
        is_fit = request.command == "fit"
        self.keeps = is_fit
        self.folder = RunFolder(request.home(options.head), request.ckpt_path, is_fit)
        config.ckpt_path = None  # config.yaml records how the run began
        self.config_text = self.parser.dump(config, skip_unset=False)
        self.options = flat(yaml.safe_load(self.config_text))
        self.checkpoint: Options = {}
        path = request.ckpt_path
        if path is None:
            if not is_fit:
                raise ValueError(
                    f"{request.command} needs a checkpoint: --ckpt_path FILE, last or best"
                )
            return
        self.checkpoint = load_checkpoint(path)
        if "optimizer" not in self.checkpoint:
            raise ValueError(f"checkpoint {path} belongs to another model")
        hyper_parameters = self.checkpoint.get("hyper_parameters", {})
        for name, wanted in {"class_path": config.model.class_path, "head": options.head}.items():
            saved = hyper_parameters.get(name, wanted)
            if saved != wanted:
                raise ValueError(f"checkpoint {path} is of {name} {saved}, not {wanted}")
        if not is_fit:
            return
        if request.record:
            check_options(path, request.record, self.options, self.given)
        self.began = self.checkpoint["global_step"]
        self.remark = resumed_text(self.began, config.trainer.total_steps, self.rollout)

    # -- model and environments ----------------------------------------------------------------

    def _build(self) -> None:
        """Make environments, the model in them, and what evaluates and saves it."""
        objects = self.config_init
        config = Config(
            objects.model,
            self.config.data.as_dict(),
            objects.trainer,
            objects.fisher,
            self.config.seed_everything,
            self.config.save_every,
        )
        folder = self.folder.path
        self.run = Run(config, folder, self.hparams(), self.checkpoint, self._begin)
        self.model = self.run.model

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps of all environments together."""
        return self.run.step

    def fit(self) -> Metrics:
        """Learn, then play."""
        if self.run.masked:
            print(f"actions are masked: {self.config.data.env} has action_masks()", flush=True)
        if not self.folder.resumed:  # otherwise with the first checkpoint: until then it may fail
            self._begin()
        logger = make_logger(self.folder, self.step + 1)
        try:
            metrics = self.run.learn(Rows(logger))
            self._begin()
            hparams = self.hparams() | {"steps": self.step, "actions": self.model.action_space}
            write_hparams(logger, hparams, metrics, self.step)
        finally:
            logger.close()
        return metrics

    def _begin(self) -> None:
        self.folder.begin(self.config_text)

    def evaluate(self, command: str) -> Metrics:
        """Play."""
        return self.run.evaluate()

    def hparams(self) -> Options:
        """The options of model and environment, for checkpoints and TensorBoard."""
        return hparams_of(self.options)
