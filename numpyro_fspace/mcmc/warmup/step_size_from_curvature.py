"""The step size, from the largest curvature of the potential in the preconditioner's coordinates.

Which step is stable for a curvature is the sampler's own (``stable_step_size`` in ``mcmc/sampler_adapters.py``).
Samplers with a Metropolis test, and MCLMC, are then tuned to an acceptance probability (``step_size_adaptation.py``,
``updates.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["NUM_POWER_ITERATIONS", "StepSize", "calibrated", "largest_curvature", "usable"]

NUM_POWER_ITERATIONS = 40
#: How far differences of gradients go, in posterior standard deviations.
REACH = 0.3
#: Factor on the curvature for a dense preconditioner without a Metropolis test. All directions are equally stiff in its
#: coordinates, so that half the step (SGLD: a quarter) makes a quarter of the error in each.
DENSE_MARGIN = 4.0


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


def calibrated(step: StepSize, curvature, direction, *, sampler, is_dense: bool, may_lengthen) -> StepSize:
    """``step`` after the largest curvature was measured at the position of the chain.

    Args:
        step: the step size so far.
        curvature, direction: what ``largest_curvature`` returned.
        sampler: it determines the stable step size.
        is_dense: whether the preconditioner is dense.
        may_lengthen: whether the step may become longer.
    """
    good = usable(curvature)
    if is_dense and not sampler.is_tuned:
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
