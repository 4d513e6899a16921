"""Ablations of the UCI regression: what each setting changes, and that it changes nothing else."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import tinygp
from numpyro import handlers

import numpyro_fspace as fs
from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments import ablations, uci
from numpyro_fspace.experiments.catalog import Job, parse_setting
from numpyro_fspace.experiments.methods import sampler
from numpyro_fspace.experiments.records import record
from numpyro_fspace.experiments.regression import PRECONDITIONERS, Config, known_gp, noisy_model
from numpyro_fspace.model.sites import base_distribution

KEY = jax.random.key(0)


def test_methods_are_settings_of_the_config():
    for method in ablations.EXPERIMENT.methods:
        sampler, _, setting = method.partition(":")
        assert sampler in ablations.SAMPLERS
        if setting:
            name, value = parse_setting(setting)
            assert getattr(ablations.CONFIG.updated({name: value}), name) == value != getattr(ablations.CONFIG, name)
    assert {method for _, method in ablations.PUBLISHED} <= set(ablations.EXPERIMENT.methods)


def test_kernels_by_name():
    x = np.random.default_rng(0).normal(size=(12, 2))
    ell, variance = np.array([0.7, 2.0]), 1.3
    distance = np.sqrt((((x[:, None] - x) / ell) ** 2).sum(-1))
    exact = {
        "rbf": np.exp(-0.5 * distance**2),
        "matern": (1 + np.sqrt(5) * distance + 5 / 3 * distance**2) * np.exp(-np.sqrt(5) * distance),
        "linear": 1 + (x / ell) @ (x / ell).T,
    }
    for name, unit in uci.UNIT_KERNELS.items():
        kernel = variance * tinygp.transforms.Linear(1.0 / ell, unit(tinygp.kernels))
        np.testing.assert_allclose(kernel(x, x), variance * exact[name], rtol=2e-5)


def test_training_is_that_of_fit_gp_and_may_be_left_out():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    y = np.sin(2.0 * x[:, 0]) + 0.1 * rng.normal(size=40)
    ours = uci._train("rbf", x, y, 50, KEY)
    theirs = fs.fit_gp(None, x, y, noise_variance=0.1, num_steps=50, learning_rate=0.1)
    np.testing.assert_allclose(ours.params["lengthscale"], theirs.params["lengthscale"], rtol=1e-6)
    start = uci._train("rbf", x, y, 0, KEY)
    assert start.params["variance"] == pytest.approx(y.var())
    assert start.noise_variance == pytest.approx(0.1, rel=1e-3)
    for kernel in ("matern", "linear"):
        losses = uci._train(kernel, x, y, 50, KEY).losses
        assert losses[-1] < losses[0]


def test_parts_of_the_warm_up_that_are_taken_away():
    def kernel(**settings):
        return sampler("fsghmc", print, ablations.CONFIG.updated(settings))

    whole = kernel()
    assert whole.step_size is None and whole.warmup == fs.Warmup() and whole.num_steps == fs.fSGHMC(print).num_steps
    assert kernel(warm_start=0.0).warmup.warm_start == 0.0
    assert kernel(step_size=0.01).step_size == 0.01
    for name in PRECONDITIONERS:
        assert repr(kernel(preconditioner=name).preconditioner).split("(")[0] == f"fs.preconditioners.{name}"
    with pytest.raises(ValueError, match="preconditioner='adam' is unknown; choose from automatic, identity"):
        kernel(preconditioner="adam")


@pytest.mark.slow
def test_rows_and_points(data_dir):
    whole = uci.prepare("yacht", 0, 0, 0)
    few = uci.prepare("yacht", 0, 0, 0, num_train=50, num_points=10)
    assert few.data.x_train.shape[0] == few.data.y_train.shape[0] == 50
    rows = {tuple(row) for row in np.column_stack([whole.data.x_train, whole.data.y_train])}
    assert all(tuple(row) in rows for row in np.column_stack([few.data.x_train, few.data.y_train]))
    np.testing.assert_array_equal(few.data.x_test, whole.data.x_test)
    assert few.points(KEY).shape[0] == 10
    assert whole.points(KEY).shape[0] == len(whole.data.x_train)
    assert few.exact.f_sd.mean() > whole.exact.f_sd.mean()


def test_unknown_settings(capsys):
    assert main(["run", "uci", "--set", "kernel=cosine"]) == 2
    assert "kernel='cosine' is unknown; choose from rbf, matern, linear" in capsys.readouterr().err


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_noise_that_varies_is_that_of_all_outputs(num_outputs):
    config, x = Config(varying_noise=True, widths=(4,)), np.linspace(-1.0, 1.0, 5, dtype=np.float32)[:, None]
    gp = known_gp(tinygp.kernels.ExpSquared(0.5), 0.2, nugget=0.01)
    model = noisy_model(config, gp, lambda _: lambda x: zeros(x, num_outputs))
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(x)
    sd = np.broadcast_to(base_distribution(trace["y"]["fn"]).scale, trace["y"]["value"].shape).reshape(5, -1)
    assert sd.shape == (5, num_outputs)
    assert (sd == sd[:, :1]).all() and sd[:, 0].std() > 0
    assert trace["y"]["fn"].batch_shape == (5,)


def zeros(x, num_outputs):
    return np.zeros((len(x), num_outputs), np.float32)


def test_noise_that_varies_needs_a_sampler(data_dir):
    job = Job("gfsvi", "yacht", 0, 0, uci.CONFIG.updated({"varying_noise": True, "num_gp_steps": 5}))
    with pytest.raises(ValueError, match="varying_noise=True needs one of the samplers or nuts, not 'gfsvi'"):
        uci.run(job)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*draws diverged:RuntimeWarning")  # after twenty draws of warm-up
def test_noise_that_varies_on_a_random_split(data_dir):
    sizes = {"num_warmup": 20, "num_samples": 30, "num_chains": 2, "num_gp_steps": 60, "widths": (10,)}
    config = uci.CONFIG.updated({"varying_noise": True, "train_share": 0.8, **sizes})
    problem, posterior = uci.fit_split(Job("fsghmc", "yacht", 0, 0, config))
    assert len(problem.data.y_test) == 62
    assert posterior.sigma.shape == posterior.f.shape == (2, 30, 62)
    assert (posterior.sigma.std(-1) > 0).all()
    assert np.isfinite(uci.results(Job("fsghmc", "yacht", 0, 0, config), problem, posterior)["lpd"])


@pytest.mark.slow
def test_a_record(capsys, tmp_path, data_dir):
    path = str(tmp_path / "records.jsonl")
    sizes = ["num_warmup=20", "num_samples=30", "num_gp_steps=60", "widths=(10,)"]
    argv = ["--dataset", "yacht", "--method", "fsghmc:kernel=linear", "--set", *sizes]
    assert main(["run", "ablations", *argv, "--out", path]) == 0
    with open(path) as file:
        (line,) = map(json.loads, file)
    assert line["method"] == "fsghmc:kernel=linear"
    assert np.isfinite(line["rmse"])
    assert line["gp_rmse"] > 0.4  # a line does not fit yacht, a squared exponential does
    assert np.shape(line["curves"]["trace"]) == (3, 30, 2)
    seen = np.array(line["curves"]["coverage"])
    assert (np.diff(seen) >= 0.0).all()  # wider intervals hold more
    assert line["changed"] == {"kernel": "linear"}
    assert line["calibration_error"] == pytest.approx(np.abs(seen - ablations.LEVELS).mean(), abs=1e-3)
    capsys.readouterr()


def test_picture():
    def line(method, coverage):
        trace = np.zeros((3, 5, 2))
        curves = {"level": [0.5, 0.9], "coverage": coverage, "draw": np.arange(5), "trace": trace}
        return record(
            experiment="ablations", dataset="boston", method=method, split=0, seed=0, config={}, curves=curves
        )

    records = [line("fsghmc", [0.4, 0.8]), line("fsghmc", [0.6, 1.0]), line("fsghmc:num_points=10", [0.2, 0.3])]
    records.append(line("fsghmc:kernel=linear", [0.1, 0.2]))
    panels = {ax.get_title(): ax for ax in ablations.picture(records).axes}
    lines = {line.get_label(): line for line in panels["num_points"].lines}
    np.testing.assert_allclose(lines["default"].get_ydata(), [0.5, 0.9])  # the mean of two
    np.testing.assert_allclose(lines["10"].get_ydata(), [0.2, 0.3])
    assert "10" not in {line.get_label() for line in panels["kernel"].lines}
    assert len(panels) == 3  # settings that no record changed have none
