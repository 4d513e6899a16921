"""The last layer of a network: the weights in which its output is affine, and the features that they multiply."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.functions import depends_on

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from numpyro_fspace.model.network_adapters import Network

__all__ = ["LastLayer", "find_last_layer"]

#: Two outputs that should be equal may differ by this, relative to the largest.
TOLERANCE = 1e-4
#: Inputs, and a key for weights, at which a network is looked at.
NUM_ROWS, SEED = 5, 0


@dataclasses.dataclass(frozen=True)
class LastLayer:
    r"""A network as :math:`f_k(x) = g_k(x) + \varphi_v(x)^\top a_k` for the outputs k = 1, …, K.

    The columns a_k are the last layer's weights of an output (its bias among them), v all other weights. The features
    φ_v are the same for all outputs.

    Attributes:
        network: the network.
        paths: the weight arrays of the last layer.
        num_outputs: K.
        is_flat: whether the network returns [M] and not [M, K].
    """

    network: Network
    paths: tuple[str, ...]
    num_outputs: int
    is_flat: bool

    @property
    def hidden(self) -> tuple[str, ...]:
        """The weight arrays that are not of the last layer."""
        return tuple(path for path in self.network.weights if path not in self.paths)

    @property
    def num_features(self) -> int:
        """H, the number of weights of an output."""
        return sum(self._size(path) for path in self.paths)

    def features(self, hidden: dict, x) -> Float[Array, "M H"]:
        """φ_v(x), for the hidden weights v by path."""
        zeros = self._arrays(jnp.zeros((self.num_features, self.num_outputs)))

        def first_output(arrays, row):
            return jnp.ravel(self.network.apply(hidden | arrays, row[None]))[0]

        slopes = jax.vmap(jax.grad(first_output), in_axes=(None, 0))(zeros, x)
        columns = [self._to_columns(path, slopes[path])[..., 0] for path in self.paths]
        return jnp.concatenate([column.reshape(len(x), -1) for column in columns], -1)

    def offset(self, hidden: dict, x) -> Float[Array, "M K"]:
        """g(x), the output where the last layer is zero."""
        zeros = self._arrays(jnp.zeros((self.num_features, self.num_outputs)))
        return self.network.apply(hidden | zeros, x).reshape(len(x), self.num_outputs)

    def output(self, hidden: dict, last: Float[Array, "H K"], x):
        """f(x), in the form in which the network returns it."""
        return self.network.apply(hidden | self._arrays(last), x)

    def typical_scale(self) -> np.ndarray:
        """1/√fan-in of each row of the columns a, [H]."""
        scales = [np.full(self._size(path), 1 / math.sqrt(self.network.fan_in(path))) for path in self.paths]
        return np.concatenate(scales)

    def _arrays(self, last):
        """The arrays of the last layer by path, from its columns [H, K]."""
        parts, start = {}, 0
        for path in self.paths:
            shape, size = self.network.weights[path].shape, self._size(path)
            columns = last[start : start + size]
            if not self._has_outputs(path):
                array = columns.reshape(shape)
            elif self.network.outputs_first:
                array = columns.T.reshape(shape)
            else:
                array = columns.reshape(shape)
            parts[path], start = array.astype(self.network.weights[path].dtype), start + size
        return parts

    def _to_columns(self, path, array):
        """Arrays [M, *shape] of a path as [M, size, K]."""
        if not self._has_outputs(path):
            return array.reshape(len(array), -1, 1)
        if self.network.outputs_first:
            return array.reshape(len(array), self.num_outputs, -1).swapaxes(-1, -2)
        return array.reshape(len(array), -1, self.num_outputs)

    def _size(self, path) -> int:
        return math.prod(self.network.weights[path].shape) // self.num_outputs

    def _has_outputs(self, path) -> bool:
        return self.num_outputs > 1


def find_last_layer(name: str, network: Network, shape: tuple[int, ...]) -> LastLayer:
    """The last layer of a network.

    Args:
        name: the network's name, for error messages.
        network: the network.
        shape: shape of one input.

    Raises:
        ValueError: the network's output is not one array [M] or [M, K]; it is affine in no weights; or these do not
            split into one column for each output.
    """
    with jax.ensure_compile_time_eval():
        weights, x = _example(network, shape)
        out = network.apply(weights, x)
        if not hasattr(out, "shape") or out.ndim > 2:
            shapes = jax.tree.map(jnp.shape, out)
            raise ValueError(f"{name}: the network must return one array [M] or [M, K], got {shapes} for M = {len(x)}.")
        num_outputs = 1 if out.ndim == 1 else out.shape[1]
        paths = _affine_in(network, weights, x)
        if not paths:
            raise ValueError(
                f"{name}: the network's output is affine in none of its weights {list(network.weights)}: the last "
                "layer must be linear, with nothing after it. Move what follows it into the likelihood."
            )
        layer = LastLayer(network, paths, num_outputs, out.ndim == 1)
        _check_columns(name, layer, weights, x, out)
    return layer


def _example(network, shape):
    """Weights and inputs at which the network is looked at; integers for networks that take no others."""
    keys = jax.random.split(jax.random.key(SEED), len(network.weights) + 1)
    weights = {
        path: 0.5 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for (path, leaf), key in zip(network.weights.items(), keys[1:], strict=True)
    }
    x = jax.random.normal(keys[0], (NUM_ROWS, *shape))
    try:
        jax.eval_shape(network.apply, weights, x)
    except Exception:
        x = jnp.ones((NUM_ROWS, *shape), int)
    return weights, x


def _affine_in(network, weights, x) -> tuple[str, ...]:
    """The weights in which the output is affine, all together; later ones first where not all can be chosen."""
    chosen: tuple[str, ...] = ()
    for path in reversed(list(network.weights)):
        some = (path, *chosen)

        def slope(values):
            rest = {k: v for k, v in weights.items() if k not in values}

            def output(values):
                return network.apply(rest | values, x)

            return jax.jvp(output, (values,), (jax.tree.map(jnp.ones_like, values),))[1]

        if not depends_on(slope, {k: weights[k] for k in some}):
            chosen = some
    return chosen


def _check_columns(name, layer, weights, x, out):
    """That the network is what ``LastLayer`` says of it."""
    num, cure = layer.num_outputs, "end the network in one dense layer from the features to the outputs."
    sizes = {path: math.prod(layer.network.weights[path].shape) for path in layer.paths}
    if any(size % num for size in sizes.values()):
        raise ValueError(f"{name}: the last layer's arrays {sizes} do not split into {num} outputs: {cure}")
    hidden = {path: weights[path] for path in layer.hidden}
    columns = [layer._to_columns(path, weights[path][None])[0] for path in layer.paths]
    rebuilt = layer.features(hidden, x) @ jnp.concatenate(columns) + layer.offset(hidden, x)
    error = jnp.max(jnp.abs(rebuilt - out.reshape(len(x), num)))
    if not error <= TOLERANCE * (1.0 + jnp.max(jnp.abs(out))):
        raise ValueError(f"{name}: the outputs of the last layer {layer.paths} do not share their features: {cure}")
