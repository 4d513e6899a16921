r"""Training of two Gaussian processes, of a mean and of the logarithm of its noise, by a variational bound.

.. math:: y = f(x) + \epsilon, \qquad \epsilon \sim N(0, e^{g(x)}), \qquad f \sim GP(0, k), \qquad g \sim GP(\mu_0, q)

With the approximation N(μ, Σ) of the posterior of g at the rows and R = diag(exp(μ - diag(Σ)/2)), the evidence is at
least (Lázaro-Gredilla and Titsias, 2011)

.. math:: F = \log N(y; 0, K + R) - \tfrac14 \mathrm{tr}\, \Sigma - \mathrm{KL}(N(\mu, \Sigma) \,\|\, N(\mu_0, Q)).

At its maximum each row is an observation of g of precision Λ: Σ = (Q⁻¹ + Λ)⁻¹ and μ = μ₀ + Σ h with

.. math:: \Lambda = \tfrac12 I + \tfrac12 R\, \mathrm{diag}\big((K + R)^{-1} y y^\top (K + R)^{-1} - (K + R)^{-1}\big),
          \qquad h = \mathrm{diag}(\Lambda) - \tfrac12 + \Lambda (\mu - \mu_0).

A step goes a part of the way to this fixed point, which is a natural gradient of F (Khan and Lin, 2017), and makes a
step of Adam in the logarithms of the kernels' parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_fspace.estimators.gp_kernels import by_products

#: Steps of Adam, their rate, and the part of the way to the fixed point that Λ goes with each.
NUM_STEPS, RATE, PART = 150, 0.1, 0.3
#: Medians of the lengthscales of g, in units of √D, and of its variance; the sd of their logarithms.
LENGTHSCALE, VARIANCE, SPREAD = 2.0, 1.0, 1.0
JITTER = 1e-8


class NoiseFit(NamedTuple):
    """Two trained processes, of the mean and of the logarithm of the noise's standard deviation.

    Attributes:
        params: of the kernel of the mean, ``"variance"`` and ``"lengthscale"``.
        noise_params: of the squared exponential kernel of the logarithm of the standard deviation.
        noise: the standard deviation at which that process is zero.
        gain: how much the bound exceeds the evidence of constant noise, in nats.
    """

    params: dict[str, np.ndarray]
    noise_params: dict[str, np.ndarray]
    noise: float
    gain: float


def fit_noise(kernel: str, params: dict, noise_variance: float, x, y) -> NoiseFit:
    """Train both processes from those of constant noise on.

    Args:
        kernel: name of the kernel of the mean.
        params: its trained parameters.
        noise_variance: the trained constant noise.
        x: standardized inputs [N, D].
        y: targets [N, K] with mean zero; the outputs share the kernels.
    """
    num_inputs = x.shape[1]
    median = {
        "lengthscale": np.full(num_inputs, LENGTHSCALE * math.sqrt(num_inputs)),
        "variance": np.asarray(VARIANCE),
    }
    start = {"f": params, "g": median, "center": np.asarray(noise_variance)}
    with jax.enable_x64(True):
        logs = jax.tree.map(lambda a: jnp.log(jnp.asarray(a, float)), start)
        x, y = jnp.asarray(x, float), jnp.asarray(y, float)
        values, gain = _train(kernel, logs, median, x, y)
    values = jax.tree.map(np.asarray, values)
    of_sd = {"variance": values["g"]["variance"] / 4, "lengthscale": values["g"]["lengthscale"]}
    return NoiseFit(values["f"], of_sd, float(np.sqrt(values["center"])), float(gain))


def _train(kernel, start, median, x, y):
    optimizer = optax.adam(RATE)

    def loss(logs, sites):
        """-F - log p(parameters of g) for each entry of y, the next sites, and F."""
        bounds, after = jax.lax.map(lambda one: _bound(kernel, logs, x, *one), (y.T, sites))
        away = jax.tree.map(lambda a, b: jnp.sum((a - jnp.log(b)) ** 2), logs["g"], median)
        penalty = 0.5 * sum(jax.tree.leaves(away)) / SPREAD**2
        return (penalty - bounds.sum()) / y.size, (after, bounds.sum())

    def step(carry, _):
        logs, sites, state = carry
        (value, (target, bound)), gradient = jax.value_and_grad(loss, has_aux=True)(logs, sites)
        updates, state = optimizer.update(gradient, state)
        after = jax.tree.map(lambda old, new: old + PART * (new - old), sites, target)
        return (optax.apply_updates(logs, updates), after, state), (value, bound, logs)

    @jax.jit
    def run(start):
        sites = jnp.full(y.T.shape, 0.5), jnp.zeros(y.T.shape)
        _, (values, bounds, path) = jax.lax.scan(step, (start, sites, optimizer.init(start)), length=NUM_STEPS)
        best = jnp.nanargmin(jnp.where(jnp.arange(NUM_STEPS) < NUM_STEPS // 2, jnp.inf, values))
        constant = sum(_constant(kernel, start, x, one) for one in y.T)
        return jax.tree.map(lambda a: jnp.exp(a[best]), path), bounds[best] - constant

    return run(start)


def _constant(kernel, logs, x, y):
    """The evidence of constant noise."""
    params = jax.tree.map(jnp.exp, logs)
    covariance = by_products(kernel, params["f"])(x, x) + params["center"] * jnp.eye(len(y))
    return _log_density(covariance, y)[0]


def _bound(kernel, logs, x, y, sites):
    """``(F, the next sites)`` for one output, with the sites ``(diag Λ, h)``."""
    weights, linear = sites
    params, root = jax.tree.map(jnp.exp, logs), jnp.sqrt(weights)
    prior = by_products("squared_exponential", params["g"])(x, x)
    inverse, log_det = _inverse(jnp.eye(len(y)) + root[:, None] * prior * root)
    diagonal = jnp.diagonal(inverse)
    variances = (1.0 - diagonal) / weights  # of Σ
    dual = linear - root * (inverse @ (root * (prior @ linear)))
    shift = prior @ dual  # μ - μ₀
    noise = jnp.exp(logs["center"] + shift - 0.5 * variances)
    value, pull, precision = _log_density(by_products(kernel, params["f"])(x, x) + jnp.diag(noise), y)
    divergence = 0.5 * (log_det + diagonal.sum() - len(y) + dual @ shift)
    target = jnp.maximum(0.5 + 0.5 * noise * (pull**2 - precision), JITTER)
    after = jax.lax.stop_gradient((target, target - 0.5 + target * shift))
    return value - 0.25 * variances.sum() - divergence, after


def _log_density(covariance, y):
    """``(log N(y; 0, Σ), Σ⁻¹ y, diag Σ⁻¹)``."""
    inverse, log_det = _inverse(covariance + JITTER * jnp.eye(len(y)))
    pull = inverse @ y
    return -0.5 * (y @ pull + log_det + len(y) * math.log(2 * math.pi)), pull, jnp.diagonal(inverse)


@jax.custom_vjp
def _inverse(matrix):
    """The inverse and the log determinant of a covariance, with derivatives by matrix products."""
    return _forward(matrix)[0]


def _forward(matrix):
    factor = jnp.linalg.cholesky(matrix)
    inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(len(matrix)))
    return (inverse, 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor)))), inverse


def _backward(inverse, slopes):
    by_inverse, by_log_det = slopes
    return (by_log_det * inverse - inverse @ by_inverse @ inverse,)


_inverse.defvjp(_forward, _backward)
