"""``FunctionalELBO``: NumPyro's evidence lower bound with divergences between functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to, transforms
from numpyro.distributions.util import scale_and_mask, sum_rightmost
from numpyro.infer import ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation

from numpyro_fspace._checks import check_count
from numpyro_fspace.model._numpyro import flat_to_sites
from numpyro_fspace.model.arguments import with_rows
from numpyro_fspace.model.checks import check_observations
from numpyro_fspace.model.functions import depends_on
from numpyro_fspace.model.handlers import fresh_draws
from numpyro_fspace.model.linearized import function_of, linearize
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import base_transform
from numpyro_fspace.model.sites import active_functional_priors, observed_sites
from numpyro_fspace.variational.divergences import RegularizedKL
from numpyro_fspace.variational.pushforward import LinearisedLaw, SampledLaw, as_normal, entropy, mean_and_spread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FunctionalELBO"]


#: Largest Jacobian at a minibatch, values of the function times weights; beyond it the variances in the Gaussian
#: likelihood are estimated, without bias, by so many draws of the linearized network.
MAX_ENTRIES, NUM_STEPS = 2**21, 8


class FunctionalELBO(ELBO):
    r"""The evidence lower bound in function space, a loss for ``numpyro.infer.SVI``.

    .. math:: L(q) = \tfrac{N}{B} \sum_b E_q[\log p(y_b \mid f_L(x_b; w))] - \sum_j \text{scale}_j\, D_j(Q \,\|\, P_0)
              - \mathrm{KL}(q(\theta) \,\|\, p(\theta))

    f_L is the network linearized around the guide's mean m, so that w ~ q = N(m, S) makes it a Gaussian process
    Q = GP(f(·; m), J S Jᵀ). **The divergence takes the place of the weights' own prior**: for the latent values that a
    function under a ``functional_prior`` depends on, the prior that the model writes is left out, and D(Q‖P0) at the
    measurement points of the step stands for it. The other latent values θ (noise, …) keep their prior.

    The model must use the function that ``functional_prior`` returns: it is that one which is linearized.

    A divergence that needs draws only (``linearized = False``) leaves the network as it is: f in place of f_L
    everywhere, and any guide over the flat latent values will do.

    A Gaussian likelihood whose mean is an affine function of one network's values is integrated in closed form (where
    values times weights of a minibatch are more than two million, variances are estimated by draws); any
    other by ``num_particles`` draws of the weights.

    Args:
        divergence: ``fs.variational.RegularizedKL()`` (the default: GFSVI), ``fs.variational.PushforwardKL()``
            (TFSVI), ``fs.variational.Wasserstein2()`` (GWI), ``fs.variational.SpectralSteinKL()`` (FBNN), or any
            callable ``(law, prior, x) -> D``.
        num_particles: draws of the latent values, for expectations without closed form.

    Raises:
        TypeError: at the first step, for a guide whose posterior is not normal where the divergence needs it (or other
            latent values do).
        ValueError: for a model without functional prior, or whose functions depend on constrained values.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, optax, tinygp
        >>> from numpyro.infer import SVI
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        ...     f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0] + w[2] * x[:, 0] ** 2, gp, x)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x), 0.1), obs=y)
        >>> x = jnp.linspace(-1.0, 1.0, 10)[:, None]
        >>> guide = fs.variational.guides.mean_field(model)
        >>> svi = SVI(model, guide, optax.adam(0.05), loss=fs.FunctionalELBO(fs.variational.RegularizedKL()))
        >>> result = svi.run(jax.random.key(0), 300, x, x[:, 0] ** 2, progress_bar=False)
        >>> bool(jnp.abs(guide.median(result.params)["w"][2] - 1.0) < 0.2)
        True

    Reference: T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space variational
    inference in Bayesian neural networks*, eq. 3.1 and algorithm 1.
    """

    def __init__(self, divergence: Callable | None = None, *, num_particles: int = 1):
        check_count(num_particles, "num_particles")
        super().__init__(num_particles=num_particles)
        self.divergence = RegularizedKL() if divergence is None else divergence
        if isinstance(self.divergence, type) or not callable(self.divergence):
            raise TypeError(f"divergence must be an object such as fs.variational.RegularizedKL(), got {divergence!r}.")
        self.linearized = getattr(self.divergence, "linearized", True)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        key_model, key_law, key_draws = jax.random.split(rng_key, 3)
        problem = Problem(model, guide, param_map, args, kwargs, key_model, self.linearized)
        if getattr(self.divergence, "holds_weights", False):
            problem.check_plain(type(self.divergence).__name__)
        keys = jax.random.split(key_draws, self.num_particles)
        divergence = 0.0
        for i, name in enumerate(problem.functions):
            law = problem.law(name) if self.linearized else problem.sampled(name, jax.random.fold_in(key_law, i))

            def at_draw(key, name=name, law=law):
                site = problem.prior_given_draw(name, key)
                return _strength(site) * self.divergence(law, site["fn"].prior, site["fn"].x)

            divergence += jnp.mean(jax.vmap(at_draw)(keys))
        rest = jax.vmap(problem.rest_given_draw)(keys)
        likelihood = jax.vmap(problem.closed_form)(keys) if self.linearized else None
        if likelihood is None:
            likelihood = jax.vmap(problem.likelihood_given_draw)(keys)
        expected = jnp.mean(rest + likelihood)
        return {"loss": divergence - problem.entropy_of_rest() - expected, "mutable_state": None}


class Problem:
    """One step's model, guide and randomness: what the terms of the bound are made of."""

    def __init__(self, model, guide, params, args, kwargs, key, linearized):
        is_point = isinstance(guide, AutoLaplaceApproximation)  # a normal law only once it has been trained
        if is_point or not hasattr(guide, "get_posterior") or not hasattr(guide, "prototype_trace"):
            raise TypeError(
                f"FunctionalELBO needs a guide over the flat latent values, got {type(guide).__name__}: use "
                "fs.variational.guides.mean_field(model), or another of NumPyro's AutoContinuous guides."
            )
        self.model = handlers.substitute(model, data=params)  # the values of its ``numpyro.param`` sites
        self.args, self.kwargs, self.key, self.linearized = with_rows(args), with_rows(kwargs), key, linearized
        self.unpack = flat_to_sites(guide)
        self.posterior = guide.get_posterior(params)
        self.normal = as_normal(self.posterior)
        if self.normal is not None:
            self.loc, self.spread = mean_and_spread(self.normal)
        elif linearized:
            raise TypeError(
                f"FunctionalELBO: this divergence needs a guide whose posterior is normal, {type(guide).__name__} is "
                "not: use fs.variational.guides.mean_field(model) or fs.variational.guides.low_rank(model, rank)."
            )
        else:
            self.loc = self.posterior.sample(key)
        self.sites = {name: guide.prototype_trace[name] for name in self.unpack(self.loc)}
        self.center = self.constrain(self.loc)
        sites = self.trace(self.model, self.center)
        check_observations(sites)
        self.functions = active_functional_priors(sites)
        self.num_networks = sum(s["type"] == "network" for s in sites.values())
        if not self.functions:
            raise ValueError(
                "FunctionalELBO: the model declares no functional_prior. Add one, or use numpyro.infer.Trace_ELBO()."
            )
        used = set().union(*(self._dependencies(name) for name in self.functions))
        self.used = sorted(used)
        bad = sorted(name for name in used if not _is_real(self.sites[name]))
        if bad and linearized:
            raise ValueError(
                f"FunctionalELBO: the functions depend on {bad}, which are not real-valued; reparametrize."
            )
        self.rest = [name for name in self.sites if name not in used]
        if self.rest and self.normal is None:
            raise TypeError(
                f"FunctionalELBO: {self.rest} are no weights of a function, and their entropy under "
                f"{type(guide).__name__} is not known; use a guide whose posterior is normal."
            )

    def check_plain(self, name):
        """Refuses several functional priors, and a scaled one, under a divergence that holds the weights' own KL."""
        scales = [_strength(site) for site in self.functions.values()]
        if len(scales) > 1 or any(isinstance(scale, jax.core.Tracer) or scale != 1 for scale in scales):
            raise ValueError(
                f"FunctionalELBO: {name} holds the KL of the weights, which is to count once: declare one "
                f"functional_prior, with scale=1 and no handlers.scale; got {len(scales)} with scales {scales}."
            )

    def constrain(self, flat) -> dict:
        """Values of the latent sites for flat unconstrained ones."""
        return self._constrained(self.unpack(flat))

    def _constrained(self, unconstrained: dict) -> dict:
        return {k: biject_to(self.sites[k]["fn"].support)(v) for k, v in unconstrained.items()}

    def trace(self, model, values, replace=None):
        """``model`` run with these latent values, and the minibatch and measurement points of this step."""
        settings = {"substitute": values, "hook": replace, "full_plates": False, "isolated": True}
        return run_model(fresh_draws(model, self.key), self.args, self.kwargs, **settings)

    def _observed(self, model, values, replace=None) -> dict:
        return observed_sites(self.trace(model, values, replace), factors=True, weights=True)

    def law(self, name) -> LinearisedLaw:
        """The law of the function ``name``."""

        def unpack(flat):
            return tuple(self.unpack(flat).values())  # a dict would be put into the order of its names by JAX

        def function(arrays, x):
            return self._evaluate(name, self._constrained(dict(zip(self.sites, arrays, strict=True))), x)

        return LinearisedLaw(function, self.loc, self.spread, unpack)

    def sampled(self, name, key) -> SampledLaw:
        """The law of the function ``name`` itself, by draws."""
        used = sorted(self._dependencies(name))
        return SampledLaw(
            lambda flat, x: self._evaluate(name, self.constrain(flat), x),
            self.draw,
            key,
            lambda key, x: self._evaluate(name, self._prior_values(used, key), x),
            lambda key: self._kl_terms(used, key),
            function_of(self.model, name, self.args, self.kwargs, self.center)(self.functions[name]["fn"].x).ndim == 1,
        )

    def prior_given_draw(self, name, key):
        """The site of the functional prior at a draw of θ, on which the prior may depend."""
        if not self.rest:
            return self.functions[name]
        draw = self.constrain(self.draw(key))
        values = {k: draw[k] if k in self.rest else v for k, v in self.center.items()}
        return self.trace(self.model, values)[name]

    def _prior_values(self, used, key):
        """A draw of the latent values ``used`` from the prior that the model writes."""
        rest = {k: v for k, v in self.center.items() if k not in used}
        settings = {"substitute": rest, "full_plates": False, "isolated": True}
        trace = run_model(self.model, self.args, self.kwargs, key=key, **settings)
        return {name: trace[name]["value"] for name in used}

    def _kl_terms(self, used, key):
        """An unbiased estimate of KL(q ‖ p) over ``used``; q's entropy is exact where q is normal."""
        flat = self.draw(key)
        if self.normal is None:
            return self.posterior.log_prob(flat) - self._log_prior(used, flat)
        return -self._entropy(used) - self._log_prior(used, flat)

    def _evaluate(self, name, values, x):
        f = function_of(self.model, name, self.args, self.kwargs, values)(x)
        return f.reshape(len(x), -1)

    def _dependencies(self, name) -> set:
        x = self.functions[name]["fn"].x
        return depends_on(lambda values: self._evaluate(name, values, x), self.center)

    def draw(self, key):
        """Flat values from q."""
        return self.posterior.sample(key)

    def entropy_of_rest(self):
        """H[q(θ)] of the unconstrained values that no function depends on."""
        return self._entropy(self.rest) if self.rest else 0.0

    def rest_given_draw(self, key):
        """log p(θ) and the log Jacobian of its constraints, at a draw of q."""
        return self._log_prior(self.rest, self.draw(key)) if self.rest else jnp.zeros(())

    def _entropy(self, names):
        """H[q] of the unconstrained values of some sites, for a normal q."""
        places = self.unpack(jnp.arange(self.loc.size))
        return entropy(self.normal, jnp.concatenate([jnp.ravel(places[name]) for name in names]))

    def _log_prior(self, names, flat):
        """log p of some sites and the log Jacobian of their constraints, at flat values."""
        values, unconstrained = self.constrain(flat), self.unpack(flat)
        trace, total = self.trace(self.model, values), 0.0
        for name in names:
            site, transform = trace[name], biject_to(trace[name]["fn"].support)
            log_prob = scale_and_mask(site["fn"].log_prob(values[name]), site["scale"]).sum()
            log_det = transform.log_abs_det_jacobian(unconstrained[name], values[name])
            total = total + log_prob + jnp.sum(log_det)
        return total

    def likelihood_given_draw(self, key):
        """log p(y | f_L, θ), or log p(y | f, θ), at a draw of q."""
        values = self.constrain(self.draw(key))
        model = linearize(self.model, self.center) if self.linearized else self.model
        return sum(_log_prob(site) for site in self._observed(model, values).values())

    def closed_form(self, key):
        """E_q[log p(y | f_L, θ)] over the function, at a draw of θ; None unless it is Gaussian (see the class).

        The mean of every observation must be an affine function A f(x) + b of one call of one function, whose weights
        enter nowhere else and are independent of θ under q; then it is normal with covariance (A root)(A root)ᵀ.
        """
        if len(self.functions) > 1 or (self.rest and not isinstance(self.normal, dist.Normal)):
            return None
        (name,) = self.functions
        draw = self.constrain(self.draw(key))
        values = {k: draw[k] if k in self.rest else v for k, v in self.center.items()}
        calls = []
        model = linearize(self.model, self.center) if self.num_networks > 1 else self.model  # θ may be a network's

        def observed(shift):
            """Observed sites when the function returns f(x; m) + shift."""

            def replace(_, fn, __):
                def shifted(x):
                    value = fn(x)
                    calls.append((x, value))
                    return value if shift is None else value + shift

                return shifted

            return self._observed(model, values, replace)

        sites = observed(None)
        if len(calls) != 1 or any(_normal(site) is None for site in sites.values()):
            return None
        ((x, value),) = calls
        start = jnp.zeros_like(value)

        def moments(shift):
            laws = [_normal(site) for site in observed(shift).values()]
            return [law.loc for law in laws], [law.scale for law in laws]

        def tangent(step):
            return lambda shift: jax.jvp(lambda s: moments(s)[0], (shift,), (step,))[1]

        def held(weights):
            """Laws of the observations when the function's values stay what they are."""

            def hold(_, __, ___):
                return lambda x: value

            laws = [_normal(site) for site in self._observed(model, values | weights, hold).values()]
            return [(law.loc, law.scale) for law in laws]

        if depends_on(held, {name: self.center[name] for name in self.used}):
            return None
        if depends_on(lambda v: moments(v["shift"])[1], {"shift": start}):
            return None
        if depends_on(lambda v: tangent(jnp.ones_like(start))(v["shift"]), {"shift": start}):
            return None
        root = self._root(name, x, value, jax.random.fold_in(key, 1))
        roots = jax.vmap(lambda step: tangent(step)(start), in_axes=-1, out_axes=-1)(root)
        total = 0.0
        for site, loc_root in zip(sites.values(), roots, strict=True):
            law = _normal(site)
            loss = 0.5 * jnp.broadcast_to(jnp.sum(loc_root**2, -1) / law.scale**2, site["fn"].shape())
            loss = sum_rightmost(loss, site["fn"].event_dim)
            total = total + _log_prob(site) - scale_and_mask(loss, site["scale"]).sum()
        return total

    def _root(self, name, x, value, key):
        """A [*value.shape, R] with A Aᵀ the covariance of the function's values at x; in the mean, if it is wide."""
        if value.size * self.loc.size <= MAX_ENTRIES:
            root = self.law(name).root(x)
            return root.reshape(*value.shape, root.shape[-1])

        def at(flat):
            return self._evaluate(name, self.constrain(flat), x)

        steps = jax.vmap(self.draw)(jax.random.split(key, NUM_STEPS)) - self.loc
        # One after another: on a CPU the derivative of a batch of slopes takes several times as long.
        moved = jnp.moveaxis(jax.lax.map(jax.linearize(at, self.loc)[1], steps), 0, -1)
        return moved.reshape(*value.shape, NUM_STEPS) / NUM_STEPS**0.5


def _normal(site):
    """The univariate normal laws behind a site, None for any other."""
    law = as_normal(site["fn"])
    return law if isinstance(law, dist.Normal) else None


def _is_real(site) -> bool:
    return isinstance(base_transform(site), transforms.IdentityTransform)


def _strength(site):
    """The factor on the log density of a functional prior's site."""
    return site["fn"].scale if site["scale"] is None else site["fn"].scale * site["scale"]


def _log_prob(site):
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"]).sum()
