"""The plan of a run: everything besides arrays that its programs depend on, fixed when the run begins."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from numpyro_fspace.model.arguments import frozen

__all__ = ["Plan", "one_at_a_time"]

_LOCK = threading.RLock()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a run depends on besides the chain's state and the arrays in the model's arguments.

    It is part of the type of a state, as the shapes of its arrays are, so that JAX does not use a program that was
    compiled for another plan. A state that was pickled keeps ``num_warmup`` alone of it.

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
        return dataclasses.replace(self, contents=frozen(arrays))

    def __reduce__(self):
        return Plan, (self.num_warmup,)


def one_at_a_time(fn):
    """``fn``, which runs a model, in one thread at a time: NumPyro has one stack of effect handlers for all threads.

    Of a compiled function this is its first call, by which it is traced.
    """

    @functools.wraps(fn)
    def alone(*args, **kwargs):
        with _LOCK:
            return fn(*args, **kwargs)

    return alone
