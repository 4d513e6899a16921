"""Who chooses in the bandit: the model of rewards, and what learns it while interactions come in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_fspace.experiments.catalog import hidden_layers
from numpyro_fspace.experiments.methods import KERNELS
from numpyro_fspace.mcmc import SGHMC, Warmup
from numpyro_fspace.model import fan_in, function_values, functional_prior, init_to_network, random_module
from numpyro_fspace.variational import FunctionalELBO, RegularizedKL, SpectralSteinKL, mean_field

if TYPE_CHECKING:
    from numpyro_fspace.experiments.bandit import Config

__all__ = ["METHODS", "Agent", "Buffer", "build_agent", "build_model"]

#: Divergences of the variational methods; None is NumPyro's bound, against the prior of the weights.
DIVERGENCES = {"bbb": None, "gfsvi": RegularizedKL(), "fbnn": SpectralSteinKL()}
#: Networks without uncertainty: the share of their actions that is random.
EPSILON = {"greedy": 0.0, "egreedy": 0.05}
METHODS = (*KERNELS, *DIVERGENCES, "gp", *EPSILON, "uniform")
#: Of a process: features that stand for its kernel, and the mushrooms they are found on.
NUM_FEATURES, NUM_FEATURE_ROWS = 500, 2000


class Buffer(NamedTuple):
    """The last interactions.

    Attributes:
        rows: which mushrooms came [B].
        actions: what was done [B].
        rewards: in the model's units [B].
        num: interactions so far; the first min(num, B) places are filled.
    """

    rows: jax.Array
    actions: jax.Array
    rewards: jax.Array
    num: jax.Array

    @classmethod
    def empty(cls, size: int) -> Buffer:
        return cls(jnp.zeros(size, int), jnp.zeros(size, int), jnp.zeros(size), jnp.zeros((), int))

    @property
    def size(self):
        """Filled places."""
        return jnp.minimum(self.num, len(self.rows))

    def add(self, row, action, reward) -> Buffer:
        """The buffer with one more interaction, in place of the oldest if it is full."""
        place = self.num % len(self.rows)
        return Buffer(
            self.rows.at[place].set(row),
            self.actions.at[place].set(action),
            self.rewards.at[place].set(reward),
            self.num + 1,
        )


class Agent(NamedTuple):
    """What chooses: a state, how it learns, and what it believes of a mushroom.

    Attributes:
        start: ``key -> state``.
        learn: ``(state, buffer) -> (state, undone)``, and whether what was learned was undone.
        rewards: ``(key, state, buffer, row) -> [2]``, of the two actions, under a draw from what it believes; None acts
            at random.
        epsilon: share of actions that are random.
    """

    start: Callable
    learn: Callable
    rewards: Callable | None
    epsilon: float = 0.0


class Belief(NamedTuple):
    """Normal laws of the weights of features, for each action: ``mean`` [2, R], ``covariance`` [2, R, R]."""

    mean: jax.Array
    covariance: jax.Array


def spread(indices, capacity: int, size):
    """Rows below ``size`` for indices below ``capacity``, and the share of its row that each index has.

    Consecutive indices fall to the same row, as many to each as to any other to within one; the shares of a row's
    indices sum to one. So a plate of size ``capacity`` sees every row once, whatever ``size`` is, and a minibatch of it
    holds rows that are there.
    """
    size = jnp.maximum(size, 1)
    rows = indices * size // capacity
    first, last = -(-rows * capacity // size), -(-(rows + 1) * capacity // size)
    return rows, 1.0 / (last - first)


def build_model(config: Config, x, prior, points, noise_sd: float, *, functional: bool):
    """``model(buffer)``: a network of two rewards, normal noise, and minibatches of what the buffer holds by now.

    The plate has room for a full buffer; ``spread`` gives its indices to the rows that are there by now.
    """
    from flax import linen as nn

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


def promises(model, x, draw: Callable) -> Callable:
    """``Agent.rewards`` of a network whose weights are ``draw(key, state, buffer)``."""

    def rewards(key, state, buffer, row):
        weights = draw(key, state, buffer)
        return function_values(model, weights, (buffer,), {}, {"net": x[row][None]})["net"][0]

    return rewards


def process_features(kernel, x, key):
    """Features [N, R] of the rows of x [N, D] whose products are the kernel's leading part (Nyström's method)."""
    rows = x[jax.random.permutation(key, len(x))[:NUM_FEATURE_ROWS]]
    covariance = jax.jit(lambda x: kernel(x, rows))  # compiled, it makes no array of all differences
    variances, directions = jnp.linalg.eigh(covariance(rows))
    variances, directions = variances[-NUM_FEATURES:], directions[:, -NUM_FEATURES:]
    return covariance(x) @ directions / jnp.sqrt(jnp.maximum(variances, 1e-6 * variances[-1]))


def process_agent(features, noise_sd: float) -> Agent:
    """The process itself in place of a network, one for each action: its posterior is exact, and forgets nothing."""

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
    """``num_chains`` chains that go on as the buffer grows, each of which chooses and then moves in its turn.

    So a draw is hardly akin to the last one, for as many gradients as one chain takes, and a chain that has seen harm
    and rejects everything learns from what the others eat.

    What fits the curvature of a hundred interactions is too long a step for a thousand. So warm-up never ends: every
    ``num_warmup`` draws of a chain, its step size and preconditioner are found anew where it is.
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

    return Agent(start, learn, promises(model, x, lambda key, states, buffer: chain(states, buffer.num).z))


def optimizing_agent(config: Config, model, x, guide, loss, epsilon: float) -> Agent:
    """A guide that Adam goes on fitting as the buffer grows."""
    import optax

    svi = SVI(model, guide, optax.adam(config.learning_rate), loss)
    empty = Buffer.empty(config.buffer_size)

    def learn(state, buffer):
        return jax.lax.scan(lambda s, _: (svi.update(s, buffer)[0], None), state, length=config.num_steps)[0], False

    def draw(key, state, buffer):
        return guide.sample_posterior(key, svi.get_params(state), buffer)

    return Agent(lambda key: svi.init(key, empty), learn, promises(model, x, draw), epsilon)


def build_agent(method: str, config: Config, x, prior, points, noise_sd: float, key) -> Agent:
    """The agent of a method.

    Args:
        method: one of ``METHODS``.
        config: every number of a run.
        x: features of the mushrooms [N, D].
        prior, points: the functional prior, and where it acts.
        noise_sd: of a reward, in the model's units.
        key: of the features of ``"gp"``.
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
        return optimizing_agent(config, model, x, guide, Trace_ELBO(), EPSILON[method])
    divergence = DIVERGENCES[method]
    model = build(functional=divergence is not None)
    loss = Trace_ELBO() if divergence is None else FunctionalELBO(divergence)
    return optimizing_agent(config, model, x, mean_field(model), loss, 0.0)
