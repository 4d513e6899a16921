"""Other methods for the same models as the samplers, for comparison."""

from numpyro_fspace.baselines.deep_ensemble import ensemble
from numpyro_fspace.baselines.implicit import implicit_process
from numpyro_fspace.baselines.linearized_laplace import laplace
from numpyro_fspace.baselines.sparse_gp import SVGPFit, fit_svgp

__all__ = ["SVGPFit", "ensemble", "fit_svgp", "implicit_process", "laplace"]
