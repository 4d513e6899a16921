"""What the NumPyro kernels share: the model's potential, warm-up, chains, NumPyro's protocol."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_fspace._checks import as_numbers, check_count, check_positive, check_step_size
from numpyro_fspace._xla import UNOPTIMIZED, chains_together, is_nested, largest_array
from numpyro_fspace.mcmc.chain import Chain
from numpyro_fspace.mcmc.plan import Plan, one_at_a_time
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.mcmc.warnings import warn_of_trouble
from numpyro_fspace.model._numpyro import active_handlers
from numpyro_fspace.model.arguments import frozen, kept, split_arrays
from numpyro_fspace.model.checks import checked_arguments, known_values
from numpyro_fspace.model.potential import ModelPotential, check_gradient, check_plates
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner, automatic, prior_scale

__all__ = ["Checked", "SGMCMCKernel", "check_init_params"]


class Checked(NamedTuple):
    """What the first evaluation of a model with its data tells.

    Attributes:
        params: shapes of the unconstrained parameters, by site.
        points: by name of functional prior, which rows of the data are its points (``OnePass.found``).
        largest_array: numbers in the largest array that the model computes.
    """

    params: dict
    points: dict
    largest_array: int


class SGMCMCKernel(MCMCKernel):
    """What the kernels share: the potential of the model, warm-up, chains, NumPyro's protocol.

    A setting may be changed between runs; the next one is that of a kernel made with it. No trace reads anything else
    of a kernel, so that one may serve several runs at a time.
    """

    sample_field = "z"
    friction: float | None = 0.0  # None is found in warm-up
    needs_functional_prior = False
    has_momentum = False

    def __init__(
        self,
        model,
        *,
        step_size,
        num_steps,
        temperature,
        preconditioner,
        control_variates,
        metropolis,
        warmup,
        init_strategy,
    ):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}.")
        check_count(num_steps, "num_steps")
        self._model = model
        self.metropolis = metropolis
        self.control_variates = control_variates
        self.step_size = step_size
        self.num_steps = int(num_steps)
        self.temperature = temperature
        self._preconditioner = preconditioner
        self.warmup = Warmup() if warmup is None else warmup
        self.init_strategy = init_strategy
        self._programs = {}

    def _check_settings(self):
        """Refuses settings of the wrong kind or range: when a kernel is made, and when a run begins."""
        check_step_size(self.step_size)
        check_count(self.num_steps, "num_steps")
        check_positive(self.temperature, "temperature")
        if not isinstance(self.preconditioner, Preconditioner):
            raise TypeError(
                "preconditioner must come from fs.preconditioners (dense(), rmsprop(), prior_scale(), low_rank(rank), "
                "diagonal(s), identity()), "
                f"got {self.preconditioner!r}."
            )
        if not isinstance(self.warmup, Warmup):
            raise TypeError(f"warmup must be a fs.Warmup or None, got {self.warmup!r}.")
        self.warmup.check()
        if not isinstance(self.control_variates, bool):
            check_count(self.control_variates, "control_variates")
        if self.metropolis is not None and not isinstance(self.metropolis, bool):
            raise TypeError(f"metropolis must be True, False or None, got {self.metropolis!r}.")

    @property
    def preconditioner(self) -> Preconditioner:
        """The preconditioner that was given, or else the default for the step size."""
        return self._default_preconditioner() if self._preconditioner is None else self._preconditioner

    @preconditioner.setter
    def preconditioner(self, preconditioner):
        self._preconditioner = preconditioner

    @property
    def absorbs_noise(self) -> bool:
        """Whether the sampler's thermostat takes account of the noise of gradients."""
        return False

    def warn_of_trouble(self, mcmc):
        """Warn where a run of this kernel went wrong. ``fs.MCMC`` does so itself; NumPyro's ``MCMC`` does not."""
        warn_of_trouble(mcmc)

    # ---- what a sampler adds -------------------------------------------------------------------

    @abstractmethod
    def _initial_momentum(self, key, position):
        """The momentum a chain starts with, flat [P] (or empty)."""

    @abstractmethod
    def _transition(
        self, key, position, momentum, count, potential, step_size, friction, metric, metropolis, gradient_noise
    ):
        """``num_steps`` gradient steps: ``(position, momentum, Info)``."""

    @abstractmethod
    def _stable_step_size(self, curvature, metropolis):
        """The step size for largest curvature λ (in the preconditioner's coordinates), tested or not."""

    def _default_preconditioner(self):
        return automatic() if self.step_size is None else prior_scale()

    # ---- NumPyro's protocol --------------------------------------------------------------------

    @property
    def _sample_fn(self):
        """Tells NumPyro's driver that a run which goes on from a state needs no ``init``."""
        return self.sample

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

    @one_at_a_time
    def postprocess_fn(self, model_args, model_kwargs):
        return one_at_a_time(self._model_potential(model_args, model_kwargs).constrain_fn())

    def get_constrain_fn(self, model_args, model_kwargs):
        return self.postprocess_fn(model_args, model_kwargs)

    def refresh(self, state, model_args, model_kwargs):
        arrays, static, join = split_arrays((model_args, model_kwargs))
        single = is_prng_key(state.rng_key)

        @one_at_a_time
        def refresh(state, arrays):
            fn = self._chain(*join(arrays)).refresh
            return fn(state) if single else jax.vmap(fn)(state)

        return self._compiled(refresh, static, "refresh", self._settings(), single)(state, arrays)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        checked = self.check(model_args, model_kwargs)
        plan = self.plan(checked, num_warmup, (model_args, model_kwargs))
        return self.start(checked, plan, rng_key, init_params, model_args, model_kwargs)

    def plan(self, checked: Checked, num_warmup: int, constants=()) -> Plan:
        """What programs of a run depend on; NumPy arrays that are constants of theirs may be changed in place."""
        arrays = [leaf for leaf in jax.tree.leaves(constants) if isinstance(leaf, np.ndarray)]
        return Plan(num_warmup, checked.largest_array, self._settings(), frozen(arrays))

    def start(self, checked: Checked, plan: Plan, rng_key, init_params, model_args, model_kwargs):
        """The state of a chain, or of as many as there are keys, at ``init_params`` or where the strategy puts it."""
        num_warmup = plan.num_warmup
        if self.step_size is None and not self.warmup.calibration_draws(num_warmup):
            raise ValueError(
                f"num_warmup={num_warmup} leaves no draw to find a step size in (warm_start="
                f"{self.warmup.warm_start} of it goes to the optimizer): give step_size, or warm up for longer."
            )
        single, expected = is_prng_key(rng_key), checked.params
        if init_params is not None:
            check_init_params(init_params, expected, None if single else rng_key.shape[0])
            init_params = {
                k: jnp.asarray(as_numbers(v, f"init_params[{k!r}]"), expected[k].dtype) for k, v in init_params.items()
            }
        arrays, static, join = split_arrays((model_args, model_kwargs))

        @one_at_a_time
        def init(rng_key, init_params, arrays):
            args, kwargs = join(arrays)

            def one(key, init_params):
                key, key_model = jax.random.split(key)
                chain = self._chain(args, kwargs, num_warmup, key_model)
                return chain.start(key, init_params, self._initial_momentum, plan=None)

            return one(rng_key, init_params) if single else jax.vmap(one)(rng_key, init_params)

        is_alone = not is_nested()  # else no options can be given
        options = UNOPTIMIZED if is_alone and jax.default_backend() == "cpu" else None
        start = self._compiled(init, static, "init", plan.settings, num_warmup, single, is_alone, options=options)
        with known_values(self._model, model_args, model_kwargs, "run"):
            return start(rng_key, init_params, arrays)._replace(plan=plan)

    @one_at_a_time
    def check(self, model_args, model_kwargs) -> Checked:
        """What the model and its data are like; an error for settings, a model or data that cannot be sampled."""
        self._check_settings()
        points: dict = {}
        with checked_arguments(model_args, model_kwargs, model=self._model) as trouble:
            trace = jax.make_jaxpr(partial(self._checked_params, model_args, model_kwargs, points), return_shape=True)
            program, params = trace(jax.random.key(0))  # the model's first evaluation, with what its start takes
            check_plates(self._model, model_args, model_kwargs, self.init_strategy)
            if trouble is not None:
                check_gradient(self._model, model_args, model_kwargs, self.init_strategy)
        return Checked(params, points, largest_array(program.jaxpr))

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

    @one_at_a_time
    def sample(self, state, model_args, model_kwargs):
        with checked_arguments(model_args, model_kwargs) as trouble:  # NumPyro's driver may go on with other data
            if trouble is not None:
                check_gradient(self._model, model_args, model_kwargs, self.init_strategy)
        chain = self._chain(model_args, model_kwargs, state.plan.num_warmup)
        if is_prng_key(state.rng_key):
            return chain.draw(state.i, state)
        # The draw index is the same for all chains: unbatched, so that phases are branches, not selects.
        draw = jax.vmap(lambda one: chain.draw(state.i[0], one))
        num = len(state.i)
        num_together = chains_together(num, state.plan.largest_array)
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

    def _preconditioner_of(self, model):
        return self.preconditioner.chosen(model.size, model.is_plain)

    def _settings(self):
        """What tells all that a trace reads of this kernel from others, effect handlers around the run included."""
        values = {k: v for k, v in vars(self).items() if k != "_programs"}
        values = {k: (type(v), vars(v)) if isinstance(v, Preconditioner) else v for k, v in values.items()}
        return type(self), frozen(values), tuple(active_handlers())

    def _chain(self, args, kwargs, num_warmup=0, key=None):
        model = self._model_potential(args, kwargs, key)
        return Chain(
            model=model,
            warmup=self.warmup,
            num_warmup=num_warmup,
            num_steps=self.num_steps,
            step_size=self.step_size,
            friction=self.friction if self.friction is not None or model.is_random else 1.0,
            temperature=self.temperature,
            transition=self._transition,
            metropolis=not self._why_untested(model) if self.metropolis is None else self.metropolis,
            stable_step_size=self._stable_step_size,
            preconditioner=self._preconditioner_of(model),
            absorbs_noise=self.absorbs_noise,
            control_every=None if model.has_own_noise else self._control_every(model.batches()),
        )

    def _why_untested(self, potential) -> str | None:
        """Why a Metropolis test has no sense with this potential and these settings; None if it has."""
        if callable(self.step_size):
            return "step_size is a schedule"
        return (
            "minibatches, random measurement points or the model's own random numbers change it at every step"
            if potential.is_random
            else None
        )

    def _checked_params(self, args, kwargs, points, key):
        potential, name = self._model_potential(args, kwargs, key), type(self).__name__
        if self.needs_functional_prior and not potential.functional_priors:
            raise ValueError(
                f"{name} needs a model that declares fs.functional_prior(...); this one has none. "
                f"Add it, or sample with fs.{name[1:]}."
            )
        why = self._why_untested(potential)
        if self.metropolis and why:
            raise ValueError(
                f"metropolis=True needs the exact density, but {why}: leave metropolis out, or change that."
            )
        potential.check_data()
        points |= potential.points_in_data()
        params = potential.init_params()
        position = ravel_pytree(params)[0]
        preconditioner = self._preconditioner_of(potential)
        preconditioner.build(position, preconditioner.start(position))  # refuses a scale of another length
        return params

    def _compiled(self, fn, static, *key, options=None):
        """``jax.jit(fn)``, or what it was when it was first asked for with such arguments and under this key."""
        return kept(self._programs, static, key, jax.jit(fn, compiler_options=options))


def check_init_params(given, expected, num_chains):
    """``init_params`` must have the sites of the model, of the shapes that are expected, for so many chains or one."""
    if not isinstance(given, dict) or set(given) != set(expected):
        names = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"init_params must be a dict with the sites {sorted(expected)}, got {names}.")
    for name, value in given.items():
        if value is None or isinstance(value, dict):
            raise TypeError(f"init_params[{name!r}] must be an array of numbers, got {value!r}.")
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
