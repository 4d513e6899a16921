"""``fs.Regressor`` and ``fs.Classifier``: scikit-learn's checks, predictions against their draws, the command."""

import json
import pickle
import subprocess
import sys
import typing

import jax
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import log_ndtr, logsumexp
from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import estimator_checks_generator
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.__main__ import main
from numpyro_fspace.estimators.base import mean_and_spread, train_gp
from numpyro_fspace.estimators.regressor import MIN_GAIN
from numpyro_fspace.estimators.saved import load_estimator, save_estimator
from numpyro_fspace.estimators.varying_noise import _bound, fit_noise

#: Settings with which a fit takes seconds.
SMALL = {"widths": (10,), "num_points": 20, "num_warmup": 20, "num_samples": 20, "num_chains": 1, "random_state": 0}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # so few draws are doubtful, and say so


#: Checks of scikit-learn that fit many times.
LONG_CHECKS = {
    "check_classifier_data_not_an_array",
    "check_classifiers_classes",
    "check_classifiers_train",
    "check_dtype_object",
    "check_estimators_dtypes",
    "check_estimators_nan_inf",
    "check_fit_idempotent",
    "check_pipeline_consistency",
    "check_regressor_data_not_an_array",
    "check_regressor_multioutput",
    "check_regressors_int",
    "check_regressors_train",
}


def checks():
    """Each check with its estimator. The long ones are nightly, but for training on ordinary arrays."""
    for estimator in (fs.Regressor(**SMALL), fs.Classifier(**SMALL)):
        for instance, check in estimator_checks_generator(estimator):
            name, settings = check.func.__name__, check.keywords
            is_long = name in LONG_CHECKS and (bool(settings) or not name.endswith("s_train"))
            label = "-".join([type(estimator).__name__, name, *map(str, settings.values())])
            yield pytest.param(instance, check, id=label, marks=[pytest.mark.nightly] * is_long)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
def test_scikit_learn_is_imported_when_an_estimator_is_used():
    code = (
        "import sys, numpyro_fspace as fs\nassert 'sklearn' not in sys.modules\n"
        "assert {'Regressor', 'Classifier'} <= set(dir(fs))\nfs.Regressor\nassert 'sklearn' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_estimators_without_scikit_learn_say_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None; import numpyro_fspace as fs; fs.Regressor"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert 'fspace fit need scikit-learn 1.6 or newer: pip install "scikit-learn>=1.6"' in found.stderr


# ---- regression ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def line():
    """60 rows of a line in units far from one."""
    X = np.random.default_rng(0).uniform(2000.0, 2010.0, (60, 2))
    y = 1e4 + 300.0 * (X[:, 0] - 2005.0) + np.random.default_rng(1).normal(0.0, 50.0, 60)
    return X, y


@pytest.fixture(scope="module")
def regressor(line):
    return fs.Regressor(**SMALL | {"num_samples": 50}).fit(*line)


def test_predictions_are_in_the_units_of_the_table(regressor, line):
    X, y = line
    mean, sd = regressor.predict(X, return_std=True)
    assert regressor.score(X, y) > 0.95
    assert 25.0 < sd.mean() < 150.0  # the noise is 50
    assert abs(np.mean(y - mean)) < 50.0
    assert isinstance(regressor.mcmc_, fs.MCMC) and regressor.model is regressor.posterior_.model


@pytest.mark.slow
def test_moments_and_quantiles_are_those_of_the_draws(regressor, line):
    """By 50 × 400 draws of y at each of five rows: their sd has a standard error of 1 %."""
    X = line[0][:5]
    draws = np.concatenate([regressor.sample(X, None, random_state=i) for i in range(400)])
    mean, sd = regressor.predict(X, return_std=True)
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * sd.max() / len(draws) ** 0.5)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.05)
    quantiles = regressor.predict_quantiles(X, (0.1, 0.9))
    np.testing.assert_allclose(np.quantile(draws, (0.1, 0.9), axis=0).T, quantiles, atol=0.06 * sd.max())


def test_the_decomposition_is_that_of_the_model(regressor, line):
    X = line[0][:5]
    parts, model = regressor.decompose(X), fs.decompose(regressor.posterior_, regressor.standardize(X))
    np.testing.assert_allclose(parts.epistemic, model.epistemic * regressor.y_scale_**2, rtol=1e-3)
    np.testing.assert_allclose(parts.aleatoric, model.aleatoric * regressor.y_scale_**2, rtol=1e-5)
    np.testing.assert_allclose(parts.total, regressor.predict(X, return_std=True)[1] ** 2)


def test_predictions_do_not_depend_on_an_overridden_decomposition(regressor, line):
    class Relabeled(fs.Regressor):
        def decompose(self, X):
            raise AssertionError("predict is the estimator's own")

    other = Relabeled()
    vars(other).update(vars(regressor))
    np.testing.assert_array_equal(other.predict(line[0][:3]), regressor.predict(line[0][:3]))


@pytest.mark.parametrize("estimator", [fs.Regressor, fs.Classifier])
def test_annotations_of_the_settings_can_be_read(estimator):
    assert "widths" in typing.get_type_hints(estimator.__init__)


def test_functions_vary_less_than_targets(regressor, line):
    X = line[0][:5]
    functions = regressor.sample(X, None, noise=False, random_state=0)
    assert functions.shape == (50, 5)
    np.testing.assert_allclose(functions.var(0), regressor.decompose(X).epistemic, rtol=1e-6)


def test_a_row_is_predicted_the_same_beside_any_others(regressor, line):
    X = np.tile(line[0], (6, 1))  # 360 rows: another program
    np.testing.assert_allclose(regressor.predict(X)[:60], regressor.predict(line[0]), rtol=1e-6)


@pytest.mark.parametrize("store", some(["pickle", "folder"], 1))
def test_a_stored_estimator_predicts_the_same(regressor, line, store, tmp_path):
    if store == "pickle":
        again = pickle.loads(pickle.dumps(regressor))
    else:
        save_estimator(regressor, tmp_path)
        again, _ = load_estimator(tmp_path)
    np.testing.assert_array_equal(again.predict(line[0]), regressor.predict(line[0]))
    np.testing.assert_array_equal(again.predict_quantiles(line[0]), regressor.predict_quantiles(line[0]))


@pytest.mark.slow
def test_several_targets(line):
    X, y = line
    both = np.stack([y, -2.0 * y + 5.0], -1)
    estimator = fs.Regressor(**SMALL).fit(X, both)
    mean, sd = estimator.predict(X[:4], return_std=True)
    assert mean.shape == sd.shape == (4, 2) and estimator.predict_quantiles(X[:4]).shape == (4, 2, 3)
    assert estimator.score(X, both) > 0.9
    assert estimator.sample(X[:4], 3).shape == (3, 4, 2)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "sgd"}, "method='sgd' is unknown"),
        ({"kernel": "rbf"}, "kernel='rbf' is unknown"),
        ({"num_samples": 0}, "num_samples=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
    ],
)
def test_settings_out_of_range(settings, words, line):
    with pytest.raises(ValueError, match=words):
        fs.Regressor(**settings).fit(*line)


@pytest.mark.parametrize("estimator", [fs.Regressor, fs.Classifier])
def test_what_scikit_learn_would_take_is_refused(estimator, line, regressor):
    X, y = line
    masked = np.ma.masked_greater(X, 2008.0)
    with pytest.raises(TypeError, match="X is a masked array, whose mask would be lost"):
        estimator(**SMALL).fit(masked, y > y.mean())
    with pytest.raises(TypeError, match="y is a masked array"):
        estimator(**SMALL).fit(X, np.ma.masked_greater(y, y.mean()))
    with pytest.raises(TypeError, match="X is a masked array"):
        regressor.predict(masked)
    dates = np.arange(len(y)).astype("datetime64[D]")
    with pytest.raises(TypeError, match="y holds dates"):
        estimator(**SMALL).fit(X, dates)
    with pytest.raises(TypeError, match="X holds dates"):
        estimator(**SMALL).fit([[day] for day in dates], y > y.mean())
    with pytest.raises(TypeError, match="y holds durations"):
        estimator(**SMALL).fit(X, np.array(list(dates - dates[0]), object))
    with pytest.raises(TypeError, match="X holds dates"):
        estimator(**SMALL).fit(pd.DataFrame({"day": dates, "number": y}), y > y.mean())
    with pytest.raises(ValueError, match=r"quantiles=\[\] must be"):
        regressor.predict_quantiles(X, [])
    with pytest.raises(ValueError, match="num=-1 must be at least 1"):
        regressor.sample(X, -1)


def test_quantiles_far_out(regressor, line):
    """Of a mixture of normals: the level of a quantile is the mean of the draws' levels."""
    X = line[0][:3]
    f, sigma = regressor._mean_and_noise(X)
    found = (regressor.predict_quantiles(X, (1e-300, 1e-20, 0.3, 1 - 1e-12)) - regressor.y_mean_) / regressor.y_scale_
    logs = logsumexp(log_ndtr((found - f) / sigma), 0) - np.log(len(f))  # f [S, N, 1]
    np.testing.assert_allclose(logs, np.log([[1e-300, 1e-20, 0.3, 1 - 1e-12]] * 3), rtol=1e-2, atol=1e-9)


def test_quantiles_out_of_range(regressor, line):
    with pytest.raises(ValueError, match="between 0 and 1"):
        regressor.predict_quantiles(line[0], (5, 95))


# ---- noise that varies ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy():
    """300 rows in the plane, the standard deviation of whose noise is .2 exp(.8 x1) in units of 1000."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-2.0, 2.0, (300, 2))
    sd = 0.2 * np.exp(0.8 * X[:, 0])
    return X, 1000.0 * (np.sin(X[:, 1]) + sd * generator.normal(size=300)), 1000.0 * sd


@pytest.fixture(scope="module")
def varying(noisy):
    return fs.Regressor(noise="auto", **SMALL | {"num_warmup": 100, "num_samples": 50}).fit(*noisy[:2])


@pytest.mark.slow
def test_noise_that_varies_is_found(varying, noisy):
    X, _, sd = noisy
    assert varying.noise_ == "varying"
    parts = varying.decompose(X)
    assert stats.spearmanr(parts.aleatoric, sd)[0] > 0.95
    assert np.mean(np.abs(np.log(np.sqrt(parts.aleatoric) / sd))) < 0.25
    model = fs.decompose(varying.posterior_, varying.standardize(X[:5]))
    np.testing.assert_allclose(parts.aleatoric[:5], model.aleatoric * varying.y_scale_**2, rtol=1e-3)
    draws = np.concatenate([varying.sample(X[:5], None, random_state=i) for i in range(400)])
    np.testing.assert_allclose(draws.std(0), varying.predict(X[:5], return_std=True)[1], rtol=0.05)
    low, high = varying.predict_quantiles(X[:5], (0.1, 0.9)).T
    np.testing.assert_allclose(np.quantile(draws, (0.1, 0.9), axis=0), [low, high], atol=0.06 * draws.std(0).max())


@pytest.mark.slow
def test_its_last_layer_is_sampled_and_that_of_the_mean_integrated_out(varying):
    kernel = fs.fSGHMC(varying.model)
    block = kernel._integrated_out(varying.posterior_.args, {})
    assert {site.split(".")[0] for site in block} == {"f"}


@pytest.mark.slow
def test_a_stored_estimator_has_its_noise(varying, noisy, tmp_path):
    save_estimator(varying, tmp_path)
    again, _ = load_estimator(tmp_path)
    np.testing.assert_array_equal(again.predict_quantiles(noisy[0]), varying.predict_quantiles(noisy[0]))


@pytest.mark.slow
def test_constant_noise_stays_constant(noisy):
    X, _, _ = noisy
    y = np.sin(X[:, 1]) + 0.3 * np.random.default_rng(1).normal(size=300)
    gp, kernel = train_gp(X, y[:, None], kernel="auto", key=jax.random.key(0))
    assert fit_noise(kernel, gp.params, gp.noise_variance, X, y[:, None]).gain < MIN_GAIN
    with pytest.raises(ValueError, match="noise='same' is unknown"):
        fs.Regressor(noise="same").fit(X, y)


@pytest.mark.slow
def test_the_bound_is_the_evidence_where_the_noise_hardly_varies(x64):
    """With a variance of 1e-8 of g it is log N(y; 0, K + s²I) in closed form; with more it stays below a Monte Carlo
    estimate of the evidence over 4000 draws of g."""
    generator = np.random.default_rng(0)
    x, y = generator.uniform(-1.0, 1.0, (12, 1)), generator.normal(size=12)
    params = {"f": {"variance": 1.0, "lengthscale": np.ones(1)}, "center": 0.3}

    def bound(variance):
        logs = jax.tree.map(np.log, params | {"g": {"variance": variance, "lengthscale": np.ones(1)}})
        sites = np.full(12, 0.5), np.zeros(12)
        for _ in range(100):
            value, after = _bound("squared_exponential", logs, x, y, sites)
            sites = tuple(a + 0.3 * (b - a) for a, b in zip(sites, after, strict=True))
        return float(value)

    covariance = np.exp(-0.5 * (x - x.T) ** 2)
    exact = stats.multivariate_normal(np.zeros(12), covariance + 0.3 * np.eye(12)).logpdf(y)
    np.testing.assert_allclose(bound(1e-8), exact, atol=1e-5)
    g = generator.multivariate_normal(np.zeros(12), covariance, 4000)
    noise = 0.3 * np.exp(g)
    found = [stats.multivariate_normal(np.zeros(12), covariance + np.diag(n)).logpdf(y) for n in noise]
    evidence = np.log(np.mean(np.exp(found)))
    assert evidence - 1.0 < bound(1.0) < evidence + 0.1


# ---- numbers of any size -------------------------------------------------------------------------------------


def test_means_and_spreads_of_numbers_of_any_size():
    values = np.array([1.0, 2.0, 4.0])[:, None] * [1.0, 1e300, 1e-300, 0.0] + [0.0, 0.0, 0.0, 7.0]
    mean, spread = mean_and_spread(values)
    np.testing.assert_allclose(mean, np.array([7.0 / 3.0] * 3 + [7.0]) * [1.0, 1e300, 1e-300, 1.0])
    np.testing.assert_allclose(spread, np.std([1.0, 2.0, 4.0]) * np.array([1.0, 1e300, 1e-300, 0.0]) + [0, 0, 0, 1.0])


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_targets_whose_variance_is_no_number_are_refused(line, size):
    X, y = line
    with pytest.raises(ValueError, match=r"y has a standard deviation of .* give y / "):
        fs.Regressor(**SMALL).fit(X, y / y.std() * size)


def test_inputs_that_single_precision_does_not_hold_are_named(regressor):
    with pytest.raises(ValueError, match=r"X\[1, 0\]=1e\+300 is so far from the training rows"):
        regressor.predict([[2005.0, 2005.0], [1e300, 2005.0]])


@pytest.mark.slow
def test_inputs_and_targets_of_extreme_size_give_the_same_predictions(line, regressor):
    X, y = line
    again = fs.Regressor(**SMALL | {"num_samples": 50}).fit((X - 2000.0) * [1e300, 1e-300], y * 1e100)
    np.testing.assert_allclose(again.predict((X - 2000.0) * [1e300, 1e-300]) / 1e100, regressor.predict(X), rtol=1e-2)


@pytest.mark.slow
def test_minibatches_of_many_rows(line):
    X, y = line
    estimator = fs.Regressor(**SMALL, batch_size=20).fit(X, y)
    assert estimator.model.batch_size == 20 and estimator.score(X, y) > 0.5
    assert fs.Regressor(**SMALL, batch_size=100).fit(X, y).model.batch_size is None


@pytest.mark.slow
def test_pipeline_and_cross_validation():
    X, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(PolynomialFeatures(1, include_bias=False), fs.Regressor(**SMALL | {"num_samples": 50}))
    scores = cross_val_score(pipeline, X[:200], y[:200], cv=3)
    assert scores.mean() > 0.3


# ---- classes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 150)
    X = generator.normal(size=(150, 2)) + 2.5 * np.eye(3)[labels][:, :2]
    return fs.Classifier(**SMALL | {"num_samples": 50}).fit(X, np.array(["a", "b", "c"])[labels]), X, labels


@pytest.mark.slow
def test_probabilities_and_their_decomposition(classifier):
    estimator, X, labels = classifier
    probabilities = estimator.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert (estimator.predict(X) == np.array(["a", "b", "c"])[labels]).mean() > 0.8
    parts, model = estimator.decompose(X[:5]), fs.decompose(estimator.posterior_, estimator.standardize(X[:5]))
    np.testing.assert_allclose(parts.mean, probabilities[:5])
    np.testing.assert_allclose(model.mean, probabilities[:5], atol=1e-4)
    np.testing.assert_allclose(parts.epistemic, model.epistemic, atol=1e-4)
    np.testing.assert_allclose(parts.total, stats.entropy(probabilities[:5], axis=1), atol=1e-6)


@pytest.mark.slow
def test_labels_are_drawn_with_their_probabilities(classifier):
    """50 × 100 draws at three rows: a share has a standard error of at most .007."""
    estimator, X, _ = classifier
    draws = np.concatenate([estimator.sample(X[:3], None, random_state=i) for i in range(100)])
    shares = np.stack([(draws == name).mean(0) for name in estimator.classes_], -1)
    np.testing.assert_allclose(shares, estimator.predict_proba(X[:3]), atol=0.03)
    assert estimator.sample(X[:3], 2, noise=False).shape == (2, 3, 3)


@pytest.mark.slow
def test_probabilities_of_overlapping_classes_are_calibrated():
    """Two normal classes whose best accuracy is .83: the error of the probabilities, not only of their order."""
    generator = np.random.default_rng(0)

    def draw(num):
        labels = generator.integers(0, 2, num)
        return generator.normal(size=(num, 2)) + np.where(labels == 1, 0.7, -0.7)[:, None], labels

    X, y = draw(300)
    X_new, y_new = draw(4000)
    estimator = fs.Classifier(**SMALL | {"num_points": 100, "num_warmup": 200, "num_samples": 200}).fit(X, y)
    probabilities = estimator.predict_proba(X_new)
    exact = 1.0 / (1.0 + np.exp(-2 * 0.7 * X_new.sum(1)))
    assert fs.metrics.ece(probabilities, y_new) < 0.05
    assert np.abs(probabilities[:, 1] - exact).mean() < 0.08
    assert fs.metrics.nll(probabilities, y_new) < fs.metrics.nll(np.stack([1 - exact, exact], -1), y_new) + 0.04


def test_a_single_class_is_refused():
    with pytest.raises(ValueError, match="only one class"):
        fs.Classifier().fit(np.ones((5, 1)), np.zeros(5, int))


# ---- the command ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_fit_and_predict_a_table(kind, tmp_path, capsys):
    generator = np.random.default_rng(0)
    size = generator.uniform(1.0, 9.0, 80)
    color = generator.choice(["red", "blue", "green"], 80)
    value = 3.0 * size + 10.0 * (color == "red") + generator.normal(0.0, 0.5, 80)
    frame = pd.DataFrame({"size": size, "color": color, "price": value.round(2)})
    target = "price" if kind == "numbers" else "dear"
    if kind == "classes":
        frame["dear"] = np.where(frame.pop("price") > 18, "yes", "no")
    data, out, new = tmp_path / "data.csv", tmp_path / "out", tmp_path / "new.csv"
    frame.to_csv(data, index=False)
    assert main(["fit", str(data), "--target", target, "--out", str(out), "--draws", "20", "--chains", "1"]) == 0
    printed = capsys.readouterr().out
    assert "'color' is categorical: 3 levels" in printed and "64 rows to learn from, 16 held out" in printed
    assert "gradient boosting" in printed
    files = {path.name for path in out.iterdir()}
    assert {"estimator.json", "posterior.npz", "posterior.nc", "predictions.csv", "scores.csv", "report.txt"} <= files
    assert {"partial_dependence.png", "predicted_observed.png"} <= files
    assert json.loads((out / "estimator.json").read_text())["design"]["target"] == target
    held_out = pd.read_csv(out / "predictions.csv")
    scores = pd.read_csv(out / "scores.csv", index_col=0)
    assert len(held_out) == 16
    np.testing.assert_array_equal(held_out["observed"], frame[target].to_numpy()[held_out["row"] - 1])
    if kind == "numbers":
        rmse = np.sqrt(np.mean((held_out["mean"] - held_out["observed"]) ** 2))
        np.testing.assert_allclose(scores.loc["network", "RMSE"], rmse, rtol=1e-4)
        assert rmse < scores.loc["constant", "RMSE"] / 2
        inside = held_out["observed"].between(held_out["q05"], held_out["q95"])
        np.testing.assert_allclose(scores.loc["network", "coverage90"], inside.mean(), rtol=1e-4)
        np.testing.assert_allclose(held_out["sd"] ** 2, held_out["epistemic_sd"] ** 2 + held_out["aleatoric_sd"] ** 2)

    rows = frame.drop(columns=target).head(4).copy()
    rows.loc[1, "color"], rows.loc[2, "size"] = "pink", None
    rows.to_csv(new, index=False)
    assert main(["predict", str(out), str(new), "--out", str(tmp_path / "found.csv")]) == 0
    printed, doubts = capsys.readouterr().out, json.loads((out / "estimator.json").read_text())["doubts"]
    assert "(row 2: color = 'pink'; row 3: size is missing)" in printed
    assert "Wrote 2 predictions" in printed and ("The fit has doubts" in printed) == bool(doubts)
    assert ("A longer run: --draws 100" in (out / "report.txt").read_text()) == bool(doubts)
    found = pd.read_csv(tmp_path / "found.csv")
    assert found.isna().all(axis=1).tolist() == [False, True, True, False]
    estimator, _ = load_estimator(out)
    assert jax.tree.leaves(estimator.posterior_.samples)[0].shape[0] == 20


@pytest.mark.slow
def test_a_refused_or_interrupted_fit_leaves_the_last_one_as_it_was(line, monkeypatch):
    """Units and classes of the new data would otherwise belong to the draws of the old ones."""
    X, y = line
    regressor = fs.Regressor(**SMALL).fit(X, y)
    before = regressor.predict(X)
    with pytest.raises(ValueError, match="square"):
        regressor.fit(X, 1e200 * y)
    np.testing.assert_array_equal(regressor.predict(X), before)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fs.MCMC, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        regressor.fit(X + 100.0, 50.0 * y)
    np.testing.assert_array_equal(regressor.predict(X), before)


@pytest.mark.slow
def test_a_refused_fit_of_a_classifier_leaves_its_classes(line):
    X, y = line
    labels = np.where(y > y.mean(), "high", "low")
    classifier = fs.Classifier(**SMALL).fit(X, labels)
    with pytest.raises(ValueError, match="one class"):
        classifier.fit(X, np.full(len(X), "other"))
    assert set(classifier.predict(X)) <= {"high", "low"}
