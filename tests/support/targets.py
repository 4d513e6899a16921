"""Targets whose laws are known exactly: a correlated Gaussian, and linear features under a GP prior."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro import handlers

from support.compilation import quick_jit
from support.laws import AffineMap

#: A position with leaves of two ranks; flat, it is (a, b).
LIKE = {"a": np.zeros((1, 2)), "b": np.zeros(1)}


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, precision⁻¹) on positions shaped like ``LIKE``."""

    mean: np.ndarray
    precision: np.ndarray

    @property
    def covariance(self):
        return np.linalg.inv(self.precision)

    def potential(self, position, key=None):
        """U(w) = (w - μ)ᵀ H (w - μ) / 2; the key is ignored."""
        r = ravel_pytree(position)[0] - jnp.asarray(self.mean, float)
        return 0.5 * r @ jnp.asarray(self.precision, float) @ r

    def quadratics(self):
        """The one draw (H [1, 1, 3, 3], g [1, 1, 3]) of an exact gradient."""
        return jnp.asarray(self.precision)[None, None], jnp.asarray(self.precision @ self.mean)[None, None]


def correlated_gaussian() -> Gaussian:
    """Curvatures 1, 4 and 16 along directions that are no axes."""
    rotation = np.linalg.qr(np.array([[1.0, 2.0, -1.0], [0.5, -1.0, 1.0], [2.0, 0.3, 1.0]]))[0]
    return Gaussian(np.array([0.5, -1.0, 2.0]), rotation @ np.diag([1.0, 4.0, 16.0]) @ rotation.T)


@functools.cache
def gaussian_terms(name, num_steps=1, refresh_every=1):
    """The affine map of a kernel on a Gaussian shaped like ``LIKE``; one program for all tests."""
    return AffineMap(name, LIKE, num_steps, refresh_every)


def features(x):
    """Four features of inputs [N, 1]; every 4 distinct inputs below determine the weights."""
    np_ = jnp if isinstance(x, jax.Array) else np
    x = x[:, 0]
    return np_.stack([np_.ones_like(x), x, np_.sin(2.0 * x), np_.cos(3.0 * x)], 1)


@dataclass(frozen=True, eq=False)
class LinearFeatures:
    """f(x) = φ(x)ᵀ w, y ~ N(f(x), σ²), f(X_M) ~ N(0, K + nugget), with X_M uniform over a pool of sets.

    The posterior of w is Gaussian with precision ΦᵀΦ/σ² + E[Φ_Mᵀ (K_M + nugget)⁻¹ Φ_M] (+ I with a weight prior).

    Attributes:
        pool: measurement sets [S, M, 1]; one set means fixed points.
        batch_size: B of the minibatch.
        has_weight_prior: w ~ N(0, I) instead of Lebesgue measure.
    """

    pool: np.ndarray
    batch_size: int
    has_weight_prior: bool = False

    sigma = 0.5
    lengthscale = 0.7
    nugget = 0.1
    x = np.array([[-1.0], [-0.4], [0.1], [0.5], [0.9]])
    y = np.array([0.3, -0.7, 0.2, 1.1, 0.6])
    x_test = np.array([[-1.5], [-0.2], [0.3], [1.4]])
    num_weights = 4

    @property
    def size(self):
        """N."""
        return len(self.y)

    @cached_property
    def batches(self):
        """All minibatches without replacement, [n, B]."""
        return np.array(list(itertools.combinations(range(self.size), self.batch_size)))

    @cached_property
    def draws(self):
        """All outcomes (minibatch, measurement set), [n, 2]."""
        return np.array(list(itertools.product(range(len(self.batches)), range(len(self.pool)))))

    def covariance_at(self, x):
        """K + nugget·I of the GP, from the formula."""
        return np.exp(-0.5 * ((x - x.T) / self.lengthscale) ** 2) + self.nugget * np.eye(len(x))

    def posterior(self):
        """Exact mean and covariance of w."""
        phi = features(self.x)
        precision = phi.T @ phi / self.sigma**2 + self.has_weight_prior * np.eye(self.num_weights)
        for x in self.pool:
            phi_m = features(x)
            precision = precision + phi_m.T @ np.linalg.solve(self.covariance_at(x), phi_m) / len(self.pool)
        covariance = np.linalg.inv(precision)
        return covariance @ phi.T @ self.y / self.sigma**2, covariance

    def push_forward(self, mean, covariance, x=None):
        """Law of f(x) for weights N(mean, covariance), at ``x_test`` if x is None."""
        phi = features(self.x_test if x is None else x)
        return phi @ mean, phi @ covariance @ phi.T

    def model(self, points, likelihood_factor=1.0, prior_factor=1.0):
        """The NumPyro model with this sampler of measurement points; factors other than 1 are faults."""
        from tinygp.kernels import ExpSquared

        from numpyro_fspace import GPPrior, functional_prior

        prior = GPPrior(ExpSquared(self.lengthscale), nugget=self.nugget)
        law = dist.Normal(jnp.zeros(4), 1.0).to_event(1)
        if not self.has_weight_prior:
            law = dist.ImproperUniform(dist.constraints.real_vector, (), (4,))

        def model():
            w = numpyro.sample("w", law)

            def f(x):
                return features(jnp.asarray(x, float)) @ w

            with handlers.scale(scale=prior_factor):
                functional_prior("f", f, prior, points)
            with numpyro.plate("data", self.size, subsample_size=self.batch_size):
                x = numpyro.subsample(jnp.asarray(self.x), event_dim=1)
                y = numpyro.subsample(jnp.asarray(self.y), event_dim=0)
                with handlers.scale(scale=likelihood_factor):
                    numpyro.sample("y", dist.Normal(f(x), self.sigma), obs=y)

        return model

    def random_points(self, key):
        """A sampler of measurement points: a set of the pool."""
        return jnp.asarray(self.pool)[jax.random.randint(key, (), 0, len(self.pool))]

    def model_potential(self, *, key):
        """The library's potential of the model, random as it is in use; position {"w": [4]}."""
        from numpyro_fspace.model.potential import ModelPotential

        points = self.random_points if len(self.pool) > 1 else self.pool[0]
        return ModelPotential(self.model(points), key=key)

    @cached_property
    def _quadratics(self):
        template = self.model_potential(key=jax.random.key(0))
        batches, pool, draws = (jnp.asarray(v) for v in (self.batches, self.pool, self.draws))

        def potential_fn(w, draw, *factors):
            points = (lambda _: pool[draw[1]]) if len(pool) > 1 else self.pool[0]
            given = copy.copy(template)
            given.model = handlers.substitute(self.model(points, *factors), data={"data": batches[draw[0]]})
            return given({"w": w}, jax.random.key(0))[0]

        def terms(draw, *factors):
            zero, basis = jnp.zeros((1, self.num_weights)), jnp.eye(self.num_weights)
            gradients = jax.vmap(lambda w: jax.grad(potential_fn)(w, draw, *factors))(jnp.concatenate([zero, basis]))
            return (gradients[1:] - gradients[0]).T, -gradients[0]

        return quick_jit(lambda *factors: jax.vmap(lambda draw: terms(draw, *factors))(draws))

    def quadratics(self, likelihood_factor=1.0, prior_factor=1.0):
        """The library's potential for each row of ``draws``, as (H [n, 4, 4], g [n, 4]): U = wᵀHw/2 - gᵀw."""
        return self._quadratics(likelihood_factor, prior_factor)


#: Four points for four weights: w ↦ f(X_M) is a bijection.
FOUR_POINTS = np.array([[[-1.2], [-0.3], [0.4], [1.1]]])
#: Three sets of three points.
POOL = np.array([[[-1.3], [-0.5], [0.2]], [[-0.8], [0.6], [1.3]], [[-0.1], [0.8], [1.6]]])

#: Full or minibatched, with measurement points fixed or from a pool.
TARGETS = {
    "full batch, fixed points": LinearFeatures(FOUR_POINTS, 5),
    "minibatch, fixed points": LinearFeatures(FOUR_POINTS, 2),
    "full batch, random points": LinearFeatures(POOL, 5, has_weight_prior=True),
    "minibatch, random points": LinearFeatures(POOL, 2, has_weight_prior=True),
}
