"""Priors over functions: any object with ``log_prob(x, f)`` and ``sample(key, x, sample_shape)``.

``GPPrior`` is the usual choice. ``fit_gp`` trains its kernel on data, and ``condition`` gives the exact posterior,
which is itself a prior. ``StudentTPrior`` has heavier tails. ``NetworkPrior`` is the distribution of a random network,
and ``CalibratedPrior`` the ratio of a Gaussian prior to such a distribution. ``Helmholtz`` is a kernel of plane vector
fields.
"""

from numpyro_fspace.priors.base import FunctionalPrior, check_prior
from numpyro_fspace.priors.calibrated import CalibratedPrior
from numpyro_fspace.priors.dirichlet import dirichlet_targets
from numpyro_fspace.priors.fit import GPFit, fit_gp
from numpyro_fspace.priors.gaussian_base import ConditionedGP, GaussianProcess
from numpyro_fspace.priors.gp_prior import GPPrior
from numpyro_fspace.priors.helmholtz import Helmholtz
from numpyro_fspace.priors.kernel_params import median_start
from numpyro_fspace.priors.network import NetworkPrior
from numpyro_fspace.priors.student_t import StudentTPrior

__all__ = [
    "CalibratedPrior",
    "ConditionedGP",
    "FunctionalPrior",
    "GPFit",
    "GPPrior",
    "GaussianProcess",
    "Helmholtz",
    "NetworkPrior",
    "StudentTPrior",
    "check_prior",
    "dirichlet_targets",
    "fit_gp",
    "median_start",
]
