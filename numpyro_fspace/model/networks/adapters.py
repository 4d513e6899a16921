"""Adapters that turn a network (flax linen, flax nnx, equinox, a pair) into pure functions of its weights by path."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import warn
from numpyro_fspace.model.networks.convolution import with_products
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on

#: Number of rows of the inputs on which a network is tried, chosen to differ from usual sizes of networks.
_ROWS = 7


class StatefulError(ValueError):
    """A network keeps state or draws random numbers when it is called."""

    def __init__(self, what, cure):
        super().__init__(
            f"The network has {what}, which a function of weights and inputs cannot keep. Use LayerNorm or "
            f"GroupNorm in place of BatchNorm and switch dropout off; {cure}"
        )


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as pure functions of its weights, a dict from path to array.

    Attributes:
        weights: the weight arrays if the network is already built, otherwise their shapes and dtypes.
        apply: ``(weights, x [M, ...]) -> f(x)``.
        init: ``key -> new weights``; None if the network is already built.
        outputs_first: whether weight arrays are (out, in, ...) and not (..., in, out).
        tables: paths of embeddings, whose rows are looked up and not summed.
        norms: paths of the scales of norm layers that are known by the type of the layer.
        numpy_arrays: paths of arrays of NumPy in an equinox module, which may be meant as constants.
        takes_integers: whether its inputs must be integers, like those of embeddings.
    """

    weights: dict
    apply: Callable
    init: Callable | None = None
    outputs_first: bool = False
    tables: frozenset = frozenset()
    norms: frozenset = frozenset()
    numpy_arrays: frozenset = frozenset()
    takes_integers: bool = False

    def draw(self, path, key):
        """The network's own initial value of one weight array, in the dtype of NumPyro's draws."""
        if self.init is None:
            value = self.weights[path]
            value = jax.random.permutation(key, jnp.ravel(value)).reshape(value.shape)
        else:
            value = self.init(key)[path]
        return value.astype(jnp.result_type(float))

    def fan_in(self, path) -> int:
        """The number of inputs that are summed with these weights; 1 for biases and embeddings."""
        shape = self.weights[path].shape
        if len(shape) < 2 or _last(path) in ("bias", "embedding") or path in self.tables:
            return 1
        return max(1, math.prod(shape[1:] if self.outputs_first else shape[:-1]))

    def units(self, paths) -> set:
        """Which of the ``paths`` are of factors with the initial value one, as the scales of norm layers.

        Warns:
            RuntimeWarning: the initial values are not known, because the network is created in a program.
        """
        named = {path for path in paths if _last(path) == "scale" or path in self.norms}
        unclear = [path for path in paths if path not in named and _last(path) != "bias"]
        values = {path: self.weights[path] for path in unclear}
        if self.init is not None:
            unclear = [path for path in unclear if len(values[path].shape) < 2]
            with jax.ensure_compile_time_eval():  # concrete values, also while the model is traced
                start = self.init(jax.random.key(0)) if unclear else {}
            values = {path: start[path] for path in unclear}
        traced = {path for path, value in values.items() if isinstance(value, jax.core.Tracer)}
        if hidden := sorted(path for path in traced if values[path].ndim < 2 and not _last(path).startswith("bias")):
            warn(
                f"The default prior of the weights {hidden} depends on whether they are initially one, which is not "
                "known, because the network is created while the model is compiled: its mean is taken to be 0. Create "
                "the network outside of the model, or give these weights a prior."
            )
        return named | {path for path in values.keys() - traced if np.all(np.asarray(values[path]) == 1)}


def _last(path):
    return path.rsplit(".", 1)[-1]


def by_path(tree, drop=0, is_leaf=None):
    """The leaves of a tree by path, without the last ``drop`` keys of each path, and the function that inverts this.

    ``is_leaf`` is that of ``jax.tree``.
    """
    flat_tree, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = [_join(path[: len(path) - drop]) for path, _ in flat_tree]
    if len(set(paths)) < len(paths):
        raise ValueError(f"two weights have the same path: {sorted(p for p in set(paths) if paths.count(p) > 1)}")
    leaves = dict(zip(paths, (leaf for _, leaf in flat_tree), strict=True))
    return leaves, lambda weights: jax.tree.unflatten(structure, [weights[path] for path in paths])


def _join(path) -> str:
    parts = [next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)) for k in path]
    return ".".join(str(part) for part in parts).replace("/", ".") or "weight"


def read_network(name, module, shape, maker: str = "random_module", origin: str | None = None) -> Network:
    """``module`` as a ``Network``, checked by an abstract evaluation on inputs of ``shape``.

    ``origin`` says where the shape comes from, and the cure; None means the argument ``input_shape``.
    """
    kind, error = _kind_of(name, module, maker), None
    for dtype in (float, int):  # embeddings take integers
        x = jax.ShapeDtypeStruct((_ROWS, *shape), jnp.result_type(dtype))
        try:
            network = dataclasses.replace(kind(module, x), takes_integers=dtype is int)
            program, outputs = jax.make_jaxpr(network.apply, return_shape=True)(network.weights, x)
            break
        except StatefulError:
            raise
        except Exception as caught:
            error = error or caught
    else:
        sizes = ", ".join(["M", *map(str, shape)])
        raise ValueError(
            f"{maker}({name!r}): the network does not accept inputs [{sizes}]"
            f"{origin or f', as given by input_shape={shape} (one input, without batch).'} "
            f"{type(error).__name__}: {error}"
        ) from error
    if not network.weights:
        raise ValueError(f"{maker}({name!r}): the network has no weights to give a prior to.")
    for path, leaf in network.weights.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{maker}({name!r}): the weight {path!r} is {leaf.dtype}, not a real number.")
    wrong = [out.shape for out in jax.tree.leaves(outputs) if out.shape[:1] != (_ROWS,)]
    if wrong:
        raise ValueError(
            f"{maker}({name!r}): {_ROWS} inputs of input_shape={shape} give an output of shape "
            f"{wrong[0]}; the network must keep the leading axis M. Map a one-input function by jax.vmap."
        )
    return dataclasses.replace(network, apply=with_products(network.apply, program.jaxpr))


def _kind_of(name, module, maker):
    bases = (("flax.linen", _linen), ("flax.nnx", _nnx), ("equinox", _equinox))
    for library, kind in bases:  # an object of a library exists only if that library is imported
        if library in sys.modules and isinstance(module, sys.modules[library].Module):
            return kind
    if isinstance(module, tuple | list) and len(module) == 2 and all(map(callable, module)):
        return _pair
    hint = " (this is a class; give an instance)" if isinstance(module, type) else ""
    raise TypeError(
        f"{maker}({name!r}): module is a {type(module).__name__}{hint}; give a flax linen module, a "
        "flax nnx module, an equinox module, or a pair (init, apply) of functions."
    )


def _linen(module, x) -> Network:
    from flax.core import meta
    from flax.errors import InvalidRngError

    def init(key, shape):
        variables = meta.unbox(module.init(key, jnp.zeros((1, *shape), x.dtype)))
        state = sorted(set(variables) - {"params"})
        if state:
            raise StatefulError(
                f"the linen collection(s) {state}",
                "to freeze statistics give the pair (init, apply) with "
                'apply = lambda w, x: module.apply({"params": w, "batch_stats": stats}, x).',
            )
        return variables.get("params", {})

    def apply(params, x):
        try:
            return module.apply({"params": params}, x)
        except InvalidRngError as error:
            raise StatefulError(f"a random stream ({error})", "give dropout layers deterministic=True.") from error

    return _pair((init, apply), x)


def _nnx(module, x) -> Network:
    from flax import nnx

    graph, params, *others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    random, rest = others
    weights, rebuild = by_path(params, drop=1)

    def call(weights, random, x):
        state = jax.tree.map(lambda leaf: leaf, rest)  # new variables, so that those of the module do not change
        variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        before = [variable.get_value() for variable in variables]
        out = nnx.merge(graph, rebuild(weights), random, state)(x)
        pairs = zip(variables, before, strict=True)
        changed = sorted({type(v).__name__ for v, old in pairs if v.get_value() is not old})
        if changed:
            cure = "call module.eval() first, or give a pair (init, apply) that holds the state."
            raise StatefulError(f"the nnx state {changed}, which a call changes", cure)
        return out

    # Keys on which no value depends, such as those of a recurrent layer whose initial carry is zero, are ignored.
    if jax.tree.leaves(random):
        inputs = {"random": random, "weights": weights, "x": x}
        if "random" in depends_on(lambda given: call(given["weights"], given["random"], given["x"]), inputs):
            cure = "call module.eval() first, and start recurrent layers at a carry of zeros."
            raise StatefulError("an active nnx random stream (dropout, or a random first carry)", cure)

    return Network(weights, lambda weights, x: call(weights, jax.tree.map(lambda leaf: leaf, random), x))


def _equinox(module, x) -> Network:
    import equinox as eqx

    norm_layers = (eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
    special = (eqx.nn.StateIndex, eqx.nn.Dropout, eqx.nn.Embedding, *norm_layers)
    nodes, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda node: isinstance(node, special))
    for path, node in nodes:
        if isinstance(node, eqx.nn.StateIndex):
            raise StatefulError(
                f"the equinox StateIndex {_join(path)!r}",
                "to freeze it give a pair (init, apply) that holds the state.",
            )
        if isinstance(node, eqx.nn.Dropout) and not node.inference and node.p != 0:
            raise StatefulError(
                f"the active equinox Dropout {_join(path)!r}", "call equinox.nn.inference_mode(module) first."
            )
    tables = frozenset(f"{_join(path)}.weight" for path, node in nodes if isinstance(node, eqx.nn.Embedding))
    # By type, because the values of a module that is built inside a compiled model are traced.
    norms = frozenset(f"{_join(path)}.weight" for path, node in nodes if isinstance(node, norm_layers))
    arrays, static = eqx.partition(module, eqx.is_inexact_array)
    weights, rebuild = by_path(arrays)
    numpy_arrays = frozenset(path for path, array in weights.items() if isinstance(array, np.ndarray))

    def apply(weights, x):
        return jax.vmap(eqx.combine(rebuild(weights), static))(x)

    return Network(weights, apply, outputs_first=True, tables=tables, norms=norms, numpy_arrays=numpy_arrays)


def _pair(module, x) -> Network:
    init, apply = module

    @functools.partial(jax.jit, inline=True)  # traced only once, as it is called for each weight array
    def init_tree(key):
        made = init(key, x.shape[1:])
        is_stax = isinstance(made, tuple) and len(made) == 2 and _is_shape(made[0])
        return made[1] if is_stax else made

    weights, rebuild = by_path(jax.eval_shape(init_tree, jax.random.key(0)))
    return Network(
        weights,
        lambda weights, x: apply(rebuild(weights), x),
        lambda key: by_path(init_tree(key))[0],
    )


def _is_shape(made):
    return isinstance(made, tuple) and made != () and all(isinstance(n, int) for n in made)
