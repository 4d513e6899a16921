"""The units of a network's inputs under a Gaussian process, which are proportional to its lengthscales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.functions import some_rows
from numpyro_fspace.priors.gaussian_base import GaussianProcess
from numpyro_fspace.priors.kernel_params import spreads
from numpyro_fspace.priors.tracing import evaluated

#: The correlation at a distance of one lengthscale, which is that of the squared exponential kernel.
CORRELATION = float(np.exp(-0.5))
#: Candidate distances in units of the range of an input. An input without influence gets the largest one.
DISTANCES = np.geomspace(1 / 256, 4.0, 41)
#: Number of points at which correlations are computed.
NUM_PLACES = 16


def units_of(prior: GaussianProcess, x, *, is_random: bool):
    """The function from inputs [N, D] to (inputs - center) / unit, the inputs of a network under ``prior``.

    The units are proportional to the lengthscales of the process along each input, and scaled such that the points have
    a mean square of one. An input with no influence on the process then has little influence on the network. If the
    kernel has random parameters, the units are the standard deviations of the points.

    Args:
        prior: the Gaussian process.
        x: points [M, D].
        is_random: whether the kernel has random parameters.
    """
    x = np.asarray(x, np.float64)
    center, unit = x.mean(0), spreads(x)
    if not is_random:
        unit = prior._memory.once(("lengthscales", x), lambda: lengthscales(prior, x))
        size = np.sqrt(np.mean(((x - center) / unit) ** 2))
        unit = unit * (size if size > 0 else 1.0)
    return lambda inputs: ((inputs - center) / unit).astype(jnp.result_type(inputs, float))


def lengthscales(prior: GaussianProcess, x: np.ndarray) -> np.ndarray:
    """The distance along each input at which the correlation of the process is exp(-1/2), [D].

    It is between 1/256 and four times the range of the input at the points x [M, D].
    """
    places = some_rows(x, NUM_PLACES)
    width = np.ptp(x, axis=0)
    width = np.where(width > 0, width, 1.0)

    def correlation(step):
        """Mean correlation of the outputs at the places and a step away from them."""
        both = jnp.concatenate([places, places + step])
        covariance = prior.covariance_function(both, both)
        size = covariance.shape[-1] // 2
        sd = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
        cross = jnp.diagonal(covariance[:, :size, size:], axis1=-2, axis2=-1)
        product = sd[:, :size] * sd[:, size:]
        return jnp.mean(jnp.where(product > 0, cross / jnp.where(product > 0, product, 1.0), 0.0))

    steps = DISTANCES[:, None, None] * np.diag(width)
    found = evaluated(lambda steps: jax.lax.map(jax.vmap(correlation), steps), steps)
    is_far = np.asarray(found) < CORRELATION  # [distances, D]
    first = np.where(is_far.any(0), is_far.argmax(0), len(DISTANCES) - 1)
    return DISTANCES[first] * width
