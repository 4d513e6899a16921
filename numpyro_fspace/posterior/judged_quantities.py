"""The quantities whose convergence is judged: functions, parameters of likelihoods, and latent sites but weights.

Weights are left out, since hidden units can be exchanged. So are networks that enter the likelihood through another
network alone, since their outputs can be exchanged too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import one_program, taken
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.functions import evaluate, function_inputs, functions_of, some_rows
from numpyro_fspace.model.programs.cache import cached_program
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import counted, is_functional_prior, is_masked, subsampled_plates
from numpyro_fspace.posterior.arrays import joined
from numpyro_fspace.posterior.draw_batches import compile_chunk, map_compiled
from numpyro_fspace.posterior.judged_draws import KINDS, PLACES, JudgedDraws, judged_draws
from numpyro_fspace.posterior.model_structure import Structure, likelihood_parameters, structure
from numpyro_fspace.posterior.thresholds import MIN_RUN

#: The most draws of each chain, evenly spaced, and the most entries of each site.
MAX_DRAWS, MAX_ENTRIES = 1000, 100


class Quantities(NamedTuple):
    """The quantities of a run whose convergence is judged; None where there are none of the kind.

    Attributes:
        functions: the model's functions, each at several kinds of inputs.
        others: latent sites other than weights, and parameters of likelihoods that depend on several networks.
        left_out: what is not judged, in words.
    """

    functions: JudgedDraws | None
    others: JudgedDraws | None
    left_out: tuple[str, ...]


def quantities_of(
    model,
    draws,
    args,
    kwargs,
    *,
    inputs=None,
    num_points: int = 100,
    num_others: int = 30,
    programs: dict | None = None,
) -> Quantities:
    """The quantities of a run: their draws, at most 1000 of each chain.

    Args:
        model: the NumPyro model.
        draws: draws of its sites, [C, S, …], which may lie on disk.
        args, kwargs: its arguments, with the targets.
        inputs: where functions are judged, [N, …] or a dict of them by name of function. None judges each at
            ``num_points`` of the rows that the model gives it, and at ``num_others`` points of each other kind: the
            measurement points of its prior, and rows whose columns come from different rows of the data.
        num_points, num_others: see ``inputs``.
        programs: keeps the compiled programs for further runs of the same model.

    Raises:
        ValueError: if ``inputs`` names something that is not a function of the model.
    """
    programs = {} if programs is None else programs
    num_draws = next(iter(draws.values())).shape[1]
    step = -(-num_draws // MAX_DRAWS)
    draws = _every(draws, step) if step > 1 else draws
    parts = structure(model, taken(draws, 0, 0), args, kwargs)
    latents = {k for k, s in parts.trace.items() if s["type"] == "sample" and not s["is_observed"]}
    missing = sorted(latents - set(draws) - set(parts.priors))
    draws = {k: v for k, v in draws.items() if k in latents}
    names = [] if missing else _chosen(parts, inputs)
    others = {k: v for k, v in draws.items() if k not in parts.weights}
    masked = [k for k in others if is_masked(parts.trace[k]["fn"])]
    if masked:
        others |= _without_masked(model, {k: others.pop(k) for k in masked}, draws, args, kwargs)
    left_out = [f"{k} (it reaches the data through another function)" for k in parts.networks if k not in parts.direct]
    if parts.weights:
        taken_for = f", with {', '.join(sorted(parts.by_hand))}" if parts.by_hand else ""
        left_out.append(f"weights (units can be exchanged{taken_for})")
    if missing:
        left_out.append(f"functions (the draws of {', '.join(missing)} were not kept)")
    on_disk = any(isinstance(leaf, OnDemand) for leaf in jax.tree.leaves((args, kwargs)))
    functions: dict = {}
    places: dict = {}
    row_numbers: dict = {}
    if names:
        if inputs is None:
            first, last = taken(draws, 0, 0), taken(draws, -1, -1)
            ends = {k: np.stack([first[k], last[k]]) for k in draws}
            arrays, static, _ = split_arrays((args, kwargs))
            shapes = tuple((a.shape, str(a.dtype)) for a in arrays)
            program = cached_program(programs, static, ("inputs of functions", shapes), {})
            known = {} if on_disk else function_inputs(model, ends, args, kwargs, programs=program)
            at = _kinds({k: np.asarray(x) for k, x in known.items() if k in names}, num_points, num_others)
            row_numbers = {k: some_rows(np.arange(len(known[k])), num_points) for k in at[""]}
            why = "they are on disk: give inputs=" if on_disk else "its inputs are not known: give inputs="
            left_out += [f"{k} at the data ({why})" for k in names if k not in known]
        else:
            at = {"": inputs if isinstance(inputs, dict) else dict.fromkeys(names, inputs)}
        num = num_others if inputs is None else 0
        given = args, kwargs, jax.tree.map(jnp.asarray, at), row_numbers
        found, places = _by_chain(partial(_function_values, model, num), draws, given, programs, ("functions", num))
        functions = {k: f for name in names for k, f in found.items() if _is_of(k, name)}
    is_likelihood_judged = parts.needs_likelihood and not missing
    if is_likelihood_judged and on_disk:
        left_out.append("what enters the likelihood (the data are on disk)")
    elif is_likelihood_judged:
        sizes = {size for size, _ in subsampled_plates(parts.trace).values()}
        rows = some_rows(np.arange(sizes.pop()), num_points) if len(sizes) == 1 else None
        roots = frozenset(parts.networks) - parts.composed
        key = "likelihood", None if rows is None else tuple(rows), roots
        found, also = _by_chain(partial(_likelihood_values, model, rows, roots), draws, (args, kwargs), programs, key)
        places |= also
        others = others | {k: v for k, v in found.items() if (v != v[:1, :1]).any()}  # a known scale is not judged
    judged = judged_draws(functions, places=places), judged_draws(others, MAX_ENTRIES, places=places)
    return Quantities(*judged, tuple(left_out))


def _without_masked(model, masked: dict, draws, args, kwargs) -> dict:
    """Draws of masked sites, with zeros in place of the entries that the mask excludes, as ``obs_mask=`` does.

    Sites that are masked altogether are omitted.
    """

    arrays, _, join = split_arrays((args, kwargs))

    @jax.jit
    def counts(draw, arrays):
        trace = run_model(model, *join(arrays), key=jax.random.key(0), substitute=draw)
        return {k: counted(trace[k]) for k in masked}

    found = jax.device_get(counts(taken(draws, 0, 0), arrays))
    return {k: np.where(found[k], np.asarray(v), 0.0) for k, v in masked.items() if found[k].any()}


def quantities_in_predictions(predictions: dict, num_chains: int, find_structure: Callable) -> JudgedDraws | None:
    """Functions and observations among predictions [S, …], by chain; None if there are too few draws or one chain."""
    num = len(next(iter(predictions.values()), ()))
    if num_chains < 2 or num < num_chains * MIN_RUN or num % num_chains:
        return None
    parts = find_structure()
    drawn = [k for k, s in parts.trace.items() if s["type"] == "sample" and not is_functional_prior(s)]
    named = {k for k in predictions if k in drawn or any(_is_of(k, name) for name in parts.monitored)}
    step = -(-num // num_chains // MAX_DRAWS)
    by_chain = {k: predictions[k].reshape(num_chains, -1, *predictions[k].shape[1:])[:, ::step] for k in sorted(named)}
    return judged_draws(by_chain, MAX_ENTRIES)


def _chosen(parts: Structure, inputs) -> list:
    """Names of the functions that are judged: all that ``inputs`` names, or those that the structure says."""
    known = list(dict.fromkeys([*parts.priors, *parts.networks]))
    if inputs is None:
        return parts.monitored
    if not known:
        raise ValueError(
            "inputs: the model has no gp_network, random_module or functional_prior: there is no f to judge."
        )
    if not isinstance(inputs, dict):
        return parts.monitored or parts.networks
    if not inputs.keys() <= set(known):
        raise ValueError(f"inputs: report judges {sorted(known)}, got inputs of {sorted(inputs)}.")
    return [k for k in known if k in inputs]


def _kinds(known: dict, num_points: int, num_others: int) -> dict:
    """``{kind: {function: inputs}}``; labels are the function's name and the kind."""
    return {
        "": {k: some_rows(x, num_points) for k, x in known.items()},
        KINDS[1]: {k: _permuted(x, num_others) for k, x in known.items() if _has_columns(x)},
    }


def _has_columns(x) -> bool:
    return len(x) > 1 and np.size(x[0]) > 1


def _permuted(x, num: int):
    """``num`` rows whose columns come from different rows of x."""
    columns = x.reshape(len(x), -1)
    rows = np.random.default_rng(0).integers(len(x), size=(num, columns.shape[1]))
    return columns[rows, np.arange(columns.shape[1])].reshape(num, *x.shape[1:])


def _function_values(model, num_points, draw, _, *given) -> dict:
    """The functions at a draw: at their inputs by kind, and at ``num_points`` measurement points; and their places.

    Inputs at the data are the ``rows`` of those that the model gives a function.
    """
    args, kwargs, at, rows = given
    trace = run_model(model, args, kwargs, key=jax.random.key(0), substitute=draw)
    at, numbers = dict(at), {"": rows}
    if num_points:
        points = {k: s["fn"].points(jax.random.key(1)) for k, s in trace.items() if is_functional_prior(s)}
        points |= {k: s["points"] for k, s in trace.items() if s["type"] == "network" and "points" in s}
        at[KINDS[2]] = {k: some_rows(x, num_points) for k, x in points.items()}
        numbers[KINDS[2]] = {k: some_rows(np.arange(len(x)), num_points) for k, x in points.items()}
    functions = functions_of(trace)
    found: dict = {}
    for kind, name, x in ((kind, name, x) for kind, inputs in at.items() for name, x in inputs.items()):
        values = {k + kind: f for k, f in evaluate(functions, {name: x}).items()}
        known = numbers.get(kind, {}).get(name)
        has_rows = {k: known is not None and f.shape[:1] == known.shape for k, f in values.items()}
        found |= values | {k + PLACES: known[:, None] for k in values if has_rows[k]}
    return found


def _likelihood_values(model, rows, roots, draw, _, *given) -> dict:
    """Parameters of the likelihoods at a draw, at the data and where the functions ``roots`` take permuted inputs.

    ``rows`` are those of the data that are taken, or None for all of them.
    """
    args, kwargs = given
    found: dict = {}
    kinds: dict = {"": lambda x: x}
    if roots:
        kinds[KINDS[1]] = lambda x: _permuted(x, len(x)) if _has_columns(x) else x
    for kind, change in kinds.items():

        def changed(name, fn, _, change=change):
            return (lambda x: fn(change(x))) if name in roots else fn

        settings = {"hook": changed, "networks": True, "rows": rows}
        trace = run_model(model, args, kwargs, key=jax.random.key(0), substitute=draw, **settings)
        for k, v in likelihood_parameters(trace, draw).items():
            some = some_rows(np.arange(v.size), MAX_ENTRIES)
            places = np.stack(np.unravel_index(some, v.shape), axis=1) if v.ndim else np.zeros((1, 0), int)
            if rows is not None and v.shape[:1] == rows.shape:
                places[:, 0] = rows[places[:, 0]]
            found |= {k + kind: v.ravel()[some], k + kind + PLACES: places}
    return found


@one_program
def _every(draws, step: int) -> dict:
    """The last of every ``step`` draws [C, S, …]."""
    return {k: v[:, ::-step][:, ::-1] for k, v in draws.items()}


def _by_chain(fn, draws, given: tuple, programs: dict, key: tuple) -> tuple[dict, dict]:
    """``fn`` at every draw, [C, S, …], and the places of its numbers, which are the same at all draws.

    Draws that lie on disk are evaluated a chain at a time.

    ``programs`` keeps its program under ``key``, which is to tell it from other functions of the same model.
    """
    arrays, static, _ = split_arrays(given)
    places = [id(a) for a in arrays]
    key = *key, is_nested(), tuple(map(places.index, places))  # which of the arguments are the same array
    program = cached_program(programs, static, key, compile_chunk(fn, given, is_quick=True))

    def values(some):
        return map_compiled(program, some, jax.random.key(0), given)

    shape = next(iter(draws.values())).shape[:2]
    if any(isinstance(v, np.memmap) for v in draws.values()):
        parts = [values({k: v[chain] for k, v in draws.items()}) for chain in range(shape[0])]
        found = {k: np.stack([part[k] for part in parts]) for k in parts[0]}
    else:
        found = {k: v.reshape(*shape, *v.shape[1:]) for k, v in values(joined(draws)).items()}
    return found, {k.removesuffix(PLACES): found.pop(k)[0, 0] for k in list(found) if k.endswith(PLACES)}


def _is_of(label: str, name: str) -> bool:
    """Whether a label is that of a function, of a part of its output, or of it at other inputs."""
    return label == name or label.startswith((f"{name}[", f"{name} at "))
