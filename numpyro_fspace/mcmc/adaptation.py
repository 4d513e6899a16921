"""What a chain learns in warm-up: preconditioner, step size and friction, and when, from where it is.

Functions of a ``Chain``, which says how to learn, and of its state, which holds what is learned; each returns the
state with more of it. ``fs.Warmup`` has the schedule and the rules, and nothing here acts after warm-up's end.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.newton import hessian
from numpyro_fspace.mcmc.warmup import (
    NUM_GRADIENTS,
    NUM_POWER_ITERATIONS,
    differences_of,
    largest_curvature,
    leading_curvatures,
)
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

if TYPE_CHECKING:
    from numpyro_fspace.mcmc.chain import Chain
    from numpyro_fspace.mcmc.state import KernelState

__all__ = ["after_draw", "before_draw", "steadied", "tuned"]

#: Curvature elsewhere over curvature here, for a low-rank preconditioner: where it was made, and elsewhere.
TURNING, TURNED = 30.0, 3.0
#: The same for a dense one, in whose coordinates all directions are stiff: half the step, a quarter of the error.
DENSE_MARGIN = 4.0


def before_draw(chain: Chain, i, state: KernelState) -> KernelState:
    """``state`` with what it has collected made use of, if draw ``i`` is one before which it is time."""
    draws = chain.calibration_draws
    if not draws:
        return state
    if chain.step_size is None and state.momentum.size and not chain.metropolis:
        state = _cool(chain, (i == draws[3]) | (i == chain.num_warmup), chain.num_warmup - draws[3], state)
    is_time = jnp.any(jnp.array(draws) == i)
    may_lengthen = i < (draws[3] if chain.preconditioner.adapts else draws[2])
    if chain.preconditioner.rank:
        state = jax.lax.cond(is_time & (i < draws[3]), lambda s: _find_directions(chain, s), lambda s: s, state)
    state = jax.lax.cond(is_time, lambda s: _calibrate(chain, may_lengthen, s), lambda s: s, state)
    if chain.step_size is None and not chain.metropolis and not chain.preconditioner.rank:
        is_time = jnp.any(jnp.array(chain.warmup.shortening_draws(chain.num_warmup)) == i)
        again = functools.partial(_calibrate, chain, False, num_iterations=NUM_POWER_ITERATIONS // 4)
        state = jax.lax.cond(is_time, again, lambda s: s, state)
    if chain.finds_friction:
        state = _learn_noise(chain, i, state)
    return state


def after_draw(chain: Chain, i, state: KernelState) -> KernelState:
    """``state`` with what the place where draw ``i`` ended tells, if warm-up asks there."""
    draws = chain.calibration_draws
    if not draws:
        return state
    if chain.preconditioner.adapts:
        every = -(-state.scale.size // 16) if chain.preconditioner.is_dense else 1
        is_learning = (i >= draws[0]) & (i < draws[2]) & ((i - draws[0]) % every == 0)
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


def tuned(chain: Chain, is_adapting, state: KernelState, momentum, info):
    """``(warmup, momentum)`` after a draw that was tested: a step size nearer to the acceptance that is aimed at.

    It stays below the longest step, which the curvature allows. A draw of burn-in that is hotter than chance allows
    loses its heat, as a chain that slides down to where the posterior is would take long to.
    """
    warmup = state.warmup
    factor = chain.warmup.tuning(info.accept_prob, warmup.num_tuned).astype(warmup.step_size.dtype)
    step_size = jnp.minimum(warmup.step_size * factor, warmup.longest_step)
    warmup = warmup._replace(
        step_size=jnp.where(is_adapting, step_size, warmup.step_size), num_tuned=warmup.num_tuned + 1
    )
    is_hot = is_adapting & chain.warmup.is_hot(info.temperature / chain.temperature, state.scale.size)
    return warmup, jnp.where(is_hot, _cooled(momentum, chain.temperature), momentum)


def _learn_squares(chain, state):
    """``state`` with its preconditioner renewed from the gradients since the last calibration."""
    warmup = state.warmup
    mean = warmup.squares / jnp.maximum(warmup.num_squares, 1)
    renewed = chain.preconditioner.renewed(warmup.learned, mean)
    warmup = warmup._replace(
        learned=jax.tree.map(lambda new, old: jnp.where(warmup.num_squares > 0, new, old), renewed, warmup.learned),
        squares=jnp.zeros_like(warmup.squares),
        num_squares=jnp.zeros_like(warmup.num_squares),
    )
    return state._replace(warmup=warmup)


def _find_directions(chain, state):
    """``state`` with the leading directions of curvature where it is."""
    state = _learn_squares(chain, state)
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


def _calibrate(chain, may_lengthen, state, num_iterations=NUM_POWER_ITERATIONS):
    """``state`` with its preconditioner renewed, and the step size that suits it there."""
    state = _learn_squares(chain, state)
    warmup = state.warmup
    if chain.step_size is not None:
        return state
    position, _, metric, potential = chain.dynamics(state)
    key, key_potential = jax.random.split(state.rng_key)
    curvature, direction = largest_curvature(
        lambda w, k: potential(w, k)[0], position, warmup.direction, key_potential, metric, num_iterations
    )
    good = jnp.isfinite(curvature) & (curvature > 0)
    if chain.preconditioner.rank:
        curvature = curvature * jnp.where(may_lengthen, TURNING, TURNED)
        may_lengthen = True  # at last calibration it is judged away from where it was made
    if chain.preconditioner.is_dense and not chain.metropolis:
        curvature = DENSE_MARGIN * curvature
    found = jnp.where(good, chain.stable_step_size(curvature, chain.metropolis), 0.5 * warmup.step_size)
    # λ belongs to one minibatch and one set of points; a step that has proved itself is not cut by more than half.
    shortened = jnp.clip(found, 0.5 * warmup.step_size, warmup.step_size)
    step_size = jnp.where(may_lengthen | (warmup.step_size == 0), found, shortened)  # 0 before the first
    if chain.metropolis:  # the test tells what the curvature elsewhere would
        step_size = jnp.where(may_lengthen | (warmup.step_size == 0), found, jnp.minimum(found, warmup.step_size))
    warmup = warmup._replace(
        direction=jnp.where(good, direction, warmup.direction),
        step_size=step_size,
        longest_step=found,
        num_tuned=jnp.zeros_like(warmup.num_tuned),
    )
    return state._replace(warmup=warmup, rng_key=key)


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
    """Add one squared gradient in prior scales, or one Hessian, to what the preconditioner learns from."""
    position, _, metric, potential = chain.dynamics(state)
    key, key_potential = jax.random.split(state.rng_key)

    def energy(w):
        return potential(w, key_potential)[0]

    if chain.preconditioner.is_dense:
        square = hessian(energy, position, metric)
    else:
        square = (state.scale * jax.grad(energy)(position)) ** 2
    good = jnp.all(jnp.isfinite(square)) & ~state.diverging
    warmup = state.warmup
    warmup = warmup._replace(
        squares=warmup.squares + jnp.where(good, square, 0.0), num_squares=warmup.num_squares + good
    )
    return state._replace(warmup=warmup, rng_key=key)


def _kinetic(momentum):
    return 0.5 * jnp.vdot(momentum, momentum)


def _cooled(momentum, temperature):
    """``momentum``, shortened to the mean square ``temperature`` if it is longer."""
    square = jnp.vdot(momentum, momentum)
    return momentum * jnp.sqrt(jnp.minimum(1.0, temperature * momentum.size / jnp.where(square > 0, square, 1.0)))
