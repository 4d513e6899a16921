"""One chain of a kernel: its start, and the updates that the phases of a run consist of.

``draw_and_learn`` and ``sample``, and ``warm_start`` and ``calibrate`` of ``warmup/updates.py``, take the target, the
number of a draw and the state before it, and return the updated state. ``phases`` of ``loop.py`` says which of them
makes which draws, each in a program of its own; ``draw`` is all of them in one program, for a driver that knows nothing
of phases.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_fspace.mcmc.state import Averages, DrawInfo, KernelState
from numpyro_fspace.mcmc.target import Target
from numpyro_fspace.mcmc.warmup.friction import friction_for
from numpyro_fspace.mcmc.warmup.state import WarmupState
from numpyro_fspace.mcmc.warmup.updates import after_draw, calibrate, judged, warm_start
from numpyro_fspace.sgmcmc.control_variates import ControlVariate


def start(target: Target, key, init_params) -> KernelState:
    """The state of a chain at ``init_params``, or at the values of the init strategy; without its plan."""
    plan, model = target.plan, target.model
    key, key_momentum, key_direction = jax.random.split(key, 3)
    z = model.init_params() if init_params is None else init_params
    position = ravel_pytree(z)[0]
    zero, count = jnp.zeros((), position.dtype), jnp.zeros((), int)
    if plan.finds_step_size and not plan.schedule.num_optimizing:
        value, aux = target.potential(z, key)  # warm-up needs the energy that the first draw gains
    else:
        value, aux = jnp.asarray(jnp.inf), jnp.zeros(())
    return KernelState(
        i=count,
        z=z,
        momentum=plan.sampler.initial_momentum(key_momentum, position),
        count=count,
        info=DrawInfo(value.astype(float), aux.astype(float), zero, zero, zero, zero, zero, jnp.zeros((), bool)),
        averages=Averages(zero, zero, count, count),
        warmup=WarmupState.start(key_direction, position, ravel_pytree(model.scale())[0], plan),
        control=ControlVariate(*(jnp.zeros_like(position if plan.control_every else position[:0]),) * 2),
        rng_key=key,
        plan=None,  # type: ignore[arg-type]  # the caller sets it
    )


def draw(target: Target, i, state: KernelState) -> KernelState:
    """Draw number ``i``, of whatever phase, after the calibration that is due."""

    def calibrated(state):
        due = jnp.array(target.plan.interruptions)
        if due.size:
            state = jax.lax.cond(jnp.any(due == i), lambda s: calibrate(target, i, s), lambda s: s, state)
        return draw_and_learn(target, i, state)

    if not target.plan.schedule.num_optimizing or state.warmup.is_started:
        return calibrated(state)
    is_starting = i < target.plan.schedule.num_optimizing
    return jax.lax.cond(is_starting, lambda state: warm_start(target, i, state), calibrated, state)


def draw_and_learn(target: Target, i, state: KernelState) -> KernelState:
    """A draw; during warm-up also what is learned from it."""
    state, gradient = _sampled(target, i, state)
    return after_draw(target, i, state, gradient) if target.plan.calibrates else state


def sample(target: Target, i, state: KernelState) -> KernelState:
    """A draw after warm-up."""
    return _sampled(target, i, state)[0]


def _sampled(target, i, state):
    """``state`` after draw ``i`` of the sampler, and the last gradient."""
    plan = target.plan
    if plan.control_every is not None:
        is_time = (i - plan.schedule.num_optimizing) % plan.control_every == 0
        state = jax.lax.cond(is_time, target.renew_control, lambda s: s, state)
    is_adapting = i < plan.num_warmup
    dynamics = target.dynamics(state)
    key, key_steps = jax.random.split(state.rng_key)
    step_size = state.warmup.step.size if plan.finds_step_size else plan.step_size
    friction = plan.friction
    if friction is None:
        friction = friction_for(step_size, state.warmup.noise.rest, plan.sampler.temperature)
    given = {"step_size": step_size, "friction": friction, "gradient_noise": target.gradient_noise(state)}
    drawn = plan.sampler.transition(key_steps, dynamics, state.momentum, state.count, **given)
    step = state.warmup.step
    if plan.finds_step_size:
        step, drawn = judged(plan, is_adapting, state, drawn)
    position, momentum, info = drawn
    starts = jnp.array([0, *plan.schedule.calibrations, plan.num_warmup])
    state = state._replace(
        i=state.i + 1,
        z=dynamics.unravel(position),
        momentum=momentum,
        count=state.count + plan.sampler.num_steps,
        info=state.info._replace(
            gradient_norm=info.gradient_norm,
            temperature=info.temperature,
            step_size=info.step_size,
            friction=jnp.asarray(friction, position.dtype),
            accept_prob=info.accept_prob,
            diverging=info.is_diverging,
        ).with_energy(info.potential_energy, info.aux),
        averages=_averaged(state.averages, info, jnp.any(starts == i), is_adapting, plan.sampler.temperature),
        warmup=state.warmup._replace(step=step),
        rng_key=key,
    )
    return state, info.gradient


def _averaged(old, info, begins, is_adapting, temperature):
    """``old`` averages with one more draw, which is the first of them if it ``begins`` a stretch."""
    num = jnp.where(begins, 0, old.num_averaged) + 1
    before = jnp.where(begins, temperature, old.temperature)  # what a draw that was undone leaves the mean at
    kept = jnp.where(info.is_diverging, before, info.temperature)
    mean = old.temperature + (kept - old.temperature) / num
    mean_accept = old.accept_prob + (info.accept_prob - old.accept_prob) / num
    return Averages(
        temperature=mean.astype(old.temperature.dtype),
        accept_prob=mean_accept.astype(old.accept_prob.dtype),
        num_averaged=num,
        num_diverging=jnp.where(is_adapting, 0, old.num_diverging + info.is_diverging),
    )
