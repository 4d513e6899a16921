"""One chain of a kernel: where it starts, and its draws, in warm-up and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.adaptation import after_draw, before_draw, steadied, tuned
from numpyro_fspace.mcmc.newton import NUM_STEPS, approach
from numpyro_fspace.mcmc.state import Averages, DrawInfo, KernelState
from numpyro_fspace.mcmc.warmup import NUM_DIRECTIONS, Noise, Warmup, WarmupState, drawn_to
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate
from numpyro_fspace.sgmcmc.gradient_noise import GradientNoise

__all__ = ["Chain"]


class Chain(NamedTuple):
    """What a chain's draws need besides its state.

    Attributes:
        model: the potential of the model.
        warmup: settings of the warm-up.
        num_warmup: its draws.
        num_steps: gradient steps per draw.
        step_size: fixed step size or schedule; None if warm-up finds it.
        friction: of the sampler; None if warm-up finds it.
        temperature: T of the sampler.
        transition: the sampler, ``(key, position, momentum, count, potential, step_size, friction, metric, metropolis,
            gradient_noise) -> (position, momentum, Info)``.
        metropolis: whether the sampler tests its steps.
        stable_step_size: the sampler's step size for a largest curvature λ, ``(λ, metropolis) -> ε``.
        preconditioner: ``fs.preconditioners`` object.
        absorbs_noise: whether the sampler takes a ``GradientNoise``.
        control_every: draws between renewals of the control variate's center; None has no control variate.
    """

    model: ModelPotential
    warmup: Warmup
    num_warmup: int
    num_steps: int
    step_size: Any
    friction: float | None
    temperature: float
    transition: Callable
    metropolis: bool
    stable_step_size: Callable
    preconditioner: Any
    absorbs_noise: bool
    control_every: int | None

    @property
    def finds_friction(self) -> bool:
        """Whether warm-up finds the friction."""
        return self.friction is None

    @property
    def calibration_draws(self) -> list[int]:
        """Before which draws warm-up calibrates; none if there is nothing to find."""
        if self.step_size is None or self.preconditioner.adapts:
            return self.warmup.calibration_draws(self.num_warmup)
        return []

    @property
    def _judges_first_draw(self) -> bool:
        """Whether warm-up asks what the first draw of all gained."""
        return self.step_size is None and self.num_warmup > 0 and not self.warmup.num_optimizer_draws(self.num_warmup)

    def start(self, key, init_params, initial_momentum, plan) -> KernelState:
        """The state of a chain at ``init_params``, or where the model's init strategy puts it."""
        key, key_momentum, key_direction = jax.random.split(key, 3)
        z = self.model.init_params() if init_params is None else init_params
        position = ravel_pytree(z)[0]
        if self._judges_first_draw:
            value, aux = self.model(z, key)
        else:
            value, aux = jax.eval_shape(lambda z: self.model(z, key), z)
            value, aux = jnp.full(value.shape, jnp.inf, value.dtype), jnp.zeros(aux.shape, aux.dtype)
        zero, count = jnp.zeros((), position.dtype), jnp.zeros((), int)
        warmup = WarmupState(
            scale=ravel_pytree(self.model.scale())[0],
            optimizer=self.warmup.optimizer(1).init(position),
            direction=jax.random.normal(key_direction, position.shape, position.dtype),
            step_size=zero,
            longest_step=zero,
            num_tuned=count,
            learned=self.preconditioner.start(position),
            squares=self.preconditioner.nothing_seen(position),
            num_squares=count,
            noise=Noise.start(position, NUM_DIRECTIONS if self.finds_friction and self.absorbs_noise else 0),
            anchor=position if self.warmup.anchored else position[:0],
        )
        return KernelState(
            i=count,
            z=z,
            momentum=initial_momentum(key_momentum, position),
            count=count,
            info=DrawInfo(value, aux, zero, zero, zero, zero, zero, jnp.zeros((), bool)),
            averages=Averages(zero, zero, count, count),
            warmup=warmup,
            control=ControlVariate(*(jnp.zeros_like(position if self.control_every else position[:0]),) * 2),
            rng_key=key,
            plan=plan,
        )

    def draw(self, i, state: KernelState) -> KernelState:
        """Draw number ``i``: a warm start or, with the step size calibrated first if it is time, a sample."""
        num_optimizing = self.warmup.num_optimizer_draws(self.num_warmup)
        if num_optimizing == 0:
            return self._calibrate_and_sample(i, state)
        return jax.lax.cond(
            i < num_optimizing,
            lambda state: self._optimize(num_optimizing, state),
            lambda state: self._calibrate_and_sample(i, state),
            state,
        )

    def refresh(self, state: KernelState) -> KernelState:
        """``state`` with its potential energy, and the control variate, evaluated anew."""
        if self.control_every is not None:
            state = self._renew_control(state)
        key, key_potential = jax.random.split(state.rng_key)
        value, aux = self.model(state.z, key_potential)
        info = state.info._replace(potential_energy=value, log_functional_prior=aux)
        return state._replace(info=info, rng_key=key)

    def dynamics(self, state: KernelState):
        """``(position [P], unravel, metric, potential)`` of the sampler.

        The potential is ``(position, key) -> (U, aux)``. With minibatches it is corrected by the control variate,
        which the first draw after the warm start centers.
        """
        position, unravel = flatten(state.z)
        metric = self.preconditioner.build(state.scale, state.warmup.learned)

        def potential(w, key):
            return self.model(unravel(w), key)

        if self.control_every is not None:
            potential = with_control_variate(
                potential, lambda w, key: self.model.data_potential(unravel(w), key), state.control
            )
        return position, unravel, metric, potential

    def gradient_noise(self, state: KernelState) -> GradientNoise | None:
        """What warm-up knows of the noise of gradients; None if that is not asked or the sampler has no use for it."""
        if not (self.finds_friction and self.absorbs_noise):
            return None
        return GradientNoise(state.warmup.noise.basis, state.warmup.noise.variances)

    def _optimize(self, num_draws, state):
        if self.preconditioner.is_dense:
            return self._approach(num_draws, state)
        position, unravel, metric, _ = self.dynamics(state)
        key, key_steps, _ = jax.random.split(state.rng_key, 3)
        position, optimizer, (value, aux) = self.warmup.optimize(
            key_steps,
            position,
            state.warmup.optimizer,
            lambda w, k: self.model(unravel(w), k),
            (state.potential_energy, state.log_functional_prior),
            metric,
            self.num_steps,
            num_draws * self.num_steps,
            ravel_pytree(self.model.is_location())[0],
            self._correction(state, unravel),
        )
        return state._replace(
            i=state.i + 1,
            z=unravel(position),
            info=state.info._replace(potential_energy=value, log_functional_prior=aux),
            warmup=state.warmup._replace(optimizer=optimizer),
            rng_key=key,
        )

    def _approach(self, num_draws, state):
        position, unravel, _, potential = self.dynamics(state)
        key, key_steps, key_potential = jax.random.split(state.rng_key, 3)
        learned, num_steps = state.warmup.learned, -(-NUM_STEPS // num_draws)
        position, factor = approach(
            key_steps, position, learned.factor, lambda w: potential(w, key_potential)[0], state.scale, num_steps
        )
        value, aux = potential(position, key_potential)
        return state._replace(
            i=state.i + 1,
            z=unravel(position),
            info=state.info._replace(potential_energy=value, log_functional_prior=aux),
            warmup=state.warmup._replace(learned=learned._replace(factor=factor)),
            rng_key=key,
        )

    def _correction(self, state, unravel):
        """What is added to the warm start's gradients; None if it is not anchored."""
        if not self.warmup.anchored:
            return None
        return drawn_to(state.warmup.anchor, lambda w: ravel_pytree(self.model.prior_gradient(unravel(w)))[0])

    def _calibrate_and_sample(self, i, state):
        if self.control_every is not None:
            is_time = (i - self.warmup.num_optimizer_draws(self.num_warmup)) % self.control_every == 0
            state = jax.lax.cond(is_time, self._renew_control, lambda s: s, state)
        return after_draw(self, i, self._sample(i, before_draw(self, i, state)))

    def _renew_control(self, state):
        """``state`` with the control variate centered where the chain is."""
        key, key_potential = jax.random.split(state.rng_key)
        gradient = self.model.data_gradient(state.z, key_potential)
        control = ControlVariate(ravel_pytree(state.z)[0], ravel_pytree(gradient)[0])
        return state._replace(control=control, rng_key=key)

    def _sample(self, i, state):
        is_adapting = i < self.num_warmup
        position, unravel, metric, potential = self.dynamics(state)
        key, key_steps = jax.random.split(state.rng_key)
        step_size = state.warmup.step_size if self.step_size is None else self.step_size
        friction = self.friction
        if self.finds_friction:
            friction = self.warmup.friction(step_size, state.warmup.noise.rest, self.temperature)
        new_position, momentum, info = self.transition(
            key_steps,
            position,
            state.momentum,
            state.count,
            potential,
            step_size,
            friction,
            metric,
            self.metropolis,
            self.gradient_noise(state),
        )
        warmup = state.warmup
        if self.step_size is None and self.metropolis:
            warmup, momentum = tuned(self, is_adapting, state, momentum, info)
        elif self.step_size is None:
            warmup, new_position, momentum, info = steadied(self, is_adapting, state, new_position, momentum, info)
        starts = jnp.array([0, *self.warmup.calibration_draws(self.num_warmup), self.num_warmup])
        averages = self._averaged(jnp.any(starts == i), is_adapting, state.averages, info)
        draw = DrawInfo(
            potential_energy=info.potential_energy,
            log_functional_prior=info.aux,
            gradient_norm=info.gradient_norm,
            temperature=info.temperature,
            step_size=info.step_size,
            friction=jnp.asarray(friction, position.dtype),
            accept_prob=info.accept_prob,
            diverging=info.is_diverging,
        )
        return state._replace(
            i=state.i + 1,
            z=unravel(new_position),
            momentum=momentum,
            count=state.count + self.num_steps,
            info=draw,
            averages=averages,
            warmup=warmup,
            rng_key=key,
        )

    @staticmethod
    def _averaged(begins, is_adapting, old, info):
        """``old`` averages with those of one more draw, the first of them if it ``begins`` a stretch."""
        num = jnp.where(begins, 0, old.num_averaged) + 1
        kept = jnp.where(info.is_diverging, old.temperature, info.temperature)
        mean = old.temperature + (kept - old.temperature) / num
        mean_accept = old.accept_prob + (info.accept_prob - old.accept_prob) / num
        return Averages(
            temperature=mean.astype(old.temperature.dtype),
            accept_prob=mean_accept.astype(old.accept_prob.dtype),
            num_averaged=num,
            num_diverging=jnp.where(is_adapting, 0, old.num_diverging + info.is_diverging),
        )
