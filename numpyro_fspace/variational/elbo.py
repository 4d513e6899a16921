"""``FunctionalELBO``: NumPyro's evidence lower bound with divergences between functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to, transforms
from numpyro.distributions.util import scale_and_mask
from numpyro.infer import ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation
from numpyro.infer.util import constrain_fn

from numpyro_fspace._checks import check_count, one_line
from numpyro_fspace.model._numpyro import flat_to_sites
from numpyro_fspace.model.checks.sites import check_likelihood, check_observations
from numpyro_fspace.model.data.arguments import with_rows
from numpyro_fspace.model.handlers import fresh_draws
from numpyro_fspace.model.linearized import function_of, linearize
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import base_transform, has_dynamic_support
from numpyro_fspace.model.sites import active_functional_priors, weights_of
from numpyro_fspace.variational import expected_log_likelihood as likelihood
from numpyro_fspace.variational.divergences import RegularizedKL
from numpyro_fspace.variational.pushforward import (
    LinearizedPushforward,
    SampledPushforward,
    as_normal,
    entropy,
    mean_and_spread,
)


class FunctionalELBO(ELBO):
    r"""The evidence lower bound in function space, a loss for ``numpyro.infer.SVI``.

    .. math:: L(q) = \tfrac{N}{B} \sum_b E_q[\log p(y_b \mid f_L(x_b; w))] - \sum_j \text{scale}_j\, D_j(Q \,\|\, P_0)
              - \mathrm{KL}(q(\theta) \,\|\, p(\theta))

    b runs over the B rows of a minibatch of the N rows. f_L is the network linearized around the guide's mean m, with
    derivatives J, so that w ~ q = N(m, S) makes it a Gaussian process Q = GP(f(·; m), J S Jᵀ). **The divergence
    replaces the prior of the weights**: for the latent values that a function under a ``functional_prior`` depends on,
    the prior written in the model is left out (``BridgeWasserstein`` uses it), and D(Q‖P0) at the measurement points of
    the step is used instead. The other latent values θ (the noise, for example) keep their prior.

    The model must use the function that ``functional_prior`` returns, because this is the function that is linearized.

    A divergence that needs only draws (``linearized = False``) does not linearize the network: f replaces f_L
    everywhere, and, if there is no θ, the guide may be any of NumPyro's ``AutoContinuous`` guides.

    A Gaussian likelihood is integrated in closed form if the network is linearized, the mean is an affine function of
    one network's values, the variance does not depend on them, and w is independent of θ under the guide (mean-field,
    or no θ). With more than two million values times weights in a minibatch, eight draws estimate the variances of f_L.
    ``num_particles`` draws of the weights estimate the expectation of any other likelihood.

    Args:
        divergence: an object of ``fs.variational``: ``RegularizedKL()`` (the default: GFSVI), ``PushforwardKL()``
            (TFSVI), ``Wasserstein2()`` (GWI), ``SpectralSteinKL()`` (FBNN), ``Wasserstein1()`` (fVI),
            ``BridgeWasserstein()`` (IFBNN); or any callable ``(pushforward, prior, x) -> D``.
        num_particles: number of draws of the latent values, for expectations without a closed form.

    Raises:
        TypeError: the divergence is no function; at the first step, the guide is not ``AutoContinuous``, or not normal
            where the divergence or θ needs it.
        ValueError: ``num_particles`` is not positive; at the first step, the model has no functional prior, or a
            linearized function depends on constrained values.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, optax, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        ...     f = fs.functional_prior(
        ...         "f", lambda x: w[0] + w[1] * x[:, 0] + w[2] * x[:, 0] ** 2, gp, x
        ...     )
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x), 0.1), obs=y)
        >>> x = jnp.linspace(-1.0, 1.0, 10)[:, None]
        >>> guide = fs.variational.guides.mean_field(model)
        >>> loss = fs.FunctionalELBO(fs.variational.RegularizedKL())
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.05), loss=loss)
        >>> result = svi.run(jax.random.key(0), 300, x, x[:, 0] ** 2, progress_bar=False)
        >>> bool(jnp.abs(guide.median(result.params)["w"][2] - 1.0) < 0.2)
        True

    Reference: T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space variational
    inference in Bayesian neural networks*, eq. 3.1 and algorithm 1.
    """

    __repr__ = one_line

    def __init__(self, divergence: Callable | None = None, *, num_particles: int = 1):
        check_count(num_particles, "num_particles")
        super().__init__(num_particles=num_particles)
        self.divergence = RegularizedKL() if divergence is None else divergence
        if isinstance(self.divergence, type) or not callable(self.divergence):
            raise TypeError(f"divergence must be an object such as fs.variational.RegularizedKL(), got {divergence!r}.")
        self.linearized = getattr(self.divergence, "linearized", True)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        key_model, key_function, key_draws = jax.random.split(rng_key, 3)
        guided = GuidedModel(model, guide, param_map, key_model, args=args, kwargs=kwargs, needs_normal=self.linearized)
        if getattr(self.divergence, "holds_weights", False):
            guided.check_single_unscaled_prior(type(self.divergence).__name__)
        keys = jax.random.split(key_draws, self.num_particles)
        divergence = 0.0
        for i, name in enumerate(guided.functions):
            if self.linearized:
                pushforward = guided.linearized_pushforward(name)
            else:
                pushforward = guided.sampled_pushforward(name, jax.random.fold_in(key_function, i))

            def at_draw(key, name=name, pushforward=pushforward):
                site = guided.prior_given_draw(name, key)
                return _strength(site) * self.divergence(pushforward, site["fn"].prior, site["fn"].x)

            divergence += jnp.mean(jax.vmap(at_draw)(keys))
        rest = jax.vmap(guided.rest_given_draw)(keys)
        expected = jax.vmap(lambda key: likelihood.integrated(guided, key))(keys) if self.linearized else None
        if expected is None:
            expected = jax.vmap(lambda key: likelihood.at_draw(guided, key))(keys)
        entropy_of_rest = guided.entropy(guided.rest) if guided.rest else 0.0
        value = divergence - entropy_of_rest - jnp.mean(rest + expected)
        return {"loss": value, "mutable_state": None}


class GuidedModel:
    """A model under a guide in one step of the optimization, from which the terms of the bound are computed.

    Args:
        model, guide: those of ``SVI``.
        params: values of the guide's and of the model's parameters.
        key: determines the minibatches and the measurement points of the step.
        args, kwargs: arguments of the model.
        needs_normal: whether the guide's posterior must be normal, because the functions are linearized.

    Attributes:
        draw: draws flat values from q, given a key.
        drawn_model: the model to run at a draw of q, linearized if ``needs_normal``.
    """

    def __init__(self, model, guide, params, key, *, args, kwargs, needs_normal):
        is_point = isinstance(guide, AutoLaplaceApproximation)  # it is normal only after training
        if is_point or not hasattr(guide, "get_posterior") or not hasattr(guide, "prototype_trace"):
            raise TypeError(
                f"FunctionalELBO needs a guide over the flat latent values, got {type(guide).__name__}: use "
                "fs.variational.guides.mean_field(model), or another of NumPyro's AutoContinuous guides."
            )
        self.model = handlers.substitute(model, data=params)  # the values of its ``numpyro.param`` sites
        self.args, self.kwargs, self.key = with_rows(args), with_rows(kwargs), key
        self.unpack = flat_to_sites(guide)
        self.posterior = guide.get_posterior(params)
        self.draw = self.posterior.sample
        self.normal = as_normal(self.posterior)
        if self.normal is not None:
            self.loc, self.spread = mean_and_spread(self.normal)
        elif needs_normal:
            raise TypeError(
                f"FunctionalELBO: this divergence needs a guide whose posterior is normal, but {type(guide).__name__} "
                "is not: use fs.variational.guides.mean_field(model) or fs.variational.guides.low_rank(model, rank)."
            )
        else:
            self.loc = self.draw(key)
        self.sites = {name: guide.prototype_trace[name] for name in self.unpack(self.loc)}
        self.center = self.constrain(self.loc)
        self.drawn_model = linearize(self.model, self.center) if needs_normal else self.model
        sites = self.trace(self.model, self.center)
        check_observations(sites)
        check_likelihood(sites)
        self.functions, self.weights = active_functional_priors(sites), weights_of(sites)
        if not self.functions:
            raise ValueError(
                "FunctionalELBO: the model declares no functional_prior. Add one, or use numpyro.infer.Trace_ELBO()."
            )
        used = set().union(*(self._dependencies(name) for name in self.functions))
        self.used = sorted(used)
        identity = transforms.IdentityTransform
        bad = sorted(name for name in used if not isinstance(base_transform(self.sites[name]), identity))
        if bad and needs_normal:
            raise ValueError(
                f"FunctionalELBO: the functions depend on {bad}, which are not real-valued; reparametrize."
            )
        self.rest = [name for name in self.sites if name not in used]
        if self.rest and self.normal is None:
            raise TypeError(
                f"FunctionalELBO: {self.rest} are not weights of a function, and their entropy under "
                f"{type(guide).__name__} is not known; use a guide whose posterior is normal."
            )

    def check_single_unscaled_prior(self, name):
        """Raise for several or scaled functional priors, under a divergence that includes the KL of the weights."""
        scales = [_strength(site) for site in self.functions.values()]
        if len(scales) > 1 or any(isinstance(scale, jax.core.Tracer) or scale != 1 for scale in scales):
            raise ValueError(
                f"FunctionalELBO: {name} includes the KL of the weights, which must count once: declare one "
                f"functional_prior, with scale=1 and without handlers.scale; got {len(scales)} with scales {scales}."
            )

    def constrain(self, flat) -> dict:
        """Values of the latent sites for flat unconstrained values."""
        return self._constrained(self.unpack(flat))

    def _constrained(self, unconstrained: dict) -> dict:
        """Constrained values, by a run of the model where the support of a site may depend on other sites."""
        if not any(has_dynamic_support(site) for site in self.sites.values()):
            return {k: biject_to(self.sites[k]["fn"].support)(v) for k, v in unconstrained.items()}
        with handlers.block():
            values = constrain_fn(fresh_draws(self.model, self.key), self.args, self.kwargs, unconstrained)
        return {k: values[k] for k in unconstrained}

    def trace(self, model, values, replace=None):
        """``model`` run with these latent values, and the minibatch and measurement points of this step."""
        settings = {"substitute": values, "hook": replace, "full_plates": False, "isolated": True}
        return run_model(fresh_draws(model, self.key), self.args, self.kwargs, **settings)

    def linearized_pushforward(self, name) -> LinearizedPushforward:
        """The distribution of the linearized function ``name``."""

        def unpack(flat):
            return tuple(self.unpack(flat).values())  # JAX would sort a dict by its keys

        def function(arrays, x):
            return self.evaluate(name, self._constrained(dict(zip(self.sites, arrays, strict=True))), x)

        return LinearizedPushforward(function, self.loc, self.spread, unpack)

    def sampled_pushforward(self, name, key) -> SampledPushforward:
        """The distribution of the function ``name`` itself, represented by draws."""
        used = sorted(self._dependencies(name))
        return SampledPushforward(
            lambda flat, x: self.evaluate(name, self.constrain(flat), x),
            self.draw,
            key,
            lambda key, x: self.evaluate(name, self._prior_values(used, key), x),
            lambda key: self._kl_terms(used, key),
            function_of(self.model, name, self.args, self.kwargs, self.center)(self.functions[name]["fn"].x).ndim == 1,
        )

    def prior_given_draw(self, name, key):
        """The site of the functional prior at a draw of θ. The prior may depend on θ."""
        if not self.rest:
            return self.functions[name]
        draw = self.constrain(self.draw(key))
        values = {k: draw[k] if k in self.rest else v for k, v in self.center.items()}
        return self.trace(self.model, values)[name]

    def _prior_values(self, used, key):
        """A draw of the latent values ``used`` from the prior written in the model."""
        rest = {k: v for k, v in self.center.items() if k not in used}
        settings = {"substitute": rest, "full_plates": False, "isolated": True}
        trace = run_model(self.model, self.args, self.kwargs, key=key, **settings)
        return {name: trace[name]["value"] for name in used}

    def _kl_terms(self, used, key):
        """An unbiased estimate of KL(q ‖ p) over ``used``; q's entropy is exact where q is normal."""
        flat = self.draw(key)
        if self.normal is None:
            return self.posterior.log_prob(flat) - self._log_prior(used, flat)
        return -self.entropy(used) - self._log_prior(used, flat)

    def evaluate(self, name, values, x):
        """The function ``name`` at x, [M, K], for these latent values."""
        return function_of(self.model, name, self.args, self.kwargs, values)(x).reshape(len(x), -1)

    def _dependencies(self, name) -> set:
        x = self.functions[name]["fn"].x
        return depends_on(lambda values: self.evaluate(name, values, x), self.center)

    def rest_given_draw(self, key):
        """log p(θ | f_L), or log p(θ | f), and the log Jacobian of its constraints, at a draw of q."""
        return self._log_prior(self.rest, self.draw(key)) if self.rest else jnp.zeros(())

    def entropy(self, names):
        """H[q] of the unconstrained values of the given sites, for a normal q."""
        places = self.unpack(jnp.arange(self.loc.size))
        return entropy(self.normal, jnp.concatenate([jnp.ravel(places[name]) for name in names]))

    def _log_prior(self, names, flat):
        """log p of the given sites and the log Jacobian of their constraints, at flat values."""
        values, unconstrained = self.constrain(flat), self.unpack(flat)
        trace, total = self.trace(self.drawn_model, values), 0.0
        for name in names:
            site, transform = trace[name], biject_to(trace[name]["fn"].support)
            log_prob = scale_and_mask(site["fn"].log_prob(values[name]), site["scale"]).sum()
            log_det = transform.log_abs_det_jacobian(unconstrained[name], values[name])
            total = total + log_prob + jnp.sum(log_det)
        return total


def _strength(site):
    """The factor on the log density of a functional prior's site."""
    return site["fn"].scale if site["scale"] is None else site["fn"].scale * site["scale"]
