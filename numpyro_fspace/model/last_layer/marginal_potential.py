r"""The potential of a model whose last layers are integrated out exactly under a Gaussian likelihood.

Given all other sites v, let the observations be normal with means μ + J c, affine in the white parameters c of the last
layers, and with standard deviations s that do not depend on c. Then

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
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from numpyro_fspace.model.handlers import fresh_draws, given_last_layers, without_data
from numpyro_fspace.model.last_layer.integrable import last_layers, normal_observations, num_observations, sites_of
from numpyro_fspace.model.last_layer.marginal_likelihood import draw_parameters, log_marginal
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.run_model import run_model


class MarginalPotential(ModelPotential):
    """The potential of the remaining sites when last layers are integrated out, those of ``block`` (``find_block``)."""

    def __call__(self, z, key):
        """``(U(z), 0)``. U is known exactly, whatever the key is."""
        value = log_marginal(*self._linear(z))
        return self.prior_potential(z) - value, jnp.zeros(())

    def prior_potential(self, z):
        """-log p(z), without the likelihood and the sites that are integrated out."""
        model = without_data(fresh_draws(self.model, self._key_scale))
        return potential_energy(self._given(jnp.zeros(self.size), model), self.args, self.kwargs, z)

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
        jacobian, residual, sd = self._linear(z)
        white = draw_parameters(jacobian, residual, sd, key_white)
        if self.has_few_observations:
            return z | self._sites(white)
        model = self._given(white)
        values: dict = {}
        run_model(model, self.args, self.kwargs, key=self._key_fresh, substitute=self._values(z))
        for i, (name, (distribution, part)) in enumerate(model.given.items()):
            found = distribution.latents(part, jax.random.fold_in(key_rest, i))
            values |= {f"{name}.{site}": value for site, value in found.items()}
        return z | values

    @functools.cached_property
    def has_few_observations(self) -> bool:
        """Whether the covariance of the observations is cheaper to factorize than that of the last layers' weights.

        The white parameters c are then the R values of the last layers' sites. Otherwise there is one for each of the
        W weights. The estimated costs are 2 (R + N) N², for one factorization and the products with it, and
        (R + 2W + N) W², for three factorizations.
        """
        num_weights, num_sites = sum(self._sizes.values()), self._num_sites
        num = num_observations(self.trace)
        return 2 * (num_sites + num) * num**2 < (num_sites + 2 * num_weights + num) * num_weights**2

    @property
    def _num_sites(self) -> int:
        return sum(jnp.size(self.trace[site]["value"]) for site in self.block)

    @property
    def size(self) -> int:
        """R, the number of white parameters of the last layers that are integrated out."""
        return self._num_sites if self.has_few_observations else sum(self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int]:
        """The numbers of weights of the last layers that are integrated out, in the order of the program."""
        return {k: size for k, size in last_layers(self.trace).items() if set(sites_of(k)) <= set(self.block)}

    def _given(self, white, model=None):
        """The model with these last layers computed from white parameters."""
        return given_last_layers(self.model if model is None else model, white, self._sizes)

    def _values(self, z):
        """Constrained values of the remaining sites."""
        return {k: biject_to(self.trace[k]["fn"].support)(z[k]) for k in self.latents}

    def _sites(self, white) -> dict:
        """The sites of the last layers whose values are these white parameters."""
        shapes = {site: jnp.shape(self.trace[site]["value"]) for site in self.block}
        return ravel_pytree({site: jnp.zeros(shape) for site, shape in shapes.items()})[1](white)

    def _linear(self, z):
        """``(J [N, R], r [N], s [N])`` of the observations as a linear model of the white parameters."""
        values = self._values(z)

        def means(white):
            model, sites = (self.model, self._sites(white)) if self.has_few_observations else (self._given(white), {})
            trace = run_model(model, self.args, self.kwargs, key=self._key_fresh, substitute=values | sites)
            normals = normal_observations(trace)
            loc, *others = (jnp.concatenate(parts) for parts in zip(*normals, strict=True))
            return loc, others

        zeros = jnp.zeros(self.size)
        loc, slope, (sd, y) = jax.linearize(means, zeros, has_aux=True)
        if self.has_few_observations:
            (jacobian,) = jax.vmap(jax.linear_transpose(slope, zeros))(jnp.eye(len(loc)))
        else:
            jacobian = jax.vmap(slope, out_axes=1)(jnp.eye(self.size))
        return jacobian, y - loc, sd


def _key_of(z):
    """A key computed from the bits of all numbers in ``z``."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(z)]
    bits = jax.lax.bitcast_convert_type(jnp.concatenate(leaves), jnp.uint32)
    odd = 2 * jnp.arange(len(bits), dtype=jnp.uint32) + 1
    mixed = (bits ^ (bits >> 15)) * (odd * jnp.uint32(2654435761))
    return jax.random.key(jnp.sum(mixed, dtype=jnp.uint32))
