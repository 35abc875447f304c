"""FisherMonitor on a small model of a user's own."""

import lightning.pytorch as L
import pytest
import torch
from cases_callbacks import TAGS, Memory, Small, fit, loader
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from catnat import NaturalHead, SoftmaxHead, head_names, make_head
from catnat.callbacks import Figures, FisherMonitor
from catnat.callbacks.fisher_diagnostics import sampled_row, sampled_sums
from catnat.fisher import condition_number, off_diagonal_mass, paired_mean_fishers

BUILT_IN = head_names()[:4]


def observed(model, monitor=None, **flags):
    """The logger of a run with the monitor."""
    fit(model, monitor or FisherMonitor(details=True), logger=(logger := Memory()), **flags)
    return logger


def assert_masses(logger, model, batches=None):
    """The mass of each step is that of its scores."""
    for step, scores in enumerate(batches or model.seen):
        mass = float(off_diagonal_mass(model.head.mean_fisher(scores)))
        assert logger.rows[step]["fim/exact_off_diagonal_mass"] == pytest.approx(mass, rel=1e-5)


@pytest.mark.parametrize("head", BUILT_IN)
def test_every_step_gets_the_values_of_its_own_scores(head):
    logger = observed(model := Small(head), FisherMonitor(write_every_n_steps=2, details=True))
    assert sorted(logger.rows) == [0, 1, 2, 3, 4]
    for step, scores in enumerate(model.seen):
        mean = model.head.fisher(scores.double()).mean((0, 1))
        row = logger.rows[step]
        expected = {
            "fim/off_diagonal_mass_l1": off_diagonal_mass(mean, "l1"),
            "fim/exact_off_diagonal_mass": off_diagonal_mass(mean),
            "fim_spectrum/condition_number": condition_number(mean),
            "fim/saturated": model.head.saturated(scores).double().mean(),
        }
        assert set(row) == set(TAGS)
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value), rel=1e-3, abs=1e-6), name


class Shifted(NaturalHead):
    """A tree whose splits depend on all scores, so that its matrix is far from diagonal."""

    def log_probs(self, scores):
        return super().log_probs(scores + 0.7 * scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", [Shifted, NaturalHead, SoftmaxHead])
def test_the_mass_is_measured_and_a_closed_form_is_used_only_where_it_applies(kind):
    """The exact mass is that of the definition, and draws of every step agree with it."""
    torch.manual_seed(0)
    model = Small()
    model.head = kind(6)
    model.linear = nn.Linear(4, 2 * model.head.num_scores)
    logger = observed(model, FisherMonitor(num_samples=400), max_steps=5)
    assert {tag for row in logger.rows.values() for tag in row} == {
        "fim/off_diagonal_mass",
        "fim/exact_off_diagonal_mass",
        "fim/saturated",
    }
    for step, scores in enumerate(model.seen):
        rows = scores.double().flatten(0, 1)
        matrices = []
        for row in rows:
            jacobian = torch.autograd.functional.jacobian(model.head.log_probs, row)
            probs = model.head.log_probs(row).exp()
            matrices.append(torch.einsum("k,ki,kj->ij", probs, jacobian, jacobian))
        want = float(off_diagonal_mass(torch.stack(matrices).mean(0)))
        row = logger.rows[step]
        assert row["fim/exact_off_diagonal_mass"] == pytest.approx(want, rel=1e-3, abs=1e-4)
        assert row["fim/off_diagonal_mass"] == pytest.approx(want, abs=0.12)
        if kind is Shifted:
            assert want > 0.75


def test_training_is_the_same_with_and_without_it():
    watched, alone = Small("softmax"), Small("softmax")
    alone.load_state_dict(watched.state_dict())
    fit(watched, FisherMonitor(num_samples=4, details=True), Figures())
    fit(alone)
    torch.testing.assert_close(watched.seen, alone.seen, rtol=0, atol=0)


def test_intervals_and_leaving_out_the_samples():
    logger = observed(Small(), FisherMonitor(every_n_steps=2, num_samples=0, details=True))
    assert sorted(logger.rows) == [0, 2, 4]
    assert "fim/off_diagonal_mass" not in logger.rows[0]


def test_scores_that_are_parameters_are_those_before_the_update():
    class Bare(Small):
        def __init__(self):
            super().__init__("softmax")
            self.scores = nn.Parameter(torch.randn(1, 2, 6))

        def training_step(self, batch, batch_idx):
            self.seen.append(self.scores.detach().clone())
            return self.head(self.scores).entropy().mean()

    assert_masses(observed(model := Bare()), model)


def test_batches_may_have_many_sizes():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x), batch_sampler=[[0, 1], [2], [3, 4, 5], [6, 7, 8], [9]])
    logger = observed(model := Small("softmax"), data=data)
    assert [len(scores) for scores in model.seen] == [2, 1, 3, 3, 1]
    assert_masses(logger, model)


@pytest.mark.parametrize("every", [1, 3, 50])
def test_no_row_is_lost_or_written_twice(every, tmp_path):
    """Also around checkpoints."""

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % 4 == 0:
                trainer.save_checkpoint(tmp_path / "some.ckpt")
                assert logger.observed == list(range(trainer.global_step))

    model, logger = Small("softmax"), Memory()
    monitor = FisherMonitor(write_every_n_steps=every, details=True)
    fit(model, monitor, Save(), logger=logger, data=loader(batches=11), max_steps=11)
    assert logger.observed == list(range(11))
    assert_masses(logger, model)


def test_a_second_run_begins_anew_also_after_an_exception():
    class Fails(Small):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 3:
                raise ArithmeticError

    monitor = FisherMonitor(details=True)
    with pytest.raises(ArithmeticError):
        fit(Fails("softmax"), monitor, logger=(before := Memory()))
    assert before.observed == [0, 1, 2], "the steps before the exception are written"
    logger = observed(model := Small("softmax"), monitor)
    assert logger.observed == list(range(5))
    assert_masses(logger, model)
    assert not model.head._forward_hooks


def test_heads_are_seen_where_they_are_called():
    """Each in some of the steps, and one in validation, which does not count."""

    class Now(Small):
        def training_step(self, batch, batch_idx):
            scores = self.linear(batch[0])[:, :6]
            q = (self.head, self.second)[batch_idx % 2](scores[:, : (6, 2)[batch_idx % 2]])
            return q.entropy().mean()

    model = Now("softmax", second="natural")
    flags = {"val_check_interval": 1, "val": loader(batches=1)}
    rows = observed(model, FisherMonitor(write_every_n_steps=1, details=True), **flags).rows
    names = [{tag.split("/")[1] for tag in rows[step] if "fim/" in tag} for step in range(5)]
    assert names == [{"head"}, {"second"}, {"head"}, {"second"}, {"head"}]


def test_a_head_with_parameters_is_looked_at_in_its_step():
    class Tempered(type(make_head("softmax", 6))):
        def __init__(self):
            super().__init__(6)
            self.log_scale = nn.Parameter(torch.zeros(()))

        def log_probs(self, scores):
            return super().log_probs(scores * self.log_scale.exp())

    class Learns(Small):
        def __init__(self):
            super().__init__("softmax")
            self.head, self.masses = Tempered(), []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            mass = off_diagonal_mass(self.head.mean_fisher(self.seen[-1]))
            self.masses.append(mass.item())

    logger = observed(model := Learns())
    masses = [logger.rows[step]["fim/exact_off_diagonal_mass"] for step in range(5)]
    assert masses == pytest.approx(model.masses, rel=1e-5)
    assert max(masses) - min(masses) > 1e-3


def test_accumulated_gradients_count_as_one_step_with_all_its_batches():
    flags = {"max_steps": 3, "accumulate_grad_batches": 3, "data": loader(batches=7)}
    logger = observed(
        model := Small("softmax"), FisherMonitor(write_every_n_steps=2, details=True), **flags
    )
    assert sorted(logger.rows) == [0, 1, 2]
    seen = model.seen
    assert_masses(logger, model, [torch.cat(seen[:3]), torch.cat(seen[3:6]), seen[6]])


def test_scores_that_a_mask_decides_are_not_saturated():
    """Of the split between the two free categories alone a share can be saturated."""
    allowed = torch.tensor([True, False, False, False, True, False])

    class Masked(Small):
        def training_step(self, batch, batch_idx):
            scores = 20 * self.linear(batch[0]).unflatten(-1, (2, -1))
            self.seen.append(self.head.masked(scores.detach(), allowed))
            return self.head(scores, allowed).entropy().mean()

    logger = observed(model := Masked("natural"))
    for step, scores in enumerate(model.seen):
        free = scores.isfinite()
        assert 0 < int(free.sum()) < free.numel()
        share = model.head.saturated(scores)[free].float().mean()
        assert logger.rows[step]["fim/saturated"] == pytest.approx(float(share), abs=1e-6)
    assert logger.rows[0]["fim/saturated"] < 0.9


def test_a_matrix_of_one_entry_has_no_constant_tags():
    class Binary(Small):
        def __init__(self):
            super().__init__()
            self.head, self.linear = make_head("natural", 2), nn.Linear(4, 2)

    masses = {"fim/exact_off_diagonal_mass", "fim/off_diagonal_mass"}
    row = observed(Binary()).rows[0]
    assert set(row) == {*masses, "fim/saturated"} and all(row[tag] == 0 for tag in masses)


def test_several_heads_are_told_apart():
    logger = observed(Small("softmax", second="natural"))
    tags = {tag.replace("/", f"/{head}/") for head in ("head", "second") for tag in TAGS}
    assert tags == set(logger.rows[0])
    row = logger.rows[4]
    assert row["fim/second/exact_off_diagonal_mass"] != row["fim/head/exact_off_diagonal_mass"]


def test_a_model_without_a_head_is_told_so():
    class Headless(Small):
        def __init__(self):
            super().__init__()
            self.head = nn.Identity()

    with pytest.raises(ValueError, match="contains no CategoricalHead"):
        fit(Headless(), FisherMonitor(details=True))


def test_a_head_that_is_never_called_is_told_so():
    class Silent(Small):
        def training_step(self, batch, batch_idx):
            return -self.head.log_probs(self.linear(batch[0]).unflatten(-1, (2, -1))).mean()

    with pytest.warns(UserWarning, match="observes nothing: no head .* was called") as warned:
        fit(Silent(), FisherMonitor(write_every_n_steps=1, details=True))
    assert sum("observes nothing" in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_the_monitor_sees_a_model_with_two_optimizers(every):
    class Two(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
            self.head = make_head("natural", 4)

        def training_step(self, batch, _):
            for layer, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(-self.head(layer(batch)).entropy().mean())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.one, self.two)]

    data = DataLoader(torch.randn(96, 4), batch_size=4)
    fit(Two(), monitor := FisherMonitor(every_n_steps=every, details=True), data=data, max_steps=48)
    tags = {(tag.partition("/")[0], tag.rpartition("/")[-1]) for tag in monitor.latest}
    assert {("fim", "off_diagonal_mass"), ("fim", "exact_off_diagonal_mass")} <= tags


# -- draws -----------------------------------------------------------------------------------------


def test_the_sampled_share_of_small_batches_is_not_biased():
    """The mean of the ratios of four rows would be -.1 for natural, where 0 is right."""
    head, generator = make_head("natural", 8), torch.Generator().manual_seed(0)
    scores = torch.randn(4, 7, generator=generator)
    uniforms = torch.rand(2, 3000, 4, generator=generator)
    sums = sampled_sums(
        paired_mean_fishers(head, scores.expand(3000, 4, 7), uniforms).movedim(0, 1)
    )
    run = [0.0, 0.0]
    shares = [
        sampled_row(run, True, *step_sums)["fim_sampled/off_diagonal_share"]
        for step_sums in sums.tolist()
    ]
    assert sum(shares) / len(shares) == pytest.approx(0, abs=0.02)
    assert sums[:, 1].sum() / sums[:, 2].sum() == pytest.approx(0, abs=0.02)
    assert (sums[:, 1] / sums[:, 2]).mean() < -0.05


def test_every_step_has_its_draws_whatever_the_length_of_a_block():
    rows = []
    for block in (1, 2, 50):
        torch.manual_seed(0)
        rows.append(
            observed(Small("softmax"), FisherMonitor(write_every_n_steps=block, details=True)).rows
        )
    assert list(rows[0]) == [0, 1, 2, 3, 4]
    for other in rows[1:]:
        for step, values in rows[0].items():
            assert other[step] == pytest.approx(values, rel=1e-4)
    assert len({row["fim_sampled/off_diagonal_share"] for row in rows[0].values()}) == 5


def test_the_latest_values_are_metrics_of_the_trainer():
    monitor, logger = FisherMonitor(), Memory()
    stop = EarlyStopping("fim/saturated", patience=1, check_on_train_epoch_end=True)
    trainer = fit(Small(), monitor, stop, logger=logger, max_steps=-1, max_epochs=9)
    assert trainer.callback_metrics["fim/saturated"] == pytest.approx(
        monitor.latest["fim/saturated"]
    )
    assert stop.wait_count <= 2 and trainer.current_epoch <= 9
    assert all("fim/saturated" in row for row in logger.rows.values())
