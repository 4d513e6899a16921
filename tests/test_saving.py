"""save and Posterior.load: one file, the same predictions, nothing damaged or foreign taken for a posterior."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from models import X, Y, linear, random_points, run
from numpyro.infer import NUTS, SVI, HMCGibbs, Trace_ELBO

import numpyro_fspace as fs
from numpyro_fspace.posterior.storage.posterior_file import read_archive

KEY = jax.random.key(0)
NEW = np.linspace(-3.0, 3.0, 5, dtype=np.float32)[:, None]
NET = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)])

pytestmark = pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning")


def network(x, y=None, *, noise=0.5, kind="normal"):
    f = fs.random_module("net", NET, input_shape=1)
    law = {"normal": dist.Normal, "laplace": dist.Laplace}[kind]
    scale = numpyro.param("scale", 1.0)
    numpyro.sample("y", law(scale * f(x)[:, 0], noise).to_event(1), obs=y)


def with_bfloat16(x, y=None):
    w = numpyro.sample("w", dist.Normal(jnp.zeros((), jnp.bfloat16), jnp.ones((), jnp.bfloat16)))
    numpyro.sample("y", dist.Normal(w.astype(jnp.float32) * x[:, 0], 1.0).to_event(1), obs=y)


def svi_posterior():
    svi = SVI(
        network,
        fs.variational.guides.mean_field(network),
        optax.adam(0.1),
        fs.FunctionalELBO(fs.variational.RegularizedKL()),
    )
    plain = SVI(network, svi.guide, optax.adam(0.1), Trace_ELBO())
    params = plain.run(KEY, 20, X, Y, progress_bar=False).params
    return fs.svi_posterior(svi, params, KEY, X, Y, num_samples=7)  # linearized, with the value of a param site


def checkpointed(folder):
    return run(fs.SGHMC(linear(random_points(), batch=4), step_size=0.02), checkpoint=folder, checkpoint_every=2)


SOURCES = {
    "sghmc": lambda _: (linear(), run(fs.SGHMC(linear(), step_size=0.02), num_chains=2, chain_method="vectorized")),
    "nuts": lambda _: (linear(), run(NUTS(linear()))),
    "svi": lambda _: (network, svi_posterior()),
    "ensemble": lambda _: (linear(), fs.baselines.ensemble(linear(), KEY, X, Y, num_members=3, num_updates=5)),
    "checkpoint": lambda folder: (linear(random_points(), batch=4), checkpointed(folder / "run")),
    "bfloat16": lambda _: (
        with_bfloat16,
        fs.Posterior(with_bfloat16, {"w": jnp.linspace(0, 1, 6, dtype=jnp.bfloat16)}),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_predictions_are_the_same(kind, tmp_path):
    model, source = SOURCES[kind](tmp_path)
    fs.save(source, tmp_path / "posterior.npz")
    found = fs.Posterior.load(tmp_path / "posterior.npz", model)
    before, after = (fs.predict(given, KEY, NEW) for given in (source, found))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    if isinstance(source, fs.MCMC):
        one, other = (fs.to_arviz(given) for given in (source, found))
        for group in ("posterior", "sample_stats", "log_likelihood", "observed_data"):
            assert one[group].equals(other[group]), group
    assert os.listdir(tmp_path).count("posterior.npz") == 1 and not [n for n in os.listdir(tmp_path) if n[0] == "."]


def test_functions_kept_in_place_of_weights(tmp_path):
    def model(x, y=None):
        f = fs.random_module("net", NET, input_shape=1)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.5).to_event(1), obs=y)

    mcmc = run(fs.SGHMC(model, step_size=0.02), functions_at=NEW)
    fs.save(mcmc, tmp_path / "f.npz")
    found = fs.Posterior.load(tmp_path / "f.npz", model)
    np.testing.assert_array_equal(found.samples["net"], mcmc.get_samples()["net"])
    one, other = fs.to_arviz(mcmc), fs.to_arviz(found)
    assert one["posterior"].equals(other["posterior"]) and one["constant_data"].equals(other["constant_data"])
    with pytest.raises(ValueError, match="kept functions in place of weights"):
        fs.predict(found, KEY, NEW)


@pytest.mark.slow
def test_another_process_predicts_the_same(tmp_path):
    mcmc = run(fs.SGHMC(linear(), step_size=0.02))
    fs.save(mcmc, tmp_path / "posterior.npz")
    program = """
import sys, jax, numpy as np, numpyro_fspace as fs
from models import linear
new = np.linspace(-3.0, 3.0, 5, dtype=np.float32)[:, None]
np.save(sys.argv[2], fs.predict(fs.Posterior.load(sys.argv[1], linear()), jax.random.key(0), new)["y"])
"""
    tests = str(Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])}
    command = [sys.executable, "-c", program, tmp_path / "posterior.npz", tmp_path / "y.npy"]
    subprocess.run(command, check=True, env=env)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), fs.predict(mcmc, KEY, NEW)["y"])


def with_prior_scale(scale):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x[:, 0], 0.5), obs=y)

    return model


def test_another_model_with_the_same_sites_is_told(tmp_path):
    posterior = fs.Posterior(with_prior_scale(1.0), {"w": jnp.array([[0.1, 0.2], [1.5, -1.0]])}, args=(X, Y))
    fs.save(posterior, tmp_path / "p.npz")
    found = read_archive(tmp_path / "p.npz")["log_densities"]
    for draw, parts in zip(posterior.samples["w"], found, strict=True):
        likelihood = dist.Normal(draw[0] + draw[1] * X[:, 0], 0.5).log_prob(Y).sum()
        by_hand = {"latent sites": dist.Normal().log_prob(draw).sum(), "y": likelihood}
        assert parts == pytest.approx({k: float(v) for k, v in by_hand.items()}, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fs.Posterior.load(tmp_path / "p.npz", with_prior_scale(1.0))
    with pytest.warns(
        RuntimeWarning, match="are not those of the draws: the log density of 'latent sites' at the first draw is"
    ):
        fs.Posterior.load(tmp_path / "p.npz", with_prior_scale(1.1))
    with pytest.warns(RuntimeWarning, match="are not those of the draws"):
        fs.Posterior.load(tmp_path / "p.npz", with_prior_scale(1.0), X, Y + 1.0)


def of_many_weights(factor=1.0, df=None, activation=jnp.tanh, penalty=0.0):
    """A network whose weights have most of the log density."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 0.1).expand([1000]).to_event(1))
        f = activation(x * w[:500]) @ w[500:]
        if penalty:
            numpyro.factor("penalty", -penalty * jnp.mean(f**2))
        likelihood = dist.Normal(f, 0.5 * factor) if df is None else dist.StudentT(df, f, 0.5)
        numpyro.sample("y", likelihood, obs=y)

    return model


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"factor": 1.2}, "y"),
        ({"df": 2.0}, "y"),
        ({"activation": jax.nn.relu}, "y"),
        ({"penalty": 1.0}, "penalty"),
    ],
)
def test_another_likelihood_is_told_beside_many_weights(changes, part, tmp_path):
    draws = 0.1 * np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    fs.save(fs.Posterior(of_many_weights(), {"w": draws}, args=(X, Y)), tmp_path / "p.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fs.Posterior.load(tmp_path / "p.npz", of_many_weights())
    with pytest.warns(RuntimeWarning, match=f"the log density of '{part}' at the"):
        fs.Posterior.load(tmp_path / "p.npz", of_many_weights(**changes))


@pytest.mark.slow
def test_sites_of_any_name_are_known_again(tmp_path):
    def model(x, y=None):
        w = numpyro.sample("w'", dist.Normal())
        numpyro.sample("y'", dist.Normal(w * x[:, 0], 0.5), obs=y)

    settings = {"num_warmup": 4, "num_samples": 4, "progress_bar": False, "checkpoint": tmp_path / "run"}
    fs.MCMC(fs.SGHMC(model), **settings).run(jax.random.key(0), X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fs.Posterior.from_checkpoint(tmp_path / "run", model, X, Y)


def test_latent_values_of_all_rows_of_a_minibatch_are_compared(tmp_path):
    """More rows than those at which the likelihood is evaluated."""
    num = 1500

    def with_scale(scale):
        def model(x, y=None):
            z = numpyro.sample("z", dist.Normal(0.0, scale).expand([num]).to_event(1))
            with numpyro.plate("rows", num, subsample_size=5) as rows:
                numpyro.sample("y", dist.Normal(z[rows] + x[rows], 0.5), obs=None if y is None else y[rows])

        return model

    args = (jnp.zeros(num), jnp.ones(num))
    fs.save(fs.Posterior(with_scale(1.0), {"z": jnp.ones((2, num))}, args=args), tmp_path / "p.npz")
    assert None not in read_archive(tmp_path / "p.npz")["log_densities"]
    with pytest.warns(RuntimeWarning, match="the log density of 'z' at the|the log density of 'latent sites' at the"):
        fs.Posterior.load(tmp_path / "p.npz", with_scale(2.0))


def line_of(y):
    """A model with minibatches of data that it closes over."""
    y = jnp.asarray(y)

    def model(x):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=2) as rows:
            numpyro.sample("y", dist.Normal(w[0] + w[1] * x[rows, 0], 0.5), obs=y[rows])

    return model


GIBBS = {"gibbs_sites": ["w"]}


def gibbs_to(value):
    def gibbs_fn(rng_key, gibbs_sites, hmc_sites):
        return {"w": jnp.full(2, value)}

    return gibbs_fn


def with_offset(x, y=None):
    offset = numpyro.sample("offset", dist.Normal())
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(offset + w[0] + w[1] * x[:, 0], 0.5), obs=y)


def around(value):
    """A context in which a site has this value."""
    return numpyro.handlers.condition(data={"offset": jnp.asarray(value)})


RUNS = {
    "data of the model": (lambda: fs.SGHMC(line_of(Y)), lambda: fs.SGHMC(line_of([*Y[:-1], 9.0])), (X,), "'y'"),
    "a kernel in a kernel": (
        lambda: HMCGibbs(NUTS(with_offset, max_tree_depth=1), gibbs_to(0.0), **GIBBS),
        lambda: HMCGibbs(NUTS(with_offset, max_tree_depth=2), gibbs_to(0.0), **GIBBS),
        (X, Y),
        r"settings\.inner_kernel\._max_tree_depth",
    ),
    "a function of a kernel": (
        lambda: HMCGibbs(NUTS(with_offset, max_tree_depth=1), gibbs_to(0.0), **GIBBS),
        lambda: HMCGibbs(NUTS(with_offset, max_tree_depth=1), gibbs_to(5.0), **GIBBS),
        (X, Y),
        r"settings\._gibbs_fn",
    ),
    "a handler around the run": (
        lambda: (fs.SGHMC(with_offset), around(0.1)),
        lambda: (fs.SGHMC(with_offset), around(5.0)),
        (X, Y),
        "handlers",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_another_run_is_refused(name, tmp_path):
    first, second, args, what = RUNS[name]

    def run(make):
        kernel, context = made if isinstance(made := make(), tuple) else (made, contextlib.nullcontext())
        mcmc = fs.MCMC(kernel, num_warmup=4, num_samples=4, progress_bar=False, checkpoint=tmp_path / "run")
        with context:
            mcmc.run(jax.random.key(0), *args)
        return mcmc.get_samples()["w"]

    np.testing.assert_array_equal(run(first), run(first))
    with pytest.raises(ValueError, match=f"holds another run: .*{what}"):
        run(second)


@pytest.mark.slow
def test_another_model_does_not_go_on_with_a_checkpoint(tmp_path):
    def run(scale):
        settings = {"num_warmup": 4, "num_samples": 4, "progress_bar": False, "checkpoint": tmp_path / "run"}
        mcmc = fs.MCMC(fs.SGHMC(with_prior_scale(scale)), **settings)
        mcmc.run(jax.random.key(0), X, Y)
        return mcmc

    draws = run(1.0).get_samples()["w"]
    np.testing.assert_array_equal(run(1.0).get_samples()["w"], draws)
    with pytest.raises(
        ValueError, match=r"the model's log density at a draw from its prior\['latent sites'\] was .* and is"
    ):
        run(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fs.Posterior.from_checkpoint(tmp_path / "run", with_prior_scale(1.0), X, Y)
        fs.Posterior.from_checkpoint(tmp_path / "run", with_prior_scale(1.0))  # whose arguments are not known
    with pytest.warns(RuntimeWarning, match="are not those of the checkpoint"):
        fs.Posterior.from_checkpoint(tmp_path / "run", with_prior_scale(2.0), X, Y)


def test_arguments_come_back_as_they_were(tmp_path):
    key = jax.random.key(3, impl="rbg")
    args = (np.arange(3.0), jnp.ones(2, jnp.bfloat16), 1, True, 0.1, "a", None, (1, [np.float32(2.0), {"b": key}]))
    kwargs = {"names": np.array(["ä", "b"]), "big": np.arange(3, dtype=">f4"), "infinite": float("inf")}

    def model(*args, **kwargs):
        numpyro.sample("w", dist.Normal())

    path = tmp_path / "p"
    fs.save(fs.Posterior(model, {"w": np.zeros(2)}, args=args, kwargs=kwargs), path)
    found = fs.Posterior.load(path, model)
    for before, after in zip(jax.tree.leaves((args, kwargs)), jax.tree.leaves((found.args, found.kwargs)), strict=True):
        assert type(after) is type(before)
        if isinstance(before, np.ndarray | jax.Array):
            assert after.dtype == before.dtype and bool((after == before).all())
        else:
            assert after == before
    given = fs.Posterior.load(path, model, 5.0)
    assert given.args == (5.0,) and given.kwargs == {}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, float])
def test_the_spread_of_an_array_is_an_argument(dtype, tmp_path):
    """``y.std()``, which is a number of NumPy; its float64 is a float of Python too."""

    def model(x, y=None, *, noise):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x[:, 0], noise).to_event(1), obs=y)

    noise = dtype(np.std([1.0, 2.0, 4.0]))
    draws = np.array([[0.1, 0.2], [1.5, -1.0]], np.float32)
    posterior = fs.Posterior(model, {"w": draws}, args=(X, Y), kwargs={"noise": noise})
    fs.save(posterior, tmp_path / "p.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = fs.Posterior.load(tmp_path / "p.npz", model)
    assert type(found.kwargs["noise"]) is dtype and found.kwargs["noise"] == noise
    before, after = (fs.predict(p, KEY, NEW, noise=p.kwargs["noise"]) for p in (posterior, found))
    np.testing.assert_array_equal(after["y"], before["y"])
    means = draws[:, :1] + draws[:, 1:] * X[:, 0]
    expected = scipy.stats.norm.logpdf(Y, means, 1.2472191).sum(1)  # the spread of 1, 2 and 4 is the root of 14/9
    densities = read_archive(tmp_path / "p.npz")["log_densities"]
    np.testing.assert_allclose([parts["y"] for parts in densities], expected, rtol=1e-5)


def test_arguments_that_no_file_holds_are_named(tmp_path):
    for bad in (fs.OnDemand(X), np.array([object()]), {1: 2.0}, np.zeros(2, [("a", "f4")])):
        posterior = fs.Posterior(linear(), {"w": np.zeros((2, 2))}, args=(X, bad))
        with pytest.raises(TypeError, match=r"save: args\[1\] is of type .*arguments=False"):
            fs.save(posterior, tmp_path / "p.npz")
        assert not os.listdir(tmp_path)
    fs.save(posterior, tmp_path / "p.npz", arguments=False)
    found = fs.Posterior.load(tmp_path / "p.npz", linear(), X, Y)
    assert fs.to_arviz(found)["log_likelihood"]["y"].shape == (1, 2, 8)


@pytest.mark.slow
def test_every_flipped_byte_is_found_or_changes_nothing(tmp_path):
    posterior = fs.Posterior(linear(), {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}, args=(X, Y))
    path, other = tmp_path / "p.npz", tmp_path / "q.npz"
    fs.save(posterior, path)
    content, found = path.read_bytes(), 0
    for i in range(0, len(content), 3):
        other.write_bytes(content[:i] + bytes([content[i] ^ 0x10]) + content[i + 1 :])
        try:
            loaded = fs.Posterior.load(other, linear())
        except ValueError as error:
            assert "damaged" in str(error) or "has format" in str(error)
            found += 1
        else:
            np.testing.assert_array_equal(loaded.samples["w"], posterior.samples["w"])
            np.testing.assert_array_equal(loaded.args[0], X)
    assert found > len(content) // 6
    for size in (0, 10, len(content) // 2, len(content) - 1):
        other.write_bytes(content[:size])
        with pytest.raises(ValueError, match="is damaged, or not a file of"):
            fs.Posterior.load(other, linear())


class Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_other_files_are_refused_and_left_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    posterior = fs.Posterior(linear(), {"w": np.zeros((2, 2))})
    np.savez("other.npz", w=np.zeros(3))
    np.savez("trap.npz", header=np.array([Trap()], object))
    Path("text").write_text("hello")
    Path("trap").write_bytes(pickle.dumps(Trap()))
    for name in ("other.npz", "trap.npz", "text", "trap"):
        before = Path(name).read_bytes()
        with pytest.raises(ValueError, match=r"is damaged, or not a file of fs.save"):
            fs.Posterior.load(name, linear())
        with pytest.raises(FileExistsError, match="give another name"):
            fs.save(posterior, name)
        assert Path(name).read_bytes() == before
    assert not Path("executed").exists()
    with pytest.raises(ValueError, match="is not a file"):
        fs.save(posterior, tmp_path)
    with pytest.raises(ValueError, match="path is empty"):
        fs.save(posterior, "")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        fs.Posterior.load("nothing.npz", linear())
    with pytest.raises(OSError, match="missing"):
        fs.save(posterior, "missing/p.npz")


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "p.npz"
    for value in (1.0, 2.0):
        fs.save(fs.Posterior(linear(), {"w": np.full((2, 2), value)}), path)
        assert fs.Posterior.load(path, linear()).samples["w"].max() == value

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        fs.save(fs.Posterior(linear(), {"w": np.full((2, 2), 3.0)}), path)
    assert os.listdir(tmp_path) == ["p.npz"] and fs.Posterior.load(path, linear()).samples["w"].max() == 2.0


def test_a_later_format_says_so(tmp_path, monkeypatch):
    from numpyro_fspace.posterior.storage import posterior_file

    monkeypatch.setattr(posterior_file, "FORMAT", 99)
    fs.save(fs.Posterior(linear(), {"w": np.zeros((2, 2))}), tmp_path / "p.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 99, this version reads 2"):
        fs.Posterior.load(tmp_path / "p.npz", linear())


def test_mistakes_are_named(tmp_path):
    draws = {"w": np.zeros((2, 2))}
    with pytest.raises(TypeError, match=r"got dict. Make one of them: fs.Posterior\(model, draws"):
        fs.save(draws, tmp_path / "p")
    with pytest.raises(TypeError, match="path must be the name of a file, got None"):
        fs.save(fs.Posterior(linear(), draws), None)
    with pytest.raises(ValueError, match="no draws yet"):
        fs.save(fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1), tmp_path / "p")
    with pytest.raises(ValueError, match=r"transformed by networks"):
        fs.save(fs.Posterior(linear(), draws, fit=None), tmp_path / "p")
    fs.save(fs.Posterior(linear(), draws), tmp_path / "p")
    with pytest.raises(TypeError, match="needs the model"):
        fs.Posterior.load(tmp_path / "p", draws)


def test_the_header_can_be_read_without_the_package(tmp_path):
    fs.save(fs.Posterior(linear(), {"w": np.zeros((2, 2))}, num_chains=2), tmp_path / "p")
    with np.load(tmp_path / "p") as file:
        assert json.loads(file["header"].tobytes())["num_chains"] == 2 and file["array_0"].shape == (2, 2)


@pytest.mark.parametrize(
    "value",
    [
        np.ma.array([1.0, 2.0], mask=[False, True]),
        {"rows": [np.ma.array([1.0, 2.0], mask=[False, True])]},
        np.ma.masked,
        np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    ],
    ids=["masked", "nested", "constant", "structured", "records"],
)
def test_arguments_that_would_lose_something_are_refused(tmp_path, value):
    posterior = fs.Posterior(network, {"w": np.zeros(3)}, args=(value,))
    with pytest.raises(TypeError, match=r"args\[0\].*arguments=False"):
        fs.save(posterior, tmp_path / "posterior.npz")
    assert not list(tmp_path.iterdir())


def test_arguments_that_lose_nothing_are_kept(tmp_path):
    values = np.ma.array([1.0, 2.0]), np.array(["2020-01-01"], "datetime64[D]"), np.array(["a", "bc"])
    fs.save(fs.Posterior(network, {"w": np.zeros(3)}, args=values), tmp_path / "posterior.npz")
    for found, given in zip(fs.Posterior.load(tmp_path / "posterior.npz", network).args, values, strict=True):
        np.testing.assert_array_equal(found, given)


def test_masked_draws_are_refused():
    draws = {"w": np.ma.array([1.0, 2.0], mask=[False, True])}
    with pytest.raises(TypeError, match=r"samples\['w'\] is a masked array"):
        fs.Posterior(network, draws)
    with pytest.raises(TypeError, match=r"samples\['w'\] is a masked array"):
        fs.predict(draws, KEY, X, model=network)
