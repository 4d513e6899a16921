"""BlackJAX's microcanonical Langevin Monte Carlo (MCLMC) on a NumPyro model, tuned by BlackJAX's own tuners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import initialize_model

from numpyro_fspace.model import init_to_network

#: Shares of all steps that BlackJAX's tuner spends on the step size, on the variances and on the length: in total half.
TUNING = {"frac_tune1": 0.3, "frac_tune2": 0.3, "frac_tune3": 0.3}
#: Gradients of a step of BlackJAX's default integrator.
GRADIENTS = 2
#: Acceptance that the adjusted sampler is tuned for, and its mean number of steps per proposal, BlackJAX's default.
ACCEPTANCE, MEAN_STEPS = 0.9, 2.0


def microcanonical(model: Callable, args: tuple, *, num_steps: int, num_draws: int, num_chains: int, adjusted: bool):
    """A compiled sampler ``key -> (draws, number of gradients)``.

    The target is that of NUTS: NumPyro's potential of the model on unconstrained values.

    Args:
        model: a NumPyro model, whose density must not be random.
        args: its arguments.
        num_steps: integration steps of each chain in the sampling phase, after as many of tuning.
        num_draws: draws of each chain that are kept, at equal distances.
        num_chains: chains.
        adjusted: whether proposals pass a Metropolis test. Its tuner may take more gradients than are counted here,
            because its trajectories are longer where the step is short.

    Returns:
        Draws of the latent sites by name, [C, S, …], on their support; and the gradients of a chain with tuning.
    """
    info = initialize_model(jax.random.key(0), model, model_args=args, init_strategy=init_to_network)
    _, unravel = ravel_pytree(info.param_info.z)

    def log_density(position):
        return -info.potential_fn(unravel(position))

    def start(key):
        params = initialize_model(key, model, model_args=args, init_strategy=init_to_network, validate_grad=False)
        return ravel_pytree(params.param_info.z)[0]

    chain = _adjusted(log_density, num_steps, num_draws) if adjusted else _unadjusted(log_density, num_steps, num_draws)

    def run(key):
        key_start, key_chain = jax.random.split(key)
        starts = jnp.stack([start(one) for one in jax.random.split(key_start, num_chains)])
        positions, num = program(jax.random.split(key_chain, num_chains), starts)
        draws = constrain(positions.reshape(-1, positions.shape[-1]))
        return jax.tree.map(lambda a: a.reshape(num_chains, num_draws, *a.shape[1:]), draws), float(jnp.mean(num))

    program = jax.jit(jax.vmap(chain))
    constrain = jax.jit(lambda positions: jax.lax.map(lambda one: info.postprocess_fn(unravel(one)), positions))
    return run


def _unadjusted(log_density, num_steps: int, num_draws: int) -> Callable:
    """A chain of MCLMC."""
    import blackjax

    kernel = blackjax.mcmc.mclmc.build_kernel()
    thinning = max(1, num_steps // num_draws)

    def chain(key, position):
        keys = jax.random.split(key, 3)
        state = blackjax.mcmc.mclmc.init(position, log_density, keys[0])
        settings: dict[str, Any] = {"logdensity_fn": log_density, **TUNING}
        state, found, _ = blackjax.mclmc_find_L_and_step_size(kernel, num_steps, state, keys[1], **settings)

        def draw(state, key):
            def step(i, state):
                key_step = jax.random.fold_in(key, i)
                return kernel(key_step, state, log_density, found.inverse_mass_matrix, found.L, found.step_size)[0]

            state = jax.lax.fori_loop(0, thinning, step, state)
            return state, state.position

        positions = jax.lax.scan(draw, state, jax.random.split(keys[2], num_draws))[1]
        return positions, GRADIENTS * (num_steps + thinning * num_draws)

    return chain


def _adjusted(log_density, num_steps: int, num_draws: int) -> Callable:
    """A chain of adjusted MCLMC, with proposals of a random number of steps."""
    import blackjax

    def random_steps(key, mean):
        return jnp.ceil(jax.random.uniform(key) * (2.0 * mean - 1.0)).astype(int)

    kernel = blackjax.mcmc.adjusted_mclmc_dynamic.build_kernel(integration_steps_fn=random_steps)
    num_proposals = max(1, round(num_steps / MEAN_STEPS / num_draws))

    def chain(key, position):
        keys = jax.random.split(key, 3)
        state = blackjax.mcmc.adjusted_mclmc_dynamic.init(position, log_density, keys[0])
        found = blackjax.adjusted_mclmc_find_L_and_step_size(
            kernel,
            log_density,
            round(num_steps / MEAN_STEPS),
            state,
            keys[1],
            ACCEPTANCE,
            **TUNING | {"frac_tune3": 0.0},
        )
        state, tuned = found[:2]
        settings = {"inverse_mass_matrix": tuned.inverse_mass_matrix, "integration_steps_params": (MEAN_STEPS,)}

        def draw(state, key):
            def propose(i, carry):
                state, num = carry
                key_step = jax.random.fold_in(key, i)
                state, info = kernel(key_step, state, log_density, tuned.step_size, **settings)
                return state, num + info.num_integration_steps

            state, num = jax.lax.fori_loop(0, num_proposals, propose, (state, 0))
            return state, (state.position, num)

        positions, num = jax.lax.scan(draw, state, jax.random.split(keys[2], num_draws))[1]
        return positions, GRADIENTS * (num_steps + num.sum())

    return chain
