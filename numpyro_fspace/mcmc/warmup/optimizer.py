"""The warm start: Adam on the potential, in the preconditioner's coordinates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Descent", "adam", "descend", "drawn_to"]


class Descent(NamedTuple):
    """State of an optimization.

    Attributes:
        position: w [P].
        optimizer: state of the optimizer.
        value: the last ``(U, aux)``.
    """

    position: jax.Array
    optimizer: Any
    value: Any


def adam(num_updates: int, learning_rate: float = 0.01):
    """Adam with a learning rate that decays to a hundredth over ``num_updates`` updates by a cosine."""
    import optax

    return optax.adam(optax.cosine_decay_schedule(learning_rate, max(1, num_updates), alpha=0.01))


def descend(key, start: Descent, value_and_gradient, metric, *, optimizer, num_updates: int, mask) -> Descent:
    """Make updates of u ↦ U(S u); an update to numbers that are not finite is skipped.

    Args:
        key: draws the minibatches and measurement points.
        start: where the optimization begins.
        value_and_gradient: ``(position, key) -> ((U, aux), gradient)``.
        metric: the preconditioner S.
        optimizer: an optax optimizer.
        num_updates: updates to make.
        mask: 1 for the parameters that move and 0 for those that are held [P].
    """

    def update(state, key):
        value, gradient = value_and_gradient(state.position, key)
        gradient = mask * metric.scale_gradient(gradient)
        change, optimizer_state = optimizer.update(gradient, state.optimizer)
        position = state.position + mask * metric.scale(change)
        good = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(position))
        new = Descent(position, optimizer_state, value)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state), None

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
