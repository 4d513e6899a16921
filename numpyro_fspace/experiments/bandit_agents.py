"""Who chooses in the bandit: the model of rewards, and what learns it while interactions come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_fspace.experiments.methods import KERNELS
from numpyro_fspace.infer import SGHMC, Warmup
from numpyro_fspace.networks import fan_in, init_to_network, random_module
from numpyro_fspace.primitives import functional_prior
from numpyro_fspace.variational import FunctionalELBO, RegularizedKL, SpectralSteinKL, mean_field

if TYPE_CHECKING:
    from numpyro_fspace.experiments.bandit import Config

__all__ = ["METHODS", "Agent", "Buffer", "build_agent", "build_model"]

#: Divergences of the variational methods; None is NumPyro's bound, against the prior of the weights.
DIVERGENCES = {"bbb": None, "gfsvi": RegularizedKL(), "fbnn": SpectralSteinKL()}
#: Networks without uncertainty: the share of their actions that is random.
EPSILON = {"greedy": 0.0, "egreedy": 0.05}
METHODS = (*KERNELS, *DIVERGENCES, *EPSILON, "uniform")


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
    """What chooses: a state, how it learns, and weights drawn from what it believes.

    Attributes:
        start: ``key -> state``.
        learn: ``(state, buffer) -> state``.
        draw: ``(key, state, buffer) -> weights``; None acts at random.
        epsilon: share of actions that are random.
    """

    start: Callable
    learn: Callable
    draw: Callable | None
    epsilon: float = 0.0


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

    activation = getattr(jax.nn, config.activation)
    layers = [layer for width in config.widths for layer in (nn.Dense(width), activation)]
    network = nn.Sequential([*layers, nn.Dense(2)])

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


def sampler_agent(method: str, config: Config, model) -> Agent:
    """A chain that goes on as the buffer grows, a step after each interaction.

    What fits the curvature of a hundred interactions is too long a step for a thousand. So warm-up never ends: every
    ``num_warmup`` draws step size and preconditioner are found anew where the chain is.
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

    def learn(state, buffer):
        state = state._replace(i=state.i % config.num_warmup)
        return kernel.sample(state, (buffer,), {})

    return Agent(
        start=lambda key: kernel.init(key, config.num_warmup, None, (empty,), {}),
        learn=learn,
        draw=lambda key, state, buffer: state.z,
    )


def optimising_agent(config: Config, model, guide, loss, epsilon: float) -> Agent:
    """A guide that Adam goes on fitting as the buffer grows."""
    import optax

    svi = SVI(model, guide, optax.adam(config.learning_rate), loss)
    empty = Buffer.empty(config.buffer_size)

    def learn(state, buffer):
        return jax.lax.scan(lambda state, _: (svi.update(state, buffer)[0], None), state, length=config.num_steps)[0]

    def draw(key, state, buffer):
        return guide.sample_posterior(key, svi.get_params(state), buffer)

    return Agent(lambda key: svi.init(key, empty), learn, draw, epsilon)


def build_agent(method: str, config: Config, build) -> Agent:
    """The agent of a method; ``build(functional=...)`` gives the model."""
    if method == "uniform":
        return Agent(lambda key: (), lambda state, buffer: state, None)
    if method in KERNELS:
        return sampler_agent(method, config, build(functional=KERNELS[method].needs_functional_prior))
    if method in EPSILON:
        model = build(functional=False)
        return optimising_agent(
            config, model, AutoDelta(model, init_loc_fn=init_to_network), Trace_ELBO(), EPSILON[method]
        )
    divergence = DIVERGENCES[method]
    model = build(functional=divergence is not None)
    loss = Trace_ELBO() if divergence is None else FunctionalELBO(divergence)
    return optimising_agent(config, model, mean_field(model), loss, 0.0)
