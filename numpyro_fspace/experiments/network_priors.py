"""The prior of random networks at a few inputs: its limit at infinite width, and its score at finite width.

Weights are N(0, 1/fan-in), biases N(0, ``BIAS``), and inputs are one-dimensional.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.variational import spectral_stein_score

#: Variance of a bias.
BIAS = 0.1
#: Number of nodes and largest node of the trapezoidal rule for normal expectations; variance added to a kernel matrix,
#: relative to the mean of its diagonal.
NUM_NODES, LAST_NODE, JITTER = 71, 7.0, 1e-6
#: Number of values of f whose score is computed together; number of draws of f for a spectral estimate.
NUM_ROWS, NUM_SPECTRAL = 50, 1000


class Architecture(NamedTuple):
    """Number of layers, width of the hidden layers, and their activation, a name in ``jax.nn``."""

    depth: int
    width: int
    activation: str


def infinite_kernels(x, depth: int, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """Limits at infinite width for inputs [M, 1]: covariance of f under the prior, and tangent kernel / width.

    The expectations of φ(a)φ(b) and φ'(a)φ'(b) over a bivariate normal are computed layer by layer with the trapezoidal
    rule, whose error decreases exponentially for analytic φ. Only arrays with variance 1/width contribute to the
    tangent kernel at this scale; the first layer and the biases do not.
    """
    phi = getattr(jax.nn, activation)
    slope = jax.vmap(jax.vmap(jax.grad(phi)))
    x = np.asarray(x, np.float64)
    covariance, tangent = x @ x.T + BIAS, np.zeros((len(x), len(x)))
    with jax.enable_x64(True):
        for layer in range(depth - 1):
            hidden = _expectation(covariance, phi)
            # The weights of the previous layer, whose outputs are a and b; the first layer does not contribute.
            tangent = hidden + (tangent * _expectation(covariance, slope) if layer else 0.0)
            covariance = hidden + BIAS
    return covariance, tangent


def _expectation(covariance, function):
    """E[g(a) g(b)] for every pair (a, b) ~ N(0, covariance)."""
    nodes = np.linspace(-LAST_NODE, LAST_NODE, NUM_NODES)
    weights = np.exp(-0.5 * nodes**2)
    weights /= weights.sum()
    sd = np.sqrt(np.diagonal(covariance))
    first = np.asarray(function(jnp.asarray(sd[:, None] * nodes)))  # [M, Q]
    result = np.empty_like(covariance)
    for i in range(len(sd)):
        ratio = np.clip(covariance[i] / (sd[i] * sd), -1.0, 1.0)
        rest = np.sqrt(np.maximum(1.0 - ratio**2, 0.0))
        b = sd[:, None, None] * (ratio[:, None, None] * nodes[:, None] + rest[:, None, None] * nodes)  # [M, Q, Q]
        shape = (len(sd) * NUM_NODES, NUM_NODES)
        second = np.asarray(function(jnp.asarray(b.reshape(shape)))).reshape(b.shape) @ weights
        result[i] = second @ (weights * first[i])
    return 0.5 * (result + result.T)


def root(matrix):
    """A with A Aᵀ = matrix + jitter."""
    jitter = JITTER * np.trace(matrix) / len(matrix)
    return np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)))


def gaussian_score(kernel):
    """``values [S, M] -> ∇ log p(values)`` of N(0, kernel)."""
    return lambda values: -np.linalg.solve(root(kernel) @ root(kernel).T, values.T).T


def _hidden(key, at, network: Architecture, num):
    """Features of the last layer [S, M, H] of random networks."""
    phi, width = getattr(jax.nn, network.activation), network.width

    def draw(key):
        h = jnp.asarray(at)
        for _ in range(network.depth - 1):
            key, key_weight, key_bias = jax.random.split(key, 3)
            fan = h.shape[-1]
            weight = jax.random.normal(key_weight, (fan, width)) / np.sqrt(fan)
            h = phi(h @ weight + BIAS**0.5 * jax.random.normal(key_bias, (width,)))
        return h

    return jax.lax.map(draw, jax.random.split(key, num), batch_size=20)


def mixture_score(key, at, network: Architecture, num_units: int):
    """``values [S, M] -> ∇ log p(values)`` of a network's prior at inputs ``at``: a mixture of Gaussians.

    Given its hidden layers f is Gaussian with covariance C = ΦΦᵀ/H + 0.1, so p(f) = E[N(f; 0, C)] over random hidden
    layers. No kernel density estimate is needed, and the estimate is as accurate in the tails, where the posterior
    lies, as in the center. ``num_units`` is the number of hidden units in a layer of all random networks together.
    """
    num = max(1, num_units // network.width)

    def second_moments(key):
        phi = _hidden(key, at, network, num)
        return phi @ phi.mT / network.width

    covariance = np.asarray(jax.jit(second_moments)(key), np.float64) + BIAS
    covariance += JITTER * np.trace(covariance, axis1=1, axis2=2).mean() / len(at) * np.eye(len(at))
    precision, log_det = np.linalg.inv(covariance), np.linalg.slogdet(covariance)[1]
    flat = precision.reshape(len(precision), -1)

    def score(values):
        result = np.empty_like(values)
        for rows in np.array_split(np.arange(len(values)), -(-len(values) // NUM_ROWS)):
            f = values[rows]
            squares = (f[:, :, None] * f[:, None, :]).reshape(len(f), -1)
            log_weights = -0.5 * (squares @ flat.T + log_det)
            weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            mean = (weights @ flat).reshape(len(f), len(at), len(at))
            result[rows] = -np.einsum("sij,sj->si", mean, f)
        return result

    return score


def spectral_score(key, at, network: Architecture, num_units: int):
    """The score of ``mixture_score`` by the spectral Stein estimate from draws of the function, as in the paper."""
    width = network.width
    key_hidden, key_last, key_bias = jax.random.split(key, 3)
    phi = _hidden(key_hidden, at, network, min(NUM_SPECTRAL, num_units // width))
    weights = jax.random.normal(key_last, (len(phi), width)) / np.sqrt(width)
    biases = BIAS**0.5 * jax.random.normal(key_bias, (len(phi), 1))
    draws = jnp.einsum("smh,sh->sm", phi, weights) + biases
    return lambda values: np.array(spectral_stein_score(draws, at=jnp.asarray(values, jnp.float32)), np.float64)


SCORES = {"mixture": mixture_score, "spectral": spectral_score}
