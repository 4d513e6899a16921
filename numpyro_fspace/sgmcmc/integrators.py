"""The parts of a step (kick, drift, thermostat) and SGLD's step, deterministic given the gradient and the noise.

The steps of ``sghmc.py`` and ``sgld.py`` are made of them; ``mclmc.py`` has parts of its own.

Position w, momentum p with unit mass in the coordinates of the preconditioner S (w = S u), step size ε,
temperature T, friction γ, noise ξ ~ N(0, I).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add(x, factor, y):
    """x + factor · y, leaf by leaf."""
    return jax.tree.map(lambda a, b: a + factor * b, x, y)


def euler_maruyama(position, gradient, noise, step_size, temperature, metric):
    """w ← w - ε S Sᵀ∇U + √(2εT) S ξ: overdamped Langevin dynamics [Welling & Teh 2011].

    Targets exp(-U/T) as ε → 0; the second moments are off by O(ε).
    """
    scale = jnp.sqrt(2.0 * step_size * temperature)
    du = jax.tree.map(lambda g, xi: -step_size * g + scale * xi, metric.scale_gradient(gradient), noise)
    return jax.tree.map(jnp.add, position, metric.scale(du)), du


def kick(momentum, gradient, step_size, metric, *, damping=0.0):
    """B: p ← (1 - damping) p - ε Sᵀ∇U."""
    momentum = jax.tree.map(lambda p: (1.0 - damping) * p, momentum)
    return add(momentum, -step_size, metric.scale_gradient(gradient))


def drift(position, momentum, step_size, metric):
    """A: w ← w + ε S p."""
    return add(position, step_size, metric.scale(momentum))


def ornstein_uhlenbeck(momentum, noise, step_size, friction, temperature):
    """O: p ← e^(-γε) p + √(T (1 - e^(-2γε))) ξ, exact for dp = -γ p dt + √(2γT) dB.

    γ = ∞ replaces the momentum by a fresh draw from N(0, T I).
    """
    decay = jnp.where(jnp.isinf(friction), jnp.inf, friction * step_size)
    keep, fresh = jnp.exp(-decay), jnp.sqrt(temperature * -jnp.expm1(-2.0 * decay))
    return jax.tree.map(lambda p, xi: keep * p + fresh * xi, momentum, noise)
