"""The samplers as NumPyro kernels, their warm-up, and the driver."""

from numpyro_fspace.infer.chain import KernelState
from numpyro_fspace.infer.kernels import SGHMC, SGLD, fSGHMC, fSGLD
from numpyro_fspace.infer.mcmc import MCMC
from numpyro_fspace.infer.metropolis import fHMC, fMALA
from numpyro_fspace.infer.warmup import Warmup

__all__ = ["MCMC", "SGHMC", "SGLD", "KernelState", "Warmup", "fHMC", "fMALA", "fSGHMC", "fSGLD"]
