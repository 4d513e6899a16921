"""predict and log_likelihood: the model's own functions at new inputs, however the work is cut."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from models import NOISE, POINTS, Independent, X, Y, line, linear, random_points, run
from numpyro import handlers

import numpyro_fspace as fs
from numpyro_fspace.model.functions import function_inputs
from numpyro_fspace.posterior import draw_batches, function_draws
from numpyro_fspace.posterior.function_draws import log_likelihood

KEY = jax.random.key(0)
NEW = np.linspace(-3.0, 3.0, 5, dtype=np.float32)[:, None]
DRAWS = {"w": jax.random.normal(jax.random.key(1), (6, 2))}
LINES = np.asarray(DRAWS["w"])[:, :1] + np.asarray(DRAWS["w"])[:, 1:] * NEW[:, 0]


def test_functions_are_those_of_the_draws():
    values = fs.predict(DRAWS, KEY, NEW, model=linear(POINTS))
    assert set(values) == {"f", "y"} and all(type(v) is np.ndarray for v in values.values())
    np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)
    assert values["y"].shape == (6, 5)


def test_inputs_in_another_byte_order_are_found():
    """Where the model evaluates f, with which the chains are judged at new inputs."""
    swapped = function_inputs(linear(POINTS), DRAWS, (NEW.astype(">f8"),), {})["f"]
    np.testing.assert_array_equal(swapped, function_inputs(linear(POINTS), DRAWS, (NEW,), {})["f"])


def test_observations_have_the_likelihood_s_noise():
    """y - f over 300 draws of 5 points is N(0, 0.5²): Kolmogorov–Smirnov, false alarms 1e-5; no draw shares noise."""
    draws = {"w": jnp.tile(DRAWS["w"], (50, 1))}
    values = fs.predict(draws, KEY, NEW, model=linear(POINTS))
    noise = values["y"] - values["f"]
    assert scipy.stats.kstest(noise.ravel() / NOISE, "norm").pvalue > 1e-5
    assert len(np.unique(noise)) > 0.99 * noise.size


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batches_of_draws_change_nothing(batch_size):
    model = linear(POINTS)
    cut, whole = (fs.predict(DRAWS, KEY, NEW, model=model, batch_size=b) for b in (batch_size, 6))
    for name in ("f", "y"):
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-5, atol=1e-6)


def deterministic_model(x, y=None, offset=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    mean = numpyro.deterministic("mean", w[0] + w[1] * x[:, 0] + (0.0 if offset is None else offset))
    numpyro.deterministic("slope", w[1])
    numpyro.deterministic("swapped", w[::-1])
    numpyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=y)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_batches_of_inputs_change_no_function(rows):
    """Arguments with as many rows are cut alike; sites that do not depend on the inputs are left whole."""
    offset = jnp.arange(5.0)
    values = fs.predict(DRAWS, KEY, NEW, offset=offset, model=deterministic_model, input_batch_size=rows)
    np.testing.assert_allclose(values["mean"], LINES + np.arange(5.0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values["slope"], DRAWS["w"][:, 1])
    np.testing.assert_allclose(values["swapped"], DRAWS["w"][:, ::-1])
    assert values["y"].shape == (6, 5)


def test_batches_of_inputs_share_a_program():
    traced = []

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        traced.append(len(x))
        numpyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)

    x = np.ones((40, 1))
    draws = fs.predict({"w": jnp.ones(3)}, jax.random.key(0), x, model=model, inputs=x, input_batch_size=4)
    assert draws["y"].shape == (3, 40)
    # the whole for its sites, for what depends on what, for its size and as it is tried; the part is compiled once
    assert sorted(traced) == [4, 4, 40, 40, 40, 40, 40]


@pytest.mark.slow
def test_batches_of_inputs_cut_data_on_disk_too():
    """An ``OnDemand`` is cut with the arrays, and no array takes another's place."""

    def model(x, offset, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        f = fs.functional_prior("f", line(w), Independent(), POINTS)
        with numpyro.plate("data", len(x), subsample_size=2) as rows:
            mean = numpyro.deterministic("mean", f(x[rows]) + offset[rows])
            numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)

    offset = 100.0 * jnp.arange(5.0)
    for x in (NEW, fs.OnDemand(NEW)):
        values = fs.predict(DRAWS, KEY, x, offset, model=model, inputs=NEW, input_batch_size=2)
        np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values["mean"], LINES + offset, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_what_is_as_long_as_a_batch_is_not_doubled():
    """Inputs, and a site, of as many numbers as a batch of other inputs has rows."""
    x = np.ones((4, 2), np.float32)
    inputs = {"first": np.linspace(0.0, 1.0, 4, dtype=np.float32)[:, None], "second": NEW[:2]}
    pieces, whole = (
        fs.predict(DRAWS, KEY, x, model=additive, inputs=inputs, input_batch_size=rows) for rows in (2, 100)
    )
    for name in ("first", "second"):
        np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-5, atol=1e-6)
    values = fs.predict(DRAWS, KEY, NEW[:4], model=deterministic_model, inputs=NEW[:4], input_batch_size=2)
    assert values["swapped"].shape == (6, 2) and values["mean"].shape == (6, 4)


def test_batches_of_inputs_have_noise_of_their_own():
    draws = {"w": jnp.zeros((4, 2))}
    noise = fs.predict(draws, KEY, np.zeros((6, 1), np.float32), model=linear(), input_batch_size=2)["y"]
    assert len(np.unique(noise)) == 24


def test_plates_are_run_at_full_size():
    values = fs.predict(DRAWS, KEY, NEW, model=linear(random_points(), batch=2))
    assert values["y"].shape == (6, 5)
    np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)


def test_functions_elsewhere_than_the_arguments():
    values = fs.predict(DRAWS, KEY, X, Y, model=linear(POINTS), inputs=NEW)
    np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)
    assert values["y"].shape == (6, 8)


def test_inputs_may_be_lists():
    values = fs.predict(DRAWS, KEY, X, model=linear(POINTS), inputs=NEW.tolist())
    np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)


def additive(x, y=None):
    """Two functions, each of its own column."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    first = fs.functional_prior("first", lambda x: w[0] * x[:, 0], Independent(), POINTS)
    second = fs.functional_prior("second", lambda x: w[1] * x[:, 0], Independent(), POINTS)
    numpyro.sample("y", dist.Normal(first(x[:, :1]) + second(x[:, 1:]), NOISE).to_event(1), obs=y)


def test_functions_are_evaluated_where_the_model_does_it():
    x = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], np.float32)
    draws = np.asarray(DRAWS["w"])
    values = fs.predict(DRAWS, KEY, x, model=additive)
    np.testing.assert_allclose(values["first"], draws[:, :1] * x[:, 0], rtol=1e-5)
    np.testing.assert_allclose(values["second"], draws[:, 1:] * x[:, 1], rtol=1e-5)
    elsewhere = fs.predict(DRAWS, KEY, x, model=additive, inputs={"second": NEW})
    assert "first" not in elsewhere
    np.testing.assert_allclose(elsewhere["second"], draws[:, 1:] * NEW[:, 0], rtol=1e-5, atol=1e-6)
    pieces = fs.predict(DRAWS, KEY, x, model=additive, input_batch_size=2)
    np.testing.assert_allclose(pieces["second"], values["second"], rtol=1e-5)


def latent_inputs(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    f = fs.functional_prior("f", line(w), Independent(), POINTS)
    with numpyro.plate("data", len(x)):
        true = numpyro.sample("true", dist.Normal(x[:, 0], 0.1))
        numpyro.sample("y", dist.Normal(f(true[:, None]), NOISE), obs=y)


def mapped(x, y=None):
    """f is called on one row at a time, under vmap."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    f = fs.functional_prior("f", line(w), Independent(), POINTS)
    numpyro.sample("y", dist.Normal(jax.vmap(lambda row: f(row[None])[0])(x), NOISE).to_event(1), obs=y)


@pytest.mark.parametrize("model", [latent_inputs, mapped])
def test_functions_at_the_first_array_where_the_model_does_not_say(model):
    new = ["true"] if model is latent_inputs else []
    values = fs.predict(DRAWS, KEY, NEW, model=model, from_prior=new)
    np.testing.assert_allclose(values["f"], LINES, rtol=1e-5, atol=1e-6)


def test_given_targets_are_drawn_anew():
    values = fs.predict(DRAWS, KEY, X, Y, model=linear(POINTS))
    assert not np.isclose(values["y"], Y).all(axis=1).any()


@pytest.mark.slow
def test_an_mcmc_object_knows_its_model():
    """Chains are concatenated in order."""
    mcmc = run(
        fs.fSGLD(linear(POINTS), step_size=0.005, num_steps=2), num_chains=2, chain_method="vectorized", num_samples=3
    )
    values, draws = fs.predict(mcmc, KEY, NEW), np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    assert values["f"].shape == (6, 5)
    np.testing.assert_allclose(values["f"][4], draws[1, 1, 0] + draws[1, 1, 1] * NEW[:, 0], rtol=1e-5)


def test_networks_are_functions_too():
    """A network without functional prior appears under its own name, [S, N, K]."""

    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(3), input_shape=1)
        numpyro.sample("y", dist.Normal(f(x), NOISE).to_event(2), obs=y)

    draws = {"net.kernel": jnp.ones((2, 1, 3)), "net.bias": jnp.array([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])}
    values = fs.predict(draws, KEY, NEW, model=model)
    np.testing.assert_allclose(values["net"], NEW + np.asarray(draws["net.bias"])[:, None], rtol=1e-5)
    assert values["y"].shape == (2, 5, 3)


@pytest.mark.parametrize("model", [linear(POINTS), linear(random_points(), batch=2)], ids=["full", "minibatch"])
@pytest.mark.parametrize("chunk", [draw_batches.CHUNK, 1], ids=["all draws", "draw by draw"])
def test_log_likelihood_is_pointwise_over_all_data(model, chunk, monkeypatch):
    monkeypatch.setattr(draw_batches, "CHUNK", chunk)
    values = log_likelihood(fs.Posterior(model, DRAWS), (X, Y), {})
    draws = np.asarray(DRAWS["w"])
    expected = scipy.stats.norm.logpdf(Y, draws[:, :1] + draws[:, 1:] * X[:, 0], NOISE)
    assert set(values) == {"y"}
    np.testing.assert_allclose(values["y"], expected, rtol=1e-4)


def test_what_is_observed_stays_what_it_is_for_sites_that_depend_on_it():
    """A noise that is known by ``condition`` and inputs with a law of their own: only outputs are drawn anew."""

    def model(x, y=None):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([len(X), 1]).to_event(2), obs=x)
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.LogNormal(2.0, 1.0))
        numpyro.sample("y", dist.Normal(line(w)(x), sigma).to_event(1), obs=y)

    known = handlers.condition(model, {"sigma": 0.01})
    values = fs.predict(DRAWS, KEY, X, Y, model=known)
    lines = np.asarray(DRAWS["w"])[:, :1] + np.asarray(DRAWS["w"])[:, 1:] * X[:, 0]
    np.testing.assert_allclose(values["y"], lines, atol=0.06)
    assert np.std(values["y"] - lines) > 0.005 and np.std(values["x"]) > 0.5
    assert not np.array_equal(values["x"][0], X)


@pytest.mark.slow
def test_imputed_targets_are_no_draws_at_other_rows():
    """obs_mask= puts known and imputed targets together in a site of the run's own rows."""

    def model(x, y=None, mask=None, z=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", len(x)):
            y = numpyro.sample("y", dist.Normal(w * x, 0.3), obs=y, obs_mask=mask)
            numpyro.sample("z", dist.Normal(3.0 * y, 0.1), obs=z)

    x = np.linspace(-1.0, 1.0, 20, dtype=np.float32)
    y, known = 2.0 * x, np.arange(20) % 4 > 0
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(model), num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), x, y, known, 3.0 * y)
    new = np.full(20, 5.0, np.float32)
    draws = fs.predict(mcmc, jax.random.key(1), new)
    assert set(draws) == {"y", "z"}
    np.testing.assert_allclose(draws["y"].mean(0), 10.0, atol=0.6)
    np.testing.assert_allclose(draws["z"].mean(0), 30.0, atol=1.5)
    with pytest.raises(ValueError, match="that obs_mask= put together"):  # draws alone do not say what was observed
        fs.predict(mcmc.get_samples(), jax.random.key(1), new, model=model)
    seen = fs.predict(mcmc, jax.random.key(1), x, y, known, 3.0 * y)["z"]  # at the run's own rows
    np.testing.assert_allclose(seen.mean(0), 6.0 * x, atol=0.2)


@pytest.mark.slow
def test_runs_that_subsample_by_themselves_are_read():
    """HMCECS keeps the rows of its minibatch among the values of its state."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0))
        with numpyro.plate("N", len(x), subsample_size=10):
            xb = numpyro.subsample(x, event_dim=0)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(w * xb, 0.3), obs=yb)

    x = np.linspace(-1.0, 1.0, 40, dtype=np.float32)
    kernel = numpyro.infer.HMCECS(numpyro.infer.NUTS(model), num_blocks=2)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=50, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), x, 2.0 * x)
    assert fs.predict(mcmc, jax.random.key(1), x[:7])["y"].shape == (50, 7)


def test_functions_in_a_scope_are_evaluated_where_the_model_does_it():
    def part(x):
        return fs.random_module("net", nn.Dense(1), input_shape=1)(x)[:, 0]

    def model(x, y=None):
        a = numpyro.deterministic("at_a", handlers.scope(part, prefix="a", divider=".")(10.0 * x))
        b = numpyro.deterministic("at_b", handlers.scope(part, prefix="b", divider=".")(x - 1.0))
        numpyro.sample("y", dist.Normal(a + b, NOISE).to_event(1), obs=y)

    draws = {f"{p}.net.{w}": jnp.ones((2, *shape)) for p in "ab" for w, shape in (("kernel", (1, 1)), ("bias", (1,)))}
    values = fs.predict(draws, KEY, X, model=model)
    for name in "ab":
        np.testing.assert_allclose(values[f"{name}.net"][..., 0], values[f"at_{name}"], rtol=1e-5)


def test_weights_that_were_not_kept_are_not_drawn_from_the_prior():
    mcmc = run(fs.SGLD(linear(POINTS), step_size=0.01), extra_fields=("~z.w",))
    with pytest.raises(ValueError, match=r"did not keep the draws of \['w'\]"):
        fs.predict(mcmc, KEY, NEW)


@pytest.mark.slow
def test_keys_among_the_fields_are_no_hindrance():
    mcmc = run(fs.SGLD(linear(POINTS), step_size=0.01), extra_fields=("rng_key",))
    assert set(fs.predict(mcmc, KEY, NEW)) == {"f", "y"}
    assert "rng_key" in fs.to_arviz(mcmc)["sample_stats"]


@pytest.mark.parametrize("on_demand", [False, True], ids=["in memory", "on demand"])
def test_the_largest_array_bounds_the_number_of_draws_at_a_time(monkeypatch, on_demand):
    """40 rows of 7 hidden units, of which nothing that is given or returned tells."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=4) as rows:
            hidden = jnp.tanh(x[rows] * w[0] + jnp.arange(7.0))
            numpyro.sample("y", dist.Normal(w[1] * hidden.sum(-1), NOISE), obs=y)

    calls = []
    compiled = function_draws.compile_chunk
    monkeypatch.setattr(
        function_draws,
        "compile_chunk",
        lambda fn, given, **settings: Recorder(compiled(fn, given, **settings), calls),
    )
    x = np.linspace(0.0, 1.0, 40, dtype=np.float32)[:, None]
    given = fs.OnDemand(x) if on_demand else x
    whole = fs.predict(DRAWS, KEY, given, model=model, inputs={})
    monkeypatch.setattr(draw_batches, "CHUNK", 2 * 40 * 7)
    parts = fs.predict(DRAWS, KEY, given, model=model, inputs={})
    assert calls == [6, 2, 2, 2]
    np.testing.assert_allclose(parts["y"], whole["y"], rtol=1e-6)


class Recorder:
    """A compiled function that notes how many draws each call is given."""

    def __init__(self, chunk, calls):
        self.chunk, self.calls, self.trace = chunk, calls, chunk.trace

    def __call__(self, draws, keys, arrays):
        self.calls.append(len(keys))
        return self.chunk(draws, keys, arrays)


def test_a_function_is_evaluated_once_where_the_model_and_its_names_have_equal_inputs(monkeypatch):
    """Of the products with the one kernel, for the likelihood, the network and its prior, one is left."""
    programs = []

    class Looked(Recorder):
        def __call__(self, *args):
            programs.append(self.chunk.lower(*args).compile().as_text())
            return self.chunk(*args)

    def model(x):
        net = fs.random_module("net", nn.Dense(3), input_shape=(2,))
        fs.functional_prior("f", net, Independent(), np.zeros((4, 2), np.float32))
        numpyro.deterministic("mean", net(x))

    compile_chunk = function_draws.compile_chunk

    def recorded(fn, given, **settings):
        return Looked(compile_chunk(fn, given, **settings), [])

    monkeypatch.setattr(function_draws, "compile_chunk", recorded)
    draws = {"net.kernel": jnp.ones((5, 2, 3)), "net.bias": jnp.zeros((5, 3))}
    for x in (np.ones((50, 2), np.float32), np.ones((50, 2))):  # the second in another precision
        values = fs.predict(draws, KEY, x, model=model)
        assert {k: v.shape for k, v in values.items()} == dict.fromkeys(("f", "net", "mean"), (5, 50, 3))
        assert programs.pop().count(" dot(") == 1
    fs.predict(draws, KEY, x, model=model, inputs={"net": x, "f": x + 1.0})
    assert programs.pop().count(" dot(") == 2


def test_parts_of_rows_that_are_equal_in_the_first_part_alone_stay_apart():
    x = np.arange(6.0, dtype=np.float32)[:, None]
    other = np.where(x < 3.0, x, -x)
    values = fs.predict(DRAWS, KEY, x, model=line_at, inputs=other, input_batch_size=3)
    w = np.asarray(DRAWS["w"])
    np.testing.assert_allclose(values["mean"], w[:, :1] + w[:, 1:] * x[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values["f"], w[:, :1] + w[:, 1:] * other[:, 0], rtol=1e-5, atol=1e-6)


def line_at(x):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0], Independent(), POINTS)
    numpyro.deterministic("mean", f(x))


@pytest.mark.parametrize(
    ("arrays", "first"),
    [
        ([np.ones(3), np.ones(3, np.float32), jnp.ones(3), np.ones(2)], [0, 0, 0, 3]),
        ([np.ones(3), np.ones(3, int), np.full(3, np.nan), np.full(3, np.nan)], [0, 1, 2, 3]),
        ([jax.random.split(KEY, 2), np.zeros(2), np.ones(2), jax.random.split(KEY, 2), np.ones(2)], [0, 1, 2, 3, 2]),
        ([1.0, 2.0, "a", np.array(1.0)], [0, 1, 2, 3]),
    ],
    ids=["precisions and lengths", "integers and NaN", "keys", "no arrays"],
)
def test_arrays_are_shared_that_can_be_exchanged(arrays, first):
    shared = draw_batches.share_equal(arrays)
    assert [next(j for j, b in enumerate(arrays) if a is b) for a in shared] == first


def test_rows_are_cut_where_one_draw_would_make_too_large_an_array(monkeypatch):
    traced = []

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        traced.append(len(x))
        hidden = jnp.tanh(x * w[0] + jnp.arange(7.0))
        numpyro.deterministic("mean", w[1] * hidden.sum(-1))

    x = np.linspace(0.0, 1.0, 40, dtype=np.float32)[:, None]
    whole = fs.predict(DRAWS, KEY, x, model=model, inputs=x)
    assert traced == [40, 40]  # one trace tells the sites, one the size, and is run
    monkeypatch.setattr(draw_batches, "CHUNK", 10 * 7)
    parts = fs.predict(DRAWS, KEY, x, model=model, inputs=x)
    # ten rows and five of them are tried, and then a program of ten rows of all draws, then of one
    assert traced == [40, 40, 40, 40, 10, 5, 10, 10, 10]
    np.testing.assert_allclose(parts["mean"], whole["mean"], rtol=1e-6)


def wide_model(x, y=None):
    """Sites whose rows lie on another axis than the first, and on none."""
    slopes = numpyro.sample("slopes", dist.Normal().expand([3]).to_event(1))
    numpyro.deterministic("lines", slopes[:, None] * x[:, 0])
    numpyro.sample("y", dist.Normal(slopes[0] * x[:, 0], NOISE), obs=y)


def of_all_rows(x, y=None):
    slope = numpyro.sample("slope", dist.Normal())
    numpyro.deterministic("mean", jnp.mean(slope * x[:, 0]))
    numpyro.deterministic("size", jnp.ones(len(x) // 1 + 1))
    numpyro.sample("y", dist.Normal(slope * x[:, 0], NOISE), obs=y)


def test_batches_of_inputs_join_rows_where_they_are():
    draws = {"slopes": jax.random.normal(KEY, (6, 3))}
    values = fs.predict(draws, KEY, NEW, model=wide_model, inputs=NEW, input_batch_size=2)
    np.testing.assert_allclose(values["lines"], draws["slopes"][:, :, None] * NEW[:, 0], rtol=1e-5)


def test_sites_of_all_rows_are_not_made_of_batches(monkeypatch):
    """Asked for, an error that names them; else the rows are not cut."""
    draws = {"slope": jnp.arange(3.0)}
    with pytest.raises(ValueError, match=r"input_batch_size=2: \['mean', 'size'\] cannot be put together from"):
        fs.predict(draws, KEY, NEW, model=of_all_rows, inputs=NEW, input_batch_size=2)
    monkeypatch.setattr(draw_batches, "CHUNK", 4)
    values = fs.predict(draws, KEY, NEW + 1.0, model=of_all_rows, inputs=NEW + 1.0)
    np.testing.assert_allclose(values["mean"], np.arange(3.0) * (NEW + 1.0).mean(), rtol=1e-5)


def test_local_latents_are_those_of_their_rows():
    def model(x, y=None):
        with numpyro.plate("data", len(x)):
            effect = numpyro.sample("effect", dist.Normal())
            numpyro.sample("y", dist.Normal(effect + x[:, 0], NOISE), obs=y)

    draws = {"effect": jnp.zeros((4, 8))}
    assert fs.predict(draws, KEY, X, model=model)["y"].shape == (4, 8)
    with pytest.raises(ValueError, match=r"draws of 'effect' have shape \(8,\), but the model has \(1,\)"):
        fs.predict(draws, KEY, X[:1], model=model)


@pytest.mark.slow
def test_outputs_of_a_network_with_several():
    """A mean and a log standard deviation as a tuple: each is predicted and judged under a name of its own."""

    def apply(params, x):
        f = x @ params["w"]
        return f[:, :1], f[:, 1:]

    def init(key, x):
        return {"w": jax.random.normal(key, (1, 3))}

    def model(x, y=None):
        mean, log_sd = fs.random_module("net", (init, apply), input_shape=1)(x)
        numpyro.sample("y", dist.Normal(mean[:, 0], jnp.exp(log_sd[:, 0])), obs=y)

    x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=50, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), x, jax.random.normal(jax.random.key(2), (20,)))
    found = fs.predict(mcmc, jax.random.key(1), x)
    assert found["net[0]"].shape == (50, 20, 1) and found["net[1]"].shape == (50, 20, 2)
    np.testing.assert_allclose(found["net[1]"][:, :, 0], x[:, 0] * mcmc.get_samples()["net.w"][:, :, 1], rtol=1e-5)
    names = fs.report(mcmc).functions.names
    assert {name.partition("]")[0] for name in names} == {"net[0", "net[1"} and len(names) == 20 * 3


# ---- Predictive ------------------------------------------------------------------------------------------------


def counted():
    """A model of a line, and the list to which each run of its Python code adds an entry."""
    runs = []

    def model(x, y=None):
        runs.append(x.shape)
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0], Independent(), POINTS)
        with numpyro.plate("data", len(x), subsample_size=2) as rows:
            numpyro.sample("y", dist.Normal(f(x[rows]), NOISE), obs=y)

    return model, runs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"inputs": 0.1 * NEW},
        pytest.param({"batch_size": 40}, marks=pytest.mark.slow),
        pytest.param({"input_batch_size": 2}, marks=pytest.mark.slow),
    ],
    ids=list,
)
def test_predictive_gives_the_numbers_of_predict_and_traces_the_model_once(settings):
    model, runs = counted()
    chains = {"w": np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)}  # judged, as there are two chains
    posterior = fs.Posterior(model, chains, num_chains=2)
    predictive = fs.Predictive(posterior, **settings)
    first = predictive(KEY, NEW)
    num = len(runs)
    for key, x in ((jax.random.key(1), NEW), (KEY, NEW + 1.0), (KEY, np.asarray(NEW, np.float32).copy())):
        values = predictive(key, x)
        assert len(runs) == num
        expected = fs.predict(posterior, key, x, **settings)
        num = len(runs)
        assert values.keys() == expected.keys() == first.keys()
        for name in values:
            np.testing.assert_array_equal(values[name], expected[name])
    predictive(KEY, NEW[:4])
    assert len(runs) > num


def test_predictive_looks_at_the_rows_of_every_call():
    """Rows that are all alike cannot tell that the model standardizes its inputs; those of the next call do."""

    def model(x):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0], Independent(), POINTS)
        numpyro.deterministic("mean", f(x - x.mean()))

    predictive = fs.Predictive(DRAWS, model=model, input_batch_size=2)
    predictive(KEY, np.ones((6, 1), np.float32))
    with pytest.raises(ValueError, match="cannot be put together"):
        predictive(KEY, np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None])


def test_predictive_takes_other_settings_of_the_model_anew():
    def model(x, scale=1.0):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        numpyro.deterministic("mean", scale * w[0] * x[:, 0])

    predictive = fs.Predictive(DRAWS, model=model)
    once, twice = (predictive(KEY, NEW, scale=scale)["mean"] for scale in (1.0, 2.0))
    np.testing.assert_array_equal(2.0 * once, twice)
    assert repr(predictive).startswith("Predictive(Posterior(") and "\n" not in repr(predictive)


class Half(nn.Module):
    """A network that computes in 16 bits."""

    dtype: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dtype=self.dtype, name="d")(x)


def half(dtype):
    def model(x, y=None):
        f = fs.random_module("f", Half(dtype), input_shape=1)
        numpyro.deterministic("g", f(x))
        numpyro.sample("y", dist.Normal(f(x)[:, 0].astype(jnp.float32), 0.1).to_event(1), obs=y)

    return model


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_means_of_functions_of_16_bits_are_right(dtype):
    """NumPy adds numbers of 16 bits in 16 bits."""
    draws = {"f.d.kernel": np.ones((2000, 1, 1), np.float32), "f.d.bias": np.full((2000, 1), 3.0, np.float32)}
    found = fs.predict(fs.Posterior(half(dtype), draws), KEY, NEW)
    for name in ("f", "g"):
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name].mean(0), 3.0 + NEW, rtol=1e-2)


def test_functions_of_16_bits_are_judged():
    """Four chains that stay apart."""
    bias = np.repeat([0.0, 1.0, 2.0, 3.0], 300)[:, None] + 0.1 * np.random.default_rng(0).normal(size=(1200, 1))
    draws = {"f.d.kernel": np.ones((1200, 1, 1), np.float32), "f.d.bias": bias.astype(np.float32)}
    posterior = fs.Posterior(half(jnp.bfloat16), draws, num_chains=4)
    with pytest.warns(RuntimeWarning, match="At these inputs R-hat of f"):
        fs.predict(posterior, KEY, NEW)
    draws["f.d.bias"][3] = np.nan
    with pytest.warns(RuntimeWarning, match=r"\['f', 'g', 'y'\] are NaN"):
        fs.predict(fs.Posterior(half(jnp.bfloat16), draws), KEY, NEW)


@pytest.mark.slow
def test_functions_kept_in_place_of_weights_have_32_bits():
    kernel = fs.SGHMC(half(jnp.bfloat16), step_size=0.01, num_steps=2)
    mcmc = run(kernel, num_samples=10, functions_at=NEW, chain_method="vectorized")
    assert mcmc.get_samples()["f"].dtype == jnp.float32


def test_rows_that_do_not_exist_are_named_at_every_call():
    def model(group, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(w[group], 0.1).to_event(1), obs=y)

    predictive = fs.Predictive(fs.Posterior(model, {"w": np.ones((4, 3), np.float32)}))
    predictive(KEY, np.array([0, 1, 2]))
    with pytest.warns(RuntimeWarning, match="The model takes the rows 5 to 9"):
        predictive(KEY, np.array([5, 7, 9]))


@pytest.mark.slow
def test_latent_inputs_are_no_inputs_of_predictions_of_a_single_draw():
    """f is then evaluated at the first array among the arguments, as it is for several draws."""

    def model(x, y=None):
        places = numpyro.sample("places", dist.Normal(x[:, 0], 0.1).to_event(1))
        f = fs.random_module("f", nn.Dense(1), input_shape=1)
        numpyro.sample("y", dist.Normal(f(places[:, None])[:, 0], 0.1).to_event(1), obs=y)

    draws = {"places": np.zeros((2, 5)), "f.kernel": np.ones((2, 1, 1)), "f.bias": np.zeros((2, 1))}
    draws["places"][1] = 1.0
    draws = {k: v.astype(np.float32) for k, v in draws.items()}
    both = fs.predict(fs.Posterior(model, draws), KEY, NEW)["f"]
    alone = fs.predict(fs.Posterior(model, {k: v[:1] for k, v in draws.items()}), KEY, NEW)["f"]
    np.testing.assert_array_equal(alone[0], both[0])
    np.testing.assert_allclose(alone[0], NEW, rtol=1e-6)


@pytest.mark.slow
def test_a_negative_code_of_a_group_is_warned_of():
    """-1 is pandas' code of a missing category, and the last row of an array."""

    def model(group, y=None):
        with numpyro.plate("groups", 3):
            offset = numpyro.sample("offset", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(offset[group], 1.0), obs=y)

    group, y, key = np.array([0, 1, 2, -1]), np.array([0.0, 5.0, 2.0, 9.0]), jax.random.key(0)
    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=20, num_samples=20, progress_bar=False)
    with pytest.warns(RuntimeWarning, match="-1, pandas' code of a missing category, is the last row"):
        mcmc.run(key, group, y)
    mcmc.run(key, np.abs(group), y)
    with pytest.warns(RuntimeWarning, match="rows by an argument's negative numbers"):
        fs.predict(mcmc, key, np.array([-1, 0]))
    fs.predict(mcmc, key, np.array([2, 0]))


@pytest.mark.slow
def test_negative_labels_are_no_row_numbers():
    """Beside rows of the model's own numbers, which without a sign need no conversion."""

    def model(x, label=None):
        w = numpyro.sample("w", dist.Normal().expand([6]).to_event(1))
        numpyro.sample("label", dist.Normal(w[jnp.arange(4, dtype=jnp.uint32)] + x, 1.0), obs=label)

    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), np.zeros(4, np.float32), np.array([-1, 1, 1, -1]))
