"""Level 3: 4096 chains of 200 steps, last states only, against the law of the discrete chain at its own ε.

The states are independent, so χ² and KS need no effective sample size. Every check is p > 1e-5, 4 per chain law:
fewer than 1e-3 false alarms a run. A 2 % error of the noise is not seen here (levels 1 and 2 see it); √ε for √(2ε),
a drift or friction of the wrong size or sign, a schedule that starts anew are, with p < 1e-20.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree
from support.broken import HEALTHY, Faults, broken
from support.laws import Settings, affine_map, gaussian_p_values
from support.targets import LIKE, correlated_gaussian

from numpyro_fspace.sgmcmc import sghmc, sgld
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

NUM_CHAINS, NUM_TRANSITIONS, NUM_STEPS = 4096, 20, 10
TARGET = correlated_gaussian()
SCALE = np.array([0.5, 1.0, 0.7], np.float32)
START = np.array([3.0, -3.0, 3.0], np.float32)
SIZES = {"sgld": (0.1, 0.02), "baoab": (0.5, 0.25)}


def schedule(name):
    """ε falls linearly over all 200 steps."""
    import optax

    return optax.linear_schedule(*SIZES[name], NUM_TRANSITIONS * NUM_STEPS)


def ensemble(name):
    """``last(keys, faults, restarts) -> [C, P]``; with ``restarts`` each transition starts the schedule anew."""
    unravel = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, np.float32), LIKE))[1]
    metric, epsilon = Diagonal(unravel(SCALE)), schedule(name)

    def chain(key, restarts):
        key_init, key_steps = jax.random.split(key)
        position = unravel(START)
        state = sgld.init(position) if name == "sgld" else sghmc.init(position, key_init)

        def step(state, key):
            state = state._replace(count=jnp.where(restarts, 0, state.count))
            if name == "sgld":
                kernel = sgld.build_kernel()
                return kernel(key, state, TARGET.potential, epsilon, NUM_STEPS, 1.0, metric)[0], None
            kernel = sghmc.build_kernel(integrator=name)
            rest = (1.0, 1.0, metric, True, 2)
            return kernel(key, state, TARGET.potential, epsilon, NUM_STEPS, *rest)[0], None

        state = jax.lax.scan(step, state, jax.random.split(key_steps, NUM_TRANSITIONS))[0]
        return ravel_pytree(state.position)[0]

    @jax.jit
    def last(keys, faults, restarts):
        with broken(faults, metric):
            return jax.vmap(chain, (0, None))(keys, restarts)

    return last


def exact_law(name):
    """Mean and covariance after 200 steps, by iterating the affine law of two steps (one refresh) at a time."""
    refresh_every = 1 if name == "sgld" else 2
    with jax.enable_x64(True):
        terms = affine_map(name, LIKE, refresh_every, refresh_every)
        draws, epsilon = TARGET.quadratics(), schedule(name)
        mean = np.append(START, np.zeros(0 if name == "sgld" else 3)).astype(float)
        covariance = np.zeros((len(mean), len(mean)))
        covariance[3:, 3:] = np.eye(len(mean) - 3)
        for t in range(0, NUM_TRANSITIONS * NUM_STEPS, refresh_every):
            steps = Settings(Later(epsilon, t), 1.0, 1.0, SCALE.astype(float), t % NUM_STEPS == 0)
            a, b, c = (np.asarray(v[0]) for v in terms(*draws, steps, HEALTHY))
            mean, covariance = a @ mean + c, a @ covariance @ a.T + b @ b.T
    return mean[:3], covariance[:3, :3]
