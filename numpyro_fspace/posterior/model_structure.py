"""The structure of a model: which functions reach the data, through which others, and which sites are weights.

It is read off the model's program, of which nothing is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.programs.jaxpr_analysis import depends_on, sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import base_distribution, is_functional_prior, module_weights, parameters_of


class Structure(NamedTuple):
    """What can be read off a model's program.

    Attributes:
        trace: sites of the model. Nothing was computed: do not read their values.
        direct: names of the functions whose outputs enter a likelihood, and not only through another function.
        composed: names of those whose inputs depend on weights.
        weights: names of the sites that are weights.
        by_hand: those of them that are taken for weights because a function is made of them, and no network declares
            them.
    """

    trace: dict
    direct: set
    composed: set
    weights: set
    by_hand: set

    @property
    def priors(self) -> list:
        return [k for k, site in self.trace.items() if is_functional_prior(site)]

    @property
    def networks(self) -> list:
        return [k for k, site in self.trace.items() if site["type"] == "network"]

    @property
    def monitored(self) -> list:
        """Functions under a functional prior; without one, the only network that enters the likelihood directly."""
        alone = [k for k in self.networks if k in self.direct]
        return self.priors or (alone if len(alone) == 1 and alone[0] not in self.composed else [])

    @property
    def needs_likelihood(self) -> bool:
        """Whether some network enters the likelihood directly and is not monitored itself.

        Networks of NumPyro's own modules cannot be monitored.
        """
        is_unseen = bool(module_weights(self.trace)) and not self.priors
        return is_unseen or bool((self.direct & set(self.networks)) - set(self.monitored))


def structure(model, draw, args, kwargs) -> Structure:
    """The structure of a model at a draw of its latent sites."""
    draw = jax.device_put(draw)
    trace: dict = {}
    shapes: dict = {}

    def run(draw, replace):
        settings = {"hook": replace, "networks": True, "full_plates": False}
        return run_model(model, args, kwargs, key=jax.random.key(0), substitute=draw, **settings)

    def calls(draw):
        """Input and output of each function, and its first call."""
        seen: dict = {}
        shapes.clear()

        def watch(name, fn, _):
            def watched(x):
                out = fn(x)
                seen.setdefault(name, (x, out))
                shapes.setdefault(name, []).append(jax.tree.map(_shape_of, out))
                return out

            return watched

        trace.update(run(draw, watch))
        return seen

    def likelihoods(outputs):
        """Their parameters, where each function returns these values in place of its own."""
        left = {name: iter(values) for name, values in outputs.items()}
        return likelihood_parameters(run(draw, lambda name, fn, _: lambda x: next(left[name])), draw)

    def ends(draw):
        return {(name, part): value for name, pair in calls(draw).items() for part, value in enumerate(pair)}

    try:
        found = sources(ends, draw)
        names = [name for name in shapes if (name, 0) in found]
        inputs, outputs = ({name: found[name, part] for name in names} for part in (0, 1))
        direct = depends_on(likelihoods, dict(shapes)) if names else set()
    except jax.errors.UnexpectedTracerError:  # functions are called under a transformation of the model's own
        names, inputs, outputs, direct = [], {}, {}, {k for k, s in trace.items() if s["type"] == "network"}
    weights = {k for k in draw if k in trace and "fspace" in trace[k].get("infer", {})}
    weights |= draw.keys() & set(module_weights(trace))
    # Written by hand: the arrays that a function is made of, but for what the process of a gp_network depends on.
    networks = {k for k, site in trace.items() if site["type"] == "network"}
    declared = {k for name in networks & set(names) for k in outputs[name]} | weights
    others = {k for name in set(names) - networks for k in outputs[name] - inputs[name]}
    by_hand = {k for k in others - declared if np.size(draw[k]) > 1}
    weights |= by_hand
    composed = {name for name in names if inputs[name] & weights}
    return Structure(trace, direct, composed, weights, by_hand)


def _shape_of(value):
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


def likelihood_parameters(trace, draw) -> dict:
    """Floating-point parameters of the observations' distributions, by name; of their draws where no data are given.

    Those that are no attributes of the innermost distribution (gates, bounds and transforms of the distributions around
    it, parameters that NumPyro keeps in another form) are numbered.
    """
    found = {}
    for name, site in trace.items():
        if site["type"] != "sample" or is_functional_prior(site) or (name in draw and not site["is_observed"]):
            continue
        distribution = site["fn"]
        while hasattr(distribution, "base_dist"):
            distribution = distribution.base_dist
        values = {k: vars(distribution)[k] for k in distribution.arg_constraints if k in vars(distribution)}
        is_whole = (
            distribution is base_distribution(site["fn"]) and distribution.arg_constraints.keys() <= values.keys()
        )
        known = {id(value) for value in values.values()}
        others = {id(value): value for value in parameters_of(site["fn"]) if id(value) not in known}
        for key, value in (values | ({} if values and is_whole else dict(enumerate(others.values())))).items():
            if jnp.issubdtype(jnp.result_type(value), jnp.floating):
                found[f"{name}.{key}"] = jnp.asarray(value)
    return found
