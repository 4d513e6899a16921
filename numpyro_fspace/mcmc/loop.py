"""The compiled loops of a run: one for each of its phases, which makes any number of draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.util import nested_attrgetter

from numpyro_fspace._xla import compiler_options, one_program
from numpyro_fspace.mcmc.chain_updates import draw_and_learn, sample
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.mcmc.state import KernelState, with_axis
from numpyro_fspace.mcmc.warmup.updates import calibrate, warm_start
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.functions import function_inputs, function_values, some_rows
from numpyro_fspace.model.handlers import one_at_a_time
from numpyro_fspace.model.joint_evaluation import assume_rows_of_points
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.sharding import CHAINS

#: Number of inputs at which the bar judges functions.
NUM_PROBES = 10
#: How arrays are spread over the devices of a mesh: not, by their axis of chains, or by that axis of their slots.
ALL, EACH, BY_CHAIN = PartitionSpec(), PartitionSpec(CHAINS), PartitionSpec(None, CHAINS)


class Phase(NamedTuple):
    """A part of a run that one program makes.

    Attributes:
        update: a function such as ``draw_and_learn``.
        start, stop: its draws; a calibration makes none, and precedes draw ``start``.
        keeps: whether the program is that of the sampling phase, whose draws are kept.
    """

    update: Callable
    start: int
    stop: int
    keeps: bool


def phases(plan: Plan, start: int, stop: int) -> Iterator[Phase]:
    """The phases of the draws ``start`` to ``stop`` - 1, in their order.

    Burn-in that needs no measurements of its own is made by the program of the sampling phase.
    """
    warm, end = plan.schedule.num_optimizing, plan.num_warmup
    if start < min(stop, warm):
        yield Phase(warm_start, start, min(stop, warm), keeps=False)
    start = max(start, warm)
    limits = {*plan.interruptions, end, stop}
    for limit in sorted(draw for draw in limits if start <= draw <= stop):
        if start < limit:
            update = sample if start >= end and plan.measures else draw_and_learn
            yield Phase(update, start, limit, keeps=start >= end or not plan.measures)
        if limit in plan.interruptions and limit < stop:
            yield Phase(calibrate, limit, limit, keeps=False)
        start = limit


class Loop:
    """Makes draws and writes those that are kept into preallocated slots.

    It holds no array. The arrays of the model are arguments, so that other data of the same shapes use the same program
    (if they contain the same number of measurement points).

    Args:
        kernel: of NumPyro's protocol.
        fields: names of the fields of a state that are kept; parts of a field as ``"a.b"``.
        join: from arrays to ``(args, kwargs, inputs, points)``: the model's arguments, the inputs at which its
            functions are kept in place of the weights (None keeps the weights), and which rows of the arrays are
            measurement points.
        num_chains, thinning: as for ``MCMC``; several chains are vectorized.
        constrain: from unconstrained to constrained values of the sample field; None for the kernel's own.
        mesh: devices along whose axis ``"chains"`` the chains are spread; None is one device.
        is_divided: whether XLA may divide loops over arrays among a CPU's threads.
    """

    def __init__(self, kernel, fields, join, *, num_chains: int, thinning: int, constrain, mesh, is_divided: bool):
        self.kernel, self.fields, self.join = kernel, fields, join
        self.num_chains, self.thinning, self.constrain, self.mesh = num_chains, thinning, constrain, mesh
        self.is_divided = is_divided
        self._programs: dict = {}
        shardings = None if mesh is None else NamedSharding(mesh, BY_CHAIN)
        self._slots = jax.jit(self._make_slots, static_argnums=0, out_shardings=shardings)

    def slots(self, num: int, state, arrays, inputs):
        """Slots for ``num`` draws, [num, (C,) …]: the fields, and the functions at ``inputs`` by name."""
        return self._slots(num, started(state), arrays, inputs)

    def __call__(self, state, draws, start: int, stop: int, arrays, *, inputs, first: int):
        """``(state, draws)`` after the draws number ``start`` to ``stop`` - 1.

        From number ``first`` on, the last of every ``thinning`` draws is written to the next slot. Earlier draws are
        not kept.
        """
        if not isinstance(state, KernelState):
            return self._program(None, keeps=True)(state, draws, start, stop, first, arrays, inputs)
        offset = _draws_made(state, start) - start  # a run that goes on is past its warm-up
        for phase in phases(state.plan, start + offset, stop + offset):
            if phase.update is not warm_start:
                state = started(state)
            program = self._program(phase.update, keeps=phase.keeps, factorizes=state.plan.factorizes)
            if phase.keeps:
                state, draws = program(state, draws, phase.start - offset, phase.stop - offset, first, arrays, inputs)
            else:
                state = program(state, max(1, phase.stop - phase.start), arrays)
        return state, draws

    def by_chain(self, draws, num: int) -> dict:
        """The fields of the first ``num`` draws, [C, S, …]."""
        return _by_chain(draws[0], num, self.num_chains == 1)

    @one_at_a_time
    def find_inputs(self, state, arrays) -> dict:
        """A few inputs of each function, by name; none for data on disk, which would be loaded completely."""
        args, kwargs, *_ = self.join(arrays)
        if any(isinstance(leaf, OnDemand) for leaf in jax.tree.leaves((args, kwargs))):
            return {}
        start = getattr(state, self.kernel.sample_field)
        first = start if self.num_chains == 1 else jax.tree.map(lambda a: a[0], start)
        draw = self.kernel.postprocess_fn(args, kwargs)(first)
        inputs = function_inputs(self.kernel.model, with_axis(draw), args, kwargs)
        return {k: some_rows(x, NUM_PROBES) for k, x in inputs.items()}

    @one_at_a_time
    def _make_slots(self, num, state, arrays, inputs):
        kept = jax.eval_shape(lambda state, arrays: self._stored(state, *self.join(arrays)[:3], inputs), state, arrays)
        return jax.tree.map(lambda spec: _empty(spec, num), kept)

    def options(self, *, factorizes: bool) -> dict | None:
        """Options of the compiler for programs whose gradients factorize matrices (``Plan.factorizes``) or do not."""
        return compiler_options(is_divided=self.is_divided, is_quick=factorizes and not self.is_divided)

    def _program(self, update, *, keeps: bool, factorizes: bool = False):
        """The program that makes draws and keeps them, or only updates a state, by a function of ``chain_updates``."""
        key = update, keeps, is_nested(), factorizes
        if key not in self._programs:
            program: Callable = partial(self._draw if keeps else self._advance, update)
            if self.mesh is not None:  # every device runs its own chains
                in_specs = (EACH, BY_CHAIN, *(ALL,) * 5) if keeps else (EACH, ALL, ALL)
                specs = {"in_specs": in_specs, "out_specs": (EACH, BY_CHAIN) if keeps else EACH}
                program = jax.shard_map(program, mesh=self.mesh, axis_names={CHAINS}, check_vma=False, **specs)
            if not is_nested():  # otherwise it is part of another program, which has its own options
                options = self.options(factorizes=factorizes)
                program = jax.jit(program, donate_argnums=1 if keeps else (), compiler_options=options)
            self._programs[key] = program
        return self._programs[key]

    @one_at_a_time
    def _advance(self, update, state, num, arrays):
        return jax.lax.fori_loop(0, num, lambda _, state: self._updated(update, state, arrays), state)

    @one_at_a_time
    def _draw(self, update, state, draws, start, stop, first, arrays, inputs):
        *given, _ = self.join(arrays)
        one_each = jax.tree.map(lambda slots: jax.ShapeDtypeStruct(slots.shape[1:], slots.dtype), draws)

        def step(i, carry):
            state, draws = carry
            state = self._updated(update, state, arrays)
            slot = jnp.maximum(i - first, 0) // self.thinning
            is_kept = (i >= first) & ((i - first) % self.thinning == self.thinning - 1)
            kept = jax.lax.cond(  # zeros are overwritten by the draw that belongs to the slot
                is_kept, lambda s: self._stored(s, *given, inputs), lambda _: jax.tree.map(_empty, one_each), state
            )
            return state, jax.tree.map(lambda all_, one: all_.at[slot].set(one), draws, kept)

        return jax.lax.fori_loop(start, stop, step, (state, draws))

    def _updated(self, update, state, arrays):
        args, kwargs, _, points = self.join(arrays)
        with assume_rows_of_points(points, arrays):
            if update is None:
                return self.kernel.sample(state, args, kwargs)
            return self.kernel.updated(update, state, args, kwargs)

    def _stored(self, state, args, kwargs, functions_at, inputs):
        constrain = self.constrain or self.kernel.postprocess_fn(args, kwargs)
        over_chains = jax.vmap if self.num_chains > 1 else lambda fn: fn
        values = {name: nested_attrgetter(name)(state) for name in self.fields}

        def functions(draw, inputs):
            return function_values(self.kernel.model, draw, args, kwargs, inputs)

        def in_place_of_weights(draw):
            hidden = depends_on(lambda draw: functions(draw, functions_at), draw)
            return {k: v for k, v in draw.items() if k not in hidden} | functions(draw, functions_at)

        def probes(draw):
            return jnp.concatenate([f.ravel() for f in functions(draw, inputs).values()])

        draws = over_chains(constrain)(values[self.kernel.sample_field])
        kept = draws if functions_at is None else over_chains(in_place_of_weights)(draws)
        values[self.kernel.sample_field] = kept
        return values, over_chains(probes)(draws) if inputs else ()


def started(state):
    """A state after the warm start, without what only the warm start needs."""
    return state._replace(warmup=state.warmup.started()) if isinstance(state, KernelState) else state


@one_program
def _by_chain(draws, num: int, is_alone: bool):
    """The first ``num`` draws [num, (C,) …] as [C, num, …]."""
    return jax.tree.map(lambda a: a[:num][None] if is_alone else a[:num].swapaxes(0, 1), draws)


def _draws_made(state, default: int) -> int:
    """The number of draws that a state counts; the default inside another program, where it is not known."""
    return default if is_nested() else int(np.ravel(state.i.addressable_shards[0].data)[0])


def _empty(spec, *num):
    """Zeros of a shape and type, which may be that of keys."""
    is_key = jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
    zero = jax.random.key(0) if is_key else jnp.zeros((), spec.dtype)
    return jnp.broadcast_to(zero, (*num, *spec.shape))
