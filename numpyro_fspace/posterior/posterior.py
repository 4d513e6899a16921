"""``Posterior``: posterior draws together with their model."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace._checks import as_numbers, check_count, not_numbers
from numpyro_fspace.model.linearized import linearize
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sharding import with_devices_of
from numpyro_fspace.posterior.arrays import joined, plain
from numpyro_fspace.posterior.storage.checkpoint_files import RunFiles
from numpyro_fspace.posterior.storage.model_check import warn_of_another_model, warn_of_another_prior
from numpyro_fspace.posterior.storage.posterior_file import read_archive


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Draws of the latent values of a model, with the model and the arguments that it was fitted to.

    Attributes:
        model: the NumPyro model. Its functions are those of the posterior, which may be linearized.
        samples: draws of all latent sites by name, [S, …], as ``get_samples()`` gives them, the chains concatenated.
        num_chains: the number of chains, which must divide S; 1 for independent draws.
        args, kwargs: the arguments that the model was fitted to.
        stats: other values by draw, [S, …] each, such as ``diverging``.
        fit: what rebuilds ``model`` from the user's function: ``"params"``, values of ``numpyro.param`` sites, and
            ``"center"``, where its networks are linearized. None if that is not enough; ``fs.save`` then refuses.
        functions_at: None, or the inputs of a run that kept functions in place of weights; ``samples`` then holds these
            functions.

    Raises:
        TypeError, ValueError: the draws are empty, traced, no arrays, or have different leading axes; ``num_chains``
            does not divide S; the model is not callable; another argument has the wrong type.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> posterior = fs.Posterior(model, {"slope": jax.numpy.ones(5)})
        >>> fs.predict(posterior, jax.random.key(0), jax.numpy.ones(3))["y"].shape
        (5, 3)
    """

    model: Callable
    samples: dict
    _: KW_ONLY
    num_chains: int = 1
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)
    fit: dict | None = field(default_factory=dict)
    functions_at: np.ndarray | dict | None = None

    @classmethod
    def load(cls, path: str | Path, model: Callable, /, *args, **kwargs) -> Posterior:
        """Read the posterior that ``fs.save`` has written.

        A ``RuntimeWarning`` says if ``model`` is not the model of the draws, that is, if its log densities at two of
        them are not those saved.

        Args:
            path: the path of the file.
            model: the model that was fitted, before ``fs.svi_posterior`` or ``fs.baselines.laplace`` changed it. The
                changes are in the file.
            args, kwargs: the arguments that the model was fitted to; those in the file if none are given.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, has another format, or was not written by ``fs.save``.
            TypeError: ``model`` is not a function, or ``path`` is not a path.

        Example:
            >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tempfile
            >>> def model(x, y=None):
            ...     slope = numpyro.sample("slope", dist.Normal())
            ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
            >>> path, x = tempfile.mkdtemp() + "/run.npz", jax.numpy.ones(3)
            >>> fs.save(fs.Posterior(model, {"slope": jax.numpy.ones(5)}, args=(x,)), path)
            >>> fs.Posterior.load(path, model).samples["slope"].shape  # in another process, say
            (5,)
        """
        if not callable(model):
            raise TypeError(f"load needs the model of the posterior, a function, got {type(model).__name__}.")
        found = read_archive(path)
        if args or kwargs:
            found |= {"args": args, "kwargs": kwargs}
        if found["fit"].get("params"):
            model = handlers.substitute(model, data=found["fit"]["params"])
        if "center" in found["fit"]:
            model = linearize(model, found["fit"]["center"])
        names = ("num_chains", "kwargs", "stats", "fit", "functions_at")
        loaded = cls(model, found["samples"], args=tuple(found["args"]), **{name: found[name] for name in names})
        warn_of_another_model(found.get("log_densities", []), loaded)
        return loaded

    @classmethod
    def from_checkpoint(cls, folder: str | Path, model: Callable, /, *args, **kwargs) -> Posterior:
        """The draws that ``fs.MCMC(..., checkpoint=folder)`` has written so far, without loading them.

        The files are read once, block by block, and compared with their checksums. The arrays are then mapped from
        disk, and only what is used is loaded: ``fs.predict`` reads them in batches. The draws of a run of several
        chains that has not ended are copied into memory. A ``RuntimeWarning`` says if the arguments, or the model's log
        density at a draw from its prior, are not those of the run.

        Args:
            folder: the folder of the checkpoint.
            model: the model of the run.
            args, kwargs: the arguments that the model was fitted to.

        Raises:
            ValueError: the folder holds no draws of a run, damaged ones, files of several runs, an incomplete copy, or
                functions in place of weights (``functions_at``).

        Example:
            >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tempfile
            >>> def model(x, y=None):
            ...     slope = numpyro.sample("slope", dist.Normal())
            ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
            >>> folder, x = tempfile.mkdtemp() + "/run", jax.numpy.ones(3)
            >>> mcmc = fs.MCMC(fs.SGLD(model, step_size=1e-3), num_warmup=0, num_samples=5,
            ...                checkpoint=folder, progress_bar=False)
            >>> mcmc.run(jax.random.key(0), x, x)
            >>> fs.Posterior.from_checkpoint(folder, model, x, x).samples["slope"].shape
            (5,)
        """
        files = RunFiles.open(folder)
        if files.run.get("kept") == "functions":
            raise ValueError(
                f"{str(folder)!r} holds functions in place of weights (functions_at=...), which a model cannot use: "
                "call the same run again and read get_samples()."
            )
        warn_of_another_prior(files.run["inputs"], model, args, kwargs)
        stats = files.draws()
        samples = stats.pop(files.run["sample_field"])
        flat = joined((samples, _arrays(stats)))
        return cls(model, flat[0], num_chains=files.run["num_chains"], args=args, kwargs=kwargs, stats=flat[1])

    def __repr__(self) -> str:
        num_draws = len(next(iter(self.samples.values())))
        name = getattr(self.model, "__name__", type(self.model).__name__)
        sizes = f"num_draws={num_draws}, num_chains={self.num_chains}, num_sites={len(self.samples)}"
        return f"Posterior({name}, {sizes})"

    def __post_init__(self):
        if not callable(self.model):
            raise TypeError(f"model must be the NumPyro model of the draws, a function, got {self.model!r}.")
        if not isinstance(self.samples, Mapping):
            raise TypeError(f"samples must be a dict of draws by site, got {type(self.samples).__name__}.")
        if not all(isinstance(name, str) for name in self.samples):
            raise TypeError(f"samples must be a dict of draws by name of site, got the names {list(self.samples)}.")
        for name, draws in self.samples.items():
            if isinstance(draws, list | tuple | float | int):
                raise TypeError(f"samples[{name!r}] must be an array of draws [S, …]: np.asarray(samples[{name!r}]).")
        if not self.samples:
            raise ValueError("samples is empty: pass the draws of all latent sites, as get_samples() gives them.")
        if any(isinstance(draws, jax.core.Tracer) for draws in self.samples.values()):
            raise TypeError(
                "The draws are traced: predict, report and to_arviz do not work inside jax.jit and vmap, nor with "
                "an MCMC object that ran there. Return mcmc.get_samples() from the compiled function, and use "
                "fs.Posterior(model, samples, args=...) outside of it."
            )
        check_count(self.num_chains, "num_chains")
        sizes = {k: jnp.shape(v)[0] if jnp.ndim(v) else None for k, v in self.samples.items()}
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ValueError(f"Every array of draws must have the same leading axis [S, …], got {sizes}.")
        for name, draws in self.samples.items():
            trouble = not_numbers(draws) if isinstance(draws, np.ndarray) else None
            if trouble is not None:
                raise TypeError(f"samples[{name!r}] {trouble}.")
        if 0 in sizes.values():
            raise ValueError("samples holds no draws: every array of it has a leading axis of length 0.")
        num_draws = next(iter(sizes.values()))
        if num_draws % self.num_chains:
            raise ValueError(f"samples holds {num_draws} draws, which num_chains={self.num_chains} cannot share.")
        for name, kinds in {"kwargs": Mapping, "stats": Mapping, "fit": Mapping | None}.items():
            if not isinstance(value := getattr(self, name), kinds):
                raise TypeError(f"{name} must be a dict, got {value!r}.")
        lengths = {k: np.shape(v)[:1] for k, v in self.stats.items() if hasattr(v, "shape")}
        if any(length != (num_draws,) for length in lengths.values()):
            raise ValueError(f"stats must hold a value for each of the {num_draws} draws, got {lengths}.")


def _warn_of_positions(init):
    """``Posterior`` with fields given by position, as in version 0.1: they work and warn until 0.3."""

    @functools.wraps(init)
    def wrapped(self, model, samples, *others, **fields):
        if others:
            names = ("num_chains", "args", "kwargs", "stats", "fit", "functions_at")[: len(others)]
            warnings.warn(
                f"Posterior(model, samples, ...): pass {', '.join(f'{k}=' for k in names)} by keyword; positions go in "
                "0.3.",
                DeprecationWarning,
                stacklevel=2,
            )
            fields |= dict(zip(names, others, strict=True))
        init(self, model, samples, **fields)

    return wrapped


Posterior.__init__ = _warn_of_positions(Posterior.__init__)  # type: ignore[method-assign]


def as_posterior(
    source, model: Callable | None = None, from_prior: tuple[str, ...] = (), *, functions: bool = False
) -> Posterior:
    """The posterior of an ``MCMC`` object, of a dict of draws, or a ``Posterior`` itself.

    Args:
        source: an ``MCMC`` object that has run, a ``Posterior``, or a dict of draws [S, …].
        model: another model; the arguments that it was fitted to are then unknown. A dict needs one.
        from_prior: names of latent sites that need no draws.
        functions: whether draws of functions in place of weights (``functions_at``) will do.
    """
    if isinstance(source, NumPyroMCMC):
        _check_has_run(source)
    functions_at = getattr(source, "functions_at", None) if isinstance(source, NumPyroMCMC | Posterior) else None
    if functions_at is not None and not functions:
        raise ValueError(
            "This run kept functions in place of weights (functions_at=...); their draws are get_samples(), or samples "
            "of a Posterior. Run without functions_at for what needs weights."
        )
    if isinstance(source, NumPyroMCMC):
        stats, samples = _arrays(source.get_extra_fields()), source.get_samples()
        latents = {} if functions_at is not None else getattr(source.last_state, source.sampler.sample_field)
        if isinstance(latents, dict):
            missing = sorted(set(latents) - set(samples) - set(from_prior))
            missing = [k for k in missing if k not in _plates(source)] if missing else []  # HMCECS keeps rows of plates
            if missing:
                raise ValueError(
                    f"This run did not keep the draws of {missing} (extra_fields='~...'), without which they would "
                    f"come from the prior. If that is meant, say so: predict(..., from_prior={missing})."
                )
            # obs_mask= puts known and imputed rows of the run's own data together in a site that is not latent.
            samples = {k: v for k, v in samples.items() if k in latents or f"{k}_unobserved" not in latents}
        args, kwargs = with_devices_of((source._args, source._kwargs), samples)
        draws = jax.tree.leaves(source.get_samples(group_by_chain=True))
        source = Posterior(
            source.sampler.model,
            samples,
            num_chains=len(draws[0]) if draws else source.num_chains,  # fewer than asked if the run was interrupted
            args=args,
            kwargs=kwargs,
            stats=stats,
            functions_at=functions_at,
        )
    if isinstance(source, Posterior):
        return source if model is None else replace(source, model=model, args=(), kwargs={}, fit={})
    if not isinstance(source, dict):
        cure = " For draws of a model's prior there is numpyro.infer.Predictive(model, num_samples=...)."
        raise TypeError(
            f"source must be an MCMC object, a Posterior or a dict of posterior draws, got {type(source).__name__}."
            f"{cure if inspect.isroutine(source) else ''}"
        )
    if model is None:
        raise TypeError("A dict of draws needs the model: pass model=.")
    return Posterior(model, {k: as_numbers(v, f"samples[{k!r}]") for k, v in source.items()})


def _plates(mcmc: NumPyroMCMC) -> set:
    """The names of the plates of a run's model."""
    found: set = set()

    def run():
        trace = run_model(mcmc.sampler.model, mcmc._args, mcmc._kwargs, key=jax.random.key(0), full_plates=False)
        found.update(name for name, site in trace.items() if site["type"] == "plate")

    jax.eval_shape(run)
    return found


def _check_has_run(source: NumPyroMCMC):
    state, start = source.last_state, source.post_warmup_state
    # A run that goes on from another state counts its draws from that of the state.
    is_new = start is None or start is state
    if state is None or (is_new and np.max(getattr(state, "i", np.inf)) <= source.num_warmup):
        raise ValueError("The MCMC object has no draws yet (warm-up makes none): call run first.")


def _arrays(fields: dict) -> dict:
    return {k: plain(v) for k, v in fields.items() if not isinstance(v, dict | tuple)}
