"""Train a group of runs as one batched model, and leave what ``train.py`` would have left."""

from __future__ import annotations

import io
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from catnat.datamodules.in_memory import InMemoryDataModule
from catnat.lit_modules import GraphStructureLearner
from catnat.replay import Backlog, StepGraph
from experiments import runs
from experiments.together import states
from experiments.together.graphs import ManyGraphLearners, add_errors
from experiments.together.members import KINDS, Curve, Member, Model, write_run

_STEPS_AHEAD = 40  # of the host, before it waits for the device
Known = tuple[tuple[Tensor, Tensor], dict[str, Tensor]]  # the last batch, and errors on all pairs


class Many(Protocol):
    """M models trained as one."""

    def prepare_step(self, step: int) -> None:
        """Set the numbers that depend on the step; called before the step, on the host."""

    def step(self, batch: Any) -> Tensor:
        r"""Take a step of every model on its own batch, (M, B, \*); returns the losses, (M,)."""

    def state_of(self, model: int) -> dict[str, Tensor]:
        """Parameters and statistics of one model, for ``load_state_dict(..., strict=False)``."""

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in a step: written back in place, the models are what they were."""


class _Alone:
    """What a model asks of its Trainer when it is validated."""

    world_size, global_rank = 1, 0

    def __init__(self, data: InMemoryDataModule) -> None:
        self.datamodule = data


@torch.inference_mode()
def validated(
    model: Model, data: InMemoryDataModule, device: torch.device, known: Known | None = None
) -> dict[str, float]:
    """What ``Trainer.validate`` gives, without what the Trainer does before and after.

    Args:
        model: to be validated.
        data: its data.
        device: where the model is.
        known: of a graph learner, where its errors were computed together with those of others.
    """
    found: dict[str, float] = {}

    def log_dict(metrics: dict[str, Tensor], **_: Any) -> None:
        found.update({name: float(value) for name, value in metrics.items()})

    alone = _Alone(data)
    model.trainer = alone  # type: ignore[assignment]
    model.log_dict = log_dict  # type: ignore[assignment, method-assign]
    model.eval()
    try:
        model.on_validation_epoch_start()
        if known is not None and isinstance(model, GraphStructureLearner):
            add_errors(model, *known)
        else:
            for number, batch in enumerate(data.make_loader("val", device)):
                model.validation_step(batch, number)
        model.on_validation_epoch_end()
    finally:
        model.train()
        del model.log_dict
        model.trainer = None
    return found


def train_group(members: list[Member], folder: Path, say: Callable[[str], None]) -> None:
    """Train a group; too little memory on the device is an error of one line.

    The arguments are those of :class:`GroupTraining`.
    """
    try:
        GroupTraining(members, folder, say).run()
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{len(members)} models at once do not fit into the memory of the GPU: "
            "choose fewer with --jobs"
        ) from None


class GroupTraining:
    """The training of a group.

    Its state is kept in the folder of the table until the group has ended, see ``states.py``.

    Args:
        members: of one group.
        folder: of the table.
        say: prints a line.
    """

    def __init__(self, members: list[Member], folder: Path, say: Callable[[str], None]) -> None:
        self.members, self.say = members, say
        accelerator = members[0].trainer["accelerator"]
        with_cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        self.device = torch.device("cuda" if with_cuda else "cpu")
        self.max_steps = members[0].trainer["max_steps"]
        self.interval = members[0].trainer["val_check_interval"]
        self.path = states.state_path(folder, [each.run for each in members])
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.trainer = Trainer(
            accelerator="gpu" if with_cuda else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.data: dict[str, InMemoryDataModule] = {}
        for each in members:
            if each.same_data not in self.data:
                each.data.prepare_data()
                each.data.setup("fit")
                self.data[each.same_data] = each.data
        places = {name: place for place, name in enumerate(self.data)}
        which = [places[each.same_data] for each in members]
        self.which = torch.tensor(which, device=self.device)
        for each in members:
            each.model.to(self.device)
        self.many: Many = KINDS[type(members[0].model)]([each.model for each in members])
        self.curves: list[Curve] = [[] for _ in members]
        self.failed: dict[int, str] = {}  # why models were given up, by their number

    def run(self) -> None:
        """Train to the end; then validate and test every model, and write its folder."""
        # The noise of a group is that of its first seed.
        torch.manual_seed(self.members[0].seed)
        begun = self._restore()
        first, spent = begun, time.monotonic()
        take = StepGraph(self._step) if self.device.type == "cuda" else self._step
        backlog = Backlog(1) if self.device.type == "cuda" else None
        for step, batch in enumerate(self._batches(begun), begun):
            self.many.prepare_step(step)
            losses = take(batch)
            if backlog is not None and step % _STEPS_AHEAD == 0:
                backlog.add()
            done = step + 1
            if done % self.interval == 0 or done == self.max_steps:
                self._validate(done, losses)
                rate = len(self.members) * (done - first) / (time.monotonic() - spent)
                spent, first = time.monotonic(), done
                self.say(
                    f"{len(self.members)} models together: step {done} of {self.max_steps}, "
                    f"{rate:,.0f} model-steps/s"
                )
                self._save(done)
        for number, one in enumerate(self.members):
            if runs.done(one.run):
                continue  # since before an interruption
            if number not in self.failed:
                self._finish(number)
            if number in self.failed:
                (one.home / "log.txt").write_text(self.failed[number] + "\n")
                runs.record_failure(one.run, 1, self.failed[number])
        states.forget(self.path)

    def _step(self, batch: tuple[Tensor, ...]) -> Tensor:
        own = tuple(each[self.which] for each in batch)
        return self.many.step(own[0] if len(own) == 1 else own)

    def _batches(self, begun: int) -> Iterator[tuple[Tensor, ...]]:
        r"""What is left of the batches of all data, (D, B, \*), in the order of ``train.py``."""
        loaders = []
        for data in self.data.values():
            loader = data.make_loader("train", self.device, shuffle=True, seed=data.seed)
            if begun:
                epoch, position = divmod(begun - 1, len(loader))
                loader.load_state_dict({"epoch": epoch, "position": position + 1})
            loaders.append(loader)
        endless = [_endless(loader) for loader in loaders]
        for _ in range(begun, self.max_steps):
            found = [next(each) for each in endless]
            batches = [each if isinstance(each, tuple) else (each,) for each in found]
            yield tuple(torch.stack(each) for each in zip(*batches, strict=True))

    # -- results -------------------------------------------------------------------------------

    def _validate(self, step: int, losses: Tensor) -> None:
        known = self._known_errors()
        for number, (one, loss) in enumerate(zip(self.members, losses.tolist(), strict=True)):
            if number in self.failed:
                continue
            one.model.load_state_dict(self.many.state_of(number), strict=False)
            try:
                data = self.data[one.same_data]
                found = validated(one.model, data, self.device, known.get(number))
            except ValueError as error:
                self._give_up(number, error)
            else:
                self.curves[number].append((step, {"train/loss": loss, **found}))

    def _known_errors(self) -> dict[int, Known]:
        """Errors of all graph learners on the pairs of their validation; none of VAEs."""
        found: dict[int, Known] = {}
        if isinstance(self.many, ManyGraphLearners):
            for name, data in self.data.items():
                models = [i for i, each in enumerate(self.members) if each.same_data == name]
                batches = list(data.make_loader("val", self.device))
                errors = self.many.errors(models, batches)
                for place, model in enumerate(models):
                    own = {key: each[place] for key, each in errors.items()}
                    found[model] = batches[-1], own
        return found

    def _finish(self, number: int) -> None:
        """Test a model, and write its folder."""
        one = self.members[number]
        one.model.load_state_dict(self.many.state_of(number), strict=False)
        try:
            tested = self._tested(one)
        except ValueError as error:
            self._give_up(number, error)
            return
        log = f"trained together with {len(self.members) - 1} other models\n"
        try:
            write_run(one, self.trainer, self.curves[number], self.max_steps, tested, log)
        except OSError as error:
            raise ValueError(f"cannot write {one.home}: {error.strerror}") from error

    def _tested(self, one: Member) -> dict[str, float]:
        data, on_interrupt = self.data[one.same_data], signal.getsignal(signal.SIGINT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return dict(self.trainer.test(one.model, datamodule=data, verbose=False)[0])
            except SystemExit:  # what the Trainer makes of Ctrl-C; it ignores later ones
                signal.signal(signal.SIGINT, on_interrupt)
                raise KeyboardInterrupt from None

    def _give_up(self, number: int, error: ValueError) -> None:
        """Keep why a model has failed: its scores are not finite."""
        self.failed[number] = str(error).splitlines()[0]

    # -- interruptions -------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        noise = torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.get_rng_state()
        state = {"step": step, "tensors": self.many.tensors(), "noise": {self.device.type: noise}}
        state |= {"curves": self.curves, "failed": self.failed}
        packed = io.BytesIO()
        torch.save(state, packed)
        states.save(self.path, packed.getbuffer(), [each.run for each in self.members])

    def _restore(self) -> int:
        """Go on from the group's last validation; returns the number of steps taken before."""
        if not self.path.is_file():
            return 0
        mine = self.many.tensors()
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            found = {name: each.shape for name, each in state["tensors"].items()}
            if found != {name: each.shape for name, each in mine.items()}:
                raise ValueError("it is the state of other models")
            step, noise = int(state["step"]), dict(state["noise"])
            self.curves, self.failed = state["curves"], state["failed"]
        except Exception as error:  # whatever a damaged file brings
            line = (str(error) or type(error).__name__).splitlines()[0]
            self.say(f"{self.path} cannot be read ({line}): its runs begin anew")
            return 0
        with torch.no_grad():
            for name, each in mine.items():
                each.copy_(state["tensors"][name])
        # On another kind of device than before, the noise is new.
        if "cuda" in noise and self.device.type == "cuda":
            torch.cuda.set_rng_state(noise["cuda"])
        if "cpu" in noise and self.device.type == "cpu":
            torch.set_rng_state(noise["cpu"])
        return step


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
