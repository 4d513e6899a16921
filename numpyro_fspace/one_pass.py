"""A function evaluated at the measurement points and at the data's inputs in one pass, forwards and backwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_fspace.priors.factor import is_traced

__all__ = ["OnePass"]


class OnePass:
    """``fn`` for a model that is running, with its values at measurement points evaluated along the way.

    The first call at inputs that are rows of the same kind takes the measurement points along: a network is run over
    both at once, which costs less than twice, in the gradient too; or over the data alone, where these are the points.
    A function's value at an input is taken to depend on that input alone.

    Args:
        fn: function of inputs [M, D] to values [M] or [M, K].
        x: measurement points [M, D].
    """

    def __init__(self, fn, x):
        self.fn, self.x, self._values, self._trace = fn, x, None, _current_trace()

    def __call__(self, x):
        if self._values is not None or not self._goes_with(x):
            return self.fn(x)
        if self._are_the_points(x):
            self._values = self.fn(x)
            return self._values
        both = self.fn(jnp.concatenate([self.x, jnp.asarray(x)]))
        self._values = both[: len(self.x)]
        return both[len(self.x) :]

    def values(self):
        """fn(x) at the measurement points."""
        if self._values is None:
            self._values = self.fn(self.x)
        return self._values

    def _goes_with(self, x) -> bool:
        """Whether ``x`` are rows of the same kind, on one device, and under no transformation in the model (a scan)."""
        is_array = hasattr(x, "dtype") and hasattr(x, "shape")
        same_kind = is_array and jnp.shape(x)[1:] == self.x.shape[1:] and jnp.result_type(x) == self.x.dtype
        return same_kind and jnp.ndim(x) > 0 and self._trace == _current_trace() and not _rows_may_be_spread()

    def _are_the_points(self, x) -> bool:
        if is_traced((x, self.x)):
            return x is self.x
        return x.shape == self.x.shape and np.array_equal(x, self.x)


def _rows_may_be_spread() -> bool:
    """Whether a mesh has an axis of several devices for data: rows put before theirs would move all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _current_trace():
    return get_opaque_trace_state(convention="nnx")
