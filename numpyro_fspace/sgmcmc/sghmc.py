r"""Stochastic-gradient Hamiltonian Monte Carlo (SGHMC) as a pure algorithm.

Underdamped Langevin dynamics dw = S p dt, dp = -Sᵀ∇U dt - γ p dt + √(2γT) dB has the stationary distribution
exp(-U(w)/T) N(p; 0, T I). There are two discretizations:

* ``"baoab"`` (default): drift ε/2, exact Ornstein–Uhlenbeck ε, drift ε/2, kick ε, with one gradient per step. Up
  to half a kick at the very first and last step this is kick ε/2, drift ε/2, O, drift ε/2, kick ε/2 (BAOAB), so
  the positions have exactly the distribution of BAOAB. Its second moments are off by O(ε²), and exact on Gaussian
  targets with exact gradients; it is stable for ε√λ < 2. Resampling the momentum replaces the first O of a transition
  by a fresh draw, which keeps that distribution (exactly on Gaussians, to its order elsewhere) for every number of
  inner steps.
* ``"euler"``: the papers' update w ← w + ε S p; p ← p - ε Sᵀ∇U - εγ p + √(2γεT) ξ. If the momentum is resampled
  before each transition of L steps, the last force of a transition is not used, and the variance of w tends to
  L/(L-1) times that of the target as ε → 0. The momentum is refreshed at every step, whatever ``refresh_every``.

**The Metropolis test** (for exact potentials) makes the target exact at every ε. A transition is then O, followed by a
path Ψ O Ψ … O Ψ, where Ψ is k leapfrog steps (kick ε/2, drift ε, kick ε/2). O leaves N(p; 0, T I) invariant and is
reversible with respect to it, Ψ preserves volume and is reversible, and the path is a palindrome. It is therefore
accepted with probability min(1, exp(-Δ/T)), where Δ is the energy U + |p|²/2 gained in the Ψ's alone. After a rejection
the momentum is reversed. If the momentum is redrawn in every transition this is MALT, otherwise it is generalized HMC
with a path in place of a step.

References: T. Chen, E. Fox, C. Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*;
A. M. Horowitz (1991), *A generalized guided Monte Carlo algorithm*; L. Riou-Durand, J. Vogrinc (2022), *Metropolis
adjusted Langevin trajectories: a robust alternative to Hamiltonian Monte Carlo*;
B. Leimkuhler, C. Matthews (2013), *Rational construction of stochastic numerical methods for molecular
sampling*; M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural networks*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.integrators import add, drift, kick, ornstein_uhlenbeck
from numpyro_fspace.sgmcmc.metropolis import accept, rejecting_infinite
from numpyro_fspace.sgmcmc.preconditioners import Identity
from numpyro_fspace.sgmcmc.random_normals import normal_like
from numpyro_fspace.sgmcmc.shared import (
    Info,
    as_position,
    as_sampling_algorithm,
    check_refreshes,
    dot,
    finite,
    scan_with_draws,
    select,
    size_and_dtype,
    squared_norm,
    step_size_at,
)
from numpyro_fspace.sgmcmc.staged_potential import staged_gradient

__all__ = ["INTEGRATORS", "SGHMCState", "as_top_level_api", "build_kernel", "init"]

INTEGRATORS = ("baoab", "euler")

#: Kinetic temperature (relative to the sampler's if that is above 1) beyond which a transition counts as diverging even
#: though it is still finite.
MAX_TEMPERATURE = 1e4


class SGHMCState(NamedTuple):
    """The state of a chain.

    Attributes:
        position: w, any pytree.
        momentum: p, shaped like the position, of unit mass in the preconditioner's coordinates.
        count: gradient steps taken, read by schedules.
    """

    position: Any
    momentum: Any
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


def init(position, rng_key, *, temperature=1.0) -> SGHMCState:
    """The state of a chain that starts at ``position`` with momentum drawn from N(0, T I)."""
    position = as_position(position)
    return SGHMCState(position, _fresh_momentum(rng_key, position, temperature), jnp.zeros((), int))


def _fresh_momentum(key, position, temperature):
    return jax.tree.map(lambda p: jnp.sqrt(temperature) * p, normal_like(key, position))


def build_kernel(*, integrator: str = "baoab", has_aux: bool = False, metropolis: bool = False):
    """The transition kernel of SGHMC: ``num_steps`` steps, each with a fresh key for the potential.

    Args:
        integrator: ``"baoab"`` or ``"euler"`` (see the module's docstring).
        has_aux: whether ``potential_fn`` returns ``(U, aux)`` instead of ``U``.
        metropolis: whether the whole transition is a proposal that a Metropolis test accepts or rejects, which makes
            exp(-U/T) the exact target at every step size (see the module's docstring). The potential must not depend
            on its key, nor the step size on the count within a transition, and the integrator must be ``"baoab"``.

    Returns:
        ``kernel(key, state, potential_fn, step_size, *, num_steps=10, friction=1.0, temperature=1.0,
        metric=Identity(), resample_momentum=False, refresh_every=1, gradient_noise=None) -> (SGHMCState, Info)``.

        With ``refresh_every`` = k the thermostat O acts at every k-th step, for a time kε. Noise, which on a CPU costs
        more than the gradient of a small network, is then drawn k times less often, and the order of the error does not
        change (nor does the exactness on Gaussians). Keep ε√λ_max below 2 and k ε√λ_max below 2.1: a mode that turns by
        π between refreshes meets them at the same phase, is hardly damped, and accumulates the noise of gradients.
        (λ_max is the largest curvature in the coordinates u = S⁻¹w.)

        A transition that ends in a number that is not finite (or a kinetic temperature above 10⁴, or 10⁴ T if T > 1) is
        undone, and its momentum is drawn afresh. With the test, a rejected transition reverses its momentum; one that
        meets NaN is rejected and reported. With a ``GradientNoise`` (``"baoab"`` without a test, flat positions) O has
        more friction and less noise along its directions.

    Raises:
        ValueError: for an unknown integrator, or a Metropolis test of another one than ``"baoab"``; from the kernel, if
            ``refresh_every`` does not divide ``num_steps``.
    """
    if integrator not in INTEGRATORS:
        raise ValueError(f"integrator={integrator!r} is unknown; choose one of {', '.join(INTEGRATORS)}.")
    if metropolis and integrator != "baoab":
        raise ValueError(f"metropolis=True needs a reversible integrator, 'baoab', got {integrator!r}.")

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
        resample_momentum=False,
        refresh_every=1,
        gradient_noise=None,
    ):
        if integrator == "euler":
            refresh_every = 1
        check_refreshes(num_steps, refresh_every)
        potential, gradient_fn = staged_gradient(potential_fn, state.position, key, has_aux=has_aux)
        key_scan, key_momentum = jax.random.split(key)
        size, dtype = size_and_dtype(state.position)

        def thermostat(position, momentum, noise, epsilon, t):
            """O for a time kε in the middle of the drift ε that follows."""
            gamma = jnp.where(resample_momentum & (t == 0), jnp.inf, friction * refresh_every)
            position = drift(position, momentum, 0.5 * epsilon, metric)
            refreshed = ornstein_uhlenbeck(momentum, noise, epsilon, gamma, temperature)
            if gradient_noise is not None:
                refreshed += gradient_noise.correction(momentum, noise, epsilon, gamma, temperature, refresh_every)
            return drift(position, refreshed, -0.5 * epsilon, metric), refreshed

        def leapfrogs(carry, draws, noise, block):
            """``refresh_every`` steps, of which the first refreshes the momentum with ``noise``."""
            first = block * refresh_every
            if integrator == "baoab":
                epsilon = step_size_at(step_size, state.count + first, dtype)
                carry = (*thermostat(*carry[:2], noise, epsilon, first), *carry[2:])

            def step(carry, xs):
                draws, t = xs
                position, momentum, kinetic, *_ = carry
                epsilon = step_size_at(step_size, state.count + t, dtype)
                position = drift(position, momentum, epsilon, metric)
                value, gradient = gradient_fn(position, draws)
                damping = epsilon * friction if integrator == "euler" else 0.0
                momentum = kick(momentum, gradient, epsilon, metric, damping=damping)
                if integrator == "euler":
                    momentum = add(momentum, jnp.sqrt(2.0 * friction * epsilon * temperature), noise)
                kinetic = kinetic + squared_norm(momentum) / (size * num_steps)
                return (position, momentum, kinetic, value, gradient, epsilon), None

            return jax.lax.scan(step, carry, (draws, first + jnp.arange(refresh_every)))[0]

        def tested_leapfrogs(carry, draws, noise, block):
            """``refresh_every`` leapfrog steps and, before all but the first of them, O."""
            position, momentum, gradient, kinetic, _, gain, epsilon = carry
            gamma = jnp.where(block > 0, friction * refresh_every, 0.0)
            before = momentum = ornstein_uhlenbeck(momentum, noise, epsilon, gamma, temperature)
            momentum = kick(momentum, gradient, 0.5 * epsilon, metric)

            def step(carry, draws):
                position, momentum, kinetic, *_ = carry
                position = drift(position, momentum, epsilon, metric)
                value, gradient = gradient_fn(position, draws)
                momentum = kick(momentum, gradient, epsilon, metric)
                kinetic = kinetic + squared_norm(momentum) / (size * num_steps)
                return (position, momentum, kinetic, value, gradient), None

            carry = (position, momentum, kinetic, potential.zeros, gradient)
            (position, momentum, kinetic, value, gradient), _ = jax.lax.scan(step, carry, draws, length=refresh_every)
            momentum = kick(momentum, gradient, -0.5 * epsilon, metric)
            gain = gain + 0.5 * dot(add(before, -1.0, momentum), add(before, 1.0, momentum))
            return position, momentum, gradient, kinetic, value, gain, epsilon

        zero = jnp.zeros((), dtype)
        blocks = (num_steps // refresh_every, state.position, potential.draw, refresh_every)
        if metropolis:
            gradient_fn = rejecting_infinite(gradient_fn)
            epsilon = step_size_at(step_size, state.count, dtype)
            gamma = jnp.where(resample_momentum, jnp.inf, friction * refresh_every)
            noise = normal_like(key_momentum, state.position)
            momentum = ornstein_uhlenbeck(state.momentum, noise, epsilon, gamma, temperature)
            old_value, old_gradient = gradient_fn(state.position, potential.draw(key_momentum))
            start = (state.position, momentum, old_gradient, zero, potential.zeros, zero, epsilon)
            end = scan_with_draws(tested_leapfrogs, start, key_scan, *blocks)
            position, new_momentum, gradient, kinetic, value, gain, _ = end
            gain = (old_value[0] - value[0] + gain) / temperature
            accepted, probability = accept(jax.random.fold_in(key_momentum, 1), gain)
            rejected = state.position, jax.tree.map(jnp.negative, momentum), old_value, old_gradient
            position, momentum, value, gradient = select(accepted, (position, new_momentum, value, gradient), rejected)
            good = ~jnp.isnan(gain)
        else:
            fresh = _fresh_momentum(key_momentum, state.position, temperature)
            momentum = state.momentum
            if integrator == "euler":
                momentum = select(resample_momentum, fresh, momentum)
            start = (state.position, momentum, zero, potential.zeros, state.position, zero)
            end = scan_with_draws(leapfrogs, start, key_scan, *blocks)
            position, momentum, kinetic, value, gradient, epsilon = end
            good = finite(position, momentum, value[0]) & (kinetic < MAX_TEMPERATURE * jnp.maximum(temperature, 1.0))
            position, momentum = select(good, (position, momentum), (state.position, fresh))
            probability = jnp.ones((), dtype)
        norm = jnp.sqrt(squared_norm(gradient))
        info = Info(value[0], norm, kinetic, epsilon, ~good, value[1], probability, gradient)
        return SGHMCState(position, momentum, state.count + num_steps), info

    return kernel


def as_top_level_api(
    potential_fn,
    step_size,
    *,
    num_steps: int = 10,
    friction: float = 1.0,
    temperature: float = 1.0,
    metric=None,
    resample_momentum: bool = False,
    refresh_every: int = 1,
    integrator: str = "baoab",
    has_aux: bool = False,
    metropolis: bool = False,
):
    """SGHMC in BlackJAX's form.

    Args:
        potential_fn: ``potential_fn(position, key) -> U``.
        step_size: ε > 0, or an optax schedule of the gradient step.
        num_steps: gradient steps per call of ``step``.
        friction: γ > 0, per unit of the dynamics' time.
        temperature: T; the target is exp(-U/T).
        metric: a constant preconditioner (``Identity()``, ``Diagonal(s)``); None is the identity. The mass matrix is
            (S Sᵀ)⁻¹.
        resample_momentum: draw the momentum afresh in every transition.
        refresh_every: steps between partial refreshes of the momentum; divides ``num_steps``.
        integrator: ``"baoab"`` or ``"euler"``.
        has_aux: whether ``potential_fn`` returns ``(U, aux)``.
        metropolis: whether each call is tested, for potentials that do not depend on the key (``build_kernel``).

    Returns:
        ``blackjax.base.SamplingAlgorithm(init, step)``; ``init`` needs a key (for the momentum).

    Raises:
        ImportError: BlackJAX is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc import sghmc
        >>> algorithm = sghmc.as_top_level_api(lambda w, key: 0.5 * jnp.sum(w**2), 0.5)
        >>> state = algorithm.init(jnp.zeros(3), jax.random.key(0))
        >>> state, info = algorithm.step(jax.random.key(1), state)
        >>> bool(info.is_diverging)
        False
    """
    kernel = build_kernel(integrator=integrator, has_aux=has_aux, metropolis=metropolis)

    def init_fn(position, rng_key):
        return init(position, rng_key, temperature=temperature)

    settings = {
        "num_steps": num_steps,
        "friction": friction,
        "temperature": temperature,
        "resample_momentum": resample_momentum,
        "refresh_every": refresh_every,
    }

    return as_sampling_algorithm(init_fn, kernel, potential_fn, step_size, metric=metric, settings=settings)
