"""Potentials in two stages: draws that depend on the key alone, and their value at a position.

A step of a sampler draws a minibatch and measurement points and factorizes a covariance. These are many small
operations that do not depend on the position of the chain. Separated from U(w, key), they run for several steps at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

#: Largest size of an array in the first stage. Larger arrays, and what depends on them, are left to the second.
MAX_NUMBERS = 2**15


class Staged(NamedTuple):
    """U(w, key) = ``value(w, draw(key))``.

    Attributes:
        draw: all that depends on the key alone, and that the value needs: a list of arrays.
        value: the potential, of a position and such a list.
        zeros: zeros in the form of the value.
    """

    draw: Callable
    value: Callable
    zeros: Any


def stage(potential_fn: Callable, position, key) -> Staged:
    """``potential_fn(position, key)`` in two stages, by tracing which operations depend on the position.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc.staged_potential import stage
        >>> def potential(w, key):
        ...     x = jax.random.normal(key, (100,))
        ...     return w * jnp.exp(x).sum()
        >>> key = jax.random.key(0)
        >>> staged = stage(potential, jnp.ones(()), key)
        >>> [array.shape for array in staged.draw(key)]  # the sum, not the normals
        [()]
        >>> bool(staged.value(2.0, staged.draw(key)) == potential(2.0, key))
        True
    """
    closed, shapes = jax.make_jaxpr(lambda w, k: potential_fn(w, k), return_shape=True)(position, key)
    program, structure = closed.jaxpr, jax.tree.structure(shapes)
    num_position = len(jax.tree.leaves(position))
    positions, keys = program.invars[:num_position], program.invars[num_position:]
    # 0: constant; 1: depends on the key alone; 2: on the position, or too large to be made for several steps at once
    level = dict.fromkeys(program.constvars, 0) | dict.fromkeys(keys, 1) | dict.fromkeys(positions, 2)
    equations: list[list] = [[], [], []]
    for equation in program.eqns:
        highest = max((level[v] for v in _variables(equation.invars)), default=0)
        highest = 2 if equation.effects or (highest == 1 and _is_large(equation)) else highest
        level |= dict.fromkeys(equation.outvars, highest)
        equations[highest].append(equation)
    constant, early, late = equations
    read = {v for equation in [*early, *late] for v in _variables(equation.invars)} | set(_variables(program.outvars))
    constants = [v for v, number in level.items() if number == 0 and v in read]
    values = _function(_part(program, constant, program.constvars, constants))(closed.consts)
    wanted = [v for equation in late for v in _variables(equation.invars)] + _variables(program.outvars)
    drawn = [v for v in dict.fromkeys(wanted) if level[v] == 1]
    first = _part(program, early, [*constants, *keys], drawn)
    draw = _function(dce_jaxpr(first, [True] * len(drawn), instantiate=True)[0])
    value = _function(_part(program, late, [*constants, *drawn, *positions], program.outvars))
    return Staged(
        lambda key: draw([*values, *jax.tree.leaves(key)]),
        lambda position, draws: jax.tree.unflatten(structure, value([*values, *draws, *jax.tree.leaves(position)])),
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
    )


def staged_gradient(potential_fn: Callable, position, key, *, has_aux: bool):
    """``(potential, gradient)`` of a potential that returns U, or ``(U, aux)`` if it ``has_aux``.

    ``potential`` is staged and returns ``(U, aux)`` in either case, with None for a missing aux;
    ``gradient(position, draws)`` is ``((U, aux), ∇U)``.
    """
    both = potential_fn if has_aux else lambda w, k: (potential_fn(w, k), None)
    potential = stage(both, position, key)
    return potential, jax.value_and_grad(potential.value, has_aux=True)


def _variables(atoms):
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _is_large(equation):
    """Whether an equation makes a large array. A call of Python does not count: one for several steps is cheaper."""
    calls_python = "callback" in str(equation.primitive)
    return not calls_python and any(v.aval.size > MAX_NUMBERS for v in equation.outvars)


def _part(program, equations, inputs, outputs):
    """The part of a program that leads from some of its variables to others."""
    return program.replace(
        constvars=(),
        invars=tuple(inputs),
        outvars=tuple(outputs),
        eqns=equations,
        debug_info=program.debug_info.with_unknown_names(),
    )


def _function(program):
    """A program as a function of a list."""
    run = jaxpr_as_fun(ClosedJaxpr(program, ()))
    return lambda values: run(*values)
