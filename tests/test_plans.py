"""Plans of one's own: found anywhere, and answered with one line where they are wrong."""

import pytest
import yaml
from cases_sweep import SEARCH, arguments, calls, write_table

from experiments import figures, plan, run_one, stages, sweep, tables

SPACE = {k: v for k, v in SEARCH.items() if k not in ("option", "coarse")}


def one_line(main, words, capsys):
    """The line with which a command answers wrong usage."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert "Traceback" not in out
    return line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "colour: unknown key; choose from title"),
        ({"sedes": [1]}, "did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds: one is there twice, in [1, 1]"),
        ({"seeds": []}, "seeds: expected at least one"),
        ({"seeds": [0, -1]}, "seeds: -1; a seed is at least 0 and below 2^32"),
        ({"options": {"seed": 4}}, "options.seed: the sweep gives it to each run; use seeds"),
        ({"options": {"default_root_dir": "a"}}, "options.default_root_dir: the sweep gives it"),
        ({"seeds": 3}, "seeds: expected a list, got 3"),
        ({"seeds": ["a"]}, "seeds[0]: expected a whole number, got 'a'"),
        ({"title": None}, "title: missing"),
        ({"program": None}, "model, program: name one of them"),
        ({"program": "none.py"}, "program: there is no none.py in"),
        ({"program": None, "model": "vea"}, "model: 'vea'; choose from vae, mlp-vae, gsl, ppo"),
        ({"program": None, "model": "vae"}, "head: name one in options, or several in the grid"),
        ({"import": ["heads"]}, "import: only train.py takes it"),
        ({"grid": {"x": []}}, "grid.x: expected at least one value"),
        ({"grid": {"x": 1.0}}, "grid.x: expected a list, got 1.0"),
        ({"grid": {"x": [1.0, 1.0]}}, "grid.x: a value is there twice"),
        ({"grid": {"x y": [[1.0]]}}, "grid.x y: expected 2 values together, got [1.0]"),
        ({"grid": {"x": [{"low": 1}]}}, "grid.x: expected text or a number"),
        ({"columns": ["z"]}, "columns: 'z'; choose from x"),
        ({"metrics": {"a": {"labl": "b"}}}, "metrics.a.labl: unknown key"),
        ({"metrics": {"a": {"label": "b", "better": "max"}}}, "metrics.a.better: 'max'; choose"),
        ({"paper": {"table": "vae"}}, "paper.table: 'vae'; choose from"),
        ({"search": {**SEARCH, "option": "y", "better": "max"}}, "search.better: 'max'; choose"),
        ({"search": {**SEARCH, "option": "y", "better": None}}, "search.better: missing"),
        ({"search": {**SEARCH, "option": "y", "metric": "test/loss"}}, "no test metric"),
        ({"search": {**SEARCH, "option": "y", "seed": 1}}, "search.seed: 1 must not be one of"),
        ({"search": {**SEARCH, "option": "x"}}, "search: x is already in the grid"),
        ({"search": {**SEARCH, "option": "y", "betr": 1}}, "search.betr: unknown key"),
        ({"search": {**SEARCH, "option": None}}, "search.option: missing"),
        (
            {"search": {**SEARCH, "option": "y", "coarse": ["a"]}},
            "search.coarse[0]: expected a",
        ),
        ({"search": {**SEARCH, "option": "y", "early_stop": "asah"}}, "did you mean asha?"),
        ({"search": SPACE}, "search: name one of coarse, space and fixed"),
        (
            {"search": {**SPACE, "space": {"y": {"low": 2, "high": 1}}, "trials": 2}},
            "above high",
        ),
        ({"search": {**SPACE, "space": {"y": {"low": 0, "high": 1, "log": True}}}}, "log needs"),
        ({"search": {**SPACE, "space": {"y": {"low": 0, "high": 1}}}}, "search.trials: expected"),
        ({"search": {**SPACE, "space": {"y": {"low": 0}}}}, "search.space.y.high: missing"),
        (
            {"search": {**SPACE, "space": {"y": {"low": 0, "high": 9}}, "confirm": True}},
            "search.confirm: goes with coarse values, not with space",
        ),
        (
            {"search": {**SPACE, "space": {"y": {"low": 0, "high": 9}}, "trials": 2, "top": 3}},
            "search.top: expected 1 to 2, got 3",
        ),
        (
            {"search": {"fixed": {"y": {"a": 1}}}, "grid": {"head": ["a", "b"]}},
            "for head 'b'",
        ),
        ({"scales": {"smoke": {}, "full": {"sedes": [2]}}}, "scale full: sedes: unknown key"),
        ({"scales": [1]}, "scales: expected keys and values"),
        ({"base": "vae_adm"}, "base: there is no 'vae_adm' beside it; choose from"),
        ({"differences": "none"}, "differences: expected a list, got 'none'"),
    ],
)
def test_a_wrong_plan_gets_one_line(tmp_path, change, said, capsys):
    path = write_table(tmp_path, **change)
    assert said in (line := one_line(sweep.main, arguments(path), capsys)), line
    assert "tiny.yaml" in line


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "a: 1\n\tb: 2"])
def test_a_file_that_is_no_plan_gets_one_line(tmp_path, text, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    assert "tiny.yaml" in one_line(sweep.main, arguments(path), capsys)


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (sweep.main, ("vae_adm",), "no experiment 'vae_adm'; choose from"),
        (figures.main, ("curves", "all"), "no experiment 'all'; choose from"),
        (sweep.main, ("none.yaml",), "there is no plan none.yaml"),
        (sweep.main, ("all", "gsl"), "all: is no table beside others"),
        (sweep.main, ("gsl", "--only", "head"), "expected key=value"),
        (sweep.main, ("--only", "seed=1", "gsl"), "names of tables come before --only"),
        (
            sweep.main,
            ("gsl", "--only", "hed=natural"),
            "from head, seed, theta; did you mean head?",
        ),
        (sweep.main, ("gsl", "--only", "head=natral"), "did you mean natural?"),
        (
            sweep.main,
            ("gsl", "--only", "seed=2,0"),
            "--only seed=0: no final run has that; choose from 1, 2, 3, 4, 5",
        ),
        (
            sweep.main,
            ("figure_landscapes", "--only", "seed=1"),
            "--only seed: figure_landscapes has no such option in its grid",
        ),
        (sweep.main, ("gsl", "--scale", "tiny"), "there is no scale 'tiny'; choose from smoke"),
        (sweep.main, ("gsl", "--jobs", "0"), "--jobs 0: at least 1"),
        (sweep.main, ("gsl", "--jobs", "two"), "invalid int value"),
        (sweep.main, ("gsl", "--jobs_per_gpu", "0"), "--jobs_per_gpu 0: at least 1"),
        (sweep.main, ("gsl", "--retries", "-1"), "--retries -1: at least 0"),
        (sweep.main, ("gsl", "--gpus_per_run", "-0.5"), "--gpus_per_run -0.5: at least 0"),
        (sweep.main, ("gsl", "--engine", "slrum"), "invalid choice: 'slrum'"),
        (sweep.main, ("gsl", "--dry_run"), "only with --engine slurm"),
        (sweep.main, ("gsl", "--job", "2"), "unrecognized arguments: --job"),
        (sweep.main, (), "required: TABLE"),
        (sweep.main, ("status", "gls"), "did you mean gsl?"),
        (tables.main, ("gls",), "did you mean gsl?"),
        (tables.main, ("gsl", "--scale", "smal"), "did you mean small?"),
        (tables.main, ("all",), "no runs of any table"),
        (figures.main, ("curves", "gsl", "--scale", "smoke"), "no run of gsl has val/elbo"),
        (figures.main, ("theta", "gsl", "--scale", "smoke"), "no run of gsl is finished"),
        (figures.main, ("samples", "mlp_vae", "--scale", "smoke"), "is finished"),
        (run_one.main, ("folder",), "expected the command of the run after --"),
    ],
)
def test_a_wrong_command_line_gets_one_line(tmp_path, monkeypatch, main, words, said, capsys):
    monkeypatch.chdir(tmp_path)
    if words == ("all",):
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        assert stop.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
        return
    assert said in (line := one_line(main, words, capsys)), line
    assert not list(tmp_path.rglob("*.png"))


# -- anywhere ------------------------------------------------------------------------------------


def test_a_base_lies_beside_the_plan_or_among_ours(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: vae_adam\ntitle: Mine\nimport: [mine.heads]\ngrid: {head: [natural, mine]}"
    )
    found = plan.load(str(mine), "smoke", tmp_path)
    assert [cell["head"] for cell in found.cells()] == ["softmax", "natural"]  # the scale's
    found = plan.load(str(mine), "paper", tmp_path)
    assert {cell["head"] for cell in found.cells()} == {"natural", "mine"}
    assert found.folder == tmp_path / "mine" / "paper"
    run = stages.coarse(found, found.cells()[0])[0]
    assert "--import=mine.heads" in run.command and run.home.parts[-2:] == ("vae", "natural")
    above = tmp_path / "above.yaml"
    above.write_text("base: mine\ntitle: Above\nscales: {full: {seeds: [7]}}")
    assert plan.load(str(above), "full").title == "Above"
    assert plan.load(str(above), "full").imports == ["mine.heads"]
    (tmp_path / "vae_adam.yaml").write_text("base: vae_adam\ntitle: Ours, with changes")
    assert plan.load(str(tmp_path / "vae_adam.yaml"), "smoke").model == "vae"


def test_files_that_are_each_other_s_base_get_one_line(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text("base: other")
    (tmp_path / "other.yaml").write_text("base: tiny")
    assert "each other's base" in one_line(sweep.main, arguments(tmp_path / "tiny.yaml"), capsys)


def test_a_plan_without_scales_has_one_called_full(tmp_path):
    path = write_table(tmp_path, scales=None)
    assert plan.scales(str(path)) == ["full"]
    assert sweep.main([str(path), "--runs", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs/tiny/full/x1-seed1/metrics.json").is_file()


def test_a_program_may_be_a_module_of_the_folder_where_the_sweep_starts(tmp_path, monkeypatch):
    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    path = write_table(tmp_path)
    (tmp_path / "program.py").rename(project / "mine" / "work.py")
    content = yaml.safe_load(path.read_text()) | {"program": "-m mine.work"}
    path.write_text(yaml.safe_dump(content))
    monkeypatch.chdir(project)
    assert sweep.main(arguments(path)) == 0
    assert calls(tmp_path) == {"x1-seed1": ["new"]}


def test_numbers_may_be_written_without_a_point(tmp_path):
    """YAML takes 1e-4 for text."""
    search = {**SEARCH, "option": "y", "coarse": ["1e-4", 2]}
    path = write_table(tmp_path, search=search)
    assert plan.load(str(path), "smoke").search.coarse == [1e-4, 2]


def test_every_plan_of_ours_has_the_three_scales():
    assert all(plan.scales(name) == list(plan.SCALES) for name in plan.names())
