"""Agents of the mushroom bandit: the model of rewards, and methods that learn it during the interactions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen as nn
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_fspace.experiments.bandit_problem import Buffer, Config
from numpyro_fspace.experiments.methods import KERNELS
from numpyro_fspace.experiments.networks import hidden_layers
from numpyro_fspace.mcmc import SGHMC, Warmup
from numpyro_fspace.model import fan_in, function_values, functional_prior, init_to_network, random_module
from numpyro_fspace.variational import FunctionalELBO, RegularizedKL, SpectralSteinKL, mean_field

#: Divergences of the variational methods; None means NumPyro's bound, with the KL to the prior of the weights.
DIVERGENCES = {"bbb": None, "gfsvi": RegularizedKL(), "fbnn": SpectralSteinKL()}
#: Methods without uncertainty, with their share of random actions.
EPSILON = {"greedy": 0.0, "egreedy": 0.05}
METHODS = (*KERNELS, *DIVERGENCES, "gp", *EPSILON, "uniform")
#: Number of features that approximate the kernel of the process, and number of mushrooms that define them.
NUM_FEATURES, NUM_FEATURE_ROWS = 500, 2000


class Agent(NamedTuple):
    """An agent as functions of its state.

    Attributes:
        start: ``key -> state``.
        learn: ``(state, buffer) -> (state, undone)``; ``undone`` says whether the learning step was undone.
        rewards: ``(key, state, buffer, row) -> [2]``, the rewards of the two actions under a draw from the agent's
            posterior; None means random actions.
        epsilon: share of random actions.
    """

    start: Callable
    learn: Callable
    rewards: Callable | None
    epsilon: float = 0.0


class Belief(NamedTuple):
    """Normal posteriors of the weights of features, for each action: ``mean`` [2, R], ``covariance`` [2, R, R]."""

    mean: jax.Array
    covariance: jax.Array


def spread(indices, capacity: int, size):
    """Rows below ``size`` for indices below ``capacity``, and the weight of each index.

    Consecutive indices are mapped to the same row. The numbers of indices of two rows differ by at most one, and the
    weights of the indices of a row sum to one. A plate of size ``capacity`` then sees every row once, whatever ``size``
    is, and its minibatches contain only existing rows.
    """
    size = jnp.maximum(size, 1)
    rows = indices * size // capacity
    first, last = -(-rows * capacity // size), -(-(rows + 1) * capacity // size)
    return rows, 1.0 / (last - first)


def build_model(config: Config, x, prior, points, noise_sd: float, *, functional: bool):
    """``model(buffer)``: a network with two rewards, normal noise, and minibatches of the current buffer.

    The plate has the size of a full buffer; ``spread`` maps its indices to the filled rows.
    """
    network = nn.Sequential([*hidden_layers(config), nn.Dense(2)])

    def model(buffer):
        f = random_module("net", network, input_shape=(x.shape[-1],), prior=fan_in(config.weight_scale))
        if functional:
            f = functional_prior("f", f, prior, points)
        with numpyro.plate("buffer", config.buffer_size, subsample_size=config.batch_size) as indices:
            places, shares = spread(indices, config.buffer_size, buffer.size)
            with handlers.scale(scale=shares), handlers.mask(mask=buffer.num > 0):
                rewards = f(x[buffer.rows[places]])[jnp.arange(len(places)), buffer.actions[places]]
                numpyro.sample("reward", dist.Normal(rewards, noise_sd), obs=buffer.rewards[places])

    return model


def network_rewards(model, x, draw: Callable) -> Callable:
    """``Agent.rewards`` of a network with the weights ``draw(key, state, buffer)``."""

    def rewards(key, state, buffer, row):
        weights = draw(key, state, buffer)
        return function_values(model, weights, (buffer,), {}, {"net": x[row][None]})["net"][0]

    return rewards


def process_features(kernel, x, key):
    """Features [N, R] of the rows of x [N, D] whose inner products approximate the kernel (Nyström's method)."""
    rows = x[jax.random.permutation(key, len(x))[:NUM_FEATURE_ROWS]]
    covariance = jax.jit(lambda x: kernel(x, rows))  # jit avoids an array of all differences
    variances, directions = jnp.linalg.eigh(covariance(rows))
    variances, directions = variances[-NUM_FEATURES:], directions[:, -NUM_FEATURES:]
    return covariance(x) @ directions / jnp.sqrt(jnp.maximum(variances, 1e-6 * variances[-1]))


def process_agent(features, noise_sd: float) -> Agent:
    """An agent with a GP for each action instead of a network: its posterior is exact and uses all interactions."""

    def start(key):
        size = features.shape[1]
        return Belief(jnp.zeros((2, size)), jnp.broadcast_to(jnp.eye(size), (2, size, size)))

    def learn(state, buffer):
        place = (buffer.num - 1) % len(buffer.rows)
        row, action, reward = buffer.rows[place], buffer.actions[place], buffer.rewards[place]
        cross = state.covariance[action] @ features[row]
        gain = cross / (features[row] @ cross + noise_sd**2)
        error = reward - features[row] @ state.mean[action]
        mean = state.mean.at[action].add(gain * error)
        return Belief(mean, state.covariance.at[action].add(-jnp.outer(gain, cross))), False

    def rewards(key, state, buffer, row):
        variance = jnp.einsum("r,ars,s->a", features[row], state.covariance, features[row])
        return state.mean @ features[row] + jnp.sqrt(jnp.maximum(variance, 0.0)) * jax.random.normal(key, (2,))

    return Agent(start, learn, rewards)


def sampler_agent(method: str, config: Config, model, x) -> Agent:
    """An agent with ``num_chains`` chains that continue while the buffer grows, and that choose and move in turn.

    Successive draws are then nearly independent at the cost of a single chain, and a chain that rejects everything
    after harm learns from the actions of the others. A step size for a hundred interactions is too large for a
    thousand, so the step size and the preconditioner of a chain are adapted again every ``num_warmup`` draws.
    """
    settings: dict[str, Any] = {"friction": config.friction} if issubclass(KERNELS[method], SGHMC) else {}
    kernel = KERNELS[method](
        model,
        num_steps=config.num_steps,
        control_variates=config.control_variates,
        warmup=Warmup(warm_start=0.0),
        **settings,
    )
    empty = Buffer.empty(config.buffer_size)

    def start(key):
        states = [
            kernel.init(key, config.num_warmup, None, (empty,), {}) for key in jax.random.split(key, config.num_chains)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def chain(states, num):
        return jax.tree.map(lambda leaves: leaves[num % config.num_chains], states)

    def learn(states, buffer):
        state = chain(states, buffer.num - 1)
        state = kernel.sample(state._replace(i=state.i % config.num_warmup), (buffer,), {})
        turn = (buffer.num - 1) % config.num_chains
        return jax.tree.map(lambda leaves, leaf: leaves.at[turn].set(leaf), states, state), state.diverging

    return Agent(start, learn, network_rewards(model, x, lambda key, states, buffer: chain(states, buffer.num).z))


def optimizing_agent(config: Config, model, x, guide, loss, *, epsilon: float = 0.0) -> Agent:
    """An agent with a guide that Adam continues to fit while the buffer grows."""
    svi = SVI(model, guide, optax.adam(config.learning_rate), loss)
    empty = Buffer.empty(config.buffer_size)

    def learn(state, buffer):
        return jax.lax.scan(lambda s, _: (svi.update(s, buffer)[0], None), state, length=config.num_steps)[0], False

    def draw(key, state, buffer):
        return guide.sample_posterior(key, svi.get_params(state), buffer)

    return Agent(lambda key: svi.init(key, empty), learn, network_rewards(model, x, draw), epsilon)


def build_agent(method: str, config: Config, x, prior, points, *, noise_sd: float, key) -> Agent:
    """The agent of a method.

    Args:
        method: one of ``METHODS``.
        config: settings of the run.
        x: features of the mushrooms [N, D].
        prior, points: the functional prior and its measurement points.
        noise_sd: sd of a reward in the model's units.
        key: for the features of ``"gp"``.
    """
    build = functools.partial(build_model, config, x, prior, points, noise_sd)
    if method == "uniform":
        return Agent(lambda key: (), lambda state, buffer: (state, False), None)
    if method == "gp":
        return process_agent(process_features(prior.kernel, x, key), noise_sd)
    if method in KERNELS:
        return sampler_agent(method, config, build(functional=KERNELS[method].needs_functional_prior), x)
    if method in EPSILON:
        model = build(functional=False)
        guide = AutoDelta(model, init_loc_fn=init_to_network)
        return optimizing_agent(config, model, x, guide, Trace_ELBO(), epsilon=EPSILON[method])
    divergence = DIVERGENCES[method]
    model = build(functional=divergence is not None)
    loss = Trace_ELBO() if divergence is None else FunctionalELBO(divergence)
    return optimizing_agent(config, model, x, mean_field(model), loss)
