"""train.py as a user meets it: right and wrong command lines, and runs."""

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import yaml
from cases import HEADS, slow
from cases_cli import ROOT, last, run
from cases_fresh import one_server, run_fresh

import train
from catnat import make_head
from catnat.heads import _REGISTRY
from catnat.training import names

BUILT_IN = ("softmax", "sparsemax", "sigmoid", "natural")

# -- wrong command lines --------------------------------------------------------------------------

WRONG = {
    "--model vea": "did you mean vae?",
    "--model": "expected one argument",
    "--head naturl": "did you mean natural?",
    "--head=": "not one of",
    "--head Softmax": "did you mean softmax?",
    "--head catnat": "softmax, sparsemax",
    "traim --model vae": "'traim' is not one of fit, test",
    "--help modl": "did you mean model?",
    "--import no.such.module": "no.such",
    "--import no_such_module --head mine": "no_such_module",
    "--import math --head mine": "softmax, sparsemax",
    "--config no_such_file.yaml": "No such file",
    "--config {broken}": "no YAML",
    "--config {number}": "--print_config",
    "--config {unknown}": "did you mean model.num_latents?",
    "--config {binary}": "decode",
    "--model.num_latent 3": "did you mean --model.num_latents?",
    "--num_latent 3": "did you mean --num_latents?",
    "--trainer.max_epoch 3": "did you mean --trainer.max_epochs?",
    "--max_stps 3": "did you mean --max_steps?",
    "--colour blue": "unknown option --colour",
    "--lr 0.1": "did you mean --learning_rate?",
    "--steps 9": "did you mean --max_steps?",
    "--total_steps 9": "did you mean --max_steps?",
    "--epochs 9": "did you mean --max_epochs?",
    "--gpus 1": "did you mean --devices?",
    "--K 9": "did you mean --num_categories?",
    "--tail 0.1": "did you mean --head_options.tail?",
    "--mix 0.1": "did you mean --head_options.mix?",
    "--head_options tail=0.1": "expected --head_options.NAME VALUE",
    "--env CartPole-v1": "it is one of --model ppo and a2c",
    "--model gsl --num_latents 4": "it is one of --model vae and mlp-vae",
    "--model VAE": "did you mean vae?",
    "--num_latents ten": "expected int",
    "--num_latents 2.5": "expected int",
    "--num_latents": "expected one argument",
    "--num_latents 0": "num_latents must be positive",
    "--num_categories 1": "at least 2",
    "--learning_rate -1": "learning_rate must be positive",
    "--learning_rate fast": "expected float",
    "--learning_rate nan": "--model.learning_rate 'nan': expected a finite number",
    "--optimizer adm": "did you mean adam?",
    "--head_options.amplitde 3": "no option 'amplitde'",
    "--variant binry": "did you mean binary?",
    "--batch_size 0": "batch_size must be positive",
    "--batch_size 5000": "more than the 60 training images",
    "--seed x": "expected int",
    "--seed -1": "--seed -1 does not lie in 0..4294967295",
    "--max_steps -7": "max_steps",
    "--precision 17": "16-mixed",
    "--accelerator gpu": "gpu",
    "--accelerator abacus": "abacus",
    "--devices none": "--devices 'none'",
    "--strategy fast": "fast",
    "--logger foo": "foo",
    "--save_every 0": "--save_every '0': expected a number > 0",
    "--fisher.every_n_steps 0": "at least 1",
    "--fisher.every_step 1": "--fisher.every_step",
    "leftover": "leftover",
    "--max_steps 3 leftover": "leftover",
    "test": "needs a checkpoint",
    "--ckpt_path no_such.ckpt": "no checkpoint no_such.ckpt",
    "--ckpt_path last": "no last.ckpt in any run",
    "test --ckpt_path best": "no best.ckpt in any run",
    "--ckpt_path .": "no checkpoint",
    "--ckpt_path {broken}": "broken.yaml is damaged, or no checkpoint at all",
    "--ckpt_path=": "'' is no file, and neither last nor best",
    "--model ppo --ckpt_path=": "'' is no file",
    "--modle vae": "did you mean --model?",
    "--haed natural": "did you mean --head?",
    "--val_check_interval 0": "--val_check_interval must be positive, got 0; --limit_val_batches 0",
    "--val_check_interval 0.0": "must be positive",
    "--check_val_every_n_epoch 0": "must be positive",
    "--accumulate_grad_batches 0": "must be positive",
    "--log_every_n_steps -1": "must not be negative",
    "--gradient_clip_val -1": "must not be negative",
    "--logger CSVLogger": "CSVLogger needs --trainer.logger.save_dir",
    "--logger CSVLogger --logger.save_dr x": "CSVLogger has no option save_dr",
    "--logger.save_dir x": "needs a class",
    "--callbacks+=EarlyStopping": "EarlyStopping needs --trainer.callbacks.monitor",
    "--callbacks+=Foo": "'Foo': expected the name of a class",
    "--config {name}": "model.name should be a name, got 3",
    "--config {head}": "model.head should be a name, got 3",
    "--config {imports}": "import should be a list of modules, like [my_heads], got 3",
    "--config {module}": "import should be a list of modules, like [my_heads], got 'math'",
    "--config {top}": "unknown option head; did you mean model.head?",
    "--config {group}": "trainer should hold options, got 3",
    "--config {path}": "--ckpt_path 3 is no file",
    "--data.root typo": "root 'typo' has no MNIST: there is no train-images-idx3-ubyte",
}  # fmt: skip


FILES = {
    "broken": b"model: [1, 2\n",
    "number": b"3\n",
    "unknown": b"model:\n  num_latent: 3\n",
    "binary": b"\xff\xfe\x00\x80",
    "name": b"model: {name: 3}\n",
    "head": b"model: {head: 3}\n",
    "imports": b"import: 3\n",
    "module": b"import: math\n",
    "top": b"head: natural\n",
    "group": b"trainer: 3\n",
    "path": b"ckpt_path: 3\n",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_line(line, workspace, capfd):
    if "accelerator gpu" in line and torch.cuda.is_available():
        pytest.skip("right on this machine")
    for name, content in FILES.items():
        Path(f"{name}.yaml").write_bytes(content)
    argv = line.format(**{name: f"{name}.yaml" for name in FILES}).split()
    root = [] if argv[0] in ("--help", "--data.root") else workspace[:1]
    assert train.main(argv + root) == 2
    out, err = capfd.readouterr()
    assert len(err.splitlines()) == 1, err
    assert WRONG[line] in err
    assert "Traceback" not in out + err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("typed", "name", "command"),
    [
        ("train.py", "train.py", "python train.py"),
        ("/usr/bin/catnat", "catnat", "catnat"),
        ("C:/x/catnat.exe", "catnat", "catnat"),
    ],
)
def test_errors_and_help_have_the_name_that_the_user_typed(
    typed, name, command, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [typed, "--model", "vea"])
    assert train.main() == 2
    assert capsys.readouterr().err.startswith(f"{name}: --model 'vea' is not one of vae")
    assert train.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: {command} [fit | test]")


def test_what_lightning_finds_out_late_is_one_line_too(workspace, capfd):
    assert run(*workspace, "--val_check_interval=100", "--check_val_every_n_epoch=1") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "val_check_interval" in line


def test_heads_read_from_the_source_are_the_registered_ones():
    heads = names.builtin_heads()
    assert set(heads.values()) == set(HEADS)
    assert all(make_head(name, 4).name == canonical for name, canonical in heads.items())


def test_names_are_checked_before_torch_is_imported():
    code = "import sys, train; print(train.main(sys.argv[1:]), 'torch' in sys.modules)"
    for argv, rc in ((["--head", "naturl"], 2), (["--model", "x"], 2), (["--help"], 0)):
        out = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, stdout=-1, text=True)
        assert out.stdout.splitlines()[-1] == f"{rc} False"


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--head", "naturl"], 2)])
def test_a_process_ends_at_once_after_its_threads_and_what_was_registered(words, code):
    source = """
import atexit, sys, threading, time
from catnat.training import main
class Large:
    def __del__(self): print("freed")
large, usual = Large(), main.main
def work():
    atexit.register(print, "registered")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    return usual()
main.main = work
sys.exit(main.program())
"""
    words = [sys.executable, "-c", source, *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.splitlines()[-2:] == ["thread", "registered"]
    assert ("usage" in done.stdout) == (code == 0) and ("naturl" in done.stderr) == (code == 2)


def test_a_bug_in_the_program_ends_it_as_python_does():
    source = """
import sys
from catnat.training import main
main.main = lambda: 1 / 0
sys.exit(main.program())
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_damaged_data_file_is_named(workspace, capfd, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0" * 100)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"\0" * 100)
    assert run(*workspace, f"--data.root={tmp_path}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "train-images-idx3-ubyte" in line


# -- help and configuration -----------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--model", "mlp-vae", "--help"]])
def test_the_help_page_fits_a_screen(argv, capsys):
    assert train.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(name in "\n".join(lines) for name in (*names.MODELS, *BUILT_IN))


@pytest.mark.parametrize(
    ("group", "option"),
    [
        ("model", "num_latents"),
        ("data", "variant"),
        ("trainer", "max_steps"),
        ("fisher", "fisher.seed"),
    ],
)
def test_each_group_has_a_help_page(group, option, capsys):
    assert train.main(["--help", group]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"  --{option} ") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("group", ["model", "trainer", "fisher"])
def test_help_pages_cut_no_description(group, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert train.main(["--help", group]) == 0
    said = capsys.readouterr().out
    assert " ..." not in said
    assert max(map(len, said.splitlines())) <= 80
    if group == "fisher":
        assert "how many observed steps are written at once, up" in said
        assert " ".join(said.split()).count("replayed as CUDA graphs, 50 elsewhere") == 1


@pytest.mark.parametrize(
    "line", ["--logger.help CSVLogger --max_steps 3", "--trainer.logger.help=CSVLogger"]
)
def test_the_options_of_a_class_have_a_help_page(line, capfd):
    assert train.main(line.split()) == 0
    out, err = capfd.readouterr()
    assert "--trainer.logger.save_dir" in out
    assert err == ""


def test_print_config_can_be_read_back(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [
        "--model=mlp-vae",
        "--head=catnat-sigmoid",
        "--num-latents=7",
        "--devices=2",
        "--seed=5",
    ]
    assert train.main([*argv, "--print_config"]) == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed)
    assert (
        config["model"] | {"name": "mlp-vae", "head": "sigmoid", "num_latents": 7}
        == config["model"]
    )
    assert int(config["trainer"]["devices"]) == 2
    assert config["seed"] == 5
    assert config["data"]["variant"] == "stochastic"
    Path("c.yaml").write_text(printed)
    assert train.main(["--config=c.yaml", "--print_config"]) == 0
    assert capsys.readouterr().out == printed
    assert train.main(["--config=c.yaml", "--head=softmax", "--max_steps=9", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["model"]["head"], config["trainer"]["max_steps"]) == ("softmax", 9)


@pytest.mark.parametrize(
    "model, options",
    [
        ("vae", {"limit_val_batches": 1, "limit_train_batches": 2, "gradient_clip_val": 3}),
        ("ppo", {"total_steps": 1000, "eval_every": 100}),
    ],
)
def test_a_whole_number_stays_whole_whatever_types_other_libraries_have_made(
    model, options, capsys
):
    argv = [f"--{name}={value}" for name, value in options.items()]
    assert train.main([f"--model={model}", "--print_config"]) == 0  # imports all it needs
    capsys.readouterr()
    for clear in typing._cleanups:  # Python caches Optional[...], and the first order stays
        clear()
    written, joined = typing.Union[float, int, None], float | int | None  # noqa: UP007
    assert typing.Optional[written] == typing.Optional[joined]  # noqa: UP045
    assert train.main([f"--model={model}", *argv, "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert {name: repr(config[name]) for name in options} == {
        name: str(value) for name, value in options.items()
    }, "1 is one batch, 1.0 is all batches"


def test_short_and_full_names_mean_the_same(capsys):
    for argv in (["--max_steps", "9"], ["--trainer.max_steps=9"], ["--max-steps=9"]):
        assert run(*argv, "--print_config") == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 9


def test_epochs_leave_steps_open(capsys):
    assert run("--max_epochs=2", "--print_config") == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["max_steps"], trainer["max_epochs"]) == (-1, 2)


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", BUILT_IN)
@pytest.mark.parametrize("model", ["vae", "mlp-vae"])
def test_every_model_trains_with_every_head(model, head, workspace, capfd):
    assert train.main(["--model", model, "--head", head, *workspace]) == 0
    out, err = capfd.readouterr()
    assert "test/nll" in out
    assert "tensorboard --logdir runs" in out
    assert err == ""
    folder = Path("runs", model, head, "version_0")
    assert {"config.yaml", "hparams.yaml", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_what_tensorboard_gets(workspace):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(*workspace, "--log_every_n_steps=1") == 0
    events = EventAccumulator("runs/vae/natural/version_0").Reload()
    tags = events.Tags()
    assert {"train/loss", "val/loss", "test/nll", "fim/off_diagonal_mass"} <= set(tags["scalars"])
    assert [e.step for e in events.Scalars("fim/condition_number")] == [0, 1, 2]
    assert {"images/reconstructions", "images/prior", "latents/usage", "fim/mean"} <= set(
        tags["images"]
    )
    plugins = [n for n in Path("runs/vae/natural/version_0").glob("events*")
               if b"_hparams_/session_start_info" in n.read_bytes()]  # fmt: skip
    assert plugins
    assert any(b"test/nll" in n.read_bytes() for n in plugins)


@one_server
def test_two_devices(workspace):
    # In a process of its own: OpenMP, used by other tests, does not survive a fork.
    argv = [ROOT / "train.py", "--head=natural", *workspace]
    argv += ["--batch_size=5", "--devices=2", "--strategy=ddp_fork", "--accelerator=cpu"]
    done = run_fresh(*argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test/nll") == 1
    assert last()["global_step"] == 3


def test_a_head_of_the_users_own(workspace):
    Path("my_heads.py").write_text(
        "from catnat.heads import SoftmaxHead\nclass Mine(SoftmaxHead, name='mine_cli'): pass\n"
    )
    try:
        assert train.main(["--import=my_heads", "--head=mine_cli", *workspace]) == 0
        assert Path("runs/vae/mine_cli/version_0").is_dir()
    finally:
        _REGISTRY.pop("mine_cli", None)  # other tests go by the names that are registered


def test_a_second_run_gets_a_folder_of_its_own(workspace):
    assert run(*workspace, "--limit_test_batches=1") == 0
    assert run(*workspace, "--limit_test_batches=1") == 0
    assert Path("runs/vae/natural/version_1/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize(
    "option", ["--fast_dev_run=true", "--logger=false", "--enable_checkpointing=false"]
)
def test_trainer_flags_that_switch_things_off(option, workspace):
    assert run(*workspace, option) == 0


@pytest.mark.parametrize("bar", ["StepBar", "RichProgressBar", "TQDMProgressBar"])
def test_callbacks_of_the_users_own(bar, workspace, monkeypatch):
    from lightning.pytorch import Callback

    seen = []
    monkeypatch.setattr(Callback, "on_train_end", lambda self, *_: seen.append(type(self).__name__))
    Path("stop.yaml").write_text(
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/loss}}]}\n"
    )
    more = ["--callbacks+=LearningRateMonitor", "--callbacks+=ModelCheckpoint",
            "--callbacks.monitor=val/loss", "--callbacks.dirpath=mine"]  # fmt: skip
    more += [] if bar == "StepBar" else [f"--callbacks+={bar}"]
    assert run(*workspace, "--config=stop.yaml", *more, "--limit_test_batches=1") == 0
    assert {"EarlyStopping", "LearningRateMonitor"} <= set(seen)
    assert len(list(Path("mine").glob("*.ckpt"))) == 1


@pytest.mark.parametrize("limits", [("test",), ("test", "val")])
def test_nothing_to_test_is_no_error(limits, workspace):
    assert run(*workspace, *(f"--limit_{each}_batches=0" for each in limits)) == 0
    metrics = json.loads(Path("runs/vae/natural/version_0/metrics.json").read_text())
    assert ("val/loss" in metrics) == ("val" not in limits)
    assert "test/nll" not in metrics


def test_another_logger(workspace):
    assert run(*workspace, "--logger=CSVLogger", "--logger.save_dir=logs") == 0
    metrics = next(Path("logs").rglob("metrics.csv")).read_text()
    assert "fim/off_diagonal_mass" in metrics


def test_collapse_and_saturation_are_said_in_plain_words(capsys):
    from catnat.training.report import warnings_of

    assert warnings_of({"test/collapsed": 0.0, "test/saturated": 0.1}) == []
    collapsed, saturated = warnings_of({"test/collapsed": 1.0, "test/saturated": 0.8})
    assert "COLLAPSED" in collapsed
    assert "80% of the scores" in saturated


def test_the_order_of_help_and_other_options_does_not_matter(capsys):
    lines = ["--help data", "--max_steps 4 --help data", "--help=data --max_steps 4",
             "--max_steps=4 -h data --seed 3", "fit --seed 3 --help data"]  # fmt: skip
    pages = set()
    for line in lines:
        assert train.main(line.split()) == 0
        pages.add(capsys.readouterr().out)
    assert len(pages) == 1 and "--batch_size" in pages.pop()
    assert train.main(["--help", "--max_steps", "4"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize(
    "argv", [["--help"], slow(["--model", "vae", "--help", "model"], id="of an option")]
)
def test_a_reader_who_leaves_early_hears_nothing(argv):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "train.py", *argv]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_order_of_help_and_model_does_not_matter(capsys):
    pages = []
    for argv in (["--help", "--model", "ppo"], ["--model", "ppo", "--help"]):
        assert train.main(argv) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert "--env" in pages[0]
