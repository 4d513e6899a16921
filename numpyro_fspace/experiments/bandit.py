"""Thompson sampling on UCI's mushrooms, with a network under a GP prior as the model of rewards.

The agent sees the features of a mushroom and eats or rejects it. It draws weights from its posterior and takes the
action with the larger reward under these weights, so that it explores according to its uncertainty. The chain of a
sampler is never restarted; it continues while the buffer of interactions grows. All interactions are one compiled loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace import measurement
from numpyro_fspace.datasets import load_mushroom
from numpyro_fspace.experiments import tables
from numpyro_fspace.experiments.bandit_agents import METHODS, Agent, build_agent
from numpyro_fspace.experiments.bandit_problem import (
    BAD,
    EAT,
    GOOD,
    PATTERNS,
    REJECT,
    Buffer,
    Config,
    expected_regret,
    pretrain,
)
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.priors import GPPrior

#: Number of points of a curve of regrets.
NUM_CHECKPOINTS = 100


def interact(agent: Agent, state, rows, key, *, poisonous, harm: float, scale: float, buffer: Buffer):
    """Run all interactions.

    Args:
        agent: the agent.
        state: its initial state.
        rows: numbers of the mushrooms [T].
        key: for harm and for the agent's choices.
        poisonous: whether each mushroom is poisonous.
        harm: probability that a poisonous mushroom does harm.
        scale: unit of the model's rewards.
        buffer: the empty buffer.

    Returns:
        ``((state, buffer), (actions, undone))``: the action of each interaction, and whether the agent's learning step
        after it was undone, [T].
    """

    def step(carry, xs):
        state, buffer = carry
        row, key = xs
        key_draw, key_random, key_action, key_harm = jax.random.split(key, 4)
        action = jax.random.randint(key_action, (), 0, 2)
        if agent.rewards is not None:
            best = jnp.argmax(agent.rewards(key_draw, state, buffer, row))
            action = jnp.where(jax.random.bernoulli(key_random, agent.epsilon), action, best)
        does_harm = poisonous[row] & jax.random.bernoulli(key_harm, harm)
        reward = jnp.where(action == EAT, jnp.where(does_harm, BAD, GOOD), 0.0)
        buffer = buffer.add(row, action, reward / scale)
        state, undone = agent.learn(state, buffer)
        return (state, buffer), (action, undone)

    return jax.lax.scan(step, (state, buffer), (rows, jax.random.split(key, len(rows))))


def run(job: Job[Config]) -> dict:
    """A method on a reward pattern.

    ``regret`` is the sum of the expected regrets of all interactions (see ``expected_regret``), ``regret_late`` that of
    the second half. ``eaten`` is the number of poisonous mushrooms eaten, ``rejected`` that of edible ones rejected.
    The unit of rewards (and the kernel of the GP, if it is trained) is based on ``num_pretrain`` mushrooms eaten
    before.
    """
    config, harm = job.config, PATTERNS[job.dataset]
    x, poisonous = load_mushroom()
    kernel, variance, scale, seen = pretrain(job.dataset, config.num_pretrain, config.num_gp_steps, job.seed)
    prior = GPPrior(kernel, nugget=config.nugget * variance, num_outputs=2)
    if config.fixed_points:
        points = measurement.fixed(x[seen[: config.num_points]])
    else:
        points = measurement.subset(x[seen], config.num_points)
    key_rows, key_start, key_run = jax.random.split(jax.random.key(job.seed), 3)
    key_features = jax.random.fold_in(jax.random.key(job.seed), 2)
    noise_sd = config.noise_sd / scale
    agent = build_agent(job.method, config, jnp.asarray(x), prior, points, noise_sd=noise_sd, key=key_features)
    buffer = Buffer.empty(config.buffer_size)
    rows = jax.random.randint(key_rows, (config.num_interactions,), 0, len(x))
    start = time.perf_counter()
    world = {"poisonous": jnp.asarray(poisonous), "harm": harm, "scale": scale, "buffer": buffer}
    play = jax.jit(functools.partial(interact, agent, **world))
    _, (actions, undone) = jax.device_get(play(agent.start(key_start), rows, key_run))
    seconds = time.perf_counter() - start
    bad = poisonous[np.asarray(rows)]
    regret = expected_regret(actions, bad, harm)
    curve = np.cumsum(regret)
    checkpoints = np.unique(np.linspace(0, len(regret), NUM_CHECKPOINTS + 1).astype(int))[1:]
    learns = job.method not in ("gp", "uniform")
    return {
        "seconds": seconds,
        "num_gradients": config.num_interactions * config.num_steps if learns else 0,
        "num_diverging": int(np.sum(undone)),
        "regret": float(curve[-1]),
        "regret_late": float(curve[-1] - curve[len(curve) // 2 - 1]),
        "eaten": int(np.sum(bad & (actions == EAT))),
        "rejected": int(np.sum(~bad & (actions == REJECT))),
        "curves": {"interaction": checkpoints, "regret": curve[checkpoints - 1]},
    }


def picture(records: Sequence[Mapping]) -> Any:
    """Cumulative regret: a panel for each reward pattern, with the mean and the range over seeds for each method.

    Runs with different settings have different lines.
    """
    import matplotlib.pyplot as plt

    datasets = [name for name in PATTERNS if any(line["dataset"] == name for line in records)]
    if not datasets:
        raise ValueError("no record to draw; make some with fspace run bandit --out FILE.")
    size = (4.2 * len(datasets), 3.4)
    figure, axes = plt.subplots(1, len(datasets), figsize=size, squeeze=False, sharex=True, sharey=True)
    records = sorted(records, key=lambda line: list(METHODS).index(line["method"]))
    labels = tables.labels(records)
    for ax, dataset in zip(axes.flat, datasets, strict=True):
        for number, label in enumerate(dict.fromkeys(labels)):
            lines = [
                line["curves"]
                for line, name in zip(records, labels, strict=True)
                if (line["dataset"], name) == (dataset, label)
            ]
            if not lines:
                continue
            regrets = np.array([curves["regret"] for curves in lines])
            interaction, color = lines[0]["interaction"], f"C{number}"
            ax.fill_between(interaction, regrets.min(0), regrets.max(0), color=color, alpha=0.15, lw=0)
            ax.plot(interaction, regrets.mean(0), color=color, label=tables.readable(label))
        ax.set(title=f"harm with probability {PATTERNS[dataset]}", xlabel="interactions")
    tops = [line["regret"] for line in records if line["method"] != "uniform"]
    axes.flat[0].set(ylabel="cumulative regret", ylim=(0.0, 1.05 * max(tops, default=records[0]["regret"])))
    shown = {line.get_label(): line for ax in axes.flat for line in ax.lines}
    axes.flat[-1].legend(shown.values(), shown, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


EXPERIMENT = Experiment(
    summary="Thompson sampling on mushrooms: the regret until the poisonous ones are known.",
    run=run,
    config=Config(),
    methods=METHODS,
    defaults=("gp", "fsghmc", "fsgld", "sghmc", "sgld", "bbb", "greedy", "uniform"),
    datasets=tuple(PATTERNS),
    files=("mushroom/agaricus-lepiota.data",),
    minutes=2,
    columns={
        "regret": "regret",
        "regret_late": "regret, second half",
        "eaten": "poisonous eaten",
        "rejected": "edible rejected",
        "num_diverging": "undone draws",
        "seconds": "seconds",
    },
    picture=picture,
)
