"""Values that are known, and computed, while a program that uses them is traced."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float

    from numpyro_fspace.priors._cholesky import AnyArray

__all__ = ["at_compile_time", "closes_over_traced", "evaluated", "in_default_precision", "is_traced"]


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
    # A separate jaxpr does not leak into the outer trace. Its constants are the values that fn closes over.
    program = jax.make_jaxpr(fn)(*arguments)
    leaves = jax.tree.leaves(arguments)
    if is_traced((program.consts, leaves)):
        return None
    constants = [one if isinstance(one, jax.Array) else np.array(one) for one in program.consts]
    leaves = [in_default_precision(leaf) for leaf in leaves]
    with jax.ensure_compile_time_eval():
        (value,) = jax.jit(lambda some, given: jaxpr_as_fun(ClosedJaxpr(program.jaxpr, some))(*given))(
            constants, leaves
        )
        return np.asarray(value)


def closes_over_traced(fn: Callable, *arguments: Any) -> bool:
    """Whether ``fn(*arguments)`` depends on traced values that ``fn`` closes over."""
    return is_traced(jax.make_jaxpr(fn)(*arguments).consts)
