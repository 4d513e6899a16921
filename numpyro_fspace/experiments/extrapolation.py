"""The papers' 1-D extrapolation: 20 points in two clusters, with no data between and outside of them."""

from __future__ import annotations

import jax
import numpy as np
import tinygp

from numpyro_fspace import measurement
from numpyro_fspace.datasets import extrapolation, extrapolation_grid, extrapolation_truth
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import panels
from numpyro_fspace.experiments.methods import METHODS
from numpyro_fspace.experiments.one_dimension import COLUMNS, Problem, judge, panel
from numpyro_fspace.experiments.regression import Config, known_gp

NOISE = 0.5
#: The papers' network with known noise (as for the exact GP). The prior of the weights is so wide that the functional
#: prior dominates; the nugget allows for the wiggles of a network with wide weights.
CONFIG = Config(widths=(100, 100), num_chains=4, weight_sd=2.0, noise_sd=0.02)
NUGGET = 0.1


def run(job: Job[Config]) -> dict:
    """A method on the data of a seed (see ``one_dimension.judge``).

    There are M = 40 measurement points: the 20 inputs of the data and 20 uniform points on [-1, 1], drawn anew at each
    gradient.
    """
    key_data, *keys = jax.random.split(jax.random.key(job.seed), 4)
    x, y = (np.asarray(a) for a in extrapolation(key_data))
    inputs = extrapolation_grid()
    grid, truth = np.asarray(inputs), np.asarray(extrapolation_truth(inputs))
    seen = (np.abs(grid[:, 0]) >= 0.25) & (np.abs(grid[:, 0]) <= 0.75)
    gp = known_gp(tinygp.kernels.ExpSquared(0.1), NOISE, nugget=NUGGET)
    points = measurement.union(measurement.fixed(x), measurement.uniform(-1.0, 1.0, 20))
    return judge(Problem(x, y, grid, truth, seen, gp, points), job, keys)


EXPERIMENT = Experiment(
    summary="A 1-D function from 20 points in two clusters: predictions between and outside of them.",
    run=run,
    config=CONFIG,
    methods=METHODS,
    defaults=("gp", "fsghmc", "fsgld", "sghmc", "gfsvi"),
    datasets=("extrapolation",),
    minutes=1,
    columns=COLUMNS,
    picture=lambda records: panels(records, panel),
    unused=("num_gp_steps", "max_lengthscale"),
)
