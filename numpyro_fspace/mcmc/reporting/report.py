"""``report``: one page on whether a run can be trusted, with a line of advice for each doubt."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import transforms
from numpyro.infer import MCMC

from numpyro_fspace._checks import check_key
from numpyro_fspace._xla import flatten
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.driver_checks import checked_inputs
from numpyro_fspace.mcmc.reporting.doubts import advice, sampler_doubts
from numpyro_fspace.mcmc.reporting.report_of_draws import convergence_of, report_of_draws
from numpyro_fspace.mcmc.reporting.report_table import Report
from numpyro_fspace.mcmc.state import with_chains
from numpyro_fspace.mcmc.warmup.friction import differences_of, noise_variances
from numpyro_fspace.model.checks.arguments import checked_arguments
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.model.sharding import with_devices_of
from numpyro_fspace.model.site_transforms import base_transform, has_dynamic_support
from numpyro_fspace.model.sites import is_masked
from numpyro_fspace.posterior.configurational_temperature import configurational_temperature, unconstrained
from numpyro_fspace.posterior.judged_quantities import quantities_of
from numpyro_fspace.posterior.posterior import as_posterior
from numpyro_fspace.posterior.product_priors import product_doubts, product_shares
from numpyro_fspace.priors.tracing import without_computing
from numpyro_fspace.sgmcmc.integrators import drift, kick

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Key

__all__ = ["Report", "report"]

NUM_GRADIENTS = 16
NUM_TRAJECTORIES = 8

#: Limit of the cost of the configurational temperature, as a share of the run's gradient steps.
SHARE = 0.2


@entry_point
def report(
    mcmc: MCMC,
    *args: Any,
    key: Key[Array, ""] | None = None,
    inputs: Float[ArrayLike, "N D"] | dict | None = None,
    **kwargs: Any,
) -> Report:
    r"""Judge a run in function space.

    It checks for the known failures of such runs: chains that have not converged (R-hat, effective sample sizes) or do
    not move, a chain that is stuck at a low likelihood (``shortfall``), steps that are too long (divergences, kinetic
    and configurational temperature, the acceptance of a Metropolis test), minibatches that are too small
    (``noise_share``, ``weighted_noise_share``), and improper distributions (``drift`` of the weights). It says where
    the weights' own prior overrules a Gaussian process that multiplies it (``product_shares``). Of runs by NumPyro's
    NUTS and other kernels it judges convergence, divergences and products of priors; the rest is known for ``SGLD``,
    ``SGHMC``, ``MCLMC`` and their functional forms.

    **What is judged.** Every function under a functional prior is judged or, without one, the network that enters the
    likelihood. Inputs are the data, the measurement points of the prior and, with several inputs, rows whose columns
    come from different rows of the data, because predictions are needed away from the data too. If a likelihood depends
    on several networks, its parameters are judged in their place, because parts of a sum can be exchanged. Every latent
    site other than weights is judged too, so that a model without networks is judged by its sites. Parts that are left
    out are listed. ``inputs`` gives other inputs, and other networks.

    **Temperature of the draws.** For the potential U, the sampler's temperature T and the preconditioner S,
    E|Sᵀ∇U|² / E tr Sᵀ∇²U S is T if the draws have the distribution exp(-U/T). Gradients of all data at up to 256 draws
    estimate it, at the cost of at most a fifth of the run's gradients.

    **Noise.** With V the covariance of :math:`S^\top \nabla \tilde U` over minibatches and points, ε the step size and
    γ the friction, a direction in which the variance is v gets the temperature
    :math:`T + \varepsilon v / (2 \gamma)` under SGHMC, and :math:`T + \varepsilon v / 2` under SGLD, to leading order.
    ``noise_share`` takes the mean variance, v = tr V / P, ``weighted_noise_share`` a mean that is weighted by the
    variances themselves, v = tr V² / tr V. A direction with a
    friction of its own from warm-up is counted with that friction.

    Args:
        mcmc: an ``MCMC`` object that has run.
        *args: the arguments of that run; by default those of the last run.
        key: random key of the probes; None is ``jax.random.key(0)``.
        inputs: where f is judged, [N, D], or a dict of them by name of function; None is as above, up to 100 rows of
            the data and 30 points of each other kind. ``f[37, 0]`` is the first output at row 37 of ``inputs`` or of
            what the model passes to f, ``f at measurement points[12, 0]`` that at point 12 (of random points, of those
            for ``jax.random.key(1)``).
        **kwargs: the keyword arguments of that run.

    Returns:
        A :class:`Report`.

    Raises:
        TypeError: if ``mcmc`` is no ``MCMC`` object, or its kernel has no model; for arguments or ``inputs`` that are
            no numbers, and a wrong key.
        ValueError: if it has not run, or kept functions in place of weights; if ``inputs`` is empty, holds NaN or names
            something that is not a function of the model.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> from flax import linen as nn
        >>> def model(x, y=None):
        ...     f = fs.random_module("f", nn.Dense(1), input_shape=1)
        ...     numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.5), obs=y)
        >>> x = jax.numpy.linspace(-1, 1, 20)[:, None]
        >>> mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=200, num_samples=500, num_chains=2,
        ...                chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, x[:, 0])
        >>> fs.report(mcmc, x, x[:, 0]).num_diverging
        0
    """
    kernel = _checked_kernel(mcmc)
    if key is not None:
        check_key(key, "key", single=True)
    checked_inputs(inputs, "inputs")
    if not args and not kwargs:
        args, kwargs = mcmc._args, mcmc._kwargs
    with checked_arguments(args, kwargs, "report"):
        return _judged(mcmc, kernel, args, kwargs, inputs=inputs, key=jax.random.key(0) if key is None else key)


def _judged(mcmc, kernel, args, kwargs, *, inputs, key) -> Report:
    args, kwargs = with_devices_of((args, kwargs), mcmc.last_state)
    if not isinstance(kernel, SGMCMCKernel):
        return report_of_draws(mcmc, args, kwargs, inputs=inputs)
    posterior, draws = as_posterior(mcmc), mcmc.get_samples(group_by_chain=True)
    judged = quantities_of(posterior.model, draws, args, kwargs, inputs=inputs, programs=kernel._programs)
    functions, sites, doubts = convergence_of(judged, posterior.num_chains)
    state = mcmc.last_state
    plan = kernel._plan_of(state, args, kwargs)
    target, is_tested = kernel._target(plan, args, kwargs), plan.sampler.metropolis
    noise_share, weighted_noise_share, acceptance = _probe(target, state, key)
    shortfall, chance = _shortfall(target, state, key)
    has_product = without_computing(lambda: bool(kernel._model_potential(args, kwargs).functional_priors))
    temperature = np.atleast_1d(state.mean_temperature) / kernel.temperature
    found = Report(
        functions,
        sites,
        judged.left_out,
        num_diverging=int(np.sum(state.num_diverging)),
        temperature=temperature if plan.sampler.has_momentum else np.full_like(temperature, np.nan),
        configurational=configurational_temperature(
            kernel, with_chains(state), draws, args, kwargs, key=key, share=SHARE
        ),
        acceptance=acceptance,
        noise_share=noise_share,
        weighted_noise_share=weighted_noise_share,
        drift=_weight_drift(mcmc, kernel, args, kwargs),
        shortfall=shortfall,
        product_shares=product_shares(kernel._model_potential(args, kwargs)) if has_product else {},
        advice=(),
    )
    lines = advice(
        found,
        convergence=doubts,
        sampler=list(sampler_doubts(kernel, state, mcmc.num_samples)),
        shortfall_sd=chance,
        is_tested=is_tested,
    )
    return replace(found, advice=(*lines, *product_doubts(found.product_shares)))


def _checked_kernel(mcmc):
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"report judges the run of an MCMC object, got {type(mcmc).__name__}. Print the report of a run before it "
            "is saved; of draws without a run use fs.diagnostics.function_diagnostics on draws of f."
        )
    if getattr(mcmc.sampler, "model", None) is None:
        raise TypeError(f"report needs the model of the run, and {type(mcmc.sampler).__name__} was given none.")
    if mcmc.last_state is None:
        raise ValueError("The MCMC object has no draws yet: call run first.")
    return mcmc.sampler


def _shortfall(target, state, key):
    """``(log likelihood at each chain's last state below the best chain's [C], its standard deviation by chance)``.

    Chance is that of a Gaussian posterior at the sampler's temperature T, in which the log likelihood of N numbers has
    the variance T²P/2, or T²N/2 if that is less, at most.
    """
    model, states = target.model, with_chains(state)
    is_alone = states.i.size == 1

    def evaluate(z):
        found = jnp.zeros(1) if is_alone else jax.lax.map(lambda z: model.log_likelihood(z, key), z)
        return found, jnp.asarray(model.num_observed())

    found, num_observed = jax.jit(evaluate)(states.z)
    chance = target.plan.sampler.temperature * np.sqrt(0.5 * min(state.scale.shape[-1], float(num_observed)))
    found = np.nan_to_num(np.asarray(found, np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    with np.errstate(invalid="ignore"):  # of minus infinity everywhere
        shortfall = np.where(found == found.max(), 0.0, found.max() - found)
    return shortfall, chance


def _probe(target, state, key):
    """``(noise share, weighted noise share, acceptance)``, means over chains.

    They are those of gradients and trajectories at the last states. The acceptance of a tuned step is that of the draws
    themselves, which needs no trajectories.
    """
    sampler = target.plan.sampler
    has_momentum, temperature = sampler.has_momentum, sampler.temperature

    def one_chain(key, state):
        position, _, metric, potential = target.dynamics(state)
        step_size = state.step_size

        def energy(w, key):
            return potential(w, key)[0]

        key_gradients, key_trajectories = jax.random.split(key)
        keys = jax.random.split(key_gradients, NUM_GRADIENTS)
        gradients = jax.lax.map(lambda k: metric.scale_gradient(jax.grad(energy)(position, k)), keys)
        friction = state.friction if has_momentum else 1.0
        gradient_noise = target.gradient_noise(state)
        if gradient_noise is not None:
            gradients = gradient_noise.damped(gradients, step_size, friction, temperature)
        trace, weighted = noise_variances(differences_of(gradients))
        variances = trace / position.size, weighted
        shares = tuple(step_size * v / (2.0 * friction * temperature) for v in variances)
        if sampler.is_tuned:
            return shares

        # A step of SGLD is a leapfrog step of length √(2ε) from a fresh momentum.
        time_step, num_steps = (step_size, sampler.num_steps) if has_momentum else (jnp.sqrt(2.0 * step_size), 1)

        def accept(keys):
            key_momentum, key_potential = keys
            momentum = jnp.sqrt(temperature) * jax.random.normal(key_momentum, position.shape, position.dtype)
            value_and_gradient = jax.value_and_grad(lambda w: energy(w, key_potential))

            def leapfrog(carry, _):
                w, p, gradient, _ = carry
                p = kick(p, gradient, 0.5 * time_step, metric)
                w = drift(w, p, time_step, metric)
                value, gradient = value_and_gradient(w)
                return (w, kick(p, gradient, 0.5 * time_step, metric), gradient, value), None

            value, gradient = value_and_gradient(position)
            start = (position, momentum, gradient, value)
            (_, p, _, new_value), _ = jax.lax.scan(leapfrog, start, length=num_steps)
            gain = value - new_value + 0.5 * jnp.sum((momentum - p) * (momentum + p))
            return jnp.where(jnp.isfinite(gain), jnp.exp(jnp.minimum(0.0, gain / temperature)), 0.0)

        keys = jax.random.split(key_trajectories, (2, NUM_TRAJECTORIES))
        return *shares, jnp.mean(jax.lax.map(accept, (keys[0], keys[1])))

    states = with_chains(state)
    keys = jax.random.split(key, states.potential_energy.shape[0])
    found = [float(jnp.mean(values)) for values in jax.jit(jax.vmap(one_chain))(keys, states)]
    return [*found, float(np.mean(state.mean_accept_prob))] if sampler.is_tuned else found


def _weight_drift(mcmc, kernel, args, kwargs):
    """Mean square of standardized network weights, last quarter of the draws over the first, [C]."""

    def facts():
        potential = kernel._model_potential(args, kwargs)
        # Values without a density, which a mask leaves, drift.
        latents = [k for k in potential.latents if not is_masked(potential.trace[k]["fn"])]
        names = [k for k in latents if "fspace" in potential.trace[k]["infer"]] or latents
        moved = [k for k in names if not isinstance(base_transform(potential.trace[k]), transforms.IdentityTransform)]
        is_dynamic = any(has_dynamic_support(potential.trace[k]) for k in names)
        return names, moved, potential.latents if is_dynamic else moved

    def values(draws):
        return jax.vmap(jax.vmap(partial(unconstrained, kernel._model_potential(args, kwargs))))(draws)

    names, moved, needed = without_computing(facts)
    state, draws = with_chains(mcmc.last_state), mcmc.get_samples(group_by_chain=True)
    position, scale = jax.tree.map(operator.itemgetter(0), jax.device_get((state.z, state.scale)))
    scale = flatten(position)[1](scale)  # of unconstrained values
    found = jax.jit(values)({k: draws[k] for k in needed}) if moved else {}
    squares = 0.0
    for name in names:
        drawn = found[name] if name in moved else draws[name]
        weights = np.asarray(drawn).reshape(*drawn.shape[:2], -1)  # may lie on disk: nothing is copied
        precision = np.broadcast_to(np.asarray(scale[name], np.float64) ** -2, drawn.shape[2:]).ravel()
        squares = squares + np.einsum("csp,csp,p->cs", weights, weights, precision, dtype=np.float64)
    quarter = max(1, squares.shape[1] // 4)
    return squares[:, -quarter:].mean(1) / squares[:, :quarter].mean(1)
