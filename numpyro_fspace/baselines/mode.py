"""Modes of a model's density from several starts, optimized together."""

from __future__ import annotations

import jax
import numpy as np

from numpyro_fspace.mcmc.warmup.optimizer import adam
from numpyro_fspace.model.checks.model import checked_model
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.potential import ModelPotential


def _checked_latents(model, args, kwargs, init_strategy) -> list[str]:
    """The names of the latent sites; raises for models that the samplers refuse."""

    def start(key):
        potential = ModelPotential(model, args, kwargs, key=key, init_strategy=init_strategy)
        potential.check_data()
        return potential.init_params()

    with checked_model(model, args, kwargs, init_strategy):
        return list(jax.eval_shape(start, jax.random.key(0)))


def find_modes(model, keys, args, kwargs, *, num_updates, optimizer, init_strategy) -> tuple[dict, list[str]]:
    """Values of latent and deterministic sites at one mode for each of ``keys`` [E], and the names of the latent ones.

    All modes are found together. The density is that of the unconstrained values, as for the samplers. Minibatches and
    measurement points are drawn anew at each update.

    Args:
        optimizer: an optax optimizer; None means Adam with a cosine decay of the learning rate from 0.01.

    Raises:
        TypeError: the optimizer is not one of optax.
        ValueError: the samplers refuse the model.
        RuntimeError: an optimization diverged to NaN or infinity, or ended where the density is not finite.
    """
    import optax

    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must be an optax optimizer such as optax.adam(1e-2), got {optimizer!r}.")
    latents = _checked_latents(model, args, kwargs, init_strategy)
    optimizer = adam(num_updates) if optimizer is None else optimizer
    arrays, _, join = split_arrays((args, kwargs))

    def one(key, arrays):
        args, kwargs = join(arrays)
        key_start, key_updates = jax.random.split(key)
        potential = ModelPotential(model, args, kwargs, key=key_start, init_strategy=init_strategy)

        def update(carry, key):
            z, state = carry
            gradient = jax.grad(lambda z: potential(z, key)[0])(z)
            change, state = optimizer.update(gradient, state, z)
            return (optax.apply_updates(z, change), state), None

        start = potential.init_params()
        z = start
        if num_updates:
            carry = (start, optimizer.init(start))
            (z, _), _ = jax.lax.scan(update, carry, jax.random.split(key_updates, num_updates))
        return potential.constrain_fn()(z), z, potential(z, key_updates)[0]

    modes, positions, energies = jax.device_get(jax.jit(jax.vmap(one, in_axes=(0, None)))(keys, arrays))
    finite = [np.isfinite(modes[name]).reshape(len(keys), -1).all(1) for name in latents]
    num_bad = int(len(keys) - np.logical_and.reduce(finite).sum())
    if num_bad:
        raise RuntimeError(
            f"{num_bad} of {len(keys)} optimizations diverged to NaN or infinity: pass an optimizer with a smaller "
            "learning rate, or one that clips gradients."
        )
    stuck = ~np.isfinite(energies)
    if num_updates and stuck.any():
        number = int(np.argmax(stuck))
        potential = ModelPotential(model, args, kwargs, key=keys[number], init_strategy=init_strategy)
        names = potential.not_finite({k: z[number] for k, z in positions.items()}, keys[number])
        raise RuntimeError(
            f"The log density is {-energies[number]} where {stuck.sum()} of {len(keys)} optimizations end: that of "
            f"{', '.join(map(repr, names)) or 'the model'} is not finite there. Standardize the data, look at what the "
            "model computes, or pass an optimizer with a smaller learning rate."
        )
    return modes, latents
