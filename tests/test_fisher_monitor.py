"""FisherMonitor on a small model of a user's own."""

import lightning.pytorch as L
import pytest
import torch
from cases_callbacks import Memory, Small, fit, loader
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from catnat import head_names, make_head
from catnat.callbacks import FisherMonitor, VAEFigures, fisher_diagnostics
from catnat.callbacks.fisher_diagnostics import matrices_of
from catnat.fisher import condition_number, off_diagonal_mass, score_fisher
from catnat.replay import send

SCALARS = (
    "off_diagonal_mass",
    "off_diagonal_mass_fro",
    "off_diagonal_mass_sampled",
    "off_diagonal_mass_fro_sampled",
    "off_diagonal_share_sampled",
    "condition_number",
    "saturated",
)
BUILT_IN = head_names()[:4]
S_OF = {"softmax": 6, "sparsemax": 6, "sigmoid": 5, "natural": 5}


def assert_mass(logger, step, head, scores):
    mass = float(off_diagonal_mass(head.mean_fisher(scores), "fro"))
    assert logger.rows[step]["fim/off_diagonal_mass_fro"] == pytest.approx(mass, rel=1e-5)


@pytest.mark.parametrize("head", BUILT_IN)
def test_every_step_gets_the_values_of_its_own_scores(head):
    model, logger = Small(head), Memory()
    fit(model, FisherMonitor(write_every_n_steps=2), logger=logger)
    assert sorted(logger.rows) == [0, 1, 2, 3, 4]
    for step, scores in enumerate(model.seen):
        mean = model.head.fisher(scores.double()).mean((0, 1))
        row = logger.rows[step]
        expected = {
            "off_diagonal_mass": off_diagonal_mass(mean),
            "off_diagonal_mass_fro": off_diagonal_mass(mean, "fro"),
            "condition_number": condition_number(mean),
            "saturated": model.head.saturated(scores).double().mean(),
        }
        for name, value in expected.items():
            assert row[f"fim/{name}"] == pytest.approx(float(value), rel=1e-3, abs=1e-6), name
    masses = [row["fim/off_diagonal_mass"] for row in logger.rows.values()]
    if head in ("sigmoid", "natural"):
        assert masses == [0] * 5
    if head == "softmax":
        assert masses == pytest.approx([0.5] * 5)


def test_training_is_the_same_with_and_without_it():
    watched, alone = Small("softmax"), Small("softmax")
    alone.load_state_dict(watched.state_dict())
    fit(watched, FisherMonitor(num_samples=4), VAEFigures())
    fit(alone)
    assert all(torch.equal(a, b) for a, b in zip(watched.seen, alone.seen, strict=True))


def test_intervals_and_leaving_out_the_samples():
    logger = Memory()
    fit(Small(), FisherMonitor(every_n_steps=2, num_samples=0), logger=logger)
    assert sorted(logger.rows) == [0, 2, 4]
    assert "fim/off_diagonal_mass_sampled" not in logger.rows[0]
    logger = Memory()
    fit(Small(), FisherMonitor(sampled_every_n_steps=3), logger=logger)
    sampled = [s for s, row in logger.rows.items() if "fim/off_diagonal_mass_sampled" in row]
    assert sampled == [0, 3]


def test_the_latest_values_are_those_of_the_last_step_that_has_them():
    logger, monitor = Memory(), FisherMonitor(sampled_every_n_steps=3, write_every_n_steps=4)
    fit(Small(), monitor, logger=logger)
    drawn = {tag: value for tag, value in logger.rows[3].items() if tag.endswith("_sampled")}
    assert monitor.latest == logger.rows[4] | drawn and len(drawn) == 3


def test_validation_does_not_get_mixed_in():
    model, logger = Small("softmax"), Memory()
    torch.manual_seed(3)
    trainer = L.Trainer(
        max_steps=4, val_check_interval=1, logger=logger, callbacks=[FisherMonitor()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(model, loader(), loader(batches=1))
    last = off_diagonal_mass(model.head.mean_fisher(model.seen[-1]), "fro")
    assert logger.rows[3]["fim/off_diagonal_mass_fro"] == pytest.approx(float(last), rel=1e-4)


def test_scores_that_are_parameters_are_those_before_the_update():
    class Bare(Small):
        def __init__(self):
            super().__init__("softmax")
            self.scores = nn.Parameter(torch.randn(1, 2, 6))

        def training_step(self, batch, batch_idx):
            self.seen.append(self.scores.detach().clone())
            return self.head(self.scores).entropy().mean()

    model, logger = Bare(), Memory()
    fit(model, FisherMonitor(), logger=logger)
    for step, scores in enumerate(model.seen):
        assert_mass(logger, step, model.head, scores)


@pytest.mark.parametrize("most", ["", "diagnostics._MAX_SCORES", "monitor._MAX_RESULTS"])
def test_batches_of_many_sizes_and_little_room(most, monkeypatch):
    if most:
        # Two steps of 37 + 2 * 36 / 2 numbers, or six rows.
        monkeypatch.setattr(f"catnat.callbacks.fisher_{most}", 150)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x), batch_sampler=[[0, 1], [2], [3, 4, 5], [6, 7, 8], [9]])
    model, logger, monitor = Small("softmax"), Memory(), FisherMonitor(sampled_every_n_steps=2)
    fit(model, monitor, logger=logger, data=data)
    assert monitor._steps_per_block == (2 if most == "monitor._MAX_RESULTS" else 50)
    assert [len(scores) for scores in model.seen] == [2, 1, 3, 3, 1]
    for step, scores in enumerate(model.seen):
        assert_mass(logger, step, model.head, scores)
        assert ("fim/off_diagonal_mass_sampled" in logger.rows[step]) == (step % 2 == 0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_no_row_is_lost_or_written_twice(late, every, monkeypatch, tmp_path):
    """Also where results arrive later, as on a GPU, and around checkpoints."""
    monkeypatch.setattr("catnat.callbacks.fisher_monitor._copies_take_time", lambda trainer: late)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % 4 == 0:
                trainer.save_checkpoint(tmp_path / "some.ckpt")
                assert logger.observed == list(range(trainer.global_step))

    model, logger = Small("softmax"), Memory()
    monitor = FisherMonitor(write_every_n_steps=every)
    fit(model, monitor, Save(), logger=logger, data=loader(batches=11), max_steps=11)
    assert logger.observed == list(range(11))
    for step, scores in enumerate(model.seen):
        assert_mass(logger, step, model.head, scores)


def test_a_second_run_begins_anew_also_after_an_exception():
    class Fails(Small):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 3:
                raise ArithmeticError

    model, monitor, logger = Fails("softmax"), FisherMonitor(), Memory()
    with pytest.raises(ArithmeticError):
        fit(model, monitor)
    model = Small("softmax")
    fit(model, monitor, logger=logger)
    assert logger.observed == list(range(5))
    for step, scores in enumerate(model.seen):
        assert_mass(logger, step, model.head, scores)
    assert not model.head._forward_hooks


def test_heads_are_seen_where_they_are_called():
    """Each in some of the steps, and one in validation, too."""

    class Now(Small):
        def training_step(self, batch, batch_idx):
            scores = self.linear(batch[0])[:, :6]
            q = (self.head, self.second)[batch_idx % 2](scores[:, : (6, 2)[batch_idx % 2]])
            return q.entropy().mean()

    logger = Memory()
    model = Now("softmax", second="natural")
    torch.manual_seed(3)
    trainer = L.Trainer(
        max_steps=5, val_check_interval=1, logger=logger, accelerator="cpu",
        callbacks=[FisherMonitor(write_every_n_steps=1)],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, loader(), loader(batches=1))
    tags = {s: {tag.split("/")[1] for tag in row if "fim" in tag} for s, row in logger.rows.items()}
    assert {s: names for s, names in tags.items() if names} == {
        0: {"head"}, 1: {"second"}, 2: {"head"}, 3: {"second"}, 4: {"head"},
    }  # fmt: skip


def test_a_step_without_a_head_is_left_out():
    class Skips(Small):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                return super().training_step(batch, batch_idx)
            return self.linear(batch[0]).sum()

    logger = Memory()
    fit(Skips("softmax"), FisherMonitor(write_every_n_steps=2), logger=logger)
    assert sorted(logger.rows) == [1, 3]


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
            mass = off_diagonal_mass(self.head.mean_fisher(self.seen[-1]), "fro")
            self.masses.append(mass.item())

    model, logger = Learns(), Memory()
    fit(model, FisherMonitor(), logger=logger)
    masses = [logger.rows[step]["fim/off_diagonal_mass_fro"] for step in range(5)]
    assert masses == pytest.approx(model.masses, rel=1e-5)
    assert max(masses) - min(masses) > 1e-3


def test_accumulated_gradients_count_as_one_step():
    logger = Memory()
    fit(Small(), FisherMonitor(), logger=logger, max_steps=2, accumulate_grad_batches=2)
    assert sorted(logger.rows) == [0, 1]


def test_several_heads_are_told_apart():
    logger = Memory()
    fit(Small("softmax", second="natural"), FisherMonitor(), logger=logger)
    tags = {f"fim/{head}/{scalar}" for head in ("head", "second") for scalar in SCALARS}
    assert tags == set(logger.rows[0])
    assert logger.rows[4]["fim/second/off_diagonal_mass"] == 0


def test_a_model_without_a_head_is_told_so():
    class Headless(Small):
        def __init__(self):
            super().__init__()
            self.head = nn.Identity()

    with pytest.raises(ValueError, match="contains no CategoricalHead"):
        fit(Headless(), FisherMonitor())


def test_a_head_that_is_never_called_is_told_so():
    class Silent(Small):
        def training_step(self, batch, batch_idx):
            return -self.head.log_probs(self.linear(batch[0]).unflatten(-1, (2, -1))).mean()

    with pytest.warns(UserWarning, match="observes nothing: no head was called") as told:
        fit(Silent(), FisherMonitor(write_every_n_steps=1))
    assert sum("observes nothing" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("name", ["every_n_steps", "write_every_n_steps"])
def test_options_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        FisherMonitor(**{name: 0})
    with pytest.raises(ValueError, match="write_every_n_steps must be at most 200, got 201"):
        FisherMonitor(write_every_n_steps=201)


@pytest.mark.parametrize("head", BUILT_IN)
def test_the_sampled_matrix_estimates_the_exact_one(head):
    scores, model = torch.randn(50, S_OF[head]), make_head(head, 6)
    generator = torch.Generator().manual_seed(0)
    sampled = score_fisher(model, scores, "sampled", 4000, generator).mean(0).flatten()
    exact = model.fisher(scores.double()).mean(0).float().flatten()
    told = matrices_of(model, model.diagnostics(scores)[None]).flatten()
    assert torch.allclose(told, exact, rtol=1e-4)
    tolerance = 0.1 if head == "sparsemax" else 0.03  # 1 / p has heavy tails
    assert torch.allclose(exact, sampled, atol=tolerance * float(exact.max()))


def test_samples_give_a_diagonal_matrix_a_floor_that_falls_with_their_number():
    head, generator = make_head("natural", 8), torch.Generator().manual_seed(0)
    floors = []
    for num_samples in (1, 64, 4096):
        sampled = score_fisher(head, torch.zeros(100, 7), "sampled", num_samples, generator)
        floors.append(float(off_diagonal_mass(sampled.mean(0))))
    assert floors == sorted(floors, reverse=True)
    assert 0.1 < floors[0] < 0.5
    assert floors[2] < 0.02


def test_three_numbers_of_a_step_are_copied_for_its_draws_and_no_matrices(monkeypatch):
    sizes = []

    def noted(x):
        sizes.append(tuple(x.shape))
        return send(x)

    monkeypatch.setattr(fisher_diagnostics, "send", noted)
    fit(Small("natural"), FisherMonitor())
    assert sizes == [(5, S_OF["natural"] + 1), (5, 3)]


def test_a_cpu_computes_before_the_scores_leave_its_cache_and_the_values_stay(monkeypatch):
    rows, sizes = [], []
    diagnostics = fisher_diagnostics.HeadHistory._compute

    def noted(self, steps, scores, draws):
        sizes.append(len(steps))
        diagnostics(self, steps, scores, draws)

    monkeypatch.setattr(fisher_diagnostics.HeadHistory, "_compute", noted)
    for most in (2**19, 1):
        monkeypatch.setattr(fisher_diagnostics, "_MAX_IN_CACHE", most)
        torch.manual_seed(0)
        fit(Small("natural"), FisherMonitor(), logger=(logger := Memory()))
        rows.append(logger.rows)
    assert sizes == [5, 1, 1, 1, 1, 1]
    for step, row in rows[0].items():
        assert row == pytest.approx(rows[1][step], rel=1e-4, abs=1e-5)


def test_logged_to_tensorboard_with_a_picture(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(Small(), FisherMonitor(sampled_every_n_steps=1, image_every_n_steps=2), logger=logger)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for scalar in SCALARS:
        assert [e.step for e in events.Scalars(f"fim/{scalar}")] == [0, 1, 2, 3, 4]
    assert [e.step for e in events.Images("fim/mean")] == [0, 2, 4]


def test_logged_to_a_logger_without_pictures(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    fit(Small(), FisherMonitor(), logger=logger)
    assert "fim/saturated" in (tmp_path / "run" / "metrics.csv").read_text()
