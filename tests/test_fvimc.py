"""FVIMC: one law for bound, draws and density; transformations that are found again; exact posteriors; errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoMultivariateNormal
from scipy.stats import kstest, multivariate_normal
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.variational.bijections import Fitted, Linear, Tanh
from numpyro_fspace.variational.fvimc import FVIMC, MStage, TStage, VStage
from numpyro_fspace.variational.transformation import compose, fit_transformation, log_density

X = np.array([[-1.0], [-0.4], [0.1], [0.5], [0.9]], np.float32)
Y = np.array([0.3, -0.7, 0.2, 1.1, 0.6], np.float32)
POINTS = np.array([[-1.2], [-0.3], [0.4], [1.1], [1.5]], np.float32)
SIGMA, NUGGET = 0.5, 0.1
PRIOR = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=NUGGET)
QUICK = {"num_updates": 20, "num_warmup": 10, "num_samples": 10, "num_transform_steps": 10}
SMALL = {"bijections": (Linear((10,)), Tanh((10,)))}


def features(x):
    return jnp.stack([jnp.ones_like(x[:, 0]), x[:, 0], jnp.sin(2.0 * x[:, 0])], 1)


def linear(x, y=None):
    """f = Φ w with hardly any prior on w, under a GP prior at ``POINTS``."""
    w = numpyro.sample("w", dist.Normal(0.0, 30.0).expand([3]).to_event(1))
    f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)


def curved(x, y=None):
    """f is no linear function of w: its linearized law is another than its own."""
    w = numpyro.sample("w", dist.Normal(0.5, 1.0))
    f = fs.functional_prior("f", lambda x: 3.0 * jnp.sin(w * x[:, 0]), PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)


def batched(x, y=None):
    """Minibatches, random points, two outputs and a noise that is sampled too."""
    sigma = numpyro.sample("sigma", dist.LogNormal(-0.5, 0.2))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=NUGGET, num_outputs=2)
    f = fs.functional_prior("f", lambda x: features(x) @ w, prior, fs.measurement.uniform(-1.5, 1.5, 7))
    with numpyro.plate("data", len(x), subsample_size=2):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f(xb).sum(-1), sigma), obs=yb)


def strong(draws_at, slope=3.0):
    """Two bijections, by hand: a squashing tanh, then a linear one with a bias."""
    tanh, line = Tanh((10,)), Linear((10,))
    y = jax.random.normal(jax.random.key(0), (50, len(draws_at), 1))
    first = tanh.init(jax.random.key(1), draws_at, y)
    first = first | {
        "log_slope": jnp.log(jnp.array([slope])),
        "reach": jnp.array([1.0]),
        "log_margin": jnp.array([-1.0]),
    }
    first["inner"]["layers_2"]["kernel"] = 0.3 * jax.random.normal(jax.random.key(3), (10, 1))
    second = line.init(jax.random.key(2), draws_at, y) | {"log_a": jnp.array([0.4])}
    second["bias"]["layers_2"]["bias"] = jnp.array([0.7])
    return Fitted(tanh, first), Fitted(line, second)


@functools.cache
def fitted_by_hand(model=linear):
    """A run of one stage, whose result is then given the two bijections."""
    fvimc = FVIMC(model, num_stages=1, num_updates=1000, optimizer=optax.adam(optax.cosine_decay_schedule(0.1, 1000)))
    result = fvimc.run(jax.random.key(0), X, Y, progress_bar=False)
    fvimc.result = result._replace(bijections=strong(X))
    return fvimc


def run(model=linear, *args, **settings):
    fvimc = FVIMC(model, **(QUICK | SMALL | settings))
    fvimc.run(jax.random.key(0), *(args or (X, Y)), progress_bar=False)
    return fvimc


# ---- one law ---------------------------------------------------------------------------------------------------


def density(fvimc, x):
    """A grid of values at the point x, and their density."""
    grid = np.linspace(-6.0, 6.0, 20_001, dtype=np.float32)
    return grid, np.exp(np.asarray(fvimc.log_prob(x, grid[:, None]), float))


@pytest.mark.slow
@pytest.mark.parametrize("model", [linear, curved])
def test_density_integrates_to_one(model, monkeypatch):
    fvimc = fitted_by_hand(model)
    grid, p = density(fvimc, X[3:4])
    assert np.trapezoid(p, grid) == pytest.approx(1.0, abs=0.01)
    monkeypatch.setattr(Tanh, "log_det", lambda self, params, x, f: 0.0 * f)
    grid, p = density(fvimc, X[3:4])
    assert np.trapezoid(p, grid) != pytest.approx(1.0, abs=0.1), "without the determinant"


@pytest.mark.slow
def test_density_of_two_points_integrates_to_one():
    grid = np.linspace(-2.5, 1.5, 400, dtype=np.float32)
    both = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    p = np.exp(np.asarray(fitted_by_hand().log_prob(X[1:3], both), float))
    assert p.shape == (400, 400)
    assert np.trapezoid(np.trapezoid(p, grid), grid) == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_density_of_two_outputs_integrates_to_one():
    """After V, M and V: under a bijection that was fitted to draws of both."""
    fvimc = run(batched, num_stages=3, num_points=6, bijections=(Linear((10,)),))
    f = np.asarray(fs.predict(fvimc.posterior(jax.random.key(1), 500), jax.random.key(2), X[:1])["f"])[:, 0]
    axes = [np.linspace(m - 7 * s, m + 7 * s, 300, dtype=np.float32) for m, s in zip(f.mean(0), f.std(0), strict=True)]
    both = np.stack(np.meshgrid(*axes, indexing="ij"), -1)[:, :, None]
    p = np.exp(np.asarray(fvimc.log_prob(X[:1], both), float))
    assert np.trapezoid(np.trapezoid(p, axes[1]), axes[0]) == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.01, 0.5])
def test_jitter_of_the_density_is_gamma(gamma):
    """Without bijections it is N(f; Φ m, Φ S Φᵀ + M γ c I)."""
    fvimc = run(num_stages=1, gamma=gamma)
    draws = np.asarray(
        fvimc.guide.sample_posterior(jax.random.key(0), fvimc.result.params, sample_shape=(200_000,))["w"]
    )
    phi = np.asarray(features(X))
    covariance = phi @ np.cov(draws, rowvar=False) @ phi.T
    size = max(1.0, np.trace(covariance) / len(X))
    law = multivariate_normal(phi @ draws.mean(0), covariance + len(X) * gamma * size * np.eye(len(X)))
    f = np.random.default_rng(0).normal(size=(10, len(X)))
    np.testing.assert_allclose(fvimc.log_prob(X, f), law.logpdf(f), rtol=0.02, atol=0.05)


@pytest.mark.slow
def test_the_kernel_of_the_m_stages_is_the_users():
    """One that does not move gives copies of the V-stage's draw."""
    asked = []

    def still(model):
        asked.append(fs.fSGHMC(model, step_size=1e-10, warmup=fs.Warmup(warm_start=0.0)))
        return asked[-1]

    fvimc = run(num_stages=3, kernel=still)
    assert len(asked) == 1
    samples = np.asarray(fvimc.result.stages[1].samples["w"])
    assert len(samples) == 10 and np.ptp(samples, axis=0).max() < 1e-4
    assert np.ptp(np.asarray(run(num_stages=3).result.stages[1].samples["w"]), axis=0).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("model", [linear, curved])
def test_draws_have_the_density(model):
    """Their probability integral transforms are uniform; those of draws without the tanh are not."""
    fvimc = fitted_by_hand(model)
    grid, p = density(fvimc, X[3:4])
    cdf = np.cumsum(p) / p.sum()
    posterior = fvimc.posterior(jax.random.key(1), 2000)
    f = fs.predict(posterior, jax.random.key(2), X)["f"][:, 3]
    assert kstest(np.interp(f, grid, cdf), "uniform").pvalue > 1e-5
    linear_only = compose(
        fs.variational.linearize(model, fvimc.guide.median(fvimc.result.params)), fvimc.result.bijections[1:]
    )
    f = fs.predict(posterior.samples, jax.random.key(2), X, model=linear_only)["f"][:, 3]
    assert kstest(np.interp(f, grid, cdf), "uniform").pvalue < 1e-10


class SquareByDraws:
    """The mean square of the function under the law that a bound works with, by draws."""

    linearized = False

    def __call__(self, law, prior, x):
        return (law.sample(x, 4000) ** 2).mean()


class Nothing(SquareByDraws):
    def __call__(self, law, prior, x):
        return 0.0


@pytest.mark.slow
def test_bound_by_draws_sees_the_law_of_the_posterior():
    """E[(F∘f_L)²] in the bound is that of the posterior's draws, and not that of F∘f."""
    fvimc = fitted_by_hand(curved)
    params, bijections = fvimc.result.params, strong(X, 0.3)
    params = params | {"auto_scale": jnp.array([1.0])}
    fvimc = FVIMC(curved, num_stages=1, divergence=SquareByDraws(), num_updates=1)
    fvimc.run(jax.random.key(0), X, Y, progress_bar=False)
    fvimc.result = fvimc.result._replace(params=params, bijections=bijections)

    def bound(divergence):
        made = FVIMC(curved, num_stages=1, divergence=divergence)
        return made.bound(bijections).loss(jax.random.key(5), params, curved, fvimc.guide, X, Y)

    seen = float(bound(SquareByDraws()) - bound(Nothing()))
    posterior = fvimc.posterior(jax.random.key(1), 4000)
    drawn = np.mean(fs.predict(posterior, jax.random.key(2), POINTS)["f"] ** 2)
    plain = compose(curved, bijections)
    other = np.mean(fs.predict(posterior.samples, jax.random.key(2), POINTS, model=plain)["f"] ** 2)
    assert seen == pytest.approx(float(drawn), abs=0.03)
    assert abs(seen - float(other)) > 0.05


@pytest.mark.slow
def test_bound_of_a_gaussian_divergence_is_exact_for_linear_bijections():
    """RegularizedKL gets GP((f(m) - b)/a, J S Jᵀ/a²); the likelihood stays in closed form."""
    fvimc, line = fitted_by_hand(curved), strong(X)[1]
    seen = {}

    def divergence(law, prior, x):
        seen.update(law=law, x=x)
        return 0.0

    bound = FVIMC(curved, divergence=divergence).bound((line,))
    losses = [bound.loss(jax.random.key(i), fvimc.result.params, curved, fvimc.guide, X, Y) for i in range(2)]
    assert losses[0] == losses[1]
    draws = fvimc.posterior(jax.random.key(0), 4000).samples
    model = compose(fs.variational.linearize(curved, fvimc.guide.median(fvimc.result.params)), (line,))
    f = fs.predict(draws, jax.random.key(0), POINTS, model=model)["f"]
    mean, root = seen["law"].mean(seen["x"]), seen["law"].root(seen["x"])
    sd = np.sqrt(np.sum(root**2, -1))[:, 0]
    np.testing.assert_allclose(f.mean(0), mean[:, 0], atol=0.1 * sd.max())
    np.testing.assert_allclose(f.std(0), sd, rtol=0.05)


@pytest.mark.slow
def test_compose_and_linearize_go_together():
    """F∘f, F∘f_L and (F∘f)_L at the same weights, against their formulas."""
    bijections, w, m = strong(X), 1.3, jnp.array(0.4)

    def forward(f):
        for fitted in bijections:
            f = fitted.forward(X, f)
        return f

    def at(model):
        return fs.predict({"w": np.array([w])}, jax.random.key(0), X, model=model)["f"][0]

    def f(w):
        return (3.0 * jnp.sin(w * X[:, 0]))[:, None]

    value, slope = jax.jvp(f, (m,), (jnp.array(w) - m,))
    both, both_slope = jax.jvp(lambda w: forward(f(w)), (m,), (jnp.array(w) - m,))
    np.testing.assert_allclose(at(compose(curved, bijections)), forward(f(w))[:, 0], rtol=1e-4)
    np.testing.assert_allclose(
        at(compose(fs.variational.linearize(curved, {"w": m}), bijections)), forward(value + slope)[:, 0], rtol=1e-4
    )
    linearized = fs.variational.linearize(compose(curved, bijections), {"w": m})
    np.testing.assert_allclose(at(linearized), (both + both_slope)[:, 0], rtol=1e-4)
    assert compose(curved, ()) is curved


# ---- T-stages --------------------------------------------------------------------------------------------------

GRID = jnp.linspace(-1.0, 1.0, 6)[:, None]


def base():
    """A Gaussian law at ``GRID``, and draws from it."""
    covariance = jnp.exp(-0.5 * ((GRID - GRID.T) / 0.5) ** 2) + 0.05 * jnp.eye(6)
    law = dist.MultivariateNormal(jnp.sin(GRID[:, 0]), covariance)
    return law, law.sample(jax.random.key(0), (400,))[..., None]


def transformation(draws, candidates, previous=(), *, law=None, **settings):
    settings = {"num_steps": 800, "learning_rate": 0.03} | settings
    law = base()[0] if law is None else law
    return fit_transformation(jax.random.key(1), candidates, law, GRID, draws, previous=previous, **settings)


@pytest.mark.parametrize("blur", some([0.0, 0.1, 1.0], 1))
def test_a_linear_transformation_is_found_again(blur):
    """With noise on both laws too, which then carry the same share of it."""
    _, f = base()
    b = jnp.cos(3.0 * GRID)
    stage = transformation((f - b) / 2.0, {"linear": Linear((20,))}, blur=blur)
    bijection, params = stage.fitted
    assert float(jnp.exp(params["log_a"][0])) == pytest.approx(2.0, rel=0.05)
    np.testing.assert_allclose(bijection._bias(params, "bias", GRID, 1), b, atol=0.2)
    assert stage.losses["linear"][0] > stage.nll["linear"] + 1.0


def test_blur_narrows_a_law_of_few_directions_to_narrow_draws():
    """Draws a third as wide, which vary in directions where Q does not: what they do there would decide the scale."""
    span = jnp.concatenate([jnp.ones_like(GRID), GRID], 1)
    law = dist.MultivariateNormal(jnp.zeros(6), span @ span.T + 1e-4 * jnp.eye(6))
    draws = 0.4 * jax.random.normal(jax.random.key(0), (400, 6, 1))

    def narrowing(blur):
        return float(
            jnp.exp(transformation(draws, {"linear": Linear((5,))}, law=law, blur=blur).fitted.params["log_a"][0])
        )

    assert narrowing(0.0) < 0.1, "the paper's: ten times as wide"
    assert 1.1 < narrowing(0.1) < narrowing(1.0) < 3.2


@pytest.mark.slow
def test_squashed_draws_choose_tanh_and_reach_the_true_density():
    law, f = base()
    true = Fitted(Tanh((10,)), strong(GRID, 1.0)[0].params)
    y = true.forward(GRID, f)
    candidates = {"linear": Linear((10,)), "tanh": Tanh((10,))}
    stage = transformation(y, candidates)
    truth = -float(log_density(law, (true,), GRID, y).mean())
    assert stage.chosen == "tanh" and set(stage.nll) == set(stage.losses) == set(candidates)
    assert stage.nll["linear"] > stage.nll["tanh"] + 1.0
    assert stage.nll["tanh"] == pytest.approx(truth, abs=0.6)


@pytest.mark.slow
def test_draws_on_top_of_an_earlier_bijection():
    """The inverse runs through a bounded one underneath."""
    law, f = base()
    inner, _ = strong(GRID, 1.0)
    y = (inner.forward(GRID, f) - 0.5) / 1.5
    stage = transformation(y, {"linear": Linear((20,))}, (inner,))
    assert np.all(np.isfinite(stage.losses["linear"]))
    assert float(jnp.exp(stage.fitted.params["log_a"][0])) == pytest.approx(1.5, rel=0.1)
    truth = -float(log_density(law, (inner,), GRID, inner.forward(GRID, f)).mean()) - 6 * np.log(1.5)
    assert stage.nll["linear"] == pytest.approx(truth, abs=0.5)


def test_draws_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="finite density"):
        transformation(jnp.full((3, 6, 1), jnp.nan), {"linear": Linear((5,))})


# ---- whole runs ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_stage_is_plain_variational_inference():
    fvimc = run(num_stages=1, num_updates=100)
    guide = fs.variational.guides.mean_field(linear)
    svi = SVI(linear, guide, optax.adam(5e-3), fs.FunctionalELBO())
    plain = svi.run(jax.random.split(jax.random.key(0), 1)[0], 100, X, Y, progress_bar=False)
    for name, value in plain.params.items():
        np.testing.assert_allclose(fvimc.result.params[name], value, rtol=1e-5)
    np.testing.assert_allclose(fvimc.result.stages[0].losses, plain.losses, rtol=1e-4)
    assert fvimc.result.bijections == () and len(fvimc.result.stages) == 1


@functools.cache
def three_stages():
    """V, M, T and V on linear features with a full-rank guide."""
    fvimc = FVIMC(
        linear,
        num_stages=3,
        guide=AutoMultivariateNormal,
        optimizer=optax.adam(optax.cosine_decay_schedule(0.03, 2000)),
        num_updates=2000,
        num_warmup=50,
        num_samples=200,
        num_transform_steps=300,
        bijections=(Linear((20,)), Tanh((20,))),
    )
    fvimc.run(jax.random.key(0), X, Y, progress_bar=False)
    return fvimc


def exact_posterior():
    """Mean of the weights, and mean and standard deviation of f at the data."""
    phi, phi_m = np.asarray(features(X)), np.asarray(features(POINTS))
    covariance = np.exp(-0.5 * ((POINTS - POINTS.T) / 0.7) ** 2) + NUGGET * np.eye(len(POINTS))
    precision = phi.T @ phi / SIGMA**2 + phi_m.T @ np.linalg.solve(covariance, phi_m)
    weights = np.linalg.solve(precision, phi.T @ Y / SIGMA**2)
    return weights, phi @ weights, np.sqrt(np.diag(phi @ np.linalg.inv(precision) @ phi.T))


@pytest.mark.slow
def test_three_stages_stay_at_the_exact_posterior():
    weights, mean, sd = exact_posterior()
    f = fs.predict(three_stages().posterior(jax.random.key(1), 4000), jax.random.key(2), X)["f"]
    assert np.all(np.abs(f.mean(0) - mean) < 0.3 * sd)
    np.testing.assert_allclose(f.std(0), sd, rtol=0.15)
    sampled = three_stages().result.stages[1]
    assert np.all(np.abs(sampled.samples["w"].mean(0) - weights) < 0.3)
    draws = np.asarray(features(sampled.x) @ sampled.samples["w"].T).T
    np.testing.assert_allclose(sampled.functions[..., 0], draws, atol=1e-4)


@pytest.mark.slow
def test_the_guide_goes_on_where_it_was():
    first, *_, last = three_stages().result.stages
    assert np.mean(last.losses[:5]) < first.losses[0] - 0.9 * (first.losses[0] - first.losses[-1])


@pytest.mark.slow
def test_five_stages_with_progress(capsys):
    """Traces are kept, and the second bijection goes on top of a bounded one."""
    fvimc = FVIMC(linear, num_stages=5, num_points=3, **(QUICK | {"bijections": (Tanh((10,)),)}))
    stages = fvimc.run(jax.random.key(0), X, Y).stages
    shown = "".join(capsys.readouterr())
    assert all(text in shown for text in ("V-stage 1 of 5", "M-stage 4 of 5", "T-stage 2 of 2", "V-stage 5 of 5"))
    assert [type(s) for s in stages] == [VStage, MStage, TStage, VStage, MStage, TStage, VStage]
    assert stages[0].losses.shape == (20,) and stages[2].losses["tanh"].shape == (10,)
    assert stages[4].functions.shape == (10, 3, 1) and stages[4].potential_energy.shape == (10,)
    assert [stages[2].chosen, stages[5].chosen] == ["tanh", "tanh"] and len(fvimc.result.bijections) == 2
    second, w = stages[4], stages[4].samples["w"]
    f = jnp.einsum("mp,sp->sm", features(second.x), w)[..., None]
    np.testing.assert_allclose(second.functions, fvimc.result.bijections[0].forward(second.x, f), atol=1e-4)
    arrays = [leaf for leaf in jax.tree.leaves(stages) if isinstance(leaf, np.ndarray | jax.Array)]
    assert all(np.all(np.isfinite(leaf)) for leaf in arrays)
    assert np.all(np.isfinite(fvimc.log_prob(X[:2], stages[4].functions[:, :2, 0])))


@pytest.mark.slow
def test_minibatches_random_points_two_outputs_and_other_latents(capsys):
    fvimc = run(batched, num_stages=3, num_points=6, bijections=(Linear((10,)),))
    assert not "".join(capsys.readouterr())
    sampled = fvimc.result.stages[1]
    assert sampled.functions.shape == (10, 6, 2)
    assert sampled.samples["sigma"].shape == (10,) and np.all(sampled.samples["sigma"] > 0)
    predicted = fs.predict(fvimc.posterior(jax.random.key(1), 8), jax.random.key(2), X)
    assert predicted["f"].shape == (8, 5, 2) and predicted["y"].shape == (8, 5)
    assert np.all(np.isfinite(fvimc.log_prob(X[:2], predicted["f"][:, :2])))


@pytest.mark.slow
def test_transformations_see_the_points_of_several_steps():
    """Of as many as it takes where a step draws fewer, none of them twice; of fixed points all."""

    def model(points):
        def model(x, y=None):
            w = numpyro.sample("w", dist.Normal(0.0, 30.0).expand([3]).to_event(1))
            f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, points)
            numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)

        return model

    few = fs.measurement.union(fs.measurement.subset(POINTS, 2), fs.measurement.uniform(-1.5, 1.5, 3))
    seen = run(model(few), num_stages=3, num_points=20).result.stages[1]
    assert 4 * 3 < len(seen.x) <= 20 and seen.functions.shape == (10, len(seen.x), 1)
    assert len(np.unique(np.asarray(seen.x))) == len(seen.x)
    w = seen.samples["w"]
    np.testing.assert_allclose(seen.functions[..., 0], np.asarray(features(seen.x) @ w.T).T, atol=1e-4)
    seen = run(model(fs.measurement.fixed(POINTS)), num_stages=3, num_points=20).result.stages[1]
    np.testing.assert_array_equal(np.sort(np.asarray(seen.x).ravel()), np.sort(POINTS.ravel()))


@pytest.mark.slow
def test_divergences_by_draws_run():
    fvimc = run(batched, num_stages=1, num_updates=5, divergence=fs.variational.SpectralSteinKL(num_draws=10))
    assert np.all(np.isfinite(fvimc.result.stages[0].losses))


def test_arviz_reads_it():
    data = fs.to_arviz(fitted_by_hand().posterior(jax.random.key(0), 10))
    assert data["posterior"]["f"].shape == (1, 10, 5) and "y" in data["log_likelihood"].data_vars


# ---- errors ----------------------------------------------------------------------------------------------------


def without_prior(x, y=None):
    w = numpyro.sample("w", dist.Normal())
    numpyro.sample("y", dist.Normal(w * x[:, 0], 1.0).to_event(1), obs=y)


def discrete(x, y=None):
    w = numpyro.sample("w", dist.Normal())
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    f = fs.functional_prior("f", lambda x: w * x[:, 0] + k, PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x), 1.0).to_event(1), obs=y)


def with_param(x, y=None):
    scale = numpyro.param("scale", 1.0)
    w = numpyro.sample("w", dist.Normal())
    f = fs.functional_prior("f", lambda x: scale * w * x[:, 0], PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x), 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_stages": 4}, ValueError, "num_stages=4 must be odd"),
        ({"num_stages": 0}, ValueError, "num_stages=0"),
        ({"num_samples": 0}, ValueError, "num_samples"),
        ({"bijections": ("spline",)}, ValueError, "'linear', 'tanh', 'sigmoid'"),
        ({"divergence": fs.variational.RegularizedKL}, TypeError, "divergence must be an object"),
        ({"guide": "mean field"}, TypeError, "guide must be a function of a model"),
        ({"gamma": -1.0}, ValueError, "gamma"),
        ({"blur": -0.1}, ValueError, "blur=-0.1 must not be negative"),
        ({"blur": np.inf}, ValueError, "blur=inf must not be negative, and finite"),
        ({"blur": "strong"}, TypeError, "blur must be a positive number, got 'strong'"),
        ({"model": "net"}, TypeError, "model must be a NumPyro model"),
        ({"guide": fs.variational.guides.mean_field(linear)}, TypeError, "guide must be a function of a model"),
    ],
)
def test_bad_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        FVIMC(**({"model": linear} | settings))


@pytest.mark.parametrize(
    ("model", "guide", "error", "message"),
    [
        (without_prior, fs.variational.guides.mean_field, ValueError, r"functional_prior.*declares 0"),
        (discrete, fs.variational.guides.mean_field, ValueError, "'k' is discrete"),
        (with_param, fs.variational.guides.mean_field, ValueError, "param site 'scale'"),
        pytest.param(
            linear,
            AutoIAFNormal,
            TypeError,
            r"AutoIAFNormal.*posterior is normal.*guides.mean_field",
            marks=pytest.mark.slow,
        ),
        pytest.param(linear, AutoDelta, TypeError, r"AutoDelta.*guides.mean_field", marks=pytest.mark.slow),
    ],
)
def test_bad_models_and_guides(model, guide, error, message, monkeypatch):
    monkeypatch.setattr(SVI, "run", None)  # the error is raised before anything is fitted
    with pytest.raises(error, match=message):
        FVIMC(model, guide=guide).run(jax.random.key(0), X, Y, progress_bar=False)


@pytest.mark.slow
def test_nothing_before_run_and_values_of_another_shape():
    with pytest.raises(RuntimeError, match="call run first"):
        FVIMC(linear).posterior(jax.random.key(0))
    with pytest.raises(ValueError, match=r"log_prob: f has shape \(3, 2\)"):
        fitted_by_hand().log_prob(X[:1], np.zeros((3, 2)))
