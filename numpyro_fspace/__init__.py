"""Bayesian neural networks with priors over functions, as NumPyro programs."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

from numpyro_fspace import metrics, model, priors, sgmcmc
from numpyro_fspace.mcmc import (
    MCLMC,
    MCMC,
    SGHMC,
    SGLD,
    Warmup,
    fHMC,
    fMALA,
    fMCLMC,
    fSGHMC,
    fSGLD,
    plot_report,
    report,
)
from numpyro_fspace.model import OnDemand, fan_in, functional_prior, gp_network, measurement, random_module
from numpyro_fspace.posterior import (
    Posterior,
    Predictive,
    decompose,
    diagnostics,
    plot_functions,
    predict,
    save,
    to_arviz,
)
from numpyro_fspace.priors import GPPrior, dirichlet_targets, fit_gp
from numpyro_fspace.sgmcmc import preconditioners

if TYPE_CHECKING:
    from numpyro_fspace import baselines, datasets, variational
    from numpyro_fspace import estimators as estimators
    from numpyro_fspace.estimators import Classifier as Classifier
    from numpyro_fspace.estimators import Regressor as Regressor
    from numpyro_fspace.variational import FVIMC, FunctionalELBO, svi_posterior

__version__ = "0.2.0"

__all__ = [
    "FVIMC",
    "MCLMC",
    "MCMC",
    "SGHMC",
    "SGLD",
    "FunctionalELBO",
    "GPPrior",
    "OnDemand",
    "Posterior",
    "Predictive",
    "Warmup",
    "baselines",
    "datasets",
    "decompose",
    "diagnostics",
    "dirichlet_targets",
    "fHMC",
    "fMALA",
    "fMCLMC",
    "fSGHMC",
    "fSGLD",
    "fan_in",
    "fit_gp",
    "functional_prior",
    "gp_network",
    "measurement",
    "metrics",
    "model",
    "plot_functions",
    "plot_report",
    "preconditioners",
    "predict",
    "priors",
    "random_module",
    "report",
    "save",
    "sgmcmc",
    "svi_posterior",
    "to_arviz",
    "variational",
]

#: Names of version 0.1 and where they are now. They go in version 0.3.
_MOVED = {
    "BridgeWasserstein": "variational.BridgeWasserstein",
    "CalibratedPrior": "priors.CalibratedPrior",
    "Helmholtz": "priors.Helmholtz",
    "NetworkPrior": "priors.NetworkPrior",
    "PushforwardKL": "variational.PushforwardKL",
    "RegularizedKL": "variational.RegularizedKL",
    "SpectralSteinKL": "variational.SpectralSteinKL",
    "StudentTPrior": "priors.StudentTPrior",
    "Wasserstein1": "variational.Wasserstein1",
    "Wasserstein2": "variational.Wasserstein2",
    "conv_general_dilated": "model.conv_general_dilated",
    "flat": "model.flat",
    "function_diagnostics": "diagnostics.function_diagnostics",
    "guides": "variational.guides",
    "init_to_network": "model.init_to_network",
    "linearise": "variational.linearize",
    "random_function": "model.random_function",
}

#: Modules that are imported when they are first used, and the names of theirs that are here too.
_LAZY = {
    "baselines": (),
    "datasets": (),
    "estimators": ("Classifier", "Regressor"),  # they need scikit-learn
    "variational": ("FVIMC", "FunctionalELBO", "svi_posterior"),
}


def __dir__():
    return sorted({*globals(), *_LAZY, *(name for names in _LAZY.values() for name in names)})


def __getattr__(name: str):
    for module, names in _LAZY.items():
        if name == module or name in names:
            found = importlib.import_module(f"{__name__}.{module}")
            return found if name == module else getattr(found, name)
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, _, new = _MOVED[name].partition(".")
    warnings.warn(f"fs.{name} is now fs.{_MOVED[name]}; the old name goes in 0.3.", DeprecationWarning, stacklevel=2)
    home = diagnostics if place == "diagnostics" else importlib.import_module(f"{__name__}.{place}")
    return getattr(home, new)
