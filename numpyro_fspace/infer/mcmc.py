"""``MCMC``: NumPyro's driver, ending with a warning when the run should not be trusted, and able to survive."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import jax
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.util import is_prng_key
from tqdm.auto import tqdm

from numpyro_fspace.arguments import split_arrays
from numpyro_fspace.infer.chain import KernelState
from numpyro_fspace.infer.checkpoint import Checkpoint, fingerprint
from numpyro_fspace.infer.kernels import SGHMC
from numpyro_fspace.validate import check_count

__all__ = ["MCMC", "warn_of_trouble"]


class MCMC(NumPyroMCMC):
    """NumPyro's ``MCMC`` with a check at the end of ``run``, and checkpoints.

    Everything else is NumPyro's; ``numpyro.infer.MCMC`` runs the same kernels to the same draws, and then
    ``fs.predict`` and ``fs.to_arviz`` give the warning. A run that goes on from ``post_warmup_state`` may be given
    other data: the full gradient of the control variates is then computed anew (NumPyro's class does so only when
    their centre is next renewed).

    **Checkpoints.** With ``checkpoint="folder"`` draws and state are written as the run goes, a part of
    ``checkpoint_every`` draws at a time. If it is killed, at any moment, the same call (same kernel, numbers, key and
    data) goes on after the last part that was written, to the draws of an undisturbed run, bit for bit on the same
    machine; a run that was finished is read. A folder that holds another run is refused and left as it is: kernel and
    settings, key and data are compared, and the shapes of the state, not the model's code.

    Args:
        sampler: a kernel.
        num_warmup, num_samples, num_chains, thinning, ...: as for NumPyro's ``MCMC``.
        checkpoint: folder of the files; None writes none. Several chains must be vectorised.
        checkpoint_every: draws between two writes.

    Raises:
        ValueError: for chains that are not vectorised with a checkpoint, and, at ``run``, for a folder that holds
            another run or damaged files.
        OSError: at ``run``, when a write fails (a full disk); what was written before is intact, and ``last_state`` is
            the state at which the run stopped.

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

    def __init__(self, sampler, *, checkpoint: str | Path | None = None, checkpoint_every: int = 100, **settings):
        super().__init__(sampler, **settings)
        check_count(checkpoint_every, "checkpoint_every")
        if checkpoint is not None and self.num_chains > 1 and self.chain_method != "vectorized":
            raise ValueError(
                f"chain_method={self.chain_method!r} has no checkpoints: set chain_method='vectorized', or run the "
                "chains one by one, each with a folder of its own."
            )
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every

    def run(self, rng_key, *args, extra_fields=(), init_params=None, **kwargs):
        state = self.post_warmup_state
        if isinstance(state, KernelState) and state.control.centre.size:
            self.post_warmup_state = self.sampler.refresh(state, args, kwargs)
        if self.checkpoint is None:
            super().run(rng_key, *args, extra_fields=extra_fields, init_params=init_params, **kwargs)
        else:
            self._run_with_checkpoints(rng_key, extra_fields, init_params, args, kwargs)
        warn_of_trouble(self)

    def _run_with_checkpoints(self, key, extra_fields, init_params, args, kwargs):
        if self.post_warmup_state is not None:
            raise ValueError("checkpoint= writes a run from its start; it cannot go on from post_warmup_state.")
        if self.num_chains > 1 and is_prng_key(key):
            key = jax.random.split(key, self.num_chains)
        self._args, self._kwargs = args, kwargs
        arrays, _, join = split_arrays((args, kwargs))
        fields = tuple(dict.fromkeys((*self.sampler.default_fields, *extra_fields)))
        files = Checkpoint(self.checkpoint, self._describe(key, fields, init_params, arrays))
        state = self.sampler.init(key, self.num_warmup, init_params, args, kwargs)
        num_parts, num_draws, state = files.load(state) or (0, 0, state)
        num_total = self.num_warmup + self.num_samples
        part = functools.cache(functools.partial(self._part, join, fields))
        with tqdm(total=num_total, initial=num_draws, disable=not self.progress_bar) as bar:
            while num_draws < num_total:
                is_warmup = num_draws < self.num_warmup
                left = (self.num_warmup if is_warmup else num_total) - num_draws
                size = min(left, self.checkpoint_every * (1 if is_warmup else self.thinning))
                state, draws = part(size, is_warmup)(state, arrays)
                num_draws, num_parts = num_draws + size, num_parts + (not is_warmup)
                self._last_state = state
                try:
                    files.save(num_parts, num_draws, state, None if is_warmup else jax.device_get(draws))
                except OSError as error:
                    raise OSError(
                        error.errno,
                        f"the checkpoint could not be written ({error.strerror}); what was written before is intact, "
                        "and the same call goes on from there",
                        str(self.checkpoint),
                    ) from error
                bar.update(size)
        self._last_state = state
        self._keep(files.draws(num_parts))

    def _describe(self, key, fields, init_params, arrays) -> dict:
        """What tells this run from others."""
        settings = {k: repr(v) for k, v in sorted(vars(self.sampler).items()) if not k.startswith("_")}
        unnamed = {k: type(vars(self.sampler)[k]).__name__ for k, text in settings.items() if " at 0x" in text}
        return {
            "kernel": type(self.sampler).__name__,
            "settings": settings | unnamed,
            "num_warmup": self.num_warmup,
            "num_samples": self.num_samples,
            "num_chains": self.num_chains,
            "thinning": self.thinning,
            "checkpoint_every": self.checkpoint_every,
            "fields": list(fields),
            "float64": bool(jax.config.jax_enable_x64),
            "inputs": fingerprint((key, init_params, arrays)),
        }

    def _part(self, join, fields, size, is_warmup):
        """``(state, arrays) -> (state, draws)``: so many draws, those that are kept with the axes [C, S, …]."""

        @jax.jit
        def part(state, arrays):
            args, kwargs = join(arrays)

            def step(state, _):
                state = self.sampler.sample(state, args, kwargs)
                return state, None

            if is_warmup:
                return jax.lax.fori_loop(0, size, lambda _, state: step(state, None)[0], state), None

            def kept(state, _):
                state, _ = jax.lax.scan(step, state, length=self.thinning)
                return state, {name: _field(state, name) for name in fields}

            state, draws = jax.lax.scan(kept, state, length=size // self.thinning)
            sample_field, constrain = self.sampler.sample_field, self.postprocess_fn
            if constrain is None:
                constrain = self.sampler.postprocess_fn(args, kwargs)
            if self.num_chains == 1:
                draws = jax.tree.map(lambda a: a[:, None], draws)
            draws[sample_field] = jax.vmap(jax.vmap(constrain))(draws[sample_field])
            draws = jax.tree.map(lambda a: a.swapaxes(0, 1), draws)
            flat = {f"{sample_field}/{k}": v for k, v in draws.pop(sample_field).items()}
            bad = [name for name, value in draws.items() if not isinstance(value, jax.Array)]
            if bad:
                raise ValueError(f"extra_fields={bad} are no arrays; with a checkpoint name their parts, as 'a.b'.")
            return state, draws | flat

        return part

    def _keep(self, draws):
        """Draws where NumPyro's ``MCMC`` looks for them."""
        prefix = f"{self.sampler.sample_field}/"
        states = {k: v for k, v in draws.items() if not k.startswith(prefix)}
        states[self.sampler.sample_field] = {k[len(prefix) :]: v for k, v in draws.items() if k.startswith(prefix)}
        self._states = jax.tree.map(jax.numpy.asarray, states)
        self._states_flat = None  # NumPyro's cache


def _field(state, name):
    return functools.reduce(getattr, name.split("."), state)


def warn_of_trouble(mcmc):
    """Warn when draws diverged, or the chain ran hot, in the sampling phase of ``mcmc``."""
    state = mcmc.last_state
    if not isinstance(state, KernelState) or isinstance(state.num_diverging, jax.core.Tracer):
        return
    num = int(np.sum(state.num_diverging))
    total = mcmc.num_samples * mcmc.num_chains
    if num:
        warnings.warn(
            f"{num} of {total} draws diverged: a non-finite potential or position; each kept the last good state. "
            "Use a smaller step_size (or a decaying schedule), a longer warm-up, or a larger nugget in the "
            "functional prior.",
            RuntimeWarning,
            stacklevel=3,
        )
    temperature = np.asarray(state.mean_temperature) / mcmc.sampler.temperature
    size = state.scale.shape[-1]
    tolerance = 0.1 + 4.0 * np.sqrt(2.0 / (size * max(1, mcmc.num_samples)))
    if isinstance(mcmc.sampler, SGHMC) and np.any(temperature > 1.0 + tolerance):
        warnings.warn(
            f"The chain runs hot: mean kinetic temperature {np.max(temperature):.2f} instead of 1, so the draws are "
            "wider than the posterior. Use a smaller step_size, a larger friction, or larger minibatches.",
            RuntimeWarning,
            stacklevel=3,
        )
