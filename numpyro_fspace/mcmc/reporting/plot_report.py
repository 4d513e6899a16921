"""``plot_report``: the picture of a run beside its report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpyro.distributions import constraints
from numpyro.infer import MCMC

from numpyro_fspace._checks import check_key
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.reporting.report import report
from numpyro_fspace.mcmc.reporting.report_table import Report
from numpyro_fspace.metrics import calibration_curve, reliability_curve
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.posterior.arviz_export import observations
from numpyro_fspace.posterior.diagnostics import diagnose
from numpyro_fspace.posterior.function_draws import Evaluator, log_likelihood
from numpyro_fspace.posterior.judged_quantities import quantities_of
from numpyro_fspace.posterior.plot_functions import pyplot
from numpyro_fspace.posterior.posterior import Posterior, as_posterior
from numpyro_fspace.posterior.thresholds import ESS_LIMIT, KINETIC_LIMIT, RHAT_LIMIT

if TYPE_CHECKING:
    from jaxtyping import Array, Key
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Draws of each chain whose likelihood is shown, and draws of all chains that make the calibration curve.
NUM_ENERGIES, NUM_PREDICTIONS = 100, 400
#: Levels of central intervals, bins of ranks, and the most classes of a site that is taken for one of classes.
LEVELS, NUM_BINS, MAX_CLASSES = np.linspace(0.05, 0.95, 19), 20, 50


@entry_point
def plot_report(
    mcmc: MCMC, *args: Any, found: Report | None = None, key: Key[Array, ""] | None = None, **kwargs: Any
) -> Figure:
    """Draw one figure on whether a run can be trusted, to go with ``fs.report``.

    Its six panels, with a color for each chain:

    1. trace: draws of the function value with the largest R-hat (of the site, if no function is judged);
    2. ranks of these draws among those of all chains, by chain. Chains that agree have flat lines; the band is what
       chance allows if the draws are independent;
    3. R-hat against the effective sample size of everything that is judged, with the limits;
    4. calibration: the share of targets in central intervals of the predictions, against the intervals' probability,
       or accuracy against confidence for classes. The band is what chance allows if all points are independent. With
       the data of the run the curve is too optimistic: give held-out data;
    5. energy: the log likelihood of the same data in the course of each chain, or the potential energy if the run
       kept it (``extra_fields=("potential_energy",)``);
    6. kinetic temperature of each chain, and configurational temperature, relative to the sampler's (SGLD, SGHMC,
       MCLMC and their functional forms).

    Args:
        mcmc: an ``MCMC`` object that has run, with any kernel.
        *args: arguments of the model with targets, of held-out data, say; those of the run by default.
        found: the result of ``fs.report`` if it is known already. None computes it for SGLD, SGHMC, MCLMC
            and their functional forms.
        key: random key of the predictions; None is ``jax.random.key(0)``.
        **kwargs: keyword arguments of the model.

    Returns:
        The figure, which is not shown.

    Raises:
        TypeError: ``mcmc`` is no ``MCMC`` object, ``found`` no report, or ``key`` no random key.
        ValueError: ``mcmc`` has not run, or kept functions in place of weights.
        ImportError: matplotlib is missing.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.5), obs=y)
        >>> x = jax.numpy.linspace(-1, 1, 20)[:, None]
        >>> mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=200, num_samples=300, num_chains=2,
        ...                chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, x[:, 0])
        >>> [ax.get_title() for ax in fs.plot_report(mcmc).axes][:3]
        ['trace of slope', 'ranks of slope', 'convergence']
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(f"plot_report draws runs of an MCMC object, got {type(mcmc).__name__}.")
    if found is not None and not isinstance(found, Report):
        raise TypeError(f"found must be the result of fs.report, got {type(found).__name__}.")
    key = jax.random.key(0) if key is None else key
    check_key(key, "key", single=True)
    plt = pyplot()
    posterior = as_posterior(mcmc)
    is_ours = isinstance(mcmc.sampler, SGMCMCKernel)
    if found is None and is_ours:
        found = report(mcmc)
    data = (args, kwargs) if args or kwargs else (posterior.args, posterior.kwargs)
    figure, axes = plt.subplots(2, 3, figsize=(12.0, 6.5), layout="constrained")
    _convergence(axes[0], mcmc, posterior)
    _calibration(axes[1, 0], posterior, data, key)
    _energy(axes[1, 1], mcmc, posterior, data)
    _temperature(axes[1, 2], found)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    if found is not None:
        number = len(found.advice)
        doubts = "no doubts" if not number else f"{number} doubt{'s' * (number > 1)}"
        diverged = "" if found.num_diverging is None else f", {found.num_diverging} draws diverged"
        figure.suptitle(f"{doubts} in print(fs.report(mcmc)){diverged}", fontsize="medium")
    return figure


def _convergence(axes, mcmc, posterior):
    """The first row: trace and ranks of what has the largest R-hat, and all R-hats and effective sample sizes."""
    draws, programs = mcmc.get_samples(group_by_chain=True), getattr(mcmc.sampler, "_programs", None)
    judged = quantities_of(posterior.model, draws, posterior.args, posterior.kwargs, programs=programs)
    points = [part for part in judged[:2] if part is not None]
    if not points:
        for ax in axes:
            _empty(ax, "nothing to judge")
        return
    found = [diagnose(*part) for part in points]
    worst = int(np.argmax(np.nan_to_num(found[0].rhat, nan=-1.0)))
    name, values = points[0].names[worst], np.asarray(points[0].draws[..., worst], np.float64)
    for chain, line in enumerate(values):
        axes[0].plot(line, lw=0.6, color=f"C{chain}")
    axes[0].set(title=f"trace of {name}", xlabel="draw")
    ranks = values.ravel().argsort().argsort().reshape(values.shape)
    edges = np.linspace(0, ranks.size, NUM_BINS + 1)
    expected = values.shape[1] / NUM_BINS
    for chain, line in enumerate(ranks):
        axes[1].stairs(np.histogram(line, edges)[0], edges, baseline=None, color=f"C{chain}", label=f"chain {chain}")
    band = 2.0 * np.sqrt(expected * (1.0 - 1.0 / NUM_BINS))
    axes[1].axhspan(max(0.0, expected - band), expected + band, color="0.5", alpha=0.15, lw=0)
    axes[1].set(title=f"ranks of {name}", xlabel="rank among all chains", ylim=(0, None))
    if len(values) <= 8:
        axes[1].legend(frameon=False, fontsize="small")
    for part, marker in zip(found, "os", strict=False):
        axes[2].plot(np.minimum(part.ess_bulk, part.ess_tail), part.rhat, marker, ms=3, color="C0", alpha=0.5)
    axes[2].axhline(RHAT_LIMIT, color="0.4", lw=0.8, ls="--")
    axes[2].axvline(ESS_LIMIT * len(values), color="0.4", lw=0.8, ls="--")
    axes[2].set(title="convergence", xlabel="effective sample size", ylabel="R-hat", xscale="log")


def _calibration(ax: Axes, posterior: Posterior, data, key):
    """Observed against nominal frequencies, a line for each observed site."""
    args, kwargs = data
    trace, observed, known, _ = observations(posterior.model, args, kwargs)
    some = _thinned(posterior, -(-len(_first(posterior)) // NUM_PREDICTIONS))
    predicted = Evaluator(some).draws(key, data, {}) if observed else {}
    fewest = 0
    for color, (name, y) in enumerate(observed.items()):
        kept = np.broadcast_to(known[name], np.shape(y)).ravel() & np.isfinite(np.asarray(y, float)).ravel()
        draws = _like(predicted[name], np.shape(y))[:, kept]
        y = np.ravel(y)[kept]
        if not y.size:
            continue
        fewest = y.size if not fewest else min(fewest, y.size)
        if _is_of_classes(trace[name]["fn"].support, y):
            classes = np.arange(1 + int(max(y.max(), draws.max())))
            probabilities = np.mean(draws[..., None] == classes, axis=0)
            curve = reliability_curve(probabilities, y.astype(int), num_bins=10)
            across, up = curve.confidence, curve.accuracy
            ax.set(xlabel="confidence", ylabel="accuracy")
        else:
            if getattr(trace[name]["fn"].support, "is_discrete", False):  # an interval of counts contains its ends
                noise = np.random.default_rng(0).uniform(-0.5, 0.5, size=(len(draws) + 1, len(y)))
                y, draws = y + noise[0], draws + noise[1:]
            across, up = LEVELS, calibration_curve(y, draws, LEVELS)
            ax.set(xlabel="probability of the interval", ylabel="targets inside")
        ax.plot(across, up, "o-", ms=3, lw=1.2, color=f"C{color}", label=name)
    if not fewest:
        _empty(ax, "no targets")
        return
    grid = np.linspace(0, 1, 50)
    width = 2.0 * np.sqrt(grid * (1 - grid) / fewest)
    ax.fill_between(grid, grid - width, grid + width, color="0.5", alpha=0.15, lw=0)
    ax.plot([0, 1], [0, 1], color="0.4", lw=0.8, ls="--")
    ax.set(title="calibration", xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=False, fontsize="small")


def _like(draws, shape) -> np.ndarray:
    """Draws [S, …] of a distribution that gives each of ``shape`` numbers the same draw where it has fewer axes."""
    axes = (1,) * (len(shape) - draws.ndim + 1)
    return np.broadcast_to(draws.reshape(len(draws), *axes, *draws.shape[1:]), (len(draws), *shape)).reshape(
        len(draws), -1
    )


def _is_of_classes(support, y) -> bool:
    """Whether targets are numbers of classes: 0 or 1, or integers of a known range."""
    is_bounded = hasattr(support, "upper_bound") or support is constraints.boolean
    is_discrete = bool(getattr(support, "is_discrete", False))
    return is_discrete and is_bounded and bool(y.min() >= 0) and bool(y.max() < MAX_CLASSES)


def _energy(ax: Axes, mcmc, posterior: Posterior, data):
    """The potential energy that the run kept, or the log likelihood of the data."""
    num_chains = posterior.num_chains
    if "potential_energy" in posterior.stats:
        values = np.reshape(posterior.stats["potential_energy"], (num_chains, -1))
        title, step = "potential energy", 1
    else:
        step = -(-(len(_first(posterior)) // num_chains) // NUM_ENERGIES)
        pointwise = log_likelihood(_thinned(posterior, step), *data)
        if not pointwise:
            _empty(ax, "no targets")
            return
        values = sum(np.reshape(v, (len(v), -1)).sum(1, dtype=np.float64) for v in pointwise.values())
        values, title = values.reshape(num_chains, -1), "log likelihood"
    for chain, line in enumerate(values):
        ax.plot(step * np.arange(len(line)), line, lw=0.8, color=f"C{chain}")
    ax.set(title=f"energy: {title}", xlabel="draw")


def _temperature(ax: Axes, found: Report | None):
    """Temperatures relative to the sampler's, where there are any."""
    if found is None:
        _empty(ax, "no temperature of this kernel")
        return
    labels: list[str] = []
    if not np.isnan(found.temperature).all():
        for chain, value in enumerate(found.temperature):
            ax.bar(chain, value, color=f"C{chain}", width=0.7)
            labels.append(f"{chain}" if chain else "chain 0")
    if found.configurational is not None:
        for name in ("mean", "leading"):
            value = getattr(found.configurational, name)
            error = 2.0 * value * getattr(found.configurational, f"{name}_error")
            ax.errorbar(len(labels), value, error, fmt="o", color="0.2", capsize=3)
            labels.append("config." if name == "mean" else "leading")
    if not labels:
        _empty(ax, "not known for this run")
        return
    for height, style in ((1.0, "-"), (KINETIC_LIMIT, "--")):
        ax.axhline(height, color="0.4", lw=0.8, ls=style)
    ax.set(title="temperature", xticks=range(len(labels)), xticklabels=labels, ylim=(0, None))


def _empty(ax: Axes, text: str):
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color="0.4")
    ax.set(xticks=[], yticks=[])


def _first(posterior: Posterior):
    return next(iter(posterior.samples.values()))


def _thinned(posterior: Posterior, step: int) -> Posterior:
    """Every ``step``-th draw of each chain, the same number of each."""
    num = len(_first(posterior)) // posterior.num_chains
    rows = (num * np.arange(posterior.num_chains)[:, None] + np.arange(0, num, step)).ravel()
    return replace(posterior, samples={k: v[rows] for k, v in posterior.samples.items()}, stats={})
