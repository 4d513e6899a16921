"""The nugget of a Gaussian prior: its default, and its form as diagonals of covariance blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import warn
from numpyro_fspace.priors.base import as_values

if TYPE_CHECKING:
    from jaxtyping import Float

    from numpyro_fspace.priors.cholesky import AnyArray

#: The default nugget, relative to the mean variance of the smallest summand of the kernel.
RELATIVE_NUGGET = 1e-2
#: The default nugget is at least the one for a summand with this share of the variance.
SMALLEST_SHARE = 1e-2


def default_nugget(share: Float[AnyArray, " B"], covariance: Float[AnyArray, "B M M"]) -> Float[AnyArray, " B"]:
    """``RELATIVE_NUGGET`` times the mean variance of the smallest summand, which a larger nugget would hide.

    Args:
        share: share of the smallest summand in the mean variance, by block.
        covariance: covariance blocks.
    """
    if isinstance(share, np.ndarray) and np.any(share < 0.1 * SMALLEST_SHARE):
        warn(
            f"A summand of the kernel has the share {share.min():.1g} of the variance at the points, and the default "
            f"nugget ({RELATIVE_NUGGET * SMALLEST_SHARE:.0e} of the variance) hides much of it. Pass nugget= with a "
            "hundredth of the summand's variance, or remove the summand."
        )
    xp = np if isinstance(share, np.ndarray) and isinstance(covariance, np.ndarray) else jnp
    variance = covariance.diagonal(axis1=-2, axis2=-1).mean(-1)
    return RELATIVE_NUGGET * xp.maximum(share, SMALLEST_SHARE) * variance


def as_diagonal(nugget, num_points: int, num_outputs: int | None, *, size: int, name: str):
    """A nugget or noise (a scalar, [M] or [M, K]) as diagonals that broadcast to the blocks [B, size, size]."""
    if nugget.ndim == 2:
        nugget = as_values(nugget, num_points, num_outputs, name)
        return nugget.T if size == num_points else nugget.reshape(1, -1)
    if nugget.shape not in [(), (num_points,)]:
        raise ValueError(f"{name} must be a scalar or have shape [{num_points}], got {list(nugget.shape)}.")
    return nugget.repeat(size // num_points) if nugget.ndim == 1 else nugget
