"""The first seconds of a program: faster imports, and the GPU gets ready beside them."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from catnat.training.names import LIGHTNING_MODELS, Names

# Options that may bring another device, several processes, or code of the user's own; and those
# that must be known before the first call of a library of CUDA.
_DECIDES_DEVICE = frozenset({
    "accelerator", "devices", "num_nodes", "strategy", "plugins", "deterministic",
    "trainer", "config", "callbacks", "logger", "profiler", "predictor",
})  # fmt: skip
_ONE_OF_SEVERAL = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"})


@contextmanager
def first_imports(names: Names, options: list[str]) -> Iterator[None]:
    """Import torch and Lightning inside, in a third less time.

    If torch is there already, this process is not the program alone: nothing happens then.
    """
    if "torch" in sys.modules:
        yield
        return
    if trains_on_one_gpu(names, options, os.environ) and torch_has_cuda():
        threading.Thread(target=begin_cuda, daemon=True).start()
    with _no_garbage(), _without_scipy_signal():
        yield


def trains_on_one_gpu(names: Names, options: list[str], environment: Collection[str]) -> bool:
    """Whether a command line certainly trains on the first CUDA device, if there is one.

    No process may be forked after CUDA has begun. So a command line that could bring other devices,
    several processes or code of the user's own is not certain.

    Args:
        names: from the command line.
        options: the rest of the command line.
        environment: names of the environment's variables.
    """
    given = {part for word in options if word.startswith("--") for part in _parts(word)}
    own = names.imports or "." in (names.data or "") or names.model not in LIGHTNING_MODELS
    other = own or names.ckpt_path is not None or names.print_config
    return not (other or given & _DECIDES_DEVICE or _ONE_OF_SEVERAL & set(environment))


def _parts(option: str) -> list[str]:
    """The parts of an option's name.

    >>> _parts("--trainer.callbacks+=my_module.MyCallback"), _parts("--max-steps")
    (['callbacks'], ['max_steps'])
    """
    name = option.removeprefix("--").partition("=")[0].rstrip("+").replace("-", "_")
    return name.removeprefix("trainer.").split(".")


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, found out without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(Path(each, "lib", "libtorch_cuda.so").exists() for each in folders)


def begin_cuda() -> None:
    """Make the context of the first CUDA device, which torch then finds; without a GPU, nothing.

    The driver takes about a second, in which Python goes on with its imports.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Python looks for no garbage inside, nor later among the objects that were made inside.

    Imports make half a million objects that stay. Python would search them all, again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # A program that ends with a traceback frees these objects, too: triton's libraries would
        # print a page about those that are left, below the traceback.
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


@contextmanager
def _without_scipy_signal() -> Iterator[None]:
    """A stand-in for scipy.signal inside, which imports the real one if anybody needs it.

    torchmetrics imports scipy.signal, a sixth of all the time of imports, to add a name that other
    packages for audio may look for, ``scipy.signal.hamming``. The stand-in has that name; the real
    module, should a run import it, has it not.
    """
    name = "scipy.signal"

    def find(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__path__":  # inspect asks every module
            raise AttributeError(attribute)
        remove()
        return getattr(importlib.import_module(name), attribute)

    def remove() -> None:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]

    stand_in = ModuleType(name)
    vars(stand_in).update(hamming=None, __getattr__=find)
    sys.modules.setdefault(name, stand_in)
    try:
        yield
    finally:
        remove()
