"""The plan of a run, from a kernel and the arguments of its model."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import largest_array
from numpyro_fspace.mcmc.numpyro_runs import ModelOfRows
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.model._numpyro import active_handlers
from numpyro_fspace.model.admission import checked_model
from numpyro_fspace.model.arguments import frozen, kept, split_arrays
from numpyro_fspace.model.scale_sites import scale_sites

__all__ = ["make_plan", "structure_of"]

#: Friction by default for gradients without noise, which no friction has to balance.
EXACT_FRICTION = 0.3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The fields of a ``Plan`` that the first evaluation of a model determines, by name.

    It is part of the structure of what that evaluation returns, so that a trace hands it on without side effects.
    """

    fields: dict


def make_plan(kernel, args: tuple, kwargs: dict, num_warmup: int) -> Plan:
    """The plan of a run of ``kernel``; an error for a model or data that cannot be sampled.

    Raises:
        TypeError, ValueError: naming what is wrong, and the cure.
    """
    with checked_model(kernel._model, args, kwargs, kernel.init_strategy) as ahead:
        passed = _passed(kernel, args, kwargs)
        ahead.plates = not passed
        trace = jax.make_jaxpr(partial(_first_evaluation, kernel, args, kwargs), return_shape=True)
        program, (params, facts) = trace(jax.random.key(0))
    passed["plates"] = True
    if facts.fields["batches"] > 1.0:
        kernel._programs["model"] = ModelOfRows(kernel._model)
    return Plan(
        num_warmup=num_warmup,
        warmup=kernel.warmup,
        schedule=kernel.warmup.schedule(num_warmup),
        step_size=kernel.step_size,
        largest_array=largest_array(program.jaxpr),
        settings=(kernel._settings(), tuple(active_handlers())),
        arguments=structure_of(args, kwargs),
        params=params,
        **facts.fields,
    )


def structure_of(args, kwargs):
    """A key of the structure, shapes and types of the model's arguments."""
    arrays, (structure, others), _ = split_arrays((args, kwargs))
    return structure, frozen(others), tuple((np.shape(a), jnp.result_type(a)) for a in arrays)


def _first_evaluation(kernel, args, kwargs, key):
    """``(initial parameters, Facts)`` of a model, or an error if it cannot be sampled."""
    potential, name = kernel._model_potential(args, kwargs, key), type(kernel).__name__
    if kernel.needs_functional_prior and not potential.has_functional_prior:
        raise ValueError(
            f"{name} needs a model that declares a prior over functions, by fs.gp_network(...) or "
            f"fs.functional_prior(...); this one has none. Add it, or sample with fs.{name[1:]}."
        )
    why = kernel._why_untested() or _why_random(potential)
    if kernel.needs_exact_density and why:
        cure = "give a number, or leave it None" if callable(kernel.step_size) else "sample with fs.fSGHMC or fs.SGHMC"
        raise ValueError(f"{name} needs the exact density, but {why}: {cure}.")
    if kernel.metropolis and why:
        raise ValueError(f"metropolis=True needs the exact density, but {why}: leave metropolis out, or change that.")
    potential.check_data()
    params = potential.init_params()
    position = ravel_pytree(params)[0]
    preconditioner = kernel.preconditioner.chosen(position.size, potential.is_plain)
    preconditioner.build(position, preconditioner.start(position))  # refuses a scale of another length
    facts = Facts(
        {
            "sampler": kernel._sampler(not why if kernel.metropolis is None else kernel.metropolis),
            "friction": kernel.friction if kernel.friction is not None or potential.is_random else EXACT_FRICTION,
            "preconditioner": preconditioner,
            "control_every": None if potential.has_own_noise else _control_every(kernel, potential.batches()),
            "held_in_warm_start": tuple(scale_sites(potential)),
            "block": potential.block,
            "curvatures": _curvatures(potential),
            "rows_of_points": potential.rows_of_points(),
            "batches": potential.batches(),
            "has_random_points": potential.has_random_points,
            "has_own_noise": potential.has_own_noise,
        }
    )
    return params, facts


def _curvatures(potential) -> tuple[bool, ...]:
    """``Plan.curvatures`` of a model."""
    if not potential.gp_networks:
        return (False,)
    return (True, False) if any(f"{k}.last_layer" in potential.latents for k in potential.gp_networks) else (True,)


def _why_random(potential) -> str | None:
    """Why a Metropolis test does not apply to a random potential; None for one that is known exactly."""
    cause = "minibatches, random measurement points or the model's own random numbers change it at every step"
    return cause if potential.is_random else None


def _control_every(kernel, batches: float) -> int | None:
    """Draws between renewals of the control variate, None for none; by default one full gradient per N/B steps."""
    if batches <= 1.0 or not kernel.control_variates:
        return None
    if kernel.control_variates is True:
        return math.ceil(batches / kernel.num_steps)
    return int(kernel.control_variates)


def _passed(kernel, args, kwargs) -> dict:
    """The checks passed by arguments of these shapes with the same integers, which may be numbers of rows."""
    arrays, static, _ = split_arrays((args, kwargs))
    shapes = tuple((np.shape(a), jnp.result_type(a)) for a in arrays)
    integers = frozen([a for a in arrays if jnp.issubdtype(jnp.result_type(a), jnp.integer)])
    return kept(kernel._programs, static, ("passed", shapes, integers), {})
