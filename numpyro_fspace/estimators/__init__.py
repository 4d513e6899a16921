"""Estimators in scikit-learn's protocol, and the commands ``fspace fit`` and ``fspace predict``.

They need scikit-learn: ``pip install "numpyro_fspace[estimators]"``.
"""

from __future__ import annotations

from numpyro_fspace.estimators.classifier import Classifier
from numpyro_fspace.estimators.network_model import ClassificationModel, RegressionModel
from numpyro_fspace.estimators.regressor import Regressor

__all__ = ["ClassificationModel", "Classifier", "RegressionModel", "Regressor"]
