"""The last layer of a network: which weights it is, and that features, offset and output agree with the network."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.tiers import some

from numpyro_fspace.model.last_layer.find_last_layer import find_last_layer
from numpyro_fspace.model.networks.adapters import read_network

KEY = jax.random.key(0)


def dense(num_outputs=1, bias=True):
    return nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(num_outputs, use_bias=bias)])


class Module(nn.Module):
    """A linen module by its function."""

    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(self, x)


def hidden(x, width=6):
    return nn.tanh(nn.Dense(width)(x))


class LastFirst(nn.Module):
    """Its last layer comes first in the alphabet, and the layer before it is linear too."""

    def setup(self):
        self.aa, self.yy, self.zz = nn.Dense(2), nn.Dense(4), nn.Dense(6)

    def __call__(self, x):
        return self.aa(self.yy(nn.tanh(self.zz(x))))


def skip(self, x):
    return x[:, :1] + nn.Dense(1)(jnp.concatenate([x, hidden(x)], -1))


def wide_and_deep(self, x):
    return nn.Dense(2)(hidden(x)) + nn.Dense(2, use_bias=False)(x)


def scaled(self, x):
    return self.param("scale", nn.initializers.ones, ()) * nn.Dense(1)(hidden(x))


def attention(self, x):
    h = nn.MultiHeadDotProductAttention(2, qkv_features=4)(*2 * [nn.Dense(4)(x[:, :, None])])
    return nn.Dense(1)(h.mean(1))


def attention_last(self, x):
    return nn.MultiHeadDotProductAttention(2, qkv_features=4, out_features=2)(*2 * [hidden(x[:, :, None])]).mean(1)


def normed(self, x):
    return nn.Dense(3)(nn.LayerNorm()(hidden(x)))


def equinox_network(out):
    return eqx.nn.MLP(2, out, 6, 1, activation=jnp.tanh, key=KEY)


def pair():
    def init(key, shape):
        return {"b": jnp.zeros(()), "head": jnp.ones(6), "in": jax.random.normal(key, (*shape, 6))}

    return init, lambda w, x: jnp.tanh(x @ w["in"]) @ w["head"] + w["b"]


NETWORKS = {
    "dense": (dense(), {"layers_2.bias", "layers_2.kernel"}),
    "three outputs": (dense(3), {"layers_2.bias", "layers_2.kernel"}),
    "no bias": (dense(bias=False), {"layers_2.kernel"}),
    "linear": (nn.Dense(2), {"bias", "kernel"}),
    "nnx": (
        nnx.Sequential(nnx.Linear(2, 6, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1))),
        {"layers.2.bias", "layers.2.kernel"},
    ),
    "equinox": (equinox_network(3), {"layers.1.bias", "layers.1.weight"}),
    "equinox, scalar": (equinox_network("scalar"), {"layers.1.bias", "layers.1.weight"}),
    "pair": (pair(), {"b", "head"}),
    "skip": (Module(skip), {"Dense_0.bias", "Dense_0.kernel"}),
    "wide and deep": (Module(wide_and_deep), {"Dense_0.bias", "Dense_0.kernel", "Dense_2.kernel"}),
    "norm": (Module(normed), {"Dense_0.bias", "Dense_0.kernel"}),
    "flat": (nn.Sequential([dense(), lambda h: h[:, 0]]), {"layers_0.layers_2.bias", "layers_0.layers_2.kernel"}),
    "rescaled": (nn.Sequential([dense(), lambda h: 3 * h + 1]), {"layers_0.layers_2.bias", "layers_0.layers_2.kernel"}),
    "last first": (LastFirst(), {"aa.bias", "aa.kernel"}),
    "learned scale": (Module(scaled), {"Dense_0.bias", "Dense_0.kernel"}),
    "attention": (Module(attention), {"Dense_1.bias", "Dense_1.kernel"}),
    "attention last": (
        Module(attention_last),
        {"MultiHeadDotProductAttention_0.out.bias", "MultiHeadDotProductAttention_0.out.kernel"},
    ),
}


def find(module, shape=(2,)):
    return find_last_layer("f", read_network("f", module, shape), shape)


@pytest.mark.parametrize("name", some(NETWORKS, 5))
def test_layer(name, key):
    """It is the layer used last, and offset plus features times its columns is the network's output."""
    module, paths = NETWORKS[name]
    layer = find(module)
    # Linen counts the layers of a module in the order of its calls, which differs where a call is an argument.
    assert {path.split(".")[-1] for path in layer.paths} == {path.split(".")[-1] for path in paths}
    assert len(layer.paths) == len(paths)
    keys = jax.random.split(key, len(layer.network.weights) + 2)
    weights = dict(zip(layer.hidden, keys, strict=False))
    weights = {path: jax.random.normal(one, layer.network.weights[path].shape) for path, one in weights.items()}
    last = jax.random.normal(keys[-1], (layer.num_features, layer.num_outputs))
    x = jax.random.normal(keys[-2], (7, 2))
    out = layer.output(weights, last, x)
    built = layer.features(weights, x) @ last + layer.offset(weights, x)
    np.testing.assert_allclose(out.reshape(7, -1), built, rtol=1e-4, atol=1e-4)
    assert not np.allclose(out, layer.output(weights, 2 * last, x))


def test_alphabet():
    """The order of use counts, not that of names: nor does a scale of the output hide the layer."""
    assert find(LastFirst()).paths == ("aa.bias", "aa.kernel")
    assert "scale" in find(Module(scaled)).hidden


def test_integers():
    """Networks that take integers are looked at with integers."""
    layer = find(nn.Sequential([nn.Embed(10, 3), lambda h: h.reshape(len(h), -1), nn.Dense(1)]))
    assert layer.network.takes_integers and layer.num_features == 7
    assert not find(dense()).network.takes_integers


class Embedded(eqx.Module):
    """A network whose first input is the number of a row of a table."""

    table: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.table, self.mlp = eqx.nn.Embedding(4, 3, key=key), eqx.nn.MLP(4, 1, 6, 1, key=key)

    def __call__(self, x):
        return self.mlp(jnp.concatenate([self.table(x[0].astype(int)), x[1:]]))


def in_place(self, x):
    return nn.Dense(1)(hidden(x.at[:, 0].multiply(2.0)))


@pytest.mark.parametrize(
    "module", [pytest.param(Embedded(KEY), marks=pytest.mark.slow), Module(in_place)], ids=["embedding", "in place"]
)
def test_networks_that_need_arrays_of_jax(module):
    """Their programs index by tracers and call methods of arrays that NumPy's lack."""
    network = read_network("f", module, (2,))
    x = np.stack([np.arange(8) % 4, np.linspace(-1.0, 1.0, 8)], -1)
    layer = find_last_layer("f", network, (2,), x)
    assert layer.num_features == 7 and not layer.network.takes_integers
    v = {path: jax.random.normal(KEY, network.weights[path].shape) for path in layer.hidden}
    columns = jax.random.normal(KEY, (7, 1))
    by_features = layer.features(v, x) @ columns + layer.offset(v, x)
    np.testing.assert_allclose(layer.output(v, columns, x), by_features, rtol=1e-5, atol=1e-5)


def test_images():
    network = nn.Sequential([nn.Conv(3, (3, 3), strides=2), nn.relu, lambda h: h.reshape(len(h), -1), nn.Dense(10)])
    layer = find(network, (6, 6, 1))
    assert layer.paths == ("layers_3.bias", "layers_3.kernel")
    assert (layer.num_features, layer.num_outputs) == (28, 10)


def used_twice(self, x):
    layer = nn.Dense(1)
    h = hidden(x)
    return layer(h * layer(h))


def two_heads(self, x):
    h = hidden(x)
    return {"mean": nn.Dense(1)(h), "scale": nn.Dense(1)(h)}


def joined_heads(self, x):
    h = hidden(x)
    return jnp.concatenate([nn.Dense(1)(h), nn.Dense(1)(h)], -1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential([dense(), nn.softplus]),
            "not affine in any of the layers.*Move what follows it into the likeli",
        ),
        (nn.Sequential([dense(), nn.relu]), "not affine in any"),
        (Module(used_twice), "not affine in any.*used once"),
        (Module(two_heads), r"one array \[M\] or \[M, K\], got .*'mean'.*separate network for each output"),
        (nn.Sequential([nn.Dense(6), nn.tanh, nn.DenseGeneral((2, 2))]), r"got \(5, 2, 2\)"),
        (Module(joined_heads), "do not split into 2 outputs.*one dense layer"),
        (nn.Sequential([dense(3), nn.LayerNorm()]), "do not share their features.*one dense layer"),
        (nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(1, dtype=jnp.bfloat16)]), "bfloat16.*float32"),
    ],
)
def test_refused(module, message):
    with pytest.raises(ValueError, match=f"^f: .*{message}"):
        find(module)


def test_half_precision_weights():
    """Weights of half precision are drawn in single precision, as ``random_module`` does."""
    layer = find(nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(1, param_dtype=jnp.bfloat16)]))
    assert all(array.dtype == jnp.float32 for array in layer._arrays(jnp.ones((7, 1))).values())


def test_found_once(monkeypatch):
    """What was found for a program is kept; another program is looked at anew."""
    from numpyro_fspace.model.last_layer import find_last_layer as last_layer

    find(dense(2))
    calls = []
    monkeypatch.setattr(last_layer, "_find", lambda *args: calls.append(args) or {"paths": ()})
    assert find(dense(2)).paths and not calls
    assert find(nn.Sequential([nn.Dense(7), nn.tanh, nn.Dense(2)])).paths == () and len(calls) == 1


SKIPS = {
    "no skip": (nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(2)]), False),
    "relu and normalization": (nn.Sequential([nn.Dense(6), nn.LayerNorm(), nn.relu, nn.Dense(1)]), False),
}


class Skip(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(6)(x))) + jnp.sin(x[:, :1])


@pytest.mark.parametrize("kind", [*SKIPS, "skip"])
def test_what_is_added_to_the_last_layer_is_found(kind):
    """The output where the last layer is zero: left out if it is zero by the program, else computed."""
    net, has_offset = SKIPS.get(kind, (Skip(), True))
    layer = find_last_layer("net", read_network("net", net, (1,)), (1,))
    x = np.linspace(-1.0, 1.0, 4)[:, None]
    hidden = {path: jnp.ones(layer.network.weights[path].shape) for path in layer.hidden}
    assert layer.has_offset == has_offset
    expected = np.sin(x) if has_offset else np.zeros((4, layer.num_outputs))
    np.testing.assert_allclose(layer.offset(hidden, x), expected, atol=1e-6)


# Features of the inputs


def on(transform):
    """A network whose first layer reads ``transform(x)``."""
    return nn.Sequential([transform, nn.Dense(6), nn.tanh, nn.Dense(1)])


LINEAR = {
    "nothing": lambda x: x,
    "units": lambda x: x / jnp.array([3.0, 4.0]),
    "columns": lambda x: jnp.concatenate([x[:, 1:], 2.0 * x[:, [0]], x[:, ::-1]], -1),
    "shapes": lambda x: x.reshape(len(x), 1, 2).squeeze(1),
    "products": lambda x: x @ jnp.array([[1.0, 2.0], [0.0, 1.0]]),
    "a jitted product": jax.jit(lambda x: 3.0 * x),
}
FEATURES = {
    "a translation": lambda x: (x - jnp.array([1.0, 2.0])) / jnp.array([3.0, 4.0]),
    "sines": lambda x: jnp.concatenate([x, jnp.sin(x)], -1),
    "squares": lambda x: jnp.concatenate([x, x**2], -1),
    "interactions": lambda x: jnp.concatenate([x, x[:, :1] * x[:, 1:]], -1),
    "relu": jax.nn.relu,
    "a norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "the inverse": lambda x: 1.0 / (3.0 + x),
    "a jitted sine": jax.jit(jnp.sin),
}


@pytest.mark.parametrize("name", [*LINEAR, *FEATURES])
def test_a_network_that_makes_features_of_its_inputs_is_told_apart(name):
    network = read_network("f", on((LINEAR | FEATURES)[name]), (2,))
    assert find_last_layer("f", network, (2,)).makes_features == (name in FEATURES)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda module, x: nn.Dense(1)(jnp.tanh(nn.Dense(3)(x) ** 2)), False),
        (lambda module, x: nn.Dense(1)(hidden(x)) + jnp.sin(x[:, :1]), True),  # beside the network
        (lambda module, x: nn.Dense(1)(hidden(nn.LayerNorm()(x))), True),
        (skip, False),
        pytest.param(attention, False, marks=pytest.mark.slow),
    ],
)
def test_features_beside_and_before_layers(fn, expected):
    network = read_network("f", Module(fn), (2,))
    assert find_last_layer("f", network, (2,)).makes_features == expected
