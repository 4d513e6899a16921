"""The functions of a model, their inputs and their values."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import as_numbers
from numpyro_fspace._xla import one_program
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import is_functional_prior
from numpyro_fspace.priors.tracing import is_traced


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
        args, kwargs = join(arrays)
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

    ends = _ends(draws)
    watched, takes = ({} if programs is None else programs).setdefault("inputs", (jax.jit(calls), takes))
    try:
        first, last = (watched(draw, jax.random.key(i), arrays) for i, draw in enumerate(ends))
        known = {k: x for k, x in first.items() if np.array_equal(x, last[k])}
        is_single = {len(leaf) for leaf in jax.tree.leaves(draws)} == {1}
        if known and is_single:  # the program alone tells what is random
            used = sources(lambda at: calls(at["draw"], at["key"], arrays), {"draw": ends[0], "key": jax.random.key(0)})
            known = {k: x for k, x in known.items() if not used[k]}
    except jax.errors.UnexpectedTracerError:  # the model calls the function under its own vmap
        known = {}
    return {k: jnp.asarray(known.get(k, first_array)) for k, taken in takes.items() if k in known or taken}


@one_program
def _ends(draws):
    return [jax.tree.map(operator.itemgetter(i), draws) for i in (0, -1)]


def _takes(fn, shape) -> bool:
    try:
        jax.eval_shape(fn, shape)
    except (TypeError, ValueError):
        return False
    return True


def function_values(model, draw, args, kwargs, inputs) -> dict:
    """Values of a model's functions (``functional_prior``, ``random_module``, ``gp_network``) at a draw.

    Args:
        model: a NumPyro model.
        draw: values of its latent sites, by name.
        args, kwargs: its arguments, a tuple and a dict.
        inputs: inputs [N, ...] of all functions, or a dict of inputs by name of function.

    Returns:
        A dict from name to values, [N] or [N, K]. If a function returns a tuple or a dict, each output has a name of
        its own: ``net[0]``, ``net['mean']``.

    Raises:
        ValueError: the model has no function with one of the names, or the draw lacks sites that a function needs.
    """
    arrays, _, join = split_arrays((args, kwargs))
    inputs = {k: jnp.asarray(x) for k, x in inputs.items()} if isinstance(inputs, dict) else jnp.asarray(inputs)
    lacking: list = []

    def values(draw, arrays, inputs, key):
        args, kwargs = join(arrays)
        trace = run_model(model, args, kwargs, key=key, substitute=draw)
        is_latent = {k: s["type"] == "sample" and not s["is_observed"] for k, s in trace.items()}
        lacking[:] = [k for k, s in trace.items() if is_latent[k] and k not in draw and not is_functional_prior(s)]
        functions = functions_of(trace)
        if not isinstance(inputs, dict):
            check_has_functions(functions)
        return evaluate(functions, inputs)

    key, other = jax.random.key(0), jax.random.key(1)
    if is_traced((draw, arrays, inputs)):
        return values(draw, arrays, inputs, key)
    # Compiled, as runs are: a gp_network whose kernel has sampled parameters is another function if these are known.
    program, given = jax.jit(values), [draw, arrays, inputs]
    try:
        found = program(*given, key)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):  # the model reads its arguments
        program, given = jax.jit(lambda draw, inputs, key: values(draw, arrays, inputs, key)), [draw, inputs]
        found = program(*given, key)
    if lacking and not all(np.array_equal(found[k], v, equal_nan=True) for k, v in program(*given, other).items()):
        raise ValueError(f"function_values: the draw lacks some of the sites {lacking}, which the functions need.")
    return found


def check_has_functions(functions) -> None:
    """Raise a ValueError for a model without functions, which could be evaluated at no inputs of their own."""
    if not functions:
        raise ValueError(
            "inputs: the model has no gp_network, random_module or functional_prior whose function could be evaluated "
            "there: leave inputs (or functions_at) out."
        )


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
    return widened({k + jax.tree_util.keystr(path): part for k, parts in values.items() for path, part in parts})


def widened(values):
    """A tree of arrays with float32 in place of floats of 16 bits, whose means NumPy computes in 16 bits."""

    def wide(array):
        is_half = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
        return array.astype(jnp.float32) if is_half else array

    return jax.tree.map(lambda a: wide(a) if hasattr(a, "dtype") else a, values)


def some_rows(x, num: int):
    """At most ``num`` evenly spaced rows of x."""
    return x[np.unique(np.linspace(0, len(x) - 1, min(num, len(x))).astype(int))]
