"""What tells two runs apart, in words that are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re

import jax
import numpy as np

from numpyro_fspace.infer.base import SGMCMCKernel
from numpyro_fspace.infer.checkpoint import plain
from numpyro_fspace.on_demand import OnDemand

__all__ = ["describe", "fingerprint"]


def describe(mcmc, key, fields, init_params, arrays, static) -> dict:
    """What tells a run of ``mcmc`` from others: a checkpoint of another one is not gone on from."""
    hidden = set() if isinstance(mcmc.sampler, SGMCMCKernel) else _settings_of_numpyro(mcmc.sampler)
    values = vars(mcmc.sampler) | _with_defaults(mcmc.sampler)
    settings = {k: _words(values[k]) for k in sorted(values) if not k.startswith("_") or k in hidden}
    if callable(step_size := values.get("step_size")):
        total = (mcmc.num_warmup + mcmc.num_samples) * mcmc.sampler.num_steps
        counts = np.unique(np.r_[np.linspace(0, total, 1000), np.geomspace(1, max(1, total), 100)].astype(int))
        settings["step_size"] = fingerprint(np.asarray(jax.vmap(step_size)(counts), np.float32))
    structure, others = static
    return {
        "arguments": [_words(value) for value in (structure, *others)],
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
        "inputs": fingerprint((key, init_params, arrays)),
    }


def fingerprint(arrays) -> str:
    """SHA-256 of a tree of arrays: types, shapes and values."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        value = np.ascontiguousarray(plain(leaf))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


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
    """A setting, or an argument that is no array [N, …], in words that are the same in every process."""
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, OnDemand):  # its first, last and some other rows speak for all
        return f"{words} {fingerprint(value.source[np.unique(np.linspace(0, len(value) - 1, 1000).astype(int))])}"
    if isinstance(value, functools.partial):  # an init_strategy with its values
        arrays = [a for a in jax.tree.leaves((value.args, value.keywords)) if isinstance(a, np.ndarray | jax.Array)]
        return f"{words} {fingerprint(arrays)}" if arrays else words
    if hasattr(value, "__array__") and np.asarray(value).dtype != object:  # a table, whose words leave rows out
        return f"{words} {fingerprint(np.asarray(value))}"
    return words
