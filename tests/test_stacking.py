"""Weights of chains by their leave-one-out predictions."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import norm

import numpyro_fspace as fs
from numpyro_fspace.posterior import stacking

RNG = np.random.default_rng(0)


def model(y=None, known=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.handlers.mask(mask=True if known is None else known):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def chains(*means, y, num_draws=300, **kwargs):
    """A posterior of chains around these means, as wide as that of the mean of so many targets."""
    sd = 1 / np.sqrt(len(y))
    draws = np.concatenate([mean + sd * RNG.normal(size=num_draws) for mean in means])
    return fs.Posterior(model, {"mean": draws}, num_chains=len(means), args=(y,), **kwargs)


def test_a_chain_that_predicts_badly_gets_no_weight():
    y = RNG.normal(size=60)
    found = fs.diagnostics.stack_chains(chains(y.mean(), 4.0, y.mean(), y=y))
    assert found.weights[1] < 1e-3 and found.weights.sum() == pytest.approx(1.0)
    assert found.elpd_stacked > found.elpd_equal + 0.3 * len(y)
    kept = np.asarray(found.posterior.samples["mean"])
    assert len(kept) == 300 and found.posterior.num_chains == 1 and np.all(kept < 2)
    assert len(np.unique(kept)) == 300  # none twice
    f = fs.predict(found.posterior, jax.random.key(0))
    assert f["y"].shape == (300,)


def test_weights_are_the_best_of_all():
    """Of three chains, against a search over the simplex by scipy."""
    parts = (-2.5, 60), (0.0, 20), (2.5, 40)
    y = np.concatenate([mean + RNG.normal(size=size) for mean, size in parts])
    found = fs.diagnostics.stack_chains(chains(-2.5, 0.0, 2.5, y=y))
    # A chain hardly feels a single target: its leave-one-out density is that of its mean.
    points = np.stack([norm.logpdf(y, mean, np.sqrt(1 + 1 / len(y))) for mean, _ in parts])

    def loss(free):
        logits = np.append(free, 0.0)
        return -np.mean(logsumexp(points + (logits - logsumexp(logits))[:, None], axis=0))

    best = np.append(minimize(loss, np.zeros(2)).x, 0.0)
    np.testing.assert_allclose(found.weights, np.exp(best - logsumexp(best)), atol=0.03)
    np.testing.assert_allclose(found.elpd, points.sum(1), rtol=0.03)
    assert np.all(found.unreliable == 0)
    share = np.histogram(found.posterior.samples["mean"], [-4, -1.2, 1.2, 4])[0] / 300
    np.testing.assert_allclose(share, found.weights, atol=0.01)


def test_leave_one_out_densities_are_those_of_a_refit():
    """Exact for a normal mean; an outlier's own pull on the mean is taken out."""
    y = np.append(RNG.normal(size=19), 4.0)
    precision = len(y) + 0.01
    draws = y.sum() / precision + RNG.normal(size=4000) / np.sqrt(precision)
    by_draw = norm.logpdf(y, draws[:, None], 1.0)
    left = np.array([(y.sum() - one) / (precision - 1) for one in y])
    exact = norm.logpdf(y, left, np.sqrt(1 + 1 / (precision - 1)))
    found, shapes = stacking._loo(by_draw)
    np.testing.assert_allclose(found, exact, atol=0.03)
    assert abs(by_draw.mean(0)[-1] - exact[-1]) > 0.2  # what it would be without leaving it out
    assert np.all(shapes < 0.7)


def test_targets_that_are_masked_do_not_count():
    y = np.append(RNG.normal(size=30), 100.0)
    known = np.arange(31) < 30
    posterior = chains(0.0, 4.0, y=y)
    found = fs.diagnostics.stack_chains(posterior, y, known)
    assert found.weights[0] > 0.999 and found.elpd[0] > -60
    same = fs.diagnostics.stack_chains(posterior, y[:30])
    np.testing.assert_allclose(found.elpd, same.elpd, rtol=1e-5)


def test_targets_of_a_scale_of_zero_do_not_count():
    y = np.append(RNG.normal(size=30), 100.0)
    posterior = chains(0.0, 4.0, y=y)

    def scaled(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        with numpyro.handlers.scale(scale=jnp.where(jnp.arange(31) < 30, 1.0, 0.0)):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    found = fs.diagnostics.stack_chains(fs.Posterior(scaled, posterior.samples, num_chains=2, args=(y,)))
    np.testing.assert_allclose(found.elpd, fs.diagnostics.stack_chains(posterior, y[:30]).elpd, rtol=1e-5)


def test_the_scale_of_arviz_does_not_matter():
    import arviz as az

    y = RNG.normal(size=30)
    posterior, name = chains(0.0, 4.0, y=y), "stats.ic_scale"
    right = fs.diagnostics.stack_chains(posterior)
    with az.rc_context({name: "deviance"} if name in az.rcParams else {}):  # ArviZ 1.x has no such setting
        found = fs.diagnostics.stack_chains(posterior)
    np.testing.assert_array_equal(found.weights, right.weights)
    np.testing.assert_array_equal(found.elpd, right.elpd)


def test_a_run_is_stacked_and_its_report_says_so():
    def two_modes(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(jnp.abs(w) * x + 0.3 * w, 0.5), obs=y)

    x = np.linspace(-1, 1, 20)
    y = 2.0 * x + 0.6
    kernel = fs.SGHMC(two_modes, step_size=0.02, num_steps=5, warmup=fs.Warmup(warm_start=0.0))
    mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=100, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), x, y, init_params={"w": jnp.array([2.0, -2.0])})
    advice = fs.report(mcmc).advice
    assert any("R-hat of w" in line and "fs.diagnostics.stack_chains(mcmc)" in line for line in advice)
    found = fs.diagnostics.stack_chains(mcmc)
    assert found.weights[0] > 0.99
    table = str(found)
    assert "The gain is small" not in table and found.elpd_stacked - found.elpd_equal > 4 * found.gain_error
    assert "chain" in table and f"{found.elpd_stacked:.1f} with these" in table and "weights=[" in repr(found)


def test_chains_that_have_met_gain_little():
    y = RNG.normal(size=40)
    found = fs.diagnostics.stack_chains(chains(*[y.mean()] * 4, y=y))
    assert 0 <= found.elpd_stacked - found.elpd_equal < 2 and "The gain is small: equal weights" in str(found)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda y: chains(0.0, y=y), "weights several chains and got one"),
        (lambda y: chains(0.0, 1.0, y=y, num_draws=5), "10 draws of each chain or more, got 5"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        fs.diagnostics.stack_chains(make(np.zeros(5)))


def test_a_model_without_targets_is_named():
    posterior = fs.Posterior(model, {"mean": RNG.normal(size=80)}, num_chains=2)
    with pytest.raises(ValueError, match="no observed site"):
        fs.diagnostics.stack_chains(posterior)


def test_without_arviz_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro_fspace\[arviz\]"'):
        fs.diagnostics.stack_chains(chains(0.0, 1.0, y=np.zeros(5)))


def test_held_out_targets_were_not_fitted():
    """Their densities are means over draws; importance weights would take out a likelihood that the draws lack."""
    y, y_held = RNG.normal(size=60), RNG.normal(size=40)
    draws = np.concatenate([0.0 + RNG.normal(size=300), 0.8 + 0.05 * RNG.normal(size=300)])
    posterior = fs.Posterior(model, {"mean": draws}, num_chains=2, args=(y,))
    found = fs.diagnostics.stack_chains(posterior, y_held)
    densities = norm.logpdf(y_held, draws[:, None], 1.0).reshape(2, 300, -1)
    exact = logsumexp(densities, axis=1).sum(-1) - len(y_held) * np.log(300)
    np.testing.assert_allclose(found.elpd, exact, rtol=1e-4)
    assert found.unreliable.tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(
        fs.diagnostics.stack_chains(posterior, y=y).elpd, fs.diagnostics.stack_chains(posterior).elpd
    )


def test_random_keys_among_the_arguments_are_no_data():
    y = RNG.normal(size=30)

    def noisy(y, keys):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    args = y, jax.random.split(jax.random.key(0), 3)
    found = fs.diagnostics.stack_chains(fs.Posterior(noisy, chains(0.0, 4.0, y=y).samples, num_chains=2, args=args))
    assert found.weights[0] > 0.99
