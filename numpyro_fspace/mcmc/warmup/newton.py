"""A warm start of second order, for few parameters: Newton's method on the mean potential of a Gaussian.

The Gaussian N(w, S Sᵀ) is fitted to exp(-U) as in variational inference: w solves E[∇U] = 0, and S
solves (S Sᵀ)⁻¹ = E[∇²U]. Each step of w is a Newton step in the coordinates u of w + S u, with the length that lowers
E[U] most.
The means are over the same few draws of the Gaussian and their mirror images.

A mode need not be near the posterior mass: at the joint mode of values and their scale all values are equal and the
scale is zero. When the spread of the values is averaged over, their scale fits that spread too. Scales therefore move
freely here, over any number of powers of ten.

Reference: M. Opper, C. Archambeau (2009), *The variational Gaussian approximation revisited*.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import matmul
from numpyro_fspace.sgmcmc.linear_maps import Dense, whitened

#: Least number of steps of a warm start.
NUM_STEPS = 100
#: Pairs of draws in the means, and pairs at which the Hessian is computed.
NUM_PAIRS, NUM_HESSIAN_PAIRS = 8, 1
#: Lengths of a step that are tried, relative to the Newton step.
LENGTHS = np.concatenate([[4.0, 2.0, 1.0, 0.5], 4.0 ** -np.arange(1.0, 16.0)])


def hessian(potential, position, metric):
    """Sᵀ ∇²U S [P, P] at ``position`` [P], one product of the Hessian with each column of S."""

    def product(direction):
        return metric.scale_gradient(jax.jvp(jax.grad(potential), (position,), (metric.scale(direction),))[1])

    products = jax.vmap(product)(jnp.eye(position.size, dtype=position.dtype))
    return 0.5 * (products + products.T)


def approach(key, position, factor, potential, *, scale, num_steps: int):
    """``num_steps`` steps of the Gaussian with mean ``position`` [P] and S = diag(``scale``) ``factor``.

    Args:
        key: draws the points of the means.
        position: w, at which the potential is finite.
        factor: S in units of ``scale``, [P, P].
        potential: U as a function of w.
        scale: prior scales [P].
        num_steps: steps.

    Returns:
        ``(position, factor)``.
    """

    def step(carry, key):
        position, factor = carry
        metric = Dense(scale[:, None] * factor)
        normals = jax.random.normal(key, (NUM_PAIRS, position.size), position.dtype)
        spread = matmul(jnp.stack([normals, -normals], 1).reshape(-1, position.size), metric.s.T)
        points = position + jnp.concatenate([jnp.zeros_like(position)[None], spread])
        energies, gradients = jax.vmap(jax.value_and_grad(potential))(points)
        # If U is not finite over the width of the Gaussian, only its mean is used.
        is_wide = ~jnp.all(jnp.isfinite(energies)) | ~jnp.all(jnp.isfinite(gradients))
        spread = jnp.where(is_wide, 0.0, spread)
        value = jnp.where(is_wide, energies[0], jnp.mean(energies[1:]))
        gradient = metric.scale_gradient(jnp.where(is_wide, gradients[0], jnp.mean(gradients[1:], 0)))
        some = position + spread[: 2 * NUM_HESSIAN_PAIRS]
        curvature = jnp.mean(jax.vmap(lambda point: hessian(potential, point, metric))(some), 0)
        values, vectors = jnp.linalg.eigh(curvature)
        damped = 0.5 + 0.5 * jnp.abs(values)
        direction = -matmul(vectors, matmul(vectors.T, gradient) / damped)
        lengths = jnp.asarray(LENGTHS, position.dtype)
        candidates = position + lengths[:, None] * metric.scale(direction)
        lowered = jnp.mean(jax.vmap(jax.vmap(potential))(candidates[:, None] + spread), 1)
        best = jnp.argmin(jnp.where(jnp.isfinite(lowered), lowered, jnp.inf))
        length, moved = lengths[best], candidates[best]
        is_lower = (lowered[best] < value) & jnp.all(jnp.isfinite(moved))
        # Where U or its derivatives overflow, the step goes towards unconstrained values of 0.
        is_lost = ~(jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(curvature)))
        position = jnp.where(is_lower, moved, jnp.where(is_lost, 0.5 * position, position))
        # If a step was too long although U could be lowered, the curvature ahead is larger than at its start.
        is_short = (length < 1.0) & (matmul(-gradient, direction) > 1.0)
        norm = jnp.linalg.norm(direction)
        unit = direction / jnp.where(norm > 0, norm, 1.0)
        secant = jnp.where(is_short & is_lower & (length < 0.5), jnp.abs(matmul(gradient, unit)) / (length * norm), 0.0)
        damped = jnp.where(is_short, jnp.maximum(damped, 1.0), damped)
        factor = whitened(factor, matmul(vectors * damped, vectors.T) + secant * jnp.outer(unit, unit))
        return (position, factor), None

    return jax.lax.scan(step, (position, factor), jax.random.split(key, num_steps))[0]
