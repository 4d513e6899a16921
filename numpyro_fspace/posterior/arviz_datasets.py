"""Arrays as ArviZ's groups: named dimensions with coordinates, without the points that the likelihood leaves out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: The axes before those of a variable: those of draws, and none in the groups of data.
DRAWS = ("chain", "draw")
AXES = {"observed_data": (), "constant_data": ()}
#: The groups of the points that count.
POINTWISE = ("observed_data", "log_likelihood", "posterior_predictive")


class Site(NamedTuple):
    """The dimensions of a model's site.

    Attributes:
        plates: names of its first dimensions, None where there is none.
        event_dim: the number of its last dimensions that are one point together.
        known: for an observation, which of its numbers the likelihood does not leave out; else None.
    """

    plates: list
    event_dim: int
    known: np.ndarray | None


class Variable(NamedTuple):
    """An array and the names of its dimensions; ``kept``, by dimension with rows left out, has the rows kept and N."""

    values: np.ndarray
    dims: list
    kept: dict


def clean(name: str) -> str:
    """The name of a site in ArviZ, whose version 1.x refuses '/'."""
    return name.replace("/", ".")


def check_names(names) -> None:
    """Raise a ValueError if two names of sites have the same ``clean`` name, or one has that of an axis of draws."""
    taken = sorted(set(DRAWS) & set(names))
    if taken:
        raise ValueError(f"to_arviz: {taken} are the names of ArviZ's dimensions of draws: rename these sites.")
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(clean(name), name)
        if other != name:
            raise ValueError(f"to_arviz: the sites {other!r} and {name!r} would both be {clean(name)!r}: rename one.")


def check_dims(dims: dict | None, coords: dict | None) -> None:
    """Raise an error unless ``dims`` has lists of names by variable, other than DRAWS, and ``coords`` is a dict."""
    for name, given in {"dims": dims, "coords": coords}.items():
        if given is not None and not isinstance(given, dict):
            raise TypeError(f"to_arviz: {name} must be a dict by name, got {given!r}.")
    for name, given in (dims or {}).items():
        if not isinstance(given, list | tuple) or not all(isinstance(dim, str | None) for dim in given):
            raise TypeError(f"dims: {name!r} must have a list of names of dimensions, got {given!r}.")
        taken = sorted(set(DRAWS) & set(given))
        if taken:
            raise ValueError(f"dims: {taken} of {name!r} are the dimensions of the draws: choose other names.")


def datasets(groups: dict, sites: dict, dims: dict | None, coords: dict | None) -> dict:
    """An ``xarray.Dataset`` for each group that is not empty.

    Args:
        groups: by name of group, arrays by name of variable, [C, S, ...] in groups of draws.
        sites: the model's, by name of variable.
        dims: names of dimensions after chain and draw, by name of variable.
        coords: coordinates, by name of dimension.

    Raises:
        TypeError: for coordinates that are no array.
        ValueError: for names that are no variables, and coordinates of another length than their dimension.
    """
    dims, coords = dims or {}, {k: _as_coordinates(k, v) for k, v in (coords or {}).items()}
    names = {*sites, *(k for group in groups.values() for k in group)}
    unknown = sorted(set(dims) - names)
    if unknown:
        raise ValueError(f"dims: {unknown} are no variables; there are {sorted(names)}.")
    found = {}
    for group, arrays in groups.items():
        axes = AXES.get(group, DRAWS)
        made = {
            k: _variable(group, k, np.asarray(v), axes=axes, site=sites.get(k), dims=dims.get(k, ()))
            for k, v in arrays.items()
        }
        variables = {k: variable for k, variable in made.items() if variable is not None}
        if variables:
            found[group] = _dataset(variables, axes, coords)
    return found


def _variable(group, name, values, *, axes, site, dims) -> Variable | None:
    """None if no point is left."""
    event_dim = 0 if site is None or group == "log_likelihood" else site.event_dim
    num_own = values.ndim - len(axes)  # dimensions after those of draws
    if group != "log_likelihood" and len(dims) > num_own:
        raise ValueError(f"dims: {name!r} has {num_own} dimensions after chain and draw, got {len(dims)} names {dims}.")
    num_points = num_own - event_dim
    names = list(site.plates) if site is not None and len(site.plates) <= num_points else []
    names = [*dims, *names[len(dims) :]] + [None] * values.ndim
    names = [n or f"{name}_dim_{i}" for i, n in enumerate(names[:num_own])]
    variable = Variable(values, [*axes, *names], {})
    if group not in POINTWISE or site is None or site.known is None or site.known.all():
        return variable
    known = site.known
    if group == "observed_data":
        values = np.broadcast_to(values, known.shape)
    points = known.any(tuple(range(known.ndim - site.event_dim, known.ndim)))
    if points.size and not points.any():
        return None
    if group == "observed_data" and not known[points].all():
        values = np.where(known, values, np.nan)
    return _points(name, values, variable.dims, len(axes), points)


def _points(name, values, dims, start, points) -> Variable:
    """The ``points`` of an array, whose dimensions begin at ``start``."""
    stop = start + points.ndim
    if points.all() or values.shape[start:stop] != points.shape:
        return Variable(values, dims, {})
    for axis in range(points.ndim):
        line = points.any(tuple(i for i in range(points.ndim) if i != axis), keepdims=True)
        if (points == line).all():
            kept = np.flatnonzero(line)
            return Variable(np.take(values, kept, start + axis), dims, {dims[start + axis]: (kept, line.size)})
    dim, kept = f"{name}_point", np.flatnonzero(points)
    flat = values.reshape(*values.shape[:start], points.size, *values.shape[stop:])
    return Variable(np.take(flat, kept, start), [*dims[:start], dim, *dims[stop:]], {dim: (kept, points.size)})


def _as_coordinates(dim: str, values) -> np.ndarray:
    """Coordinates given by the user as an array."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"coords: those of {dim!r} must be a list or an array, got {values!r}: {error}") from None


def _dataset(variables: dict, axes, coords: dict):
    """A dataset. Dimensions of one name are one if they have the same rows; else the later variable's is renamed."""
    import xarray as xr

    indices: dict = {}
    arrays = {}
    for name, (values, dims, kept) in variables.items():
        names: list = []
        for axis, dim in enumerate(dims):
            rows, size = kept.get(dim, (np.arange(values.shape[axis]), values.shape[axis]))
            index = _coordinates(dim, coords[dim], rows, size) if dim in coords else rows
            if axis >= len(axes) and dim in (*variables, *axes):  # a plate that is called like a variable
                dim = f"{dim}_dim"
            for other in (dim, f"{dim}_{name}", f"{name}_dim_{axis - len(axes)}"):
                if other not in names and are_equal(indices.setdefault(other, index), index):
                    break
            names.append(other)
        arrays[name] = (names, values)
    return xr.Dataset(arrays, indices, {"inference_library": "numpyro_fspace"})


def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same shape and the same values; NaN is equal to itself."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fcmM" and other.dtype.kind in "fcmM")


def _coordinates(dim, values, rows, size):
    if values.shape != (size,):
        raise ValueError(f"coords: {dim!r} has {size} rows, got coordinates of shape {values.shape}.")
    return values[rows]
