"""From draws of weights to draws of functions and observations, in bounded memory.

Everything here runs the model with its plates at full size, whatever ``subsample_size`` says, and recomputes
deterministic sites instead of reusing those of the run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import subjaxprs
from numpyro import handlers

from numpyro_fspace.arguments import split_arrays
from numpyro_fspace.functions import (
    condition,
    depends_on,
    evaluate,
    function_inputs,
    function_values,
    functions_of,
)
from numpyro_fspace.handlers import full_plates
from numpyro_fspace.infer.trouble import warn_of_predictions
from numpyro_fspace.posterior import as_posterior
from numpyro_fspace.validate import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float, Key
    from numpyro.infer import MCMC

    from numpyro_fspace.posterior import Posterior

__all__ = ["function_and_site_draws", "function_draws", "log_likelihood", "map_draws", "predict"]

#: Numbers in the largest array that draws evaluated together may make: 2²⁵ (128 MiB in float32).
CHUNK = 2**25


def predict(
    source: MCMC | Posterior | dict,
    key: Key[Array, ""],
    *args: Any,
    model: Callable | None = None,
    inputs: Float[ArrayLike, "N D"] | dict | None = None,
    batch_size: int | None = None,
    input_batch_size: int | None = None,
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
            numbers of them (a convolutional network's, say, of a thousand images), and no site depends on all rows
            at once. Every argument with as many rows as the longest of ``inputs`` is cut alike.
        **kwargs: the model's keyword arguments; those called as an argument above must be given by position.

    Returns:
        A dict of NumPy arrays [S, N] or [S, N, K]: the functions by name of their ``functional_prior`` or
        ``random_module``, new observations by site, deterministic sites. Chains are concatenated.

    Raises:
        TypeError: if ``source`` is neither, or the model is missing.
        ValueError: if ``source`` has no draws, kept functions in place of weights or left out latent sites; if
            ``inputs`` names no function of the model. Errors of the model itself come through.

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
    if input_batch_size is not None:
        check_count(input_batch_size, "input_batch_size")
    posterior, sizes = as_posterior(source, model), {"batch_size": batch_size, "input_batch_size": input_batch_size}
    found = function_and_site_draws(posterior, key, args, kwargs, inputs, **sizes)
    warn_of_predictions(posterior, args, kwargs, found)
    return found


def function_and_site_draws(
    posterior: Posterior, key, args, kwargs, inputs, *, batch_size=None, input_batch_size=None
) -> dict:
    """``predict`` with the model's arguments as a tuple and a dict."""
    draws, model = posterior.samples, posterior.model
    inputs = function_inputs(model, draws, args, kwargs) if inputs is None else _as_arrays(inputs)

    def one_draw(draw, key, args, kwargs, inputs):
        trace = _trace(model, draw, key, args, kwargs)
        outputs = {k: s["value"] for k, s in trace.items() if _is_output(s, draw)}
        given = [k for k in outputs if trace[k]["type"] == "sample" and trace[k]["is_observed"]]
        keys = jax.random.split(jax.random.fold_in(key, 1), len(given))
        # What is observed is drawn anew, and stays what it is for the sites that depend on it (a known noise, inputs).
        outputs |= {k: trace[k]["fn"](rng_key=key) for k, key in zip(given, keys, strict=True)}
        return evaluate(functions_of(trace), inputs) | outputs

    given, keys = _shared((args, kwargs, inputs)), jax.random.split(key, len(jax.tree.leaves(draws)[0]))
    all_rows = _compiled(one_draw, given)
    num = max([0, *(len(x) for x in jax.tree.leaves(inputs))])
    size = input_batch_size
    if size is None:
        largest = _largest(all_rows, draws, keys, split_arrays(given)[0]) // len(keys)
        size = max(1, num * CHUNK // max(largest, CHUNK))

    def cut(start):
        rows = slice(start, start + size)
        parts = {id(a): a[rows] for a in jax.tree.leaves(given) if np.shape(a)[:1] == (num,)}  # once what is shared
        return jax.tree.map(lambda a: parts.get(id(a), a), given)

    if num > size:
        chunk = _compiled(one_draw, cut(0))  # one program for all parts
        whole, part = (
            {k: site.shape for k, site in jax.eval_shape(program, draws, keys, split_arrays(some)[0]).items()}
            for program, some in ((all_rows, given), (chunk, cut(0)))
        )
        axes = {k: _changed_axes(whole[k], part[k]) for k in whole}
        mixed = [k for k, axis in axes.items() if axis and [(whole[k][i], part[k][i]) for i in axis] != [(num, size)]]
        one = partial(one_draw, jax.tree.map(lambda a: a[0], draws), keys[0])
        mixed += _depending_on_rows(one, given, num, [k for k, axis in axes.items() if not axis])
        if mixed and input_batch_size is not None:
            raise ValueError(
                f"input_batch_size={size}: {sorted(mixed)} cannot be put together from parts of the {num} rows: they "
                "depend on all of them at once, or have no axis of them. Leave it None, or the sites out of the model."
            )
    if num <= size or mixed:
        return map_draws(one_draw, draws, key, *given, batch_size=batch_size, chunk=all_rows)
    parts = []
    for start in range(0, num, size):
        part_key = jax.random.fold_in(key, start)
        parts.append(map_draws(one_draw, draws, part_key, *cut(start), batch_size=batch_size, chunk=chunk))
    return {k: np.concatenate([p[k] for p in parts], axis[0]) if axis else parts[0][k] for k, axis in axes.items()}


def _changed_axes(whole: tuple, part: tuple) -> list:
    """Axes along which two shapes differ: all, if they have not as many."""
    if len(whole) != len(part):
        return list(range(min(len(whole), len(part))))
    return [axis for axis, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]


def _depending_on_rows(run, given, num: int, names: list) -> list:
    """Which of these outputs of ``run(*given)`` depend on the arrays of ``num`` rows among what is given."""
    arrays, _, join = split_arrays(given)
    has_rows = [len(a) == num for a in arrays]
    rows = [a for a, chosen in zip(arrays, has_rows, strict=True) if chosen]

    def output(name, values):
        some = iter(values["rows"])
        return run(*join([next(some) if chosen else a for a, chosen in zip(arrays, has_rows, strict=True)]))[name]

    return [name for name in names if depends_on(partial(output, name), {"rows": rows})]


def function_draws(posterior: Posterior, args, kwargs, inputs) -> dict:
    """Draws [S, N, K] of the functions alone, at ``inputs``: nothing of the size of the data is computed for them."""

    def one_draw(draw, _, args, kwargs, inputs):
        return function_values(posterior.model, draw, args, kwargs, inputs)

    return map_draws(one_draw, posterior.samples, jax.random.key(0), args, kwargs, _as_arrays(inputs))


def log_likelihood(posterior: Posterior, args, kwargs, *, batch_size=None) -> dict:
    """Pointwise log-likelihood [S, N] of every observed site, at the full data and recomputed functions.

    ``args`` include the targets. The functional prior and other factors are no observations and are left out.
    """

    def one_draw(draw, key, args, kwargs, inputs):
        trace = _trace(posterior.model, draw, key, args, kwargs)
        return {k: s["fn"].log_prob(s["value"]) for k, s in trace.items() if is_observation(s)}

    return map_draws(one_draw, posterior.samples, jax.random.key(0), args, kwargs, None, batch_size=batch_size)


def _trace(model, draw, key, args, kwargs):
    """The model at one draw, plates at full size."""
    seeded = handlers.seed(full_plates(condition(model, draw)), key)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    _refuse_other_names(trace, draw)
    for name, site in trace.items():
        if site["type"] == "sample" and name in draw and np.shape(site["value"]) != site["fn"].shape():
            raise ValueError(
                f"The draws of {name!r} have shape {np.shape(site['value'])}, but the model has {site['fn'].shape()} "
                "with these arguments. A latent value of each row of the data is known for those rows alone."
            )
    return trace


def _refuse_other_names(trace, draw):
    """Draws under names that the model does not have, where weights of the model have none."""
    unknown = sorted(draw.keys() - trace.keys())
    left = [k for k, s in trace.items() if s["type"] == "sample" and "fspace" in s["infer"] and k not in draw]
    if unknown and (left or len(unknown) == len(draw)):
        raise ValueError(
            f"The draws hold {unknown}, which are no sites of the model; its own {left or sorted(trace)} would come "
            "from the prior. Give them the names of the model's sites."
        )


def is_observation(site) -> bool:
    """Whether a trace's site is data under a likelihood (and no factor)."""
    is_data = site["type"] == "sample" and site["is_observed"]
    return is_data and not site["infer"].get("is_auxiliary", False)


def _shared(tree):
    """``tree`` with one array in the place of all that equal it."""
    found: list = []

    def share(leaf):
        is_array = isinstance(leaf, np.ndarray | jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if not is_array or not leaf.ndim:
            return leaf
        value = jnp.asarray(leaf)
        for first, other in found:
            if value.dtype == other.dtype and value.shape == other.shape and np.array_equal(value, other):
                return first
        found.append((leaf, value))
        return leaf

    return jax.tree.map(share, tree)


def _compiled(fn, given):
    """``fn`` over draws and keys, compiled; arrays among what is given enter as arguments.

    An array that stands at several places is one there too, and what is computed from it at each is computed once.
    """
    arrays, _, join = split_arrays(given)
    places = [id(a) for a in arrays]
    first = [places.index(place) for place in places]

    @jax.jit
    def chunk(draws, keys, arrays):
        filled = join([arrays[i] for i in first])
        return jax.vmap(lambda draw, key: fn(draw, key, *filled))(draws, keys)

    return chunk


def map_draws(fn, draws, key, args, kwargs, inputs, *, batch_size=None, chunk=None) -> dict:
    """``fn(draw, key, args, kwargs, inputs)`` for every draw, in chunks, collected as NumPy arrays.

    Arrays among the arguments enter the compiled function as arguments, all else as constants.
    """
    num = jax.tree.leaves(draws)[0].shape[0]
    arrays = split_arrays((args, kwargs, inputs))[0]
    chunk = _compiled(fn, (args, kwargs, inputs)) if chunk is None else chunk
    keys = jax.random.split(key, num)
    if batch_size is None:
        batch_size = max(1, num * CHUNK // max(_largest(chunk, draws, keys, arrays), CHUNK))
    check_count(batch_size, "batch_size")
    values: dict = {}
    for start in range(0, num, batch_size):
        rows = slice(start, start + batch_size)
        part = jax.device_get(chunk(jax.tree.map(lambda a, rows=rows: a[rows], draws), keys[rows], arrays))
        for k, v in part.items():
            values.setdefault(k, np.empty((num, *v.shape[1:]), v.dtype))[rows] = v
    return values


def _as_arrays(inputs):
    return {k: jnp.asarray(x) for k, x in inputs.items()} if isinstance(inputs, dict) else jnp.asarray(inputs)


def _largest(chunk, draws, keys, arrays) -> int:
    """Numbers in the largest array that ``chunk`` makes of all draws at once. The trace serves its call too."""
    return max([1, *_sizes(chunk.trace(draws, keys, arrays).jaxpr)])


def _sizes(program):
    """Numbers in each array that a program makes, and its subprograms."""
    for equation in program.eqns:
        yield from (math.prod(getattr(made.aval, "shape", ())) for made in equation.outvars)
    for part in subjaxprs(getattr(program, "jaxpr", program)):
        yield from _sizes(part)


def _is_output(site, draw):
    if site["type"] == "deterministic":
        return True
    return site["type"] == "sample" and site["name"] not in draw and not site["infer"].get("is_auxiliary", False)
