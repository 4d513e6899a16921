"""The standard deviation of a Gaussian process at some points, and its factor with a tolerance relative to that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from numpyro_fspace.priors.base import as_inputs

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float

    from numpyro_fspace.priors.cholesky import AnyArray, Factor
    from numpyro_fspace.priors.gaussian_base import GaussianProcess


def amplitude(prior: GaussianProcess, x: Float[ArrayLike, "M D"]) -> Float[AnyArray, " K"]:
    """The root of the mean variance of each output at x, without nugget; the same for outputs that share a kernel."""
    x = as_inputs(x)
    return prior._memory.once(("amplitude", x), lambda: _amplitude(prior, x))


def _amplitude(prior, x):
    covariance = prior._covariance(x)
    xp = np if isinstance(covariance, np.ndarray) else jnp
    variances = xp.diagonal(covariance, axis1=-2, axis2=-1)
    variances = variances.reshape(len(x), -1).T if variances.shape[-1] != len(x) else variances
    return xp.sqrt(xp.broadcast_to(variances.mean(-1), (prior.num_outputs or 1,)))


def tolerant_factor(prior: GaussianProcess, x: Float[ArrayLike, "M D"], tolerance: float) -> Factor:
    """The factor of k(x, x) + τ² · I with τ = tolerance times the ``amplitude`` of each output."""
    x = as_inputs(x)
    variance, name = (tolerance * amplitude(prior, x)) ** 2, "(tolerance · sd)²"
    if isinstance(variance, np.ndarray) and np.ptp(variance) == 0:
        return prior._factor(x, variance[:1].reshape(()), name)  # one factor for all outputs
    xp = np if isinstance(variance, np.ndarray) else jnp
    return prior._factor(x, xp.broadcast_to(variance, (len(x), len(variance))), name)
