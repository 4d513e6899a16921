"""The state of warm-up: one small state for each of its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.mcmc.warmup.friction import NUM_DIRECTIONS, Noise
from numpyro_fspace.mcmc.warmup.optimizer import adam
from numpyro_fspace.mcmc.warmup.step_size import StepSize
from numpyro_fspace.sgmcmc.preconditioners import Learned


class Squares(NamedTuple):
    """Sums for the preconditioner: squared gradients (or Hessians) since the last calibration.

    Attributes:
        total: their sum.
        num: their number.
    """

    total: jax.Array
    num: jax.Array


class WarmupState(NamedTuple):
    """State of warm-up.

    Attributes:
        scale: prior standard deviations [P].
        anchor: the start of the chain [P] for an anchored warm start; empty [0] without one, ``()`` after it.
        optimizer: state of Adam; ``()`` after the warm start.
        step: the step size.
        learned: estimates that the preconditioner is built from.
        squares: sums from which these are renewed.
        noise: estimates of the noise of gradients.
    """

    scale: jax.Array
    anchor: Any
    optimizer: Any
    step: StepSize
    learned: Learned
    squares: Squares
    noise: Noise

    @property
    def step_size(self) -> jax.Array:
        """The current step size."""
        return self.step.size

    @property
    def is_started(self) -> bool:
        """Whether this is a state after the warm start, without what only the warm start needs."""
        return self.optimizer == ()

    def started(self) -> WarmupState:
        """A copy without the anchor and the optimizer, which only the warm start needs."""
        return self._replace(anchor=(), optimizer=())

    @classmethod
    def start(cls, key, position, scale, plan) -> WarmupState:
        """The initial state, for flat ``position`` [P] with prior standard deviations ``scale`` [P]."""
        learned = plan.preconditioner.start(position)
        is_hessian = plan.preconditioner.adapts and plan.preconditioner.is_dense
        total = jnp.zeros_like(learned.factor if is_hessian else learned.mean_square)
        start = cls(
            scale=scale,
            anchor=position if plan.warmup.anchored else position[:0],
            optimizer=adam(1).init(position),
            step=StepSize.start(key, position),
            learned=learned,
            squares=Squares(total, jnp.zeros((), int)),
            noise=Noise.start(position, NUM_DIRECTIONS if plan.absorbs_noise else 0),
        )
        return start if plan.schedule.num_optimizing else start.started()
