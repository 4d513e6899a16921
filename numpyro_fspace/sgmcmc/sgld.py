r"""Stochastic-gradient Langevin dynamics (SGLD) as a pure algorithm.

.. math:: w \leftarrow w - \varepsilon\, S S^\top \nabla \tilde U(w) + \sqrt{2 \varepsilon T}\, S \xi,
          \qquad \xi \sim N(0, I)

**Target.** exp(-U/T) as ε → 0, for every constant preconditioner S; ∇Ũ is ∇U or an unbiased estimate of it. At finite ε
second moments are off by O(ε): in a direction of curvature λ, in the coordinates u = S⁻¹w, the variance is (1 - ελ/2)⁻¹
times that of the target, and gradient noise of covariance V adds O(εV). With a Metropolis test of each step (for exact
potentials) the target is exp(-U/T) at every ε. fSGLD is this algorithm on a potential that includes a functional prior.

References: M. Welling, Y. W. Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*;
G. O. Roberts, R. L. Tweedie (1996), *Exponential convergence of Langevin distributions and their discrete
approximations* (the Metropolis-adjusted algorithm, MALA).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.integrators import euler_maruyama
from numpyro_fspace.sgmcmc.metropolis import accept, rejecting_infinite
from numpyro_fspace.sgmcmc.preconditioners import Identity
from numpyro_fspace.sgmcmc.shared import (
    Info,
    as_position,
    as_sampling_algorithm,
    dot,
    finite,
    scan_with_draws,
    select,
    size_and_dtype,
    squared_norm,
    step_size_at,
)
from numpyro_fspace.sgmcmc.staged_potential import staged_gradient

__all__ = ["SGLDState", "as_top_level_api", "build_kernel", "init"]


class SGLDState(NamedTuple):
    """Attributes: ``position`` (any pytree), ``count`` (gradient steps taken, read by schedules)."""

    position: Any
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


def init(position) -> SGLDState:
    """The state of a chain that starts at ``position``, a pytree of floating-point arrays of one type."""
    return SGLDState(as_position(position), jnp.zeros((), int))


def build_kernel(*, has_aux: bool = False, metropolis: bool = False):
    """The transition kernel of SGLD: ``num_steps`` steps, each with a fresh key for the potential.

    Args:
        has_aux: whether ``potential_fn`` returns ``(U, aux)`` instead of ``U``.
        metropolis: whether each step is a proposal that a Metropolis test accepts or rejects (MALA), which makes
            exp(-U/T) the exact target at every step size. The potential must not depend on its key.

    Returns:
        ``kernel(key, state, potential_fn, step_size, *, num_steps=1, temperature=1.0, metric=Identity())
        -> (SGLDState, Info)``. Without the test, a transition in which the potential, its gradient or the position is
        not finite anywhere is undone and reported. With the test, a step to an infinite potential is rejected, and a
        step to a potential that is NaN is rejected and reported.
    """

    def kernel(key, state, potential_fn, step_size, *, num_steps=1, temperature=1.0, metric=Identity()):  # noqa: B008
        potential, gradient_fn = staged_gradient(potential_fn, state.position, key, has_aux=has_aux)
        size, dtype = size_and_dtype(state.position)
        # Where keys are counters, fold_in(key, 1) is split(key)[1], from which the steps draw their minibatches.
        key_end, key_test = jax.random.fold_in(key, 2), jax.random.split(jax.random.fold_in(key, 1))[1]

        def propose(position, gradient, noise, t):
            epsilon = step_size_at(step_size, state.count + t, dtype)
            position, du = euler_maruyama(position, gradient, noise, epsilon, temperature, metric)
            displaced = squared_norm(du) / jnp.where(epsilon > 0, 2.0 * epsilon * size * num_steps, 1.0)
            return position, du, displaced, epsilon

        def step(carry, draws, noise, t):
            position, displaced, good, *_ = carry
            value, gradient = gradient_fn(position, [stacked[0] for stacked in draws])
            good &= finite(value[0], gradient)
            position, _, more, epsilon = propose(position, gradient, noise, t)
            return position, displaced + more, good, gradient, epsilon

        def tested_step(carry, draws, noise, t):
            (position, value, gradient), displaced, good, probability, _ = carry
            new, du, more, epsilon = propose(position, gradient, noise, t)
            new_value, new_gradient = gradient_fn(new, [stacked[0] for stacked in draws])
            energy, new_energy = value[0], new_value[0]
            # log U-ratio plus log q(w | w') - log q(w' | w), written in differences that float32 keeps
            old_force, new_force = metric.scale_gradient(gradient), metric.scale_gradient(new_gradient)
            gain = energy - new_energy + 0.5 * (dot(du, old_force) + dot(du, new_force))
            gain += 0.25 * epsilon * (squared_norm(old_force) - squared_norm(new_force))
            accepted, chance = accept(jax.random.fold_in(key_test, t), gain / temperature)
            place = select(accepted, (new, new_value, new_gradient), (position, value, gradient))
            return place, displaced + more, good & ~jnp.isnan(gain), probability + chance / num_steps, epsilon

        zero, position, draw = jnp.zeros((), dtype), state.position, potential.draw
        if metropolis:
            gradient_fn = rejecting_infinite(gradient_fn)
            value, gradient = gradient_fn(position, draw(key_end))
            good = finite(value[0], gradient)
            start = ((position, value, gradient), zero, good, zero, zero)
            end = scan_with_draws(tested_step, start, key, num_steps, position, draw)
            (position, value, gradient), displaced, good, probability, epsilon = end
        else:
            start = (position, zero, jnp.ones((), bool), position, zero)
            end = scan_with_draws(step, start, key, num_steps, position, draw)
            position, displaced, good, gradient, epsilon = end
            value, probability = potential.value(position, draw(key_end)), jnp.ones((), dtype)
            good &= finite(position, value[0])
            position = select(good, position, state.position)
        norm = jnp.sqrt(squared_norm(gradient))
        info = Info(value[0], norm, displaced, epsilon, ~good, value[1], probability, gradient)
        return SGLDState(position, state.count + num_steps), info

    return kernel


def as_top_level_api(
    potential_fn,
    step_size,
    *,
    num_steps: int = 1,
    temperature: float = 1.0,
    metric=None,
    has_aux: bool = False,
    metropolis: bool = False,
):
    """SGLD in BlackJAX's form.

    Args:
        potential_fn: ``potential_fn(position, key) -> U``.
        step_size: ε > 0, or an optax schedule of the gradient step.
        num_steps: gradient steps per call of ``step``.
        temperature: T; the target is exp(-U/T).
        metric: a constant preconditioner (``Identity()``, ``Diagonal(s)``), None for the identity.
        has_aux: whether ``potential_fn`` returns ``(U, aux)``.
        metropolis: whether each step is tested, for potentials that do not depend on the key (``build_kernel``).

    Returns:
        ``blackjax.base.SamplingAlgorithm(init, step)``.

    Raises:
        ImportError: BlackJAX is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc import sgld
        >>> def potential(w, key):
        ...     return 0.5 * jnp.sum(w**2)
        >>> algorithm = sgld.as_top_level_api(potential, 0.1, num_steps=50)
        >>> state = algorithm.init(jnp.zeros(3))
        >>> state, info = algorithm.step(jax.random.key(0), state)
        >>> state.position.shape
        (3,)
    """
    kernel = build_kernel(has_aux=has_aux, metropolis=metropolis)
    settings = {"num_steps": num_steps, "temperature": temperature}

    def init_fn(position, rng_key=None):
        return init(position)

    return as_sampling_algorithm(init_fn, kernel, potential_fn, step_size, metric=metric, settings=settings)
