"""Tests between cells: against values by hand, and which cells are bold."""

import math

import pytest

from experiments.significance import compare, holm, interval, rank_test, verdicts, welch


def bold(samples, better="lower"):
    return [each.bold for each in verdicts(compare(samples, better))]


def test_welch_by_hand():
    a, b = [1.0, 2.0, 3.0, 4.0], [3.0, 5.0, 7.0]
    from scipy.stats import t

    va, vb = 5 / 3 / 4, 4 / 3
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    expected = 2 * t.sf(abs(2.5 - 5) / math.sqrt(va + vb), freedom)
    assert welch(a, b) == pytest.approx(expected, rel=1e-12)


def test_the_interval_by_hand():
    a, b = [1.0, 2.0, 3.0, 4.0], [3.0, 5.0, 7.0]
    from scipy.stats import t

    va, vb = 5 / 3 / 4, 4 / 3
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    half = t.ppf(0.975, freedom) * math.sqrt(va + vb)
    assert interval(a, b) == pytest.approx((-2.5 - half, -2.5 + half), rel=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1.0, 1.0], [1.0, 1.0], 1.0), ([1.0, 1.0], [2.0, 2.0], 0.0), ([1.0], [1.0, 2.0], None)],
)
def test_welch_where_it_has_nothing_to_go_by(a, b, expected):
    assert welch(a, b) == expected


def test_the_rank_test_by_counting():
    """Of the 10 ways to choose ranks of 2 values among 5, 2 are as extreme as this one."""
    assert rank_test([1.0, 2.0], [3.0, 4.0, 5.0]) == pytest.approx(0.2)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_bold_is_the_best_and_what_cannot_be_told_from_it():
    close, best, far, missing = [1.0, 1.2, 1.1], [1.0, 1.1, 1.05], [5.0, 5.1, 5.2], []
    assert bold([close, best, far, missing]) == [True, True, False, False]
    assert bold([close, best, far, missing], "higher") == [False, False, True, False]
    assert bold([[1.0], [2.0]]) == [True, False]
    assert bold([[1.0], [1.0]]) == [True, True]
    assert bold([close, best], None) == [False, False]


def test_a_cell_without_an_opponent_is_not_bold():
    assert bold([[1.0, 1.1]]) == [False]
    assert bold([[1.0, 1.1], []]) == [False, False]  # the others have not finished
    assert bold([[1.0, 1.1], [math.nan]]) == [True, False]  # the other has, and has diverged
    assert bold([[], []]) == [False, False]


def test_a_wide_spread_is_no_reason_for_bold():
    """143.7 ± 57.1 is not to be told from 96.8 ± 0.3 by any test of three runs, and yet worse."""
    wide, best = [110.7, 110.7, 209.7], [96.5, 96.8, 97.1]
    (worse, _) = compare([wide, best], "lower")
    assert worse.test == "rank" and worse.p_value >= 0.05
    assert welch(wide, best) >= 0.05
    assert bold([wide, best]) == [False, True]
    assert bold([[96.4, 96.9, 97.4], best]) == [True, True]  # a little wider, and about the same


def test_spreads_that_differ_tenfold_are_compared_by_ranks():
    narrow, wide = [1.0, 1.01, 1.02], [3.0, 4.0, 5.0]
    assert [each.test for each in compare([narrow, wide], "lower")] == [None, "rank"]
    assert compare([[1.0, 1.5, 2.0], wide], "lower")[1].test == "Welch"


def test_holm_goes_over_all_tests_of_a_table():
    best, near = [0.0, 0.1, 0.2], [0.27, 0.37, 0.47]
    alone = compare([best, near], "lower")
    assert alone[1].p_value < 0.05
    assert verdicts(alone)[1].bold is False
    many = verdicts(alone * 8)
    assert many[1].adjusted == pytest.approx(8 * alone[1].p_value)
    assert many[1].bold is True


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_with_a_value_that_is_not_finite_is_never_the_best(bad):
    assert bold([[0.0, bad], [1.0, 1.1]]) == [False, True]
    assert bold([[bad], []]) == [False, False]
