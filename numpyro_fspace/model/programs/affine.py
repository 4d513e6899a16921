"""Whether the program of a function shows that its outputs are affine in some of its inputs, and what it costs.

A derivative that does not depend on the inputs is not enough: that of a step function is zero. A value counts as affine
only if all operations by which it depends on the inputs are known to be affine.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

#: How a value depends on the inputs.
CONSTANT, AFFINE, OTHER = range(3)
#: Operations that are affine in all operands together.
SUMS = {"add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "concatenate", "pad", "reshape", "transpose", "rev"}
SUMS |= {"broadcast_in_dim", "squeeze", "expand_dims", "slice", "split", "copy", "copy_p", "real", "imag"}
#: Operations that are affine in each operand if the others are constant.
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
#: Operations that are affine in these operands together if the others are constant.
OPERANDS = {
    "div": (0,),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "triangular_solve": (1,),
}
#: Operations that call another program with their operands. Functions with a derivative of their own are left out,
#: because it may differ from that of the program.
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_vmap_call"}


def kinds(program, given: list[int]) -> list[int]:
    """How each output of a program depends on the inputs of ``kinds`` ``given``."""
    program = getattr(program, "jaxpr", program)
    found = dict.fromkeys(program.constvars, CONSTANT) | dict(zip(program.invars, given, strict=True))

    def read(atoms):
        return [CONSTANT if hasattr(atom, "val") else found[atom] for atom in atoms]

    for equation in program.eqns:
        found.update(zip(equation.outvars, _outputs(equation, read(equation.invars)), strict=True))
    return read(program.outvars)


def _outputs(equation, given):
    name, params, num = equation.primitive.name, equation.params, len(equation.outvars)
    worst = max(given, default=CONSTANT)
    if worst == CONSTANT:
        return [CONSTANT] * num
    if name in CALLS:
        return kinds(_called(params), given)
    if name == "scan":
        return _scan(params, given)
    if name == "cond":
        ways = [kinds(branch, given[1:]) for branch in params["branches"]]
        return [OTHER] * num if given[0] != CONSTANT else [max(way) for way in zip(*ways, strict=True)]
    return [_kind(equation, given, worst)] * num


def _kind(equation, given, worst):
    name = equation.primitive.name
    touched = [i for i, kind in enumerate(given) if kind != CONSTANT]
    if worst == OTHER:
        return OTHER
    if name == "convert_element_type":
        return AFFINE if jnp.issubdtype(equation.params["new_dtype"], jnp.inexact) else OTHER
    if name == "custom_linear_solve":
        is_affine = min(touched) >= sum(equation.params["const_lengths"])
    elif name == "select_n":
        is_affine = 0 not in touched
    else:
        is_affine = name in SUMS or (name in PRODUCTS and len(touched) == 1)
        is_affine |= set(touched) <= set(OPERANDS.get(name, ()))
    return AFFINE if is_affine else OTHER


def _scan(params, given):
    start, stop = params["num_consts"], params["num_consts"] + params["num_carry"]
    carry = given[start:stop]
    while True:
        outputs = kinds(params["jaxpr"], [*given[:start], *carry, *given[stop:]])
        after = [max(pair) for pair in zip(carry, outputs, strict=False)]
        if after == carry:
            return [*carry, *outputs[len(carry) :]]
        carry = after


def _called(params):
    return next(params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in params)


def num_operations(program) -> float:
    """Floating-point operations of a program: those of products, and one for each entry that another operation makes.

    A loop of unknown length counts once, and of several branches the most expensive one.
    """
    total = 0.0
    for equation in getattr(program, "jaxpr", program).eqns:
        name, params = equation.primitive.name, equation.params
        size = sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            size *= 2 * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
            size *= 2 * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
        elif name == "cond":
            size = max(num_operations(branch) for branch in params["branches"])
        else:
            inner = [part for part in params.values() if hasattr(getattr(part, "jaxpr", part), "eqns")]
            size = params.get("length", 1) * sum(map(num_operations, inner)) if inner else size
        total += size
    return total
