"""The tables of the paper: every file fits the real options, and runs become the right table."""

import csv
import json
import math

import pytest
from cases import slow
from cases_sweep import SEARCH, write_table

import train
from catnat.training.names import MODELS
from experiments import layout, plan, runs, stages, tables
from experiments.plan import HERE
from experiments.summary import paper_entry, rows

EVERY = [(name, scale) for name in plan.names() for scale in plan.SCALES]


def finish(run, **numbers):
    folder = run.home / "version_0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(
        json.dumps({k.replace("_", "/", 1): v for k, v in numbers.items()})
    )


def some_runs(experiment):
    """A run of each head, with settings from wherever they come."""
    search = experiment.search
    for cell in {cell.get("head"): cell for cell in experiment.cells()}.values():
        if search and search.space:
            space = {name: limits.low for name, limits in search.space.items()}
            yield stages.trial_run(experiment, cell, space)
        if search and search.coarse:
            yield stages.coarse(experiment, cell)[0]
        if not stages.searched(experiment):
            yield from stages.final(experiment, cell)[:1]


# -- the files -----------------------------------------------------------------------------------


def test_there_is_a_file_for_every_table_and_figure():
    wanted = {"gsl", "gsl_local", "vae_adam", "vae_sgd", "mlp_vae", "ppo_breakout", "ppo_seaquest"}
    assert set(plan.names()) >= wanted | {"figure_landscapes"}


@pytest.mark.parametrize("scale", ["smoke", *(slow(scale) for scale in plan.SCALES[1:])])
@pytest.mark.parametrize("name", plan.names())
def test_train_takes_every_option(name, scale, capsys):
    experiment = plan.load(name, scale)
    if experiment.program:
        pytest.skip("not a matter of train.py")
    if experiment.model not in MODELS:
        pytest.skip(f"no model {experiment.model} here")
    for run in some_runs(experiment):
        status = train.main([*run.command[2:], "--print_config"])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert str(run.folder) in out


@pytest.mark.parametrize("scale", plan.SCALES)
def test_figures_take_every_option(scale):
    from experiments.figures import build_parser

    for run in some_runs(plan.load("figure_landscapes", scale)):
        assert build_parser().parse_args(run.command[2:]).default_root_dir == run.folder


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_cell_of_the_paper_is_found(name, scale):
    experiment = plan.load(name, scale)
    for metric, described in experiment.metrics.items():
        if described.paper is not None:
            for cell in experiment.cells():
                assert math.isfinite(paper_entry(experiment, cell, metric)["mean"]), (metric, cell)


def test_the_paper_scale_has_all_the_cells_of_the_paper():
    paper = json.loads((HERE / "paper.json").read_text())
    for name in plan.names():
        experiment = plan.load(name, "paper")
        own_cells = ("gsl_seeds", "vae_rates", "vae_second_rate", "vae_sgd_k32", "ppo")
        if experiment.paper and not name.startswith(own_cells):
            theirs = [row for row in paper[experiment.paper.table] if row["head"] != "optimal"]
            assert len(experiment.cells()) == len(theirs)


def test_all_folders_and_selection_metrics_are_sound():
    for name, scale in EVERY:
        experiment = plan.load(name, scale)
        found = stages.known(experiment)
        assert len({(run.home, run.seed) for run in found}) == len(found)
        if stages.searched(experiment):
            assert not experiment.search.metric.startswith("test/")


def test_layers_of_a_file(tmp_path):
    below = {"a": 1, "b": {"x": 1, "y": [1, 2]}, "c": {"z": 1}}
    assert plan.merged(below, {"b": {"y": [3]}, "c": None}) == {"a": 1, "b": {"x": 1, "y": [3]}}
    assert below["b"]["y"] == [1, 2]
    sgd, adam = plan.load("vae_sgd", "small"), plan.load("vae_adam", "small")
    assert sgd.options["optimizer"] == "sgd"
    assert plan.load("vae_sgd", "paper").cells() == plan.load("vae_adam", "paper").cells()
    assert adam.runs.is_absolute()  # or Ray's workers would look elsewhere
    assert len(adam.differences) == 2  # one of the file, one of the scale
    recipe = plan.load("vae_recipe", "small").differences  # two of the files, one of its own scale
    assert len(recipe) == 3 and adam.differences[0] in recipe and adam.differences[1] not in recipe


def test_only_keeps_part_of_the_grid():
    only = {"head": ["natural"], "num_latents": ["10", "20"]}
    cells = plan.load("vae_adam", "paper", only=only).cells()
    assert {cell["num_latents"] for cell in cells} == {10, 20}
    assert len(cells) == 6 * 2
    with pytest.raises(ValueError, match="no cell has that; choose from natural"):
        plan.load("vae_adam", "paper", only={"head": ["soft"]})


def test_only_keeps_part_of_the_seeds_and_the_settings_that_all_seeds_would_have(tmp_path):
    """With confirm, the seeds that were not asked for still speak against a rate."""
    search = {**SEARCH, "coarse": [1.0, 2.0], "confirm": True}
    path = write_table(tmp_path, grid={"head": ["a"]}, search=search, seeds=[1, 2, 3])
    whole, part = (plan.load(str(path), runs=tmp_path, only=only) for only in ({}, {"seed": ["3"]}))
    (cell,) = part.cells()
    assert stages.planned(part, cell) == 2 + 1
    for run in stages.coarse(part, cell):
        finish(run, val_loss=run.settings["x"])
    assert [(run.seed, run.settings["x"]) for run in stages.final(part, cell)] == [(3, 1.0)]
    for run in stages.final(whole, cell):
        finish(run, val_loss=9.0 if run.seed == 1 else 1.0)
    assert stages.selected(part, cell) == stages.selected(whole, cell) == [{"x": 2.0}]


def test_only_means_the_seed_of_the_grid_where_the_grid_has_one(tmp_path):
    path = write_table(tmp_path, grid={"seed": [7, 8], "x": [1.0]}, seeds=[None])
    experiment = plan.load(str(path), runs=tmp_path, only={"seed": ["8"]})
    (cell,) = experiment.cells()
    (run,) = stages.final(experiment, cell)
    assert cell["seed"] == 8 and "--seed=8" in run.command


# -- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "best", "refined"),
    [
        ("vae_adam", 0.01, {0.0045, 0.0056, 0.0069, 0.0085, 0.013, 0.016, 0.02}),
        ("mlp_vae", 0.0002, {0.00012, 0.00015, 0.00018, 0.00022, 0.00027, 0.00033, 0.0004}),
        ("gsl", 0.05, {0.025, 0.03, 0.0375, 0.045, 0.055, 0.0675, 0.0825}),
        ("gsl", 0.02, {0.012, 0.015, 0.018, 0.022, 0.027, 0.033, 0.04}),
    ],
)
def test_rates_are_refined_around_the_best_as_in_the_paper(tmp_path, name, best, refined):
    experiment = plan.load(name, "paper", tmp_path)
    cell = experiment.cells()[0]
    first = stages.coarse(experiment, cell)
    for run in first[:-1]:
        finish(run, val_loss=abs(math.log(run.settings["learning_rate"] / best)), test_nll=1)
    assert stages.refined(experiment, cell) == []  # one is missing
    finish(first[-1], val_loss=9)
    made = {run.settings["learning_rate"] for run in stages.refined(experiment, cell)}
    assert made >= refined
    assert not made & {
        run.settings["learning_rate"] for run in first if run.settings["learning_rate"] == best
    }


def test_selection_is_by_validation_over_both_stages(tmp_path):
    experiment = plan.load("vae_adam", "smoke", tmp_path, only={"head": ["natural"]})
    (cell,) = experiment.cells()
    low, high = stages.coarse(experiment, cell)
    finish(low, val_loss=5.0, test_nll=0.0)  # the best on the test set, which must not count
    finish(high, val_loss=2.0, test_nll=9.0)
    (refined,) = stages.refined(experiment, cell)
    assert refined.settings == {"learning_rate": 0.005}
    assert stages.selected(experiment, cell) == []  # not yet known
    finish(refined, val_loss=1.0, test_nll=9.0)
    assert stages.selected(experiment, cell) == [{"learning_rate": 0.005}]
    assert [run.seed for run in stages.final(experiment, cell)] == [1, 2]


def test_runs_that_failed_or_diverged_are_not_selected(tmp_path):
    experiment = plan.load("vae_adam", "smoke", tmp_path, only={"head": ["natural"]})
    (cell,) = experiment.cells()
    low, high = stages.coarse(experiment, cell)
    finish(low, val_loss=math.nan)
    high.home.mkdir(parents=True)
    runs.record_failure(high, 2, "out of memory")
    assert runs.done(high) and runs.failure(high) == "out of memory"
    assert stages.refined(experiment, cell) == []
    assert [stage.runs for stage in stages.stages(experiment, cell)][1:] == [[], []]
    assert stages.present(experiment, cell) is None  # nothing left that could be done


def test_half_a_metrics_file_is_no_finished_run(tmp_path):
    run = stages.final(
        plan.load("mlp_vae", "smoke", tmp_path),
        {"head": "natural", "num_latents": 10, "num_categories": 8},
    )[0]
    finish(run, val_loss=1)
    assert runs.done(run)
    (run.home / "version_0" / "metrics.json").write_text('{"val/loss": 1')
    assert not runs.done(run)


def test_tpe_selects_the_top_configurations(tmp_path):
    experiment = plan.load("ppo_breakout", "smoke", tmp_path)
    cell, other = experiment.cells()
    search = stages.present(experiment, cell)
    assert (search.runs, search.missing) == ([], 2)
    returns = {1: 3.0, 2: 7.0}
    for epochs, value in returns.items():
        run = stages.open_trial(experiment, cell, {"update_epochs": epochs, "num_envs": 2})
        finish(run, **{"train_return": value})
    assert stages.present(experiment, cell).name == "seeds"
    assert stages.present(experiment, other).missing == 2
    assert stages.selected(experiment, cell) == [{"update_epochs": 2, "num_envs": 2}]
    assert stages.selected(experiment, other) == []
    (final,) = stages.final(experiment, cell)
    assert "--update_epochs=2" in final.command and "--seed=1" in final.command
    assert final.folder.name.split("-seed")[0] == run.folder.name.split("-seed")[0]


# -- tables --------------------------------------------------------------------------------------


@pytest.fixture
def gsl(tmp_path):
    """Five seeds of two heads at one theta: one dead, one failed, everything else missing."""
    experiment = plan.load("gsl_local", "small", tmp_path / "runs")
    cells = [cell for cell in experiment.cells() if cell["theta"] == 0.75]
    for cell in cells:
        for run in stages.final(experiment, cell):
            if cell["head"] == "natural":
                dead = 2.0 if run.seed == 3 else 0.0
                finish(
                    run,
                    **{
                        "test_theta_mae": 0.002 + run.seed * 1e-4,
                        "test_dead_edges": dead,
                        "test_energy_score_2x": 10.7,
                        "test_gap_2x": 0.01,
                    },
                )
            if cell["head"] == "softmax" and run.seed < 5:
                finish(run, **{"test_theta_mae": 0.009 + run.seed * 1e-4, "test_dead_edges": 0.0})
            if cell["head"] == "softmax" and run.seed == 5:
                run.home.mkdir(parents=True)
                runs.record_failure(run, 2, "boom")
    return tmp_path


def test_a_table_says_everything(gsl):
    folder = gsl
    out = folder / "out"
    arguments = ["--runs", str(folder / "runs"), "--out", str(out)]
    assert tables.main(["gsl_local", *arguments]) == 0
    with (out / "gsl_local.csv").open() as file:
        lines = list(csv.DictReader(file))
    mae = {
        line["head"]: line
        for line in lines
        if line["metric"] == "test/theta_mae" and line["theta"] == "0.75"
    }
    assert float(mae["natural"]["mean"]) == pytest.approx(0.0023)
    assert float(mae["natural"]["std"]) == pytest.approx(math.sqrt(2.5) * 1e-4)
    assert float(mae["natural"]["difference"]) == pytest.approx(0.0023 - 0.0043)
    assert (mae["natural"]["n"], mae["natural"]["bold"]) == ("5", "True")
    assert (mae["softmax"]["n"], mae["softmax"]["bold"]) == ("4", "False")
    assert (mae["sigmoid"]["n"], mae["sigmoid"]["mean"]) == ("0", "")
    gap = next(
        line
        for line in lines
        if line["metric"] == "test/gap_2x" and line["theta"] == "0.75" and line["head"] == "natural"
    )
    assert float(gap["paper_mean"]) == pytest.approx(10.674 - 10.672)

    text = (out / "gsl_local.md").read_text()
    row = {
        line.split("|")[2].strip(): line for line in text.splitlines() if line.startswith("| 0.75 ")
    }
    assert "**0.0023 ± 0.0002** (0.0043, -0.0020)" in row["natural"]
    assert "1 with dead edges" in row["natural"] and "| 0.05 | 5 |" in row["natural"]
    assert "1 failed" in row["softmax"] and "4 of 5" in row["softmax"]
    assert "— (0.0119)" in row["sigmoid"] and "0 of 5" in row["sigmoid"]
    assert (
        "`small`" in text
        and "Not the paper's estimator" in text
        and "9 of 100 runs finished, 1 failed" in text
    )
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1

    latex = (out / "gsl_local.tex").read_text()
    assert r"$\mathbf{0.0023 \pm 0.0002}$ {\scriptsize $(0.0043, -0.0020)$}" in latex
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({line.count(" & ") for line in body}) == 1 and len(body) == 21
    with (out / "gsl_local_runs.csv").open() as file:
        states = [line["status"] for line in csv.DictReader(file)]
    assert [states.count(each) for each in ("finished", "failed", "missing")] == [9, 1, 90]


def test_cells_that_are_alone_in_their_groups_are_not_bold_and_bold_is_not_explained(tmp_path):
    experiment = plan.load("gsl_tail", "small", tmp_path / "runs")
    for cell in experiment.cells():
        for run in stages.final(experiment, cell):
            finish(run, **{"test_theta_mae": 0.002 + run.seed * 1e-4})
    found = rows(experiment)
    text = layout.markdown(experiment, found, []) + layout.latex(experiment, found, [])
    assert "0.0023 ± 0.0002" in text
    assert "**" not in text and "mathbf" not in text and "Bold" not in text


def test_collapsed_runs_and_a_rate_at_the_edge_are_noted(tmp_path):
    experiment = plan.load("vae_adam", "smoke", tmp_path, only={"head": ["softmax"]})
    (cell,) = experiment.cells()
    for loss, run in enumerate(reversed(stages.coarse(experiment, cell))):
        finish(run, val_loss=loss)
    for run in stages.refined(experiment, cell):
        finish(run, val_loss=5)
    for run in stages.final(experiment, cell):
        finish(run, test_nll=200.0, test_collapsed=run.seed - 1)
    (row,) = rows(experiment)
    assert row.notes == ["1 collapsed", "lr at the edge of the search"]
    assert row.at_edge
    text = layout.markdown(experiment, [row], [])
    assert "| 0.01† | 2 |" in text and "200.0 ± 0.0 (100.9, +99.1)†" in text
    assert "†: the selected value is at the edge of those searched" in text
    assert r"$^\dagger$" in layout.latex(experiment, [row], [])


def test_the_paper_s_layout_has_a_place_for_every_cell(tmp_path):
    experiment = plan.load("vae_adam", "paper", tmp_path)
    found = rows(experiment)
    text = layout.markdown(experiment, found, [])
    header, _, *body = [line.split("|")[1:-1] for line in text.split("\n\n")[2].splitlines()]
    assert [cell.strip() for cell in header] == [
        "N", "head", "gray, K = 8", "gray, K = 16", "gray, K = 32",
        "binary, K = 8", "binary, K = 16", "binary, K = 32",
    ]  # fmt: skip
    assert [line[0].strip() for line in body] == ["10"] * 4 + ["20"] * 4 + ["30"] * 4
    assert [cell.strip() for cell in body[-1][1:4]] == ["natural", "— (97.9)", "— (97.6)"]
    latex = layout.latex(experiment, found, [])
    assert latex.count(r"\midrule") == 3 and latex.count(r" \\") == 13


# -- what a table is made of ---------------------------------------------------------------------


def test_no_runs_no_table(tmp_path, capsys):
    for words in ([], ["--scale", "smoke"]):
        with pytest.raises(SystemExit) as stop:
            tables.main(["gsl", *words, "--runs", str(tmp_path)])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no" in line and "runs of gsl" in line
    assert not list(tmp_path.rglob("*.md"))


def test_tables_lie_beside_the_runs_and_are_printed(gsl, monkeypatch, capsys):
    monkeypatch.chdir(gsl)
    assert tables.main(["gsl_local"]) == 0
    folder = gsl / "runs" / "gsl_local" / "small"
    text = (folder / "gsl_local.md").read_text()
    assert text in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("gsl_local*")) == [
        "gsl_local.csv", "gsl_local.md", "gsl_local.tex", "gsl_local_runs.csv",
    ]  # fmt: skip
    assert not (gsl / "results").exists()


def test_smoke_never_goes_to_results(tmp_path, monkeypatch, capsys):
    experiment = plan.load("mlp_vae", "smoke", tmp_path)
    for cell in experiment.cells():
        for run in stages.final(experiment, cell):
            finish(run, test_elbo=1.0)
    before = {path: path.stat().st_mtime_ns for path in (HERE.parent / "results").iterdir()}
    with pytest.raises(SystemExit) as stop:
        words = ["--runs", str(tmp_path), "--out", str(HERE.parent / "results")]
        tables.main(["mlp_vae", "--scale", "smoke", *words])
    assert stop.value.code == 2
    assert "has no results" in capsys.readouterr().err
    monkeypatch.chdir(HERE.parent)
    assert tables.main(["mlp_vae", "--scale", "smoke", "--runs", str(tmp_path)]) == 0
    after = {path: path.stat().st_mtime_ns for path in (HERE.parent / "results").iterdir()}
    assert after == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, [1.0], "text"])
def test_a_value_that_is_no_number_is_noted_and_never_bold(tmp_path, bad, capsys):
    experiment = plan.load("mlp_vae", "smoke", tmp_path)
    for cell in experiment.cells():
        for run in stages.final(experiment, cell):
            broken = cell["head"] == "natural" and run.seed == 2
            finish(run, test_elbo=bad if broken else 10.0 * (cell["head"] == "natural"))
    assert tables.main(["mlp_vae", "--scale", "smoke", "--runs", str(tmp_path)]) == 0
    softmax, natural = rows(experiment)
    entry = natural.entries["test/elbo"]
    assert entry.values == [10.0]
    if not isinstance(bad, list | str):
        assert not entry.bold and softmax.entries["test/elbo"].bold
        assert "1 not finite" in natural.notes


def test_metrics_that_are_no_mapping_are_no_finished_run(tmp_path):
    run = stages.known(plan.load("mlp_vae", "smoke", tmp_path))[0]
    finish(run, test_elbo=1)
    for text in ("[1, 2]", "null", "3"):
        (run.home / "version_0" / "metrics.json").write_text(text)
        assert not runs.done(run)


def test_all_makes_the_tables_that_have_runs(gsl, capsys):
    assert tables.main(["all", "--runs", str(gsl / "runs")]) == 0
    out, err = capsys.readouterr()
    assert out.count("# Graph structure learning") == 1
    assert "no runs of vae_adam" in err and "no runs of gsl_local" not in err


def test_a_metric_that_no_run_has_is_told(gsl, capsys):
    assert tables.main(["gsl_local", "--runs", str(gsl / "runs")]) == 0
    assert "no run has test/pp_mae; they have test/dead" in capsys.readouterr().err
