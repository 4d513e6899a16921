"""Bayesian neural networks with priors over functions, as NumPyro programs."""

from numpyro_fspace import baselines, datasets, diagnostics, measurement, metrics, sgmcmc
from numpyro_fspace.convolution import conv_general_dilated
from numpyro_fspace.diagnostics import function_diagnostics
from numpyro_fspace.infer import MCMC, SGHMC, SGLD, Warmup, fHMC, fMALA, fSGHMC, fSGLD
from numpyro_fspace.inference_data import to_arviz
from numpyro_fspace.networks import fan_in, flat, init_to_network, random_function, random_module
from numpyro_fspace.on_demand import OnDemand
from numpyro_fspace.plots import plot_functions
from numpyro_fspace.posterior import Posterior
from numpyro_fspace.prediction import predict
from numpyro_fspace.primitives import functional_prior
from numpyro_fspace.priors import (
    CalibratedPrior,
    GPPrior,
    Helmholtz,
    NetworkPrior,
    StudentTPrior,
    dirichlet_targets,
    fit_gp,
)
from numpyro_fspace.reporting import report
from numpyro_fspace.saving import save
from numpyro_fspace.sgmcmc import preconditioners
from numpyro_fspace.variational import (
    FVIMC,
    BridgeWasserstein,
    FunctionalELBO,
    PushforwardKL,
    RegularizedKL,
    SpectralSteinKL,
    Wasserstein1,
    Wasserstein2,
    guides,
    linearise,
    svi_posterior,
)

__version__ = "0.1.0"

__all__ = [
    "FVIMC",
    "MCMC",
    "SGHMC",
    "SGLD",
    "BridgeWasserstein",
    "CalibratedPrior",
    "FunctionalELBO",
    "GPPrior",
    "Helmholtz",
    "NetworkPrior",
    "OnDemand",
    "Posterior",
    "PushforwardKL",
    "RegularizedKL",
    "SpectralSteinKL",
    "StudentTPrior",
    "Warmup",
    "Wasserstein1",
    "Wasserstein2",
    "baselines",
    "conv_general_dilated",
    "datasets",
    "diagnostics",
    "dirichlet_targets",
    "fHMC",
    "fMALA",
    "fSGHMC",
    "fSGLD",
    "fan_in",
    "fit_gp",
    "flat",
    "function_diagnostics",
    "functional_prior",
    "guides",
    "init_to_network",
    "linearise",
    "measurement",
    "metrics",
    "plot_functions",
    "preconditioners",
    "predict",
    "random_function",
    "random_module",
    "report",
    "save",
    "sgmcmc",
    "svi_posterior",
    "to_arviz",
]
