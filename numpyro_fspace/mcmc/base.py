"""The base class of the NumPyro kernels: settings, programs, NumPyro's protocol."""

from __future__ import annotations

import copy
from collections.abc import Callable

import jax
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_fspace._checks import check_count, check_is_model, check_positive, check_step_size, one_line
from numpyro_fspace._xla import chains_together
from numpyro_fspace.mcmc import chain_updates
from numpyro_fspace.mcmc.plan import Plan, make_plan
from numpyro_fspace.mcmc.reporting.end_of_run import judge_numpyro_runs
from numpyro_fspace.mcmc.sampler_adapters import Sampler
from numpyro_fspace.mcmc.start_checks import checked_init_params
from numpyro_fspace.mcmc.target import Target
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.model._numpyro import active_handlers, is_nested
from numpyro_fspace.model.checks.arguments import checked_arguments, known_values
from numpyro_fspace.model.checks.model import check_gradient
from numpyro_fspace.model.data.arguments import split_arrays, structure_of
from numpyro_fspace.model.handlers import one_at_a_time
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.last_layer.integrable import find_block
from numpyro_fspace.model.last_layer.marginal_potential import MarginalPotential
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.programs.cache import cached_program, content_key, options_of_outermost
from numpyro_fspace.priors.tracing import is_traced
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner, automatic, prior_scale


class SGMCMCKernel(MCMCKernel):
    """The base class of the kernels: the potential of the model, warm-up, chains, NumPyro's protocol.

    A setting may be changed between runs: the next run is that of a new kernel with this setting. Compiled programs
    depend on nothing else of a kernel, so that several runs at a time may share one.
    """

    sampler_type: type[Sampler]
    sample_field = "z"
    default_fields = ("z", "diverging")
    friction: float | None = 0.0  # None is found in warm-up
    needs_functional_prior = False
    needs_exact_density = False  # even without a Metropolis test
    min_parameters = 1

    def __init__(
        self,
        model: Callable,
        *,
        step_size: float | Callable | None = None,
        num_steps: int = 40,
        temperature: float = 1.0,
        preconditioner: Preconditioner | None = None,
        control_variates: bool | int = True,
        metropolis: bool | None = None,
        marginalize: bool | None = None,
        warmup: Warmup | None = None,
        init_strategy: Callable = init_to_network,
    ):
        check_is_model(model)
        check_count(num_steps, "num_steps")
        self._model = model
        self.metropolis = metropolis
        self.marginalize = marginalize
        self.control_variates = control_variates
        self.step_size = step_size
        self.num_steps = int(num_steps)
        self.temperature = temperature
        self._preconditioner = preconditioner
        self.warmup = Warmup() if warmup is None else warmup
        if not callable(init_strategy):
            raise TypeError(f"init_strategy must be one of NumPyro's, such as init_to_median, got {init_strategy!r}.")
        self.init_strategy = init_strategy
        self._programs: dict = {}
        judge_numpyro_runs()
        self._check_settings()

    def _check_settings(self):
        """Refuses settings of the wrong kind or range: when a kernel is made, and when a run begins."""
        check_step_size(self.step_size)
        check_count(self.num_steps, "num_steps")
        check_positive(self.temperature, "temperature")
        if not isinstance(self.preconditioner, Preconditioner):
            raise TypeError(
                "preconditioner must come from fs.preconditioners (dense(), rmsprop(), prior_scale(), diagonal(s), "
                f"identity()), got {self.preconditioner!r}."
            )
        if not isinstance(self.warmup, Warmup):
            raise TypeError(f"warmup must be a fs.Warmup or None, got {self.warmup!r}.")
        self.warmup.check()
        if not isinstance(self.control_variates, bool):
            check_count(self.control_variates, "control_variates")
        for name in ("metropolis", "marginalize"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True, False or None, got {getattr(self, name)!r}.")

    @property
    def preconditioner(self) -> Preconditioner:
        """The preconditioner that was given, or else the default for the step size."""
        if self._preconditioner is not None:
            return self._preconditioner
        return automatic() if self.step_size is None else prior_scale()

    @preconditioner.setter
    def preconditioner(self, preconditioner):
        self._preconditioner = preconditioner

    # ---- NumPyro's protocol --------------------------------------------------------------------

    @property
    def _sample_fn(self):
        """Tells NumPyro's driver that a run which goes on from a state needs no ``init``."""
        return self.sample

    @property
    def model(self):
        return self._programs.get("model", self._model)

    def wrap_model(self, wrapper):
        kernel = copy.copy(self)
        kernel._model, kernel._programs = wrapper(self._model), {}
        return kernel

    __repr__ = one_line

    def __getstate__(self):
        return self.__dict__ | {"_programs": {}}

    def get_diagnostics_str(self, state):
        text = f"step size {float(state.step_size):.1e}, temperature {float(state.temperature):.2f}"
        return f"{text}, {int(state.num_diverging)} diverging" if int(state.num_diverging) else text

    @one_at_a_time
    def postprocess_fn(self, model_args, model_kwargs):
        return one_at_a_time(self._model_potential(model_args, model_kwargs).constrain_fn())

    def refresh(self, state, model_args, model_kwargs):
        """``state`` with its potential energy, and the control variate, evaluated anew on this data."""
        arrays, static, join = split_arrays((model_args, model_kwargs))
        single, plan = is_prng_key(state.rng_key), self._plan_of(state, model_args, model_kwargs)

        @one_at_a_time
        def refresh(state, arrays):
            fn = self._target(plan, *join(arrays)).refresh
            return fn(state) if single else jax.vmap(fn)(state)

        return self._compiled(refresh, static, "refresh", plan, single)(state, arrays)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        plan = self.prepare(model_args, model_kwargs, num_warmup).of_constants((model_args, model_kwargs))
        return self.start(plan, rng_key, init_params, model_args, model_kwargs)

    @one_at_a_time
    def prepare(self, args: tuple, kwargs: dict, num_warmup: int) -> Plan:
        """The plan of a run: all that it depends on besides numbers in arrays.

        Args:
            args, kwargs: the model's arguments.
            num_warmup: draws of warm-up.

        Raises:
            TypeError, ValueError: for settings, a model or data that cannot be sampled.
        """
        self._check_settings()
        return make_plan(self, args, kwargs, num_warmup)

    def start(self, plan: Plan, rng_key, init_params, model_args, model_kwargs):
        """The state of a chain, or of as many as there are keys, at ``init_params`` or where the strategy puts it."""
        if plan.finds_step_size and not plan.schedule.calibrations:
            raise ValueError(
                f"num_warmup={plan.num_warmup} leaves no draw to find a step size in (warm_start="
                f"{self.warmup.warm_start} of it goes to the optimizer): give step_size, or warm up for longer."
            )
        single = is_prng_key(rng_key)
        if init_params is not None:
            init_params = checked_init_params(init_params, plan, None if single else len(rng_key))
        arrays, static, join = split_arrays((model_args, model_kwargs))

        @one_at_a_time
        def init(rng_key, init_params, arrays):
            args, kwargs = join(arrays)

            def one(key, init_params):
                key, key_model = jax.random.split(key)
                return chain_updates.start(self._target(plan, args, kwargs, key=key_model), key, init_params)

            return one(rng_key, init_params) if single else jax.vmap(one)(rng_key, init_params)

        start = self._compiled(init, static, "init", plan, single)
        with known_values(self._model, model_args, model_kwargs, "run"):
            return start(rng_key, init_params, arrays)._replace(plan=plan)

    def sample(self, state, model_args, model_kwargs):
        return self.updated(chain_updates.draw, state, model_args, model_kwargs)

    @one_at_a_time
    def updated(self, update, state, model_args, model_kwargs):
        """``state``, of one chain or several, after an update by a function of ``chain_updates``."""
        with checked_arguments(model_args, model_kwargs) as trouble:  # NumPyro's driver may go on with other data
            if trouble is not None:
                check_gradient(self._model, model_args, model_kwargs, self.init_strategy)
        plan = self._plan_of(state, model_args, model_kwargs)
        target = self._target(plan, model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return update(target, state.i, state)
        # The draw index is the same for all chains: unbatched, so that phases are branches, not selects.
        draw = jax.vmap(lambda one: update(target, state.i[0], one))
        num = len(state.i)
        num_together = chains_together(num, plan.largest_array)
        if num_together == num:
            return draw(state)
        blocks = jax.tree.map(lambda a: a.reshape(num // num_together, num_together, *a.shape[1:]), state)
        return jax.tree.map(lambda a, old: a.reshape(old.shape), jax.lax.map(draw, blocks), state)

    # ---- parts ---------------------------------------------------------------------------------

    def _model_potential(self, args, kwargs, key=None, *, is_known=False, block: tuple[str, ...] | None = None):
        key = jax.random.key(0) if key is None else key
        block = self._integrated_out(args, kwargs) if block is None else block
        kind = MarginalPotential if block else ModelPotential
        return kind(
            self._model, args, kwargs, key=key, init_strategy=self.init_strategy, is_known=is_known, block=block
        )

    def _integrated_out(self, args, kwargs) -> tuple[str, ...]:
        """The sites that are integrated out of this model, found once for arguments of the same structure."""
        if self.marginalize is False:
            return ()
        _, static, _ = split_arrays((args, kwargs))
        key = ("block", self._settings(), structure_of(args, kwargs), tuple(active_handlers()))
        found = cached_program(self._programs, static, key, {})
        if "block" not in found:
            potential = self._model_potential(args, kwargs, block=())
            is_cold = is_traced(self.temperature) or self.temperature != 1.0
            cold: tuple = (), f"temperature={self.temperature} is not 1"
            # Small factorizations are slow on accelerators, and only a gp_network needs them in any case.
            unasked, on_cpu = self.marginalize is None, jax.default_backend() == "cpu"
            limits = {"only_gp_networks": unasked and not on_cpu, "only_cheap": unasked}
            block, why = cold if is_cold else find_block(potential, self.min_parameters, **limits)
            if why is not None and self.marginalize:
                raise ValueError(f"marginalize=True, but {why}: leave marginalize out, or change that.")
            found["block"] = block
        return found["block"]

    def _settings(self):
        """A key of all settings of this kernel."""
        values = {k: v for k, v in vars(self).items() if k != "_programs"}
        values = {k: (type(v), vars(v)) if isinstance(v, Preconditioner) else v for k, v in values.items()}
        return type(self), content_key(values)

    def _plan_of(self, state, args, kwargs) -> Plan:
        """The plan of a state; made anew for settings or arguments that it was not made for."""
        plan = state.plan
        is_known = plan.settings is not None and plan.settings[0] == self._settings()
        is_known = is_known and plan.arguments == structure_of(args, kwargs)
        return plan if is_known else self.prepare(args, kwargs, plan.num_warmup)

    def _target(self, plan: Plan, args, kwargs, key=None) -> Target:
        """A model with these arguments, and the plan of a run on it."""
        return Target(self._model_potential(args, kwargs, key, is_known=True, block=plan.block), plan)

    def _why_untested(self) -> str | None:
        """Why a Metropolis test does not apply to these settings; None if it does."""
        return "step_size is a schedule" if callable(self.step_size) else None

    def _compiled(self, fn, static, *key):
        """``jax.jit(fn)`` of a program that runs once or a few times, made once for each key and type of arguments."""
        program = jax.jit(fn, compiler_options=options_of_outermost(is_quick=True))
        return cached_program(self._programs, static, (*key, is_nested()), program)
