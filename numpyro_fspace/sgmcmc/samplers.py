"""SGLD, SGHMC and MCLMC with their settings, as chains on flat positions use them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from numpyro_fspace.sgmcmc import mclmc, sghmc, sgld
from numpyro_fspace.sgmcmc.base import Dynamics
from numpyro_fspace.sgmcmc.gradient_noise import GradientNoise

__all__ = ["Given", "Hamiltonian", "Langevin", "Microcanonical", "Sampler"]


#: The longest tuned step for a largest curvature of 1; from 2 on, leapfrog steps are unstable.
LONGEST = 1.5
#: Acceptance probability for which warm-up tunes the step of a tested sampler.
ACCEPT_PROB = 0.9
#: Variance per parameter of the energy error of an untested draw; the smallest acceptance that may result.
ERROR, MIN_TARGET_ACCEPT = 7e-5, 0.8


class Given(NamedTuple):
    """Settings of a sampler that warm-up chooses or the user gives.

    Attributes:
        step_size: a number, or a schedule of the gradient step.
        friction: γ of SGHMC and MCLMC.
        gradient_noise: the noise of gradients, for a sampler whose thermostat takes account of it.
    """

    step_size: Any
    friction: Any
    gradient_noise: GradientNoise | None = None


class Sampler(Protocol):
    """What a kernel's warm-up, chain and report need of a sampler.

    Attributes:
        num_steps: gradient steps per draw.
        temperature: T.
        metropolis: whether steps, or draws, pass a Metropolis test.
        is_tuned: whether warm-up tunes the step size to the acceptance probability of draws.
        has_momentum: whether the state of a chain has a momentum.
        absorbs_noise: whether friction can take up the noise of gradients in the directions where it is largest.
    """

    @property
    def num_steps(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def metropolis(self) -> bool: ...
    @property
    def is_tuned(self) -> bool: ...
    @property
    def has_momentum(self) -> bool: ...
    @property
    def absorbs_noise(self) -> bool: ...

    def initial_momentum(self, key, position):
        """The momentum [P] of a chain that starts, or an empty array."""

    def transition(self, key, dynamics: Dynamics, momentum, count, given: Given):
        """One draw: ``(position, momentum, Info)``."""

    def target_accept_prob(self, size: int) -> float:
        """The acceptance probability of draws of ``size`` parameters that warm-up tunes the step size for."""

    def stable_step_size(self, curvature):
        """The step size for a largest curvature λ in the preconditioner's coordinates."""


@dataclass(frozen=True)
class Langevin:
    """SGLD.

    Attributes:
        num_steps: gradient steps per draw.
        temperature: T.
        metropolis: whether each step is tested.
    """

    num_steps: int
    temperature: float
    metropolis: bool

    has_momentum = False
    absorbs_noise = False

    @property
    def is_tuned(self) -> bool:
        """Whether warm-up tunes the step size to the acceptance probability."""
        return self.metropolis

    def initial_momentum(self, key, position):
        """An empty momentum."""
        return jnp.zeros((0,), position.dtype)

    def transition(self, key, dynamics: Dynamics, momentum, count, given: Given):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""
        kernel = sgld.build_kernel(has_aux=True, metropolis=self.metropolis)
        state, info = kernel(
            key,
            sgld.SGLDState(dynamics.position, count),
            dynamics.potential,
            given.step_size,
            num_steps=self.num_steps,
            temperature=self.temperature,
            metric=dynamics.metric,
        )
        return state.position, momentum, info

    def target_accept_prob(self, size: int) -> float:
        """The acceptance probability that warm-up tunes the step size for."""
        return ACCEPT_PROB

    def stable_step_size(self, curvature):
        """The step size for a largest curvature λ in the preconditioner's coordinates."""
        return (0.4 if self.metropolis else 0.2) / curvature


@dataclass(frozen=True)
class Hamiltonian:
    """SGHMC.

    Attributes:
        num_steps: gradient steps per draw.
        temperature: T.
        metropolis: whether each draw is tested.
        resample_momentum: whether the momentum is redrawn at every draw.
        refresh_every: steps between the thermostat's partial refreshes of the momentum.
        integrator: ``"baoab"`` or ``"euler"``.
    """

    num_steps: int
    temperature: float
    metropolis: bool
    resample_momentum: bool
    refresh_every: int
    integrator: str

    has_momentum = True

    @property
    def is_tuned(self) -> bool:
        """Whether warm-up tunes the step size to the acceptance probability."""
        return self.metropolis

    @property
    def absorbs_noise(self) -> bool:
        """Whether the thermostat takes account of the noise of gradients."""
        return self.integrator == "baoab"

    def initial_momentum(self, key, position):
        """A draw from N(0, T I), flat [P]."""
        return sghmc.init(position, key, temperature=self.temperature).momentum

    def transition(self, key, dynamics: Dynamics, momentum, count, given: Given):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""
        kernel = sghmc.build_kernel(integrator=self.integrator, has_aux=True, metropolis=self.metropolis)
        state, info = kernel(
            key,
            sghmc.SGHMCState(dynamics.position, momentum, count),
            dynamics.potential,
            given.step_size,
            num_steps=self.num_steps,
            friction=given.friction,
            temperature=self.temperature,
            metric=dynamics.metric,
            resample_momentum=self.resample_momentum,
            refresh_every=self.refresh_every,
            gradient_noise=given.gradient_noise,
        )
        return state.position, state.momentum, info

    def target_accept_prob(self, size: int) -> float:
        """The acceptance probability that warm-up tunes the step size for."""
        return ACCEPT_PROB

    def stable_step_size(self, curvature):
        """The step size for a largest curvature λ in the preconditioner's coordinates; a tuned one may be longer."""
        return (LONGEST if self.is_tuned else 1.0) / jnp.sqrt(curvature)


@dataclass(frozen=True)
class Microcanonical:
    """MCLMC.

    Attributes:
        num_steps: gradient steps per draw.
        temperature: T.
        metropolis: whether each draw is tested.
        refresh_every: steps between partial refreshes of the momentum.
    """

    num_steps: int
    temperature: float
    metropolis: bool
    refresh_every: int

    is_tuned = True
    has_momentum = True
    absorbs_noise = False

    def initial_momentum(self, key, position):
        """A uniform direction, of length √P, flat [P]."""
        return mclmc.init(position, key).momentum

    def transition(self, key, dynamics: Dynamics, momentum, count, given: Given):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""
        kernel = mclmc.build_kernel(has_aux=True, metropolis=self.metropolis)
        state, info = kernel(
            key,
            mclmc.MCLMCState(dynamics.position, momentum, count),
            dynamics.potential,
            given.step_size,
            num_steps=self.num_steps,
            friction=given.friction,
            temperature=self.temperature,
            metric=dynamics.metric,
            refresh_every=self.refresh_every,
        )
        return state.position, state.momentum, info

    def target_accept_prob(self, size: int) -> float:
        """The acceptance probability that warm-up tunes the step size for.

        Without a test it is that of an energy error of variance ``ERROR`` times P in a draw: the error of the
        distribution is that of each direction, not that of the sum over all.
        """
        if self.metropolis:
            return ACCEPT_PROB
        return max(MIN_TARGET_ACCEPT, math.erfc(math.sqrt(ERROR * size / 8.0)))

    def stable_step_size(self, curvature):
        """The longest step size for a largest curvature λ in the preconditioner's coordinates."""
        return LONGEST / jnp.sqrt(curvature)
