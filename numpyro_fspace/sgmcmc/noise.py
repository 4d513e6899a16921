"""Standard normals for the noise of a sampler, several times faster than ``jax.random.normal`` on a CPU.

Noise costs more than the gradient of a small network. Here each number is a hash of the key, the step and its own
place, so that a compiler fuses all of it into the update that uses it. The hash is Threefry-2×32 with 13 rounds, which
passes BigCrush [Salmon et al. 2011] (JAX's own generator is the same function with 20 rounds). Its upper 16 bits choose
one of 65 536 equally likely values, the normal's quantiles scaled to variance 1: mean and third moment are exactly 0,
the kurtosis is 2.999, the largest value 4.3. Moments beyond the second enter the law of a Langevin step only at orders
that its discretisation error exceeds by far.

Reference: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw (2011), *Parallel random numbers: as easy as 1, 2, 3*.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.special import ndtri

__all__ = ["normal", "normal_like", "threefry"]

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
NUM_ROUNDS = 13
#: Bits of a word that choose a normal.
NUM_BITS = 16


def threefry(key, counter, num_rounds: int = NUM_ROUNDS):
    """Threefry-2×32: two words for each pair of words of the ``counter``, under a ``key`` of two words (all uint32)."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(num_rounds):
        x, rotation = x + y, ROTATIONS[i % 8]
        y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        if i % 4 == 3:
            number = i // 4 + 1
            x, y = x + keys[number % 3], y + keys[(number + 1) % 3] + jnp.uint32(number)
    return x, y


def normal(key, shape, dtype=jnp.float32, step=0):
    """Standard normals for number ``step`` of the sequence that ``key`` stands for.

    Args:
        key: a typed key, used for nothing else.
        shape: of the result.
        dtype: float64 takes ``jax.random.normal``, all others the table.
        step: a number below 2³², may be traced.
    """
    if dtype == jnp.float64:
        return jax.random.normal(jax.random.fold_in(key, step), shape, dtype)
    size = int(np.prod(shape))
    if size >= 2**32:
        raise ValueError(f"shape={shape} has more than 2**32 numbers, which the counter of one step does not reach.")
    words = jax.random.key_data(key)
    if words.shape != (2,):  # another generator than JAX's default
        words = jax.random.bits(key, (2,))
    word, _ = threefry((words[0], words[1]), (jnp.arange(size, dtype=jnp.uint32), jnp.asarray(step, jnp.uint32)))
    index = (word >> (32 - NUM_BITS)).astype(jnp.int32)
    return _quantiles().at[index].get(mode="promise_in_bounds").reshape(shape).astype(dtype)


def normal_like(key, tree, step=0):
    """Standard normals in the shape of ``tree``."""
    flat, unravel = ravel_pytree(tree)
    return unravel(normal(key, flat.shape, flat.dtype, step))


@functools.cache
def _table() -> np.ndarray:
    num = 2**NUM_BITS
    half = ndtri((np.arange(num // 2) + 0.5) / num)
    values = np.concatenate([half, -half[::-1]])
    return (values / np.sqrt(np.mean(values**2))).astype(np.float32)


def _quantiles():
    return jnp.asarray(_table())
