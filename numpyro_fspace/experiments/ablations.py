"""Ablations of the UCI regression: runs in which one setting is changed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np

from numpyro_fspace import metrics
from numpyro_fspace.experiments import uci
from numpyro_fspace.experiments.catalog import Experiment, Job, parse_setting
from numpyro_fspace.experiments.figures import with_curves
from numpyro_fspace.experiments.uci import UCIConfig

#: The runs are shorter than those of ``fspace run uci``, because there are many.
CONFIG = replace(uci.CONFIG, num_chains=2, num_warmup=500, num_samples=500)
SAMPLERS = ("fsghmc", "fsgld")
VARIANTS = {
    "num_samples": (8, 75),
    "num_train": (50, 150),
    "num_points": (10, 40, 400),
    "kernel": ("matern", "linear"),
    "num_gp_steps": (0, 10, 20, 100),
    "warm_start": (0.0,),
    "anchored": (False,),
    "preconditioner": ("prior_scale", "identity"),
    "step_size": (0.005, 0.02),
}
LEVELS = np.linspace(0.1, 0.9, 9)
#: Number of draws of a chain in a trace; number of test points at which f is traced.
NUM_TRACED, NUM_POINTS = 100, 3


def _methods(sampler):
    return sampler, *(f"{sampler}:{name}={value}" for name, values in VARIANTS.items() for value in values)


def run(job: Job[UCIConfig]) -> dict:
    """``"fsghmc:num_points=10"`` is a run of ``fspace run uci --method fsghmc`` with ten measurement points.

    ``num_samples`` is the number of draws of a chain, ``num_train`` that of training rows, ``num_points`` that of
    measurement points, and ``num_gp_steps`` that of training steps of the GP. ``warm_start``, ``anchored``,
    ``preconditioner`` and ``step_size`` (in the preconditioner's units) each disable a part of the warm-up.
    ``calibration_error`` is the mean distance between the levels 0.1, 0.2, …, 0.9 of central intervals and the shares
    of targets in them.
    """
    sampler, _, setting = job.method.partition(":")
    config = job.config.updated(dict([parse_setting(setting)])) if setting else job.config
    job = job._replace(method=sampler, config=config)
    problem, posterior = uci.fit_split(job)
    f, sigma = posterior.f, posterior.sigma
    assert f is not None and sigma is not None, "a sampler has draws"
    flat = f.reshape(-1, f.shape[-1])
    noise = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(job.seed), job.split), flat.shape))
    seen = metrics.calibration_curve(problem.data.y_test, flat + sigma.reshape(len(flat), -1) * noise, LEVELS)
    draws = np.unique(np.linspace(0, f.shape[1] - 1, NUM_TRACED).astype(int))
    points = np.linspace(0, f.shape[2] - 1, NUM_POINTS).astype(int)
    return {
        **uci.results(job, problem, posterior),
        "changed": dict([parse_setting(setting)]) if setting else {},
        "calibration_error": float(np.abs(seen - LEVELS).mean()),
        "curves": {"level": LEVELS, "coverage": seen, "draw": draws, "trace": f[:, draws][:, :, points].swapaxes(0, 2)},
    }


def picture(records):
    """A panel of mean calibration curves for each changed setting, and the traces of one run."""
    import matplotlib.pyplot as plt

    records = with_curves(records)
    sampler = records[0]["method"].partition(":")[0]
    changed = {line["method"].partition(":")[2].partition("=")[0] for line in records}
    variants = {name: values for name, values in VARIANTS.items() if name in changed}
    num_rows = 1 + len(variants) // 3
    figure, axes = plt.subplots(num_rows, 3, figsize=(10.5, 3.1 * num_rows), layout="constrained", squeeze=False)
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, 4))
    for ax, (name, values) in zip(axes.flat, variants.items(), strict=False):
        ax.plot([0, 1], [0, 1], color="gray", lw=0.6)
        _calibration(ax, records, sampler, "default", color="black", lw=2.0)
        for value, color in zip(values, colors, strict=False):
            _calibration(ax, records, f"{sampler}:{name}={value}", str(value), color=color)
        ax.set(title=name, xlabel="level", ylabel="share of targets inside", aspect="equal", xlim=(0, 1), ylim=(0, 1))
        ax.legend(frameon=False, fontsize="small")
    last, *spare = axes.flat[len(variants) :]
    _traces(last, next((line for line in records if line["method"] == sampler), records[0]))
    for ax in spare:
        ax.remove()
    return figure


def _calibration(ax, records, method, label, **style):
    curves = [line["curves"] for line in records if line["method"] == method]
    if curves:
        ax.plot(curves[0]["level"], np.mean([curve["coverage"] for curve in curves], 0), label=label, **style)


def _traces(ax, line):
    """f at some test points, with a shade for each chain."""
    trace, draw = np.array(line["curves"]["trace"]), line["curves"]["draw"]  # [points, draws, chains]
    for values, color in zip(trace, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        for number, chain in enumerate(values.T):
            ax.plot(draw, chain, color=color, lw=0.7, alpha=1.0 / (1 + number))
    ax.set(title=f"f at {len(trace)} test points, {trace.shape[2]} chains", xlabel="draw", ylabel="f")


#: RMSE of Wu, Xuan and Lu's tables 2, 8 and 10, by their nearest setting here.
PUBLISHED = {
    ("yacht", "fsghmc:num_samples=8"): 0.25,
    ("yacht", "fsghmc:num_samples=75"): 0.246,
    ("yacht", "fsghmc:num_points=40"): 0.297,
    ("yacht", "fsgld:num_samples=8"): 0.41,
    ("yacht", "fsgld:num_samples=75"): 0.409,
    ("yacht", "fsgld:num_points=40"): 0.496,
    ("boston", "fsghmc:num_samples=8"): 0.24,
    ("boston", "fsghmc:num_samples=75"): 0.270,
    ("boston", "fsghmc:num_points=40"): 0.290,
    ("boston", "fsgld:num_samples=8"): 0.36,
    ("boston", "fsgld:num_samples=75"): 0.392,
    ("boston", "fsgld:num_points=40"): 0.448,
}

EXPERIMENT = Experiment(
    summary="The effect of draws, training rows, measurement points, the kernel and its training on UCI sets.",
    run=run,
    config=CONFIG,
    methods=tuple(itertools.chain.from_iterable(map(_methods, SAMPLERS))),
    defaults=_methods("fsghmc"),
    datasets=("boston", "yacht", "concrete", "energy", "wine_red"),
    num_splits=uci.EXPERIMENT.num_splits,
    files=tuple(f"uci/{name}.npz" for name in ("boston", "yacht", "concrete", "energy", "wine_red")),
    minutes=1,
    columns={
        "rmse": "RMSE",
        "gp_rmse": "of the GP",
        "lpd": "lpd",
        "gp_lpd": "of the GP",
        "coverage90": "coverage",
        "calibration_error": "calibration error",
        "w2_gp": "W2 to the GP",
        "rhat_max": "R-hat",
        "ess_min": "smallest ESS",
        "temperature": "temperature",
        "num_diverging": "undone draws",
        "seconds": "seconds",
    },
    published={key: {"rmse": value} for key, value in PUBLISHED.items()},
    source="Wu, Xuan and Lu, tables 2, 8 and 10 (15 or 150 draws, other splits, a 2×10 network)",
    picture=picture,
)
