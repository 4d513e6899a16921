"""Expected log likelihoods of ``FunctionalELBO`` (GFSVI and others): Gaussian in closed form, others from draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import get_opaque_trace_state
from numpyro.distributions.util import scale_and_mask, sum_rightmost

from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.sites import base_distribution, counted, observed_sites
from numpyro_fspace.variational.pushforward import as_normal

#: Largest number of entries of a Jacobian at a minibatch (values of the function times weights). If it is exceeded,
#: variances in the Gaussian likelihood are estimated without bias from ``NUM_DRAWS`` draws of the linearized network.
MAX_ENTRIES, NUM_DRAWS = 2**21, 8


def at_draw(guided, key):
    """log p(y | f_L, θ), or log p(y | f, θ), at a draw of the guide."""
    values = guided.constrain(guided.draw(key))
    return sum(_log_prob(site) for site in _observed(guided.trace(guided.drawn_model, values)).values())


def integrated(guided, key):
    """E[log p(y | f_L, θ)] over the function, at a draw of θ; None unless the conditions below hold.

    The mean of every observation must be an affine function A f(x) + b of one call of one function. The weights of the
    function must enter nowhere else and must be independent of θ under the guide. The mean is then normal with
    covariance (A root)(A root)ᵀ. Calls of the function that no observation depends on do not count.
    """
    if len(guided.functions) > 1 or (guided.rest and not isinstance(guided.normal, dist.Normal)):
        return None
    try:
        return _integrated(guided, key)
    except _CalledInProgram:
        return None


class _CalledInProgram(Exception):
    """The model calls the function within a ``jax.jit``, ``vmap`` or the like of its own."""


def _integrated(guided, key):
    (name,) = guided.functions
    draw = guided.constrain(guided.draw(key))
    values = {k: draw[k] if k in guided.rest else v for k, v in guided.center.items()}
    has_other_network = not {*guided.weights}.isdisjoint(guided.rest)
    model = guided.drawn_model if has_other_network else guided.model

    def observed(replaced=None):
        """Observed sites, and calls (x, f(x; m)), when call number i returns ``replaced(i, f(x; m))``."""
        calls: list = []
        outside = get_opaque_trace_state(convention="flax")

        def replace(_, fn, __):
            def recorded(x):
                if get_opaque_trace_state(convention="flax") != outside:
                    raise _CalledInProgram
                value = fn(x)
                calls.append((x, value))
                return value if replaced is None else replaced(len(calls) - 1, value)

            return recorded

        return _observed(guided.trace(model, values, replace)), calls

    sites, calls = observed()
    if any(_normal(site) is None for site in sites.values()):
        return None

    def moments_if(replaced):
        normals = [_normal(site) for site in observed(replaced)[0].values()]
        return [normal.loc for normal in normals], [normal.scale for normal in normals]

    outputs = {str(i): value for i, (_, value) in enumerate(calls)}
    kept = depends_on(lambda given: moments_if(lambda i, _: given[str(i)]), outputs)
    if len(kept) != 1:
        return None
    place = int(*kept)
    x, value = calls[place]
    start = jnp.zeros_like(value)

    def moments(shift):
        return moments_if(lambda i, value: value + shift if i == place else value)

    def tangent(step):
        return lambda shift: jax.jvp(lambda s: moments(s)[0], (shift,), (step,))[1]

    def with_fixed_function(weights):
        """Moments of the observations if the weights change and the function's values do not."""
        left = iter(calls)

        def hold(_, __, ___):
            return lambda x: next(left)[1]

        fixed = _observed(guided.trace(model, values | weights, hold)).values()
        return [(normal.loc, normal.scale) for normal in map(_normal, fixed)]

    if depends_on(with_fixed_function, {name: guided.center[name] for name in guided.used}):
        return None
    if depends_on(lambda v: moments(v["shift"])[1], {"shift": start}):
        return None
    if depends_on(lambda v: tangent(jnp.ones_like(start))(v["shift"]), {"shift": start}):
        return None
    root = _root(guided, name, x, value, jax.random.fold_in(key, 1))
    roots = jax.vmap(lambda step: tangent(step)(start), in_axes=-1, out_axes=-1)(root)
    total = 0.0
    for site, loc_root in zip(sites.values(), roots, strict=True):
        shape = jnp.broadcast_shapes(site["fn"].shape(), jnp.shape(site["value"]))  # rows may be measured repeatedly
        loss = 0.5 * jnp.broadcast_to(jnp.sum(loc_root**2, -1) / _normal(site).scale ** 2, shape)
        loss = sum_rightmost(jnp.where(counted(site), loss, 0.0), site["fn"].event_dim)
        total = total + _log_prob(site) - scale_and_mask(loss, site["scale"]).sum()
    return total


def _root(guided, name, x, value, key):
    """A [*value.shape, R] with A Aᵀ equal to the covariance of the function's values at x, or equal in the mean."""
    if value.size * guided.loc.size <= MAX_ENTRIES:
        root = guided.linearized_pushforward(name).root(x)
        return root.reshape(*value.shape, root.shape[-1])

    def at(flat):
        return guided.evaluate(name, guided.constrain(flat), x)

    steps = jax.vmap(guided.draw)(jax.random.split(key, NUM_DRAWS)) - guided.loc
    # lax.map instead of vmap: on a CPU the derivative of a batch of slopes takes several times as long.
    moved = jnp.moveaxis(jax.lax.map(jax.linearize(at, guided.loc)[1], steps), 0, -1)
    return moved.reshape(*value.shape, NUM_DRAWS) / NUM_DRAWS**0.5


def _normal(site):
    """The univariate normal distribution of a site, without its mask; None for any other distribution."""
    distribution = as_normal(base_distribution(site["fn"]))
    return distribution if isinstance(distribution, dist.Normal) else None


def _observed(trace) -> dict:
    return observed_sites(trace, factors=True, weights=True)


def _log_prob(site):
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"]).sum()
