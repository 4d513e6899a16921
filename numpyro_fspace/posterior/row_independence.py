"""Whether a model can be evaluated in batches of rows.

It cannot where the values of a row depend on other rows (inputs standardized in the model, attention, a cumulative
sum), on the row's number, or on the number of rows. One draw is evaluated to find out, at as many rows as memory
allows:

* if half of the rows are replaced, the values of the others must not change by a bit, as the program is the same;
* the first rows alone, and the last ones alone, must have the values that they have among all, up to rounding;
* random values must be drawn independently for each row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.sites import base_distribution

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Key

#: Evaluations of rows in programs of different sizes agree if they differ, on average over rows, by less than these
#: shares of the spread of the values and of their size.
SPREAD, SIZE = 1e-2, 1e-5


class Evaluation(NamedTuple):
    """What a model gives at one draw.

    Attributes:
        values: what ``predict`` returns, by name.
        distributions: the distributions that some of the values were drawn from, by name.
        is_noisy: whether the model draws random numbers beside these values.
    """

    values: dict
    distributions: dict
    is_noisy: bool


def take_rows(given, num: int, rows):
    """``given`` with these rows of its arrays of ``num`` rows. An array at several places stays one array."""
    parts = {id(a): a[rows] for a in jax.tree.leaves(given) if np.shape(a)[:1] == (num,)}
    return jax.tree.map(lambda a: parts.get(id(a), a), given)


def find_axes(probe: Probe, given: tuple, size: int, most: int, key: Key[Array, ""]) -> tuple[dict, list]:
    """``(axes, mixed)``: the axis of rows of each value, None if it has none; and the names of values that cannot be
    computed in batches of rows.

    Args:
        probe: evaluates the model at one draw.
        given: the model's arguments.
        size: how many rows a batch is to have.
        most: how many can be evaluated at once.
        key: of what is drawn.

    Raises:
        TypeError, ValueError: of a model that does not take fewer rows.
    """
    many = max(2, min(probe.num, most))
    few = min(size, many // 2)
    run = partial(probe, given)
    rows = np.arange(many)
    whole, start, end = run(key, rows), run(key, rows[:few]), run(key, rows[-few:])
    anew = run(jax.random.fold_in(key, 1), rows)
    axes = {k: _axis(whole[k].shape, start[k].shape, many, few) for k in whole}
    mixed = {k for k, axis in axes.items() if axis is False}
    mixed |= {
        k
        for k, distribution in probe.distributions.items()
        if k not in mixed and (axes[k] or 0) >= whole[k].ndim - distribution.event_dim
    }
    kept = {k: axis for k, axis in axes.items() if k not in mixed}
    is_random = {k for k in kept if not _same(whole[k], anew[k])}
    # Random numbers that are not those of the rows differ from part to part.
    if probe.is_noisy or any(axes[k] is None for k in probe.distributions):
        mixed |= {k for k in is_random if axes[k] is not None and k not in probe.distributions}
    half = many // 2
    for kept_rows, row in ((rows[half:], probe.num - 1), (rows[:half], 0)):
        others = np.full(many, row)
        others[kept_rows] = kept_rows
        found = run(key, others)
        mixed |= {k for k, i in kept.items() if not _same(_take(whole[k], kept_rows, i), _take(found[k], kept_rows, i))}
    for found, place in ((start, rows[:few]), (end, rows[-few:])):
        mixed |= {k for k, i in kept.items() if k not in is_random and not _alike(_take(whole[k], place, i), found[k])}
    without = [k for k, axis in kept.items() if axis is None]
    mixed |= set(without) & probe.depending_on_rows(given, key, rows)
    names = {k.partition(LAW)[0] for k in mixed}
    return {k: axis for k, axis in axes.items() if LAW not in k}, sorted(names)


#: Between the name of a site and the number of a parameter of its distribution, among the outputs of a probe.
LAW = "\0"


class Probe:
    """A model at one draw and some rows: values, and parameters of distributions, by name.

    Args:
        evaluate: ``evaluate(key, *given)``, an ``Evaluation``.
        num: the number of rows of the whole.
    """

    def __init__(self, evaluate: Callable, num: int):
        self.num, self._evaluate = num, evaluate
        self._programs: dict = {}  # one for each number of rows
        self._depending: dict = {}
        self.distributions: dict = {}
        self.is_noisy = False

    def __call__(self, given, key, rows) -> dict:
        arrays, _, join = split_arrays(take_rows(given, self.num, rows))
        program = self._programs.setdefault(len(rows), jax.jit(lambda key, arrays: self._outputs(key, join(arrays))))
        return {k: np.asarray(v) for k, v in program(key, arrays).items()}

    def _outputs(self, key, given) -> dict:
        found = self._evaluate(key, *given)
        self.is_noisy = found.is_noisy
        self.distributions = {k: base_distribution(law) for k, law in found.distributions.items()}
        leaves = {
            k: [a for a in jax.tree.leaves(law) if isinstance(a, jax.Array)] for k, law in found.distributions.items()
        }
        return found.values | {f"{k}{LAW}{i}": a for k, parts in leaves.items() for i, a in enumerate(parts)}

    def depending_on_rows(self, given, key, rows) -> set:
        """Names of the values that depend on arrays of as many rows."""
        if len(rows) in self._depending:
            return self._depending[len(rows)]
        arrays, _, join = split_arrays(take_rows(given, self.num, rows))
        is_cut = [len(a) == len(rows) for a in arrays]

        def outputs(values):
            cut = iter(values["rows"])
            filled = [next(cut) if chosen else a for a, chosen in zip(arrays, is_cut, strict=True)]
            return self._outputs(key, join(filled))

        found = sources(outputs, {"rows": [a for a, chosen in zip(arrays, is_cut, strict=True) if chosen]})
        return self._depending.setdefault(len(rows), {k for k, of in found.items() if of})


def _axis(whole: tuple, part: tuple, many: int, few: int) -> int | bool | None:
    """The axis of rows, None if there is none, False if the shapes differ otherwise."""
    if len(whole) != len(part):
        return False
    changed = [axis for axis, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not changed:
        return None
    return changed[0] if [(whole[i], part[i]) for i in changed] == [(many, few)] else False


def _take(value, rows, axis):
    return value if axis is None else np.take(value, rows, axis)


def _same(a, b) -> bool:
    return np.array_equal(a, b, equal_nan=True)


def _alike(a, b) -> bool:
    if not a.size:
        return True
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    is_known = np.isfinite(a) & np.isfinite(b)
    if not is_known.any():
        return _same(a, b)
    a, b = a[is_known], b[is_known]
    return np.abs(a - b).mean() <= SPREAD * np.abs(b - b.mean()).mean() + SIZE * np.abs(b).mean()
