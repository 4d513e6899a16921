"""One chain of a kernel: its state, where it starts, and its draws, in warm-up and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace.infer.warmup import (
    NUM_GRADIENTS,
    Warmup,
    WarmupState,
    drawn_to,
    largest_curvature,
    leading_curvatures,
    noise_variances,
)
from numpyro_fspace.infer.xla import flatten
from numpyro_fspace.potential import ModelPotential
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

__all__ = ["Chain", "KernelState"]

#: Curvature elsewhere over curvature here, for a low-rank preconditioner: where it was made, and elsewhere.
TURNING, TURNED = 30.0, 3.0


class KernelState(NamedTuple):
    """State of a chain under NumPyro's ``MCMC``; every field can be an ``extra_fields`` entry.

    Attributes:
        i: draws made so far, warm-up included.
        z: unconstrained values of the latent sites.
        potential_energy: U at the last gradient (an estimate, if minibatches or points are random); infinite before it.
        log_functional_prior: Σ scale · log P0(f(X_M)) at the same place.
        gradient_norm: Euclidean norm of that gradient.
        temperature: mean kinetic temperature of the draw (see ``fs.sgmcmc.Info``).
        mean_temperature: its running mean since the last calibration or, after warm-up, over the sampling phase of this
            run; a draw that was undone does not count.
        num_averaged: how many draws that mean is over.
        step_size: the step size used last.
        friction: the friction used last; 0 for SGLD, which has none.
        diverging: whether this draw left the finite numbers (or ran above temperature 10⁴; in warm-up, gained energy
            and was twice as hot as chance allows) and was undone.
        num_diverging: how many draws of the sampling phase were.
        momentum: momentum of the chain, flat [P]; empty [0] for SGLD.
        count: gradient steps of the sampler, read by schedules.
        scale: prior standard deviations, flat [P].
        warmup: what warm-up adapts, frozen afterwards.
        control: centre of the control variate and the data's full gradient there, flat [P]; empty [0] without one.
        rng_key: the chain's key.
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
    diverging: jax.Array
    num_diverging: jax.Array
    momentum: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    scale: jax.Array
    warmup: WarmupState
    control: ControlVariate
    rng_key: jax.Array


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
        transition: the sampler, ``(key, position, momentum, count, potential, step_size, friction, metric) ->
            (position, momentum, Info)``.
        stable_step_size: the sampler's step size for a largest curvature λ.
        preconditioner: ``fs.preconditioners`` object.
        control_every: draws between renewals of the control variate's centre; None has no control variate.
    """

    model: ModelPotential
    warmup: Warmup
    num_warmup: int
    num_steps: int
    step_size: Any
    friction: float | None
    temperature: float
    transition: Callable
    stable_step_size: Callable
    preconditioner: Any
    control_every: int | None

    @property
    def finds_friction(self) -> bool:
        """Whether warm-up finds the friction."""
        return self.friction is None

    def start(self, key, init_params, initial_momentum) -> KernelState:
        """The state of a chain at ``init_params``, or where the model's init strategy puts it."""
        key, key_momentum, key_direction = jax.random.split(key, 3)
        z = self.model.init_params() if init_params is None else init_params
        position = ravel_pytree(z)[0]
        value, aux = jax.eval_shape(lambda z: self.model(z, key), z)
        zero, count = jnp.zeros((), position.dtype), jnp.zeros((), int)
        warmup = WarmupState(
            optimiser=self.warmup.optimiser(1).init(position),
            direction=jax.random.normal(key_direction, position.shape, position.dtype),
            step_size=zero,
            learned=self.preconditioner.start(position),
            squares=jnp.zeros_like(position) if self.preconditioner.adapts else jnp.zeros((0,), position.dtype),
            num_squares=count,
            noise_variance=zero,
            noise_traces=jnp.zeros((2,), position.dtype),
            anchor=position if self.warmup.anchored else position[:0],
        )
        return KernelState(
            i=count,
            z=z,
            potential_energy=jnp.full(value.shape, jnp.inf, value.dtype),
            log_functional_prior=jnp.zeros(aux.shape, aux.dtype),
            gradient_norm=zero,
            temperature=zero,
            mean_temperature=zero,
            num_averaged=count,
            step_size=zero,
            friction=zero,
            diverging=jnp.zeros((), bool),
            num_diverging=count,
            momentum=initial_momentum(key_momentum, position),
            count=count,
            scale=ravel_pytree(self.model.scale())[0],
            warmup=warmup,
            control=ControlVariate(*(jnp.zeros_like(position if self.control_every else position[:0]),) * 2),
            rng_key=key,
        )

    def draw(self, i, state: KernelState) -> KernelState:
        """Draw number ``i``: a warm start or, with the step size calibrated first if it is time, a sample."""
        num_optimising = self.warmup.num_optimiser_draws(self.num_warmup)
        if num_optimising == 0:
            return self._calibrate_and_sample(i, state)
        return jax.lax.cond(
            i < num_optimising,
            lambda state: self._optimise(num_optimising, state),
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
        which the first draw after the warm start centres.
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

    def _optimise(self, num_draws, state):
        position, unravel, metric, _ = self.dynamics(state)
        key, key_steps, _ = jax.random.split(state.rng_key, 3)
        position, optimiser, (value, aux) = self.warmup.optimise(
            key_steps,
            position,
            state.warmup.optimiser,
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
            warmup=state.warmup._replace(optimiser=optimiser),
            rng_key=key,
        )

    def _correction(self, state, unravel):
        """What is added to the warm start's gradients; None if it is not anchored."""
        if not self.warmup.anchored:
            return None
        return drawn_to(state.warmup.anchor, lambda w: ravel_pytree(self.model.prior_gradient(unravel(w)))[0])

    def _calibrate_and_sample(self, i, state):
        if self.control_every is not None:
            is_time = (i - self.warmup.num_optimiser_draws(self.num_warmup)) % self.control_every == 0
            state = jax.lax.cond(is_time, self._renew_control, lambda s: s, state)
        draws = self.warmup.calibration_draws(self.num_warmup)
        if not draws or not (self.step_size is None or self.preconditioner.adapts):
            return self._sample(i, state)
        if self.step_size is None and state.momentum.size:
            state = self._cool((i == draws[3]) | (i == self.num_warmup), self.num_warmup - draws[3], state)
        is_time = jnp.any(jnp.array(draws) == i)
        may_lengthen = i < (draws[3] if self.preconditioner.adapts else draws[2])
        if self.preconditioner.rank:
            state = jax.lax.cond(is_time & (i < draws[3]), self._find_directions, lambda s: s, state)
        state = jax.lax.cond(is_time, lambda s: self._calibrate(may_lengthen, s), lambda s: s, state)
        if self.finds_friction:
            state = self._learn_noise((i == draws[2]) | (i == draws[3]) | (i == self.num_warmup), state)
        state = self._sample(i, state)
        if self.preconditioner.adapts:
            is_learning = (i >= draws[0]) & (i < draws[2])
            state = jax.lax.cond(is_learning, self._collect_square, lambda s: s, state)
        if self.finds_friction:
            is_measuring = (i >= draws[1]) & (i < self.num_warmup)
            state = jax.lax.cond(is_measuring, self._measure_noise, lambda s: s, state)
        return state

    def _renew_control(self, state):
        """``state`` with the control variate centred where the chain is."""
        key, key_potential = jax.random.split(state.rng_key)
        gradient = self.model.data_gradient(state.z, key_potential)
        control = ControlVariate(ravel_pytree(state.z)[0], ravel_pytree(gradient)[0])
        return state._replace(control=control, rng_key=key)

    def _learn_squares(self, state):
        """``state`` with its preconditioner renewed from the gradients since the last calibration."""
        warmup = state.warmup
        mean = warmup.squares / jnp.maximum(warmup.num_squares, 1)
        mean = jnp.where(warmup.num_squares > 0, mean, warmup.learned.mean_square)
        warmup = warmup._replace(
            learned=warmup.learned._replace(mean_square=mean),
            squares=jnp.zeros_like(warmup.squares),
            num_squares=jnp.zeros_like(warmup.num_squares),
        )
        return state._replace(warmup=warmup)

    def _find_directions(self, state):
        """``state`` with the leading directions of curvature where it is."""
        state = self._learn_squares(state)
        learned = state.warmup.learned
        diagonal = self.preconditioner.build(state.scale, learned).s
        position, _, _, potential = self.dynamics(state)
        key, key_potential = jax.random.split(state.rng_key)
        basis, curvatures = leading_curvatures(
            lambda w, k: potential(w, k)[0], position, learned.basis, key_potential, Diagonal(diagonal)
        )
        good = jnp.all(jnp.isfinite(basis)) & jnp.all(jnp.isfinite(curvatures))
        basis, curvatures = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), (basis, curvatures), (learned.basis, learned.curvatures)
        )
        warmup = state.warmup._replace(learned=learned._replace(basis=basis, curvatures=curvatures))
        return state._replace(warmup=warmup, rng_key=key)

    def _calibrate(self, may_lengthen, state):
        """``state`` with its preconditioner renewed, and the step size that suits it there."""
        state = self._learn_squares(state)
        warmup = state.warmup
        if self.step_size is not None:
            return state
        position, _, metric, potential = self.dynamics(state)
        key, key_potential = jax.random.split(state.rng_key)
        curvature, direction = largest_curvature(
            lambda w, k: potential(w, k)[0], position, warmup.direction, key_potential, metric
        )
        good = jnp.isfinite(curvature) & (curvature > 0)
        if self.preconditioner.rank:
            curvature = curvature * jnp.where(may_lengthen, TURNING, TURNED)
            may_lengthen = True  # at last calibration it is judged away from where it was made
        found = jnp.where(good, self.stable_step_size(curvature), 0.5 * warmup.step_size)
        # λ belongs to one minibatch and one set of points; a step that has proved itself is not cut by more than half.
        shortened = jnp.clip(found, 0.5 * warmup.step_size, warmup.step_size)
        step_size = jnp.where(may_lengthen | (warmup.step_size == 0), found, shortened)  # 0 before the first
        direction = jnp.where(good, direction, warmup.direction)
        return state._replace(warmup=warmup._replace(direction=direction, step_size=step_size), rng_key=key)

    def _cool(self, is_time, num_draws, state):
        """``state`` with a shorter step, if it is time, for the heat of ``num_draws`` since the last calibration."""
        warmup = state.warmup
        factor = self.warmup.cooling(state.mean_temperature / self.temperature, num_draws * state.scale.size)
        step_size = jnp.where(is_time, factor.astype(warmup.step_size.dtype), 1.0) * warmup.step_size
        return state._replace(warmup=warmup._replace(step_size=step_size))

    def _learn_noise(self, is_time, state):
        """``state`` with the variance of the gradient's noise, if it is time, that was measured since the last."""
        warmup = state.warmup
        trace, squared = warmup.noise_traces
        known = is_time & (trace > 0)
        variance = jnp.where(known, squared / jnp.where(known, trace, 1.0), warmup.noise_variance)
        traces = jnp.where(is_time, 0.0, warmup.noise_traces)
        return state._replace(warmup=warmup._replace(noise_variance=variance, noise_traces=traces))

    def _measure_noise(self, state):
        """Add what some gradients say of their noise to what the friction is found from.

        The key is none that the chain comes to: its draws are the same whether or not this is asked.
        """
        position, _, metric, potential = self.dynamics(state)
        keys = jax.random.split(jax.random.fold_in(state.rng_key, 2), NUM_GRADIENTS)
        gradients = jax.lax.map(lambda key: jax.grad(lambda w: potential(w, key)[0])(position), keys)
        trace, weighted = noise_variances(jax.vmap(metric.scale_gradient)(gradients))
        traces = jnp.stack([trace, trace * weighted])
        good = jnp.all(jnp.isfinite(traces)) & ~state.diverging
        warmup = state.warmup
        return state._replace(warmup=warmup._replace(noise_traces=warmup.noise_traces + jnp.where(good, traces, 0.0)))

    def _collect_square(self, state):
        """Add one squared gradient, in prior scales, to what the preconditioner learns from."""
        position, _, _, potential = self.dynamics(state)
        key, key_potential = jax.random.split(state.rng_key)
        gradient = state.scale * jax.grad(lambda w: potential(w, key_potential)[0])(position)
        good = jnp.all(jnp.isfinite(gradient)) & ~state.diverging
        warmup = state.warmup
        warmup = warmup._replace(
            squares=warmup.squares + jnp.where(good, gradient**2, 0.0), num_squares=warmup.num_squares + good
        )
        return state._replace(warmup=warmup, rng_key=key)

    def _sample(self, i, state):
        is_adapting = i < self.num_warmup
        position, unravel, metric, potential = self.dynamics(state)
        key, key_steps = jax.random.split(state.rng_key)
        step_size = state.warmup.step_size if self.step_size is None else self.step_size
        friction = self.friction
        if self.finds_friction:
            friction = self.warmup.friction(step_size, state.warmup.noise_variance, self.temperature)
        new_position, momentum, info = self.transition(
            key_steps, position, state.momentum, state.count, potential, step_size, friction, metric
        )
        warmup = state.warmup
        if self.step_size is None:
            relative = info.temperature / self.temperature
            heat = 0.5 * position.size * (info.temperature - self.temperature)  # SGLD's speed is not remembered
            if momentum.size:
                heat = _kinetic(momentum) - _kinetic(state.momentum)
            gained = (info.potential_energy - state.potential_energy + heat) / self.temperature
            factor = self.warmup.shortening(relative, gained, info.is_diverging, position.size)
            factor = jnp.where(is_adapting, factor, 1.0)
            undo = factor <= 0.5
            warmup = warmup._replace(step_size=warmup.step_size * factor.astype(position.dtype))
            # An unstable draw may end finite but far away, from where short steps never come back: it is undone. And
            # heat must not outlive the step size it came from: short steps would take for ever to lose it, and be
            # shortened for it again and again.
            info = info._replace(
                is_diverging=info.is_diverging | undo,
                potential_energy=jnp.where(undo, state.potential_energy, info.potential_energy),
                aux=jnp.where(undo, state.log_functional_prior, info.aux),
            )
            is_hot = is_adapting & self.warmup.is_hot(relative, position.size)
            new_position = jnp.where(undo, position, new_position)
            momentum = jnp.where(undo, state.momentum, momentum)
            momentum = jnp.where(undo | is_hot, _cooled(momentum, self.temperature), momentum)
        position = new_position
        starts = jnp.array([0, *self.warmup.calibration_draws(self.num_warmup), self.num_warmup])
        num_averaged = jnp.where(jnp.any(starts == i), 0, state.num_averaged) + 1
        kept = jnp.where(info.is_diverging, state.mean_temperature, info.temperature)
        mean = state.mean_temperature + (kept - state.mean_temperature) / num_averaged
        return state._replace(
            i=state.i + 1,
            z=unravel(position),
            potential_energy=info.potential_energy,
            log_functional_prior=info.aux,
            gradient_norm=info.gradient_norm,
            temperature=info.temperature,
            mean_temperature=mean.astype(state.mean_temperature.dtype),
            num_averaged=num_averaged,
            step_size=info.step_size,
            friction=jnp.asarray(friction, position.dtype),
            diverging=info.is_diverging,
            num_diverging=jnp.where(is_adapting, 0, state.num_diverging + info.is_diverging),
            momentum=momentum,
            count=state.count + self.num_steps,
            warmup=warmup,
            rng_key=key,
        )


def _kinetic(momentum):
    return 0.5 * jnp.vdot(momentum, momentum)


def _cooled(momentum, temperature):
    """``momentum``, shortened to the mean square ``temperature`` if it is longer."""
    square = jnp.vdot(momentum, momentum)
    return momentum * jnp.sqrt(jnp.minimum(1.0, temperature * momentum.size / jnp.where(square > 0, square, 1.0)))
