"""The state of a chain, in groups, and the names by which users read it."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import jax

from numpyro_fspace._checks import one_line
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.mcmc.warmup.state import WarmupState
from numpyro_fspace.sgmcmc.control_variates import ControlVariate


class DrawInfo(NamedTuple):
    """The report of the last draw.

    Attributes:
        potential_energy: U at the draw, an estimate if there are minibatches or random points. After warm-up, that of a
            draw that was undone is U where it ended. Before the first draw it is infinite, or U where the chain starts.
        log_functional_prior: Σ scale · log P0(f(X_M)) at the same place; 0 if a last layer is integrated out, since U
            is then an integral over functions.
        gradient_norm: Euclidean norm of the last gradient of U.
        temperature: mean kinetic temperature of the draw (see ``fs.sgmcmc.Info``).
        step_size: the step size used last.
        friction: the friction used last, except in the directions of the gradients' noise; 0 for SGLD, which has none.
        accept_prob: acceptance probability of the draw's Metropolis test, the mean over its steps for SGLD; 1 where
            there is no test, except for MCLMC, for which it is what a test would have.
        diverging: whether the draw met numbers that are not finite and was undone. Also undone are draws of SGHMC above
            a temperature of 10⁴ (or 10⁴ times the sampler's, if that is above 1) and, in warm-up, draws that gain
            energy at twice the temperature that chance allows. For MCLMC, and with a Metropolis test, whether the draw
            met NaN.
    """

    potential_energy: jax.Array
    log_functional_prior: jax.Array
    gradient_norm: jax.Array
    temperature: jax.Array
    step_size: jax.Array
    friction: jax.Array
    accept_prob: jax.Array
    diverging: jax.Array

    def with_energy(self, value, aux) -> DrawInfo:
        """This with U and the log functional prior, cast to the types of the fields."""
        energy, log_prior = self.potential_energy, self.log_functional_prior
        return self._replace(
            potential_energy=value.astype(energy.dtype), log_functional_prior=aux.astype(log_prior.dtype)
        )


class Averages(NamedTuple):
    """Running means since the last calibration or, after warm-up, over the sampling phase of this run.

    Attributes:
        temperature: mean of the draws' temperatures; a draw that was undone leaves the mean as it was.
        accept_prob: mean of their acceptance probabilities.
        num_averaged: draws in these means, those that were undone too.
        num_diverging: draws of the sampling phase that diverged.
    """

    temperature: jax.Array
    accept_prob: jax.Array
    num_averaged: jax.Array
    num_diverging: jax.Array


class _Fields(NamedTuple):
    """The fields of a ``KernelState``, which adds names for their parts."""

    i: jax.Array
    z: dict
    momentum: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    info: DrawInfo
    averages: Averages
    warmup: WarmupState
    control: ControlVariate
    rng_key: jax.Array
    plan: Plan


class KernelState(_Fields):
    """State of a chain under NumPyro's ``MCMC``.

    Every attribute but ``plan`` can be an entry of ``extra_fields``, and so can those of ``info`` and ``averages``:
    ``"step_size"`` is ``"info.step_size"``, ``"mean_temperature"`` and ``"mean_accept_prob"`` are those of
    ``averages``. The arrays of several vectorized chains have a first axis [C].

    Attributes:
        i: draws made so far, warm-up included.
        z: unconstrained values of the latent sites, except for last layers that are integrated out.
        momentum: momentum of the chain, flat [P]; empty [0] for SGLD.
        count: gradient steps of the sampler, read by schedules; the optimizer's are not counted.
        info: the report of the last draw (``DrawInfo``).
        averages: means of its entries, and the number of draws that diverged (``Averages``).
        warmup: the state of warm-up, frozen afterwards.
        control: center of the control variate, and the gradient there of U on all data without functional priors, each
            flat [P]; empty [0] without a control variate.
        rng_key: the chain's key.
        plan: the plan of the run; static for JAX, which never traces what it holds.
    """

    __slots__ = ()
    __repr__ = one_line

    potential_energy = property(attrgetter("info.potential_energy"))
    log_functional_prior = property(attrgetter("info.log_functional_prior"))
    gradient_norm = property(attrgetter("info.gradient_norm"))
    temperature = property(attrgetter("info.temperature"))
    step_size = property(attrgetter("info.step_size"))
    friction = property(attrgetter("info.friction"))
    accept_prob = property(attrgetter("info.accept_prob"))
    diverging = property(attrgetter("info.diverging"))
    mean_temperature = property(attrgetter("averages.temperature"))
    mean_accept_prob = property(attrgetter("averages.accept_prob"))
    num_averaged = property(attrgetter("averages.num_averaged"))
    num_diverging = property(attrgetter("averages.num_diverging"))
    scale = property(attrgetter("warmup.scale"))


def with_chains(state):
    """``state`` with an axis of chains, which the state of a single chain lacks."""
    return state if state.potential_energy.ndim else with_axis(state)


@jax.jit
def with_axis(tree):
    """A tree of arrays with a new first axis of length one."""
    return jax.tree.map(lambda a: a[None], tree)
