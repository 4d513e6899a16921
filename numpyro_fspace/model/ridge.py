r"""Ridge regression by orthogonal factors, differentiable, in single precision and under ``vmap``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace.priors._lapack import inverse_root, times

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float

__all__ = ["Reduction", "Ridge"]

#: Steps of iterative refinement, at most: a solution by R alone has the error of the squared condition number, and each
#: step of refinement multiplies it by about that factor again.
NUM_REFINEMENTS = 2
#: Accuracy of solutions, and of the directions of a ``Reduction``.
ACCURACY, ACCURACY_OF_DIRECTIONS = 1e-5, 3e-3


class Ridge:
    r"""Solutions of :math:`\min_b |\Psi b - r|^2 + \tau^2 |b|^2` for one matrix Ψ and any r.

    With the residual e = (r - Ψb) / τ the solution solves the symmetric system τe + Ψb = r, Ψᵀe - τb = 0. Its condition
    number is that of [Ψ; τI] and not the square of it, so that e and b are refined to the precision of the type. R is
    the triangular factor of [Ψ; τI], or of [Ψᵀ; τI] if Ψ has fewer rows than columns. Derivatives are those of a linear
    solution: none is taken of R.

    Args:
        matrix: Ψ [M, H].
        tau: τ > 0.
    """

    def __init__(self, matrix: Float[Array, "M H"], tau: Float[ArrayLike, ""]):
        self.matrix, self.tau = matrix, jnp.asarray(tau, matrix.dtype)
        # Rows of Ψ have a mean square length of about one, so that its largest singular value is at most √M.
        known = float(tau) if isinstance(tau, int | float) else 0.0
        self._rate = float(jnp.finfo(matrix.dtype).eps) * len(matrix) / known**2 if known else 1.0
        self.is_dual = matrix.shape[0] < matrix.shape[1]
        tall = matrix.T if self.is_dual else matrix
        self.inverse = inverse_root(jnp.concatenate([tall, self.tau * jnp.eye(tall.shape[1], dtype=matrix.dtype)]))

    def __call__(self, r: Float[Array, "M C"], *, accuracy: float = ACCURACY) -> Float[Array, "H C"]:
        """The solutions for the columns of r."""
        wanted = NUM_REFINEMENTS if self._rate >= 0.5 else math.ceil(math.log(accuracy) / math.log(self._rate)) - 1
        num_refinements = min(max(wanted, 0), NUM_REFINEMENTS)
        psi, tau, inverse = self.matrix, self.tau, jax.lax.stop_gradient(self.inverse)

        def product(x):
            e, b = x[: len(psi)], x[len(psi) :]
            return jnp.concatenate([tau * e + times(psi, b), times(psi.T, e) - tau * b])

        def corrections(rest):
            first, second = rest[: len(psi)], rest[len(psi) :]
            if self.is_dual:
                y = times(inverse, times(inverse.T, first + times(psi, second) / tau))
                return jnp.concatenate([tau * y, times(psi.T, y) - second / tau])
            b = times(inverse, times(inverse.T, times(psi.T, first) - tau * second))
            return jnp.concatenate([(first - times(psi, b)) / tau, b])

        def solve(product, right):
            x = corrections(right)
            for _ in range(num_refinements):
                x = x + corrections(right - product(x))
            return x

        # One array for both: JAX has no derivative of a part of the right-hand side.
        right = jnp.concatenate([r, jnp.zeros((psi.shape[1], r.shape[1]), r.dtype)])
        return jax.lax.custom_linear_solve(product, right, solve, symmetric=True)[len(psi) :]


@dataclasses.dataclass(frozen=True)
class Reduction:
    r"""The latent sites w of a ``gp_network`` by as few white numbers c as its last layer has parameters.

    The last layer is :math:`\mu + B w` with white w = (values z, last layer b₀, residual e) and
    :math:`B = [G W, I - G \Psi, -\tau G]`, where G r is the ridge regression of r. With the triangular factor T of Bᵀ
    and Q = Bᵀ T⁻¹, whose columns are orthonormal, c = Qᵀ w is white and the last layer is μ + Tᵀ c.

    Attributes:
        ridge: of the features Ψ [M, H].
        roots: W, the factor of the process's covariance in units of its amplitude, [1, M, M] or one per output.
        num_outputs: K.
    """

    ridge: Ridge
    roots: Float[Array, "B M M"]
    num_outputs: int
    sites = ("last_layer", "values", "residual")

    @property
    def size(self) -> int:
        """Numbers in c, for all outputs."""
        return self.ridge.matrix.shape[1] * self.num_outputs

    def lift(self, white: Float[Array, " R"], key=None) -> dict:
        """w = Q c by site; with a key plus (I - Q Qᵀ) w' for white w', so that w is white if c is."""
        columns = white.reshape(-1, self.num_outputs)
        bases = [self._basis(root) for root in self.roots]
        sizes = {"last_layer": len(columns), "values": len(self.roots[0]), "residual": len(self.roots[0])}
        keys = jax.random.split(jax.random.key(0) if key is None else key, len(sizes))
        values: dict = {}
        for k in range(self.num_outputs):
            basis, column = bases[k % len(bases)], columns[:, k]
            w = {site: times(basis[site], column) for site in sizes}
            if key is not None:
                other = {
                    site: jax.random.normal(jax.random.fold_in(one, k), (size,), column.dtype)
                    for (site, size), one in zip(sizes.items(), keys, strict=True)
                }
                along = jnp.asarray(sum(times(basis[site].T, other[site]) for site in sizes))
                w = {site: w[site] + other[site] - times(basis[site], along) for site in sizes}
            for site, part in w.items():
                values.setdefault(site, []).append(part)
        return {site: jnp.stack(parts, -1) for site, parts in values.items()}

    def _basis(self, root):
        """Q by site, each [size, H]."""
        matrix, tau = self.ridge.matrix, self.ridge.tau
        unit = jnp.eye(matrix.shape[1], dtype=matrix.dtype)
        primal = inverse_root(jnp.concatenate([matrix, tau * unit])) if self.ridge.is_dual else self.ridge.inverse
        half = tau * primal.T  # its square, HᵀH, is I - G Ψ
        values = self.ridge(root, accuracy=ACCURACY_OF_DIRECTIONS).T
        inverse = inverse_root(jnp.concatenate([values, half]))
        last_layer = times(half.T, times(half, inverse))
        residual = -times(times(matrix, primal), times(half, inverse))  # as half is τ Pᵀ: no division by τ
        return {"last_layer": last_layer, "values": times(values, inverse), "residual": residual}
