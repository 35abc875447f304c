"""Each number in a page of paper/ is computed again from the rows."""

import re
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "paper"
sys.path.append(str(PAPER))  # its programs are run from there

pytest.importorskip("pandas")
import claims_factors  # noqa: E402
import measures  # noqa: E402
import pandas as pd  # noqa: E402
import verdicts  # noqa: E402
import yaml  # noqa: E402

SETTINGS = yaml.safe_load((PAPER / "settings.yaml").read_text())


@pytest.fixture(scope="module")
def claims():
    """Words, numbers, and the places that state them."""
    return [
        (words, computed, list(measures.statements(words, len(computed))))
        for _, words, computed in verdicts.claims()
    ]


def test_pages_state_what_the_rows_say(claims):
    for words, computed, statements in claims:
        assert statements, f"no page says {words} {computed}"
        for statement in statements:
            assert statement.holds(computed), (statement.page, words, computed)


def stated_on(page, claims):
    return [
        statement.numbers[place]
        for _, computed, statements in claims
        for statement in statements
        if statement.page == page
        for place in statement.places(computed)
    ]


@pytest.mark.parametrize(
    "page", measures.PAGES, ids=lambda page: str(page.relative_to(PAPER.parent))
)
def test_every_number_is_a_claim_or_a_listed_setting(claims, page):
    listed = str(SETTINGS.get(str(page.relative_to(PAPER.parent)), "")).split()
    left = measures.unclaimed(page, stated_on(page, claims))
    left = [number for number in left if number not in str(SETTINGS["all"]).split()]
    assert set(left) <= set(listed), f"{page} has numbers that are neither claims nor settings"
    assert set(listed) <= set(left), "paper/settings.yaml lists numbers that the page does not have"


def test_markers_name_claims(claims):
    names = {name for name, *_ in claims}
    for page in measures.PAGES:
        assert set(re.findall(r"<!--:(.*?)-->", page.read_text())) <= names, page


@pytest.mark.parametrize(
    "page", measures.PAGES, ids=lambda page: str(page.relative_to(PAPER.parent))
)
def test_no_line_begins_with_a_marker(page):
    """Markdown ends a paragraph or a list at a line that begins with a comment."""
    assert not re.findall(r"^\s*<!--.*", page.read_text(), re.MULTILINE)


def test_planted_errors_are_found(claims, tmp_path, monkeypatch):
    page = page_with(tmp_path, monkeypatch, "It took 19 seconds, in 17 of 18 runs, 3 times.")
    assert measures.unclaimed(page, []) == ["3", "19", "17", "18"]
    page.write_text("`x = 19` [link](a/19.md) <!-- 19 --> K = 8")
    assert measures.unclaimed(page, []) == []


@pytest.mark.parametrize(
    "number, computed, expected",
    [("3.1", 3.149, True), ("3.1", 3.16, False), ("2e-7", 2.04e-7, True), ("1,336", 1336.3, True)],
)
def test_a_number_agrees_to_its_last_digit(number, computed, expected):
    assert measures.agrees(number, computed) is expected


def page_with(folder, monkeypatch, text):
    page = folder / "page.md"
    page.write_text(text)
    monkeypatch.setattr(measures, "PAGES", [page])
    return page


@pytest.mark.parametrize(
    "computed, expected",
    [([2.04, 1.23, 3.39], True), ([2.05, 1.23, 3.39], False), ([1.23, 3.39], True)],
)
def test_markers_hold_the_numbers_in_order(tmp_path, monkeypatch, computed, expected):
    text = "The factor is <!--:a.factor-->2.04 at K = 8,\nand [1.23, 3.39]<!--/-->, not 2.05."
    page_with(tmp_path, monkeypatch, text)
    (statement,) = measures.statements("a.factor", len(computed))
    assert statement.holds(computed) is expected


def test_a_row_has_no_other_numbers_and_is_renewed(tmp_path, monkeypatch):
    page = page_with(
        tmp_path, monkeypatch, "| a | n |\n|---|---|\n| it | 1,200 | 0.5 [0.1, 0.9] |\n"
    )
    (row,) = measures.statements("| it |", 4)
    assert row.holds([1200, 0.5, 0.1, 0.9])
    assert not list(measures.statements("| it |", 3))
    measures.renew(row, [1300, -0.04, -1.26, 2])
    assert page.read_text().endswith("| it | 1,300 | 0.0 [-1.3, 2.0] |\n")


def curves(*losses):
    columns = [f"val/loss_{step}" for step in (10, 100, 1000)]
    return pd.DataFrame([losses], columns=columns, index=[1])


def test_a_factor_is_the_ratio_of_steps_to_the_same_loss():
    slow, fast = curves(9, 8, 7), curves(8, 6, 5)
    (ratio,) = measures.log_factors(slow, fast)  # to a loss of 7, after 1,000 and 10^1.5 steps
    assert ratio == pytest.approx(1.5 * 2.302585, rel=1e-5)
    assert [*measures.log_factors(fast, slow)] == pytest.approx([-ratio])
    assert [*measures.log_factors(slow, slow)] == [0]


def test_curves_cross_where_their_means_change_places():
    ahead_early, ahead_late = curves(9, 7, 6), curves(10, 8, 5)
    assert list(measures.crossings(ahead_early, ahead_late)) == [300]  # 10^2.5
    assert not len(measures.crossings(ahead_early, curves(10, 8, 7)))
    first = pd.concat([ahead_early] * 2, ignore_index=True)
    second = pd.concat([ahead_late, curves(10, 8, 4)], ignore_index=True)
    ((words, count, ((ratio, *_),), crossing),) = claims_factors.factor_row(
        ["words"], [first, second], 1000
    )
    assert (words, count, *crossing) == ("| words |", 2, 300)
    assert ratio == pytest.approx(10 ** (5 / 12))  # the mean of 1/3 and 1/2


def test_leads_are_differences_of_means_by_cell():
    rewards = {"a": ([1, 2, 3], [4, 6]), "b": ([5, 5, 6], [1, 2])}
    cells = [
        {"cell": cell, "head": head, "return": value}
        for cell, samples in rewards.items()
        for head, values in zip(("tree", "softmax"), samples, strict=True)
        for value in values
    ]
    leads = measures.leads(pd.DataFrame(cells), "return", "tree", by=["cell"])
    assert [*leads["mean"]] == pytest.approx([-3, 16 / 3 - 1.5])
    assert [*leads["n"]] == [3, 3]
    for cell, samples in rewards.items():
        assert [*leads.loc[cell, "mean":"p"]] == pytest.approx(measures.welch(*samples))


def test_a_table_is_claimed_row_by_row():
    table = pd.DataFrame({"n": [3.0, 5.0], "mean": [0.5, None]}, [("a", 8), ("b", 16)])
    claims = [(words, [*numbers]) for words, numbers in measures.rows(table)]
    assert claims == [("| a | 8 |", [3, 0.5]), ("| b | 16 |", [5])]


def test_a_pair_has_one_run_of_each_seed():
    softmax, sigmoid = measures.pair("vae/longest_curve.csv")
    assert softmax.index.names == [*measures.COLUMN, "seed"]
    assert softmax.index.equals(sigmoid.index)
    with pytest.raises(ValueError, match="several runs of a seed"):
        measures.pair("vae/runs.csv")
