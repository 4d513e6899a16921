"""The latent sites of a model that are scales, such as a noise, or the weights of a network for the noise."""

from __future__ import annotations

import numpy as np

from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import is_positive
from numpyro_fspace.model.sites import (
    base_distribution,
    is_functional_prior,
    latent_sites,
    observed_sites,
    parameters_of,
)


def scale_sites(potential) -> list[str]:
    """The latent sites that are positive, or that determine scales of observations and no location.

    The warm start holds them, because at the joint mode of a model and its scales the noise is far too small.

    Args:
        potential: a ``ModelPotential``.
    """
    trace, latents = potential.trace, potential.latents
    positive = {k for k in latents if is_positive(trace[k])}
    found = positive | _of_noise(potential) if positive != set(latents) else positive
    return [k for k in latents if k in (positive if found == set(latents) else found)]


def _of_noise(potential) -> set[str]:
    """The latent sites on which the ``scale`` of an observation depends and nothing else, but for functional priors."""
    if all(isinstance(scale, int | float | np.ndarray | np.number) for scale in _scales(potential.trace).values()):
        return set()
    settings = {"args": potential.args, "kwargs": potential.kwargs, "key": potential._key_fresh, "full_plates": False}

    def parameters(values):
        trace = run_model(potential.model, substitute=values, **settings)
        scales = _scales(trace)
        sites = {k: s for k, s in trace.items() if s["type"] == "sample" and not is_functional_prior(s)}
        others = [_without_scale(s["fn"]) if k in scales else parameters_of(s["fn"]) for k, s in sites.items()]
        data = [s["value"] for s in observed_sites(trace).values()]
        return {"scales": list(scales.values()), "others": [others, data]}

    found = sources(parameters, {k: site["value"] for k, site in latent_sites(potential.trace).items()})
    return found["scales"] - found["others"]


def _scales(trace) -> dict:
    """The scales of the observations whose distributions have a location and a scale, by name of their site."""
    distributions = {k: base_distribution(site["fn"]) for k, site in observed_sites(trace).items()}
    return {k: d.scale for k, d in distributions.items() if {"loc", "scale"} <= set(d.arg_constraints)}


def _without_scale(distribution) -> dict:
    """The other parameters of a distribution."""
    base = base_distribution(distribution)
    return {name: getattr(base, name) for name in base.arg_constraints if name != "scale"}
