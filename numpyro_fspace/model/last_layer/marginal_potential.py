r"""The potential of a model whose last layers are integrated out exactly under a Gaussian likelihood.

Given all other sites v, let the observations be normal with means μ + J c, affine in the white parameters c of the last
layers, and with standard deviations s that do not depend on c. Gaussian functional priors count as observations: their
density is that of residuals which are affine in c and have standard deviation 1. Then

.. math:: \log p(y \mid v) = \log N(y; \mu, J J^\top + \mathrm{diag}(s^2)), \qquad
          c \mid y, v \sim N(P J^\top r / s^2, P), \qquad P = (I + J^\top \mathrm{diag}(s^{-2}) J)^{-1},

with r = y - μ. The sampler moves v alone, with the potential U(v) = -log p(y | v) - log p(v), and c is drawn exactly
for each draw of v that is kept. With few observations c are the sites of the last layers, else parameters of their
distribution given v (``LastLayerPrior``), from which the sites are drawn.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from numpyro_fspace.model.handlers import (
    fresh_draws,
    function_hook,
    given_last_layers,
    given_standardized,
    without_data,
)
from numpyro_fspace.model.last_layer.integrable import (
    last_layers,
    log_constant,
    normal_observations,
    num_observations,
    sites_of,
)
from numpyro_fspace.model.last_layer.marginal_likelihood import draw_parameters, log_marginal
from numpyro_fspace.model.potential import ModelPotential


class MarginalPotential(ModelPotential):
    """The potential of the remaining sites when last layers are integrated out, those of ``block`` (``find_block``)."""

    def __call__(self, z, key):
        """``(U(z), 0)``. U is known exactly, whatever the key is, and is integrated over the functional priors."""
        linear, constant = self._linear(z)
        return self.prior_potential(z) - log_marginal(*linear) - constant, jnp.zeros(())

    def prior_potential(self, z):
        """-log p(z), without the likelihood, functional priors and the sites that are integrated out."""
        model = self._given(jnp.zeros(self.size), without_data(fresh_draws(self.model, self._key_scale)))
        with function_hook(density=False):
            return potential_energy(handlers.block(model, hide=self._whitened), self.args, self.kwargs, z)

    def data_potential(self, z, key, model=None):
        """U(z), which has all data, whatever ``model`` is; there are no functional priors."""
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
        (jacobian, residual, sd), _ = self._linear(z)
        model = self._given(draw_parameters(jacobian, residual, sd, key_white))
        trace = self.run(self._values(z), model)
        values = {k: trace[k]["value"] for k in self._whitened}
        for i, (name, (distribution, part)) in enumerate(model.given.items()):
            found = distribution.latents(part, jax.random.fold_in(key_rest, i))
            values |= {f"{name}.{site}": value for site, value in found.items()}
        return z | values

    @functools.cached_property
    def has_few_observations(self) -> bool:
        """Whether the covariance of the observations is cheaper to factorize than that of the last layers' weights.

        The white parameters c are then the R numbers of the sites. Otherwise those of ``gp_network`` layers are W in
        place of R. The estimated costs are 2 (R + N) N², for one factorization and the products with it, and
        (R + 2W + N) W², for three factorizations.
        """
        num_sites = self._num_numbers(self.block)
        num_weights = sum(self._gp_layers.values()) + self._num_numbers(self._other_sites)
        num = num_observations(self.trace)
        return 2 * (num_sites + num) * num**2 < (num_sites + 2 * num_weights + num) * num_weights**2

    @property
    def size(self) -> int:
        """The number of white parameters of the last layers that are integrated out."""
        return self._num_numbers(self._whitened) + sum(self._computed.values())

    @property
    def _gp_layers(self) -> dict[str, int]:
        """The numbers of weights of the ``gp_network`` layers in the block, by name, in the order of the program."""
        return {k: size for k, size in last_layers(self.trace).items() if set(sites_of(k)) <= set(self.block)}

    @property
    def _other_sites(self) -> list[str]:
        """The sites of the block that are the weights of other networks."""
        of_gp = {site for name in self._gp_layers for site in sites_of(name)}
        return [site for site in self.block if site not in of_gp]

    @property
    def _computed(self) -> dict[str, int]:
        """The ``gp_network`` layers that are computed from white parameters directly, and how many these are."""
        return {} if self.has_few_observations else self._gp_layers

    @property
    def _whitened(self) -> list[str]:
        """The sites of the block that have the values m + s c, under their prior N(m, s²)."""
        return list(self.block) if self.has_few_observations else self._other_sites

    def _num_numbers(self, sites) -> int:
        return sum(jnp.size(self.trace[site]["value"]) for site in sites)

    def _given(self, white, model=None):
        """The model with the last layers of the block computed from white parameters."""
        num = sum(self._computed.values())
        zeros = {site: jnp.zeros(jnp.shape(self.trace[site]["value"])) for site in self._whitened}
        parts = ravel_pytree(zeros)[1](white[num:]) if zeros else {}
        model = given_standardized(self.model if model is None else model, parts)
        return given_last_layers(model, white[:num], self._computed)

    def _values(self, z):
        """Constrained values of the remaining sites."""
        return {k: biject_to(self.trace[k]["fn"].support)(z[k]) for k in self.latents}

    def _linear(self, z):
        """``(J [N, R], r [N], s [N])`` of the observations as a linear model, and the ``log_constant`` of priors."""
        values = self._values(z)

        def means(white):
            trace = self.run(values, self._given(white))
            normals = normal_observations(trace)
            loc, *others = (jnp.concatenate(parts) for parts in zip(*normals, strict=True))
            return loc, (*others, log_constant(trace))

        zeros = jnp.zeros(self.size)
        loc, slope, (sd, y, constant) = jax.linearize(means, zeros, has_aux=True)
        if self.has_few_observations:
            (jacobian,) = jax.vmap(jax.linear_transpose(slope, zeros))(jnp.eye(len(loc)))
        else:
            jacobian = jax.vmap(slope, out_axes=1)(jnp.eye(self.size))
        return (jacobian, y - loc, sd), constant


def _key_of(z):
    """A key computed from the bits of all numbers in ``z``."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(z)]
    bits = jax.lax.bitcast_convert_type(jnp.concatenate(leaves), jnp.uint32)
    odd = 2 * jnp.arange(len(bits), dtype=jnp.uint32) + 1
    mixed = (bits ^ (bits >> 15)) * (odd * jnp.uint32(2654435761))
    return jax.random.key(jnp.sum(mixed, dtype=jnp.uint32))
