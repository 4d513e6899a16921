"""Tests of the step size, and its changes: shortening, cooling, tuning to an acceptance probability.

The step for a curvature, and the acceptance that tuning aims at, are the sampler's own (``mcmc/sampler_adapters.py``).
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_fspace.posterior.thresholds import KINETIC_LIMIT, kinetic_margin

__all__ = ["cooled", "cooling", "is_hot", "shortening", "tuning"]

#: Excess of the mean kinetic temperature over 1, beyond chance, after which burn-in shortens the step permanently.
MAX_STRETCH_EXCESS = 0.05


def is_hot(temperature, size):
    """Whether a mean temperature of ``size`` numbers, relative to the sampler's, is higher than chance allows."""
    return temperature > KINETIC_LIMIT + kinetic_margin(size)


def shortening(temperature, gained, risen, is_diverging, size: int):
    """Factor on the step size after a draw of burn-in over ``size`` parameters; 1 if all is well.

    A chain that descends to the posterior mass has a high temperature at every step size, but it gains energy only if
    the step is too long. A high temperature therefore counts only if the total energy grew by half of the excess, or if
    U grew by more than ``size``, twice its rise from a mode to temperature 1. (A large friction may remove the kinetic
    energy before the end of the draw and leave the chain at a high potential.)

    Args:
        temperature: mean kinetic temperature of the draw, relative to the sampler's own.
        gained: by how much the draw raised U + |p|²/2, relative to the sampler's temperature.
        risen: the same of U alone.
        is_diverging: whether the draw met numbers that are not finite.
        size: P.
    """
    is_unstable = ~((gained < 0.25 * size * (temperature - 1.0)) & (risen < size))  # also where a number is NaN
    factor = jnp.where(is_hot(temperature, size) & is_unstable, 0.9, 1.0)
    is_far_too_hot = is_hot(0.5 * temperature, size) & is_unstable
    return jnp.where(is_diverging | is_far_too_hot, 0.5, factor)


def cooling(temperature, size: int):
    """Factor on the step size after a stretch of burn-in of a mean ``temperature``, relative to the sampler's.

    It is 1 up to a temperature of 1 + ``MAX_STRETCH_EXCESS``, and where ``size`` numbers may exceed 1 as much by
    chance. Above, it reduces the excess to ``MAX_STRETCH_EXCESS`` under the assumption that the excess is proportional
    to the square of the step. The factor is at least one half. (The excess from discretization is; that from
    noise is proportional to the step, and that from noise after control variates to its third power.)
    """
    excess = temperature - 1.0
    limited = jnp.maximum(jnp.sqrt(MAX_STRETCH_EXCESS / jnp.maximum(excess, MAX_STRETCH_EXCESS)), 0.5)
    return jnp.where(excess > MAX_STRETCH_EXCESS + kinetic_margin(size), limited, 1.0)


def tuning(accept_prob, num_tuned, target: float):
    """Factor on the step size after draw number ``num_tuned`` since a calibration, for a mean acceptance of ``target``.

    This is a stochastic approximation [Robbins and Monro 1951] of the logarithm.
    """
    return jnp.exp(0.5 * (num_tuned + 1.0) ** -0.6 * (accept_prob - target))


def cooled(momentum, temperature):
    """``momentum``, shortened to the mean square ``temperature`` if it is longer."""
    square = jnp.vdot(momentum, momentum, precision="highest")
    return momentum * jnp.sqrt(jnp.minimum(1.0, temperature * momentum.size / jnp.where(square > 0, square, 1.0)))
