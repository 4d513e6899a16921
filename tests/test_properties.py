"""Arbitrary input to the public functions: the right answer by an independent route, or a clear error."""

from __future__ import annotations

import os
import warnings

import hypothesis.extra.numpy as hnp
import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from support.tiers import some
from tinygp.kernels import ExpSquared

import numpyro_fspace as fs
from numpyro_fspace.model.checks.arguments import checked_arguments
from numpyro_fspace.model.data.minibatches import minibatch

#: NUMPYRO_FSPACE_EXAMPLES=5 tries five times as many.
FACTOR = int(os.environ.get("NUMPYRO_FSPACE_EXAMPLES", "1"))
EXAMPLES = settings(
    max_examples=200 * FACTOR,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
#: Of tests whose every example compiles a program.
FEWER_EXAMPLES = settings(EXAMPLES, max_examples=60 * FACTOR)
REFUSED = (TypeError, ValueError)  # errors of ours; an IndexError or LinAlgError would be somebody else's
DTYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int8, np.uint8, np.bool_])
KEY = jax.random.key(0)


def numbers(scale=100.0):
    """Finite numbers with duplicates and zeros among them."""
    return st.floats(-scale, scale, width=32) | st.sampled_from([0.0, 1.0, -1.0])


def arrays(shape, scale=100.0):
    return hnp.arrays(np.float64, shape, elements=numbers(scale))


def hostile():
    """Arrays of any rank, dtype and content: empty, NaN, infinite, complex, text."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    dtypes = DTYPES | st.sampled_from([np.complex64, np.dtype("<U3")])
    return dtypes.flatmap(lambda kind: hnp.arrays(kind, shapes)) | st.just(np.array([None, 1], object))


def inputs(max_points=4, scale=3.0):
    """Inputs [M, D] in few shapes, some rows alike and some columns constant."""
    shapes = st.sampled_from([(1, 1), (2, 1), (max_points, 1), (max_points, 2)])
    return shapes.flatmap(lambda shape: arrays(shape, scale))


# ---- priors ------------------------------------------------------------------------------------------------


def covariance(x, scale, nugget):
    distances = ((x[:, None] - x) ** 2).sum(-1)
    return np.exp(-0.5 * distances / scale**2) + nugget * np.eye(len(x))


@pytest.mark.slow
@EXAMPLES
@given(
    x=inputs(),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    nugget=st.sampled_from([1e-3, 1.0]),
)
def test_gaussian_process_density(x, seed, scale, nugget):
    f = np.random.default_rng(seed).normal(size=len(x))
    prior = fs.GPPrior(ExpSquared(scale), nugget=nugget)
    exact = scipy.stats.multivariate_normal(np.zeros(len(x)), covariance(x, scale, nugget)).logpdf(f)
    np.testing.assert_allclose(prior.log_prob(x, f), exact, rtol=1e-4, atol=1e-4 * (1 + np.sum(f**2) / nugget))


@pytest.mark.slow
@EXAMPLES
@given(x=inputs(), seed=st.integers(0, 2**31), df=st.sampled_from([0.5, 3.0, 100.0]))
def test_student_t_density(x, seed, df):
    f = np.random.default_rng(seed).normal(size=len(x))
    prior = fs.priors.StudentTPrior(ExpSquared(1.0), df, nugget=0.1)
    exact = scipy.stats.multivariate_t(np.zeros(len(x)), covariance(x, 1.0, 0.1), df).logpdf(f)
    np.testing.assert_allclose(prior.log_prob(x, f), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@FEWER_EXAMPLES
@given(x=inputs(), y_seed=st.integers(0, 2**31), noise=st.sampled_from([0.01, 1.0]))
def test_conditioned_process_is_gaussian_conditioning(x, y_seed, noise):
    y = np.random.default_rng(y_seed).normal(size=len(x))
    posterior = fs.GPPrior(ExpSquared(1.0), nugget=1e-6).condition(x, y, noise)
    mean, found = posterior.moments(x)
    gram = covariance(x, 1.0, 0.0)
    gain = np.linalg.solve(gram + noise * np.eye(len(x)), gram).T
    np.testing.assert_allclose(mean, gain @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.reshape(found, gram.shape), gram - gain @ gram, atol=1e-5)


@EXAMPLES
@given(x=hostile(), f=hostile())
def test_density_is_a_number_or_an_error(x, f):
    try:
        value = fs.GPPrior(ExpSquared(1.0)).log_prob(x, f)
    except REFUSED:
        return
    assert x.ndim == 2 and len(f) == len(x) and np.shape(value) == ()
    assert np.isfinite(value) or not np.isfinite(f.astype(float)).all() or np.abs(f).max() > 1e15


@EXAMPLES
@given(labels=hostile(), num_classes=st.integers(-1, 5))
def test_dirichlet_targets_are_finite_or_refused(labels, num_classes):
    try:
        targets, variances = fs.dirichlet_targets(labels, num_classes)
    except REFUSED:
        return
    assert targets.shape == variances.shape == (len(labels), num_classes)
    assert np.array_equal(targets.argmax(1), labels.astype(int)) and (variances > 0).all()


# ---- measurement points and minibatches --------------------------------------------------------------------


@EXAMPLES
@given(low=arrays((2,), 5.0), width=arrays((2,), 5.0), num=st.sampled_from([1, 3]), seed=st.integers(0, 2**31))
def test_uniform_points_lie_in_the_box(low, width, num, seed):
    try:
        points = fs.measurement.uniform(low, low + width, num)
    except REFUSED:
        assert (low + width <= low).any()
        return
    x = np.asarray(points(jax.random.key(seed)))
    assert x.shape == (num, 2)
    slack = 1e-5 * (1 + np.abs(low) + np.abs(width))
    assert (low - slack <= x).all() and (x <= low + width + slack).all()


@pytest.mark.slow
@EXAMPLES
@given(x=inputs(), num=st.integers(-1, 5), seed=st.integers(0, 2**31))
def test_subsets_are_distinct_rows(x, num, seed):
    x = x + np.arange(len(x))[:, None] * 1e3
    try:
        points = fs.measurement.subset(x, num)
    except REFUSED:
        assert not 1 <= num <= len(x)
        return
    rows = np.round(np.asarray(points(jax.random.key(seed)))[:, 0] / 1e3).astype(int)
    assert len(set(rows.tolist())) == num


@EXAMPLES
@given(points=hostile())
@example(points=np.array([[3.40282357e38]]))
@example(points=np.array([[-1e300, np.inf]]))
@example(points=np.array([[5.88101535e-106]]))
def test_fixed_points_are_themselves_or_refused(points):
    try:
        x = fs.measurement.fixed(points)(KEY)
    except REFUSED:
        return
    assert points.ndim == 2 and points.size
    np.testing.assert_array_equal(x, points.astype(float).astype(x.dtype))


@EXAMPLES
@given(size=st.sampled_from([1, 2, 7, 100]), batch=st.integers(-1, 12), seed=st.integers(0, 2**31))
def test_minibatches_are_distinct_rows(size, batch, seed):
    try:
        rows = np.asarray(minibatch(jax.random.key(seed), size, batch))
    except REFUSED:
        assert not 1 <= batch <= size
        return
    assert len(set(rows.tolist())) == batch and rows.min() >= 0 and rows.max() < size


# ---- data --------------------------------------------------------------------------------------------------


@EXAMPLES
@given(x=hostile())
def test_data_are_checked_before_a_run(x):
    try:
        with checked_arguments((x,), {}) as trouble:
            pass
    except REFUSED:
        return
    if trouble is not None:
        return
    assert x.size and x.dtype.kind in "biufc"
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            assert np.isfinite(x.astype(np.float32)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fit_gp. y has mean")
@FEWER_EXAMPLES
@given(shape=st.sampled_from([(3, 1), (12, 2)]), scale=st.sampled_from([1e-6, 1.0, 1e6]), data=st.data())
def test_a_trained_process_is_usable_or_refused(shape, scale, data):
    """Duplicated rows, constant columns and targets, huge and tiny units."""
    x, y = data.draw(arrays(shape, 3.0)) * scale, data.draw(arrays(shape[:1], 3.0)) * scale
    try:
        fit = fs.fit_gp(None, x, y, num_steps=5)
    except REFUSED:
        return
    mean, covariance = fit.prior.condition(x, y, fit.noise_variance).moments(x)
    assert np.isfinite(mean).all() and np.isfinite(covariance).all() and fit.noise_variance > 0


# ---- scores ------------------------------------------------------------------------------------------------


@EXAMPLES
@given(y=arrays((5,)), draws=arrays((7, 5)), level=st.floats(0.01, 0.99))
def test_scores_of_draws(y, draws, level):
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull")
    assert fs.metrics.coverage(y, draws, level) == np.mean((low <= y) & (y <= high))
    pairs = np.abs(draws[:, None] - draws).sum((0, 1)) / (2 * 7 * 6)
    np.testing.assert_allclose(
        fs.metrics.crps(y, draws), np.mean(np.abs(draws - y).mean(0) - pairs), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        fs.metrics.rmse(y, draws[0]), np.sqrt(np.mean((y - draws[0]) ** 2)), rtol=1e-9, atol=1e-12
    )


@EXAMPLES
@given(log_lik=arrays((6, 4), 1e4))
def test_scores_of_log_densities(log_lik):
    exact = np.mean(scipy.special.logsumexp(log_lik, axis=0) - np.log(6))
    np.testing.assert_allclose(fs.metrics.lpd(log_lik), exact, rtol=1e-12, atol=1e-12)
    assert fs.metrics.gibbs_score(log_lik) <= fs.metrics.lpd(log_lik) + 1e-9


@pytest.mark.slow
@EXAMPLES
@given(logits=arrays((8, 3), 20.0), labels=hnp.arrays(np.int64, (8,), elements=st.integers(0, 2)))
def test_scores_of_classes(logits, labels):
    from sklearn import metrics

    probs = scipy.special.softmax(logits, axis=1)
    assert fs.metrics.accuracy(probs, labels) == np.mean(probs.argmax(1) == labels)
    exact = -np.mean(scipy.special.log_softmax(logits, axis=1)[np.arange(8), labels])
    np.testing.assert_allclose(fs.metrics.nll(probs, labels), exact, rtol=1e-6, atol=1e-9)
    columns = sum(metrics.brier_score_loss(labels == k, probs[:, k], pos_label=True) for k in range(3))
    np.testing.assert_allclose(fs.metrics.brier(probs, labels), columns, rtol=1e-9, atol=1e-12)
    assert 0.0 <= fs.metrics.ece(probs, labels) <= 1.0
    np.testing.assert_allclose(fs.metrics.entropy(probs), scipy.stats.entropy(probs, axis=1), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@EXAMPLES
@given(inside=arrays((5,), 3.0), outside=arrays((6,), 3.0))
def test_area_under_the_curve(inside, outside):
    from sklearn.metrics import roc_auc_score

    exact = roc_auc_score(np.repeat([0, 1], [5, 6]), np.concatenate([inside, outside]))
    np.testing.assert_allclose(fs.metrics.ood_auc(inside, outside), exact, rtol=1e-9)


def spoiled(values):
    """These arrays, now and then with a NaN, an infinity or a huge number in front."""
    bad = st.sampled_from([np.nan, np.inf, -np.inf, 1e300])
    return st.tuples(values, st.none() | bad).map(
        lambda both: both[0] if both[1] is None else np.append(both[1], both[0].ravel()[1:]).reshape(both[0].shape)
    )


VECTOR, DRAWS = spoiled(arrays((5,))), spoiled(arrays((7, 5)))
PROBS = spoiled(arrays((5, 3), 20.0).map(lambda logits: scipy.special.softmax(logits, axis=1)))
LABELS = hnp.arrays(np.int64, (5,), elements=st.integers(-1, 3) | st.sampled_from([0, 1, 2]))
INFINITE = (-np.inf, np.inf)
#: Each with arguments of the right shapes, and what it lies between.
SCORES = {
    "rmse": (VECTOR, VECTOR, (0.0, np.inf)),
    "coverage": (VECTOR, DRAWS, (0.0, 1.0)),
    "crps": (VECTOR, DRAWS, INFINITE),  # the fair estimate may be negative
    "gaussian_lpd": (VECTOR, VECTOR, INFINITE),
    "gaussian_crps": (VECTOR, VECTOR, (0.0, np.inf)),
    "gaussian_w2": (VECTOR, VECTOR, (0.0, np.inf)),
    "sample_w2": (DRAWS, DRAWS, (0.0, np.inf)),
    "accuracy": (PROBS, LABELS, (0.0, 1.0)),
    "nll": (PROBS, LABELS, (0.0, np.inf)),
    "brier": (PROBS, LABELS, (0.0, 2.0)),
    "ece": (PROBS, LABELS, (0.0, 1.0)),
    "ood_auc": (VECTOR, VECTOR, (0.0, 1.0)),
    "ood_accuracy": (VECTOR, VECTOR, (0.5, 1.0)),
    "entropy": (PROBS, st.none(), (0.0, np.log(4))),  # hostile arrays have up to four columns
}
CALLED_OTHERWISE = {
    "gaussian_lpd": lambda y, mean: fs.metrics.gaussian_lpd(y, mean, 1.0),
    "gaussian_crps": lambda y, mean: fs.metrics.gaussian_crps(y, mean, 1.0),
    "gaussian_w2": lambda one, other: fs.metrics.gaussian_w2(one, 1.0, other, 1.0),
    "entropy": lambda probs, _: fs.metrics.entropy(probs),
}


@pytest.mark.parametrize("name", some(SCORES, 2))
def test_a_score_is_a_number_or_an_error(name):
    """Of arguments of any kind, half of them of the right shapes: most of those without NaN and infinities count."""
    first, second, (low, high) = SCORES[name]
    score, counted = CALLED_OTHERWISE.get(name, getattr(fs.metrics, name)), []

    @EXAMPLES
    @given(st.tuples(first, second) | st.tuples(hostile(), second if name == "entropy" else hostile()))
    def check(pair):
        assume(all(getattr(part, "dtype", None) != np.float16 for part in pair))  # its squares overflow
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                value = np.asarray(score(*pair))
        except REFUSED:
            return
        except RuntimeWarning as warning:
            assert "overflow" in str(warning)
            return
        counted.append(pair)
        assert value.size and not np.isnan(value).any()
        assert (low - 1e-9 <= value).all() and (value <= high + 1e-9).all()
        assert all(part is None or (part.size and np.isfinite(part.astype(float)).all()) for part in pair)

    check()
    assert len(counted) > 20 * FACTOR


# ---- diagnostics -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:overflow:RuntimeWarning")  # f never moves, or is not finite
@EXAMPLES
@given(draws=hostile() | spoiled(arrays((2, 8, 3))))
def test_diagnostics_are_numbers_or_an_error(draws):
    """R-hat and ESS are NaN where draws are not finite, or never move, and only there."""
    try:
        found = fs.diagnostics.function_diagnostics(draws)
    except REFUSED:
        return
    assert draws.ndim >= 2 and str(found)
    points = draws.reshape(*draws.shape[:2], -1).astype(float)
    finite = np.isfinite(points).all((0, 1))
    huge = finite & (np.abs(points).max((0, 1)) > 1e100)  # their squares overflow
    usable = finite & (points != points[0, 0]).any((0, 1))
    np.testing.assert_array_equal(~np.isnan(np.ravel(found.rhat))[~huge], usable[~huge])


@EXAMPLES
@given(seed=st.integers(0, 2**31), shift=st.floats(-1e3, 1e3), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_diagnostics_do_not_depend_on_units(seed, shift, scale):
    draws = np.random.default_rng(seed).normal(size=(2, 200, 2))
    one, other = fs.diagnostics.function_diagnostics(draws), fs.diagnostics.function_diagnostics(shift + scale * draws)
    np.testing.assert_allclose(one.max_rhat, other.max_rhat, rtol=5e-3)  # rounding parts values tied about the median
    np.testing.assert_allclose(one.min_ess, other.min_ess, rtol=0.05)
