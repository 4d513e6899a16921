r"""The potential of a model whose last layers are integrated out exactly under a Gaussian likelihood.

Given all other sites v, let the observations be normal with means μ + J c, affine in the white parameters c of the last
layers, and with standard deviations s that do not depend on c. Then

.. math:: \log p(y \mid v) = \log N(y; \mu, J J^\top + \mathrm{diag}(s^2)), \qquad
          c \mid y, v \sim N(P J^\top r / s^2, P), \qquad P = (I + J^\top \mathrm{diag}(s^{-2}) J)^{-1},

with r = y - μ. The sampler moves v alone, with the potential U(v) = -log p(y | v) - log p(v), and c is drawn exactly
for each draw of v that is kept.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.util import is_identically_one
from numpyro.infer.util import potential_energy

from numpyro_fspace._xla import matmul
from numpyro_fspace.model.checks.sites import check_observations
from numpyro_fspace.model.handlers import fresh_draws, given_last_layers, without_data
from numpyro_fspace.model.last_layer.linear_gaussian import log_marginal
from numpyro_fspace.model.last_layer.prior import LastLayerPrior
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.programs.analysis import depends_on
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import has_dynamic_support
from numpyro_fspace.model.sites import (
    base_distribution,
    is_functional_prior,
    is_masked,
    latent_sites,
    observed_sites,
)

__all__ = ["MarginalPotential", "find_block"]

#: Maximum number of white parameters of all last layers together, and maximum number of entries of J.
MAX_PARAMETERS, MAX_ENTRIES = 512, 2**22


class MarginalPotential(ModelPotential):
    """The potential of the remaining sites when last layers are integrated out, those of ``block`` (``find_block``)."""

    def __call__(self, z, key):
        del key  # U is known exactly
        value, *_ = log_marginal(*self._linear(z))
        return self.prior_potential(z) - value, jnp.zeros(())

    def prior_potential(self, z):
        """-log p(z), without the likelihood and the sites that are integrated out."""
        model = without_data(fresh_draws(self.model, self._key_scale))
        return potential_energy(self._given(jnp.zeros(self.size), model), self.args, self.kwargs, z)

    def data_potential(self, z, key, model=None):
        """U(z); a model with a marginal potential has no functional priors."""
        del model  # U includes all data
        return self(z, key)[0]

    def not_finite(self, z, key) -> list[str]:
        return super().not_finite(self.completed(z), key)

    def constrain_fn(self):
        constrain = super().constrain_fn()
        return lambda z: constrain(self.completed(z))

    def completed(self, z) -> dict:
        """``z`` with an exact draw of the sites that are integrated out.

        The key of the draw is computed from the bits of ``z``, so that a state always has the same draw.
        """
        key_white, key_rest = jax.random.split(_key_of(z))
        _, mean, inverse = log_marginal(*self._linear(z))
        white = mean + matmul(inverse, jax.random.normal(key_white, mean.shape, mean.dtype))
        model = self._given(white)
        values: dict = {}
        run_model(model, self.args, self.kwargs, key=self._key_fresh, substitute=self._values(z))
        for i, (name, (distribution, part)) in enumerate(model.given.items()):
            found = distribution.latents(part, jax.random.fold_in(key_rest, i))
            values |= {f"{name}.{site}": value for site, value in found.items()}
        return z | values

    @property
    def size(self) -> int:
        """R, the number of white parameters of the last layers that are integrated out."""
        sizes = _last_layers(self.trace)
        return sum(sizes[name] for name in self._names)

    @property
    def _names(self) -> list[str]:
        """The networks whose last layers are integrated out, in the order of the program."""
        return [name for name in _last_layers(self.trace) if set(_sites(name)) <= set(self.block)]

    def _given(self, white, model=None):
        """The model with these last layers computed from white parameters."""
        return given_last_layers(self.model if model is None else model, white, self._names)

    def _values(self, z):
        """Constrained values of the remaining sites."""
        return {k: biject_to(self.trace[k]["fn"].support)(z[k]) for k in self.latents}

    def _linear(self, z):
        """``(J [N, R], r [N], s [N])`` of the observations as a linear model of the white parameters."""
        values = self._values(z)

        def means(white):
            model = self._given(white)
            normals = _normals(run_model(model, self.args, self.kwargs, key=self._key_fresh, substitute=values))
            loc, *others = (jnp.concatenate(parts) for parts in zip(*normals, strict=True))
            return loc, others

        loc, slope, (sd, y) = jax.linearize(means, jnp.zeros(self.size), has_aux=True)
        jacobian = jax.vmap(slope, out_axes=1)(jnp.eye(self.size))
        return jacobian, y - loc, sd


def find_block(potential: ModelPotential, least: int = 1) -> tuple[tuple[str, ...], str | None]:
    """The sites of the last layers that can be integrated out together, and if there are none, why.

    These are all last layers where that is possible. Otherwise the networks are taken in the order of the program, each
    if the observations stay affine in it and in those before it: of a mean and a noise that depends on the inputs it is
    the mean. At least ``least`` numbers must remain to be sampled.
    """
    trace = potential.trace
    sizes = _last_layers(trace)
    why = _why_no_last_layer(potential, sizes)
    if why is not None:
        return (), why
    num = sum(jnp.size(site["value"]) for site in observed_sites(trace, factors=True, weights=True).values())

    def why_not(names):
        block = tuple(site for name in names for site in _sites(name))
        num_left = sum(_num_parameters(trace[k]) for k in potential.latents if k not in block)
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
    return tuple(site for name in names for site in _sites(name)), None if names else why


def _num_parameters(site) -> int:
    """The number of unconstrained values of a site."""
    return math.prod(biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"])))


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


def _sites(name: str) -> tuple[str, ...]:
    """The sites of a network's last layer."""
    return tuple(f"{name}.{site}" for site in LastLayerPrior.sites)


def _last_layers(trace) -> dict:
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
            return [loc for loc, *_ in _normals(run(inside))]

        return jax.jvp(means, (inside,), (jax.tree.map(jnp.ones_like, inside),))[1]

    def others(inside):
        trace = run(inside)
        rest = [s["fn"].log_prob(s["value"]) for k, s in latent_sites(trace).items() if k not in block]
        return rest, [sd for _, sd, _ in _normals(trace)], [y for *_, y in _normals(trace)]

    if depends_on(slope, inside):
        return "the mean of an observation is not affine in a function"
    if depends_on(others, inside):
        return "the scale of an observation, or the prior of another site, depends on a function"
    return None


def _normals(trace) -> list:
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


def _key_of(z):
    """A key computed from the bits of all numbers in ``z``."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(z)]
    bits = jax.lax.bitcast_convert_type(jnp.concatenate(leaves), jnp.uint32)
    odd = 2 * jnp.arange(len(bits), dtype=jnp.uint32) + 1
    mixed = (bits ^ (bits >> 15)) * (odd * jnp.uint32(2654435761))
    return jax.random.key(jnp.sum(mixed, dtype=jnp.uint32))
