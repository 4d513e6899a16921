"""Gaussian guides over all latent values of a model, with the networks' own initializers as initial means.

They are NumPyro's guides with other initial values. ``fs.FunctionalELBO`` accepts any guide whose
``get_posterior(params)`` is a normal distribution (diagonal, low-rank or full).
"""

from __future__ import annotations

import jax
from numpyro import handlers
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoLowRankMultivariateNormal

from numpyro_fspace._checks import check_count, check_positive
from numpyro_fspace.model.initial_values import init_to_network

__all__ = ["low_rank", "mean_field"]

#: Initial standard deviations: small, so that the mean is fitted before the spread.
INIT_SCALE = 1e-2
#: Size of the initial entries of a low-rank factor, relative to the standard deviations.
INIT_FACTOR = 1e-2


def mean_field(model, *, init_scale: float = INIT_SCALE):
    """q(w) = N(m, diag(s²)): NumPyro's ``AutoDiagonalNormal``, where m starts at ``fs.model.init_to_network``.

    Args:
        model: a NumPyro model with continuous latent sites, whose unconstrained values are w.
        init_scale: initial s, positive; 0.01 by default.

    Returns:
        A guide for ``numpyro.infer.SVI``.
    """
    check_positive(init_scale, "init_scale")
    return AutoDiagonalNormal(model, init_loc_fn=init_to_network, init_scale=init_scale)


def low_rank(model, rank: int, *, init_scale: float = INIT_SCALE):
    """q(w) = N(m, D (I + L Lᵀ) D), D = diag(s), L [P, rank]: NumPyro's ``AutoLowRankMultivariateNormal``.

    NumPyro starts L at 0, which is a stationary point of the bound: without noise in the gradient L would stay there.
    Here L starts at small random numbers, and m at ``fs.model.init_to_network``.

    Args:
        model: a NumPyro model with continuous latent sites, whose unconstrained values are w.
        rank: number of columns of L, at least 1.
        init_scale: initial s, positive; 0.01 by default.

    Returns:
        A guide for ``numpyro.infer.SVI``.
    """
    check_positive(init_scale, "init_scale")
    check_count(rank, "rank")
    return _LowRank(model, init_loc_fn=init_to_network, init_scale=init_scale, rank=rank)


class _LowRank(AutoLowRankMultivariateNormal):
    def _get_posterior(self, *args, **kwargs):
        start = INIT_FACTOR * jax.random.normal(jax.random.key(0), (self.latent_dim, self.rank))
        with handlers.substitute(data={f"{self.prefix}_cov_factor": start}):
            return super()._get_posterior(*args, **kwargs)
