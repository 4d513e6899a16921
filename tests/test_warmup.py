"""The parts of warm-up: curvature, phases, what a hot or diverging draw does to the step size."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.mcmc import chain_updates
from numpyro_fspace.mcmc.loop import phases
from numpyro_fspace.mcmc.state import Averages
from numpyro_fspace.mcmc.warmup import step_size, updates
from numpyro_fspace.mcmc.warmup.friction import MAX_KICK, MAX_NOISE_EXCESS, Noise, friction_for, steadying
from numpyro_fspace.mcmc.warmup.optimizer import adam, descend
from numpyro_fspace.mcmc.warmup.step_size import cooled, cooling, largest_curvature, shortening
from numpyro_fspace.mcmc.warmup.updates import calibrate, warm_start
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.scale_sites import scale_sites
from numpyro_fspace.sgmcmc.preconditioners import Diagonal, Identity


@pytest.mark.parametrize("by_differences", [False, True])
@pytest.mark.parametrize("scale", [None, [1.0, 0.5, 3.0]])
def test_largest_curvature_is_that_of_the_preconditioned_hessian(scale, by_differences, key):
    hessian = np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 9.0]], np.float32)
    metric = Identity() if scale is None else Diagonal(jnp.array(scale))
    s = np.eye(3) if scale is None else np.diag(scale)
    start, settings = jax.random.normal(key, (3,)), {"by_differences": by_differences}
    found, direction = largest_curvature(lambda w: 0.5 * w @ hessian @ w, jnp.ones(3), start, metric, **settings)
    values, vectors = np.linalg.eigh(s @ hessian @ s)
    np.testing.assert_allclose(found, values[-1], rtol=1e-3)
    np.testing.assert_allclose(abs(direction @ vectors[:, -1]), 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(2.0, 3.0, 0), (3.0, 2.0, 1), (np.nan, 2.0, 1), (2.0, np.nan, 0), (2.0, 0.0, 0), (0.0, 2.0, 1)],
)
def test_the_smaller_usable_curvature_counts(one, other, expected):
    """Rounding makes estimates larger, and what is no curvature says nothing."""
    found = updates._smaller((jnp.array(one), jnp.zeros(2)), (jnp.array(other), jnp.ones(2)))
    assert float(found[0]) == (one, other)[expected] and float(found[1][0]) == expected


@pytest.mark.parametrize("begins", [False, True])
def test_a_draw_that_was_undone_does_not_move_the_mean_temperature(begins):
    """Nor does it carry the mean of the draws before a stretch into it."""
    old = Averages(jnp.array(3.0), jnp.array(0.9), jnp.array(10), jnp.array(0))
    info = SimpleNamespace(temperature=jnp.array(50.0), accept_prob=jnp.array(0.0), is_diverging=jnp.array(True))
    found = chain_updates._averaged(old, info, jnp.array(begins), jnp.array(False), 2.0)
    assert float(found.temperature) == (2.0 if begins else 3.0)
    assert int(found.num_averaged) == (1 if begins else 11)


def test_phases():
    schedule = fs.Warmup(warm_start=0.3).schedule(1000)
    assert schedule.num_optimizing == 300
    assert schedule.calibrations == (300, 475, 650, 825)
    assert schedule.directions_found == 737
    assert fs.Warmup(warm_start=0.3).schedule(0).calibrations == ()
    assert fs.Warmup(warm_start=0.0).schedule(8).calibrations == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("temperature", "diverging", "factor"),
    [(1.0, False, 1.0), (1.05, False, 1.0), (1.4, False, 0.9), (5.0, False, 0.5), (1.0, True, 0.5), (0.2, False, 1.0)],
)
def test_heat_shortens_the_step(temperature, diverging, factor):
    found = shortening(jnp.array(temperature), 1e6, 0.0, jnp.array(diverging), 10_000)
    np.testing.assert_allclose(found, factor)


def test_heat_without_a_gain_of_energy_is_no_sign_of_a_long_step():
    """1000 parameters at temperature 3 hold 1000 units of energy more than at 1."""
    assert shortening(3.0, -50.0, -900.0, False, 1000) == 1.0
    assert shortening(3.0, 900.0, 100.0, False, 1000) < 1.0
    assert shortening(10.0, 4500.0, 100.0, False, 1000) == 0.5
    assert shortening(3.0, -50.0, -900.0, True, 1000) == 0.5
    assert shortening(10.0, np.nan, np.nan, False, 1000) == 0.5


def test_energy_that_friction_took_away_does_not_hide_a_rise():
    """Flung up by 6000, at a mean temperature of 100, and cold again when the draw ends."""
    assert shortening(100.0, 6000.0, 6000.0, False, 1000) == 0.5
    assert shortening(100.0, 6000.0, 900.0, False, 1000) == 1.0
    assert shortening(1.0, 6000.0, 6000.0, False, 1000) == 1.0


def wells(y=None):
    """Each value is in a well whose bottom is flat and whose walls are steep, on a plateau 100 above."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
    numpyro.factor("wells", -100.0 * jnp.sum(1.0 - jnp.exp(-0.5 * (w / 0.1) ** 4)))


@pytest.mark.slow
@pytest.mark.parametrize("warm_start", [0.3, 0.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_chain_that_a_long_step_flings_out_of_its_well_is_brought_back(warm_start):
    """The curvature at the bottom says nothing of the walls: the first steps are far too long, and friction is high."""
    mcmc = fs.MCMC(
        fs.SGHMC(wells, friction=50.0, num_steps=100, warmup=fs.Warmup(warm_start=warm_start)),
        num_warmup=50,
        num_samples=2,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), init_params={"w": jnp.full((16, 20), 0.01)})
    outside = jnp.mean(jnp.abs(mcmc.last_state.z["w"]) > 0.2, 1)
    assert jnp.max(outside) < 0.5


def test_few_parameters_fluctuate_more():
    """With 8 parameters a temperature of 2 is within chance, with 8000 it is not."""
    assert shortening(jnp.array(2.0), 1e6, 0.0, jnp.array(False), 8) == 1.0
    assert shortening(jnp.array(2.0), 1e6, 0.0, jnp.array(False), 8000) < 1.0


@pytest.mark.slow
def test_a_chain_that_comes_to_where_its_step_is_too_long_is_warned_of(key):
    """A step at 2.02 of the frequency, the limit being 2, gains energy slowly: the first draw is finite, and hot."""

    def model(precision):
        w = numpyro.sample("w", dist.Normal().expand([100]).to_event(1))
        numpyro.sample("y", dist.Normal(w, precision**-0.5).to_event(1), obs=jnp.zeros(100))

    def make(num_warmup):
        kernel = fs.SGHMC(model, preconditioner=fs.preconditioners.prior_scale(), friction=1.0, metropolis=False)
        return fs.MCMC(kernel, num_warmup=num_warmup, num_samples=20, progress_bar=False)

    warm, mcmc = make(100), make(0)
    warm.warmup(key, jnp.array(1.0))
    mcmc.post_warmup_state = warm.post_warmup_state
    with (
        pytest.warns(RuntimeWarning, match="draws diverged"),
        pytest.warns(RuntimeWarning, match="kinetic temperature"),
    ):
        mcmc.run(key, (2.02 / warm.post_warmup_state.warmup.step_size) ** 2 - 1.0)


def test_momentum_of_an_undone_draw_is_cooled_and_never_heated():
    hot = jnp.full((4,), 3.0)
    np.testing.assert_allclose(jnp.mean(cooled(hot, 2.0) ** 2), 2.0, rtol=1e-6)
    np.testing.assert_array_equal(cooled(0.1 * hot, 1.0), 0.1 * hot)
    assert cooled(jnp.zeros((0,)), 1.0).shape == (0,)


@pytest.mark.parametrize(
    ("temperature", "factor"),
    [(0.9, 1.0), (1.04, 1.0), (1.1, 0.5**0.5), (1.2, 0.5), (9.0, 0.5), (np.nan, 1.0), (np.inf, 0.5)],
)
def test_heat_of_a_stretch_is_brought_down(temperature, factor):
    np.testing.assert_allclose(cooling(jnp.array(temperature), 10**6), factor, rtol=1e-6)


def test_few_parameters_are_hot_by_chance():
    assert cooling(jnp.array(1.5), 100) == 1.0


def many_means(y):
    """A mean for each of 50 columns; a minibatch is 10 of 1000 rows."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([50]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=10) as rows:
        numpyro.sample("y", dist.Normal(mu, 1.0).to_event(1), obs=y[rows])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
@pytest.mark.filterwarnings("ignore:The draws are doubtful")  # which they are: the chain is kept hot on purpose
def test_the_noise_of_minibatches_shortens_the_step_in_warm_up_alone(monkeypatch):
    """In equilibrium no draw gains energy; the mean temperature tells of the noise."""
    y = np.random.default_rng(0).normal(size=(1000, 50)).astype(np.float32)
    end = []
    for limit in (np.inf, step_size.MAX_STRETCH_EXCESS):  # without cooling, and with it
        monkeypatch.setattr(step_size, "MAX_STRETCH_EXCESS", limit)
        kernel = fs.SGHMC(many_means, friction=1.0, control_variates=False)
        mcmc = fs.MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
        mcmc.run(jax.random.key(0), y, extra_fields=("step_size",))
        assert len(set(mcmc.get_extra_fields()["step_size"].tolist())) == 1
        end.append(mcmc.last_state)
    without, with_cooling = end
    assert with_cooling.step_size <= 0.5 * without.step_size
    assert 0.95 < with_cooling.mean_temperature < 1.0 + 0.6 * (without.mean_temperature - 1.0)


def cliff(y=None):
    """A density that is not a number beyond 2."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
    numpyro.factor("edge", jnp.where(jnp.max(w) < 2.0, 0.0, jnp.nan))
    numpyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_undone_draws_have_no_temperature():
    kernel = fs.SGHMC(cliff, step_size=0.3, warmup=fs.Warmup(warm_start=0.0))
    mcmc = fs.MCMC(kernel, num_warmup=0, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.zeros(20), extra_fields=("temperature", "diverging"))
    fields = mcmc.get_extra_fields()
    kept = fields["temperature"][~fields["diverging"]]
    assert 100 < len(kept) < 200
    np.testing.assert_allclose(mcmc.last_state.mean_temperature, kept.mean(), rtol=0.1)


def hierarchical(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0).expand([2]).to_event(1))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    share = numpyro.sample("share", dist.Uniform(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu + share, spread.sum() + rate).expand([50]).to_event(1), obs=y)


def test_warm_start_moves_locations_and_holds_scales(key):
    """At the joint mode of a wide model and its noise the noise is far too small; so it is left where it starts."""
    y = jnp.full((50,), 5.0)
    model = ModelPotential(hierarchical, (y,), key=key)
    assert scale_sites(model) == ["spread", "rate"]
    mask = {name: jnp.full_like(value, name not in scale_sites(model)) for name, value in model.init_params().items()}

    position, unravel = ravel_pytree(model.init_params())
    flat_mask = ravel_pytree(mask)[0]

    def potential(w, k):
        return model(unravel(w), k)

    def optimize(mask):
        optimizer = adam(500, learning_rate=0.1)
        start = position, optimizer.init(position), model(model.init_params(), key)
        settings = {"optimizer": optimizer, "num_updates": 500, "mask": mask}
        gradient = jax.value_and_grad(potential, has_aux=True)
        found, _, (value, _) = descend(key, start, gradient, Identity(), **settings)
        np.testing.assert_allclose(value, potential(found, key)[0], rtol=1e-3)  # at the step before
        return unravel(found)

    held, free = optimize(flat_mask), optimize(jnp.ones_like(flat_mask))
    start = unravel(position)
    np.testing.assert_array_equal(held["spread"], start["spread"])
    np.testing.assert_array_equal(held["rate"], start["rate"])
    assert abs(held["mu"] - 4.5) < 0.6
    assert free["rate"] < start["rate"] - 1.0  # without the mask the noise collapses


def regression(x, y=None):
    """Two weights, of which the data see one; under a functional prior that sees it too."""
    w = numpyro.sample("w", dist.Normal(jnp.array([0.5, -1.0]), jnp.array([2.0, 0.5])).to_event(1))
    f = fs.functional_prior("f", lambda x: w[0] * x[:, 0], fs.GPPrior(tinygp.kernels.Constant(1.0), nugget=0.5), x)
    numpyro.sample("y", dist.Normal(f(x), 0.3).to_event(1), obs=y)


@pytest.mark.parametrize("anchored", some([True, False], 1))
def test_an_anchored_warm_start_is_drawn_to_where_it_began(key, anchored):
    """To the optimum of likelihood, functional prior and |w - w*|²/2σ²; not anchored, to the posterior's mode."""
    x, y, start = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([0.5, 1.5, 2.0]), jnp.array([3.0, 0.7])
    kernel = fs.SGLD(regression, num_steps=50, warmup=fs.Warmup(0.99, 0.05, anchored))
    state = kernel.init(key, 100, {"w": start}, (x, y), {})
    draw = jax.jit(lambda state: kernel.sample(state, (x, y), {}))
    for _ in range(99):
        state = draw(state)
    precision = 1.0 / 0.3**2 * jnp.eye(3) + jnp.linalg.inv(jnp.ones((3, 3)) + 0.5 * jnp.eye(3))
    towards = start if anchored else jnp.array([0.5, -1.0])
    curvature = x[:, 0] @ precision @ x[:, 0] + 0.25
    first = (x[:, 0] @ y / 0.3**2 + 0.25 * towards[0]) / curvature
    np.testing.assert_allclose(state.z["w"], [first, towards[1]], atol=2e-3)


@pytest.mark.slow
def test_an_anchor_never_pushes_away(key):
    """-log p of a Cauchy is not convex: less its tangent at w*, it falls without end on the other side of the hump."""

    def heavy_tailed(y):
        w = numpyro.sample("w", dist.Cauchy(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w[1], 0.1), obs=y)

    preconditioner = fs.preconditioners.rmsprop()
    kernel = fs.SGLD(heavy_tailed, num_steps=50, warmup=fs.Warmup(0.99, 0.05), preconditioner=preconditioner)
    state = kernel.init(key, 100, {"w": jnp.array([6.0, 0.9])}, (jnp.array(5.0),), {})
    draw = jax.jit(lambda state: kernel.sample(state, (jnp.array(5.0),), {}))
    for _ in range(99):
        state = draw(state)
    np.testing.assert_allclose(state.z["w"], [6.0, 5.0], atol=2e-3)  # the second at the likelihood's maximum


def test_an_anchor_is_yes_or_no():
    with pytest.raises(TypeError, match="anchored=1 must be True or False"):
        fs.SGLD(two_scales, warmup=fs.Warmup(anchored=1))


def deep(x, y=None):
    """A deep network whose weights' scale is random."""
    scale = numpyro.sample("scale", dist.LogNormal(0.4, 0.5))
    net = nn.Sequential([nn.Dense(60), nn.tanh, nn.Dense(60), nn.tanh, nn.Dense(60), nn.tanh, nn.Dense(1)])
    f = fs.random_module("net", net, input_shape=1, prior=fs.fan_in(scale))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1).to_event(1), obs=y)


@pytest.mark.slow
def test_an_anchor_keeps_a_random_scale_from_following_the_mode(key):
    x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    kept = []
    for anchored in (False, True):
        kernel = fs.SGHMC(deep, warmup=fs.Warmup(anchored=anchored), friction=1.0, metropolis=False)
        mcmc = fs.MCMC(kernel, num_warmup=60, num_samples=10, progress_bar=False)
        mcmc.run(key, x, jnp.sin(3.0 * x[:, 0]))
        kept.append(float(jnp.mean(mcmc.get_samples()["scale"])))
    assert kept[0] < 0.75 < 1.0 < kept[1]


@pytest.mark.parametrize(
    ("settings", "is_random"), [({}, False), ({"metropolis": False}, False), ({"step_size": 0.01}, False), ({}, True)]
)
def test_every_draw_and_calibration_belongs_to_one_phase_however_a_run_is_cut(settings, is_random):
    def model(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 20, subsample_size=5 if is_random else 20):
            numpyro.sample("y", dist.Normal(w, 0.3), obs=numpyro.subsample(x, 0))

    plan = fs.SGHMC(model, **settings).prepare((np.linspace(0.0, 1.0, 20),), {}, 40)
    assert bool(plan.interruptions) == ("step_size" not in settings)
    for parts in ([60], [1] * 60, [7, 5, 28, 1, 19], [12, 28, 20]):
        draws, calibrations, start = [], [], 0
        for num in parts:
            for phase in phases(plan, start, start + num):
                if phase.update is calibrate:
                    calibrations.append((phase.start, len(draws)))
                    continue
                draws += [(draw, phase.update) for draw in range(phase.start, phase.stop)]
                assert phase.keeps or phase.stop <= 40
            start += num
        assert [draw for draw, _ in draws] == list(range(60))
        assert {draw for draw, update in draws if update is warm_start} == set(range(12))
        assert calibrations == [(draw, draw) for draw in plan.interruptions]  # each right before its draw
        assert {update for _, update in draws[40:]} == {
            chain_updates.sample if plan.measures else chain_updates.draw_and_learn
        }


@pytest.mark.slow
def test_the_state_of_the_sampling_phase_has_nothing_of_the_optimizer(key):
    mcmc = fs.MCMC(fs.SGHMC(two_scales), num_warmup=10, num_samples=2, progress_bar=False)
    mcmc.run(key, np.float32(0.3))
    assert mcmc.last_state.warmup.optimizer == () == mcmc.last_state.warmup.anchor
    mcmc.warmup(key, np.float32(0.3))
    mcmc.run(key, np.float32(0.3))
    assert mcmc.last_state.warmup.optimizer == ()


def two_scales(y=None):
    """A posterior whose second coordinate has a hundredth of the prior's scale."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(w[1], 0.01), obs=y)


def run_states(kernel, num_warmup, num_draws, key):
    """The states of a chain of ``two_scales`` after each draw."""
    y = jnp.array(0.3)
    state = kernel.init(key, num_warmup, None, (y,), {})
    draw = jax.jit(lambda state: kernel.sample(state, (y,), {}))
    states = []
    for _ in range(num_draws):
        state = draw(state)
        states.append(state)
    return states


def test_rmsprop_learns_in_burn_in_and_is_frozen_after(key):
    kernel = fs.SGLD(two_scales, preconditioner=fs.preconditioners.rmsprop())
    assert kernel.preconditioner.adapts
    states = run_states(kernel, 200, 230, key)
    start, second, third = (fs.Warmup().schedule(200).calibrations[q] for q in (0, 1, 2))
    squares = [np.asarray(state.warmup.learned.mean_square) for state in states]
    assert not squares[start].any() and not squares[second - 1].any()
    assert squares[second][1] > 100.0 * squares[second][0]  # the Hessian's diagonal is 1 and 10001
    assert 1e3 < squares[third][1] < 1e5
    for later in squares[third:]:
        np.testing.assert_array_equal(later, squares[third])
    steps = {float(state.warmup.step_size) for state in states[200:]}
    assert len(steps) == 1


def test_rmsprop_learns_the_mean_square_of_the_gradients_at_the_draws(key):
    kernel = fs.SGHMC(two_scales, preconditioner=fs.preconditioners.rmsprop())
    start, second, _, _ = fs.Warmup().schedule(80).calibrations
    states = run_states(kernel, 80, second + 1, key)
    w = np.array([state.z["w"] for state in states[start:second]])
    kept = ~np.array([state.diverging for state in states[start:second]])
    gradients = w + np.stack([np.zeros(len(w)), (w[:, 1] - 0.3) / 0.01**2], axis=1)
    learned = states[second].warmup.learned.mean_square
    np.testing.assert_allclose(learned, np.mean(gradients[kept] ** 2, axis=0), rtol=1e-3)


def test_rmsprop_map():
    metric = fs.preconditioners.rmsprop().build(
        jnp.array([2.0, 3.0]), fs.preconditioners.Learned(jnp.array([0.0, 16.0]), None)
    )
    np.testing.assert_allclose(metric.scale(jnp.ones(2)), [2.0, 1.5])


def test_a_fixed_step_size_keeps_its_units():
    """Without a step size to find, nothing changes under the user's number unless he asks for it."""
    assert not fs.SGLD(two_scales, step_size=1e-4).preconditioner.adapts
    assert not fs.SGHMC(two_scales, step_size=1e-2).preconditioner.adapts
    assert fs.SGHMC(two_scales).preconditioner.adapts


@pytest.mark.slow
def test_asked_for_it_rmsprop_learns_with_a_fixed_step_size(key):
    kernel = fs.SGLD(two_scales, step_size=1e-5, preconditioner=fs.preconditioners.rmsprop())
    last = run_states(kernel, 40, 45, key)[-1]
    assert last.warmup.learned.mean_square[1] > 100.0
    np.testing.assert_allclose(last.step_size, 1e-5)


@pytest.mark.slow
def test_heat_left_in_the_momentum_does_not_shrink_the_step_without_end(key):
    """Warm-up once shortened the step for old heat, and so could lose it only more slowly: 1e-3 became 1e-27."""
    kernel = fs.SGHMC(wide, friction=1e-4, warmup=fs.Warmup(warm_start=0.0))
    y = jnp.zeros(400)

    def draw(state):
        return kernel.sample(state, (y,), {})

    state = kernel.init(key, 10**6, None, (y,), {})
    draw = jax.jit(draw)
    for _ in range(5):  # calibrated; half the kinetic energy has become potential
        state = draw(state)
    found = float(state.warmup.step_size)
    state = state._replace(momentum=2.2 * state.momentum)
    for _ in range(100):
        state = draw(state)
    assert float(state.warmup.step_size) > 0.3 * found


def wide(y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([400 if y is None else len(y)]).to_event(1))
    spread = jnp.linspace(0.3, 3.0, w.size)  # many frequencies
    numpyro.sample("y", dist.Normal(w, spread).to_event(1), obs=y)


def test_relaxation_from_a_bad_start_keeps_the_step(key):
    """Far from the mode the chain is hot for a while at every step size: with three parameters it shrank to nothing."""
    kernel = fs.SGHMC(wide, num_steps=5, warmup=fs.Warmup(warm_start=0.0))
    y = jnp.full((3,), 30.0)
    state = kernel.init(key, 10**6, None, (y,), {})
    draw = jax.jit(lambda state: kernel.sample(state, (y,), {}))
    state = draw(state)
    found = float(state.warmup.step_size)
    for _ in range(100):
        state = draw(state)
    assert float(state.warmup.step_size) > 0.5 * found


@pytest.mark.slow
def test_a_steadily_hot_sgld_shortens_its_step(key):
    """Its potential does not rise any more, as it has risen before; nor does it fall, which would explain the heat."""

    def stiff(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([200]).to_event(1))
        numpyro.sample("y", dist.Normal(w, 0.01).to_event(1), obs=y)

    kernel = fs.SGLD(stiff, warmup=fs.Warmup(warm_start=0.0), preconditioner=fs.preconditioners.prior_scale())
    y = jnp.zeros(200)
    state = kernel.init(key, 10**6, None, (y,), {})
    draw = jax.jit(lambda state: kernel.sample(state, (y,), {}))
    state = draw(state)
    too_long = 1.9 / 1e4  # the variance is twenty times what it should be
    spread = 0.01 * jnp.sqrt(20.0) * jax.random.normal(key, (200,))
    step = state.warmup.step._replace(size=jnp.asarray(too_long))
    state = state._replace(z={"w": spread}, warmup=state.warmup._replace(step=step))
    state = kernel.refresh(state, (y,), {})
    for _ in range(20):
        state = draw(state)
    assert float(state.warmup.step_size) < 0.85 * too_long


# ---- friction ----------------------------------------------------------------------------------------------


def one_informed(y, batch_size=None):
    """Of 300 weights of prior N(0, 1) the data, in minibatches, inform the first."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([300]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=batch_size):
        numpyro.sample("y", dist.Normal(w[0], 0.5), obs=numpyro.subsample(y, event_dim=0))


NOISY = jnp.asarray(np.random.default_rng(0).normal(0.3, 0.5, 256), jnp.float32)


def chain_of_one_informed(key, batch_size, **settings):
    """The MCMC object of a run, and by how much the informed weight's variance exceeds the posterior's."""
    model = partial(one_informed, batch_size=batch_size)
    kernel = fs.SGHMC(model, control_variates=False, warmup=fs.Warmup(warm_start=0.0), **settings)
    mcmc = fs.MCMC(kernel, num_warmup=200, num_samples=1500, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mcmc.run(key, NOISY, extra_fields=("friction",))
    precision = 1.0 + len(NOISY) / 0.5**2
    return mcmc, float(jnp.var(mcmc.get_samples()["w"][:, 0])) * precision


def test_friction_is_what_leaves_the_heat_that_is_allowed():
    friction = friction_for(jnp.array([0.1, 0.1, 0.2]), jnp.array([0.0, 800.0, 800.0]), 2.0)
    np.testing.assert_allclose(friction, [1.0, 0.5 * 80.0 / (2.0 * MAX_NOISE_EXCESS), 160.0 / (4.0 * MAX_NOISE_EXCESS)])


@pytest.mark.parametrize(("measured", "is_last", "found"), [(3.0, False, 3.0), (3.0, True, 5.0), (7.0, True, 7.0)])
def test_the_last_look_at_the_rest_of_the_noise_takes_no_friction_away(measured, is_last, found):
    """Heat was last looked at under the friction before, and is not again. Along directions it goes both ways."""
    noise = Noise.start(jnp.zeros(3), 2)._replace(rest=jnp.array(5.0), variances=jnp.array([4.0, 9.0]))
    noise = noise._replace(traces=jnp.array([2.0, 2.0 * measured]), squares=jnp.array([10.0, 50.0]), num=jnp.array(5))
    learned = noise.renewed(jnp.array(is_last))
    assert learned.rest == found
    np.testing.assert_array_equal(learned.variances, [2.0, 10.0])
    assert not (learned.traces.any() or learned.squares.any() or learned.num)


def test_noise_that_lies_along_its_directions_exactly_leaves_none():
    """The rest of the noise is zero then, not what it was before the directions were known; without draws it stays."""
    noise = Noise.start(jnp.zeros(3), 1)._replace(basis=jnp.eye(1, 3), rest=jnp.array(5.0))
    assert noise.renewed(jnp.array(False)).rest == 5.0
    learned = noise.with_measured(jnp.array([[2.0, 0.0, 0.0], [-4.0, 0.0, 0.0]])).renewed(jnp.array(False))
    assert learned.rest == 0.0
    np.testing.assert_array_equal(learned.variances, [10.0])


def test_leading_directions_of_noise_are_found_and_measured():
    """Two of 30 directions, variances 40 and 9, the others .01: found to 1 %, measured on other rows to 5 errors."""
    axes = np.linalg.qr(np.random.default_rng(3).normal(size=(30, 30)))[0]
    rows = jnp.asarray(np.random.default_rng(4).normal(size=(800, 2, 30)) * np.sqrt([40.0, 9.0] + 28 * [0.01]) @ axes.T)
    rows = rows.astype(jnp.float32)
    noise = jax.lax.scan(lambda n, r: (n.with_noise_rows(r), None), Noise.start(jnp.zeros(30), 4), rows[:400])[0]
    noise = noise.with_directions()
    np.testing.assert_allclose(noise.basis @ noise.basis.T, np.eye(4), atol=1e-5)
    assert (np.abs(np.sum(noise.basis[:2] * axes[:, :2].T, axis=1)) > 0.99).all()
    assert not noise.variances.any()
    noise = jax.lax.scan(lambda n, r: (n.with_measured(r), None), noise, rows[400:])[0].renewed(jnp.array(False))
    np.testing.assert_allclose(noise.variances, [40.0, 9.0, 0.01, 0.01], rtol=5.0 * np.sqrt(2.0 / 800))
    np.testing.assert_allclose(noise.rest, 0.01, rtol=0.3)


def test_a_step_is_shortened_until_a_kick_s_noise_can_be_balanced():
    factor = jax.vmap(steadying, (None, 0, None))(0.1, jnp.array([0.0, 1.0, 100.0, 1e4]), 2.0)
    np.testing.assert_allclose(factor, [1.0, 1.0, np.sqrt(MAX_KICK * 2.0), 0.1 * np.sqrt(MAX_KICK * 2.0)], rtol=1e-6)


@pytest.mark.slow
def test_friction_cools_what_minibatches_heat(key):
    """The informed weight has the posterior's variance, without control variates; under friction 1 five times that."""
    mcmc, cooled = chain_of_one_informed(key, 16)
    _, hot = chain_of_one_informed(key, 16, friction=1.0)
    assert abs(cooled - 1.0) < 0.25 and hot > 5.0
    np.testing.assert_array_equal(mcmc.get_extra_fields()["friction"], 1.0)  # of all others


def informed_directions(x, y, batch_size, sd):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=batch_size):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(xb @ w, sd), obs=yb)


@pytest.mark.slow
@pytest.mark.parametrize("num_directions", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_directions_that_the_data_know_have_the_posteriors_sd(num_directions, key):
    """A linear model of 40 weights with the default control variates: a Gaussian law. Friction 1 is too wide."""
    rng = np.random.default_rng(11)
    axes = np.linalg.qr(rng.normal(size=(40, num_directions)))[0]
    scores = rng.normal(size=(800, num_directions))
    x, y = scores @ axes.T, scores.sum(1) + 0.15 * rng.normal(size=800)
    values, vectors = np.linalg.eigh(x.T @ x / 0.15**2 + np.eye(40))
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    found = {}
    for friction in (None, 1.0):
        kernel = fs.SGHMC(partial(informed_directions, batch_size=60, sd=0.15), friction=friction)
        mcmc = fs.MCMC(
            kernel, num_warmup=400, num_samples=400, num_chains=8, chain_method="vectorized", progress_bar=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            mcmc.run(key, *data)
        white = np.asarray(mcmc.get_samples()["w"], float) @ vectors * np.sqrt(values)
        found[friction] = white[:, -num_directions:].std(0)
    assert (np.abs(found[None] - 1.0) < 0.05).all() and (found[1.0] > 1.15).all()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 255])
def test_friction_is_one_where_there_is_little_heat_and_less_where_there_is_none(batch_size, key):
    """And to look at the noise changes nothing, if there is none."""
    right = 0.3 if batch_size is None else 1.0
    found, given = (chain_of_one_informed(key, batch_size, **settings)[0] for settings in ({}, {"friction": right}))
    if batch_size is None:
        np.testing.assert_array_equal(found.get_samples()["w"], given.get_samples()["w"])
    np.testing.assert_allclose(found.get_extra_fields()["friction"], right, rtol=1e-6)
    assert (float(found.last_state.warmup.noise.variances.sum()) > 0.0) == (batch_size is not None)


@pytest.mark.slow
def test_friction_is_one_with_a_given_step_size_and_none_is_sgld_s(key):
    mcmc, _ = chain_of_one_informed(key, 16, step_size=0.01)
    np.testing.assert_array_equal(mcmc.get_extra_fields()["friction"], 1.0)
    assert float(run_states(fs.SGLD(two_scales), 8, 9, key)[-1].friction) == 0.0


@pytest.mark.slow
def test_random_points_are_noise_too():
    x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
    for points, is_random in ((fs.measurement.fixed(x), False), (fs.measurement.uniform([-1.0], [1.0], 5), True)):

        def model(x, points=points):
            f = fs.random_module("f", nn.Dense(1), input_shape=1)
            fs.functional_prior("prior", f, prior, points)
            numpyro.sample("y", dist.Normal(f(x)[:, 0], 1.0), obs=x[:, 0])

        potential = ModelPotential(model, (x,), key=jax.random.key(0))
        assert potential.is_random == is_random
        plan = fs.fSGHMC(model).prepare((x,), {}, 100)
        assert plan.absorbs_noise == is_random and (plan.friction is None) == is_random


@pytest.mark.slow
def test_the_step_of_a_network_with_a_gp_s_distribution_is_not_cut_by_rounding():
    """Its second derivatives are wrong by factors of hundreds in float32; steps were twenty times too short."""
    t = np.arange(240, dtype=np.float32)[:, None] / 12
    y = np.sin(2 * np.pi * t[:, 0]) + 0.2 * np.random.default_rng(0).normal(size=240).astype(np.float32)
    season = tinygp.kernels.ExpSquared(20.0) * tinygp.kernels.ExpSineSquared(scale=1.0, gamma=1.0)
    points = fs.measurement.space_filling(0.0, 20.0, 120)

    def on_circle(t):
        return jnp.concatenate([t / 10.0, jnp.cos(2 * jnp.pi * t), jnp.sin(2 * jnp.pi * t)], -1)

    def model(t, y):
        net = nn.Sequential([on_circle, nn.Dense(30), nn.tanh, nn.Dense(30), nn.tanh, nn.Dense(1)])
        f = fs.gp_network("f", net, fs.GPPrior(season + tinygp.kernels.ExpSquared(10.0)), points)
        numpyro.sample("y", dist.Normal(f(t).squeeze(-1), numpyro.sample("sigma", dist.HalfNormal(1.0))), obs=y)

    mcmc = fs.MCMC(fs.fSGHMC(model), num_warmup=200, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), t, y, extra_fields=("accept_prob",))
    assert 0.6 < mcmc.get_extra_fields()["accept_prob"].mean() < 0.97
    assert mcmc.last_state.step_size > 0.03
