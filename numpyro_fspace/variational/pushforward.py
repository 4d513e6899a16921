"""The pushforward of a guide: the distribution of a function at any inputs if its weights follow the guide.

``LinearizedPushforward`` is the Gaussian distribution of the linearized function, ``SampledPushforward`` the
distribution of the function itself, represented by draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_fspace._xla import matmul

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key


@dataclass(frozen=True, eq=False)
class LinearizedPushforward:
    """GP(f(·; m), J S Jᵀ), the distribution of the linearized function under w ~ N(m, S), with J the derivative at m.

    Attributes:
        function: ``(weights, x [M, D]) -> [M, K]``.
        loc: m, flat [P].
        spread: ``[…, P] -> […, R]``, the product with a square root of S.
        unpack: ``flat weights [P] -> weights``, a tuple of arrays in the order of the flat weights.
    """

    function: Any
    loc: Float[Array, " P"]
    spread: Any
    unpack: Any = lambda flat: flat

    def mean(self, x):
        """f(x; m), [M, K]."""
        return self.function(self.unpack(self.loc), x)

    def jacobian(self, x):
        """J(x; m), [M, K, P], computed row by row, because a function's value at an input depends only on that input.

        The derivatives are taken for each array of weights. Derivatives with respect to flat weights would be a sum of
        wide matrices, one for each array.
        """
        weights = self.unpack(self.loc)

        def of_row(row):
            value, pull = jax.vjp(lambda w: self.function(w, row[None])[0], weights)
            # One output after another: with an axis of outputs the derivative of J is several times slower on a CPU.
            slopes = [pull(unit)[0] for unit in jnp.eye(len(value), dtype=value.dtype)]
            return jax.tree.map(lambda *parts: jnp.stack(parts), *slopes)

        slopes = jax.tree.leaves(jax.vmap(of_row)(x))
        return jnp.concatenate([slope.reshape(*slope.shape[:2], -1) for slope in slopes], -1)

    def root(self, x):
        """A [M, K, R] with A Aᵀ = J S Jᵀ."""
        return self.spread(self.jacobian(x))


@dataclass(frozen=True, eq=False)
class SampledPushforward:
    """The distribution of f(·; w) under w ~ q, represented by draws.

    Attributes:
        function: ``(flat weights, x [M, D]) -> [M, K]``.
        draw: ``key -> flat weights [P]``, differentiable in the guide's parameters.
        key: for all draws.
        prior_function: ``(key, x [M, D]) -> [M, K]``, the function with weights drawn from their prior in the model.
        weights_kl_terms: ``key ->`` an unbiased estimate of KL(q(w) ‖ p(w)) from one draw of q.
        flat: whether the model's function returns [M] where ``function`` returns [M, 1].
    """

    function: Any
    draw: Any
    key: Key[Array, ""]
    prior_function: Any = None
    weights_kl_terms: Any = None
    flat: bool = False

    def sample(self, x, num_draws: int) -> Float[Array, "S M K"]:
        """Draws of f(x)."""
        keys = jax.random.split(self.key, num_draws)
        return jax.vmap(lambda key: self.function(self.draw(key), x))(keys)

    def sample_prior(self, x, num_draws: int) -> Float[Array, "S M K"]:
        """Draws of f(x) under the prior of the weights in the model."""
        keys = jax.random.split(jax.random.fold_in(self.key, 3), num_draws)
        return jax.vmap(lambda key: self.prior_function(key, x))(keys)

    def weights_kl(self, num_draws: int) -> Float[Array, ""]:
        """Estimate of KL(q(w) ‖ p(w))."""
        return jnp.mean(jax.vmap(self.weights_kl_terms)(jax.random.split(jax.random.fold_in(self.key, 4), num_draws)))


def as_normal(distribution):
    """``distribution`` without wrappers if it is normal (diagonal, low-rank or full); None otherwise."""
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution):
        distribution = distribution.base_dist
    kinds = dist.Normal | dist.LowRankMultivariateNormal | dist.MultivariateNormal
    return distribution if isinstance(distribution, kinds) else None


def mean_and_spread(normal):
    """Mean [P] of a normal distribution, and the product with a root of its covariance, ``[…, P] -> […, R]``."""
    if isinstance(normal, dist.Normal):
        return normal.loc, lambda rows: _scaled(rows, normal.scale)
    if isinstance(normal, dist.MultivariateNormal):
        return normal.loc, lambda rows: matmul(rows, normal.scale_tril)
    scale, factor = jnp.sqrt(normal.cov_diag), normal.cov_factor
    return normal.loc, lambda rows: jnp.concatenate([rows * scale, matmul(rows, factor)], -1)


@jax.custom_vjp
def _scaled(rows: Float[Array, "... P"], scale: Float[Array, " P"]) -> Float[Array, "... P"]:
    """rows · scale. The gradient sums over rows by a product, because XLA's sum takes ten times as long on a CPU."""
    return rows * scale


def _pull_scaled(saved, g):
    rows, scale = saved
    each = (g * rows).reshape(-1, scale.size)
    return g * scale, jnp.ones(len(each), each.dtype) @ each


_scaled.defvjp(lambda rows, scale: (rows * scale, (rows, scale)), _pull_scaled)


def entropy(normal, index) -> Float[Array, ""]:
    """Entropy of some coordinates of a normal distribution."""
    loc = normal.loc[index]
    if isinstance(normal, dist.Normal):
        return dist.Normal(loc, normal.scale[index]).entropy().sum()
    if isinstance(normal, dist.MultivariateNormal):
        return dist.MultivariateNormal(loc, normal.covariance_matrix[jnp.ix_(index, index)]).entropy().sum()
    return dist.LowRankMultivariateNormal(loc, normal.cov_factor[index], normal.cov_diag[index]).entropy().sum()
