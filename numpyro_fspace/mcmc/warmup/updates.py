"""The parts of warm-up put together: the steps before a draw, on a draw, and after it.

Each function takes the target, the number of a draw and the state of a chain, and returns the updated state. The
schedule determines when each acts; none acts after the end of warm-up.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.warmup import friction, step_size
from numpyro_fspace.mcmc.warmup.newton import NUM_STEPS, approach, hessian
from numpyro_fspace.mcmc.warmup.optimizer import adam, descend, drawn_to
from numpyro_fspace.mcmc.warmup.state import Squares
from numpyro_fspace.sgmcmc.linear_maps import Dense, narrowed, whitened
from numpyro_fspace.sgmcmc.shared import select, squared_norm

#: Largest number of minibatches in the Hessian of a preconditioner's dense block.
MAX_BATCHES = 8


def warm_start(target, i, state):
    """``state`` after a draw of the warm start: Adam's updates or, for a dense preconditioner, Newton's."""
    plan, dynamics = target.plan, target.dynamics(state)
    num_draws = plan.schedule.num_optimizing
    key, key_steps, key_potential = jax.random.split(state.rng_key, 3)
    if plan.preconditioner.is_dense:
        learned = state.warmup.learned
        position, factor = approach(
            key_steps,
            dynamics.position,
            learned.factor,
            lambda w: dynamics.potential(w, key_potential)[0],
            scale=state.warmup.scale,
            num_steps=-(-NUM_STEPS // num_draws),
        )
        value = dynamics.potential(position, key_potential)
        warmup = state.warmup._replace(learned=learned._replace(factor=factor))
    else:
        energy = state.info.potential_energy, state.info.log_functional_prior
        position, optimizer, value = descend(
            key_steps,
            (dynamics.position, state.warmup.optimizer, energy),
            _warm_start_gradient(target, state, dynamics.unravel),
            dynamics.metric,
            optimizer=adam(num_draws * plan.sampler.num_steps, plan.warmup.learning_rate),
            num_updates=plan.sampler.num_steps,
            mask=target.mask(state.z),
        )
        warmup = state.warmup._replace(optimizer=optimizer)
    info = state.info.with_energy(*value)
    return state._replace(i=state.i + 1, z=dynamics.unravel(position), info=info, warmup=warmup, rng_key=key)


def calibrate(target, i, state):
    """``state`` after the calibrations that precede draw ``i``, one of ``plan.interruptions``."""
    plan = target.plan
    draws = plan.schedule.calibrations
    if plan.control_every is not None:
        state = target.renew_control(state)
    if plan.may_shorten and plan.sampler.has_momentum:
        state = _cool(plan, (i == draws[3]) | (i == plan.num_warmup), state)
    is_main = jnp.any(jnp.array(draws) == i)
    is_time = is_main | jnp.any(jnp.array(plan.schedule.shortenings) == i) if plan.may_shorten else is_main
    may_lengthen = is_main & (i < (draws[3] if plan.preconditioner.adapts else draws[2]))
    num_iterations = jnp.where(is_main, step_size.NUM_POWER_ITERATIONS, step_size.NUM_POWER_ITERATIONS // 4)
    if plan.preconditioner.ranges:
        is_learning = is_main & (i <= draws[2])
        state = jax.lax.cond(is_learning, functools.partial(_learn_block, target), lambda s: s, state)
    calibrated = functools.partial(_calibrate, target, may_lengthen, num_iterations)
    state = jax.lax.cond(is_time, calibrated, lambda s: s, state)
    return state if plan.friction is not None else _learn_noise(plan, i, state)


def after_draw(target, i, state, gradient):
    """``state`` after the measurements that are due at the end of draw ``i``, whose last gradient is given."""
    plan = target.plan
    draws = plan.schedule.calibrations
    if plan.preconditioner.adapts:
        every = -(-state.warmup.scale.size // 16) if plan.preconditioner.is_dense else 1
        is_learning = (i >= draws[0]) & (i < draws[2]) & ((i - draws[0]) % every == 0)
        state = jax.lax.cond(is_learning, lambda s: _collect_square(target, gradient, s), lambda s: s, state)
    if plan.friction is None:
        is_measuring = (i >= draws[1]) & (i < plan.num_warmup)
        state = jax.lax.cond(is_measuring, lambda s: _measure_noise(target, i, s), lambda s: s, state)
    return state


def judged(plan, is_adapting, state, drawn):
    """``(step, drawn)`` after a draw from ``state``: the step size that follows from it, and the draw, undone if it was
    unstable.

    Args:
        plan: the plan of the run.
        is_adapting: whether the draw belongs to warm-up and may change the step size.
        state: the chain's state before the draw.
        drawn: the result of the sampler's ``transition``.
    """
    return (_tuned if plan.sampler.is_tuned else _steadied)(plan, is_adapting, state, drawn)


def _tuned(plan, is_adapting, state, drawn):
    """A step size tuned to the target acceptance, no longer than the curvature allows.

    A draw of burn-in whose temperature is too high loses the excess, because a chain that descends to the posterior
    mass would lose it only slowly.
    """
    step, (position, momentum, info) = state.warmup.step, drawn
    target = step_size.target_accept_prob(state.warmup.scale.size, metropolis=plan.sampler.metropolis)
    factor = step_size.tuning(info.accept_prob, step.num_tuned, target).astype(step.size.dtype)
    size = jnp.minimum(step.size * factor, step.longest)
    step = step._replace(size=jnp.where(is_adapting, size, step.size), num_tuned=step.num_tuned + 1)
    temperature = plan.sampler.temperature
    is_hot = is_adapting & step_size.is_hot(info.temperature / temperature, state.warmup.scale.size)
    momentum = jnp.where(is_hot, step_size.cooled(momentum, temperature), momentum)
    return step, (position, momentum, info)


def _steadied(plan, is_adapting, state, drawn):
    """A shorter step and the old position, after an unstable draw."""
    temperature, (position, momentum, info) = plan.sampler.temperature, drawn
    relative = info.temperature / temperature
    kinetic = 0.5 * position.size * (info.temperature - temperature)  # the state of SGLD has no momentum
    if momentum.size:
        kinetic = 0.5 * squared_norm(momentum) - 0.5 * squared_norm(state.momentum)
    risen = (info.potential_energy - state.info.potential_energy) / temperature
    gained = risen + kinetic / temperature
    factor = step_size.shortening(relative, gained, risen, info.is_diverging, position.size)
    factor = jnp.where(is_adapting, factor, 1.0)
    undo = factor <= 0.5
    step = state.warmup.step
    step = step._replace(size=step.size * factor.astype(position.dtype))
    # An unstable draw may end finite but far away, from where short steps never return, so it is undone. The kinetic
    # energy from a longer step must be removed: short steps lose it slowly, and would be shortened for it repeatedly.
    info = info._replace(
        is_diverging=info.is_diverging | undo,
        potential_energy=jnp.where(undo, state.info.potential_energy, info.potential_energy),
        aux=jnp.where(undo, state.info.log_functional_prior, info.aux),
    )
    is_hot = is_adapting & step_size.is_hot(relative, position.size)
    position = jnp.where(undo, flatten(state.z)[0], position)
    momentum = jnp.where(undo, state.momentum, momentum)
    momentum = jnp.where(undo | is_hot, step_size.cooled(momentum, temperature), momentum)
    return step, (position, momentum, info)


def _warm_start_gradient(target, state, unravel):
    """``(position, key) -> ((U, aux), gradient)`` of the warm start."""
    info = state.info

    def potential(w, key):
        value, aux = target.potential(unravel(w), key)
        return value, (value.astype(info.potential_energy.dtype), aux.astype(info.log_functional_prior.dtype))

    def prior_gradient(w):
        return ravel_pytree(target.prior_gradient(unravel(w)))[0]

    is_anchored = target.plan.warmup.anchored
    correction = drawn_to(state.warmup.anchor, prior_gradient) if is_anchored else jnp.zeros_like
    gradient = jax.value_and_grad(potential, has_aux=True)

    def value_and_gradient(w, key):
        (_, value), found = gradient(w, key)
        return value, found + correction(w)

    return value_and_gradient


def _learn_squares(plan, state):
    """``state`` with its preconditioner renewed from the gradients since the last calibration."""
    warmup = state.warmup
    total, num = warmup.squares
    renewed = plan.preconditioner.renewed(warmup.learned, total / jnp.maximum(num, 1))
    learned = select(num > 0, renewed, warmup.learned)
    squares = Squares(jnp.zeros_like(total), jnp.zeros_like(num))
    return state._replace(warmup=warmup._replace(learned=learned, squares=squares))


def _learn_block(target, state):
    """``state`` with the dense block of its preconditioner renewed, from the Hessian of its sites here.

    With minibatches this is the mean over a few of them. The other sites are constants, so that the Hessian of a last
    layer's values costs no pass through the hidden layers for each of them.
    """
    plan, learned = target.plan, state.warmup.learned
    position, unravel = flatten({site: state.z[site] for site in plan.preconditioner.sites})
    metric = Dense(target.dynamics(state).metric.factor)
    key, *keys = jax.random.split(state.rng_key, 1 + min(math.ceil(plan.batches), MAX_BATCHES))

    def block(key):
        return hessian(lambda w: target.potential(state.z | unravel(w), key)[0], position, metric)

    factor = whitened(learned.factor, jnp.mean(jax.lax.map(block, jnp.stack(keys)), 0))
    learned = learned._replace(factor=narrowed(factor, plan.preconditioner.max_width))
    return state._replace(warmup=state.warmup._replace(learned=learned), rng_key=key)


def _calibrate(target, may_lengthen, num_iterations, state):
    """``state`` with its preconditioner renewed, and the step size for it at this position."""
    plan, state = target.plan, _learn_squares(target.plan, state)
    if not plan.finds_step_size:
        return state
    dynamics, step = target.dynamics(state), state.warmup.step
    key, key_potential = jax.random.split(state.rng_key)

    def energy(w):
        return dynamics.potential(w, key_potential)[0]

    given = energy, dynamics.position, step.direction, dynamics.metric
    found = [
        step_size.largest_curvature(*given, num_iterations=num_iterations, by_differences=way)
        for way in plan.curvatures
    ]
    curvature, direction = functools.reduce(_smaller, found)
    step = step_size.calibrated(step, plan, curvature, direction, may_lengthen=may_lengthen)
    return state._replace(warmup=state.warmup._replace(step=step), rng_key=key)


def _smaller(one, other):
    """The smaller of two curvatures that is positive and finite, with its direction."""
    is_first = ~(step_size.usable(other[0]) & ((other[0] < one[0]) | ~step_size.usable(one[0])))
    return select(is_first, one, other)


def _shortened(state, is_time, factor):
    """``state`` with its step size times ``factor``, if that is due."""
    step = state.warmup.step
    size = jnp.where(is_time, factor.astype(step.size.dtype), 1.0) * step.size
    return state._replace(warmup=state.warmup._replace(step=step._replace(size=size)))


def _cool(plan, is_time, state):
    """``state`` with a step shortened for the temperature of the draws since the last calibration, if that is due."""
    num = (plan.num_warmup - plan.schedule.calibrations[3]) * state.warmup.scale.size
    return _shortened(state, is_time, step_size.cooling(state.averages.temperature / plan.sampler.temperature, num))


def _learn_noise(plan, i, state):
    """``state`` with the friction from the measured noise, if that is due before draw ``i``.

    The last measurement may only raise the variance of the rest, because the temperature, which belongs to the friction
    before, is not checked again.
    """
    schedule, noise = plan.schedule, state.warmup.noise
    draws, is_last = schedule.calibrations, i == plan.num_warmup
    is_time = (i == draws[2]) | (i == draws[3]) | is_last
    noise = jax.lax.cond(is_time, lambda n: n.renewed(is_last), lambda n: n, noise)
    if not plan.absorbs_noise:
        return state._replace(warmup=state.warmup._replace(noise=noise))
    noise = jax.lax.cond(i == schedule.directions_found, lambda n: n.with_directions(), lambda n: n, noise)
    factor = friction.steadying(state.warmup.step.size, jnp.max(noise.variances), plan.sampler.temperature)
    return _shortened(state._replace(warmup=state.warmup._replace(noise=noise)), is_time, factor)


def _measure_noise(target, i, state):
    """Add the noise of some gradients to the sums that determine the friction.

    The chain never uses this key, so that its draws do not depend on the measurement.
    """
    plan, dynamics = target.plan, target.dynamics(state)
    keys = jax.random.split(jax.random.fold_in(state.rng_key, 2), friction.NUM_GRADIENTS)
    gradient = jax.grad(lambda w, key: dynamics.potential(w, key)[0])
    gradients = jax.lax.map(lambda key: gradient(dynamics.position, key), keys)
    rows = friction.differences_of(jax.vmap(dynamics.metric.scale_gradient)(gradients))
    schedule, noise = plan.schedule, state.warmup.noise
    is_seeking = plan.absorbs_noise & (schedule.calibrations[2] <= i) & (i < schedule.directions_found)
    new = jax.lax.cond(is_seeking, noise.with_noise_rows, noise.with_measured, rows)
    good = jnp.all(jnp.isfinite(rows)) & ~state.info.diverging
    return state._replace(warmup=state.warmup._replace(noise=select(good, new, noise)))


def _collect_square(target, gradient, state):
    """Add one squared gradient in prior scales, or one Hessian, to the sums for the preconditioner."""
    (total, num), key = state.warmup.squares, state.rng_key
    if target.plan.preconditioner.is_dense:
        dynamics, (key, key_potential) = target.dynamics(state), jax.random.split(key)
        square = hessian(lambda w: dynamics.potential(w, key_potential)[0], dynamics.position, dynamics.metric)
    else:
        square = (state.warmup.scale * gradient) ** 2
    good = jnp.all(jnp.isfinite(square)) & ~state.info.diverging
    squares = Squares(total + jnp.where(good, square, 0.0), num + good)
    return state._replace(warmup=state.warmup._replace(squares=squares), rng_key=key)
