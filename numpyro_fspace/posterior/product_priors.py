r"""How much of a Gaussian process a product with the prior of the weights leaves.

``functional_prior`` multiplies the prior of the weights by the density of the process. Where the network's values f at
the measurement points are about Gaussian under the prior of the weights, with covariance Q, the product has the
covariance :math:`(s K^{-1} + Q^{-1})^{-1} = K (K + s Q)^{-1} Q`, with K that of the process and the ``scale`` s.
"""

from __future__ import annotations

import jax
import numpy as np

from numpyro_fspace.model.functions import functions_of, some_rows
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.posterior.thresholds import LEAST_PRODUCT_SHARE
from numpyro_fspace.priors.gaussian_base import GaussianProcess
from numpyro_fspace.priors.tracing import is_traced

#: Draws of the network, and points, at most, at which they are compared with the process.
NUM_DRAWS, NUM_POINTS = 400, 50


def product_shares(potential: ModelPotential) -> dict[str, float]:
    """tr K (K + s Q)⁻¹ Q / tr K for each ``functional_prior`` of a Gaussian process with known parameters, by name.

    Args:
        potential: that of the model.
    """
    found = {}
    for name, site in potential.functional_priors.items():
        if not isinstance(site.prior, GaussianProcess) or is_traced(site.scale) or not site.scale:
            continue
        x = site.points(jax.random.key(0))  # random points: one draw stands for all
        if is_traced(x):
            continue
        x = some_rows(np.asarray(x), NUM_POINTS)
        values = np.asarray(_draws(potential, name, x), float).reshape(NUM_DRAWS, -1)
        covariance = site.prior.marginal(x)[1]
        if is_traced(covariance) or not np.isfinite(values).all():
            continue
        own = np.cov(values.T).reshape(values.shape[1], values.shape[1])
        scale = float(site.scale)
        found[name] = _share(np.asarray(covariance, float) / scale, own, len(x)) / scale
    return found


def product_doubts(shares: dict[str, float]) -> list[str]:
    """A line for each share that is below ``LEAST_PRODUCT_SHARE``."""
    return [
        f"the prior of the weights, by which functional_prior({name!r}) multiplies the process's density, leaves "
        f"{100 * share:.0f} % of the process's variance at the measurement points, as the network is narrower or "
        "smoother than the process. Declare the network by fs.gp_network, which has the process's distribution, or "
        "widen its weights (prior=fs.fan_in(3.0), say)."
        for name, share in shares.items()
        if share < LEAST_PRODUCT_SHARE
    ]


def _draws(potential, name, x):
    """Draws of a function at x, [S, M] or [S, M, K], under the prior of the weights."""

    def draw(key):
        trace = run_model(potential.model, potential.args, potential.kwargs, key=key, isolated=True)
        return functions_of(trace)[name](x)

    return jax.jit(lambda keys: jax.lax.map(draw, keys))(jax.random.split(jax.random.key(0), NUM_DRAWS))


def _share(covariance, own, num_points) -> float:
    """The share for K as ``marginal`` returns it and Q of all values together, [M K, M K] in the order of f.ravel()."""
    if covariance.ndim == 3:  # a block for each output, of which the covariances between outputs are zero
        num_outputs = own.shape[0] // num_points
        blocks = np.broadcast_to(covariance, (num_outputs, num_points, num_points))
        covariance = np.einsum("kmn,kl->mknl", blocks, np.eye(num_outputs)).reshape(own.shape)
    return float(np.trace(covariance @ np.linalg.solve(covariance + own, own)) / np.trace(covariance))
