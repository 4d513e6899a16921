"""The demo: what is seen, the exact process beside it, and a quick run that alarms nobody."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import jax
import numpy as np
import numpyro
import pytest
from scipy.stats import norm

from numpyro_fspace import metrics
from numpyro_fspace.__main__ import main
from numpyro_fspace.datasets import load_co2
from numpyro_fspace.experiments import demo


def test_the_line_is_that_of_the_weeks_seen(data_dir):
    """Nothing of the year that is held out enters the units, and ``ppm`` gives the measured values back."""
    series = demo.load_series()
    assert (series.num_seen, len(series.x)) == (104, 156)
    assert series.x[series.num_seen - 1] < 0.0 <= series.x[series.num_seen]
    z = series.z[: series.num_seen]
    np.testing.assert_allclose([z.mean(), z.std(), (z * series.x[: len(z), 0]).mean()], [0.0, 1.0, 0.0], atol=1e-5)
    t, co2 = load_co2(dtype=np.float64)
    np.testing.assert_allclose(series.ppm(series.z), co2[(t[:, 0] >= 1995) & (t[:, 0] < 1998)], atol=1e-4)


def test_the_exact_process_predicts_the_next_year(data_dir):
    """Its error is a third of that of the line, and its 90 % intervals are honest."""
    series = demo.load_series()
    mean, variance = (moment[series.num_seen :] for moment in demo.exact(series))
    y = series.z[series.num_seen :]
    assert metrics.rmse(y, mean) < 0.35 * metrics.rmse(y, np.zeros_like(y))
    half = norm.ppf(0.95) * np.sqrt(variance + demo.NOISE**2)
    assert 0.8 < np.mean(np.abs(y - mean) < half) < 1.0


@pytest.mark.slow
def test_the_prior_of_the_network_is_the_process(data_dir):
    """Variances and the covariance of a year's distance, which is that of the season (and drift) again."""
    x = np.array([[-1.5], [-1.0], [-0.5], [0.5]], np.float32)
    draws = numpyro.infer.Predictive(demo.with_prior, num_samples=4000)(jax.random.key(0), x)["y"]
    wanted = np.asarray(demo.KERNEL(x, x)) + np.exp(2 * np.log(demo.NOISE) + 2 * 0.3**2) * np.eye(4)
    np.testing.assert_allclose(np.cov(draws, rowvar=False), wanted, atol=0.15)  # six standard errors


@pytest.mark.slow
def test_a_quick_demo_does_not_alarm(data_dir, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert main(["demo", "--quick", "--out", str(tmp_path / "demo")]) == 0
    captured = capsys.readouterr()
    assert "too short to judge" in captured.out
    assert not any(word in captured.out + captured.err for word in ("doubt", "R-hat", "Warning"))
    rows = re.findall(rf"^({'|'.join(demo.NAMES)}) +(\d+\.\d\d) +(-?\d+\.\d\d) +(\d+)%", captured.out, flags=re.M)
    assert [name for name, *_ in rows] == list(demo.NAMES)
    assert float(rows[2][1]) < 1.0  # ppm, of the exact process
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["co2.nc", "co2.png"]
    assert (tmp_path / "demo" / "co2.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_command_line_leaves_the_number_of_devices_open():
    """``fspace demo`` and ``fspace fit`` ask for a device for each chain, which is too late once JAX has started."""
    code = """
import contextlib, jax, numpyro_fspace.__main__ as command
with contextlib.suppress(SystemExit):
    command.main(["--help"])
jax.config.update("jax_num_cpu_devices", 2)
assert jax.device_count() == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
