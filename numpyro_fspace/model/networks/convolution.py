"""Convolutions as matrix products, for networks that are trained or sampled in a loop on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, subjaxprs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float

#: Largest number of numbers in the patches of a convolution that is computed as a product.
MAX_PATCHES = 2**27


def conv_general_dilated(
    lhs: Float[Array, ...],
    rhs: Float[Array, ...],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
) -> Float[Array, ...]:
    """``jax.lax.conv_general_dilated``, fast in the loops of samplers and optimizers on a CPU.

    On a CPU, XLA's convolutions take several times as long inside a loop (``lax.scan``, and therefore every chain and
    every ``svi.run``) as outside. Here a convolution is one product of two matrices: the patches of the images and the
    kernel. On other backends, for grouped or transposed convolutions, and if the patches would hold more than
    ``MAX_PATCHES`` numbers, JAX's own is called. The networks of ``random_module`` and ``gp_network`` use it
    automatically; pass it to layers that are called elsewhere.

    Args:
        lhs: images [N, H, W, C] (or with one or three spatial dimensions).
        rhs: kernels [h, w, C, L].
        window_strides: distance from one patch to the next, in each dimension.
        padding: ``"SAME"``, ``"VALID"``, or the number of pixels added before and after, in each dimension.
        lhs_dilation: dilation of the images; None means none.
        rhs_dilation: dilation of the kernel; None means none.
        dimension_numbers: the order of axes, if it is not that above, as flax's layers pass it. None is JAX's own
            order, channels first.
        feature_group_count: number of groups of channels.
        batch_group_count: number of groups of images.
        precision: precision of the product.
        preferred_element_type: type of the result.
        out_sharding: how the result is spread over devices, as flax nnx passes it; JAX's own convolution is called for
            it.

    Returns:
        Images with L channels, equal to those of JAX's convolution up to rounding.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_fspace as fs
        >>> from flax import linen as nn
        >>> layer = nn.Conv(16, (3, 3), conv_general_dilated=fs.model.conv_general_dilated)
        >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((5, 28, 28, 1)))
        >>> y.shape
        (5, 28, 28, 16)
    """
    rank = lhs.ndim - 2
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    dilated = lhs_dilation is not None and any(step != 1 for step in lhs_dilation)
    is_grouped = feature_group_count * batch_group_count != 1
    form = (lhs_dilation, rhs_dilation, numbers, feature_group_count, batch_group_count)
    settings = (window_strides, padding, *form, precision, preferred_element_type)
    jax_convolution = functools.partial(lax.conv_general_dilated, lhs, rhs, *settings, out_sharding=out_sharding)
    shape = jax.eval_shape(jax_convolution).shape  # an error for arrays that do not fit
    num_numbers = math.prod(shape) * rhs.size // max(1, shape[numbers.out_spec[1]]) ** 2  # of all patches
    is_product = not dilated and not is_grouped and out_sharding is None and 0 < num_numbers <= MAX_PATCHES
    if jax.default_backend() != "cpu" or not is_product:
        return jax_convolution()
    of_images, of_kernels, of_results = (np.roll(one[1:], -1) for one in numbers)  # axes in space, then of channels
    lhs = lhs.transpose(numbers.lhs_spec[0], *of_images)
    rhs = rhs.transpose(*of_kernels, numbers.rhs_spec[0])
    window, holes = rhs.shape[:rank], rhs_dilation or (1,) * rank
    reach = [(size - 1) * hole + 1 for size, hole in zip(window, holes, strict=True)]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:-1], reach, window_strides, padding)
    # Not jnp.pad, because padding may be negative.
    lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), ((0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)))
    ends = [size - length + 1 for size, length in zip(lhs.shape[1:-1], reach, strict=True)]
    patches = []
    for place in itertools.product(*map(range, window)):
        starts = [at * hole for at, hole in zip(place, holes, strict=True)]
        steps = zip(starts, ends, window_strides, strict=True)
        patches.append(lhs[:, *(slice(start, start + end, stride) for start, end, stride in steps)])
    kernel = rhs.reshape(-1, rhs.shape[-1])
    both = {"precision": precision, "preferred_element_type": preferred_element_type}
    result = jnp.matmul(jnp.concatenate(patches, -1), kernel, **both)
    return result.transpose(np.argsort([numbers.out_spec[0], *of_results]))


def with_products(apply: Callable, program: Jaxpr) -> Callable:
    """A network's ``apply(weights, x)`` with ``conv_general_dilated`` of this module in place of JAX's.

    Without a convolution in its ``program``, which is that for any number of rows, this is ``apply`` itself.
    """
    if jax.default_backend() != "cpu" or not _has_convolution(program):
        return apply

    def changed(weights, x):
        program, outputs = jax.make_jaxpr(apply, return_shape=True)(weights, x)
        values = jaxpr_as_fun(ClosedJaxpr(_changed(program.jaxpr), program.consts))(*jax.tree.leaves((weights, x)))
        return jax.tree.unflatten(jax.tree.structure(outputs), values)

    return changed


def _has_convolution(program) -> bool:
    """Whether a program, or one that it calls, has a convolution."""
    is_here = any(equation.primitive is lax.conv_general_dilated_p for equation in program.eqns)
    return is_here or any(map(_has_convolution, subjaxprs(program)))


def _changed(program):
    """A program with products for its convolutions, but for those within loops, branches and derivatives by hand."""

    def change(equation):
        params = equation.params
        if equation.primitive is lax.conv_general_dilated_p:
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            with jax.disable_jit(False):  # which would put the equations here in place of one call
                (call,) = jax.make_jaxpr(jax.jit(functools.partial(conv_general_dilated, **params)))(*shapes).eqns
            return call.replace(invars=equation.invars, outvars=equation.outvars)
        if equation.primitive.name in ("jit", "pjit") and _has_convolution(params["jaxpr"].jaxpr):
            called = ClosedJaxpr(_changed(params["jaxpr"].jaxpr), params["jaxpr"].consts)
            return equation.replace(params=params | {"jaxpr": called})
        return equation

    return program.replace(eqns=[change(equation) for equation in program.eqns])
