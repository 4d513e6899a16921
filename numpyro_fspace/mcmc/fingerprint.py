"""A description of a run by which checkpoints tell runs apart; it is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re

import jax
import numpy as np

from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.model.functions import some_rows
from numpyro_fspace.model.on_demand import OnDemand
from numpyro_fspace.posterior.arrays import plain
from numpyro_fspace.posterior.model_check import PRIOR_DRAW, prior_density
from numpyro_fspace.posterior.run_files import HASHED

__all__ = ["describe", "fingerprint"]


def describe(mcmc, key, fields, init_params, *, args, kwargs) -> dict:
    """A description of a run of ``mcmc``. A checkpoint with another description belongs to another run."""
    hidden = set() if isinstance(mcmc.sampler, SGMCMCKernel) else _settings_of_numpyro(mcmc.sampler)
    values = vars(mcmc.sampler) | _with_defaults(mcmc.sampler)
    settings = {k: _text(values[k]) for k in sorted(values) if not k.startswith("_") or k in hidden}
    if callable(step_size := values.get("step_size")):
        total = (mcmc.num_warmup + mcmc.num_samples) * mcmc.sampler.num_steps
        counts = np.unique(np.r_[np.linspace(0, total, 1000), np.geomspace(1, max(1, total), 100)].astype(int))
        settings["step_size"] = fingerprint(np.asarray(jax.vmap(step_size)(counts), np.float32))
    inputs = {"rng_key": key, "init_params": init_params, "functions_at": mcmc.functions_at}
    if getattr(mcmc.sampler, "model", None) is not None:
        inputs[PRIOR_DRAW] = prior_density(mcmc.sampler.model, args, kwargs)
    inputs |= {f"positional argument {i}": value for i, value in enumerate(args)}
    inputs |= {f"argument {name!r}": value for name, value in kwargs.items()}
    return {
        "inputs": {name + part: text for name, value in inputs.items() for part, text in _parts(value).items()},
        "kept": "functions" if mcmc.functions_at is not None else "weights",
        "kernel": type(mcmc.sampler).__name__,
        "settings": settings,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "num_chains": mcmc.num_chains,
        "thinning": mcmc.thinning,
        "checkpoint_every": mcmc.checkpoint_every,
        "fields": list(fields),
        "sample_field": mcmc.sampler.sample_field,
        "float64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
    }


def fingerprint(array) -> str:
    """Type, shape and SHA-256 of an array."""
    value = plain(array)
    content = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
    return f"{value.dtype}{list(value.shape)}{HASHED}{hashlib.sha256(content).hexdigest()}"


def _parts(value) -> dict:
    """The leaves of an input as text, by their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda leaf: leaf is None)
    text = {jax.tree_util.keystr(place): _text(leaf) for place, leaf in leaves}
    return text if jax.tree_util.treedef_is_leaf(structure) else text | {" (its structure)": _text(structure)}


def _with_defaults(kernel) -> dict:
    """The settings of one of our kernels whose defaults depend on other settings."""
    kind = type(kernel) if isinstance(kernel, SGMCMCKernel) else object
    members = inspect.getmembers(kind, lambda member: isinstance(member, property) and member.fset is not None)
    return {name: getattr(kernel, name) for name, _ in members}


def _settings_of_numpyro(kernel) -> set:
    """The attributes in which a NumPyro kernel stores its arguments."""
    made_by = [vars(kind)["__init__"] for kind in type(kernel).__mro__ if "__init__" in vars(kind)]
    names = {name for init in made_by for name in inspect.signature(init).parameters}
    return {f"_{name}" for name in names - {"model", "potential_fn", "kinetic_fn"}}


def _text(value) -> str:
    """A setting, or a leaf of an input, as text that is the same in every process."""
    if isinstance(value, np.ndarray | jax.Array):
        return fingerprint(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, OnDemand):  # up to 1000 rows, evenly spaced, represent all
        return f"{text} of {fingerprint(value[some_rows(np.arange(len(value)), 1000)])}"
    if isinstance(value, functools.partial):  # an init_strategy with its values
        value = (value.args, value.keywords)
    elif hasattr(value, "__array__"):  # a table, whose text leaves rows out
        value = np.asarray(value)
    return " ".join([text, *map(fingerprint, _arrays(value))])


def _arrays(value):
    """The arrays in a value, those in objects of this package too (measurement points, priors)."""
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, np.ndarray | jax.Array):
            yield leaf
        elif type(leaf).__module__.startswith("numpyro_fspace.") and hasattr(leaf, "__dict__"):
            yield from _arrays([part for name, part in vars(leaf).items() if not name.startswith("_")])
