"""From draws of weights to draws of functions and observations, in bounded memory.

Everything here runs the model with its plates at full size, whatever ``subsample_size`` says, and recomputes
deterministic sites instead of reusing those of the run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_fspace._checks import as_numbers, check_count
from numpyro_fspace.model.arguments import split_arrays
from numpyro_fspace.model.checks import check_key, checked_arguments, known_values, named_leaves
from numpyro_fspace.model.functions import condition, evaluate, function_inputs, function_values, functions_of
from numpyro_fspace.model.handlers import full_plates, own_keys
from numpyro_fspace.model.indices import check_indices, plates_of
from numpyro_fspace.model.on_demand import errors_as_themselves
from numpyro_fspace.model.sharding import beside
from numpyro_fspace.model.sites import is_observation, is_weight, weights_of
from numpyro_fspace.posterior import mapping
from numpyro_fspace.posterior.completeness import check_complete
from numpyro_fspace.posterior.mapping import compile_chunk, largest_array, map_draws, share_equal
from numpyro_fspace.posterior.posterior import as_posterior
from numpyro_fspace.posterior.row_batches import Evaluation, find_axes, take_rows
from numpyro_fspace.posterior.warnings import warn_of_predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, ArrayLike, Float, Key
    from numpyro.infer import MCMC

    from numpyro_fspace.posterior.posterior import Posterior

__all__ = ["function_and_site_draws", "function_draws", "log_likelihood", "predict"]


@errors_as_themselves
def predict(
    source: MCMC | Posterior | dict,
    key: Key[Array, ""],
    *args: Any,
    model: Callable | None = None,
    inputs: Float[ArrayLike, "N D"] | dict | None = None,
    batch_size: int | None = None,
    input_batch_size: int | None = None,
    from_prior: Sequence[str] = (),
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    """Draws of functions and observations at new inputs, one for each posterior draw.

    A ``RuntimeWarning`` tells if the chains of ``source`` have not met in these (R-hat above 1.05; where it has several
    chains of 100 draws or more).

    Args:
        source: an ``MCMC`` object that has run, a ``fs.Posterior`` (of ``fs.svi_posterior``, of a checkpoint, …), or a
            dict of posterior draws [S, …] (then ``model`` is needed).
        key: draws the observations.
        *args: the model's arguments at the new inputs, without targets (``predict(mcmc, key, x_new)``).
        model: the model; that of ``source`` if None; a dict needs one.
        inputs: where functions are evaluated: an array [N, D], or a dict of them by name of function; if None where
            the model itself first evaluates each (at the first array among the arguments, where that is random).
        batch_size: draws evaluated together; chosen to bound memory if None.
        input_batch_size: rows evaluated together; if None all, unless one draw would make an array of more than 2²⁵
            numbers of them (a convolutional network's, say, of a thousand images), and each row's values depend on
            that row alone, which is tried at one draw. Every argument with as many rows as the longest of ``inputs``
            is cut alike.
        from_prior: names of latent sites that come from the prior, given the others, in place of the draws, such as
            the latent values of new rows. All others must be among the draws.
        **kwargs: the model's keyword arguments; those called as an argument above must be given by position.

    Returns:
        A dict of NumPy arrays [S, N] or [S, N, K]: the functions by name of their ``functional_prior`` or
        ``random_module``, new observations by site, deterministic sites. Chains are concatenated.

    Raises:
        TypeError: if ``source`` is neither, or the model is missing.
        ValueError: if ``source`` has no draws, kept functions in place of weights or lacks latent sites of the model;
            if ``inputs`` names no function of the model, or ``from_prior`` no latent site; if ``input_batch_size`` is
            given and the model mixes rows. Errors of the model itself come through.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.1), obs=y)
        >>> draws = {"slope": jax.numpy.ones(5)}
        >>> fs.predict(draws, jax.random.key(0), jax.numpy.ones((3, 1)), model=model)["y"].shape
        (5, 3)
    """
    check_key(key, "key")
    if input_batch_size is not None:
        check_count(input_batch_size, "input_batch_size")
    from_prior = (from_prior,) if isinstance(from_prior, str) else tuple(from_prior)
    posterior, given = as_posterior(source, model, from_prior), {} if inputs is None else {"inputs": inputs}
    sizes = {"batch_size": batch_size, "input_batch_size": input_batch_size}
    known = known_values(posterior.model, args, kwargs, "predict")
    with checked_arguments(args, kwargs | given, "predict") as trouble, known:
        draws = function_and_site_draws(posterior, key, args, kwargs, inputs, from_prior=from_prior, **sizes)
        bad = [k for k, v in draws.items() if trouble is not None and not np.isfinite(v).all()]
        if bad:
            raise ValueError(f"{bad} are not finite.")
    warn_of_predictions(posterior, args, kwargs, draws)
    return draws


def function_and_site_draws(
    posterior: Posterior, key, args, kwargs, inputs, *, from_prior=(), batch_size=None, input_batch_size=None
) -> dict:
    """``predict`` with the model's arguments as a tuple and a dict."""
    draws, model = {k: v for k, v in posterior.samples.items() if k not in from_prior}, posterior.model
    if not draws:
        raise ValueError(f"from_prior={list(from_prior)} leaves no draws.")
    inputs = None if inputs is None else _as_arrays(inputs)
    args, kwargs, inputs = beside((args, kwargs, inputs), draws)

    @cache
    def places():
        return function_inputs(model, draws, args, kwargs) if inputs is None else _as_arrays(inputs)

    check_complete(replace(posterior, samples=draws), args, kwargs, places, from_prior)

    plates: dict = {}

    def evaluation(draw, key, args, kwargs, inputs):
        with (asked := own_keys()):
            trace = _trace(model, draw, key, args, kwargs)
        plates.update(plates_of(trace))
        weights = weights_of(trace)
        found = {k: s["value"] for k, s in trace.items() if _is_output(s, draw, weights)}
        given = [k for k in found if trace[k]["type"] == "sample" and trace[k]["is_observed"]]
        keys = jax.random.split(jax.random.fold_in(key, 1), len(given))
        # What is observed is drawn anew, and stays what it is for the sites that depend on it (a known noise, inputs).
        found |= {k: trace[k]["fn"](rng_key=key) for k, key in zip(given, keys, strict=True)}
        laws = {k: trace[k]["fn"] for k in found if trace[k]["type"] == "sample"}
        for name in laws:
            if jnp.iscomplexobj(found[name]):
                raise TypeError(f"The site {name!r} is complex; densities are of real numbers.")
        is_noisy = asked.num > 0 or any(k in trace and k not in found for k in from_prior)
        return Evaluation(evaluate(functions_of(trace), inputs) | found, laws, is_noisy)

    def one_draw(*given):
        return evaluation(*given).values

    given, keys = share_equal((args, kwargs, places())), jax.random.split(key, len(jax.tree.leaves(draws)[0]))
    all_rows, arrays = compile_chunk(one_draw, given), split_arrays(given)[0]
    unknown = [None] * len(jax.tree.leaves((draws, keys)))
    check_indices(all_rows.trace(draws, keys, arrays).jaxpr, [*unknown, *arrays], plates, named_leaves(args, kwargs))
    num, size = max([0, *(len(x) for x in jax.tree.leaves(places()))]), input_batch_size
    if size is None or num > size:
        largest = largest_array(all_rows, draws, keys, arrays) // len(keys)
        room = max(1, num * mapping.CHUNK // max(largest, mapping.CHUNK))
        size = room if size is None else size
    axes: dict = {}
    mixed: list = []
    if num > size:
        first = jax.tree.map(lambda a: a[0], draws)
        try:
            axes, mixed = find_axes(partial(evaluation, first), given, num, size, room, keys[0])
        except (TypeError, ValueError) as error:  # of a model that does not take fewer rows
            if input_batch_size is not None:
                raise ValueError(
                    f"input_batch_size={size}: the model cannot be evaluated at a part of the {num} rows ({error}). "
                    "Leave it None."
                ) from error
            mixed = ["the model"]
        if mixed and input_batch_size is not None:
            raise ValueError(
                f"input_batch_size={size}: {mixed} cannot be put together from parts of the {num} rows: they depend on "
                "all of them at once, on the rows' numbers, or have no axis of them. Leave it None, compute what all "
                "rows share (a mean, say) outside the model, or leave the sites out of it."
            )
    if num <= size or mixed:
        return map_draws(one_draw, draws, key, *given, batch_size=batch_size, chunk=all_rows)
    parts, chunk = [], compile_chunk(one_draw, take_rows(given, num, slice(size)))  # one program for all parts
    for start in range(0, num, size):
        part_key = jax.random.fold_in(key, start)
        part = take_rows(given, num, slice(start, start + size))
        parts.append(map_draws(one_draw, draws, part_key, *part, batch_size=batch_size, chunk=chunk))
    return {k: parts[0][k] if i is None else np.concatenate([p[k] for p in parts], 1 + i) for k, i in axes.items()}


def function_draws(posterior: Posterior, args, kwargs, inputs) -> dict:
    """Draws [S, N, K] of the functions alone, at ``inputs``: nothing of the size of the data is computed for them."""

    inputs = _as_arrays(inputs)
    check_complete(posterior, args, kwargs, lambda: inputs)

    def one_draw(draw, _, args, kwargs, inputs):
        return function_values(posterior.model, draw, args, kwargs, inputs)

    args, kwargs, inputs = beside((args, kwargs, inputs), posterior.samples)
    return map_draws(one_draw, posterior.samples, jax.random.key(0), args, kwargs, _as_arrays(inputs))


def log_likelihood(posterior: Posterior, args, kwargs, *, batch_size=None) -> dict:
    """Pointwise log-likelihood [S, N] of every observed site, at the full data and recomputed functions.

    ``args`` include the targets. The functional prior and other factors are no observations and are left out, and so
    are weights that ``numpyro.handlers.condition`` fixes. A point under a mask has log-likelihood 0.
    """

    check_complete(posterior, args, kwargs, dict)

    def one_draw(draw, key, args, kwargs, inputs):
        trace = _trace(posterior.model, draw, key, args, kwargs)
        weights = weights_of(trace)
        return {k: s["fn"].log_prob(s["value"]) for k, s in trace.items() if is_observation(s, weights)}

    return map_draws(one_draw, posterior.samples, jax.random.key(0), args, kwargs, None, batch_size=batch_size)


def _trace(model, draw, key, args, kwargs):
    """The model at one draw, plates at full size."""
    seeded = handlers.seed(full_plates(condition(model, draw)), key)
    return handlers.trace(seeded).get_trace(*args, **kwargs)


def _as_arrays(inputs):
    if isinstance(inputs, dict):
        return {k: jnp.asarray(as_numbers(x, f"inputs[{k!r}]")) for k, x in inputs.items()}
    return jnp.asarray(as_numbers(inputs, "inputs"))


def _is_output(site, draw, weights):
    if site["type"] not in ("sample", "deterministic") or is_weight(site, weights):
        return False
    return site["type"] == "deterministic" or not (site["name"] in draw or site["infer"].get("is_auxiliary", False))
