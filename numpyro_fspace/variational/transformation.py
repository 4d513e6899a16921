"""Bijections of function values in models and laws: composed with a function, fitted to draws (a T-stage)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from tqdm.auto import tqdm

from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.variational.bijections import Fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float, Key

__all__ = ["TStage", "compose", "fit_transformation", "log_density"]


class TStage(NamedTuple):
    """What a T-stage leaves.

    Attributes:
        losses: by candidate, the mean negative log density of the draws at every step [num_steps].
        nll: by candidate, the least of them.
        chosen: the candidate with the least.
        fitted: that bijection with its parameters.
    """

    losses: dict
    nll: dict
    chosen: str
    fitted: Fitted


def compose(model: Callable, bijections: Sequence[Fitted]) -> Callable:
    r"""``model`` with F_k∘…∘F_1∘f in place of the function f under its functional prior.

    Args:
        model: a NumPyro model that declares functional priors; ``fs.variational.linearize(model, center)`` for F∘f_L.
        bijections: F_1, …, F_k.

    Returns:
        A NumPyro model with the same sites.
    """
    bijections = tuple(bijections)
    if not bijections:
        return model

    @functools.wraps(model)
    def composed(*args, **kwargs):
        def replace(name, fn, values):
            def transformed(x):
                f = fn(x)
                y = f.reshape(len(x), -1)
                for fitted in bijections:
                    y = fitted.forward(x, y)
                return y.reshape(f.shape)

            return transformed

        with function_hook(replace):
            return model(*args, **kwargs)

    return composed


def log_density(gaussian, bijections: Sequence[Fitted], x, y) -> Float[Array, ...]:
    """log density of values y [..., M, K] under F_k∘…∘F_1∘Q, with Q's law ``gaussian`` at x over the flat values."""
    total = 0.0
    for fitted in reversed(tuple(bijections)):
        f = fitted.inverse(x, y)
        total, y = total - fitted.log_det(x, f).sum((-2, -1)), f
    return total + gaussian.log_prob(y.reshape(*y.shape[:-2], -1))


def fit_transformation(
    key: Key[Array, ""],
    candidates: dict,
    gaussian,
    previous: Sequence[Fitted],
    x: Float[Array, "M D"],
    draws: Float[Array, "S M K"],
    *,
    blur: float = 0.0,
    num_steps: int = 1000,
    learning_rate: float = 1e-2,
    progress_bar: bool = False,
) -> TStage:
    r"""A T-stage: the bijection F with the highest mean log density of the draws under F∘F_k∘…∘F_1∘Q.

    .. math:: \max_\lambda \tfrac{1}{S} \sum_s \log Q\big((F_\lambda \circ F_k \circ \dots \circ F_1)^{-1}(y_s)\big)
              + \log \big|\det \partial (F_\lambda \circ F_k \circ \dots \circ F_1)^{-1} / \partial y_s\big|

    By Adam with a cosine schedule on the density per value, gradients clipped to norm 1; the best parameters that were
    met count.

    Args:
        key: initial values of the biases.
        candidates: bijections by name.
        gaussian: Q at x, a multivariate normal over the flat values.
        previous: F_1, …, F_k.
        x: points.
        draws: y_s, function values of the M-stage at x.
        blur: τ, white noise on Q and on the draws, of variances τ times their own mean variances.
        num_steps, learning_rate: of Adam.
        progress_bar: whether to show the candidates done.

    Returns:
        The traces of all candidates, and the one that was chosen.

    Raises:
        FloatingPointError: no candidate gives the draws a finite density.
    """
    import optax

    key, key_noise = jax.random.split(key)
    gaussian, draws = _blurred(key_noise, gaussian, draws, blur)
    size = draws[0].size
    schedule = optax.cosine_decay_schedule(learning_rate, num_steps, alpha=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def fit(bijection, key, draws):
        def loss(params):
            fitted = Fitted(bijection, bijection.cover(params, x, draws))
            return -jnp.mean(log_density(gaussian, (*previous, fitted), x, draws)) / size

        def step(carry, _):
            params, state, best, lowest = carry
            value, gradient = jax.value_and_grad(loss)(params)
            best = jax.tree.map(lambda new, old: jnp.where(value < lowest, new, old), params, best)
            update, state = optimizer.update(gradient, state)
            carry = optax.apply_updates(params, update), state, best, jnp.fmin(value, lowest)
            return carry, size * value

        params = bijection.init(key, x, draws)
        start = params, optimizer.init(params), params, jnp.full((), jnp.inf, draws.dtype)
        (_, _, best, lowest), losses = jax.lax.scan(step, start, length=num_steps)
        return bijection.cover(best, x, draws), size * lowest, losses

    found, losses, nll = {}, {}, {}
    for i, (name, bijection) in enumerate(tqdm(candidates.items(), disable=not progress_bar)):
        params, lowest, trace = jax.jit(functools.partial(fit, bijection))(jax.random.fold_in(key, i), draws)
        found[name], losses[name], nll[name] = Fitted(bijection, params), np.asarray(trace), float(lowest)
    chosen = min(nll, key=nll.__getitem__)
    if not np.isfinite(nll[chosen]):
        raise FloatingPointError(f"No bijection gives the draws of the M-stage a finite density: {nll}.")
    return TStage(losses, nll, chosen, found[chosen])


def _blurred(key, gaussian, draws, share):
    """Q and the draws, with white noise of a share of the mean variance of each."""
    if not share:
        return gaussian, draws
    covariance = gaussian.covariance_matrix
    noise = share * jnp.mean(jnp.diagonal(covariance))
    wider = dist.MultivariateNormal(gaussian.loc, covariance + noise * jnp.eye(len(covariance), dtype=covariance.dtype))
    sd = jnp.sqrt(share * jnp.mean(jnp.var(draws, 0)))
    return wider, draws + sd * jax.random.normal(key, draws.shape, draws.dtype)
