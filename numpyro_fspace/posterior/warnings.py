"""Warnings about draws, at the line of the user's program that the call came from."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager

import numpy as np

from numpyro_fspace.posterior.diagnostics import diagnose, doubts
from numpyro_fspace.posterior.quantities import quantities_in_predictions

__all__ = ["warn", "warn_of_predictions", "without_harm"]


def warn(message: str):
    """A ``RuntimeWarning`` at the line outside of the package that the call came from."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("numpyro_fspace."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_of_predictions(predictions: dict, num_chains: int, find_structure):
    """Warn where the chains of a posterior do not agree in its predictions."""
    with without_harm("These predictions"):
        points = quantities_in_predictions(predictions, num_chains, find_structure)
        if points is None:
            return
        found = diagnose(*points)
        lines = doubts([found], np.zeros(found.num_chains))
        if lines and lines[0].startswith("R-hat"):
            warn(f"At these inputs {lines[0]}")


@contextmanager
def without_harm(what):
    """An error of ours must not cost anybody a run."""
    try:
        yield
    except Warning:  # warnings that somebody turned into errors
        raise
    except Exception as error:
        warn(f"{what} could not be judged: {type(error).__name__}: {error}")
