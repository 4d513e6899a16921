"""``svi_posterior``: draws from a guide that NumPyro's ``SVI`` has fitted."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoGuide, AutoGuideList
from numpyro.infer.util import constrain_fn

from numpyro_fspace._checks import check_count
from numpyro_fspace.model._numpyro import flat_to_sites, parts_of
from numpyro_fspace.model.handlers import full_plates
from numpyro_fspace.model.linearized import linearize
from numpyro_fspace.model.site_transforms import has_dynamic_support
from numpyro_fspace.posterior.function_draws import deterministic_draws
from numpyro_fspace.posterior.posterior import Posterior
from numpyro_fspace.variational.elbo import FunctionalELBO


def svi_posterior(svi, params: dict, key, *args: Any, num_samples: int = 1000, **kwargs: Any) -> Posterior:
    """Draws from a guide that NumPyro's ``SVI`` has fitted.

    If the loss is a ``fs.FunctionalELBO`` with a divergence of the linearized network, the posterior's model is
    linearized too (``fs.variational.linearize``), because the linearized function is the one that was fitted.

    Args:
        svi: NumPyro's ``SVI`` object.
        params: fitted parameters, ``svi.run(...).params`` or ``svi.get_params(state)``.
        key: random key of the draws.
        *args: the arguments of the run.
        num_samples: S, the number of independent draws.
        **kwargs: the keyword arguments of the run.

    Returns:
        A :class:`Posterior` of S draws, for ``fs.predict`` and ``fs.to_arviz``.

    Raises:
        ValueError, TypeError: num_samples is not a positive integer; params is not a dict of finite parameters; or
            ``svi`` is not an ``SVI`` object, or has not run in this process.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, optax, tinygp
        >>> from numpyro.infer import SVI
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        ...     f = fs.functional_prior("f", lambda x: w * x[:, 0], gp, x)
        ...     numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> guide = fs.variational.guides.mean_field(model)
        >>> svi = SVI(model, guide, optax.adam(0.05), loss=fs.FunctionalELBO())
        >>> result = svi.run(jax.random.key(0), 100, x, x[:, 0], progress_bar=False)
        >>> posterior = fs.svi_posterior(
        ...     svi, result.params, jax.random.key(1), x, x[:, 0], num_samples=50
        ... )
        >>> fs.predict(posterior, jax.random.key(2), x)["f"].shape
        (50, 10)
    """
    if not hasattr(svi, "guide"):
        raise TypeError(
            f"svi must be a numpyro.infer.SVI, got {type(svi).__name__}: svi_posterior(svi, params, key, ...)."
        )
    if not isinstance(params, Mapping):
        raise TypeError("params must be the parameters of a fit: result.params of svi.run, or svi.get_params(state).")
    if not all(np.isfinite(leaf).all() for leaf in map(np.asarray, jax.tree.leaves(params))):
        raise ValueError("params holds NaN or infinite values: the fit has diverged. Use a smaller learning rate.")
    check_count(num_samples, "num_samples")
    guide, kwargs = svi.guide, {**svi.static_kwargs, **kwargs}
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        raise ValueError("The guide does not know the model, because svi has not run in this process: call svi.init.")
    model = handlers.substitute(svi.model, data=params)  # the values of its ``numpyro.param`` sites
    fit = {"params": jax.tree.map(np.asarray, params)}
    samples = _draws(svi, model, params, key, num_samples, (args, kwargs))
    if isinstance(svi.loss, FunctionalELBO) and svi.loss.linearized:
        fit["center"] = jax.tree.map(np.asarray, guide.median(params))
        model = linearize(model, fit["center"])
    return posterior_of(guide, samples, model, args=args, kwargs=kwargs, fit=fit)


def _draws(svi, model, params, key, num_samples: int, arguments) -> dict:
    """Draws of a guide by site, as its loss takes them."""
    guide, (args, kwargs) = svi.guide, arguments
    if not hasattr(guide, "sample_posterior"):
        return Predictive(guide, params=params, num_samples=num_samples)(key, *args, **kwargs)
    if isinstance(guide, AutoGuideList):  # whose own method gives all parts the same key
        draws: dict = {}
        for part, own in zip(parts := parts_of(guide), jax.random.split(key, len(parts)), strict=True):
            draws |= part.sample_posterior(own, params, *args, sample_shape=(num_samples,), **kwargs)
        return draws
    is_dynamic = any(s["type"] == "sample" and has_dynamic_support(s) for s in guide.prototype_trace.values())
    if not (isinstance(svi.loss, FunctionalELBO) and is_dynamic and _takes(model, args, kwargs)):
        return guide.sample_posterior(key, params, *args, sample_shape=(num_samples,), **kwargs)

    def constrained(flat):  # guides keep the supports of the data that they were made for, and FunctionalELBO does not
        return constrain_fn(full_plates(handlers.seed(model, 0)), args, kwargs, flat_to_sites(guide)(flat))

    return jax.vmap(constrained)(guide.get_posterior(params).sample(key, (num_samples,)))


def posterior_of(guide, samples: dict, model, *, args: tuple, kwargs: dict, fit) -> Posterior:
    """The posterior of draws of a guide under a ``model``, which may be another than the guide's (linearized, say).

    Deterministic sites, which guides compute at the arguments that they were made for, are computed anew at these.
    """
    sites = getattr(guide, "prototype_trace", {})
    computed = [k for k, site in sites.items() if site["type"] == "deterministic"]
    latents = {k: np.asarray(v) for k, v in samples.items() if k not in computed}
    posterior = Posterior(model, latents, args=args, kwargs=kwargs, fit=fit)
    if not computed or not _takes(model, args, kwargs):
        return posterior
    return replace(posterior, samples=latents | deterministic_draws(posterior, args, kwargs, computed))


def _takes(model, args, kwargs) -> bool:
    """Whether these are all arguments that a model needs."""
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except TypeError:
        return False
    return True
