"""Values that are known, and computed, while a program that uses them is traced; and facts that need no computation."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from numpyro_fspace._xla import compiler_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float

    from numpyro_fspace.priors.cholesky import AnyArray


def is_traced(value) -> bool:
    """Whether an array, or any leaf of a pytree, is abstract: an argument of jit, grad or vmap."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def at_compile_time(fn: Callable, x: Float[AnyArray, "M D"], *, exact: bool = True) -> AnyArray:
    """``fn(x)``, evaluated immediately, even while an outer function is traced, unless it depends on traced values.

    Args:
        fn: function of x that returns one array.
        x: inputs.
        exact: evaluate in float64; otherwise in JAX's default precision.

    Returns:
        A float64 NumPy array; or a JAX array of the outer graph if x or a value that ``fn`` closes over is traced.
    """
    if is_traced(x):
        return fn(x)
    with jax.enable_x64(True) if exact else contextlib.nullcontext():
        value = evaluated(fn, x)
    return fn(jnp.asarray(in_default_precision(x))) if value is None else value.astype(np.float64)


def in_default_precision(x: AnyArray) -> AnyArray:
    """A NumPy array as a new one in JAX's default precision; others unchanged.

    JAX remembers an array by its identity, in the precision of the first program that has it as a constant. So one
    array must not be a constant of programs in float32 and in float64.
    """
    return np.array(x, jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray) else x


def evaluated(fn: Callable, *arguments: Any) -> np.ndarray | None:
    """``fn(*arguments)``, one array, evaluated even while an outer function is traced; None if it is a traced value."""
    program = None if is_traced(arguments) else computed(fn, *arguments)
    return None if program is None else program(*arguments)


def computed(fn: Callable, *arguments: Any) -> Callable[..., np.ndarray] | None:
    """``fn``, which returns one array, as a compiled function of numbers like these; None if it needs traced values.

    It is traced and compiled once, and can be evaluated even while an outer function is traced.
    """
    # A separate jaxpr does not leak into the outer trace. Its constants are the values that fn closes over.
    program = jax.make_jaxpr(fn)(*arguments)
    if is_traced(program.consts):
        return None
    constants = [one if isinstance(one, jax.Array) else np.array(one) for one in program.consts]

    def numbers(arguments):
        return [in_default_precision(leaf) for leaf in jax.tree.leaves(arguments)]

    # Compiled here and not at a call, where an outer trace would evaluate its operations on constants one by one.
    function = jax.jit(lambda some, given: jaxpr_as_fun(ClosedJaxpr(program.jaxpr, some))(*given))
    compiled = function.lower(constants, numbers(arguments)).compile(compiler_options(is_quick=True))
    return lambda *arguments: np.asarray(compiled(constants, numbers(arguments))[0])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    value: Any


def without_computing(fn: Callable[[], Any]) -> Any:
    """``fn()``, whose result does not depend on the values of arrays, without computing any."""
    return jax.eval_shape(lambda: _Known(fn())).value
