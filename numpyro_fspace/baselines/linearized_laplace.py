"""``laplace``: a mode of the model's density and the Gaussian approximation of the weights around it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from scipy.linalg import solve_triangular

from numpyro_fspace._checks import check_count, check_key, renamed_argument
from numpyro_fspace.baselines.curvature import CurvedModel
from numpyro_fspace.baselines.mode import find_modes
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.linearized import linearize
from numpyro_fspace.posterior.posterior import Posterior


@renamed_argument("optimiser", "optimizer")
def laplace(
    model,
    key,
    *args: Any,
    num_updates: int = 5000,
    optimizer=None,
    init_strategy=init_to_network,
    num_samples: int = 1000,
    **kwargs: Any,
) -> Posterior:
    r"""The linearized Laplace approximation, with the generalized Gauss-Newton matrix of all weights.

    .. math::
        f_L(x; w) &= f(x; m) + J(x; m)(w - m), \\
        w &\sim N\Big(m, \big(\Sigma_0^{-1} + J^\top \Lambda J
        + \textstyle\sum_j \text{scale}_j J_M^\top K_M^{-1} J_M\big)^{-1}\Big)

    m is a mode of the model's density, which an optax optimizer finds, and J is the derivative of the functions' values
    at all data. Λ = -∇² log p(y | f) is the curvature of the likelihood with respect to these values; its negative
    eigenvalues, which occur if the likelihood is not log-concave, are set to 0. Σ0⁻¹ = -∇² log p0(m) is the diagonal
    curvature of the weights' prior. The last term is that of the functional priors, if the model has any: J_M is the
    derivative at their fixed measurement points, K_M the covariance there, nugget included. If f is linear in w, the
    noise Gaussian and known, and the prior of the weights normal, this is the exact posterior.

    Latent values on which no function depends (the noise) stay at the mode, so that their draws are constant. At the
    mode the noise of a wide network may be far too small: give it an informative prior, or fix it. Also fix the scale
    of the weights' prior, because the joint mode of a sampled scale and its weights is at zero.

    The matrix that is factorized, in float64, has P rows, the number of weights, or N·K + M·K rows, the number of the
    functions' values, if that is smaller. Only the optimizer uses minibatches; the curvature is that of all data. The
    value of a function at an input must depend on that input alone.

    Args:
        model: a NumPyro model whose functions come from ``fs.random_module`` or are declared by
            ``fs.functional_prior``; the functional priors, if any, Gaussian and at fixed points.
        key: random key of the start, the minibatches and the draws.
        *args: the model's arguments.
        num_updates: optimizer steps to the mode; with 0 the start is used as the mode.
        optimizer: an optax optimizer; None means Adam with a cosine decay of the learning rate from 0.01.
        init_strategy: where the optimizer starts, a NumPyro init strategy; by default networks start from their own
            initializer.
        num_samples: S, the number of draws.
        **kwargs: the model's keyword arguments.

    Returns:
        A :class:`~numpyro_fspace.Posterior` of S independent draws; its model is linearized around m.

    Raises:
        ValueError: the samplers refuse the model, or it declares no function; measurement points are random; weights
            are constrained, or their prior is flat, heavy-tailed or not independent; the likelihood depends on weights
            other than through the functions, or couples the rows of the data; functions are used at different numbers
            of rows; there are more than 20 000 weights, unless there are at most 20 000 values of functions and
            values · weights ≤ 4·10⁸.
        TypeError: a functional prior is not Gaussian, or an argument has the wrong type.
        RuntimeError: the optimization diverged, or ended where the density is not finite.

    Example:
        >>> import flax.linen as nn, jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> from numpyro_fspace.baselines import laplace
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(1)])
        ...     f = fs.random_module("net", net, input_shape=1)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> y = x[:, 0] ** 2
        >>> posterior = laplace(model, jax.random.key(0), x, y, num_updates=100, num_samples=50)
        >>> fs.predict(posterior, jax.random.key(1), x)["net"].shape
        (50, 10, 1)

    Reference: A. Immer, M. Korzepa, M. Bauer (2021), *Improving predictions of Bayesian neural nets via local
    linearization*.
    """
    check_count(num_updates, "num_updates", 0)
    check_count(num_samples, "num_samples")
    check_key(key, "key", single=True)
    key_mode, key_draws = jax.random.split(key)

    def find(num_updates):
        settings = {"num_updates": num_updates, "optimizer": optimizer, "init_strategy": init_strategy}
        modes, latents = find_modes(model, key_mode[None], args, kwargs, **settings)
        return {name: modes[name][0] for name in latents}

    try:
        curved = CurvedModel(model, args, kwargs, find(0))
        if num_updates:
            curved.check()  # before the long optimization
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "laplace: the model calls a function within a jax.jit, jax.vmap or jax.lax.map of its own: call it at all "
            "rows directly, f(x)."
        ) from error
    if num_updates:
        curved = CurvedModel(model, args, kwargs, find(num_updates))
    precision = curved.prior_precision()
    scale = 1.0 / np.sqrt(precision)
    num_weights, num_values = len(precision), curved.num_values
    whitened = (rows * scale for rows in curved.curvature_rows())
    color, size = dual(np.concatenate(list(whitened))) if num_values < num_weights else primal(whitened, num_weights)
    noise = np.asarray(jax.random.normal(key_draws, (num_samples, size)), np.float64)
    weights = curved.mode + scale * color(noise)
    fit = {"center": jax.tree.map(np.asarray, curved.center)}
    return Posterior(linearize(model, curved.center), curved.draws(weights), args=args, kwargs=kwargs, fit=fit)


def primal(rows, num_weights):
    """``(color, size)``: ``color`` maps noise [S, size] to draws [S, P] of N(0, (I + BᵀB)⁻¹), given the rows of B."""
    gram = np.eye(num_weights)
    for part in rows:
        gram += part.T @ part
    root = np.linalg.cholesky(gram)
    return lambda noise: solve_triangular(root, noise.T, lower=True, trans=1).T, num_weights


def dual(b):
    """``primal`` with a matrix of as many rows as B: z - Bᵀ (I + B Bᵀ)⁻¹ (B z + e) for z, e ~ N(0, I)."""
    num_values, num_weights = b.shape
    root = np.linalg.cholesky(np.eye(num_values) + b @ b.T)

    def color(noise):
        z, e = noise[:, :num_weights], noise[:, num_weights:]
        residual = solve_triangular(root, (z @ b.T + e).T, lower=True)
        return z - solve_triangular(root, residual, lower=True, trans=1).T @ b

    return color, num_weights + num_values
