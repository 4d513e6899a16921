"""Estimators in scikit-learn's protocol, and the commands ``fspace fit`` and ``fspace predict``.

They need scikit-learn: ``pip install "numpyro_fspace[estimators]"``.
"""

from __future__ import annotations

try:
    from numpyro_fspace.estimators.classifier import Classifier
    from numpyro_fspace.estimators.network_model import ClassificationModel, RegressionModel
    from numpyro_fspace.estimators.regressor import Regressor
except ImportError as error:
    if (error.name or "").startswith("sklearn"):
        raise ImportError(
            "fs.Regressor, fs.Classifier and fspace fit need scikit-learn 1.6 or newer: "
            'pip install "scikit-learn>=1.6".'
        ) from error
    raise

__all__ = ["ClassificationModel", "Classifier", "RegressionModel", "Regressor"]
