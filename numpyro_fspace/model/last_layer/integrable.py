"""Which last layers of a model can be integrated out: those in which all observations are affine and normal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.util import is_identically_one

from numpyro_fspace.model.checks.sites import check_observations
from numpyro_fspace.model.last_layer.given_features import LastLayerPrior
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import has_dynamic_support
from numpyro_fspace.model.sites import base_distribution, is_functional_prior, is_masked, latent_sites, observed_sites

#: Maximum numbers of weights of all last layers together, and of weights times observations.
MAX_PARAMETERS, MAX_ENTRIES = 512, 2**22


def find_block(potential: ModelPotential, least: int = 1) -> tuple[tuple[str, ...], str | None]:
    """The sites of the last layers that can be integrated out together, and if there are none, why.

    These are all last layers where that is possible. Otherwise the networks are taken in the order of the program, each
    if the observations stay affine in it and in those before it: of a mean and a noise that depends on the inputs it is
    the mean. At least ``least`` numbers must remain to be sampled.
    """
    trace = potential.trace
    sizes = last_layers(trace)
    why = _why_no_last_layer(potential, sizes)
    if why is not None:
        return (), why
    num, start = num_observations(trace), jax.eval_shape(potential.init_params)

    def why_not(names):
        block = tuple(site for name in names for site in sites_of(name))
        num_left = sum(values.size for k, values in start.items() if k not in block)
        if num_left < least:
            return f"it would leave too few parameters ({num_left})" if num_left else "there is no other site to sample"
        if not all(_is_standard(trace[k]) for k in block):
            return "a site of the last layer is observed or has another prior"
        size = sum(sizes[name] for name in names)
        if size > MAX_PARAMETERS or size * num > MAX_ENTRIES:
            return f"{size} last-layer parameters and {num} observations are too many for one factor"
        return _why_not_affine(potential, block)

    names, why = list(sizes), why_not(list(sizes))
    if why is not None:
        names = []
        for name in sizes if len(sizes) > 1 else ():
            names += [name] if why_not([*names, name]) is None else []
    return tuple(site for name in names for site in sites_of(name)), None if names else why


def _why_no_last_layer(potential, sizes) -> str | None:
    """Why no last layer of a model can be integrated out, whichever it is; None if this remains to be seen."""
    trace = potential.trace
    if not sizes:
        return "the model has no fs.gp_network"
    if potential.is_random:
        return "minibatches or random numbers in the model change U at every step"
    if any(is_functional_prior(s) for s in trace.values()):
        return "the model has a functional_prior too"
    if any(has_dynamic_support(trace[k]) for k in potential.latents):
        return "the support of a site depends on other sites"
    check_observations(trace)  # names what would broadcast
    for site in observed_sites(trace, factors=True, weights=True).values():
        plain = site["scale"] is None or is_identically_one(site["scale"])
        if not (plain and _is_normal(site["fn"])):
            return f"{site['name']!r} is not a plain Normal likelihood"
    return None


def sites_of(name: str) -> tuple[str, ...]:
    """The sites of a network's last layer."""
    return tuple(f"{name}.{site}" for site in LastLayerPrior.sites)


def last_layers(trace) -> dict:
    """The number of white parameters of each network's last layer, by name, in the order of the program."""
    return {name: site["last_layer_size"] for name, site in trace.items() if "last_layer_size" in site}


def _why_not_affine(potential, block):
    """Why the means are not affine in the block, or what else depends on it; None if neither is the case."""
    values = {k: site["value"] for k, site in latent_sites(potential.trace).items()}
    inside = {k: values[k] for k in block}

    def run(inside):
        return run_model(
            potential.model, potential.args, potential.kwargs, key=potential._key_fresh, substitute=values | inside
        )

    def slope(inside):
        def means(inside):
            return [loc for loc, *_ in normal_observations(run(inside))]

        return jax.jvp(means, (inside,), (jax.tree.map(jnp.ones_like, inside),))[1]

    def others(inside):
        trace = run(inside)
        rest = [s["fn"].log_prob(s["value"]) for k, s in latent_sites(trace).items() if k not in block]
        return rest, [sd for _, sd, _ in normal_observations(trace)], [y for *_, y in normal_observations(trace)]

    if depends_on(slope, inside):
        return "the mean of an observation is not affine in a function"
    if depends_on(others, inside):
        return "the scale of an observation, or the prior of another site, depends on a function"
    return None


def num_observations(trace) -> int:
    """The number of observed values."""
    return sum(jnp.size(site["value"]) for site in observed_sites(trace, factors=True, weights=True).values())


def normal_observations(trace) -> list:
    """``(mean, sd, value)`` of each observed site, as vectors."""
    found = []
    for site in observed_sites(trace, factors=True, weights=True).values():
        normal = base_distribution(site["fn"])
        shape = jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
        parts = (normal.loc, normal.scale, site["value"])
        found.append(tuple(jnp.ravel(jnp.broadcast_to(part, shape)).astype(float) for part in parts))
    return found


def _is_normal(distribution) -> bool:
    return isinstance(base_distribution(distribution), dist.Normal) and not is_masked(distribution)


def _is_standard(site) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and _is_normal(site["fn"]) and site["scale"] is None
