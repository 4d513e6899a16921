"""What kernels need of a sampler: the base class ``Sampler``, and SGLD, SGHMC and MCLMC with their settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import jax.numpy as jnp

from numpyro_fspace.mcmc.warmup.step_size import langevin_step, leapfrog_step
from numpyro_fspace.sgmcmc import mclmc, sghmc, sgld
from numpyro_fspace.sgmcmc.gradient_noise import GradientNoise
from numpyro_fspace.sgmcmc.shared import Dynamics


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """What a kernel's warm-up, chain and report need of a sampler.

    Attributes:
        num_steps: gradient steps per draw.
        temperature: T.
        metropolis: whether each draw (of ``Langevin`` each step) passes a Metropolis test.
        has_momentum: whether the state of a chain has a momentum.
        absorbs_noise: whether friction can take up the noise of gradients in the directions where it is largest.
        is_tuned: whether warm-up tunes the step size to the acceptance probability of draws.
    """

    num_steps: int
    temperature: float
    metropolis: bool

    has_momentum: ClassVar[bool] = True

    @classmethod
    def of(cls, kernel, *, metropolis: bool) -> Sampler:
        """The algorithm with the settings of a kernel, with a Metropolis test or without one."""
        settings = {field.name: getattr(kernel, field.name) for field in fields(cls)}
        return cls(**settings | {"metropolis": metropolis})

    @property
    def absorbs_noise(self) -> bool:
        return False

    @property
    def is_tuned(self) -> bool:
        return self.metropolis

    @abstractmethod
    def initial_momentum(self, key, position):
        """The momentum [P] of a chain that starts, or an empty array."""

    @abstractmethod
    def transition(
        self, key, dynamics: Dynamics, momentum, count, *, step_size, friction, gradient_noise: GradientNoise | None
    ):
        """One draw, ``num_steps`` gradient steps.

        Args:
            key: random key.
            dynamics: where the draw starts, the potential and the preconditioner.
            momentum: the momentum of the chain.
            count: gradient steps made so far, read by schedules.
            step_size: a number, or a schedule of the gradient step.
            friction: γ of SGHMC and MCLMC.
            gradient_noise: the noise of gradients, for a sampler whose thermostat takes account of it.

        Returns:
            ``(position, momentum, Info)``.
        """

    @abstractmethod
    def stable_step_size(self, curvature):
        """The step size for a largest curvature λ in the preconditioner's coordinates; a tuned one is at most this."""

    def _run(self, algorithm, key, state, dynamics, step_size, *, variant=None, **settings):
        """A draw by a module of ``sgmcmc`` from a state of its own: ``(state, Info)``."""
        kernel = algorithm.build_kernel(has_aux=True, metropolis=self.metropolis, **(variant or {}))
        common = {"num_steps": self.num_steps, "temperature": self.temperature, "metric": dynamics.metric}
        return kernel(key, state, dynamics.potential, step_size, **common, **settings)


class Langevin(Sampler):
    """SGLD."""

    has_momentum = False

    def initial_momentum(self, key, position):
        return jnp.zeros((0,), position.dtype)

    def transition(self, key, dynamics, momentum, count, *, step_size, friction, gradient_noise):
        state, info = self._run(sgld, key, sgld.SGLDState(dynamics.position, count), dynamics, step_size)
        return state.position, momentum, info

    def stable_step_size(self, curvature):
        return langevin_step(curvature, metropolis=self.metropolis)


@dataclass(frozen=True, kw_only=True)
class Hamiltonian(Sampler):
    """SGHMC.

    Attributes:
        resample_momentum: whether the momentum is redrawn at every draw.
        refresh_every: steps between the thermostat's partial refreshes of the momentum.
        integrator: ``"baoab"`` or ``"euler"``.
    """

    resample_momentum: bool
    refresh_every: int
    integrator: str

    @property
    def absorbs_noise(self):
        return self.integrator == "baoab"

    def initial_momentum(self, key, position):
        return sghmc.init(position, key, temperature=self.temperature).momentum

    def transition(self, key, dynamics, momentum, count, *, step_size, friction, gradient_noise):
        settings = {
            "variant": {"integrator": self.integrator},
            "friction": friction,
            "resample_momentum": self.resample_momentum,
            "refresh_every": self.refresh_every,
            "gradient_noise": gradient_noise,
        }
        start = sghmc.SGHMCState(dynamics.position, momentum, count)
        state, info = self._run(sghmc, key, start, dynamics, step_size, **settings)
        return state.position, state.momentum, info

    def stable_step_size(self, curvature):
        num_steps = self.refresh_every if self.integrator == "baoab" else 1
        return leapfrog_step(curvature, num_steps, is_tuned=self.is_tuned)


@dataclass(frozen=True, kw_only=True)
class Microcanonical(Sampler):
    """MCLMC, which warm-up tunes with and without a test.

    Attributes:
        refresh_every: steps between partial refreshes of the momentum.
    """

    refresh_every: int

    is_tuned = True

    def initial_momentum(self, key, position):
        return mclmc.init(position, key).momentum

    def transition(self, key, dynamics, momentum, count, *, step_size, friction, gradient_noise):
        settings = {"friction": friction, "refresh_every": self.refresh_every}
        start = mclmc.MCLMCState(dynamics.position, momentum, count)
        state, info = self._run(mclmc, key, start, dynamics, step_size, **settings)
        return state.position, state.momentum, info

    def stable_step_size(self, curvature):
        # The force is that of U/T.
        return leapfrog_step(curvature / self.temperature, self.refresh_every, is_tuned=True)
