"""UCI regression on the classic 90/10 splits, standardised on the training part."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import numpy as np

from numpyro_fspace import metrics
from numpyro_fspace.datasets import load_uci
from numpyro_fspace.experiments.records import record
from numpyro_fspace.experiments.regression import Config, fit, scores, training_points
from numpyro_fspace.priors import fit_gp

__all__ = ["FULL_BATCH", "run_split"]

#: Largest training set that is used whole at every gradient; larger ones by minibatches of ``BATCH``.
FULL_BATCH, BATCH = 2000, 500
#: Measurement points of the functional prior, and points the GP is trained on and conditioned on.
NUM_MEASUREMENT, NUM_GP = 300, 1500


def run_split(dataset: str, method: str, split: int, seed: int, *, quick: bool = False, config=None, progress=False):
    """One record: ``method`` on one split of ``dataset``, beside the exact GP of the functional prior's kernel.

    The GP (squared exponential with a lengthscale per input, noise) is trained by marginal likelihood on up to
    1500 training points. Its kernel is the functional prior at up to 300 training inputs; its noise centres the
    noise's prior.
    """
    data = load_uci(dataset, split)
    config = Config() if config is None else config
    if len(data.x_train) > FULL_BATCH and config.batch_size is None:
        config = replace(config, batch_size=BATCH)
    if quick:
        config = config.quick()
    key_gp, key_points, key_fit, key_scores = jax.random.split(jax.random.key(seed), 4)
    gp, reference = train_gp(data.x_train, data.y_train, key_gp, num_steps=100 if quick else 500)
    points = training_points(data.x_train, NUM_MEASUREMENT, key_points)
    exact = fit("gp", config, gp, None, *reference, data.x_test, None)
    posterior = exact
    if method != "gp":
        key = jax.random.fold_in(key_fit, split)
        posterior = fit(method, config, gp, points, data.x_train, data.y_train, data.x_test, key, progress=progress)
    result, gp_result = scores(posterior, data.y_test, key_scores), scores(exact, data.y_test, key_scores)
    rmse_raw, lpd_raw = metrics.to_raw_units(result["rmse"], result["lpd"], data.y_scale)
    w2 = metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2)
    return record(
        experiment="uci",
        dataset=dataset,
        method=method,
        split=split,
        seed=seed,
        rmse_raw=rmse_raw,
        lpd_raw=lpd_raw,
        seconds=posterior.seconds,
        num_gradients=posterior.num_gradients,
        num_diverging=posterior.num_diverging,
        gp_rmse=gp_result["rmse"],
        gp_lpd=gp_result["lpd"],
        w2_gp=w2,
        config=asdict(config),
        **result,
    )


def train_gp(x, y, key, *, num_steps: int = 500):
    """``(GPFit, (x, y))``: the GP trained on, and to be conditioned on, at most 1500 points."""
    key_rows, key_fit = jax.random.split(key)
    if len(x) > NUM_GP:
        rows = np.asarray(jax.random.permutation(key_rows, len(x))[:NUM_GP])
        x, y = x[rows], y[rows]
    return fit_gp(None, x, y, num_steps=num_steps, max_points=NUM_GP, key=key_fit), (x, y)
