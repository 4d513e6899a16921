"""The Metropolis test, by which the samplers accept or reject a proposal."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rejecting_infinite(gradient_fn):
    """The gradient of ``staged_gradient``, with U = ∞ and gradient 0 wherever U is infinite, so that tests reject.

    U is -∞ where a position is rounded to a pole of the density, such as the 0 of a Gamma distribution with a shape
    below 1.
    """

    def gradient(*given):
        (energy, aux), gradient = gradient_fn(*given)
        is_infinite = jnp.isinf(energy)
        energy = jnp.where(is_infinite, jnp.inf, energy)
        gradient = jax.tree.map(lambda g: jnp.where(is_infinite, 0.0, g), gradient)
        return (energy, aux), gradient

    return gradient


def accept(key, log_ratio):
    """``(whether to accept, the probability of it)``: a Metropolis test of exp(``log_ratio``); NaN is rejected."""
    probability = jnp.exp(jnp.minimum(0.0, jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)))
    return jax.random.uniform(key, dtype=probability.dtype) < probability, probability
