"""Checks of a model's handlers, sites and observations before long computations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import init_to_value

from numpyro_fspace._checks import warn
from numpyro_fspace.model._numpyro import active_handlers
from numpyro_fspace.model.sites import (
    has_point_mass,
    is_masked,
    latent_sites,
    module_weights,
    observed_sites,
    parameters_of,
    subsampled_plates,
)


def check_unseeded(model):
    """Raise a ValueError for a model that is wrapped in ``seed``, which would fix its random numbers."""
    for layer in _layers(model):
        if isinstance(layer, handlers.seed):
            raise ValueError(
                "The model is wrapped in numpyro.handlers.seed, which would freeze one minibatch and one set "
                "of measurement points for the whole run. Pass the bare model; the kernel supplies the keys."
            )


def check_unsubstituted(model, latents):
    """Raise a ValueError if ``substitute`` gives values to latent sites, because a sampler would change them."""
    for layer in (*_layers(model), *active_handlers()):
        names = sorted(set(latents) & set(layer.data or ())) if isinstance(layer, handlers.substitute) else []
        if names:
            raise ValueError(
                f"The model is wrapped in numpyro.handlers.substitute with values of {names}, which leaves these sites "
                "latent. To hold them fixed use numpyro.handlers.condition; to start from these values use "
                "init_strategy=numpyro.infer.init_to_value(values=...)."
            )


def warn_of_unknown(model, trace, init_strategy):
    """Warn of values that ``condition`` or ``init_to_value`` gives to names that are no sites of the model."""
    given = []
    if getattr(init_strategy, "func", None) is init_to_value:
        given.append(("init_to_value(values=...) starts", init_strategy.keywords.get("values") or {}))
    for layer in _layers(model):
        if isinstance(layer, handlers.scope | handlers.block):  # within it, sites have other names or are hidden
            break
        if isinstance(layer, handlers.condition):
            given.append(("numpyro.handlers.condition fixes", layer.data or {}))
    for what, names in given:
        if unknown := sorted(set(names) - set(trace)):
            known = sorted(k for k, site in trace.items() if site["type"] == "sample")
            warn(f"{what} {unknown}, which the model does not have with these arguments. Its sites are {known}.")


def _layers(model):
    """A model, followed by the functions that its handlers and partial functions wrap, from outer to inner."""
    while model is not None:
        yield model
        model = model.func if isinstance(model, functools.partial) else getattr(model, "fn", None)


def check_sites(trace):
    """The latent sites of a model must be continuous, and outside of subsampled plates.

    Raises:
        ValueError: the message names the site and the cure.
    """
    latents = latent_sites(trace).values()
    for site in trace.values():
        if site["type"] == "param":
            raise ValueError(f"The model has the param site {site['name']!r}, which a sampler {_cure(site, trace)}")
    small = subsampled_plates(trace)
    for site in latents:
        name = site["name"]
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"The latent site {name!r} is discrete; stochastic-gradient samplers move continuous sites only. "
                "Marginalize it out."
            )
        if has_point_mass(site["fn"]):
            raise ValueError(
                f"The latent site {name!r} has a Delta prior, or one made of a Delta, so it is a point that a sampler "
                f"would leave. For a constant write numpyro.deterministic({name!r}, value), or give the value to "
                "fs.random_module as prior; in a mixture replace the point by a narrow density, such as "
                "Normal(value, 0.01)."
            )
        local = [frame.name for frame in site["cond_indep_stack"] if frame.name in small]
        if local:
            raise ValueError(
                f"The latent site {name!r} lies inside the subsampled plate {local[0]!r}. Local latent variables "
                "cannot be sampled with minibatches. If it is an observation, pass its data (obs=None makes it "
                "latent); otherwise remove subsample_size."
            )
    if not latents:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    check_likelihood(trace)


def check_likelihood(trace):
    """Raise a ValueError for a model without an observed site or factor."""
    if not observed_sites(trace, factors=True, weights=True):
        raise ValueError(
            "The model has no observed site, so there is no likelihood. Did run(...) get the targets (y=None makes "
            "the observation latent)? To draw from the prior use numpyro.infer.Predictive (it leaves "
            "functional priors out), or mask the likelihood with numpyro.handlers.mask(mask=False)."
        )


def _cure(site, trace) -> str:
    """Why a param site is refused, and what to write in its place."""
    name, is_module, _ = site["name"].partition("$params")
    if not is_module:
        return "cannot move. Give it a prior: numpyro.sample in place of numpyro.param."
    write = f"fs.random_module({name!r}, module, input_shape=(D,)"
    if any(k.startswith(f"{name}/") for k in module_weights(trace)):
        return (
            "cannot move: NumPyro's random_flax_module, random_nnx_module and random_eqx_module leave it beside the "
            f"weights that have a prior. In their place write {write}, prior=...), which takes the same modules and "
            "priors; its sites have a '.' for the '/', and an equinox module is mapped over the rows of x already."
        )
    return (
        f"cannot move: a network without a prior. In place of flax_module, nnx_module or eqx_module write {write}), "
        "with frozen={path: array} for some weights that stay as they are. If all stay, call the network as a function "
        "of x."
    )


def check_modules(trace):
    """Raise a ValueError for NumPyro's modules without priors, whose weights HMC and NUTS would leave where they start.

    Raises:
        ValueError: naming the param site and the cure.
    """
    for site in trace.values():
        if site["type"] == "param" and site["name"].endswith("$params"):
            name = site["name"].removesuffix("$params")
            if not any(k.startswith(name) for k in module_weights(trace)):
                raise ValueError(f"The model has the param site {site['name']!r}, which a sampler {_cure(site, trace)}")


def check_observations(trace):
    """Observations must have the shape of their likelihood, and lie in its support."""
    small = subsampled_plates(trace)
    for site in observed_sites(trace, weights=True).values():
        name, value, shape = site["name"], site["value"], tuple(site["fn"].shape())
        for what, part in [("", value), ("The likelihood of t", site["fn"])]:
            if any(jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.complexfloating) for leaf in parameters_of(part)):
                raise TypeError(f"{what or 'T'}he observation {name!r} is complex; densities are of real numbers.")
        if not _fits(site["fn"], np.shape(value)):
            for frame in site["cond_indep_stack"]:
                size = small.get(frame.name, (frame.size,))[0]
                if frame.size < size in np.shape(value):
                    what = f"the observation {name!r}"
                    raise ValueError(all_rows(frame.name, size, frame.size, what, np.shape(value)))
            raise ValueError(
                f"The observation {name!r} has shape {np.shape(value)} but its likelihood has shape {shape}: "
                "they would broadcast against each other. Squeeze the network's output (f(x).squeeze(-1)) or "
                "reshape the data."
            )
        _check_support(name, site["fn"], value)


def all_rows(plate: str, size: int, batch: int, what: str, shape) -> str:
    """The message that ``what``, of this shape, has all rows of a plate, and not those of a minibatch."""
    return (
        f"The plate {plate!r} takes minibatches of {batch} of its {size} rows (subsample_size={batch}), but {what} in "
        f"it has the shape {tuple(shape)}, of all rows. Take the rows of the plate: "
        f"with numpyro.plate({plate!r}, {size}, subsample_size={batch}) as rows: and x[rows], y[rows] within (or "
        "numpyro.subsample(x, event_dim=1) and numpyro.subsample(y, event_dim=0)); or leave out subsample_size."
    )


def _fits(distribution, shape: tuple) -> bool:
    """Whether a distribution broadcasts to values of this shape, and does not broadcast the values."""
    event = distribution.event_shape
    if shape[len(shape) - len(event) :] != event:
        return False
    try:
        return np.broadcast_shapes(shape, tuple(distribution.shape())) == shape
    except ValueError:
        return False


def _check_support(name, distribution, value):
    """Concrete values must lie in the support of their likelihood."""
    if isinstance(value, jax.core.Tracer) or is_masked(distribution) or distribution.support is None:
        return
    with jax.ensure_compile_time_eval():
        inside = distribution.support(value)
    if isinstance(inside, jax.core.Tracer) or np.asarray(inside).all():
        return
    outside = np.asarray(value)[~np.asarray(inside)]
    is_categorical = isinstance(distribution, dist.CategoricalLogits | dist.CategoricalProbs)
    cure = "Classes are numbered from 0. " if is_categorical else ""
    raise ValueError(
        f"The observation {name!r} holds {len(outside)} values that its likelihood gives no density, {outside[0]} "
        f"among them (its support: {distribution.support}). {cure}Correct them, or leave them out with "
        "numpyro.handlers.mask."
    )
