"""``fs.MCMC``: NumPyro's driver with a progress bar, warnings and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.util import is_prng_key

from numpyro_fspace._checks import one_line, warn
from numpyro_fspace._xla import chains_together, is_worth_dividing
from numpyro_fspace.mcmc import driver_checks as checks
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.checkpoint_writer import Checkpoint
from numpyro_fspace.mcmc.loop import Loop
from numpyro_fspace.mcmc.numpyro_arguments import NumPyroArguments
from numpyro_fspace.mcmc.reporting.end_of_run import judge
from numpyro_fspace.mcmc.reporting.summary import print_functions
from numpyro_fspace.mcmc.run import Run
from numpyro_fspace.mcmc.run_description import describe
from numpyro_fspace.mcmc.start_checks import at_data, checked_init_params, continued
from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.checks.arguments import check_masks
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.model.programs.cache import cached_program
from numpyro_fspace.model.sharding import CHAINS, check_mesh, place, with_devices_of
from numpyro_fspace.posterior.arrays import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh
    from jaxtyping import Array, ArrayLike, Float, Key


class MCMC(NumPyroMCMC):
    """NumPyro's ``MCMC`` with a progress bar, a check of the draws at the end of ``run``, and checkpoints.

    Everything else is NumPyro's. NumPyro's own ``MCMC`` makes the same draws with the kernels of this package: SGLD,
    SGHMC, MCLMC and their functional forms (fHMC and fMALA are NumPyro's HMC). Creating the first such kernel replaces
    ``numpyro.infer.MCMC.run``, in the whole process, by a function that also warns. A run that continues from
    ``post_warmup_state`` may be given other data.

    **Progress.** On a terminal or in a notebook the bar shows the rate, the remaining time, step size, potential energy
    and kinetic temperature (means over chains), and for several vectorized chains the largest R-hat of the functions at
    ten inputs (not with ``checkpoint``). Log files get no bar. A run that is interrupted (Ctrl-C) ends within about
    half a second and keeps all its draws; of sequential chains it keeps the complete ones, or the first chain's draws
    if none is complete. All this holds for the kernels of this package. NumPyro's own loop runs other
    kernels, parallel chains, and runs that leave out sites (``"~z.w"`` in ``extra_fields``).

    **Repeated runs.** Numbers of draws, the kernel's settings and the arguments of ``run`` may change between runs;
    programs are reused where all they depend on is the same. Several drivers, also in threads, may share one kernel.
    Inside ``jax.jit`` and ``vmap`` a run becomes part of the program: without a bar, check, mesh or checkpoint.

    **Warnings.** At its end ``run`` warns, once, of R-hat above 1.05, of fewer than 50 effective draws per chain, of a
    chain that does not move, and of draws that are wider or narrower than the posterior (by the configurational
    temperature, for the kernels of this package; see ``fs.report``). It judges functions at a few inputs and every
    latent site that is not a weight, in runs of at least 200 draws per chain. If thinning keeps fewer than 100 per
    chain, it judges only the width. In runs of any length, draws that diverged or were rounded, rejections and a high
    kinetic temperature have warnings of their own.

    **Checkpoints.** With ``checkpoint="folder"`` draws and state are written every ``checkpoint_every`` draws. If the
    process is killed, the same call (same kernel, numbers, key and data) continues after the last write and gives the
    draws of an uninterrupted run, bit for bit on the same machine. A finished run is read. A folder that holds another
    run is refused and not changed; the error names what differs. Kernel, settings, outer handlers, key, data (on disk:
    1000 rows), other arguments, shapes, and the parts of the model's log density at a draw from its prior are compared.
    Checksums of the draws reveal damaged or mixed files, which are refused. Memory holds only the draws since the last
    write. ``get_samples`` then returns read-only NumPy arrays that are mapped from disk, and
    ``fs.Posterior.from_checkpoint`` opens them without the run, even before its end.

    **Many chains.** Vectorized chains are one program on one device. With ``mesh=`` every device along its axis
    ``"chains"`` runs a share of them; the draws are those of one device up to rounding. Other axes are for data:
    arguments that were distributed over the mesh stay so. After ``jax.distributed.initialize`` the mesh may span
    processes, each of which makes the same calls and gets all draws.

    Args:
        sampler: a kernel.
        num_warmup: warm-up draws of each chain, which are not kept.
        num_samples: draws of each chain after warm-up.
        num_chains: number of chains.
        thinning: keep the last of every ``thinning`` draws.
        postprocess_fn: from unconstrained to constrained values, in place of the kernel's own.
        chain_method: ``"parallel"`` (a device for each chain; one after another if there are fewer), ``"sequential"``
            or ``"vectorized"`` (one program on one device).
        progress_bar: whether a bar is shown on a terminal or in a notebook.
        progress_rate: draws between two updates of the bar of NumPyro's own loop.
        jit_model_args: True runs NumPyro's own loop and traces the model's arguments; this driver always traces them.
        functions_at: inputs [N, D] (or a dict of them by name of function) at which every draw's functions are kept *in
            place of the weights* they depend on, for networks whose draws would not fit in memory:
            ``get_samples()["f"]`` is then [S, N, ...]. What needs weights, such as ``fs.predict``, cannot use the run.
        mesh: devices that share vectorized chains, such as ``jax.make_mesh((8,), ("chains",))``; None uses one device.
        checkpoint: folder of the files (``~`` is the home folder); None writes none. Several chains must be vectorized.
        checkpoint_every: draws that are kept between two writes; in warm-up, draws between two writes.

    Raises:
        TypeError: for a sampler that is no kernel, and for functions_at or a mesh with a kernel other than SGLD, SGHMC,
            MCLMC and their functional forms.
        ValueError: for settings out of range, for chains that are not vectorized with a checkpoint, functions_at or a
            mesh, and for a mesh that cannot share the chains equally, or that spans processes with a checkpoint.
            ``run`` raises it for a folder that holds another run or damaged files, and if the log density is not finite
            where a chain of the package's kernels starts (the message names the sites).
        OSError: at ``run``, when a write fails (a full disk, a folder without write permission) or another process is
            writing to the folder. What was written before is intact, and ``last_state`` is the state at which the run
            stopped.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tempfile
        >>> def model(y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> settings = {"num_warmup": 20, "num_samples": 30, "progress_bar": False}
        >>> files = {"checkpoint": tempfile.mkdtemp(), "checkpoint_every": 10}
        >>> first, again = (fs.MCMC(fs.SGHMC(model), **settings, **files) for _ in range(2))
        >>> for mcmc in (first, again):  # the second reads what the first wrote
        ...     mcmc.run(jax.random.key(0), y=1.0)
        >>> bool((first.get_samples()["mu"] == again.get_samples()["mu"]).all())
        True
    """

    post_warmup_state: Any  # a property of NumPyro's

    has_warned = True  # ``run`` warns of trouble by itself

    def __init__(
        self,
        sampler,
        *,
        num_warmup: int = 1000,
        num_samples: int = 1000,
        num_chains: int = 1,
        thinning: int = 1,
        postprocess_fn: Callable | None = None,
        chain_method: str | Callable = "parallel",
        progress_bar: bool = True,
        progress_rate: int | None = None,
        jit_model_args: bool = False,
        functions_at: Float[ArrayLike, "N D"] | dict | None = None,
        mesh: Mesh | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
    ):
        options = {"thinning": thinning, "chain_method": chain_method, "postprocess_fn": postprocess_fn}
        checks.check_settings(sampler, num_warmup, num_samples, num_chains=num_chains, **options)
        super().__init__(
            sampler,
            num_warmup=int(num_warmup),  # NumPyro takes no integers of NumPy
            num_samples=int(num_samples),
            num_chains=int(num_chains),
            thinning=int(thinning),
            postprocess_fn=postprocess_fn,
            chain_method=chain_method,
            progress_bar=progress_bar,
            progress_rate=progress_rate,
            jit_model_args=jit_model_args,
        )
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        self.functions_at = checks.checked_inputs(functions_at, "functions_at")
        self.mesh = None if mesh is None else check_mesh(mesh, self.num_chains)
        checks.check_options(self)
        self._loops: dict = {}
        self._arguments, self._warmed = NumPyroArguments(), None  # and the state after a warm-up of this object

    __repr__ = one_line

    def __getstate__(self):
        return super().__getstate__() | {"_loops": {}}

    @entry_point
    def warmup(self, *args, **kwargs):
        try:
            super().warmup(*args, **kwargs)
        except BaseException:
            self._set_collection_params()  # otherwise the next run would draw nothing
            raise
        self._warmed = self.post_warmup_state

    @entry_point
    def run(
        self,
        rng_key: Key[Array, ""],
        *args: Any,
        extra_fields: Sequence[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        check_masks(args, kwargs)
        is_whole = not checks.is_warmup(self)
        if is_whole:
            self._set_collection_params()  # numbers may have been changed since the last run
        checks.check_run(self, rng_key)
        rng_key = checks.single(self, rng_key)
        if init_params is not None and is_whole and self.post_warmup_state is not None:
            warn("init_params is not used: the run continues from post_warmup_state. Set that to None to start anew.")
        before = self.post_warmup_state, self._warmed
        try:
            self._continue(args, kwargs)
            if checks.uses_own_loop(self, extra_fields):
                self._run(rng_key, extra_fields, init_params, args, kwargs)
            else:
                checks.check_left_out(self, extra_fields, args, kwargs)
                with checks.foreign_kernel(self.sampler, args, kwargs):
                    args, kwargs = self._arguments.prepared(self, args, kwargs)
                    super().run(rng_key, *args, extra_fields=extra_fields, init_params=init_params, **kwargs)
        finally:
            if is_nested():  # the states of a program are no states to begin from
                self.post_warmup_state, self._warmed = before
        if is_whole:  # the temperature of warm-up is no draw's
            judge(self)

    def _continue(self, args, kwargs):
        """Adapt ``post_warmup_state`` to these arguments and to the kernel's present settings."""
        state = self.post_warmup_state
        if isinstance(state, KernelState):
            is_own = state is self._warmed
            state = continued(self.sampler, state, args, kwargs, num_warmup=self.num_warmup, is_own=is_own)
            self._warmed = state if is_own else self._warmed  # the next run begins there too
        elif state is not None:
            with checks.foreign_kernel(self.sampler, args, kwargs):
                state = at_data(self.sampler, state, args, kwargs)
        self.post_warmup_state = state

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True, *, weights: bool = False) -> None:
        """NumPyro's summary of all sites but weights (all with ``weights``), and of functions at five rows of data."""
        if weights or self.functions_at is not None or getattr(self.sampler, "model", None) is None:
            super().print_summary(prob, exclude_deterministic and self.functions_at is None)
        else:
            print_functions(self, prob, exclude_deterministic)

    def _run(self, key, extra_fields, init_params, args, kwargs):
        if self.num_chains > 1 and is_prng_key(key):
            key = jax.random.split(key, self.num_chains)
        args, kwargs = given = with_devices_of((args, kwargs), ())
        fields = tuple(dict.fromkeys((*self.sampler.default_fields, *extra_fields)))
        if self.checkpoint is not None:
            description = describe(self, key, fields, init_params, args=args, kwargs=kwargs)
            Checkpoint(self.checkpoint, description)  # refuses another run before anything is computed
        init_params = checks.arrays_of(init_params)
        if self.mesh is not None:
            key, init_params = place((key, init_params), self.mesh, CHAINS)
            arrays, _, join = split_arrays((args, kwargs))
            args, kwargs = join(place(arrays, self.mesh))
        points, largest = {}, 0
        if isinstance(self.sampler, SGMCMCKernel):
            plan = self.sampler.prepare(args, kwargs, self.num_warmup)
            points, largest = plan.rows_of_points, plan.largest_array

        def begin(key, init_params, state):
            if not isinstance(self.sampler, SGMCMCKernel):
                return self.sampler.init(key, self.num_warmup, init_params, args, kwargs), 0
            if state is None:
                return self.sampler.start(plan, key, init_params, args, kwargs), 0
            return state._replace(rng_key=key, plan=plan), self.num_warmup

        arrays, static, join = split_arrays((args, kwargs, self.functions_at, points))
        start = key, init_params, self.post_warmup_state
        is_sequential = self.num_chains > 1 and self.chain_method == "sequential"
        run = Run(self, self._loop(fields, static, join, largest, 1 if is_sequential else self.num_chains))
        if is_sequential:
            if init_params is not None:
                checked_init_params(init_params, plan, self.num_chains)
            self._hold(None, given)
            run.one_by_one(begin, start, arrays)
            return
        state, done = begin(*start)
        self._hold(None, given)
        if self.checkpoint is None:
            run.in_memory(state, done, arrays)
        else:
            run.on_disk(state, arrays, description)

    def _loop(self, fields, static, join, largest, num_chains):
        together = chains_together(num_chains // (1 if self.mesh is None else self.mesh.shape[CHAINS]), largest)
        settings = {
            "num_chains": num_chains,
            "thinning": self.thinning,
            "constrain": self.postprocess_fn,
            "mesh": self.mesh,
            "is_divided": is_worth_dividing(together * largest) or not isinstance(self.sampler, SGMCMCKernel),
        }
        loop = Loop(self.sampler, fields, join, **settings)
        return cached_program(self._loops, static, (self.sampler, fields, *settings.values()), loop)

    def _hold(self, states, arguments=None):
        """Store draws [C, S, …] where NumPyro's ``MCMC`` expects them; None and the arguments before the first draw."""
        self._states, self._states_flat = states, None
        if arguments is not None:
            self._args, self._kwargs = arguments

    def _get_states_flat(self):
        if self._states_flat is None:  # NumPyro would load draws from disk
            self._states_flat = joined(self._states)
        return self._states_flat
