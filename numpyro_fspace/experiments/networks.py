"""The networks of the experiments: hidden layers of a config, and classifiers of images.

The classifiers take flat pixels and return logits. They are made from the shape of an image [H, W, C], the number of
classes, and a config with ``activation`` and ``dtype`` (and ``widths``). They compute in ``dtype``, but keep their
weights and return their logits in JAX's default type.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from numpyro_fspace.model import conv_general_dilated

#: For what calls these networks itself, such as the SGD of ``fspace bench device``.
Conv = functools.partial(nn.Conv, conv_general_dilated=conv_general_dilated)
#: Types in which a classifier can compute.
DTYPES = ("float32", "bfloat16")
#: Number of groups of group norm.
NUM_GROUPS = 32


def hidden_layers(config, dtype=None) -> list:
    """Dense layers of ``config.widths``, each followed by ``config.activation``, for a flax network."""
    activation = getattr(jax.nn, config.activation)
    return [layer for width in config.widths for layer in (nn.Dense(width, dtype=dtype), activation)]


def check_activation(name: str) -> None:
    """``name`` must be the name of a function in ``jax.nn``."""
    if not callable(getattr(jax.nn, name, None)):
        raise ValueError(f"activation={name!r} is unknown; give the name of a function in jax.nn, such as relu, tanh.")


def _logits(num_classes):
    """The last layer, which computes in JAX's default type."""
    return nn.Dense(num_classes, dtype=jnp.result_type(float))


def mlp(shape, num_classes, config):
    """A network with hidden layers of ``config.widths``."""
    return nn.Sequential([*hidden_layers(config, config.dtype), _logits(num_classes)])


def cnn(shape, num_classes, config):
    """GFSVI's network: three convolutions with max-pooling between them, and two dense layers."""
    activation = getattr(jax.nn, config.activation)

    def pool(x):  # sides are even; flax's pooling makes a gradient 1.5 times slower on a CPU
        return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))

    def image(x):
        return x.reshape(len(x), *shape)

    def flat(x):
        return x.reshape(len(x), -1)

    convolutions = [Conv(channels, (3, 3), dtype=config.dtype) for channels in (16, 32, 64)]
    first, second, third = ([convolution, activation] for convolution in convolutions)
    head = [flat, nn.Dense(128, dtype=config.dtype), activation, _logits(num_classes)]
    return nn.Sequential([image, *first, pool, *second, pool, *third, *head])


def resnet18(shape, num_classes, config):
    """ResNet-18 for small images (with a first layer of 3×3 without pooling), with group norm instead of batch norm.

    With batch norm the output for an image depends on the other images of its minibatch, so there is no function that
    could have a prior.
    """
    activation = getattr(jax.nn, config.activation)
    conv = functools.partial(Conv, use_bias=False, dtype=config.dtype)
    norm = functools.partial(nn.GroupNorm, NUM_GROUPS, dtype=config.dtype)

    class Block(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x):
            strides = (self.stride, self.stride)
            y = conv(self.channels, (3, 3), strides)(x)
            y = activation(norm()(y))
            y = norm()(conv(self.channels, (3, 3))(y))
            if x.shape != y.shape:
                x = norm()(conv(self.channels, (1, 1), strides)(x))
            return activation(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = conv(64, (3, 3))(x.reshape(len(x), *shape))
            x = activation(norm()(x))
            for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
                x = Block(channels, 1)(Block(channels, stride)(x))
            return _logits(num_classes)(x.mean((1, 2)))

    return ResNet()


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet18": resnet18}
