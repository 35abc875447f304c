"""The VAEs: losses and gradients against oracles, the recipe step by step, test metrics."""

import math
import warnings
from collections import UserDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import slow
from cases_callbacks import quiet_trainer
from cases_replay import equal
from lightning.pytorch import Callback

from catnat import head_names, make_head
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE
from catnat.lit_modules.vae import ESTIMATORS

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = [DiscreteVAE, MLPDiscreteVAE]


@pytest.fixture(scope="module")
def x():
    """A few images that compress well: four shapes, (16, 1, 28, 28)."""
    shapes = torch.zeros(4, 1, 28, 28)
    for i, shape in enumerate(shapes):
        shape[:, 7 * i : 7 * i + 7] = 0.9
    return shapes.repeat(4, 1, 1, 1)


def trainer(steps=3, **options):
    return quiet_trainer(max_steps=steps, max_epochs=-1, **options)


class Batches:
    """A loader; Lightning would take a list for several."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def fit(model, x, steps=3, **options):
    run = trainer(steps, **options)
    run.fit(model, Batches(x))
    return run


def evaluated(model, x, batch_size=6):
    run = trainer()
    run.test(model, Batches(*x.split(batch_size)), verbose=False)
    return {name: value.item() for name, value in run.callback_metrics.items()}


# -- what is learned -----------------------------------------------------------------------


def losses_of(model, x, steps):
    """The losses of all steps of a run."""
    losses = []

    class Record(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].item())

    run = fit(model, x, steps, callbacks=[Record()])
    assert run.global_step == len(losses) == steps
    return losses


@pytest.mark.parametrize(
    ("kind", "head"),
    [*((DiscreteVAE, head) for head in head_names()), (MLPDiscreteVAE, "natural")],
)
def test_every_head_learns(kind, head, x):
    model = kind(head, num_latents=4, num_categories=5, learning_rate=3e-3)
    losses = losses_of(model, x, steps=40)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("estimator", [estimator.name for estimator in ESTIMATORS])
def test_every_estimator_trains_the_encoder_and_gumbel_is_the_default(estimator, x):
    def trained(**options):
        torch.manual_seed(0)
        model = DiscreteVAE("natural", num_latents=4, learning_rate=3e-3, **options)
        before = model.encoder[0].weight.detach().clone()
        losses = losses_of(model, x, steps=30)
        assert not torch.equal(model.encoder[0].weight, before)
        return losses

    losses = trained(estimator=estimator)
    assert losses[-1] < 0.8 * losses[0]
    assert estimator != "gumbel" or losses == trained()


def test_the_temperature_starts_and_ends_where_it_is_told():
    options = {"temperature": 0.5, "min_temperature": 0.25, "temperature_rate": 1e-4}
    model = DiscreteVAE("sigmoid", 2, 3, estimator="gumbel-rao", **options)
    schedule = [model.annealed_temperature(step) for step in (0, 999, 1000, 10**6)]
    assert schedule == [0.5, 0.5, pytest.approx(0.5 * math.exp(-0.1)), 0.25]
    half, full = (
        DiscreteVAE("sigmoid", 2, 3, **x) for x in (options | {"temperature_rate": 3e-5}, {})
    )
    for step in (0, 5000, 24_000, 10**5):
        assert half.annealed_temperature(step) == pytest.approx(full.annealed_temperature(step) / 2)


@pytest.mark.parametrize("option", ["temperature", "temperature_rate", "min_temperature"])
@pytest.mark.parametrize("estimator", ["straight-through", "zgr", "score_function"])
def test_an_estimator_without_a_temperature_refuses_one(estimator, option):
    with pytest.raises(ValueError, match=rf"the estimator '\S+' has no {option}, got 0\.5"):
        DiscreteVAE(estimator=estimator, **{option: 0.5})


def test_num_draws_belongs_to_gumbel_rao():
    with pytest.raises(ValueError, match="the estimator 'gumbel' has no num_draws, got 8"):
        DiscreteVAE(num_draws=8)


def test_aliases_of_estimators_are_the_same_model(x):
    losses = []
    for estimator in ("reinmax", "zgr"):
        torch.manual_seed(0)
        model = DiscreteVAE("sigmoid", 2, 3, estimator=estimator)
        losses.append(losses_of(model, x, steps=2))
    assert losses[0] == losses[1]
    assert DiscreteVAE(estimator="score_function").estimator == "score-function"


def test_the_temperature_is_logged_where_the_estimator_has_one(x):
    for estimator in ESTIMATORS:
        model = DiscreteVAE("sigmoid", 2, 3, estimator=estimator.name)
        logged = fit(model, x, steps=1).callback_metrics
        assert ("train/temperature" in logged) == estimator.has_temperature


def test_a_checkpoint_keeps_the_estimator_and_its_defaults(x, tmp_path):
    run = fit(DiscreteVAE("sigmoid", 2, 3, estimator="reinmax"), x, steps=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert DiscreteVAE.load_from_checkpoint(tmp_path / "a.ckpt").estimator == "reinmax"


@pytest.mark.parametrize("kind", [DiscreteVAE, MLPDiscreteVAE, GraphStructureLearner])
def test_a_checkpoint_takes_options_of_a_head_in_any_mapping(kind, tmp_path):
    """Hydra's DictConfig is one."""
    model = kind(head="natural", head_options=UserDict(tail=0.05, center=0.5))
    trainer = quiet_trainer(max_steps=1)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "model.ckpt")
    assert loaded.head.tail == 0.05
    assert loaded.hparams["head_options"] == {"tail": 0.05, "center": 0.5}


def test_the_help_lists_every_estimator():
    assert all(f'"{estimator.name}"' in DiscreteVAE.__doc__ for estimator in ESTIMATORS)


@pytest.mark.parametrize("kind", MODELS)
def test_the_kl_weight_changes_linearly_and_evaluation_has_the_final_one(kind, x):
    model = kind("sigmoid", kl_weight=0.5, kl_start=2.0, kl_steps=4).double()
    weights = [model.annealed_kl_weight(step) for step in (0, 1, 4, 9)]
    assert weights == [2.0, 1.625, 0.5, 0.5]
    model.prepare_step(1)
    for is_training, weight in ((True, 1.625), (False, 0.5)):
        model.train(is_training)
        q = model(x)
        losses = []
        for factor in (1.0, 0.0):  # with and without the divergence
            torch.manual_seed(0)
            kl = model.kl(q)
            model.kl = lambda q, kl=kl, factor=factor: factor * kl
            losses.append(model.loss(x, q))
            del model.kl
        torch.testing.assert_close(losses[0] - losses[1], weight * model.kl(q).mean())


def test_the_kl_weight_is_logged_if_it_has_a_schedule(x):
    model = DiscreteVAE("sigmoid", 2, 3, kl_start=0.0, kl_steps=4)
    assert fit(model, x, steps=3).callback_metrics["train/kl_weight"] == 0.5
    constant = fit(DiscreteVAE("sigmoid", 2, 3, kl_weight=4.0), x, steps=1)
    assert "train/kl_weight" not in constant.callback_metrics


def test_a_kl_weight_of_one_changes_nothing(x):
    torch.manual_seed(0)
    model = DiscreteVAE("sigmoid", 2, 3)
    torch.manual_seed(1)
    loss = model.step_loss(x)
    torch.manual_seed(1)
    q = model(x)
    reconstruction = model.reconstruction(x, q.rsample(**model.sample_options()))
    assert torch.equal(loss, (reconstruction + model.kl(q)).mean())


@pytest.mark.parametrize("head", head_names())
def test_the_loss_is_reconstruction_plus_kl(head, x):
    model = DiscreteVAE(head, num_latents=3, num_categories=6).eval()
    q = model(x)
    torch.manual_seed(5)
    loss = model.loss(x, q)
    torch.manual_seed(5)
    z = q.rsample(estimator="gumbel")
    assert set(z.unique().tolist()) == {0.0, 1.0}
    pixels = model.decode(z).sigmoid()
    bce = F.binary_cross_entropy(pixels, x, reduction="sum") / len(x)
    p = q.probs.double()
    kl = (torch.special.xlogy(p, p) + p * math.log(6)).sum() / len(x)
    torch.testing.assert_close(loss, (bce + kl).float())


def test_training_is_zero_grad_backward_clip_step(x):
    """Lightning's loop against one written out, bit for bit."""
    torch.manual_seed(0)
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model = DiscreteVAE("sigmoid", lr_scheduler=halved, temperature_rate=0.1)
    model.temperature_steps = 2
    torch.manual_seed(0)
    twin = DiscreteVAE("sigmoid")
    torch.manual_seed(1)
    run = fit(model, x, steps=5)
    assert run.callback_metrics["train/temperature"] == pytest.approx(math.exp(-0.4))
    assert run.progress_bar_metrics.keys() == {"train/loss"}

    torch.manual_seed(1)
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3, fused=True)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 ** (step // 2)
        temperature = max(math.exp(-0.1 * (step // 2 * 2)), 0.5)
        optimizer.zero_grad()
        twin.temperature.set(temperature)
        loss = twin.step_loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        assert norm > 1, "or clipping would go untested"
        optimizer.step()
    assert equal(model, twin)


@pytest.mark.parametrize(("clip", "trainers"), [(0.25, None), (0.0, None), (1.0, 0.5)])
def test_the_gradient_is_clipped(clip, trainers, x):
    norms = []

    class Norm(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            grads = [p.grad.flatten() for p in module.parameters()]
            norms.append(torch.cat(grads).norm().item())

    fit(
        DiscreteVAE("softmax", gradient_clip=clip),
        x,
        steps=1,
        callbacks=[Norm()],
        gradient_clip_val=trainers,
    )
    limit = trainers or clip
    assert norms[0] == pytest.approx(limit, rel=1e-3) if limit else norms[0] > 2


BASELINES = {"constant": {"baseline_value": 540.0}, "others": {"baseline": "leave-one-out"}}


@pytest.mark.parametrize(
    ("head", "baseline"),
    [
        *(("natural", baseline) for baseline in ("constant", "others")),
        *(slow(head, "others") for head in head_names() if head != "natural"),
    ],
)
def test_the_score_function_gradient_is_unbiased(head, baseline, x):
    """Against the gradient of the ELBO summed over all K^N latents."""
    K, x = 3, x[:2]
    options = {"num_categories": K, "num_samples": 20_000} | BASELINES[baseline]
    model = MLPDiscreteVAE(head, num_latents=2, **options)
    latents = torch.cartesian_prod(torch.arange(K), torch.arange(K))  # (9, 2)
    z = F.one_hot(latents, K).float()[:, None].expand(-1, len(x), -1, -1)  # (9, B, 2, 3)
    parameters = list(model.encoder[-1].parameters())

    q = model(x)
    probs = (z * q.probs).sum(-1).prod(-1)  # (9, B)
    exact = ((probs * model.reconstruction(x, z)).sum(0) + model.kl(q)).mean()
    expected = torch.autograd.grad(exact, parameters)
    estimate = model.loss(x, model(x))
    gradients = torch.autograd.grad(estimate, parameters)
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-3)
    torch.testing.assert_close(gradients, expected, atol=0.05, rtol=0.1)


# -- one step is device work alone ----------------------------------------------------------


@pytest.mark.parametrize("head", ["softmax", "sigmoid", "natural"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_reads_nothing_back_from_the_device(kind, head):
    """On the meta device there is nothing to read: .item() or a branch on a value would raise."""
    model = kind(head).to("meta")
    loss = model.step_loss(torch.zeros(4, 1, 28, 28, device="meta"))
    loss.backward()
    assert loss.shape == ()


# -- evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_test_metrics_agree_with_enumeration(kind, x):
    torch.manual_seed(3)
    K, model = 4, kind("natural", num_latents=1, num_categories=4, nll_samples=512)
    with torch.no_grad():
        model.encoder[-1].weight.mul_(20)
        model.decoder[0].weight.mul_(20)
    metrics = evaluated(model, x)
    model.eval()
    with torch.no_grad():
        q = model(x)
        z = torch.eye(K)[:, None, None].expand(-1, len(x), 1, K)
        reconstruction = model.reconstruction(x, z)  # (K, B)
        nll = -(-reconstruction).logsumexp(0).mean() + math.log(K)
        elbo = -(q.probs[:, 0].t() * reconstruction).sum(0).mean() - model.kl(q).mean()
    assert reconstruction.std(0).mean() > 0.3, "or anything would pass"
    assert metrics["test/nll"] == pytest.approx(nll.item(), abs=0.1)
    assert metrics["test/elbo"] == pytest.approx(elbo.item(), abs=0.1)
    assert metrics["test/kl"] == pytest.approx(model.kl(q).mean().item(), rel=1e-4)
    assert metrics["test/nll"] < -metrics["test/elbo"]


def test_collapse_and_saturation_are_told(x):
    model = DiscreteVAE("natural", nll_samples=4)
    weight = model.encoder[-1].weight.detach().clone()
    with torch.no_grad():
        model.encoder[-1].weight.zero_()
        model.encoder[-1].bias.zero_()
    dead = evaluated(model, x)
    assert (dead["test/collapsed"], dead["test/saturated"]) == (1, 0)
    assert dead["test/kl"] == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        model.encoder[-1].bias[: 7 * 5].fill_(10)  # 5 of 10 latents
    constant = evaluated(model, x)  # far from the prior, but the same for every image
    assert (constant["test/collapsed"], constant["test/saturated"]) == (1, 0.5)
    assert constant["test/kl"] > 5
    with torch.no_grad():
        model.encoder[-1].weight.copy_(100 * weight)
    alive = evaluated(model, x)
    assert alive["test/collapsed"] == 0


@pytest.mark.parametrize("head", ["softmax", "sparsemax", "natural"])
def test_information_and_perplexity_are_those_of_all_images(x, head):
    model = DiscreteVAE(head, num_latents=3, num_categories=5, nll_samples=1)
    with torch.no_grad():
        model.encoder[-1].weight *= 1000
    metrics = evaluated(model, x, batch_size=7)
    model.eval()
    with torch.no_grad():
        p = model(x).probs.double()  # (B, N, K)
    entropies = torch.special.entr(p.mean(0)).sum(-1)
    information = (entropies.sum() - torch.special.entr(p).sum((1, 2)).mean()).item()
    assert information > 0.1
    assert metrics["test/information"] == pytest.approx(information, rel=1e-4)
    perplexity = entropies.exp().mean().item()
    assert 1 < perplexity < 5
    assert metrics["test/perplexity"] == pytest.approx(perplexity, rel=1e-4)


def test_validation_weighs_images_alike_and_draws_the_same_each_time(x):
    model, run = DiscreteVAE("softmax"), trainer()

    def validated(*batches):
        run.validate(model, Batches(*batches), verbose=False)
        return dict(run.callback_metrics)

    validated(x[:3])
    before = torch.get_rng_state()
    first = validated(x[:12], x[12:])
    assert torch.equal(torch.get_rng_state(), before)
    assert first == validated(x[:12], x[12:])
    assert first.keys() == {"val/loss", "val/elbo", "val/kl", "val/perplexity"}
    model.eval()
    assert first["val/kl"] == pytest.approx(model.kl(model(x)).mean().item(), rel=1e-5)
    assert first["val/loss"] == pytest.approx(-first["val/elbo"].item(), rel=0.05)


@pytest.mark.parametrize("kind", MODELS)
def test_pictures_change_nothing(kind, x):
    model = kind()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for picture in (model.reconstruct(x), model.sample_prior(3)):
        assert picture.shape[1:] == (1, 28, 28) and not picture.requires_grad
        assert 0 <= picture.min() <= picture.max() <= 1
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not torch.equal(model.sample_prior(3), model.sample_prior(3))


# -- seams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_subclasses_override_scores_and_loss(kind, x):
    called = set()

    class Mine(kind):
        def __init__(self, width=16, **options):
            super().__init__(**options)
            self.body = torch.nn.Linear(784, width)
            self.tail = torch.nn.Linear(width, self.num_latents * self.head.num_scores)

        def scores(self, batch):
            called.add("scores")
            hidden = self.body(batch.flatten(1)).relu()
            return self.tail(hidden).reshape(len(batch), self.num_latents, -1)

        def loss(self, batch, q):
            called.add("loss")
            return super().loss(batch, q) + 0 * sum(p.sum() for p in self.encoder.parameters())

    model = Mine(width=8, head="natural", num_latents=3)
    before = model.tail.weight.detach().clone()
    fit(model, x)
    assert called == {"scores", "loss"}
    assert not torch.equal(model.tail.weight, before)
    assert (model.hparams["width"], model.hparams["num_latents"]) == (8, 3)


@pytest.mark.parametrize("kind", MODELS)
def test_images_of_float64_with_labels_are_taken(kind, x):
    model = kind(num_latents=2, num_categories=3)
    torch.manual_seed(0)
    loss = model.step_loss([x.double(), torch.arange(len(x))])
    torch.manual_seed(0)
    assert loss.dtype == torch.float32 and torch.equal(loss, model.step_loss(x))


def test_the_range_of_every_batch_is_checked_on_the_cpu(x):
    run = trainer(steps=-1)
    with pytest.raises(ValueError, match=r"images must lie in \[0, 1\], got values from 0 to"):
        run.fit(DiscreteVAE(num_latents=2, num_categories=2), Batches(x, x, 3 * x))
    assert run.global_step == 2, "the first two batches were right"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DiscreteVAE, {"estimator": "gumble"}, "'gumble'; .* choose from gumbel, gumbel-rao"),
        (DiscreteVAE, {"learning_rate": math.nan}, "learning_rate must be positive, got nan"),
        (DiscreteVAE, {"kl_weight": -1.0}, "kl_weight must be at least 0, got -1"),
        (DiscreteVAE, {"kl_start": 0.0}, "belong together, got kl_start=0.0, kl_steps=None"),
        (MLPDiscreteVAE, {"kl_steps": 9}, "belong together, got kl_start=None, kl_steps=9"),
        (DiscreteVAE, {"kl_start": 0, "kl_steps": 0}, "kl_steps must be positive, got 0"),
        (DiscreteVAE, {"gradient_clip": -1.0}, "gradient_clip must be at least 0, got -1"),
        (DiscreteVAE, {"head": "softmax", "head_options": {"amplitude": 1.0}}, "'amplitude'"),
        (MLPDiscreteVAE, {"baseline": "mean"}, "'mean'; choose from constant, leave-one-out"),
        (MLPDiscreteVAE, {"baseline": "leave-one-out"}, "num_samples >= 2, got 1"),
    ],
)
def test_wrong_options_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", [*MODELS, GraphStructureLearner])
def test_a_module_takes_the_name_of_a_head(kind):
    with pytest.raises(ValueError, match="head must be a name, so that it can be saved"):
        kind(head=make_head("natural", 8))


# -- what users override and are told --------------------------------------------------------------


def test_pictures_of_another_decoder_are_its_means(x):
    class Gaussian(DiscreteVAE):
        def reconstruction(self, batch, z):
            return 0.5 * (self.decode(z) - self.images(batch)).square().flatten(-3).sum(-1)

        def mean_image(self, logits):
            return logits

    model = Gaussian(num_latents=2, num_categories=3)
    torch.nn.init.constant_(list(model.decoder.parameters())[-1], 5.0)
    assert model.sample_prior(4).mean() > 2 and model.reconstruct(x).mean() > 2
    assert DiscreteVAE(num_latents=2, num_categories=3).sample_prior(4).max() < 1


@pytest.mark.parametrize("use", ["all", "even", "one"])
def test_a_code_that_is_hardly_used_is_told_once(use, x):
    class Coded(DiscreteVAE):
        """Latents that depend on the image, or not at all."""

        def scores(self, batch):
            sizes = self.images(batch).flatten(1)[:, : 2 * 4].unflatten(1, (2, 4))
            one_category = torch.tensor([40.0, 0, 0, 0])
            scores = {"all": 40 * (sizes - 0.5), "even": 0.02 * sizes, "one": one_category}[use]
            return scores + 0 * super().scores(batch)

    model = Coded("softmax", num_latents=2, num_categories=4, nll_samples=2, learning_rate=1e-9)
    images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    batches = [images[:32], images[32:]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(steps=2, limit_val_batches=2)
        run.fit(model, Batches(*batches), Batches(*batches))
        run.test(model, Batches(*batches), verbose=False)
    lines = [str(each.message) for each in caught if "hardly used" in str(each.message)]
    assert len(lines) == (use != "all")
    if use != "all":
        assert "of 2.77 nats" in lines[0]
        assert ("perplexity is 1 of 4 categories" in lines[0]) == (use == "one")
