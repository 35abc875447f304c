"""Each number in a page of paper/ is computed again from the rows."""

import re
import sys
from itertools import chain
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "paper"
sys.path.append(str(PAPER))  # its programs are run from there

import measures  # noqa: E402
import verdicts  # noqa: E402
import wider  # noqa: E402

# Decimals that are options of runs or levels of tests, not results.
SETTINGS = re.compile(
    r"0\.0+[1-58]\b|0\.(00025|1|25|5|75|9)\b|C = -?[\d.]+|rates? [\d.]+|"
    r"coupling -?[\d.]+|above 1\.5|\(G \+ 0\.1 I\)|-0\.5\)"
)


@pytest.fixture(scope="module")
def claims():
    return list(chain.from_iterable(study() for study in verdicts.CLAIMS))


def test_pages_state_what_the_rows_say(claims):
    for claim in claims:
        numbers = measures.stated(claim)
        assert len(numbers) == len(claim.computed), f"{claim.page}: {claim.sentence}"
        for number, computed in zip(numbers, claim.computed, strict=True):
            assert measures.agrees(number, computed), (claim, number, computed)


@pytest.mark.parametrize("page", [path.relative_to(PAPER) for path in PAPER.glob("**/README.md")])
def test_pages_state_no_other_results(claims, page):
    text = measures.text_of(str(page))
    for claim in claims:
        if claim.page == str(page):
            text = re.sub(measures.pattern_of(claim), " ", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    unclaimed = re.findall(r"\d+\.\d+", SETTINGS.sub(" ", text))
    assert not unclaimed, f"{page} has numbers without a claim"


@pytest.mark.parametrize(
    "number, computed, expected",
    [("3.1", 3.149, True), ("3.1", 3.16, False), ("2e-7", 2.04e-7, True), ("1,336", 1336.3, True)],
)
def test_a_number_agrees_to_its_last_digit(number, computed, expected):
    assert measures.agrees(number, computed) is expected


def test_a_factor_is_the_ratio_of_steps_to_the_same_loss():
    slow = {"1": {f"val/loss_{step}": str(loss) for step, loss in ((10, 9), (100, 8), (1000, 7))}}
    fast = {"1": {f"val/loss_{step}": str(loss) for step, loss in ((10, 8), (100, 6), (1000, 5))}}
    (ratio,) = measures.log_factors((slow, fast))  # to a loss of 7, after 1,000 and 10^1.5 steps
    assert ratio == pytest.approx(1.5 * 2.302585, rel=1e-5)
    assert measures.log_factors((fast, slow)) == pytest.approx([-ratio])
    assert measures.log_factors((slow, slow)) == [0]


def test_curves_cross_where_their_means_change_places():
    ahead_early = {"1": {"val/loss_10": "9", "val/loss_100": "7", "val/loss_1000": "6"}}
    ahead_late = {"1": {"val/loss_10": "10", "val/loss_100": "8", "val/loss_1000": "5"}}
    assert wider.crossing([ahead_early, ahead_late]) == pytest.approx(10**2.5)
    (row,) = wider.factor_row("README.md", "words", [ahead_early, ahead_late])
    assert row.sentence == "| words | {} | {} | {} |"
    assert row.computed == pytest.approx([1, 10 ** (1 / 3), 300])
