"""Broken twins of the samplers: the real kernels with a fault put into their integrators.

Faults are numbers, 1 (or 0) where the code is right, so that one compiled function serves the kernel and all
its twins. Every twin must be rejected by the tests that accept the kernel.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace.sgmcmc import integrators, sghmc, sgld, shared


class Faults(NamedTuple):
    """What is wrong with a kernel.

    Attributes:
        noise: factor on the noise.
        drift: factor on the gradient.
        friction: factor on the friction that damps (not on the noise that balances it); -1 is the wrong sign.
        forgets_metric: 1 if the preconditioner scales the gradient and not the noise.
        refresh: factor on a momentum drawn afresh.
    """

    noise: float = 1.0
    drift: float = 1.0
    friction: float = 1.0
    forgets_metric: float = 0.0
    refresh: float = 1.0


HEALTHY = Faults()

#: Faults of the dynamics that every kernel can have.
COMMON = {
    "noise √ε instead of √(2ε)": Faults(noise=2.0**-0.5),
    "noise 2 % too large": Faults(noise=1.02),
    "drift ε/2": Faults(drift=0.5),
    "drift sign": Faults(drift=-1.0),
    "preconditioned noise forgotten": Faults(forgets_metric=1.0),
}
#: Faults of Hamiltonian kernels alone.
HAMILTONIAN = {
    "friction sign": Faults(friction=-1.0),
    "friction 10 % too large": Faults(friction=1.1),
}
REFRESH = {"momentum drawn 10 % too large": Faults(refresh=1.1)}


@contextmanager
def broken(faults, metric):
    """The kernels traced inside have these faults."""

    def spoil(noise, factor=1.0):
        def spoil_leaf(xi, unscaled):
            return faults.noise * factor * jnp.where(faults.forgets_metric > 0, unscaled, xi)

        return jax.tree.map(spoil_leaf, noise, jax.tree.map(jnp.divide, noise, metric.s))

    def euler_maruyama(position, gradient, noise, *rest):
        gradient = jax.tree.map(lambda g: faults.drift * g, gradient)
        return integrators.euler_maruyama(position, gradient, spoil(noise), *rest)

    def kick(momentum, gradient, step_size, metric, *, damping=0.0):
        gradient = jax.tree.map(lambda g: faults.drift * g, gradient)
        return integrators.kick(momentum, gradient, step_size, metric, damping=faults.friction * damping)

    def ornstein_uhlenbeck(momentum, noise, step_size, friction, temperature):
        is_refresh = jnp.isinf(friction)
        excess = (1.0 - faults.friction) * jnp.where(is_refresh, 0.0, friction) * step_size
        momentum = jax.tree.map(lambda p: jnp.exp(excess) * p, momentum)
        noise = spoil(noise, jnp.where(is_refresh, faults.refresh, 1.0))
        return integrators.ornstein_uhlenbeck(momentum, noise, step_size, friction, temperature)

    def add(x, factor, y):
        return integrators.add(x, factor, spoil(y))

    real_momentum = sghmc._fresh_momentum

    def fresh_momentum(*args):
        return jax.tree.map(lambda p: faults.refresh * p, real_momentum(*args))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sgld, "euler_maruyama", euler_maruyama))
        stack.enter_context(mock.patch.object(sghmc, "kick", kick))
        stack.enter_context(mock.patch.object(sghmc, "ornstein_uhlenbeck", ornstein_uhlenbeck))
        stack.enter_context(mock.patch.object(sghmc, "add", add))
        stack.enter_context(mock.patch.object(sghmc, "_fresh_momentum", fresh_momentum))
        yield


@contextmanager
def shared_noise(is_shared):
    """If ``is_shared``, noise is drawn leaf by leaf with one key: the leaves move together."""
    real = shared.normals

    def normals(key, like, num, part=0):
        def row(j):
            def spoil(leaf, noise):
                common = jax.random.normal(jax.random.fold_in(key, part * num + j), leaf.shape, leaf.dtype)
                return jax.lax.select(is_shared, common, noise)

            return jax.tree.map(spoil, like, real(key, like, num, part)(j))

        return row

    with mock.patch.object(shared, "normals", normals):
        yield


@contextmanager
def spoiled_steps(spoil):
    """Inner steps go through ``step, draw = spoil(step, draw, key of all steps)``."""
    real = shared.scan_with_draws

    def scan_with_draws(step, carry, first, num_blocks, like, draw, *rest):
        step, draw = spoil(step, draw, first)
        return real(step, carry, first, num_blocks, like, draw, *rest)

    with (
        mock.patch.object(sgld, "scan_with_draws", scan_with_draws),
        mock.patch.object(sghmc, "scan_with_draws", scan_with_draws),
    ):
        yield


def stale_draws(is_stale):
    """If ``is_stale``, the potential gets one key for all inner steps: its draw is made once per transition."""
    return spoiled_steps(lambda step, draw, first: (step, lambda key: draw(jax.lax.select(is_stale, first, key))))


def noise_from_the_potentials_key(is_reused):
    """If ``is_reused``, the noise of a step is drawn with the key its potential gets."""

    def spoil(step, draw, first):
        def spoiled(carry, draws, noise, t):
            *draws, keys = draws
            flat, unravel = ravel_pytree(noise)
            reused = jax.random.normal(keys[0], flat.shape, flat.dtype)
            return step(carry, draws, unravel(jax.lax.select(is_reused, reused, flat)), t)

        return spoiled, lambda key: [*draw(key), key]

    return spoiled_steps(spoil)
