"""Regression targets for class labels, with which a GP over logits can be trained by marginal likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import as_numbers, check_count
from numpyro_fspace.priors.base import as_positive
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float, Int


def dirichlet_targets(
    labels: Int[ArrayLike, " N"], num_classes: int, *, concentration: float = 0.01
) -> tuple[Float[np.ndarray, "N K"], Float[np.ndarray, "N K"]]:
    r"""Gaussian targets for logits, which approximate the gamma variables of a Dirichlet distribution as log-normal.

    .. math:: \alpha_{nk} = \epsilon + [y_n = k], \quad s^2_{nk} = \log(1 + 1/\alpha_{nk}), \quad
              \tilde y_{nk} = \log \alpha_{nk} - s^2_{nk} / 2

    Regression with observations ỹ_k ~ N(f_k, s²_k) then approximates classification by a softmax of the functions f_k.

    Args:
        labels: classes y [N], integers from 0 to K - 1; the values of a traced array are not checked.
        num_classes: K, at least 2.
        concentration: ε > 0. The smaller it is, the more certain the classes can be.

    Returns:
        Targets ỹ [N, K] and their variances s² [N, K].

    Raises:
        ValueError, TypeError: labels are not integers from 0 to K - 1, or another argument is out of range.

    Example:
        >>> import numpyro_fspace as fs
        >>> targets, variances = fs.dirichlet_targets([0, 2], 3)
        >>> targets.round(2).tolist()
        [[-0.33, -6.91, -6.91], [-6.91, -6.91, -0.33]]

    Reference: D. Milios et al. (2018), *Dirichlet-based Gaussian processes for large-scale calibrated classification*.
    """
    check_count(num_classes, "num_classes", 2)
    concentration = float(as_positive(concentration, "concentration"))
    given = as_numbers(labels, "labels")
    xp: Any = jnp if is_traced(given) else np
    classes = xp.asarray(given)
    if classes.ndim != 1 or not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"labels must be integers [N], got {classes.dtype} of shape {classes.shape}.")
    if xp is np and classes.size and not 0 <= classes.min() <= classes.max() < num_classes:
        raise ValueError(
            f"labels must lie from 0 to num_classes - 1 = {num_classes - 1}, got {classes.min()} to {classes.max()}."
        )
    alpha = concentration + (classes[:, None] == xp.arange(num_classes))
    variance = xp.log1p(1.0 / alpha)
    return xp.log(alpha) - 0.5 * variance, variance
