"""A thermostat with the gradients' noise in it: what it leaves invariant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import some

from numpyro_fspace.sgmcmc import sghmc
from numpyro_fspace.sgmcmc.gradient_noise import FRICTION_RATIO, GradientNoise

TEMPERATURE = 1.7
NUM_CHAINS = 4000


def variances(gradient_noise, step_size, variance, refresh_every, resample=False):
    """Of both coordinates of 4000 chains, over the target's: U = |w|²/2, noise along (3, 4)/5 and across it."""
    axes = jnp.array([[0.6, 0.8], [-0.8, 0.6]])

    def potential(w, key):
        return 0.5 * jnp.sum(w**2) + jnp.sqrt(variance) * jax.random.normal(key) * (axes[0] @ w)

    kernel = sghmc.build_kernel()

    @jax.jit
    @jax.vmap
    def run(key):
        def draw(state, key):
            rest = {"num_steps": 20, "temperature": TEMPERATURE, "resample_momentum": resample}
            rest |= {"refresh_every": refresh_every, "gradient_noise": gradient_noise}
            return kernel(key, state, potential, step_size, **rest)[0], None

        key, key_start = jax.random.split(key)
        start = sghmc.init(jnp.sqrt(TEMPERATURE) * jax.random.normal(key_start, (2,)), key_start)
        return jax.lax.scan(draw, start, jax.random.split(key, 20))[0].position

    return (np.asarray(run(jax.random.split(jax.random.key(3), NUM_CHAINS))) @ axes.T).var(0) / TEMPERATURE


@pytest.mark.parametrize("refresh_every", some([1, 2], 1))
@pytest.mark.parametrize(
    ("step_size", "kick"),
    [(0.3, 0.3), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0.3, 0.02), (0.1, 0.15)))],
)
def test_known_noise_leaves_the_law_as_it_is(step_size, kick, refresh_every):
    """``kick`` = ε² v / T: within 7 % (three standard errors); as hot as the formula says without."""
    variance = kick * TEMPERATURE / step_size**2
    known = GradientNoise(jnp.array([[0.6, 0.8]]), jnp.array([variance]))
    along, across = variances(known, step_size, variance, refresh_every)
    assert abs(along - 1.0) < 0.07 and abs(across - 1.0) < 0.07
    along, across = variances(None, step_size, variance, refresh_every)
    assert along > 1.0 + 0.8 * 0.5 * kick / step_size and abs(across - 1.0) < 0.07


def test_a_fresh_momentum_leaves_room_for_the_noise():
    known = GradientNoise(jnp.array([[0.6, 0.8]]), jnp.array([5.0]))
    along, across = variances(known, 0.2, 5.0, 2, resample=True)
    assert abs(along - 1.0) < 0.07 and abs(across - 1.0) < 0.07


def test_no_noise_is_no_correction():
    known = GradientNoise(jnp.eye(3)[:2], jnp.zeros(2))
    p, xi = jnp.array([1.0, -2.0, 3.0]), jnp.array([0.3, 0.2, -1.0])
    for friction in (0.5, jnp.inf):
        np.testing.assert_allclose(known.correction(p, xi, 0.1, friction, 2.0, 2), 0.0, atol=1e-6)


def test_rows_heat_one_friction_as_they_heat_the_directions_own():
    known = GradientNoise(jnp.eye(3)[:2], jnp.array([40.0, 1.0]))
    own = 0.5 * FRICTION_RATIO * 0.1 * 40.0 / 2.0
    damped = known.damped(jnp.ones((1, 3)), 0.1, 1.0, 2.0)
    np.testing.assert_allclose(damped, [[own**-0.5, 1.0, 1.0]], rtol=1e-6)
