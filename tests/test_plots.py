"""Plots: what is drawn, where, and that nothing global changes."""

import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats
from tinygp import kernels

from numpyro_fspace import GPPrior, metrics
from numpyro_fspace.posterior.plot_functions import plot_functions


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture
def draws():
    rng = np.random.default_rng(0)
    x = rng.permutation(np.linspace(-1, 1, 30))  # unsorted on purpose
    return x, np.sin(3 * x) + 0.2 * rng.normal(size=(50, 1)) + 0.1 * rng.normal(size=(50, 30))


def labeled(ax):
    artists = [*ax.lines, *ax.collections, *ax.patches]
    return {a.get_label(): a for a in artists if not a.get_label().startswith("_")}


def test_mean_and_band_follow_sorted_inputs(ax, draws):
    x, f = draws
    artists = labeled(plot_functions(x[:, None], f, level=0.8, ax=ax))
    order = np.argsort(x)
    np.testing.assert_allclose(artists["mean"].get_xdata(), x[order])
    np.testing.assert_allclose(artists["mean"].get_ydata(), f.mean(axis=0)[order])
    vertices = artists["80 % of f"].get_paths()[0].vertices
    low, high = np.quantile(f[:, order[0]], [0.1, 0.9], method="weibull")
    first = vertices[np.isclose(vertices[:, 0], x[order[0]]), 1]
    assert first.min() == pytest.approx(low) and first.max() == pytest.approx(high)


def test_noise_band_follows_sorted_inputs_too(ax, draws):
    x, _ = draws
    f = np.tile(10 * x, (5, 1))
    vertices = labeled(plot_functions(x, f, noise_draws=f, ax=ax))["90 % of y"].get_paths()[0].vertices
    np.testing.assert_allclose(vertices[:, 1], 10 * vertices[:, 0], atol=1e-12)


@pytest.mark.parametrize(("asked", "shown"), [(7, 7), (0, 0), (500, 50)])
def test_number_of_draws(ax, draws, asked, shown):
    x, f = draws
    plot_functions(x, f, num_draws=asked, ax=ax)
    assert len(ax.lines) == shown + 1  # and the mean


def test_everything_optional_is_labeled_once(ax, draws):
    x, f = draws
    order = np.argsort(x)
    mean, sd = np.cos(x), 0.3 + x**2
    plot_functions(
        x,
        f,
        x_data=[-0.5, 0.5],
        y_data=[0.0, 2.0],
        truth=x**3,
        reference=(mean, sd),
        noise_draws=3 * f,
        ax=ax,
    )
    artists = labeled(ax)
    assert set(artists) == {
        "mean",
        "draws of f",
        "90 % of f",
        "90 % of y",
        "reference",
        "truth",
        "data",
        "far from data",
    }
    np.testing.assert_allclose(artists["truth"].get_ydata(), x[order] ** 3)
    np.testing.assert_allclose(artists["data"].get_xydata(), [[-0.5, 0.0], [0.5, 2.0]])
    np.testing.assert_allclose(artists["reference"].get_ydata(), mean[order])
    edge = (mean + stats.norm.ppf(0.95) * sd)[order]
    assert any(len(line.get_ydata()) == 30 and np.allclose(line.get_ydata(), edge) for line in ax.lines)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(texts) == len(set(texts)) == 8


def test_a_process_is_a_reference_like_its_moments(ax, draws):
    x, f = draws
    exact = GPPrior(kernels.ExpSquared(0.5)).condition(x[:3, None], np.ones(3), noise_variance=0.1)
    mean, covariance = exact.moments(x[:, None])
    expected = (mean, np.sqrt(np.diag(covariance)))
    curves = []
    for reference in (exact, expected):
        ax.clear()
        plot_functions(x, f, reference=reference, ax=ax)
        curves.append([line.get_ydata() for line in ax.lines if line.get_linestyle() == "--"])
    assert len(curves[0]) >= 3
    np.testing.assert_array_equal(*curves)


def test_gaps_between_data_are_shaded_and_neighborhoods_are_not(ax):
    x = np.linspace(0, 10, 21)  # reach: .5
    plot_functions(x, np.zeros((5, 21)) + x, x_data=[2.0, 2.8, 6.0, 10.0], y_data=np.zeros(4), ax=ax)
    shaded = [patch.get_window_extent().transformed(ax.transData.inverted()) for patch in ax.patches]
    spans = sorted((box.x0, box.x1) for box in shaded)
    np.testing.assert_allclose(spans, [(0.0, 1.5), (3.3, 5.5), (6.5, 9.5)])


def test_data_outside_the_grid_stay_in_view(ax, draws):
    x, f = draws
    plot_functions(x, f, x_data=[3.0], y_data=[0.0], ax=ax)
    assert ax.get_xlim() == pytest.approx((-1.0, 3.0))


def test_several_inputs_plot_predicted_against_observed(ax):
    x, y = np.zeros((3, 2)), np.array([0.0, 1.0, 2.0])
    f = np.array([[-1.0, 0.5, 4.0], [1.0, 1.5, 5.0], [0.0, 1.0, 4.5]])
    plot_functions(x, f, y_data=y, ax=ax)
    artists = labeled(ax)
    np.testing.assert_allclose(artists["67 % inside 90 % bar"].get_xydata(), [[0.0, 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(artists["33 % outside 90 % bar"].get_xydata(), [[2.0, 4.5]])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("observed", "predicted")


def test_bars_of_several_inputs_come_from_noisy_draws(ax):
    x, y = np.zeros((2, 2)), np.array([0.0, 1.0])
    f = np.tile([[0.5, 0.5]], (4, 1)) + np.array([[-0.1], [0.1], [0.0], [0.0]])
    plot_functions(x, f, y_data=y, noise_draws=10 * (f - 0.5) + 0.5, level=0.99, ax=ax)
    assert "100 % inside 99 % bar" in labeled(ax)


def test_settings_stay_and_a_given_axes_is_used(ax, draws):
    before = dict(mpl.rcParams)
    assert plot_functions(*draws, ax=ax) is ax
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 < ax.get_window_extent().x1  # inside: neighbors may follow
    assert dict(mpl.rcParams) == before


def test_a_new_figure_is_made_with_the_legend_beside_it(draws):
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ax = plot_functions(*draws)
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1
    plt.close(ax.figure)


@pytest.mark.slow
def test_import_leaves_matplotlib_alone():
    code = "import sys; import numpyro_fspace.posterior.plot_functions; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


X, F = np.linspace(0, 1, 4), np.zeros((5, 4))
BAD = {
    "f_draws must have shape": lambda: plot_functions(X, F.T),
    "f_draws holds NaN": lambda: plot_functions(X, F * np.nan),
    "noise_draws must have shape": lambda: plot_functions(X, F, noise_draws=F[:, :2]),
    "x must have shape": lambda: plot_functions(np.zeros((0, 1)), F),
    "two different points": lambda: plot_functions(0 * X, F),
    "x holds NaN": lambda: plot_functions(X * np.nan, F),
    "level must lie": lambda: plot_functions(X, F, level=90),
    "num_draws=-1 must be at least 0": lambda: plot_functions(X, F, num_draws=-1),
    "go together": lambda: plot_functions(X, F, x_data=X),
    "y_data must have shape": lambda: plot_functions(X, F, x_data=X, y_data=np.zeros((4, 2))),
    "x_data must have shape": lambda: plot_functions(X, F, x_data=X[:2], y_data=X),
    "truth must have shape": lambda: plot_functions(X, F, truth=X[:2]),
    "y_data is required": lambda: plot_functions(np.zeros((4, 2)), F),
    "truth is for one input only": lambda: plot_functions(np.zeros((4, 2)), F, y_data=X, truth=X),
}


def test_what_is_no_number_is_named():
    with pytest.raises(TypeError, match="f_draws has dtype <U1; encode it as numbers"):
        plot_functions(X, "a")
    with pytest.raises(TypeError, match="f_draws must be real, got complex128"):
        plot_functions(X, F + 1j)


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_bars_of_few_draws_cover_what_the_metric_says(ax):
    """NumPy's own quantiles of ten draws cover less than their level."""
    rng = np.random.default_rng(0)
    y, f = rng.normal(size=200), rng.normal(size=(10, 200))
    plot_functions(np.zeros((200, 2)), f, y_data=y, ax=ax)
    share = metrics.coverage(y, f, 0.9)
    assert f"{100 * share:.0f} % inside 90 % bar" in labeled(ax)
