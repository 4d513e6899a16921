"""The samplers as pure algorithms on pytrees, with BlackJAX's interface. Nothing here uses NumPyro.

The functional samplers (fSGLD, fSGHMC, fMCLMC) are the same algorithms on a potential that includes -log P0(f(X_M)).
A new sampler is a module here, an adapter in ``mcmc/sampler_adapters.py`` and a kernel beside those of
``mcmc/sgmcmc_kernels.py`` ("A new sampler" in docs/contributing.md).
"""

from numpyro_fspace.sgmcmc import control_variates, mclmc, preconditioners, sghmc, sgld
from numpyro_fspace.sgmcmc.shared import Info

__all__ = ["Info", "control_variates", "mclmc", "preconditioners", "sghmc", "sgld"]
