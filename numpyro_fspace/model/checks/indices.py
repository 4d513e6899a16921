"""Checks of a model's program for row numbers that an array does not have, which JAX replaces by other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.lax import GatherScatterMode

from numpyro_fspace._checks import native, warn
from numpyro_fspace.model.programs.jaxpr_analysis import inlined

#: Minibatches are checked at up to this number of places in the data, plus one.
NUM_PARTS = 1000


class PlateRows(NamedTuple):
    """A plate: its size, the number of rows of a minibatch, and the names of the sites inside."""

    size: int
    batch: int
    sites: list


def plates_of(trace) -> dict[str, PlateRows]:
    """The plates of a trace."""
    sites = [s for s in trace.values() if s["type"] == "sample"]
    inside = {k: [s["name"] for s in sites if k in [f.name for f in s["cond_indep_stack"]]] for k in trace}
    plates = {k: s["args"] for k, s in trace.items() if s["type"] == "plate"}
    return {k: PlateRows(size, size if batch is None else batch, inside[k]) for k, (size, batch) in plates.items()}


def check_indices(
    program: ClosedJaxpr, inputs: Sequence, plates: dict, arguments: Sequence, *, part: int | None = None
):
    """Check that a model reads only existing rows of arrays, for row numbers that do not depend on random values.

    Args:
        program: the program of the model.
        inputs: its inputs; None for unknown ones.
        plates: the plates of the model.
        arguments: pairs of a name and an argument of the model.
        part: position of the input that moves minibatches through the data, with values from 0 to ``NUM_PARTS``; None
            if there is no such input.

    Raises:
        ValueError: an array is shorter than a plate whose rows are read from it.

    Warns:
        RuntimeWarning: other rows do not exist. ``array.at[rows].get(mode="clip")`` states that clipping is intended.
            Or an argument's negative numbers take rows from the end, as pandas' code -1 of a missing category does.
    """
    values = [None if jax.tree.leaves(a) == [] or isinstance(a, jax.core.Tracer) else a for a in inputs]
    steps, _ = inlined(program, values)
    constant = {i for i, value in enumerate(values) if value is not None}
    known = constant | ({part} if part is not None else set())
    for step in steps:
        for one in (constant, known):
            if one.issuperset(step.inputs) and not step.equation.effects:
                one.update(step.outputs)
    num = max([1, *(-(-plate.size // plate.batch) for plate in plates.values() if plate.batch)])
    places = np.unique(np.linspace(0, NUM_PARTS, min(num, NUM_PARTS) + 1).astype(np.int32))
    places = places if part in known and num > 1 else places[:1]
    taking = [step for step in steps if _indices(step) and known.issuperset(_indices(step))]
    is_signed = has_negatives(arguments)
    signs = [_signs(steps, step) if is_signed else [] for step in taking]

    def taken(place, arrays):
        given = [arrays.get(i, value) for i, value in enumerate(values)]
        if part is not None:
            given[part] = place
        return [
            (_evaluate(steps, given, _indices(step)), _evaluate(steps, given, negative))
            for step, negative in zip(taking, signs, strict=True)
        ]

    arrays = {i: value for i, value in enumerate(values) if value is not None and np.ndim(value)}
    if not taking:
        return
    try:
        found = jax.jit(jax.vmap(taken, in_axes=(0, None))).lower(places, arrays).compile()(places, arrays)
    except TypeError:  # the model computes row numbers in a precision that is not enabled here
        return
    with jax.ensure_compile_time_eval():
        for step, (indices, negative) in zip(taking, jax.tree.map(np.asarray, found), strict=True):
            array = _evaluate(steps, values, step.inputs[:1])[0] if step.inputs[0] in constant else None
            _check(step, indices, array, plates, arguments)
            if any(np.any(one) for one in negative):
                warn(
                    "The model takes rows by an argument's negative numbers, which count from the end: -1, pandas' "
                    "code of a missing category, is the last row. Number groups from 0; if the end is intended, pass "
                    "rows % len(array)."
                )


def _check(step, indices, array, plates, arguments):
    operand, params = step.equation.invars[0].aval, step.equation.params
    is_gather = step.equation.primitive.name == "gather"
    axes = params["dimension_numbers"].start_index_map if is_gather else range(operand.ndim)
    mode = params["mode"] if is_gather else GatherScatterMode.PROMISE_IN_BOUNDS
    by_axis = np.moveaxis(indices[0], -1, 0) if is_gather else indices
    for axis, rows in zip(axes, by_axis, strict=True):
        last = operand.shape[axis] - params["slice_sizes"][axis]
        if not rows.size or (rows.min() >= 0 and rows.max() <= last):
            continue
        low, high, length = rows.min(), rows.max() + params["slice_sizes"][axis] - 1, operand.shape[axis]
        name = _name(array, arguments)
        what = f"{name or 'an array'} of shape {list(operand.shape)}"
        for plate, (size, _, sites) in plates.items():
            if (low, high) == (0, size - 1):
                raise ValueError(
                    f"The plate {plate!r} (sites: {', '.join(map(repr, sites)) or 'none'}) has {size} rows, and they "
                    f"are taken from {what}, which has {length} along axis {axis}: JAX would replace missing rows by "
                    "the last one. Give the plate the size of the data, and the arrays as many rows."
                )
        if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
            warn(
                f"The model takes the rows {low} to {high} of {what}, which has 0 to {length - 1} along axis {axis}: "
                "JAX replaces missing rows by the nearest one. Number groups from 0; if clipping is intended, write "
                'array.at[rows].get(mode="clip").'
            )


def _name(array, arguments) -> str | None:
    """The name of the argument that is equal to an array of the program; None if there is none."""
    if array is None or isinstance(array, jax.core.Tracer):
        return None
    for name, leaf in arguments:
        is_like = isinstance(leaf, np.ndarray | jax.Array) and np.shape(leaf) == np.shape(array)
        if is_like and np.array_equal(jnp.asarray(native(leaf)), np.asarray(array), equal_nan=True):
            return name
    return None


def has_negatives(arguments: Sequence) -> bool:
    """Whether an array of integers among pairs of a name and an argument holds negative numbers."""
    arrays = [a for _, a in arguments if isinstance(a, np.ndarray | jax.Array) and not isinstance(a, jax.core.Tracer)]
    return any(np.any(np.asarray(a) < 0) for a in arrays if jnp.issubdtype(a.dtype, jnp.signedinteger))


def _signs(steps, step) -> list:
    """The comparisons by which ``array[rows]`` adds the length of the array to negative rows."""
    makers = {output: one for one in steps for output in one.outputs}
    found: list = []
    waiting = _indices(step)
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None:
            continue
        kind = maker.equation.primitive.name
        if kind == "select_n":
            sign = makers.get(maker.inputs[0])
            found += maker.inputs[:1] if sign is not None and sign.equation.primitive.name == "lt" else []
        elif kind in ("broadcast_in_dim", "concatenate", "convert_element_type", "reshape", "squeeze"):
            waiting = waiting + maker.inputs
    return found


def _indices(step) -> list:
    """The values that select the rows which a step reads from its first input; none if it reads no rows."""
    kind = step.equation.primitive.name
    return step.inputs[1:] if kind in ("gather", "dynamic_slice") else []


def _evaluate(steps, values, wanted) -> list:
    """The wanted values of a program, computed with only the steps that they need."""
    makers = {output: step for step in steps for output in step.outputs}
    values, missing = dict(enumerate(values)), list(wanted)
    while missing:
        if values[missing[-1]] is not None:
            missing.pop()
            continue
        step = makers[missing[-1]]
        needed = [i for i in step.inputs if values[i] is None]
        missing += needed
        if not needed:
            primitive, params = step.equation.primitive, step.equation.params
            made = primitive.bind(*(values[i] for i in step.inputs), **params)
            values.update(zip(step.outputs, made if primitive.multiple_results else [made], strict=True))
    return [values[i] for i in wanted]
