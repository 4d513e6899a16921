"""What every pure kernel promises: keys used once, jit, vmap, scan, no second compilation, dtypes, guard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import quick_jit
from support.tiers import some

from numpyro_fspace.sgmcmc import mclmc, sghmc, sgld
from numpyro_fspace.sgmcmc.preconditioners import Diagonal, Identity

KERNELS = ["sgld", "baoab", "baoab, resampled", "euler, resampled", "mclmc"]


def make(name, potential_fn, step_size=0.1, num_steps=4, **options):
    """``(init(position, key), step(key, state))`` of an algorithm in BlackJAX's form."""
    if name == "sgld":
        return sgld.as_top_level_api(potential_fn, step_size, num_steps=num_steps, **options)
    if name == "mclmc":
        return mclmc.as_top_level_api(potential_fn, step_size, num_steps=num_steps, **options)
    integrator, resample = name.split(",")[0], "resampled" in name
    return sghmc.as_top_level_api(
        potential_fn, step_size, num_steps=num_steps, integrator=integrator, resample_momentum=resample, **options
    )


def noisy(position, key):
    """A quadratic with a random tilt: a potential that uses its key."""
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(position)])
    return 0.5 * jnp.sum(flat**2) + flat[0] * jax.random.normal(key, (), flat.dtype)


def tree(dtype=None):
    return {"a": jnp.ones((2, 2), dtype), "b": [jnp.zeros((), dtype), -jnp.ones(3, dtype)]}


@pytest.mark.parametrize("name", KERNELS)
def test_no_key_is_used_twice_and_nothing_is_compiled_twice(key, name):
    """JAX's own checker follows every key; a step keeps the type of the state, so the next finds its program."""
    algorithm = make(name, noisy)
    key_init, *keys = jax.random.split(key, 4)
    step = quick_jit(algorithm.step)
    with jax.debug_key_reuse(True):
        first = state = algorithm.init(tree(), key_init)
        for one in keys:
            state, info = step(one, state)
    assert step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, first)
    assert all(leaf.shape == () for leaf in jax.tree.leaves(info))


@pytest.mark.slow
def test_a_kernel_and_its_form_for_blackjax_have_the_documented_defaults(key):
    potential, start, key_init = (lambda w, k: 0.5 * jnp.sum(w**2)), jnp.ones(3), jax.random.fold_in(key, 1)
    for module, settings in (
        (sgld, {"num_steps": 1, "temperature": 1.0}),
        (sghmc, {"num_steps": 10, "temperature": 1.0, "friction": 1.0, "resample_momentum": False, "refresh_every": 1}),
        (mclmc, {"num_steps": 10, "temperature": 1.0, "friction": 1.0, "refresh_every": 1}),
    ):
        state = module.as_top_level_api(potential, 0.1).init(start, key_init)
        kernel = module.build_kernel()
        state_given, info_given = kernel(key, state, potential, 0.1, **settings, metric=Identity())
        forms = [kernel(key, state, potential, 0.1)]
        forms += [module.as_top_level_api(potential, 0.1, **given).step(key, state) for given in ({}, settings)]
        for found, info in forms:
            np.testing.assert_array_equal(found.position, state_given.position)
            assert info.temperature == info_given.temperature and found.count == settings["num_steps"]


def test_the_checker_of_keys_sees_a_reused_key(key):
    def reusing(position, k):
        return noisy(position, k) + noisy(position, k)

    algorithm = make("sgld", reusing)
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        quick_jit(algorithm.step)(key, algorithm.init(tree()))


@pytest.mark.parametrize("name", some(["sgld", "baoab, resampled"], 1))
def test_scan_and_vmap_agree_with_single_steps(key, name):
    algorithm = make(name, noisy)
    key_init, *keys = jax.random.split(key, 4)
    state = algorithm.init(tree(), key_init)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    @quick_jit
    def chains(states, keys):
        return jax.lax.scan(lambda s, k: jax.vmap(algorithm.step)(k, s), states, keys)[0]

    twice = jnp.stack([jnp.stack([one, one]) for one in keys])
    out = chains(states, twice)
    step = quick_jit(algorithm.step)
    for one in keys:
        state, _ = step(one, state)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out, both)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sgld", "baoab", "euler, resampled"])
@pytest.mark.usefixtures("x64")
def test_the_position_keeps_its_dtype(key, name, dtype):
    """Also float32 positions while float64 is enabled, with a schedule in float64."""
    algorithm = make(name, noisy, lambda count: 0.1 / (1.0 + count.astype(np.float64)))
    state = algorithm.init(tree(dtype), key)
    out, info = jax.eval_shape(algorithm.step, key, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert info.step_size.dtype == info.temperature.dtype == dtype


@pytest.mark.parametrize("name", KERNELS)
def test_the_temperature_reported_is_that_of_the_noise(key, name):
    """Without forces, over 40 000 numbers and four steps: 2 % are at least five standard deviations."""
    algorithm = make(name, lambda w, k: 0.0 * jnp.sum(w), 0.01, temperature=2.5, metric=Diagonal(jnp.array(3.0)))
    state = algorithm.init(jnp.zeros(40_000), key)
    _, info = quick_jit(algorithm.step)(jax.random.fold_in(key, 1), state)
    np.testing.assert_allclose(info.temperature, 2.5, rtol=0.02)
    if name == "sgld":  # a step of length zero has no temperature, and must not divide by it
        still = make(name, lambda w, k: 0.0 * jnp.sum(w), 0.0)
        _, info = quick_jit(still.step)(key, still.init(jnp.zeros(2), key))
        assert info.temperature == 0.0 and not info.is_diverging


@pytest.mark.parametrize("name", ["sgld", "baoab"])
def test_schedule_reads_the_count_of_gradient_steps(key, name):
    """On U = -w, without noise or friction, the position tells which step sizes were used."""
    options = {"temperature": 0.0} if name == "sgld" else {"temperature": 0.0, "friction": 0.0}
    algorithm = make(name, lambda w, k: -jnp.sum(w), lambda t: 0.5**t, num_steps=3, **options)
    state, step = algorithm.init(jnp.zeros(1), key), quick_jit(algorithm.step)
    for k in jax.random.split(key, 2):
        state, info = step(k, state)
    assert int(state.count) == 6
    assert float(info.step_size) == 0.5**5
    epsilons = 0.5 ** np.arange(6)
    force_so_far = np.cumsum(epsilons) - epsilons
    expected = np.sum(epsilons) if name == "sgld" else np.sum(epsilons * force_so_far)
    np.testing.assert_allclose(state.position, [expected], rtol=1e-6)


@pytest.mark.parametrize("name", ["sgld", "baoab", "euler, resampled"])
def test_aux_that_is_not_finite_undoes_nothing(key, name):
    algorithm = make(name, lambda w, k: (0.5 * jnp.sum(w**2), {"missing": jnp.array(jnp.nan)}), has_aux=True)
    state = algorithm.init(jnp.array([1.0, 2.0]), key)
    out, info = quick_jit(algorithm.step)(key, state)
    assert not info.is_diverging and (out.position != state.position).all() and jnp.isnan(info.aux["missing"])


@pytest.mark.parametrize("name", ["sgld", "baoab", "euler, resampled"])
def test_a_transition_that_leaves_the_finite_numbers_is_undone(key, name):
    """Only where it did: of three chains, NaN and infinity stop two. ``aux`` belongs to the potential reported."""

    def potential_fn(w, k):
        factor = jnp.where(w[0] > 200.0, jnp.inf, jnp.where(w[0] > 50.0, jnp.nan, 1.0))
        return 0.5 * jnp.sum(w**2) * factor, {"w": w}

    algorithm = make(name, potential_fn, metric=Diagonal(jnp.full(2, 0.5)), has_aux=True)
    starts = jnp.array([[100.0, 101.0], [300.0, 2.0], [1.0, 2.0]])
    keys = jax.random.split(key, (2, 3))
    states = jax.vmap(algorithm.init)(starts, keys[0])
    out, info = quick_jit(jax.vmap(algorithm.step))(keys[1], states)
    assert info.is_diverging.tolist() == [True, True, False]
    np.testing.assert_array_equal(out.position[:2], starts[:2])
    assert (out.position[2] != starts[2]).all()
    assert out.count.tolist() == [4, 4, 4]
    if name != "sgld":  # a fresh, finite momentum: the next try differs
        assert jnp.isfinite(out.momentum).all()
        assert (out.momentum[:2] != states.momentum[:2]).all()
    last = info.aux["w"][2]
    np.testing.assert_allclose(info.potential_energy[2], 0.5 * jnp.sum(last**2), rtol=1e-6)
    if name == "sgld":  # whose last gradient belongs to the place before
        np.testing.assert_array_equal(last, out.position[2])
    else:
        np.testing.assert_allclose(info.gradient_norm[2], jnp.linalg.norm(last), rtol=1e-6)


def test_a_step_size_beyond_stability_is_reported(key):
    """Finite overflow counts too: the kinetic temperature explodes before the numbers do."""
    algorithm = make("baoab", lambda w, k: 0.5 * jnp.sum(w**2), 5.0, num_steps=8)
    state = algorithm.init(jnp.ones(3), key)
    out, info = quick_jit(algorithm.step)(key, state)
    assert bool(info.is_diverging)
    np.testing.assert_array_equal(out.position, state.position)


def test_bad_options_are_refused(key):
    with pytest.raises(ValueError, match="integrator='leap' is unknown; choose one of baoab, euler"):
        sghmc.build_kernel(integrator="leap")
    algorithm = make("baoab", noisy, num_steps=4, refresh_every=3)
    with pytest.raises(ValueError, match="refresh_every=3 must divide num_steps=4"):
        algorithm.step(key, algorithm.init(tree(), key))


def test_the_energy_of_sgld_is_that_of_a_minibatch_of_its_own():
    """Its mean is that of all data. With the minibatch of the last gradient it would be less by ε tr V = 1.

    The mean over 20 000 draws has a standard error of 0.1.
    """

    def potential(w, key):
        return 0.5 * w**2 + 10.0 * jax.random.normal(key) * w

    kernel = sgld.build_kernel()

    def draw(state, key):
        state, info = kernel(key, state, potential, 0.01)
        return state, info.potential_energy - 0.5 * state.position**2

    keys = jax.random.split(jax.random.key(0), 20_000)
    _, noise = jax.jit(lambda keys: jax.lax.scan(draw, sgld.init(jnp.zeros(())), keys))(keys)
    assert abs(float(noise.mean())) < 0.45


def test_a_high_temperature_does_not_diverge():
    def potential(w, key):
        return 0.5 * jnp.sum(w**2)

    kernel = sghmc.build_kernel()

    def draw(state, key):
        state, info = kernel(key, state, potential, 0.5, num_steps=10, temperature=2e4, friction=1.0)
        return state, (state.position, info.is_diverging)

    keys = jax.random.split(jax.random.key(0), 1000)
    start = sghmc.init(jnp.zeros(20), jax.random.key(1), temperature=2e4)
    _, (positions, diverging) = jax.jit(lambda keys: jax.lax.scan(draw, start, keys))(keys)
    assert not diverging.any()
    assert float(positions[100:].std()) == pytest.approx(2e4**0.5, rel=0.1)
