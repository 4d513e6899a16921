"""Time of a step of function-space variational inference."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
import tinygp
from numpyro.infer import SVI, Trace_ELBO

from numpyro_fspace import measurement
from numpyro_fspace.experiments.regression import Config, build_model, known_gp
from numpyro_fspace.variational import FunctionalELBO, mean_field

__all__ = ["bench_svi"]


def bench_svi(repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: the time of a step of GFSVI and that of a mean-field step, measured alternately.

    The problem is a 2×100 tanh network of one input with 8000 data, minibatches of 2000 and M = 500 uniform measurement
    points at each step. Times are median milliseconds over ten rounds, without compilation.
    """
    num_points, num_data, batch_size, num_turns = (20, 100, 50, 2) if quick else (500, 8000, 2000, 10)
    x = np.linspace(-1.0, 1.0, num_data, dtype=np.float32)[:, None]
    y = np.sin(5.0 * x[:, 0])
    gp = known_gp(tinygp.kernels.ExpSquared(0.3), 0.1, nugget=1e-3)
    config = Config(widths=(100, 100), batch_size=batch_size, noise_sd=0.1)
    points = measurement.uniform(-1.0, 1.0, num_points)
    steps: dict[str, Callable] = {}
    times: dict[str, list[float]] = {"gfsvi": [], "mean_field": []}
    for name, loss in {"gfsvi": FunctionalELBO(), "mean_field": Trace_ELBO()}.items():
        model = build_model(config, gp, points, functional=name == "gfsvi")
        svi = SVI(model, mean_field(model), optax.adam(1e-3), loss)
        state = svi.init(jax.random.key(repeat), x, y)
        update = jax.jit(svi.update)
        jax.block_until_ready(update(state, x, y))
        steps[name] = functools.partial(update, state, x, y)
    for _ in range(num_turns):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "benchmark": "svi",
        "repeat": repeat,
        "num_points": num_points,
        "batch_size": batch_size,
        "gfsvi_ms": medians["gfsvi"],
        "mean_field_ms": medians["mean_field"],
        "ratio": medians["gfsvi"] / medians["mean_field"],
    }
