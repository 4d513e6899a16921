"""The last layer of a network: the weights in which its output is affine, and the features that multiply them."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import matmul
from numpyro_fspace.model.programs.cache import content_key, keep
from numpyro_fspace.model.programs.jaxpr_analysis import constants, depends_on, makes_features, vanishes_with
from numpyro_fspace.priors.gp_prior import full_precision
from numpyro_fspace.priors.tracing import evaluated, is_traced

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from numpyro_fspace.model.networks.adapters import Network

#: Two outputs that should be equal may differ by this amount, relative to the largest.
TOLERANCE = 1e-4
#: Number of inputs at which a network is examined, and the seed of the weights.
NUM_ROWS, SEED = 5, 0
#: A cache of results by the program of a network.
_FOUND: dict = {}


@dataclasses.dataclass(frozen=True)
class LastLayer:
    r"""A network as :math:`f_k(x) = g_k(x) + \varphi_v(x)^\top a_k` for the outputs k = 1, …, K.

    The columns a_k are the last layer's weights of an output (its bias among them), v all other weights. The features
    φ_v are the same for all outputs.

    Attributes:
        network: the network; it multiplies in full precision on every device, as the last layer's columns can be so
            large that the errors of a GPU's default would exceed what they contribute.
        paths: the weight arrays of the last layer.
        num_outputs: K.
        program: a text that identifies the network's program; None if the program holds traced values.
        has_offset: whether g may differ from zero.
        makes_features: whether the network transforms its inputs, other than linearly, before its first weights.
    """

    network: Network
    paths: tuple[str, ...]
    num_outputs: int
    program: str | None = None
    has_offset: bool = True
    makes_features: bool = False

    @property
    def hidden(self) -> tuple[str, ...]:
        """The weight arrays outside of the last layer."""
        return tuple(path for path in self.network.weights if path not in self.paths)

    @property
    def num_features(self) -> int:
        """H, the number of weights per output."""
        return sum(self._size(path) for path in self.paths)

    def features(self, hidden: dict, x) -> Float[Array, "M H"]:
        """φ_v(x), for the hidden weights v by path."""
        zeros = self._arrays(jnp.zeros((self.num_features, self.num_outputs)))

        def first_output(arrays, row):
            return jnp.ravel(self.network.apply(hidden | arrays, row[None]))[0]

        slopes = jax.vmap(jax.grad(first_output), in_axes=(None, 0))(zeros, jnp.asarray(x))
        columns = [self._to_columns(slopes[path])[..., 0] for path in self.paths]
        return jnp.concatenate([column.reshape(len(x), -1) for column in columns], -1)

    def offset(self, hidden: dict, x) -> Float[Array, "M K"]:
        """g(x), the output if the last layer is zero."""
        if not self.has_offset:
            return jnp.zeros((len(x), self.num_outputs))
        zeros = self._arrays(jnp.zeros((self.num_features, self.num_outputs)))
        return self.network.apply(hidden | zeros, jnp.asarray(x)).reshape(len(x), self.num_outputs)

    def output(self, hidden: dict, last: Float[Array, "H K"], x):
        """f(x), in the form that the network returns."""
        return self.network.apply(hidden | self._arrays(last), jnp.asarray(x))

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
            parts[path] = (columns.T if self.network.outputs_first else columns).reshape(shape)
            start += size
        return parts

    def _to_columns(self, array):
        """Arrays [M, *shape] of weights as [M, size, K]."""
        if self.network.outputs_first:
            return array.reshape(len(array), self.num_outputs, -1).swapaxes(-1, -2)
        return array.reshape(len(array), -1, self.num_outputs)

    def _size(self, path) -> int:
        return math.prod(self.network.weights[path].shape) // self.num_outputs


def find_last_layer(name: str, network: Network, shape: tuple[int, ...], points=None) -> LastLayer:
    """The last layer of a network.

    If the output is affine in several layers, this is the one that the network uses last.

    Args:
        name: the network's name, for error messages.
        network: the network.
        shape: shape of one input.
        points: inputs [M, D] for which the network is made, some of which it is examined at; if None at random ones.

    Raises:
        ValueError: the network's output is not one array [M] or [M, K] of at least float32; it is not affine in any
            layer; or the weights of the layer do not split into one column for each output.
    """
    network = dataclasses.replace(network, apply=full_precision(network.apply))
    weights, x = _example(network, shape, points)
    out = jax.eval_shape(network.apply, weights, x)
    if not hasattr(out, "shape") or out.ndim > 2:
        shapes = jax.tree.map(lambda one: one.shape, out)
        raise ValueError(
            f"{name}: the network must return one array [M] or [M, K], got {shapes} for M = {NUM_ROWS}. Use a separate "
            "network for each output, or one network with K outputs that the model splits."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating) or jnp.finfo(out.dtype).eps > jnp.finfo(jnp.float32).eps:
        raise ValueError(
            f"{name}: the network computes in {out.dtype}, whose rounding errors exceed the corrections of its last "
            "layer: let it compute in float32 (dtype=None in flax)."
        )
    program = jax.make_jaxpr(network.apply)(weights, x)
    layer = LastLayer(network, (), 1 if out.ndim == 1 else out.shape[1])
    known = constants(program)
    if is_traced(known):
        return dataclasses.replace(layer, **_find(name, layer, program, weights, x))
    text = re.sub(r" at 0x[0-9a-f]+", "", str(program))
    signature = str((text, content_key(known), tuple(weights), network.outputs_first))
    if signature not in _FOUND:
        keep(_FOUND, signature, _find(name, layer, program, weights, x))
    return dataclasses.replace(layer, program=signature, **_FOUND[signature])


def _example(network, shape, points):
    """Weights and inputs at which the network is examined; the inputs are ones if the network takes integers."""
    rng, dtype = np.random.default_rng(SEED), jnp.result_type(float)
    weights = {path: 0.5 * rng.normal(size=leaf.shape).astype(dtype) for path, leaf in network.weights.items()}
    if network.takes_integers:
        x = np.ones((NUM_ROWS, *shape), jnp.result_type(int))
    elif points is None or is_traced(points):
        x = rng.normal(size=(NUM_ROWS, *shape)).astype(dtype)
    else:
        some = np.linspace(0, len(points) - 1, NUM_ROWS).round().astype(int)
        x = np.asarray(points)[some].reshape(NUM_ROWS, *shape).astype(dtype)
    with jax.ensure_compile_time_eval():  # arrays of JAX, because networks may call methods that NumPy's lack
        return jax.tree.map(jnp.asarray, (weights, x))


def _find(name, layer, program, weights, x) -> dict:
    """What ``layer`` still lacks, by name of the attribute."""
    network, trouble, seen = layer.network, None, set()
    paths = sorted(weights)  # in the order of the program's inputs
    first_use = dict(zip(paths, _first_uses(program.jaxpr), strict=False))
    latest_first = sorted(paths, key=lambda path: first_use[path], reverse=True)
    for start in latest_first:
        if start in seen:
            continue
        chosen = _affine_in(network, weights, x, start, latest_first)
        seen |= set(chosen)
        if not chosen:
            continue
        found = dataclasses.replace(layer, paths=tuple(path for path in network.weights if path in chosen))
        wrong = _wrong_columns(found, weights, x)
        if wrong is None and (found.num_features > 1 or not found.hidden):
            return {
                "paths": found.paths,
                "has_offset": _has_offset(found, weights, x),
                "makes_features": makes_features(program, len(weights)),
            }
        trouble = trouble or wrong
    if trouble is not None:
        raise ValueError(f"{name}: {trouble}: end the network in one dense layer from the features to the outputs.")
    raise ValueError(
        f"{name}: the network's output is not affine in any of the layers of its weights {list(weights)}: the last "
        "layer must be linear, used once, with nothing after it. Move what follows it into the likelihood."
    )


def _has_offset(layer, weights, x) -> bool:
    """Whether, by the program, the output may differ from zero if the last layer is zero."""
    hidden = {path: weights[path] for path in layer.hidden}
    last = {path: weights[path] for path in layer.paths}
    return not vanishes_with(lambda last: layer.network.apply(hidden | last, x), last)


def _first_uses(jaxpr) -> list[tuple[int, ...]]:
    """Where a program first uses each input: the number of the equation, then the number of the one inside it, …"""
    places: dict[int, tuple[int, ...]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        inner = equation.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        known = inner is not None and len(inner.invars) == len(equation.invars)
        uses = _first_uses(inner) if known else [()] * len(equation.invars)
        for variable, use in zip(equation.invars, uses, strict=True):
            places.setdefault(id(variable), (number, *use))
    return [places.get(id(variable), (-1,)) for variable in jaxpr.invars]


def _affine_in(network, weights, x, start, order) -> tuple[str, ...]:
    """``start`` and further weights such that the output is jointly affine in all of them; empty if there are none."""
    chosen: tuple[str, ...] = ()
    for path in (start, *(path for path in order if path != start)):
        some = (path, *chosen)
        rest = {k: v for k, v in weights.items() if k not in some}
        values = {k: weights[k] for k in some}

        def slope(values, rest=rest):
            ones = jax.tree.map(jnp.ones_like, values)
            return jax.jvp(lambda values: network.apply(rest | values, x), (values,), (ones,))[1]

        if not depends_on(slope, values):
            chosen = some
        if not chosen:
            return ()
    return chosen


def _wrong_columns(layer, weights, x) -> str | None:
    """How the network differs from the form that ``LastLayer`` assumes; None if it does not."""
    num = layer.num_outputs
    sizes = {path: math.prod(layer.network.weights[path].shape) for path in layer.paths}
    if any(size % num for size in sizes.values()):
        return f"the last layer's arrays {sizes} do not split into {num} outputs"

    def error(weights):
        hidden = {path: weights[path] for path in layer.hidden}
        columns = [layer._to_columns(weights[path][None])[0] for path in layer.paths]
        out = layer.network.apply(weights, x).reshape(len(x), num)
        rebuilt = matmul(layer.features(hidden, x), jnp.concatenate(columns)) + layer.offset(hidden, x)
        return jnp.max(jnp.abs(rebuilt - out)) / (1.0 + jnp.max(jnp.abs(out)))

    found = evaluated(error, weights)
    if found is None or found <= TOLERANCE:
        return None
    return f"the outputs of the last layer {layer.paths} do not share their features"
