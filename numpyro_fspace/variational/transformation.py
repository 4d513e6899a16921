"""Bijections of function values: composed with the function of a model, and fitted to draws (a T-stage)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from tqdm.auto import tqdm

from numpyro_fspace._checks import one_line
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.variational.bijections import Fitted
from numpyro_fspace.variational.divergences import default_gamma

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float, Key


class TStage(NamedTuple):
    """Result of a T-stage.

    Attributes:
        losses: by name of candidate, the mean negative log density of the (blurred) draws at every step, [num_steps].
        nll: by name of candidate, its smallest loss.
        chosen: the name of the candidate with the smallest loss.
        fitted: this bijection with its parameters.
    """

    losses: dict
    nll: dict
    chosen: str
    fitted: Fitted

    def __repr__(self) -> str:
        return one_line(self)


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


def gaussian_at(pushforward, x, gamma: float | None):
    """A linearized pushforward at x over the flat values [M K], with jitter M γ max(1, mean variance)."""
    mean, root = jax.jit(lambda x: (pushforward.mean(x), pushforward.root(x)))(x)
    root = root.reshape(mean.size, -1)
    size = float(jnp.mean(jnp.sum(root**2, -1)))
    jitter = len(x) * default_gamma(gamma, mean.dtype) * max(1.0, size)
    factor = jnp.linalg.cholesky(root @ root.T + jitter * jnp.eye(mean.size, dtype=mean.dtype))
    if not np.all(np.isfinite(factor)):
        raise ValueError(
            f"FVIMC: the covariance of {mean.size} function values is singular in {mean.dtype}. Use fewer points, "
            'a larger gamma, or jax.config.update("jax_enable_x64", True).'
        )
    return dist.MultivariateNormal(mean.ravel(), scale_tril=factor)


def log_density(gaussian, bijections: Sequence[Fitted], x, y) -> Float[Array, ...]:
    """log density of values y [..., M, K] under F_k∘…∘F_1∘Q; ``gaussian`` is Q at x over the flat values."""
    total = 0.0
    for fitted in reversed(tuple(bijections)):
        f = fitted.inverse(x, y)
        total, y = total - fitted.log_det(x, f).sum((-2, -1)), f
    return total + gaussian.log_prob(y.reshape(*y.shape[:-2], -1))


def fit_transformation(
    key: Key[Array, ""],
    candidates: dict,
    gaussian,
    x: Float[Array, "M D"],
    draws: Float[Array, "S M K"],
    *,
    previous: Sequence[Fitted] = (),
    blur: float = 0.0,
    num_steps: int = 1000,
    learning_rate: float = 1e-2,
    progress_bar: bool = False,
) -> TStage:
    r"""A T-stage: the bijection F with the highest mean log density of the draws under F∘F_k∘…∘F_1∘Q.

    .. math:: \max_\lambda \tfrac{1}{S} \sum_s \log Q\big((F_\lambda \circ F_k \circ \dots \circ F_1)^{-1}(y_s)\big)
              + \log \big|\det \partial (F_\lambda \circ F_k \circ \dots \circ F_1)^{-1} / \partial y_s\big|

    The mean log density per value is maximized by Adam with a cosine schedule and gradients clipped to norm 1. The best
    iterate is returned.

    Args:
        key: for the initial biases and for the noise.
        candidates: bijections by name.
        gaussian: Q at x, a multivariate normal over the flat values.
        x: points.
        draws: y_s, function values of the M-stage at x.
        previous: F_1, …, F_k.
        blur: τ; white noise of variance τ times the mean variance is added to Q and to the draws.
        num_steps, learning_rate: steps and learning rate of Adam.
        progress_bar: whether to show the progress over candidates.

    Returns:
        The losses of all candidates, and the chosen one.

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
    """Q and the draws, each with white noise of the given share of its mean variance."""
    if not share:
        return gaussian, draws
    covariance = gaussian.covariance_matrix
    noise = share * jnp.mean(jnp.diagonal(covariance))
    wider = dist.MultivariateNormal(gaussian.loc, covariance + noise * jnp.eye(len(covariance), dtype=covariance.dtype))
    sd = jnp.sqrt(share * jnp.mean(jnp.var(draws, 0)))
    return wider, draws + sd * jax.random.normal(key, draws.shape, draws.dtype)
