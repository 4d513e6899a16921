"""Warnings about draws, at the line of the user's program that the call came from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import is_table, warn
from numpyro_fspace.model.checks.arguments import arguments_of
from numpyro_fspace.posterior.convergence_doubts import convergence_doubts
from numpyro_fspace.posterior.diagnostics import diagnose
from numpyro_fspace.posterior.judged_quantities import quantities_in_predictions


def warn_of_nan(predictions: dict, samples: dict):
    """Warn of predictions that are NaN, and say whether it is the posterior draws [S, …] that are."""
    infinite = [k for k, v in samples.items() if _where(np.isinf, v).any()]
    if infinite and any(_where(np.isinf, v).any() for v in predictions.values()):
        warn(f"predictions are infinite where the posterior draws of {infinite} are: leave those draws out.")
    spoiled = {k: v for k, v in predictions.items() if _where(np.isnan, v).any()}
    if not spoiled:
        return
    num = max(np.sum(_where(np.isnan, v).reshape(len(v), -1).any(1)) for v in spoiled.values())
    sites = [k for k, v in samples.items() if _where(np.isnan, v).any()]
    reason = (
        f"the posterior draws of {sites} are. Leave those draws out, or run again with a smaller step_size."
        if sites
        else "the model gives NaN there. Look at what it computes (a logarithm or root of a negative number, 0 / 0)."
    )
    warn(f"{sorted(spoiled)} are NaN in {num} of {len(next(iter(spoiled.values())))} draws: {reason}")


def _where(test: Callable, values) -> np.ndarray:
    """Where a test of floating-point numbers holds, ``np.isnan`` say; nowhere among values of other types."""
    array = np.asarray(values)
    return test(array) if jnp.issubdtype(array.dtype, jnp.inexact) else np.zeros(len(array), bool)


def warn_of_columns(posterior, args: tuple, kwargs: dict):
    """Warn of a table among the arguments whose columns have other names, or another order, than in the run."""
    known = arguments_of(posterior.args, posterior.kwargs)
    for name, table in arguments_of(args, kwargs).items():
        old, new = (list(getattr(one, "columns", ())) if is_table(one) else [] for one in (known.get(name), table))
        if len(old) == len(new) and old != new:
            cure = f"pass the table with columns in the order {old}" if set(old) == set(new) else "rename them"
            warn(
                f"{name} has the columns {new}, and that of the run has {old}. A network takes columns by their place: "
                f"{cure}, or pass arrays."
            )


def warn_of_predictions(predictions: dict, num_chains: int, find_structure):
    """Warn if the chains of a posterior have not converged in these predictions.

    Args:
        predictions: draws [S, …] by name.
        num_chains: the number of chains that they come from.
        find_structure: a function without arguments that returns the ``Structure`` of the model.
    """
    with without_harm("These predictions"):
        points = quantities_in_predictions(predictions, num_chains, find_structure)
        if points is None:
            return
        found = diagnose(*points)
        for doubt in convergence_doubts([found], np.zeros(found.num_chains))[:1]:
            if doubt.about == "R-hat":
                warn(f"At these inputs {doubt.text}")


@contextmanager
def without_harm(what):
    """Report an error as a warning, so that a run that has ended is not lost."""
    try:
        yield
    except Warning:  # warnings that somebody turned into errors
        raise
    except Exception as error:
        warn(f"{what} could not be judged: {type(error).__name__}: {error}")
