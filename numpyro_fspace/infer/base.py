"""What the NumPyro kernels share: the model's potential, warm-up, chains, NumPyro's protocol."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_fspace.arguments import split_arrays
from numpyro_fspace.infer.chain import Chain
from numpyro_fspace.infer.warmup import Warmup
from numpyro_fspace.infer.xla import UNOPTIMISED, chains_together, largest_array
from numpyro_fspace.potential import ModelPotential, check_gradient
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner, prior_scale, rmsprop
from numpyro_fspace.validate import (
    check_count,
    check_positive,
    check_step_size,
    checked_arguments,
)

__all__ = ["SGMCMCKernel"]


class SGMCMCKernel(MCMCKernel):
    """What the kernels share: the potential of the model, warm-up, chains, NumPyro's protocol."""

    sample_field = "z"
    friction: float | None = 0.0  # None is found in warm-up
    needs_functional_prior = False

    def __init__(
        self, model, *, step_size, num_steps, temperature, preconditioner, control_variates, warmup, init_strategy
    ):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}.")
        check_step_size(step_size)
        check_count(num_steps, "num_steps")
        check_positive(temperature, "temperature")
        if preconditioner is not None and not isinstance(preconditioner, Preconditioner):
            raise TypeError(
                "preconditioner must come from fs.preconditioners (rmsprop(), prior_scale(), low_rank(rank), "
                "diagonal(s), identity()), "
                f"got {preconditioner!r}."
            )
        if warmup is not None and not isinstance(warmup, Warmup):
            raise TypeError(f"warmup must be a fs.Warmup or None, got {warmup!r}.")
        if warmup is not None:
            warmup.check()
        if not isinstance(control_variates, bool):
            check_count(control_variates, "control_variates")
        self._model = model
        self.control_variates = control_variates
        self.step_size = step_size
        self.num_steps = int(num_steps)
        self.temperature = temperature
        self.preconditioner = self._default_preconditioner() if preconditioner is None else preconditioner
        self.warmup = Warmup() if warmup is None else warmup
        self.init_strategy = init_strategy
        self._num_warmup, self._goes_on = 0, False
        self._points_in_data: dict = {}
        self._largest_array = 0  # numbers in the largest array that the model computes
        self._programs = {}

    # ---- what a sampler adds -------------------------------------------------------------------

    @abstractmethod
    def _initial_momentum(self, key, position):
        """The momentum a chain starts with, flat [P] (or empty)."""

    @abstractmethod
    def _transition(self, key, position, momentum, count, potential, step_size, friction, metric):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""

    @abstractmethod
    def _stable_step_size(self, curvature):
        """The step size for largest curvature λ (in the preconditioner's coordinates)."""

    def _default_preconditioner(self):
        return rmsprop() if self.step_size is None else prior_scale()

    # ---- NumPyro's protocol --------------------------------------------------------------------

    @property
    def model(self):
        return self._model

    @property
    def default_fields(self):
        return ("z", "diverging")

    def wrap_model(self, wrapper):
        kernel = copy.copy(self)
        kernel._model, kernel._programs = wrapper(self._model), {}
        return kernel

    def __getstate__(self):
        return self.__dict__ | {"_programs": {}}

    def get_diagnostics_str(self, state):
        text = f"step size {float(state.step_size):.1e}, temperature {float(state.temperature):.2f}"
        return f"{text}, {int(state.num_diverging)} diverging" if int(state.num_diverging) else text

    def postprocess_fn(self, model_args, model_kwargs):
        return self._model_potential(model_args, model_kwargs).constrain_fn()

    def get_constrain_fn(self, model_args, model_kwargs):
        return self.postprocess_fn(model_args, model_kwargs)

    def refresh(self, state, model_args, model_kwargs):
        arrays, static, join = split_arrays((model_args, model_kwargs))
        single = is_prng_key(state.rng_key)

        def refresh(state, arrays):
            fn = self._chain(*join(arrays)).refresh
            return fn(state) if single else jax.vmap(fn)(state)

        return self._compiled(refresh, "refresh", static, single)(state, arrays)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        if self.step_size is None and not self._goes_on and not self.warmup.calibration_draws(num_warmup):
            raise ValueError(
                f"num_warmup={num_warmup} leaves no draw to find a step size in (warm_start="
                f"{self.warmup.warm_start} of it goes to the optimiser): give step_size, or warm up for longer."
            )
        self._num_warmup = num_warmup
        single = is_prng_key(rng_key)
        expected = self.check(model_args, model_kwargs)
        if init_params is not None:
            _check_init_params(init_params, expected, None if single else rng_key.shape[0])
            init_params = jax.tree.map(lambda given, like: jnp.asarray(given, like.dtype), init_params, expected)
        arrays, static, join = split_arrays((model_args, model_kwargs))

        def init(rng_key, init_params, arrays):
            args, kwargs = join(arrays)

            def one(key, init_params):
                key, key_model = jax.random.split(key)
                return self._chain(args, kwargs, key_model).start(key, init_params, self._initial_momentum)

            return one(rng_key, init_params) if single else jax.vmap(one)(rng_key, init_params)

        # Nested in NumPyro's parallel chains no options can be given.
        is_quick = jax.default_backend() == "cpu" and not isinstance(rng_key, jax.core.Tracer)
        options = UNOPTIMISED if is_quick else None
        start = self._compiled(init, "init", static, single, is_quick, options=options)
        try:
            return start(rng_key, init_params, arrays)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            error.add_note(
                "numpyro_fspace: arrays given to run are arguments of a compiled model, which cannot read their values "
                "(len(np.unique(groups)), int(groups.max()), if x.sum() > 0). Compute such a number outside of the "
                "model and pass it to run as a Python int, or close over the array."
            )
            raise

    def check(self, model_args, model_kwargs):
        """The shapes of the unconstrained parameters; an error for a model or data that cannot be sampled."""
        with checked_arguments(model_args, model_kwargs) as trouble:
            trace = jax.make_jaxpr(partial(self._checked_params, model_args, model_kwargs), return_shape=True)
            program, params = trace(jax.random.key(0))  # the model's first evaluation, with what its start takes
            if trouble is not None:
                check_gradient(self._model, model_args, model_kwargs, self.init_strategy)
        self._largest_array = largest_array(program.jaxpr)
        return params

    def check_start(self, start, state, model_args, model_kwargs):
        """Raise a ValueError if a chain's first draw left it at ``start``, where the potential is not finite."""
        stuck = ~np.isfinite(np.atleast_1d(state.potential_energy))
        if not stuck.any():
            return
        for old, new in zip(jax.tree.leaves(start.z), jax.tree.leaves(state.z), strict=True):
            stuck &= np.all(np.reshape(old == new, (stuck.size, -1)), axis=1)
        energy = np.atleast_1d(self.refresh(start, model_args, model_kwargs).potential_energy)
        stuck &= ~np.isfinite(energy)  # else the draw was undone for its step's length
        if stuck.any():
            number = int(np.argmax(stuck))
            chain = jax.tree.map(lambda a: a.reshape(energy.size, *a.shape[state.i.ndim :])[number], start)
            names = self._model_potential(model_args, model_kwargs).not_finite(chain.z, chain.rng_key)
            raise ValueError(
                f"The log density is {-energy[number]} where {stuck.sum()} of {energy.size} chains start, and they "
                f"cannot move: that of {', '.join(map(repr, names)) or 'the model'} is not finite there. Look at what "
                "the model computes (a covariance without a Cholesky factor wants a larger nugget), or start elsewhere "
                "(init_params of run, init_strategy of the kernel)."
            )

    def sample(self, state, model_args, model_kwargs):
        chain = self._chain(model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return chain.draw(state.i, state)
        # The draw index is the same for all chains: unbatched, so that phases are branches, not selects.
        draw = jax.vmap(lambda one: chain.draw(state.i[0], one))
        num = len(state.i)
        num_together = chains_together(num, self._largest_array)
        if num_together == num:
            return draw(state)
        blocks = jax.tree.map(lambda a: a.reshape(num // num_together, num_together, *a.shape[1:]), state)
        return jax.tree.map(lambda a, old: a.reshape(old.shape), jax.lax.map(draw, blocks), state)

    # ---- parts ---------------------------------------------------------------------------------

    def _model_potential(self, args, kwargs, key=None):
        key = jax.random.key(0) if key is None else key
        return ModelPotential(self._model, args, kwargs, key=key, init_strategy=self.init_strategy)

    def _control_every(self, batches: float) -> int | None:
        """Draws between renewals of the control variate, None for none; by default one full gradient per N/B steps."""
        if batches <= 1.0 or not self.control_variates:
            return None
        return math.ceil(batches / self.num_steps) if self.control_variates is True else int(self.control_variates)

    def _chain(self, args, kwargs, key=None):
        model = self._model_potential(args, kwargs, key)
        return Chain(
            model=model,
            warmup=self.warmup,
            num_warmup=self._num_warmup,
            num_steps=self.num_steps,
            step_size=self.step_size,
            friction=self.friction if self.friction is not None or model.is_random else 1.0,
            temperature=self.temperature,
            transition=self._transition,
            stable_step_size=self._stable_step_size,
            preconditioner=self.preconditioner,
            control_every=None if model.has_own_noise else self._control_every(model.batches()),
        )

    def _checked_params(self, args, kwargs, key):
        potential, name = self._model_potential(args, kwargs, key), type(self).__name__
        if self.needs_functional_prior and not potential.functional_priors:
            raise ValueError(
                f"{name} needs a model that declares fs.functional_prior(...); this one has none. "
                f"Add it, or sample with fs.{name[1:]}."
            )
        potential.check_data()
        self._points_in_data = potential.points_in_data()
        params = potential.init_params()
        position = ravel_pytree(params)[0]
        self.preconditioner.build(position, self.preconditioner.start(position))  # refuses a scale of another length
        return params

    def _compiled(self, fn, *key, options=None):
        """``jax.jit(fn)``, or what it was when it was first asked for under this key."""
        compiled = jax.jit(fn, compiler_options=options)
        try:
            return self._programs.setdefault(key, compiled)
        except TypeError:  # an argument that is neither an array nor hashable
            return compiled


def _check_init_params(given, expected, num_chains):
    if not isinstance(given, dict) or set(given) != set(expected):
        names = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"init_params must be a dict with the sites {sorted(expected)}, got {names}.")
    for name, value in given.items():
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
