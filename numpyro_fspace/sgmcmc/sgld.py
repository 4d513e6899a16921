r"""Stochastic-gradient Langevin dynamics (SGLD) as a pure algorithm.

.. math:: w \leftarrow w - \varepsilon\, S S^\top \nabla \tilde U(w) + \sqrt{2 \varepsilon T}\, S \xi,
          \qquad \xi \sim N(0, I)

**Target.** exp(-U/T) as ε → 0, for every constant preconditioner S; at finite ε second moments are off by
O(ε) (for curvature λ, the variance is (1 - ελ/2)⁻¹ times the target), and gradient noise of covariance V
adds O(εV). fSGLD is this algorithm on a potential that includes a functional prior.

Reference: M. Welling, Y. W. Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.base import (
    Info,
    as_position,
    finite,
    scan_with_draws,
    size_and_dtype,
    squared_norm,
    step_size_at,
)
from numpyro_fspace.sgmcmc.integrators import euler_maruyama
from numpyro_fspace.sgmcmc.preconditioners import Identity
from numpyro_fspace.sgmcmc.staging import stage

__all__ = ["SGLDState", "as_top_level_api", "build_kernel", "init"]


class SGLDState(NamedTuple):
    """Attributes: ``position`` (any pytree), ``count`` (gradient steps taken, read by schedules)."""

    position: Any
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


def init(position) -> SGLDState:
    """The state of a chain that starts at ``position``, a pytree of floating-point arrays of one type."""
    return SGLDState(as_position(position), jnp.zeros((), int))


def build_kernel(*, has_aux: bool = False):
    """The transition kernel of SGLD: ``num_steps`` steps, each with a fresh key for the potential.

    Args:
        has_aux: whether ``potential_fn`` returns ``(U, aux)`` instead of ``U``.

    Returns:
        ``kernel(key, state, potential_fn, step_size, num_steps=1, temperature=1.0, metric=Identity())
        -> (SGLDState, Info)``. A transition that ends in a non-finite number is undone and reported.
    """

    def kernel(key, state, potential_fn, step_size, num_steps=1, temperature=1.0, metric=Identity()):  # noqa: B008
        potential = stage(potential_fn, state.position, key)
        gradient_fn = jax.value_and_grad(potential.value, has_aux=has_aux)
        size, dtype = size_and_dtype(state.position)

        def step(carry, draws, noise, t):
            position, heat, *_ = carry
            epsilon = step_size_at(step_size, state.count + t, dtype)
            value, gradient = gradient_fn(position, [stacked[0] for stacked in draws])
            position, du = euler_maruyama(position, gradient, noise, epsilon, temperature, metric)
            heat = heat + squared_norm(du) / jnp.where(epsilon > 0, 2.0 * epsilon * size * num_steps, 1.0)
            return position, heat, value, squared_norm(gradient), epsilon

        zero = jnp.zeros((), dtype)
        start = (state.position, zero, potential.zeros, zero, zero)
        position, heat, value, squared_gradient, epsilon = scan_with_draws(
            step, start, key, num_steps, state.position, potential.draw
        )
        value, aux = value if has_aux else (value, None)
        good = finite(position, value, squared_gradient)
        position = jax.tree.map(lambda new, old: jnp.where(good, new, old), position, state.position)
        info = Info(value, jnp.sqrt(squared_gradient), heat, epsilon, ~good, aux)
        return SGLDState(position, state.count + num_steps), info

    return kernel


def as_top_level_api(
    potential_fn, step_size, *, num_steps: int = 1, temperature: float = 1.0, metric=None, has_aux: bool = False
):
    """SGLD in BlackJAX's form.

    Args:
        potential_fn: ``potential_fn(position, key) -> U``.
        step_size: ε > 0, or an optax schedule of the gradient step.
        num_steps: gradient steps per call of ``step``.
        temperature: T; the target is exp(-U/T).
        metric: a constant preconditioner (``Identity()``, ``Diagonal(s)``).
        has_aux: whether ``potential_fn`` returns ``(U, aux)``.

    Returns:
        ``blackjax.base.SamplingAlgorithm(init, step)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc import sgld
        >>> algorithm = sgld.as_top_level_api(lambda w, key: 0.5 * jnp.sum(w**2), 0.1, num_steps=50)
        >>> state = algorithm.init(jnp.zeros(3))
        >>> state, info = algorithm.step(jax.random.key(0), state)
        >>> state.position.shape
        (3,)
    """
    from blackjax.base import SamplingAlgorithm

    kernel = build_kernel(has_aux=has_aux)
    metric = Identity() if metric is None else metric

    def init_fn(position, rng_key=None):
        return init(position)

    def step_fn(rng_key, state):
        return kernel(rng_key, state, potential_fn, step_size, num_steps, temperature, metric)

    return SamplingAlgorithm(init_fn, step_fn)
