"""The last layer of a network: the weights in which its output is affine, and the features that they multiply."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.arguments import frozen
from numpyro_fspace.model.functions import depends_on, vanishes_with
from numpyro_fspace.priors._cholesky import is_traced

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from numpyro_fspace.model.network_adapters import Network

__all__ = ["LastLayer", "find_last_layer"]

#: Two outputs that should be equal may differ by this, relative to the largest.
TOLERANCE = 1e-4
#: Inputs at which a network is looked at, and the seed of its weights there.
NUM_ROWS, SEED = 5, 0
#: What was found for the programs of networks, so that it is found once in a process; and how many are kept.
_FOUND: dict = {}
MAX_FOUND = 200

CURE = "end the network in one dense layer from the features to the outputs."


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
        takes_integers: whether its inputs must be integers, as those of embeddings.
        program: what tells the network's program from others; None if it holds traced values.
        has_offset: whether g may differ from zero.
    """

    network: Network
    paths: tuple[str, ...]
    num_outputs: int
    is_flat: bool
    takes_integers: bool = False
    program: str | None = None
    has_offset: bool = True

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

        slopes = jax.vmap(jax.grad(first_output), in_axes=(None, 0))(zeros, jnp.asarray(x))
        columns = [self._to_columns(path, slopes[path])[..., 0] for path in self.paths]
        return jnp.concatenate([column.reshape(len(x), -1) for column in columns], -1)

    def offset(self, hidden: dict, x) -> Float[Array, "M K"]:
        """g(x), the output where the last layer is zero."""
        if not self.has_offset:
            return jnp.zeros((len(x), self.num_outputs))
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
            parts[path], start = array, start + size
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

    Of several layers in which the output is affine, it is the one that the network uses last.

    Args:
        name: the network's name, for error messages.
        network: the network.
        shape: shape of one input.

    Raises:
        ValueError: the network's output is not one array [M] or [M, K] of at least float32; it is affine in none of its
            layers; or their weights do not split into one column for each output.
    """
    weights, x = _example(network, shape)
    out = jax.eval_shape(network.apply, weights, x)
    if not hasattr(out, "shape") or out.ndim > 2:
        shapes = jax.tree.map(lambda one: one.shape, out)
        raise ValueError(
            f"{name}: the network must return one array [M] or [M, K], got {shapes} for M = {NUM_ROWS}. Give each "
            "output a network of its own, or one network with K outputs that the model splits."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating) or jnp.finfo(out.dtype).eps > jnp.finfo(jnp.float32).eps:
        raise ValueError(
            f"{name}: the network computes in {out.dtype}, whose rounding errors exceed what its last layer corrects: "
            "let it compute in float32 (dtype=None in flax)."
        )
    program = jax.make_jaxpr(network.apply)(weights, x)
    if is_traced(program.consts):
        return _find(name, LastLayer(network, (), _width(out), out.ndim == 1, x.dtype.kind == "i"), program, weights, x)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(program))
    signature = str((text, frozen(list(program.consts)), tuple(weights), network.outputs_first))
    layer = LastLayer(network, (), _width(out), out.ndim == 1, x.dtype.kind == "i", signature)
    if signature not in _FOUND:
        with jax.ensure_compile_time_eval():
            found = _find(name, layer, program, weights, x)
        while len(_FOUND) >= MAX_FOUND:
            del _FOUND[next(iter(_FOUND))]
        _FOUND[signature] = {"paths": found.paths, "has_offset": _has_offset(found, weights, x)}
    return dataclasses.replace(layer, **_FOUND[signature])


def _width(out) -> int:
    return 1 if out.ndim == 1 else out.shape[1]


def _example(network, shape):
    """Weights and inputs at which the network is looked at; integers for networks that take no others."""
    rng, dtype = np.random.default_rng(SEED), jnp.result_type(float)
    weights = {path: 0.5 * rng.normal(size=leaf.shape).astype(dtype) for path, leaf in network.weights.items()}
    x = rng.normal(size=(NUM_ROWS, *shape)).astype(dtype)
    try:
        jax.eval_shape(network.apply, weights, x)
    except Exception:
        x = np.ones((NUM_ROWS, *shape), jnp.result_type(int))
    return weights, x


def _find(name, layer, program, weights, x) -> LastLayer:
    """``layer`` with its paths."""
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
            return found
        trouble = trouble or wrong
    if trouble is not None:
        raise ValueError(f"{name}: {trouble}: {CURE}")
    raise ValueError(
        f"{name}: the network's output is affine in none of the layers of its weights {list(weights)}: the last layer "
        "must be linear, used once, with nothing after it. Move what follows it into the likelihood."
    )


def _has_offset(layer, weights, x) -> bool:
    """Whether the program says that the output may differ from zero where the last layer is zero."""
    hidden = {path: weights[path] for path in layer.hidden}
    last = {path: weights[path] for path in layer.paths}
    return not vanishes_with(lambda last: layer.network.apply(hidden | last, x), last)


def _first_uses(jaxpr) -> list[tuple[int, ...]]:
    """Where a program uses each of its inputs first: the number of the equation, and so on inside of it."""
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
    """``start`` and the weights in which, with it, the output is affine all together; none if not in ``start``."""
    chosen: tuple[str, ...] = ()
    for path in (start, *(path for path in order if path != start)):
        some = (path, *chosen)

        def slope(values):
            rest = {k: v for k, v in weights.items() if k not in values}

            def output(values):
                return network.apply(rest | values, x)

            return jax.jvp(output, (values,), (jax.tree.map(jnp.ones_like, values),))[1]

        if not depends_on(slope, {k: weights[k] for k in some}):
            chosen = some
        if not chosen:
            return ()
    return chosen


def _wrong_columns(layer, weights, x) -> str | None:
    """In what the network is not what ``LastLayer`` says of it."""
    num = layer.num_outputs
    sizes = {path: math.prod(layer.network.weights[path].shape) for path in layer.paths}
    if any(size % num for size in sizes.values()):
        return f"the last layer's arrays {sizes} do not split into {num} outputs"

    def error(weights):
        hidden = {path: weights[path] for path in layer.hidden}
        columns = [layer._to_columns(path, weights[path][None])[0] for path in layer.paths]
        out = layer.network.apply(weights, x).reshape(len(x), num)
        rebuilt = layer.features(hidden, x) @ jnp.concatenate(columns) + layer.offset(hidden, x)
        return jnp.max(jnp.abs(rebuilt - out)) / (1.0 + jnp.max(jnp.abs(out)))

    found = jax.jit(error)({path: jnp.asarray(value) for path, value in weights.items()})
    if is_traced(found) or found <= TOLERANCE:
        return None
    return f"the outputs of the last layer {layer.paths} do not share their features"
