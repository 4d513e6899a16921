"""What the program of a function shows: on which values it depends, if it vanishes with them, if it is affine.

A *program* is a ``jaxpr``, what JAX compiles. Nothing is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_fspace.model.programs import affine


def depends_on(fn, values: dict) -> set:
    """Names of the ``values`` on which the program of ``fn(values)`` depends; possibly too many, never too few."""
    return set().union(*sources(lambda values: {"": fn(values)}, values).values())


def sources(fn, values: dict) -> dict:
    """``depends_on`` for each output of ``fn``, which returns a dict."""
    names = [name for name in sorted(values) for _ in jax.tree.leaves(values[name])]
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(values)
    owners = [name for name in sorted(shapes) for _ in jax.tree.leaves(shapes[name])]

    def of(output):
        _, is_used = dce_jaxpr(program.jaxpr, [owner == output for owner in owners])
        return {name for name, used in zip(names, is_used, strict=True) if used}

    return {output: of(output) for output in sorted(shapes)}


#: Operations whose result is zero if one operand is zero, and operations whose result is zero if all operands are.
PRODUCTS, SUMS = affine.PRODUCTS, affine.SUMS | {"convert_element_type"}
#: Operations that are affine in their first operand if the others are constant.
MOVES = {"div", "gather", "dynamic_slice"}
#: Operations that call another program with their operands.
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}


class Step(NamedTuple):
    """An equation of a program whose calls are inlined, with the numbers of the values that it reads and makes."""

    equation: Any
    inputs: list
    outputs: list


def inlined(program, values: list) -> tuple[list[Step], list[int]]:
    """The equations of a program and of the programs that it calls, in order, and the numbers of its outputs.

    Args:
        program: the program.
        values: its inputs; None for unknown ones. All other values of the program are appended: literals and constants,
            and None for traced constants and for results.
    """
    steps = []

    def number(value=None):
        values.append(value)
        return len(values) - 1

    def walk(program, inputs):
        constants = [number(None if isinstance(a, jax.core.Tracer) else a) for a in getattr(program, "consts", ())]
        program = getattr(program, "jaxpr", program)
        names = dict(zip([*program.constvars, *program.invars], [*constants, *inputs], strict=True))

        def read(atoms):
            return [number(a.val) if isinstance(a, Literal) else names[a] for a in atoms]

        for equation in program.eqns:
            given, inner = read(equation.invars), _called(equation)
            made = [number() for _ in equation.outvars] if inner is None else walk(inner, given)
            if inner is None:
                steps.append(Step(equation, given, made))
            names.update(zip(equation.outvars, made, strict=True))
        return read(program.outvars)

    return steps, walk(program, list(range(len(values))))


def _called(equation):
    """The program, possibly with its constants, that an equation calls; None if it does not only call one."""
    if equation.primitive.name not in CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def vanishes_with(fn, values) -> bool:
    """Whether the program of ``fn`` shows that ``fn(values)`` is zero if all ``values`` are zero."""
    num = len(jax.tree.leaves(values))
    known: list = [None] * num
    steps, outputs = inlined(jax.make_jaxpr(fn)(values), known)
    zeros = {i for i, value in enumerate(known) if i < num or _is_zero_literal(value)}
    for step in steps:
        name, are_zero = step.equation.primitive.name, [i in zeros for i in step.inputs]
        if (name in PRODUCTS and any(are_zero)) or (name in SUMS and all(are_zero)):
            zeros.update(step.outputs)
    return outputs[0] in zeros


def _is_zero_literal(value) -> bool:
    """Whether a value of a program is a literal zero. Literals are scalars; other constants may be arrays of JAX."""
    is_literal = value is not None and not isinstance(value, jax.Array) and np.ndim(value) == 0
    return is_literal and not np.any(value)


def constants(program) -> list:
    """The constants of a program, and of all programs within it."""
    found = list(getattr(program, "consts", ()))
    for equation in getattr(program, "jaxpr", program).eqns:
        for part in jax.tree.leaves(list(equation.params.values())):
            found += constants(part) if isinstance(part, ClosedJaxpr | Jaxpr) else []
    return found


#: What a value in a network's program is made of: constants; a linear function of the inputs; another function of the
#: inputs; weights.
CONSTANT, LINEAR, FEATURE, WEIGHTED = range(4)
#: Operations by which a constant translates the inputs.
TRANSLATIONS = {"add", "sub"}


def makes_features(program, num_weights: int) -> bool:
    """Whether a program of weights and x transforms x, other than linearly, before weights meet it."""
    kinds = dict(enumerate([*[WEIGHTED] * num_weights, LINEAR]))
    steps, _ = inlined(program, [None] * len(kinds))
    for step in steps:
        name, given = step.equation.primitive.name, [kinds.get(i, CONSTANT) for i in step.inputs]
        found = max(given, default=CONSTANT)
        if found == WEIGHTED and FEATURE in given:
            return True
        if found == LINEAR:
            is_only = given.count(LINEAR) == 1
            is_sum = name in SUMS and not (is_only and name in TRANSLATIONS)
            is_linear = is_sum or (is_only and (name in PRODUCTS or (name in MOVES and given[0] == LINEAR)))
            found = LINEAR if is_linear else FEATURE
        kinds |= dict.fromkeys(step.outputs, found)
    return False
