"""Level 2: the real kernel with real keys, one transition from one state, 200 000 times.

The law of a transition with given noise is known exactly (level 0 and 1); here the noise itself is under test: its
mean, its variance, its independence across leaves, of the momentum's, and of the draws of the potential. Every
check is p > 1e-5 and a test makes at most 3, so a run has fewer than 2e-4 false alarms. Smallest errors seen: 2 % of
the noise, 5 % of the drift or of a fresh momentum, 10 % of the friction, each with p < 1e-8 (most below 1e-100).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree
from support.broken import HEALTHY, Faults, broken, noise_from_the_potentials_key, shared_noise
from support.compilation import quick_jit
from support.laws import Settings, gaussian_p_values
from support.targets import LIKE, correlated_gaussian, gaussian_terms
from support.tiers import some

from numpyro_fspace.sgmcmc import sghmc, sgld
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

NUM_KEYS = 200_000
TARGET = correlated_gaussian()
STATE = np.array([0.4, -0.9, 1.3, 0.2, 0.7, -0.5], np.float32)
#: SGHMC takes 4 steps with 2 refreshes, so that position and momentum have a covariance of full rank.
SETTINGS = {
    "sgld": (Settings(0.05, 1.5, scale=np.array([0.5, 1.0, 1.5], np.float32)), 1, 1),
    "baoab": (Settings(0.2, 1.5, 0.7, np.array([0.5, 1.0, 1.5], np.float32)), 4, 2),
    "euler": (Settings(0.1, 1.5, 0.7, np.array([0.5, 1.0, 1.5], np.float32), True), 3, 1),
}


def outcome(name, key, metric, unravel):
    """Flat state after one transition of the real kernel."""
    settings, num_steps, refresh_every = SETTINGS[name]
    position, count = unravel(STATE[:3]), jnp.zeros((), int)
    if name == "sgld":
        start = sgld.SGLDState(position, count)
        rest = {"num_steps": num_steps, "temperature": settings.temperature, "metric": metric}
        out, _ = sgld.build_kernel()(key, start, TARGET.potential, settings.epsilon, **rest)
        return ravel_pytree(out.position)[0]
    start = sghmc.SGHMCState(position, unravel(STATE[3:]), count)
    rest = {"friction": settings.friction, "temperature": settings.temperature, "metric": metric}
    rest |= {"num_steps": num_steps, "resample_momentum": settings.resample, "refresh_every": refresh_every}
    kernel = sghmc.build_kernel(integrator=name)
    out, _ = kernel(key, start, TARGET.potential, settings.epsilon, **rest)
    return jnp.concatenate([ravel_pytree(out.position)[0], ravel_pytree(out.momentum)[0]])


def program(name):
    """``draws(keys, faults, is_shared)``, compiled once for the kernel and its twins."""
    unravel = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, np.float32), LIKE))[1]
    metric = Diagonal(unravel(SETTINGS[name][0].scale))

    @functools.partial(quick_jit, is_busy=True)
    def draws(keys, faults, is_shared):
        with broken(faults, metric), shared_noise(is_shared):
            return jax.vmap(lambda key: outcome(name, key, metric, unravel))(keys)

    return draws


def exact_law(name):
    settings, *counts = SETTINGS[name]
    with jax.enable_x64(True):
        settings = settings._replace(scale=settings.scale.astype(float))
        a, b, c = (v[0] for v in gaussian_terms(name, *counts)(TARGET.quadratics(), settings))
    return a @ STATE[: len(a)] + c, b @ b.T


@pytest.mark.parametrize("name", some(SETTINGS, 2))
def test_one_transition(key, name):
    mean, covariance = exact_law(name)
    keys, run = jax.random.split(key, NUM_KEYS), program(name)

    def p_values(faults=HEALTHY, is_shared=False):
        return gaussian_p_values(run(keys, faults, is_shared), mean, covariance)

    found = p_values()
    assert min(found.values()) > 1e-5, found
    twins = {"noise": Faults(noise=1.02), "drift": Faults(drift=1.05), "metric": Faults(forgets_metric=1.0)}
    if name != "sgld":
        twins["friction"] = Faults(friction=1.1)
    if name == "euler":
        twins["refresh"] = Faults(refresh=1.05)
    for fault, faults in twins.items():
        assert min(p_values(faults).values()) < 1e-8, fault
    assert p_values(is_shared=True)["correlation"] < 1e-100, "one key on two leaves"


@pytest.mark.parametrize("name", ["sgld", "baoab"])
def test_noise_is_independent_of_the_draw_of_the_potential(key, name):
    """Given which of two minibatches was drawn, the noise still has mean 0: z-test, false alarms 1e-5."""

    def potential_fn(w, key):
        return jnp.sum(w) * jnp.where(jax.random.uniform(key) < 0.5, 1.0, 3.0)

    def last(key):
        if name == "sgld":
            out, info = sgld.build_kernel()(key, sgld.init(jnp.zeros(2)), potential_fn, 0.1)
            return jnp.append(out.position / jnp.sqrt(0.2), info.gradient_norm)
        start = sghmc.SGHMCState(jnp.zeros(2), jnp.zeros(2), jnp.zeros((), int))
        out, info = sghmc.build_kernel()(key, start, potential_fn, 1.0, num_steps=1, friction=jnp.inf)
        return jnp.append(out.position / 0.5, info.gradient_norm)

    @functools.partial(quick_jit, is_busy=True)
    def run(keys, is_reused):
        with noise_from_the_potentials_key(is_reused):
            return jax.vmap(last)(keys)

    def p_value(is_reused):
        draws = np.asarray(run(jax.random.split(key, NUM_KEYS), is_reused), float)
        noise, slope = draws[:, :2], draws[:, 2] / np.sqrt(2.0)
        if name == "sgld":  # add the drift back
            noise = noise + 0.1 / np.sqrt(0.2) * slope[:, None]
        first = noise[slope < 2]
        assert 0.49 < len(first) / NUM_KEYS < 0.51
        return scipy.stats.chi2.sf(len(first) * np.sum(first.mean(0) ** 2), 2)

    assert p_value(False) > 1e-5
    if name == "sgld":  # BAOAB splits the key of a step before the potential gets it
        assert p_value(True) < 1e-100
