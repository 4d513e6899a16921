"""Checks of the settings of an ``MCMC``, and which loop makes its draws."""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import as_numbers, check_choice, check_count, check_kernel, check_key
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.state import KernelState
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.checks.arguments import checked_arguments
from numpyro_fspace.model.checks.sites import check_modules, check_observations
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.posterior.storage.checkpoint_files import folder_of
from numpyro_fspace.priors.base import as_real
from numpyro_fspace.priors.tracing import is_traced


def check_settings(sampler, num_warmup, num_samples, *, num_chains, thinning, chain_method, postprocess_fn):
    """``sampler`` must be a kernel, the numbers of draws and chains whole numbers in their range, and so on.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """
    check_kernel(sampler)
    check_count(num_warmup, "num_warmup", 0)
    for name, value in {"num_samples": num_samples, "num_chains": num_chains, "thinning": thinning}.items():
        check_count(value, name)
    if thinning > num_samples:
        raise ValueError(f"thinning={thinning} keeps none of num_samples={num_samples} draws: let it be at most these.")
    _check_chain_method(chain_method)
    if postprocess_fn is not None and not callable(postprocess_fn):
        raise TypeError(f"postprocess_fn must be a function of a draw, or None, got {postprocess_fn!r}.")


def _check_chain_method(chain_method):
    if not callable(chain_method):
        check_choice(chain_method, "chain_method", ("parallel", "vectorized", "sequential"))


def check_fields(mcmc, extra_fields):
    """``extra_fields`` must be names of fields of the kernel's state, or of sites that are left out, with '~' first.

    Raises:
        TypeError, ValueError: naming them.
    """
    if not isinstance(extra_fields, list | tuple) or not all(isinstance(name, str) for name in extra_fields):
        raise TypeError(f'extra_fields must be a tuple of names, such as ("potential_energy",), got {extra_fields!r}.')
    if not isinstance(mcmc.sampler, SGMCMCKernel):
        return
    for name in extra_fields:
        if name.startswith("~") and not name.startswith("~z."):
            raise ValueError(f'extra_fields: {name!r} names no site to leave out: write "~z.{name[1:]}".')
        if not name.startswith("~") and not hasattr(KernelState, name.partition(".")[0]):
            names = sorted(name for name in dir(KernelState) if name[0] != "_" and name not in ("index", "plan"))
            raise ValueError(f"extra_fields: {name!r} is no field of {type(mcmc.sampler).__name__}'s state: {names}.")


def check_left_out(mcmc, extra_fields, args, kwargs):
    """The sites that ``extra_fields`` leaves out must be latent sites of the model."""
    names = {name[3:] for name in extra_fields if name.startswith("~z.")}
    if names and isinstance(mcmc.sampler, SGMCMCKernel):
        plan = mcmc.sampler.prepare(args, kwargs, mcmc.num_warmup)
        latents = {*plan.params, *plan.block}
        if names - latents:
            wrong = sorted(names - latents)
            raise ValueError(f"extra_fields: {wrong} are no latent sites of the model, which has {sorted(latents)}.")


def single(mcmc, key):
    """The key of a run; with one chain one key, also of an array of one."""
    is_raw = not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key[0] if mcmc.num_chains == 1 and key.ndim - is_raw else key


def arrays_of(init_params):
    """``init_params`` as arrays, one for each site."""
    if isinstance(init_params, dict):
        return {k: jnp.asarray(as_numbers(v, f"init_params[{k!r}]")) for k, v in init_params.items()}
    return jax.tree.map(lambda a: jnp.asarray(as_numbers(a, "init_params")), init_params)


def check_options(mcmc):
    """``checkpoint``, ``functions_at`` and ``mesh``, where they are given, must suit the kernel and the chains.

    Raises:
        TypeError, ValueError: naming the option and the cure.
    """
    for name in _options(mcmc):
        if name != "checkpoint" and not isinstance(mcmc.sampler, SGMCMCKernel):
            raise TypeError(
                f"{name}= is for SGLD, SGHMC, MCLMC and their functional forms, not for {type(mcmc.sampler).__name__}."
            )
        if mcmc.num_chains > 1 and mcmc.chain_method != "vectorized":
            raise ValueError(
                f"chain_method={mcmc.chain_method!r} has no {name}: set chain_method='vectorized', or run the "
                "chains one by one."
            )
    check_count(mcmc.checkpoint_every, "checkpoint_every")
    if mcmc.checkpoint is not None:
        if mcmc.mesh is not None and mcmc.mesh.is_multi_process:
            raise ValueError("checkpoint= does not write the chains of other processes: leave it out, or mesh.")
        folder_of(mcmc.checkpoint)  # refuses what names none


def checked_inputs(inputs, name: str):
    """``inputs`` of functions as arrays of real numbers."""
    for leaf in jax.tree.leaves(inputs):
        as_real(leaf, name)
        if not np.size(leaf):
            raise ValueError(f"{name} must hold at least one row, got shape {list(np.shape(leaf))}.")
    return jax.tree.map(lambda x: x if is_traced(x) else np.asarray(x), inputs)


def check_run(mcmc, key):
    """Key, numbers, chain method, state and options of a run that begins, which may have been changed since the last.

    Raises:
        TypeError, ValueError: naming the setting and the cure.
    """
    check_key(key, "rng_key")
    shape = key.shape if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key.shape[:-1]
    for name, least in (("num_warmup", 0), ("thinning", 1), ("num_samples", mcmc.thinning), ("num_chains", 1)):
        check_count(getattr(mcmc, name), name, least)
    state = mcmc.post_warmup_state
    if state is not None and not hasattr(state, "_replace"):
        raise TypeError(f"post_warmup_state must be the last_state of an MCMC run, got {state!r}.")
    if hasattr(state, "i") and (num_chains := np.size(state.i)) != mcmc.num_chains:
        raise ValueError(
            f"post_warmup_state is that of {num_chains} chains, and num_chains={mcmc.num_chains}: make an MCMC "
            f"with num_chains={num_chains}."
        )
    if shape not in ((), (mcmc.num_chains,)):  # after the state, whose keys may be those that were passed
        raise ValueError(f"rng_key has shape {list(shape)}, and num_chains={mcmc.num_chains}: pass one key.")
    _check_chain_method(mcmc.chain_method)
    if mcmc.chain_method == "parallel" and mcmc.num_chains > jax.local_device_count():  # num_chains was raised
        message = (
            f"There are not enough devices to run parallel chains: expected {mcmc.num_chains} but got "
            f"{jax.local_device_count()}. chain_method is now 'sequential'."
        )
        warnings.warn(message, UserWarning, stacklevel=4)
        mcmc.chain_method = "sequential"
    if mcmc.checkpoint is not None and _is_part(mcmc):
        raise ValueError("checkpoint= writes whole runs: leave out warmup() and post_warmup_state.")
    for name in ("checkpoint", "mesh"):
        if is_nested() and getattr(mcmc, name) is not None:
            raise ValueError(f"{name}= is not for runs inside of jax.jit, vmap and the like: leave it out there.")


def uses_own_loop(mcmc, extra_fields) -> bool:
    """Whether ``Loop`` makes the draws, not NumPyro's loop: with an option, or whole runs of our kernels on one device.

    Raises:
        ValueError: for options that do not go together with the fields or the phase of the run.
    """
    check_fields(mcmc, extra_fields)
    left_out = [name for name in extra_fields if name.startswith("~")]
    options = _options(mcmc)
    if left_out and options:
        raise ValueError(f"{options[0]}= keeps all latent sites: leave {left_out} out of extra_fields.")
    if mcmc.checkpoint is None and options and _is_part(mcmc):
        raise ValueError("mesh= and functions_at= are for whole runs: leave out warmup() and post_warmup_state.")
    if options:
        return True
    is_plain = not left_out and not mcmc._jit_model_args
    is_one_program = mcmc.num_chains == 1 or mcmc.chain_method in ("vectorized", "sequential")
    is_known = mcmc.post_warmup_state is None or isinstance(mcmc.post_warmup_state, KernelState)
    is_ours = isinstance(mcmc.sampler, SGMCMCKernel) and is_known and not is_warmup(mcmc)
    return is_ours and is_plain and is_one_program


@contextlib.contextmanager
def foreign_kernel(kernel, args: tuple, kwargs: dict):
    """Around a run by NumPyro's loop: errors of NUTS and other kernels on the model or its arguments name the cure.

    Raises:
        TypeError, ValueError: naming the argument or site, and the cure.
    """
    model = getattr(kernel, "model", None)
    if isinstance(kernel, SGMCMCKernel) or model is None:  # the first has its own checks
        yield
        return
    with checked_arguments(args, kwargs):
        trace: dict = {}
        with contextlib.suppress(Exception):  # of which the run itself tells
            jax.eval_shape(lambda key: trace.update(run_model(model, args, kwargs, key=key)), jax.random.key(0))
        check_modules(trace)
        check_observations(trace)
        yield


def is_warmup(mcmc) -> bool:
    """Whether ``mcmc.warmup()`` is running."""
    return mcmc._collection_params["phase"] == "warmup"


def _options(mcmc) -> list[str]:
    """The names of the options that are given."""
    return [name for name in ("checkpoint", "functions_at", "mesh") if getattr(mcmc, name) is not None]


def _is_part(mcmc) -> bool:
    """Whether a run is only the warm-up, or only what follows one."""
    return is_warmup(mcmc) or mcmc.post_warmup_state is not None
