"""Whether a model is the one that saved draws are of: its log densities at given values are the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import warn
from numpyro_fspace.model.arguments import split_arrays
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import log_density_of, zeros_if_not_drawable
from numpyro_fspace.posterior.fingerprint import other_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpyro_fspace.posterior.posterior import Posterior

__all__ = ["PRIOR_DRAW", "log_densities", "prior_density", "warn_of_another_model", "warn_of_another_prior"]

#: What a checkpoint knows its model by.
PRIOR_DRAW = "the model's log density at a draw from its prior"

#: Log densities may differ by as much between devices and versions of JAX, relative to 1 and to their own size.
TOLERANCE = 0.01


def _log_densities(model: Callable, args: tuple, kwargs: Mapping, draws: Sequence[Mapping]) -> list:
    """The log densities of a model at draws of its latent sites, and at the first row of each subsampled plate.

    Args:
        model: a NumPyro model.
        args, kwargs: the arguments it was fitted to.
        draws: values by site. Other sites are drawn from the prior, and are 0 if it is improper.

    Returns:
        A number for each draw; None if the model does not run with these arguments, or if the density is not finite.
    """

    def value(draw, site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        return draw.get(site["name"], zeros_if_not_drawable(site))

    @jax.jit
    def evaluated(draw, arrays):
        args, kwargs = join(arrays)
        one_row = {"rows": jnp.arange(1), "full_plates": False}
        settings = {"key": jax.random.key(0), "points": True, "density": True, "isolated": True}
        trace = run_model(model, args, kwargs, substitute=partial(value, draw), **one_row, **settings)
        sites = [site for site in trace.values() if site["type"] == "sample"]
        return sum((jnp.sum(log_density_of(site)) for site in sites), jnp.zeros(()))

    try:
        arrays, _, join = split_arrays((args, kwargs))
        found = [float(evaluated(draw, arrays)) for draw in draws]
    except Exception:  # whatever a model makes of arguments that are missing, or that are no data
        return [None] * len(draws)
    return [one if np.isfinite(one) else None for one in found]


def prior_density(model: Callable, args: tuple, kwargs: Mapping) -> float | None:
    """The log density of a model at a draw from its prior, in three digits, which do not differ between machines."""
    (found,) = _log_densities(model, args, kwargs, [{}])
    return None if found is None else float(f"{found:.3g}")


def log_densities(posterior: Posterior) -> list:
    """The log densities at the first and the last draw of a posterior; an empty list for functions without weights."""
    if posterior.functions_at is not None:
        return []
    draws = [{k: v[i] for k, v in posterior.samples.items()} for i in (0, -1)]
    return _log_densities(posterior.model, posterior.args, posterior.kwargs, draws)


def warn_of_another_prior(inputs: Mapping, model: Callable, args: tuple, kwargs: Mapping) -> None:
    """Warn if arguments, or a model's log density at a draw from its prior, are not those of a checkpoint's inputs."""
    if others := other_arguments(inputs, model, args, kwargs):
        warn(
            f"These arguments differ from those of the checkpoint's run: {', '.join(others)}. Log-likelihoods, and all "
            "else that is computed from the data, would be wrong. Give the arguments of the run."
        )
        return
    saved, now = inputs.get(PRIOR_DRAW), prior_density(model, args, kwargs)
    if now is None or saved in (None, repr(None)) or np.isclose(now, float(saved), rtol=TOLERANCE, atol=TOLERANCE):
        return
    warn(
        f"The model, or the arguments given with it, are not those of the checkpoint: {PRIOR_DRAW} is {now}, and was "
        f"{saved} in the run. Predictions would be wrong. Use the model and the arguments of the run."
    )


def warn_of_another_model(saved: list, posterior: Posterior) -> None:
    """Warn if the log densities of a posterior's model are not those saved with its draws."""
    now = log_densities(posterior) if saved else []
    if None in (*saved, *now) or np.allclose(now, saved, rtol=TOLERANCE, atol=TOLERANCE):
        return
    warn(
        "The model, or the arguments given with it, are not those of the draws: the log density at the first and the "
        f"last draw is {now[0]:.6g} and {now[1]:.6g}, and was {saved[0]:.6g} and {saved[1]:.6g} when they were saved. "
        "Predictions would be wrong. Load with the same layers, activation functions, priors, kernels and likelihood."
    )
