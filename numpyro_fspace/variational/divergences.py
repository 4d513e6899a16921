"""Divergences between the law that a guide gives a function and its prior, at measurement points.

A divergence is a callable ``(law, prior, x) -> D``. ``law`` is a ``LinearisedLaw``: the Gaussian law of the
linearized function under the guide, by its ``mean(x)`` [M, K], ``root(x)`` [M, K, R] (whose product with its
transpose is the covariance), ``jacobian(x)`` [M, K, P] and ``loc``, the mean of the weights [P]. Those that need
draws of the function only are in ``sampled_divergences``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_fspace._checks import check_positive

if TYPE_CHECKING:
    from jaxtyping import Array, Float

__all__ = ["PushforwardKL", "RegularizedKL", "Wasserstein2", "regularized_kl"]


@dataclass(frozen=True)
class RegularizedKL:
    r"""GFSVI's divergence: the KL between Gaussian laws at X_M, both with a little white noise added.

    .. math:: D^\gamma(Q \,\|\, P_0) = \mathrm{KL}\big(N(f(X_M; m), J S J^\top + \gamma M I) \,\big\|\,
              N(\mu(X_M), K(X_M, X_M) + \gamma M I)\big)

    Between a network's law, which lives on a manifold of as many dimensions as there are weights, and a process,
    the plain KL is infinite. K includes the prior's own nugget. D tends to the plain KL as γ → 0 where that is
    finite.

    Args:
        gamma: γ > 0, variance per measurement point. None is 1e-10 in float64 (the paper's) and 1e-6 in float32,
            where a smaller one is lost to rounding.

    Raises:
        ValueError, TypeError: γ is not a positive number; the prior is not Gaussian.

    Reference: T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space variational
    inference in Bayesian neural networks*, eq. 2.9 and algorithm 1.
    """

    gamma: float | None = None

    def __post_init__(self):
        if self.gamma is not None:
            check_positive(self.gamma, "gamma")

    def __call__(self, law, prior, x) -> Float[Array, ""]:
        difference, root, prior_covariance = _compared(self, law, prior, x)
        jitter = len(x) * default_gamma(self.gamma, difference.dtype)
        return regularized_kl(difference, root, prior_covariance, jitter)


@dataclass(frozen=True)
class PushforwardKL:
    r"""TFSVI's divergence: the KL to the law that a prior of the weights gives the same linearized function.

    .. math:: \mathrm{KL}\big(N(f(X_M; m), J S J^\top + \gamma M I) \,\big\|\,
              N(f(X_M; m) - J m, \sigma_p^2 J J^\top + \gamma M I)\big)

    The functional prior of the model lends its measurement points only; weights ~ N(0, σ_p² I) decide.

    Args:
        prior_scale: σ_p > 0.
        gamma: γ > 0, variance per measurement point. None is that of ``RegularizedKL`` times the mean of the diagonal
            of σ_p² J Jᵀ, which is as large as the network is wide: what is lost to rounding grows with it.

    Reference: T. Rudner, Z. Chen, Y. W. Teh, Y. Gal (2022), *Tractable function-space variational inference in
    Bayesian neural networks*.
    """

    prior_scale: float = 1.0
    gamma: float | None = None

    def __post_init__(self):
        check_positive(self.prior_scale, "prior_scale")
        if self.gamma is not None:
            check_positive(self.gamma, "gamma")

    def __call__(self, law, prior, x) -> Float[Array, ""]:
        jacobian = law.jacobian(x)
        num_points, num_outputs, _ = jacobian.shape
        flat = self.prior_scale * jnp.swapaxes(jacobian, 0, 1).reshape(num_outputs * num_points, -1)
        difference = jnp.einsum("mkp,p->km", jacobian, law.loc).reshape(-1, 1)
        root = jnp.swapaxes(law.root(x), 0, 1).reshape(num_outputs * num_points, 1, -1)
        covariance = gram(flat)
        unit = jax.lax.stop_gradient(jnp.diagonal(covariance).mean()) if self.gamma is None else 1.0
        jitter = num_points * default_gamma(self.gamma, flat.dtype) * unit
        return regularized_kl(difference, root, covariance[None], jitter)


@dataclass(frozen=True)
class Wasserstein2:
    r"""GWI's divergence: the squared 2-Wasserstein distance between the Gaussian laws at X_M.

    .. math:: W_2^2 = \|m_Q - m_P\|^2 + \mathrm{tr}\, \Sigma_Q + \mathrm{tr}\, \Sigma_P
              - 2\, \mathrm{tr}\big(\Sigma_P^{1/2} \Sigma_Q \Sigma_P^{1/2}\big)^{1/2}

    It is finite where a KL is not, so nothing need be added to either law; Σ_P includes the prior's nugget. What
    maximizes the bound is a posterior of generalized variational inference, not that of Bayes' rule.

    Raises:
        TypeError: the prior is not Gaussian.

    Reference: V. Wild, R. Hu, D. Sejdinovic (2022), *Generalized variational inference in function spaces: Gaussian
    measures meet Bayesian deep learning*.
    """

    def __call__(self, law, prior, x) -> Float[Array, ""]:
        difference, root, prior_covariance = _compared(self, law, prior, x)
        root = jnp.swapaxes(root, 0, 1)
        factor = jnp.linalg.cholesky(prior_covariance)
        flat = (factor.mT @ root).reshape(-1, root.shape[-1])
        values = jnp.linalg.eigvalsh(gram(flat))
        eps = jnp.finfo(difference.dtype).eps
        floor = eps * jnp.max(values)  # below it eigenvalues are rounding, and the root is steep
        overlap = jnp.sqrt(jnp.maximum(values, floor)).sum()
        spread = jnp.sum(root**2) + jnp.trace(prior_covariance, axis1=-2, axis2=-1).sum() - 2.0 * overlap
        return jnp.sum(difference**2) + spread


def _compared(divergence, law, prior, x):
    """m_q - m_p [M, K] and A [M, K, R] of the law at x, covariance [K, M, M] of a Gaussian prior.

    Dependent outputs are taken together: their values are one output at M K points.
    """
    if not hasattr(prior, "law"):
        raise TypeError(
            f"{type(divergence).__name__} needs a Gaussian prior such as fs.GPPrior; {type(prior).__name__} is known "
            "by its log density and draws only. fs.variational.SpectralSteinKL() takes any prior."
        )
    mean, root = law.mean(x), law.root(x)
    prior_mean, covariance = (jnp.asarray(part, mean.dtype) for part in prior.law(x))
    difference = mean - prior_mean.reshape(mean.shape)
    if covariance.ndim == 3:
        return difference, root, covariance
    size = len(covariance)
    return difference.reshape(size, 1), root.reshape(size, 1, -1), covariance[None]


def default_gamma(gamma: float | None, dtype) -> float:
    """γ, or what the precision allows."""
    if gamma is not None:
        return gamma
    return 1e-10 if dtype == jnp.float64 else 1e-6


@jax.custom_vjp
def gram(rows: Float[Array, "M P"]) -> Float[Array, "M M"]:
    """A Aᵀ; its gradient takes one product with A, where that of ``A @ A.T`` takes two."""
    return rows @ rows.T


gram.defvjp(lambda rows: (gram(rows), rows), lambda rows, g: ((g + g.T) @ rows,))


def regularized_kl(
    difference: Float[Array, "M K"], root: Float[Array, "M K R"], covariance: Float[Array, "K M M"], jitter: float
) -> Float[Array, ""]:
    """KL(N(m_q, A Aᵀ + c I) ‖ N(m_p, Σ + c I)) for K independent outputs of p.

    Args:
        difference: m_q - m_p.
        root: A.
        covariance: Σ, a block for each output.
        jitter: c.
    """
    num_points, num_outputs = difference.shape
    eye = jnp.eye(num_points, dtype=covariance.dtype)
    factor = jnp.linalg.cholesky(covariance + jitter * eye)
    whitener = solve_triangular(factor, jnp.broadcast_to(eye, factor.shape), lower=True)
    white_difference = jnp.einsum("kmn,nk->km", whitener, difference)
    whole = gram(jnp.swapaxes(root, 0, 1).reshape(num_outputs * num_points, -1))
    whole += jitter * jnp.eye(len(whole), dtype=whole.dtype)
    blocks = jnp.einsum("kmkn->kmn", whole.reshape(num_outputs, num_points, num_outputs, num_points))
    trace = jnp.sum((whitener.mT @ whitener) * blocks)
    log_ratio = 2.0 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum() - log_det(whole)
    return 0.5 * (jnp.sum(white_difference**2) + trace + log_ratio - num_outputs * num_points)


@jax.custom_vjp
def log_det(matrix: Float[Array, "M M"]) -> Float[Array, ""]:
    """log|C| of a positive definite C, by Cholesky's factor; its gradient C⁻¹ is made of the same factor."""
    return _log_det(matrix)[0]


def _log_det(matrix):
    factor = jnp.linalg.cholesky(matrix)
    return 2.0 * jnp.log(jnp.diagonal(factor)).sum(), factor


def _inverse(factor, g):
    whitener = solve_triangular(factor, jnp.eye(len(factor), dtype=factor.dtype), lower=True)
    return (g * (whitener.T @ whitener),)


log_det.defvjp(_log_det, _inverse)
