"""What ``print_summary`` shows of a run: its functions at a few inputs, and its sites without the weights."""

from __future__ import annotations

import jax
import numpy as np
from numpyro.diagnostics import print_summary

from numpyro_fspace._checks import check_positive
from numpyro_fspace._xla import taken
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.functions import function_inputs, some_rows
from numpyro_fspace.posterior.function_draws import function_draws
from numpyro_fspace.posterior.model_structure import structure
from numpyro_fspace.posterior.posterior import as_posterior

#: Inputs of each function that are shown.
NUM_ROWS = 5


def print_functions(mcmc, prob: float, exclude_deterministic: bool):
    """Print NumPyro's summary of the functions and of all sites but weights, with a line on what it leaves out."""
    check_positive(prob, "prob")
    if prob >= 1:
        raise ValueError(f"prob={prob} must be between 0 and 1.")
    shown, left_out = _summarized(mcmc, exclude_deterministic)
    print_summary(shown, prob=prob)
    if left_out:
        print(left_out)
    fields = mcmc.get_extra_fields()
    if "diverging" in fields:
        print(f"Number of divergences: {int(fields['diverging'].sum())}")


def _summarized(mcmc, exclude_deterministic: bool) -> tuple[dict, str]:
    """``(draws [C, S, …] by name, a line on what they leave out)``.

    Args:
        mcmc: a run of a model, with all its draws.
        exclude_deterministic: whether deterministic sites are left out.
    """
    posterior, draws = as_posterior(mcmc), mcmc.get_samples(group_by_chain=True)
    args, kwargs = posterior.args, posterior.kwargs
    plan = structure(posterior.model, taken(draws, 0, 0), args, kwargs)
    latents = {k for k, s in plan.trace.items() if s["type"] == "sample"}
    shown = {k: v for k, v in draws.items() if k not in plan.weights and (k in latents or not exclude_deterministic)}
    num_weights = sum(v[0, 0].size for k, v in draws.items() if k in plan.weights)
    if not num_weights:
        return shown, ""
    functions: dict = {}
    inputs: dict = {}
    names = plan.monitored or plan.networks
    if not any(isinstance(leaf, OnDemand) for leaf in jax.tree.leaves((args, kwargs))):
        some = {k: np.stack([v[0, 0], v[-1, -1]]) for k, v in draws.items()}
        found = function_inputs(posterior.model, some, args, kwargs)
        inputs = {k: some_rows(np.asarray(x), NUM_ROWS) for k, x in found.items() if k in names}
    if inputs:
        functions = function_draws(posterior, args, kwargs, inputs)
        shape = next(iter(draws.values())).shape[:2]
        functions = {k: v.reshape(*shape, *v.shape[1:]) for k, v in functions.items() if k in inputs}
    shown |= functions
    if not shown:
        return draws, ""
    num_rows = max(map(len, inputs.values()), default=0)
    rows = f"{' and '.join(functions)} at {num_rows} rows of the data; " if functions else ""
    return shown, f"{rows}{num_weights} weights left out (print_summary(weights=True))."
