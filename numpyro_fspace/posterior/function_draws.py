"""Draws of functions and observations from draws of weights, in bounded memory.

The model runs with its plates at full size, whatever ``subsample_size`` is. Deterministic sites are recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_fspace._checks import as_numbers, warn
from numpyro_fspace._xla import largest_array, taken
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.checks.arguments import named_leaves
from numpyro_fspace.model.checks.indices import check_indices, plates_of
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.functions import (
    check_has_functions,
    evaluate,
    function_inputs,
    function_values,
    functions_of,
    widened,
)
from numpyro_fspace.model.handlers import full_plates, own_keys
from numpyro_fspace.model.programs.cache import cached_program, content_key
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sharding import with_devices_of
from numpyro_fspace.model.sites import base_distribution, is_drawable, observed_sites, weights_of
from numpyro_fspace.posterior.completeness import check_complete
from numpyro_fspace.posterior.draw_batches import compile_chunk, map_compiled, map_draws, most_at_once, share_equal
from numpyro_fspace.posterior.model_structure import Structure, structure
from numpyro_fspace.posterior.posterior import Posterior
from numpyro_fspace.posterior.row_independence import Evaluation, Probe, find_axes, take_rows

#: Up to so many rows at all draws together, a program takes longer to compile than to run.
MAX_QUICK = 2**20


class Evaluator:
    """Functions and observations at each draw of a posterior.

    Programs are compiled at the first call and used again for arguments of the same shapes.

    Args:
        posterior: the draws and their model.
        from_prior: names of latent sites that come from the prior.
    """

    def __init__(self, posterior: Posterior, from_prior: tuple[str, ...] = ()):
        draws = {k: v for k, v in posterior.samples.items() if k not in from_prior}
        if not draws:
            raise ValueError(f"from_prior={list(from_prior)} leaves no draws.")
        self.posterior, self.from_prior = replace(posterior, samples=draws), from_prior
        self._programs: dict = {}

    def _programs_for(self, given) -> dict:
        """The programs compiled for arguments of these shapes, by name; empty at first."""
        arrays, static, _ = split_arrays(given)
        places = [id(a) for a in arrays]
        shapes = tuple((places.index(id(a)), a.shape, str(a.dtype)) for a in arrays)
        return cached_program(self._programs, static, (is_nested(), *shapes), {})

    def structure(self, args, kwargs) -> Structure:
        """The structure of the model at such arguments."""
        programs = self._programs_for((args, kwargs))
        if "structure" not in programs:
            draw = taken(self.posterior.samples, 0)
            programs["structure"] = structure(full_plates(self.posterior.model), draw, args, kwargs)
        return programs["structure"]

    def draws(self, key, arguments, inputs, *, batch_size=None, input_batch_size=None) -> dict:
        """Values by name, [S, ...], at the model's ``arguments``, a tuple and a dict; see ``predict``."""
        draws, model = self.posterior.samples, self.posterior.model
        inputs = None if inputs is None else as_arrays(inputs)
        args, kwargs, inputs = with_devices_of((*arguments, inputs), draws)
        programs = self._programs_for((args, kwargs, inputs))

        @cache
        def places():
            return function_inputs(model, draws, args, kwargs, programs=programs) if inputs is None else inputs

        if "is_complete" not in programs:
            check_complete(self.posterior, args, kwargs, places, self.from_prior)
            programs["is_complete"] = True
        given = share_equal((args, kwargs, places()))
        keys = jax.random.split(key, len(jax.tree.leaves(draws)[0]))
        num = max(map(len, jax.tree.leaves(places())), default=0)
        programs = self._programs_for((given, num, "draws"))
        if not programs:
            plates: dict = {}
            # Inputs of a model without functions say how many rows there are, if they are those of an argument.
            is_elsewhere = isinstance(given[2], np.ndarray | jax.Array)
            if is_elsewhere and not any(a is given[2] for a in jax.tree.leaves(given[:2])):
                check_has_functions(functions_of(self.structure(args, kwargs).trace))
            evaluation = partial(self._evaluation, plates)
            probe = Probe(partial(evaluation, jax.tree.map(lambda a: a[0], draws)), num)

            def one_draw(*given):
                return evaluation(*given).values

            compiled = compile_chunk(one_draw, given, is_quick=num * len(keys) <= MAX_QUICK)
            traced = compiled.trace(draws, keys, split_arrays(given)[0]).jaxpr
            programs |= {"one draw": one_draw, "all": compiled, "probe": probe, "traced": traced, "plates": plates}
        all_rows, arrays = programs["all"], split_arrays(given)[0]
        rows = content_key([a for a in arrays if jnp.issubdtype(a.dtype, jnp.integer)])
        if programs.get("rows") != rows:  # which may be numbers of rows
            known = [*[None] * len(jax.tree.leaves((draws, keys))), *arrays]
            check_indices(programs["traced"], known, programs["plates"], named_leaves(args, kwargs))
            programs["rows"] = rows
        axes, size = self._row_batches(programs, given, keys, num, input_batch_size)
        if not axes:
            return map_compiled(all_rows, draws, key, given, batch_size=batch_size)
        if size not in programs:  # one program for all parts
            programs[size] = compile_chunk(programs["one draw"], take_rows(given, num, slice(size)))
        parts = []
        for start in range(0, num, size):
            part_key = jax.random.fold_in(key, start)
            part = take_rows(given, num, slice(start, start + size))
            parts.append(map_compiled(programs[size], draws, part_key, part, batch_size=batch_size))
        return {k: parts[0][k] if i is None else np.concatenate([p[k] for p in parts], 1 + i) for k, i in axes.items()}

    def _row_batches(self, programs, given, keys, num, input_batch_size) -> tuple[dict, int]:
        """``(axes, size)``: the axis of rows of each value, and rows of a batch; no axes where all go together."""
        if input_batch_size is not None and num <= input_batch_size:
            return {}, num
        most = most_at_once(num, largest_array(programs["traced"].jaxpr) // len(keys))  # rows of one draw
        size = most if input_batch_size is None else input_batch_size
        if num <= size:
            return {}, size
        try:
            axes, mixed = find_axes(programs["probe"], given, size, most, keys[0])
        except (TypeError, ValueError) as error:  # of a model that does not take fewer rows
            if input_batch_size is not None:
                raise ValueError(
                    f"input_batch_size={size}: the model cannot be evaluated at a part of the {num} rows ({error}). "
                    "Leave it None."
                ) from error
            return {}, size
        if mixed and input_batch_size is not None:
            raise ValueError(
                f"input_batch_size={size}: {mixed} cannot be put together from parts of the {num} rows: they depend on "
                "all of them at once, on the rows' numbers, or have no axis of them. Leave it None, compute what all "
                "rows share (a mean, say) outside the model, or leave the sites out of it."
            )
        return {} if mixed else axes, size

    def _traced(self, plates, draw, key, given):
        """``(trace, names of its weights, whether the model has random numbers of its own)`` at a draw."""
        args, kwargs, _ = given
        with (asked := own_keys()):
            trace = run_model(self.posterior.model, args, kwargs, key=key, substitute=draw)
        plates.update(plates_of(trace))
        return trace, weights_of(trace), asked.num > 0

    def _evaluation(self, plates, draw, key, *given) -> Evaluation:
        trace, weights, has_own_noise = self._traced(plates, draw, key, given)
        *_, inputs = given
        found = {k: s["value"] for k, s in trace.items() if is_output(s, draw, weights)}
        undrawn = [k for k in found if trace[k]["type"] == "sample" and not is_drawable(trace[k])]
        if undrawn:
            kinds = ", ".join(sorted({type(base_distribution(trace[k]["fn"])).__name__ for k in undrawn}))
            what = f"{undrawn} cannot be drawn, as {kinds} has no method sample(key, sample_shape=())"
            if set(undrawn) & set(self.from_prior):
                raise ValueError(f"{what}: pass draws of these sites.")
            if zeros := [k for k in undrawn if not trace[k]["is_observed"]]:
                what += f"; sites computed from {zeros} are those of zeros"
            warn(f"{what}. Functions are given.")
        found = {k: v for k, v in found.items() if k not in undrawn}
        observed = [k for k in found if trace[k]["type"] == "sample" and trace[k]["is_observed"]]
        keys = jax.random.split(jax.random.fold_in(key, 1), len(observed))
        # Observations are drawn anew. Sites that depend on them (a known noise, inputs) see the values observed.
        found |= {k: trace[k]["fn"](rng_key=key) for k, key in zip(observed, keys, strict=True)}
        distributions = {k: trace[k]["fn"] for k in found if trace[k]["type"] == "sample"}
        for name in distributions:
            if jnp.iscomplexobj(found[name]):
                raise TypeError(f"The site {name!r} is complex; densities are of real numbers.")
        is_noisy = has_own_noise or any(k in trace and k not in found for k in self.from_prior)
        return Evaluation(evaluate(functions_of(trace), inputs) | widened(found), distributions, is_noisy)


def function_draws(posterior: Posterior, args, kwargs, inputs) -> dict:
    """Draws [S, N, K] of the functions alone, at ``inputs``. Nothing of the size of the data is computed."""

    inputs = as_arrays(inputs)
    check_complete(posterior, args, kwargs, lambda: inputs)

    def one_draw(draw, _, args, kwargs, inputs):
        return function_values(posterior.model, draw, args, kwargs, inputs)

    args, kwargs, inputs = with_devices_of((args, kwargs, inputs), posterior.samples)
    return map_draws(one_draw, posterior.samples, (args, kwargs, inputs))


def deterministic_draws(posterior: Posterior, args, kwargs, names) -> dict:
    """Draws [S, ...] of deterministic sites of a model at these arguments, where it may lack some of them."""

    def one_draw(draw, key, args, kwargs):
        trace = run_model(posterior.model, args, kwargs, key=key, substitute=draw)
        return widened({k: trace[k]["value"] for k in names if k in trace})

    args, kwargs = with_devices_of((args, kwargs), posterior.samples)
    return map_draws(one_draw, posterior.samples, (args, kwargs))


def log_likelihood(posterior: Posterior, args, kwargs) -> dict:
    """Pointwise log-likelihood [S, N] of every observed site, at all rows of the data and recomputed functions.

    ``args`` include the targets. The functional prior and other factors are not observations and are left out, and so
    are weights that ``numpyro.handlers.condition`` fixes. A point under a mask, or with a scale of 0, has
    log-likelihood 0.

    Warns:
        RuntimeWarning: a ``numpyro.factor`` depends on the arguments, so that it may be a part of the likelihood.
    """

    check_complete(posterior, args, kwargs, dict)
    names = _factors_of_data(posterior, args, kwargs)
    if names:
        warn(
            f"The log-likelihood leaves out numpyro.factor {', '.join(map(repr, names))}, whose rows are not known, so "
            "that az.loo judges the observed sites alone. If it is a part of the likelihood, write it as a "
            "numpyro.sample site with obs= (for censored rows there is dist.RightCensoredDistribution)."
        )

    def one_draw(draw, key, args, kwargs):
        trace = run_model(posterior.model, args, kwargs, key=key, substitute=draw)
        return {k: _log_prob(s) for k, s in observed_sites(trace).items()}

    return map_draws(one_draw, posterior.samples, (args, kwargs))


def _log_prob(site):
    """The log densities of an observation's rows; 0 where a mask or a scale of 0 leaves a row out."""
    log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else jnp.where(site["scale"] != 0, log_prob, 0.0)


def _factors_of_data(posterior, args, kwargs) -> list[str]:
    """The ``numpyro.factor`` sites that depend on arrays among the model's arguments."""
    arrays, _, join = split_arrays((args, kwargs))
    draw = jax.device_put(taken(posterior.samples, 0))  # a model may index it by a traced argument

    def factors(given):
        args, kwargs = join(given["arrays"])
        with numpyro.validation_enabled(False):  # a draw may be NaN
            trace = run_model(posterior.model, args, kwargs, key=jax.random.key(0), substitute=draw)
        names = observed_sites(trace, factors=True).keys() - observed_sites(trace).keys()
        return {k: trace[k]["fn"].log_prob(trace[k]["value"]) for k in names}

    return sorted(k for k, used in sources(factors, {"arrays": arrays}).items() if used)


def as_arrays(inputs):
    if isinstance(inputs, dict):
        return {k: _as_inputs(x, f"inputs[{k!r}]") for k, x in inputs.items()}
    return _as_inputs(inputs, "inputs")


def _as_inputs(x, name):
    array = jnp.asarray(as_numbers(x, name))
    if not array.ndim:
        raise ValueError(f"{name} must be an array [N, D] of inputs, got {x!r}.")
    if not array.size:
        raise ValueError(f"{name} has no rows (shape {array.shape}).")
    return array


def is_output(site, draw, weights) -> bool:
    """Whether ``predict`` returns a site. Values that have draws, weights and auxiliary sites are left out."""
    if site["type"] not in ("sample", "deterministic") or site["name"] in weights:
        return False
    return site["type"] == "deterministic" or not (site["name"] in draw or site["infer"].get("is_auxiliary", False))
