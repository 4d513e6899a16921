"""Unconstrained parameters of latent sites: their transforms, their signs, and their prior scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints, transforms

from numpyro_fspace.model.sites import base_distribution

#: Number of prior draws from which a scale without a closed form is estimated.
NUM_SCALE_DRAWS = 200


def base_transform(site):
    """The transform from unconstrained values to one element of a site's support."""
    transform = biject_to(site["fn"].support)
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    return transform


def is_positive(site):
    """Whether the support of a site has a lower bound only, which it reaches as the unconstrained value tends to -∞."""
    transform = base_transform(site)
    if isinstance(transform, transforms.ComposeTransform):  # of greater_than(low): a shifted exponential
        transform, *others = transform.parts
        if not all(isinstance(other, transforms.AffineTransform) for other in others):
            return False
    return isinstance(transform, transforms.ExpTransform | transforms.SoftplusTransform)


def has_dynamic_support(site) -> bool:
    """Whether the support of a site may depend on other sites."""
    support = site["fn"].support
    while isinstance(support, type(constraints.independent(constraints.real, 1))):
        support = support.base_constraint
    bounds = [getattr(support, name, 0.0) for name in ("lower_bound", "upper_bound")]
    return not all(isinstance(bound, int | float) for bound in bounds)


def prior_scale(site, key):
    """The prior standard deviation of the unconstrained parameters of a site, or an estimate of it."""
    hint = site["infer"].get("fspace", {}).get("scale")
    if hint is not None:
        return jnp.asarray(hint)
    distribution = site["fn"]
    if isinstance(base_distribution(distribution), dist.Normal):
        return jnp.sqrt(distribution.variance)
    try:
        draws = biject_to(distribution.support).inv(distribution.sample(key, (NUM_SCALE_DRAWS,)))
    except NotImplementedError:  # an improper distribution, or one without a sampler
        return jnp.ones(())
    low, high = jnp.quantile(draws, jnp.array([0.25, 0.75]), axis=0)
    scale = (high - low) / 1.349
    return jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1.0)
