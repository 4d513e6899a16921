"""Networks from an image's pixels, in a row, to the logits of its class.

Each is made of the image's shape [H, W, C], the number of classes, and a config with ``activation`` (and ``widths``).
"""

from __future__ import annotations

import functools

import jax
from flax import linen as nn

from numpyro_fspace.experiments.catalog import hidden_layers
from numpyro_fspace.model import conv_general_dilated

__all__ = ["NETWORKS"]

Conv = functools.partial(nn.Conv, conv_general_dilated=conv_general_dilated)
#: Groups of channels that group norm takes together.
NUM_GROUPS = 32


def mlp(shape, num_classes, config):
    """Hidden layers of ``config.widths``."""
    return nn.Sequential([*hidden_layers(config), nn.Dense(num_classes)])


def cnn(shape, num_classes, config):
    """GFSVI's: three convolutions, max-pooling between each two, two layers."""
    activation = getattr(jax.nn, config.activation)

    def pool(x):  # sides are even; with flax's pooling a gradient takes half as long again on a CPU
        return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))

    def image(x):
        return x.reshape(len(x), *shape)

    def flat(x):
        return x.reshape(len(x), -1)

    convolutions = [Conv(channels, (3, 3)) for channels in (16, 32, 64)]
    first, second, third = ([convolution, activation] for convolution in convolutions)
    head = [flat, nn.Dense(128), activation, nn.Dense(num_classes)]
    return nn.Sequential([image, *first, pool, *second, pool, *third, *head])


def resnet18(shape, num_classes, config):
    """ResNet-18 for small images (a first layer of 3×3, no pooling after it), with group norm in place of batch norm.

    Batch norm makes a function of an image depend on the other images of its minibatch, so it is no function that
    could have a prior.
    """
    activation = getattr(jax.nn, config.activation)

    class Block(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x):
            strides = (self.stride, self.stride)
            y = Conv(self.channels, (3, 3), strides, use_bias=False)(x)
            y = activation(nn.GroupNorm(NUM_GROUPS)(y))
            y = nn.GroupNorm(NUM_GROUPS)(Conv(self.channels, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = nn.GroupNorm(NUM_GROUPS)(Conv(self.channels, (1, 1), strides, use_bias=False)(x))
            return activation(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Conv(64, (3, 3), use_bias=False)(x.reshape(len(x), *shape))
            x = activation(nn.GroupNorm(NUM_GROUPS)(x))
            for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
                x = Block(channels, 1)(Block(channels, stride)(x))
            return nn.Dense(num_classes)(x.mean((1, 2)))

    return ResNet()


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet18": resnet18}
