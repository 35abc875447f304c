"""Plans: what a file may say, and our own plans against the command line and rows."""

import pytest
import yaml
from cases import slow
from cases_sweep import PLANS, ROOT, run_command

from catnat.sweeps import plan_file, sweep
from catnat.sweeps.check import check
from catnat.sweeps.defaults import Rows

WHOLE = {
    "title": "T",
    "study": "s",
    "model": "vae",
    "grid": {"head": ["softmax"]},
    "metrics": {"a/b": {}},
}
ADAM = ROOT / "paper" / "plans" / "vae_adam.yaml"


def write(folder, **keys):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(WHOLE | keys))
    return str(path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"modell": "vae"}, "modell"),
        ({"name": "x"}, "name"),
        ({"seeds": ["one"]}, "seeds"),
        ({"seeds": [1, 1]}, "seeds: 1 appears twice"),
        ({"search": {"seeds": [1]}}, "search: grid or fixed: give at least one"),
        ({"search": {"grid": {"a": ["b"]}, "factors": [2]}}, "factors refine numbers of one"),
        ({"search": {"grid": {"a b": ["cd"]}}}, "a b: cd is not a list of 2 values"),
        ({"grid": {"a": [1, 2, 1]}}, "{'a': 1} appears twice"),
        ({"grid": {"head": []}}, "grid: give at least one"),
        ({"grid": {"seed": [1, 2]}}, "what a sweep sets: seed appears twice"),
        ({"search": {"fixed": {"lr": {"natural": 1}}}}, "no value for head softmax"),
        ({"options": {"head": "natural"}}, "head appears twice"),
        ({"search": {"grid": {"lr": [1]}, "options": {"lr": 2}}}, "lr appears twice"),
        ({"search": {"grid": {"lr": [1]}, "top": 0}}, "top"),
        ({"study": "../../escape"}, "study: ../../escape is not the name of a folder"),
        ({"options": {"note": "a"}}, "an option cannot be called note"),
        ({"program": "x.py"}, "either model or program"),
        ({"base": "other.yaml"}, "other.yaml"),
        ({"base": "mine.yaml"}, "base leads back to itself"),
        ({"scales": ["small"]}, "mine.yaml cannot be read: expected keys and values"),
    ],
)
def test_a_wrong_plan_is_one_line(keys, words, tmp_path, capsys):
    assert run_command("status", [write(tmp_path, **keys)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\x00"])
def test_a_file_that_is_not_a_plan_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert run_command("sweep", [str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_command("sweep", [str(ADAM), "--scale", "smal"]) == 2
    assert "did you mean small?" in capsys.readouterr().err


def test_an_option_of_a_head_with_a_wrong_type_is_refused_before_anything_runs(tmp_path, capsys):
    plan_path = write(tmp_path, model="gsl", grid={"head_options.amplitude": [3, "wide"]})
    assert run_command("sweep", [plan_path, f"--results={tmp_path}"]) == 2
    assert "amplitude must lie in" in capsys.readouterr().err


def test_scales_lie_over_the_plan_and_the_plan_over_its_base_at_that_scale(tmp_path):
    path = tmp_path / "mine.yaml"
    scales = {"small": {"options": {"max_steps": 7}, "grid": {"variant": None}}}
    path.write_text(
        yaml.safe_dump(
            {
                "base": str(ADAM),
                "title": "Mine",
                "scales": scales,
                "seeds": [7],
                "options": {"max_steps": 9},
                "search": {"grid": {"learning_rate": ["on", "1e-3"]}},
            }
        )
    )
    loaded, base = plan_file.load(str(path)), plan_file.load(str(ADAM))
    assert loaded.title == "Mine" and loaded.scale == "small"
    assert loaded.options == base.options | {"max_steps": 7}
    assert "variant" not in loaded.grid and loaded.seeds == [7]
    assert loaded.search.grid == {"learning_rate": ["on", 0.001]}  # yaml quotes 'on' only
    assert loaded.search.options == base.search.options
    assert plan_file.load(str(path), "long").options["max_steps"] == 9
    assert plan_file.scales(str(path)) == plan_file.scales(str(ADAM))
    assert loaded.results == base.results == str(ROOT / "paper")


@pytest.mark.parametrize("path", [*PLANS[:2], *map(slow, PLANS[2:])], ids=lambda path: path.stem)
def test_our_plans_have_sound_grids_and_options_that_train_takes(path, tmp_path):
    for scale in plan_file.scales(str(path)):
        names = [run.name() for run in plan_file.load(str(path), scale).runs(Rows())]
        assert len(set(names)) == len(names)
    if path.stem == "minatar":
        pytest.importorskip("minatar.gym")  # paper/minatar is a package of that name, too
    args = sweep.build_parser().parse_args([str(path), "--scale=smoke", f"--runs={tmp_path}"])
    loaded = sweep.Sweep.load(str(path), args)
    check(loaded.plan, loaded.rows(), loaded.folder)


def test_a_plan_is_checked_once_for_each_kind_of_run(monkeypatch, tmp_path):
    checked = []
    monkeypatch.setattr("catnat.sweeps.check.resolve", checked.append)
    loaded = plan_file.load(str(ADAM), "paper")
    check(loaded, Rows(), tmp_path)
    variants = [next(word for word in words if "variant" in word) for words in checked]
    assert variants == ["--variant=gray", "--variant=binary"]  # heads and numbers need no check


# -- published rows --------------------------------------------------------------------------------

PUBLISHED = {  # by plan and scale: final runs that have rows, of all
    ("vae_adam", "small"): (216, 216),
    ("gsl", "paper"): (200, 200),
    ("gsl_local", "small"): (100, 100),
    ("ppo_seaquest", "small"): (4, 6),
    ("ppo_cartpole", "seeds"): (12, 12),
}


@pytest.mark.parametrize(("name", "scale"), PUBLISHED)
def test_a_plan_finds_its_published_runs_from_the_search_to_the_last_seed(name, scale):
    path = str(ADAM.with_stem(name))
    args = sweep.build_parser().parse_args([path, f"--scale={scale}"])
    loaded = sweep.Sweep.load(path, args)
    rows = loaded.rows()
    finals = [run for run in loaded.plan.runs(rows) if run.stage == "final"]
    done = sum(rows.get(run) is not None for run in finals)
    assert (done, len(finals)) == PUBLISHED[name, scale]
