"""Figures are drawn from what runs left behind."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from catnat import head_names
from experiments import drawing, figures, plan, restore, runs, stages
from experiments.train_interface import load_run


def assert_drawn(folder, name):
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_landscapes_write_the_steps_needed(tmp_path):
    assert figures.main(["landscapes", "--steps", "30", "--default_root_dir", str(tmp_path)]) == 0
    assert_drawn(tmp_path, "landscapes")
    needed = json.loads((tmp_path / "metrics.json").read_text())
    assert set(needed) == {f"steps/{name}" for name in head_names()}
    assert needed["steps/sigmoid"] == 5  # at this rate one Newton step and a few more


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["landscapes", "--steps", "-1"], "--steps must be at least 1"),
        (["landscapes", "--learning_rate", "nan"], "--learning_rate above 0, got 200 and nan"),
        (["fisher", "--out", "/dev/null/x"], "/dev/null/x: Not a directory"),
        (["samples", "vae_recipe", "--runs", "RESTORED"], "restore.py made again have none"),
    ],
)
def test_bad_input_gets_one_line(words, line, tmp_path, capsys):
    if "RESTORED" in words:
        restore.main(["vae_recipe", "--runs", str(tmp_path)])
        words = [str(tmp_path) if word == "RESTORED" else word for word in words]
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        figures.main(words)
    text = capsys.readouterr().err
    assert error.value.code == 2 and line in text and text.count("\n") == 1


def test_fisher_matrices(tmp_path):
    assert figures.main(["fisher", "--num_categories", "5", "--out", str(tmp_path)]) == 0
    assert_drawn(tmp_path, "fisher")


def test_every_head_has_a_colour_of_its_own():
    heads = [*head_names(), "mine", "yours"]
    assert len({drawing.colour(head, heads) for head in heads}) == len(heads)


@pytest.fixture
def table(tmp_path):
    """Two seeds of each head whose event files hold a line of slope = seed."""
    experiment = plan.load("mlp_vae", "smoke", tmp_path / "runs")
    for cell in experiment.cells():
        for run in stages.final(experiment, cell):
            folder = run.home / "version_0"
            with SummaryWriter(str(folder)) as writer:
                for step in range(0, 50, 10):
                    writer.add_scalar("val/elbo", run.seed * step, step)
            (folder / "metrics.json").write_text('{"test/elbo": 1}')
    return experiment, tmp_path


def test_curves_come_from_event_files(table):
    experiment, folder = table
    run = stages.final(experiment, experiment.cells()[0])[1]
    points = list(runs.curves(run, ["val/elbo", "not/there"]))
    assert [(each["step"], each["value"]) for each in points] == [
        (s, 2.0 * s) for s in range(0, 50, 10)
    ]
    arguments = ["--runs", str(folder / "runs"), "--out", str(folder)]
    assert figures.main(["curves", "mlp_vae", "--tag", "val/elbo", *arguments]) == 0
    assert_drawn(folder, "mlp_vae_val_elbo")


def test_a_band_is_mean_and_deviation():
    figure, (axes,) = drawing.panels(1)
    steps = torch.arange(5.0).numpy()
    drawing.draw_band(axes, [(steps, steps), (steps, 3 * steps)], "red", "natural")
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx(2 * line.get_xdata())
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().y1 == pytest.approx(8 + 32**0.5, rel=1e-6)
    drawing.plt.close(figure)


def test_each_run_can_have_its_own_line(table, monkeypatch):
    experiment, folder = table
    drawn = []
    monkeypatch.setattr(figures.drawing, "save", lambda figure, *_: drawn.append(figure) or [])
    arguments = ["--runs", str(folder / "runs"), "--out", str(folder), "--each"]
    assert figures.main(["curves", "mlp_vae", "--tag", "val/elbo", *arguments]) == 0
    axes = drawn[0].axes[0]
    heads = len({cell["head"] for cell in experiment.cells()})
    assert sorted(max(line.get_ydata()) for line in axes.lines) == sorted([40, 80] * heads)
    assert not axes.collections
    assert len(axes.get_legend_handles_labels()[1]) == heads  # each once
    assert drawn[0].legends[0].get_title().get_text() == "one line a run, n = 2"
    drawing.plt.close(drawn[0])


@pytest.mark.parametrize(("x", "text"), [(500, "500"), (2000, "2k"), (2_500_000, "2.5M")])
def test_steps_are_short(x, text):
    figure, (axes,) = drawing.panels(1)
    drawing.thousands(axes)
    assert axes.xaxis.get_major_formatter()(x, 0) == text
    drawing.plt.close(figure)


def test_a_tag_that_no_run_has_gets_one_line(table, capsys):
    _, folder = table
    with pytest.raises(SystemExit):
        figures.main(["mass", "mlp_vae", "--runs", str(folder / "runs"), "--out", str(folder)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run of mlp_vae has fim/off_diagonal_mass_fro" in line


def test_pictures_of_one_run_a_head_name_its_seed(tmp_path, monkeypatch):
    """Edges found: the first seed of each head, and the picture says which seed that is."""
    experiment = plan.load("gsl_fixed", "smoke", tmp_path / "runs")
    for cell in experiment.cells():
        for run in stages.final(experiment, cell):
            (run.home / "version_0").mkdir(parents=True)
            (run.home / "version_0" / "metrics.json").write_text('{"test/gap_2x": 1}')
    learner = SimpleNamespace(theta=torch.rand(3, 3)), SimpleNamespace(edge_probs=torch.rand(3, 3))
    monkeypatch.setattr(figures, "load_run", lambda folder: learner)
    drawn = []
    monkeypatch.setattr(figures.drawing, "save", lambda figure, *_: drawn.append(figure) or [])
    arguments = ["--scale", "smoke", "--runs", str(tmp_path / "runs")]
    assert figures.main(["theta", "gsl_fixed", *arguments]) == 0
    (figure,) = drawn
    assert figure.get_suptitle() == f"seed {experiment.seeds[0]}"
    drawing.plt.close(figure)


@pytest.mark.slow
def test_samples_of_a_real_run(tmp_path, capsys):
    """Also: metrics.json has what to select by, even if a run is resumed after its last step."""
    import train

    only = {"head": ["natural"]}
    extra = ("--max_steps=2", "--val_check_interval=2", "--accelerator=cpu")
    experiment = plan.load("mlp_vae", "smoke", tmp_path, only=only, extra=extra)
    run = stages.final(experiment, experiment.cells()[0])[0]
    assert train.main([*run.command[2:]]) == 0
    first = runs.metrics(run)
    assert {"val/loss", "test/elbo"} <= set(first)
    steps = [each["step"] for each in runs.curves(run, ["val/loss"])]
    assert steps == [1]  # the hparams tab adds none
    assert runs.interrupted(run) is False
    (runs.version(run) / "metrics.json").unlink()
    assert runs.interrupted(run) is True
    assert train.main([*run.command[2:], "--ckpt_path=last"]) == 0
    assert runs.metrics(run) == pytest.approx(first)

    model, data = load_run(runs.version(run))
    saved = torch.load(runs.version(run) / "checkpoints" / "last.ckpt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["state_dict"][name])
    assert next(iter(data.test_dataloader())).shape[1:] == (1, 28, 28)
    arguments = ["--runs", str(tmp_path), "--out", str(tmp_path)]
    assert figures.main(["samples", "mlp_vae", *arguments]) == 0
    assert_drawn(tmp_path, "mlp_vae_samples")
