"""A description of a run by which checkpoints tell runs apart; it is the same in every process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect

import jax
import numpy as np
from numpyro.handlers import seed, trace
from numpyro.infer.mcmc import MCMCKernel

from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.model._numpyro import active_handlers
from numpyro_fspace.model.checks.arguments import arguments_of
from numpyro_fspace.posterior.storage.fingerprint import fingerprint, leaves_as_text, text_of
from numpyro_fspace.posterior.storage.model_check import PRIOR_DRAW, prior_density


def describe(mcmc, key, fields, init_params, *, args, kwargs) -> dict:
    """A description of a run of ``mcmc``. A checkpoint with another description belongs to another run."""
    hidden = set() if isinstance(mcmc.sampler, SGMCMCKernel) else _settings_of_numpyro(mcmc.sampler)
    values = vars(mcmc.sampler) | _with_defaults(mcmc.sampler)
    settings = {k: _setting(values[k]) for k in sorted(values) if not k.startswith("_") or k in hidden}
    if callable(step_size := values.get("step_size")):
        total = (mcmc.num_warmup + mcmc.num_samples) * mcmc.sampler.num_steps
        counts = np.unique(np.r_[np.linspace(0, total, 1000), np.geomspace(1, max(1, total), 100)].astype(int))
        settings["step_size"] = fingerprint(np.asarray(jax.vmap(step_size)(counts), np.float32))
    inputs = {"rng_key": key, "init_params": init_params, "functions_at": mcmc.functions_at}
    if getattr(mcmc.sampler, "model", None) is not None:
        inputs[PRIOR_DRAW] = prior_density(mcmc.sampler.model, args, kwargs)
    inputs |= arguments_of(args, kwargs)
    return {
        "inputs": {name + part: text for name, value in inputs.items() for part, text in leaves_as_text(value).items()},
        "kept": "functions" if mcmc.functions_at is not None else "weights",
        "handlers": [_handler(one) for one in active_handlers() if not isinstance(one, trace | seed)],
        "kernel": type(mcmc.sampler).__name__,
        "settings": settings,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "num_chains": mcmc.num_chains,
        "thinning": mcmc.thinning,
        "checkpoint_every": mcmc.checkpoint_every,
        "fields": list(fields),
        "sample_field": mcmc.sampler.sample_field,
        "postprocess_fn": _code_of(mcmc.postprocess_fn),
        "float64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
    }


def _setting(value):
    """A setting of a kernel as text; the settings of a kernel in it by name."""
    if isinstance(value, MCMCKernel):
        values = vars(value) | _with_defaults(value)
        names = (k for k in sorted(values) if not k.startswith("_") or k in _settings_of_numpyro(value))
        return {"kernel": type(value).__name__} | {k: _setting(values[k]) for k in names}
    return _code_of(value) if callable(value) else text_of(value)


def _handler(handler) -> str:
    """An effect handler around a run as text: its kind and its values."""
    values = {k: v for k, v in vars(handler).items() if k != "fn"}
    return f"{type(handler).__name__} {[(k, _code_of(v) if callable(v) else text_of(v)) for k, v in values.items()]}"


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


def _code_of(fn) -> str:
    """A function as text: its name, its code, and the values that it closes over."""
    if isinstance(fn, set | frozenset):  # sets have no order
        return repr(sorted(map(_code_of, fn)))
    if isinstance(fn, functools.partial):
        keywords = sorted((k, _code_of(v)) for k, v in fn.keywords.items())
        return repr(["partial", _code_of(fn.func), [*map(_code_of, fn.args)], keywords])
    inner = inspect.unwrap(fn) if callable(fn) else fn
    if not inspect.isfunction(inner):
        return text_of(fn)
    values = [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).items()]
    for cell in inner.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is still empty
            values.append(cell.cell_contents)
    texts = [_code_of(v) if isinstance(v, set | frozenset | functools.partial) else text_of(v) for v in values]
    of_a_library = str(inner.__module__).startswith(("numpyro.", "numpyro_fspace."))  # whose code changes with versions
    content = repr([None if of_a_library else _parts_of_code(inner.__code__), texts])
    return f"{text_of(inner)} {hashlib.sha256(content.encode()).hexdigest()}"


def _parts_of_code(code) -> list:
    """Instructions, names and constants of a function and of those within it, the same in every process."""

    def part(one):
        if inspect.iscode(one):
            return _parts_of_code(one)
        return sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)  # sets have no order

    return [code.co_code.hex(), code.co_names, *map(part, code.co_consts)]
