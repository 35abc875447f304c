"""A run's key is made from its resolved options: defaults of classes count."""

import pytest
import yaml
from cases_sweep import ROOT, arguments, write_plan

from catnat.sweeps import check, defaults, runs, sweep
from catnat.sweeps.defaults import Defaults, Rows

OPTIONS = {"program": None, "model": "vae", "grid": {"head": ["softmax"]}, "seeds": [1]}
CLASS = {"model.head": "natural", "model.estimator": "gumbel", "data.seed": 0, "model.clip": None}


@pytest.fixture
def of_class(monkeypatch):
    """The defaults of the class, which a test may change."""
    options = dict(CLASS)

    def resolve(words):
        given = dict(word[2:].split("=", 1) for word in words)
        return options | {f"model.{x}": y for x, y in given.items() if f"model.{x}" in options}

    monkeypatch.setattr(defaults, "resolve", resolve)
    monkeypatch.setattr(check, "resolve", resolve)
    return options


class Engine:
    """Does every run at once."""

    jobs = 1

    def execute(self, run, folder):
        return {"test/nll": 1.0, "val/loss": 1.0}

    def stop(self):
        pass


@pytest.fixture
def count(tmp_path, monkeypatch):
    """A function that sweeps a plan with these keys, and counts the runs that were done."""
    monkeypatch.setattr(sweep, "make_engine", lambda *_: Engine())
    rows_path = tmp_path / "results" / "tiny" / "runs.csv"

    def count(**keys):
        path = write_plan(tmp_path, **(OPTIONS | keys))
        before = len(runs.read(rows_path))
        args = sweep.build_parser().parse_args(arguments(path))
        assert sweep.Sweep.load(str(path), args, resolves=True).run() == 0
        return len(runs.read(rows_path)) - before

    return count


def test_a_changed_default_of_a_class_makes_old_rows_unfinished(of_class, count):
    assert [count(), count()] == [1, 0]
    of_class["model.estimator"] = "gumbel-rao"
    assert [count(), count()] == [1, 0]
    of_class["model.estimator"] = "gumbel"
    assert count() == 0  # the first row counts again
    of_class["model.clip"] = 1.0  # it had none
    assert [count(), count()] == [1, 0]


def test_an_option_that_is_given_is_equal_to_the_default_that_it_has(of_class, count):
    assert count() == 1
    assert count(options={"estimator": "gumbel"}) == 0
    of_class["model.estimator"] = "gumbel-rao"
    assert count(options={"estimator": "gumbel"}) == 0
    assert count(options={"estimator": "gumbel-rao"}) == 1
    assert count() == 0


def test_options_that_are_new_or_gone_change_no_row(of_class, count):
    assert count() == 1
    of_class["model.num_draws"] = 8
    assert count() == 0
    assert count(options={"num_draws": 4}) == 1
    del of_class["model.num_draws"], of_class["model.estimator"]
    assert count() == 0


def test_a_default_that_the_class_decides_is_the_last_one(of_class, count):
    assert count() == 1
    of_class["model.estimator"] = None
    assert count() == 0
    assert count(options={"estimator": "gumbel"}) == 0
    assert count(options={"estimator": "gumbel-rao"}) == 1
    of_class["model.clip"] = 1.0
    assert [count(), count()] == [1, 0]


def test_a_default_of_a_given_option_and_observers_change_nothing(of_class, count):
    of_class["fisher.every_n_steps"] = 5
    assert count() == 1
    of_class.update({"model.head": "sigmoid", "fisher.every_n_steps": 9})
    assert count() == 0


def test_folders_of_runs_differ_where_defaults_do(of_class, count, tmp_path):
    assert count() == 1
    names = set()
    for estimator in ("gumbel", "gumbel-rao"):
        of_class["model.estimator"] = estimator
        for options in ({}, {"estimator": "gumbel"}):
            path = write_plan(tmp_path, **OPTIONS, options=options)
            args = sweep.build_parser().parse_args(arguments(path))
            loaded = sweep.Sweep.load(str(path), args, resolves=True)
            names |= {loaded.folder_of(run).name for run in loaded.plan.runs(Rows())}
    assert len(names) == 3


def test_a_damaged_record_is_one_line(tmp_path):
    path = tmp_path / "defaults.yaml"
    for text in ("[", "rows: 3", "- a"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"defaults\.yaml cannot be read"):
            Defaults(path)


def test_old_rows_of_every_study_have_recorded_defaults():
    for path in (ROOT / "paper").glob("*/defaults.yaml"):
        record = yaml.safe_load(path.read_text())
        families = {defaults.family_of(row) for row in runs.read(path.with_name("runs.csv"))}
        named = set(record["rows"].values()) | {x for xs in record["families"].values() for x in xs}
        assert named <= record["defaults"].keys()
        assert record["rows"].keys() <= families
