"""The plan of a run: everything besides arrays that its programs depend on, fixed when the run begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fspace._xla import largest_array
from numpyro_fspace.model._numpyro import active_handlers
from numpyro_fspace.model.checks.model import check_plates, checked_model
from numpyro_fspace.model.data.arguments import split_arrays, structure_of
from numpyro_fspace.model.data.minibatches import ModelOfRows
from numpyro_fspace.model.joint_evaluation import rows_found
from numpyro_fspace.model.programs.cache import cached_program, content_key
from numpyro_fspace.model.scale_sites import scale_sites

#: Friction by default for gradients without noise, which no friction has to balance.
EXACT_FRICTION = 0.3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a run depends on besides the chain's state and the arrays in the model's arguments.

    It is part of the type of a state, as the shapes of its arrays are, so that JAX does not use a program that was
    compiled for another plan. A pickled state keeps only its ``num_warmup``.

    Attributes:
        num_warmup: draws of warm-up.
        largest_array: size of the largest array that the model computes.
        settings: a key of the kernel's settings.
        arguments: a key of the structure of the model's arguments.
        contents: a key of the contents of NumPy arrays, if they are constants of the program.
        warmup: the settings of the warm-up.
        schedule: the schedule of the warm-up.
        sampler: the algorithm with its settings, with a Metropolis test or without one.
        step_size: fixed step size or schedule; None if warm-up chooses it.
        friction: friction of the sampler; None if warm-up chooses it.
        preconditioner: the one chosen for the model.
        control_every: draws between renewals of the control variate's center; None has no control variate.
        held_in_warm_start: names of the latent sites that the optimizer does not move.
        block: names of the sites that are integrated out.
        params: shapes of the unconstrained parameters, by site.
        batches: number of minibatches in the data.
        has_random_points: whether measurement points are drawn anew for each gradient.
        has_own_noise: whether the model draws random numbers of its own.
        curvatures: how the largest curvature is computed, by differences of gradients (True) or by second derivatives;
            of two results the smaller counts, because rounding only makes them larger. Of a ``gp_network`` whose last
            layer is integrated out second derivatives pass through the inverse of τ²I + ΦAΦᵀ twice and are wrong by
            factors of hundreds in float32. Where a last layer is sampled, it is the gradient that is rounded most.
        rows_of_points: by name of functional prior, which rows of the data are its points (``OnePass.found``).
    """

    num_warmup: int
    largest_array: int = 0
    settings: Hashable = None
    arguments: Hashable = None
    contents: Hashable = None
    warmup: Any = None
    schedule: Any = None
    sampler: Any = None
    step_size: float | Callable | None = None
    friction: float | None = None
    preconditioner: Any = None
    control_every: int | None = None
    held_in_warm_start: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    batches: float = 1.0
    has_random_points: bool = False
    has_own_noise: bool = False
    curvatures: tuple[bool, ...] = (False,)
    params: dict = dataclasses.field(default_factory=dict)
    rows_of_points: dict = dataclasses.field(default_factory=dict)

    @property
    def finds_step_size(self) -> bool:
        """Whether warm-up chooses the step size."""
        return self.step_size is None

    @property
    def factorizes(self) -> bool:
        """Whether each gradient factorizes matrices to integrate a last layer out.

        Unless there are thousands of rows this takes most of its time.
        """
        return bool(self.block)

    @property
    def absorbs_noise(self) -> bool:
        """Whether warm-up measures the noise of gradients, and the sampler's thermostat takes account of it."""
        return self.friction is None and self.sampler.absorbs_noise

    @property
    def calibrates(self) -> bool:
        """Whether warm-up has anything to calibrate."""
        return bool(self.schedule.calibrations) and (self.finds_step_size or self.preconditioner.adapts)

    @property
    def may_shorten(self) -> bool:
        """Whether further measurements of the curvature may shorten the step, which is not tuned to an acceptance."""
        return self.finds_step_size and not self.sampler.is_tuned

    @property
    def measures(self) -> bool:
        """Whether a draw of burn-in is followed by measurements that cost more gradients."""
        return self.calibrates and (self.friction is None or self.preconditioner.is_dense)

    @property
    def interruptions(self) -> tuple[int, ...]:
        """The draws that are preceded by a calibration."""
        if not self.calibrates:
            return ()
        draws = {*self.schedule.calibrations}
        if self.may_shorten:
            draws |= {*self.schedule.shortenings, self.num_warmup}
        if self.friction is None:
            draws |= {self.schedule.directions_found, self.num_warmup}
        return tuple(sorted(draws))

    def _key(self):
        """The fields that determine all others."""
        return self.num_warmup, self.largest_array, self.settings, self.arguments, self.contents

    def __eq__(self, other):
        return isinstance(other, Plan) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def of_constants(self, arguments) -> Plan:
        """This plan for programs in which NumPy arrays are constants; they may be changed in place between runs."""
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, np.ndarray)]
        return dataclasses.replace(self, contents=content_key(arrays))

    def __reduce__(self):
        return Plan, (self.num_warmup,)


def make_plan(kernel, args: tuple, kwargs: dict, num_warmup: int) -> Plan:
    """The plan of a run of ``kernel``; an error for a model or data that cannot be sampled.

    Raises:
        TypeError, ValueError: naming what is wrong, and the cure.
    """
    with checked_model(kernel._model, args, kwargs, kernel.init_strategy, plates=False):
        passed = _passed(kernel, args, kwargs)
        trace = jax.make_jaxpr(partial(_first_evaluation, kernel, args, kwargs, num_warmup), return_shape=True)
        program, (params, plan) = trace(jax.random.key(0))
        if not passed:
            check_plates(kernel._model, args, kwargs, kernel.init_strategy)
    passed["plates"] = True
    if plan.batches > 1.0:
        kernel._programs["model"] = ModelOfRows(kernel._model)
    return dataclasses.replace(
        plan,
        largest_array=largest_array(program.jaxpr),
        settings=(kernel._settings(), tuple(active_handlers())),
        arguments=structure_of(args, kwargs),
        params=params,
    )


def _first_evaluation(kernel, args, kwargs, num_warmup, key):
    """The initial parameters of a model, and a ``Plan`` of what else is known then; an error if it cannot be sampled.

    A plan is part of the structure of what is returned, so that a trace hands it on without side effects.
    """
    potential, name = kernel._model_potential(args, kwargs, key), type(kernel).__name__
    if kernel.needs_functional_prior and not (potential.functional_priors or potential.gp_networks):
        raise ValueError(
            f"{name} needs a model that declares a prior over functions, by fs.gp_network(...) or "
            f"fs.functional_prior(...); this one has none. Add it, or sample with fs.{name[1:]}."
        )
    why = kernel._why_untested()
    if not why and potential.is_random:
        why = "minibatches, random measurement points or the model's own random numbers change it at every step"
    if kernel.needs_exact_density and why:
        cure = "give a number, or leave it None" if callable(kernel.step_size) else "sample with fs.fSGHMC or fs.SGHMC"
        raise ValueError(f"{name} needs the exact density, but {why}: {cure}.")
    if kernel.metropolis and why:
        raise ValueError(f"metropolis=True needs the exact density, but {why}: leave metropolis out, or change that.")
    potential.check_data()
    params = potential.init_params()
    position = ravel_pytree(params)[0]
    preconditioner = kernel.preconditioner.chosen(potential.parameters())
    preconditioner.build(position, preconditioner.start(position))  # refuses a scale of another length
    plan = Plan(
        num_warmup=num_warmup,
        warmup=kernel.warmup,
        schedule=kernel.warmup.schedule(num_warmup),
        sampler=kernel.sampler_type.of(kernel, metropolis=not why if kernel.metropolis is None else kernel.metropolis),
        step_size=kernel.step_size,
        friction=kernel.friction if kernel.friction is not None or potential.is_random else EXACT_FRICTION,
        preconditioner=preconditioner,
        control_every=None if potential.has_own_noise else _control_every(kernel, potential.batches()),
        held_in_warm_start=tuple(scale_sites(potential)),
        block=potential.block,
        curvatures=_curvatures(potential),
        rows_of_points=rows_found(potential.trace),
        batches=potential.batches(),
        has_random_points=potential.has_random_points,
        has_own_noise=potential.has_own_noise,
    )
    return params, plan


def _curvatures(potential) -> tuple[bool, ...]:
    """``Plan.curvatures`` of a model."""
    if not potential.gp_networks:
        return (False,)
    return (True, False) if any(f"{k}.last_layer" in potential.latents for k in potential.gp_networks) else (True,)


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
    integers = content_key([a for a in arrays if jnp.issubdtype(jnp.result_type(a), jnp.integer)])
    return cached_program(kernel._programs, static, ("passed", structure_of(args, kwargs), integers), {})
