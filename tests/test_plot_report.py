"""The figure beside the report: what its panels show."""

from __future__ import annotations

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot as plt
from models import X, Y, linear
from numpyro.infer import NUTS

import numpyro_fspace as fs

KEY = jax.random.key(0)
PANELS = {"trace": 0, "ranks": 1, "convergence": 2, "calibration": 3, "energy": 4, "temperature": 5}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def run(kernel, *data, num_samples=120, num_chains=3, fields=(), **settings):
    mcmc = fs.MCMC(
        kernel, num_warmup=100, num_samples=num_samples, num_chains=num_chains, progress_bar=False, **settings
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mcmc.run(KEY, *data, extra_fields=fields)
    return mcmc


def sghmc(model):
    return fs.SGHMC(model, num_steps=5, metropolis=False)


@pytest.fixture(scope="module")
def many():
    """Rows enough for a calibration curve."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 1)).astype(np.float32)
    return x, (0.5 * x[:, 0] + 0.5 * rng.normal(size=200)).astype(np.float32)


@pytest.fixture(scope="module")
def plain(many):
    return run(sghmc(linear()), *many, chain_method="vectorized")


def panel(figure, name):
    return figure.axes[PANELS[name]]


def test_traces_and_ranks_are_of_the_worst_quantity(plain, many):
    found = fs.report(plain)
    figure = fs.plot_report(plain, found=found)
    draws = np.asarray(plain.get_samples(group_by_chain=True)["w"])
    worst = int(np.argmax(found.sites.rhat))
    assert panel(figure, "trace").get_title() == f"trace of w[{worst}]"
    for line, chain in zip(panel(figure, "trace").lines, draws[..., worst], strict=True):
        np.testing.assert_allclose(line.get_ydata(), chain, rtol=1e-6)
    counts = [patch.get_data().values for patch in panel(figure, "ranks").patches if hasattr(patch, "get_data")]
    assert [int(c.sum()) for c in counts] == [120] * 3 and np.all(np.sum(counts, 0) == 18)
    ess, rhat = panel(figure, "convergence").lines[0].get_data()
    np.testing.assert_allclose(rhat, found.sites.rhat)
    np.testing.assert_allclose(ess, np.minimum(found.sites.ess_bulk, found.sites.ess_tail))


@pytest.mark.slow
def test_the_trace_of_a_chain_apart_has_ranks_of_its_own(many):
    kernel = fs.SGLD(linear(), step_size=1e-9, num_steps=1, warmup=fs.Warmup(warm_start=0.0))
    mcmc = fs.MCMC(kernel, num_warmup=1, num_samples=100, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(KEY, *many, init_params={"w": jnp.array([[0.0, 0.0], [1.0, 1.0]])})
    figure = fs.plot_report(mcmc)
    low, high = (p.get_data().values for p in panel(figure, "ranks").patches if hasattr(p, "get_data"))
    assert np.all(low[:10] == 10) and np.all(low[10:] == 0) and np.all(high == low[::-1])
    assert "doubt" in figure.get_suptitle() and "no doubts" not in figure.get_suptitle()


def test_calibration_is_that_of_new_draws_at_the_data(plain, many):
    """Held-out targets that are wider than the model says are seen to be so."""
    levels, inside = panel(fs.plot_report(plain), "calibration").lines[0].get_data()
    assert np.max(np.abs(inside - levels)) < 0.12  # three standard errors of 200 points
    x, y = many
    wide = panel(fs.plot_report(plain, x[:50], 4.0 * y[:50]), "calibration").lines[0].get_ydata()
    assert np.all(wide < inside - 0.02)


@pytest.mark.slow
def test_counts_that_the_model_describes_are_calibrated():
    """Intervals of small counts contain their ends, so that they cover far more than their level."""

    def model(y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 600):
            numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    y = np.random.default_rng(0).poisson(0.8, size=600)
    levels, inside = panel(fs.plot_report(run(sghmc(model), y, num_chains=1)), "calibration").lines[0].get_data()
    assert np.max(np.abs(inside - levels)) < 0.07  # more than three standard errors


@pytest.mark.slow
def test_energies_are_log_likelihoods_or_those_that_the_run_kept(plain, many):
    x, y = many
    lines = panel(fs.plot_report(plain), "energy").lines
    w = np.asarray(plain.get_samples(group_by_chain=True)["w"])[:, ::2]  # sixty of 120 draws
    exact = dist.Normal(w[..., :1] + w[..., 1:] * x[:, 0], 0.5).log_prob(y).sum(-1)
    np.testing.assert_allclose([line.get_ydata() for line in lines], exact, rtol=1e-4)
    np.testing.assert_array_equal(lines[0].get_xdata(), np.arange(0, 120, 2))
    kept = run(sghmc(linear()), X, Y, num_chains=1, fields=("potential_energy",))
    axes = panel(fs.plot_report(kept), "energy")
    np.testing.assert_allclose(axes.lines[0].get_ydata(), kept.get_extra_fields()["potential_energy"])
    assert axes.get_title() == "energy: potential energy"


def test_temperatures_are_those_of_the_report(plain):
    found = fs.report(plain)
    axes = panel(fs.plot_report(plain, found=found), "temperature")
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], found.temperature, rtol=1e-6)
    points = [c.lines[0].get_ydata()[0] for c in axes.containers if hasattr(c, "has_yerr")]
    np.testing.assert_allclose(points, [found.configurational.mean, found.configurational.leading], rtol=1e-6)


@pytest.mark.slow
def test_nuts_has_all_panels_but_the_temperature():
    figure = fs.plot_report(run(NUTS(linear(), max_tree_depth=3), X, Y, num_samples=40, chain_method="vectorized"))
    assert [len(panel(figure, name).lines) > 0 for name in PANELS] == [True, False, True, True, True, False]
    assert "no temperature" in panel(figure, "temperature").texts[0].get_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_classes_show_accuracy_against_confidence(kind):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 1)).astype(np.float32)
    labels = (rng.uniform(size=300) < 1 / (1 + np.exp(-2.0 * x[:, 0]))).astype(int)

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
        logits = slope * x[:, 0]
        both = jnp.stack([jnp.zeros_like(logits), logits], -1)
        numpyro.sample(
            "y", dist.Categorical(logits=both) if kind == "categorical" else dist.Bernoulli(logits=logits), obs=y
        )

    axes = panel(fs.plot_report(run(sghmc(model), x, labels, chain_method="vectorized")), "calibration")
    confidence, accuracy = axes.lines[0].get_data()
    assert axes.get_ylabel() == "accuracy" and np.nanmin(confidence) >= 0.5
    many = confidence > 0.5  # no tie; the bins hold 30 points or more
    assert many.sum() == 5 and np.max(np.abs(confidence - accuracy)[many]) < 0.25


@pytest.mark.slow
def test_counts_are_numbers():
    def model(y=None):
        rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(rate), obs=y)

    mcmc = run(sghmc(model), np.random.default_rng(0).poisson(3.0, 40), num_chains=1)
    assert panel(fs.plot_report(mcmc), "calibration").get_ylabel() == "targets inside"


@pytest.mark.slow
def test_targets_that_are_masked_do_not_count(many):
    x, y = many
    far = np.where(np.arange(200) < 100, y, 50.0)

    def model(x, y=None, known=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.handlers.mask(mask=known):
            numpyro.sample("y", dist.Normal(w * x[:, 0], 0.5), obs=y)

    mcmc = run(sghmc(model), x, far, jnp.arange(200) < 100, num_chains=1)
    assert panel(fs.plot_report(mcmc), "calibration").lines[0].get_ydata()[-1] > 0.85


def test_nothing_is_shown_and_mistakes_are_named(plain, monkeypatch):
    with pytest.raises(TypeError, match="plot_report draws runs of an MCMC object, got dict"):
        fs.plot_report({})
    with pytest.raises(TypeError, match=r"found must be the result of fs\.report, got dict"):
        fs.plot_report(plain, found={})
    with pytest.raises(ValueError, match="no draws yet"):
        fs.plot_report(fs.MCMC(sghmc(linear()), progress_bar=False))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro_fspace\[plots\]"'):
        fs.plot_report(plain)
