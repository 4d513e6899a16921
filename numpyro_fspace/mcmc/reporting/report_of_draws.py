"""What a report says of the draws alone: their convergence, and the whole report of a run by another kernel."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from numpyro_fspace._xla import taken
from numpyro_fspace.mcmc.reporting.report_table import Report
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.posterior.convergence_doubts import convergence_doubts
from numpyro_fspace.posterior.diagnostics import diagnose
from numpyro_fspace.posterior.judged_quantities import Quantities, quantities_of
from numpyro_fspace.posterior.model_structure import structure
from numpyro_fspace.posterior.posterior import as_posterior
from numpyro_fspace.posterior.product_priors import product_doubts, product_shares
from numpyro_fspace.posterior.rhat_ess import standstill

#: What helps where longer runs do not.
STACK = " Chains that stay apart can be weighted by their predictions: fs.diagnostics.stack_chains(mcmc)."


def diagnosed(parts):
    """``(diagnostics, doubts)``: the diagnostics of each part that is judged, None for None; doubts of convergence."""
    diagnostics = [None if part is None else diagnose(*part) for part in parts]
    found = [part for part in diagnostics if part is not None]
    still = [standstill(np.moveaxis(part.draws, 2, 0)) for part in parts if part is not None]
    return diagnostics, convergence_doubts(found, np.min(still, axis=0)) if found else []


def convergence_of(judged: Quantities, num_chains: int):
    """``(functions, sites, doubts)``: the diagnostics of both, and doubts about convergence."""
    (functions, sites), doubts = diagnosed(judged[:2])
    is_several = num_chains > 1
    doubts = [one._replace(text=one.text + STACK) if is_several and one.about == "R-hat" else one for one in doubts]
    return functions, sites, doubts


def report_of_draws(mcmc, args, kwargs, *, inputs=None) -> Report:
    """The report of a run by a kernel that is not ours, such as NUTS; what only our kernels know is NaN or None."""
    posterior, draws = as_posterior(mcmc), mcmc.get_samples(group_by_chain=True)
    model = posterior.model
    judged = quantities_of(model, draws, args, kwargs, inputs=inputs)
    functions, sites, doubts = convergence_of(judged, posterior.num_chains)
    diverging = mcmc.get_extra_fields().get("diverging")
    accept_prob = getattr(mcmc.last_state, "mean_accept_prob", np.nan)
    unknown = np.full(posterior.num_chains, np.nan)
    shares, left_out = {}, judged.left_out
    if structure(model, taken(draws, 0, 0), args, kwargs).priors:
        try:
            shares = product_shares(ModelPotential(model, args, kwargs, key=jax.random.key(0)))
        except ValueError as error:  # a model that our kernels refuse, with discrete sites, say
            left_out = (*left_out, f"the product with the weights' prior ({error})")
    found = Report(
        functions,
        sites,
        left_out,
        num_diverging=None if diverging is None else int(np.sum(diverging)),
        temperature=unknown,
        configurational=None,
        acceptance=float(np.mean(accept_prob)),
        noise_share=np.nan,
        weighted_noise_share=np.nan,
        drift=unknown,
        shortfall=unknown,
        product_shares=shares,
        advice=(),
    )
    lines = [doubt.text for doubt in doubts]
    if found.num_diverging:
        lines.append(
            f"{found.num_diverging} of {np.size(diverging)} draws diverged: the posterior is too steep somewhere for "
            "this step size, and draws avoid the place. Raise target_accept_prob, use a longer warm-up, keep scales "
            "away from 0 by their priors, and give a functional prior a larger nugget."
        )
    return replace(found, advice=(*lines, *product_doubts(shares)))
