"""Every number in the pages of this folder, and of README.md and docs/, computed from the rows.

    python paper/verdicts.py               # all claims; exit code 1 if a page differs
    python paper/verdicts.py | grep 2.67   # which function computes a number
    python paper/verdicts.py --renew       # put computed numbers into rows of tables

A claim has a name, such as ``vae.sigmoid-gain``, and numbers. Pages mark the numbers with it:
``<!--:vae.sigmoid-gain-->1 to 6 nats in 18 of 18<!--/-->``. The name of a row of a table is its
first cells. Numbers that do not come from a run are listed by page in settings.yaml. To add a
claim, yield its name and numbers from a function in claims_*.py: select() has runs by options,
pair() those of two heads, leads() their differences by cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import measures
import numpy as np
from claims_codebook import codebook
from claims_factors import factors, other_factors, why_a_tree_leads
from claims_photographs import photographs
from claims_tasks import games, graphs, labels_and_words, masks, output_layers
from claims_together import together
from claims_vae import estimators, likelihoods, other_vaes

STUDIES = (
    *(likelihoods, other_vaes, estimators, together, factors, other_factors, why_a_tree_leads),
    *(graphs, games, masks, labels_and_words, output_layers, photographs, codebook),
)


def claims() -> Iterator[tuple[str, str, list[float]]]:
    """The function, the words and the numbers of each claim."""
    for study in STUDIES:
        for words, *parts in study():
            numbers = np.hstack([np.ravel(part) for part in parts]).astype(float)
            yield study.__name__, words, numbers.tolist()


def main() -> int:
    """Print all claims."""
    failed = 0
    for study, words, numbers in claims():
        places = list(measures.statements(words, len(numbers)))
        wrong = [place for place in places if not place.holds(numbers)]
        failed += not places or len(wrong) > 0
        text = ", ".join(f"{number:.4g}" for number in numbers)
        print(f"{study}: {words} {text}{'' if places else '  (NO PAGE SAYS SO)'}")
        for place in wrong:
            stated = ", ".join(number[0] for number in place.numbers)
            print(f"    {place.page.relative_to(measures.PAPER.parent)} DIFFERS: {stated}")
            if "--renew" in sys.argv and place.is_row:
                measures.renew(place, numbers)
    print(f"{failed} claims differ from the rows", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
