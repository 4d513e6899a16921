"""Models and drivers as NumPyro's users write them: its MCMC, its modules, its summary, ArviZ's converter."""

from __future__ import annotations

import subprocess
import sys
import warnings

import arviz as az
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import nnx
from models import X, Y, linear
from numpyro.contrib.module import eqx_module, flax_module, random_eqx_module, random_flax_module, random_nnx_module
from numpyro.infer import NUTS

import numpyro_fspace as fs

KEY = jax.random.key(2)
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))


def stuck(cls, *, num_samples=210, num_chains=2, **settings):
    """A run of chains that hardly move from different starts."""
    kernel = fs.SGLD(linear(), step_size=1e-9, num_steps=1, warmup=fs.Warmup(warm_start=0.0))
    settings = {"chain_method": "vectorized", "progress_bar": False} | settings
    mcmc = cls(kernel, num_warmup=1, num_samples=num_samples, num_chains=num_chains, **settings)
    mcmc.run(KEY, X, Y, init_params={"w": jnp.array([[-1.0, 0.0], [1.0, 0.0]])})
    return mcmc


@pytest.fixture(scope="module")
def network_run():
    """A network and a scale, in minibatches, by NumPyro's driver and by ours."""

    def model(x, y=None):
        f = fs.random_module("net", nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)]), input_shape=1)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.deterministic("twice", 2.0 * scale)
        with numpyro.plate("data", len(x), subsample_size=4):
            xb, yb = numpyro.subsample(x, event_dim=1), None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb)[:, 0], scale), obs=yb)

    found = {}
    for cls in (numpyro.infer.MCMC, fs.MCMC):
        kernel = fs.SGHMC(model, num_steps=2, step_size=0.05)
        found[cls] = cls(kernel, num_warmup=2, num_samples=6, progress_bar=False)
        found[cls].run(KEY, X, Y)
    return found


# ---- warnings at the end of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [pytest.param(numpyro.infer.MCMC, marks=pytest.mark.slow), fs.MCMC])
def test_both_drivers_warn_of_chains_that_have_not_met(cls):
    with pytest.warns(RuntimeWarning, match="The draws are doubtful: R-hat of w") as caught:
        stuck(cls)
    assert [w.filename for w in caught if "doubtful" in str(w.message)] == [__file__]


@pytest.mark.slow
def test_numpyros_driver_stays_quiet_where_ours_does():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        stuck(numpyro.infer.MCMC, num_samples=50)  # a trial
        kernel = fs.SGLD(linear(), step_size=1e-9, num_steps=1, warmup=fs.Warmup(warm_start=0.0))
        mcmc = numpyro.infer.MCMC(kernel, num_warmup=300, num_samples=300, progress_bar=False)
        mcmc.warmup(KEY, X, Y, collect_warmup=True)  # no draws of the posterior
        with pytest.warns(RuntimeWarning, match="doubtful"):
            warnings.simplefilter("default", RuntimeWarning)
            mcmc.run(KEY, X, Y)  # which goes on from there


@pytest.mark.slow
def test_other_kernels_of_numpyros_driver_are_not_judged():
    fs.SGLD(linear())  # from here on runs are watched
    mcmc = numpyro.infer.MCMC(NUTS(linear(), max_tree_depth=1), num_warmup=2, num_samples=210, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        mcmc.run(KEY, X, Y)


@pytest.mark.slow
def test_an_import_leaves_numpyro_alone():
    code = (
        "import numpyro.infer as i; run = i.MCMC.run; import numpyro_fspace as fs; assert i.MCMC.run is run;"
        "fs.SGLD(print); fs.SGLD(print); assert i.MCMC.run.of_numpyro is run"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- az.from_numpyro ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cls", [numpyro.infer.MCMC, fs.MCMC])
def test_arviz_of_minibatches_is_told_of_to_arviz(network_run, cls):
    with pytest.raises(ValueError, match=r"fs\.to_arviz\(mcmc\).*log_likelihood=False"):
        az.from_numpyro(network_run[cls], log_likelihood=True)
    assert "scale" in az.from_numpyro(network_run[cls], log_likelihood=False).posterior
    assert fs.to_arviz(network_run[cls])["log_likelihood"]["y"].shape == (1, 6, len(X))


@pytest.mark.slow
def test_other_errors_of_the_model_stay(network_run):
    with pytest.raises(TypeError, match="argument"):
        network_run[fs.MCMC].sampler.model()


# ---- print_summary -----------------------------------------------------------------------------------------


def rows(printed: str) -> list:
    """First words of the lines of a table."""
    return [line.split()[0] for line in printed.splitlines() if line.strip() and " at " not in line]


@pytest.mark.slow
def test_the_summary_shows_functions_and_sites(network_run, capsys):
    mcmc = network_run[fs.MCMC]
    mcmc.print_summary()
    printed = capsys.readouterr().out
    assert [row for row in rows(printed) if "[" in row or row in ("scale", "twice")] == [
        "scale",
        *(f"net[{i},0]" for i in range(5)),
    ]
    assert "net at 5 rows of the data; 10 weights left out (print_summary(weights=True))." in printed
    expected = fs.predict(mcmc, KEY, X)["net"].mean(0)[0, 0]
    value = next(line.split()[1] for line in printed.splitlines() if line.strip().startswith("net[0,0]"))
    assert abs(float(value) - expected) < 0.006
    mcmc.print_summary(exclude_deterministic=False)
    assert "twice" in rows(capsys.readouterr().out)
    mcmc.print_summary(weights=True)
    shown = rows(capsys.readouterr().out)
    assert sum(row.startswith("net.") for row in shown) == 10 and not any(row.startswith("net[") for row in shown)


def test_a_summary_without_networks_is_numpyros(capsys):
    mcmc = fs.MCMC(fs.SGLD(linear(), step_size=0.1, num_steps=1), num_warmup=1, num_samples=8, progress_bar=False)
    mcmc.run(KEY, X, Y)
    mcmc.print_summary()
    ours = capsys.readouterr().out
    mcmc.print_summary(weights=True)
    assert capsys.readouterr().out == ours and "w[0]" in ours


# ---- NumPyro's modules -------------------------------------------------------------------------------------

MODULES = {
    "flax": lambda: random_flax_module("net", nn.Dense(1), dist.Normal(0.0, 1.0), input_shape=(1,)),
    "nnx": lambda: random_nnx_module("net", nnx.Linear(1, 1, rngs=nnx.Rngs(0)), dist.Normal(0.0, 1.0)),
    "eqx": lambda: jax.vmap(random_eqx_module("net", eqx.nn.Linear(1, 1, key=KEY), dist.Normal(0.0, 1.0))),
    "flax without prior": lambda: flax_module("net", nn.Dense(1), input_shape=(1,)),
    "eqx without prior": lambda: jax.vmap(eqx_module("net", eqx.nn.Linear(1, 1, key=KEY))),
}


def of_numpyro(kind, *, prior=False):
    def model(x, y=None):
        f = MODULES[kind]()
        if prior:
            f = fs.functional_prior("f", f, GP, X)
        scale = numpyro.sample("net_scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], scale), obs=y)

    return model


@pytest.mark.parametrize("kind", MODULES)
def test_our_kernels_name_the_cure_for_numpyros_modules(kind):
    cure = "a network without a prior.*frozen=" if "without" in kind else r"random_flax_module.*prior=\.\.\."
    with pytest.raises(ValueError, match=rf"'net\$params'.*{cure}") as error:
        fs.MCMC(fs.SGHMC(of_numpyro(kind)), progress_bar=False).run(KEY, X, Y)
    assert "fs.random_module('net', module, input_shape=(D,)" in str(error.value)


@pytest.mark.parametrize("kind", ["flax without prior", "eqx without prior"])
def test_so_does_nuts(kind):
    with pytest.raises(ValueError, match=r"'net\$params'.*a network without a prior"):
        fs.MCMC(NUTS(of_numpyro(kind)), progress_bar=False).run(KEY, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flax", "nnx", "eqx"])
@pytest.mark.parametrize("prior", [False, True])
def test_weights_of_numpyros_modules_are_weights(kind, prior, capsys):
    """Under NUTS: hidden where those of fs.random_module are, and not judged."""
    model = of_numpyro(kind, prior=prior)
    mcmc = fs.MCMC(NUTS(model, max_tree_depth=3), num_warmup=10, num_samples=20, progress_bar=False)
    mcmc.run(KEY, X, Y)
    weights = {k for k in mcmc.get_samples() if k.startswith("net/")}
    assert len(weights) == 2
    posterior = fs.to_arviz(mcmc, log_lik=False)["posterior"]
    assert set(posterior.data_vars) == {"net_scale"} | ({"f"} if prior else set())
    assert not weights & set(fs.predict(mcmc, KEY, X))
    mcmc.print_summary()
    shown = {row.partition("[")[0] for row in rows(capsys.readouterr().out)}
    assert "net_scale" in shown and not weights & shown and ("f" in shown) == prior


def test_what_a_module_of_numpyros_makes_is_judged_by_the_likelihood():
    from numpyro_fspace.posterior.judged_quantities import quantities_of

    draws = {"net/kernel": np.random.default_rng(0).normal(size=(2, 9, 1, 1)), "net/bias": np.zeros((2, 9, 1))}
    draws["net_scale"] = np.ones((2, 9))
    found = quantities_of(of_numpyro("flax"), draws, (X, Y), {})
    assert found.functions is None
    assert {name.partition("[")[0] for name in found.others.names} == {"net_scale", "y.loc"}


# ---- arguments of NUTS -------------------------------------------------------------------------------------


class Series:
    """What NumPy reads and JAX does not, as pandas' Series."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize(
    "x, y, message",
    [
        (X, Series(Y), r"positional argument 1 of run is a test_numpyro_way Series.*\.to_numpy\(\)"),
        (X, Series(list("abcdefgh")), "positional argument 1 of run has dtype <U1; encode it as numbers"),
        (np.array(list("abcdefgh")), Y, "positional argument 0 of run has dtype <U1; encode it as numbers"),
        (X, list(map(float, Y)), r"positional argument 1 of run is a list.*np\.asarray"),
    ],
)
def test_arguments_that_nuts_cannot_take_are_named(x, y, message):
    mcmc = fs.MCMC(NUTS(linear()), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(TypeError, match=message):
        mcmc.run(KEY, x, y)


@pytest.mark.slow
def test_what_the_model_reads_itself_is_left_to_it():
    def model(table, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w * jnp.asarray(table.values)[:, 0], 1.0), obs=y)

    mcmc = fs.MCMC(NUTS(model), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(KEY, Series(X), Y)
    assert np.isfinite(mcmc.get_samples()["w"]).all()


def test_observations_that_would_broadcast_are_refused_under_nuts():
    """y [N, 1] beside means [N] makes an N × N likelihood of another model."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)

    x = np.linspace(-1.0, 1.0, 12)
    mcmc = fs.MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False)
    for y in (x[:, None], x[:5]):
        with pytest.raises(ValueError, match=r"The observation 'y' has shape .* but its likelihood has shape \(12,\)"):
            mcmc.run(jax.random.key(0), x, y)
    mcmc.run(jax.random.key(0), x, x)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"num_samples": "6"}, "num_samples must be an integer ≥ 1, got '6'"),
        ({"num_warmup": -1}, "num_warmup=-1 must be at least 0"),
        ({"num_chains": "2"}, "num_chains must be an integer ≥ 1, got '2'"),
        ({"num_samples": 6, "thinning": 9}, "thinning=9 keeps none of num_samples=6 draws"),
    ],
)
def test_numbers_of_draws_and_chains_are_checked_at_once(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fs.MCMC(fs.SGHMC(linear()), **settings)


def test_the_summary_counts_the_rows_that_it_shows(capsys):
    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.5).to_event(1), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(model, step_size=0.01), num_warmup=5, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), np.zeros((3, 1), np.float32), np.zeros(3, np.float32))
    mcmc.print_summary()
    assert "net at 3 rows of the data" in capsys.readouterr().out
