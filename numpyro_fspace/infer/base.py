"""What the NumPyro kernels share: the model's potential, warm-up, chains, NumPyro's protocol."""

from __future__ import annotations

import copy
from abc import abstractmethod
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_fspace.arguments import split_arrays
from numpyro_fspace.infer.warmup import Warmup, WarmupState, largest_curvature
from numpyro_fspace.networks import init_to_network
from numpyro_fspace.potential import ModelPotential
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner, prior_scale
from numpyro_fspace.validate import (
    check_arguments,
    check_count,
    check_positive,
    check_step_size,
)

__all__ = ["KernelState", "SGMCMCKernel"]


class KernelState(NamedTuple):
    """State of a chain under NumPyro's ``MCMC``; every field can be an ``extra_fields`` entry.

    Attributes:
        i: draws made so far, warm-up included.
        z: unconstrained values of the latent sites.
        potential_energy: U at the last gradient (an estimate, if minibatches or points are random).
        log_functional_prior: Σ scale · log P0(f(X_M)) at the same place.
        gradient_norm: Euclidean norm of that gradient.
        temperature: mean kinetic temperature of the draw (see ``fs.sgmcmc.Info``).
        mean_temperature: its running mean over the sampling phase.
        step_size: the step size used last.
        diverging: whether this draw left the finite numbers and was undone.
        num_diverging: how many draws of the sampling phase were.
        momentum: momentum of the chain, flat [P]; empty [0] for SGLD.
        count: gradient steps of the sampler, read by schedules.
        scale: prior standard deviations, flat [P].
        warmup: what warm-up adapts, frozen afterwards.
        rng_key: the chain's key.
    """

    i: jax.Array
    z: dict
    potential_energy: jax.Array
    log_functional_prior: jax.Array
    gradient_norm: jax.Array
    temperature: jax.Array
    mean_temperature: jax.Array
    step_size: jax.Array
    diverging: jax.Array
    num_diverging: jax.Array
    momentum: jax.Array
    count: jax.Array
    scale: jax.Array
    warmup: WarmupState
    rng_key: jax.Array


class SGMCMCKernel(MCMCKernel):
    """What the kernels share: the potential of the model, warm-up, chains, NumPyro's protocol."""

    sample_field = "z"
    needs_functional_prior = False

    def __init__(self, model, *, step_size, num_steps, temperature, preconditioner, warmup, init_strategy):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}.")
        check_step_size(step_size)
        check_count(num_steps, "num_steps")
        check_positive(temperature, "temperature")
        if preconditioner is not None and not isinstance(preconditioner, Preconditioner):
            raise TypeError(
                f"preconditioner must come from fs.preconditioners (prior_scale(), identity(), diagonal(s)), "
                f"got {preconditioner!r}."
            )
        if warmup is not None and not isinstance(warmup, Warmup):
            raise TypeError(f"warmup must be a fs.Warmup or None, got {warmup!r}.")
        self._model = model
        self.step_size = step_size
        self.num_steps = int(num_steps)
        self.temperature = temperature
        self.preconditioner = prior_scale() if preconditioner is None else preconditioner
        self.warmup = Warmup() if warmup is None else warmup
        self.init_strategy = init_strategy
        self._num_warmup = 0
        self._inits = {}

    # ---- what a sampler adds -------------------------------------------------------------------

    @abstractmethod
    def _initial_momentum(self, key, position):
        """The momentum a chain starts with, flat [P] (or empty)."""

    @abstractmethod
    def _transition(self, key, position, momentum, count, potential, step_size, metric):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""

    @abstractmethod
    def _stable_step_size(self, curvature):
        """The step size for largest curvature λ (in the preconditioner's coordinates)."""

    # ---- NumPyro's protocol --------------------------------------------------------------------

    @property
    def model(self):
        return self._model

    @property
    def default_fields(self):
        return ("z", "diverging")

    def wrap_model(self, wrapper):
        kernel = copy.copy(self)
        kernel._model, kernel._inits = wrapper(self._model), {}
        return kernel

    def __getstate__(self):
        return self.__dict__ | {"_inits": {}}

    def get_diagnostics_str(self, state):
        text = f"step size {float(state.step_size):.1e}, temperature {float(state.temperature):.2f}"
        return f"{text}, {int(state.num_diverging)} diverging" if int(state.num_diverging) else text

    def postprocess_fn(self, model_args, model_kwargs):
        return self._model_potential(model_args, model_kwargs).constrain_fn()

    def get_constrain_fn(self, model_args, model_kwargs):
        return self.postprocess_fn(model_args, model_kwargs)

    def refresh(self, state, model_args, model_kwargs):
        potential = self._model_potential(model_args, model_kwargs)
        one = partial(self._refresh_chain, potential)
        return one(state) if is_prng_key(state.rng_key) else jax.vmap(one)(state)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        check_arguments(model_args, model_kwargs)
        if self.step_size is None and num_warmup == 0:
            raise ValueError("num_warmup=0 leaves no draw to find a step size in: give step_size, or warm up.")
        self._num_warmup = num_warmup
        single = is_prng_key(rng_key)
        expected = jax.eval_shape(partial(self._checked_params, model_args, model_kwargs), jax.random.key(0))
        if init_params is not None:
            _check_init_params(init_params, expected, batched=not single)
        arrays, static, join = split_arrays((model_args, model_kwargs))
        return self._compiled_init(static, join, single)(rng_key, init_params, arrays)

    def sample(self, state, model_args, model_kwargs):
        potential = self._model_potential(model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return self._sample_chain(state.i, state, potential)
        # The draw index is the same for all chains: unbatched, so that phases are branches, not selects.
        return jax.vmap(lambda chain: self._sample_chain(state.i[0], chain, potential))(state)

    # ---- one chain -----------------------------------------------------------------------------

    def _model_potential(self, args, kwargs, key=None):
        key = jax.random.key(0) if key is None else key
        return ModelPotential(self._model, args, kwargs, key=key, init_strategy=self.init_strategy)

    def _checked_params(self, args, kwargs, key):
        potential, name = self._model_potential(args, kwargs, key), type(self).__name__
        if self.needs_functional_prior and not potential.functional_priors:
            raise ValueError(
                f"{name} needs a model that declares fs.functional_prior(...); this one has none. "
                f"Add it, or sample with fs.{name[1:]}."
            )
        potential.check_data()
        return potential.init_params()

    def _compiled_init(self, static, join, single):
        def init(rng_key, init_params, arrays):
            args, kwargs = join(arrays)
            one = partial(self._init_chain, args, kwargs)
            return one(rng_key, init_params) if single else jax.vmap(one)(rng_key, init_params)

        try:
            return self._inits.setdefault((static, single), jax.jit(init))
        except TypeError:  # an argument that is neither an array nor hashable
            return jax.jit(init)

    def _init_chain(self, args, kwargs, key, init_params):
        key, key_model, key_momentum, key_direction = jax.random.split(key, 4)
        model = self._model_potential(args, kwargs, key_model)
        z = model.init_params() if init_params is None else init_params
        position = ravel_pytree(z)[0]
        zero, count = jnp.zeros((), position.dtype), jnp.zeros((), int)
        warmup = WarmupState(
            optimiser=self.warmup.optimiser(1).init(position),
            direction=jax.random.normal(key_direction, position.shape, position.dtype),
            step_size=zero,
        )
        return KernelState(
            i=count,
            z=z,
            potential_energy=zero,
            log_functional_prior=zero,
            gradient_norm=zero,
            temperature=zero,
            mean_temperature=zero,
            step_size=zero,
            diverging=jnp.zeros((), bool),
            num_diverging=count,
            momentum=self._initial_momentum(key_momentum, position),
            count=count,
            scale=ravel_pytree(model.scale())[0],
            warmup=warmup,
            rng_key=key,
        )

    def _refresh_chain(self, model, state):
        key, key_potential = jax.random.split(state.rng_key)
        value, aux = model(state.z, key_potential)
        return state._replace(potential_energy=value, log_functional_prior=aux, rng_key=key)

    def _sample_chain(self, i, state, model):
        _, unravel = ravel_pytree(state.z)
        flat = _flatten(model, unravel)
        metric = self.preconditioner.build(state.scale)
        num_optimiser = self.warmup.num_optimiser_draws(self._num_warmup)
        is_adapting = i < self._num_warmup
        sample = partial(self._sampling_draw, flat, metric, unravel, is_adapting)
        if self.step_size is None:
            sample = partial(self._calibrated_draw, sample, flat, metric, i)
        if num_optimiser == 0:
            return sample(state)
        optimise = partial(self._optimising_draw, flat, metric, unravel, num_optimiser)
        return jax.lax.cond(i < num_optimiser, optimise, sample, state)

    def _optimising_draw(self, flat, metric, unravel, num_draws, state):
        key, key_steps, key_potential = jax.random.split(state.rng_key, 3)
        position, optimiser = self.warmup.optimise(
            key_steps,
            ravel_pytree(state.z)[0],
            state.warmup.optimiser,
            lambda w, k: flat(w, k)[0],
            metric,
            self.num_steps,
            num_draws * self.num_steps,
        )
        value, aux = flat(position, key_potential)
        return state._replace(
            i=state.i + 1,
            z=unravel(position),
            potential_energy=value,
            log_functional_prior=aux,
            warmup=state.warmup._replace(optimiser=optimiser),
            rng_key=key,
        )

    def _calibrated_draw(self, sample, flat, metric, i, state):
        draws = self.warmup.calibration_draws(self._num_warmup)
        may_lengthen = i < draws[2]

        def calibrate(state):
            key, key_potential = jax.random.split(state.rng_key)
            position, warmup = ravel_pytree(state.z)[0], state.warmup
            curvature, direction = largest_curvature(
                lambda w, k: flat(w, k)[0], position, warmup.direction, key_potential, metric
            )
            good = jnp.isfinite(curvature) & (curvature > 0)
            found = jnp.where(good, self._stable_step_size(curvature), 0.5 * warmup.step_size)
            step_size = jnp.where(may_lengthen, found, jnp.minimum(found, warmup.step_size))
            direction = jnp.where(good, direction, warmup.direction)
            return state._replace(warmup=warmup._replace(direction=direction, step_size=step_size), rng_key=key)

        return sample(jax.lax.cond(jnp.any(jnp.array(draws) == i), calibrate, lambda s: s, state))

    def _sampling_draw(self, flat, metric, unravel, is_adapting, state):
        key, key_steps = jax.random.split(state.rng_key)
        position = ravel_pytree(state.z)[0]
        step_size = state.warmup.step_size if self.step_size is None else self.step_size
        position, momentum, info = self._transition(
            key_steps, position, state.momentum, state.count, flat, step_size, metric
        )
        warmup = state.warmup
        if self.step_size is None:
            hot = jnp.where(info.temperature > _hot(position.size), 0.9, 1.0)
            factor = jnp.where(info.is_diverging | (info.temperature > 2.0), 0.5, hot)
            factor = jnp.where(is_adapting, factor, 1.0).astype(position.dtype)
            warmup = warmup._replace(step_size=warmup.step_size * factor)
        num_sampled = jnp.maximum(state.i + 1 - self._num_warmup, 1)
        mean = state.mean_temperature + (info.temperature - state.mean_temperature) / num_sampled
        return state._replace(
            i=state.i + 1,
            z=unravel(position),
            potential_energy=info.potential_energy,
            log_functional_prior=info.aux,
            gradient_norm=info.gradient_norm,
            temperature=info.temperature,
            mean_temperature=jnp.where(is_adapting, 0.0, mean).astype(mean.dtype),
            step_size=info.step_size,
            diverging=info.is_diverging,
            num_diverging=jnp.where(is_adapting, 0, state.num_diverging + info.is_diverging),
            momentum=momentum,
            count=state.count + self.num_steps,
            warmup=warmup,
            rng_key=key,
        )


def _flatten(model, unravel):
    return lambda position, key: model(unravel(position), key)


def _hot(size):
    """Kinetic temperature beyond which a draw is too hot to be chance: 1.1 plus four standard deviations."""
    return 1.1 + 4.0 * (2.0 / size) ** 0.5


def _check_init_params(given, expected, *, batched):
    if not isinstance(given, dict) or set(given) != set(expected):
        names = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"init_params must be a dict with the sites {sorted(expected)}, got {names}.")
    for name, value in given.items():
        shape = jnp.shape(value)[1:] if batched else jnp.shape(value)
        if shape != jnp.shape(expected[name]):
            raise ValueError(
                f"init_params[{name!r}] has shape {shape} per chain, the model's (unconstrained) site has "
                f"{jnp.shape(expected[name])}."
            )
