"""Convolutions as matrix products, for networks that are trained or sampled in a loop on a CPU."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Float

__all__ = ["conv_general_dilated"]


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
    kernel. On other backends, and for grouped, transposed or channels-first convolutions, JAX's own is called.

    Args:
        lhs: images [N, H, W, C] (or with one or three spatial dimensions).
        rhs: kernels [h, w, C, L].
        window_strides: distance from one patch to the next, in each dimension.
        padding: ``"SAME"``, ``"VALID"``, or the number of pixels added before and after, in each dimension.
        lhs_dilation: dilation of the images; None means none.
        rhs_dilation: dilation of the kernel; None means none.
        dimension_numbers: the order of axes, as flax's layers pass it. None is JAX's own order, channels first.
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
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    last = (0, rank + 1, *range(1, rank + 1))
    channels_last = numbers == lax.ConvDimensionNumbers(last, (rank + 1, rank, *range(rank)), last)
    dilated = lhs_dilation is not None and any(step != 1 for step in lhs_dilation)
    is_grouped = feature_group_count * batch_group_count != 1
    if jax.default_backend() != "cpu" or not channels_last or dilated or is_grouped or out_sharding is not None:
        form = (lhs_dilation, rhs_dilation, numbers, feature_group_count, batch_group_count)
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, *form, out_sharding=out_sharding, **options)
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
    return jnp.matmul(jnp.concatenate(patches, -1), rhs.reshape(-1, rhs.shape[-1]), **options)
