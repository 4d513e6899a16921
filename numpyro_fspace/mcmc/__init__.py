"""The samplers as NumPyro kernels, their warm-up, and the driver."""

from numpyro_fspace.mcmc.driver import MCMC
from numpyro_fspace.mcmc.hmc_kernels import fHMC, fMALA
from numpyro_fspace.mcmc.mclmc_kernels import MCLMC, fMCLMC
from numpyro_fspace.mcmc.reporting.plot_report import plot_report
from numpyro_fspace.mcmc.reporting.report import Report, report
from numpyro_fspace.mcmc.sgmcmc_kernels import SGHMC, SGLD, fSGHMC, fSGLD
from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.mcmc.warmup import Warmup

__all__ = [
    "MCLMC",
    "MCMC",
    "Report",
    "SGHMC",
    "SGLD",
    "KernelState",
    "Warmup",
    "fHMC",
    "fMCLMC",
    "fMALA",
    "fSGHMC",
    "fSGLD",
    "plot_report",
    "report",
]
