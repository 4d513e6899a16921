"""Models that are not ours: every one of the gallery runs, converges, and says the same under every engine."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from gallery import CASES
from numpyro.infer import NUTS, SVI

import numpyro_fspace as fs

KERNELS = {"fsghmc": fs.fSGHMC, "fsgld": fs.fSGLD, "fmclmc": fs.fMCLMC, "nuts": NUTS}


def draws_by_chain(name, kernel, *, num_warmup, num_samples):
    """Draws of every function of a case where the model evaluates it, [2, S, ...], and the run."""
    case = CASES[name]
    settings = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(KERNELS[kernel](case.model), num_warmup=num_warmup, num_samples=num_samples, **settings)
    mcmc.run(jax.random.key(0), *case.data)
    drawn = fs.predict(mcmc, jax.random.key(1), *case.data[:-1])
    return {k: drawn[k].reshape(2, num_samples, -1) for k in case.functions}, mcmc


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning")  # warm-ups are short
@pytest.mark.filterwarnings("ignore:(The draws are doubtful|At these inputs R-hat):RuntimeWarning")  # and draws are few
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "convolutions")) for name in CASES]
)
def test_converges_under_fsghmc(name):
    num_draws = CASES[name].num_draws
    drawn, mcmc = draws_by_chain(name, "fsghmc", num_warmup=num_draws, num_samples=num_draws)
    for f in drawn.values():
        assert np.isfinite(f).all() and f.std() > 0.0
        assert fs.diagnostics.function_diagnostics(f).max_rhat < 1.1
    assert not np.any(mcmc.last_state.num_diverging)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernel", ["fsghmc", "fsgld", "fmclmc"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "ordered_classes"])
def test_agrees_with_nuts(name, kernel):
    """Mean of f within a quarter of its standard deviation, standard deviation within a fifth, medians over inputs."""
    exact, _ = draws_by_chain(name, "nuts", num_warmup=500, num_samples=500)
    found, _ = draws_by_chain(name, kernel, num_warmup=1000, num_samples=2000)
    for function in exact:
        sd = exact[function].std((0, 1))
        off = np.abs(found[function].mean((0, 1)) - exact[function].mean((0, 1))) / sd
        assert np.median(off) < 0.25
        assert abs(np.median(found[function].std((0, 1)) / sd) - 1.0) < 0.2


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_variational_mean_is_near_the_sampled_one(name):
    """GFSVI's mean of f within a standard deviation and a half of fSGHMC's, median over inputs."""
    case = CASES[name]
    svi = SVI(case.model, fs.variational.guides.mean_field(case.model), optax.adam(0.01), fs.FunctionalELBO())
    result = svi.run(jax.random.key(0), 2000, *case.data, progress_bar=False)
    posterior = fs.svi_posterior(svi, result.params, jax.random.key(1), *case.data, num_samples=500)
    inputs = {"first": case.data[0][:, :1]} if name == "additive" else None  # a linearized model does not say
    found = fs.predict(posterior, jax.random.key(2), *case.data[:-1], inputs=inputs)
    sampled, _ = draws_by_chain(name, "fsghmc", num_warmup=1000, num_samples=1000)
    for function, draws in sampled.items():
        off = np.abs(found[function].reshape(500, -1).mean(0) - draws.mean((0, 1))) / draws.std((0, 1))
        assert np.median(off) < 1.5
