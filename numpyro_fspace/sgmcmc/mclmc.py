r"""Microcanonical Langevin Monte Carlo (MCLMC) as a pure algorithm.

The momentum has constant length: with P parameters and the unit vector u it is p = √P u. Hamilton's equations of a
particle with this constraint, and noise that turns u, are, with the preconditioner S and the temperature T,

.. math:: dw = \sqrt P\, S u\, dt, \qquad
          du = -\frac{\sqrt P}{P - 1} (I - u u^\top) S^\top \nabla U / T\, dt + \text{noise},

and leave exp(-U/T) invariant, with u uniform on the sphere. A chain cannot gain speed, so a step that is too long for a
stiff part of the density does not throw it far. The factor √P makes the mean square of each momentum 1, as for SGHMC,
so that step sizes and frictions mean the same.

One gradient step is half a kick B, a drift A, and half a kick. B solves the equation of u for a constant gradient: with
the unit vector e along -Sᵀ∇U and δ = ε √P |Sᵀ∇U| / ((P - 1) T)

.. math:: u \leftarrow \frac{u + (\sinh\delta + c\,(\cosh\delta - 1))\, e}{\cosh\delta + c \sinh\delta}, \qquad
          c = e \cdot u, \qquad \text{with the work } (P - 1) \log(\cosh\delta + c \sinh\delta).

Along the exact flow the work equals the loss of U/T. Every k = ``refresh_every`` steps O turns the momentum partially:
p ← √P (a p + b ξ) / |a p + b ξ| with a = e^(-γkε), b² = 1 - a² and ξ ~ N(0, I), which is reversible with respect to the
uniform distribution.

**Target.** exp(-U/T) as ε → 0; second moments are off by O(ε²). With a Metropolis test of each transition, on the sum
of U/T and the work, the target is exp(-U/T) at every step size. U must be known exactly: gradients of minibatches or
random points would act as noise that nothing balances.

References: J. Robnik, G. B. De Luca, E. Silverstein, U. Seljak (2023), *Microcanonical Hamiltonian Monte Carlo*;
J. Robnik, U. Seljak (2023), *Microcanonical Langevin Monte Carlo*; the variant with a test:
J. Robnik, R. Cohn-Gordon, U. Seljak (2025), *Metropolis adjusted microcanonical Hamiltonian Monte Carlo*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.integrators import drift, ornstein_uhlenbeck
from numpyro_fspace.sgmcmc.metropolis import accept, rejecting_infinite
from numpyro_fspace.sgmcmc.preconditioners import Identity
from numpyro_fspace.sgmcmc.random_normals import normal_like
from numpyro_fspace.sgmcmc.shared import (
    Info,
    as_position,
    as_sampling_algorithm,
    check_refreshes,
    dot,
    scan_with_draws,
    select,
    size_and_dtype,
    squared_norm,
    step_size_at,
)
from numpyro_fspace.sgmcmc.staged_potential import staged_gradient

__all__ = ["MCLMCState", "as_top_level_api", "build_kernel", "init"]


class MCLMCState(NamedTuple):
    """The state of a chain.

    Attributes:
        position: w, any pytree.
        momentum: p, shaped like the position, of length √P.
        count: gradient steps taken.
    """

    position: Any
    momentum: Any
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


def init(position, rng_key) -> MCLMCState:
    """The state of a chain that starts at ``position`` with a momentum of uniform direction.

    Raises:
        ValueError: for a single parameter, whose momentum could not turn.
    """
    position = as_position(position)
    size, _ = size_and_dtype(position)
    if size < 2:
        raise ValueError(f"MCLMC needs at least two parameters, because its momentum only turns; this has {size}.")
    return MCLMCState(position, _on_sphere(normal_like(rng_key, position)), jnp.zeros((), int))


def _on_sphere(momentum):
    """The momentum with length √P."""
    size, dtype = size_and_dtype(momentum)
    factor = jnp.sqrt(jnp.asarray(size, dtype) / squared_norm(momentum))
    return jax.tree.map(lambda p: factor * p, momentum)


def turn(momentum, gradient, step_size, metric, temperature):
    """B: ``(p, work)`` after a time ε in a constant gradient."""
    size, dtype = size_and_dtype(momentum)
    root = jnp.sqrt(jnp.asarray(size, dtype))
    force = jax.tree.map(lambda g: -g / temperature, metric.scale_gradient(gradient))
    norm = jnp.sqrt(squared_norm(force))
    along = jax.tree.map(lambda f: f / jnp.where(norm > 0, norm, 1.0), force)
    delta = step_size * root * norm / (size - 1)
    cosine = dot(momentum, along) / root
    decay, lost = jnp.exp(-delta), -jnp.expm1(-delta)
    toward = root * lost * (1.0 + decay + cosine * lost)
    # the direction times 2 e^-δ, so that nothing overflows; work = (P - 1) log(cosh δ + cosine sinh δ)
    turned = jax.tree.map(lambda p, e: 2.0 * decay * p + toward * e, momentum, along)
    work = (size - 1) * (delta + jnp.log1p(-0.5 * (1.0 - cosine) * -jnp.expm1(-2.0 * delta)))
    return _on_sphere(turned), work


def refresh(momentum, noise, step_size, friction):
    """O: a partial refresh of the momentum, for a time ε; γ = ∞ replaces it."""
    return _on_sphere(ornstein_uhlenbeck(momentum, noise, step_size, friction, 1.0))


def build_kernel(*, has_aux: bool = False, metropolis: bool = False):
    """The transition kernel of MCLMC: ``num_steps`` gradient steps.

    Args:
        has_aux: whether ``potential_fn`` returns ``(U, aux)`` instead of ``U``.
        metropolis: whether the whole transition is a proposal that a Metropolis test accepts or rejects, which makes
            exp(-U/T) the exact target at every step size.

    Returns:
        ``kernel(key, state, potential_fn, step_size, *, num_steps=10, friction=1.0, temperature=1.0, metric=Identity(),
        refresh_every=1) -> (MCLMCState, Info)``. The potential must not depend on its key.

        ``Info.accept_prob`` is the acceptance probability of the test, or, without a test, what it would be; step sizes
        can be tuned to it. A rejected transition reverses its momentum, and so does one that is undone, because it ends
        at an infinite potential or meets NaN; NaN is reported. A schedule of step sizes is read once per transition.
    """

    def kernel(
        key,
        state,
        potential_fn,
        step_size,
        *,
        num_steps=10,
        friction=1.0,
        temperature=1.0,
        metric=Identity(),  # noqa: B008
        refresh_every=1,
    ):
        check_refreshes(num_steps, refresh_every)
        potential, gradient_fn = staged_gradient(potential_fn, state.position, key, has_aux=has_aux)
        gradient_fn = rejecting_infinite(gradient_fn)
        key_scan, key_momentum, key_test, key_potential = jax.random.split(key, 4)
        _, dtype = size_and_dtype(state.position)
        epsilon = step_size_at(step_size, state.count, dtype)

        def block(carry, draws, noise, t):
            """``refresh_every`` steps and, before all but the first of them, O."""
            position, momentum, *rest = carry
            gamma = jnp.where(t > 0, friction * refresh_every, 0.0)
            carry = (position, refresh(momentum, noise, epsilon, gamma), *rest)

            def step(carry, draws):
                position, momentum, _, gradient, work = carry
                momentum, first = turn(momentum, gradient, 0.5 * epsilon, metric, temperature)
                position = drift(position, momentum, epsilon, metric)
                value, gradient = gradient_fn(position, draws)
                momentum, second = turn(momentum, gradient, 0.5 * epsilon, metric, temperature)
                return (position, momentum, value, gradient, work + first + second), None

            return jax.lax.scan(step, carry, draws, length=refresh_every)[0]

        noise = normal_like(key_momentum, state.position)
        momentum = refresh(state.momentum, noise, epsilon, friction * refresh_every)
        value, gradient = gradient_fn(state.position, potential.draw(key_potential))
        old = state.position, jax.tree.map(jnp.negative, momentum), value, gradient
        start = (state.position, momentum, value, gradient, jnp.zeros((), dtype))
        end = scan_with_draws(
            block, start, key_scan, num_steps // refresh_every, state.position, potential.draw, refresh_every
        )
        gain = (value[0] - end[2][0]) / temperature - end[4]
        accepted, probability = accept(key_test, gain)
        if not metropolis:
            accepted = jnp.isfinite(gain)
        position, momentum, value, gradient = select(accepted, end[:4], old)
        norm, kinetic = jnp.sqrt(squared_norm(gradient)), jnp.asarray(temperature, dtype)
        info = Info(value[0], norm, kinetic, epsilon, jnp.isnan(gain), value[1], probability, gradient)
        return MCLMCState(position, momentum, state.count + num_steps), info

    return kernel


def as_top_level_api(
    potential_fn,
    step_size,
    *,
    num_steps: int = 10,
    friction: float = 1.0,
    temperature: float = 1.0,
    metric=None,
    refresh_every: int = 1,
    has_aux: bool = False,
    metropolis: bool = False,
):
    """MCLMC in BlackJAX's form.

    Args:
        potential_fn: ``potential_fn(position, key) -> U``, which must not depend on the key.
        step_size: ε > 0, comparable to SGHMC's at T = 1: each momentum has mean square 1.
        num_steps: gradient steps per call of ``step``.
        friction: γ > 0, per unit of the dynamics' time.
        temperature: T; the target is exp(-U/T).
        metric: a constant preconditioner (``Identity()``, ``Diagonal(s)``), None for the identity.
        refresh_every: steps between partial refreshes of the momentum; divides ``num_steps``.
        has_aux: whether ``potential_fn`` returns ``(U, aux)``.
        metropolis: whether each call is tested (``build_kernel``).

    Returns:
        ``blackjax.base.SamplingAlgorithm(init, step)``; ``init`` needs a key (for the momentum).

    Raises:
        ImportError: BlackJAX is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc import mclmc
        >>> algorithm = mclmc.as_top_level_api(lambda w, key: 0.5 * jnp.sum(w**2), 0.5)
        >>> state = algorithm.init(jnp.zeros(3), jax.random.key(0))
        >>> state, info = algorithm.step(jax.random.key(1), state)
        >>> round(float(jnp.sum(state.momentum**2)), 3)
        3.0
    """
    kernel = build_kernel(has_aux=has_aux, metropolis=metropolis)
    settings = {
        "num_steps": num_steps,
        "friction": friction,
        "temperature": temperature,
        "refresh_every": refresh_every,
    }
    return as_sampling_algorithm(init, kernel, potential_fn, step_size, metric=metric, settings=settings)
