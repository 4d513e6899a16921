"""Networks of which some weights are fixed numbers, and weights that were trained elsewhere."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import as_numbers, warn
from numpyro_fspace.model.functions import widened
from numpyro_fspace.model.networks.adapters import Network, by_path


def weights_by_path(source: Any) -> dict:
    """The weights of a trained network by path, in the form of ``random_module``'s ``frozen`` and ``prior``.

    Args:
        source: the variables or the ``params`` of a flax linen module, as its ``init`` returns them or a checkpoint
            holds them; a flax nnx module or the state of one; an equinox module; or any tree of arrays, such as the
            weights of a pair (init, apply).

    Returns:
        A dict from path to array. Paths are those of the sites of ``random_module``, without its name
        (``"Dense_0.kernel"``, ``"layers.1.weight"``).

    Raises:
        ValueError: a source without weights, or in which two have the same path.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
        >>> {path: array.shape for path, array in weights_by_path(variables).items()}
        {'bias': (3,), 'kernel': (2, 3)}
    """
    if isinstance(source, Mapping) and isinstance(source.get("params"), Mapping):
        source = source["params"]
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(source, nnx.Module):
        source = nnx.state(source, nnx.Param)
    drop = int(nnx is not None and isinstance(source, nnx.State))  # the last key of a path, of the variable's value
    if equinox is not None and isinstance(source, equinox.Module):
        source = equinox.filter(source, equinox.is_inexact_array)
    weights = by_path(source, drop=drop)[0]
    if not weights:
        raise ValueError(f"weights_by_path: the {type(source).__name__} holds no weights.")
    return weights


def read_safetensors(path: str | Path, convert: Callable) -> dict:
    r"""The weights in a safetensors file, such as PyTorch's networks are kept in, by path of another network.

    PyTorch has other names and other orders of axes. A linear layer's ``weight`` is [out, in] and a convolution's
    [out, in, height, width]. Flax's ``kernel`` is [in, out], ``array.T``, and [height, width, in, out],
    ``array.transpose(2, 3, 1, 0)``; a norm's ``weight`` is its ``scale``, an embedding's ``weight`` its ``embedding``,
    both unchanged. Equinox has PyTorch's names and axes, except for a convolution's ``bias``, which for images is
    ``array.reshape(-1, 1, 1)``. A dense layer after a flattened image takes its inputs in another order: PyTorch
    flattens [channels, height, width], flax [height, width, channels].

    Args:
        path: the file.
        convert: a function of the name of an array in the file and the array, which returns ``(path, array)`` as the
            network has it, or None to leave the array out.

    Returns:
        A dict from path to NumPy array, float32 for smaller floating-point types: ``random_module``'s ``frozen``, or a
        part of it.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: there is no such file.
        ValueError: two arrays get the same path.
        TypeError: ``convert`` returns something else.

    Example:
        >>> import numpy as np, tempfile
        >>> from safetensors.numpy import save_file
        >>> file = tempfile.mkdtemp() + "/network.safetensors"
        >>> arrays = {"fc.weight": np.ones((3, 2)), "fc.bias": np.ones(3), "steps": np.ones(1)}
        >>> save_file(arrays, file)
        >>> def convert(name, array):
        ...     layer, _, kind = name.partition(".")
        ...     paths = {"weight": ("Dense_0.kernel", array.T), "bias": ("Dense_0.bias", array)}
        ...     return paths.get(kind)
        >>> weights = read_safetensors(file, convert)
        >>> {path: array.shape for path, array in sorted(weights.items())}
        {'Dense_0.bias': (3,), 'Dense_0.kernel': (2, 3)}
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError('read_safetensors needs safetensors: pip install "numpyro_fspace[safetensors]".') from error
    found: dict = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  # of a file, which is no dict
            array = file.get_tensor(name)
            kept = convert(name, widened(array))
            if kept is None:
                continue
            if not (isinstance(kept, tuple) and len(kept) == 2 and isinstance(kept[0], str)):
                raise TypeError(
                    f"read_safetensors: convert({name!r}, array) returned {type(kept).__name__}; return (path, array), "
                    "or None to leave the array out."
                )
            if kept[0] in found:
                raise ValueError(f"read_safetensors: {name!r} gets the path {kept[0]!r}, which another array has.")
            found[kept[0]] = np.ascontiguousarray(kept[1])
    return found


def freeze(owner: str, network: Network, frozen) -> Network:
    """The network with some weights fixed at these numbers; its other weights are those of the result.

    Args:
        owner: what errors call the caller.
        network: the network.
        frozen: numbers by path, or nested as in a tree of flax; None fixes none.

    Raises:
        TypeError, ValueError: naming the path and the cure.

    Warns:
        RuntimeWarning: an array that is perhaps a constant becomes a random weight.
    """
    if frozen is None:
        _warn_of_constants(owner, network)
        return network
    if not isinstance(frozen, Mapping):
        raise TypeError(
            f"{owner}: frozen must be a dict of arrays by path, got {type(frozen).__name__}. "
            "fs.model.weights_by_path(trained) makes one of a trained network; keep the paths that are to stay fixed."
        )
    paths = list(network.weights)
    given = by_path(frozen, is_leaf=lambda node: not isinstance(node, Mapping))[0]
    if not given:
        raise ValueError(f"{owner}: frozen is empty and fixes nothing: leave it out, or name some of {paths}.")
    unknown = [path for path in given if path not in paths]
    if unknown:
        raise ValueError(f"{owner}: frozen holds {unknown}, which are no weights of the network; it has {paths}.")
    fixed = {path: _fixed(owner, path, given[path], network.weights[path]) for path in given}
    rest = {path: leaf for path, leaf in network.weights.items() if path not in fixed}
    if not rest:
        raise ValueError(
            f"{owner}: frozen fixes all weights {paths}, and nothing is random: leave some out, such as the last layer."
        )

    def apply(weights, x):
        return network.apply({**fixed, **weights}, x)

    def init(key):
        return {path: value for path, value in network.init(key).items() if path in rest}

    found = dataclasses.replace(network, weights=rest, apply=apply, init=None if network.init is None else init)
    _warn_of_constants(owner, found)
    return found


def _warn_of_constants(owner, network):
    """Equinox takes arrays of NumPy for weights too; in a module of JAX arrays they are usually constants."""
    paths = [path for path in network.weights if path in network.numpy_arrays]
    if paths and len(paths) < len(network.weights):
        warn(
            f"{owner}: the NumPy arrays {paths} of the equinox module become random weights, as equinox's own filters "
            "take them for weights. Fix those that are constants, frozen={path: array}; make JAX arrays of the others."
        )


def _fixed(owner, path, value, leaf):
    """One array as the network has it."""
    array = value if isinstance(value, jax.Array) else np.asarray(as_numbers(value, f"{owner}: frozen[{path!r}]"))
    if array.shape != tuple(leaf.shape):
        raise ValueError(
            f"{owner}: frozen[{path!r}] has shape {array.shape} and the network needs {tuple(leaf.shape)}. PyTorch and "
            "equinox have the axes of a weight in another order than flax: see fs.model.read_safetensors."
        )
    if jnp.iscomplexobj(array) and not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(f"{owner}: frozen[{path!r}] holds complex numbers ({array.dtype}): pass real ones.")
    with np.errstate(over="ignore"):
        array = array.astype(leaf.dtype)
    if not isinstance(array, jax.core.Tracer) and not np.isfinite(np.asarray(array)).all():
        raise ValueError(f"{owner}: frozen[{path!r}] holds NaN or infinite numbers, or some beyond {leaf.dtype}.")
    return array
