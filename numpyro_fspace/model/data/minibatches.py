"""Minibatches: which rows of a subsampled plate a gradient step uses; a model that has them, outside of a run.

A run asks for them by the effect handler ``fresh_draws`` (``model/handlers.py``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


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


class ModelOfRows:
    """A model with minibatches, as a kernel hands it out after a run.

    It says what to do where somebody runs it without a random key, as ``arviz.from_numpyro`` and
    ``numpyro.infer.log_likelihood`` do; in all else it is the model.
    """

    def __init__(self, model):
        functools.update_wrapper(self, model, updated=())
        self.fn = model

    def __call__(self, *args, **kwargs):
        try:
            return self.fn(*args, **kwargs)
        except ValueError as error:
            if "random key to generate subsample" not in str(error):
                raise
            raise ValueError(
                "The model draws minibatches and has no random key here, so that the log-likelihood of all rows is "
                "not known. In place of arviz.from_numpyro(mcmc) call fs.to_arviz(mcmc), which evaluates the model at "
                "its full data; or leave it out, arviz.from_numpyro(mcmc, log_likelihood=False)."
            ) from error
