"""A function evaluated at the measurement points and at the data's inputs in one pass, forwards and backwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_fspace.priors.factor import is_traced

__all__ = ["OnePass", "rows_among"]


class OnePass:
    """``fn`` for a model that is running, with its values at measurement points evaluated along the way.

    The first call at inputs that are rows of the same kind takes the measurement points along: a network is run over
    both at once, which costs less than twice, in the gradient too. Points that are among these inputs cost nothing. A
    function's value at an input is taken to depend on that input alone.

    Args:
        fn: function of inputs [M, D] to values [M] or [M, K].
        x: measurement points [M, D].
        pool: what is known of them before they are drawn, [P, D]: all that can be, or themselves (P = M), with NaN in
            rows that will be drawn; None is x.
        drawn: their row numbers in the pool [M]; None if the pool are themselves.

    Attributes:
        in_data: row numbers of the pool [P] in the inputs of that call, -1 where there is none: found there if both are
            concrete. In a compiled program, whose inputs are not, ``points_in_data`` sets it.
    """

    def __init__(self, fn, x, pool=None, drawn=None):
        self.fn, self.x, self.pool, self.drawn = fn, x, x if pool is None else pool, drawn
        self.in_data = np.full(len(self.pool), -1)
        self._values, self._trace = None, _current_trace()

    def __call__(self, x):
        if self._values is not None or not self._goes_with(x):
            return self.fn(x)
        if x is self.pool:
            self.in_data = np.arange(len(x))
        elif not is_traced((x, self.pool)):
            self.in_data = rows_among(self.pool, x)
        others, places = self._places()
        both = self.fn(jnp.concatenate([_rows(self.x, others), jnp.asarray(x)]) if len(others) else x)
        self._values = _rows(both, places)
        return both[len(others) :]

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

    def _places(self):
        """Numbers of the points that go before the data, as they are not among them; where all points are then."""
        found, num = self.in_data, len(self.x)
        if self.drawn is not None:
            if found.min() >= 0:
                return np.arange(0), jnp.asarray(found)[self.drawn]
            found = np.full(num, -1)
        is_other = found < 0
        return np.flatnonzero(is_other), np.where(is_other, np.cumsum(is_other) - 1, found + is_other.sum())


def _rows(x, numbers):
    """x[numbers], without a copy of them one by one where they are the first."""
    is_first = not is_traced(numbers) and np.array_equal(numbers, np.arange(len(numbers)))
    return x[: len(numbers)] if is_first else x[numbers]


def rows_among(points, x):
    """For each of the ``points`` [P, ...] the number of an equal row of ``x`` [N, ...], -1 where there is none."""
    if not all(getattr(array, "is_fully_addressable", True) for array in (points, x)):  # parts lie with other processes
        return np.full(len(points), -1)
    points = np.asarray(points)
    wanted, rows = _as_bytes(points), _as_bytes(np.asarray(x, points.dtype))
    order = np.argsort(rows, kind="stable")
    places = order[np.minimum(np.searchsorted(rows, wanted, sorter=order), len(rows) - 1)]
    return np.where(rows[places] == wanted, places, -1)


def _as_bytes(x):
    """The rows of an array, each as one string of bytes."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()


def _rows_may_be_spread() -> bool:
    """Whether a mesh has an axis of several devices for data: rows put before theirs would move all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _current_trace():
    return get_opaque_trace_state(convention="nnx")
