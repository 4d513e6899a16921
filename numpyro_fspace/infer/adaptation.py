"""What a chain learns in warm-up: preconditioner, step size and friction, and when, from where it is.

Functions of a ``Chain``, which says how to learn, and of its state, which holds what is learned; each returns the
state with more of it. ``fs.Warmup`` has the schedule and the rules, and nothing here acts after warm-up's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace.infer.warmup import NUM_GRADIENTS, differences_of, largest_curvature, leading_curvatures
from numpyro_fspace.infer.xla import flatten
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

if TYPE_CHECKING:
    from numpyro_fspace.infer.chain import Chain, KernelState

__all__ = ["after_draw", "before_draw", "steadied"]

#: Curvature elsewhere over curvature here, for a low-rank preconditioner: where it was made, and elsewhere.
TURNING, TURNED = 30.0, 3.0


def before_draw(chain: Chain, i, state: KernelState) -> KernelState:
    """``state`` with what it has collected made use of, if draw ``i`` is one before which it is time."""
    draws = chain.calibration_draws
    if not draws:
        return state
    if chain.step_size is None and state.momentum.size:
        state = _cool(chain, (i == draws[3]) | (i == chain.num_warmup), chain.num_warmup - draws[3], state)
    is_time = jnp.any(jnp.array(draws) == i)
    may_lengthen = i < (draws[3] if chain.preconditioner.adapts else draws[2])
    if chain.preconditioner.rank:
        state = jax.lax.cond(is_time & (i < draws[3]), lambda s: _find_directions(chain, s), lambda s: s, state)
    state = jax.lax.cond(is_time, lambda s: _calibrate(chain, may_lengthen, s), lambda s: s, state)
    if chain.finds_friction:
        state = _learn_noise(chain, i, state)
    return state


def after_draw(chain: Chain, i, state: KernelState) -> KernelState:
    """``state`` with what the place where draw ``i`` ended tells, if warm-up asks there."""
    draws = chain.calibration_draws
    if not draws:
        return state
    if chain.preconditioner.adapts:
        is_learning = (i >= draws[0]) & (i < draws[2])
        state = jax.lax.cond(is_learning, lambda s: _collect_square(chain, s), lambda s: s, state)
    if chain.finds_friction:
        is_measuring = (i >= draws[1]) & (i < chain.num_warmup)
        state = jax.lax.cond(is_measuring, lambda s: _measure_noise(chain, i, s), lambda s: s, state)
    return state


def steadied(chain: Chain, is_adapting, state: KernelState, position, momentum, info):
    """``(warmup, position, momentum, info)`` of a draw from ``state``, undone if it was unstable.

    Args:
        chain, state: the chain and its state before the draw.
        is_adapting: whether the draw is one of warm-up's, which shorten the step.
        position, momentum, info: where the sampler got [P], and what it says of the way.
    """
    relative = info.temperature / chain.temperature
    heat = 0.5 * position.size * (info.temperature - chain.temperature)  # SGLD's speed is not remembered
    if momentum.size:
        heat = _kinetic(momentum) - _kinetic(state.momentum)
    risen = (info.potential_energy - state.potential_energy) / chain.temperature
    gained = risen + heat / chain.temperature
    factor = chain.warmup.shortening(relative, gained, risen, info.is_diverging, position.size)
    factor = jnp.where(is_adapting, factor, 1.0)
    undo = factor <= 0.5
    warmup = state.warmup._replace(step_size=state.warmup.step_size * factor.astype(position.dtype))
    # An unstable draw may end finite but far away, from where short steps never come back: it is undone. And heat must
    # not outlive the step size it came from: short steps would take for ever to lose it, and be shortened for it again
    # and again.
    info = info._replace(
        is_diverging=info.is_diverging | undo,
        potential_energy=jnp.where(undo, state.potential_energy, info.potential_energy),
        aux=jnp.where(undo, state.log_functional_prior, info.aux),
    )
    is_hot = is_adapting & chain.warmup.is_hot(relative, position.size)
    position = jnp.where(undo, flatten(state.z)[0], position)
    momentum = jnp.where(undo, state.momentum, momentum)
    momentum = jnp.where(undo | is_hot, _cooled(momentum, chain.temperature), momentum)
    return warmup, position, momentum, info


def _learn_squares(state):
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


def _find_directions(chain, state):
    """``state`` with the leading directions of curvature where it is."""
    state = _learn_squares(state)
    learned = state.warmup.learned
    diagonal = chain.preconditioner.build(state.scale, learned).s
    position, _, _, potential = chain.dynamics(state)
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


def _calibrate(chain, may_lengthen, state):
    """``state`` with its preconditioner renewed, and the step size that suits it there."""
    state = _learn_squares(state)
    warmup = state.warmup
    if chain.step_size is not None:
        return state
    position, _, metric, potential = chain.dynamics(state)
    key, key_potential = jax.random.split(state.rng_key)
    curvature, direction = largest_curvature(
        lambda w, k: potential(w, k)[0], position, warmup.direction, key_potential, metric
    )
    good = jnp.isfinite(curvature) & (curvature > 0)
    if chain.preconditioner.rank:
        curvature = curvature * jnp.where(may_lengthen, TURNING, TURNED)
        may_lengthen = True  # at last calibration it is judged away from where it was made
    found = jnp.where(good, chain.stable_step_size(curvature), 0.5 * warmup.step_size)
    # λ belongs to one minibatch and one set of points; a step that has proved itself is not cut by more than half.
    shortened = jnp.clip(found, 0.5 * warmup.step_size, warmup.step_size)
    step_size = jnp.where(may_lengthen | (warmup.step_size == 0), found, shortened)  # 0 before the first
    direction = jnp.where(good, direction, warmup.direction)
    return state._replace(warmup=warmup._replace(direction=direction, step_size=step_size), rng_key=key)


def _cool(chain, is_time, num_draws, state):
    """``state`` with a shorter step, if it is time, for the heat of ``num_draws`` since the last calibration."""
    warmup = state.warmup
    factor = chain.warmup.cooling(state.mean_temperature / chain.temperature, num_draws * state.scale.size)
    step_size = jnp.where(is_time, factor.astype(warmup.step_size.dtype), 1.0) * warmup.step_size
    return state._replace(warmup=warmup._replace(step_size=step_size))


def _learn_noise(chain, i, state):
    """``state`` with the noise that was measured made use of, if draw ``i`` is one before which it is time.

    The last measurement may raise that of the rest alone: heat is not looked at again, and was as it is under the
    friction before.
    """
    draws, noise = chain.calibration_draws, state.warmup.noise
    is_last = i == chain.num_warmup
    is_time = (i == draws[2]) | (i == draws[3]) | is_last
    noise = jax.lax.cond(is_time, lambda n: n.renewed(is_last), lambda n: n, noise)
    step_size = state.warmup.step_size
    if chain.absorbs_noise:
        noise = jax.lax.cond(i == draws[2], lambda n: n.without_directions(), lambda n: n, noise)
        noise = jax.lax.cond(i == _found_before(draws), lambda n: n.with_directions(), lambda n: n, noise)
        factor = chain.warmup.steadying(step_size, jnp.max(noise.variances), chain.temperature)
        step_size = jnp.where(is_time, factor.astype(step_size.dtype), 1.0) * step_size
    return state._replace(warmup=state.warmup._replace(noise=noise, step_size=step_size))


def _found_before(draws):
    """The draw before which the noise's directions are fixed: they are sought with the final preconditioner."""
    return (draws[2] + draws[3]) // 2


def _measure_noise(chain, i, state):
    """Add what some gradients say of their noise to what the friction is found from.

    The key is none that the chain comes to: its draws are the same whether or not this is asked.
    """
    position, _, metric, potential = chain.dynamics(state)
    keys = jax.random.split(jax.random.fold_in(state.rng_key, 2), NUM_GRADIENTS)
    gradients = jax.lax.map(lambda key: jax.grad(lambda w: potential(w, key)[0])(position), keys)
    rows = differences_of(jax.vmap(metric.scale_gradient)(gradients))
    draws, noise = chain.calibration_draws, state.warmup.noise
    is_seeking = chain.absorbs_noise & (draws[2] <= i) & (i < _found_before(draws))
    new = jax.lax.cond(is_seeking, noise.with_rows, noise.with_measured, rows)
    good = jnp.all(jnp.isfinite(rows)) & ~state.diverging
    noise = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, noise)
    return state._replace(warmup=state.warmup._replace(noise=noise))


def _collect_square(chain, state):
    """Add one squared gradient, in prior scales, to what the preconditioner learns from."""
    position, _, _, potential = chain.dynamics(state)
    key, key_potential = jax.random.split(state.rng_key)
    gradient = state.scale * jax.grad(lambda w: potential(w, key_potential)[0])(position)
    good = jnp.all(jnp.isfinite(gradient)) & ~state.diverging
    warmup = state.warmup
    warmup = warmup._replace(
        squares=warmup.squares + jnp.where(good, gradient**2, 0.0), num_squares=warmup.num_squares + good
    )
    return state._replace(warmup=warmup, rng_key=key)


def _kinetic(momentum):
    return 0.5 * jnp.vdot(momentum, momentum)


def _cooled(momentum, temperature):
    """``momentum``, shortened to the mean square ``temperature`` if it is longer."""
    square = jnp.vdot(momentum, momentum)
    return momentum * jnp.sqrt(jnp.minimum(1.0, temperature * momentum.size / jnp.where(square > 0, square, 1.0)))
