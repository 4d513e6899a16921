"""Gaussian laws of functions: what every Gaussian prior shares, their exact posteriors, and their tables."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.priors._cholesky import (
    Factor,
    Memory,
    as_columns,
    as_rows,
    at_compile_time,
    factorize,
    is_traced,
    product,
    warn_of_indefinite,
)
from numpyro_fspace.priors.base import as_inputs, as_positive, as_real, as_values

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Key

    from numpyro_fspace.priors._cholesky import AnyArray

__all__ = ["ConditionedGP", "GaussianProcess", "TabulatedGP"]

RELATIVE_NUGGET = 1e-2
#: The default nugget is no smaller than for a summand of this share in the variance.
SMALLEST_SHARE = 1e-2
#: Numbers of a table of covariances, at most: 32 MiB in float32.
MAX_TABLE = 2**23


class GaussianProcess(ABC):
    """A prior whose values at any inputs are Gaussian, given its mean and covariance.

    Inside, values are [M, K] with K = 1 for a single output, and covariances are B blocks [B, M, M]: one
    shared by all outputs, or one for each. Outputs that depend on one another have one block [1, M K, M K],
    whose rows go through the outputs of a point and then through the points. Where x and the prior are
    concrete, mean and factor are computed once in float64, even while a program is being traced, and enter
    it as constants.

    Attributes:
        num_outputs: K, or None for a single output whose values are [M].
        nugget: variance added to the covariance's diagonal at the points, or None for 1e-2 times the mean
            variance there, of the smallest summand if the kernel is a sum (``smallest_share``).
    """

    exact = True  # evaluate mean and covariance in float64 where they are concrete

    def __init__(self, num_outputs: int | None, nugget: ArrayLike | None):
        self.num_outputs = num_outputs
        self.nugget = None if nugget is None else as_positive(nugget, "nugget")
        self._memory = Memory()

    @abstractmethod
    def mean_function(self, x: Float[ArrayLike, "M D"]) -> Float[Array, "M K"]:
        """m(x), [M, 1] for a single output."""

    @abstractmethod
    def covariance_function(self, x1: Float[ArrayLike, "M D"], x2: Float[ArrayLike, "L D"]) -> Float[Array, "B M L"]:
        """k(x1, x2) without nugget, in one block or K, or in one block [1, M K, L K] of dependent outputs."""

    def smallest_share(self, x: Float[ArrayLike, "M D"]) -> Float[AnyArray, " B"]:
        """The share in the mean variance at x of the smallest of the independent functions whose sum f is, by block."""
        del x
        return np.ones(1)

    def log_prob(self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"]) -> Float[Array, ""]:
        """log N(f; m(x), k(x, x) + nugget · I), summed over outputs.

        Args:
            x: measurement points [M, D].
            f: the function's values there, [M] (or [M, 1]), or [M, K] if the prior has ``num_outputs``.

        Returns:
            The log density, in the precision of f. If x or the kernel is traced, a covariance that is not
            positive definite gives NaN.

        Raises:
            ValueError: wrong shapes, NaN in x, or a concrete covariance that is not positive definite.
        """
        return self._log_density(x, f, noise=None)

    def log_marginal_likelihood(
        self, x: Float[ArrayLike, "N D"], y: Float[ArrayLike, "N K"], noise_variance: Float[ArrayLike, "*N"]
    ) -> Float[Array, ""]:
        """log N(y; m(x), k(x, x) + noise_variance · I), the evidence of targets y; no nugget is added.

        Args:
            x: inputs [N, D].
            y: targets, [N] or [N, K].
            noise_variance: of each target, scalar, [N] or [N, K].
        """
        return self._log_density(x, y, as_positive(noise_variance, "noise_variance", ndim=2))

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f(x) from the law that ``log_prob`` evaluates, nugget included.

        Returns:
            Draws [*sample_shape, M], or [*sample_shape, M, K] if the prior has ``num_outputs``.
        """
        x = as_inputs(x)
        factor, mean = self._factor(x), jnp.asarray(self._mean(x))
        num_blocks, size, _ = factor.shape
        noise = jax.random.normal(key, (*sample_shape, num_blocks, size, mean.size // (num_blocks * size)), float)
        draws = mean.astype(noise.dtype) + as_rows(factor.color(noise), len(x))
        return draws[..., 0] if self.num_outputs is None else draws

    def moments(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """Mean and covariance of f(x) without nugget, float64 NumPy arrays if x and the prior are concrete.

        Returns:
            Mean [M] and covariance [M, M], or [M, K] and [K, M, M] if the prior has ``num_outputs``; [M, K] and
            [M K, M K], the covariance of ``f.ravel()``, if these depend on one another.
        """
        x = as_inputs(x)
        mean, covariance = self._mean(x), self._covariance(x)
        if self.num_outputs is None:
            return mean[:, 0], covariance[0]
        if covariance.shape[-1] != len(x):
            return mean, covariance[0]
        return mean, covariance.repeat(self.num_outputs // len(covariance), axis=0)

    def law(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """``moments`` with the nugget: mean and covariance of the law that ``log_prob`` evaluates."""
        mean, covariance = self.moments(x)
        nugget = self.nugget
        if nugget is None:
            nugget = self._default_nugget(as_inputs(x), covariance)[..., None, None]
            nugget = nugget if covariance.ndim == 3 else nugget[0]
        xp = np if isinstance(covariance, np.ndarray) and isinstance(nugget, np.ndarray) else jnp
        return mean, covariance + nugget * xp.eye(covariance.shape[-1])

    def condition(
        self,
        x: Float[ArrayLike, "N D"],
        y: Float[ArrayLike, "N K"],
        noise_variance: Float[ArrayLike, "*N"],
        *,
        nugget: ArrayLike | None = None,
    ) -> ConditionedGP:
        """The exact posterior of f given y = f(x) + noise, itself a prior.

        As a prior of a network that is trained on the same y it counts the data twice.

        Args:
            x: inputs [N, D].
            y: targets, [N] or [N, K].
            noise_variance: of each target, scalar, [N] or [N, K].
            nugget: of the posterior as a prior; None inherits this prior's (a relative nugget is then
                relative to the posterior variance).
        """
        return ConditionedGP(self, x, y, noise_variance, self.nugget if nugget is None else nugget)

    def tabulated(self, pool: Float[ArrayLike, "N D"]) -> TabulatedGP | None:
        """This law at the points of a pool, with row numbers [M, 1] in place of inputs [M, D].

        Mean and covariance of the whole pool are computed once, in the precision of fixed points; at rows of it they
        are looked up. None if that needs what is traced (a random lengthscale), or more than 2²³ numbers.
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
        """Passes if k(x, x) + nugget · I has a Cholesky factor, or is not known yet: with a random lengthscale, say.

        Raises:
            ValueError: it has none; the message gives the smallest eigenvalue and the cure.
        """
        self._factor(as_inputs(x))

    def whitened_square(
        self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"], noise: Float[ArrayLike, "*shape"] | None = None
    ) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
        """(f - m)ᵀ Σ⁻¹ (f - m) and log |Σ| / 2 of each output, with Σ = k(x, x) + nugget (or noise) · I.

        Of all values together, K = 1, if the outputs depend on one another.
        """
        x = as_inputs(x)
        f = jnp.asarray(as_values(f, len(x), self.num_outputs, "f" if noise is None else "y"))
        factor = self._factor(x, noise)
        residual = f - jnp.asarray(self._mean(x), f.dtype)
        white = factor.whiten(as_columns(residual, factor.shape))
        square = jnp.sum(white**2, axis=-2)
        half_log_det = jnp.broadcast_to(jnp.asarray(factor.half_log_det, white.dtype)[:, None], square.shape)
        return square.ravel(), half_log_det.ravel()

    def _log_density(self, x, f, noise) -> Float[Array, ""]:
        square, half_log_det = self.whitened_square(x, f, noise)
        num_values = len(x) * (self.num_outputs or 1)
        return -(0.5 * square + half_log_det).sum() - 0.5 * math.log(2 * math.pi) * num_values

    def _mean(self, x) -> Float[AnyArray, "M K"]:
        return self._memory.once(("mean", x), lambda: at_compile_time(self.mean_function, x, exact=self.exact))

    def _covariance(self, x) -> Float[AnyArray, "B P P"]:
        return at_compile_time(lambda a: self.covariance_function(a, a), x, exact=self.exact)

    def _factor(self, x, noise=None) -> Factor:
        """The factor of k(x, x) plus noise (scalar, [M] or [M, K]), or plus the nugget."""
        nugget, name = (self.nugget, "nugget") if noise is None else (noise, "noise_variance")
        return self._memory.once(("factor", x, nugget), lambda: self._factorize(x, nugget, name))

    def _factorize(self, x, nugget, name: str) -> Factor:
        covariance = self._covariance(x)
        size = covariance.shape[-1]
        if nugget is None:
            nugget = self._default_nugget(x, covariance)[:, None]
        elif nugget.ndim == 2:
            nugget = as_values(nugget, len(x), self.num_outputs, name)
            nugget = nugget.T if size == len(x) else nugget.reshape(1, -1)
        elif nugget.shape not in [(), (len(x),)]:
            raise ValueError(f"{name} must be a scalar or have shape [{len(x)}], got {list(nugget.shape)}.")
        elif nugget.ndim == 1:
            nugget = nugget.repeat(size // len(x))
        concrete = isinstance(covariance, np.ndarray) and isinstance(nugget, np.ndarray)
        xp = np if concrete else jnp
        blocks = max(len(covariance), len(nugget) if nugget.ndim == 2 else 1)
        covariance = xp.broadcast_to(covariance, (blocks, size, size))
        factor = factorize(covariance, xp.broadcast_to(nugget, (blocks, size)), name)
        if self.exact:
            warn_of_indefinite(covariance)
        return factor

    def _default_nugget(self, x, covariance) -> Float[AnyArray, " B"]:
        """``RELATIVE_NUGGET`` of the mean variance, or of the smallest summand's, which a larger one would drown."""
        share = self.smallest_share(x)
        if isinstance(share, np.ndarray) and np.any(share < 0.1 * SMALLEST_SHARE):
            warnings.warn(
                f"A summand of the kernel has {share.min():.1g} of the variance at the points, and the default nugget "
                f"({RELATIVE_NUGGET * SMALLEST_SHARE:.0e} of it) hides much of it: pass nugget=, a hundredth of the "
                "summand's variance, or leave the summand out.",
                RuntimeWarning,
                stacklevel=2,
            )
        xp = np if isinstance(share, np.ndarray) and isinstance(covariance, np.ndarray) else jnp
        variance = covariance.diagonal(axis1=-2, axis2=-1).mean(-1)
        return RELATIVE_NUGGET * xp.maximum(share, SMALLEST_SHARE) * variance


class ConditionedGP(GaussianProcess):
    """The posterior of f under a Gaussian prior and data y = f(x) + noise, made by ``condition``.

    m'(·) = m(·) + k(·, x) Σ⁻¹ (y - m(x)),  k'(·, ·) = k(·, ·) - k(·, x) Σ⁻¹ k(x, ·),  Σ = k(x, x) + noise.

    k' is a difference. Where x is traced (random points under jit) it is formed in the program's precision,
    and in float32 a small noise leaves it without a factor: ``log_prob`` is then NaN. Use fixed points or rows of a
    pool, for which it is formed in float64, or enable float64.

    Reference: rasmussen2006, equations 2.22 to 2.24.
    """

    def __init__(self, prior: GaussianProcess, x, y, noise_variance, nugget: ArrayLike | None):
        super().__init__(prior.num_outputs, nugget)
        self.exact = prior.exact
        self.prior, self.x = prior, as_inputs(x)
        y = as_values(as_real(y, "y"), len(self.x), self.num_outputs, "y")
        self._data = prior._factor(self.x, as_positive(noise_variance, "noise_variance", ndim=2))
        self._weights = self._data.solve(as_columns(y - prior._mean(self.x), self._data.shape))

    def smallest_share(self, x):
        return self.prior.smallest_share(x)

    def mean_function(self, x):
        cross = self.prior.covariance_function(x, self.x)
        return self.prior.mean_function(x) + as_rows(product(cross, self._weights), len(x))

    def covariance_function(self, x1, x2):
        white1, white2 = (self._data.whiten(self.prior.covariance_function(self.x, x)) for x in (x1, x2))
        return self.prior.covariance_function(x1, x2) - product(jnp.swapaxes(white1, -1, -2), white2)


class TabulatedGP(GaussianProcess):
    """A Gaussian law at the points of a pool, by their row numbers, made by ``tabulated``.

    Args:
        law: the law that was tabulated; its nugget is added to the points that are looked up, not to the table.
        covariance: of the pool, in blocks [B, N, N], or [1, N K, N K] of dependent outputs.
        mean: of the pool [N, K].
        share: of the smallest summand in the variance at the pool, by block.
    """

    def __init__(self, law: GaussianProcess, covariance: np.ndarray, mean: np.ndarray, share: np.ndarray):
        super().__init__(law.num_outputs, law.nugget)
        self.exact = law.exact
        self._tables, self._share = (covariance, mean), share

    def smallest_share(self, rows):
        return self._share

    def mean_function(self, rows):
        return jnp.asarray(self._tables[1], float)[rows[:, 0].astype(int)]

    def covariance_function(self, rows1, rows2):
        covariance, mean = self._tables
        width = covariance.shape[-1] // len(mean)
        left, right = ((r.astype(int) * width + np.arange(width)).ravel() for r in (rows1, rows2))
        return jnp.asarray(covariance, float)[:, left[:, None], right]
