"""What the stochastic-gradient samplers share: potentials, schedules, loops, the non-finite guard.

A *potential* is any function ``potential_fn(position, key) -> U`` with U = -log density (up to a
constant); ``key`` feeds whatever randomness the estimate of U has (minibatch, measurement points) and
is ignored by a deterministic potential. ``position`` is any pytree of floating-point arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.noise import normal_like

__all__ = [
    "Info",
    "as_position",
    "finite",
    "last_value",
    "scan_with_noise",
    "size_and_dtype",
    "squared_norm",
    "step_size_at",
]


class Info(NamedTuple):
    """What a human wants to know of a transition; nothing of it is needed by the next one.

    Attributes:
        potential_energy: the last estimate of U within the transition.
        gradient_norm: Euclidean norm of the gradient that came with it.
        temperature: mean of |p|²/P over the inner steps, 1 in equilibrium at temperature 1 (SGHMC), or
            the mean squared displacement in units of its noise, |Δu|²/(2εP) (SGLD).
        step_size: the step size used last.
        is_diverging: whether the transition left the finite numbers and was undone.
        aux: the auxiliary output of the potential, at the same place as ``potential_energy``.
    """

    potential_energy: jax.Array
    gradient_norm: jax.Array
    temperature: jax.Array
    step_size: jax.Array
    is_diverging: jax.Array
    aux: Any


def step_size_at(step_size, count, dtype):
    """The step size at gradient step ``count``: a number, or an optax schedule of the count."""
    return jnp.asarray(step_size(count) if callable(step_size) else step_size, dtype)


def as_position(position):
    """``position`` as JAX arrays.

    Raises:
        TypeError: unless its leaves are floating-point numbers of one type.
    """
    position = jax.tree.map(jnp.asarray, position)
    types = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(position)})
    if len(types) != 1 or not jnp.issubdtype(types[0], jnp.floating):
        raise TypeError(f"position must hold floating-point arrays of one type, got {types}; cast it.")
    return position


def last_value(potential_fn, position, key):
    """Zeros shaped like ``potential_fn(position, key)``: where a loop keeps the last one it saw."""
    shapes = jax.eval_shape(potential_fn, position, key)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def squared_norm(tree):
    """Σ x² over all leaves."""
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))


def size_and_dtype(tree):
    """Number of scalars P in ``tree``, and the floating-point type they share."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves), jnp.result_type(*leaves)


def finite(*trees):
    """Whether every number in ``trees`` is finite (as one boolean)."""
    return jnp.isfinite(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(trees)))


def scan_with_noise(step, carry, key, num_steps, like):
    """Run ``carry = step(carry, key_t, noise_t, t)`` for t = 0 … num_steps - 1, with noise shaped as ``like``."""
    key_noise, key_steps = jax.random.split(key)

    def body(carry, xs):
        key, t = xs
        return step(carry, key, normal_like(key_noise, like, t), t), None

    return jax.lax.scan(body, carry, (jax.random.split(key_steps, num_steps), jnp.arange(num_steps)))[0]
