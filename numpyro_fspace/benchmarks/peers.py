"""The samplers of this package, those of other libraries, and plain SGD, on the density of a benchmark's problem.

Each is a function ``run(key)`` with the same number of gradient steps and kept draws. It uses the loop shown in the
documentation of the library.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax

from numpyro_fspace.benchmarks.problems import NUM_STEPS, STEP_SIZE, Size, likelihood, network, params, sampler
from numpyro_fspace.experiments.methods import KERNELS

#: Gradient steps of a transition of SGHMC, BlackJAX's default.
NUM_INTEGRATION_STEPS = 10


def num_draws(name: str, problem: Size) -> int:
    """Number of draws of a run; runs in a Python loop make a hundredth of the draws."""
    return max(problem.num_draws // 100, 1) if name.startswith("posteriors") else problem.num_draws


def contenders(problem: Size, x, y) -> dict[str, Callable]:
    """Runs by name: the kernels of this package, BlackJAX, posteriors (PyTorch) if it is installed, and SGD."""
    runs = {name: sampler(kernel, problem, x, y) for name, kernel in KERNELS.items()}
    names = ["blackjax_sgld", "blackjax_sghmc", "sgd"]
    if find_spec("posteriors") is not None:
        names[2:2] = ["posteriors_sgld", "posteriors_sghmc"]
    return runs | {name: peer(name, problem, x, y) for name in names}


def peer(name: str, problem: Size, x, y) -> Callable:
    """The run of one that is not of this package, such as ``"blackjax_sghmc"`` or ``"sgd"``."""
    library, _, method = name.partition("_")
    return _PEERS[library](method, problem, x, y)


def _sgd(_, problem: Size, x, y) -> Callable:
    """optax's SGD, a lower bound: a gradient and an update without noise."""
    log_density, optimizer = _log_density(problem), optax.sgd(STEP_SIZE)

    def step(state, key):
        weights, inner = state
        gradient = jax.grad(lambda w: -log_density(w, _batch(problem, x, y, key)))(weights)
        updates, inner = optimizer.update(gradient, inner)
        return optax.apply_updates(weights, updates), inner

    start = params(problem)
    return _scanned(step, (start, optimizer.init(start)), problem.num_draws, NUM_STEPS, lambda state: state[0])


def _log_density(problem):
    net = network(problem)

    def log_density(weights, batch):
        x, y = batch
        log_likelihood = jnp.sum(likelihood(problem, net.apply(weights, x)).log_prob(y))
        scales = [1.0 if leaf.ndim == 1 else leaf.shape[0] ** -0.5 for leaf in jax.tree.leaves(weights)]
        priors = [dist.Normal(0.0, scale) for scale in scales]
        log_prior = sum(jnp.sum(prior.log_prob(w)) for prior, w in zip(priors, jax.tree.leaves(weights), strict=True))
        return log_prior + problem.num_data / len(y) * log_likelihood

    return log_density


def _batch(problem, x, y, key):
    if problem.batch_size is None:
        return x, y
    rows = jax.random.randint(key, (problem.batch_size,), 0, problem.num_data)
    return x[rows], y[rows]


def _scanned(step, state, num_draws, num_inner, kept):
    """``run(key)``: ``num_draws`` draws of ``num_inner`` steps each."""

    @jax.jit
    def scan(key, state):
        def draw(state, key):
            keys = jax.random.split(key, num_inner)
            state, _ = jax.lax.scan(lambda state, key: (step(state, key), None), state, keys)
            return state, kept(state)

        return jax.lax.scan(draw, state, jax.random.split(key, num_draws))

    return lambda key: jax.block_until_ready(scan(key, state))


def _blackjax(name, problem, x, y):
    import blackjax  # which starts JAX, before fspace can ask for a device for each chain

    gradient = jax.grad(_log_density(problem))
    per_step = 1 if name == "sgld" else NUM_INTEGRATION_STEPS
    make = {"sgld": blackjax.sgld, "sghmc": functools.partial(blackjax.sghmc, num_integration_steps=per_step)}[name]
    algorithm = make(gradient)

    def step(position, key):
        key_batch, key_step = jax.random.split(key)
        return algorithm.step(key_step, position, _batch(problem, x, y, key_batch), STEP_SIZE)

    start = algorithm.init(params(problem))
    return _scanned(step, start, problem.num_draws, NUM_STEPS // per_step, lambda position: position)


def _posteriors(name, problem, x, y):
    import torch

    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # from a library that posteriors imports
        import posteriors

    layers = []
    for num_in, num_out in zip(
        (problem.num_inputs, *problem.widths), (*problem.widths, problem.num_outputs), strict=True
    ):
        layers += [torch.nn.Linear(num_in, num_out), torch.nn.Tanh()]
    net = torch.nn.Sequential(*layers[:-1])
    x, y = (torch.from_numpy(np.array(a)) for a in (x, y))

    def log_posterior(weights, batch):
        x, y = batch
        output = torch.func.functional_call(net, weights, (x,))
        if problem.num_outputs == 1:
            log_likelihood = torch.distributions.Normal(output.squeeze(-1), 0.5).log_prob(y).sum()
        else:
            log_likelihood = -torch.nn.functional.cross_entropy(output, y.long(), reduction="sum")
        log_prior = sum(
            torch.distributions.Normal(0.0, 1.0 if w.ndim == 1 else w.shape[1] ** -0.5).log_prob(w).sum()
            for w in weights.values()
        )
        return log_prior + problem.num_data / len(y) * log_likelihood, torch.zeros(())

    module = {"sgld": posteriors.sgmcmc.sgld, "sghmc": posteriors.sgmcmc.sghmc}[name]
    transform = module.build(log_posterior, lr=STEP_SIZE)

    def run(key):
        torch.manual_seed(int(jax.random.randint(key, (), 0, 2**31 - 1)))
        state = transform.init({k: w.detach().clone() for k, w in net.named_parameters()})
        draws = []
        for _ in range(num_draws("posteriors", problem)):
            for _ in range(NUM_STEPS):
                batch = x, y
                if problem.batch_size is not None:
                    rows = torch.randint(0, problem.num_data, (problem.batch_size,))
                    batch = x[rows], y[rows]
                state, _ = transform.update(state, batch, inplace=True)
            draws.append({k: w.clone() for k, w in state.params.items()})

    return run


_PEERS: dict[str, Callable] = {"blackjax": _blackjax, "posteriors": _posteriors, "sgd": _sgd}
