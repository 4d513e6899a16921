"""Metropolis-adjusted Langevin dynamics of a network's weights and of functions, by BlackJAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_fspace.experiments.network_priors import BIAS, Architecture, root
from numpyro_fspace.model import fan_in, random_module

#: Variance of the noise of the observations.
NOISE = 0.01
#: Number of weights, in millions, of the chains that run together.
MILLIONS = 0.5


class Dynamics(NamedTuple):
    """Langevin dynamics with a Metropolis test.

    Attributes:
        start: ``key -> position``, a draw of the prior.
        log_density: ``position -> log p``, up to a constant.
        values: ``(position, x) -> f(x)`` at some inputs.
        step_size: ε.
        size: number of coordinates of a position.
    """

    start: Callable
    log_density: Callable
    values: Callable
    step_size: float
    size: int


def data(key, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The paper's N points, two thirds on [-2.5, -0.5] and the rest on [1, 2], and y with noise of variance 0.01."""
    first = 2 * num // 3
    x = np.concatenate([np.linspace(-2.5, -0.5, first), np.linspace(1.0, 2.0, num - first)])
    y = x * np.sin(1.5 * x) + 0.125 * x**3 + np.sqrt(NOISE) * np.asarray(jax.random.normal(key, x.shape))
    return x[:, None].astype(np.float32), y.astype(np.float32)


def simulate(dynamics: Dynamics, x, iterations: Sequence[int], num_chains: int, key):
    """f at x after each of the given iterations, [I, C, M], and the mean acceptance probability."""
    kernel = blackjax.mala(dynamics.log_density, dynamics.step_size)
    x = jnp.asarray(x)

    def chain(key):
        key_start, key_run = jax.random.split(key)
        state = kernel.init(dynamics.start(key_start))

        def step(i, carry):
            state, total = carry
            state, info = kernel.step(jax.random.fold_in(key_run, i), state)
            return state, total + info.acceptance_rate

        def several(carry, ends):
            carry = jax.lax.fori_loop(*ends, step, carry)
            return carry, dynamics.values(carry[0].position, x)

        first, ends = dynamics.values(state.position, x), (jnp.asarray(iterations[:-1]), jnp.asarray(iterations[1:]))
        (_, total), rest = jax.lax.scan(several, (state, jnp.zeros(())), ends)
        return jnp.concatenate([first[None], rest]), total / iterations[-1]

    together = max(1, min(num_chains, int(MILLIONS * 1e6 / dynamics.size)))
    run_chains = jax.jit(lambda keys: jax.lax.map(chain, keys, batch_size=together))
    f, acceptance = jax.device_get(run_chains(jax.random.split(key, num_chains)))
    return np.moveaxis(f, 0, 1), acceptance.mean()


def weight_dynamics(x, y, network: Architecture, step_size: float) -> Dynamics:
    """Langevin dynamics of a network's weights under the paper's priors, N(0, 1/fan-in) and N(0, 0.1) for biases."""
    layers = (1, *(network.width,) * (network.depth - 1), 1)
    activation = getattr(jax.nn, network.activation)

    def init(key, input_shape):
        return [{"weight": jnp.zeros((a, b)), "bias": jnp.zeros(b)} for a, b in itertools.pairwise(layers)]

    def model(x, y):
        pair = (init, lambda weights, x: forward(weights, x, activation)[:, 0])
        f = random_module("net", pair, input_shape=1, prior=prior)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x), NOISE**0.5), obs=y)
        return f

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(x, y)
        return {name: site["value"] for name, site in trace.items() if name.startswith("net.")}

    def values(weights, at):
        return handlers.seed(handlers.substitute(model, weights), 0)(x, y)(at)

    def log_density(weights):
        return numpyro.infer.util.log_density(model, (x, y), {}, weights)[0]

    size = sum(a * b + b for a, b in itertools.pairwise(layers))
    return Dynamics(draw, log_density, values, step_size / (len(x) * network.width), size)


def prior(path, shape):
    """The paper's prior of a weight array."""
    return dist.Normal(0.0, BIAS**0.5) if path.endswith("bias") else fan_in()


def forward(layers, x, activation):
    """The network's output, linear in the last layer."""
    for layer in layers[:-1]:
        x = activation(x @ layer["weight"] + layer["bias"])
    return x @ layers[-1]["weight"] + layers[-1]["bias"]


def function_dynamics(limit, y, step_size: float) -> Dynamics:
    """Langevin dynamics of f at M inputs, the data first, under N(0, K) and with the tangent kernel Θ as metric.

    With f = A u, A Aᵀ = Θ, this is plain Langevin dynamics of u, as in the paper's example 2.1.
    """
    kernel, tangent = (root(matrix) for matrix in limit)
    precision = tangent.T @ np.linalg.solve(kernel @ kernel.T, tangent)
    outward, start = jnp.asarray(tangent, jnp.float32), jnp.asarray(np.linalg.solve(tangent, kernel), jnp.float32)
    precision, y = jnp.asarray(precision, jnp.float32), jnp.asarray(y)

    def log_density(u):
        return -0.5 * (u @ precision @ u + jnp.sum((outward[: len(y)] @ u - y) ** 2) / NOISE)

    return Dynamics(
        lambda key: start @ jax.random.normal(key, (len(start),)),
        log_density,
        lambda u, x: outward @ u,
        step_size / len(y),
        len(start),
    )
