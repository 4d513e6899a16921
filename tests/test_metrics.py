"""Metrics against hand-computed cases, SciPy and scikit-learn."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.spatial import distance
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from numpyro_fspace import metrics

RNG_SEED = 0


@pytest.fixture
def regression():
    rng = np.random.default_rng(RNG_SEED)
    y, f = rng.normal(size=7), rng.normal(size=(5, 7))
    return y, f, rng.uniform(0.3, 2.0, size=5)


@pytest.fixture
def classification():
    rng = np.random.default_rng(RNG_SEED)
    return rng.dirichlet(np.ones(3), size=200), rng.integers(0, 3, size=200)


# Densities


def test_rmse_by_hand():
    assert metrics.rmse([0.0, 0.0, 0.0], [3.0, 0.0, -3.0]) == pytest.approx(np.sqrt(6.0))


def test_lpd_and_gibbs_score_by_hand():
    p = np.array([[0.2, 0.5], [0.4, 0.1]])
    assert metrics.lpd(np.log(p)) == pytest.approx(0.5 * (np.log(0.3) + np.log(0.3)))
    assert metrics.gibbs_score(np.log(p)) == pytest.approx(np.log(p).sum() / 4)


def test_lpd_averages_over_draws_not_points():
    log_lik = np.log([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
    assert metrics.lpd(log_lik) == pytest.approx(np.mean(np.log([0.1, 0.9])))


def test_lpd_does_not_underflow_and_takes_zero_densities():
    assert metrics.lpd([[-1e4], [-1e4]]) == pytest.approx(-1e4)
    assert metrics.lpd([[-np.inf], [0.0]]) == pytest.approx(np.log(0.5))
    assert metrics.lpd([[-np.inf], [-np.inf]]) == -np.inf


def test_gaussian_lpd_is_scipys():
    y, mean, variance = [0.0, 1.0, -2.0], [0.5, 1.0, 0.0], [0.25, 4.0, 9.0]
    expected = stats.norm(mean, np.sqrt(variance)).logpdf(y).mean()
    assert metrics.gaussian_lpd(y, mean, variance) == pytest.approx(expected)
    assert metrics.gaussian_lpd(y, 0.5, 4.0) == pytest.approx(stats.norm(0.5, 2.0).logpdf(y).mean())


@pytest.mark.parametrize("form", ["scalar", "draw", "column", "full"])
def test_gaussian_mixture_lpd_is_scipys(regression, form):
    y, f, sigma = regression
    given = {"scalar": 0.7, "draw": sigma, "column": sigma[:, None], "full": np.tile(sigma[:, None], 7)}[form]
    per_draw = np.full(5, 0.7) if form == "scalar" else sigma
    expected = np.mean(np.log(stats.norm(f, per_draw[:, None]).pdf(y).mean(axis=0)))
    assert metrics.gaussian_mixture_lpd(y, f, given) == pytest.approx(expected)


def test_a_square_problem_reads_a_vector_sigma_per_draw():
    y, f, sigma = np.zeros(2), np.ones((2, 2)), np.array([0.1, 10.0])
    expected = np.log(stats.norm(1, sigma).pdf(0).mean())  # the same at both points
    assert metrics.gaussian_mixture_lpd(y, f, sigma) == pytest.approx(expected)


def test_raw_units_agree_with_scoring_raw_targets(regression):
    y, f, _ = regression
    s = 3.7
    rmse, lpd = metrics.to_raw_units(metrics.rmse(y, f[0]), metrics.gaussian_lpd(y, f[0], 0.5), s)
    assert rmse == pytest.approx(metrics.rmse(s * y + 2, s * f[0] + 2))
    assert lpd == pytest.approx(metrics.gaussian_lpd(s * y + 2, s * f[0] + 2, s**2 * 0.5))


# Predictive laws


def test_coverage_counts_the_central_interval():
    draws = np.tile(np.arange(1.0, 100.0)[:, None], 5)  # quantile q is 100 q
    y = np.array([4.9, 5.0, 50.0, 95.0, 95.1])
    assert metrics.coverage(y, draws, level=0.9) == pytest.approx(3 / 5)
    assert metrics.calibration_curve(y, draws, [0.1, 0.9, 0.99]) == pytest.approx([1 / 5, 3 / 5, 1.0])


def test_an_interval_holds_its_ends():
    assert metrics.calibration_curve([1.0], [[1.0], [1.0]], [0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_coverage_of_calibrated_draws_is_nominal():
    rng = np.random.default_rng(RNG_SEED)
    covered = metrics.coverage(rng.normal(size=4000), rng.normal(size=(2000, 4000)), level=0.7)
    assert covered == pytest.approx(0.7, abs=4 * np.sqrt(0.21 / 4000))


@pytest.mark.parametrize(("num", "expected"), [(10, 9 / 11), (19, 0.9), (50, 0.9)])
def test_coverage_of_few_calibrated_draws(num, expected):
    """Of ten draws and a target, which are alike, the target is the smallest or the largest with probability 2/11."""
    rng = np.random.default_rng(RNG_SEED)
    covered = metrics.coverage(rng.normal(size=20_000), rng.normal(size=(num, 20_000)), level=0.9)
    assert covered == pytest.approx(expected, abs=4 * np.sqrt(0.16 / 20_000))


def test_gaussian_coverage_ends_at_the_normal_quantile():
    edge = 1.0 + 2.0 * stats.norm.ppf(0.95)
    assert metrics.gaussian_coverage([edge - 1e-9, edge + 1e-9], 1.0, 4.0, level=0.9) == 0.5


@pytest.mark.parametrize("fair", [True, False])
def test_crps_is_the_double_sum(regression, fair):
    y, f, _ = regression
    pairs = np.abs(f[:, None] - f[None]).sum(axis=(0, 1)) / (2 * 5 * (4 if fair else 5))
    assert metrics.crps(y, f, fair=fair) == pytest.approx(np.mean(np.abs(f - y).mean(axis=0) - pairs))


def test_plain_crps_is_the_integral_it_stands_for():
    draws, y = np.array([-1.0, 0.5, 2.0]), 0.8
    integral, _ = integrate.quad(lambda t: ((draws <= t).mean() - (y <= t)) ** 2, -3, 4, points=[-1.0, 0.5, 0.8, 2.0])
    assert metrics.crps([y], draws[:, None], fair=False) == pytest.approx(integral, rel=1e-8)


def test_gaussian_crps_is_the_limit_of_the_empirical_one():
    draws = stats.norm(1.0, 2.0).ppf((np.arange(20000) + 0.5) / 20000)
    expected = metrics.crps([2.5], draws[:, None], fair=False)
    assert metrics.gaussian_crps([2.5], 1.0, 4.0) == pytest.approx(expected, rel=1e-4)


def test_fair_crps_of_few_draws_is_unbiased():
    rng = np.random.default_rng(RNG_SEED)
    y = np.full(40000, 0.5)
    score = metrics.crps(y, rng.normal(size=(3, len(y))))
    assert score == pytest.approx(metrics.gaussian_crps([0.5], 0.0, 1.0), abs=0.012)  # plain: .19 higher


def test_gaussian_w2_by_hand_and_squared():
    arguments = [0.0, 1.0], [1.0, 4.0], [3.0, 1.0], [25.0, 4.0]
    assert metrics.gaussian_w2(*arguments) == pytest.approx(2.5)
    assert metrics.gaussian_w2(*arguments, squared=True) == pytest.approx(12.5)


def test_sample_w2_pairs_order_statistics_at_each_point():
    first = np.array([[0.0, 5.0], [2.0, 1.0], [7.0, 3.0]])
    second = np.array([[8.0, 1.0], [1.0, 3.0], [2.0, 5.0]])
    best = min(np.mean((first[:, 0] - second[list(p), 0]) ** 2) for p in itertools.permutations(range(3)))
    assert metrics.sample_w2(first, second, squared=True) == pytest.approx(best / 2)
    assert metrics.sample_w2(first, second) == pytest.approx(np.sqrt(best) / 2)


def test_sample_w2_approaches_the_gaussian_one():
    u = stats.norm.ppf((np.arange(5000) + 0.5) / 5000)[:, None]
    assert metrics.sample_w2(1 + 2 * u, -0.5 * u) == pytest.approx(
        metrics.gaussian_w2([1.0], 4.0, [0.0], 0.25), rel=1e-2
    )


# Classification


def test_accuracy_nll_and_brier_are_scikit_learns(classification):
    probs, labels = classification
    assert metrics.accuracy(probs, labels) == pytest.approx(np.mean(probs.argmax(1) == labels))
    assert metrics.nll(probs, labels) == pytest.approx(log_loss(labels, probs))
    one_hot = np.eye(3)[labels]
    each = sum(brier_score_loss(one_hot[:, k], probs[:, k]) for k in range(3))
    assert metrics.brier(probs, labels) == pytest.approx(each)


def test_nll_of_an_impossible_label_is_infinite():
    assert metrics.nll([[1.0, 0.0]], [1]) == np.inf


def test_ece_by_hand():
    probs = np.array([[0.95, 0.05], [0.85, 0.15], [0.4, 0.6], [0.45, 0.55]])
    # Of 4 bins, (.5, .75] holds .6 and .55 with no hit, (.75, 1] holds .95 and .85 with one.
    assert metrics.ece(probs, [0, 1, 0, 0], num_bins=4) == pytest.approx(0.5 * 0.575 + 0.5 * (0.9 - 0.5))


def test_bins_of_ece_are_fifteen():
    """.61 and .66 share one of fifteen bins, where a right and a wrong answer cancel in part; not one of sixteen."""
    probs = [[0.61, 0.39], [0.66, 0.34]]
    assert metrics.ece(probs, [1, 0]) == pytest.approx(0.635 - 0.5)
    assert metrics.ece(probs, [1, 0], num_bins=16) == pytest.approx((0.61 + 0.34) / 2)


def test_ece_weights_bins_by_their_size():
    probs = np.array([[1.0, 0.0]] * 3 + [[0.5, 0.5]])
    # Confidence 1 is right in 2 of 3, confidence .5 in 1 of 1.
    assert metrics.ece(probs, [0, 0, 1, 0], num_bins=10) == pytest.approx(0.75 * (1 / 3) + 0.25 * 0.5)


def test_a_confidence_on_an_edge_counts_in_the_bin_below():
    curve = metrics.reliability_curve([[0.5, 0.5], [0.75, 0.25]], [0, 1], num_bins=4)
    np.testing.assert_array_equal(curve.count, [0, 1, 1, 0])
    np.testing.assert_allclose(curve.accuracy, [np.nan, 1.0, 0.0, np.nan])
    np.testing.assert_allclose(curve.confidence, [np.nan, 0.5, 0.75, np.nan])


def test_entropy_is_scipys_over_the_last_axis():
    probs = np.random.default_rng(RNG_SEED).dirichlet(np.ones(4), size=(2, 3))
    np.testing.assert_allclose(metrics.entropy(probs), stats.entropy(probs, axis=-1))
    certain = metrics.entropy([1.0, 0.0, 0.0])
    assert certain == 0.0 and not np.signbit(certain)


def test_probabilities_rounded_to_half_precision_are_renormalized():
    assert metrics.nll([[0.4998, 0.4998]], [0]) == pytest.approx(np.log(2))


def test_ood_auc_is_scikit_learns_with_ties():
    rng = np.random.default_rng(RNG_SEED)
    inside, outside = rng.integers(0, 6, 300), rng.integers(1, 8, 200)
    truth = np.r_[np.zeros(300), np.ones(200)]
    assert metrics.ood_auc(inside, outside) == pytest.approx(roc_auc_score(truth, np.r_[inside, outside]))
    assert metrics.ood_auc([0.0, 1.0], [2.0]) == 1.0
    assert metrics.ood_auc([1.0], [1.0, 1.0]) == 0.5


# Input


def test_float32_input_is_scored_in_float64():
    y = np.full(2, 1e20, dtype=np.float32)
    assert metrics.rmse(y, -y) == pytest.approx(2e20)  # the square overflows float32
    assert isinstance(metrics.rmse(y, y), float)


def test_jax_arrays_are_accepted():
    import jax.numpy as jnp

    assert metrics.crps(jnp.zeros(2), jnp.array([[1.0, -1.0], [1.0, 1.0]])) == pytest.approx(0.5)


BAD = {
    "y must have shape": lambda: metrics.rmse(np.zeros((3, 1)), np.zeros((3, 1))),
    "mean has 2 entries": lambda: metrics.rmse(np.zeros(3), np.zeros(2)),
    "y holds 1 NaN": lambda: metrics.rmse([np.nan, 1.0], [0.0, 0.0]),
    "y is empty": lambda: metrics.rmse([], []),
    "log_lik must have shape": lambda: metrics.lpd(np.zeros((4, 10, 3))),
    "log_lik holds NaN": lambda: metrics.gibbs_score([[np.nan]]),
    "variance must be positive": lambda: metrics.gaussian_lpd([0.0], [0.0], [0.0]),
    "variance must be a scalar": lambda: metrics.gaussian_crps(np.zeros(3), 0.0, np.ones(2)),
    "sigma must be a scalar": lambda: metrics.gaussian_mixture_lpd(np.zeros(3), np.zeros((4, 3)), np.ones(3)),
    "sigma must be positive": lambda: metrics.gaussian_mixture_lpd(np.zeros(3), np.zeros((4, 3)), 0.0),
    "draws must have shape": lambda: metrics.coverage(np.zeros(3), np.zeros((3, 4))),
    "level must lie": lambda: metrics.coverage(np.zeros(3), np.zeros((4, 3)), level=90),
    "pass fair=False": lambda: metrics.crps(np.zeros(3), np.zeros((1, 3))),
    "must not be negative": lambda: metrics.gaussian_w2([0.0], -1.0, [0.0], 1.0),
    "thin the longer": lambda: metrics.sample_w2(np.zeros((4, 2)), np.zeros((5, 2))),
    "y_std must be positive": lambda: metrics.to_raw_units(1.0, 1.0, 0.0),
    "sum to one": lambda: metrics.entropy([[0.5, 0.6]]),
    "non-negative": lambda: metrics.brier([[1.5, -0.5]], [0]),
    "average the draws": lambda: metrics.accuracy(np.full((5, 4, 2), 0.5), [0, 1, 0, 1]),
    "labels must be integers from 0 to 1": lambda: metrics.nll([[0.5, 0.5]], [2]),
    "labels has 2 entries": lambda: metrics.nll([[0.5, 0.5]], [0, 1]),
    "num_bins": lambda: metrics.ece([[0.5, 0.5]], [0], num_bins=0),
    "score_out is empty": lambda: metrics.ood_auc([1.0], []),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_text_is_a_type_error():
    with pytest.raises(TypeError, match="y must be a real numeric array"):
        metrics.rmse(["a"], [0.0])
    with pytest.raises(TypeError, match=r"num_bins must be an integer ≥ 1, got 2\.5"):
        metrics.ece([[0.5, 0.5]], [0], num_bins=2.5)


# Kernelised Stein discrepancy


def stein_kernel(kernel, score):
    """u(x, y) from its definition, by automatic differentiation."""
    import jax

    def u(x, y):
        mixed = jax.jacfwd(jax.grad(kernel, 0), 1)(x, y)
        k_x, k_y = jax.grad(kernel, 0)(x, y), jax.grad(kernel, 1)(x, y)
        return score(x) @ score(y) * kernel(x, y) + score(x) @ k_y + score(y) @ k_x + mixed.trace()

    return u


@pytest.mark.parametrize("name", ["imq", "rbf"])
def test_ksd_is_its_definition(name, x64):
    import jax
    import jax.numpy as jnp

    def kernel(x, y):
        r2 = jnp.sum((x - y) ** 2) / 0.7**2
        return (1 + r2) ** -0.5 if name == "imq" else jnp.exp(-0.5 * r2)

    def score(x):
        return -jnp.tanh(x) * jnp.array([1.0, 3.0, 0.2])

    draws = jax.random.normal(jax.random.key(0), (6, 3), float)
    u = np.array(jax.vmap(jax.vmap(stein_kernel(kernel, score), (None, 0)), (0, None))(draws, draws))
    settings = {"kernel": name, "bandwidth": 0.7}
    assert metrics.ksd(draws, jax.vmap(score)(draws), **settings) == pytest.approx(u.mean())
    expected = (u.sum() - np.trace(u)) / 30
    assert metrics.ksd(draws, jax.vmap(score)(draws), unbiased=True, **settings) == pytest.approx(expected)


def test_ksd_of_two_draws_is_that_of_their_pair():
    """At 0 and 2, with the score of N(0, 1): k = e⁻², s(y) ∇_x k = -4k, the trace is -3k."""
    draws = np.array([[0.0], [2.0]])
    settings = {"kernel": "rbf", "bandwidth": 1.0}
    assert metrics.ksd(draws, -draws, unbiased=True, **settings) == pytest.approx(-7.0 * np.exp(-2.0))


def test_ksd_far_from_the_origin():
    """Draws of a translated law, with the score of that law."""
    draws = np.random.default_rng(0).normal(size=(200, 2))
    for kernel in ("imq", "rbf"):
        near = metrics.ksd(draws, -draws, kernel=kernel)
        assert metrics.ksd(draws + 2.0**26, -draws, kernel=kernel) == pytest.approx(near, rel=1e-5)


def gaussian_ksd(mean, sd, bandwidth):
    """KSD² of N(mean, sd²) from N(0, 1) with the squared exponential kernel, by quadrature of the definition."""

    def term(y, x):
        r = x - y
        k = np.exp(-0.5 * r**2 / bandwidth**2)
        u = x * y - r**2 / bandwidth**2 + 1 / bandwidth**2 - r**2 / bandwidth**4
        return stats.norm.pdf(x, mean, sd) * stats.norm.pdf(y, mean, sd) * u * k

    low, high = mean - 8 * sd, mean + 8 * sd
    return integrate.dblquad(term, low, high, low, high)[0]


@pytest.mark.parametrize(
    ("mean", "sd"),
    [(0.8, 1.0), pytest.param(0.0, 1.7, marks=pytest.mark.slow), pytest.param(0.5, 0.6, marks=pytest.mark.slow)],
)
def test_ksd_of_gaussians_in_closed_form(mean, sd):
    """With the Stein feature b(y) = E[s(x) k + ∇_x k], KSD² = |b|²: for equal sd, m² times E[k]."""
    bandwidth = 1.3
    exact = gaussian_ksd(mean, sd, bandwidth)
    if sd == 1.0:
        assert exact == pytest.approx(mean**2 * bandwidth / np.sqrt(bandwidth**2 + 2.0), rel=1e-6)
    draws = np.random.default_rng(RNG_SEED).normal(mean, sd, size=(3000, 1))
    found = metrics.ksd(draws, -draws, kernel="rbf", bandwidth=bandwidth, unbiased=True)
    assert found == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize("kernel", ["imq", "rbf"])
def test_ksd_of_the_law_itself_is_zero_and_grows_with_the_distance(kernel):
    rng = np.random.default_rng(RNG_SEED)
    draws = rng.normal(size=(200, 100, 3))
    settings = {"kernel": kernel, "bandwidth": 2.0}
    own = np.array([metrics.ksd(x, -x, unbiased=True, **settings) for x in draws])
    assert abs(own.mean()) < 4.0 * own.std() / np.sqrt(len(own))
    biased = np.mean([metrics.ksd(x, -x, **settings) for x in draws])
    assert biased == pytest.approx((3.0 + 3.0 / 2.0**2) / 100, rel=0.1)  # (E|s|² + tr ∇∇k)/S
    shifted = [metrics.ksd(draws[0] + shift, -(draws[0] + shift), **settings) for shift in (0.0, 0.3, 0.6, 1.2)]
    assert np.all(np.diff(shifted) > 0)


def test_ksd_by_blocks_of_draws():
    """More draws than are held at a time, in another order; the bandwidth is their median distance."""
    rng = np.random.default_rng(RNG_SEED)
    draws, score = rng.normal(size=(2, 901, 2))
    rows = rng.permutation(901)
    median = np.median(distance.pdist(draws))
    assert metrics.ksd(draws[rows], score[rows], bandwidth=median) == pytest.approx(metrics.ksd(draws, score))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((np.zeros((3, 2)), np.zeros((3, 1))), {}, "must both have shape"),
        ((np.zeros(3), np.zeros(3)), {}, "must both have shape"),
        ((np.zeros((1, 2)), np.zeros((1, 2))), {}, "two or more"),
        ((np.ones((3, 2)), np.ones((3, 2))), {}, "bandwidth must be positive"),
        ((np.ones((3, 2)), np.ones((3, 2))), {"kernel": "cosine"}, "'imq', 'rbf'"),
        ((np.ones((3, 2)), np.full((3, 2), np.nan)), {}, "score holds 6 NaN"),
    ],
)
def test_ksd_refuses(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        metrics.ksd(*arguments, **settings)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.ma.masked_array([0.0, 0.0, 99.0], mask=[0, 0, 1]), "mask would be lost"),
        (np.array(["2020-01-01", "2020-01-02", "2020-01-03"], "datetime64[D]"), "holds dates"),
        (np.array([1, 2, 3], "timedelta64[s]"), "holds durations"),
        (np.array(["1", "2", "3"]), "encode it as numbers"),
    ],
)
def test_what_is_no_number_is_not_scored(values, reason):
    with pytest.raises(TypeError, match=reason):
        metrics.rmse(values, np.zeros(3))
