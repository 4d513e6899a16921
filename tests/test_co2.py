"""The experiment on carbon dioxide: its kernel and features, its exact GP, a quick run."""

from __future__ import annotations

import numpy as np
import pytest
from tinygp.kernels import ExpSineSquared, ExpSquared

from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments.catalog import find
from numpyro_fspace.experiments.co2 import circle, kernel, prepare
from numpyro_fspace.experiments.records import read


def test_periodic_kernel_is_the_squared_exponential_on_the_circle(x64):
    x = np.linspace(0.0, 2.3, 9)[:, None]
    places = circle(x, 0.7)
    np.testing.assert_allclose(ExpSquared()(places, places), ExpSineSquared(scale=1.0, gamma=0.7)(x, x), rtol=1e-10)
    np.testing.assert_allclose(circle(x, 0.7), circle(x + 1.0, 0.7), atol=1e-12)


def test_kernel_has_a_trend_and_a_season(x64):
    params = {"trend": 4.0, "trend_scale": 30.0, "season": 0.5, "season_scale": 100.0, "roughness": 0.8}
    x = np.array([[0.0], [0.25], [1.0]])
    tau = x - x.T
    trend = 4.0 * np.exp(-0.5 * tau**2 / 30.0**2)
    season = 0.5 * np.exp(-0.5 * tau**2 / 100.0**2) * np.exp(-0.8 * np.sin(np.pi * tau) ** 2)
    np.testing.assert_allclose(kernel(params)(x, x), trend + season, rtol=1e-10)


def test_nothing_after_1985_is_seen(data_dir):
    problem = prepare(1)
    assert problem.x.max() < 0.0 <= problem.x_test.min()
    assert len(problem.x) + len(problem.x_test) == 521
    np.testing.assert_allclose([problem.y.mean(), problem.y.std()], [0.0, 1.0], atol=1e-5)


@pytest.mark.slow
def test_quick_run_and_picture(data_dir, tmp_path):
    """Better than a straight line, which is wrong by 2.3 ppm on the years seen and by 6.6 ppm on those held out."""
    path = tmp_path / "co2.jsonl"
    assert main(["run", "co2", "--method", "gp", "fsghmc", "--quick", "--out", str(path)]) == 0
    gp, line = read(path)
    assert gp["rmse_raw"] < 1.5
    assert gp["w2_gp"] == 0
    assert 0.7 < gp["coverage90"] < 1.0
    assert line["gp_rmse"] == gp["rmse"]
    assert line["rmse_seen"] < 1.0
    assert line["rmse_raw"] < 4.0
    assert line["num_diverging"] == 0
    picture = tmp_path / "co2.png"
    assert main(["figure", "co2", str(path), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_panels_are_titled_by_method_and_settings():
    import matplotlib

    matplotlib.use("agg")
    curves = {key: [-9.0, 16.0] for key in ("x", "co2", "mean", "low", "high", "gp_low", "gp_high")}
    record = {"experiment": "co2", "dataset": "co2", "curves": curves}
    records = [
        record | {"method": method, "config": {"exact": exact}}
        for method, exact in (("fsghmc", True), ("fsghmc", False), ("bbb", False))
    ]
    figure = find("co2").picture(records)
    titles = [ax.get_title() for ax in figure.axes if ax.has_data()]
    assert titles == ["fSGHMC, gp_network", "fSGHMC", "mean field (BBB)"]
    matplotlib.pyplot.close(figure)
