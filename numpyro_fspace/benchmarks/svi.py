"""Time of a step of function-space variational inference."""

from __future__ import annotations

import jax
import numpy as np
import optax
import tinygp
from numpyro.infer import SVI, Trace_ELBO

from numpyro_fspace import measurement
from numpyro_fspace.benchmarks.problems import turns
from numpyro_fspace.experiments.regression import Config, build_model, known_gp
from numpyro_fspace.variational import FunctionalELBO, mean_field


def bench_svi(repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: the time of a step of GFSVI and that of a mean-field step, measured alternately.

    The problem is a 2×100 tanh network of one input with 8000 data, minibatches of 2000 and M = 500 uniform measurement
    points at each step. Times are median milliseconds over ten rounds, without compilation.
    """
    num_points, num_data, batch_size = (20, 100, 50) if quick else (500, 8000, 2000)
    x = np.linspace(-1.0, 1.0, num_data, dtype=np.float32)[:, None]
    y = np.sin(5.0 * x[:, 0])
    gp = known_gp(tinygp.kernels.ExpSquared(0.3), 0.1, nugget=1e-3)
    config = Config(widths=(100, 100), batch_size=batch_size, noise_sd=0.1)
    points = measurement.uniform(-1.0, 1.0, num_points)

    def step(loss, *, functional):
        """``run(key)``: a step from the initial state; the key is not used."""
        model = build_model(config, gp, points, functional=functional)
        svi = SVI(model, mean_field(model), optax.adam(1e-3), loss)
        state, update = svi.init(jax.random.key(repeat), x, y), jax.jit(svi.update)
        return lambda key: jax.block_until_ready(update(state, x, y))

    runs = {"gfsvi": step(FunctionalELBO(), functional=True), "mean_field": step(Trace_ELBO(), functional=False)}
    wall = turns(runs, repeat, quick=quick, num_turns=10)[1]
    return {
        "benchmark": "svi",
        "repeat": repeat,
        "num_points": num_points,
        "batch_size": batch_size,
        "gfsvi_ms": 1e3 * wall["gfsvi"],
        "mean_field_ms": 1e3 * wall["mean_field"],
        "ratio": wall["gfsvi"] / wall["mean_field"],
    }
