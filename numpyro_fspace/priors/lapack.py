"""Triangular factors and solves that do not deadlock under ``vmap``.

On a CPU, jaxlib 0.10 to 0.11.1 distribute a batch of matrices over the threads of XLA's pool, and each call waits in
one of these threads for the others. If there are as many such batches as threads, they wait forever. With several
chains every matrix is a batch, so two functional priors at random points can deadlock on two cores. On a CPU the
functions below therefore process one matrix after another. This is necessary as long as jaxlib below 0.11.2 is
supported; with newer versions ``cholesky`` and ``solve_lower`` are JAX's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.custom_batching import sequential_vmap
from jax.scipy.linalg import solve_triangular

from numpyro_fspace._xla import matmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float


def batches_may_deadlock() -> bool:
    """Whether this version of jaxlib may deadlock in batches of matrices."""
    return (0, 10) <= jaxlib.version.__version_info__ < (0, 11, 2) and jax.default_backend() == "cpu"


def one_by_one(fn: Callable) -> Callable:
    """``fn``, which under ``vmap`` processes one matrix after another on a CPU, and all at once on other devices."""
    return sequential_vmap(fn) if jax.default_backend() == "cpu" else fn


def cholesky(covariance: Float[Array, "B M M"]) -> Float[Array, "B M M"]:
    """Lower Cholesky factors; NaN for matrices that have none."""
    return jax.vmap(_cholesky)(covariance) if batches_may_deadlock() else jnp.linalg.cholesky(covariance)


def solve_lower(
    triangular: Float[Array, "B M M"], columns: Float[Array, "B M R"], *, transposed: bool = False
) -> Float[Array, "B M R"]:
    """L⁻¹ r, or L⁻ᵀ r, for lower triangular L."""
    solve = _solve_one if batches_may_deadlock() else _solve
    return jax.vmap(lambda l, r: solve(l, r, transposed))(triangular, columns)


def _solve(triangular, columns, transposed):
    return solve_triangular(triangular, columns, lower=True, trans=int(transposed))


def _solve_one(triangular, columns, transposed):
    """``_solve`` with one call for each matrix, differentiable any number of times."""

    def applied(x):
        return matmul(triangular.T if transposed else triangular, x)

    def solver(transposed):
        solve = one_by_one(lambda l, r: _solve(l, r, transposed))
        return lambda _, r: solve(triangular, r)

    return jax.lax.custom_linear_solve(applied, columns, solver(transposed), solver(not transposed))


@jax.custom_jvp
def _cholesky(covariance):
    return one_by_one(jnp.linalg.cholesky)(covariance)


@_cholesky.defjvp
def _cholesky_jvp(primals, tangents):
    """dL = L Φ(L⁻¹ dΣ L⁻ᵀ), Φ the lower triangle with half the diagonal, of the symmetrized argument."""
    factor = _cholesky(*primals)
    half = _solve_one(factor, 0.5 * (tangents[0] + tangents[0].T), False)
    white = _solve_one(factor, half.T, False)
    return factor, matmul(factor, jnp.tril(white) - 0.5 * jnp.diag(jnp.diagonal(white)))


def root_and_inverse(matrix: Float[Array, "M H"]) -> tuple[Float[Array, "H H"], Float[Array, "H H"]]:
    """``triangular_root`` R and R⁻¹.

    Products with R⁻¹ replace triangular solves, each of which would call LAPACK. If the rounding errors of R⁻¹ matter,
    the caller refines the solution.
    """
    root = triangular_root(matrix)
    return root, _inverse(root)


@jax.custom_jvp
def triangular_root(matrix: Float[Array, "M H"]) -> Float[Array, "H H"]:
    """The upper triangular R with a positive diagonal and RᵀR = AᵀA, for a matrix A of full column rank.

    R comes from the QR factorization of A, so the condition number of the problem is that of A and not its square.
    """
    root = one_by_one(lambda a: jnp.linalg.qr(a, mode="r"))(matrix)
    signs = jnp.where(jnp.diagonal(root) < 0, -1.0, 1.0).astype(root.dtype)
    return signs[:, None] * root


@triangular_root.defjvp
def _triangular_root_jvp(primals, tangents):
    """dR = Φ(Z + Zᵀ) R with Z = R⁻ᵀ Aᵀ dA R⁻¹, Φ the upper triangle with half the diagonal."""
    (matrix,), (tangent,) = primals, tangents
    root = triangular_root(matrix)
    inverse = _inverse(root)
    slope = matmul(matmul(inverse.T, matmul(matrix.T, tangent)), inverse)
    total = slope + slope.T
    return root, matmul(jnp.triu(total) - 0.5 * jnp.diag(jnp.diagonal(total)), root)


@jax.custom_jvp
def _inverse(triangular):
    return one_by_one(lambda r: solve_triangular(r, jnp.eye(len(r), dtype=r.dtype)))(triangular)


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    """d(R⁻¹) = -R⁻¹ dR R⁻¹."""
    inverse = _inverse(*primals)
    return inverse, -matmul(matmul(inverse, tangents[0]), inverse)
