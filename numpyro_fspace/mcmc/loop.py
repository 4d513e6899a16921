"""The loop over draws as one compiled program, which makes the parts of a run of any length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.util import nested_attrgetter

from numpyro_fspace._xla import UNDIVIDED, is_nested
from numpyro_fspace.mcmc.plan import one_at_a_time
from numpyro_fspace.model.functions import depends_on, function_inputs, function_values, some_rows
from numpyro_fspace.model.joint_evaluation import points_in_data
from numpyro_fspace.model.on_demand import OnDemand
from numpyro_fspace.model.sharding import CHAINS

__all__ = ["Loop"]

#: Number of inputs at which the bar judges functions.
NUM_PROBES = 10


class Loop:
    """Makes draws and writes those that are kept into preallocated slots.

    It holds no array. The arrays of the model are arguments, so that other data of the same shapes use the same program
    (if they contain the same number of measurement points).

    Args:
        sampler: a kernel.
        fields: names of the fields of a state that are kept; parts of a field as ``"a.b"``.
        join: from arrays to ``(args, kwargs, inputs, points)``: the model's arguments, the inputs at which its
            functions are kept in place of the weights (None keeps the weights), and which rows of the arrays are
            measurement points.
        num_chains, thinning: as for ``MCMC``; several chains are vectorized.
        constrain: from unconstrained to constrained values of the sample field; None for the kernel's own.
        mesh: devices along whose axis ``"chains"`` the chains are spread; None is one device.
        is_divided: whether XLA may divide loops over arrays among a CPU's threads.
    """

    def __init__(
        self, sampler, fields, join, *, num_chains: int, thinning: int, constrain=None, mesh=None, is_divided=True
    ):
        self.sampler, self.fields, self.join = sampler, fields, join
        self.num_chains, self.thinning, self.constrain, self.mesh = num_chains, thinning, constrain, mesh
        draw, shardings = self._draw, None
        if mesh is not None:  # every device runs its own chains
            by_chain, each, all_ = PartitionSpec(None, CHAINS), PartitionSpec(CHAINS), PartitionSpec()
            specs = {"in_specs": (each, by_chain, *(all_,) * 5), "out_specs": (each, by_chain)}
            draw = jax.shard_map(draw, mesh=mesh, axis_names={CHAINS}, check_vma=False, **specs)
            shardings = NamedSharding(mesh, by_chain)
        self.options = None if is_divided else UNDIVIDED
        self._draws = draw
        self._program = jax.jit(draw, donate_argnums=1, compiler_options=self.options)
        self._slots = jax.jit(self._make_slots, static_argnums=0, out_shardings=shardings)

    def slots(self, num: int, state, arrays, inputs):
        """Slots for ``num`` draws, [num, (C,) …]: the fields, and the functions at ``inputs`` by name."""
        return self._slots(num, state, arrays, inputs)

    def __call__(self, state, draws, start: int, stop: int, arrays, *, inputs, first: int):
        """``(state, draws)`` after the draws number ``start`` to ``stop`` - 1.

        From number ``first`` on, the last of every ``thinning`` draws is written to the next slot. Earlier draws are
        not kept.
        """
        draw = self._draws if is_nested() else self._program  # part of another program, which has its own options
        return draw(state, draws, start, stop, first, arrays, inputs)

    def by_chain(self, draws, num: int) -> dict:
        """The fields of the first ``num`` draws, [C, S, …]."""
        return jax.tree.map(lambda a: a[:num][None] if self.num_chains == 1 else a[:num].swapaxes(0, 1), draws[0])

    @one_at_a_time
    def find_inputs(self, state, arrays) -> dict:
        """A few inputs of each function, by name; none for data on disk, which would be loaded completely."""
        args, kwargs, *_ = self.join(arrays)
        if any(isinstance(leaf, OnDemand) for leaf in jax.tree.leaves((args, kwargs))):
            return {}
        start = getattr(state, self.sampler.sample_field)
        first = start if self.num_chains == 1 else jax.tree.map(lambda a: a[0], start)
        draw = self.sampler.postprocess_fn(args, kwargs)(first)
        inputs = function_inputs(self.sampler.model, jax.tree.map(lambda a: a[None], draw), args, kwargs)
        return {k: some_rows(x, NUM_PROBES) for k, x in inputs.items()}

    @one_at_a_time
    def _make_slots(self, num, state, arrays, inputs):
        kept = jax.eval_shape(lambda state, arrays: self._kept(state, *self.join(arrays)[:3], inputs), state, arrays)
        return jax.tree.map(lambda spec: _empty(spec, num), kept)

    @one_at_a_time
    def _draw(self, state, draws, start, stop, first, arrays, inputs):
        *given, points = self.join(arrays)
        args, kwargs, _ = given
        one_each = jax.tree.map(lambda slots: jax.ShapeDtypeStruct(slots.shape[1:], slots.dtype), draws)

        def step(i, carry):
            state, draws = carry
            with points_in_data(points, arrays):
                state = self.sampler.sample(state, args, kwargs)
            slot = jnp.maximum(i - first, 0) // self.thinning
            is_kept = (i >= first) & ((i - first) % self.thinning == self.thinning - 1)
            kept = jax.lax.cond(  # zeros are overwritten by the draw that belongs to the slot
                is_kept, lambda s: self._kept(s, *given, inputs), lambda _: jax.tree.map(_empty, one_each), state
            )
            return state, jax.tree.map(lambda all_, one: all_.at[slot].set(one), draws, kept)

        return jax.lax.fori_loop(start, stop, step, (state, draws))

    def _kept(self, state, args, kwargs, functions_at, inputs):
        constrain = self.constrain or self.sampler.postprocess_fn(args, kwargs)
        over_chains = jax.vmap if self.num_chains > 1 else lambda fn: fn
        values = {name: nested_attrgetter(name)(state) for name in self.fields}

        def functions(draw, inputs):
            return function_values(self.sampler.model, draw, args, kwargs, inputs)

        def in_place_of_weights(draw):
            hidden = depends_on(lambda draw: functions(draw, functions_at), draw)
            return {k: v for k, v in draw.items() if k not in hidden} | functions(draw, functions_at)

        def probes(draw):
            return jnp.concatenate([f.ravel() for f in functions(draw, inputs).values()])

        draws = over_chains(constrain)(values[self.sampler.sample_field])
        kept = draws if functions_at is None else over_chains(in_place_of_weights)(draws)
        values[self.sampler.sample_field] = kept
        return values, over_chains(probes)(draws) if inputs else ()


def _empty(spec, *num):
    """Zeros of a shape and type, which may be that of keys."""
    is_key = jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
    zero = jax.random.key(0) if is_key else jnp.zeros((), spec.dtype)
    return jnp.broadcast_to(zero, (*num, *spec.shape))
