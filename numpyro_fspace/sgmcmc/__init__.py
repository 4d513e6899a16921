"""The samplers as pure algorithms on pytrees, in BlackJAX's form; no NumPyro needed.

A functional sampler (fSGLD, fSGHMC) is the same algorithm on a potential that includes -log P0(f(X_M)).
"""

from numpyro_fspace.sgmcmc import control_variates, mclmc, preconditioners, sghmc, sgld
from numpyro_fspace.sgmcmc.base import Info

__all__ = ["Info", "control_variates", "mclmc", "preconditioners", "sghmc", "sgld"]
