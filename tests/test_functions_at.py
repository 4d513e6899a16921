"""Runs that keep functions at chosen inputs in place of weights."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen as nn

import numpyro_fspace as fs

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32)[:, None]
NEW = np.linspace(-2.0, 2.0, 5, dtype=np.float32)[:, None]
SETTINGS = {"num_warmup": 20, "num_samples": 12, "progress_bar": False}


def model(x, y=None):
    f = fs.random_module("net", nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)]), input_shape=1)
    g = fs.random_module("other", nn.Dense(2), input_shape=1)
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 0.1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal((f(x) + g(x)[:, :1])[:, 0], sigma), obs=y)


def run(**settings):
    mcmc = fs.MCMC(fs.SGHMC(model, step_size=1e-3, warmup=None), **SETTINGS, **settings)
    mcmc.run(jax.random.key(0), X, X[:, 0] ** 2)
    return mcmc


@pytest.fixture(scope="module")
def whole():
    return run()


@pytest.mark.slow
def test_the_functions_are_those_of_the_weights(whole):
    f = fs.predict(whole, jax.random.key(1), X, inputs=NEW)
    kept = run(functions_at=NEW).get_samples()
    assert set(kept) == {"net", "other", "sigma"}
    assert kept["net"].shape == (12, 5, 1) and kept["other"].shape == (12, 5, 2)
    for name in ("net", "other"):
        np.testing.assert_allclose(kept[name], f[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(kept["sigma"], whole.get_samples()["sigma"])


@pytest.mark.slow
def test_inputs_by_name_thinned_chains_and_checkpoints(tmp_path):
    """Functions that are not named lose nothing: their weights are kept."""
    settings = {"functions_at": {"net": NEW}, "num_chains": 2, "chain_method": "vectorized", "thinning": 2}
    kept = run(**settings).get_samples(group_by_chain=True)
    assert kept["net"].shape == (2, 6, 5, 1)
    assert set(kept) - {"net", "sigma"} == {"other.bias", "other.kernel"}
    on_disk = run(checkpoint=tmp_path, checkpoint_every=3, **settings).get_samples(group_by_chain=True)
    jax.tree.map(np.testing.assert_array_equal, dict(on_disk), dict(kept))


@pytest.mark.slow
def test_they_are_printed(capsys):
    run(functions_at=NEW).print_summary()
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [sum(row.startswith(name) for row in rows) for name in ("net[", "other[", "sigma")] == [5, 10, 1]


@pytest.mark.slow
def test_arviz_reads_them():
    found = fs.to_arviz(run(functions_at=NEW))
    assert found["posterior"]["net"].shape == (1, 12, 5, 1)
    np.testing.assert_array_equal(found["constant_data"]["probe_inputs"], NEW)
    with pytest.raises(ValueError, match="at no other inputs"):
        fs.to_arviz(run(functions_at=NEW), inputs=X)
    assert "diverging" in found["sample_stats"]


@pytest.mark.slow
def test_what_needs_weights_says_so():
    mcmc = run(functions_at=NEW)
    for use in (lambda: fs.predict(mcmc, jax.random.key(0), X), lambda: fs.report(mcmc, X, X[:, 0])):
        with pytest.raises(ValueError, match="Run without functions_at"):
            use()


def test_mistakes_are_named():
    from numpyro.infer import NUTS

    with pytest.raises(ValueError, match=r"\['nett'\] are no functions of the model; it has"):
        run(functions_at={"nett": NEW})
    with pytest.raises(TypeError, match=r"functions_at= is for SGLD, SGHMC, MCLMC and .*, not for NUTS"):
        fs.MCMC(NUTS(model), functions_at=NEW, **SETTINGS)
    with pytest.raises(ValueError, match="chain_method='sequential' has no functions_at"):
        fs.MCMC(fs.SGHMC(model), functions_at=NEW, num_chains=2, chain_method="sequential", **SETTINGS)


def test_a_model_without_functions_cannot_be_evaluated_elsewhere():
    def line(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)

    posterior = fs.Posterior(line, {"w": np.zeros(20)}, args=(X, X[:, 0]))
    for call in (
        lambda: fs.predict(posterior, jax.random.key(0), X, inputs=NEW),
        lambda: fs.to_arviz(posterior, inputs=NEW),
        lambda: fs.MCMC(fs.SGHMC(line), functions_at=NEW, **SETTINGS).run(jax.random.key(0), X, X[:, 0]),
    ):
        with pytest.raises(ValueError, match="the model has no gp_network, random_module or functional_prior"):
            call()
