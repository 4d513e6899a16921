"""What the program of a function shows: on which values it depends, if it vanishes with them, if it is affine.

A *program* is a ``jaxpr``, what JAX compiles. Nothing is computed.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = ["called", "constants", "depends_on", "makes_features", "sources", "vanishes_with"]


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
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
SUMS = {"add", "add_any", "sub", "neg", "reduce_sum", "reshape", "transpose", "broadcast_in_dim", "squeeze"}
SUMS |= {"convert_element_type", "concatenate", "slice", "copy"}
#: Operations that are affine in their first operand if the others are constant.
MOVES = {"div", "gather", "dynamic_slice", "pad", "rev", "split", "cumsum", "expand_dims"}
#: Operations that call another program with their operands.
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}


def vanishes_with(fn, values) -> bool:
    """Whether the program of ``fn`` shows that ``fn(values)`` is zero if all ``values`` are zero."""
    program = jax.make_jaxpr(fn)(values)
    return _zeros(program.jaxpr, [True] * len(program.jaxpr.invars))[0]


def _zeros(jaxpr, are_zero) -> list[bool]:
    """For each output of a program, whether it is known to be zero, given the same for its inputs."""
    known = dict(zip(map(id, jaxpr.invars), are_zero, strict=True))

    def is_zero(atom):
        return not np.any(atom.val) if hasattr(atom, "val") else known.get(id(atom), False)

    for equation in jaxpr.eqns:
        given = [is_zero(atom) for atom in equation.invars]
        if equation.primitive.name in PRODUCTS:
            found = [any(given)]
        elif equation.primitive.name in SUMS:
            found = [all(given)]
        elif called(equation) is not None:
            found = _zeros(without_constants(called(equation)), given)
        else:
            found = [False] * len(equation.outvars)
        known |= {id(out): one for out, one in zip(equation.outvars, found, strict=True)}
    return [is_zero(out) for out in jaxpr.outvars]


def called(equation):
    """The program, possibly with its constants, that an equation calls; None if it does not only call one."""
    if equation.primitive.name not in CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def constants(program) -> list:
    """The constants of a closed program, and of all programs within it."""
    found = list(program.consts)
    for equation in program.jaxpr.eqns:
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if isinstance(part, ClosedJaxpr):
                found += constants(part)
            elif isinstance(part, Jaxpr):
                found += constants(ClosedJaxpr(part, ()))
    return found


def _is_program(value) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def without_constants(program):
    return getattr(program, "jaxpr", program)


#: What a value in a network's program is made of: constants; an affine function of the inputs; another function of the
#: inputs; weights.
CONSTANT, AFFINE, FEATURE, WEIGHTED = range(4)


def makes_features(apply, weights, x) -> bool:
    """Whether the program of ``apply(weights, x)`` transforms x, other than affinely, before weights meet it."""
    program = jax.make_jaxpr(apply)(weights, x)
    kinds = [*[WEIGHTED] * len(jax.tree.leaves(weights)), AFFINE]
    return _kinds(program.jaxpr, kinds)[1]


def _kinds(jaxpr, kinds) -> tuple[list[int], bool]:
    """The kinds of a program's outputs, given those of its inputs, and whether weights meet a feature in it."""
    known, has_met = dict(zip(map(id, jaxpr.invars), kinds, strict=True)), False

    def kind_of(atom):
        return CONSTANT if hasattr(atom, "val") else known.get(id(atom), CONSTANT)

    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, [kind_of(atom) for atom in equation.invars]
        found = [max(given, default=CONSTANT)] * len(equation.outvars)
        if called(equation) is not None:
            found, has_met_inside = _kinds(without_constants(called(equation)), given)
            has_met |= has_met_inside
        elif WEIGHTED in given:
            has_met |= FEATURE in given
        elif AFFINE in found:
            is_product = name in PRODUCTS and given.count(AFFINE) == 1
            is_move = name in MOVES and given.index(AFFINE) == 0 and given.count(AFFINE) == 1
            if not (name in SUMS or is_product or is_move):
                found = [FEATURE] * len(equation.outvars)
        known |= {id(out): one for out, one in zip(equation.outvars, found, strict=True)}
    return [kind_of(out) for out in jaxpr.outvars], has_met
