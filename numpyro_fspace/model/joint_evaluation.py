"""A function evaluated at the measurement points and at the data's inputs in one pass, forwards and backwards.

Points that are rows of the data cost nothing. They are recognized by their values rather than declared, because most
programs make their points from the data outside of the model, as in ``fs.measurement.fixed(x)``, where no declaration
could name the model's argument without a change to every such program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from numpyro.primitives import Messenger

from numpyro_fspace.model.sites import is_functional_prior
from numpyro_fspace.priors._cholesky import is_traced

__all__ = ["Found", "OnePass", "points_in_data", "rows_among", "rows_found"]


class Found(NamedTuple):
    """Which points are among the data, as a pass found it where both were concrete.

    Attributes:
        known: the points, as bytes.
        is_there: whether each of them is among the data, as bytes.
        numbers: row numbers in the data [P], which may be arguments of a program too; None if the points are its first
            P rows, in order.
    """

    known: bytes
    is_there: bytes
    numbers: np.ndarray | jax.Array | None


class OnePass:
    """``fn`` for a model that is running, with its values at measurement points evaluated along the way.

    The first call at inputs that are rows of the same kind takes the measurement points along: a network is run over
    both at once, which costs less than twice, in the gradient too. Points that are among these inputs cost nothing. A
    function's value at an input is taken to depend on that input alone.

    Args:
        fn: function of inputs [M, D] to values [M] or [M, K].
        x: measurement points [M, D].
        known: points that are known before any are drawn, [P, D]. With ``drawn`` these are a pool; without, x itself
            (P = M) with NaN in rows that are not known. None is x.
        drawn: row numbers of x in the pool [M].
    """

    def __init__(self, fn, x, known=None, drawn=None):
        self.fn, self.x, self.known, self.drawn = fn, x, x if known is None else known, drawn
        self._is_there, self._numbers = np.zeros(len(self.known), bool), np.arange(len(self.known))
        self._values, self._trace = None, _current_trace()
        self._assumed, self._arguments = None, ()

    def __call__(self, x):
        if self._values is not None or not self._goes_with(x):
            return self.fn(x)
        self._look_for_points(x)
        others, places = self._places()
        both = self.fn(jnp.concatenate([_rows(self.x, others), jnp.asarray(x)]) if len(others) else x)
        self._values = _rows(both, places)
        return both[len(others) :]

    def values(self):
        """fn(x) at the measurement points."""
        if self._values is None:
            self._values = self.fn(self.x)
        return self._values

    def found(self) -> Found | None:
        """Which of the points are among the data; None if none of use."""
        known = _as_bytes(self.known)
        if known is None or not self._is_there.any():
            return None
        is_first = np.array_equal(self._numbers, np.arange(len(self._numbers)))
        return Found(known, self._is_there.tobytes(), None if is_first else self._numbers)

    def assume(self, found: Found, arguments):
        """Use what another pass of the same model found when the ``arguments`` of this program were concrete.

        It holds for inputs that are one of these arguments and for the same points only: other arrays that were equal
        then, such as latent inputs that start at the data, may differ later.
        """
        self._assumed, self._arguments = found, arguments

    def _goes_with(self, x) -> bool:
        """Whether ``x`` are rows of the same kind, on one device, and under no transformation in the model (a scan)."""
        is_array = isinstance(x, np.ndarray | jax.Array)
        same_kind = is_array and jnp.shape(x)[1:] == self.x.shape[1:] and jnp.result_type(x) == self.x.dtype
        return same_kind and jnp.ndim(x) > 0 and self._trace == _current_trace() and not _rows_may_be_spread()

    def _look_for_points(self, x):
        assumed, found = self._assumed, None
        if x is self.known:
            found = np.arange(len(x))
        elif not is_traced((x, self.known)):
            found = rows_among(self.known, x)
        if found is not None:
            self._is_there, self._numbers = found >= 0, found
        elif assumed is not None and self._is_argument(x) and assumed.known == _as_bytes(self.known):
            self._is_there = np.frombuffer(assumed.is_there, bool)
            self._numbers = self._numbers if assumed.numbers is None else assumed.numbers
        if self.drawn is not None and not self._is_there.all():  # any of them may be drawn
            self._is_there = np.zeros(len(self.known), bool)

    def _is_argument(self, x) -> bool:
        return any(x is one for one in self._arguments)

    def _places(self):
        """Numbers of the points that go before the data, as they are not among them; where all points are then."""
        num, is_other = len(self.x), ~self._is_there
        if not is_other.any():
            return np.arange(0), self._numbers if self.drawn is None else jnp.asarray(self._numbers)[self.drawn]
        if is_other.all():
            return np.arange(num), np.arange(num)
        return np.flatnonzero(is_other), jnp.where(is_other, np.cumsum(is_other) - 1, self._numbers + is_other.sum())


def rows_found(trace) -> dict[str, Found]:
    """Which points of each functional prior of a trace are rows of the data, by its name, where any are."""
    passes = {k: s["fn"].one_pass for k, s in trace.items() if is_functional_prior(s)}
    found = {k: one.found() for k, one in passes.items() if one is not None}
    return {k: v for k, v in found.items() if v is not None}


class points_in_data(Messenger):
    """Gives the functional priors of a compiled program what ``rows_found`` gave before it was compiled.

    Args:
        found: by name of site, which points are rows of the data.
        arguments: the arrays that stand for the model's arguments in the program.
    """

    def __init__(self, found, arguments):
        super().__init__()
        self.found, self.arguments = found, arguments

    def postprocess_message(self, msg):
        if is_functional_prior(msg) and msg["name"] in self.found and msg["fn"].one_pass is not None:
            msg["fn"].one_pass.assume(self.found[msg["name"]], self.arguments)


def _rows(x, numbers):
    """x[numbers], without a copy of them one by one where they are the first."""
    is_first = not is_traced(numbers) and np.array_equal(numbers, np.arange(len(numbers)))
    return x[: len(numbers)] if is_first else x[numbers]


def rows_among(points, x):
    """For each of the ``points`` [P, ...] the number of an equal row of ``x`` [N, ...], -1 where there is none."""
    nowhere = np.full(len(points), -1)
    if not len(x) or not all(getattr(array, "is_fully_addressable", True) for array in (points, x)):
        return nowhere  # parts of the arrays may lie with other processes
    points = np.asarray(points)
    is_known = ~np.isnan(points.reshape(len(points), -1)).any(1)
    if not is_known.any():
        return nowhere
    wanted, rows = _as_strings(points), _as_strings(np.asarray(x, points.dtype))
    order = np.argsort(rows, kind="stable")
    places = order[np.minimum(np.searchsorted(rows, wanted, sorter=order), len(rows) - 1)]
    return np.where((rows[places] == wanted) & is_known, places, nowhere)


def _as_strings(x):
    """The rows of an array, each as one string of bytes."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()


def _as_bytes(x) -> bytes | None:
    return None if is_traced(x) else np.asarray(x).tobytes()


def _rows_may_be_spread() -> bool:
    """Whether a mesh has an axis of several devices for data: rows put before theirs would move all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _current_trace():
    return get_opaque_trace_state(convention="nnx")
