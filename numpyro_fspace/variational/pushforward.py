"""The law that a guide gives a function: of its linearization, Gaussian, or of the function itself, by draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key

__all__ = ["LinearisedLaw", "SampledLaw", "as_normal", "entropy", "mean_and_spread"]


@dataclass(frozen=True, eq=False)
class LinearisedLaw:
    """GP(f(·; m), J S Jᵀ), the law of the linearized function under w ~ N(m, S).

    Attributes:
        function: ``(weights, x [M, D]) -> [M, K]``.
        loc: m, flat [P].
        spread: ``[…, P] -> […, R]``, the product with a square root of S.
        unpack: ``flat weights [P] -> weights``, a tuple of arrays that follow one another in the flat ones.
    """

    function: Any
    loc: Float[Array, " P"]
    spread: Any
    unpack: Any = lambda flat: flat

    def mean(self, x):
        """f(x; m), [M, K]."""
        return self.function(self.unpack(self.loc), x)

    def jacobian(self, x):
        """J(x; m), [M, K, P], row by row: a function's value at an input depends on that input alone.

        Array by array of the weights: derivatives by flat weights would be a sum of wide matrices, one for each array.
        """
        weights = self.unpack(self.loc)

        def of_row(row):
            value, pull = jax.vjp(lambda w: self.function(w, row[None])[0], weights)
            # One output after another: an axis of them makes the derivative of J several times as slow on a CPU.
            slopes = [pull(unit)[0] for unit in jnp.eye(len(value), dtype=value.dtype)]
            return jax.tree.map(lambda *parts: jnp.stack(parts), *slopes)

        slopes = jax.tree.leaves(jax.vmap(of_row)(x))
        return jnp.concatenate([slope.reshape(*slope.shape[:2], -1) for slope in slopes], -1)

    def root(self, x):
        """A [M, K, R] with A Aᵀ = J S Jᵀ."""
        return self.spread(self.jacobian(x))


@dataclass(frozen=True, eq=False)
class SampledLaw:
    """The law of f(·; w), w ~ q, known by draws.

    Attributes:
        function: ``(flat weights, x [M, D]) -> [M, K]``.
        draw: ``key -> flat weights [P]``, differentiable in the guide's parameters.
        key: of everything that is drawn.
        prior_function: ``(key, x [M, D]) -> [M, K]``, the function with weights drawn from the model's prior of them.
        weights_kl_terms: ``key -> log q(w) - log p(w)`` at a draw of q, or an unbiased estimate of its mean.
        flat: whether the model's function gives [M] where ``function`` gives [M, 1].
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
        """Draws of f(x) under the model's prior of the weights."""
        keys = jax.random.split(jax.random.fold_in(self.key, 3), num_draws)
        return jax.vmap(lambda key: self.prior_function(key, x))(keys)

    def weights_kl(self, num_draws: int) -> Float[Array, ""]:
        """Estimate of KL(q(w) ‖ p(w))."""
        return jnp.mean(jax.vmap(self.weights_kl_terms)(jax.random.split(jax.random.fold_in(self.key, 4), num_draws)))


def as_normal(law):
    """The normal law behind a guide's posterior or a site (diagonal, low-rank, full); None for any other."""
    while isinstance(law, dist.Independent | dist.ExpandedDistribution):
        law = law.base_dist
    kinds = dist.Normal | dist.LowRankMultivariateNormal | dist.MultivariateNormal
    return law if isinstance(law, kinds) else None


def mean_and_spread(law):
    """Mean [P] of a normal law, and the product with a root of its covariance, ``[…, P] -> […, R]``."""
    if isinstance(law, dist.Normal):
        return law.loc, lambda rows: _scaled(rows, law.scale)
    if isinstance(law, dist.MultivariateNormal):
        return law.loc, lambda rows: rows @ law.scale_tril
    scale, factor = jnp.sqrt(law.cov_diag), law.cov_factor
    return law.loc, lambda rows: jnp.concatenate([rows * scale, rows @ factor], -1)


@jax.custom_vjp
def _scaled(rows: Float[Array, "... P"], scale: Float[Array, " P"]) -> Float[Array, "... P"]:
    """rows · scale; XLA's own sum over the rows, in the gradient, takes ten times as long as this product on a CPU."""
    return rows * scale


def _pull_scaled(saved, g):
    rows, scale = saved
    each = (g * rows).reshape(-1, scale.size)
    return g * scale, jnp.ones(len(each), each.dtype) @ each


_scaled.defvjp(lambda rows, scale: (rows * scale, (rows, scale)), _pull_scaled)


def entropy(law, index) -> Float[Array, ""]:
    """H of some coordinates of a normal law."""
    if isinstance(law, dist.Normal):
        return dist.Normal(law.loc[index], law.scale[index]).entropy().sum()
    if isinstance(law, dist.MultivariateNormal):
        covariance = law.covariance_matrix[jnp.ix_(index, index)]
        return dist.MultivariateNormal(law.loc[index], covariance).entropy().sum()
    return dist.LowRankMultivariateNormal(law.loc[index], law.cov_factor[index], law.cov_diag[index]).entropy().sum()
