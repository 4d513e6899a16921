"""The rules of the step size: the stable step for a curvature, and how warm-up tunes, shortens and cools it.

The largest curvature of the potential in the preconditioner's coordinates gives the longest step. Samplers with a
Metropolis test, and MCLMC, are then tuned to an acceptance probability. Others are shortened if a draw of burn-in is
unstable, and cooled if the mean temperature stays too high. ``updates.py`` applies these rules, for the settings of a
sampler (``stable_step_size`` in ``mcmc/sampler_adapters.py``); ``friction.py`` shortens steps for the gradient's noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.posterior.thresholds import KINETIC_LIMIT, kinetic_margin

NUM_POWER_ITERATIONS = 40
#: How far differences of gradients go, in posterior standard deviations.
REACH = 0.3
#: Factor on the curvature for a dense preconditioner without a Metropolis test. All directions are equally stiff in its
#: coordinates, so that half the step (SGLD: a quarter) makes a quarter of the error in each.
DENSE_MARGIN = 4.0
#: The longest tuned step for a largest curvature of 1; from 2 on, leapfrog steps are unstable.
LONGEST = 1.5
#: How far a mode may turn between two refreshes of the momentum, with exact gradients and with noisy ones.
MAX_TURN, MAX_NOISY_TURN = 5.0 * math.pi / 6.0, 2.0 * math.pi / 3.0
#: Acceptance probability for which warm-up tunes the step of a tested sampler.
ACCEPT_PROB = 0.9
#: Variance per parameter of the energy error of an untested draw; the smallest acceptance that may result.
ERROR, MIN_TARGET_ACCEPT = 7e-5, 0.8
#: Excess of the mean kinetic temperature over 1, beyond chance, after which burn-in shortens the step permanently.
MAX_STRETCH_EXCESS = 0.05


def langevin_step(curvature, *, metropolis: bool):
    """The stable step of SGLD for a largest curvature λ."""
    return (0.4 if metropolis else 0.2) / curvature


def leapfrog_step(curvature, num_steps: int, *, is_tuned: bool):
    """The stable leapfrog step for a largest curvature λ and ``num_steps`` steps between refreshes of the momentum.

    A tuned step is at most this. If not tuned, gradients may be noisy.
    """
    longest, turn = (LONGEST, MAX_TURN) if is_tuned else (1.0, MAX_NOISY_TURN)
    return min(longest, step_of_turn(turn, num_steps)) / jnp.sqrt(curvature)


def step_of_turn(turn: float, num_steps: int) -> float:
    """The step ε√λ at which a mode turns by ``turn`` in ``num_steps`` = k leapfrog steps, 2 sin(turn / 2k).

    At a turn of π refreshes of the momentum meet the mode always at the same phase, so that its amplitude hardly
    changes, and the noise of gradients accumulates in it. Its energy returns, and a Metropolis test accepts every draw,
    so that the acceptance does not tell.
    """
    return 2.0 * math.sin(turn / (2 * num_steps))


class StepSize(NamedTuple):
    """The step size that warm-up adapts.

    Attributes:
        size: the current step size; 0 before the first calibration.
        longest: its upper limit, the step size from the last calibration.
        num_tuned: draws since then; tuning to the acceptance probability becomes finer with them.
        direction: estimate of the direction of largest curvature [P].
    """

    size: jax.Array
    longest: jax.Array
    num_tuned: jax.Array
    direction: jax.Array

    @classmethod
    def start(cls, key, position) -> StepSize:
        """The initial state, for flat ``position`` [P]."""
        zero, direction = jnp.zeros((), position.dtype), jax.random.normal(key, position.shape, position.dtype)
        return cls(zero, zero, jnp.zeros((), int), direction)


def largest_curvature(
    energy, position, direction, metric, *, num_iterations=NUM_POWER_ITERATIONS, by_differences: bool = False
):
    """Largest |eigenvalue| of Sᵀ ∇²U S at ``position`` [P], by power iteration from ``direction`` [P].

    ``energy(w)`` is U for one minibatch and one set of measurement points. The Hessian's products are derivatives of
    the gradient or, with ``by_differences``, central differences over ``REACH`` posterior standard deviations.

    Returns:
        ``(λ, direction)``.
    """
    gradient = jax.grad(energy)
    if by_differences:

        def hessian_times(change, curvature):
            reach = REACH / jnp.sqrt(jnp.maximum(curvature, 1.0))
            above, below = jax.lax.map(gradient, position + reach * jnp.stack([change, -change]))
            return (above - below) / (2 * reach)

    else:
        _, times = jax.linearize(gradient, position)

        def hessian_times(change, curvature):
            return times(change)

    def step(_, carry):
        direction, curvature = carry
        product = metric.scale_gradient(hessian_times(metric.scale(direction), curvature))
        norm = jnp.linalg.norm(product)
        return product / jnp.where(norm > 0, norm, 1.0), norm

    start = direction / jnp.linalg.norm(direction), jnp.zeros((), direction.dtype)
    direction, norm = jax.lax.fori_loop(0, num_iterations, step, start)
    return norm, direction


def usable(curvature):
    """Whether a curvature is positive and finite."""
    return jnp.isfinite(curvature) & (curvature > 0)


def calibrated(step: StepSize, plan, curvature, direction, *, may_lengthen) -> StepSize:
    """``step`` after the largest curvature was measured at the position of the chain.

    Args:
        step: the step size so far.
        plan: that of the run, whose sampler determines the stable step size.
        curvature, direction: what ``largest_curvature`` returned.
        may_lengthen: whether the step may become longer.
    """
    good, sampler = usable(curvature), plan.sampler
    if plan.preconditioner.is_dense and not sampler.is_tuned:
        curvature = DENSE_MARGIN * curvature
    found = jnp.where(good, sampler.stable_step_size(curvature), 0.5 * step.size)
    # λ belongs to one minibatch and one set of points; a step that has been stable is not cut by more than half. Tuning
    # to the acceptance probability replaces measurements of curvature elsewhere.
    least = 0.0 if sampler.is_tuned else 0.5 * step.size
    shortened = jnp.clip(found, least, step.size)
    return StepSize(
        size=jnp.where(may_lengthen | (step.size == 0), found, shortened),
        longest=found,
        num_tuned=jnp.zeros_like(step.num_tuned),
        direction=jnp.where(good, direction, step.direction),
    )


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


def target_accept_prob(size: int, *, metropolis: bool) -> float:
    """The acceptance probability of draws of ``size`` = P parameters that warm-up tunes the step size for.

    Without a test (MCLMC) it is that of an energy error of variance ``ERROR`` times P in a draw: the error of the
    distribution is that of each direction, not that of the sum over all.
    """
    if metropolis:
        return ACCEPT_PROB
    return max(MIN_TARGET_ACCEPT, math.erfc(math.sqrt(ERROR * size / 8.0)))


def tuning(accept_prob, num_tuned, target: float):
    """Factor on the step size after draw number ``num_tuned`` since a calibration, for a mean acceptance of ``target``.

    This is a stochastic approximation [Robbins and Monro 1951] of the logarithm.
    """
    return jnp.exp(0.5 * (num_tuned + 1.0) ** -0.6 * (accept_prob - target))


def cooled(momentum, temperature):
    """``momentum``, shortened to the mean square ``temperature`` if it is longer."""
    square = jnp.vdot(momentum, momentum, precision="highest")
    return momentum * jnp.sqrt(jnp.minimum(1.0, temperature * momentum.size / jnp.where(square > 0, square, 1.0)))
