"""Networks of which some weights are fixed numbers, and weights that were trained elsewhere."""

from __future__ import annotations

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
from numpyro import handlers
from numpyro.infer import Predictive
from safetensors.flax import save_file as save_of_jax
from safetensors.numpy import save_file
from support.tiers import some

import numpyro_fspace as fs

KEY = jax.random.key(0)
X = np.linspace(-1.0, 1.0, 12, dtype=np.float32)[:, None]
Y = np.sin(3 * X[:, 0]).astype(np.float32)
NOISE, WIDTH = 0.3, 4


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="head")(jnp.tanh(nn.Dense(WIDTH, name="body")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(1, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


class Equinox(eqx.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.body, self.head = eqx.nn.Linear(1, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, 1, key=keys[1])

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


def trained(kind):
    """A network, what holds its trained weights, and its function."""
    if kind == "linen":
        network = Linen()
        variables = network.init(jax.random.key(7), X)
        return network, variables, lambda x: network.apply(variables, x)
    if kind == "nnx":
        network = Nnx(nnx.Rngs(7))
        return network, network, network
    network = Equinox(jax.random.key(7))
    return network, network, jax.vmap(network)


KINDS = pytest.mark.parametrize("kind", some(["linen", "nnx", "equinox"], 1))


def body(kind):
    """The network and the trained weights of its first layer."""
    network, source, _ = trained(kind)
    return network, {k: v for k, v in fs.model.weights_by_path(source).items() if k.startswith("body")}


def make_model(network, frozen, *, prior=None, gp=None, points=None):
    def model(x, y=None):
        if gp is not None and points is not None:
            f = fs.gp_network("f", network, gp, points, frozen=frozen)
        else:
            f = fs.random_module("f", network, input_shape=1, frozen=frozen, prior=prior)
        numpyro.deterministic("values", f(x)[:, 0])
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE), obs=y)

    return model


def trace_of(model, *args):
    return handlers.trace(handlers.seed(model, KEY)).get_trace(*args)


# ---- frozen weights ----------------------------------------------------------------------------------------------


@KINDS
def test_only_weights_that_are_not_frozen_are_sites(kind):
    network, frozen = body(kind)
    sites = {k for k, s in trace_of(make_model(network, frozen), X, Y).items() if k.startswith("f.")}
    assert sites == {"f.head.bias", "f.head.weight" if kind == "equinox" else "f.head.kernel"}


@KINDS
def test_with_the_trained_head_it_is_the_trained_network(kind):
    network, source, function = trained(kind)
    _, frozen = body(kind)
    weights = fs.model.weights_by_path(source)
    head = {f"f.{k}": v for k, v in weights.items() if k.startswith("head")}
    found = trace_of(handlers.substitute(make_model(network, frozen), head), X)["values"]["value"]
    np.testing.assert_allclose(found, function(X)[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@KINDS
def test_a_last_layer_alone_has_the_closed_posterior(kind):
    """Bayesian regression on the frozen features: mean and standard deviation of f."""
    network, frozen = body(kind)
    body_weights = [np.asarray(v, np.float64) for k, v in sorted(frozen.items())]  # bias, then kernel
    kernel = body_weights[1].reshape(1, WIDTH)
    features = np.concatenate([np.tanh(X @ kernel + body_weights[0]), np.ones((len(X), 1))], 1)
    precision = features.T @ features / NOISE**2 + np.diag([WIDTH] * WIDTH + [1.0])  # of the fan-in prior
    covariance = np.linalg.inv(precision)
    mean = features @ covariance @ features.T @ Y / NOISE**2
    sd = np.sqrt(np.einsum("nh,hk,nk->n", features, covariance, features))
    mcmc = fs.MCMC(
        fs.SGHMC(make_model(network, frozen)),
        num_warmup=300,
        num_samples=1500,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, X, Y)
    draws = mcmc.get_samples()["values"]
    assert np.max(np.abs(draws.mean(0) - mean) / sd) < 0.2  # five standard errors of 600 effective draws
    np.testing.assert_allclose(draws.std(0) / sd, 1.0, atol=0.15)
    assert fs.predict(mcmc, KEY, X)["f"].shape == (3000, len(X), 1)


def test_nested_and_dotted_paths_are_the_same():
    network, source, _ = trained("linen")
    _, frozen = body("linen")
    nested = {"body": source["params"]["body"]}
    lists = {path: np.asarray(value).tolist() for path, value in frozen.items()}
    a, b, c = (trace_of(make_model(network, given), X)["values"]["value"] for given in (frozen, nested, lists))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)


def test_some_arrays_of_a_layer():
    network, frozen = body("linen")
    model = make_model(network, {"body.bias": frozen["body.bias"]})
    assert {k for k in trace_of(model, X) if k.startswith("f.")} == {"f.body.kernel", "f.head.kernel", "f.head.bias"}


def test_priors_and_starts_are_of_the_other_weights():
    network, frozen = body("linen")
    prior = {"head.kernel": dist.Normal(5.0, 0.1), "head.bias": dist.Normal(-5.0, 0.1)}
    trace = trace_of(make_model(network, frozen, prior=prior), X)
    assert np.all(trace["f.head.kernel"]["value"] > 4) and np.all(trace["f.head.bias"]["value"] < -4)
    start = fs.model.init_to_network(trace["f.head.kernel"] | {"value": None, "kwargs": {"rng_key": KEY}})
    own = network.init(KEY, X)["params"]["head"]["kernel"]
    assert start.shape == own.shape and np.all(np.abs(start) < 2)
    with pytest.raises(ValueError, match=r"prior must give every weight a prior; missing \[\], unknown \['body"):
        trace_of(make_model(network, frozen, prior=prior | {"body.bias": dist.Normal()}), X)


@pytest.mark.slow
def test_frozen_weights_may_be_an_argument_of_the_model():
    """Then they are no constants of the compiled programs."""
    network, frozen = body("linen")

    def model(x, frozen, y=None):
        return make_model(network, frozen)(x, y)

    mcmc = fs.MCMC(fs.SGHMC(model, step_size=0.1, num_steps=2), num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(KEY, X, frozen, Y)
    assert set(mcmc.get_samples()) == {"f.head.kernel", "f.head.bias", "values"}


def test_random_functions_of_a_frozen_network():
    network, frozen = body("linen")
    ranks = []
    for given in (frozen, None):
        draw = fs.model.random_function(network, input_shape=1, frozen=given, prior=dist.Normal(0.0, 3.0))
        values = np.stack([draw(key, X)[:, 0] for key in jax.random.split(KEY, 10)])
        ranks.append(np.linalg.matrix_rank(values, tol=1e-3))
    assert ranks[0] <= WIDTH + 1 < ranks[1]  # the features and a constant


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda w: {}, ValueError, r"frozen is empty and fixes nothing: leave it out, or name some of \['body.bias"),
        (lambda w: list(w), TypeError, "frozen must be a dict of arrays by path, got list.*weights_by_path"),
        (lambda w: w | {"neck.bias": w["body.bias"]}, ValueError, r"frozen holds \['neck.bias'\].*no weights.*head"),
        (
            lambda w: w | {"body.kernel": w["body.kernel"].T},
            ValueError,
            r"shape \(4, 1\) and the network needs \(1, 4\)",
        ),
        (lambda w: w | {"body.bias": np.full(4, np.nan)}, ValueError, r"frozen\['body.bias'\] holds NaN"),
        (lambda w: w | {"body.bias": ["a"] * 4}, TypeError, r"frozen\['body.bias'\]"),
        (
            lambda w: w | {"head.bias": np.zeros(1), "head.kernel": np.ones((4, 1))},
            ValueError,
            "fixes all weights.*leave some out",
        ),
    ],
)
def test_mistakes_are_named(change, error, message):
    network, frozen = body("linen")
    with pytest.raises(error, match=message):
        trace_of(make_model(network, change(frozen)), X)


# ---- with priors over functions -----------------------------------------------------------------------------------

GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.7))
COVARIANCE = np.exp(-0.5 * ((X - X.T) / 0.7) ** 2).astype(np.float64)
WIDE = nn.Sequential([nn.Dense(60), nn.tanh, nn.Dense(1)])


def wide(scale=3.0):
    """Trained weights of the first layer of a wide network."""
    rng = np.random.default_rng(0)
    return {"layers_0": {"kernel": scale * rng.normal(size=(1, 60)), "bias": scale * rng.normal(size=60)}}


@pytest.mark.slow
def test_gp_network_with_a_frozen_backbone_keeps_the_prior():
    """Its hidden layer has no sites, its input no units, and f at the points the covariance of the process."""
    frozen = wide()
    model = make_model(WIDE, frozen, gp=GP, points=X)
    trace = trace_of(model, X)
    assert {k for k in trace if k.startswith("f.")} == {"f.last_layer", "f.values", "f.residual"}
    features = np.tanh(X @ frozen["layers_0"]["kernel"] + frozen["layers_0"]["bias"])
    features = np.concatenate([features, np.ones((len(X), 1))], 1)
    draws = np.asarray(Predictive(model, num_samples=2000)(KEY, X)["values"], np.float64)
    coefficients = np.linalg.lstsq(features, draws[:5].T, rcond=None)[0]
    np.testing.assert_allclose(features @ coefficients, draws[:5].T, atol=5e-3)
    assert np.linalg.norm(np.cov(draws.T) - COVARIANCE) / np.linalg.norm(COVARIANCE) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["known", "random"])
def test_gp_network_with_a_frozen_backbone_is_sampled(noise):
    """Also where nothing is left to move once the last layer is integrated out."""

    def model(x, y=None):
        f = fs.gp_network("f", WIDE, GP, X, frozen=wide())
        sd = NOISE if noise == "known" else numpyro.sample("sd", dist.LogNormal(-1.0, 0.5))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sd), obs=y)

    mcmc = fs.MCMC(fs.fSGHMC(model), num_warmup=100, num_samples=300, progress_bar=False)
    mcmc.run(KEY, X, Y)
    f = fs.predict(mcmc, KEY, X)["f"][..., 0]
    k = COVARIANCE
    mean = k @ np.linalg.solve(k + NOISE**2 * np.eye(len(X)), Y)
    if noise == "known":
        sd = np.sqrt(np.diagonal(k - k @ np.linalg.solve(k + NOISE**2 * np.eye(len(X)), k)))
        assert np.max(np.abs(f.mean(0) - mean) / sd) < 0.4
        np.testing.assert_allclose(f.std(0) / sd, 1.0, atol=0.25)
    assert np.mean((f.mean(0) - Y) ** 2) < 0.02


@pytest.mark.slow
def test_the_warning_about_frozen_features_does_not_ask_to_widen_them():
    narrow = fs.GPPrior(tinygp.kernels.ExpSquared(0.05))
    with pytest.warns(RuntimeWarning, match="features make .*Frozen layers keep .*larger lengthscale") as found:
        trace_of(make_model(WIDE, wide(), gp=narrow, points=np.linspace(-1.0, 1.0, 60)[:, None]), X)
    assert not any("Widen" in str(one.message) for one in found)


def test_gp_network_refuses_a_backbone_that_is_an_argument():
    """A compiled run could not choose the scales by its features, and would have another prior than predictions."""

    def model(x, frozen, y=None):
        f = fs.gp_network("f", WIDE, GP, X, frozen=frozen)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE), obs=y)

    with pytest.raises(ValueError, match=r"the frozen weights are not known.*outside of the model"):
        fs.MCMC(fs.fSGHMC(model), num_warmup=2, num_samples=2, progress_bar=False).run(KEY, X, wide(), Y)


def test_gp_network_needs_a_random_last_layer():
    head = {"layers_2": {"kernel": np.ones((60, 1)), "bias": np.zeros(1)}}
    with pytest.raises(ValueError, match=r"not affine in any.*leave the last layer random"):
        trace_of(make_model(WIDE, head, gp=GP, points=X), X)


@pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning")
@KINDS
def test_functional_prior_on_a_frozen_backbone(kind):
    network, frozen = body(kind)

    def model(x, y=None):
        f = fs.random_module("net", network, input_shape=1, frozen=frozen)
        f = fs.functional_prior("f", f, GP, fs.measurement.uniform(-1.0, 1.0, 5))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE), obs=y)

    mcmc = fs.MCMC(fs.fSGHMC(model, step_size=0.05, num_steps=2), num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(KEY, X, Y)
    assert sum(v[0].size for v in mcmc.get_samples().values()) == WIDTH + 1
    assert np.isfinite(fs.predict(mcmc, KEY, X)["f"]).all()


# ---- weights that were trained elsewhere ---------------------------------------------------------------------------


@KINDS
def test_weights_by_path_are_those_of_the_sites(kind):
    network, source, _ = trained(kind)
    sites = {k.removeprefix("f.") for k in trace_of(make_model(network, None), X) if k.startswith("f.")}
    weights = fs.model.weights_by_path(source)
    assert set(weights) == sites and all(isinstance(v, jax.Array) for v in weights.values())


def test_weights_by_path_of_other_sources():
    _, source, _ = trained("linen")
    module = trained("nnx")[0]
    assert set(fs.model.weights_by_path(source["params"])) == set(fs.model.weights_by_path(source))
    assert set(fs.model.weights_by_path(nnx.state(module, nnx.Param))) == set(fs.model.weights_by_path(module))
    assert set(fs.model.weights_by_path([np.ones(2), {"a": np.ones(3)}])) == {"0", "1.a"}
    with pytest.raises(ValueError, match="the dict holds no weights"):
        fs.model.weights_by_path({})


class Image(nn.Module):
    """A convolution and a dense layer, as torch.nn.Sequential(Conv2d, ReLU, Flatten, Linear)."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(3, (2, 2), padding="VALID", name="conv")(x))
        return nn.Dense(2, name="fc")(x.reshape(len(x), -1))


def torch_image(weights, x):
    """What PyTorch computes of images [N, channels, height, width]."""
    kernel, size = weights["0.weight"], x.shape[-1] - 1
    patches = np.stack([x[:, :, i : i + 2, j : j + 2] for i in range(size) for j in range(size)], 1)
    hidden = np.einsum("npchw,ochw->nop", patches, kernel) + weights["0.bias"][:, None]
    return np.maximum(hidden, 0).reshape(len(x), -1) @ weights["3.weight"].T + weights["3.bias"]


def to_flax(name, array):
    """Axes as flax has them."""
    if name.startswith("0."):
        return ("conv.kernel", array.transpose(2, 3, 1, 0)) if name == "0.weight" else ("conv.bias", array)
    if name == "3.weight":  # inputs in the order height, width, channels
        return "fc.kernel", array.reshape(2, 3, 4, 4).transpose(2, 3, 1, 0).reshape(-1, 2)
    return ("fc.bias", array) if name == "3.bias" else None


@pytest.fixture
def torch_file(tmp_path):
    """A file, and the arrays in it."""
    rng = np.random.default_rng(1)
    shapes = {"0.weight": (3, 2, 2, 2), "0.bias": (3,), "3.weight": (2, 48), "3.bias": (2,), "steps": (1,)}
    weights = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    save_file(weights, tmp_path / "network.safetensors")
    return tmp_path / "network.safetensors", weights


def test_a_network_of_pytorchs_computes_the_same_here(torch_file):
    file, arrays = torch_file
    weights = fs.model.read_safetensors(file, to_flax)
    images = np.random.default_rng(2).normal(size=(5, 2, 5, 5)).astype(np.float32)
    frozen = {k: v for k, v in weights.items() if k.startswith("conv")}
    head = {f"f.{k}": v for k, v in weights.items() if k.startswith("fc")}

    def model(x):
        return fs.random_module("f", Image(), input_shape=(5, 5, 2), frozen=frozen)(x)

    found = handlers.seed(handlers.substitute(model, head), KEY)(images.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(found, torch_image(arrays, images), rtol=1e-4, atol=1e-5)


def test_mistakes_of_a_conversion_are_named(torch_file, tmp_path):
    file, _ = torch_file
    with pytest.raises(ValueError, match=r"gets the path 'w', which another array has"):
        fs.model.read_safetensors(file, lambda name, array: ("w", array))
    with pytest.raises(TypeError, match=r"convert\('[\w.]+', array\) returned str; return \(path, array\)"):
        fs.model.read_safetensors(file, lambda name, array: name)
    with pytest.raises(FileNotFoundError):
        fs.model.read_safetensors(tmp_path / "none", to_flax)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_becomes_float32(tmp_path, dtype):
    save_of_jax({"w": jnp.asarray([1.5, -2.0], dtype)}, tmp_path / "half.safetensors")
    found = fs.model.read_safetensors(tmp_path / "half.safetensors", lambda name, array: (name, array))
    assert found["w"].dtype == np.float32
    np.testing.assert_array_equal(found["w"], [1.5, -2.0])


def test_without_safetensors_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro_fspace\[safetensors\]"'):
        fs.model.read_safetensors("a", to_flax)
