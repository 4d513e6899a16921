"""fHMC and fMALA have the exact law: linear features under a GP prior at fixed points, Gaussian noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp

import numpyro_fspace as fs

X = np.linspace(-1.0, 1.0, 10, dtype=np.float32)[:, None]
Y = np.sin(3.0 * X[:, 0])
POINTS = np.linspace(-1.5, 1.5, 7, dtype=np.float32)[:, None]
NOISE, NUGGET = 0.3, 0.05
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.8), nugget=NUGGET)


def features(x):
    x = x[:, 0]
    return jnp.stack([jnp.ones_like(x), x, jnp.sin(2.0 * x), jnp.cos(3.0 * x)], 1)


def model(x, y=None, *, functional=True, points=None, batch_size=None):
    net = ((lambda key, x: jnp.zeros(4)), (lambda w, x: features(x) @ w))
    f = fs.random_module("net", net, input_shape=1, prior=dist.Normal(0.0, 1.0))
    if functional:
        f = fs.functional_prior("f", f, GP, fs.measurement.fixed(POINTS) if points is None else points)
    with numpyro.plate("data", len(x), subsample_size=batch_size):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f(xb), NOISE), obs=yb)


def exact(functional=True):
    """Mean and standard deviation of f at X under the Gaussian posterior of the weights."""
    phi, phi_m = np.asarray(features(X), np.float64), np.asarray(features(POINTS), np.float64)
    precision = np.eye(4) + phi.T @ phi / NOISE**2
    if functional:
        covariance = GP.moments(POINTS)[1] + NUGGET * np.eye(len(POINTS))
        precision = precision + phi_m.T @ np.linalg.solve(covariance, phi_m)
    covariance = np.linalg.inv(precision)
    mean = phi @ covariance @ phi.T @ Y / NOISE**2
    return mean, np.sqrt(np.diag(phi @ covariance @ phi.T))


def error_of_moments(kernel, num_samples):
    """Largest errors of mean and sd of f, in Monte Carlo standard errors, against the exact law."""
    mcmc = fs.MCMC(
        kernel, num_warmup=500, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(0), X, Y)
    f = fs.predict(mcmc, jax.random.key(1), X)["net"].reshape(4, num_samples, len(X))
    found = fs.diagnostics.function_diagnostics(f)
    squares = fs.diagnostics.function_diagnostics((f - f.mean((0, 1))) ** 2)
    assert found.max_rhat < 1.05

    def errors(functional):
        mean, sd = exact(functional)
        return (
            np.abs(found.mean - mean).max() / found.mcse_mean.max(),
            np.abs(found.sd - sd).max() / (squares.mcse_mean / (2.0 * sd)).max(),
        )

    return errors(functional=True), errors(functional=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "num_samples"), [(fs.fHMC, 1000), (fs.fMALA, 4000)])
def test_the_law_is_exact(kernel, num_samples):
    ours, without_prior = error_of_moments(kernel(model), num_samples)
    assert max(ours) < 5
    assert max(without_prior) > 10  # the comparison would see the functional prior left out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The draws are doubtful:RuntimeWarning")  # one step each makes short moves
def test_lengths_of_trajectories():
    """fHMC's are uniform up to twice ``num_steps`` (their mean within 4.5 standard errors); fMALA takes one step."""
    numbers = {}
    for kernel in (fs.fHMC(model, num_steps=20), fs.fMALA(model)):
        mcmc = fs.MCMC(kernel, num_warmup=300, num_samples=300, progress_bar=False)
        mcmc.run(jax.random.key(0), X, Y, extra_fields=("num_steps",))
        numbers[type(kernel)] = mcmc.get_extra_fields()
    steps = np.asarray(numbers[fs.fHMC]["num_steps"])
    assert steps.min() >= 1 and 36 <= steps.max() <= 41 and len(set(steps.tolist())) > 25
    assert abs(steps.mean() - 20.0) < 4.5 * 40.0 / np.sqrt(12 * 300)
    assert np.all(np.asarray(numbers[fs.fMALA]["num_steps"]) == 1)
    assert fs.fMALA(model)._target_accept_prob == 0.574  # what NumPyro's warm-up makes of it is above, in a short run


@pytest.mark.parametrize("kernel", [fs.fHMC, fs.fMALA])
def test_chains_start_from_the_network(kernel):
    assert kernel(model)._init_strategy is fs.model.init_to_network


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functional": False}, "declares fs.functional_prior"),
        ({"batch_size": 5}, "subsample_size=5"),
        ({"points": fs.measurement.uniform(-1.0, 1.0, 5)}, "Freeze"),
    ],
)
@pytest.mark.parametrize("kernel", [fs.fHMC, fs.fMALA])
def test_refuses_models_without_a_fixed_density(kernel, settings, message):
    mcmc = fs.MCMC(kernel(model), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), X, Y, **settings)


def test_refuses_arguments_it_cannot_honor():
    with pytest.raises(TypeError, match="one step per draw"):
        fs.fMALA(model, num_steps=3)
    with pytest.raises(TypeError, match="model must be a NumPyro model"):
        fs.fHMC(3)


def test_refuses_observations_that_broadcast():
    def broadcasting(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([4]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, GP, fs.measurement.fixed(POINTS))
        numpyro.sample("y", dist.Normal(f(x)[:, None], NOISE).to_event(2), obs=y)

    mcmc = fs.MCMC(fs.fHMC(broadcasting), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="observation 'y' has shape"):
        mcmc.run(jax.random.key(0), X, Y)
