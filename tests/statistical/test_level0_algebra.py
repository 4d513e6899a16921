"""Level 0: one transition with given noise is the textbook's update; gradients are unbiased, by enumeration.

Nothing here is random but ``test_draws_of_the_potential_are_uniform`` and ``test_each_step_draws_anew``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from support.broken import COMMON, HAMILTONIAN, HEALTHY, REFRESH, stale_draws
from support.compilation import quick_jit
from support.laws import Settings, Transition, relative_error
from support.targets import FOUR_POINTS, LIKE, TARGETS, features

from numpyro_fspace.sgmcmc import sghmc, sgld

pytestmark = pytest.mark.usefixtures("x64")

EPS, T, FRICTION, S = 0.3, 1.7, 0.8, np.array([0.5, 1.0, 2.0])
STATE, NUM_STEPS = np.array([0.4, -0.9, 1.3, 0.2, 0.7, -0.5]), 4
NOISE = np.random.default_rng(0).normal(size=(NUM_STEPS + 1, 3))


def skewed(position, draw=None):
    """A potential that is not quadratic, nor symmetric, nor a sum over coordinates."""
    (a, b), c = position["a"][0], position["b"][0]
    return jnp.exp(0.5 * a) + 0.25 * b**4 + 0.5 * (c - a * b) ** 2


def gradient(w):
    """∇U of ``skewed``, by hand, with respect to the flat position."""
    a, b, c = w
    return np.array([0.5 * np.exp(0.5 * a) - (c - a * b) * b, b**3 - (c - a * b) * a, c - a * b])


def textbook_sgld():
    w = STATE[:3]
    for xi in NOISE[:NUM_STEPS]:
        w = w - EPS * S**2 * gradient(w) + np.sqrt(2 * EPS * T) * S * xi
    return w


def textbook_baoab(resample=False, refresh_every=1):
    """Kick ε/2, drift ε/2, O, drift ε/2, kick ε/2 [Leimkuhler & Matthews 2013], positions only.

    A chain of the library is half a kick ahead, so the textbook's starts half a kick behind it. With
    ``refresh_every`` = k every k-th O lasts kε, and the others nothing.
    """
    w, p = STATE[:3], STATE[3:]
    p = p + 0.5 * EPS * S * gradient(w)
    for t in range(NUM_STEPS):
        p = p - 0.5 * EPS * S * gradient(w)
        w = w + 0.5 * EPS * S * p
        if t % refresh_every == 0:
            keep = 0.0 if resample and t == 0 else np.exp(-FRICTION * refresh_every * EPS)
            p = keep * p + np.sqrt(T * (1 - keep**2)) * NOISE[t // refresh_every]
        w = w + 0.5 * EPS * S * p
        p = p - 0.5 * EPS * S * gradient(w)
    return w


def textbook_euler(resample):
    """The papers' literal update."""
    w, p = STATE[:3], STATE[3:]
    if resample:
        p = np.sqrt(T) * NOISE[-1]
    for xi in NOISE[:NUM_STEPS]:
        w = w + EPS * S * p
        p = p - EPS * S * gradient(w) - EPS * FRICTION * p + np.sqrt(2 * FRICTION * EPS * T) * xi
    return w


CASES = {
    "sgld": (1, False, textbook_sgld),
    "baoab": (1, False, textbook_baoab),
    "baoab, resampled": (1, True, lambda: textbook_baoab(True)),
    "baoab, refreshed every 2": (2, False, lambda: textbook_baoab(False, 2)),
    "euler": (1, False, lambda: textbook_euler(False)),
    "euler, resampled": (1, True, lambda: textbook_euler(True)),
}


@functools.cache
def compiled(name, refresh_every):
    transition = Transition(name, skewed, LIKE, NUM_STEPS, refresh_every)
    noise = NOISE[: transition.num_rows].ravel()
    noise = noise if name == "sgld" else np.concatenate([noise, NOISE[-1]])
    return quick_jit(transition), (STATE[: transition.num_state], noise, np.zeros(1))


@pytest.mark.parametrize("case", CASES)
def test_transition_is_the_textbooks(case):
    name, (refresh_every, resample, textbook) = case.split(",")[0], CASES[case]
    run, arguments = compiled(name, refresh_every)
    settings = Settings(EPS, T, FRICTION, S, resample)

    def error(faults):
        return np.abs(run(*arguments, settings, faults)[:3] - textbook()).max()

    assert error(HEALTHY) < 1e-13
    twins = COMMON if name == "sgld" else COMMON | HAMILTONIAN
    for fault, faults in (twins | REFRESH if resample else twins).items():
        assert error(faults) > 1e-3, fault


def test_a_transition_is_its_parts_one_after_another(key):
    """Six steps with a schedule and a thermostat at every second are three transitions of two, at temperature 0."""

    def run(num_steps, num_transitions):
        kernel = quick_jit(lambda state: sghmc.build_kernel()(key, state, quartic, schedule, **settings)[0])
        settings = {"num_steps": num_steps, "friction": FRICTION, "temperature": 0.0, "refresh_every": 2}
        state = sghmc.SGHMCState(jnp.array(STATE[:3]), jnp.array(STATE[3:]), jnp.zeros((), int))
        for _ in range(num_transitions):
            state = kernel(state)
        return np.concatenate([state.position, state.momentum]), int(state.count)

    def quartic(w, key):
        return 0.25 * jnp.sum(w**4)

    def schedule(count):
        return EPS / (1.0 + count)

    (whole, count), (parts, counted) = run(6, 1), run(2, 3)
    assert count == counted == 6
    np.testing.assert_allclose(whole, parts, rtol=1e-13)


# ---- unbiased gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minibatch, fixed points", "minibatch, random points"])
def test_gradient_is_unbiased(name):
    """Over all minibatches and measurement sets: N/B on the likelihood, nothing on the functional prior."""
    target, ratio = TARGETS[name], 5 / 2
    mean, covariance = target.posterior()
    exact = np.linalg.inv(covariance), np.linalg.solve(covariance, mean)

    def error(**faults):
        terms = (np.asarray(v).mean(0) for v in target.quadratics(**faults))
        return max(relative_error(value, expected) for value, expected in zip(terms, exact, strict=True))

    assert error() < 1e-13
    assert error(likelihood_factor=1 / ratio) > 0.1, "N/B forgotten"
    assert error(prior_factor=ratio) > 0.05, "functional prior scaled by N/B"


def test_functional_prior_is_not_scaled_inside_the_plate(key):
    """The term is the same for a functional prior stated inside the data plate."""
    import numpyro
    import numpyro.distributions as dist
    import tinygp

    import numpyro_fspace as fs
    from numpyro_fspace.model.potential import ModelPotential

    target = TARGETS["minibatch, fixed points"]
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(target.lengthscale), nugget=target.nugget)

    def model():
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("data", 5, subsample_size=2):
            fs.functional_prior("f", lambda x: features(jnp.asarray(x)) @ w, prior, FOUR_POINTS[0])
            numpyro.sample("y", dist.Normal(w[0], 1.0), obs=jnp.zeros(2))

    w = jnp.array([0.3, -0.2, 0.8, 0.5])
    value, log_prior = quick_jit(ModelPotential(model, key=key))({"w": w}, key)
    f = features(FOUR_POINTS[0]) @ w
    expected = scipy.stats.multivariate_normal(cov=target.covariance_at(FOUR_POINTS[0])).logpdf(f)
    rest = scipy.stats.norm.logpdf(w).sum() + 5 / 2 * 2 * scipy.stats.norm.logpdf(w[0])
    np.testing.assert_allclose(log_prior, expected, rtol=1e-12)
    np.testing.assert_allclose(-value, expected + rest, rtol=1e-12)


def test_draws_of_the_potential_have_their_law(key):
    """With real keys, (minibatch, measurement set) over all 30 outcomes: χ², false alarms 1e-5.

    The sets are equally likely. The minibatch takes a row of each of two runs on a circle of five: neighbors come
    together half as often as others. Rejects minibatch and points drawn from one key; an index favored by 20 %
    gives p < 1e-5.
    """
    target = TARGETS["minibatch, random points"]
    w = jnp.array([0.3, -0.2, 0.8, 0.5])
    h, g = target.quadratics()
    outcomes = np.asarray(h @ w - g)
    potential = target.model_potential(key=key)
    gradient_fn = quick_jit(jax.vmap(jax.grad(lambda w, k: potential({"w": w}, k)[0]), (None, 0)))
    gradients = np.asarray(gradient_fn(w, jax.random.split(key, 30_000)))
    distance = np.abs(gradients[:, None] - outcomes).max(-1)
    assert distance.min(1).max() < 1e-10, "every draw is one of the enumerated outcomes"
    assert (np.sort(distance, 1)[:, 1] > 1e-6).all(), "and of no other"
    counts = np.bincount(distance.argmin(1), minlength=len(outcomes))
    apart = np.abs(np.diff(target.batches)[target.draws[:, 0], 0])
    law = np.where((apart == 1) | (apart == 4), 1.0, 2.0)
    assert scipy.stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > 1e-5
    assert scipy.stats.chisquare(counts).pvalue < 1e-5, "the check has power"


@pytest.mark.parametrize("algorithm", ["sgld", "baoab"])
def test_each_step_draws_anew(key, algorithm):
    """The draws of two inner steps are independent: χ² of their 9 pairs, false alarms 1e-5.

    At temperature 0 on U = -w·(1, 3 or 9 at random) position and last gradient tell the pair.
    """
    slopes, zero = jnp.array([1.0, 3.0, 9.0]), jnp.zeros(1)

    def potential_fn(w, k):
        return -w[0] * slopes[jax.random.randint(k, (), 0, 3)]

    def last(k):
        if algorithm == "sgld":
            out, info = sgld.build_kernel()(k, sgld.init(zero), potential_fn, 1.0, num_steps=2, temperature=0.0)
        else:
            start = sghmc.SGHMCState(zero, zero, jnp.zeros((), int))
            out, info = sghmc.build_kernel()(k, start, potential_fn, 1.0, num_steps=2, friction=0.5, temperature=0.0)
        return jnp.stack([out.position[0], info.gradient_norm])

    @quick_jit
    def run(keys, is_stale):
        with stale_draws(is_stale):
            return jax.vmap(last)(keys)

    def p_value(is_stale):
        draws = np.asarray(run(jax.random.split(key, 9_000), is_stale))
        counts = np.unique(draws.round(6), axis=0, return_counts=True)[1]
        return scipy.stats.chisquare(np.pad(counts, (0, 9 - len(counts)))).pvalue

    assert p_value(False) > 1e-5
    assert p_value(True) < 1e-100
