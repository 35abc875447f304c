"""GraphStructureLearner: what it starts from, its gradients, schedules, metrics, resuming."""

import re
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from cases import HEADS
from cases_callbacks import Memory, quiet_trainer
from cases_replay import Watch, cuda, equal, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, DenseGraphConv, GCNConv, Sequential

from catnat.callbacks import Figures, FisherMonitor, LastCheckpoint
from catnat.datamodules import CommunityGraphDataModule, GraphDataModule
from catnat.graphs import sample_graphs
from catnat.lit_modules import GraphStructureLearner
from catnat.losses import energy_score

ESTIMATORS = ("score_function", "local_expectation")
BOTH = pytest.mark.parametrize("estimator", ESTIMATORS)


def make(head="natural", theta=(0.0, 0.1), **options):
    model = GraphStructureLearner(head, **{"num_nodes": 6, "test_passes": 2} | options)
    if theta != (0.0, 0.1):
        model.edge_scores.data = model.initial_scores(*theta)
    return model


def fit(model, steps=10, callbacks=(), ckpt_path=None, logger=False, **options):
    data = CommunityGraphDataModule(communities=1, num_pairs=200, batch_size=32)
    saving = any(isinstance(callback, Checkpoint) for callback in callbacks)
    options = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0} | options
    trainer = quiet_trainer(
        callbacks=list(callbacks), logger=logger, enable_checkpointing=saving, **options
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, data


def batch(n=6):
    return torch.randn(16, n, 4), torch.randn(16, n, 2)


# -- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_theta_starts_in_the_range_asked_for(head):
    theta = make(head, num_nodes=24).theta
    assert theta.shape == (24, 24) and not theta.requires_grad
    assert 0 <= theta.min() < 0.01 and 0.09 < theta.max() <= 0.1 + 1e-6
    assert theta.mean() == pytest.approx(0.05, abs=0.004)


def test_learning_rates_follow_head_and_estimator():
    def rates(*args, **options):
        model = make(*args, **options)
        return model.learning_rate, model.psi_learning_rate

    assert rates("natural") == (0.005, 0.005)
    assert rates("natural", estimator="local_expectation") == (0.05, 0.05)
    assert rates("sigmoid", learning_rate=0.3) == (0.3, 0.3)
    assert rates("softmax", psi_learning_rate=0.1) == (0.0225, 0.1)


def test_names_of_estimators_take_hyphens():
    for name in ("local_expectation", "local-expectation"):
        model = GraphStructureLearner(estimator=name)
        assert model.estimator == model.hparams.estimator == "local_expectation"


def test_wrong_options_are_named():
    for options, reason in (
        ({"estimator": "reinforce"}, "choose from score_function, local_expectation"),
        ({"num_samples": 2}, "num_samples must be at least 3, got 2"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"psi_warmup_steps": -1}, "psi_warmup_steps must be at least 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(**options)


@pytest.mark.parametrize(
    "x, y", [((8, 6, 3), (8, 6, 2)), ((8, 5, 4), (8, 5, 2)), ((8, 6, 4), (8, 6, 1))]
)
def test_pairs_of_another_size_are_named(x, y):
    learner = make(num_nodes=6, in_features=4, out_features=2)
    batch = torch.zeros(x), torch.zeros(y)
    with pytest.raises(ValueError, match="do not fit num_nodes 6, in_features 4 and out_features"):
        learner.step_loss(batch)


# -- the loss ------------------------------------------------------------------------------------


@BOTH
def test_the_value_of_the_loss_is_the_clean_score(estimator):
    model, (x, y) = make(estimator=estimator), batch()
    torch.manual_seed(5)
    loss = model.step_loss((x, y))
    torch.manual_seed(5)
    outputs = model.predictor(x, sample_graphs(model.theta, 32))
    wanted = energy_score(outputs.flatten(2), y.flatten(1)).mean()
    assert torch.equal(loss, wanted)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any()


@pytest.mark.parametrize("head", ["natural", "sparsemax", "sigmoid"])
def test_edges_that_are_never_sampled(head):
    """The score function says nothing of them; the local expectation does."""
    for estimator in ESTIMATORS:
        model = make(head, (1e-7, 2e-7), estimator=estimator)
        assert not model.head.saturated(model.edge_scores).any()
        model.step_loss(batch()).backward()
        gradient = model.edge_scores.grad
        assert (gradient == 0).all() if estimator == "score_function" else (gradient != 0).all()


def test_an_edge_that_should_be_there_is_revived():
    """All θ near 0 and psi known: true edges grow and only they."""
    _, data = fit(make(), steps=1)
    model = make(
        theta=(1e-6, 1e-6),
        estimator="local_expectation",
        learning_rate=0.05,
        psi_learning_rate=1e-9,
    )
    model.predictor.load_state_dict({"weight": data.psi})
    fit(model, steps=150)
    true = data.edge_probs > 0
    assert model.theta[true].min() > 0.5
    assert model.theta[~true].max() < 0.2


# -- predictors ----------------------------------------------------------------------------------


def test_a_convolution_of_torch_geometric_learns():
    from torch_geometric.nn import DenseSAGEConv, GATConv

    for conv in (GATConv(4, 2), DenseSAGEConv(4, 2)):
        model = make(predictor=conv)
        model.step_loss(batch()).backward()
        assert model.edge_scores.grad.any()
        assert all(p.grad is not None for p in conv.parameters())
        with pytest.raises(ValueError, match=f"linear in the edges.*{type(conv).__name__}"):
            make(predictor=conv, estimator="local_expectation")


class TwoLayers(nn.Module):
    """A network as torch-geometric's tutorials write it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(4, 5), GCNConv(5, 2)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Weighted(TwoLayers):
    def forward(self, x, edge_index, edge_weight):
        assert edge_weight.shape == edge_index[0].shape and (edge_weight == 1).all()
        return self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


class OwnSums(nn.Module):
    """Without torch-geometric."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, edge_index):
        messages = self.linear(x)[edge_index[0]]
        return x.new_zeros(len(x), 2).index_add(0, edge_index[1], messages)


class DenseLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = DenseGraphConv(4, 5), DenseGraphConv(5, 2)

    def forward(self, x, adj):
        return self.second(self.first(x, adj).relu(), adj)


NETWORKS = {
    "two layers": TwoLayers,
    "weights": Weighted,
    "Sequential": lambda: Sequential(
        "x, edge_index",
        [(GCNConv(4, 5), "x, edge_index -> x"), nn.ReLU(), (GCNConv(5, 2), "x, edge_index -> x")],
    ),
    "GCN": lambda: GCN(4, 5, num_layers=2, out_channels=2),
    "GCN with a norm": lambda: GCN(4, 5, num_layers=2, out_channels=2, norm="GraphNorm"),
    "own": OwnSums,
    "dense": DenseLayers,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_of_torch_geometric_is_a_predictor(name):
    """Each graph and each input give what the network gives when it is called with them alone."""
    network = NETWORKS[name]()
    model = make(predictor=network)
    x, y = batch()
    graphs = sample_graphs(torch.full((6, 6), 0.4), 3)
    outputs = model.predictor(x[:2], graphs)
    for m, graph in enumerate(graphs):
        for row in range(2):
            if name == "dense":
                alone = network(x[row], graph.T)[0]
            else:
                edges = graph.nonzero().t()
                weights = (torch.ones(edges.shape[1]),) * (name == "weights")
                alone = network(x[row], edges, *weights)
            torch.testing.assert_close(outputs[m, row], alone, atol=1e-5, rtol=1e-5)
    model.step_loss((x, y)).backward()
    assert model.edge_scores.grad.any()
    assert all(p.grad is not None for p in network.parameters())


def test_predictors_that_do_not_fit_are_named():
    class Pooled(nn.Module):
        def forward(self, x, edge_index):
            return x.mean(0, keepdim=True)

    class Attributes(nn.Module):
        def forward(self, x, edge_index, edge_attr):
            return x

    with pytest.raises(ValueError, match="Pooled must return one row for each of the 3072 nodes"):
        make(predictor=Pooled()).step_loss(batch())
    with pytest.raises(ValueError, match="Attributes requires 'edge_attr'"):
        make(predictor=Attributes())
    with pytest.raises(ValueError, match=r"returns \(32, 16, 6, 3\).* be \(32, 16, 6, 2\)"):
        make(predictor=GCNConv(4, 3)).step_loss(batch())


def test_a_predictor_of_ones_own():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x, graphs):
            return torch.einsum("mji,bjd->mbid", graphs, x[..., :2] * self.scale)

    model = make(predictor=Sums())
    model.step_loss(batch()).backward()
    assert model.predictor.scale.grad.any() and model.edge_scores.grad.any()
    assert model.why_host_needed().startswith("the predictor may wait for the device")
    model.predictor.capturable = True
    assert model.why_host_needed() is None


def test_subclasses_may_override_scores_and_loss():
    class Symmetric(GraphStructureLearner):
        def scores(self, batch):
            return self.edge_scores + self.edge_scores.transpose(0, 1)

        def loss(self, batch, q):
            return super().loss(batch, q) + 0.1 * q.probs[..., 1].mean()

    model = Symmetric(num_nodes=6, psi_warmup_steps=2)
    model.edge_scores.data = model.initial_scores(0.5, 0.6)
    before = model.theta
    fit(model, steps=2)
    assert torch.equal(model.theta, before)
    fit(model, steps=6)
    assert torch.allclose(model.theta, model.theta.T) and not torch.equal(model.theta, before)


# -- torch-geometric's Data ------------------------------------------------------------------------


def observations(count=64, n=6):
    """Data of a chain: each node's y is the x of the node before it."""
    torch.manual_seed(0)
    xs = torch.randn(count, n, 4)
    return [Data(x=x, y=x.roll(1, 0)[:, :2]) for x in xs]


def test_a_loader_of_data_is_the_same_as_pairs():
    graphs = observations(8)
    x, y = (torch.stack([getattr(graph, name) for graph in graphs]) for name in "xy")
    losses = []
    for batch_of in ((x, y), Batch.from_data_list(graphs)):
        torch.manual_seed(1)
        losses.append(make().step_loss(batch_of))
    assert torch.equal(*losses)
    torch.manual_seed(1)
    model = make()
    trainer = quiet_trainer(max_steps=2, max_epochs=-1)
    loader = DataLoader(graphs, batch_size=4)
    trainer.fit(model, loader, loader)
    trainer.test(model, loader, verbose=False)
    assert trainer.callback_metrics["test/energy_score"] > 0


def test_data_that_do_not_fit_are_named():
    model = make()
    five = [*observations(2), *observations(1, n=5)]
    with pytest.raises(ValueError, match="num_nodes 6 nodes, got one with 5"):
        model.step_loss(Batch.from_data_list(five))
    with pytest.raises(ValueError, match="got DataBatch without y"):
        model.step_loss(Batch.from_data_list([Data(x=torch.zeros(6, 4))]))
    with pytest.raises(ValueError, match=r"y must have a row for each of 1 x 6 nodes, .*\(1, 2\)"):
        model.step_loss(Data(x=torch.zeros(6, 4), y=torch.zeros(1, 2)))
    with pytest.raises(ValueError, match="got dict"):
        model.step_loss({"x": torch.zeros(1, 6, 4)})


def test_a_list_of_data_is_learned_and_comes_out_as_data(tmp_path):
    graphs = observations(400)
    torch.save(graphs, tmp_path / "graphs.pt")
    data = GraphDataModule(str(tmp_path / "graphs.pt"), batch_size=32)
    data.setup()
    sizes = [len(data.parts[part][0]) for part in ("train", "val", "test")]
    assert sizes == [320, 40, 40]
    everything = torch.cat([data.parts[part][0] for part in data.parts])
    assert len(everything.flatten(1).unique(dim=0)) == 400
    model = make("sigmoid", estimator="local_expectation", learning_rate=0.2)
    quiet_trainer(max_steps=150, max_epochs=-1).fit(model, datamodule=data)
    learned = model.graph()
    assert learned.num_nodes == 6 and (learned.edge_weight > 0.5).all()
    chain = [[j, (j + 1) % 6] for j in range(6)]
    assert sorted(learned.edge_index.t().tolist()) == sorted(chain)
    sampled = model.sample_graphs(50)
    shares = sum(len(graph.edge_weight) for graph in sampled) / 50
    assert len(sampled) == 50 and shares == pytest.approx(model.theta.sum().item(), abs=1)
    assert model.graph(0.99).edge_index.shape[1] <= 6


def test_the_parts_of_a_list_of_data():
    train, val = observations(20), observations(7)
    data = GraphDataModule(train, val=val, seed=3, batch_size=4)
    data.setup()
    assert [len(data.parts[part][0]) for part in ("train", "val", "test")] == [18, 7, 2]
    assert torch.equal(data.parts["val"][0][0], val[0].x)
    again = GraphDataModule(train, val=val, seed=4, batch_size=4)
    again.setup()
    assert not torch.equal(data.parts["test"][0], again.parts["test"][0])
    for wrong, reason in (
        ([], r"train must be a list of Data with at least one graph, got \[\]"),
        (train[0], "train must be a list of Data"),
        ([Data(x=torch.zeros(6, 4))], r"train\[0\]: a batch must be .* without y"),
        ([*train, *observations(1, n=5)], r"train\[20\]: x must have a row for each"),
        ("missing.pt", "train 'missing.pt' cannot be read: No such file"),
        (__file__, "is not a list of Data"),
    ):
        with pytest.raises(ValueError, match=reason):
            GraphDataModule(wrong)
    with pytest.raises(ValueError, match=r"val\[0\]: x has the shape \(6, 3\), not \(6, 4\)"):
        GraphDataModule(train, val=[Data(x=torch.zeros(6, 3), y=torch.zeros(6, 2))])
    with pytest.raises(ValueError, match="at least 10 graphs to split off val"):
        GraphDataModule(train[:9]).setup()


# -- dead edges ------------------------------------------------------------------------------------


def dead(head="natural", where=slice(None), **options):
    model = make(head, (0.3, 0.4), **options)
    with torch.no_grad():
        dead_scores = model.head.inverse(torch.tensor([1.0, 0.0]))
        model.edge_scores[where] = dead_scores - 1e-3 * (model.head.num_scores == 1)
    return model


@pytest.mark.parametrize(
    ("make_model", "limit", "warned"),
    [
        (lambda: dead(), 0, "true edges .*: 24;.*tail=0.005"),
        (lambda: dead(), 1.0, "true edges .*: 24;"),
        (lambda: dead(estimator="local_expectation"), 0, "true edges .*: 24;"),
        (lambda: dead("sigmoid", slice(0, 0)), 1.0, None),
    ],
)
def test_a_run_says_once_that_edges_died(make_model, limit, warned, recwarn):
    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            module.edge_scores.requires_grad_(False)

    fit(make_model(), steps=4, callbacks=[Keep()], limit_val_batches=limit, val_check_interval=1)
    lines = [str(w.message) for w in recwarn if "dead edges" in str(w.message)]
    assert len(lines) == (warned is not None)
    assert warned is None or re.search(warned, lines[0])


def test_dead_edges_where_the_truth_is_not_known(recwarn):
    loader = DataLoader(observations(8), batch_size=4)
    for estimator, count in (("local_expectation", 0), ("score_function", 1)):
        model = dead(where=0, estimator=estimator)
        quiet_trainer(max_steps=1, max_epochs=-1).fit(model, loader)
        lines = [str(w.message) for w in recwarn if "6 of 36;" in str(w.message)]
        assert len(lines) == count


# -- the run -------------------------------------------------------------------------------------


def linear(steps):
    """A schedule that ends at zero."""
    return partial(torch.optim.lr_scheduler.PolynomialLR, total_iters=steps)


class Rates(pl.Callback):
    """Remembers the learning rates of each step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append(tuple(group["lr"] for group in optimizer.param_groups))


@pytest.mark.parametrize("length", [{"steps": 10}, {"steps": -1, "max_epochs": 2}])
def test_the_linear_schedule_ends_with_the_run(length):
    rates = Rates()
    model = make(lr_scheduler=linear(10), learning_rate=0.1, psi_learning_rate=0.5)
    trainer, _ = fit(model, callbacks=[rates], **length)
    assert trainer.global_step == 10
    wanted = [(0.1 * (1 - k / 10), 0.5 * (1 - k / 10)) for k in range(10)]
    torch.testing.assert_close(torch.tensor(rates.seen), torch.tensor(wanted))


@BOTH
def test_it_learns(estimator):
    model = make(estimator=estimator, learning_rate=0.05)
    trainer, data = fit(model, steps=1)
    (before,) = trainer.test(model, datamodule=data, verbose=False)
    trainer, data = fit(model, steps=150)
    (after,) = trainer.test(model, datamodule=data, verbose=False)
    assert after["test/gap_2x"] < before["test/gap_2x"] / 4
    assert after["test/theta_mae"] < before["test/theta_mae"] / 2


def test_what_is_logged():
    model, curve = make("sparsemax"), Memory()
    with torch.no_grad():
        model.edge_scores[0, 0] = torch.tensor([3.0, -3.0])
    monitor = FisherMonitor()
    trainer, data = fit(
        model,
        steps=2,
        callbacks=[monitor, Figures()],
        logger=curve,
        val_check_interval=2,
        limit_val_batches=1.0,
        check_val_every_n_epoch=None,
    )
    assert list(curve.series("train/loss")) == [0, 1]
    assert set(monitor.latest) >= {"fim/off_diagonal_mass", "fim/saturated"}
    common = {
        "energy_score",
        "energy_score_2x",
        "pp_mae",
        "pp_mse",
        "saturated",
        "theta_mae",
        "dead_edges",
        "calibration",
    }
    logged = {name for row in curve.rows.values() for name in row}
    assert logged >= {f"val/{name}" for name in (*common, "loss")}
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert tested.keys() == {f"test/{name}" for name in (*common, "gap_2x")}
    assert tested["test/energy_score_2x"] == pytest.approx(2 * tested["test/energy_score"])
    gap = tested["test/energy_score_2x"] - data.optimal["energy_score_2x"]
    assert tested["test/gap_2x"] == pytest.approx(gap, abs=1e-5)
    assert tested["test/dead_edges"] == 1 and tested["test/saturated"] >= 1 / 36
    wanted = (model.theta - data.edge_probs).abs().mean()
    assert tested["test/theta_mae"] == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_a_resumed_run_ends_at_the_same_parameters(tmp_path, step):
    def new(seed):
        pl.seed_everything(seed, verbose=False)
        return make(estimator="local_expectation", lr_scheduler=linear(10), psi_warmup_steps=3)

    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    random_states = LastCheckpoint(tmp_path)
    straight = new(1)
    fit(straight, callbacks=[save, random_states], limit_val_batches=1.0)
    resumed = new(99)
    path = tmp_path / f"step={step}.ckpt"
    trainer, _ = fit(resumed, callbacks=[random_states], ckpt_path=path)
    assert trainer.global_step == 10 and equal(straight, resumed)
    loaded = GraphStructureLearner.load_from_checkpoint(tmp_path / "step=10.ckpt")
    assert loaded.hparams == straight.hparams and equal(loaded, straight)


@pytest.mark.parametrize(
    ("length", "estimator", "accelerator"),
    [
        ({"steps": 23}, "local_expectation", "cpu"),
        ({"steps": -1, "max_epochs": 5}, "local_expectation", "cpu"),
        *(pytest.param({"steps": 60}, estimator, "gpu", marks=cuda) for estimator in ESTIMATORS),
    ],
)
def test_replayed_steps_are_the_same_steps(length, estimator, accelerator, request):
    """Several steps a batch, learning rates as tensors: on the CPU without the graphs."""
    if accelerator == "cpu":
        request.getfixturevalue("without_cuda")
    options = {"lr_scheduler": linear(60), "psi_warmup_steps": 3, "estimator": estimator}
    models = []
    for capture in (False, True):
        pl.seed_everything(1, verbose=False)
        models.append(make(capture=capture, **options))
        watch = Watch()
        fit(models[-1], callbacks=[watch], accelerator=accelerator, **length)
        assert watch.replayed is capture
    one, many = models
    near = 1e-5 if accelerator == "cpu" else 1e-3  # a rate as a float32 tensor rounds
    torch.testing.assert_close([*one.parameters()], [*many.parameters()], atol=near, rtol=1e-5)
