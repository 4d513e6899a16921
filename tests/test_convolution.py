"""Convolutions as products: equal to JAX's, with their gradients, and without a convolution where that is the point."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from numpy.testing import assert_allclose
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.networks.adapters import read_network

CONVOLUTIONS = (fs.model.conv_general_dilated, lax.conv_general_dilated)
NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def both(size, window, **settings):
    """An image and a kernel of a rank, and both convolutions of them with the same settings."""
    rank = len(size)
    x = jax.random.normal(jax.random.key(0), (2, *size, 3))
    kernel = jax.random.normal(jax.random.key(1), (*window, 3, 4))
    settings = {"window_strides": (1,) * rank, "padding": "SAME", "dimension_numbers": NUMBERS[rank], **settings}
    return (x, kernel), *(functools.partial(conv, **settings) for conv in CONVOLUTIONS)


CASES = {
    "same": ((7, 8), (3, 3), {}),
    "even window": ((7, 8), (2, 4), {}),
    "one pixel": ((7, 8), (1, 1), {}),
    "strides": ((9, 8), (3, 2), {"window_strides": (2, 3)}),
    "valid": ((9, 8), (3, 3), {"padding": "VALID"}),
    "valid, strides": ((9, 8), (3, 3), {"padding": "VALID", "window_strides": (3, 2)}),
    "given padding": ((9, 8), (3, 3), {"padding": ((2, 0), (1, 3))}),
    "padding cut off": ((9, 8), (3, 3), {"padding": ((-1, 0), (1, -2))}),
    "dilated": ((9, 8), (3, 2), {"rhs_dilation": (2, 3)}),
    "dilated, strides": ((11, 12), (3, 3), {"rhs_dilation": (2, 2), "window_strides": (2, 2)}),
    "line": ((11,), (3,), {"window_strides": (2,)}),
    "volume": ((4, 5, 6), (3, 2, 3), {"window_strides": (1, 2, 2)}),
}


@pytest.mark.parametrize("case", some(CASES, 3))
def test_equals_jax_and_so_do_its_gradients(case):
    size, window, settings = CASES[case]
    arrays, ours, theirs = both(size, window, **settings)
    y = theirs(*arrays)
    assert_allclose(ours(*arrays), y, rtol=1e-5, atol=1e-5)
    weights = jax.random.normal(jax.random.key(2), y.shape)
    gradients = [jax.grad(lambda *a, f=f: (f(*a) * weights).sum(), (0, 1))(*arrays) for f in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends keep JAX's convolution")
@pytest.mark.parametrize("case", CASES)
def test_is_a_product(case):
    size, window, settings = CASES[case]
    arrays, ours, theirs = both(size, window, **settings)
    assert "conv_general_dilated" in str(jax.make_jaxpr(theirs)(*arrays))
    program = str(jax.make_jaxpr(ours)(*arrays))
    assert "dot_general" in program
    assert "conv_general_dilated" not in program


def has_convolution(fn, *arrays):
    """Whether XLA's convolution is in the program of a function."""
    return "conv_general_dilated[" in str(jax.make_jaxpr(fn)(*arrays)).replace(" ", "").replace("\n", "")


@pytest.mark.parametrize(
    ("image", "kernel", "numbers"),
    [
        ((2, 3, 6, 7), (3, 2, 3, 4), ("NCHW", "HWIO", "NCHW")),
        ((2, 3, 6, 7), (4, 3, 3, 2), None),
        ((6, 2, 7, 3), (4, 3, 2, 3), ("HNWC", "OHWI", "CHNW")),
    ],
)
def test_axes_may_have_any_order(image, kernel, numbers):
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((image, kernel)))
    settings = {"window_strides": (1, 2), "padding": "SAME", "dimension_numbers": numbers}
    ours, theirs = (functools.partial(conv, **settings) for conv in CONVOLUTIONS)
    assert_allclose(ours(x, weights), theirs(x, weights), rtol=1e-5, atol=1e-5)
    assert has_convolution(theirs, x, weights)
    assert has_convolution(ours, x, weights) == (jax.default_backend() != "cpu")


@pytest.mark.parametrize(
    ("image", "kernel", "settings"),
    [
        ((2, 6, 6, 3), (3, 3, 1, 6), {"feature_group_count": 3}),
        ((2, 6, 6, 3), (3, 3, 3, 4), {"batch_group_count": 2}),
        ((2, 6, 6, 3), (3, 3, 3, 4), {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}),
    ],
)
def test_what_is_no_product_is_left_to_jax(image, kernel, settings):
    settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NUMBERS[2], **settings}
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((image, kernel)))
    ours, theirs = (conv(x, weights, **settings) for conv in CONVOLUTIONS)
    assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_flax_layers_take_it():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    ours, theirs = (nn.Conv(5, (3, 3), strides=2, conv_general_dilated=conv) for conv in CONVOLUTIONS)
    params = theirs.init(jax.random.key(1), x)
    assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-5, atol=1e-5)
    low = nn.Conv(5, (3, 3), dtype=jnp.bfloat16, conv_general_dilated=fs.model.conv_general_dilated)
    assert low.apply(params, x).dtype == jnp.bfloat16


def test_nnx_layers_take_it():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    layers = [nnx.Conv(3, 5, (3, 3), conv_general_dilated=conv, rngs=nnx.Rngs(0)) for conv in CONVOLUTIONS]
    assert_allclose(layers[0](x), layers[1](x), rtol=1e-5, atol=1e-5)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3), strides=2)(x)), (2, 2), (2, 2))
        return nn.Dense(2)(x.reshape(len(x), -1))


class Nnx(nnx.Module):
    def __init__(self):
        self.layer = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
        self.last = nnx.Linear(256, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(jax.jit(nnx.gelu)(self.layer(x)).reshape(len(x), -1))


class Equinox(eqx.Module):
    layer: eqx.nn.Conv2d
    last: eqx.nn.Linear

    def __init__(self):
        self.layer = eqx.nn.Conv2d(8, 4, 3, key=jax.random.key(0))  # the image's first axis is that of its channels
        self.last = eqx.nn.Linear(24, 2, key=jax.random.key(1))

    def __call__(self, x):
        return self.last(jnp.tanh(self.layer(x)).ravel())


def by_hand(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2]).mean((1, 2))


PAIR = (lambda key, shape: jax.random.normal(key, (3, 3, 3, 2)), lambda kernel, x: by_hand(x, kernel))
NETWORKS = {
    "linen": (Linen, lambda module, x: module.apply(module.init(jax.random.key(0), x), x)),
    "nnx": (Nnx, lambda module, x: module(x)),
    "equinox": (Equinox, lambda module, x: jax.vmap(module)(x)),
    "pair": (lambda: PAIR, lambda module, x: by_hand(x, module[0](jax.random.key(0), None))),
}


@pytest.mark.parametrize("kind", some(NETWORKS, 2))
def test_networks_take_products_of_themselves(kind):
    """The same values and gradients as of the module itself, whose program has XLA's convolution."""
    make, call = NETWORKS[kind]
    module, x = make(), jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    network = read_network("net", module, x.shape[1:])
    weights = network.weights if network.init is None else network.init(jax.random.key(0))
    assert_allclose(network.apply(weights, x), call(module, x), rtol=1e-5, atol=1e-5)
    slopes = [
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))
        for f in (functools.partial(network.apply, weights), functools.partial(call, module))
    ]
    assert_allclose(slopes[0](x), slopes[1](x), rtol=1e-4, atol=1e-5)
    assert has_convolution(functools.partial(call, module), x)
    assert has_convolution(network.apply, weights, x) == (jax.default_backend() != "cpu")


def test_networks_run_without_jit():
    network, x = read_network("net", Linen(), (8, 8, 3)), jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    weights = network.init(jax.random.key(0))
    with jax.disable_jit():
        eagerly = network.apply(weights, x)
    assert_allclose(eagerly, network.apply(weights, x), rtol=1e-5, atol=1e-5)


def test_many_patches_and_empty_results_are_left_to_jax():
    """A window of 5³ and 128 images of 16³ would take gigabytes."""
    kernel, numbers = jax.ShapeDtypeStruct((5, 5, 5, 16, 16), jnp.float32), NUMBERS[3]
    conv = functools.partial(CONVOLUTIONS[0], window_strides=(1, 1, 1), padding="SAME", dimension_numbers=numbers)
    assert has_convolution(conv, jax.ShapeDtypeStruct((128, 16, 16, 16, 16), jnp.float32), kernel)
    arrays, ours, theirs = both((2, 6), (4, 3), padding="VALID")
    assert ours(*arrays).shape == theirs(*arrays).shape == (2, 0, 4, 4)


@pytest.mark.parametrize(
    "kernel", [jnp.ones((3, 3, 2, 4)), jnp.ones((3, 3, 3, 4), jnp.bfloat16)], ids=["channels", "type"]
)
def test_what_jax_refuses_is_refused(kernel):
    for conv in CONVOLUTIONS:
        with pytest.raises((TypeError, ValueError), match="conv_general_dilated"):
            conv(jnp.ones((2, 8, 8, 3)), kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2])


@pytest.mark.slow
def test_an_unknown_number_of_rows_and_chains_are_no_matter():
    network = read_network("net", Linen(), (8, 8, 3))
    weights = jax.vmap(network.init)(jax.random.split(jax.random.key(0), 3))
    x = jax.random.normal(jax.random.key(0), (11, 8, 8, 3))
    together = jax.jit(jax.vmap(network.apply, (0, None)))(weights, x)
    for i, one in enumerate(together):
        assert_allclose(one, network.apply({k: w[i] for k, w in weights.items()}, x), rtol=1e-5, atol=1e-5)
