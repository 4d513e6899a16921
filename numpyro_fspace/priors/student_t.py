"""``StudentTPrior``: Student-t process priors over functions, which are Gaussian processes with a random scale."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln, gammaln

from numpyro_fspace._checks import check_sampling
from numpyro_fspace.priors.base import as_inputs, as_positive
from numpyro_fspace.priors.gp_prior import GPPrior
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, ArrayLike, Float, Key
    from tinygp.kernels import Kernel

    from numpyro_fspace.priors.cholesky import AnyArray
    from numpyro_fspace.priors.gaussian_base import GaussianProcess


class StudentTPrior:
    """The Student-t process prior f ~ TP(df, m, k): heavier tails than a Gaussian process, with the same geometry.

    At measurement points f(x) ~ t_df(m(x), k(x, x) + nugget · I), independently over outputs unless the kernel is
    matrix-valued. The kernel is the *scale* of the distribution; the covariance is df / (df - 2) times the scale, for
    df > 2. As df → ∞ the prior tends to ``GPPrior``.

    Args:
        kernel: as for ``GPPrior``.
        df: degrees of freedom, a positive number.
        mean: as for ``GPPrior``.
        nugget: as for ``GPPrior``, added to the scale.
        num_outputs: as for ``GPPrior``.

    Raises:
        TypeError, ValueError: as for ``GPPrior``, or df is not positive.

    Example:
        >>> import jax.numpy as jnp, tinygp
        >>> prior = StudentTPrior(tinygp.kernels.ExpSquared(), df=1.0, nugget=1e-6)
        >>> log_density = prior.log_prob(jnp.zeros((1, 1)), jnp.zeros(1))
        >>> print(round(float(log_density), 4))  # Cauchy: -log π
        -1.1447

    Reference: A. Shah, A. Wilson, Z. Ghahramani (2014), *Student-t processes as alternatives to Gaussian processes*.
    """

    def __init__(
        self,
        kernel: Kernel | Sequence[Kernel],
        df: float,
        *,
        mean: Float[ArrayLike, "*K"] | Callable = 0.0,
        nugget: ArrayLike | None = None,
        num_outputs: int | None = None,
    ):
        self.df = as_positive(df, "df")
        self.gaussian: GaussianProcess = GPPrior(kernel, mean=mean, nugget=nugget, num_outputs=num_outputs)

    def __repr__(self) -> str:
        df = "a traced value" if is_traced(self.df) else f"{float(self.df):.6g}"
        return f"StudentTPrior(df={df}, {self.gaussian!r})"

    @property
    def num_outputs(self) -> int | None:
        """K, or None for a single output whose values are [M]."""
        return self.gaussian.num_outputs

    def log_prob(self, x: Float[ArrayLike, "M D"], f: Float[ArrayLike, "M K"]) -> Float[Array, ""]:
        """log t_df(f; m(x), k(x, x) + nugget · I), summed over outputs; shapes and errors as for ``GPPrior``."""
        x = as_inputs(x)
        white, half_log_det = self.gaussian.whitened(x, f)
        square, half_log_det = jnp.sum(white**2, axis=-2).ravel(), half_log_det.ravel()
        df, size = jnp.asarray(self.df, square.dtype), len(x) * (self.num_outputs or 1) // len(square)
        # log Γ((df + M) / 2) - log Γ(df / 2), whose terms are large and nearly equal if df is large.
        ratio = gammaln(size / 2) - betaln(df / 2, size / 2)
        normalizer = ratio - 0.5 * size * jnp.log(df * jnp.pi)
        return (normalizer - half_log_det - 0.5 * (df + size) * jnp.log1p(square / df)).sum()

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f(x), [*sample_shape, M] or [*sample_shape, M, K]."""
        check_sampling(key, sample_shape)
        key_normal, key_scale = jax.random.split(key)
        draws = self.gaussian.sample(key_normal, x, sample_shape)
        mean, covariance = self.gaussian.moments(x)
        mean, scales = jnp.asarray(mean, draws.dtype), sample_shape
        if self.num_outputs is not None:  # one per output, or one for all if they are dependent
            scales = (*sample_shape, self.num_outputs if covariance.ndim == 3 else 1)
        df = jnp.asarray(self.df, draws.dtype)
        precision = jax.random.gamma(key_scale, df / 2, scales, draws.dtype) / (df / 2)
        return mean + (draws - mean) / jnp.sqrt(jnp.expand_dims(precision, len(sample_shape)))

    def moments(self, x: Float[ArrayLike, "M D"]) -> tuple[Float[AnyArray, "M K"], Float[AnyArray, "K M M"]]:
        """Mean and covariance df / (df - 2) · k(x, x), without nugget; the covariance is infinite if df ≤ 2."""
        mean, scale = self.gaussian.moments(x)
        factor = self.df / jnp.where(self.df > 2, self.df - 2, 1.0)
        return mean, jnp.where(self.df > 2, factor * scale, jnp.inf)

    def tabulated(self, pool: Float[ArrayLike, "N D"]) -> StudentTPrior | None:
        """This prior at the points of a pool, as a function of row numbers; see ``GPPrior.tabulated``."""
        gaussian = self.gaussian.tabulated(pool)
        if gaussian is None:
            return None
        table = copy(self)
        table.gaussian = gaussian
        return table

    def check(self, x: Float[ArrayLike, "M D"]) -> None:
        """Check that the scale at x has a Cholesky factor; see ``GPPrior.check``."""
        self.gaussian.check(as_inputs(x))
