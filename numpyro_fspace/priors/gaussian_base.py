"""Gaussian processes: the base class of Gaussian priors, exact posteriors, and processes tabulated on a pool."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_sampling, one_line
from numpyro_fspace.priors._nugget import as_diagonal, default_nugget
from numpyro_fspace.priors.base import as_inputs, as_positive, as_real, as_values, deprecated_law
from numpyro_fspace.priors.cholesky import (
    Factor,
    Memory,
    as_columns,
    as_moments,
    as_rows,
    checked_finite,
    checked_variances,
    factorize,
    product,
    warn_of_indefinite,
)
from numpyro_fspace.priors.tracing import at_compile_time, in_default_precision, is_traced

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Key

    from numpyro_fspace.priors.cholesky import AnyArray

#: Maximum number of entries of a table of covariances: 32 MiB in float32.
MAX_TABLE = 2**23


class GaussianProcess(ABC):
    """A prior whose values at any inputs are Gaussian, given its mean and covariance.

    Internally values are [M, K], with K = 1 for a single output, and covariances are B blocks [B, M, M]: one shared by
    all outputs, or one per output. Dependent outputs have one block [1, M K, M K], in which the outputs of a point are
    adjacent. If x and the prior are concrete (not traced by JAX), the mean and the Cholesky factor are computed once,
    even while a program is being traced, and become constants of that program.

    Attributes:
        num_outputs: K, or None for a single output whose values are [M].
        nugget: variance added to the diagonal of the covariance at the points. None means 1e-2 times the mean variance
            of f there (of the smallest summand, if the kernel is a sum), but at least 1e-4 times that of f.
    """

    exact = True  # evaluate concrete means and covariances in float64
    has_zero_mean = False  # whether the mean is known to be zero everywhere
    law = deprecated_law
    __repr__ = one_line

    def __init__(self, num_outputs: int | None, nugget: ArrayLike | None):
        self.num_outputs = num_outputs
        self.nugget = None if nugget is None else as_positive(nugget, "nugget")
        self._memory = Memory()

    @abstractmethod
    def mean_function(self, x: Float[ArrayLike, "M D"]) -> Float[Array, "M K"]:
        """m(x), [M, 1] for a single output."""

    @abstractmethod
    def covariance_function(self, x1: Float[ArrayLike, "M D"], x2: Float[ArrayLike, "L D"]) -> Float[Array, "B M L"]:
        """k(x1, x2) without nugget, in 1 or K blocks; one block [1, M K, L K] if outputs are dependent."""

    def smallest_share(self, x: Float[ArrayLike, "M D"]) -> Float[AnyArray, " B"]:
        """Share of the smallest summand in the mean variance at x, by block; 1 unless f is a sum of functions."""
        return np.ones(1)

    def summands(self) -> list[list[GaussianProcess]]:
        """Independent processes whose sum this one is, by kernel; this one alone unless it is a sum of functions."""
        return [[self]]

    def log_prob(self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"]) -> Float[Array, ""]:
        """log N(f; m(x), k(x, x) + nugget · I), summed over outputs.

        Args:
            x: measurement points [M, D].
            f: values of the function there, [M] (or [M, 1]), or [M, K] if the prior has ``num_outputs``.

        Returns:
            The log density, in the precision of f. If x or the prior is traced, a covariance that is not positive
            definite gives NaN.

        Raises:
            ValueError: shapes are wrong, x or f has NaN, or a concrete covariance is not positive definite.
        """
        return self._log_density(x, f, noise=None)

    def log_marginal_likelihood(
        self, x: Float[ArrayLike, "N D"], y: Float[ArrayLike, "N K"], noise_variance: Float[ArrayLike, "*N"]
    ) -> Float[Array, ""]:
        """log N(y; m(x), k(x, x) + noise_variance · I), the marginal likelihood of targets y, without nugget.

        Args:
            x: inputs [N, D].
            y: targets, [N] or [N, K].
            noise_variance: variance of the noise of the targets: a scalar, [N] or [N, K].
        """
        return self._log_density(x, y, as_positive(noise_variance, "noise_variance", ndim=2))

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f at points x [M, D] from the distribution that ``log_prob`` evaluates, nugget included.

        Returns:
            Draws [*sample_shape, M], or [*sample_shape, M, K] if the prior has ``num_outputs``.
        """
        check_sampling(key, sample_shape)
        x = as_inputs(x)
        factor, mean = self._factor(x), jnp.asarray(self._mean(x))
        num_blocks, size, _ = factor.shape
        noise = jax.random.normal(key, (*sample_shape, num_blocks, size, mean.size // (num_blocks * size)), float)
        draws = mean.astype(noise.dtype) + as_rows(factor.color(noise), len(x))
        return draws[..., 0] if self.num_outputs is None else draws

    def moments(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """Mean and covariance of f at x [M, D] without nugget, in float64 NumPy arrays if x and the prior are concrete.

        Returns:
            Mean [M] and covariance [M, M]; [M, K] and [K, M, M] if the prior has ``num_outputs``; [M, K] and the
            covariance of ``f.ravel()``, [M K, M K], if the outputs are dependent.

        Raises:
            ValueError: x, the mean or the covariance has NaN or infinity, or a variance is negative.
        """
        x = as_inputs(x)
        return as_moments(self._mean(x), self._covariance(x), self.num_outputs)

    def marginal(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """``moments`` with the nugget: mean and covariance of the distribution that ``log_prob`` evaluates."""
        mean, covariance = self.moments(x)
        nugget = self.nugget
        if nugget is None:
            nugget = default_nugget(self.smallest_share(as_inputs(x)), covariance)[..., None, None]
            nugget = nugget if covariance.ndim == 3 else nugget[0]
        return mean, covariance + nugget * np.eye(covariance.shape[-1], dtype=covariance.dtype)

    def condition(
        self,
        x: Float[ArrayLike, "N D"],
        y: Float[ArrayLike, "N K"],
        noise_variance: Float[ArrayLike, "*N"],
        *,
        nugget: ArrayLike | None = None,
    ) -> ConditionedGP:
        """The exact posterior of f given y = f(x) + noise: GP(m', k') of ``ConditionedGP``, again a prior.

        Do not use this posterior as the prior of a network with a likelihood of the same y: the data would count twice.

        Args:
            x: inputs [N, D].
            y: targets, [N] or [N, K].
            noise_variance: variance of the noise of the targets: a scalar, [N] or [N, K].
            nugget: nugget of the posterior as a prior; None keeps the nugget of this prior. If that is None too, the
                default is relative to the posterior variance.
        """
        return ConditionedGP(self, x, y, noise_variance, self.nugget if nugget is None else nugget)

    def tabulated(self, pool: Float[ArrayLike, "N D"]) -> TabulatedGP | None:
        """This process at the points of a pool [N, D], as a function of row numbers [M, 1] instead of inputs [M, D].

        Mean and covariance of the whole pool are computed once, in the precision used for fixed points, and looked up
        by row number. The result is None if they depend on traced values or the covariance has more than 2²³ entries.
        """
        pool = as_inputs(pool)
        if is_traced(pool) or jax.eval_shape(lambda a: self.covariance_function(a, a), pool).size > MAX_TABLE:
            return None
        table = self._memory.once(
            ("table", pool), lambda: (self._covariance(pool), self._mean(pool), self.smallest_share(pool))
        )
        if not all(isinstance(part, np.ndarray) for part in table):
            return None
        return TabulatedGP(self, *table)

    def check(self, x: Float[ArrayLike, "M D"]) -> None:
        """Raise a ValueError if k(x, x) + nugget · I is concrete and has no Cholesky factor."""
        self._factor(as_inputs(x))

    def gaussian_residuals(self, x, f) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        """r, which is affine in f, and a constant c, with ``log_prob(x, f)`` = c - rᵀ r / 2."""
        white, half_log_det = self.whitened(x, f)
        return white.ravel(), -half_log_det.sum() - 0.5 * math.log(2 * math.pi) * white.size

    def whitened(self, x, f, noise=None):
        """L⁻¹ (f - m) as columns, and log |Σ| / 2 of each, with Σ = k(x, x) + nugget (or noise) I = L Lᵀ."""
        x = as_inputs(x)
        f = as_values(f, len(x), self.num_outputs, "f" if noise is None else "y")
        factor, mean = self._factor(x, noise), self._mean(x)
        residual = jnp.asarray(f - (mean if isinstance(f, np.ndarray) else jnp.asarray(mean, f.dtype)))  # in float64
        white = factor.whiten(as_columns(residual, factor.shape))
        shape = (*white.shape[:-2], white.shape[-1])
        return white, jnp.broadcast_to(jnp.asarray(factor.half_log_det, white.dtype)[:, None], shape)

    def _log_density(self, x, f, noise) -> Float[Array, ""]:
        white, half_log_det = self.whitened(x, f, noise)
        return -(0.5 * jnp.sum(white**2) + half_log_det.sum()) - 0.5 * math.log(2 * math.pi) * white.size

    def _mean(self, x) -> Float[AnyArray, "M K"]:
        mean = self._memory.once(("mean", x), lambda: at_compile_time(self.mean_function, x, exact=self.exact))
        return checked_finite(mean, "mean")

    def _covariance(self, x) -> Float[AnyArray, "B P P"]:
        return checked_finite(at_compile_time(lambda a: self.covariance_function(a, a), x, exact=self.exact))

    def _factor(self, x, noise=None, name: str = "noise_variance") -> Factor:
        """The factor of k(x, x) plus noise (a scalar, [M] or [M, K]) of that name, or plus the nugget."""
        nugget, name = (self.nugget, "nugget") if noise is None else (noise, name)
        return self._memory.once(("factor", x, nugget), lambda: self._factorize(x, nugget, name))

    def _factorize(self, x, nugget, name: str) -> Factor:
        covariance = self._covariance(x)
        if nugget is None:
            nugget = default_nugget(self.smallest_share(x), covariance)[:, None]
        else:
            nugget = as_diagonal(nugget, len(x), self.num_outputs, size=covariance.shape[-1], name=name)
        xp = np if isinstance(covariance, np.ndarray) and isinstance(nugget, np.ndarray) else jnp
        size, blocks = covariance.shape[-1], max(len(covariance), len(nugget) if nugget.ndim == 2 else 1)
        covariance = xp.broadcast_to(covariance, (blocks, size, size))
        factor = factorize(covariance, xp.broadcast_to(nugget, (blocks, size)), name)
        if self.exact:
            warn_of_indefinite(covariance)
        return factor


class ConditionedGP(GaussianProcess):
    """The posterior of f under a Gaussian prior and data y = f(x) + noise of variances s², returned by ``condition``.

    m'(·) = m(·) + k(·, x) Σ⁻¹ (y - m(x)),  k'(·, ·) = k(·, ·) - k(·, x) Σ⁻¹ k(x, ·),  Σ = k(x, x) + diag(s²).

    At traced points (random points, or any under jit) both have the program's precision: in float32, with small noise,
    m' may be wrong by more than the posterior sd, and ``log_prob`` NaN. Use fixed points or a pool, or enable float64.
    Reference: C. E. Rasmussen, C. Williams (2006), *Gaussian processes for machine learning*, equations 2.22 to 2.24.
    """

    def __init__(self, prior: GaussianProcess, x, y, noise_variance, nugget: ArrayLike | None):
        super().__init__(prior.num_outputs, nugget)
        self.exact, self.prior, self.x = prior.exact, prior, as_inputs(x)
        self._first = getattr(prior, "_first", prior)  # whose variances are the unit of rounding errors
        y = as_values(as_real(y, "y"), len(self.x), self.num_outputs, "y")
        self._data = prior._factor(self.x, as_positive(noise_variance, "noise_variance", ndim=2))
        self._weights = self._data.solve(as_columns(y - prior._mean(self.x), self._data.shape))

    def smallest_share(self, x):
        return self.prior.smallest_share(x)

    def mean_function(self, x):
        self._check_columns(x)
        cross = self.prior.covariance_function(x, in_default_precision(self.x))
        return self.prior.mean_function(x) + as_rows(product(cross, self._weights), len(x))

    def _covariance(self, x):
        return checked_variances(super()._covariance(x), self._first._covariance(x))

    def _check_columns(self, *inputs):
        for x in inputs:
            if x.shape[1] != self.x.shape[1]:  # a kernel would broadcast a single column
                raise ValueError(f"x has {x.shape[1]} columns, but the data of this posterior have {self.x.shape[1]}.")

    def covariance_function(self, x1, x2):
        self._check_columns(x1, x2)
        crosses = (self.prior.covariance_function(in_default_precision(self.x), x) for x in (x1, x2))
        white1, white2 = map(self._data.whiten, crosses)
        return self.prior.covariance_function(x1, x2) - product(jnp.swapaxes(white1, -1, -2), white2)


class TabulatedGP(GaussianProcess):
    """A Gaussian process at the points of a pool, as a function of their row numbers, returned by ``tabulated``.

    Args:
        prior: the tabulated process; its nugget is added to the points that are looked up, not to the table.
        covariance: covariance of the pool in blocks [B, N, N], or [1, N K, N K] if outputs are dependent.
        mean: mean of the pool [N, K].
        share: share of the smallest summand in the variance at the pool, by block.
    """

    def __init__(self, prior: GaussianProcess, covariance: np.ndarray, mean: np.ndarray, share: np.ndarray):
        super().__init__(prior.num_outputs, prior.nugget)
        self.exact, self._tables, self._share = prior.exact, (covariance, mean), share

    def smallest_share(self, rows):
        return self._share

    def mean_function(self, rows):
        return jnp.asarray(self._tables[1], float)[rows[:, 0].astype(int)]

    def covariance_function(self, rows1, rows2):
        covariance, mean = self._tables
        width = covariance.shape[-1] // len(mean)
        left, right = ((r.astype(int) * width + np.arange(width)).ravel() for r in (rows1, rows2))
        return jnp.asarray(covariance, float)[:, left[:, None], right]
