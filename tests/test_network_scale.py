"""The scales of a network under ``gp_network``: how they are compared, chosen, kept, and warned of."""

from __future__ import annotations

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from support.tiers import some
from tinygp.kernels import Exp, ExpSineSquared, ExpSquared, Matern32

import numpyro_fspace as fs
from numpyro_fspace.model.last_layer import hidden_scale
from numpyro_fspace.model.last_layer.find_last_layer import find_last_layer
from numpyro_fspace.model.last_layer.hidden_scale import TOLERANCES, find_scales
from numpyro_fspace.model.last_layer.prior_mismatch import compare
from numpyro_fspace.model.networks.adapters import read_network

KEY = jax.random.key(0)


def network(width=20, act=nn.tanh, num_layers=2):
    layers = [layer for _ in range(num_layers) for layer in (nn.Dense(width), act)]
    return nn.Sequential([*layers, nn.Dense(1)])


def scales_of(module, prior, x, hidden_scale=None, tolerance=None, name="f"):
    layer = find_last_layer("f", read_network("f", module, x.shape[1:]), x.shape[1:])
    with jax.ensure_compile_time_eval():
        x = jnp.asarray(x)
    return find_scales(name, layer, prior, x, lambda points: points, hidden_scale=hidden_scale, tolerance=tolerance)


def grid(num, low=-1.0, high=1.0):
    return np.linspace(low, high, num)[:, None]


@pytest.mark.parametrize("num_features", [4, 30])  # fewer, and more, than points
def test_compare(num_features):
    """The share and the errors are those of the worst part, by matrices of all places together."""
    rng = np.random.default_rng(0)
    num_points, num_places, num_same = 9, 12, 5
    features = rng.normal(size=(2, num_points + num_places, num_features)) / np.sqrt(num_features)
    root = rng.normal(size=(2, num_points + num_places, 40)) / 6
    parts = root @ root.swapaxes(-1, -2), np.array([0.8, 0.2])
    for row, tau in zip(compare(features, parts, num_points, num_same, (0.01, 0.3)), (0.01, 0.3), strict=True):
        shares, errors = np.zeros((2, 2)), np.zeros((2, 2, 2))
        for i, psi in enumerate(features):
            at, there = psi[:num_points], psi[num_points:]
            gain = at.T @ np.linalg.inv(at @ at.T + tau**2 * np.eye(num_points))
            for j, (covariance, part) in enumerate(zip(*parts, strict=True)):
                given, right = covariance[:num_points, :num_points], covariance[num_points:, num_points:]
                rest = np.eye(num_features) - gain @ at + tau**2 * gain @ gain.T  # what the process does not determine
                wrong = there @ (rest / part + gain @ given @ gain.T) @ there.T - right
                shares[i, j] = np.trace(at @ gain @ given) / np.trace(given)
                same, between = slice(None, num_same), slice(num_same, None)
                errors[i, j] = [np.linalg.norm(wrong[b, b]) / np.linalg.norm(right[b, b]) for b in (same, between)]
        expected = [np.min(np.mean(shares, 0)), *np.max(np.sqrt(np.mean(np.square(errors), 0)), 0)]
        np.testing.assert_allclose(row, expected, rtol=1e-6)


@pytest.mark.slow
def test_last_layer_scale():
    """With the scale of the last layer its mean variance at the points is the process's."""
    x = grid(15)
    module = network(200, num_layers=1)
    scales = scales_of(module, fs.GPPrior(4.0 * ExpSquared(0.5)), x)
    layer = find_last_layer("f", read_network("f", module, (1,)), (1,))
    keys = iter(jax.random.split(KEY, 100))

    def features(_):
        hidden = {path: scales.hidden * jax.random.normal(next(keys), (1, 200)) for path in layer.hidden}
        hidden = {path: value.reshape(layer.network.weights[path].shape) for path, value in hidden.items()}
        return layer.features(hidden, jnp.asarray(x)) * layer.typical_scale() * scales.last_layer

    variance = np.mean([np.sum(np.square(features(i)), -1).mean() for i in range(20)])
    assert abs(variance - 1.0) < 0.15


@pytest.mark.slow
def test_rougher_kernels_take_larger_scales():
    chosen = [scales_of(network(50), fs.GPPrior(ExpSquared(scale)), grid(20)).hidden for scale in (1.5, 0.3, 0.1)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1]


def test_given_scales_are_kept():
    scales = scales_of(network(), fs.GPPrior(ExpSquared(0.5)), grid(10), hidden_scale=1.25, tolerance=0.02)
    assert (scales.hidden, scales.tolerance) == (1.25, 0.02)
    scales = scales_of(network(), fs.GPPrior(ExpSquared(0.5)), grid(10), tolerance=0.02)
    assert scales.tolerance == 0.02


@pytest.mark.slow
def test_searched_once(monkeypatch):
    """One search for a network, a covariance and points, also for a prior that is built anew at each trace."""
    searches = []
    search = hidden_scale._search
    monkeypatch.setattr(hidden_scale, "_search", lambda *args: searches.append(1) or search(*args))
    module, x = network(11), grid(10)
    first = scales_of(module, fs.GPPrior(ExpSquared(0.55)), x)
    assert scales_of(network(11), fs.GPPrior(ExpSquared(0.55)), x) == first
    traced = []
    jax.eval_shape(lambda: traced.append(scales_of(module, fs.GPPrior(ExpSquared(0.55)), x)))
    assert traced == [first]
    assert len(searches) == 1
    scales_of(module, fs.GPPrior(ExpSquared(0.45)), x)
    scales_of(module, fs.GPPrior(ExpSquared(0.55)), 0.9 * x)
    scales_of(network(11, nn.relu), fs.GPPrior(ExpSquared(0.55)), x)
    assert len(searches) == 4


def test_deterministic(monkeypatch):
    """The choice is one of numbers alone: a second search finds the same."""
    first = scales_of(network(12), fs.GPPrior(ExpSquared(0.5)), grid(10))
    monkeypatch.setattr(hidden_scale, "_CHOSEN", {})
    assert scales_of(network(12), fs.GPPrior(ExpSquared(0.5)), grid(10)) == first


@pytest.mark.slow
def test_float64(x64):
    scales = scales_of(network(50), fs.GPPrior(ExpSquared(0.5)), grid(15))
    assert scales.share > 0.99 and scales.error_between < 0.05 and scales.tolerance in TOLERANCES


@pytest.mark.slow
def test_random_lengthscale():
    """With a random kernel s and τ are fixed numbers, and the last layer still has the process's size."""
    x, module = grid(15), network(50, nn.relu, num_layers=3)

    def model():
        scale = numpyro.sample("scale", dist.LogNormal(-0.7, 0.2))
        f = fs.gp_network("f", module, fs.GPPrior(ExpSquared(scale)), x)
        numpyro.deterministic("y", f(grid(29)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        draws = numpyro.infer.Predictive(model, num_samples=300)(KEY)["y"]
    sds = np.std(draws, 0)
    assert sds.min() > 0.8 and sds.max() < 1.25


def test_narrow_network_warns_once():
    prior, x = fs.GPPrior(ExpSquared(0.1)), grid(30)
    with pytest.warns(RuntimeWarning, match=r"gp_network\('narrow'\): the network's 6 features make .*Widen"):
        scales_of(network(5), prior, x, name="narrow")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        scales_of(network(5), prior, x, name="narrow")
        scales_of(network(5), fs.GPPrior(ExpSquared(0.1)), x, name="narrow")
    with pytest.warns(RuntimeWarning, match="'other'"):
        scales_of(network(5), prior, x, name="other")


@pytest.mark.slow
@pytest.mark.parametrize("width, is_exact", [(50, False), (100, True)])
def test_the_warning_says_how_far_the_covariance_is_off(width, is_exact):
    """The error that it states is the mean over hidden weights, a little more than that of the mean covariance."""
    points, kernel = np.linspace(-1.0, 1.0, 100)[:, None], ExpSquared(0.05)
    network = nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(width), nn.tanh, nn.Dense(1)])

    def model():
        f = fs.gp_network("f", network, fs.GPPrior(kernel), points)
        numpyro.deterministic("values", f(points)[:, 0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = np.asarray(Predictive(model, num_samples=4000)(jax.random.key(0))["values"], np.float64)
    wanted = np.asarray(kernel(points, points))
    chance = np.sqrt(np.mean(wanted**2 + 1.0) / len(values))  # of the sample covariance, whose variances are 1
    square = np.mean((values.T @ values / len(values) - wanted) ** 2) - chance**2
    error = np.sqrt(max(square, 0.0) / np.mean(wanted**2))
    stated = [float(re.search(r"by (\d+)% \(root", str(w.message))[1]) / 100 for w in caught]
    if is_exact:
        assert not stated and error < 0.1
    else:
        assert len(stated) == 1, [str(w.message) for w in caught]
        assert error - 0.01 < stated[0] < 2.0 * error, (error, stated)


@pytest.mark.slow
def test_the_smallest_summand_is_followed_too():
    """A small season on a large trend: the scales are those of the season alone, and so is the warning."""
    x, trend = grid(40), 30.0 * ExpSquared(2.0)
    season = ExpSineSquared(scale=0.3, gamma=2.0) * ExpSquared(2.0)
    module = network(50)
    with pytest.warns(RuntimeWarning, match=r"the summand that they follow worst"):
        both = scales_of(module, fs.GPPrior(trend + season), x, name="both")
    with pytest.warns(RuntimeWarning, match=r"features make \d\d% of"):
        alone = scales_of(module, fs.GPPrior(season), x, name="alone")
    assert both.hidden == alone.hidden
    np.testing.assert_allclose([both.share, both.error], [alone.share, alone.error], rtol=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        scales_of(module, fs.GPPrior(trend + ExpSquared(0.5)), x, name="slow")


SMOOTH, ROUGH = ExpSquared(1.0), ExpSquared(0.03)


MANY = {
    "the fifth": [*[SMOOTH] * 4, ROUGH],
    "a summand of both": 2 * [SMOOTH + 0.03 * ROUGH],
    "one of ten": [*(ExpSquared(1.0 + 0.1 * i) for i in range(9)), ROUGH],
}


@pytest.mark.parametrize("name", some(sorted(MANY), 1))
def test_every_output_is_followed(name):
    """The worst part of all outputs counts, as if it were the only one."""
    module, x = network(50), grid(40)
    with pytest.warns(RuntimeWarning, match=r"features make \d\d% of"):
        both = scales_of(module, fs.GPPrior(MANY[name]), x, name=name)
    with pytest.warns(RuntimeWarning, match=r"features make \d\d% of"):
        worst = scales_of(module, fs.GPPrior(MANY[name][-1]), x, name=f"{name}, alone")
    np.testing.assert_allclose([both.share, both.error], [worst.share, worst.error], rtol=0.1)


@pytest.mark.parametrize(
    ("kernel", "missing"), [pytest.param(Exp(0.25), 0.078, marks=pytest.mark.slow), (Matern32(0.25), 0.001)]
)
def test_what_a_smooth_network_lacks_of_a_rough_process(kernel, missing):
    """Half-way between points h apart an Ornstein-Uhlenbeck process has the variance tanh(h / 2 l) given its values
    there; of the places that are compared half are such, and so are half of the rest, the others being points."""
    x = grid(60, -1.5, 1.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scales = scales_of(network(100), fs.GPPrior(kernel), x, name=f"rough {missing}")
    if missing > 0.05:
        assert missing == pytest.approx(0.75 * np.tanh(3.0 / 59 / (2 * 0.25)), rel=0.05)
    assert scales.missing == pytest.approx(missing, rel=0.1, abs=1e-3)
    assert [("between the points, given its values" in str(one.message)) for one in caught] == [True] * (missing > 0.05)


def test_sparse_points_warn():
    with pytest.warns(RuntimeWarning, match="between the points .* too sparse .* Give more points"):
        scales_of(network(50), fs.GPPrior(ExpSquared(0.1)), grid(5))


@pytest.mark.parametrize("act", some([nn.relu, jnp.sin, nn.gelu, nn.silu], 1))
def test_activations(act):
    """A kernel of a middling lengthscale is followed by every usual activation, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        scales = scales_of(network(50, act), fs.GPPrior(ExpSquared(0.5)), grid(20))
    assert scales.share > 0.98 and scales.error_between < 0.1


def test_one_point():
    assert scales_of(network(), fs.GPPrior(ExpSquared(0.5)), np.zeros((1, 1))).share > 0.99


def test_features_without_size():
    """Features that vanish at the points, or are not finite, are an error and not a choice among NaN."""
    with pytest.raises(ValueError, match="features at the points are all zero"):
        scales_of(nn.Sequential([lambda x: 0 * x, nn.Dense(1, use_bias=False)]), fs.GPPrior(ExpSquared(0.5)), grid(4))


@pytest.mark.slow
def test_warning_names_the_caller():
    """The warning points to the line of the model."""

    def model():
        fs.gp_network("mine", network(4), fs.GPPrior(ExpSquared(0.1)), grid(30))

    with pytest.warns(RuntimeWarning, match="'mine'") as caught:
        handlers.seed(model, KEY)()
    assert caught[0].filename == __file__


def test_a_process_without_covariance_in_float32_is_refused():
    """Squares of 1e-30 are zero there, and the variance 0/0 is no number."""
    tiny = 1e-30 * np.linspace(-1.0, 1.0, 6)[:, None]

    def model():
        net = nn.Sequential([nn.Dense(30), nn.tanh, nn.Dense(1)])
        fs.gp_network("f", net, fs.GPPrior(ExpSquared(1e-30)), tiny)

    with pytest.raises(ValueError, match=r"covariance holds NaN or infinity.*too small for float32\? rescale x"):
        Predictive(model, num_samples=2)(jax.random.key(0))
