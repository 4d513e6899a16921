"""Where chains start: the init strategy of networks, and checks of the values that any strategy gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer import init_to_median

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.model.sites import latent_sites


def init_to_network(site: dict | None = None):
    """Start networks from their own initializers and all other sites from their prior medians.

    This is a NumPyro init strategy: ``NUTS(model, init_strategy=fs.model.init_to_network)``. Sites that do not belong
    to a network, and weights whose prior is not supported on the whole real line, use ``numpyro.infer.init_to_median``
    (which uses ``init_to_uniform`` where the prior cannot be sampled).

    Args:
        site: a NumPyro message, or None for the strategy itself.

    Returns:
        The initial value of the site.

    Example:
        >>> init_to_network().func is init_to_network
        True
    """
    if site is None:
        return functools.partial(init_to_network)
    init = site["infer"].get("fspace", {}).get("init") if site["type"] == "sample" else None
    if init is None or site["value"] is not None:
        return init_to_median(site, num_samples=15)
    return init(site["kwargs"]["rng_key"])


def checked_starts(init_strategy):
    """``init_strategy`` with checked values, broadcast to the shapes of the sites."""

    def start(site):
        if not latent_sites({site["name"]: site}):
            return init_strategy(site)
        distribution, name = site["fn"], f"The start of the site {site['name']!r}, as init_strategy gives it,"
        kind = type(distribution).__name__
        if not isinstance(distribution.support, constraints.Constraint):
            raise ValueError(
                f"The distribution of the latent site {site['name']!r} has no support: give {kind} one, such as "
                "support = numpyro.distributions.constraints.real."
            )
        if not distribution.support.is_discrete:  # check_sites refuses discrete sites
            try:
                biject_to(distribution.support)
            except NotImplementedError as error:
                raise ValueError(
                    f"The latent site {site['name']!r} has the support {distribution.support}, for which NumPyro has "
                    f"no transform from the reals: give {kind} another support, or reparametrize the site "
                    "(numpyro.handlers.reparam, for a ProjectedNormal by ProjectedNormalReparam)."
                ) from error
        value = init_strategy(site)
        if value is None:
            return None
        value = as_numbers(value, name)
        is_known = not isinstance(value, jax.core.Tracer)
        value = np.asarray(value) if is_known else value
        if not isinstance(distribution, dist.MaskedDistribution):  # its shape may be that of its mask
            try:
                value = (np if is_known else jnp).broadcast_to(value, distribution.shape())
            except ValueError:
                raise ValueError(f"{name} has shape {value.shape}, but the site has {distribution.shape()}.") from None
        with jax.ensure_compile_time_eval():
            inside = distribution.support(value) if is_known else True
        if not isinstance(inside, jax.core.Tracer) and not np.all(inside):
            raise ValueError(f"{name} lies outside of its support ({distribution.support}): {value}.")
        return jnp.asarray(value, jnp.result_type(value, float))

    return start
