"""Observing never ends a run: what a monitor cannot compute is NaN, with one warning."""

import math
import warnings

import pytest
import torch
from cases_callbacks import TAGS, Memory, Small, fit

from catnat.callbacks import FisherMonitor, fisher_diagnostics
from catnat.heads.flat import SoftmaxHead


def observed(model, **options):
    """Rows and warnings of a run with the monitor; the run has to reach its end."""
    logger = Memory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(
            model, FisherMonitor(write_every_n_steps=2, details=True, **options), logger=logger
        )
    assert trainer.global_step == 5 and sorted(logger.rows) == [0, 1, 2, 3, 4]
    messages = [str(w.message) for w in caught if "could not be computed" in str(w.message)]
    return logger.rows, messages


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SoftmaxHead, "step_fishers"),
        (torch.linalg, "eigvalsh"),
        (fisher_diagnostics, "paired_mean_fishers"),
    ],
)
def test_whatever_fails_is_nan_with_one_warning(owner, name, monkeypatch):
    def fails(*_, **__):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(owner, name, fails)
    rows, messages = observed(Small("softmax"))
    for row in rows.values():
        nan = {tag for tag, value in row.items() if math.isnan(value)}
        assert nan == ({"fim_spectrum/condition_number"} if name == "eigvalsh" else set(row))
    assert len(messages) == (name != "eigvalsh")
    assert all("did not converge" in message for message in messages)


def test_scores_that_are_nan_do_not_end_a_run():
    class Broken(Small):
        def training_step(self, batch, batch_idx):
            scores = self.linear(batch[0]).unflatten(-1, (2, -1))
            broken = scores.detach() * math.nan
            self.head(broken if batch_idx == 2 else scores)
            return scores.mean()

    model = Broken("sparsemax")
    model.head.validate_args = False
    rows, messages = observed(model, image_every_n_steps=1)
    assert math.isnan(rows[2]["fim_spectrum/condition_number"])
    assert all(math.isfinite(value) for value in rows[3].values())
    assert not messages, "that no error is the reason"


DRAWN = {tag for tag in TAGS if tag.startswith("fim_sampled/")} | {"fim/off_diagonal_mass"}


@pytest.mark.parametrize("name", ["softmax", "natural"])
def test_a_matrix_that_is_too_large_is_not_even_tried(name, monkeypatch):
    monkeypatch.setattr(fisher_diagnostics, "LARGEST", 3)
    logger = Memory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Small(name), FisherMonitor(details=True), logger=logger)
    messages = [
        warning for warning in caught if "FisherMonitor observes nothing" in str(warning.message)
    ]
    assert len(messages) == (name == "softmax")
    rows = {"softmax": {}, "natural": {*TAGS} - DRAWN}
    assert set().union(*logger.rows.values()) == set(rows[name])
