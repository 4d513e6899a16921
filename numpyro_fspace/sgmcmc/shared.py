"""Parts that the stochastic-gradient samplers share: potentials, schedules, loops, checks of finiteness.

A *potential* is any function ``potential_fn(position, key) -> U`` with U = -log density (up to a
constant); ``key`` feeds whatever randomness the estimate of U has (minibatch, measurement points) and
is ignored by a deterministic potential. ``position`` is any pytree of floating-point arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.preconditioners import Identity
from numpyro_fspace.sgmcmc.random_normals import normals

#: Gradient steps whose draws are made together.
MAX_STEPS = 10


class Info(NamedTuple):
    """A report on a transition, which the next transition does not need.

    Attributes:
        potential_energy: the last estimate of U within the transition; with a Metropolis test, U at the new position.
        gradient_norm: Euclidean norm of the last gradient.
        temperature: mean of |p|²/P over the inner steps, T in equilibrium (SGHMC); the mean squared displacement in
            units of its noise, |Δu|²/(2εP), about T for small ε (SGLD); or always T (MCLMC).
        step_size: the step size used last.
        is_diverging: whether the transition met numbers that are not finite (with a test and for MCLMC: NaN) and was
            undone or, with a test, rejected. SGHMC without a test reports very high temperatures too.
        aux: the auxiliary output of the potential that belongs to ``potential_energy``; None without one.
        accept_prob: the acceptance probability of the Metropolis test, averaged over the tests of the transition; 1
            without a test, except of MCLMC, for which it is that of the test that was left out.
        gradient: the last gradient; None from ``as_top_level_api``, whose reports are often stacked.
    """

    potential_energy: jax.Array
    gradient_norm: jax.Array
    temperature: jax.Array
    step_size: jax.Array
    is_diverging: jax.Array
    aux: Any
    accept_prob: jax.Array
    gradient: Any = None


class Dynamics(NamedTuple):
    """The position, potential and preconditioner of a sampler on flat positions.

    Attributes:
        position: w [P].
        unravel: from flat positions to the model's.
        metric: the preconditioner S.
        potential: ``(position, key) -> (U, aux)``.
    """

    position: jax.Array
    unravel: Callable
    metric: Any
    potential: Callable


def step_size_at(step_size, count, dtype):
    """The step size at gradient step ``count``: a number, or an optax schedule of the count."""
    return jnp.asarray(step_size(count) if callable(step_size) else step_size, dtype)


def as_position(position):
    """``position`` as JAX arrays.

    Raises:
        TypeError: unless its leaves are floating-point numbers of one type.
    """
    position = jax.tree.map(jnp.asarray, position)
    types = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(position)})
    if len(types) != 1 or not jnp.issubdtype(types[0], jnp.floating):
        raise TypeError(f"position must hold floating-point arrays of one type, got {types}; cast it.")
    return position


def squared_norm(tree):
    """Σ x² over all leaves."""
    return dot(tree, tree)


def dot(x, y):
    """Σ x y over all leaves."""
    return sum(jnp.vdot(a, b, precision="highest") for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def size_and_dtype(tree):
    """Number of scalars P in ``tree``, and the floating-point type they share."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves), jnp.result_type(*leaves)


def finite(*trees):
    """Whether every number in ``trees`` is finite (as one boolean)."""
    return jnp.isfinite(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(trees)))


def select(condition, new, old):
    """``new`` where the ``condition`` holds, else ``old``; trees of the same structure."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def scan_with_draws(step, carry, key, num_blocks, like, draw, block_size=1):
    """Run ``carry = step(carry, draws, noise, t)`` for blocks t = 0 … num_blocks - 1 of gradient steps.

    Args:
        step: takes ``draws``, the arrays of the potential's first stage for each step of the block, stacked, and
            ``noise``, standard normals in the shape of ``like`` for the block.
        draw: the first stage of a potential, from a key to arrays. It runs for several blocks at once.
        block_size: gradient steps of a block.
    """
    key_noise, key_steps = jax.random.split(key)
    most = max(MAX_STEPS // block_size, 1)
    num = next(n for n in range(min(most, num_blocks), 0, -1) if num_blocks % n == 0)
    keys = jax.random.split(key_steps, num_blocks * block_size)
    keys = keys.reshape(-1, num * block_size, *keys.shape[1:])  # a key of the old style is two words

    def blocks(carry, xs):
        keys, part = xs
        draws = jax.tree.map(lambda d: d.reshape(num, block_size, *d.shape[1:]), jax.vmap(draw)(keys))
        noise = normals(key_noise, like, num, part)

        def body(carry, xs):
            draws, j = xs
            return step(carry, draws, noise(j), part * num + j), None

        return jax.lax.scan(body, carry, (draws, jnp.arange(num)))[0], None

    return jax.lax.scan(blocks, carry, (keys, jnp.arange(len(keys))))[0]


def check_refreshes(num_steps: int, refresh_every: int) -> None:
    """The steps of a draw must be a multiple of those between refreshes of the momentum."""
    if num_steps % refresh_every:
        raise ValueError(f"refresh_every={refresh_every} must divide num_steps={num_steps}.")


def as_sampling_algorithm(
    init: Callable, kernel: Callable, potential_fn: Callable, step_size, *, metric, settings: dict
):
    """A BlackJAX ``SamplingAlgorithm`` of a sampler's ``init`` and of its kernel with these settings.

    The preconditioner ``metric`` is the identity if it is None.

    Raises:
        ImportError: BlackJAX is missing.
    """
    try:
        from blackjax.base import SamplingAlgorithm
    except ImportError as error:
        raise ImportError("as_top_level_api needs BlackJAX: pip install blackjax.") from error

    metric = Identity() if metric is None else metric

    def step(rng_key, state):
        state, info = kernel(rng_key, state, potential_fn, step_size, metric=metric, **settings)
        return state, info._replace(gradient=None)

    return SamplingAlgorithm(init, step)
