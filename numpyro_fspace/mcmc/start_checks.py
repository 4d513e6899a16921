"""Checks of where chains start (initial parameters, a finite potential), and runs that continue from a state.

The values themselves come from the potential (``model/potential.py``, ``init_params``).
"""

from __future__ import annotations

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import HMC
from numpyro.infer.hmc import HMCState

from numpyro_fspace._checks import as_numbers, warn
from numpyro_fspace.model._numpyro import is_forward_mode, is_nested

#: Without a warning of another model: least acceptance probability of the first draw, and changes of the potential in
#: units of the root of the number of parameters plus this share of it (rounding, or an estimate of a run without test).
MIN_FIRST_ACCEPT_PROB, MIN_CHANGE, MIN_SHARE = 0.01, 1.0, 0.001


def check_start(kernel, start, state, args, kwargs):
    """Raise a ValueError if a chain's first draw left it at ``start``, where the potential is not finite."""
    stuck = ~np.isfinite(np.atleast_1d(state.potential_energy))
    if not stuck.any():
        return
    stuck &= _stands_still(start, state)
    energy = np.atleast_1d(kernel.refresh(start, args, kwargs).potential_energy)
    stuck &= ~np.isfinite(energy)  # otherwise the draw was undone because its step was too long
    if stuck.any():
        number = int(np.argmax(stuck))
        chain = jax.tree.map(lambda a: a.reshape(energy.size, *a.shape[state.i.ndim :])[number], start)
        with numpyro.validation_enabled(False):  # which would refuse the parameter that is NaN, without naming its site
            names = kernel._model_potential(args, kwargs).not_finite(chain.z, chain.rng_key)
        raise ValueError(
            f"The log density is {-energy[number]} where {stuck.sum()} of {energy.size} chains start, and they "
            f"cannot move: that of {', '.join(map(repr, names)) or 'the model'} is not finite there. Look at what "
            "the model computes (a covariance without a Cholesky factor wants a larger nugget), or start elsewhere "
            "(init_params of run, init_strategy of the kernel)."
        )


def warn_of_another_model(before, after):
    """Warn if a run cannot leave the state that it continues from, whose potential is another than the run's there.

    A draw that the Metropolis test rejects has the run's own potential at the old place, so that this costs nothing.
    Where the first draw has some chance, a run may go on with other data, and warns of nothing.

    Args:
        before: the state.
        after: the state after the first draw.
    """
    if not after.plan.sampler.metropolis:
        return
    old, new = (np.atleast_1d(np.asarray(one.potential_energy, np.float64)) for one in (before, after))
    limit = MIN_CHANGE * sum(v.size / old.size for v in jax.tree.leaves(after.z)) ** 0.5 + MIN_SHARE * np.abs(old)
    is_other = np.isfinite(old) & np.isfinite(new) & (np.abs(new - old) > limit)
    is_other &= np.atleast_1d(np.asarray(after.accept_prob)) < MIN_FIRST_ACCEPT_PROB
    is_other &= _stands_still(before, after)
    if is_other.any():
        number = int(np.argmax(is_other))
        warn(
            "post_warmup_state is not a state of this model with this data: its potential energy is "
            f"{old[number]:.6g}, and that of the model there is {new[number]:.6g}. The step size of its warm-up is too "
            "long here, as the Metropolis test rejects the first draw. Set post_warmup_state to None to warm up anew."
        )


def _stands_still(before, after):
    """Which chains are at the same place in both states, [C]."""

    def same(old, new):
        is_same = (old == new) | (np.isnan(old) & np.isnan(new))
        return is_same.reshape(before.i.size, -1).all(axis=1)

    return np.all(jax.tree.leaves(jax.tree.map(same, *jax.device_get((before.z, after.z)))), axis=0)


def checked_init_params(given, plan, num_chains) -> dict:
    """``init_params`` as arrays, without the sites that are integrated out, whose values need no start.

    All other sites of the model must be there, with the expected shapes, for this number of chains or one.
    """
    expected = plan.params
    sites = {k: v for k, v in given.items() if k not in plan.block} if isinstance(given, dict) else None
    if sites is None or set(sites) != set(expected):
        names = type(given).__name__ if sites is None else sorted(sites)
        raise ValueError(f"init_params must be a dict with the sites {sorted(expected)}, got {names}.")
    for name, value in sites.items():
        if value is None or isinstance(value, dict):
            raise TypeError(f"init_params[{name!r}] must be an array of numbers, got {value!r}.")
        if jnp.iscomplexobj(value):
            raise TypeError(f"init_params[{name!r}] is complex, and the site is real.")
        if num_chains is not None and jnp.shape(value)[:1] != (num_chains,):
            raise ValueError(
                f"init_params[{name!r}] has shape {jnp.shape(value)}; its first axis must be that of the "
                f"{num_chains} chains."
            )
        shape = jnp.shape(value) if num_chains is None else jnp.shape(value)[1:]
        if shape != jnp.shape(expected[name]):
            raise ValueError(
                f"init_params[{name!r}] has shape {shape} per chain, the model's (unconstrained) site has "
                f"{jnp.shape(expected[name])}."
            )
    return {k: jnp.asarray(as_numbers(v, f"init_params[{k!r}]"), expected[k].dtype) for k, v in sites.items()}


def at_data(kernel, state, args, kwargs):
    """The state of NumPyro's HMC or NUTS, with the potential and gradient of these data if it had those of others."""
    if not isinstance(state, HMCState) or not isinstance(kernel, HMC):
        return state
    potential = _potential_of(kernel, args, kwargs)
    slope = (jax.jacfwd if is_forward_mode(kernel) else jax.grad)(potential)

    @jax.jit
    def evaluate(z):
        return jax.lax.map(lambda z: (potential(z), slope(z)), z) if jnp.ndim(state.i) else (potential(z), slope(z))

    energy, gradient = evaluate(state.z)
    if not is_nested() and _is_close(state.potential_energy, energy) and _is_close(state.z_grad, gradient):
        return state  # up to rounding
    return state._replace(potential_energy=energy, z_grad=gradient)


def _potential_of(kernel, args, kwargs):
    """The potential of NumPyro's HMC or NUTS as a function of unconstrained values."""
    try:
        return kernel.get_potential_fn(args, kwargs)
    except (RuntimeError, ValueError):  # the kernel has made no run
        kernel = copy.copy(kernel)
        kernel.init(jax.random.key(0), 1, None, args, kwargs)
        return kernel.get_potential_fn(args, kwargs)


def _is_close(old, new) -> bool:
    """Whether numbers of chains agree up to rounding, and by no more than a hundredth."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.allclose(a, b, rtol=8 * np.finfo(np.float32).eps, atol=0.01) for a, b in pairs)


def continued(kernel, state, args, kwargs, *, num_warmup: int, is_own: bool):
    """The first state of a run of ``kernel`` on this data that continues from ``state`` after its warm-up.

    Args:
        kernel: one of the stochastic-gradient kernels.
        state: that of an earlier run.
        args, kwargs: the model's arguments.
        num_warmup: draws of warm-up in the plan of the new run.
        is_own: whether ``state`` comes from the warm-up of the same driver, whose last step may then be due.

    Raises:
        ValueError: for a kernel without a step size, and a state whose run found none.
    """
    if kernel.step_size is None and not is_nested() and np.any(np.asarray(state.warmup.step_size) == 0):
        raise ValueError(
            "post_warmup_state comes from a run with a step_size of its own, and has none from warm-up: "
            "give the kernel a step_size, or leave post_warmup_state out."
        )
    plan, old = kernel.prepare(args, kwargs, num_warmup).of_constants((args, kwargs)), state.plan
    is_other = old.sampler is not None and type(old.sampler) is not type(plan.sampler)
    is_given = kernel._preconditioner is not None and old.preconditioner is not None
    is_other |= is_given and repr(old.preconditioner) != repr(plan.preconditioner)
    size = sum(math.prod(jnp.shape(v)) for v in plan.params.values())
    needed = jax.eval_shape(plan.preconditioner.start, jax.ShapeDtypeStruct((size,), jnp.result_type(float)))
    learned = zip(needed, state.warmup.learned, strict=True)
    is_unknown = any(one.size and one.shape != found.shape[state.i.ndim :] for one, found in learned)
    if is_other or (is_unknown and set(plan.params) == set(state.z)):
        raise ValueError(
            "post_warmup_state comes from another sampler or preconditioner "
            f"({type(old.sampler).__name__}, {old.preconditioner!r}) than the kernel's "
            f"({type(plan.sampler).__name__}, {plan.preconditioner!r}): leave it out, so that the kernel warms up."
        )
    if set(plan.params) != set(state.z):
        raise ValueError(
            f"post_warmup_state is that of another model: it has the sites {sorted(state.z)}, and this model "
            f"{sorted(plan.params)}. Leave it out, or take the state of a run of this model."
        )
    for name, shape in ((k, jnp.shape(v)) for k, v in plan.params.items()):
        if (found := state.z[name].shape[state.i.ndim :]) != shape:
            raise ValueError(
                f"post_warmup_state is that of other data or another model: its site {name!r} has shape {found}, and "
                f"that of this model {shape}. Leave it out, or take the state of a run of this model."
            )
    state = state._replace(plan=plan)
    if state.control.center.size or plan.control_every is not None:
        state = kernel.refresh(state, args, kwargs)
    # A state of another driver has finished its warm-up, however long that was, so that no calibration is due.
    i = jnp.where(state.i <= num_warmup - is_own, num_warmup + 1, state.i)
    zero = jnp.zeros_like(state.num_diverging)
    averages = state.averages._replace(num_diverging=zero, num_averaged=zero)
    return state._replace(i=i.astype(state.i.dtype), averages=averages)
