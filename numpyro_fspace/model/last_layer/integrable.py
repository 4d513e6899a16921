"""Which last layers of a model can be integrated out: those in which all observations are affine and normal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from numpyro.distributions.util import is_identically_one

from numpyro_fspace.model.checks.sites import check_observations
from numpyro_fspace.model.last_layer.given_features import LastLayerPrior
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.programs.affine import AFFINE, CONSTANT, kinds, num_operations
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.site_transforms import has_dynamic_support
from numpyro_fspace.model.sites import (
    active_functional_priors,
    base_distribution,
    is_masked,
    latent_sites,
    observed_sites,
    weights_by_network,
)

#: Maximum numbers of weights of all last layers together, and of weights times observations.
MAX_PARAMETERS, MAX_ENTRIES = 512, 2**22
#: Where it is not asked for, operations of the factorization relative to those of a gradient with all weights sampled.
MAX_COST = 5.0


def find_block(
    potential: ModelPotential, least: int = 1, *, only_gp_networks: bool = False, only_cheap: bool = False
) -> tuple[tuple[str, ...], str | None]:
    """The sites of the last layers that can be integrated out together, and if there are none, why.

    The networks are taken in the order of the program, each if the observations stay affine in its last layer and in
    those before it: of a mean and a noise that depends on the inputs it is the mean. The last layer of a ``gp_network``
    is known. That of another network are the weights with normal priors in which the observations are affine.

    Args:
        potential: of all sites.
        least: numbers that must remain to be sampled.
        only_gp_networks: whether layers of other networks are sampled.
        only_cheap: whether they are if the factorization takes ``MAX_COST`` times as many operations as a gradient.
    """
    trace = potential.trace
    why = _why_no_last_layer(potential)
    if why is not None:
        return (), why
    gp_networks, networks = last_layers(trace), weights_by_network(trace)
    if only_gp_networks:
        networks = {name: sites for name, sites in networks.items() if name in gp_networks}
    if not networks:
        return (), "the model has no network"
    candidates = {name: _candidates(trace, name, sites) for name, sites in networks.items()}
    found = _dependences(potential, [site for sites in candidates.values() for site in sites])
    block: tuple[str, ...] = ()
    num, size, reasons = num_observations(trace), 0, []
    cost = 3 * num_operations(found.program)  # of a gradient
    for name, sites in candidates.items():
        layer, why = _layer(found, block, sites, is_whole=name in gp_networks)
        total = size + gp_networks.get(name, sum(jnp.size(trace[site]["value"]) for site in layer))
        if why is None and (total > MAX_PARAMETERS or total * num > MAX_ENTRIES):
            why = f"{total} last-layer parameters and {num} observations are too many for one factor"
        if why is None and only_cheap and name not in gp_networks and _cost(total, num) > MAX_COST * cost:
            why = "its factorization would take most of the time"
        if why is None:
            block, size = (*block, *layer), total
        else:
            reasons.append(why)
    if not block:
        return (), reasons[0]
    start = jax.eval_shape(potential.init_params)
    num_left = sum(values.size for k, values in start.items() if k not in block)
    if num_left < least:
        few = f"it would leave too few parameters ({num_left})"
        return (), few if num_left else "there is no other site to sample"
    return block, None


def _cost(size, num):
    """Operations of a factorization of observations that are linear in ``size`` weights, and of its derivative."""
    return 8 * min(size, num) ** 2 * max(size, num)


def _layer(found, block, sites, *, is_whole) -> tuple[tuple[str, ...], str | None]:
    """The sites of a network, from the last on, that can join the block; all or none if ``is_whole``. Why none can."""
    if not sites:
        return (), "no weights of a last layer have a normal prior"
    if is_whole:
        return sites, found.why_not((*block, *sites))
    layer: tuple[str, ...] = ()
    reasons = []
    for site in reversed(sites):
        why = found.why_not((*block, *layer, site))
        if why is None:
            layer = (site, *layer)
        else:
            reasons.append(why)
    return layer, None if layer else reasons[0]


def _why_no_last_layer(potential) -> str | None:
    """Why no last layer of a model can be integrated out, whichever it is; None if this remains to be seen."""
    trace = potential.trace
    if potential.is_random:
        return "minibatches or random numbers in the model change U at every step"
    for name, site in active_functional_priors(trace).items():
        if site["fn"].residuals is None or site["scale"] is not None:
            return f"the functional prior {name!r} is not a plain Gaussian process"
    if any(has_dynamic_support(trace[k]) for k in potential.latents):
        return "the support of a site depends on other sites"
    check_observations(trace)  # names what would broadcast
    for site in observed_sites(trace, factors=True, weights=True).values():
        plain = site["scale"] is None or is_identically_one(site["scale"])
        if not (plain and _is_normal(site["fn"])):
            return f"{site['name']!r} is not a plain Normal likelihood"
    return None


def _candidates(trace, name, sites) -> tuple[str, ...]:
    """The sites of a network that may be integrated out; of a ``gp_network`` all of its last layer, or none."""
    layer = sites_of(name) if name in last_layers(trace) else sites
    normal = tuple(site for site in layer if site in trace and _is_plain_normal(trace[site]))
    return normal if layer is sites or normal == layer else ()


def sites_of(name: str) -> tuple[str, ...]:
    """The sites of a ``gp_network``'s last layer."""
    return tuple(f"{name}.{site}" for site in LastLayerPrior.sites)


def last_layers(trace) -> dict:
    """The number of white parameters of each ``gp_network``'s last layer, by name, in the order of the program."""
    return {name: site["last_layer_size"] for name, site in trace.items() if "last_layer_size" in site}


class Dependences(NamedTuple):
    """How the density of a model depends on sites with normal priors.

    Attributes:
        names: these sites.
        program: the program of the observations' means as a function of the sites.
        scales: the sites on which standard deviations or values of observations depend.
        priors: by latent site, on which sites the parameters of its prior depend.
    """

    names: list[str]
    program: ClosedJaxpr
    scales: set
    priors: dict[str, set]

    def why_not(self, block: Iterable[str]) -> str | None:
        """Why the means are not affine in the block, or what else depends on it; None if neither is the case."""
        block = set(block)
        given = [AFFINE if name in block else CONSTANT for name in self.names]
        if max(kinds(self.program, given)) > AFFINE:
            return "the mean of an observation is not affine in a function"
        if self.scales & block or any(sites & block for sites in self.priors.values()):
            return "the scale of an observation, or the prior of another site, depends on a function"
        return None


def _dependences(potential, names) -> Dependences:
    values = {k: site["value"] for k, site in latent_sites(potential.trace).items()}
    inside = {k: values[k] for k in names}

    def parts(inside):
        trace = potential.run(values | inside)
        means, sds, observed = zip(*normal_observations(trace), strict=True)
        normals = {k: base_distribution(trace[k]["fn"]) for k in names}
        others = {k: s["fn"].log_prob(s["value"]) for k, s in latent_sites(trace).items() if k not in names}
        parameters = {k: (normal.loc, normal.scale) for k, normal in normals.items()}
        return means, {"": (sds, observed, log_constant(trace))} | others | parameters

    program, shapes = jax.make_jaxpr(parts, return_shape=True)(inside)

    def run(inside):
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves(inside)))

    other = sources(lambda inside: run(inside)[1], inside)
    means = jax.make_jaxpr(lambda inside: run(inside)[0])(inside)
    return Dependences(sorted(inside), means, other.pop(""), other)


def num_observations(trace) -> int:
    """The number of observed values, and of values under functional priors."""
    observed = observed_sites(trace, factors=True, weights=True).values()
    priors = [site["fn"] for site in active_functional_priors(trace).values()]
    num_values = sum(len(site.x) * (getattr(site.prior, "num_outputs", None) or 1) for site in priors)
    return sum(jnp.size(site["value"]) for site in observed) + num_values


def normal_observations(trace) -> list:
    """``(mean, sd, value)`` of each observed site, as vectors, and ``(r, 1, 0)`` of each functional prior.

    The density of a functional prior is that of standard normal residuals r times a constant (``log_constant``).
    """
    found: list[tuple] = []
    for site in active_functional_priors(trace).values():
        r = site["fn"].residuals()[0].astype(float)
        found.append((r, jnp.ones_like(r), jnp.zeros_like(r)))
    for site in observed_sites(trace, factors=True, weights=True).values():
        normal = base_distribution(site["fn"])
        shape = jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
        parts = (normal.loc, normal.scale, site["value"])
        found.append(tuple(jnp.ravel(jnp.broadcast_to(part, shape)).astype(float) for part in parts))
    return found


def log_constant(trace) -> jax.Array:
    """The logarithm of the constants by which functional priors differ from the density of their residuals."""
    pairs = [site["fn"].residuals() for site in active_functional_priors(trace).values()]
    return sum((c + 0.5 * math.log(2 * math.pi) * r.size for r, c in pairs), start=jnp.zeros(()))


def _is_normal(distribution) -> bool:
    return type(base_distribution(distribution)) is dist.Normal and not is_masked(distribution)


def _is_plain_normal(site) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and _is_normal(site["fn"]) and site["scale"] is None
