"""Control variates: the corrected gradient has the full one's mean whatever the center, and little of its noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro.infer import MCMC

import numpyro_fspace as fs
from numpyro_fspace.model.handlers import full_plates
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate

NUM_DATA, BATCH = 24, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM_DATA, 2)).astype(np.float32)
LABELS = (X[:, 0] + 0.3 * RNG.normal(size=NUM_DATA) > 0).astype(np.float32)
POINTS = fs.measurement.uniform([-1.0, -1.0], [1.0, 1.0], 5)
GP = fs.GPPrior(tinygp.kernels.ExpSquared(1.0), nugget=0.1)
W = jnp.array([0.7, -1.2])


def rows_potential(w, rows):
    """Logistic regression on some rows, scaled to all; a weight prior, which cancels."""
    logits = jnp.asarray(X)[rows] @ w
    log_lik = jnp.asarray(LABELS)[rows] * logits - jax.nn.softplus(logits)
    return -NUM_DATA / rows.shape[0] * jnp.sum(log_lik) + 0.5 * jnp.sum(w**2)


BATCHES = np.arange(NUM_DATA).reshape(-1, BATCH)  # a partition: its mean is the full data's


def batch_potential(w, key):
    return rows_potential(w, jnp.asarray(BATCHES)[key])


def gradients(center, gradient):
    potential = with_control_variate(batch_potential, batch_potential, ControlVariate(center, gradient))
    return jax.vmap(lambda batch: jax.grad(potential)(W, batch))(jnp.arange(len(BATCHES)))


def full_gradient(w):
    return jax.grad(rows_potential)(w, np.arange(NUM_DATA))


@pytest.mark.parametrize("distance", [0.0, 0.1, 3.0])
def test_mean_is_the_full_gradient_for_every_center(distance):
    center = W + distance
    assert np.allclose(gradients(center, full_gradient(center)).mean(0), full_gradient(W), atol=1e-4)


def test_a_gradient_of_another_place_is_caught():
    stale = gradients(W + 1.0, full_gradient(W + 2.0))
    assert not np.allclose(stale.mean(0), full_gradient(W), atol=1e-1)


def test_noise_falls_with_the_square_of_the_distance():
    plain = jax.vmap(lambda batch: jax.grad(batch_potential)(W, batch))(jnp.arange(len(BATCHES)))
    variances = [float(gradients(W + h, full_gradient(W + h)).var(0).sum()) for h in (0.2, 0.1, 0.05)]
    assert variances[0] < 0.1 * float(plain.var(0).sum())
    assert np.allclose(np.array(variances[:-1]) / variances[1:], 4.0, rtol=0.25)


def test_auxiliary_output_passes_through():
    potential = with_control_variate(
        lambda w, key: (batch_potential(w, key), "aux"), batch_potential, ControlVariate(W, full_gradient(W))
    )
    value, aux = potential(W, 0)
    assert aux == "aux"
    assert np.isclose(value, batch_potential(W, 0))  # the correction is zero at the center


def classifier(x, y=None, *, batch=BATCH):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = fs.functional_prior("f", lambda x: x @ w, GP, POINTS)
    with numpyro.plate("data", len(x), subsample_size=batch):
        xb = numpyro.subsample(x, event_dim=1)
        numpyro.sample("y", dist.Bernoulli(logits=f(xb)), obs=numpyro.subsample(y, event_dim=0))


def start(kernel, key=0):
    return kernel.init(jax.random.key(key), 0, None, (X, LABELS), {})


def target_of(kernel):
    """The model as the chains of a kernel see it."""
    return kernel._target(kernel.prepare((X, LABELS), {}, 0), (X, LABELS), {})


@pytest.mark.slow
def test_kernel_gradient_is_unbiased_with_random_points_and_a_center_elsewhere():
    """The functional prior's points keep their noise; the mean over many keys is that of the plain estimate."""
    kernel = fs.fSGHMC(classifier, step_size=0.01)
    target, state = target_of(kernel), start(kernel)
    state = target.renew_control(state)._replace(z={"w": W})
    without = target_of(fs.fSGHMC(classifier, step_size=0.01, control_variates=False))
    corrected, plain = target.dynamics(state).potential, without.dynamics(state).potential
    keys = jax.random.split(jax.random.key(1), 20_000)
    grads = [jax.vmap(lambda k, u=u: jax.grad(lambda w: u(w, k)[0])(W))(keys) for u in (corrected, plain)]
    error = np.sqrt(sum(g.var(0) / len(keys) for g in grads))
    assert np.all(np.abs(grads[0].mean(0) - grads[1].mean(0)) < 4.0 * error)
    assert grads[0].var(0).sum() < 0.5 * grads[1].var(0).sum()


@pytest.mark.slow
def test_center_is_where_the_chain_is_and_its_gradient_that_of_all_data():
    kernel = fs.fSGHMC(classifier, step_size=0.01, num_steps=3, control_variates=2)
    state = start(kernel)
    positions, centers = [state.z["w"]], []
    for _ in range(4):
        state = kernel.sample(state, (X, LABELS), {})
        centers.append(state.control.center)
        positions.append(state.z["w"])
    assert np.allclose(centers, np.array(positions)[[0, 0, 2, 2]])
    expected = jax.grad(rows_potential)(positions[2], np.arange(NUM_DATA))
    assert np.allclose(state.control.gradient, expected, atol=1e-4)


@pytest.mark.parametrize("max_rows", [1, 5, 6, 24, 2048])
def test_full_gradient_in_parts(monkeypatch, max_rows):
    """Also where the parts do not divide the data, and where a minibatch is larger than a part."""
    monkeypatch.setattr("numpyro_fspace.model.potential.MAX_ROWS", max_rows)
    model = target_of(fs.fSGHMC(classifier, step_size=0.01)).model
    found = model.data_gradient({"w": W}, jax.random.key(0))["w"]
    assert np.allclose(found, full_gradient(W), atol=1e-4)


@pytest.mark.slow
def test_full_gradient_of_two_plates():
    def two(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        for name, rows in (("a", slice(0, 10)), ("b", slice(10, None))):
            with numpyro.plate(name, len(x[rows]), subsample_size=3):
                xb = numpyro.subsample(x[rows], event_dim=1)
                yb = numpyro.subsample(y[rows], event_dim=0)
                numpyro.sample(f"y_{name}", dist.Bernoulli(logits=xb @ w), obs=yb)

    found = target_of(fs.SGHMC(two, step_size=0.01)).model.data_gradient({"w": W}, jax.random.key(0))["w"]
    assert np.allclose(found, full_gradient(W), atol=1e-4)


@pytest.mark.slow
def test_continued_run_on_other_data_is_centered_anew():
    kernel = fs.fSGHMC(classifier, step_size=0.01, control_variates=1000)
    mcmc = fs.MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), X, LABELS)
    mcmc.post_warmup_state = mcmc.last_state
    position = mcmc.last_state.z["w"]
    mcmc.run(jax.random.key(1), X, 1.0 - LABELS)
    expected = jax.grad(lambda w: rows_potential(-w, np.arange(NUM_DATA)))(position)
    assert np.allclose(mcmc.last_state.control.gradient, expected, atol=1e-3)


@pytest.mark.slow
def test_a_continued_run_may_be_the_first_with_a_control_variate():
    states = []
    for setting in (False, True):
        mcmc = fs.MCMC(
            fs.fSGHMC(classifier, step_size=0.01, control_variates=setting),
            num_warmup=0,
            num_samples=2,
            progress_bar=False,
        )
        mcmc.post_warmup_state = states[-1] if states else None
        mcmc.run(jax.random.key(0), X, LABELS)
        states.append(mcmc.last_state)
    assert not states[0].control.center.size and states[1].control.center.shape == (2,)


@pytest.mark.parametrize(
    ("setting", "batch", "every"),
    [(True, BATCH, 1), (True, 1, 3), (5, BATCH, 5), (False, BATCH, None), (True, None, None), (True, NUM_DATA, None)],
)
def test_when_the_center_is_renewed(setting, batch, every):
    def model(x, y):
        return classifier(x, y, batch=batch)

    kernel = fs.fSGHMC(model, step_size=0.01, num_steps=8, control_variates=setting)
    assert kernel.prepare((X, LABELS), {}, 0).control_every == every
    assert start(kernel).control.center.size == (0 if every is None else 2)


def regression(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x), subsample_size=8):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(5.0, jnp.tanh(xb @ w) + b, 0.3), obs=yb)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The (kinetic|draws):RuntimeWarning")  # the steps are long, to make heat
@pytest.mark.parametrize(("kernel", "step_size"), [(fs.SGHMC, 0.002), (fs.SGLD, 5e-5)])
def test_most_of_the_heat_of_minibatches_goes(kernel, step_size):
    """Variances on a target that is not Gaussian, beside the same run on all data: what they have too much."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 2)).astype(np.float32)
    y = (np.tanh(x @ np.array([1.0, -0.5])) + 0.3 * rng.standard_t(5, size=400)).astype(np.float32)

    def variance(model, control_variates=True):
        mcmc = MCMC(
            kernel(
                model,
                step_size=step_size,
                preconditioner=fs.preconditioners.identity(),
                control_variates=control_variates,
            ),
            num_warmup=100,
            num_samples=500,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), x, y)
        return float(np.sum(mcmc.get_samples()["w"].var(0)) + np.var(mcmc.get_samples()["b"]))

    def on_all_data(x, y):
        with full_plates():
            return regression(x, y)

    exact = variance(on_all_data)
    hot = variance(regression, control_variates=False) / exact - 1.0
    assert hot > 0.5
    assert abs(variance(regression, control_variates=1) / exact - 1.0) < 0.3 * hot


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("yes", TypeError)])
def test_bad_settings_are_refused(value, error):
    with pytest.raises(error, match="control_variates"):
        fs.SGHMC(regression, control_variates=value)
