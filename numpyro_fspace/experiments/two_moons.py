"""Two moons: classification in the plane with a GP prior over the logits."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import two_moons
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import panels
from numpyro_fspace.experiments.function_posterior import convergence
from numpyro_fspace.experiments.methods import EXACT_DENSITY, FUNCTIONAL, METHODS, fit
from numpyro_fspace.experiments.networks import hidden_layers
from numpyro_fspace.experiments.regression import Config, random_functions
from numpyro_fspace.priors import GPPrior, dirichlet_targets, fit_gp

#: Number of classes, of test points, and of points of the plane along an axis.
NUM_CLASSES, NUM_TEST, NUM_GRID = 2, 1000, 60
#: Corners of the plane, and the distance from all data beyond which a point counts as far.
LOW, HIGH, FAR = (-2.5, -2.0), (3.5, 2.5), 1.0
CONFIG = Config(widths=(100, 100), weight_scale=3.0, calibrated=True, num_chains=4, num_warmup=500, num_samples=500)
#: Nugget of the functional prior, relative to the variance of the process; measurement points besides the data.
NUGGET, NUM_UNIFORM = 1e-2, 50
#: Number of points along an axis of the lattice on which a functional prior is calibrated.
NUM_LATTICE = 11


def run(job: Job[Config]) -> dict:
    """A method on 100 points of two moons with noise 0.1.

    The functional prior is a squared exponential GP over both logits, trained on the Dirichlet targets of the labels.
    ``accuracy``, ``lpd`` (the mean log probability), ``brier`` and ``ece`` are those of 1000 new points. ``entropy`` is
    the mean entropy of the predicted classes at these points, and ``entropy_far`` is that at grid points more than 1
    away from all data. ``"gp"`` is scikit-learn's Laplace approximation of the same GP.
    """
    key_data, key_test, key_fit = jax.random.split(jax.random.key(job.seed), 3)
    x, labels = (np.asarray(a) for a in two_moons(key_data))
    x_test, labels_test = (np.asarray(a) for a in two_moons(key_test, num=NUM_TEST))
    plane = _grid(NUM_GRID)
    distance = np.sqrt(((plane[:, None] - x) ** 2).sum(-1)).min(1)
    where = np.concatenate([x_test, plane])
    probs, posterior = posterior_probs(job.method, job.config, (x, labels), where, key_fit, progress=job.progress)
    seen, far = probs[:NUM_TEST], probs[NUM_TEST:][distance > FAR]
    return {
        "lpd": -metrics.nll(seen, labels_test),
        "accuracy": metrics.accuracy(seen, labels_test),
        "brier": metrics.brier(seen, labels_test),
        "ece": metrics.ece(seen, labels_test),
        "entropy": float(metrics.entropy(seen).mean()),
        "entropy_far": float(metrics.entropy(far).mean()),
        **({} if posterior is None else posterior.cost | convergence(posterior, slice(NUM_TEST))),
        "curves": {"x": x, "labels": labels, "probs": probs[NUM_TEST:, 1]},
    }


def _grid(num: int) -> np.ndarray:
    """A grid of num × num points of the plane, [num², 2]."""
    axes = [np.linspace(low, high, num, dtype=np.float32) for low, high in zip(LOW, HIGH, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)


def posterior_probs(method, config, data, x_new, key, *, progress=False):
    """Probabilities of the classes at x_new, [N, K], and the posterior of the logits (None for ``"gp"``)."""
    x, labels = data
    targets, variances = dirichlet_targets(labels, NUM_CLASSES)
    mean = float(targets.mean())
    gp = fit_gp(None, x, targets - mean, noise_variance=variances)
    if method == "gp":
        return _laplace_gp(gp, x, labels, x_new), None
    variance = float(gp.params["variance"])
    prior = GPPrior(gp.prior.kernel, mean=mean, nugget=NUGGET * variance, num_outputs=NUM_CLASSES)
    points = measurement.union(measurement.fixed(x), measurement.uniform(LOW, HIGH, NUM_UNIFORM))
    if method in EXACT_DENSITY:
        points = measurement.fixed(np.asarray(points(jax.random.key(0))))
    if config.calibrated and method in FUNCTIONAL:
        points = measurement.fixed(_grid(NUM_LATTICE))
    gp = replace(gp, prior=prior)
    posterior = fit(method, config, gp, data, x_new, points=points, key=key, build=_build, progress=progress)
    f = posterior.f.reshape(-1, *posterior.f.shape[2:])
    return np.asarray(jax.nn.softmax(f, -1)).mean(0), posterior


def _build(config: Config, gp, points, *, functional: bool):
    network = nn.Sequential([*hidden_layers(config), nn.Dense(NUM_CLASSES)])
    function = random_functions(config, network, gp.prior, points, functional=functional)

    def model(x, y=None):
        f = function(x.shape[-1])
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f(x)), obs=y)

    return model


def _laplace_gp(gp, x, labels, x_new):
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    # The difference of two independent logits has twice their variance.
    kernel = ConstantKernel(2.0 * float(gp.params["variance"])) * RBF(np.asarray(gp.params["lengthscale"]))
    return GaussianProcessClassifier(kernel, optimizer=None).fit(x, labels).predict_proba(x_new)


def _panel(ax, curves):
    """Probability of class 1, from red (0) to blue (1), and the data."""
    plane, shape = _grid(NUM_GRID), (NUM_GRID, NUM_GRID)
    first, second, probs = (part.reshape(shape) for part in (plane[:, 0], plane[:, 1], curves["probs"]))
    ax.contourf(first, second, probs, levels=np.linspace(0.0, 1.0, 11), cmap="RdBu")
    for label, color in ((0, "#8b0000"), (1, "#00008b")):
        seen = curves["x"][curves["labels"] == label].T
        ax.scatter(*seen, s=8, color=color, edgecolors="white", linewidths=0.3, label=f"class {label}")


EXPERIMENT = Experiment(
    summary="Classification in the plane: sure at the data, undecided far from them.",
    run=run,
    config=CONFIG,
    methods=tuple(method for method in METHODS if method != "svgp"),
    defaults=("gp", "fsghmc", "gfsvi", "laplace"),
    datasets=("two_moons",),
    minutes=1,
    columns={
        "accuracy": "accuracy",
        "lpd": "log probability",
        "brier": "Brier",
        "ece": "ECE",
        "entropy": "entropy",
        "entropy_far": "entropy, far",
        "rhat_max": "R-hat",
    },
    picture=lambda records: panels(records, _panel),
    unused=("batch_size", "num_gp_steps", "noise_sd", "noise_factor", "max_lengthscale"),
)
