"""Chains sharded over the devices of a mesh, in one process or several."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: Name of the mesh axis over which chains are sharded.
CHAINS = "chains"


def check_mesh(mesh: Mesh, num_chains: int) -> Mesh:
    """``mesh`` with automatic axes, for which the compiler inserts the communication.

    Raises:
        TypeError, ValueError: it is not a mesh, has no axis ``"chains"``, or cannot divide the chains equally.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if CHAINS not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names}; one must be {CHAINS!r}.")
    if num_chains == 1:
        raise ValueError("mesh= is for several chains: num_chains=1.")
    if num_chains % mesh.shape[CHAINS]:
        raise ValueError(f"{mesh.shape[CHAINS]} devices along 'chains' cannot share num_chains={num_chains} equally.")
    return Mesh(mesh.devices, mesh.axis_names)


def place(tree, mesh: Mesh, *axes: str):
    """Arrays with their leading dimensions sharded over axes of the mesh; without axes, a copy on every device.

    Without axes, arrays that are already sharded over the devices of the mesh, along axes of the same names, keep their
    sharding. Every process calls this function with the same values.
    """

    def put(a):
        old = getattr(a, "sharding", None)
        is_placed = isinstance(old, NamedSharding) and old.device_set == set(mesh.devices.flat)
        is_known = is_placed and set(jax.tree.leaves(tuple(old.spec))) <= set(mesh.axis_names)
        spec = old.spec if is_known and not axes else PartitionSpec(*axes)
        sharding = NamedSharding(mesh, spec)
        if is_placed:
            return jax.device_put(a, sharding)
        if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            data = jax.device_put(np.asarray(jax.random.key_data(a)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
        return jax.device_put(np.asarray(a), sharding)

    return jax.tree.map(put, tree)


def with_devices_of(tree, draws):
    """Model arguments whose arrays one program can use together with ``draws``.

    Arrays move to the mesh of the draws if there is one. Otherwise they stay on their devices, and the compiler inserts
    the communication. Arrays that are not on a device yet are not moved, and masked arrays keep their masks for checks.
    """
    mesh = next((m for m in map(_mesh, jax.tree.leaves(draws)) if m is not None), None)

    def moved(a):
        is_bound = isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) and a.ndim > 0 and a.committed
        target = (mesh or _mesh(a)) if is_bound else None
        return a if target is None else place(a, target)

    return jax.tree.map(moved, tree)


def _mesh(array) -> Mesh | None:
    """The mesh of an array's devices with automatic axes, or None for an array on one device."""
    sharding = getattr(array, "sharding", None)
    return Mesh(sharding.mesh.devices, sharding.mesh.axis_names) if isinstance(sharding, NamedSharding) else None


def gathered(tree):
    """Arrays that this process can read: arrays that are sharded over several processes are gathered."""

    def gather(a):
        if not isinstance(a, jax.Array) or a.is_fully_addressable:
            return a
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(gather(jax.random.key_data(a)), impl=jax.random.key_impl(a))
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(a, tiled=True)

    return jax.tree.map(gather, tree)
