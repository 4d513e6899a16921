"""The target of a chain: the potential of its model, and its dynamics in the coordinates of its preconditioner."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate
from numpyro_fspace.sgmcmc.gradient_noise import GradientNoise
from numpyro_fspace.sgmcmc.shared import Dynamics


class Target:
    """A model and the plan of a run, which is all that a chain needs besides its state.

    The model's functions are compiled inline, so that each is traced once however often a program calls it.

    Args:
        model: the potential of the model.
        plan: the plan of the run.
    """

    def __init__(self, model: ModelPotential, plan: Plan):
        self.model, self.plan = model, plan
        if plan.control_every is not None:
            model.trace  # noqa: B018  # whose plates the full gradient reads, in inner programs
        self.potential = jax.jit(lambda z, key: model(z, key), inline=True)
        self.prior_gradient = jax.jit(jax.grad(lambda z: model.prior_potential(z)), inline=True)

    def dynamics(self, state: KernelState) -> Dynamics:
        """The dynamics of the sampler at the state of the chain.

        With minibatches the potential is corrected by the control variate, which the first draw after the warm start
        centers.
        """
        position, unravel = flatten(state.z)
        metric = self.plan.preconditioner.build(state.warmup.scale, state.warmup.learned)

        def potential(w, key):
            return self.potential(unravel(w), key)

        if self.plan.control_every is not None:
            potential = with_control_variate(
                potential, lambda w, key: self.model.data_potential(unravel(w), key), state.control
            )
        return Dynamics(position, unravel, metric, potential)

    def gradient_noise(self, state: KernelState) -> GradientNoise | None:
        """The noise of gradients from warm-up; None if it was not measured or the sampler cannot use it."""
        noise = state.warmup.noise
        return GradientNoise(noise.basis, noise.variances) if self.plan.absorbs_noise else None

    def refresh(self, state: KernelState) -> KernelState:
        """``state`` with its potential energy, and the control variate, evaluated anew."""
        if self.plan.control_every is not None:
            state = self.renew_control(state)
        key, key_potential = jax.random.split(state.rng_key)
        value, aux = self.potential(state.z, key_potential)
        return state._replace(info=state.info.with_energy(value, aux), rng_key=key)

    def renew_control(self, state: KernelState) -> KernelState:
        """``state`` with the control variate centered at the position of the chain."""
        key, key_potential = jax.random.split(state.rng_key)
        gradient = self.model.data_gradient(state.z, key_potential)
        control = ControlVariate(ravel_pytree(state.z)[0], ravel_pytree(gradient)[0])
        return state._replace(control=control, rng_key=key)

    def mask(self, z):
        """1 for the parameters that the optimizer moves and 0 for those that it holds [P]."""
        return ravel_pytree({k: jnp.full_like(v, k not in self.plan.held_in_warm_start) for k, v in z.items()})[0]
