"""Divergences between the pushforward of a guide and a functional prior, at measurement points.

A divergence is a callable ``(pushforward, prior, x) -> D``. ``pushforward`` is a ``LinearizedPushforward``, the
Gaussian distribution of the linearized function under the guide: ``mean(x)`` [M, K], ``root(x)`` [M, K, R] (its product
with its transpose is the covariance), ``jacobian(x)`` [M, K, P], and ``loc``, the mean of the weights [P]. Divergences
that need only draws of the function are in ``sampled_divergences``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_fspace._checks import check_positive
from numpyro_fspace._xla import matmul
from numpyro_fspace.model.last_layer.ridge import gram

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclass(frozen=True)
class RegularizedKL:
    r"""GFSVI's divergence: the KL between Gaussian distributions at X_M, with a little white noise added to both.

    .. math:: D^\gamma(Q \,\|\, P_0) = \mathrm{KL}\big(N(f(X_M; m), J S J^\top + \gamma M I) \,\big\|\,
              N(\mu(X_M), K(X_M, X_M) + \gamma M I)\big)

    M is the number of points; m, S and J are as for ``fs.FunctionalELBO``; μ and K are the prior's mean and covariance,
    nugget included. The plain KL between a network and a process is infinite, because the network's functions lie on a
    manifold with as many dimensions as there are weights. As γ → 0, D tends to the plain KL wherever that is finite.

    Args:
        gamma: γ > 0; the variance of the noise is γ M. None means 1e-10 in float64 (the paper's value) and 1e-6 in
            float32, where a smaller variance is lost to rounding.

    Raises:
        ValueError, TypeError: γ is not a positive number; at the first step, the prior is not Gaussian.

    Reference: T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space variational
    inference in Bayesian neural networks*, eq. 2.9 and algorithm 1.
    """

    gamma: float | None = None

    def __post_init__(self):
        if self.gamma is not None:
            check_positive(self.gamma, "gamma")

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        difference, root, prior_covariance = _differences(self, pushforward, prior, x)
        jitter = len(x) * default_gamma(self.gamma, difference.dtype)
        return regularized_kl(difference, root, prior_covariance, jitter)


@dataclass(frozen=True)
class PushforwardKL:
    r"""TFSVI's divergence: the KL to the pushforward of a prior of the weights through the same linearized function.

    .. math:: \mathrm{KL}\big(N(f(X_M; m), J S J^\top + \gamma M I) \,\big\|\,
              N(f(X_M; m) - J m, \sigma_p^2 J J^\top + \gamma M I)\big)

    The symbols are as for ``RegularizedKL``. Of the model's functional prior only the measurement points are used; the
    prior is that of weights ~ N(0, σ_p² I).

    Args:
        prior_scale: σ_p > 0.
        gamma: γ > 0; the variance of the noise is γ M. None means the value of ``RegularizedKL`` times the mean of the
            diagonal of σ_p² J Jᵀ. That mean grows with the width of the network, and so do rounding errors.

    Raises:
        ValueError, TypeError: an argument is not a positive number.

    Reference: T. Rudner, Z. Chen, Y. W. Teh, Y. Gal (2022), *Tractable function-space variational inference in
    Bayesian neural networks*.
    """

    prior_scale: float = 1.0
    gamma: float | None = None

    def __post_init__(self):
        check_positive(self.prior_scale, "prior_scale")
        if self.gamma is not None:
            check_positive(self.gamma, "gamma")

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        jacobian = pushforward.jacobian(x)
        num_points, num_outputs, _ = jacobian.shape
        flat = self.prior_scale * jnp.swapaxes(jacobian, 0, 1).reshape(num_outputs * num_points, -1)
        difference = jnp.einsum("mkp,p->km", jacobian, pushforward.loc, precision="highest").reshape(-1, 1)
        root = jnp.swapaxes(pushforward.root(x), 0, 1).reshape(num_outputs * num_points, 1, -1)
        covariance = gram(flat.T)
        unit = jax.lax.stop_gradient(jnp.diagonal(covariance).mean()) if self.gamma is None else 1.0
        jitter = num_points * default_gamma(self.gamma, flat.dtype) * unit
        return regularized_kl(difference, root, covariance[None], jitter)


@dataclass(frozen=True)
class Wasserstein2:
    r"""GWI's divergence: the squared 2-Wasserstein distance between the Gaussian distributions at X_M.

    .. math:: W_2^2 = \|m_Q - m_P\|^2 + \mathrm{tr}\, \Sigma_Q + \mathrm{tr}\, \Sigma_P
              - 2\, \mathrm{tr}\big(\Sigma_P^{1/2} \Sigma_Q \Sigma_P^{1/2}\big)^{1/2}

    m and Σ are means and covariances; Σ_P includes the prior's nugget. The distance is finite where a KL is not, so no
    noise needs to be added. The maximizer of the bound is a posterior of generalized variational inference and not the
    Bayesian posterior.

    Raises:
        TypeError: at the first step, the prior is not Gaussian.

    Reference: V. Wild, R. Hu, D. Sejdinovic (2022), *Generalized variational inference in function spaces: Gaussian
    measures meet Bayesian deep learning*.
    """

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        difference, root, prior_covariance = _differences(self, pushforward, prior, x)
        root = jnp.swapaxes(root, 0, 1)
        factor = jnp.linalg.cholesky(prior_covariance)
        flat = matmul(factor.mT, root).reshape(-1, root.shape[-1])
        overlap = jnp.linalg.norm(flat, "nuc")  # eigenvalues of A Aᵀ keep half of the digits only
        spread = jnp.sum(root**2) + jnp.trace(prior_covariance, axis1=-2, axis2=-1).sum() - 2.0 * overlap
        return jnp.sum(difference**2) + spread


def _differences(divergence, pushforward, prior, x):
    """m_q - m_p [M, K] and A [M, K, R] of the pushforward at x, and the covariance [K, M, M] of a Gaussian prior.

    Dependent outputs are treated as one output at M K points.
    """
    if not hasattr(prior, "marginal"):
        raise TypeError(
            f"{type(divergence).__name__} needs a Gaussian prior such as fs.GPPrior; {type(prior).__name__} has only "
            "a log density and draws. fs.variational.SpectralSteinKL() takes any prior."
        )
    mean, root = pushforward.mean(x), pushforward.root(x)
    prior_mean, covariance = (jnp.asarray(part, mean.dtype) for part in prior.marginal(x))
    difference = mean - prior_mean.reshape(mean.shape)
    if covariance.ndim == 3:
        return difference, root, covariance
    size = len(covariance)
    return difference.reshape(size, 1), root.reshape(size, 1, -1), covariance[None]


def default_gamma(gamma: float | None, dtype) -> float:
    """γ, or the smallest value that the precision allows."""
    if gamma is not None:
        return gamma
    return 1e-10 if dtype == jnp.float64 else 1e-6


def regularized_kl(
    difference: Float[Array, "M K"], root: Float[Array, "M K R"], covariance: Float[Array, "K M M"], jitter: float
) -> Float[Array, ""]:
    """KL(N(m_q, A Aᵀ + c I) ‖ N(m_p, Σ + c I)) for K independent outputs of p.

    Args:
        difference: m_q - m_p.
        root: A.
        covariance: Σ, one block for each output.
        jitter: c.
    """
    num_points, num_outputs = difference.shape
    eye = jnp.eye(num_points, dtype=covariance.dtype)
    factor = jnp.linalg.cholesky(covariance + jitter * eye)
    whitener = solve_triangular(factor, jnp.broadcast_to(eye, factor.shape), lower=True)
    white_difference = jnp.einsum("kmn,nk->km", whitener, difference, precision="highest")
    whole = gram(jnp.swapaxes(root, 0, 1).reshape(num_outputs * num_points, -1).T)
    whole += jitter * jnp.eye(len(whole), dtype=whole.dtype)
    blocks = jnp.einsum("kmkn->kmn", whole.reshape(num_outputs, num_points, num_outputs, num_points))
    trace = jnp.sum(matmul(whitener.mT, whitener) * blocks)
    log_ratio = 2.0 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum() - log_det(whole)
    return 0.5 * (jnp.sum(white_difference**2) + trace + log_ratio - num_outputs * num_points)


@jax.custom_vjp
def log_det(matrix: Float[Array, "M M"]) -> Float[Array, ""]:
    """log|C| of a positive definite C from its Cholesky factor, which also gives the gradient C⁻¹."""
    return _log_det(matrix)[0]


def _log_det(matrix):
    factor = jnp.linalg.cholesky(matrix)
    return 2.0 * jnp.log(jnp.diagonal(factor)).sum(), factor


def _inverse(factor, g):
    whitener = solve_triangular(factor, jnp.eye(len(factor), dtype=factor.dtype), lower=True)
    return (g * matmul(whitener.T, whitener),)


log_det.defvjp(_log_det, _inverse)
