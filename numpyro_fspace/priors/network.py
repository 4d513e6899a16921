"""``NetworkPrior``: random networks as priors over functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace._checks import check_count, check_key, check_sampling
from numpyro_fspace.priors.base import as_inputs, as_values
from numpyro_fspace.priors.gaussian_base import GaussianProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float, Key

    from numpyro_fspace.priors.cholesky import AnyArray

#: Number of functions evaluated together when the Gaussian approximation is fitted.
MAX_TOGETHER = 250


class NetworkPrior(GaussianProcess):
    """The distribution of a network with random weights, as a prior over the functions of another network.

    ``sample`` draws from this distribution, which has no density in closed form. ``log_prob`` and all other methods use
    its *Gaussian approximation*, with the sample mean and covariance of ``num_draws`` functions that are drawn once
    from ``key``. The approximation is biased if the distribution is not Gaussian (narrow networks, heavy tails), and it
    has no correlation between outputs unless they are ``dependent``. The rank of its covariance is below ``num_draws``,
    so use several draws per measurement point (and dependent output). The nugget makes the covariance nonsingular.

    Args:
        draw: draws one function and evaluates it, (key, x [M, D]) -> [M] or [M, K], such as the result of
            ``fs.model.random_function``. The same key must give the same function at every x.
        key: random key of the functions that define the approximation.
        num_draws: number of these functions, at least 2.
        nugget: as for ``GPPrior``.
        num_outputs: K, or None for a single output with values [M].
        dependent: whether the approximation includes covariances between outputs, like the prior of a matrix-valued
            kernel.

    Raises:
        TypeError: draw is not callable.
        ValueError: there are fewer than two draws, or the nugget is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def line(key, x):
        ...     return x @ jax.random.normal(key, x.shape[1:])
        >>> prior = NetworkPrior(line, jax.random.key(0), num_draws=2000)
        >>> prior.sample(jax.random.key(1), jnp.ones((4, 2)), (3,)).shape
        (3, 4)
    """

    exact = False  # random weights differ between precisions

    def __init__(
        self,
        draw: Callable,
        key: Key[Array, ""],
        *,
        num_draws: int = 2000,
        nugget: ArrayLike | None = None,
        num_outputs: int | None = None,
        dependent: bool = False,
    ):
        if not callable(draw):
            raise TypeError(f"draw must be a function of (key, x), got {type(draw).__name__}.")
        check_key(key, "key", single=True)
        check_count(num_draws, "num_draws", 2)
        super().__init__(num_outputs, nugget)
        self.draw, self.key, self.num_draws, self.dependent = draw, key, num_draws, dependent

    def sample(
        self, key: Key[Array, ""], x: Float[ArrayLike, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f(x), [*sample_shape, M] or [*sample_shape, M, K], from the network itself, without nugget."""
        check_sampling(key, sample_shape)
        x = jnp.asarray(as_inputs(x))
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # an old-style key, whose last axis holds its words
            key = jax.random.wrap_key_data(key)
        keys = jax.random.split(key, sample_shape)

        def draw(key):
            return self._draw(key, x)

        for _ in keys.shape:
            draw = jax.vmap(draw)
        draws = draw(keys)
        return draws[..., 0] if self.num_outputs is None else draws

    def mean_function(self, x):
        return self._fitted(x).mean(0)

    def covariance_function(self, x1, x2):
        left = self._fitted(x1)
        right = left if x2 is x1 else self._fitted(x2)
        left, right = left - left.mean(0), right - right.mean(0)
        highest = jax.lax.Precision.HIGHEST
        if self.dependent:
            left, right = (draws.reshape(self.num_draws, -1, 1) for draws in (left, right))
        return jnp.einsum("smk,slk->kml", left, right, precision=highest) / (self.num_draws - 1)

    def _fitted(self, x) -> Float[Array, "S M K"]:
        keys = jax.random.split(self.key, self.num_draws)
        return jax.lax.map(lambda key: self._draw(key, x), keys, batch_size=MAX_TOGETHER)

    def _draw(self, key, x) -> Float[AnyArray, "M K"]:
        return as_values(self.draw(key, x), len(x), self.num_outputs, "the value of draw(key, x)")
