"""Level 1, functions: linear features f = Φw under a GP prior and Gaussian noise have an exact Gaussian law.

The potential is the library's own, from a NumPyro model with ``functional_prior`` and a plate, for every outcome
of the minibatch (10) and the measurement set (3); the kernels are the real ones. No Monte Carlo. fSGLD and fSGHMC
are SGLD and SGHMC on this potential. Smallest error seen in mean or covariance of f: 2e-3 of their size.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support.broken import COMMON, HAMILTONIAN, HEALTHY, REFRESH, Faults
from support.laws import AffineMap, Settings, Unstable, extrapolate, relative_error, slope, stationary
from support.targets import FOUR_POINTS, TARGETS, LinearFeatures

pytestmark = pytest.mark.usefixtures("x64")

SCALE = np.array([0.8, 1.0, 0.7, 1.2])
TOLERANCE = 2e-3
EPSILON = {"sgld": 0.004, "baoab": 0.02}
#: Outcomes of every target are repeated to this number, so that all share one program.
NUM_OUTCOMES = 30
terms = functools.cache(functools.partial(AffineMap, like={"w": np.zeros(4)}))


def law_of_f(target, name, settings, faults=HEALTHY, quadratics=None, num_steps=1):
    """Stationary mean and covariance of f at the test inputs, each step with an outcome of its own."""
    quadratics = target.quadratics() if quadratics is None else quadratics
    if num_steps == 1:
        draws = [jnp.tile(v, (NUM_OUTCOMES // len(v),) + (1,) * (v.ndim - 1))[:, None] for v in quadratics]
    else:
        outcomes = np.array(list(itertools.product(range(len(quadratics[0])), repeat=num_steps)))
        draws = [v[outcomes] for v in quadratics]
    fn = terms(name, num_steps=num_steps, num_draws=num_steps)
    mean, covariance = stationary(*fn(draws, settings, faults))
    return target.push_forward(mean[:4], covariance[:4, :4])


def errors(target, name, faults=HEALTHY, quadratics=None, num_steps=1, resample=False):
    """Errors of mean and covariance of f: at ε, ε/2, ε/4 and in the limit."""
    exact = target.push_forward(*target.posterior())
    epsilons = EPSILON[name] * 0.5 ** np.arange(3)
    settings = [Settings(float(e), scale=SCALE, resample=resample) for e in epsilons]
    laws = zip(*[law_of_f(target, name, s, faults, quadratics, num_steps) for s in settings], strict=True)
    return [
        np.array([relative_error(v, e) for v in (*values, extrapolate(values))])
        for values, e in zip(laws, exact, strict=True)
    ]


def is_rejected(*args, **kwargs):
    try:
        mean, covariance = errors(*args, **kwargs)
    except Unstable:
        return True
    return max(mean[-1], covariance[-1]) > TOLERANCE


def test_posterior_is_gp_conditioning():
    """With a bijection w ↔ f(X_M) and data at X_M, the posterior of f(X_M) is the GP's own [Rasmussen 2006, 2.23]."""
    target = LinearFeatures(FOUR_POINTS, 4)
    object.__setattr__(target, "x", FOUR_POINTS[0])
    object.__setattr__(target, "y", np.array([0.3, -0.7, 0.2, 1.1]))
    k = target.covariance_at(target.x)
    gain = k @ np.linalg.inv(k + target.sigma**2 * np.eye(4))
    mean, covariance = target.push_forward(*target.posterior(), target.x)
    assert relative_error(mean, gain @ target.y) < 1e-12
    assert relative_error(covariance, k - gain @ k) < 1e-12


@pytest.mark.parametrize("name", ["sgld", "baoab"])
@pytest.mark.parametrize("target", TARGETS)
def test_law_of_f(target, name):
    """The limit is exact; the error at ε is O(ε), and none for BAOAB with exact gradients."""
    is_exact = name == "baoab" and target == "full batch, fixed points"
    mean, covariance = errors(TARGETS[target], name)
    if is_exact:
        assert max(mean.max(), covariance.max()) < 1e-9
    else:
        assert max(mean[-1], covariance[-1]) < TOLERANCE
        assert abs(slope(covariance[:-1]) - 1) < 0.1
    if target.startswith("full batch, fixed"):
        assert mean.max() < 1e-9, "the mean has no bias if gradients are exact"


@pytest.mark.parametrize("name", ["sgld", "baoab"])
def test_broken_dynamics_are_rejected(name):
    target = TARGETS["minibatch, random points"]
    for fault, faults in (COMMON if name == "sgld" else COMMON | HAMILTONIAN).items():
        assert is_rejected(target, name, faults), fault


@pytest.mark.parametrize("name", ["sgld", "baoab"])
def test_broken_potentials_are_rejected(name):
    target, ratio = TARGETS["minibatch, random points"], 5 / 2
    assert is_rejected(target, name, quadratics=target.quadratics(likelihood_factor=1 / ratio)), "N/B forgotten"
    assert is_rejected(target, name, quadratics=target.quadratics(prior_factor=ratio)), "prior scaled by N/B"
    frozen = [v[:1] for v in target.quadratics()]
    assert is_rejected(target, name, quadratics=frozen), "one minibatch for the whole run"
    same_points = [v[target.draws[:, 1] == 0] for v in target.quadratics()]
    assert is_rejected(target, name, quadratics=same_points), "one set of points for the whole run"


def test_resampled_momentum_with_new_points_at_each_inner_step():
    """fSGHMC, two inner steps, all 100 pairs of minibatches.

    With a fresh momentum every L steps the chain is a diffusion with time step ~ε², hence the order 2.
    """
    target = TARGETS["minibatch, fixed points"]
    mean, covariance = errors(target, "baoab", num_steps=2, resample=True)
    assert max(mean[-1], covariance[-1]) < TOLERANCE
    assert abs(slope(covariance[:-1]) - 2) < 0.2
    for fault, faults in ({"noise √ε": Faults(noise=2.0**-0.5)} | REFRESH).items():
        assert is_rejected(target, "baoab", faults, num_steps=2, resample=True), fault
