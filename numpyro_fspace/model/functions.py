"""The functions of a model, their inputs, and the dependence of computed values on inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.model.arguments import split_arrays, with_rows
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import is_functional_prior

__all__ = [
    "depends_on",
    "evaluate",
    "function_inputs",
    "function_values",
    "functions_of",
    "some_rows",
    "sources",
    "vanishes_with",
]


def functions_of(trace) -> dict:
    """The functions of a trace, by the names of their ``functional_prior`` or ``random_module``."""
    functions = {k: s["fn"].fn for k, s in trace.items() if is_functional_prior(s)}
    return functions | {k: s["fn"] for k, s in trace.items() if s["type"] == "network"}


def function_inputs(model, draws, args, kwargs, *, programs: dict | None = None) -> dict:
    """The inputs [N, ...] at which the model first evaluates each of its functions, by name.

    If they depend on random values (latent inputs), or the model does not evaluate a function, the first array among
    the arguments is used. A function is left out if there is no such array, or if it does not accept it.

    Args:
        model: a NumPyro model.
        draws: values of its latent sites, [S, ...].
        args, kwargs: its arguments.
        programs: a dict that keeps the compiled program for further calls with arguments of the same shapes.
    """
    arrays, _, join = split_arrays((args, kwargs))
    first_array = next((a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray | jax.Array) and a.ndim), None)
    first_array = None if first_array is None else as_numbers(first_array, "The first array")  # in JAX's byte order
    shape = None if first_array is None else jax.ShapeDtypeStruct(first_array.shape, jnp.result_type(first_array))
    takes: dict = {}

    def calls(draw, key, arrays):
        args, kwargs = with_rows(join(arrays))
        seen = {}

        def watch(name, fn, _):
            def watched(x):
                seen.setdefault(name, as_numbers(x, f"The input of {name!r}"))
                return fn(x)

            return watched

        trace = run_model(model, args, kwargs, key=key, substitute=draw, hook=watch, networks=True)
        functions = functions_of(trace)
        takes.update({name: shape is not None and _takes(fn, shape) for name, fn in functions.items()})
        return {name: seen[name] for name in functions if name in seen}

    ends = [jax.tree.map(lambda a, i=i: a[i], draws) for i in (0, -1)]
    watched, takes = ({} if programs is None else programs).setdefault("inputs", (jax.jit(calls), takes))
    try:
        first, last = (watched(draw, jax.random.key(i), arrays) for i, draw in enumerate(ends))
    except jax.errors.UnexpectedTracerError:  # the model calls the function under its own vmap
        first, last = {}, {}
    known = {k: x for k, x in first.items() if np.array_equal(x, last[k])}
    return {k: jnp.asarray(known.get(k, first_array)) for k, taken in takes.items() if k in known or taken}


def _takes(fn, shape) -> bool:
    try:
        jax.eval_shape(fn, shape)
    except (TypeError, ValueError):
        return False
    return True


def function_values(model, draw, args, kwargs, inputs) -> dict:
    """Values of a model's functions at a draw, by name.

    Args:
        model: a NumPyro model.
        draw: values of its latent sites.
        args, kwargs: its arguments.
        inputs: inputs [N, ...] of all functions, or a dict of inputs by name.

    Raises:
        ValueError: the model has no function with one of the names.
    """
    trace = run_model(model, args, kwargs, key=jax.random.key(0), substitute=draw)
    return evaluate(functions_of(trace), inputs)


def evaluate(functions, inputs) -> dict:
    """Values of functions by name, at inputs [N, ...] for all of them or at a dict of inputs by name.

    If a function returns a tuple or a dict, each output has its own name: ``net[0]``, ``net['mean']``.

    Raises:
        ValueError: there is no function with one of the names.
    """
    if not isinstance(inputs, dict):
        inputs = dict.fromkeys(functions, inputs)
    elif not inputs.keys() <= functions.keys():
        unknown = sorted(inputs.keys() - functions.keys())
        raise ValueError(f"inputs: {unknown} are no functions of the model; it has {sorted(functions)}.")
    values = {k: jax.tree_util.tree_leaves_with_path(functions[k](x)) for k, x in inputs.items()}
    return {k + jax.tree_util.keystr(path): part for k, parts in values.items() for path, part in parts}


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
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


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
        elif equation.primitive.name in CALLS:
            found = _zeros(_called(equation), given)
        else:
            found = [False] * len(equation.outvars)
        known |= {id(out): one for out, one in zip(equation.outvars, found, strict=True)}
    return [is_zero(out) for out in jaxpr.outvars]


def _called(equation):
    """The program that an equation calls."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


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
        if name in CALLS:
            found, has_met_inside = _kinds(_called(equation), given)
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


def some_rows(x, num: int):
    """At most ``num`` evenly spaced rows of x."""
    return x[np.unique(np.linspace(0, len(x) - 1, min(num, len(x))).astype(int))]
