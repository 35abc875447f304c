"""What the command line promises beside LightningCLI: names, recipes, resuming."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from cases_cli import FOLDER, assert_refused, config, metrics_of, one_line, printed, run

import train
from catnat.cli.main import build, resolve
from catnat.cli.names import ALIASES, DATA, HEADS, MODELS
from catnat.cli.request import RECIPES
from catnat.heads.registry import head_names

ALL_RECIPES = sorted(RECIPES.rglob("*.yaml"))


# -- names ----------------------------------------------------------------------------------------


def test_names_known_before_torch_is_imported_are_those_of_the_library():
    assert head_names()[: len(HEADS)] == HEADS
    for path in (*MODELS.values(), *DATA.values()):
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("name", ALIASES)
def test_a_head_has_the_names_of_the_paper(name):
    assert resolve(["--model=vae", f"--head={name}"])["model.head"] == ALIASES[name]


@pytest.mark.parametrize(
    "model",
    ["vae", "DiscreteVAE", "catnat.lit_modules.DiscreteVAE", "catnat.lit_modules.vae.DiscreteVAE"],
)
def test_a_model_is_a_name_or_any_class(model):
    options = resolve(["fit", "--model", model, "--num-latents=3", "--model.num_categories", "5"])
    assert options["model.class_path"] == "catnat.lit_modules.DiscreteVAE"
    assert (options["model.num_latents"], options["model.num_categories"]) == (3, 5)


def test_the_options_of_a_class_have_a_page(capsys):
    assert train.main(["--model=mlp-vae", "--model.help"]) == 0
    assert "baseline_value" in capsys.readouterr().out


def test_help_lists_all_commands_and_a_wrong_one_gets_the_closest(capfd):
    assert train.main(["--help"]) == 0
    page = capfd.readouterr().out
    assert all(word in page for word in ("sweep", "status", "tables", "figures", "compare"))
    assert train.main(["sweeep"]) == 2
    assert "did you mean sweep?" in one_line(capfd)


# -- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL_RECIPES, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_has_options_of_its_model_alone(path):
    """A file that --config names is checked option by option."""
    content = yaml.safe_load(path.read_text())
    options = resolve([f"--model={path.stem}", f"--config={path}"])
    assert options["model.class_path"] == content["model"]["class_path"] == MODELS[path.stem]


def test_steps_and_samples_are_fewer_on_a_cpu_where_nobody_sets_them(capsys):
    def steps(*words):
        options = resolve([*words, "--accelerator=cpu"])
        return options["trainer.max_steps"], options.get("model.nll_samples")

    assert steps("--model=vae") == (2000, 64)
    assert steps("--model=gsl") == (2000, None)
    assert steps("--model=vae", "--max_steps=7") == (7, 64), (
        "as many samples as without --max_steps"
    )
    assert steps("--model=vae", "--max_epochs=2") == (-1, 64)
    assert steps("--model=vae", "--recipe=paper") == (60_000, 512)
    assert printed(capsys, "--model=vae", "--accelerator=cpu")["trainer"]["max_steps"] == 2000


def test_a_head_that_is_not_named_is_the_recommended_one():
    heads = {name: resolve([f"--model={name}"])["model.head"] for name in ("vae", "mlp-vae")}
    assert heads == {"vae": "sigmoid", "mlp-vae": "sigmoid"}
    assert resolve(["--model=ppo"])["model.head"] == "softmax"
    gsl = resolve(["--model=gsl"])
    assert (gsl["model.head"], gsl["model.head_options.tail"]) == ("natural", 0.005)
    wider = resolve(["--model=gsl", "--head_options.tail=0.01"])
    assert wider["model.head_options.tail"] == 0.01
    for words in (["--head=natural"], ["--head=softmax"], ["--recipe=paper"]):
        assert "model.head_options.tail" not in resolve(["--model=gsl", *words]), words


def test_the_recipe_of_the_paper_has_its_numbers():
    vae = resolve(["--model=vae", "--recipe=paper"])
    wanted = {"model.temperature": 1, "model.min_temperature": 0.5, "data.batch_size": 100}
    assert vae | wanted == vae and vae["model.temperature_rate"] == pytest.approx(3e-5)
    mlp = resolve(["--model=mlp-vae", "--recipe=paper"])
    assert (mlp["trainer.max_epochs"], mlp["data.batch_size"]) == (500, 128)
    assert (mlp["data.variant"], mlp["model.baseline_value"]) == ("stochastic", 125)
    gsl = resolve(["--model=gsl", "--recipe=paper"])
    assert (gsl["data.batch_size"], gsl["model.num_samples"]) == (64, 32)
    assert gsl["trainer.max_steps"] * 64 == 40 * 0.8 * gsl["data.num_pairs"]  # 40 epochs
    ppo = resolve(["--model=ppo", "--recipe=paper"])
    assert (ppo["trainer.total_steps"], ppo["model.clip_range"]) == (8_000_000, 0.1)


def test_a_share_and_a_number_of_batches_differ():
    options = resolve(["--model=vae", "--limit_train_batches=1", "--limit_val_batches=1.0"])
    one, share = options["trainer.limit_train_batches"], options["trainer.limit_val_batches"]
    assert type(one) is int and type(share) is float


# -- resuming -------------------------------------------------------------------------------------


def test_a_resumed_run_changes_its_record_with_its_first_checkpoint(workspace, capfd):
    assert run(*workspace) == 0
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    metrics = metrics_of()
    capfd.readouterr()
    wrong = ["--accumulate_grad_batches=2", "--learning_rate=0.1", "--batch_size=5", "--seed=3"]
    for option in wrong:
        assert run("--ckpt_path=last", "--max_steps=6", option) == 2
        assert "only length, logging, validation, checkpoints, device" in one_line(capfd)
    after = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert after == before
    assert run(*workspace, "--ckpt_path=last") == 0
    assert "which had finished after step 3" in capfd.readouterr().out
    assert metrics_of().keys() == metrics.keys()


def test_a_checkpoint_of_another_head_is_refused_in_any_folder(workspace, capfd):
    assert run(*workspace) == 0
    assert train.main(["--model=vae", "--head=sigmoid", *workspace]) == 0
    other = Path("runs/vae/sigmoid/version_0/checkpoints/last.ckpt")
    shutil.copy(FOLDER / "checkpoints/last.ckpt", other)
    capfd.readouterr()
    for command in ("fit", "test"):
        assert train.main([command, "--model=vae", "--head=sigmoid", "--ckpt_path=last"]) == 2
        assert "is of head 'natural', not 'sigmoid'" in one_line(capfd)
    state = torch.load(FOLDER / "checkpoints/last.ckpt", weights_only=True)
    del state["optimizer_states"]
    torch.save(state, FOLDER / "checkpoints/last.ckpt")
    assert run("--ckpt_path=last", "--max_steps=9") == 2
    assert "has no optimizer_states" in one_line(capfd)


def test_a_root_that_is_a_dangling_link_is_one_line(workspace, capfd):
    os.symlink("/not/mounted", "dangling")
    assert run(*workspace, "--default_root_dir=dangling") == 1
    assert "dangling" in one_line(capfd)


# -- the rest --------------------------------------------------------------------------------------


def test_a_built_run_has_no_folder(workspace):
    ready = build(["--model=vae", "--head=natural", *workspace])
    assert ready.trainer.max_steps == 3 and ready.model.head.name == "natural"
    assert yaml.safe_load(ready.config_text)["model"]["init_args"]["num_latents"] == 10
    assert not Path("runs").exists()


def test_a_file_of_options_that_contains_itself_is_one_line(workspace, capfd):
    Path("self.yaml").write_text("model: &m {class_path: DiscreteVAE, init_args: *m}\n")
    assert_refused(run("--config=self.yaml"), "cannot be read", capfd)


def test_markup_in_a_path_is_printed_as_it_is(workspace, capfd):
    assert run(*workspace, "--default_root_dir=runs[/b]", "--limit_test_batches=1") == 0
    assert "run: runs[/b]/vae/natural/version_0" in capfd.readouterr().out
    assert config("runs[/b]/vae/natural/version_0")["trainer"]["max_steps"] == 3
