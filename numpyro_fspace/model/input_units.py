"""The units in which a network sees its inputs under a Gaussian process: its lengthscales, at points of unit size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.priors._cholesky import is_traced

if TYPE_CHECKING:
    from numpyro_fspace.priors.gaussian import GaussianProcess

__all__ = ["input_units", "lengthscales", "units_of"]

#: The correlation at a distance of one lengthscale, that of the squared exponential kernel.
CORRELATION = float(np.exp(-0.5))
#: Distances that are tried, in units of the range of an input, and the length of an input that has no influence.
DISTANCES = np.geomspace(1 / 256, 4.0, 41)
#: Points at which correlations are computed.
NUM_PLACES = 16


def input_units(prior: GaussianProcess, x) -> tuple[np.ndarray, np.ndarray]:
    """``(center [D], unit [D])``: a network under ``prior`` sees (x - center) / unit.

    The units are in proportion to the lengthscales of the process, input by input, and such that the points have a mean
    square of one. An input without influence on the process has little on the network. Where the kernel has random
    parameters the units are the standard deviations of the points.

    Args:
        prior: the Gaussian process.
        x: points [M, D].
    """
    if is_traced(x):
        return np.zeros(x.shape[1]), np.ones(x.shape[1])
    x = np.asarray(x, np.float64)
    center, spread = x.mean(0), x.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    if is_traced(prior._covariance(x[:1])):
        return center, spread
    (unit,) = prior._memory.once(("lengthscales", x), lambda: (lengthscales(prior, x),))
    size = np.sqrt(np.mean(((x - center) / unit) ** 2))
    return center, unit * (size if size > 0 else 1.0)


def units_of(prior: GaussianProcess, x):
    """The function from inputs [N, D] to what a network under ``prior`` at the points x [M, D] is given."""
    center, unit = input_units(prior, x)
    return lambda inputs: ((inputs - center) / unit).astype(jnp.result_type(inputs, float))


def lengthscales(prior: GaussianProcess, x: np.ndarray) -> np.ndarray:
    """How far the process is correlated along each input, [D]: to the distance at which the correlation is exp(-1/2).

    It is at least 1/256 and at most four times the range of the input at the points x [M, D].
    """
    places = x[np.unique(np.linspace(0, len(x) - 1, NUM_PLACES).astype(int))]
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

    with jax.ensure_compile_time_eval():
        steps = DISTANCES[:, None, None] * np.diag(width)
        found = jax.jit(lambda steps: jax.lax.map(jax.vmap(correlation), steps))(jnp.asarray(steps, float))
    is_far = np.asarray(found) < CORRELATION  # [distances, D]
    first = np.where(is_far.any(0), is_far.argmax(0), len(DISTANCES) - 1)
    return DISTANCES[first] * width
