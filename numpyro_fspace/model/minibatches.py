"""Minibatches: which rows of a subsampled plate a gradient step uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["minibatch"]


def minibatch(key, size: int, batch_size: int, *, name: str = "plate"):
    """``batch_size`` distinct indices below ``size``, one from each of ``batch_size`` strata, in O(batch_size).

    The strata are runs of consecutive indices whose lengths differ by at most one. They are shifted cyclically by a
    random number, so all indices have the same probability and gradients are unbiased. The variance of the gradients is
    that of drawing without replacement if the order of the data is arbitrary, and smaller if neighbors are similar.

    Raises:
        ValueError: unless 1 ≤ batch_size ≤ size.

    Reference: W. G. Cochran (1977), *Sampling techniques*, chapter 5.
    """
    if not 1 <= batch_size <= size:
        raise ValueError(f"plate {name!r}: subsample_size={batch_size} must lie between 1 and the plate's size {size}.")
    edges = np.arange(batch_size + 1) * size // batch_size
    key_angle, key_rows = jax.random.split(key)
    widths = np.diff(edges)
    # Rounding may favor some rows of a stratum by one part in 10⁷; the shift makes all probabilities equal again.
    places = (jax.random.uniform(key_rows, (batch_size,), jnp.float32) * widths).astype(int)
    rows = edges[:-1] + jnp.minimum(places, widths - 1)
    return (rows + jax.random.randint(key_angle, (), 0, size)) % size
