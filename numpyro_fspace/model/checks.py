"""Checks of a model, its arguments and its observations, before anything long is computed."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_fspace._checks import is_table, native, not_numbers
from numpyro_fspace.model.sites import base_distribution, latent_sites, observed_sites, subsampled_plates

__all__ = ["check_arguments", "check_observations", "check_sites", "checked_arguments"]


def _is_concrete_array(x) -> bool:
    return isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)


@contextmanager
def checked_arguments(args: tuple, kwargs: dict, of: str = "run"):
    """``check_arguments`` around a model's first evaluation, which tells whether the model handles what it is given.

    Yields what NaN and infinite values there are, as ``not_finite`` names them, or None: whoever evaluates the model is
    to raise a ValueError if they reach its density. That, or another error of the model, becomes one that names the
    argument.

    Raises:
        TypeError, ValueError: naming the argument, what is wrong with it, and the cure.
    """
    check_arguments(args, kwargs, of=of, finite=False)
    trouble = not_finite(args, kwargs, of)
    try:
        yield trouble
    except ValueError as error:
        if trouble is None:
            raise
        raise ValueError(trouble) from error
    except Exception as error:
        for name, table in _leaves(args, kwargs):
            if is_table(table):
                raise TypeError(f"{name} of {of} {_what_of(table)} ({type(error).__name__}: {error})") from error
        raise


def _what_of(table) -> str:
    """What a model that fails may mind of a table."""
    trouble = not_numbers(np.asarray(table))
    if trouble is not None:
        return f"{trouble}."
    kind = f"{type(table).__module__.split('.')[0]} {type(table).__name__}"
    return f"is a {kind}, and the model fails where it computes with it: pass its numbers, .to_numpy()."


def check_arguments(args: tuple, kwargs: dict, *, of: str = "run", finite: bool = True):
    """Arrays given to ``of`` must be non-empty, finite, of numbers, and survive the cast to JAX's float type.

    Raises:
        TypeError, ValueError: naming the argument, what is wrong with it, and the cure.
    """
    for name, leaf in _leaves(args, kwargs):
        if _is_concrete_array(leaf):
            _check_array(name, leaf, of)
        elif is_table(leaf) and np.asarray(leaf).dtype.kind in "biuf":  # of numbers
            _check_array(name, np.asarray(leaf), of)
    trouble = not_finite(args, kwargs, of) if finite else None
    if trouble is not None:
        raise ValueError(trouble)


def not_finite(args: tuple, kwargs: dict, of: str) -> str | None:
    """The first argument that holds NaN or infinite values, and the cure; None if there is none."""
    for name, leaf in _leaves(args, kwargs):
        is_number = isinstance(leaf, float)
        if not (is_number or _is_concrete_array(leaf) or is_table(leaf)):
            continue
        if not (is_number or is_table(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact)):
            continue
        values = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            total = values.sum()  # takes a third of the time that looking at each value does
        bad = 0 if np.isfinite(total) else int(np.sum(~np.isfinite(values)))
        if bad:
            return (
                f"{name} of {of} holds {bad} NaN or infinite values; drop those rows, impute them, or write any number "
                "there and leave it out of the likelihood with numpyro.handlers.mask. (A model that replaces them "
                "itself, by jnp.where before it computes anything of them, is taken as it is.)"
            )
    return None


def _leaves(args, kwargs):
    """The leaves of a model's arguments, each with the name of its argument."""
    named = {f"positional argument {i}": a for i, a in enumerate(args)}
    named |= {f"argument {k!r}": v for k, v in kwargs.items()}
    return [(name, leaf) for name, tree in named.items() for leaf in jax.tree.leaves(tree)]


def _check_array(name, array, of):
    if array.size == 0 and of == "run":
        raise ValueError(f"{name} of {of} is empty (shape {array.shape}).")
    if array.size == 0 or not isinstance(array, np.ndarray):
        return
    trouble = not_numbers(array)
    if trouble is not None:
        raise TypeError(f"{name} of {of} {trouble}.")
    array = native(array)
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and not np.array_equal(array, array.astype(kept)):
        raise ValueError(
            f"{name} of {of} is {array.dtype} and JAX would cut it to {kept}, which changes it (it holds "
            f'{array.max()}). Pass it as float, or call jax.config.update("jax_enable_x64", True) first.'
        )
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:
        _check_float32_is_enough(name, array, of)


def _check_float32_is_enough(name, array, of):
    rows = np.atleast_1d(array)
    rows = rows if np.isfinite(rows).all() else np.ma.masked_invalid(rows)
    with np.errstate(over="ignore"):
        cast = rows.astype(np.float32)
        spread = np.std(rows, axis=0)
        lost = np.max(np.abs(cast.astype(np.float64) - rows), axis=0)
        varies = np.ptp(rows, axis=0) > 0
    if not np.all(np.isfinite(cast)) or np.any(varies & (lost > 1e-3 * spread)):
        raise ValueError(
            f"{name} of {of} is float64 and JAX would round it to float32, which loses it (its values are too "
            'large for their spread). Standardize it, or call jax.config.update("jax_enable_x64", True) first.'
        )


def check_sites(trace):
    """The sites of a model must be ones these samplers can move: continuous and global latents.

    Raises:
        ValueError: naming the site and the cure.
    """
    latents = latent_sites(trace).values()
    for site in trace.values():
        if site["type"] == "param":
            raise ValueError(
                f"The model has the param site {site['name']!r}, which a sampler cannot move. Give it a prior: "
                "use fs.random_module in place of flax_module, or numpyro.sample in place of numpyro.param."
            )
    small = subsampled_plates(trace)
    for site in latents:
        name = site["name"]
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"The latent site {name!r} is discrete; stochastic-gradient samplers move continuous sites only. "
                "Marginalize it out."
            )
        if isinstance(base_distribution(site["fn"]), dist.Delta):
            raise ValueError(
                f"The latent site {name!r} has a Delta prior: a constant, which a sampler would move. Write "
                f"numpyro.deterministic({name!r}, value), or give the value to fs.random_module as prior."
            )
        local = [frame.name for frame in site["cond_indep_stack"] if frame.name in small]
        if local:
            raise ValueError(
                f"The latent site {name!r} lies inside the subsampled plate {local[0]!r}. Local latent variables "
                "cannot be sampled by minibatches; if it is an observation, pass its data (obs=None makes it "
                "latent), else drop subsample_size."
            )
    if not latents:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    if not observed_sites(trace, factors=True, weights=True):
        raise ValueError(
            "The model has no observed site, so there is no likelihood. Did run(...) get the targets (y=None makes "
            "the observation latent)? To draw from the prior use numpyro.infer.Predictive (it leaves "
            "functional priors out), or mask the likelihood with numpyro.handlers.mask(mask=False)."
        )


def check_observations(trace):
    """Observations must have a shape that their likelihood does not widen, and lie in its support."""
    for site in observed_sites(trace, weights=True).values():
        name, value, shape = site["name"], site["value"], tuple(site["fn"].shape())
        if not _is_law_of_each(site["fn"], np.shape(value)):
            raise ValueError(
                f"The observation {name!r} has shape {np.shape(value)} but its likelihood has shape {shape}: "
                "they would broadcast against each other. Squeeze the network's output (f(x).squeeze(-1)) or "
                "reshape the data."
            )
        _check_support(name, site["fn"], value)


def _is_law_of_each(law, shape: tuple) -> bool:
    """Whether a law, or one law for all rows, is that of values of this shape, none of which counts twice."""
    event = law.event_shape
    if shape[len(shape) - len(event) :] != event:
        return False
    try:
        return np.broadcast_shapes(shape, tuple(law.shape())) == shape
    except ValueError:
        return False


def _check_support(name, law, value):
    """Values must be possible under their likelihood, where that can be said before it is computed."""
    if isinstance(value, jax.core.Tracer) or _is_masked(law) or law.support is None:
        return
    with jax.ensure_compile_time_eval():
        inside = law.support(value)
    if isinstance(inside, jax.core.Tracer) or np.asarray(inside).all():
        return
    outside = np.asarray(value)[~np.asarray(inside)]
    cure = "Classes are numbered from 0. " if isinstance(law, dist.CategoricalLogits | dist.CategoricalProbs) else ""
    raise ValueError(
        f"The observation {name!r} holds {len(outside)} values that its likelihood gives no density, {outside[0]} "
        f"among them (its support: {law.support}). {cure}Correct them, or leave them out with numpyro.handlers.mask."
    )


def _is_masked(law) -> bool:
    while isinstance(law, dist.Independent | dist.ExpandedDistribution):
        law = law.base_dist
    return isinstance(law, dist.MaskedDistribution)
