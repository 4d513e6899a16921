r"""Ridge regression by orthogonal factors, and the resulting Gaussian prior of a network's last layer.

Both write a matrix as A = Q R with a triangular R and nearly orthonormal columns of Q = A R⁻¹. The rounding errors of
R, which grow with the condition number of A, do not matter, because the equations are solved for the actual
QᵀQ = I + X, where X is small. The solutions do not depend on R, so R is not differentiated.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace.priors._lapack import root_and_inverse
from numpyro_fspace.sgmcmc.base import times

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float

__all__ = ["LastLayerPrior", "ridge_solver"]


@jax.custom_jvp
def gram(matrix: Float[Array, "M H"]) -> Float[Array, "H H"]:
    """AᵀA, whose derivative takes one product with A. That of ``A.T @ A`` takes two."""
    return times(matrix.T, matrix)


@gram.defjvp
def _gram_jvp(primals, tangents):
    half = times(tangents[0].T, primals[0])
    return gram(primals[0]), half + half.T


class Factored:
    """A = Q R for a matrix of full column rank that is given in blocks of rows, with QᵀQ = I + X.

    In float32 the entries of X are below 4e-3 for condition numbers up to 1e5, so series of three terms in X and their
    derivatives are exact up to rounding.

    Args:
        blocks: the rows of A.

    Attributes:
        root: R, upper triangular.
        inverse: R⁻¹.
    """

    def __init__(self, *blocks: Float[Array, "M H"]):
        self.blocks = blocks
        self.root, self.inverse = root_and_inverse(jax.lax.stop_gradient(jnp.concatenate(blocks)))

    def excess(self, right: Float[Array, "H C"]) -> Float[Array, "H C"]:
        """X r."""
        inner = times(self.inverse, right)
        pulled = [times(block.T, times(block, inner)) for block in self.blocks]
        return times(self.inverse.T, jnp.asarray(sum(pulled))) - right

    def solve(self, right: Float[Array, "H C"]) -> Float[Array, "H C"]:
        """(QᵀQ)⁻¹ r."""
        return right - self.excess(right - self.excess(right))


class Orthonormal(Factored):
    """``Factored`` with explicit Q and X, for many right-hand sides.

    Attributes:
        q: Q, in the blocks of A.
        x, square: X and X².
    """

    def __init__(self, *blocks: Float[Array, "M H"]):
        super().__init__(*blocks)
        self.q = [times(block, self.inverse) for block in blocks]
        self.unit = jnp.eye(len(self.inverse), dtype=self.inverse.dtype)
        self.x = sum(gram(block) for block in self.q) - self.unit
        self.square = times(self.x, self.x)

    def excess(self, right):
        return times(self.x, right)

    def square_root(self) -> Float[Array, "H H"]:
        """(QᵀQ)^½."""
        return self.unit + 0.5 * self.x - 0.125 * self.square

    def inverse_square_root(self) -> Float[Array, "H H"]:
        """(QᵀQ)^-½."""
        return self.unit - 0.5 * self.x + 0.375 * self.square

    def inverse_gram(self) -> Float[Array, "H H"]:
        """(QᵀQ)⁻¹."""
        return self.unit - self.x + self.square


def ridge_solver(matrix: Float[Array, "M H"], tau: Float[ArrayLike, ""]) -> Callable:
    r"""``r [M, C] -> G r [H, C]``, the solutions of :math:`\min_b |\Psi b - r|^2 + \tau^2 |b|^2` for the columns of r.

    With [Ψ; τI] = Q R they are :math:`R^{-1} (Q^\top Q)^{-1} R^{-\top} \Psi^\top r`. With [Ψᵀ; τI] = Q R and
    :math:`Q_1 = \Psi^\top R^{-1}` they are :math:`Q_1 (Q^\top Q)^{-1} R^{-\top} r`. The smaller of the two
    factorizations is used.

    Args:
        matrix: Ψ [M, H].
        tau: τ > 0.
    """
    unit = jnp.asarray(tau, matrix.dtype) * jnp.eye(min(matrix.shape), dtype=matrix.dtype)
    if matrix.shape[0] < matrix.shape[1]:
        rows = Orthonormal(matrix.T, unit)
        # R⁻ᵀ r has entries of the order 1/τ. Multiplying by the explicit Q₁ makes them small again.
        return lambda r: times(rows.q[0], rows.solve(times(rows.inverse.T, r)))
    columns = Factored(matrix, unit)
    inverse = columns.inverse
    return lambda r: times(inverse, columns.solve(times(inverse.T, times(matrix.T, r))))


@dataclasses.dataclass(frozen=True)
class Block:
    """The coordinates of a single output, or of all outputs if they are dependent a priori.

    Attributes:
        outputs: the numbers of the outputs.
        values: the covariance factor of the process in units of its standard deviation, [M, w, n] for w outputs.
        factor: factor of the covariance of the coordinates.
    """

    outputs: slice
    values: Float[Array, "M w n"]
    factor: Orthonormal

    def color(self, white):
        """Coordinates [H, w] from white numbers [H w]."""
        column = times(self.factor.square_root(), white[:, None])
        root = self.factor.root
        return times(root.T, column).reshape(-1, self.values.shape[1])


class LastLayerPrior:
    r"""The last layer b = b₀ + G (c + W z - Ψ b₀ - τ e) of a network given its features, as a Gaussian.

    In the coordinates β = R b of the ridge regression its distribution is

    .. math:: \beta \sim N\big(\gamma\, c,\; \gamma\, W W^\top \gamma^\top + \tau^2 (Q^\top Q)^{-1}\big), \qquad
              \gamma = (Q^\top Q)^{-1} Q_1^\top,

    whose entries are of the order of the values of the process, however large those of b are.

    Args:
        features: Ψ [M, H].
        tau: τ.
        roots: W, the factor of the covariance of the process in units of its standard deviation: [1, M, M], one for
            each output [K, M, M], or one for all values together [1, M K, M K].
        center: c [M, K], the mean of the process minus the offset of the network, in the same units.

    Attributes:
        size: number of white parameters of all outputs together.
    """

    #: Names of the latent sites without the prefix of the network: standardized a₀ and z, and e.
    sites = ("last_layer", "values", "residual")

    def __init__(self, features, tau, roots, center):
        (num_points, num_outputs), num_features = center.shape, features.shape[1]
        self.center, self.size, self.tau = center, num_features * num_outputs, jnp.asarray(tau, features.dtype)
        self.factor = Orthonormal(features, self.tau * jnp.eye(num_features, dtype=features.dtype))
        self.gain = times(self.factor.inverse_gram(), self.factor.q[0].T)  # γ [H, M]
        rest = self.tau * self.factor.inverse_square_root()
        self.blocks = []
        for k in range(1 if roots.shape[-1] != num_points else num_outputs):
            if roots.shape[-1] != num_points:
                outputs, width, root = slice(None), num_outputs, roots[0]
            else:
                outputs, width, root = slice(k, k + 1), 1, roots[k % len(roots)]
            if not (k and len(roots) == 1):
                values = root.reshape(num_points, width, -1)
                colored = jnp.einsum("mwn,hm->nhw", values, self.gain, precision="highest")
                unit = jnp.eye(width, dtype=rest.dtype)
                parts = (colored.reshape(-1, num_features * width), rest if width == 1 else jnp.kron(rest, unit))
                factor = Orthonormal(*parts)
            self.blocks.append(Block(outputs, values, factor))

    def last_layer(self, white: Float[Array, " R"]) -> Float[Array, "H K"]:
        """b as a function of white parameters."""
        columns = white.reshape(-1, self.center.shape[1])
        colored = [block.color(columns[:, block.outputs].ravel()) for block in self.blocks]
        return times(self.factor.inverse, times(self.gain, self.center) + jnp.concatenate(colored, 1))

    def latents(self, white: Float[Array, " R"], key) -> dict:
        r"""Values of the sites by name, drawn from their standard normal prior given the b of these white parameters.

        With the map B = [γW, τ²(QᵀQ)⁻¹R⁻ᵀ, -τγ] from the sites to β and its covariance ΛΛᵀ, they are
        :math:`w' + B^\top \Lambda^{-\top} (c - \Lambda^{-1} B w')` for a draw w' of the prior.
        """
        factor, tau, num_points = self.factor, self.tau, len(self.center)
        columns, dtype = white.reshape(-1, self.center.shape[1]), white.dtype
        parts: dict = {site: [] for site in self.sites}
        for i, block in enumerate(self.blocks):
            num, width = len(columns), block.values.shape[1]
            keys = jax.random.split(jax.random.fold_in(key, i), 3)
            shapes = {"last_layer": (num, width), "values": (block.values.shape[2],), "residual": (num_points, width)}
            w = {k: jax.random.normal(one, shapes[k], dtype) for k, one in zip(shapes, keys, strict=True)}
            value = times(self.gain, jnp.einsum("mwn,n->mw", block.values, w["values"], precision="highest"))
            value = value + tau * factor.solve(times(tau * factor.inverse.T, w["last_layer"]))
            value = value - tau * times(self.gain, w["residual"])
            inverse, half = block.factor.inverse, block.factor.inverse_square_root()
            missing = columns[:, block.outputs].ravel() - times(half, times(inverse.T, value.ravel()[:, None]))[:, 0]
            back = times(inverse, times(half, missing[:, None])).reshape(num, width)
            pulled = times(self.gain.T, back)
            w["values"] += jnp.einsum("mwn,mw->n", block.values, pulled, precision="highest")
            w["last_layer"] += times(tau * factor.inverse, factor.solve(tau * back))
            w["residual"] -= tau * pulled
            w["values"] = w["values"].reshape(num_points, width)
            for site, part in w.items():
                parts[site].append(part)
        return {site: jnp.concatenate(found, 1) for site, found in parts.items()}
