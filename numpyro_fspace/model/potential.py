"""The potential U(z, key) of a NumPyro model as a function of its unconstrained parameters.

``ModelPotential`` traces the model once for its structure and then evaluates
U(z) = -log p(y | z) - log p(z) - Σ log P0(f(X_M)) with a minibatch and measurement points that are drawn anew for each
key. The likelihood of a plate with ``subsample_size=B`` is scaled by N/B; the functional prior is not.
"""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import constrain_fn, potential_energy

from numpyro_fspace.model.checks.sites import (
    check_observations,
    check_sites,
    check_unseeded,
    check_unsubstituted,
    warn_of_unknown,
)
from numpyro_fspace.model.data.arguments import with_rows
from numpyro_fspace.model.functional_priors import draw_points
from numpyro_fspace.model.handlers import fresh_draws, full_plates, function_hook, given_rows, without_data
from numpyro_fspace.model.initial_values import checked_starts, init_to_network
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import has_dynamic_support, prior_scale
from numpyro_fspace.model.sites import (
    active_functional_priors,
    is_functional_prior,
    latent_sites,
    observed_sites,
    subsampled_plates,
)
from numpyro_fspace.sgmcmc.preconditioners import Parameters

#: Number of rows (or size of a minibatch, if that is larger) that are evaluated together in passes over all data.
MAX_ROWS = 2048


class ModelPotential:
    """The potential of a NumPyro model, and the structure of the model.

    Args:
        model: a NumPyro model.
        args, kwargs: its arguments.
        key: for the initial values.
        init_strategy: a NumPyro init strategy; by default networks start from their own initializer.
        is_known: whether the model was checked before. Its initial run is then made when the trace is first needed,
            which must not happen in a loop or branch of a compiled program.
        block: names of the sites that are integrated out (``MarginalPotential``).

    Attributes:
        trace: the trace of the initial run.
        latents: names of the latent sites without ``block``, all continuous.
        has_own_noise: whether the model itself draws random numbers, over which no full gradient averages.
        has_random_points: whether measurement points are drawn for each key.
        is_random: whether U depends on the key, because of minibatches, random points, or random numbers of the model.

    Raises:
        ValueError: the model is seeded, has discrete or no latent sites, ``param`` sites, no observation, or local
            latent variables in a subsampled plate.
    """

    def __init__(self, model, args=(), kwargs=None, *, key, init_strategy=init_to_network, is_known=False, block=()):
        self.model, self.args, self.kwargs, self.block = model, with_rows(args), with_rows(kwargs or {}), block
        check_unseeded(model)
        self._key_init, self._key_fresh, self._key_scale = jax.random.split(key, 3)
        self._init_strategy = init_strategy
        if not is_known:
            _ = self._first  # raises the errors

    @functools.cached_property
    def _first(self):
        """``(trace, has_own_noise, whether points are random)`` of the initial run, whose errors it raises."""
        trace, fresh = self._initial_run()
        check_sites(trace)
        check_unsubstituted(self.model, list(latent_sites(trace)))
        warn_of_unknown(self.model, trace, self._init_strategy)
        return trace, fresh.num_own_keys > 0, fresh.has_random_points

    def run(self, values, model=None) -> dict:
        """The trace of a run with these values of latent sites, in which functional priors have their density."""
        model = fresh_draws(self.model if model is None else model, self._key_fresh)
        settings = {"key": self._key_init, "substitute": values, "full_plates": False, "density": True}
        return run_model(model, self.args, self.kwargs, **settings)

    def _initial_run(self):
        """``(trace, handler)`` of the model run with initial values."""
        fresh = fresh_draws(self.model, self._key_fresh)
        start = checked_starts(self._init_strategy)
        settings = {"key": self._key_init, "substitute": start, "full_plates": False, "density": True}
        return run_model(fresh, self.args, self.kwargs, **settings), fresh

    @property
    def trace(self) -> dict:
        return self._first[0]

    @property
    def has_own_noise(self) -> bool:
        return self._first[1]

    @property
    def has_random_points(self) -> bool:
        return self._first[2]

    @property
    def is_random(self) -> bool:
        return self.has_own_noise or self.batches() > 1.0 or self.has_random_points

    @property
    def latents(self) -> list[str]:
        return [k for k in latent_sites(self.trace) if k not in self.block]

    @property
    def is_plain(self) -> bool:
        """Whether the model has neither networks nor functional priors, and U does not depend on the key."""
        has_network = any("fspace" in self.trace[k]["infer"] for k in self.latents)
        return not (has_network or self.functional_priors or self.is_random)

    def parameters(self) -> Parameters:
        """What a preconditioner may know of the unconstrained parameters, in the order of ``ravel_pytree``."""
        sites, start = {}, 0
        for name, value in sorted(self.init_params().items()):
            sites[name] = (start, start + value.size)
            start += value.size
        values = tuple(f"{name}.values" for name in self.gp_networks if f"{name}.values" in sites)
        return Parameters(start, self.is_plain, sites, values)

    @property
    def functional_priors(self) -> dict:
        """The distributions of the ``functional_prior`` sites, by name."""
        return {k: s["fn"] for k, s in self.trace.items() if is_functional_prior(s)}

    @property
    def gp_networks(self) -> list[str]:
        """The names of the ``gp_network`` functions."""
        return [k for k, site in self.trace.items() if site.get("prior") is not None]

    def check_data(self):
        """Raise a ValueError for observations or measurement points at which the density cannot be computed."""
        check_observations(self.trace)
        for site in active_functional_priors(self.trace).values():
            distribution = site["fn"]
            prior, x = distribution.prior, distribution.x
            if isinstance(x, jax.core.Tracer):  # random points are checked by one draw
                with jax.ensure_compile_time_eval():
                    _, prior, x, *_ = draw_points(prior, distribution.points, jax.random.key(0))
            if hasattr(prior, "check") and not isinstance(x, jax.core.Tracer):
                prior.check(x)
            if distribution.has_density:
                site = copy.copy(distribution)  # because a site keeps its log_factor, which is abstract here
                jax.eval_shape(lambda site=site: site.log_factor)  # raises the errors of the prior's log_prob

    def init_params(self) -> dict:
        """Unconstrained initial values of the latent sites; 0 in place of infinity, at the boundary of a support."""
        sites = {k: self.trace[k] for k in self.latents}
        free = {k: biject_to(s["fn"].support).inv(s["value"]) for k, s in sites.items()}
        return {k: jnp.where(jnp.isinf(v), 0.0, v) for k, v in free.items()}

    def scale(self) -> dict:
        """Prior standard deviation of every unconstrained parameter, shaped like ``init_params``.

        The weights of networks have known scales. For other sites it is the standard deviation of a normal prior, or
        the interquartile range of 200 prior draws divided by 1.349.
        """
        keys = jax.random.split(self._key_scale, len(self.latents))
        values = self.init_params()
        scales = {k: prior_scale(self.trace[k], key) for k, key in zip(self.latents, keys, strict=True)}
        return {k: jnp.broadcast_to(scales[k], v.shape).astype(v.dtype) for k, v in values.items()}

    def __call__(self, z, key):
        """``(U(z), log functional prior)`` with the randomness of ``key``."""
        model = fresh_draws(self.model, key)
        return potential_energy(model, self.args, self.kwargs, z), model.log_functional_prior

    def not_finite(self, z, key) -> list[str]:
        """The sites whose log density is not finite at ``z`` for at least one of ten keys."""

        @jax.jit
        def finite(key):
            values = constrain_fn(fresh_draws(self.model, key), self.args, self.kwargs, z)
            settings = {"substitute": values, "full_plates": False, "density": True}
            trace = run_model(fresh_draws(self.model, key), self.args, self.kwargs, **settings)
            sites = {k: s for k, s in trace.items() if s["type"] == "sample"}
            return {k: jnp.all(jnp.isfinite(s["fn"].log_prob(s["value"]))) for k, s in sites.items()}

        with np.errstate(over="ignore"):  # constants of the program may overflow when they are cast
            found = [finite(key) for key in jax.random.split(key, 10)]
        return [k for k in found[0] if not all(one[k] for one in found)]

    def data_potential(self, z, key, model=None):
        """U(z) without the functional priors, with the same minibatch as ``self(z, key)``."""
        model = fresh_draws(self.model if model is None else model, key)
        with function_hook(density=False):
            return potential_energy(model, self.args, self.kwargs, z)

    def prior_potential(self, z):
        """-log p(z), without the likelihood and functional priors."""
        model = without_data(fresh_draws(self.model, self._key_scale))
        with function_hook(density=False):
            return potential_energy(model, self.args, self.kwargs, z)

    def data_gradient(self, z, key) -> dict:
        """Gradient of ``data_potential`` on all data."""
        return self._on_all_data(jax.grad(self.data_potential), z, key)

    def log_likelihood(self, z, key):
        """log p(y | z) of all data."""
        return self.prior_potential(z) - self._on_all_data(self.data_potential, z, key)

    def num_observed(self):
        """Number of observed values in all data; infinite if the model has a ``factor``, whose data are unknown."""
        sites = observed_sites(self._initial_run()[0], factors=True).values()  # in the caller's own program
        if not all(jnp.size(s["value"]) for s in sites):
            return float("inf")
        scales = [1.0 if s["scale"] is None else jnp.max(s["scale"]) for s in sites]
        return sum(jnp.size(s["value"]) * scale for s, scale in zip(sites, scales, strict=True))

    def _on_all_data(self, estimate, z, key):
        """``estimate(z, key, model)`` (``data_potential`` or its gradient) on all data, ``MAX_ROWS`` rows at a time."""
        minibatches = list(subsampled_plates(self.trace).values())
        if len(minibatches) != 1:
            return estimate(z, key, full_plates(self.model))
        ((size, batch),) = minibatches
        num_rows = min(size, max(batch, MAX_ROWS))
        num_whole = size // num_rows

        def part(rows):
            """The weighted estimate from these rows; the sum over all parts is the estimate on all data."""
            return jax.tree.map(lambda a: len(rows) / size * a, estimate(z, key, given_rows(self.model, rows)))

        def add(total, rows):
            return jax.tree.map(jnp.add, total, part(rows)), None

        whole = jnp.arange(num_whole * num_rows).reshape(num_whole, num_rows)
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(part, whole[0]))
        total, _ = jax.lax.scan(add, zero, whole)
        rest = jnp.arange(num_whole * num_rows, size)
        return add(total, rest)[0] if rest.size else total

    def batches(self) -> float:
        """N/B, the number of minibatches in the data (the largest of all plates); 1 without minibatches."""
        return max((size / batch for size, batch in subsampled_plates(self.trace).values()), default=1.0)

    def constrain_fn(self):
        """The function from unconstrained ``z`` to the values of latent and deterministic sites.

        Deterministic sites inside a subsampled plate differ from minibatch to minibatch and are left out.
        """
        small = subsampled_plates(self.trace)
        deterministic = {k: s["cond_indep_stack"] for k, s in self.trace.items() if s["type"] == "deterministic"}
        kept = [k for k, plates in deterministic.items() if not any(plate.name in small for plate in plates)]
        sites = latent_sites(self.trace)
        if not kept and not any(has_dynamic_support(site) for site in sites.values()):
            constrained = {k: biject_to(site["fn"].support) for k, site in sites.items()}
            return lambda z: {k: constrained[k](v) for k, v in z.items()}

        def constrain(z):
            # Sites that draw random numbers themselves use a fixed key.
            model = handlers.seed(full_plates(self.model), jax.random.key(0))
            values = constrain_fn(model, self.args, self.kwargs, z, return_deterministic=True)
            return {k: values[k] for k in (*z, *kept)}

        return constrain
