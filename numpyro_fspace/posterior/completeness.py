"""Whether posterior draws are complete: they hold every latent value that the model needs."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import taken
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.functions import evaluate, functions_of
from numpyro_fspace.model.handlers import own_keys
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import (
    is_functional_prior,
    latent_sites,
    observed_sites,
    parameters_of,
    weights_of,
    zeros_if_not_drawable,
)
from numpyro_fspace.posterior.posterior import Posterior


def check_complete(posterior: Posterior, args, kwargs, inputs, from_prior=()):
    """Refuse draws that lack latent values of the model, which would silently come from the prior.

    Two kinds of sites need no draws: the observations, and latent values that are new with these arguments. If the
    arguments of the fit are known, these are the sites that were observed then, and those that did not exist then. Else
    a site counts as an observation if no other site and no function depends on it. A deterministic site may depend on
    an observation whose own distribution depends on the draws.

    Args:
        posterior: draws, and what their model was fitted to.
        args, kwargs: the model's arguments now.
        inputs: a function without arguments that returns where functions are evaluated, as for ``evaluate``.
        from_prior: names of latent sites that are meant to come from the prior.

    Raises:
        ValueError: naming the sites and the cure; also for draws whose shape is not that of their site, or that lie
            outside of its bounds.
    """
    model, draw = posterior.model, taken(posterior.samples, 0)
    trace, hidden = _trace(model, draw, args, kwargs)
    weights = weights_of(trace)
    free = [k for k in latent_sites(trace) if k not in draw] + hidden
    unknown = sorted(set(from_prior) - set(free))
    if unknown:
        raise ValueError(f"from_prior: {unknown} are no latent sites of the model; it has {list(latent_sites(trace))}.")
    missing = [k for k in free if k in trace and k not in from_prior and k in weights]
    if hidden or (free and not missing):
        needed = _latents_of_fit(posterior)
        if needed is None:
            needed = _needed(model, draw, args, kwargs, inputs(), trace=trace, hidden=hidden)
        missing = missing or [k for k in free if k in needed and k not in from_prior]
    if hidden := [k for k in missing if k in hidden]:
        raise ValueError(
            f"numpyro.handlers.block hides the latent sites {hidden} of the model, which come from the prior: no "
            "data have moved them. Run the model without block; to hold a site fixed use numpyro.handlers.condition. "
            f"If the prior is meant, say so: predict(..., from_prior={hidden})."
        )
    others = sorted(draw.keys() - trace.keys())
    imputed = [k for k in draw.keys() & latent_sites(trace).keys() if f"{k}_unobserved" in others]
    if imputed:
        raise ValueError(
            f"The draws of {imputed} are those that obs_mask= put together for the rows of the run: pass the MCMC "
            "object, or leave them out of the draws."
        )
    if missing:
        subject = "The draws"
        if others:
            subject = f"The model is not that of the draws: they hold {others}, which are no sites of it. They"
        raise ValueError(
            f"{subject} lack the latent sites {missing}, which would come from the prior. Pass the MCMC object "
            "or the Posterior itself, or all draws (fs.to_arviz leaves weights out unless weights=True). Sites that "
            "are meant to come from the prior, such as those of new rows, are named: predict(..., from_prior=[...])."
        )
    if others and len(others) == len(draw):
        raise ValueError(f"The draws hold {others}, which are no sites of the model; it has {sorted(trace)}.")
    for name, site in observed_sites(trace).items():
        if name in draw and np.shape(draw[name]) != np.shape(site["value"]):
            raise ValueError(
                f"The draws of {name!r}, which the model observes, have shape {np.shape(draw[name])} and the data "
                f"{np.shape(site['value'])}: leave {name!r} out of the draws."
            )
    for name in draw.keys() & latent_sites(trace).keys():
        _check_bounds(name, trace[name]["fn"].support, posterior.samples[name])


def _check_bounds(name, support, draws):
    """Draws must lie in the interval that their site has for support, if its ends are known."""
    while hasattr(support, "base_constraint"):  # of independent values
        support = support.base_constraint
    ends = [getattr(support, f"{side}_bound", None) for side in ("lower", "upper")]
    if ends == [None, None] or any(isinstance(end, jax.core.Tracer) for end in ends):
        return
    low, high = (none if e is None else np.asarray(e, float) for e, none in zip(ends, (-np.inf, np.inf), strict=True))
    values, largest = np.asarray(draws), max(np.max(np.abs(e), initial=0.0, where=np.isfinite(e)) for e in (low, high))
    rounding = 4 * np.finfo(np.float32).eps * largest
    num = np.sum((values < low - rounding) | (values > high + rounding))
    if num:
        raise ValueError(
            f"{num} of {values.size} draws of {name!r} lie outside of its support, {support}: {values.min():.3g} to "
            f"{values.max():.3g}. Pass values of the model's own sites, as get_samples() gives them, and not those of "
            "the unconstrained space."
        )


def _run(model, values, args, kwargs):
    """The model's trace with these values. An improper prior, from which nothing can be drawn, gives 0."""
    others = {}  # sites whose values have another shape

    def value(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if site["name"] in values:
            found = values[site["name"]]
            if np.shape(found)[1:] != site["fn"].shape():  # a value for each step of a scan, of which the site is one
                _check_shape(site, np.shape(found))
            if np.shape(found) != site["fn"].shape():
                others[site["name"]] = site
            return found
        return zeros_if_not_drawable(site)

    try:
        return run_model(model, args, kwargs, key=jax.random.key(0), substitute=value)
    except Exception:
        for name, site in others.items():  # the likely cause
            _check_shape(site, np.shape(values[name]))
        raise


def _check_shape(site, shape):
    name, needed = site["name"], site["fn"].shape()
    if shape != needed:
        raise ValueError(
            f"The draws of {name!r} have shape {shape}, but the model has {needed} with these arguments. A latent "
            "value of each row of the data is known for those rows alone. If all of them are to come from the prior, "
            f"those of the known rows too, say so: from_prior=[{name!r}]. To keep the known ones, draw the new ones "
            f"and append them to samples[{name!r}] in fs.Posterior(model, samples)."
        )


def _trace(model, draw, args, kwargs) -> tuple[dict, list]:
    """The trace of the model and the sites that it hides. Nothing is computed: do not read the trace's values."""
    arrays, _, join = split_arrays((args, kwargs))
    trace: dict = {}
    keys = own_keys()

    def run(draw, arrays):
        with keys:
            trace.update(_run(model, draw, *join(arrays)))

    jax.eval_shape(run, draw, arrays)
    for name, site in latent_sites(trace).items():
        if name in draw:
            _check_shape(site, np.shape(site["value"]))
    return trace, keys.hidden


def _latents_of_fit(posterior) -> set | None:
    """The latent sites of the model with the arguments of its fit, hidden ones too; None if these are unknown."""
    try:
        inspect.signature(posterior.model).bind(*posterior.args, **posterior.kwargs)
        trace, hidden = _trace(posterior.model, {}, posterior.args, posterior.kwargs)
    except Exception:  # not the arguments of a fit, whatever the model makes of them
        return None
    return {*latent_sites(trace), *hidden} if observed_sites(trace, factors=True) else None


def _needed(model, draw, args, kwargs, inputs, *, trace, hidden) -> set:
    """The latent sites without draws, ``hidden`` ones too, that others depend on; none depends on an observation."""
    values = {k: s["value"] for k, s in latent_sites(trace).items()}
    sites = {k: jax.ShapeDtypeStruct(np.shape(v), jnp.result_type(v)) for k, v in values.items()}
    arrays, _, join = split_arrays((args, kwargs))

    def parts(values):
        with own_keys({k: values[f"key of {k}"] for k in hidden}):
            found = _run(model, values, *join(values[""]))
        distributions = {f"distribution of {k}": _parameters(s) for k, s in found.items() if s["type"] == "sample"}
        fixed = {f"value of {k}": s["value"] for k, s in found.items() if s["type"] == "deterministic"}
        return distributions | fixed | {"functions": evaluate(functions_of(found), inputs)}

    depends = sources(parts, sites | {f"key of {k}": jax.random.key(0) for k in hidden} | {"": arrays})
    prefix = "distribution of "
    laws = {k.removeprefix(prefix): of for k, of in depends.items() if k.startswith(prefix)}
    own = {k: of - {k} for k, of in laws.items()}
    by_distributions = set(depends["functions"]).union(*own.values())
    by_others = set().union(*(of for k, of in depends.items() if k.startswith("value of ")))
    found = {
        k for k in sites if k not in draw and (k in by_distributions or (k in by_others and not own[k] & draw.keys()))
    }
    return found | {k for k in hidden if f"key of {k}" in by_distributions | by_others}


def _parameters(site) -> list:
    """What the distribution of a site depends on: its parameters, and its density if it has one."""
    if is_functional_prior(site):
        return []
    found = [leaf for leaf in parameters_of(site["fn"]) if isinstance(leaf, jax.Array | np.ndarray)]
    try:
        return [*found, site["fn"].log_prob(site["value"])]
    except NotImplementedError:
        return found
