"""The bridge to ArviZ, for 0.23 (InferenceData) and 1.x (DataTree); ArviZ is imported when called."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.infer import init_to_median

from numpyro_fspace._checks import check_count
from numpyro_fspace.model.checks.arguments import check_masks, known_values, not_finite
from numpyro_fspace.model.checks.sites import check_observations
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.model.functions import function_inputs, some_rows
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import counted, is_functional_prior, observed_sites, weights_of
from numpyro_fspace.posterior.arrays import named_arrays
from numpyro_fspace.posterior.arviz_datasets import Site, are_equal, check_dims, check_names, clean, datasets
from numpyro_fspace.posterior.completeness import check_complete
from numpyro_fspace.posterior.draw_batches import map_draws
from numpyro_fspace.posterior.function_draws import Evaluator, deterministic_draws, function_draws, log_likelihood
from numpyro_fspace.posterior.posterior import Posterior, as_posterior
from numpyro_fspace.posterior.prediction_warnings import warn_of_nan

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@entry_point
def to_arviz(
    source: NumPyroMCMC | Posterior,
    *,
    inputs: Float[np.ndarray | Array, "M D"] | dict | None = None,
    num_probes: int = 100,
    weights: bool = False,
    log_lik: bool = True,
    dims: dict[str, list[str]] | None = None,
    coords: dict[str, Any] | None = None,
) -> Any:
    """The ArviZ object of a run, with functions where ArviZ looks for parameters.

    Groups: ``posterior`` (latent and deterministic sites, and every network's function at probe inputs, so that
    ``az.summary``, ``az.rhat`` and ``az.ess`` judge functions), ``posterior_predictive``, ``log_likelihood`` (of each
    observation, at all rows of the data), ``observed_data``, ``constant_data`` (the model's other arrays and the probe
    inputs), ``sample_stats`` (``diverging`` and the run's ``extra_fields``; ``lp`` is minus
    the potential energy). The functional prior is no observation and
    appears in none of them. In names, '/' becomes '.', because ArviZ 1.x refuses '/'.

    Dimensions are named after the plates, as by ``az.from_numpyro``, so that variables of one plate share a dimension.

    What the likelihood leaves out (``numpyro.handlers.mask``, ``Distribution.mask``, a ``numpyro.handlers.scale`` of 0)
    is no data: such points are in none of ``observed_data``, ``log_likelihood`` and ``posterior_predictive``, and
    ``az.loo`` does not count them. The coordinates of the dimension say which points are left. If these are not whole
    rows of a table, they have one dimension, ``"{site}_point"``, with their places in the flattened site. Parts of a
    point that are masked (a mask inside ``to_event``) are NaN in ``observed_data``. If a mask depends on latent values,
    only the points that it leaves out in every draw are dropped. A point that some draws count is kept, and its
    log-likelihood is 0 in the other draws.

    A run that kept functions in place of weights (``fs.MCMC(..., functions_at=x)``) has only the groups ``posterior``,
    ``sample_stats`` and ``constant_data``.

    Deterministic sites of an ``MCMC`` object are those of its run; for a ``fs.Posterior``, whose arguments may be
    others than those of the run, they are computed anew.

    Draws of a checkpoint stay on disk; functions, log-likelihood and predictive draws are computed and kept in memory.

    Args:
        source: an ``MCMC`` object that has run, or a ``fs.Posterior`` with the arguments that it was fitted to.
        inputs: probe inputs [M, D], or a dict of arrays by name of function. If None, up to ``num_probes`` evenly
            spaced rows of the inputs at which the model evaluates each function.
        num_probes: maximum number of probe inputs, if ``inputs`` is None.
        weights: whether ``posterior`` also holds the networks' weights.
        log_lik: whether to compute the log-likelihood and posterior predictive draws (N · S numbers each).
        dims: by name of variable, the names of its dimensions after chain and draw. Other variables have the names of
            their plates, or else ArviZ's defaults.
        coords: by name of dimension, its coordinates.

    Returns:
        ``arviz.InferenceData`` (ArviZ 0.23) or ``xarray.DataTree`` (1.x).

    Raises:
        ValueError: ``source`` has not run, or lacks latent sites or arguments that its model needs; ``inputs`` are
            given for a run that kept functions; the model draws its own minibatch (unless ``log_lik=False``); ``dims``
            or ``coords`` are wrong; two names are equal once '/' is '.'; a site is named ``chain`` or ``draw``.
        TypeError: ``source`` is neither an ``MCMC`` object nor a ``Posterior``, or ``dims`` or ``coords`` is no dict.
        ImportError: ArviZ is missing.

    Example:
        >>> import arviz as az, numpyro_fspace as fs  # doctest: +SKIP
        >>> az.summary(fs.to_arviz(mcmc), var_names=["f"])  # doctest: +SKIP
    """
    _check_arviz()
    trouble = not_finite((), {"inputs": inputs}, "to_arviz")
    if trouble is not None:
        raise ValueError(trouble)
    check_count(num_probes, "num_probes")
    check_dims(dims, coords)
    if getattr(source, "functions_at", None) is not None:
        if inputs is not None:
            raise ValueError("to_arviz: this run kept its functions at functions_at, and has them at no other inputs.")
        found = as_posterior(source, functions=True)
        groups = {
            "posterior": _by_chain(found.samples, found.num_chains),
            "sample_stats": _stats(found),
            "constant_data": _probes(found.functions_at),
        }
        check_names(groups["posterior"])
        return _build(datasets(groups, {}, dims, coords))
    if isinstance(source, dict):
        raise TypeError("to_arviz needs the MCMC object, or fs.Posterior(model, draws, args=(x, y)), not draws alone.")
    found = as_posterior(source)
    model, chains, args, kwargs = found.model, found.num_chains, found.args, found.kwargs
    if not isinstance(source, NumPyroMCMC):
        _check_arguments(model, args, kwargs)
        check_masks(args, kwargs, "to_arviz")
    check_complete(found, args, kwargs, lambda: function_inputs(model, found.samples, args, kwargs))
    with known_values(model, args, kwargs, "to_arviz"):
        trace, observed, known, drawn = observations(model, args, kwargs)
        known = _known_in_any_draw(found, args, kwargs, known)
    if drawn and log_lik:
        raise ValueError(
            f"to_arviz: the model draws the rows of {drawn} itself, others at each call, so that log-likelihoods of "
            "different draws would not belong together. Take them from a numpyro.plate(..., subsample_size=...), or "
            "pass log_lik=False."
        )
    check_names([k for k, s in trace.items() if s["type"] != "plate"])
    hidden = set() if weights else set(weights_of(trace))
    computed = {k for k, s in trace.items() if s["type"] == "deterministic"}
    if isinstance(source, NumPyroMCMC):  # whose draws hold those of the same arguments
        computed -= set(found.samples)
    posterior = _by_chain({k: v for k, v in found.samples.items() if k not in hidden | computed}, chains)
    named = named_arrays(model, args, kwargs)
    given = {clean(k): _as_given(v, named.values()) for k, v in observed.items()}
    if inputs is None:
        inputs = {k: some_rows(x, num_probes) for k, x in function_inputs(model, found.samples, args, kwargs).items()}
    if log_lik:
        predictions = Evaluator(found).draws(jax.random.key(0), (args, kwargs), inputs)
    else:
        predictions = function_draws(found, args, kwargs, inputs) if len(inputs) else {}
        predictions |= deterministic_draws(found, args, kwargs, computed) if computed else {}
    warn_of_nan(predictions, found.samples)
    functions = {k for k, s in trace.items() if s["type"] == "network" or is_functional_prior(s)} | computed
    functions |= {k for k in predictions if k.startswith(tuple(f"{name}[" for name in functions))}  # parts of outputs
    posterior |= _by_chain({k: v for k, v in predictions.items() if k in functions}, chains)
    groups = {
        "posterior": posterior,
        "sample_stats": _stats(found),
        "observed_data": given,
        "constant_data": {k: v for k, v in named.items() if not any(are_equal(v, y) for y in given.values())},
    }
    groups["constant_data"] |= _probes(inputs)
    if log_lik and observed:
        groups["log_likelihood"] = _by_chain(log_likelihood(found, args, kwargs), chains)
        groups["posterior_predictive"] = _by_chain({k: v for k, v in predictions.items() if k in observed}, chains)
    named = {k: s for k, s in trace.items() if s["type"] in ("sample", "deterministic")}
    sites = {clean(k): Site(_plates(s), s["fn"].event_dim if "fn" in s else 0, known.get(k)) for k, s in named.items()}
    return _build(datasets(groups, sites, dims, coords))


def _check_arviz():
    try:
        import arviz  # noqa: F401
    except ImportError as error:
        raise ImportError('to_arviz needs ArviZ: pip install "numpyro_fspace[arviz]".') from error


def _build(groups):
    import arviz as az
    import xarray as xr

    return xr.DataTree.from_dict(groups) if int(az.__version__.split(".")[0]) >= 1 else az.InferenceData(**groups)


def _check_arguments(model, args, kwargs):
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"to_arviz: the posterior does not hold the arguments its model was fitted to (args, kwargs): {error}."
        ) from error


def _stats(found) -> dict:
    """The fields of the draws. ArviZ knows the potential energy by its negative, ``lp``."""
    named = dict(("lp", -v) if k == "potential_energy" else (k, v) for k, v in found.stats.items())
    return _by_chain(named, found.num_chains)


def _by_chain(draws: dict, chains: int) -> dict:
    """Draws [S, …] as [C, S / C, …], by the names that ArviZ takes."""
    arrays = {clean(k): np.asarray(v) for k, v in draws.items()}
    return {k: v.reshape(chains, len(v) // chains, *v.shape[1:]) for k, v in arrays.items()}


def observations(model, args, kwargs):
    """``(trace, observed, known, drawn)``: the model's sites, whose values are not to be read, the values of those
    observed, which parts of these the likelihood counts, and the names of those whose values differ from call to call,
    which ``observed`` does not hold.
    """
    arrays, _, join = split_arrays((args, kwargs))
    trace = {}

    @jax.jit  # so that nothing is computed but what is observed, which takes no network
    def observed(arrays):
        def values(seed, substitute):
            trace.update(run_model(model, *join(arrays), key=jax.random.key(seed), substitute=substitute))
            return {k: s["value"] for k, s in observed_sites(trace).items()}

        first = values(0, init_to_median)
        check_observations(trace)
        known = {k: counted(trace[k]) for k in first}
        again = values(1, {k: s["value"] for k, s in trace.items() if s["type"] == "sample" and k not in first})
        return first, known, {k: jnp.all((v == again[k]) | jnp.isnan(v)) for k, v in first.items()}

    given, known, is_same = jax.device_get(observed(arrays))
    drawn = sorted(k for k, same in is_same.items() if not same)
    return trace, {k: v for k, v in given.items() if k not in drawn}, known, drawn


def _known_in_any_draw(posterior, args, kwargs, known):
    """``known``, or where masks depend on latent values or keys: which points count in at least one of the draws."""

    def counts(draw, key, args, kwargs):
        trace = run_model(posterior.model, args, kwargs, key=key, substitute=draw)
        return {k: counted(trace[k]) for k in known}

    first = {"draw": {k: v[0] for k, v in posterior.samples.items()}, "key": jax.random.key(0)}
    if not depends_on(lambda values: counts(values["draw"], values["key"], args, kwargs), first):
        return known
    by_draw = map_draws(counts, posterior.samples, (args, kwargs))
    return {k: v.any(axis=0) for k, v in by_draw.items()}


def _plates(site) -> list:
    """The names of the plates along a site's first axes, None where there is none."""
    frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    if site["type"] == "deterministic":  # which need not have its plates' axes
        sizes = tuple(frame.size for frame in frames)
        return [clean(frame.name) for frame in frames] if np.shape(site["value"])[: len(sizes)] == sizes else []
    shape = site["fn"].batch_shape
    names = {frame.dim: clean(frame.name) for frame in frames if shape[frame.dim] == frame.size}
    return [names.get(axis - len(shape)) for axis in range(len(shape))]


def _probes(inputs) -> dict:
    """The probe inputs: one array if all functions share it, else one for each."""
    if not isinstance(inputs, dict):
        return {"probe_inputs": np.asarray(inputs)}
    arrays = {k: np.asarray(x) for k, x in inputs.items()}
    if not arrays:
        return {}
    first = next(iter(arrays.values()))
    if all(are_equal(x, first) for x in arrays.values()):
        return {"probe_inputs": first}
    return {f"probe_inputs_{clean(k)}": x for k, x in arrays.items()}


def _as_given(value, arrays):
    """The one of ``arrays`` that ``value`` is, in its own precision, if it is one of them.

    A truth value or a whole number is not the number that it was computed from.
    """

    def is_given(a):
        is_kept = value.dtype.kind in ("f", a.dtype.kind) or np.array_equal(a, value)
        return is_kept and are_equal(a.astype(value.dtype), value)

    return next((a for a in arrays if is_given(a)), value)
