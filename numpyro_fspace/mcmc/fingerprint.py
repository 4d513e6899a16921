"""What tells two runs apart, in words that are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from typing import Any

import jax
import numpy as np

from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.model.on_demand import OnDemand
from numpyro_fspace.posterior.arrays import plain
from numpyro_fspace.posterior.run_files import HASHED

__all__ = ["describe", "fingerprint"]


def describe(mcmc, key, fields, init_params, args, kwargs) -> dict:
    """What tells a run of ``mcmc`` from others: a checkpoint of another one is not gone on from."""
    hidden = set() if isinstance(mcmc.sampler, SGMCMCKernel) else _settings_of_numpyro(mcmc.sampler)
    values = vars(mcmc.sampler) | _with_defaults(mcmc.sampler)
    settings = {k: _words(values[k]) for k in sorted(values) if not k.startswith("_") or k in hidden}
    if callable(step_size := values.get("step_size")):
        total = (mcmc.num_warmup + mcmc.num_samples) * mcmc.sampler.num_steps
        counts = np.unique(np.r_[np.linspace(0, total, 1000), np.geomspace(1, max(1, total), 100)].astype(int))
        settings["step_size"] = fingerprint(np.asarray(jax.vmap(step_size)(counts), np.float32))
    inputs = {"rng_key": key, "init_params": init_params, "functions_at": mcmc.functions_at}
    inputs |= {f"positional argument {i}": value for i, value in enumerate(args)}
    inputs |= {f"argument {name!r}": value for name, value in kwargs.items()}
    return {
        "inputs": {name + part: words for name, value in inputs.items() for part, words in _parts(value).items()},
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
    """An input's leaves in words, by their places in it."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda leaf: leaf is None)
    words = {jax.tree_util.keystr(place): _words(leaf) for place, leaf in leaves}
    return words if jax.tree_util.treedef_is_leaf(structure) else words | {" (its structure)": _words(structure)}


def _with_defaults(kernel) -> dict:
    """The settings of a kernel of ours whose default depends on others."""
    kind = type(kernel) if isinstance(kernel, SGMCMCKernel) else object
    found = inspect.getmembers(kind, lambda member: isinstance(member, property) and member.fset is not None)
    return {name: getattr(kernel, name) for name, _ in found}


def _settings_of_numpyro(kernel) -> set:
    """The attributes in which a kernel of NumPyro keeps the arguments that it was made with."""
    made_by = [vars(kind)["__init__"] for kind in type(kernel).__mro__ if "__init__" in vars(kind)]
    names = {name for init in made_by for name in inspect.signature(init).parameters}
    return {f"_{name}" for name in names - {"model", "potential_fn", "kinetic_fn"}}


def _words(value) -> str:
    """A setting, or a leaf of an input, in words that are the same in every process."""
    if isinstance(value, np.ndarray | jax.Array):
        return fingerprint(value)
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, OnDemand):  # its first, last and some other rows speak for all
        rows: Any = np.unique(np.linspace(0, len(value) - 1, 1000).astype(int))
        return f"{words} of {fingerprint(value[rows])}"
    if isinstance(value, functools.partial):  # an init_strategy with its values
        value = (value.args, value.keywords)
    elif hasattr(value, "__array__"):  # a table, whose words leave rows out
        value = np.asarray(value)
    return " ".join([words, *map(fingerprint, _arrays(value))])


def _arrays(value):
    """The arrays in a value, those in objects of this package too (measurement points, priors)."""
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, np.ndarray | jax.Array):
            yield leaf
        elif type(leaf).__module__.startswith("numpyro_fspace.") and hasattr(leaf, "__dict__"):
            yield from _arrays([part for name, part in vars(leaf).items() if not name.startswith("_")])
