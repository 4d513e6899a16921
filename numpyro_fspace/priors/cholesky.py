"""Cholesky factors of covariances. Factors of concrete covariances are computed once in float64 and cached."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import warn
from numpyro_fspace._xla import matmul
from numpyro_fspace.priors.lapack import cholesky, solve_lower
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float

    #: Concrete values are NumPy arrays (float64), traced values are JAX arrays.
    AnyArray: TypeAlias = np.ndarray | Array

CACHE_SIZE = 8
#: Advice for a covariance with negative eigenvalues.
KERNEL_CURE = (
    "pass a kernel that is positive definite at x. tinygp's Matern and RationalQuadratic kernels use the L1 distance; "
    "with several inputs give them distance=tinygp.kernels.distance.L2Distance(). Cosine and ExpSineSquared are "
    "kernels of one input; with several inputs use a product of tinygp.transforms.Subspace(i, kernel)"
)
#: A variance of a posterior below minus this number times the prior's is no rounding error.
NEGATIVE = 1e-4
#: A negative eigenvalue of this size, relative to the sum of all eigenvalues, is not a rounding error.
INDEFINITE = 1e-6
#: A difference of this size between k(x, x') and k(x', x), relative to the largest covariance, is not one either.
ASYMMETRIC = 1e-4


@dataclass(frozen=True, eq=False)
class Factor:
    """Cholesky factors L of B covariances, Σ = L Lᵀ.

    Attributes:
        cholesky: L, lower triangular.
        half_log_det: log |L|, half the log determinant of Σ.
        inverse: L⁻¹ if the factors are concrete, so that whitening is a product; None if they are traced.
    """

    cholesky: Float[AnyArray, "B M M"]
    half_log_det: Float[AnyArray, " B"]
    inverse: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, P, P]: one block shared by all outputs, one block per output, or one block for all values together."""
        return self.cholesky.shape

    def whiten(self, columns: Float[AnyArray, "B M R"]) -> Float[AnyArray, "B M R"]:
        """L⁻¹ r, in the precision of r."""
        if self.inverse is not None:
            return product(self.inverse.astype(columns.dtype), columns)
        return solve_lower(*_broadcast(self.cholesky, columns))

    def solve(self, columns: Float[AnyArray, "B M R"]) -> Float[AnyArray, "B M R"]:
        """Σ⁻¹ r, in the precision of r."""
        white = self.whiten(columns)
        if self.inverse is not None:
            return product(np.swapaxes(self.inverse, -1, -2).astype(white.dtype), white)
        return solve_lower(*_broadcast(self.cholesky, white), transposed=True)

    def color(self, columns: Float[AnyArray, "*S B M R"]) -> Float[AnyArray, "*S B M R"]:
        """L r, which has covariance Σ if the columns r are white."""
        return product(self.cholesky.astype(columns.dtype), columns)


class Memory:
    """A cache of the last few results computed from concrete inputs."""

    def __init__(self):
        self._cache = OrderedDict()

    def once(self, inputs: tuple, build: Callable):
        """``build()``, cached under the values of the inputs if these and the result are concrete.

        Args:
            inputs: a name for the result, followed by arrays.
            build: returns an array, a ``Factor``, or a tuple whose first entry is an array.
        """
        if is_traced(inputs[1:]):
            return build()
        digest = blake2b(f"{inputs[0]}, {jnp.result_type(float)}".encode())
        for array in inputs[1:]:
            digest.update(repr(np.shape(array)).encode() + np.asarray(array, np.float64).tobytes())
        value = self._cache.pop(digest.digest(), None)
        value = build() if value is None else value
        first = value.inverse if isinstance(value, Factor) else value[0] if isinstance(value, tuple) else value
        if isinstance(first, np.ndarray):
            self._cache[digest.digest()] = value
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return value


def factorize(covariance: Float[AnyArray, "B M M"], diagonal: Float[AnyArray, "B M"], what: str) -> Factor:
    """The Cholesky factors of covariance + diag(diagonal).

    Concrete (NumPy) arguments are factorized by LAPACK in float64. Traced arguments are factorized in the compiled
    program, where a failure gives NaN.

    Args:
        covariance: B covariance matrices.
        diagonal: numbers added to their diagonals.
        what: the name of the diagonal, for the error message.

    Raises:
        ValueError: the covariance is concrete and not positive definite.
    """
    size = covariance.shape[-1]
    if not (isinstance(covariance, np.ndarray) and isinstance(diagonal, np.ndarray)):
        traced = cholesky(jnp.asarray(covariance) + jnp.eye(size) * jnp.asarray(diagonal)[:, None])
        return Factor(traced, jnp.log(jnp.diagonal(traced, axis1=-2, axis2=-1)).sum(-1))

    import scipy.linalg

    lower = np.stack([_cholesky(c, d, what) for c, d in zip(covariance, diagonal, strict=True)])
    inverse = np.stack([scipy.linalg.solve_triangular(l, np.eye(size), lower=True) for l in lower])
    half_log_det = np.log(np.diagonal(lower, axis1=-2, axis2=-1)).sum(-1)
    return Factor(lower, half_log_det, inverse)


def _cholesky(covariance: np.ndarray, diagonal: np.ndarray, what: str) -> np.ndarray:
    """The factor of one concrete covariance, or an error that states its smallest eigenvalue."""
    difference, largest = (np.abs(part).max(initial=0.0) for part in (covariance - covariance.T, covariance))
    if difference > ASYMMETRIC * largest:
        raise ValueError(
            f"the kernel is not symmetric at x: k(x, x') and k(x', x) differ by up to {difference:.2g}, where the "
            f"largest value is {largest:.2g}. Make it symmetric in its two inputs."
        )
    total = covariance + np.diag(diagonal)
    try:
        lower = np.linalg.cholesky(total)
    except np.linalg.LinAlgError:
        if not total.any():
            raise ValueError(
                f"the covariance at x plus {what} is zero: give the kernel a positive variance, or pass {what}=."
            ) from None
        smallest, largest = np.linalg.eigvalsh(total)[[0, -1]]
        raise ValueError(
            f"the covariance at x plus {what} {diagonal.min():.3g} is not positive definite: its smallest "
            f"eigenvalue is {smallest:.3g}, its largest {largest:.3g}. Pass a larger {what}, for example "
            f"{diagonal.min() + max(-2 * smallest, 0) + 1e-6 * abs(largest):.1g}, or correct the kernel: {KERNEL_CURE}."
        ) from None
    scales, kept = np.diagonal(lower), np.finfo(jax.dtypes.canonicalize_dtype(float))
    if scales.min() < kept.tiny or np.sqrt(np.diagonal(total).max()) > kept.max:
        raise ValueError(
            f"the covariance at x plus {what} has standard deviations of {scales.min():.2g} to {scales.max():.2g}, "
            f"beyond the range of {kept.dtype}: rescale f, the variance of the kernel and the {what}."
        )
    return lower


def warn_of_indefinite(covariance: AnyArray) -> None:
    """Warn if one of the concrete matrices [B, M, M] is not a covariance, even if a nugget or noise hides it."""
    for block in covariance if isinstance(covariance, np.ndarray) else ():
        size = len(block)
        if not block.any():
            continue
        try:
            np.linalg.cholesky(block + INDEFINITE * np.trace(block) * np.eye(size))
        except np.linalg.LinAlgError:
            smallest, largest = np.linalg.eigvalsh(block)[[0, -1]]
            warn(
                f"The kernel is not a covariance: at {size} points its matrix has the eigenvalue {smallest:.2g} (the "
                f"largest is {largest:.2g}), which the nugget or the noise hides. Please {KERNEL_CURE}."
            )
            return


def checked_finite(moment: AnyArray, name: str = "covariance") -> AnyArray:
    """A mean or covariance of a prior, which holds no NaN or infinity if it is concrete."""
    if isinstance(moment, np.ndarray) and not np.isfinite(moment).all():
        cure = {
            "covariance": "kernel at these x (is a lengthscale 0, or its square too small for float32? rescale x then)",
            "mean": "mean function at these x",
        }[name]
        raise ValueError(f"the prior {name} holds NaN or infinity: check the {cure}.")
    return moment


def checked_variances(covariance: AnyArray, prior: AnyArray) -> AnyArray:
    """Concrete covariances [B, M, M], with no variance that is negative beyond rounding errors of the prior's."""
    if isinstance(covariance, np.ndarray) and isinstance(prior, np.ndarray) and covariance.size:
        variances, largest = np.diagonal(covariance, axis1=-2, axis2=-1), np.diagonal(prior, axis1=-2, axis2=-1).max()
        if variances.min() < -NEGATIVE * largest:
            raise ValueError(
                f"The process has the variance {variances.min():.3g} at x, because its kernel is not a covariance: "
                f"{KERNEL_CURE}."
            )
    return covariance


def product(left: Float[AnyArray, "*B M N"], right: Float[AnyArray, "*B N R"]) -> Float[AnyArray, "*B M R"]:
    """Matrix product in full precision on every device, in float64 if both factors are NumPy arrays."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left @ right
    return matmul(left, right)


def as_columns(values: Float[AnyArray, "M K"], shape: tuple[int, ...]) -> Float[AnyArray, "B P R"]:
    """Values as columns, to be multiplied by covariance blocks of ``shape`` [B, P, ...].

    Independent outputs have P = M, with B = 1 and R = K or B = K and R = 1. Dependent outputs are one column, P = M K.
    """
    if shape[-2] != len(values):
        return values.reshape(1, -1, 1)
    return values[None] if shape[-3] == 1 else values.T[:, :, None]


def as_rows(columns: Float[AnyArray, "*S B P R"], num_points: int) -> Float[AnyArray, "*S M K"]:
    """The inverse of ``as_columns``."""
    if columns.shape[-2] != num_points:
        return columns.reshape(*columns.shape[:-3], num_points, -1)
    if columns.shape[-3] == 1:
        return columns[..., 0, :, :]
    return columns[..., 0].swapaxes(-1, -2)


def as_moments(mean, covariance, num_outputs: int | None):
    """Mean [M, K] and covariance blocks in the public form: [M] and [M, M], or [M, K] and [K, M, M].

    If the outputs are dependent, the covariance is that of ``f.ravel()``, [M K, M K].
    """
    if num_outputs is None:
        return mean[:, 0], covariance[0]
    if covariance.shape[-1] != len(mean):
        return mean, covariance[0]
    return mean, covariance.repeat(num_outputs // len(covariance), axis=0)


def _broadcast(triangular, columns) -> tuple[Array, Array]:
    """Both with the same number of blocks."""
    blocks = max(triangular.shape[0], columns.shape[0])
    dtype = jnp.result_type(triangular, columns)
    left, right = (jnp.broadcast_to(a, (blocks, *a.shape[1:])).astype(dtype) for a in (triangular, columns))
    return left, right
