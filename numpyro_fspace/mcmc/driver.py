"""``MCMC``: NumPyro's driver, with a bar that informs, a warning where a run is doubtful, and able to survive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.util import is_prng_key

from numpyro_fspace._checks import as_numbers, check_choice, check_count, check_kernel, check_key
from numpyro_fspace._xla import chains_together, is_nested, is_worth_dividing
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.checkpoint import Checkpoint, flat, plain_fields
from numpyro_fspace.mcmc.fingerprint import describe
from numpyro_fspace.mcmc.loop import Loop
from numpyro_fspace.mcmc.plan import one_at_a_time
from numpyro_fspace.mcmc.progress import Interruption, Progress, is_watched
from numpyro_fspace.mcmc.start import check_init_params
from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.mcmc.warnings import warn_of_draws, warn_of_trouble
from numpyro_fspace.model.arguments import frozen, kept, split_arrays, with_rows
from numpyro_fspace.model.checks import check_masks
from numpyro_fspace.model.on_demand import errors_as_themselves
from numpyro_fspace.model.sharding import CHAINS, beside, check_mesh, gathered, place
from numpyro_fspace.posterior.arrays import join_chains
from numpyro_fspace.posterior.run_files import folder_of
from numpyro_fspace.priors._cholesky import is_traced
from numpyro_fspace.priors.base import as_real

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh
    from jaxtyping import Array, ArrayLike, Float, Key

__all__ = ["MCMC"]


class MCMC(NumPyroMCMC):
    """NumPyro's ``MCMC`` with a bar that informs, a check at the end of ``run``, and checkpoints.

    Everything else is NumPyro's; ``numpyro.infer.MCMC`` runs the same kernels to the same draws, and then
    ``fs.predict`` and ``fs.to_arviz`` give the warning. A run that goes on from ``post_warmup_state`` may be given
    other data: the full gradient of the control variates is then computed anew (NumPyro's class does so only when
    their center is next renewed).

    **Progress.** On a terminal or in a notebook the bar shows the rate, the time that is left, step size, potential
    energy, kinetic temperature (means over chains), and, with several chains, the worst R-hat of the functions at
    ten inputs so far (not with ``checkpoint``). In logs it is silent. With or without it, a run that is interrupted
    (Ctrl-C) ends when the draws of about half a second are made, and keeps what there is: of vectorized chains the
    draws so far, of chains that run one after another those that are whole (of the first what there is). This holds for
    SGLD, SGHMC, fSGLD and fSGHMC, unless chains run in parallel or sites are left out (``"~z.w"`` in ``extra_fields``):
    those runs, and other kernels, are NumPyro's.

    **Runs again.** Numbers of draws, the kernel's settings and the arguments of ``run`` may differ from one run to the
    next; what was compiled is used again where all that it depends on is the same. One kernel may serve several
    drivers, also in threads. Inside of ``jax.jit`` and ``vmap`` a run is part of their program: without a bar, a check,
    a mesh or a checkpoint.

    **Warnings.** At its end ``run`` warns, once, of R-hat above 1.05, of fewer than 50 effective draws per chain, of a
    chain that stands still, and of draws that are wider than the posterior (the configurational temperature of our
    kernels, see ``fs.report``): judged are functions at a few inputs and every latent site that is no weight,
    of NumPyro's kernels too. Runs of fewer than 200 draws are trials and not judged; where thinning keeps fewer than
    100 of a chain, only the width is.

    **Checkpoints.** With ``checkpoint="folder"`` draws and state are written as the run goes, a part of
    ``checkpoint_every`` draws at a time. If it is killed, at any moment, the same call (same kernel, numbers, key and
    data) goes on after the last part that was written, to the draws of an undisturbed run, bit for bit on the same
    machine; a run that was finished is read. A folder that holds another run is refused and left as it is, with an
    error that names what differs: kernel and settings, key, data and other arguments are compared, and the shapes of
    draws and state, not the model's code. Whoever opens the folder compares every draw with its checksum: damaged
    files, files of another run, and a copy that was made while the run went on are refused.

    Such draws may exceed the memory. Only one part is held while the run goes, and ``get_samples`` then returns
    read-only NumPy arrays that lie on disk (``.npy`` files) and of which is loaded what is touched;
    ``fs.Posterior.from_checkpoint`` opens them without the run, also while it goes.

    **Many chains.** Vectorized chains are one program on one device, thousands of them if they fit. With ``mesh=``
    every device along its axis ``"chains"`` runs a share of them, to the draws of one device up to rounding. Other axes
    are for data: arguments that were put on the mesh in parts stay in parts. After ``jax.distributed.initialize`` the
    mesh may span processes, each of which makes the same calls and gets all draws.

    Args:
        sampler: a kernel.
        num_warmup: draws of warm-up of each chain, which are not kept.
        num_samples: draws of each chain after that.
        num_chains: chains.
        thinning: of so many draws one is kept, the last of them.
        postprocess_fn: from unconstrained to constrained values, in place of the kernel's own.
        chain_method: ``"parallel"`` (a device for each chain; one after another if there are fewer), ``"sequential"``
            or ``"vectorized"`` (one program on one device).
        progress_bar: whether a bar is shown on a terminal or in a notebook.
        progress_rate: draws between two updates of the bar of NumPyro's own loop; ours sets its own pace.
        jit_model_args: whether NumPyro's own loop compiles the model's arguments as arguments; ours always does.
        functions_at: inputs [N, D] (or a dict of them by name of function) at which every draw's functions are kept *in
            place of the weights* they depend on, for networks whose draws would not fit: ``get_samples()["f"]`` is then
            [S, N, ...]. What needs weights, such as ``fs.predict``, cannot use such a run.
        mesh: devices that share vectorized chains, such as ``jax.make_mesh((8,), ("chains",))``; None uses one device.
        checkpoint: folder of the files (``~`` is the home folder); None writes none. Several chains must be vectorized.
        checkpoint_every: draws between two writes.

    Raises:
        TypeError: for a sampler that is no kernel, and for functions_at or a mesh with another kernel than SGLD, SGHMC,
            fSGLD and fSGHMC.
        ValueError: for chains that are not vectorized with a checkpoint, functions_at or a mesh; for a mesh that cannot
            share the chains equally, or of several processes with a checkpoint; and, at ``run``, for a folder that
            holds another run or damaged files, and if the log density is not finite where one of our kernels' chains
            starts (found at the first draw; the sites to blame are named).
        OSError: at ``run``, when a write fails (a full disk, a folder without the right to write) or another process is
            writing to the folder; what was written before is intact, and ``last_state`` is the state at which the run
            stopped.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tempfile
        >>> def model(y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> folder = tempfile.mkdtemp()
        >>> settings = {"num_warmup": 20, "num_samples": 30, "progress_bar": False, "checkpoint": folder}
        >>> first, again = (fs.MCMC(fs.SGHMC(model), checkpoint_every=10, **settings) for _ in range(2))
        >>> for mcmc in (first, again):  # the second reads what the first has written
        ...     mcmc.run(jax.random.key(0), y=1.0)
        >>> bool((first.get_samples()["mu"] == again.get_samples()["mu"]).all())
        True
    """

    post_warmup_state: Any  # a property of NumPyro's
    _cache: Any  # its compiled programs

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
        check_kernel(sampler)
        super().__init__(
            sampler,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            thinning=thinning,
            postprocess_fn=postprocess_fn,
            chain_method=chain_method,
            progress_bar=progress_bar,
            progress_rate=progress_rate,
            jit_model_args=jit_model_args,
        )
        check_count(checkpoint_every, "checkpoint_every")
        asked = {"checkpoint": checkpoint, "functions_at": functions_at, "mesh": mesh}
        for name in [name for name, value in asked.items() if value is not None]:
            if name != "checkpoint" and not isinstance(sampler, SGMCMCKernel):
                raise TypeError(f"{name}= is for SGLD, SGHMC, fSGLD and fSGHMC, not for {type(sampler).__name__}.")
            if self.num_chains > 1 and self.chain_method != "vectorized":
                raise ValueError(
                    f"chain_method={self.chain_method!r} has no {name}: set chain_method='vectorized', or run the "
                    "chains one by one."
                )
        for leaf in jax.tree.leaves(functions_at):
            as_real(leaf, "functions_at")
        self.functions_at = jax.tree.map(lambda x: x if is_traced(x) else np.asarray(x), functions_at)
        self.mesh = None if mesh is None else check_mesh(mesh, self.num_chains)
        if checkpoint is not None and self.mesh is not None and self.mesh.is_multi_process:
            raise ValueError("checkpoint= does not write the chains of other processes: leave it out, or mesh.")
        if checkpoint is not None:
            folder_of(checkpoint)  # refuses what names none
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        self._loops: dict = {}
        self._arguments: Any = None  # of the last run that was NumPyro's
        self._rows: dict = {}  # NumPy arrays among them, by place, as the model gets them
        self._warmed = None  # the state after a warm-up of this object

    def __getstate__(self):
        return super().__getstate__() | {"_loops": {}}

    @errors_as_themselves
    def warmup(self, *args, **kwargs):
        try:
            super().warmup(*args, **kwargs)
        except BaseException:
            self._set_collection_params()  # else a run that follows would draw nothing
            raise
        self._warmed = self.post_warmup_state

    @errors_as_themselves
    def run(
        self,
        rng_key: Key[Array, ""],
        *args: Any,
        extra_fields: Sequence[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        check_key(rng_key, "rng_key")
        check_masks(args, kwargs)
        state, is_warmup = self.post_warmup_state, self._collection_params["phase"] == "warmup"
        if not is_warmup:
            self._set_collection_params()  # numbers may have been changed since the last run
        for name, least in (("num_warmup", 0), ("thinning", 1), ("num_samples", self.thinning), ("num_chains", 1)):
            check_count(getattr(self, name), name, least)
        if not callable(self.chain_method):
            check_choice(self.chain_method, "chain_method", ("parallel", "vectorized", "sequential"))
        if self.checkpoint is not None and (state is not None or is_warmup):
            raise ValueError("checkpoint= writes whole runs: leave out warmup() and post_warmup_state.")
        for name in ("checkpoint", "mesh"):
            if is_nested() and getattr(self, name) is not None:
                raise ValueError(f"{name}= is not for runs inside of jax.jit, vmap and the like: leave it out there.")
        goes_on = isinstance(state, KernelState)
        if hasattr(state, "i") and (num_chains := np.size(state.i)) != self.num_chains:
            raise ValueError(
                f"post_warmup_state is that of {num_chains} chains, and num_chains={self.num_chains}: make an MCMC "
                f"with num_chains={num_chains}."
            )
        if goes_on:
            steps = state.warmup.step_size
            if self.sampler.step_size is None and not is_nested() and np.any(np.asarray(steps) == 0):
                raise ValueError(
                    "post_warmup_state comes from a run with a step_size of its own, and has none that warm-up found: "
                    "give the kernel a step_size, or leave post_warmup_state out."
                )
            is_own = state is self._warmed
            plan = self.sampler.prepare(args, kwargs, self.num_warmup).of_constants((args, kwargs))
            state = state._replace(plan=plan)
            if state.control.center.size or plan.control_every is not None:
                state = self.sampler.refresh(state, args, kwargs)
            # Another object's warm-up is over, however long that of this one is: not even the last act of one is due.
            last = self.num_warmup - is_own
            i = jnp.where(state.i <= last, self.num_warmup + 1, state.i)
            zero = jnp.zeros_like(state.num_diverging)
            averages = state.averages._replace(num_diverging=zero, num_averaged=zero)
            state = state._replace(i=i.astype(state.i.dtype), averages=averages)
            self.post_warmup_state = state
            if is_own:  # the next run begins there too
                self._warmed = state
        if self._is_ours(extra_fields):
            self._run(rng_key, extra_fields, init_params, args, kwargs)
        else:
            structure, others = split_arrays((args, kwargs))[1]
            arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, np.ndarray)]
            arguments = frozen((structure, others, arrays))
            if arguments != self._arguments:  # NumPyro takes True for 1, and an array changed in place for the same
                self._arguments, self._cache, self._rows = arguments, {}, {}
            # x[rows] works in NUTS's programs too; NumPyro tells arrays by their identity.
            leaves, structure = jax.tree.flatten((args, kwargs))
            leaves = [
                self._rows.setdefault(i, with_rows(a)) if isinstance(a, np.ndarray) else a for i, a in enumerate(leaves)
            ]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            if hasattr(self.sampler, "_init_fn"):  # else HMC vectorizes anew what it has vectorized for its last run
                self.sampler._init_fn = None
            super().run(rng_key, *args, extra_fields=extra_fields, init_params=init_params, **kwargs)
        if not is_warmup and not is_nested():  # whose heat is no draw's
            one_at_a_time(warn_of_trouble)(self)
            one_at_a_time(warn_of_draws)(self)

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """NumPyro's, of the functions too where they were kept in place of weights."""
        super().print_summary(prob, exclude_deterministic and self.functions_at is None)

    def _is_ours(self, extra_fields) -> bool:
        """Whether our loop makes the draws: with checkpoints, and those of our kernels after warm-up on one device."""
        left_out = [name for name in extra_fields if name.startswith("~")]
        asked = {"checkpoint": self.checkpoint, "functions_at": self.functions_at, "mesh": self.mesh}
        for name in [name for name, value in asked.items() if left_out and value is not None]:
            raise ValueError(f"{name}= keeps all latent sites: leave {left_out} out of extra_fields.")
        if self.checkpoint is not None:
            return True
        is_warmup, goes_on = self._collection_params["phase"] == "warmup", self.post_warmup_state is not None
        if self.mesh is not None or self.functions_at is not None:
            if is_warmup or goes_on:
                raise ValueError(
                    "mesh= and functions_at= are for whole runs: leave out warmup() and post_warmup_state."
                )
            return True
        is_plain = not left_out and not self._jit_model_args
        is_one_program = self.num_chains == 1 or self.chain_method in ("vectorized", "sequential")
        is_known = not goes_on or isinstance(self.post_warmup_state, KernelState)
        is_ours = isinstance(self.sampler, SGMCMCKernel) and is_known and not is_warmup
        return is_ours and is_plain and is_one_program

    def _run(self, key, extra_fields, init_params, args, kwargs):
        if self.num_chains > 1 and is_prng_key(key):
            key = jax.random.split(key, self.num_chains)
        self._args, self._kwargs = args, kwargs = beside((args, kwargs), ())
        self._hold(None)  # draws of another run do not belong to these
        fields = tuple(dict.fromkeys((*self.sampler.default_fields, *extra_fields)))
        arrays, static, join = split_arrays((args, kwargs, self.functions_at))
        if self.checkpoint is not None:
            run = describe(self, key, fields, init_params, args, kwargs)
            Checkpoint(self.checkpoint, run)  # refuses another run before anything is computed
        init_params = jax.tree_util.tree_map_with_path(
            lambda path, a: jnp.asarray(as_numbers(a, f"init_params{jax.tree_util.keystr(path)}")), init_params
        )
        if self.mesh is not None:
            key, init_params = place((key, init_params), self.mesh, CHAINS)
            arrays = place(arrays, self.mesh)
            args, kwargs, _ = join(arrays)
        found, largest = {}, 0
        if isinstance(self.sampler, SGMCMCKernel):
            plan = self.sampler.prepare(args, kwargs, self.num_warmup)
            found, largest = plan.points, plan.largest_array

        def begin(key, init_params, state):
            if not isinstance(self.sampler, SGMCMCKernel):
                return self.sampler.init(key, self.num_warmup, init_params, args, kwargs), 0
            if state is None:
                return self.sampler.start(plan, key, init_params, args, kwargs), 0
            return state._replace(rng_key=key, plan=plan), self.num_warmup

        arrays, static, join = split_arrays((args, kwargs, self.functions_at, found))
        start = key, init_params, self.post_warmup_state
        if self.num_chains > 1 and self.chain_method == "sequential":
            if init_params is not None:
                check_init_params(init_params, plan.params, self.num_chains)
            self._run_one_by_one(self._loop(fields, static, join, largest, 1), begin, start, arrays)
            return
        loop = self._loop(fields, static, join, largest, self.num_chains)
        state, done = begin(*start)
        if self.checkpoint is not None:
            self._run_on_disk(loop, state, arrays, run)
        else:
            self._run_in_memory(loop, state, arrays, done)

    def _run_one_by_one(self, loop, begin, start, arrays):
        whole = []
        try:
            for number in range(self.num_chains):
                state, done = begin(*jax.tree.map(lambda a: a[number], start))  # noqa: B023
                self._run_in_memory(loop, state, arrays, done)
                whole.append((self._states, self._last_state))
        finally:
            if whole:  # the chains that were made, if the run is interrupted; of the first what there is
                states, last = zip(*whole, strict=True)
                self._hold(jax.tree.map(lambda *parts: jnp.concatenate(parts), *states))
                self._last_state = jax.tree.map(lambda *parts: jnp.stack(parts), *last)

    def _loop(self, fields, static, join, largest, num_chains):
        per_device = num_chains // (1 if self.mesh is None else self.mesh.shape[CHAINS])
        is_ours = isinstance(self.sampler, SGMCMCKernel)
        settings = {
            "num_chains": num_chains,
            "thinning": self.thinning,
            "constrain": self.postprocess_fn,
            "mesh": self.mesh,
            "is_divided": not is_ours or is_worth_dividing(chains_together(per_device, largest) * largest),
        }
        loop = Loop(self.sampler, fields, join, **settings)
        return kept(self._loops, static, (self.sampler, fields, *settings.values()), loop)

    def _run_nested(self, loop, state, arrays, done):
        """A run inside of another program: all in one, of which nothing can be looked at yet."""
        total, num = self.num_warmup + self.num_samples, self.num_samples // self.thinning
        draws = loop.room(num, state, arrays, {})
        self._last_state, draws = loop(state, draws, done, total, arrays, {}, first=self._first())
        self._hold(loop.by_chain(draws, num))

    def _run_in_memory(self, loop, state, arrays, done):
        if is_nested():
            self._run_nested(loop, state, arrays, done)
            return
        total, num_kept = self.num_warmup + self.num_samples, 0
        first = self._first()
        is_alone = self.mesh is None or not self.mesh.is_multi_process
        bar = Progress(self.num_warmup, total, done, shown=bool(self.progress_bar) and is_alone and is_watched())
        inputs = loop.find_inputs(state, arrays) if bar.shown and loop.num_chains > 1 else {}
        draws = loop.room(self.num_samples // self.thinning, state, arrays, inputs)
        try:
            with Interruption() as interruption:
                while done < total:
                    # The first part is one draw, which tells whether chains can move. Processes go at one pace.
                    start, stop = state, bar.next_stop() if is_alone or done == 0 else total
                    state, draws = loop(state, draws, done, stop, arrays, inputs, first=first)
                    if done == 0:
                        self._check_start(start, state)
                    done, self._last_state = stop, gathered(state)
                    num_kept = max(0, done - first) // self.thinning
                    bar.update(done, state, np.asarray(draws[1])[:num_kept] if inputs else None)
                    interruption.hold()
                    interruption.let_through()
        finally:
            bar.close()
            if num_kept:  # of an interrupted run too
                self._hold(gathered(loop.by_chain(draws, num_kept)))

    def _first(self) -> int:
        """The draw that thinning counts from: the last of all is kept, as by NumPyro."""
        return self.num_warmup + self.num_samples % self.thinning

    def _run_on_disk(self, loop, state, arrays, run):
        total = self.num_warmup + self.num_samples
        num = self.num_samples // self.thinning
        room = loop.room(max(1, min(self.checkpoint_every, num)), state, arrays, {})
        shapes = jax.eval_shape(lambda draws: flat(plain_fields(loop.by_chain(draws, 1))), room)
        specs = {k: [str(a.dtype), [self.num_chains, num, *a.shape[2:]]] for k, a in shapes.items()}
        files = Checkpoint(self.checkpoint, run | {"arrays": specs})
        saved = files.load(state)
        if saved is None:  # a start that is refused leaves no files
            first, room = loop(state, room, 0, 1, arrays, {}, first=1)
            self._check_start(state, first)
        if saved is None or saved[1] < total:
            with files:
                num_kept, done, state = files.load(state) or (0, 0, state)
                if self.mesh is not None:
                    state = place(state, self.mesh, CHAINS)
                saved = self._write_draws(loop, room, arrays, files, (num_kept, done, state))
        self._last_state = saved[2]
        self._hold(files.draws())

    def _write_draws(self, loop, draws, arrays, files, saved):
        total, first, (num_kept, done, state) = self.num_warmup + self.num_samples, self._first(), saved
        bar = Progress(self.num_warmup, total, done, shown=bool(self.progress_bar) and is_watched())
        try:
            with Interruption() as interruption:
                while done < total:
                    base = first + num_kept * self.thinning  # the draws from here on have room
                    size = self.checkpoint_every
                    end = min(done + size, first) if done < first else min(base + size * self.thinning, total)
                    while done < end and not interruption.is_due:
                        stop = min(bar.next_stop(), end)
                        state, draws = loop(state, draws, done, stop, arrays, {}, first=base)
                        done = stop
                        bar.update(done, state)
                        interruption.hold()
                    self._last_state, part = state, None
                    if num := max(0, done - base) // self.thinning:
                        part = jax.device_get(flat(plain_fields(loop.by_chain(draws, num))))
                    files.save(num_kept + num, done, state, part)
                    num_kept += num
                    interruption.let_through()
        finally:
            bar.close()
            if num_kept:
                self._hold(files.draws())  # of an interrupted run too
        return num_kept, done, state

    def _check_start(self, start, state):
        """That the first draw from ``start`` could move at all."""
        if isinstance(self.sampler, SGMCMCKernel):
            self.sampler.check_start(gathered(start), gathered(state), self._args, self._kwargs)

    def _hold(self, states):
        """Draws [C, S, …] where NumPyro's ``MCMC`` looks for them."""
        self._states, self._states_flat = states, None

    def _get_states_flat(self):
        if self._states_flat is None:  # NumPyro would load draws that lie on disk
            self._states_flat = jax.tree.map(join_chains, self._states)
        return self._states_flat
