"""A fitted estimator in a folder, without pickle: settings in JSON, draws in the file of ``fs.save``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fspace.estimators.base import NetworkEstimator
from numpyro_fspace.estimators.classifier import Classifier
from numpyro_fspace.estimators.network_model import ClassificationModel, NetworkModel, RegressionModel
from numpyro_fspace.estimators.regressor import Regressor
from numpyro_fspace.posterior import Posterior, save

SETTINGS, DRAWS, FORMAT = "estimator.json", "posterior.npz", 2
UNITS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_", "classes_", "n_features_in_")


def save_estimator(estimator: NetworkEstimator, folder: str | Path, **more: Any) -> None:
    """Write a fitted estimator to a folder, as ``estimator.json`` and ``posterior.npz``.

    Args:
        estimator: a fitted ``fs.Regressor`` or ``fs.Classifier``.
        folder: of the two files; it is made if there is none.
        more: further entries of the JSON file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    units = {name: np.asarray(getattr(estimator, name)).tolist() for name in UNITS if hasattr(estimator, name)}
    settings = {k: v for k, v in estimator.get_params().items() if k != "random_state"}
    entries = {
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "settings": settings | {"widths": list(settings["widths"])},
        "model": estimator.model.to_dict(),
        "units": units,
        "is_flat": getattr(estimator, "_is_flat", True),
    }
    (folder / SETTINGS).write_text(json.dumps(entries | more, indent=1))
    save(estimator.posterior_, folder / DRAWS)


def load_estimator(folder: str | Path) -> tuple[NetworkEstimator, dict[str, Any]]:
    """The estimator that ``save_estimator`` has written, and all entries of the JSON file.

    Raises:
        ValueError: the folder holds no estimator, or a damaged one.
    """
    folder = Path(folder)
    try:
        entries = json.loads((folder / SETTINGS).read_text())
        kind = {"Regressor": Regressor, "Classifier": Classifier}[entries["estimator"]]
        model_kind: type[NetworkModel] = RegressionModel if kind is Regressor else ClassificationModel
        model = model_kind.from_dict(entries["model"])
        settings = entries["settings"] | {"widths": tuple(entries["settings"]["widths"])}
        estimator = kind(**settings)
        for name, value in entries["units"].items():
            setattr(estimator, name, np.asarray(value) if isinstance(value, list) else value)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no model that fspace fit has written ({type(error).__name__}: {error})."
        ) from error
    estimator._is_flat = entries["is_flat"]
    estimator._set_posterior(Posterior.load(folder / DRAWS, model))
    return estimator, entries
