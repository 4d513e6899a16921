"""Ocean currents: a vector field from twenty velocities, under a Helmholtz Gaussian process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import tinygp
from flax import linen as nn

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import load_drifters
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import with_curves
from numpyro_fspace.experiments.function_posterior import convergence, density_scores
from numpyro_fspace.experiments.methods import fit
from numpyro_fspace.experiments.networks import hidden_layers
from numpyro_fspace.experiments.regression import Config, noisy_model, random_functions
from numpyro_fspace.experiments.tables import readable
from numpyro_fspace.priors import GPFit, GPPrior, Helmholtz, fit_gp

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Initial parameters of the marginal likelihood: variances of the two parts of the velocity in (m/s)², lengthscales in
#: degrees, variance of the noise.
START = {"potential": 0.01, "potential_scale": 1.0, "stream": 0.03, "stream_scale": 1.0}
START_NOISE = 0.02
#: Number of panels in a row of the picture; size of a panel in inches.
NUM_COLUMNS, PANEL = 4, (3.4, 1.9)
#: Numbers of longitudes and latitudes of the measurement points, which are 160 as in the paper.
NUM_POINTS = (16, 10)


@dataclass(frozen=True)
class OceanConfig(Config):
    """Settings of a run: those of ``Config``, for two networks, the potential and the stream function.

    Attributes:
        nugget: nugget of the functional prior, relative to the variance of the process.
    """

    QUICK: ClassVar[Mapping[str, object]] = {**Config.QUICK, "num_gp_steps": 200, "num_chains": 1, "num_warmup": 200}

    nugget: float = 0.01


CONFIG = OceanConfig(
    num_chains=2,
    num_warmup=300,
    num_samples=300,
    num_gp_steps=800,
    num_updates=500,
    weight_scale=2.0,
    noise_sd=0.05,
    calibrated=True,
)


def kernel(params: Mapping) -> Helmholtz:
    """Squared exponentials. ``potential`` and ``stream`` are the variances that the two parts give a component of f."""
    parts = []
    for name in ("potential", "stream"):
        lengthscale = params[f"{name}_scale"]
        parts.append(params[name] * lengthscale**2 * tinygp.kernels.ExpSquared(lengthscale))
    return Helmholtz(*parts)


@lru_cache(maxsize=1)
def prepare(num_gp_steps: int):
    """The data and the GP trained on them, cached for the next method."""
    data = load_drifters()
    gp = fit_gp(kernel, data.x, data.y, params=START, noise_variance=START_NOISE, num_steps=num_gp_steps)
    return data, gp


def velocity_network(config: Config, center, lengthscale: float, speed: float):
    """``(init, apply)`` of s (grad Φ + rot Ψ)((x - c) / ℓ), Φ and Ψ networks, for ``fs.random_module``.

    Args:
        config: hidden widths and activation of both networks.
        center: c [2], in degrees.
        lengthscale: ℓ in degrees, the unit of the networks' inputs.
        speed: s in m/s, the unit of their slopes.
    """
    network = nn.Sequential([*hidden_layers(config), nn.Dense(1)])

    def init(key, shape):
        keys = jax.random.split(key)
        return {
            k: network.init(one, jnp.zeros((1, *shape))) for k, one in zip(("potential", "stream"), keys, strict=True)
        }

    def apply(weights, x):
        def slope(name, place):
            return jax.grad(lambda at: network.apply(weights[name], at[None])[0, 0])(place)

        def velocity(place):
            potential, stream = slope("potential", place), slope("stream", place)
            return speed * jnp.stack([potential[0] + stream[1], potential[1] - stream[0]])

        return jax.vmap(velocity)((x - center) / lengthscale)

    return init, apply


def _build(config: Config, gp: GPFit, points, *, functional: bool):
    """A model of the two networks with a log-normal noise prior and, if ``functional``, the trained GP as prior."""
    speed = float(np.sqrt(gp.params["potential"] + gp.params["stream"]))
    center = np.asarray(points(jax.random.key(0))).mean(0)
    network = velocity_network(config, center, float(gp.params["stream_scale"]), speed)
    function = random_functions(config, network, gp.prior, points, functional=functional, dependent=True)
    return noisy_model(config, gp, function)


def run(job: Job[OceanConfig]) -> dict:
    """A method on the twenty drifters, scored at the 544 mean currents.

    ``mse`` and ``rmse`` are over both components, in m/s. ``gibbs`` is the mean log density of a component over draws
    and points (the paper's expected log-likelihood), and ``lpd`` is that of the mixture over draws, in nats. ``w2_gp``
    is the mean distance of the components to those of the exact GP.
    """
    config = job.config
    data, gp = prepare(config.num_gp_steps)
    variance = float(gp.params["potential"] + gp.params["stream"])
    gp = replace(gp, prior=GPPrior(gp.prior.kernel, nugget=config.nugget * variance, num_outputs=2))
    exact = fit("gp", config, gp, (data.x, data.y), data.grid)
    posterior = exact
    key_fit, key_scores = jax.random.split(jax.random.key(job.seed))
    if job.method != "gp":
        settings = {"points": measurement.fixed(_lattice(data.grid)), "key": key_fit, "build": _build}
        posterior = fit(job.method, config, gp, (data.x, data.y), data.grid, progress=job.progress, **settings)
    result = density_scores(posterior, data.currents, key_scores)
    return {
        **result,
        "mse": result["rmse"] ** 2,
        "w2_gp": metrics.gaussian_w2(*(a.ravel() for a in (*_moments(posterior), *_moments(exact)))),
        "sigma": float(np.mean(np.asarray(posterior.sigma))),
        **convergence(posterior),
        **posterior.cost,
        "curves": {
            "mean": posterior.f_mean,
            "grid": data.grid,
            "currents": data.currents,
            "shape": data.shape,
            "x": data.x,
            "y": data.y,
        },
    }


def _lattice(grid) -> np.ndarray:
    """The measurement points: a lattice over the bounding box of the grid."""
    axes = [np.linspace(low, high, num) for low, high, num in zip(grid.min(0), grid.max(0), NUM_POINTS, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)


def _moments(posterior):
    return posterior.f_mean, posterior.f_sd**2


def picture(records: Sequence[Mapping]) -> Figure:
    """The truth, and the mean field of each method with its squared error below, from one record for each method.

    Raises:
        ValueError: no record has curves.
    """
    import matplotlib.pyplot as plt

    fields: dict = {}
    for line in with_curves(records):
        fields.setdefault(line["method"], {name: np.array(curve) for name, curve in line["curves"].items()})
    truth = next(iter(fields.values()))
    fields = {"currents and drifters": truth | {"mean": truth["currents"]}, **fields}
    errors = [((field["mean"] - field["currents"]) ** 2).sum(-1).reshape(field["shape"]) for field in fields.values()]
    top = max(float(np.quantile(error, 0.99)) for error in errors)
    num_columns = min(NUM_COLUMNS, len(fields))
    num_rows = 2 * -(-len(fields) // num_columns)
    size = (PANEL[0] * num_columns, PANEL[1] * num_rows)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    figure.subplots_adjust(wspace=0.05, hspace=0.2)
    images = []
    for i, ((name, field), error) in enumerate(zip(fields.items(), errors, strict=True)):
        upper, lower = axes[2 * (i // num_columns) :, i % num_columns][:2]
        upper.set_title(readable(name), fontsize=10)
        upper.quiver(*field["grid"].T, *field["mean"].T, color="#0072B2", scale=7.0, width=0.003)
        upper.quiver(*field["x"].T, *field["y"].T, color="#D55E00", scale=7.0, width=0.005)
        if i:
            longitude, latitude = (axis.reshape(field["shape"]) for axis in field["grid"].T)
            images.append(lower.pcolormesh(longitude, latitude, error, cmap="magma_r", vmin=0.0, vmax=top))
            lower.plot(*field["x"].T, "o", color="#0072B2", ms=2)
    for ax in axes.flat:
        if not ax.has_data():
            ax.set_axis_off()
    figure.colorbar(images[0], ax=axes, fraction=0.02, pad=0.02, label="squared error, (m/s)²")
    return figure


#: Cinquin and Bamler, table 3: expected log-likelihood and mean squared error (printed with a minus sign before each).
PUBLISHED = {"gfsvi": (-6.627, 0.021), "tfsvi": (-22.651, 0.034), "gp": (-0.507, 0.013)}

EXPERIMENT = Experiment(
    summary="Currents of the Gulf of Mexico from twenty drifters, under a Helmholtz Gaussian process.",
    run=run,
    config=CONFIG,
    methods=("gp", "fsghmc", "fsgld", "sghmc", "sgld", "nuts", "gfsvi", "tfsvi", "gwi", "fbnn", "bbb", "ensemble"),
    defaults=("gp", "fsghmc", "fsgld", "sghmc", "gfsvi", "tfsvi"),
    datasets=("gulf",),
    files=("drifters/gulfdrifters_gpjax.npz",),
    minutes=1,
    columns={
        "mse": "MSE",
        "gibbs": "expected log-likelihood",
        "lpd": "lpd",
        "coverage90": "coverage",
        "w2_gp": "W2 to the GP",
        "rhat_max": "R-hat",
        "seconds": "seconds",
    },
    published={("gulf", method): {"gibbs": gibbs, "mse": mse} for method, (gibbs, mse) in PUBLISHED.items()},
    source="Cinquin and Bamler, table 3",
    picture=picture,
    unused=("batch_size", "noise_factor", "max_lengthscale"),
)
