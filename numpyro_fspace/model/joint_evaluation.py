"""A function evaluated at the measurement points and at the inputs of the data in one forward and backward pass.

Points that are rows of the data cost nothing. They are recognized by their values, because most programs make their
points from the data outside of the model, as in ``fs.measurement.fixed(x)``, where they could not name the argument of
the model.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from numpyro.primitives import Messenger

from numpyro_fspace.model.networks.random_module import InputsError, numbers, points_of
from numpyro_fspace.model.sites import is_functional_prior
from numpyro_fspace.priors.tracing import is_traced


class Found(NamedTuple):
    """Which points are rows of the data, found by a pass in which both were concrete.

    Attributes:
        known: the points, as bytes.
        is_there: for each point, whether it is a row of the data, as bytes.
        numbers: row numbers in the data [P], which may be an argument of a program; None if the points are the first P
            rows, in order.
    """

    known: bytes
    is_there: bytes
    numbers: np.ndarray | jax.Array | None


class OnePass:
    """``fn`` for a running model, whose first call also computes the values at the measurement points.

    The first call at inputs of the same shape and type as the points evaluates the network at both together, which
    costs less than two passes, also in the gradient. Points that are among these inputs cost nothing. The value of
    ``fn`` at an input must depend only on that input.

    Args:
        fn: function of inputs [M, D] to values [M] or [M, K].
        x: measurement points [M, D].
        known: with ``drawn``, the pool [P, D] from which x is drawn; without, x itself (P = M), with NaN in the rows
            that are not known before tracing. None means x.
        drawn: row numbers of x in the pool [M].
        name: name of the functional prior, for error messages.
    """

    def __init__(self, fn, x, known=None, drawn=None, *, name=""):
        self.name, self.fn, self.x, self.drawn = name, fn, x, drawn
        self.known = x if known is None else known
        self._is_there, self._numbers = np.zeros(len(self.known), bool), np.arange(len(self.known))
        self._values, self._trace = None, _current_trace()
        self._assumed, self._arguments = None, ()

    def __call__(self, x):
        if self._values is not None or not self._can_join(x):
            return self.fn(x)
        self._match_points(x)
        others, places = self._places()
        both = self._array(self.fn(jnp.concatenate([_rows(self.x, others), jnp.asarray(x)]) if len(others) else x))
        self._values = _rows(both, places)
        return both[len(others) :]

    def values(self):
        """fn(x) at the measurement points."""
        if self._values is None:
            try:
                self._values = self._array(self.fn(self.x))
            except InputsError as error:
                raise ValueError(
                    f"functional_prior({self.name!r}): the points have {numbers(self.x.shape[1])}, and its function "
                    f"does not take them ({error}). Give as many as an input has: with 2 inputs {points_of(2)}."
                ) from error
        return self._values

    def _array(self, values):
        if not hasattr(values, "shape"):
            kinds = jax.tree.map(lambda part: getattr(part, "shape", part), values)
            raise ValueError(
                f"functional_prior({self.name!r}): its function must return one array [M] or [M, K], got {kinds}. Give "
                "each output a function of its own, lambda x: f(x)[...], with a prior of its own."
            )
        return values

    def found(self) -> Found | None:
        """Which of the points are rows of the data; None if none are, or if this is not known."""
        known = _as_bytes(self.known)
        if known is None or not self._is_there.any():
            return None
        is_first = np.array_equal(self._numbers, np.arange(len(self._numbers)))
        return Found(known, self._is_there.tobytes(), None if is_first else self._numbers)

    def assume(self, found: Found, arguments):
        """Use the result of another pass of the same model, in which the ``arguments`` of this program were concrete.

        The result is trusted only if the points are the same and the input is one of these arguments, the same object.
        An array that only equaled the data then, such as latent inputs that start at the data, may differ by now.
        """
        self._assumed, self._arguments = found, arguments

    def _can_join(self, x) -> bool:
        """Whether ``x`` can be evaluated with the points: same row shape, type and trace, and not sharded by rows."""
        is_array = isinstance(x, np.ndarray | jax.Array)
        same_kind = is_array and jnp.shape(x)[1:] == self.x.shape[1:] and jnp.result_type(x) == self.x.dtype
        return same_kind and jnp.ndim(x) > 0 and self._trace == _current_trace() and not _rows_may_be_spread()

    def _match_points(self, x):
        assumed, found = self._assumed, None
        if x is self.known:
            found = np.arange(len(x))
        elif not is_traced((x, self.known)):
            found = matching_rows(self.known, x)
        if found is not None:
            self._is_there, self._numbers = found >= 0, found
        elif assumed and any(x is one for one in self._arguments) and assumed.known == _as_bytes(self.known):
            self._is_there = np.frombuffer(assumed.is_there, bool)
            self._numbers = self._numbers if assumed.numbers is None else assumed.numbers
        if self.drawn is not None and not self._is_there.all():  # a draw may contain any row of the pool
            self._is_there = np.zeros(len(self.known), bool)

    def _places(self):
        """Numbers of the points that are put before the data, and the places of all points in the joint inputs."""
        num, is_other = len(self.x), ~self._is_there
        if not is_other.any():
            return np.arange(0), self._numbers if self.drawn is None else jnp.asarray(self._numbers)[self.drawn]
        if is_other.all():
            return np.arange(num), np.arange(num)
        return np.flatnonzero(is_other), jnp.where(is_other, np.cumsum(is_other) - 1, self._numbers + is_other.sum())


def rows_found(trace) -> dict[str, Found]:
    """Which points of each functional prior are rows of the data, by name; priors without such points are omitted."""
    passes = {k: s["fn"].one_pass for k, s in trace.items() if is_functional_prior(s)}
    found = {k: one.found() for k, one in passes.items() if one is not None}
    return {k: v for k, v in found.items() if v is not None}


class assume_rows_of_points(Messenger):
    """Gives the functional priors of a compiled program the result of ``rows_found`` from before it was compiled.

    Args:
        found: by name of site, which points are rows of the data.
        arguments: the traced arguments of the program.
    """

    def __init__(self, found, arguments):
        super().__init__()
        self.found, self.arguments = found, arguments

    def postprocess_message(self, msg):
        if is_functional_prior(msg) and msg["name"] in self.found and msg["fn"].one_pass is not None:
            msg["fn"].one_pass.assume(self.found[msg["name"]], self.arguments)


def _rows(x, numbers):
    """x[numbers], as a slice if these are the first rows."""
    is_first = not is_traced(numbers) and np.array_equal(numbers, np.arange(len(numbers)))
    return x[: len(numbers)] if is_first else x[numbers]


def matching_rows(points, x):
    """For each of the ``points`` [P, ...], the number of an equal row of ``x`` [N, ...], or -1 if there is none."""
    nowhere = np.full(len(points), -1)
    if not len(x) or not all(getattr(array, "is_fully_addressable", True) for array in (points, x)):
        return nowhere  # other processes may hold parts of the arrays
    points = np.asarray(points)
    is_known = ~np.isnan(points.reshape(len(points), -1)).any(1)
    if not is_known.any():
        return nowhere
    wanted, rows = _as_strings(points), _as_strings(np.asarray(x, points.dtype))
    order = np.argsort(rows, kind="stable")
    places = order[np.minimum(np.searchsorted(rows, wanted, sorter=order), len(rows) - 1)]
    return np.where((rows[places] == wanted) & is_known, places, nowhere)


def _as_strings(x):
    """The rows of an array, each as a string of bytes."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()


def _as_bytes(x) -> bytes | None:
    return None if is_traced(x) else np.asarray(x).tobytes()


def _rows_may_be_spread() -> bool:
    """Whether a mesh may shard data over several devices; prepending rows would then move all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _current_trace():
    return get_opaque_trace_state(convention="nnx")
