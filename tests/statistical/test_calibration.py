"""Simulation-based calibration of data → model → ``fs.MCMC`` → ``fs.predict``, on data of the model's own joint law.

A functional prior is part of that law: (w, σ, y) come from p0(w) P0(f(X_M; w)) p(σ) p(y | f, σ) / Z, so the weights do
not come from p0(w). For linear features that law is Gaussian and drawn exactly; for a network it is drawn by long
chains of NUTS without data. Each simulation ranks six quantities of the truth among 99 draws, thinned to near
independence: f at three held-out inputs, a new observation, σ, and the log joint density, which sees errors of all
parameters together [Modrák et al. 2023]. Errors anywhere show: potential, warm-up, sampler, constraints, predictions.

A right sampler fails with probability 1.4e-4 at most (by the exact tails of multinomial counts, at both sizes), plus
what its bias adds. The power against wrong noise is computed in ``test_power``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from support.broken import HEALTHY, Faults, broken
from support.sbc import joint_p_value, p_values, plot_ecdf, power

import numpyro_fspace as fs
from numpyro_fspace.sgmcmc.preconditioners import Diagonal

#: Some of 400 runs warn of heat (1 on the linear problem, 22 on the network) or of few effective draws. All count.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The draws are doubtful:RuntimeWarning"),
]
#: Runs of broken samplers warn of more.
WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")

X = np.linspace(-1.0, 1.0, 10, dtype=np.float32)[:, None]
X_NEW = np.array([[-1.2], [0.1], [0.8]], np.float32)
POINTS = np.linspace(-1.5, 1.5, 7, dtype=np.float32)[:, None]
LENGTHSCALE, NUGGET = 0.8, 0.05
GP = fs.GPPrior(tinygp.kernels.ExpSquared(LENGTHSCALE), nugget=NUGGET)
NOISE, NOISE_SD = 0.3, 0.3
NUM_DRAWS, NUM_QUANTITIES = 99, 6
FALSE_ALARM, REJECTED = 1e-4, 1e-6
#: Number of simulations and bins: for every night, and for every run.
NIGHTLY, QUICK = (400, 10), (60, 5)
#: Frequencies of sines and cosines: eight features.
FREQUENCIES = np.arange(1.0, 5.0, dtype=np.float32)
WRONG_NOISE = {"20 % too large": 1.2, "20 % too small": 0.8}


def linear(w, x):
    """f(x) = φ(x)ᵀ w."""
    return jnp.concatenate([jnp.sin(x * FREQUENCIES), jnp.cos(x * FREQUENCIES)], 1) @ w["w"]


def network(w, x):
    """Six hidden tanh units."""
    return jnp.tanh(x @ w["a"] + w["b"]) @ w["c"] + w["d"]


def make_model(function, shapes, weight_sd):
    """f with normal weights of these shapes, under the GP at fixed points; normal observations of unknown scale."""
    net = ((lambda key, x: {k: jnp.zeros(shape) for k, shape in shapes.items()}), function)

    def model(x, y=None):
        f = fs.random_module("net", net, input_shape=1, prior=dist.Normal(0.0, weight_sd))
        f = fs.functional_prior("f", f, GP, fs.measurement.fixed(POINTS))
        sigma = numpyro.sample("sigma", dist.LogNormal(math.log(NOISE), NOISE_SD))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x), sigma), obs=y)

    return model


def draw_linear(num, rng):
    """Exact draws of w, whose precision is I + Φ_Mᵀ (K + nugget)⁻¹ Φ_M."""
    size = 2 * len(FREQUENCIES)
    phi = np.asarray(linear({"w": np.eye(size, dtype=np.float32)}, POINTS), np.float64)
    covariance = np.exp(-0.5 * ((POINTS - POINTS.T) / LENGTHSCALE) ** 2) + NUGGET * np.eye(len(POINTS))
    precision = np.eye(size) + phi.T @ np.linalg.solve(covariance, phi)
    return {"w": rng.normal(size=(num, size)) @ np.linalg.inv(np.linalg.cholesky(precision))}


def draw_network(num, rng, num_chains=10, thinning=20):
    """Draws of the weights by chains of NUTS without data, so far apart that they are nearly independent."""
    settings = {"num_samples": thinning * -(-num // num_chains), "num_chains": num_chains, "thinning": thinning}
    kernel = NUTS(handlers.block(NETWORK.model, hide=["y"]), init_strategy=fs.model.init_to_network)
    mcmc = MCMC(kernel, num_warmup=500, chain_method="vectorized", progress_bar=False, **settings)
    mcmc.run(jax.random.key(rng.integers(2**31)), X)
    draws = mcmc.get_samples()
    f = fs.predict(draws, jax.random.key(0), X_NEW, model=NETWORK.model)["net"]
    found = fs.diagnostics.function_diagnostics(f.reshape(num_chains, -1, len(X_NEW)))
    assert found.max_rhat < 1.05
    assert found.ess_bulk.min() > 0.7 * len(f), "draws of the prior are not independent"
    rows = rng.permutation(len(f))[:num]
    return {k.removeprefix("net."): np.asarray(v)[rows] for k, v in draws.items() if k != "sigma"}


class Problem(NamedTuple):
    """A function of weights and inputs, its model, draws of the weights from the model's law without data, and a run.

    That is, its draws of warm-up, and the gradient steps after which draws of fSGHMC are nearly independent.
    """

    function: Callable
    model: Callable
    draw: Callable
    num_warmup: int
    num_steps: int


LINEAR = Problem(linear, make_model(linear, {"w": (2 * len(FREQUENCIES),)}, 1.0), draw_linear, 200, 20)
SHAPES = {"a": (1, 6), "b": (6,), "c": (6,), "d": ()}
NETWORK = Problem(network, make_model(network, SHAPES, 1.5), draw_network, 600, 40)


def ranks(problem, kernel, num, seed=0, num_samples=200, num_chains=2):
    """Ranks [num, Q] in 0, …, 99 of the truth's quantities among those of draws by ``kernel(model)``.

    Also the bulk ESS of f over the number of draws, before they are thinned: the median over 50 runs and all inputs.
    """
    function, model, draw, num_warmup, _ = problem
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(lambda a: np.asarray(a, np.float32), draw(num, rng))
    sigma = (NOISE * np.exp(NOISE_SD * rng.normal(size=num))).astype(np.float32)
    f = jax.vmap(lambda w: function(w, np.concatenate([X, X_NEW])))(weights)
    y = (f + sigma[:, None] * rng.normal(size=f.shape)).astype(np.float32)
    y_train, truth = y[:, : len(X)], {f"net.{k}": v for k, v in weights.items()} | {"sigma": sigma}

    settings = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    mcmc = fs.MCMC(kernel(model), chain_method="vectorized", progress_bar=False, **settings)
    runs = []
    for i, one in enumerate(y_train):
        mcmc.run(jax.random.fold_in(jax.random.key(seed), i), X, one)
        runs.append(jax.device_get(mcmc.get_samples()))
    draws = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    total = num_chains * num_samples
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), draws)
    new = fs.predict(flat, jax.random.key(seed), X_NEW, model=model)
    new = {k: v.reshape(num, total, len(X_NEW)) for k, v in new.items()}

    joint = jax.jit(jax.vmap(lambda draw, y: log_density(model, (X, y), {}, draw)[0]))
    density = np.asarray(joint(flat, np.repeat(y_train, total, 0))).reshape(num, total)
    among = [new["net"], new["y"][..., :1], draws["sigma"][..., None], density[..., None]]
    at_truth = [f[:, len(X) :], y[:, len(X), None], sigma[:, None], np.asarray(joint(truth, y_train))[:, None]]
    among, at_truth = np.concatenate(among, -1), np.concatenate(at_truth, -1)
    thinned = among[:, :: total // (NUM_DRAWS + 1)][:, :NUM_DRAWS]
    f = new["net"][:50].reshape(-1, num_chains, num_samples, len(X_NEW))
    ess = np.median([fs.diagnostics.function_diagnostics(one).ess_bulk for one in f]) / total
    return np.sum(thinned < at_truth[:, None], 1), ess


def judged(problem, kernel=None, num=NIGHTLY[0], faults=HEALTHY):
    """Ranks of a sampler with these faults, whose thinned draws are nearly independent; by default fSGHMC.

    It samples all weights: of the linear problem only the noise would be left if they were integrated out.
    """
    kernel = kernel or all_weights(problem)
    with broken(faults, Diagonal(1.0)):
        found, ess = ranks(problem, kernel, num)
    assert ess > 0.5, "every fourth draw is not nearly independent"
    return found


def all_weights(problem, **settings):
    return partial(fs.fSGHMC, num_steps=problem.num_steps, marginalize=False, **settings)


def joint_p(*args, size=NIGHTLY, **kwargs):
    num, num_bins = size
    return joint_p_value(judged(*args, num=num, **kwargs), NUM_DRAWS, num_bins)


def without_functional_prior(model):
    return fs.SGHMC(handlers.block(model, hide=["f"]))


def test_power():
    """Against draws too wide or too narrow for a posterior of nine parameters, those of the linear problem."""
    for sd_ratio in WRONG_NOISE.values():
        assert power(9, sd_ratio, *NIGHTLY, NUM_QUANTITIES, REJECTED) > 0.9999
    assert power(9, 2.0**-0.5, *QUICK, NUM_QUANTITIES, REJECTED) > 0.9999
    assert power(9, 1.0, *QUICK, NUM_QUANTITIES, FALSE_ALARM) < 1.01 * FALSE_ALARM


def test_rates_of_the_judge():
    """On exact normal draws: false alarms at most at their level, and the power that was computed."""
    rng, num_studies, (num, num_bins) = np.random.default_rng(0), 400, QUICK

    def rate(sd_ratio, level):
        rejected = 0
        for _ in range(num_studies):
            truth = rng.chisquare(9, (num, 1, NUM_QUANTITIES))
            draws = sd_ratio**2 * rng.chisquare(9, (num, NUM_DRAWS, NUM_QUANTITIES))
            truth[..., 1:] *= sd_ratio**2  # draws of the others are right
            rejected += joint_p_value(np.sum(draws < truth, 1), NUM_DRAWS, num_bins) < level
        return rejected / num_studies

    assert rate(1.0, 0.05) < 0.05 + 4 * math.sqrt(0.05 / num_studies)
    assert abs(rate(1.2, 1e-4) - power(9, 1.2, *QUICK, NUM_QUANTITIES, 1e-4)) < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The draws are doubtful:RuntimeWarning")  # each simulation is short
def test_quick():
    """Sixty simulations see a sampler whose noise is √ε in place of √(2ε), if no Metropolis test corrects it."""
    assert joint_p(LINEAR, size=QUICK) > FALSE_ALARM
    untested = all_weights(LINEAR, metropolis=False)
    assert joint_p(LINEAR, untested, size=QUICK, faults=Faults(noise=2.0**-0.5)) < REJECTED


@pytest.mark.nightly
@pytest.mark.parametrize("problem", [LINEAR, NETWORK], ids=["linear", "network"])
def test_calibrated(problem):
    assert joint_p(problem) > FALSE_ALARM


@pytest.mark.nightly
@pytest.mark.parametrize("problem", [LINEAR, NETWORK], ids=["linear", "network"])
def test_calibrated_with_the_last_layer_integrated_out(problem):
    assert joint_p(problem, partial(fs.fSGHMC, num_steps=problem.num_steps, marginalize=True)) > FALSE_ALARM


@WARNS
@pytest.mark.nightly
@pytest.mark.parametrize("noise", WRONG_NOISE)
@pytest.mark.parametrize("problem", [LINEAR, NETWORK], ids=["linear", "network"])
def test_wrong_noise_is_seen(problem, noise):
    """Without a Metropolis test, which would reject nearly all proposals of such a sampler: its chains would stand."""
    untested = all_weights(problem, metropolis=False)
    assert joint_p(problem, untested, faults=Faults(noise=WRONG_NOISE[noise])) < REJECTED


@WARNS
@pytest.mark.nightly
def test_a_forgotten_functional_prior_is_seen():
    assert joint_p(LINEAR, without_functional_prior) < REJECTED


def main(path):
    """Draws the ECDFs of the ranks of four samplers on the linear problem, and prints their p-values."""
    import matplotlib.pyplot as plt

    samplers = {
        "fSGHMC": (partial(fs.fSGHMC, marginalize=False), HEALTHY),
        "fSGLD": (partial(fs.fSGLD, marginalize=False), HEALTHY),
        "noise 20 % too large": (partial(fs.fSGHMC, marginalize=False, metropolis=False), Faults(noise=1.2)),
        "functional prior left out": (without_functional_prior, HEALTHY),
    }
    labels = [*(f"f({x:.1f})" for x in X_NEW[:, 0]), "new y", "σ", "log density"]
    figure, axes = plt.subplots(1, len(samplers), figsize=(12.0, 2.8), sharey=True)
    for ax, (name, (kernel, faults)) in zip(axes, samplers.items(), strict=True):
        found = judged(LINEAR, kernel, faults=faults)
        print(name, joint_p_value(found, NUM_DRAWS, NIGHTLY[1]), p_values(found, NUM_DRAWS, NIGHTLY[1]), flush=True)
        plot_ecdf(ax, found, NUM_DRAWS, labels)
        ax.set_title(name)
        ax.set_xlabel("rank / 100")
    axes[0].set_ylabel("ECDF less uniform")
    axes[0].legend(fontsize=7, loc="lower left", ncol=2)
    figure.savefig(path, dpi=72, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1])
