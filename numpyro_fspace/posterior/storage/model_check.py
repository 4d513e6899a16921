"""Whether a model is the one that saved draws are of: its log densities at given values are the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr

from numpyro_fspace._checks import warn
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.functions import some_rows
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import is_functional_prior, zeros_if_not_drawable
from numpyro_fspace.posterior.storage.fingerprint import other_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpyro_fspace.posterior.posterior import Posterior

#: What a checkpoint knows its model by.
PRIOR_DRAW = "the model's log density at a draw from its prior"
#: Log densities may differ by as much between devices and versions of JAX, relative to 1 and to their own size.
TOLERANCE = 0.01
#: The most rows of a subsampled plate at which a likelihood is evaluated.
MAX_ROWS = 1000
#: The part of a log density that is the prior of the latent sites.
LATENTS = "latent sites"


def _log_densities(model: Callable, args: tuple, kwargs: Mapping, draws: Sequence[Mapping]) -> list:
    """The log densities of a model at draws of its latent sites, in parts, at some rows of each subsampled plate.

    Args:
        model: a NumPyro model.
        args, kwargs: the arguments it was fitted to.
        draws: values by site. Other sites are drawn from the prior, and are 0 if it is improper.

    Returns:
        For each draw a dict: the density of all latent sites together, and that of each observed site, factor and
        functional prior by its name; None if the model does not run with these arguments, or if one is not finite.
    """

    def value(draw, site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        return draw.get(site["name"], zeros_if_not_drawable(site))

    def evaluated(num_rows, draw, arrays):
        args, kwargs = join(arrays)
        settings = {"key": jax.random.key(0), "points": True, "density": True, "isolated": True}
        settings |= {"rows": lambda size, batch: jnp.asarray(some_rows(np.arange(size), num_rows))}
        parts: dict = {}
        for name, site in run_model(model, args, kwargs, substitute=partial(value, draw), **settings).items():
            if site["type"] == "sample":
                part = name if site["is_observed"] or is_functional_prior(site) else LATENTS
                parts[part] = parts.get(part, 0.0) + jnp.sum(site["fn"].log_prob(site["value"]))
        return parts

    for num_rows in (MAX_ROWS, 1):  # a plate may have latent values of its own for all its rows, which fit to one row
        try:
            arrays, _, join = split_arrays((args, kwargs))
            program = jax.jit(partial(evaluated, num_rows))
            found = [{k: float(v) for k, v in program(draw, arrays).items()} for draw in draws]
        except Exception:  # whatever a model makes of arguments that are missing, or that are no data
            continue
        return [one if np.isfinite([*one.values()]).all() else None for one in found]
    return [None] * len(draws)


def prior_density(model: Callable, args: tuple, kwargs: Mapping) -> dict[str, float] | None:
    """The log density of a model at a draw from its prior, in parts of three digits, the same on every machine."""
    (found,) = _log_densities(model, args, kwargs, [{}])
    return None if found is None else {k: float(f"{v:.3g}") for k, v in found.items()}


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
    now = prior_density(model, args, kwargs)
    saved = {k: float(text) for k, text in inputs.items() if k.startswith(f"{PRIOR_DRAW}[")}
    if now is None or not saved:
        return
    parts = {PRIOR_DRAW + keystr((DictKey(k),)): v for k, v in now.items()}
    for name in _other_parts(saved, parts):
        warn(
            f"The model, or the arguments given with it, are not those of the checkpoint: {name} is "
            f"{parts.get(name, 'not there')}, and was {saved.get(name, 'not there')} in the run. Predictions would be "
            "wrong. Use the model and the arguments of the run."
        )
        return


def warn_of_another_model(saved: list, posterior: Posterior) -> None:
    """Warn if the log densities of a posterior's model are not those saved with its draws."""
    now = log_densities(posterior) if saved else []
    if not now or None in (*saved, *now):
        return
    for before, after, which in zip(saved, now, ("first", "last"), strict=True):
        for name in _other_parts(before, after):
            warn(
                "The model, or the arguments given with it, are not those of the draws: the log density of "
                f"{name!r} at the {which} draw is {after.get(name, 'not there')}, and was "
                f"{before.get(name, 'not there')} when it was saved. Predictions would be wrong. Load with the same "
                "layers, activation functions, priors, kernels and likelihood."
            )
            return


def _other_parts(before: Mapping, after: Mapping) -> list[str]:
    """The names of the parts of a log density that differ."""
    only_one = [*(set(before) ^ set(after))]
    both = [k for k in before if k in after]
    return only_one + [k for k in both if not np.isclose(before[k], after[k], rtol=TOLERANCE, atol=TOLERANCE)]
