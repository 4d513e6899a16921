"""Thompson sampling on mushrooms: the rewards and regrets, the growing buffer, and agents that learn."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpyro import handlers

from numpyro_fspace.__main__ import main
from numpyro_fspace.datasets.files import DATA_ENV
from numpyro_fspace.experiments import bandit
from numpyro_fspace.experiments.bandit_agents import (
    Agent,
    build_agent,
    build_model,
    process_agent,
    process_features,
    spread,
)
from numpyro_fspace.experiments.bandit_problem import EAT, PATTERNS, REJECT, Buffer, Config
from numpyro_fspace.model.potential import ModelPotential

needs_data = pytest.mark.skipif(not os.environ.get(DATA_ENV), reason=f"{DATA_ENV} is not set")


def test_regret_of_each_action():
    actions, poisonous = np.array([EAT, REJECT, EAT, REJECT]), np.array([False, False, True, True])
    # A poisonous one costs 35 with probability p and gives 5 otherwise: -15 if p = .5, -11 if p = .4.
    np.testing.assert_allclose(bandit.expected_regret(actions, poisonous, 0.5), [0, 5, 15, 0])
    np.testing.assert_allclose(bandit.expected_regret(actions, poisonous, 0.4), [0, 5, 11, 0])


def test_a_buffer_whose_rows_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="buffer_size=50000 is too large for 50000 interactions"):
        Config(buffer_size=50_000, num_interactions=50_000)
    Config(buffer_size=40_000, num_interactions=50_000)


def test_buffer_forgets_the_oldest():
    buffer = Buffer.empty(3)
    sizes = []
    for row in range(5):
        buffer = buffer.add(row, row % 2, 10.0 * row)
        sizes.append(int(buffer.size))
    assert sizes == [1, 2, 3, 3, 3]
    np.testing.assert_array_equal(buffer.rows, [3, 4, 2])
    np.testing.assert_array_equal(buffer.rewards, [30, 40, 20])


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_spread_gives_every_row_once(size):
    rows, shares = spread(jnp.arange(10), 10, size)
    np.testing.assert_allclose(np.bincount(rows, weights=shares, minlength=size), np.ones(size), rtol=1e-6)


def toy(num, capacity=16, batch_size=4):
    """A model of 8 mushrooms with 3 features, and a buffer of ``num`` interactions."""
    config = Config(widths=(3,), buffer_size=capacity, batch_size=batch_size)
    x = jax.random.normal(jax.random.key(0), (8, 3))
    model = build_model(config, x, None, None, 0.5, functional=False)
    buffer = Buffer.empty(capacity)
    for i in range(num):
        buffer = buffer.add(i % 8, i % 2, float(i % 3))
    return x, model, buffer


@pytest.mark.slow
@pytest.mark.parametrize("num", [0, 1, 5, 16, 21])
def test_likelihood_is_that_of_what_the_buffer_holds(num):
    """On average over minibatches; the 21st interaction has taken the place of the fifth."""
    x, model, buffer = toy(num)
    potential = ModelPotential(model, (buffer,), key=jax.random.key(1))
    z = potential.init_params()
    net = handlers.substitute(handlers.seed(model, 0), z)
    fn = next(s["fn"] for s in handlers.trace(net).get_trace(buffer).values() if s["type"] == "network")
    rows = [i % 8 for i in range(max(0, num - 16), num)]
    rewards = [float(i % 3) for i in range(max(0, num - 16), num)]
    actions = [i % 2 for i in range(max(0, num - 16), num)]
    values = np.asarray(fn(x))[rows, actions] if num else np.zeros(0)
    expected = scipy.stats.norm.logpdf(rewards, values, 0.5).sum()
    empty = ModelPotential(model, (Buffer.empty(16),), key=jax.random.key(1))
    prior = -jax.jit(empty)(z, jax.random.key(1))[0]  # an empty buffer is no data
    keys = jax.random.split(jax.random.key(2), 4000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda key: potential(z, key)[0]))(keys)) - float(prior)
    error = 5.0 * draws.std() / np.sqrt(len(draws)) + 1e-3  # five standard errors: 6e-7
    assert abs(draws.mean() - expected) < error
    assert error < 0.2 * abs(expected) + 1e-2


def play(agent, poisonous, harm, num):
    rows = jax.random.randint(jax.random.key(3), (num,), 0, len(poisonous))
    world = {"poisonous": jnp.asarray(poisonous), "harm": harm, "scale": 1.0, "buffer": Buffer.empty(num)}
    out = bandit.interact(agent, 0, rows, jax.random.key(4), **world)
    return rows, jax.device_get(out)


def test_who_knows_has_no_regret_and_chance_has_its_share():
    poisonous = np.array([False, True, True, False])
    knows = Agent(
        lambda key: 0,
        lambda state, buffer: (state + 1, False),
        lambda key, state, buffer, row: jnp.where(jnp.asarray(poisonous)[row], jnp.eye(2)[REJECT], jnp.eye(2)[EAT]),
    )
    rows, ((state, _), (actions, _)) = play(knows, poisonous, 0.5, 500)
    assert state == 500
    assert bandit.expected_regret(actions, poisonous[rows], 0.5).sum() == 0
    rows, ((_, buffer), (actions, _)) = play(Agent(knows.start, knows.learn, None), poisonous, 0.4, 4000)
    assert abs(actions.mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)
    eaten = buffer.rewards[(buffer.actions == EAT) & poisonous[buffer.rows]]
    assert set(eaten) == {5.0, -35.0}
    assert abs(np.mean(eaten == -35.0) - 0.4) < 5 * np.sqrt(0.24 / len(eaten))
    assert set(buffer.rewards[buffer.actions == REJECT]) == {0.0}
    assert set(buffer.rewards[(buffer.actions == EAT) & ~poisonous[buffer.rows]]) == {5.0}


@pytest.mark.slow
def test_chains_choose_and_move_in_turn():
    """One moves at each interaction, and its draw is what the agent chose by."""
    x, _, buffer = toy(0)
    config = Config(widths=(3,), buffer_size=16, batch_size=4, num_steps=2, num_chains=3, num_warmup=4)
    agent = build_agent("sgld", config, x, None, None, noise_sd=0.5, key=jax.random.key(0))
    state, learn = agent.start(jax.random.key(1)), jax.jit(agent.learn)
    for turn in range(4):
        promised = agent.rewards(jax.random.key(2), state, buffer, 1)
        weights = {k: v[turn % 3] for k, v in state.z.items()}
        hidden = jnp.tanh(x[1] @ weights["net.layers_0.kernel"] + weights["net.layers_0.bias"])
        expected = hidden @ weights["net.layers_2.kernel"] + weights["net.layers_2.bias"]
        np.testing.assert_allclose(promised, expected, rtol=1e-5)
        buffer = buffer.add(1, EAT, 1.0)
        moved, undone = learn(state, buffer)
        assert not undone
        before, after = (s.z["net.layers_0.kernel"] for s in (state, moved))
        changed = [not np.array_equal(before[chain], after[chain]) for chain in range(3)]
        assert changed == [chain == turn % 3 for chain in range(3)]
        state = moved
    with pytest.raises(ValueError, match="num_chains=0"):
        Config(num_chains=0)


@pytest.mark.slow
def test_the_process_s_belief_is_its_exact_posterior():
    """Thirty rewards one by one, in a buffer of eight, against the process conditioned on all of them."""
    import tinygp

    kernel, x = tinygp.kernels.ExpSquared(1.5), jax.random.normal(jax.random.key(0), (40, 3))
    features = process_features(kernel, x, jax.random.key(1))
    np.testing.assert_allclose(features @ features.T, kernel(x, x), atol=1e-4)
    agent, buffer, rng = process_agent(features, 0.5), Buffer.empty(8), np.random.default_rng(0)
    state, seen = agent.start(None), []
    for _ in range(30):
        row, action, reward = rng.integers(40), rng.integers(2), rng.normal()
        buffer = buffer.add(row, action, reward)
        state, seen = agent.learn(state, buffer)[0], [*seen, (row, action, reward)]
    draws = jax.vmap(lambda key: agent.rewards(key, state, buffer, 7))(jax.random.split(jax.random.key(2), 4000))
    for action in (REJECT, EAT):
        rows = [row for row, a, _ in seen if a == action]
        gp = tinygp.GaussianProcess(kernel, x[jnp.array(rows)], diag=0.25)
        exact = gp.condition(jnp.array([reward for _, a, reward in seen if a == action]), x).gp
        np.testing.assert_allclose(features @ state.mean[action], exact.mean, atol=2e-3)
        variance = jnp.einsum("nr,rs,ns->n", features, state.covariance[action], features)
        np.testing.assert_allclose(variance, exact.variance, atol=2e-3)
        sd = float(exact.variance[7]) ** 0.5
        assert abs(draws[:, action].mean() - exact.mean[7]) < 4.5 * sd / np.sqrt(4000)
        assert abs(draws[:, action].std() / sd - 1.0) < 4.5 / np.sqrt(8000)


def records(capsys, *words):
    capsys.readouterr()
    assert main(["run", "bandit", "--quick", *words]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


@needs_data
@pytest.mark.slow
def test_agents_learn(capsys):
    """Half of what chance loses, in 300 interactions; who has no uncertainty is no worse there."""
    by_chance, *others = records(capsys, "--method", "uniform", "fsgld", "bbb", "gp", "--dataset", "p0.5")
    expected = 0.5 * (4208 * 5.0 + 3916 * 15.0) / 8124 * 300
    # Each interaction's regret has standard deviation 5.7.
    assert abs(by_chance["regret"] - expected) < 5 * 5.7 * np.sqrt(300)
    for line in others:
        assert line["regret"] < 0.6 * expected, line["method"]
        assert line["num_diverging"] == 0
        assert line["curves"]["regret"][-1] == line["regret"]
        assert np.all(np.diff(line["curves"]["regret"]) >= 0)
        assert line["regret"] == 15 * line["eaten"] + 5 * line["rejected"]


def test_picture_has_a_panel_for_each_pattern():
    import matplotlib.pyplot as plt

    curves = {"interaction": [10, 20], "regret": [30.0, 40.0]}
    lines = [
        {"experiment": "bandit", "dataset": dataset, "method": method, "regret": 40.0, "curves": curves}
        for dataset in PATTERNS
        for method in ("fsgld", "bbb")
    ]
    figure = bandit.picture(lines)
    assert [ax.get_title() for ax in figure.axes] == [f"harm with probability {p}" for p in PATTERNS.values()]
    assert [line.get_label() for line in figure.axes[2].lines] == ["fSGLD", "mean field (BBB)"]
    shorter = {"interaction": [10], "regret": [30.0]}
    others = [line | {"curves": shorter, "config": {"num_interactions": 10}} for line in lines]
    lines = [line | {"config": {"num_interactions": 20}} for line in lines]
    figure = bandit.picture(lines + others)
    assert [line.get_label() for line in figure.axes[0].lines] == [
        f"{name}, num_interactions={num}" for name in ("fSGLD", "mean field (BBB)") for num in (20, 10)
    ]
    plt.close("all")
