"""Function-space variational inference for the same models as the samplers.

``FunctionalELBO`` with its default divergence, ``RegularizedKL``, is the method GFSVI. ``FVIMC`` alternates between
such a bound and fSGLD.
"""

from numpyro_fspace.model.linearized import linearize
from numpyro_fspace.variational import guides
from numpyro_fspace.variational.divergences import PushforwardKL, RegularizedKL, Wasserstein2
from numpyro_fspace.variational.elbo import FunctionalELBO
from numpyro_fspace.variational.fvimc import FVIMC
from numpyro_fspace.variational.guides import low_rank, mean_field
from numpyro_fspace.variational.sampled_divergences import (
    BridgeWasserstein,
    SpectralSteinKL,
    Wasserstein1,
    spectral_stein_score,
)
from numpyro_fspace.variational.svi import svi_posterior

__all__ = [
    "BridgeWasserstein",
    "FVIMC",
    "FunctionalELBO",
    "PushforwardKL",
    "RegularizedKL",
    "SpectralSteinKL",
    "Wasserstein1",
    "Wasserstein2",
    "guides",
    "linearize",
    "low_rank",
    "mean_field",
    "spectral_stein_score",
    "svi_posterior",
]
