"""Level 1: the exact stationary law on a Gaussian, without Monte Carlo, and its order in the step size.

Smallest error seen in 2nd moments: BAOAB off by 1e-10 at any step size; the others' extrapolated limit by 1e-3.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.broken import COMMON, HAMILTONIAN, HEALTHY, REFRESH, Faults
from support.laws import (
    Settings,
    Unstable,
    extrapolate,
    relative_error,
    slope,
    stationary,
)
from support.targets import correlated_gaussian, gaussian_terms

pytestmark = pytest.mark.usefixtures("x64")

TARGET = correlated_gaussian()
IDENTITY, DIAGONAL = np.ones(3), np.array([0.4, 1.0, 1.5])
HALVINGS = 0.5 ** np.arange(4)


def law(name, num_steps, settings, faults=HEALTHY, refresh_every=1):
    """Stationary mean and covariance of the position."""
    terms = gaussian_terms(name, num_steps, refresh_every)
    mean, covariance = stationary(*terms(TARGET.quadratics(), settings, faults))
    return mean[:3], covariance[:3, :3]


def limits(name, num_steps, settings, faults=HEALTHY):
    """Mean and covariance as ε → 0, and the order of the covariance's error."""
    laws = [law(name, num_steps, settings._replace(epsilon=e * settings.epsilon), faults) for e in HALVINGS]
    means, covariances = (np.stack(v) for v in zip(*laws, strict=True))
    exact = settings.temperature * TARGET.covariance
    return extrapolate(means), extrapolate(covariances), slope([relative_error(c, exact) for c in covariances])


def is_rejected(check, *args):
    """Whether a check fails, or the chain has no law at all."""
    try:
        check(*args)
    except (AssertionError, Unstable):
        return True
    return False


# ---- the harness -----------------------------------------------------------------------------------


def test_transitions_are_affine():
    """A x + B ξ + c is the transition, so its law is all there is to know."""
    terms, rng = gaussian_terms("baoab", 4, 2), np.random.default_rng(0)
    state, noise = rng.normal(size=terms.run.num_state), rng.normal(size=terms.run.num_noise)
    settings = Settings(0.05, 2.0, 0.5, DIAGONAL)
    a, b, c = (v[0] for v in terms(TARGET.quadratics(), settings))
    a_there, b_there, out = (v[0] for v in terms(TARGET.quadratics(), settings, state=state, noise=noise))
    np.testing.assert_allclose(a_there, a, atol=1e-13)
    np.testing.assert_allclose(b_there, b, atol=1e-13)
    np.testing.assert_allclose(a @ state + b @ noise + c, out, atol=1e-13)


# ---- SGLD: order one ---------------------------------------------------------------------------------


def check_sgld(settings, faults=HEALTHY):
    """At every ε the covariance in u is Hᵤ⁻¹ (I - εHᵤ/2)⁻¹ T, Hᵤ = Sᵀ H S; hence the limit, and the order 1."""
    s, t = settings.scale, settings.temperature
    mean, covariance = law("sgld", 1, settings, faults)
    h = s[:, None] * TARGET.precision * s
    expected = t * np.linalg.inv(h @ (np.eye(3) - 0.5 * settings.epsilon * h))
    assert relative_error(mean, TARGET.mean) < 1e-10
    assert relative_error(covariance, s[:, None] * expected * s) < 1e-10
    mean, covariance, order = limits("sgld", 1, settings, faults)
    assert relative_error(covariance, t * TARGET.covariance) < 1e-3
    assert abs(order - 1) < 0.1


def test_sgld():
    for scale in (IDENTITY, DIAGONAL):
        for temperature in (1.0, 0.3):
            check_sgld(Settings(0.02, temperature, scale=scale))
    for fault, faults in COMMON.items():
        assert is_rejected(check_sgld, Settings(0.02, scale=DIAGONAL), faults), fault


# ---- BAOAB: exact on Gaussians for every number of inner steps -----------------------------------------


def check_baoab(num_steps, refresh_every, settings, faults=HEALTHY):
    mean, covariance = law("baoab", num_steps, settings, faults, refresh_every)
    assert relative_error(mean, TARGET.mean) < 1e-10
    assert relative_error(covariance, settings.temperature * TARGET.covariance) < 1e-10


@pytest.mark.parametrize(("num_steps", "refresh_every"), [(1, 1), (3, 3), (4, 2)])
def test_baoab(num_steps, refresh_every):
    """Momentum kept or resampled, at step sizes up to 80 % of the stability bound; every twin is rejected."""
    for resample in (False, True):
        for scale, epsilon in ((IDENTITY, 0.4), (DIAGONAL, 0.05), (DIAGONAL, 0.3)):
            for friction, temperature in ((0.1, 1.0), (1.0, 0.3), (20.0, 1.0)):
                settings = Settings(epsilon, temperature, friction, scale, resample)
                check_baoab(num_steps, refresh_every, settings)
        twins = dict(COMMON)
        if not resample or num_steps > refresh_every:  # else there is no friction that could be wrong
            twins |= HAMILTONIAN
        if resample:
            twins |= REFRESH
        for fault, faults in twins.items():
            settings = Settings(0.3, 1.0, 1.0, DIAGONAL, resample)
            assert is_rejected(check_baoab, num_steps, refresh_every, settings, faults), (fault, resample)


# ---- Euler, the papers' update ---------------------------------------------------------------------------


def check_euler(settings, faults=HEALTHY):
    """The limit is exact; in general the error is O(ε), on Gaussians that of the position is O(ε²)."""
    mean, covariance, order = limits("euler", 1, settings, faults)
    assert relative_error(mean, TARGET.mean) < 1e-10
    assert relative_error(covariance, TARGET.covariance) < 1e-3
    assert abs(order - 2) < 0.1


def test_euler_with_persistent_momentum():
    for scale in (IDENTITY, DIAGONAL):
        check_euler(Settings(0.02, scale=scale))
    for fault, faults in (COMMON | HAMILTONIAN).items():
        assert is_rejected(check_euler, Settings(0.02, scale=DIAGONAL), faults), fault


def test_euler_with_resampled_momentum_has_its_documented_bias():
    """As ε → 0 the covariance is L/(L-1) times the target's; here L = 3."""
    settings, expected = Settings(0.02, scale=DIAGONAL, resample=True), 3 / 2 * TARGET.covariance
    assert relative_error(limits("euler", 3, settings)[1], expected) < 1e-3
    for faults in (Faults(drift=0.5), Faults(refresh=1.1)):
        assert relative_error(limits("euler", 3, settings, faults)[1], expected) > 1e-2


def test_euler_with_resampled_momentum_and_one_step_is_a_random_walk():
    with pytest.raises(Unstable):
        law("euler", 1, Settings(0.02, scale=IDENTITY, resample=True))
