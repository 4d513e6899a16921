"""A sine observed on both sides of a gap, under processes with different kernels."""

from __future__ import annotations

import jax
import numpy as np
import tinygp

from numpyro_fspace import measurement
from numpyro_fspace.datasets import sine
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import panels
from numpyro_fspace.experiments.methods import METHODS
from numpyro_fspace.experiments.one_dimension import COLUMNS, Problem, judge, panel
from numpyro_fspace.experiments.regression import Config, known_gp

#: Unit variance; the sine has period 1.
KERNELS = {
    "rbf": lambda kernels: kernels.ExpSquared(0.25),
    "rbf_short": lambda kernels: kernels.ExpSquared(0.1),
    "rbf_long": lambda kernels: kernels.ExpSquared(0.5),
    "matern12": lambda kernels: kernels.Exp(0.25),
    "periodic": lambda kernels: kernels.ExpSineSquared(scale=1.0, gamma=2.0),
}
NOISE, NUGGET = 0.1, 0.1
#: Nugget for variational methods. With a tenth of it, a network hardly moves from f = 0 under a periodic process.
VARIATIONAL_NUGGET = 1e-2
#: The function is scored on [-EDGE, EDGE]; measurement points are the data and uniform points there.
EDGE, NUM_POINTS, NUM_GRID = 1.5, 100, 201
CONFIG = Config(widths=(100, 100), num_chains=4, weight_sd=2.0, noise_sd=0.02, num_updates=6000, learning_rate=1e-2)


def run(job: Job[Config]) -> dict:
    """A method under one kernel, on the data of a seed (see ``one_dimension.judge``)."""
    key_data, *keys = jax.random.split(jax.random.key(job.seed), 4)
    x, y = (np.asarray(a) for a in sine(key_data, noise=NOISE))
    grid = np.linspace(-EDGE, EDGE, NUM_GRID, dtype=np.float32)[:, None]
    truth = np.sin(2 * np.pi * grid[:, 0])
    seen = (np.abs(grid[:, 0]) >= 0.5) & (np.abs(grid[:, 0]) <= 1.0)
    gp = known_gp(KERNELS[job.dataset](tinygp.kernels), NOISE, nugget=NUGGET)
    points = measurement.union(measurement.fixed(x), measurement.uniform(-EDGE, EDGE, NUM_POINTS))
    return judge(Problem(x, y, grid, truth, seen, gp, points, VARIATIONAL_NUGGET), job, keys)


EXPERIMENT = Experiment(
    summary="A sine observed on both sides of a gap, under processes with different kernels.",
    run=run,
    config=CONFIG,
    methods=tuple(method for method in METHODS if method != "svgp"),  # svgp trains its own kernel
    defaults=("gp", "gfsvi"),
    datasets=tuple(KERNELS),
    minutes=1,
    columns=COLUMNS,
    picture=lambda records: panels(records, panel),
    unused=("num_gp_steps", "max_lengthscale"),
)
