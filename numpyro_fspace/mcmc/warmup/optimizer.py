"""The warm start: Adam on the potential, in the preconditioner's coordinates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.shared import select


def adam(num_updates: int, learning_rate: float = 0.01):
    """Adam with a learning rate that decays to a hundredth over ``num_updates`` updates by a cosine."""
    import optax

    return optax.adam(optax.cosine_decay_schedule(learning_rate, max(1, num_updates), alpha=0.01))


def descend(key, start: tuple, value_and_gradient, metric, *, optimizer, num_updates: int, mask) -> tuple:
    """Make updates of u ↦ U(S u); an update to numbers that are not finite is skipped.

    Args:
        key: draws the minibatches and measurement points.
        start: where the optimization begins: ``(position w [P], state of the optimizer, (U, aux))``.
        value_and_gradient: ``(position, key) -> ((U, aux), gradient)``.
        metric: the preconditioner S.
        optimizer: an optax optimizer.
        num_updates: updates to make.
        mask: 1 for the parameters that move and 0 for those that are held [P].

    Returns:
        The same three at the end, with the ``(U, aux)`` before the last update.
    """

    def update(state, key):
        position, optimizer_state, _ = state
        value, gradient = value_and_gradient(position, key)
        gradient = mask * metric.scale_gradient(gradient)
        change, optimizer_state = optimizer.update(gradient, optimizer_state)
        position = position + mask * metric.scale(change)
        good = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(position))
        return select(good, (position, optimizer_state, value), state), None

    return jax.lax.scan(update, start, jax.random.split(key, num_updates))[0]


def drawn_to(anchor, prior_gradient):
    """The term that is added to the gradient of U for a warm start anchored at w* = ``anchor`` [P].

    ``prior_gradient(w)`` is the gradient g(w) of -log p0. The term is w ↦ r(w) - g(w), with r(w) = g(w) - g(w*) for
    each parameter, or 0 where its sign differs from that of w - w*.
    """
    at_anchor = prior_gradient(anchor)

    def correction(position):
        gradient = prior_gradient(position)
        pull = gradient - at_anchor
        return jnp.where(pull * (position - anchor) > 0.0, pull, 0.0) - gradient

    return correction
