"""random_module: the library's own network, the prior that was written, and no state passed over."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from jax.example_libraries import stax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import initialize_model, log_density
from support.tiers import some

from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.networks.adapters import read_network
from numpyro_fspace.model.networks.random_module import fan_in, flat, random_module

X = np.linspace(-1.0, 1.0, 10).reshape(5, 2)
Y = np.sin(X[:, 0])


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)])
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.out(x)


def linen():
    return nn.Sequential([nn.Dense(3), nn.LayerNorm(), jnp.tanh, nn.Dense(1)])


def nnx_net():
    return NnxNet(nnx.Rngs(0))


def equinox():
    return eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))


def pair():
    def init(key, input_shape):
        return {
            "W": jax.random.normal(key, (*input_shape, 3)),
            "b": jnp.full(3, 0.5),
            "gain": jnp.ones(3),
            "V": jnp.full((3, 1), 2.0),
        }

    return init, lambda w, x: (w["gain"] * jnp.tanh(x @ w["W"] + w["b"])) @ w["V"]


KINDS = {"linen": linen, "nnx": nnx_net, "equinox": equinox, "pair": pair}


@pytest.fixture(params=KINDS)
def network(request):
    return KINDS[request.param]()


def make_model(module, input_shape=2, **options):
    def model(x, y=None):
        f = random_module("net", module, input_shape=input_shape, **options)
        mean = numpyro.deterministic("f", f(x).squeeze(-1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    return model


def run(model, *args, seed=0, data=None):
    trace = handlers.trace(handlers.seed(handlers.substitute(model, data=data or {}), jax.random.key(seed)))
    return trace.get_trace(*args)


def weights_of(trace, prefix="net."):
    return {k.removeprefix(prefix): s for k, s in trace.items() if k.startswith(prefix)}


def draw(module, x=X, **options):
    """One random function: (weights by path, f(x))."""
    trace = run(make_model(module, **options), jnp.asarray(x))
    return {k: s["value"] for k, s in weights_of(trace).items()}, trace["f"]["value"]


# --- the same function as the library's own ---


def test_linen_weights_are_those_apply_takes():
    w, f = draw(linen())
    tree = {}
    for path, value in w.items():
        layer, leaf = path.split(".")
        tree.setdefault(layer, {})[leaf] = value
    own = jax.eval_shape(linen().init, jax.random.key(0), jnp.asarray(X))["params"]
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(lambda leaf: leaf.shape, own)
    np.testing.assert_allclose(f, linen().apply({"params": tree}, jnp.asarray(X))[:, 0], rtol=1e-5)


def test_nnx_weights_are_those_of_the_module():
    w, f = draw(nnx_net())
    assert sorted(w) == [
        *("layers.0.bias", "layers.0.kernel", "layers.1.bias", "layers.1.scale", "out.bias", "out.kernel"),
    ]
    other = NnxNet(nnx.Rngs(7))
    for path, variable in {
        "layers.0.bias": other.layers[0].bias,
        "layers.0.kernel": other.layers[0].kernel,
        "layers.1.bias": other.layers[1].bias,
        "layers.1.scale": other.layers[1].scale,
        "out.bias": other.out.bias,
        "out.kernel": other.out.kernel,
    }.items():
        variable.set_value(w[path])
    np.testing.assert_allclose(f, other(jnp.asarray(X))[:, 0], rtol=1e-5)


def test_nnx_module_is_left_as_it_was():
    module = nnx_net()
    before = jax.tree.leaves(nnx.state(module))
    draw(module)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(module)), strict=True))


def test_equinox_weights_map_over_the_leading_axis():
    w, f = draw(equinox())
    assert sorted(w) == ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]

    def where(m):
        return [m.layers[0].bias, m.layers[0].weight, m.layers[1].bias, m.layers[1].weight]

    other = eqx.tree_at(where, equinox(), [w[k] for k in sorted(w)])
    np.testing.assert_allclose(f, [other(jnp.asarray(row))[0] for row in X], rtol=1e-5)


def test_pair_weights_are_those_apply_takes():
    w, f = draw(pair())
    expected = (np.asarray(w["gain"]) * np.tanh(X @ w["W"] + w["b"])) @ w["V"]
    np.testing.assert_allclose(f, expected[:, 0], rtol=1e-4, atol=1e-6)


def test_stax_pair_drops_the_output_shape():
    w, f = draw(stax.serial(stax.Dense(4), stax.Tanh, stax.Dense(1)))
    assert {k: v.shape for k, v in w.items()} == {"0.0": (2, 4), "0.1": (4,), "2.0": (4, 1), "2.1": (1,)}
    expected = np.tanh(X @ w["0.0"] + w["0.1"]) @ w["2.0"] + w["2.1"]
    np.testing.assert_allclose(f, expected[:, 0], rtol=1e-4, atol=1e-6)


def test_integer_and_tuple_input_shapes_agree(network):
    (w1, f1), (w2, f2) = draw(network, input_shape=2), draw(network, input_shape=(2,))
    assert list(w1) == list(w2)
    np.testing.assert_array_equal(f1, f2)


def test_image_inputs_and_haiku_like_names():
    def init(key, shape):
        return {"conv/~/w": jnp.zeros((3, 3, shape[-1], 2)), "head": [jnp.zeros((2, 1))]}

    def apply(w, x):
        h = jax.lax.conv(jnp.moveaxis(x, -1, 1), jnp.transpose(w["conv/~/w"], (3, 2, 0, 1)), (1, 1), "SAME")
        return h.mean((2, 3)) @ w["head"][0]

    trace = run(make_model((init, apply), input_shape=(4, 4, 3)), jnp.ones((5, 4, 4, 3)))
    sites = weights_of(trace)
    assert list(sites) == ["conv.~.w", "head.0"]
    assert sites["conv.~.w"]["infer"]["fspace"]["scale"] == pytest.approx(27**-0.5)


def test_bare_array_of_weights_has_a_name():
    module = (lambda key, shape: jnp.zeros((*shape, 1)), lambda w, x: x @ w)
    assert list(draw(module)[0]) == ["weight"]


def test_several_outputs_pass_through():
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)[..., 0], nn.Dense(3)(x)

    def model():
        return random_module("net", Heads(), input_shape=2)(X)

    a, b = handlers.seed(model, 0)()
    assert (a.shape, b.shape) == ((5,), (5, 3))


def test_token_inputs_reach_an_embedding():
    module = nn.Sequential([nn.Embed(11, 4), lambda x: x.mean(-2), nn.Dense(1)])
    tokens = jnp.arange(10).reshape(5, 2)
    trace = run(make_model(module), tokens)
    assert trace["net.layers_0.embedding"]["infer"]["fspace"]["scale"] == 1.0
    assert trace["net.layers_2.kernel"]["infer"]["fspace"]["scale"] == 0.5


# --- sites and names ---


def test_sites_are_events_without_slashes_or_params(network):
    trace = run(make_model(network), X)
    sites = weights_of(trace)
    assert sites and not any("/" in name for name in trace)
    assert not any(s["type"] in ("param", "mutable") for s in trace.values())
    for site in sites.values():
        assert site["type"] == "sample" and site["fn"].batch_shape == ()
        assert site["fn"].event_shape == site["value"].shape


@pytest.mark.parametrize("name", ["", "a/b", None])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="without '/'"):
        handlers.seed(random_module, 0)(name, linen(), input_shape=2)


def test_two_networks_and_scope():
    def model():
        f, g = (random_module(name, linen(), input_shape=2) for name in ("f", "g"))
        return f(X) + g(X)

    trace = run(handlers.scope(model, prefix="m", divider="."))
    assert {"m.f.layers_0.kernel", "m.g.layers_0.kernel"} <= set(trace)
    values = trace["m.f.layers_0.kernel"]["value"], trace["m.g.layers_0.kernel"]["value"]
    assert not np.allclose(*values)


def test_equal_paths_are_refused():
    module = (lambda key, shape: {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}, lambda w, x: x)
    with pytest.raises(ValueError, match=r"same path: \['a\.b'\]"):
        draw(module)


# --- priors ---


# A table, which the formatter would break into one line for each weight.
EXPECTED = {  # path: (mean, standard deviation) of the default prior
    "linen": {"layers_0.kernel": (0, 2**-0.5), "layers_0.bias": (0, 1), "layers_1.scale": (1, 1),
              "layers_1.bias": (0, 1), "layers_3.kernel": (0, 3**-0.5), "layers_3.bias": (0, 1)},
    "nnx": {"layers.0.kernel": (0, 2**-0.5), "layers.0.bias": (0, 1), "layers.1.scale": (1, 1),
            "layers.1.bias": (0, 1), "out.kernel": (0, 3**-0.5), "out.bias": (0, 1)},
    "equinox": {"layers.0.weight": (0, 2**-0.5), "layers.0.bias": (0, 1),
                "layers.1.weight": (0, 3**-0.5), "layers.1.bias": (0, 1)},
    "pair": {"W": (0, 2**-0.5), "b": (0, 1), "gain": (1, 1), "V": (0, 3**-0.5)},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", some([None, 3.0], 1))
def test_fan_in_prior_by_sampling(kind, scale):
    prior = None if scale is None else fan_in(scale)
    model = make_model(KINDS[kind](), prior=prior)
    draws = Predictive(model, num_samples=4000)(jax.random.key(1), X[:1])
    names = {k.removeprefix("net.") for k in draws if k.startswith("net.")}
    assert names == set(EXPECTED[kind])
    sites = weights_of(run(model, X))
    for path, (mean, sd) in EXPECTED[kind].items():
        sd = sd * (scale or 1.0)
        sample = np.asarray(draws[f"net.{path}"])
        n = sample.size  # standard errors sd/sqrt(n) and sd/sqrt(2n); 5 of them
        assert abs(sample.mean() - mean) < 5 * sd / n**0.5, path
        assert abs(sample.std() - sd) < 5 * sd / (2 * n) ** 0.5, path
        assert sites[path]["infer"]["fspace"]["scale"] == pytest.approx(sd)


def test_constants_of_an_equinox_module_are_asked_about():
    """NumPy arrays become weights, as in equinox's own filters; a module of nothing else is one of trained weights."""

    class Centered(eqx.Module):
        mean: np.ndarray
        layer: eqx.nn.Linear

        def __call__(self, x):
            return self.layer(x - self.mean)

    module = Centered(np.full(2, 0.3, np.float32), eqx.nn.Linear(2, 1, key=jax.random.key(0)))
    with pytest.warns(RuntimeWarning, match=r"\['mean'\] of the equinox module become random weights.*frozen="):
        assert "mean" in weights_of(run(make_model(module), X))
    frozen = run(make_model(module, frozen={"mean": module.mean}), X)  # pytest makes errors of warnings
    assert sorted(weights_of(frozen)) == ["layer.bias", "layer.weight"]
    run(make_model(jax.tree.map(np.asarray, module)), X)


def test_fan_in_of_other_layers():
    class Layers(eqx.Module):
        embed: eqx.nn.Embedding
        conv: eqx.nn.Conv1d
        norm: eqx.nn.LayerNorm

        def __init__(self):
            self.embed = eqx.nn.Embedding(7, 4, key=jax.random.key(0))
            self.conv = eqx.nn.Conv1d(4, 5, 3, key=jax.random.key(1))
            self.norm = eqx.nn.LayerNorm((5, 2))

        def __call__(self, x):
            h = jax.vmap(self.embed)(x.astype(int)).T
            return self.norm(self.conv(jnp.pad(h, ((0, 0), (1, 1))))).sum(keepdims=True)[0]

    sites = weights_of(run(make_model(Layers()), jnp.ones((5, 2))))
    got = {path: site["infer"]["fspace"]["scale"] for path, site in sites.items()}
    one = {"embed.weight": 1, "conv.bias": 1, "norm.weight": 1, "norm.bias": 1}
    assert got == pytest.approx(one | {"conv.weight": 12**-0.5})
    assert float(sites["norm.weight"]["fn"].mean.mean()) == 1.0


def test_fan_in_scale_may_be_random():
    def model():
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        random_module("net", linen(), input_shape=2, prior=fan_in(tau))

    sites = run(model, data={"tau": 5.0})
    value = np.ones((2, 3))
    expected = dist.Normal(0, 5 / 2**0.5).log_prob(value).sum()
    np.testing.assert_allclose(sites["net.layers_0.kernel"]["fn"].log_prob(value), expected, rtol=1e-5)
    hints = []

    def traced(tau):
        site = run(model, data={"tau": tau})["net.layers_0.kernel"]
        hints.append(site["infer"]["fspace"]["scale"])
        return site["value"]

    jax.jit(traced)(5.0)
    assert hints == [pytest.approx(2**-0.5)]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_fan_in_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match="scale"):
        fan_in(scale)


def test_distribution_prior_for_every_weight(network):
    sites = weights_of(run(make_model(network, prior=dist.Normal(2.0, 0.25)), X))
    for site in sites.values():
        base = dist.Normal(2.0, 0.25).log_prob(site["value"]).sum()
        np.testing.assert_allclose(site["fn"].log_prob(site["value"]), base, rtol=1e-5)
        assert site["infer"]["fspace"]["scale"] == 0.25


def test_multivariate_prior_keeps_its_event():
    law = dist.MultivariateNormal(jnp.zeros(3), jnp.diag(jnp.array([1.0, 4.0, 9.0])))
    prior = {"W": law, "b": law, "gain": flat(), "V": fan_in(2.0)}
    sites = weights_of(run(make_model(pair(), prior=prior), X, data={"net.gain": jnp.ones(3)}))
    w = sites["W"]["value"]
    np.testing.assert_allclose(sites["W"]["fn"].log_prob(w), law.log_prob(w).sum(), rtol=1e-5)
    assert sites["W"]["infer"]["fspace"]["scale"] == pytest.approx(2**-0.5)
    assert sites["V"]["infer"]["fspace"]["scale"] == pytest.approx(2 * 3**-0.5)


def test_callable_prior_sees_paths_and_shapes():
    seen = {}

    def prior(path, shape):
        seen[path] = shape
        return dist.Laplace() if path.endswith("kernel") else fan_in(0.5)

    sites = weights_of(run(make_model(linen(), prior=prior), X))
    assert seen["layers_0.kernel"] == (2, 3) and seen["layers_3.bias"] == (1,) and len(seen) == 6
    assert isinstance(sites["layers_0.kernel"]["fn"].base_dist.base_dist, dist.Laplace)
    assert sites["layers_0.bias"]["infer"]["fspace"]["scale"] == 0.5


def test_flat_prior_has_density_one(network):
    model = make_model(network, prior=flat())
    start = {k: s["value"] for k, s in run(make_model(network), X).items() if k.startswith("net.")}
    for shift in (0.0, 100.0):
        values = {k: v + shift for k, v in start.items()}
        total, trace = log_density(handlers.seed(model, 0), (X, Y), {}, values)
        likelihood = trace["y"]["fn"].log_prob(Y).sum()
        np.testing.assert_allclose(total, likelihood, rtol=1e-6)
    assert trace[next(iter(start))]["fn"].support.base_constraint is dist.constraints.real


def test_flat_prior_cannot_be_sampled():
    with pytest.raises(NotImplementedError, match=r"init_to_network"):
        run(make_model(linen(), prior=flat()), X)


@pytest.mark.parametrize(
    ("prior", "error", "match"),
    [
        ({"W": dist.Normal()}, ValueError, r"missing \['V', 'b', 'gain'\].*The weights are"),
        (dict.fromkeys(("W", "b", "gain", "V", "c"), dist.Normal()), ValueError, r"unknown \['c'\]"),
        (1.0, TypeError, "float"),
        (lambda path, shape: None, TypeError, "'V' is a NoneType"),
        (dist.Normal(jnp.zeros(4), 1.0), ValueError, r"shape \(3, 1\)"),
        (dist.Normal(jnp.zeros((5, 5, 5)), 1.0), ValueError, r"batch_shape=\(5, 5, 5\)"),
        (dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)), ValueError, r"event_shape=\(2,\)"),
        (dist.Poisson(1.0), ValueError, "discrete"),
    ],
)
def test_wrong_priors_are_refused(prior, error, match):
    with pytest.raises(error, match=match):
        draw(pair(), prior=prior)


# --- initial values ---


def initial_values(module, seed=0, **options):
    """Where a chain starts, without compiling its potential."""
    model = handlers.seed(make_model(module, **options), jax.random.key(seed))
    trace = handlers.trace(handlers.substitute(model, substitute_fn=init_to_network)).get_trace(X)
    return {k: np.asarray(s["value"]) for k, s in weights_of(trace).items()}


def test_initial_values_follow_the_linen_initializer():
    layer = nn.Dense(2000, kernel_init=nn.initializers.uniform(0.25), bias_init=nn.initializers.constant(3.0))
    z = initial_values(nn.Sequential([layer, nn.Dense(1)]))
    kernel = z["layers_0.kernel"]
    assert kernel.min() >= 0 and kernel.max() < 0.25
    assert abs(kernel.std() - 0.25 / 12**0.5) < 0.003  # standard error of a uniform's sd: .0005
    np.testing.assert_array_equal(z["layers_0.bias"], 3.0)
    assert abs(z["layers_1.kernel"].std() * 2000**0.5 - 1) < 0.1  # lecun normal, standard error .016


def test_initial_values_of_built_modules_are_their_own_shuffled():
    module = eqx.nn.MLP(2, 1, 500, 1, key=jax.random.key(5))
    z0, z1 = initial_values(module, 0), initial_values(module, 1)
    own = np.asarray(module.layers[0].weight)
    assert not np.array_equal(z0["layers.0.weight"], own)
    assert not np.array_equal(z0["layers.0.weight"], z1["layers.0.weight"])
    np.testing.assert_array_equal(np.sort(z0["layers.0.weight"], None), np.sort(own, None))


def test_initial_values_of_a_pair_and_of_flat_weights():
    z0, z1 = initial_values(pair(), prior=flat()), initial_values(pair(), 1, prior=flat())
    np.testing.assert_array_equal(z0["gain"], 1.0)
    np.testing.assert_array_equal(z0["V"], 2.0)
    assert not np.allclose(z0["W"], z1["W"])


def test_the_initializer_is_traced_once_for_all_weights():
    """Each weight array draws it by a key of its own; tracing a deep network anew for each would be quadratic."""
    calls = []

    def init(key, shape):
        calls.append(shape)
        keys = jax.random.split(key, 3)
        return {name: jax.random.normal(k, (*shape, 1)) for name, k in zip("abc", keys, strict=True)}

    z = initial_values((init, lambda w, x: x @ (w["a"] + w["b"] + w["c"])))
    assert len(calls) == 1
    assert not np.allclose(z["a"], z["b"]) and not np.allclose(z["b"], z["c"])


def test_every_weight_array_has_its_own_randomness():
    z = initial_values(nn.Sequential([nn.Dense(2), nn.Dense(2), nn.Dense(1)]))
    assert not np.allclose(z["layers_0.kernel"], z["layers_1.kernel"])


def test_positive_weights_start_at_the_prior_median():
    site = run(make_model(linen(), prior=dist.HalfNormal(0.1)), X)["net.layers_0.kernel"]
    assert site["infer"]["fspace"] == {"init": None, "scale": None}
    z = initial_values(linen(), prior=dist.HalfNormal(0.1))
    kernel = z["layers_0.kernel"]  # the median of |N(0, .1²)| is .067; of 15 draws as a rule between .03 and .11
    assert np.all(kernel > 0.0) and 0.02 < np.median(kernel) < 0.15


@pytest.mark.slow
def test_init_to_network_falls_back_to_the_median():
    def model():
        numpyro.sample("a", dist.Gamma(2.0, 3.0))
        numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), (2,)))

    for strategy in (init_to_network, init_to_network()):
        starts = [
            initialize_model(jax.random.key(3), model, init_strategy=s).param_info.z for s in (strategy, init_to_median)
        ]
        np.testing.assert_array_equal(starts[0]["a"], starts[1]["a"])
        np.testing.assert_array_equal(starts[0]["b"], starts[1]["b"])


@pytest.mark.slow
def test_initialize_model_takes_the_strategy():
    def starts(strategy):
        model = make_model(pair(), prior=flat())
        info = initialize_model(jax.random.key(0), model, init_strategy=strategy, model_args=(X, Y))
        return info.param_info.z["net.V"]

    np.testing.assert_array_equal(starts(init_to_network), 2.0)
    np.testing.assert_array_equal(starts(init_to_value(values={"net.V": jnp.full((3, 1), 0.125)})), 0.125)


def test_double_precision_starts_in_double_precision():
    with jax.enable_x64(True):
        site = run(make_model(nn.Dense(1)), X)["net.kernel"]
        init = site["infer"]["fspace"]["init"]
        assert init(jax.random.key(0)).dtype == site["value"].dtype == jnp.float64


# --- engines ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_nuts_starts_from_the_network_and_moves(kind):
    network = KINDS[kind]()
    kernel = NUTS(make_model(network), init_strategy=init_to_network, max_tree_depth=3)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.asarray(X), jnp.asarray(Y))
    samples = mcmc.get_samples()
    assert not np.allclose(samples["f"][0], samples["f"][-1])
    assert all(np.all(np.isfinite(v)) for v in samples.values())
    again = Predictive(make_model(network), samples)(jax.random.key(1), jnp.asarray(X))
    np.testing.assert_allclose(again["f"], samples["f"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_gradients_of_vectorized_chains(network):
    model = handlers.seed(make_model(network), 0)
    start = {k: s["value"] for k, s in run(make_model(network), X).items() if k.startswith("net.")}
    chains = jax.tree.map(lambda v: jnp.stack([v, v + 0.1]), start)
    gradient = jax.grad(lambda w: log_density(model, (X, Y), {}, w)[0])
    both = jax.jit(jax.vmap(gradient))(chains)
    for name, second in gradient({k: v + 0.1 for k, v in start.items()}).items():
        assert np.any(second != 0)
        np.testing.assert_allclose(both[name][1], second, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_svi_with_a_mean_field_guide():
    model = make_model(pair())
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 20, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert all(name.startswith("net.") for name in result.params)


def test_substitute_condition_and_block():
    zero = {k: jnp.zeros_like(s["value"]) for k, s in weights_of(run(make_model(linen()), X)).items()}
    data = {f"net.{k}": v for k, v in zero.items()}
    np.testing.assert_array_equal(run(make_model(linen()), X, data=data)["f"]["value"], 0.0)
    observed = run(handlers.condition(make_model(linen()), data=data), X)
    assert all(s["is_observed"] for s in weights_of(observed).values())
    blocked = run(handlers.block(handlers.seed(make_model(linen()), 0), hide_fn=lambda s: "net" in s["name"]), X)
    assert not weights_of(blocked) and np.any(blocked["f"]["value"] != 0)


def test_structure_is_found_without_running_the_network():
    calls = []

    def init(key, shape):
        calls.append(isinstance(key, jax.core.Tracer) or isinstance(jnp.zeros(()), jax.core.Tracer))
        return {"kernel": jnp.zeros((*shape, 1)), "bias": jnp.zeros(1)}

    draw((init, lambda w, x: x @ w["kernel"] + w["bias"]))
    assert calls == [True]


def test_default_prior_under_jit_and_vmap():
    def gains(key):
        trace = run(make_model(pair()), X, seed=0)
        return trace["net.gain"]["fn"].mean + 0 * jax.random.normal(key)

    np.testing.assert_array_equal(jax.jit(jax.vmap(gains))(jax.random.split(jax.random.key(0), 2)), 1.0)


# --- mistakes ---


class Noisy(nn.Module):
    deterministic: bool | None

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(1)(x))


class NnxWith(nnx.Module):
    def __init__(self, layer, rngs):
        self.first, self.layer = nnx.Linear(2, 1, rngs=rngs), layer

    def __call__(self, x):
        return self.layer(self.first(x))


class EqxWith(eqx.Module):
    first: eqx.nn.Linear
    layer: eqx.Module

    def __call__(self, x):
        return self.layer(self.first(x))


def nnx_with(layer, **options):
    return NnxWith(layer(**options, rngs=nnx.Rngs(1)), nnx.Rngs(0))


def eqx_with(layer):
    return EqxWith(eqx.nn.Linear(2, 1, key=jax.random.key(0)), layer)


def batch_norm():
    return eqx.nn.BatchNorm(1, "batch", mode="batch")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: nn.Sequential([nn.Dense(1), nn.BatchNorm(use_running_average=False)]),
            r"\['batch_stats'\].*LayerN",
        ),
        (
            lambda: nn.Sequential([nn.Dense(1), nn.BatchNorm(use_running_average=True)]),
            r"\['batch_stats'\].*freeze",
        ),
        (lambda: Noisy(False), "dropout.*deterministic=True"),
        (lambda: nnx_with(nnx.BatchNorm, num_features=1), r"\['BatchStat'\].*module\.eval\(\)"),
        (lambda: nnx_with(nnx.Dropout, rate=0.5), r"random stream.*module\.eval\(\)"),
        (lambda: eqx_with(batch_norm()), r"StateIndex 'layer\..*GroupNorm"),
        (lambda: eqx.nn.make_with_state(lambda: eqx_with(batch_norm()))()[0], "StateIndex"),
        (lambda: eqx_with(eqx.nn.Dropout(0.5)), "Dropout 'layer'.*inference_mode"),
    ],
)
def test_state_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        draw(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Noisy(True),
        lambda: nnx_with(nnx.Dropout, rate=0.5, deterministic=True),
        lambda: nnx_with(nnx.BatchNorm, num_features=1, use_running_average=True),
        lambda: eqx.nn.inference_mode(eqx_with(eqx.nn.Dropout(0.5))),
        lambda: eqx_with(eqx.nn.Dropout(0.0)),
    ],
)
def test_switched_off_layers_are_deterministic(make):
    w, f = draw(make())
    first = next(v for v in w.values() if v.ndim == 2).reshape(2)
    assert abs(np.corrcoef(f, X @ first)[0, 1]) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2", (2, 0), (2.0,), None])
def test_input_shape_must_be_a_shape(bad):
    with pytest.raises(ValueError, match="input_shape="):
        draw(linen(), input_shape=bad)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_input_shape_must_fit_the_module(kind):
    with pytest.raises(ValueError, match=r"input_shape=\(5,\)"):
        draw(KINDS[kind](), input_shape=5, x=np.ones((4, 5)))


@pytest.mark.parametrize(
    ("x", "shape", "match"),
    [
        (np.ones(5), 1, r"x\[:, None\]"),
        (np.ones(2), 2, r"x\[None\]"),
        (np.ones((5, 3)), 2, r"needs \[M, 2\]"),
        (np.ones((5, 2, 2)), 2, r"needs \[M, 2\]"),
    ],
)
def test_inputs_of_another_shape_are_refused(x, shape, match):
    with pytest.raises(ValueError, match=match):
        draw(nn.Dense(1), x=x, input_shape=shape)


def test_scalar_inputs_have_the_empty_shape():
    module = (lambda key, shape: jnp.ones(1), lambda w, x: x[:, None] * w)
    assert draw(module, x=np.ones(5), input_shape=())[1].shape == (5,)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        draw(module, x=np.ones(()), input_shape=())


def test_outputs_must_keep_the_leading_axis():
    module = (lambda key, shape: jnp.zeros((4, *shape)), lambda w, x: w @ x.T)
    with pytest.raises(ValueError, match=r"leading axis M.*jax\.vmap"):
        draw(module)


def test_networks_without_real_weights_are_refused():
    for module in (nn.Sequential([jnp.tanh]), (lambda key, shape: {}, lambda w, x: x)):
        with pytest.raises(ValueError, match="no weights"):
            draw(module)
    counts = (lambda key, shape: {"n": jnp.zeros(2, int)}, lambda w, x: x + w["n"])
    with pytest.raises(ValueError, match="'n' is int32"):
        draw(counts)


@pytest.mark.parametrize("module", [jnp.tanh, nn.Dense, (jnp.tanh,), (jnp.tanh, 1), None, eqx.nn.MLP])
def test_other_objects_are_refused(module):
    with pytest.raises(TypeError, match="linen module, a flax nnx module, an equinox module, or a pair"):
        draw(module)


def test_calls_in_the_wrong_place_are_refused():
    with pytest.raises(RuntimeError, match="needs a random key"):
        random_module("net", linen(), input_shape=2)

    def model():
        with numpyro.plate("ensemble", 3):
            random_module("net", linen(), input_shape=2)

    with pytest.raises(ValueError, match="outside of plates"):
        run(model)


@pytest.mark.slow
def test_norm_layers_of_equinox_are_known_by_their_kind():
    """Built inside a compiled model their values are not known; the prior is the same."""

    def model(x):
        first, last = jax.random.split(jax.random.key(0))
        layers = [eqx.nn.Linear(1, 4, key=first), eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 1, key=last)]
        numpyro.deterministic("f", random_module("net", eqx.nn.Sequential(layers), input_shape=1)(x))

    x = jnp.ones((3, 1))
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(x)
    weights = {k: site["value"] for k, site in trace.items() if site["type"] == "sample"}

    def density(weights):
        return log_density(model, (x,), {}, weights)[0]

    np.testing.assert_allclose(density(weights), jax.jit(density)(weights), rtol=1e-6)


class Recurrent(nnx.Module):
    def __init__(self, layer, extra=None):
        self.layer, self.extra = layer, extra

    def __call__(self, x):
        h = self.layer(x)[:, -1]
        return h if self.extra is None else self.extra(h)


def cell(kind, **settings):
    return nnx.RNN(kind(2, 3, rngs=nnx.Rngs(0), **settings))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(cell(nnx.GRUCell)),
        lambda: Recurrent(nnx.Bidirectional(cell(nnx.OptimizedLSTMCell), cell(nnx.SimpleCell))),
        lambda: Recurrent(cell(nnx.LSTMCell), nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))),
    ],
    ids=["gru", "bidirectional", "dropout switched off"],
)
def test_recurrent_nnx_layers_are_functions_of_weights_and_inputs(make):
    """Their keys change at a call, and no value depends on them: f is the module's own at its weights."""
    x, module = np.random.default_rng(0).normal(size=(5, 4, 2)).astype(np.float32), make()
    network = read_network("net", module, (4, 2))
    expected = module(jnp.asarray(x))
    for _ in range(2):
        np.testing.assert_allclose(network.apply(network.weights, x), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(cell(nnx.GRUCell), nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
        lambda: Recurrent(cell(nnx.GRUCell, carry_init=nnx.initializers.normal(1.0))),
    ],
    ids=["dropout", "random carry"],
)
@pytest.mark.filterwarnings("ignore:carry_init is provided")
def test_randomness_of_recurrent_nnx_layers_is_refused(make):
    with pytest.raises(ValueError, match=r"active nnx random stream.*module\.eval\(\).*carry of zeros"):
        read_network("net", make(), (4, 2))


def test_factors_of_a_network_that_is_created_in_the_model_are_not_guessed():
    """Whether they are initially one, so that their prior has mean 1, is not known while the model is compiled."""

    class Net(nnx.Module):
        def __init__(self):
            self.gain, self.linear = nnx.Param(jnp.ones(1)), nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.gain.get_value() * self.linear(x)

    def model(x, prior=None):
        f = random_module("net", Net(), input_shape=1, prior=prior)
        numpyro.deterministic("f", f(x))

    x = X[:, :1]
    with pytest.warns(RuntimeWarning, match=r"The default prior of the weights \['gain'\] depends on whether"):
        Predictive(model, num_samples=2)(jax.random.key(0), x)
    priors = {"gain": dist.Normal(1.0, 0.1), "linear.kernel": fan_in(), "linear.bias": fan_in()}
    assert Predictive(model, num_samples=2)(jax.random.key(0), x, priors)["net.gain"].shape == (2, 1)
