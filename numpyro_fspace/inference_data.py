"""The bridge to ArviZ, for 0.23 (InferenceData) and 1.x (DataTree); ArviZ is imported when called."""

from __future__ import annotations

import inspect

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_median

from numpyro_fspace.prediction import is_observation, log_likelihood, predict
from numpyro_fspace.primitives import full_plates

__all__ = ["to_arviz"]

#: Names ArviZ knows the kernels' fields by.
SAMPLE_STATS = {"potential_energy": "lp"}


def to_arviz(mcmc, *, inputs=None, num_probes: int = 100, weights: bool = False, log_lik: bool = True):
    """The ArviZ object of a run, with functions where ArviZ looks for parameters.

    Groups: ``posterior`` (latent and deterministic sites, and every network's function at probe inputs, so that
    ``az.summary``, ``az.rhat`` and ``az.ess`` judge functions), ``posterior_predictive``, ``log_likelihood``
    (per observation, full data), ``observed_data``, ``constant_data`` (the model's other arrays),
    ``sample_stats`` (``diverging`` and the run's ``extra_fields``). The functional prior is no observation and
    appears in none of them. Names with '/', which ArviZ 1.x refuses, get a '.' instead.

    Args:
        mcmc: an ``MCMC`` object that has run.
        inputs: probe inputs [M, D]; up to ``num_probes`` evenly spaced rows of the model's first array if None.
        num_probes: how many, if ``inputs`` is None.
        weights: whether ``posterior`` also holds the networks' weights.
        log_lik: whether to compute the log-likelihood and posterior predictive draws (N · S numbers each).

    Returns:
        ``arviz.InferenceData`` (ArviZ 0.23) or ``xarray.DataTree`` (1.x).

    Raises:
        ValueError: if ``mcmc`` has not run.

    Example:
        >>> import arviz as az, numpyro_fspace as fs  # doctest: +SKIP
        >>> az.summary(fs.to_arviz(mcmc), var_names=["f"])  # doctest: +SKIP
    """
    if mcmc.last_state is None:
        raise ValueError("The MCMC object has no draws yet: call run first.")
    chains, args, kwargs = mcmc.num_chains, mcmc._args, mcmc._kwargs
    trace = _trace(mcmc.sampler.model, args, kwargs)
    hidden = set() if weights else {k for k, s in trace.items() if "fspace" in s.get("infer", {})}
    samples = mcmc.get_samples(group_by_chain=True)
    posterior = {_clean(k): np.asarray(v) for k, v in samples.items() if k not in hidden}
    observed = {_clean(k): np.asarray(s["value"]) for k, s in trace.items() if is_observation(s)}
    named = _named_arrays(mcmc.sampler.model, args, kwargs)
    probes = _probes(named, inputs, num_probes)
    key = jax.random.fold_in(_first_key(mcmc.last_state.rng_key), 1)
    predictions = predict(mcmc, key, *args, inputs=probes, **kwargs) if log_lik or probes is not None else {}
    functions = {k for k, s in trace.items() if s["type"] in ("network", "functional_prior")}
    posterior |= {_clean(k): _by_chain(v, chains) for k, v in predictions.items() if k in functions}
    groups = {
        "posterior": posterior,
        "sample_stats": {
            SAMPLE_STATS.get(k, k): -np.asarray(v) if k == "potential_energy" else np.asarray(v)
            for k, v in mcmc.get_extra_fields(group_by_chain=True).items()
            if not isinstance(v, dict | tuple)
        },
        "observed_data": observed,
        "constant_data": {k: v for k, v in named.items() if not any(_same(v, o) for o in observed.values())},
    }
    if probes is not None:
        groups["constant_data"]["probe_inputs"] = probes
    if log_lik and observed:
        pointwise = log_likelihood(mcmc, *args, **kwargs)
        groups["log_likelihood"] = {_clean(k): _by_chain(v, chains) for k, v in pointwise.items()}
        names = {k for k, s in trace.items() if is_observation(s)}
        new = {_clean(k): _by_chain(v, chains) for k, v in predictions.items() if k in names}
        groups["posterior_predictive"] = new
    return _build({k: v for k, v in groups.items() if v})


def _build(groups):
    import arviz as az

    if int(az.__version__.split(".")[0]) >= 1:
        return az.from_dict(groups)
    return az.from_dict(**groups)


def _trace(model, args, kwargs):
    seeded = handlers.seed(full_plates(model), jax.random.key(0))
    return handlers.trace(handlers.substitute(seeded, substitute_fn=init_to_median)).get_trace(*args, **kwargs)


def _named_arrays(model, args, kwargs):
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        names = []
    names += [f"arg_{i}" for i in range(len(names), len(args))]
    named = dict(zip(names, args, strict=False)) | kwargs
    return {k: np.asarray(v) for k, v in named.items() if isinstance(v, np.ndarray | jax.Array) and np.ndim(v)}


def _probes(named, inputs, num_probes):
    if inputs is not None:
        return np.asarray(inputs)
    if not named:
        return None
    first = next(iter(named.values()))
    rows = np.unique(np.linspace(0, len(first) - 1, min(num_probes, len(first))).astype(int))
    return first[rows]


def _same(a, b):
    return a.shape == b.shape and np.array_equal(a, b)


def _by_chain(values, chains):
    return values.reshape(chains, -1, *values.shape[1:])


def _clean(name):
    return name.replace("/", ".")


def _first_key(keys):
    from numpyro.util import is_prng_key

    return keys if is_prng_key(keys) else keys[0]
