"""What XLA must be told, or spared, for programs to be fast on a CPU."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.flatten_util import ravel_pytree
from numpyro.util import _is_under_jax_transform

__all__ = ["UNDIVIDED", "UNOPTIMIZED", "chains_together", "flatten", "is_nested", "is_worth_dividing", "largest_array"]

#: Options of the compiler for programs that run once: optimizing them takes longer than running them.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Options that leave each loop over an array to one thread (products of matrices are divided all the same).
UNDIVIDED = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
#: Numbers in an array from which dividing a loop over it among threads brings more than it costs.
MIN_DIVIDED = 2**16
#: Numbers in an array up to which chains side by side gain from one another; more do not fit into a CPU's caches.
MAX_TOGETHER = 2**19
#: Parameters from which a gradient is written piece by piece.
MIN_PIECEWISE = 2**17


def is_nested() -> bool:
    """Whether this is run inside of ``jit``, ``vmap`` and the like, where there are no numbers to look at yet."""
    return _is_under_jax_transform()


def is_worth_dividing(largest: int) -> bool:
    """Whether XLA should divide loops among threads in a program whose largest array in a step has so many numbers."""
    return jax.default_backend() != "cpu" or largest >= MIN_DIVIDED


def chains_together(num_chains: int, largest: int) -> int:
    """How many chains, a divisor of their number, go side by side; the largest array of one has so many numbers."""
    most = num_chains if jax.default_backend() != "cpu" else max(1, MAX_TOGETHER // max(1, largest))
    return next(n for n in range(min(most, num_chains), 0, -1) if num_chains % n == 0)


def largest_array(program: Jaxpr) -> int:
    """Numbers in the largest array that a program computes, in what it calls too."""
    sizes = [0]
    for equation in program.eqns:
        sizes += [math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars]
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(part):
                sizes.append(largest_array(part.jaxpr if isinstance(part, ClosedJaxpr) else part))
    return max(sizes)


def _is_program(part):
    return isinstance(part, Jaxpr | ClosedJaxpr)


def flatten(tree):
    """``(w, unflatten)``: the leaves of a tree in one vector [P], and the way back.

    As ``jax.flatten_util.ravel_pytree``, but on a CPU the gradient of a function of ``unflatten(w)`` is, for many
    parameters, written into one vector piece by piece (there is no forward-mode derivative then). Else it would be a
    concatenation of pieces of unequal size, which XLA divides among threads such that for every piece they go through
    as many numbers as the largest has: for a million weights that may take four times as long as all else in a step.
    """
    flat, unravel = ravel_pytree(tree)
    if jax.default_backend() != "cpu" or flat.size < MIN_PIECEWISE:
        return flat, unravel

    def write(_, leaves):
        whole, start = jnp.zeros_like(flat), 0
        for leaf in jax.tree.leaves(leaves):
            whole = jax.lax.dynamic_update_slice(whole, leaf.ravel().astype(flat.dtype), (start,))
            start += leaf.size
        return (whole,)

    unflatten = jax.custom_vjp(unravel)
    unflatten.defvjp(lambda w: (unravel(w), None), write)
    return flat, unflatten
