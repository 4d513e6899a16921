"""The kernels under NumPyro's MCMC: chains, state, warm-up, randomness, trouble."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import NOISE, POINTS, Revealing, X, Y, line, linear, random_points, run
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.infer import init_to_value
from numpyro.infer.util import log_density
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.mcmc.loop import started
from numpyro_fspace.sgmcmc import sghmc as algorithm

KEY = jax.random.key(0)
COLD = fs.Warmup(warm_start=0.0)
pytestmark = pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning")


def base_model(x, y=None):
    linear(POINTS)(x, y)


def sghmc(model=base_model, **settings):
    settings = {"step_size": 0.05, "num_steps": 2, "refresh_every": 1, "warmup": COLD} | settings
    return fs.fSGHMC(model, **settings)


def sgld(model=base_model, **settings):
    return fs.fSGLD(model, **({"step_size": 0.01, "num_steps": 2, "warmup": COLD} | settings))


KERNELS = {"SGHMC": sghmc, "SGLD": sgld}
FIELDS = ("potential_energy", "log_functional_prior", "gradient_norm", "temperature", "step_size")


@pytest.fixture(scope="module")
def base():
    """The run most others are compared with: SGHMC, 4 warm-up draws and 4 more of 2 steps, from key 0."""
    return run(sghmc(), extra_fields=FIELDS)


def draws_of(mcmc, **kwargs):
    return np.asarray(mcmc.get_samples(**kwargs)["w"])


# ---- chains ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernel, step_size, warmup", [("SGHMC", None, None), ("SGLD", 0.005, COLD)])
def test_chains_do_not_depend_on_how_they_run(kernel, step_size, warmup):
    """Float rounding only: 8 draws of 2 steps amplify it little. A shared key would make the chains equal."""
    made = KERNELS[kernel](linear(random_points(), batch=4), step_size=step_size, warmup=warmup)
    one, two = (
        draws_of(run(made, num_chains=2, chain_method=method), group_by_chain=True)
        for method in ("sequential", "vectorized")
    )
    assert one.shape == (2, 4, 2) and not np.allclose(one[0], one[1])
    np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-4)


def test_a_chain_is_its_key_s(base):
    """Given a key for each of two chains, the second is the single chain of that key."""
    both = fs.MCMC(sghmc(), num_warmup=4, num_samples=4, num_chains=2, chain_method="sequential", progress_bar=False)
    both.run(jnp.stack([jax.random.key(7), KEY]), X, Y)
    np.testing.assert_allclose(draws_of(both, group_by_chain=True)[1], draws_of(base), rtol=1e-4, atol=1e-5)


PARALLEL = """
import json, sys, warnings
sys.path.insert(0, "tests")
warnings.simplefilter("ignore")
import jax, numpy as np
import numpyro_fspace as fs
from models import POINTS, X, Y, linear, random_points, run
from tinygp.kernels import ExpSquared
gp = fs.GPPrior(ExpSquared(1.0))
kernel = fs.fSGHMC(linear(random_points(), prior=gp, batch=4), num_steps=2, refresh_every=1)
runs = {m: run(kernel, data=(X.astype(float), Y.astype(float)), num_chains=2, chain_method=m,
               extra_fields=("log_functional_prior",)) for m in ("parallel", "vectorized")}
draws = {m: np.asarray(r.get_samples(group_by_chain=True)["w"]) for m, r in runs.items()}
fields = runs["parallel"].get_extra_fields()
print(json.dumps(dict(
    devices=jax.local_device_count(),
    method=runs["parallel"].chain_method,
    gap=float(np.abs(draws["parallel"] - draws["vectorized"]).max()),
    spread=float(draws["parallel"].std()),
    dtypes=sorted({str(a.dtype) for a in (draws["parallel"], fields["log_functional_prior"])}),
    float32=[str(a.dtype) for a in jax.tree.leaves(runs["parallel"].last_state) if str(a.dtype) == "float32"],
)))
"""


@pytest.mark.slow
def test_parallel_chains_in_float64():
    """On two devices the draws are those of the vectorized chains up to rounding; float64 stays float64 throughout."""
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2",
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    result = subprocess.run(
        [sys.executable, "-c", PARALLEL], capture_output=True, text=True, cwd=root, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["devices"] == 2 and report["method"] == "parallel"
    assert report["gap"] < 1e-8 < report["spread"]
    assert report["dtypes"] == ["float64"] and report["float32"] == []


def test_thinning_keeps_every_second_draw(base):
    np.testing.assert_allclose(draws_of(run(sghmc(), thinning=2)), draws_of(base)[1::2], rtol=1e-5)


@pytest.fixture
def with_bar(monkeypatch):
    for name in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("numpyro_fspace.mcmc.run.is_watched", lambda: True)
    return run(sghmc(), progress_bar=True)


def test_the_progress_bar_changes_nothing(base, with_bar, capfd):
    np.testing.assert_allclose(draws_of(with_bar), draws_of(base), rtol=1e-5)
    with_bar.run(KEY, X, Y)
    assert "step 0.05" in capfd.readouterr().err


def test_numpyro_s_driver_gives_the_same_draws(base):
    plain = NumPyroMCMC(sghmc(), num_warmup=4, num_samples=4, progress_bar=False)
    plain.run(KEY, X, Y)
    np.testing.assert_array_equal(draws_of(plain), draws_of(base))


# ---- fields --------------------------------------------------------------------------------------------------


def test_fields_are_those_of_the_draw(base):
    """SGHMC ends on a gradient at the draw itself, so U, log P0 and |∇U| can be recomputed there."""
    fields, draws = base.get_extra_fields(), draws_of(base)
    assert set(fields) == {*FIELDS, "diverging"}
    density, prior_free = (lambda w, m=m: log_density(m, (X, Y), {}, {"w": w})[0] for m in (linear(POINTS), linear()))
    np.testing.assert_allclose(fields["potential_energy"], [-density(w) for w in draws], rtol=1e-4)
    gained = [density(w) - prior_free(w) for w in draws]
    np.testing.assert_allclose(fields["log_functional_prior"], gained, rtol=1e-3)
    norms = [jnp.linalg.norm(jax.grad(density)(w)) for w in draws]
    np.testing.assert_allclose(fields["gradient_norm"], norms, rtol=1e-3)
    np.testing.assert_allclose(fields["step_size"], 0.05, rtol=1e-6)
    assert np.all(np.asarray(fields["temperature"]) > 0) and not np.any(fields["diverging"])


# ---- state ---------------------------------------------------------------------------------------------------


SCHEDULE = optax.linear_schedule(0.02, 0.001, 30)


def test_a_run_can_be_continued():
    """4 + 4 draws from the last state, pickled in between, are the 8 draws of one run, schedule included."""
    whole, first = (run(sghmc(step_size=SCHEDULE), num_samples=num) for num in (8, 4))
    second = fs.MCMC(sghmc(step_size=SCHEDULE), num_warmup=4, num_samples=4, progress_bar=False)
    second.post_warmup_state = pickle.loads(pickle.dumps(first.last_state))
    second.run(second.post_warmup_state.rng_key, X, Y)
    both = np.concatenate([draws_of(first), draws_of(second)])
    np.testing.assert_allclose(both, draws_of(whole), rtol=1e-4, atol=1e-6)
    assert int(second.last_state.i) == 12 and int(second.last_state.count) == 24


@pytest.mark.slow
def test_warmup_alone_then_run():
    """Calibration included; the draws of the warm-up can be kept."""
    made = sghmc(step_size=None, warmup=None)
    parts = fs.MCMC(made, num_warmup=4, num_samples=4, progress_bar=False)
    parts.warmup(KEY, X, Y, collect_warmup=True)
    assert draws_of(parts).shape == (4, 2)
    parts.run(parts.post_warmup_state.rng_key, X, Y)
    np.testing.assert_allclose(draws_of(parts), draws_of(run(made)), rtol=1e-3, atol=1e-5)


def test_kernels_pickle(base):
    """Also after a run; the copy gives the same draws."""
    copy = pickle.loads(pickle.dumps(base.sampler))
    np.testing.assert_allclose(draws_of(run(copy)), draws_of(base), rtol=1e-5)


def test_wrap_model_makes_another_kernel():
    kernel = sghmc()
    wrapped = kernel.wrap_model(lambda model: handlers.condition(model, {"w": jnp.ones(2)}))
    assert type(wrapped) is type(kernel) and wrapped.step_size == kernel.step_size
    assert wrapped.model is not kernel.model and kernel.model is base_model
    with pytest.raises(ValueError, match="no latent site"):
        wrapped.init(KEY, 1, None, (X, Y), {})


def test_refresh_reevaluates_on_new_data():
    kernel = sghmc()
    state = kernel.init(KEY, 1, None, (X, Y), {})
    fresh = kernel.refresh(state, (X, 2 * Y), {})
    expected = -log_density(linear(POINTS), (X, 2 * Y), {}, {"w": state.z["w"]})[0]
    assert float(fresh.potential_energy) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_array_equal(fresh.z["w"], state.z["w"])
    assert not np.array_equal(jax.random.key_data(fresh.rng_key), jax.random.key_data(state.rng_key))


def test_get_constrain_fn():
    """From where the chain moves to the model's values: here the logarithm of a scale."""

    def model(x, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal())
        numpyro.deterministic("twice", 2 * scale)
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(line(w)(x), scale), obs=y)

    kernel = fs.SGHMC(model, step_size=0.05)
    values = kernel.get_constrain_fn((X, Y), {})({"w": jnp.array([1.0, -2.0]), "scale": jnp.float32(-1.0)})
    np.testing.assert_array_equal(values["w"], [1.0, -2.0])
    np.testing.assert_allclose([values["scale"], values["twice"]], [np.exp(-1.0), 2 * np.exp(-1.0)], rtol=1e-6)


@pytest.mark.slow
def test_init_params_are_where_chains_start():
    """With steps of 1e-6 the draws are still there, each chain at its own place."""
    start = jnp.array([[3.0, -4.0], [5.0, 6.0]])
    settings = dict(num_warmup=0, num_samples=2, num_chains=2, chain_method="vectorized")
    mcmc = run(sghmc(step_size=1e-6), init_params={"w": start}, **settings)
    np.testing.assert_allclose(draws_of(mcmc, group_by_chain=True)[:, 1], start, rtol=1e-4)


# ---- compilation ---------------------------------------------------------------------------------------------


def test_a_second_run_compiles_nothing(base, with_bar, caplog):
    """With a bar or without."""

    def compiled(call):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            call()
        messages = [r.getMessage() for r in caplog.records]
        return [m.split()[1] for m in messages if m.startswith("Compiling")]

    assert compiled(lambda: jax.jit(lambda x: x * 12345.678)(np.ones(3))) != []
    with_bar.run(KEY, X, Y)  # programs may have been dropped since the fixtures ran
    base.run(KEY, X, Y, extra_fields=FIELDS)
    assert compiled(lambda: with_bar.run(KEY, X, Y)) == []
    assert compiled(lambda: base.run(KEY, X, Y, extra_fields=FIELDS)) == []


# ---- damping -------------------------------------------------------------------------------------------------


def slowest_mode(refresh_every, longest, *, friction, num_steps=24):
    """By which factor a draw reduces the slowest mode of those with ε√λ between a third of ``longest`` and all of it.

    From the map (q, p) ↦ (q', p') of a draw without noise.
    """
    transition = algorithm.build_kernel()

    def moved(epsilon):
        def image(start):
            state = algorithm.SGHMCState(start[0], start[1], jnp.zeros((), int))
            settings = {"friction": friction, "temperature": 1e-24, "refresh_every": refresh_every}
            state, _ = transition(KEY, state, lambda q, key: 0.5 * q**2, epsilon, num_steps=num_steps, **settings)
            return jnp.stack([state.position, state.momentum])

        return jax.vmap(image)(jnp.eye(2))

    epsilons = np.linspace(longest / 3, longest, 160)
    maps = np.asarray(jax.jit(jax.vmap(moved))(epsilons), float)
    return np.abs(np.linalg.eigvals(maps)).max()


SLOWEST = {(1, True): 0.2, (2, True): 0.25, (3, True): 0.4, (6, True): 0.65}
SLOWEST |= {(1, False): 0.03, (2, False): 0.03, (3, False): 0.1, (6, False): 0.3}


@pytest.mark.parametrize(
    ("every", "metropolis"),
    [one if one in {(2, True), (1, False)} else pytest.param(*one, marks=pytest.mark.slow) for one in SLOWEST],
)
def test_every_mode_is_damped(every, metropolis):
    """At the friction of exact or noisy gradients and steps that warm-up may choose; not where a mode resonates."""
    kernel, friction = fs.SGHMC(linear(), num_steps=24, refresh_every=every), 0.3 if metropolis else 1.0
    longest = kernel.sampler_type.of(kernel, metropolis=metropolis).stable_step_size(1.0)
    assert slowest_mode(every, longest, friction=friction) < SLOWEST[every, metropolis]
    if every > 1:
        resonance = 2.0 * np.sin(np.pi / (2 * every))
        assert longest < resonance
        assert slowest_mode(every, resonance, friction=friction) > 0.99


def test_other_integrators_have_no_thermostat_to_meet():
    kernel = fs.SGHMC(linear(), num_steps=24, refresh_every=6, integrator="euler")
    assert kernel.sampler_type.of(kernel, metropolis=False).stable_step_size(1.0) == 1.0


@pytest.mark.slow
def test_a_single_mean_is_not_tuned_into_a_resonance():
    """At ε√λ = √2 every draw is accepted, and hardly any moves: one chain of these was tuned to 1.44."""

    def model(y=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        with numpyro.plate("data", 10):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    settings = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=500, num_samples=500, **settings)
    mcmc.run(KEY, y=jnp.arange(10) / 10)
    assert effective_sample_size(np.asarray(mcmc.get_samples(group_by_chain=True)["mean"])) > 800


# ---- randomness ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_step_has_its_own_minibatch_and_points(kernel):
    """A model that tells which rows and points it was given: none comes twice in 5 draws of 2 steps."""
    rows, points = [], []

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))

        def f(x):
            jax.debug.callback(lambda v: points.append(tuple(np.ravel(v).tolist())), x)
            return w[0] * x[:, 0]

        fs.functional_prior("f", f, Revealing(), random_points(3))
        with numpyro.plate("data", 1000, subsample_size=5) as index:
            jax.debug.callback(lambda v: rows.append(tuple(np.sort(v).tolist())), index)
            numpyro.sample("y", dist.Normal(w[1], 1.0), obs=jnp.asarray(y)[index])

    settings = {"refresh_every": 1} if kernel == "SGHMC" else {}
    kernel = getattr(fs, f"f{kernel}")(model, step_size=1e-4, num_steps=2, warmup=COLD, **settings)
    mcmc = run(kernel, data=(X, np.zeros(1000, np.float32)), num_warmup=2, num_samples=3)
    jax.block_until_ready(mcmc.last_state)
    jax.effects_barrier()
    assert len(set(rows)) >= 10 and len(set(points)) >= 10
    assert all(len(set(row)) == 5 and row[0] >= 0 and row[-1] < 1000 for row in set(rows) if len(row) == 5)


@pytest.mark.parametrize(
    ("integrator", "resample", "every"),
    [
        ("baoab", False, 2),
        pytest.param("baoab", True, 1, marks=pytest.mark.slow),
        ("euler", True, 1),
        pytest.param("euler", False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_draw_is_the_algorithm_s(integrator, resample, every):
    """Each setting reaches its place: one draw from the same key is that of ``fs.sgmcmc.sghmc`` with these numbers."""
    settings = {"friction": 2.0, "temperature": 3.0, "integrator": integrator, "resample_momentum": resample}
    kernel = sghmc(num_steps=4, refresh_every=every, metropolis=False, **settings)
    state = kernel.init(KEY, 0, {"w": jnp.array([0.5, -0.5])}, (X, Y), {})
    found = kernel.sample(state, (X, Y), {})
    step = algorithm.build_kernel(integrator=integrator)
    expected, _ = step(
        jax.random.split(state.rng_key)[1],
        algorithm.SGHMCState(state.z["w"], state.momentum, state.count),
        lambda w, key: -log_density(linear(POINTS), (X, Y), {}, {"w": w})[0],
        0.05,
        num_steps=4,
        friction=2.0,
        temperature=3.0,
        resample_momentum=resample,
        refresh_every=every,
    )
    np.testing.assert_allclose(found.z["w"], expected.position, rtol=1e-4)
    np.testing.assert_allclose(found.momentum, expected.momentum, rtol=1e-3, atol=1e-4)


def test_the_first_momentum_has_the_temperature():
    momenta = [sghmc(temperature=t).init(KEY, 0, None, (X, Y), {}).momentum for t in (1.0, 4.0)]
    np.testing.assert_allclose(momenta[1], 2.0 * momenta[0], rtol=1e-5)


def test_chains_start_where_the_strategy_says():
    kernel = sgld(init_strategy=init_to_value(values={"w": jnp.array([3.0, -4.0])}))
    np.testing.assert_array_equal(kernel.init(KEY, 0, None, (X, Y), {}).z["w"], [3.0, -4.0])
    assert sgld().init_strategy is fs.model.init_to_network


@pytest.mark.slow
def test_temperature_scales_the_noise():
    """One SGLD step from the same place and key: w' - (w - ε ∇U) grows by √T, exactly."""
    start = jnp.array([0.5, 0.5])
    gradient = jax.grad(lambda w: -log_density(linear(POINTS), (X, Y), {}, {"w": w})[0])(start)
    noise = []
    for temperature in (1.0, 4.0):
        kernel = sgld(num_steps=1, temperature=temperature)
        mcmc = run(kernel, num_warmup=0, num_samples=1, init_params={"w": start})
        noise.append(draws_of(mcmc)[0] - np.asarray(start - 0.01 * gradient))
    np.testing.assert_allclose(noise[1], 2.0 * noise[0], rtol=1e-3)
    assert np.abs(noise[0]).max() < 6 * np.sqrt(0.02)


@pytest.mark.parametrize("kernel", some(KERNELS, 1))
def test_schedules_are_read_at_every_gradient_step(kernel):
    """The last of the two steps of draw i has step size s(2 i + 1), warm-up counted."""
    mcmc = run(KERNELS[kernel](step_size=SCHEDULE), extra_fields=("step_size", "count"))
    steps = 2 * (4 + np.arange(4)) + 1
    np.testing.assert_allclose(mcmc.get_extra_fields()["step_size"], [SCHEDULE(t) for t in steps], rtol=1e-5)
    np.testing.assert_array_equal(mcmc.get_extra_fields()["count"], steps + 1)


# ---- warm-up -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_warm_start_moves_and_can_be_switched_off():
    """With sampler steps of 1e-7 only the optimizer can move, and it lowers U."""
    start = {"w": jnp.array([3.0, -3.0])}
    ends = {}
    for name, warmup in [("on", fs.Warmup(warm_start=0.8, learning_rate=0.1)), ("off", COLD)]:
        kernel = sghmc(step_size=1e-7, num_steps=10, refresh_every=5, warmup=warmup)
        ends[name] = draws_of(run(kernel, num_warmup=5, num_samples=1, init_params=start))[0]
    np.testing.assert_allclose(ends["off"], start["w"], atol=1e-4)
    energy = [-float(log_density(linear(POINTS), (X, Y), {}, {"w": w})[0]) for w in (start["w"], ends["on"])]
    assert energy[1] < 0.5 * energy[0]


@pytest.mark.parametrize("kernel", some(KERNELS, 1))
def test_the_step_size_fits_the_curvature_and_freezes(kernel):
    """λ is the largest eigenvalue of S (I + ΦᵀΦ/σ² + Φ_MᵀΦ_M/s²) S; warm-up may shorten the step, not lengthen it."""
    features, at_points = (np.stack([np.ones(len(x)), x[:, 0]], 1) for x in (X, POINTS))
    hessian = np.eye(2) + features.T @ features / NOISE**2 + at_points.T @ at_points / 0.5**2
    scale = np.array([0.5, 2.0])
    curvature = np.linalg.eigvalsh(scale[:, None] * hessian * scale)[-1]
    made = KERNELS[kernel](step_size=None, num_steps=5, warmup=None, preconditioner=fs.preconditioners.diagonal(scale))
    mcmc = run(made, num_warmup=20, num_samples=5, extra_fields=("step_size",))
    steps = np.asarray(mcmc.get_extra_fields()["step_size"])
    stable = {"SGHMC": 1.0 / np.sqrt(curvature), "SGLD": 0.4 / curvature}[kernel]
    assert len(set(steps.tolist())) == 1
    assert 0.4 * stable < steps[0] < 1.01 * stable


@pytest.mark.slow
def test_a_model_s_own_length_scale_is_sampled():
    """Constrained sites come back constrained, deterministic ones are kept, those of a minibatch are not."""
    from tinygp.kernels import ExpSquared

    def model(x, y=None):
        length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))

        def f(x):
            return w[0] + w[1] * x[:, 0]

        fs.functional_prior("f", f, fs.GPPrior(ExpSquared(length), nugget=0.1), random_points())
        numpyro.deterministic("double", 2 * length)
        with numpyro.plate("data", 8, subsample_size=4):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            mean = numpyro.deterministic("local", f(xb))
            numpyro.sample("y", dist.Normal(mean, NOISE), obs=yb)

    samples = run(sghmc(model, step_size=0.02)).get_samples()
    assert set(samples) == {"length", "w", "double"}
    assert np.all(samples["length"] > 0) and len(np.unique(samples["length"])) == 4
    np.testing.assert_allclose(samples["double"], 2 * samples["length"], rtol=1e-6)


# ---- trouble -------------------------------------------------------------------------------------------------


def cliff(x, y=None):
    """log(1 - |w|²) is NaN outside the unit disc."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.factor("disc", jnp.log(1.0 - jnp.sum(w**2)))
    numpyro.sample("y", dist.Normal(w[0] + w[1] * x[:, 0], NOISE).to_event(1), obs=y)


@pytest.mark.parametrize("kernel", some([fs.SGLD, fs.SGHMC], 1))
def test_divergences_keep_the_last_good_state_and_are_reported(kernel):
    """Steps of size 3 leave the disc at once: every draw is the start, and who ran or uses the run is told once."""
    settings = {"refresh_every": 1} if kernel is fs.SGHMC else {}
    made = kernel(cliff, step_size=3.0, num_steps=2, warmup=COLD, metropolis=False, **settings)
    start = {"w": jnp.array([0.1, 0.2])}
    with pytest.warns(RuntimeWarning, match="4 of 4 draws diverged.*smaller step_size"):
        mcmc = run(made, init_params=start)
    np.testing.assert_array_equal(draws_of(mcmc), np.tile(start["w"], (4, 1)))
    assert np.all(mcmc.get_extra_fields()["diverging"]) and int(mcmc.last_state.num_diverging) == 4
    if kernel is fs.SGLD:
        return
    fs.predict(mcmc, KEY, X)  # which does not say it again
    plain = NumPyroMCMC(made, num_warmup=4, num_samples=4, progress_bar=False)
    with pytest.warns(RuntimeWarning, match="4 of 4 draws diverged"):
        plain.run(KEY, X, Y, init_params=start)
    fs.predict(plain, KEY, X)


@pytest.mark.filterwarnings("default:The kinetic temperature:RuntimeWarning")
def test_a_hot_chain_is_reported():
    """Started far from the mode and without warm-up, the fall heats the momentum."""
    with pytest.warns(RuntimeWarning, match="kinetic temperature.*smaller step_size"):
        run(sghmc(metropolis=False), num_warmup=0, init_params={"w": jnp.array([4.0, 4.0])})


def test_cyclical_steps_come_from_optax():
    """Two gradient steps per draw, cycles of six: the step that ended each draw follows the cosine and starts anew."""
    cycle = {"init_value": 1e-2, "peak_value": 1e-2, "warmup_steps": 0, "decay_steps": 6, "end_value": 1e-3}
    kernel = fs.SGLD(linear(), step_size=optax.sgdr_schedule([cycle] * 3), num_steps=2, warmup=COLD)
    mcmc = run(kernel, num_warmup=0, num_samples=6, extra_fields=("step_size",))
    cosine = [1e-3 + 9e-3 * 0.5 * (1 + np.cos(np.pi * (t % 6) / 6)) for t in (1, 3, 5, 7, 9, 11)]
    np.testing.assert_allclose(mcmc.get_extra_fields()["step_size"], cosine, rtol=1e-4)


@pytest.mark.parametrize("sampler", ["sghmc", "sgld"])
def test_a_step_to_a_pole_of_the_density_is_rejected_and_no_divergence(sampler):
    """Below 0 the potential is -∞ and its gradient NaN, as where the value of a Gamma law underflows."""
    module = getattr(fs.sgmcmc, sampler)

    def potential(w, key):
        return 0.5 * jnp.log(jnp.maximum(w, 0.0)) + w

    settings = {"num_steps": 5, "metropolis": True}
    algorithm = module.as_top_level_api(potential, 0.3, **settings)

    def step(state, key):
        state, info = algorithm.step(key, state)
        return state, (state.position, info.is_diverging, info.accept_prob)

    start = algorithm.init(jnp.ones(()), jax.random.key(0))
    found = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 300))[1]
    positions, is_diverging, accept_prob = map(np.asarray, found)
    assert (positions > 0).all() and len(np.unique(positions)) > 10
    assert (accept_prob < 0.9).any() and not is_diverging.any()


@pytest.mark.parametrize(
    ("settings", "batch", "bytes_per_weight"),
    [
        ({}, 16, (76, 64)),
        pytest.param({"friction": 50.0}, 16, (44, 32), marks=pytest.mark.slow),
        pytest.param({"step_size": 1e-3, "control_variates": False}, 16, (28, 16), marks=pytest.mark.slow),
        pytest.param({}, 64, (36, 24), marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_chain_is_that_of_the_documentation(settings, batch, bytes_per_weight):
    network, x = nn.Sequential([nn.Dense(30), nn.tanh, nn.Dense(1)]), np.zeros((64, 200), np.float32)

    def model(x, y=None):
        f = fs.random_module("net", network, input_shape=200)
        with numpyro.plate("data", 64, subsample_size=batch):
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb).squeeze(-1), 1.0), obs=yb)

    state = fs.SGHMC(model, **settings).init(jax.random.key(0), 100, None, (x, np.zeros(64, np.float32)), {})
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(state.z))
    for one, expected in zip((state, started(state)), bytes_per_weight, strict=True):
        arrays = [leaf for leaf in jax.tree.leaves(one) if leaf.dtype == np.float32]
        assert sum(leaf.nbytes for leaf in arrays) / num_weights == pytest.approx(expected, rel=0.01)
