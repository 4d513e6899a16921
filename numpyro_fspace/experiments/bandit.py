"""Eat or reject: Thompson sampling on UCI's mushrooms, with a network under a GP prior as the model of rewards.

A mushroom comes, the agent sees its features, and eats it or not. It draws weights from its posterior and takes the
action whose reward is the larger under them: so it explores as far as it is unsure. The chain of a sampler is never
restarted, it moves on as the buffer of interactions grows. All interactions are one compiled loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace import measurement
from numpyro_fspace._checks import check_count, check_positive
from numpyro_fspace.datasets import load_mushroom
from numpyro_fspace.experiments import tables
from numpyro_fspace.experiments.bandit_agents import METHODS, Agent, Buffer, build_agent
from numpyro_fspace.experiments.catalog import Experiment, Job, Settings, check_activation
from numpyro_fspace.priors import GPPrior, fit_gp

__all__ = ["EXPERIMENT"]

#: Actions; reward of a mushroom that does one good, and of one that doesn't.
REJECT, EAT = 0, 1
GOOD, BAD = 5.0, -35.0
#: The reward patterns: probability that a poisonous mushroom does harm.
PATTERNS = {"p0.4": 0.4, "p0.5": 0.5, "p0.6": 0.6}
#: Points of a curve of regrets.
NUM_CHECKPOINTS = 100


@dataclass(frozen=True)
class Config(Settings):
    """Every number of a run.

    Attributes:
        num_interactions: mushrooms that come.
        widths, activation: of the network, which has an output for each action.
        weight_scale: sd of a weight's prior times √fan-in.
        noise_sd: of a reward, in its own units.
        buffer_size: the last so many interactions are learned from.
        batch_size: rows of the buffer in a gradient.
        num_steps: gradients after each interaction.
        num_chains: of a sampler, each of which chooses and then moves in its turn.
        num_warmup: draws of a chain's warm-up; where one ends the next begins.
        control_variates: whether a sampler's gradients are corrected by those at a center.
        friction: of the Hamiltonian samplers; it takes away the heat of minibatches.
        num_points: measurement points.
        fixed_points: whether they are drawn once; else afresh for each gradient.
        num_pretrain: mushrooms eaten before, whose rewards give the unit; the measurement points are among them.
        num_gp_steps: of Adam on the kernel's parameters, by the same rewards; 0 leaves the kernel a guess.
        nugget: variance of the functional prior beyond the process, in variances of the process.
        learning_rate: of Adam, for the methods that optimize.
    """

    QUICK: ClassVar[Mapping[str, object]] = {
        "num_interactions": 300,
        "widths": (20,),
        "num_steps": 2,
        "num_chains": 1,
        "num_points": 10,
        "num_pretrain": 100,
    }

    num_interactions: int = 10_000
    widths: tuple[int, ...] = (100, 100)
    activation: str = "tanh"
    weight_scale: float = 1.5
    noise_sd: float = 3.0
    buffer_size: int = 4096
    batch_size: int = 256
    num_steps: int = 8
    num_chains: int = 8
    num_warmup: int = 16
    control_variates: bool = False
    friction: float = 50.0
    num_points: int = 40
    fixed_points: bool = False
    num_pretrain: int = 1000
    num_gp_steps: int = 0
    nugget: float = 0.1
    learning_rate: float = 1e-3

    def __post_init__(self):
        check_activation(self.activation)
        check_count(self.num_chains, "num_chains")
        check_positive(self.friction, "friction")
        if self.buffer_size * min(self.buffer_size, self.num_interactions) >= 2**31:
            raise ValueError(
                f"buffer_size={self.buffer_size} is too large for {self.num_interactions} interactions: their product, "
                "or the buffer's square, must stay below 2³¹."
            )


@functools.lru_cache(maxsize=4)
def pretrain(pattern: str, num: int, num_steps: int, seed: int):
    """``(kernel, variance, scale, rows)``: a GP of the rewards of ``num`` eaten mushrooms, in units of their sd.

    With ``num_steps`` = 0 the kernel is a guess that no reward has told: mushrooms that share half of their 22 features
    are a lengthscale apart.
    """
    x, poisonous = load_mushroom()
    key_rows, key_harm = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1))
    rows = np.asarray(jax.random.permutation(key_rows, len(x))[:num])
    harm = poisonous[rows] & np.asarray(jax.random.bernoulli(key_harm, PATTERNS[pattern], (num,)))
    rewards = np.where(harm, BAD, GOOD)
    scale = float(rewards.std())

    def kernel(params):
        import tinygp

        return params["variance"] * tinygp.kernels.ExpSquared(
            params["lengthscale"], distance=tinygp.kernels.distance.L2Distance()
        )

    # Two mushrooms that differ in k features are √(2k) apart.
    params = {"variance": np.ones(()), "lengthscale": np.sqrt(2.0 * 11)}
    if num_steps == 0:
        return kernel(params), 1.0, scale, rows
    gp = fit_gp(kernel, x[rows], (rewards - rewards.mean()) / scale, params=params, num_steps=num_steps)
    return gp.prior.kernel, float(gp.params["variance"]), scale, rows


def interact(agent: Agent, poisonous, harm: float, scale: float, buffer: Buffer, state, rows, key):
    """All interactions: ``((state, buffer), (actions, undone))``, and of each what was done, and whether what the agent
    learned from it was undone, [T].

    Args:
        agent: who chooses.
        poisonous: of each mushroom.
        harm: probability that eating a poisonous one does harm.
        scale: unit of the model's rewards.
        buffer: the empty buffer.
        state: the agent's.
        rows: mushrooms that come [T].
        key: of chance, and the agent's choices.
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


def expected_regret(actions, poisonous, harm: float) -> np.ndarray:
    """What the oracle, who eats the edible ones alone, earns more in expectation by each action [T]."""
    eating = np.where(poisonous, harm * BAD + (1.0 - harm) * GOOD, GOOD)
    return np.where(poisonous, 0.0, GOOD) - np.where(np.asarray(actions) == EAT, eating, 0.0)


def run(job: Job[Config]) -> dict:
    """A method on a reward pattern.

    ``regret`` is the sum of expected regrets of all interactions (see ``expected_regret``), ``regret_late`` that of
    the second half; ``eaten`` counts the poisonous mushrooms eaten, ``rejected`` the edible ones rejected. The unit of
    rewards (and the kernel of the GP, if it is trained) comes from ``num_pretrain`` mushrooms that were eaten before.
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
    agent = build_agent(job.method, config, jnp.asarray(x), prior, points, config.noise_sd / scale, key_features)
    buffer = Buffer.empty(config.buffer_size)
    rows = jax.random.randint(key_rows, (config.num_interactions,), 0, len(x))
    start = time.perf_counter()
    play = jax.jit(functools.partial(interact, agent, jnp.asarray(poisonous), harm, scale, buffer))
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
    """Cumulative regret: a panel for each reward pattern, a line (mean over seeds) and a band (all) per method.

    Runs of other settings are other lines.
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
            ax.plot(interaction, regrets.mean(0), color=color, label=label)
        ax.set(title=f"harm with probability {PATTERNS[dataset]}", xlabel="interactions")
    tops = [line["regret"] for line in records if line["method"] != "uniform"]
    axes.flat[0].set(ylabel="cumulative regret", ylim=(0.0, 1.05 * max(tops, default=records[0]["regret"])))
    shown = {line.get_label(): line for ax in axes.flat for line in ax.lines}
    axes.flat[-1].legend(shown.values(), shown, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


EXPERIMENT = Experiment(
    summary="Thompson sampling on mushrooms: how much is lost until the poisonous ones are known.",
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
