"""``CalibratedPrior``: a Gaussian prior over functions, relative to the network's own distribution.

It is for ``functional_prior``. A ``gp_network`` calibrates its last layer (``model/last_layer/given_features.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_sampling, one_line
from numpyro_fspace.priors.base import as_inputs, as_values, deprecated_law
from numpyro_fspace.priors.cholesky import Memory, as_columns, as_moments, as_rows, product
from numpyro_fspace.priors.gaussian_base import GaussianProcess

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Key

    from numpyro_fspace.priors.cholesky import AnyArray


class _Basis(NamedTuple):
    """Coordinates v = Vᵀ (f - m) in which the prior is N(0, I) and the base N(β, diag(g)).

    Attributes:
        to: V [B, M, M].
        back: V⁻ᵀ [B, M, M], f - m = V⁻ᵀ v.
        mean: m of the prior, [M, K].
        shift: β as columns [B, M, R].
        variance: g [B, M, 1].
    """

    to: AnyArray
    back: AnyArray
    mean: AnyArray
    shift: AnyArray
    variance: AnyArray


class CalibratedPrior:
    r"""P0 divided by the network's own distribution Q, log P0(f) - log Q(f), in the directions in which Q is wider.

    A network with random weights has its own distribution Q at the measurement points (the *base*).
    ``functional_prior`` with P0 gives f the product distribution Q · P0, which is narrower than either.
    With the density ratio

    .. math:: p_0(w)\, \frac{P_0(f(X_M; w))}{Q(f(X_M; w))},

    f(X_M) has the distribution P0, as accurately as Q describes the network. The ratio of two Gaussian densities can be
    normalized only in directions where Q is wider. Both are therefore transformed to coordinates in which P0 is white
    and Q is diagonal. A direction in which Q has the larger variance gets the variance of P0; any other direction keeps
    that of Q. The curvature of the ratio is at most the precision of P0, whatever Q is. Give the weights a *wide*
    prior, because the ratio cannot produce functions that the network does not have.

    ``log_prob`` is the logarithm of the ratio, which has mean one under a Gaussian Q. ``sample`` and ``marginal``
    describe Q times the ratio, a Gaussian distribution with the mean and variance of P0 in the directions in which Q is
    wider and those of Q in all others. The distribution of a finite network is Gaussian only to order 1/width, and the
    calibration has the same accuracy.

    Args:
        prior: P0, a Gaussian prior (``fs.GPPrior``), including its nugget.
        base: Q, a Gaussian approximation of the network's distribution of functions: ``fs.priors.NetworkPrior`` of
            ``fs.model.random_function``, without its nugget. It is evaluated once for fixed points and for random
            points from a pool (``fs.measurement.subset``), and at each gradient step for other points.

    Raises:
        TypeError: prior or base is not Gaussian.
        ValueError: they have different numbers of outputs; or, at an evaluation, the outputs of one are dependent
            and those of the other are not.

    Example:
        >>> import jax, tinygp, flax.linen as nn, numpyro_fspace as fs
        >>> network = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        >>> draw = fs.model.random_function(network, input_shape=1, prior=fs.fan_in(3.0))
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.3), nugget=0.01)
        >>> of_network = fs.priors.NetworkPrior(draw, jax.random.key(0))
        >>> prior = fs.priors.CalibratedPrior(gp, of_network)
        >>> prior.log_prob(jax.numpy.linspace(-1, 1, 20)[:, None], jax.numpy.zeros(20)).shape
        ()

    ``docs/theory.md`` shows how the posterior approaches the exact one as the width grows.
    """

    def __init__(self, prior: GaussianProcess, base: GaussianProcess):
        for name, process in {"prior": prior, "base": base}.items():
            if not isinstance(process, GaussianProcess):
                raise TypeError(
                    f"CalibratedPrior: {name} must be Gaussian (fs.GPPrior, fs.priors.NetworkPrior), "
                    f"got {type(process).__name__}."
                )
        if prior.num_outputs != base.num_outputs:
            raise ValueError(
                f"CalibratedPrior: prior has num_outputs={prior.num_outputs}, base num_outputs={base.num_outputs}."
            )
        self.prior, self.base, self._memory = prior, base, Memory()

    __repr__ = one_line

    @property
    def num_outputs(self) -> int | None:
        """K, or None for a single output whose values are [M]."""
        return self.prior.num_outputs

    def log_prob(self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"]) -> Float[Array, ""]:
        """Log ratio of the densities at f, in the directions in which the base is wider.

        Args:
            x: measurement points [M, D].
            f: the function's values there, [M] (or [M, 1]), or [M, K] if the prior has ``num_outputs``.
        """
        v, shift, variance = self._coordinates(x, f)
        wide = jnp.maximum(variance, 1.0)
        ratio = jnp.log(wide) + (v - shift) ** 2 / wide - v**2
        return 0.5 * jnp.where(variance > 1.0, ratio, 0.0).sum()

    def gaussian_residuals(
        self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"]
    ) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        """r, which is affine in f, and a constant c, with ``log_prob(x, f)`` = c - rᵀ r / 2.

        In a wide direction, g > 1, they are √(1 - 1/g) (v + β/(g - 1)) and (log g + β²/(g - 1)) / 2, else 0.
        """
        v, shift, variance = self._coordinates(x, f)
        is_wide = variance > 1.0
        wide = jnp.where(is_wide, variance, 2.0)
        r = jnp.where(is_wide, jnp.sqrt((wide - 1.0) / wide) * (v + shift / (wide - 1.0)), 0.0)
        constant = 0.5 * jnp.where(is_wide, jnp.log(wide) + shift**2 / (wide - 1.0), 0.0)
        return r.ravel(), constant.sum()

    def _coordinates(self, x, f):
        """``(v, β, g)`` of values f at x, as columns, without directions that are known not to be wide."""
        x = as_inputs(x)
        f = jnp.asarray(as_values(f, len(x), self.num_outputs, "f"))
        basis = self._basis(x)
        num_wide = basis.variance.shape[-2]
        if isinstance(basis.variance, np.ndarray):
            num_wide = int(np.max(np.sum(basis.variance > 1.0, axis=-2)))
        first = basis.variance.shape[-2] - num_wide  # g increases
        parts = basis.to[..., first:], basis.shift[..., first:, :], basis.variance[..., first:, :]
        to, shift, variance = (jnp.asarray(part, f.dtype) for part in parts)
        v = product(to.swapaxes(-1, -2), as_columns(f - jnp.asarray(basis.mean, f.dtype), to.shape))
        return v, shift, jnp.broadcast_to(variance, v.shape)

    def marginal(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """Mean and covariance of f(x) under the base times the ratio, in the form of ``GPPrior.marginal``."""
        x = as_inputs(x)
        basis = self._basis(x)
        xp = np if isinstance(basis.to, np.ndarray) else jnp
        is_wide = basis.variance > 1.0
        mean = basis.mean + as_rows(product(basis.back, xp.where(is_wide, 0.0, basis.shift)), len(x))
        root = basis.back * xp.sqrt(xp.minimum(basis.variance, 1.0)).swapaxes(-1, -2)
        return as_moments(mean, product(root, root.swapaxes(-1, -2)), self.num_outputs)

    law = deprecated_law

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f(x) from the Gaussian distribution with the moments of ``marginal``."""
        check_sampling(key, sample_shape)
        x = as_inputs(x)
        basis = jax.tree.map(jnp.asarray, self._basis(x))
        blocks, size = basis.to.shape[:2]
        noise = jax.random.normal(key, (*sample_shape, blocks, size, basis.shift.shape[-1]), float)
        v = jnp.where(basis.variance > 1.0, noise, basis.shift + jnp.sqrt(basis.variance) * noise)
        draws = basis.mean + as_rows(product(basis.back.astype(v.dtype), v), len(x))
        return draws[..., 0] if self.num_outputs is None else draws

    def check(self, x: Float[ArrayLike, "M D"]) -> None:
        """Check that the prior's covariance at x has a Cholesky factor; see ``GPPrior.check``."""
        self.prior.check(x)

    def tabulated(self, pool: Float[ArrayLike, "N D"]) -> CalibratedPrior | None:
        """This prior at the points of a pool, as a function of row numbers; see ``GPPrior.tabulated``."""
        prior, base = self.prior.tabulated(pool), self.base.tabulated(pool)
        return None if prior is None or base is None else CalibratedPrior(prior, base)

    def _basis(self, x) -> _Basis:
        return self._memory.once(("basis", x), lambda: self._find_basis(x))

    def _find_basis(self, x) -> _Basis:
        factor, mean = self.prior._factor(x), self.prior._mean(x)
        base_mean, covariance = self.base._mean(x), self.base._covariance(x)
        if covariance.shape[-1] != factor.shape[-1]:
            raise ValueError(
                "CalibratedPrior: the outputs must be dependent in both prior and base, or in neither. With a "
                "matrix-valued kernel pass the base fs.priors.NetworkPrior(..., dependent=True)."
            )
        half = factor.whiten(covariance)
        white = factor.whiten(half.swapaxes(-1, -2))
        xp = np if isinstance(white, np.ndarray) else jnp
        variance, rotation = xp.linalg.eigh(0.5 * (white + white.swapaxes(-1, -2)))
        variance = xp.maximum(variance, 0.0)[..., None]
        inverse = factor.whiten(xp.eye(white.shape[-1], dtype=white.dtype)[None])
        to = product(inverse.swapaxes(-1, -2), rotation)
        shift = product(to.swapaxes(-1, -2), as_columns(base_mean - mean, to.shape))
        return _Basis(to, product(factor.cholesky, rotation), mean, shift, variance)
