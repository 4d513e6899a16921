"""``fs.MCMC`` as a driver: NumPyro's draws, a bar that informs, and nothing lost when it is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import POINTS, X, Y, linear, random_points
from numpyro.infer import NUTS
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.mcmc.progress import Progress
from numpyro_fspace.mcmc.reporting.end_of_run import warn_of_trouble

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEY = jax.random.key(3)


#: A kernel that compiles fast: nothing to calibrate, no control variates.
PLAIN = {"step_size": 0.05, "preconditioner": fs.preconditioners.prior_scale(), "control_variates": False}


def make(cls=fs.MCMC, *, num_chains=2, num_warmup=25, num_samples=34, options=PLAIN, **settings):
    kernel = fs.fSGHMC(linear(random_points(), batch=4), num_steps=3, **options)
    settings = {"chain_method": "vectorized", "progress_bar": False} | settings
    return cls(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, **settings)


def finished(*args, fields=("potential_energy", "warmup.step_size", "control"), **settings):
    mcmc = make(*args, **settings)
    mcmc.run(KEY, X, Y, extra_fields=fields)
    return mcmc


@pytest.mark.parametrize(
    "num_chains, thinning, options",
    [(1, 1, PLAIN), pytest.param(3, 2, {}, marks=pytest.mark.slow), pytest.param(1, 5, PLAIN, marks=pytest.mark.slow)],
)
def test_draws_are_those_of_numpyros_driver(num_chains, thinning, options):
    """Fields, names inside fields and trees among them too."""
    settings = {"num_chains": num_chains, "thinning": thinning, "options": options}
    ours, theirs = (finished(c, **settings) for c in (fs.MCMC, numpyro.infer.MCMC))
    for group in (True, False):
        for read in ("get_samples", "get_extra_fields"):
            a, b = (getattr(mcmc, read)(group_by_chain=group) for mcmc in (ours, theirs))
            assert jax.tree.structure(a) == jax.tree.structure(b)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.shape == y.shape and x.dtype == y.dtype
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert int(np.ravel(ours.last_state.i)[0]) == 59


@pytest.mark.slow
def test_a_field_inside_the_sample_is_numpyros():
    ours, theirs = (finished(c, fields=("z.w",)).get_extra_fields()["z.w"] for c in (fs.MCMC, numpyro.infer.MCMC))
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_not_kept_is_not_computed():
    """Deterministic sites belong to the draws that are kept: not to warm-up, nor to those that thinning drops."""
    calls = []

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.deterministic("seen", jax.pure_callback(lambda w: calls.append(0) or w, w, jax.lax.stop_gradient(w)))
        numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    kernel = fs.SGHMC(model, num_steps=2, **PLAIN)
    mcmc = fs.MCMC(kernel, num_warmup=30, num_samples=12, thinning=4, progress_bar=False)
    mcmc.run(KEY, X[:, 0], Y)
    np.testing.assert_array_equal(mcmc.get_samples()["seen"], mcmc.get_samples()["w"])
    assert len(calls) == 3


@pytest.mark.parametrize(
    "points", [None, pytest.param(random_points(), marks=pytest.mark.slow)], ids=["plain", "functional"]
)
def test_a_second_run_compiles_nothing(points):
    """Neither the sampler nor the check of the draws, whatever the key and the numbers in the data."""
    kernel = fs.SGHMC if points is None else fs.fSGHMC
    mcmc = fs.MCMC(kernel(linear(points), num_steps=2), num_warmup=20, num_samples=200, progress_bar=False)
    compiled = []

    def listen(event, seconds, **details):
        if event.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name"))

    mcmc.run(KEY, X, Y)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        mcmc.run(jax.random.key(4), X + 1.0, Y)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("num_warmup", [0, 20, 59, 1000])
def test_a_run_goes_on_in_another_object(num_warmup):
    """Its warm-up is over, however long that of the new object is; the divergences of the first run are not its own."""
    first = finished(options={})
    last = first.last_state
    first.post_warmup_state = last._replace(averages=last.averages._replace(num_diverging=last.num_diverging + 5))
    first.run(KEY, X, Y)
    other = make(num_warmup=num_warmup, options={})
    other.post_warmup_state = finished(options={}).last_state
    other.run(KEY, X, Y)
    np.testing.assert_allclose(other.get_samples()["w"], first.get_samples()["w"], rtol=1e-4, atol=1e-4)
    assert not np.any(other.last_state.num_diverging) and not np.any(first.last_state.num_diverging)


@pytest.mark.slow
def test_runs_after_one_warm_up_are_alike():
    """Each begins where the warm-up ended, with its last act still due."""
    mcmc = make(options={})
    mcmc.warmup(KEY, X, Y)
    draws = []
    for _ in range(2):
        mcmc.run(KEY, X, Y)
        draws.append(np.asarray(mcmc.get_samples()["w"]))
        assert int(np.ravel(mcmc.last_state.i)[0]) == 59
    np.testing.assert_allclose(draws[1], draws[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_heat_of_a_warm_up_is_no_draw_s():
    """Far from where it will be, a short warm-up ends hot, which the run that follows may no longer be."""
    mcmc = make(num_warmup=4)
    far = {"w": jnp.full((2, 2), 5.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        mcmc.warmup(KEY, X, Y, init_params=far)
    assert np.all(mcmc.last_state.mean_temperature > 2.0)
    with pytest.warns(RuntimeWarning, match="The kinetic temperature"):
        warn_of_trouble(mcmc)


@pytest.mark.slow
def test_a_warm_up_that_failed_leaves_no_trace():
    mcmc = make(options=PLAIN)
    with pytest.raises(ValueError, match="NaN"):
        mcmc.warmup(KEY, np.full_like(X, np.nan), Y)
    mcmc.run(KEY, X, Y)
    np.testing.assert_array_equal(mcmc.get_samples()["w"], finished(options=PLAIN).get_samples()["w"])


def rooted(x, y=None):
    """The root of a number that may be negative."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.factor("root", jnp.sqrt(w[0]))
    numpyro.sample("y", dist.Normal(x @ w, 0.1).to_event(1), obs=y)


@pytest.mark.parametrize("warm_start", some([0.0, 0.3], 1))
@pytest.mark.parametrize("on_disk", some([False, True], 1))
def test_a_start_without_a_density_is_refused(warm_start, on_disk, tmp_path):
    """At the first draw: two of three chains could not move; and the site that is to blame is named."""
    kernel = fs.SGHMC(rooted, step_size=0.01, warmup=fs.Warmup(warm_start=warm_start))
    settings = {"num_chains": 3, "chain_method": "vectorized", "progress_bar": False}
    settings["checkpoint"] = tmp_path if on_disk else None
    mcmc = fs.MCMC(kernel, num_warmup=10, num_samples=10, **settings)
    start = {"w": jnp.array([[-1.0, 0.0], [1.0, 0.0], [-2.0, 0.0]])}
    x = jnp.concatenate([X, X**2], 1)
    with pytest.raises(ValueError, match=r"nan where 2 of 3 chains start.*'root' is not finite.*init_params"):
        mcmc.run(KEY, x, Y, init_params=start)
    assert mcmc.last_state is None and not list(tmp_path.iterdir())
    mcmc.run(KEY, x, Y, init_params={"w": jnp.abs(start["w"])})
    assert mcmc.get_samples()["w"].shape == (30, 2)


@pytest.mark.slow
def test_a_run_cannot_go_on_without_a_step_size():
    other = make(options={})
    other.post_warmup_state = finished(options=PLAIN).last_state
    with pytest.raises(ValueError, match="has none from warm-up"):
        other.run(KEY, X, Y)


@pytest.mark.slow
def test_a_chain_that_stands_still_is_told_of():
    """The curvature of a Laplace density is zero almost everywhere, so it tells no step size."""

    def model(y=None):
        w = numpyro.sample("w", dist.Laplace(0.0, 1.0))
        numpyro.sample("y", dist.Laplace(w, 1.0).expand([len(Y)]), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=20, num_samples=5, progress_bar=False)
    with pytest.warns(RuntimeWarning, match="Warm-up found no step size"):
        mcmc.run(KEY, Y)


@pytest.mark.slow
@pytest.mark.parametrize("num_warmup", [1, 2, 3])
def test_one_draw_of_burn_in_finds_a_step_size(num_warmup):
    mcmc = make(num_warmup=num_warmup, options={})
    mcmc.run(KEY, X, Y)
    assert np.all(mcmc.last_state.warmup.step_size > 0)


@pytest.mark.slow
def test_constants_in_float64_are_no_loss():
    """What float32 cannot hold exactly is lost only where it is much of a column's spread."""

    def model(x, y=None, noise=1.0):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w * x[:, 0], noise), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(model, num_steps=2, **PLAIN), num_warmup=2, num_samples=3, progress_bar=False)
    x = np.column_stack([X[:, 0], np.full(len(X), 0.3)])
    for noise in (np.array([0.1]), np.array(0.1), np.float64(0.1)):
        mcmc.run(KEY, x, Y, noise=noise)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_run_that_goes_on_is_numpyros_and_compiles_nothing(num_chains):
    """Minibatches and a control variate, whose center is found anew."""
    ours, theirs = (
        make(c, num_chains=num_chains, options=PLAIN | {"control_variates": 2}) for c in (fs.MCMC, numpyro.infer.MCMC)
    )
    for mcmc in (ours, theirs):
        mcmc.run(KEY, X, Y)
    for i in range(2):
        state = ours.sampler.refresh(ours.last_state, (X, Y), {})
        theirs.post_warmup_state = state
        ours.post_warmup_state = ours.last_state
        for mcmc in (ours, theirs):
            mcmc.run(jax.random.key(i), X, Y)
        np.testing.assert_allclose(ours.get_samples()["w"], theirs.get_samples()["w"], rtol=1e-4, atol=1e-4)
    (loop,) = ours._loops.values()
    assert all(program._cache_size() == 1 for program in loop._programs.values())


@pytest.mark.slow
def test_after_warmup_alone_there_are_no_draws():
    mcmc = make()
    mcmc.warmup(KEY, X, Y)
    with pytest.raises(ValueError, match="no draws yet"):
        fs.predict(mcmc, KEY, X)


@pytest.mark.parametrize("warmup", [fs.Warmup(warm_start=1.0), fs.Warmup(warm_start=0.99)])
def test_a_warm_start_that_takes_all_is_refused(warmup):
    with pytest.raises(ValueError, match="leaves no draw to find a step size in"):
        finished(options={"warmup": warmup})


@pytest.mark.slow
def test_a_number_in_an_array_does_not_compile_anew():
    def model(x, y=None, noise=1.0):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w * x, noise), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(model, num_steps=2, **PLAIN), num_warmup=2, num_samples=3, progress_bar=False)
    draws = []
    for noise in (np.float32(0.5), np.array(0.5, np.float32), np.array(5.0, np.float32), np.array(0.5, np.float32)):
        mcmc.run(KEY, X[:, 0], Y, noise=noise)
        draws.append(np.asarray(mcmc.get_samples()["w"]))
    np.testing.assert_array_equal(draws[1], draws[3])
    assert len(mcmc._loops) == 3 and (draws[1] != draws[2]).all()


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr("numpyro_fspace.mcmc.run.is_watched", lambda: True)


def with_bar(**settings):
    mcmc = make(num_warmup=60, num_samples=90, **settings)
    mcmc.progress_bar = True  # NumPyro turns it off under continuous integration
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_the_bar_says_what_the_chains_do(watched, capsys, monkeypatch, num_chains):
    monkeypatch.setattr("numpyro_fspace.mcmc.progress.INTERVAL", 0.0)  # the smallest parts
    mcmc = with_bar(num_chains=num_chains)
    mcmc.run(KEY, X, Y)
    text = capsys.readouterr().err
    assert "warm-up" in text and "sample: 100%" in text and "150/150" in text
    last = text.split("\r")[-1]
    assert all(word in last for word in (", U ", "step 0.", "T "))
    assert ("R-hat of f" in last) == (num_chains > 1)
    plain = make(num_warmup=60, num_samples=90, num_chains=num_chains)
    plain.run(KEY, X, Y)
    np.testing.assert_allclose(mcmc.get_samples()["w"], plain.get_samples()["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_logs_are_silent(capsys):
    with_bar().run(KEY, X, Y)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


@pytest.mark.slow
def test_draws_of_an_interrupted_run_are_kept(watched, monkeypatch, capsys):
    """Ctrl-C in the 60th draw of sampling, thinned by two: thirty draws are there, those of the whole run."""
    update, parts = Progress.update, []

    def interrupted(self, done, state, functions=None):
        update(self, done, state, functions)
        self.size = 10
        parts.append(done)
        if self.done >= 120:
            raise KeyboardInterrupt

    whole = make(num_warmup=60, num_samples=90, thinning=2)
    whole.run(KEY, X, Y)
    monkeypatch.setattr(Progress, "update", interrupted)
    mcmc = with_bar(thinning=2)
    with pytest.raises(KeyboardInterrupt):
        mcmc.run(KEY, X, Y)
    kept, drawn = (m.get_samples(group_by_chain=True)["w"] for m in (mcmc, whole))
    assert kept.shape == (2, 30, 2) and len(parts) > 5
    np.testing.assert_allclose(kept, drawn[:, :30], rtol=1e-4, atol=1e-4)
    assert fs.predict(mcmc, KEY, X)["f"].shape == (60, 8)


@pytest.mark.slow
def test_what_it_does_not_do_itself_is_numpyros():
    """Continued runs, warm-up by itself, other kernels, excluded sites."""
    mcmc = make(num_chains=1)
    mcmc.warmup(KEY, X, Y)
    mcmc.run(KEY, X, Y)
    assert mcmc.get_samples()["w"].shape == (34, 2)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, X, Y)
    assert int(mcmc.last_state.i) == 25 + 34 + 34
    without = finished(fields=("~z.w",))
    assert "w" not in without.get_samples()
    nuts = fs.MCMC(NUTS(linear(POINTS)), num_warmup=10, num_samples=10, progress_bar=False)
    nuts.run(KEY, X, Y)
    assert nuts.get_samples()["w"].shape == (10, 2)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, 4])
def test_keys_of_the_old_style_give_the_same_draws(batch):
    """Ten gradients a draw with either, and the temperature of ten."""
    kernel = fs.fSGHMC(linear(random_points(), batch=batch), num_steps=10)
    found = []
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        mcmc = fs.MCMC(kernel, num_warmup=12, num_samples=8, progress_bar=False)
        mcmc.run(key, X, Y, extra_fields=("temperature", "count"))
        found.append((mcmc.get_samples(), mcmc.get_extra_fields()))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
def test_temperature_of_a_run_that_goes_on_is_its_own():
    first = make(num_chains=1)
    first.warmup(KEY, X, Y)
    for num_warmup in (0, 25):
        second = make(num_chains=1, num_warmup=num_warmup, options=PLAIN | {"step_size": 0.2})
        second.post_warmup_state = first.post_warmup_state
        second.run(KEY, X, Y, extra_fields=("temperature",))
        own = float(np.mean(second.get_extra_fields()["temperature"]))
        assert float(second.last_state.mean_temperature) == pytest.approx(own, rel=1e-4)


@pytest.mark.slow
def test_a_state_of_other_chains_is_refused():
    first, second = make(num_chains=2), make(num_chains=1)
    first.warmup(KEY, X, Y)
    second.post_warmup_state = first.post_warmup_state
    with pytest.raises(ValueError, match="that of 2 chains, and num_chains=1"):
        second.run(KEY, X, Y)


def test_settings_that_keep_all_sites_say_so():
    mcmc = make(functions_at=X)
    with pytest.raises(ValueError, match=r"functions_at= keeps all latent sites: leave \['~z.w'\]"):
        mcmc.run(KEY, X, Y, extra_fields=("~z.w",))


@pytest.mark.slow
def test_initial_values_may_be_integers_and_have_an_axis_of_chains():
    given = {"w": np.array([[1, 2], [3, 4]])}
    mcmc = make(num_warmup=0, num_samples=1, options=PLAIN | {"step_size": 1e-12})
    mcmc.run(KEY, X, Y, init_params=given)
    np.testing.assert_allclose(mcmc.get_samples()["w"], given["w"], atol=1e-3)
    for shape in ((), (3, 2)):
        with pytest.raises(ValueError, match="its first axis must be that of the 2 chains"):
            make().run(KEY, X, Y, init_params={"w": np.zeros(shape)})


@pytest.mark.slow
def test_a_flag_and_a_number_are_not_the_same_argument():
    """True == 1, and a model may tell them apart."""

    def model(flag):
        w = numpyro.sample("w", dist.Normal(1.0 if flag is True else 7.0, 0.01).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=Y[:2])

    mcmc = fs.MCMC(fs.SGLD(model, step_size=1e-6), num_warmup=0, num_samples=2, progress_bar=False)
    means = []
    for flag in (True, 1):
        mcmc.run(KEY, flag)
        means.append(float(np.mean(mcmc.get_samples()["w"])))
    assert means == pytest.approx([1.0, 7.0], abs=0.2)


@pytest.mark.slow
def test_a_model_may_have_randomness_of_its_own():
    """Keys that the model asks for itself: also where its deterministic sites are replayed."""

    def model(y):
        w = numpyro.sample("w", dist.Normal())
        shift = numpyro.deterministic("shift", 0.1 * jax.random.normal(numpyro.prng_key()))
        with numpyro.plate("data", len(y), subsample_size=2):
            numpyro.sample("y", dist.Normal(w + shift, 1.0), obs=numpyro.subsample(y, event_dim=0))

    mcmc = fs.MCMC(fs.SGHMC(model, num_steps=2), num_warmup=10, num_samples=5, progress_bar=False)
    mcmc.run(KEY, Y)
    assert mcmc.get_samples()["shift"].shape == (5,)
    assert mcmc.last_state.control.center.size == 0  # a gradient of all data would be that of one shift


def test_values_of_arrays_that_a_model_reads_are_explained():
    def model(groups, y):
        with numpyro.plate("groups", int(groups.max()) + 1):
            w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w[groups], 1.0).to_event(1), obs=y)

    mcmc = fs.MCMC(fs.SGLD(model), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(TypeError, match=r"positional argument 0 of run: the model reads its values.*partial") as raised:
        mcmc.run(KEY, np.arange(8) % 3, Y)
    assert isinstance(raised.value.__cause__, jax.errors.ConcretizationTypeError)


@pytest.mark.slow
def test_a_key_among_the_arguments():
    def model(y, key):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w + jax.random.normal(key[0]), 1.0).expand([8]).to_event(1), obs=y)

    mcmc = fs.MCMC(fs.SGLD(model, step_size=0.01), num_warmup=0, num_samples=3, progress_bar=False)
    mcmc.run(KEY, Y, jax.random.split(jax.random.key(5), 1))
    assert np.isfinite(mcmc.get_samples()["w"]).all()
    assert "y" in fs.to_arviz(mcmc)["posterior_predictive"]


# ---- what programs are compiled for --------------------------------------------------------------------------

DRIVERS = pytest.mark.parametrize("cls", some([fs.MCMC, numpyro.infer.MCMC], 1))


def level(x=None, y=None, sd=1.0):
    """A mean and, where there is an input, a slope."""
    mean = numpyro.sample("m", dist.Normal(0.0, 5.0))
    if x is not None:
        mean = mean + numpyro.sample("slope", dist.Normal(0.0, 1.0)) * x
    numpyro.sample("y", dist.Normal(mean, sd), obs=y)


def small(cls=fs.MCMC, kernel=None, *, num_warmup=4, num_samples=6, model=level, **settings):
    kernel = fs.SGHMC(model, num_steps=2, step_size=0.1) if kernel is None else kernel
    return cls(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False, **settings)


def drawn(mcmc, *args, **kwargs):
    mcmc.run(KEY, *args, **kwargs)
    return jax.tree.map(np.asarray, mcmc.get_samples())


def assert_equal(found, right):
    assert set(found) == set(right)
    jax.tree.map(np.testing.assert_array_equal, found, right)


@pytest.mark.slow
@DRIVERS
def test_none_and_an_array_are_not_the_same_argument(cls):
    """Whichever comes first, by place or by name."""
    mcmc, x = small(cls), X[:, 0]
    for args, kwargs in [
        ((None, Y), {}),
        ((x, Y), {}),
        ((None, Y), {}),
        ((), {"x": None, "y": Y}),
        ((), {"x": x, "y": Y}),
    ]:
        found = drawn(mcmc, *args, **kwargs)
        assert ("slope" in found) == any(value is x for value in (*args, *kwargs.values()))
        assert_equal(found, drawn(small(cls), *args, **kwargs))


@pytest.mark.slow
@DRIVERS
def test_changed_settings_are_those_of_the_next_run(cls):
    mcmc = small(cls)
    drawn(mcmc, y=Y)
    given = {"num_steps": 2, "step_size": 0.1}
    for name, value in [("temperature", 0.5), ("num_steps", 3), ("step_size", 0.2), ("friction", 3.0)]:
        setattr(mcmc.sampler, name, value)
        given[name] = value
        assert_equal(drawn(mcmc, y=Y), drawn(small(cls, fs.SGHMC(level, **given)), y=Y))


def test_changed_settings_are_checked_and_defaults_follow_them():
    kernel = fs.SGHMC(level)
    assert kernel.friction is None and kernel.refresh_every == 2
    kernel.step_size, kernel.num_steps = 0.1, 5
    new = fs.SGHMC(level, step_size=0.1, num_steps=5)
    assert kernel.friction == new.friction == 1.0 and kernel.refresh_every == new.refresh_every == 1
    assert repr(kernel.preconditioner) == repr(new.preconditioner)
    kernel.refresh_every = 2
    with pytest.raises(ValueError, match="refresh_every=2 must divide num_steps=5"):
        drawn(small(kernel=kernel), y=Y)
    kernel = fs.SGLD(level, step_size=0.1)
    kernel.temperature = -1.0
    with pytest.raises(ValueError, match=r"temperature=-1\.0 must be positive"):
        drawn(small(numpyro.infer.MCMC, kernel), y=Y)


@pytest.mark.slow
@DRIVERS
def test_one_kernel_serves_several_drivers_at_a_time(cls):
    """Of other lengths of warm-up and other data, in threads."""
    shared = fs.SGHMC(level, num_steps=2)
    runs = [(8, Y), (16, Y), (8, Y[:5]), (12, Y[:3])]
    found = {}

    def one(number):
        num_warmup, y = runs[number]
        found[number] = drawn(small(cls, shared, num_warmup=num_warmup), y=y)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (num_warmup, y) in enumerate(runs):
        assert_equal(found[number], drawn(small(cls, fs.SGHMC(level, num_steps=2), num_warmup=num_warmup), y=y))


@pytest.mark.slow
def test_numbers_of_draws_may_be_changed_between_runs():
    mcmc = small(num_warmup=20)
    drawn(mcmc, y=Y)
    mcmc.num_warmup, mcmc.num_samples = 4, 9
    found = drawn(mcmc, y=Y)
    assert found["m"].shape == (9,)
    assert_equal(found, drawn(small(num_warmup=4, num_samples=9), y=Y))
    mcmc.num_warmup = -1
    with pytest.raises(ValueError, match="num_warmup=-1"):
        mcmc.run(KEY, y=Y)


@pytest.mark.slow
@DRIVERS
def test_effect_handlers_around_a_run_belong_to_it(cls):
    mcmc = small(cls)
    without = drawn(mcmc, y=Y)
    with numpyro.handlers.scale(scale=0.01):
        inside = drawn(mcmc, y=Y)
    assert_equal(drawn(mcmc, y=Y), without)
    with numpyro.handlers.scale(scale=0.01):
        assert_equal(drawn(small(cls), y=Y), inside)
    assert (inside["m"] != without["m"]).all()


@DRIVERS
def test_arrays_changed_in_place_are_other_data(cls):
    mcmc, y = small(cls), np.array(Y)
    drawn(mcmc, y=y)
    y += 5.0
    assert_equal(drawn(mcmc, y=y), drawn(small(cls), y=np.array(y)))


@pytest.mark.slow
def test_runs_that_are_numpyros_know_their_arguments_too():
    """With a site left out: a flag is no number, and an array changed in place is another one."""

    def model(y, flag=1):
        numpyro.sample("other", dist.Normal())
        level(y=y if flag is True else y + 5.0)

    def means(mcmc, *calls):
        for y, flag in calls:
            mcmc.run(KEY, y, flag, extra_fields=("~z.other",))
            yield float(mcmc.get_samples()["m"].mean())

    y = np.array(Y)
    mcmc = small(model=model)
    found = list(means(mcmc, (y, True), (y, 1)))
    y += 10.0
    found += means(mcmc, (y, 1))
    calls = (np.array(Y), True), (np.array(Y), 1), (np.array(Y) + 10.0, 1)
    assert found == [next(means(small(model=model), call)) for call in calls]
    assert len(set(found)) == 3


@pytest.mark.slow
def test_an_object_among_the_arguments_may_change():
    class Data:
        y = Y

    mcmc = small(model=lambda data: level(y=data.y))
    drawn(mcmc, Data)  # a class is taken as it is
    data = Data()
    drawn(mcmc, data)
    data.y = Y + 5.0
    assert_equal(drawn(mcmc, data), drawn(small(), y=Y + 5.0))


@pytest.mark.slow
def test_zeros_of_either_sign_are_not_the_same_argument():
    mcmc = small(model=lambda shift: level(y=Y + 5.0 * np.copysign(1.0, shift)))
    means = [drawn(mcmc, zero)["m"].mean() for zero in (0.0, -0.0)]
    assert means[0] > means[1]


@pytest.mark.slow
def test_numpyros_driver_goes_on_without_a_warm_up():
    first = small(numpyro.infer.MCMC, fs.SGHMC(level, num_steps=2), num_warmup=20)
    drawn(first, y=Y)
    other = small(numpyro.infer.MCMC, fs.SGHMC(level, num_steps=2), num_warmup=0)
    other.post_warmup_state = first.post_warmup_state = first.last_state
    assert_equal(drawn(other, y=Y), drawn(first, y=Y))
    with pytest.raises(ValueError, match="NaN"):
        other.run(KEY, y=np.full_like(Y, np.nan))


@pytest.mark.parametrize(
    ("sampler", "cure"),
    [
        (level, r"fs.MCMC\(fs.SGHMC\(model\)"),
        (fs.SGHMC, r"is the class SGHMC: give it the model, MCMC\(SGHMC\(model\)"),
        (NUTS, r"MCMC\(NUTS\(model\)"),
        (fs.FVIMC(level), "FVIMC runs by itself"),
        (small(), "MCMC runs by itself"),
        (None, "must be a kernel, got None"),
    ],
)
def test_what_is_no_kernel_is_refused(sampler, cure):
    with pytest.raises(TypeError, match=cure):
        small(kernel=sampler) if sampler is not None else fs.MCMC(None, num_warmup=1, num_samples=1)


# ---- inside of other programs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_inside_of_jit_makes_the_same_draws_and_leaves_nothing_behind(watched):
    """Also of data and numbers that are traced, and with a bar, which nobody would see."""
    mcmc = small()
    mcmc.progress_bar = True
    plain = drawn(small(), y=Y, sd=2.0)

    def draws(key, y, sd):
        mcmc.run(key, y=y, sd=sd)
        return mcmc.get_samples()

    with jax.checking_leaks():
        inside = jax.jit(lambda key: (small().run(key, y=Y), key)[1])(KEY)
    assert inside.shape == KEY.shape
    for _ in range(2):
        found = jax.jit(draws)(KEY, Y, 2.0)
        np.testing.assert_allclose(found["m"], plain["m"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(drawn(mcmc, y=Y, sd=2.0)["m"], plain["m"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_more_chains_than_devices_after_a_run_are_run_one_by_one():
    mcmc = fs.MCMC(fs.SGHMC(linear(), num_steps=2), num_warmup=5, num_samples=6, num_chains=1, progress_bar=False)
    mcmc.run(KEY, X, Y)
    mcmc.num_chains = 2 * jax.local_device_count()
    with pytest.warns(UserWarning, match="There are not enough devices to run parallel chains"):
        mcmc.run(KEY, X, Y)
    assert mcmc.get_samples(group_by_chain=True)["w"].shape[:2] == (mcmc.num_chains, 6)


@pytest.mark.slow
@pytest.mark.parametrize("closed_over", [False, True])
def test_runs_may_be_vectorized_over_keys_and_data(closed_over):
    """Without a warning of buffers that could not be used again, where the model closes over its data too."""
    keys, data = jax.random.split(KEY, 2), np.stack([Y, Y + 5.0])

    def draws(key, y):
        mcmc = small(model=(lambda: level(y=y)) if closed_over else level, num_chains=2, chain_method="vectorized")
        mcmc.run(key, **({} if closed_over else {"y": y}))
        return mcmc.get_samples()["m"]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = jax.vmap(draws)(keys, data)
        both = jax.vmap(lambda y: draws(KEY, y))(data)
    for number in range(2):
        np.testing.assert_allclose(found[number], draws(keys[number], data[number]), rtol=1e-4, atol=1e-4)
    assert both.shape == (2, 12) and both[1].mean() > both[0].mean()


def test_inside_of_jit_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint= is not for runs inside of jax\.jit"):
        jax.jit(lambda key: small(checkpoint=tmp_path).run(key, y=Y))(KEY)


# ---- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.fixture
def press(monkeypatch):
    """Presses Ctrl-C in the part that makes a draw of this number."""
    monkeypatch.setattr("numpyro_fspace.mcmc.progress.INTERVAL", 0.0)  # parts of one draw
    update = Progress.update

    def press_at(number):
        def updated(self, done, *rest):
            update(self, done, *rest)
            if done == number:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Progress, "update", updated)

    yield press_at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(mcmc):
    with pytest.raises(KeyboardInterrupt):
        mcmc.run(KEY, y=Y)
    return mcmc.get_samples(group_by_chain=True)["m"]


@pytest.mark.parametrize("thinning", some([1, 2], 1))
def test_ctrl_c_keeps_the_draws_without_a_bar(press, thinning):
    whole = drawn(small(num_samples=20, thinning=thinning), y=Y)["m"]
    press(11)
    found = interrupted(small(num_samples=20, thinning=thinning))
    np.testing.assert_array_equal(found[0], whole[: 7 // thinning])


@pytest.mark.slow
def test_ctrl_c_keeps_the_chains_that_were_made(press):
    """Of chains that run one after another; of the first what there is."""
    settings = {"num_chains": 3, "chain_method": "sequential", "num_samples": 20}
    mcmc = small(**settings)
    mcmc.run(KEY, y=Y)
    whole = mcmc.get_samples(group_by_chain=True)["m"]
    press(9)
    np.testing.assert_array_equal(interrupted(small(**settings)), whole[:1, :5])
    for num_whole in (1, 2):
        calls = []

        def later(self, done, *rest, calls=calls, num=24 * num_whole + 3):
            calls.append(done)
            if len(calls) == num:
                signal.raise_signal(signal.SIGINT)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Progress, "next_stop", lambda self, calls=calls: len(calls) % 24 + 1)
            patch.setattr(Progress, "update", later)
            mcmc = small(**settings)
            np.testing.assert_array_equal(interrupted(mcmc), whole[:num_whole])
        assert mcmc.last_state.i.shape == (num_whole,)
        np.testing.assert_array_equal(fs.to_arviz(mcmc, log_lik=False)["posterior"]["m"], whole[:num_whole])


@pytest.mark.slow
@pytest.mark.parametrize("thinning", [1, 3])
def test_ctrl_c_writes_what_was_drawn_and_the_same_call_goes_on(press, tmp_path, thinning):
    """In the middle of a part, in warm-up and after it."""
    settings = {"num_samples": 20, "thinning": thinning}
    whole = drawn(small(**settings), y=Y)["m"]
    settings |= {"checkpoint": tmp_path, "checkpoint_every": 10}
    press(3)
    with pytest.raises(KeyboardInterrupt):
        small(**settings).run(KEY, y=Y)
    press(16)
    first = 4 + 20 % thinning
    np.testing.assert_array_equal(interrupted(small(**settings))[0], whole[: (16 - first) // thinning])
    press(-1)
    mcmc = small(**settings)
    np.testing.assert_array_equal(drawn(mcmc, y=Y)["m"], whole)


def test_a_long_run_without_a_bar_ends_within_seconds():
    """By a signal from outside, as of a terminal; a second one would not wait for the end of the part."""
    mcmc = small(num_samples=3_000_000)
    pressed = []

    def press():
        while mcmc.last_state is None or mcmc.last_state.i < 100:
            time.sleep(0.05)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    found = interrupted(mcmc)
    assert time.monotonic() - pressed[0] < 10.0
    assert 0 < found.size == int(mcmc.last_state.i) - 4 < 3_000_000  # the state is known while the run goes


def test_draws_of_a_run_before_are_none_of_one_that_failed(press):
    mcmc = small()
    drawn(mcmc, y=Y)
    press(1)
    with pytest.raises(KeyboardInterrupt):
        mcmc.run(KEY, y=Y + 1.0)
    with pytest.raises(ValueError, match="no draws yet"):
        fs.predict(mcmc, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("num_samples", 30, marks=pytest.mark.slow),
        pytest.param("num_chains", 3, marks=pytest.mark.slow),
        ("num_chains", 1),
        pytest.param("thinning", 2, marks=pytest.mark.slow),
    ],
)
def test_settings_of_a_vectorized_nuts_may_change_between_runs(name, value):
    def mu(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0.0, 5.0)), 1.0), obs=y)

    settings = {"num_warmup": 20, "num_samples": 20, "num_chains": 2, "thinning": 1}
    mcmc, fresh = (
        fs.MCMC(NUTS(mu), chain_method="vectorized", progress_bar=False, **kept)
        for kept in (settings, settings | {name: value})
    )
    mcmc.run(KEY, Y)
    setattr(mcmc, name, value)
    for one in (mcmc, fresh):
        one.run(KEY, Y)
    np.testing.assert_array_equal(*(one.get_samples(group_by_chain=True)["mu"] for one in (mcmc, fresh)))


def test_an_unknown_chain_method_is_refused():
    mcmc = make()
    mcmc.chain_method = "series"
    with pytest.raises(ValueError, match="chain_method='series' is unknown; choose one of 'parallel'"):
        mcmc.run(KEY, X, Y)


@pytest.mark.slow
def test_a_state_of_nuts_has_its_own_number_of_chains():
    def mu(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0.0, 5.0)), 1.0), obs=y)

    settings = {"num_warmup": 20, "num_samples": 20, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(NUTS(mu), num_chains=2, **settings)
    mcmc.run(KEY, Y)
    mcmc.post_warmup_state, mcmc.num_chains = mcmc.last_state, 3
    with pytest.raises(ValueError, match="post_warmup_state is that of 2 chains, and num_chains=3"):
        mcmc.run(KEY, Y)
    mcmc.num_chains = 1
    with pytest.raises(ValueError, match="post_warmup_state is that of 2 chains, and num_chains=1"):
        mcmc.run(mcmc.post_warmup_state.rng_key, Y)  # whose shape is not the mistake


@pytest.mark.parametrize("state", ["warm", 3, {"z": 1.0}])
def test_what_is_no_state_is_refused(state):
    mcmc = make()
    mcmc.post_warmup_state = state
    with pytest.raises(TypeError, match="post_warmup_state must be the last_state of an MCMC run, got"):
        mcmc.run(KEY, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [fs.fHMC, NUTS])
def test_numbers_of_draws_may_change_under_numpyros_kernels(sampler):
    """They adapt in the new warm-up, and not in the draws that are kept; a fresh driver has the same draws."""
    fields = ("adapt_state.step_size",)
    settings = {"num_samples": 40, "progress_bar": False}
    mcmc = fs.MCMC(sampler(linear(POINTS)), num_warmup=100, **settings)
    mcmc.run(KEY, X, Y, extra_fields=fields)
    mcmc.num_warmup = 30
    mcmc.run(KEY, X, Y, extra_fields=fields)
    assert len(np.unique(mcmc.get_extra_fields()[fields[0]])) == 1
    fresh = fs.MCMC(sampler(linear(POINTS)), num_warmup=30, **settings)
    fresh.run(KEY, X, Y)
    np.testing.assert_array_equal(mcmc.get_samples()["w"], fresh.get_samples()["w"])


def grouped(group, y=None):
    with numpyro.plate("groups", int(max(group)) + 1):
        w = numpyro.sample("w", dist.Normal())
    numpyro.sample("y", dist.Normal(w[np.asarray(group)], 0.5).to_event(1), obs=y)


@pytest.mark.slow
def test_a_state_of_data_with_other_sizes_is_refused():
    """NumPyro would broadcast it."""
    settings = {"num_warmup": 5, "num_samples": 5, "progress_bar": False}
    first = fs.MCMC(fs.SGHMC(grouped, step_size=0.1), **settings)
    first.run(KEY, (0, 0, 0), np.zeros(3))
    second = fs.MCMC(fs.SGHMC(grouped, step_size=0.1), **settings)
    second.post_warmup_state = first.last_state
    with pytest.raises(ValueError, match=r"its site 'w' has shape \(1,\), and that of this model \(3,\)"):
        second.run(KEY, (0, 1, 2), np.zeros(3))


@pytest.mark.slow
def test_a_run_that_goes_on_in_a_driver_with_a_longer_warm_up_has_draws():
    settings = {"num_samples": 10, "progress_bar": False}
    first = numpyro.infer.MCMC(NUTS(linear(POINTS)), num_warmup=10, **settings)
    first.run(KEY, X, Y)
    second = numpyro.infer.MCMC(NUTS(linear(POINTS)), num_warmup=1000, **settings)
    second.post_warmup_state = first.last_state
    second.run(KEY, X, Y)
    assert fs.predict(second, KEY, X)["f"].shape == (10, 8)
    only_warm = fs.MCMC(fs.SGHMC(linear(POINTS)), num_warmup=10, **settings)
    only_warm.warmup(KEY, X, Y)
    with pytest.raises(ValueError, match="has no draws yet"):
        fs.predict(only_warm, KEY, X)


# ---- runs that continue on other data ------------------------------------------------------------------------


@pytest.mark.slow
def test_hmc_continues_on_data_that_were_changed_in_place():
    y = np.array(Y)
    mcmc = fs.MCMC(NUTS(linear(POINTS)), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(KEY, X, y)
    mcmc.post_warmup_state = mcmc.last_state
    y *= -1.0
    mcmc.run(KEY, X, y)
    assert len(np.unique(mcmc.get_samples()["w"], axis=0)) > 80


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.fHMC, NUTS])
def test_hmc_continues_on_other_data(kernel):
    """Its state holds the potential and gradient of the data before, by which every proposal would look worse."""
    mcmc = fs.MCMC(kernel(linear(POINTS)), num_warmup=200, num_samples=300, progress_bar=False)
    mcmc.run(KEY, X, Y)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(KEY, X, -Y)
    right = fs.MCMC(NUTS(linear(POINTS)), num_warmup=200, num_samples=300, progress_bar=False)
    right.run(KEY, X, -Y)
    draws, expected = (np.asarray(one.get_samples()["w"]) for one in (mcmc, right))
    assert len(np.unique(draws, axis=0)) > 200
    np.testing.assert_allclose(draws.mean(0), expected.mean(0), atol=0.5 * expected.std(0).max())


@pytest.mark.slow
def test_hmc_of_much_data_continues_on_other_data():
    """A change of the energy by a hundred is far more than rounding, however large the energy is."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal())
        numpyro.sample("y", dist.Normal(mean, 0.1).expand([len(y)]).to_event(1), obs=y)

    y = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    other = y.copy()
    other[0] += 3.0
    mcmc = fs.MCMC(NUTS(model), num_warmup=100, num_samples=50, progress_bar=False)
    mcmc.run(KEY, y)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(KEY, other)
    assert len(np.unique(mcmc.get_samples()["mean"])) > 40


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_hmc_continues_a_model_that_draws_its_parameters(num_chains):
    def model(y):
        scale = numpyro.param("scale", lambda key: jnp.exp(jax.random.normal(key)))
        numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal()), scale), obs=y)

    settings = {"num_chains": num_chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(NUTS(model), num_warmup=20, num_samples=20, **settings)
    mcmc.warmup(KEY, Y)
    mcmc.run(KEY, Y)
    assert mcmc.get_samples()["mean"].shape == (20 * num_chains,)


@pytest.mark.slow
def test_hmc_continues_in_another_object_on_other_data():
    first, second = (fs.MCMC(NUTS(level), num_warmup=100, num_samples=200, progress_bar=False) for _ in range(2))
    drawn(first, y=Y)
    second.post_warmup_state = first.last_state
    assert abs(drawn(second, y=Y + 5.0)["m"].mean() - np.mean(Y) - 5.0) < 0.3


@pytest.mark.slow
def test_hmc_continues_on_the_same_data_with_its_own_numbers():
    def draws(mcmc):
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(KEY, X, Y)
        return mcmc.get_samples()["w"]

    found = []
    for cls in (fs.MCMC, numpyro.infer.MCMC):
        mcmc = cls(NUTS(linear(POINTS)), num_warmup=50, num_samples=50, progress_bar=False)
        mcmc.run(KEY, X, Y)
        found.append(draws(mcmc))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_numpyros_driver_continues_on_other_data_as_ours_does():
    """The control variate, the averages and the kernel's settings are those of the new run."""
    found = []
    for cls in (fs.MCMC, numpyro.infer.MCMC):
        kernel = fs.SGHMC(linear(batch=4), step_size=0.05, num_steps=3, control_variates=50)
        mcmc = cls(kernel, num_warmup=30, num_samples=20, progress_bar=False)
        mcmc.run(KEY, X, Y)
        mcmc.post_warmup_state = mcmc.last_state
        kernel.step_size = 0.04
        mcmc.run(KEY, X, Y + 3.0)
        state = mcmc.last_state
        assert int(state.num_averaged) == 20 and float(state.step_size) == pytest.approx(0.04)
        found.append(mcmc.get_samples()["w"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chains", [{}, {"num_chains": 2, "chain_method": "sequential"}], ids=["one", "two"])
@pytest.mark.parametrize("kernel", [fs.SGHMC, fs.SGLD])
def test_a_state_of_another_model_is_named(kernel, chains):
    """At the first draw, which costs nothing; and at the end the doubt about the steps names the cause too."""

    def made(noise):
        def model(y):
            numpyro.sample("y", dist.Normal(numpyro.sample("m", dist.Normal()), noise), obs=y)

        return fs.MCMC(kernel(model), num_warmup=60, num_samples=20, progress_bar=False, **chains)

    first, same, other = made(1.0), made(1.0), made(0.001)
    first.run(KEY, Y)
    same.post_warmup_state = other.post_warmup_state = first.last_state
    same.run(KEY, Y)  # without a warning
    with pytest.warns(RuntimeWarning, match="not a state of this model with this data: its potential") as found:
        other.run(KEY, Y)
    assert any("another model or data, warm up again" in str(one.message) for one in found)


@pytest.mark.slow
@DRIVERS
def test_a_run_inside_of_jit_leaves_the_warm_up(cls):
    mcmc, plain = small(cls), small(cls)
    for one in (mcmc, plain):
        one.warmup(KEY, y=Y)
    before = mcmc.post_warmup_state
    jax.jit(lambda key: (mcmc.run(key, y=Y), mcmc.get_samples()["m"])[1])(KEY)
    assert mcmc.post_warmup_state is before
    assert_equal(drawn(mcmc, y=Y), drawn(plain, y=Y))


@pytest.mark.parametrize(
    "wrong", [{"num": 3}, pytest.param({"init_params": {"q": 1.0}}, marks=pytest.mark.slow)], ids=["argument", "start"]
)
def test_a_refused_call_keeps_the_draws_before(wrong):
    mcmc = small()
    draws = drawn(mcmc, y=Y)
    with pytest.raises((TypeError, ValueError)):
        mcmc.run(KEY, y=Y, **wrong)
    assert_equal(mcmc.get_samples(), draws)


@pytest.mark.slow
@pytest.mark.parametrize("key", [jax.random.split(KEY, 1), jax.random.split(jax.random.PRNGKey(3), 1)])
def test_an_array_of_one_key_is_one_key(key):
    found = []
    for given in (key, key[0]):
        mcmc = make(num_chains=1)
        mcmc.run(given, X, Y)
        found.append(mcmc.get_samples()["w"])
    assert found[0].shape == (34, 2)
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_a_traced_temperature_is_none_of_the_models_arguments():
    """Of a model without data but one observation, at a quarter of the temperature half the standard deviation."""

    def sd(temperature):
        kernel = fs.SGHMC(level, temperature=temperature, step_size=0.1, num_steps=5, marginalize=None)
        mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=60, progress_bar=False)
        mcmc.run(KEY, y=Y)
        return jnp.std(mcmc.get_samples()["m"])

    wide, narrow = jax.vmap(sd)(jnp.array([1.0, 0.25]))
    assert float(narrow / wide) == pytest.approx(0.5, rel=0.3)


def test_an_integrator_that_would_ignore_the_data_is_refused():
    with pytest.raises(ValueError, match="num_steps=1 with integrator='euler' and resample_momentum=True"):
        fs.SGHMC(level, integrator="euler", resample_momentum=True, num_steps=1, step_size=0.1)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: fs.SGLD(level, step_size=0.01), marks=pytest.mark.slow),
        lambda: fs.SGHMC(level, step_size=0.01, preconditioner=fs.preconditioners.rmsprop()),
    ],
    ids=["sampler", "preconditioner"],
)
def test_a_state_of_another_sampler_is_refused(other):
    first = small(kernel=fs.SGHMC(level, step_size=0.01, preconditioner=fs.preconditioners.prior_scale()))
    drawn(first, y=Y)
    second = small(kernel=other())
    second.post_warmup_state = first.last_state
    with pytest.raises(ValueError, match="comes from another sampler or preconditioner"):
        second.run(KEY, y=Y)


def test_initial_values_beside_a_state_are_said_to_be_left_out():
    mcmc = small()
    mcmc.warmup(KEY, y=Y)
    with pytest.warns(RuntimeWarning, match="init_params is not used: the run continues from post_warmup_state"):
        mcmc.run(KEY, y=Y, init_params={"m": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
def test_initial_values_may_be_lists(chain_method):
    mcmc = make(num_warmup=0, num_samples=1, chain_method=chain_method, options=PLAIN | {"step_size": 1e-12})
    mcmc.run(KEY, X, Y, init_params={"w": [[1.0, 2.0], [3.0, 4.0]]})
    np.testing.assert_allclose(mcmc.get_samples()["w"], [[1.0, 2.0], [3.0, 4.0]], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.05, 4.0])
def test_draws_of_mclmc_at_another_temperature(temperature):
    """Those of a normal distribution have the standard deviations times the root of the temperature."""
    sd = np.array([0.2, 0.5, 1.0, 2.0, 3.0])

    def model(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1e3).expand([5]).to_event(1))
        numpyro.sample("y", dist.Normal(w, sd).to_event(1), obs=np.zeros(5))

    kernel = fs.MCLMC(model, temperature=temperature, metropolis=True)
    mcmc = fs.MCMC(kernel, num_warmup=400, num_samples=2000, progress_bar=False)
    mcmc.run(KEY)
    ratio = np.std(mcmc.get_samples()["w"], axis=0) / (sd * temperature**0.5)
    assert ratio.min() > 0.8 and ratio.max() < 1.2
