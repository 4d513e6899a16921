"""The mushroom bandit: its settings, rewards, regrets, the buffer of interactions and the GP of rewards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tinygp

from numpyro_fspace._checks import check_count, check_positive
from numpyro_fspace.datasets import load_mushroom
from numpyro_fspace.experiments.catalog import Settings
from numpyro_fspace.experiments.networks import check_activation
from numpyro_fspace.priors import fit_gp

#: Actions; reward of eating a mushroom without and with harm.
REJECT, EAT = 0, 1
GOOD, BAD = 5.0, -35.0
#: Reward patterns: probability that a poisonous mushroom does harm.
PATTERNS = {"p0.4": 0.4, "p0.5": 0.5, "p0.6": 0.6}


@dataclass(frozen=True)
class Config(Settings):
    """Settings of a run.

    Attributes:
        num_interactions: number of mushrooms.
        widths, activation: those of the network, which has one output for each action.
        weight_scale: sd of the prior of a weight times √fan-in.
        noise_sd: sd of a reward, in the units of rewards.
        buffer_size: number of latest interactions that are used for learning.
        batch_size: rows of the buffer in a gradient.
        num_steps: gradients after each interaction.
        num_chains: chains of a sampler, which choose an action and then move in turn.
        num_warmup: draws of a chain's warm-up; the next warm-up starts when one ends.
        control_variates: whether a sampler's gradients use control variates.
        friction: friction of the Hamiltonian samplers, which counters minibatch noise.
        num_points: number of measurement points.
        fixed_points: whether these are drawn only once, and not anew for each gradient.
        num_pretrain: mushrooms eaten before, whose rewards define the unit; measurement points are among them.
        num_gp_steps: Adam steps on the kernel's parameters with the same rewards; with 0 the kernel is not trained.
        nugget: nugget of the functional prior, relative to the variance of the process.
        learning_rate: learning rate of Adam, for the methods that optimize.
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

    With ``num_steps`` = 0 the kernel does not depend on rewards: its lengthscale is the distance of mushrooms that
    share half of their 22 features.
    """
    x, poisonous = load_mushroom()
    key_rows, key_harm = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1))
    rows = np.asarray(jax.random.permutation(key_rows, len(x))[:num])
    harm = poisonous[rows] & np.asarray(jax.random.bernoulli(key_harm, PATTERNS[pattern], (num,)))
    rewards = np.where(harm, BAD, GOOD)
    scale = float(rewards.std())

    def kernel(params):
        return params["variance"] * tinygp.kernels.ExpSquared(
            params["lengthscale"], distance=tinygp.kernels.distance.L2Distance()
        )

    # Two mushrooms that differ in k features are √(2k) apart.
    params = {"variance": np.ones(()), "lengthscale": np.sqrt(2.0 * 11)}
    if num_steps == 0:
        return kernel(params), 1.0, scale, rows
    gp = fit_gp(kernel, x[rows], (rewards - rewards.mean()) / scale, params=params, num_steps=num_steps)
    return gp.prior.kernel, float(gp.params["variance"]), scale, rows


def expected_regret(actions, poisonous, harm: float) -> np.ndarray:
    """Expected loss of each action compared with an oracle that eats only edible mushrooms, [T]."""
    eating = np.where(poisonous, harm * BAD + (1.0 - harm) * GOOD, GOOD)
    return np.where(poisonous, 0.0, GOOD) - np.where(np.asarray(actions) == EAT, eating, 0.0)


class Buffer(NamedTuple):
    """The latest interactions.

    Attributes:
        rows: numbers of the mushrooms [B].
        actions: actions [B].
        rewards: rewards in the model's units [B].
        num: number of interactions so far; the first min(num, B) places are filled.
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
        """Number of filled places."""
        return jnp.minimum(self.num, len(self.rows))

    def add(self, row, action, reward) -> Buffer:
        """The buffer with one more interaction, which replaces the oldest one if the buffer is full."""
        place = self.num % len(self.rows)
        return Buffer(
            self.rows.at[place].set(row),
            self.actions.at[place].set(action),
            self.rewards.at[place].set(reward),
            self.num + 1,
        )
