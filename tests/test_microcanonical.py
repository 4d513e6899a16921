"""BlackJAX's MCLMC in the benchmarks samples what NumPyro's model says."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_fspace.benchmarks.blackjax_mclmc import microcanonical


def model(y):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([20]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)
    return scale


@pytest.mark.slow
@pytest.mark.parametrize("adjusted", [False, True])
def test_draws_have_the_posterior(adjusted):
    sample = microcanonical(model, (3.0,), num_steps=8000, num_draws=500, num_chains=4, adjusted=adjusted)
    draws, num_gradients = sample(jax.random.key(0))
    assert draws["w"].shape == (4, 500, 20) and draws["scale"].shape == (4, 500)
    assert 28_000 < num_gradients < 40_000
    total = np.asarray(draws["w"]).sum(-1)
    variance = 1.0 / (1.0 + 1.0 / 80.0)
    assert abs(total.mean() - 3.0 * variance) < 0.15 and abs(total.std() / variance**0.5 - 1.0) < 0.1
    rest = np.asarray(draws["w"]) - total[..., None] / 20
    assert abs(rest.std() / (2.0 * 0.95**0.5) - 1.0) < 0.05
    assert abs(np.log(np.asarray(draws["scale"])).std() / 0.5 - 1.0) < 0.1
