"""One chain of a kernel: its state, where it starts, and its draws, in warm-up and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.adaptation import after_draw, before_draw, steadied, tuned
from numpyro_fspace.mcmc.newton import NUM_STEPS, approach
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.mcmc.warmup import NUM_DIRECTIONS, Noise, Warmup, WarmupState, drawn_to
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate
from numpyro_fspace.sgmcmc.gradient_noise import GradientNoise

__all__ = ["Chain", "KernelState"]


class KernelState(NamedTuple):
    """State of a chain under NumPyro's ``MCMC``; every field but ``plan`` can be an ``extra_fields`` entry.

    Attributes:
        i: draws made so far, warm-up included.
        z: unconstrained values of the latent sites.
        potential_energy: U at the last gradient (an estimate, if minibatches or points are random); before it infinite,
            or U where the chain starts if warm-up begins with the sampler.
        log_functional_prior: Σ scale · log P0(f(X_M)) at the same place.
        gradient_norm: Euclidean norm of that gradient.
        temperature: mean kinetic temperature of the draw (see ``fs.sgmcmc.Info``).
        mean_temperature: its running mean since the last calibration or, after warm-up, over the sampling phase of this
            run; a draw that was undone does not count.
        num_averaged: how many draws that mean is over.
        step_size: the step size used last.
        friction: the friction used last, outside of the noise's directions; 0 for SGLD, which has none.
        accept_prob: acceptance probability of the draw's Metropolis test, the mean over its steps for SGLD; 1 where
            there is no test.
        mean_accept_prob: its mean over the same draws as ``mean_temperature``.
        diverging: whether this draw left the finite numbers (or ran above temperature 10⁴; in warm-up, gained energy
            and was twice as hot as chance allows) and was undone; with a Metropolis test, whether it met NaN.
        num_diverging: how many draws of the sampling phase were.
        momentum: momentum of the chain, flat [P]; empty [0] for SGLD.
        count: gradient steps of the sampler, read by schedules.
        scale: prior standard deviations, flat [P].
        warmup: what warm-up adapts, frozen afterwards.
        control: center of the control variate and the data's full gradient there, flat [P]; empty [0] without one.
        rng_key: the chain's key.
        plan: what the programs that draw from this state depend on; no array.
    """

    i: jax.Array
    z: dict
    potential_energy: jax.Array
    log_functional_prior: jax.Array
    gradient_norm: jax.Array
    temperature: jax.Array
    mean_temperature: jax.Array
    num_averaged: jax.Array
    step_size: jax.Array
    friction: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    diverging: jax.Array
    num_diverging: jax.Array
    momentum: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    scale: jax.Array
    warmup: WarmupState
    control: ControlVariate
    rng_key: jax.Array
    plan: Plan


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
            potential_energy=value,
            log_functional_prior=aux,
            gradient_norm=zero,
            temperature=zero,
            mean_temperature=zero,
            num_averaged=count,
            step_size=zero,
            friction=zero,
            accept_prob=zero,
            mean_accept_prob=zero,
            diverging=jnp.zeros((), bool),
            num_diverging=count,
            momentum=initial_momentum(key_momentum, position),
            count=count,
            scale=ravel_pytree(self.model.scale())[0],
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
        return state._replace(potential_energy=value, log_functional_prior=aux, rng_key=key)

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
            potential_energy=value,
            log_functional_prior=aux,
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
            potential_energy=value,
            log_functional_prior=aux,
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
        num_averaged = jnp.where(jnp.any(starts == i), 0, state.num_averaged) + 1
        kept = jnp.where(info.is_diverging, state.mean_temperature, info.temperature)
        mean = state.mean_temperature + (kept - state.mean_temperature) / num_averaged
        mean_accept = state.mean_accept_prob + (info.accept_prob - state.mean_accept_prob) / num_averaged
        return state._replace(
            i=state.i + 1,
            z=unravel(new_position),
            potential_energy=info.potential_energy,
            log_functional_prior=info.aux,
            gradient_norm=info.gradient_norm,
            temperature=info.temperature,
            mean_temperature=mean.astype(state.mean_temperature.dtype),
            num_averaged=num_averaged,
            step_size=info.step_size,
            friction=jnp.asarray(friction, position.dtype),
            accept_prob=info.accept_prob,
            mean_accept_prob=mean_accept.astype(state.mean_accept_prob.dtype),
            diverging=info.is_diverging,
            num_diverging=jnp.where(is_adapting, 0, state.num_diverging + info.is_diverging),
            momentum=momentum,
            count=state.count + self.num_steps,
            warmup=warmup,
            rng_key=key,
        )
