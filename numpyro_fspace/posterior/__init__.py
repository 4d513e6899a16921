"""Draws of a posterior, and what is made of them: predictions, ArviZ objects, files, plots, diagnostics."""

from numpyro_fspace.posterior import diagnostics
from numpyro_fspace.posterior.arviz_export import to_arviz
from numpyro_fspace.posterior.plot_functions import plot_functions
from numpyro_fspace.posterior.posterior import Posterior
from numpyro_fspace.posterior.predictive import Predictive, predict
from numpyro_fspace.posterior.storage.save import save
from numpyro_fspace.posterior.uncertainty_decomposition import Decomposition, decompose

__all__ = [
    "Decomposition",
    "Posterior",
    "Predictive",
    "decompose",
    "diagnostics",
    "plot_functions",
    "predict",
    "save",
    "to_arviz",
]
