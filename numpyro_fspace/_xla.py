"""Compiler options, and forms of programs, that make XLA fast on a CPU and precise on a GPU."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, subjaxprs
from jax.flatten_util import ravel_pytree

#: Options with which XLA, if it knows them, compiles in half the time. Loops over arrays then take up to twice as long.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
#: Options that leave each loop over an array to one thread (products of matrices are divided all the same). They
#: stay because dividing the loops of a small network costs more than it brings (docs/performance.md, Threads).
UNDIVIDED = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
#: Size of an array from which it pays to divide a loop over it among threads.
MIN_DIVIDED = 2**16
#: Largest size of an array of vectorized chains; larger ones do not fit into the caches of a CPU.
MAX_TOGETHER = 2**19
#: Number of parameters from which a gradient is written piece by piece.
MIN_PIECEWISE = 2**17


@functools.cache
def _known(**options) -> dict:
    """Those of the compiler's options that this version of XLA knows."""
    known = {}
    for name, value in options.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
            known[name] = value
        except jax.errors.JaxRuntimeError:  # no such option
            continue
    return known


def optimizes() -> bool:
    """Whether the user left JAX's optimizations on, without which programs are compiled quickly anyway."""
    return not jax.config.read("jax_disable_most_optimizations")


def compiler_options(*, is_divided: bool = True, is_quick: bool = False) -> dict | None:
    """Options of the compiler for a program; None for its defaults.

    Args:
        is_divided: whether to divide loops over arrays among a CPU's threads.
        is_quick: whether to compile quickly, for programs that run once or in which loops over arrays take little time.
    """
    if jax.default_backend() != "cpu":
        return None
    options = {} if is_divided else UNDIVIDED
    if is_quick and optimizes():
        options = options | _known(**QUICK)
    return options or None


def is_worth_dividing(largest: int) -> bool:
    """Whether XLA should divide loops among threads, given the size of the largest array in a step."""
    return jax.default_backend() != "cpu" or largest >= MIN_DIVIDED


def chains_together(num_chains: int, largest: int) -> int:
    """Number of chains that run vectorized at a time, a divisor of ``num_chains``.

    Args:
        num_chains: number of all chains.
        largest: size of the largest array in a step of one chain.
    """
    most = num_chains if jax.default_backend() != "cpu" else max(1, MAX_TOGETHER // max(1, largest))
    return next(n for n in range(min(most, num_chains), 0, -1) if num_chains % n == 0)


def largest_array(program: Jaxpr) -> int:
    """Size of the largest array that a program, or a program that it calls, computes."""
    sizes = [math.prod(getattr(v.aval, "shape", ())) for equation in program.eqns for v in equation.outvars]
    return max([0, *sizes, *map(largest_array, subjaxprs(program))])


def flatten(tree):
    """``(w, unflatten)``: the leaves of a tree in one vector [P], and the way back.

    This is ``jax.flatten_util.ravel_pytree``, except for many parameters on a CPU. The gradient of a function of
    ``unflatten(w)`` is then written into one vector piece by piece (and there is no forward-mode derivative). Otherwise
    it would be a concatenation of pieces of unequal size. XLA divides a concatenation among threads such that each
    piece costs as much as the largest one: for a million weights that may take four times as long as the rest of a
    step.
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


def matmul(left, right):
    """The matrix product in the full precision of its type, which GPUs and TPUs reduce by default.

    Priors and dynamics multiply by this function; networks use the default, but for those of ``gp_network``.
    """
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def one_program(fn):
    """``fn(tree, *settings)`` compiled as a whole, for trees of arrays on a device.

    Without it each operation on an array of another shape is compiled as a program of its own. Arrays in memory or
    mapped from disk are left to NumPy.
    """
    compiled = jax.jit(lambda tree, settings: fn(tree, *settings), static_argnums=1)

    @functools.wraps(fn)
    def called(tree, *settings):
        is_on_device = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        return compiled(tree, settings) if is_on_device else fn(tree, *settings)

    return called


def taken(draws: dict, *index) -> dict[str, np.ndarray]:
    """``draws[name][index]`` by name, as NumPy arrays; those on a device are taken by one program."""
    on_device = {k: v for k, v in draws.items() if isinstance(v, jax.Array)}
    on_disk = {k: np.asarray(v)[index] for k, v in draws.items() if k not in on_device}
    return on_disk | jax.device_get(_taken(on_device, index))


@jax.jit
def _taken(draws, index):
    return jax.tree.map(lambda a: a[index], draws)
