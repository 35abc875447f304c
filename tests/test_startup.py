"""The first seconds of a program: what is imported, and when CUDA may begin."""

import ctypes
import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from catnat.training import startup
from catnat.training.names import read_names


def begins(line, environment=()):
    return startup.trains_on_one_gpu(*read_names(line.split()), environment)


@pytest.mark.parametrize(
    "line",
    [
        "--model gsl --head natural",
        "--model vae",
        "fit --model mlp-vae --max_steps 10 --trainer.max_time=00:01:00 --data kmnist",
        "--model gsl --default_root_dir elsewhere --trainer.val_check_interval 100",
    ],
)
def test_cuda_begins_beside_the_imports_of_a_run_on_one_gpu(line):
    assert begins(line)


@pytest.mark.parametrize(
    "more",
    [
        "--accelerator cpu",
        "--accelerator=cpu",
        "--trainer.accelerator=cpu",
        "--devices 2 --strategy ddp",
        "--devices 1,",
        "--strategy ddp_fork",
        "--trainer.strategy.class_path DDPStrategy",
        "--num-nodes 2",
        "--deterministic true",
        '--trainer={"accelerator":"cpu"}',
        "--callbacks+=my_module.MyCallback",
        "--predictor my_module.MyPredictor",
        "--import my_module",
        "--data my_module.MyData",
        "--ckpt_path last",
        "--print_config",
    ],
)
def test_cuda_does_not_begin_early_where_a_run_may_fork_or_not_use_it(more):
    assert not begins(f"--model gsl {more}")


def test_cuda_does_not_begin_early_for_a_configuration_in_a_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {accelerator: cpu}\n")
    assert not begins(f"--model gsl --config {path}")


@pytest.mark.parametrize("model", ["ppo", "a2c", "my_module.MyVAE"])
def test_cuda_does_not_begin_early_for_games_and_models_of_the_users_own(model):
    assert not begins(f"--model {model}")


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID"])
def test_cuda_does_not_begin_early_in_one_of_several_processes(name):
    assert not begins("--model gsl", {"PATH", name})


@pytest.mark.parametrize("devices", [0, 1])
def test_the_context_is_made_where_there_is_a_device(devices, monkeypatch):
    called = []

    def init(flags):
        called.append("cuInit")
        return 0 if devices else 100  # CUDA_ERROR_NO_DEVICE

    driver = SimpleNamespace(
        cuInit=init, cuDevicePrimaryCtxRetain=lambda _, device: called.append(device)
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    startup.begin_cuda()
    assert called == ["cuInit", 0][: devices + 1]


def test_without_a_driver_nothing_begins(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    startup.begin_cuda()


def test_a_process_that_has_torch_is_left_alone(monkeypatch):
    """As the processes that a sweep forks, and those of users who call the program themselves."""
    monkeypatch.setattr(startup, "begin_cuda", lambda: pytest.fail("CUDA begins"))
    frozen, threads = gc.get_freeze_count(), threading.active_count()
    with startup.first_imports(*read_names(["--model", "gsl"])):
        assert gc.isenabled()
        assert threading.active_count() == threads
    assert gc.get_freeze_count() == frozen


def run_python(source):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


_FIRST = """
import gc, sys, threading
from catnat.training import startup
from catnat.training.names import read_names

began = []
startup.begin_cuda = lambda: began.append(threading.current_thread().daemon)
startup.torch_has_cuda = lambda: True
"""


def test_a_young_process_imports_without_garbage_and_scipy_signal_and_begins_cuda_in_a_thread():
    run_python(
        _FIRST
        + """
with startup.first_imports(*read_names(["--model", "gsl"])):
    assert not gc.isenabled()
    import scipy.signal
    assert hasattr(scipy.signal, "hamming") and "scipy.stats" not in sys.modules
assert gc.isenabled() and gc.get_freeze_count() and "scipy.signal" not in sys.modules
assert began == [True] and "torch" not in sys.modules
with startup.first_imports(*read_names(["--model", "gsl", "--accelerator", "cpu"])):
    stand_in = sys.modules["scipy.signal"]
    assert not hasattr(stand_in, "__file__")
    from scipy.signal import butter  # somebody needs it
    assert sys.modules["scipy.signal"] is not stand_in
assert sys.modules["scipy.signal"].butter is butter is scipy.signal.butter
assert began == [True]
"""
    )


def test_what_the_imports_made_is_freed_when_the_process_ends():
    """Otherwise triton's libraries print a page of leaks below the traceback of a user's model."""
    found = run_python(
        _FIRST
        + """
class Import:
    def __init__(self): self.circle = self
    def __del__(self): print("freed")
with startup.first_imports(*read_names(["--model", "gsl"])):
    made = Import()
"""
    )
    assert found == "freed\n"


@pytest.mark.slow
def test_the_program_imports_lightning_without_scipy_signal_and_whoever_needs_it_gets_it():
    found = run_python(
        _FIRST
        + """
from catnat.training.main import main
assert main(["--model", "gsl", "--batch_size", "wrong"]) == 2  # after the imports
assert began == [True] and "torch" in sys.modules and gc.isenabled()
print("scipy.signal" in sys.modules, gc.get_freeze_count() > 100_000)
import scipy.signal, torchmetrics.audio
print(callable(scipy.signal.butter), torchmetrics.audio.scipy.signal is scipy.signal)
"""
    )
    assert found.split() == ["False", "True", "True", "True"]
