"""Function diagnostics against ArviZ, on independent, autocorrelated, stuck, collapsed and broken chains."""

import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.distributions.transforms import AffineTransform

from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.posterior.model_structure import likelihood_parameters

#: Distributions of two parameters, which may stand in a distribution around them or be kept in another form.
LIKELIHOODS = {
    "normal": lambda a, b: dist.Normal(a, b).to_event(1),
    "masked": lambda a, b: dist.Normal(a, b).mask(jnp.array([True, False])),
    "log-normal": dist.LogNormal,
    "negative binomial": dist.NegativeBinomial2,
    "beta": dist.BetaProportion,
    "zero-inflated": dist.ZeroInflatedPoisson,
    "zero-inflated by logits": lambda a, b: dist.ZeroInflatedDistribution(dist.Poisson(a), gate_logits=b),
    "transformed": lambda a, b: dist.TransformedDistribution(dist.Normal().expand([2]), AffineTransform(a, b)),
    "Pareto": dist.Pareto,
    "truncated": lambda a, b: dist.TruncatedNormal(a, low=-b),
    "censored": lambda a, b: dist.RightCensoredDistribution(dist.Normal(a, b), jnp.zeros(2)),
    "mixture": lambda a, b: dist.MixtureSameFamily(dist.Categorical(logits=a), dist.Normal(b, 1.0)),
    "normal of a covariance": lambda a, b: dist.MultivariateNormal(a, jnp.diag(b)),
}


def autoregression(phi, num_chains, num_draws, num_points=6, seed=0):
    draws = np.random.default_rng(seed).normal(size=(num_chains, num_draws, num_points))
    for s in range(1, num_draws):
        draws[:, s] += phi * draws[:, s - 1]
    return draws


@pytest.fixture(scope="module")
def arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases announce their successor on import
        import arviz
    return arviz


def by_arviz(arviz, draws):
    data = xr.Dataset({"f": (("chain", "draw", "point"), draws)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = {
            "rhat": arviz.rhat(data),
            "ess_bulk": arviz.ess(data, method="bulk"),
            "ess_tail": arviz.ess(data, method="tail", prob=(0.05, 0.95)),
            "mcse_mean": arviz.mcse(data, method="mean"),
        }
    return {name: table["f"].values for name, table in tables.items()}


# Even, odd and minimal lengths; halves of 6 reach the last autocorrelation, of 7 an odd transform length.
@pytest.mark.parametrize("shape", [(4, 500), (2, 101), (3, 4), (2, 5), (2, 12), (2, 13), (3, 14), (5, 33)])
@pytest.mark.parametrize("phi", [0.0, 0.95, -0.7])
def test_statistics_are_arvizs(arviz, shape, phi):
    draws = autoregression(phi, *shape)
    diagnostics = function_diagnostics(draws)
    for name, expected in by_arviz(arviz, draws).items():
        np.testing.assert_allclose(getattr(diagnostics, name), expected, rtol=1e-10, err_msg=name)


def test_statistics_are_arvizs_with_ties_and_shifted_chains(arviz):
    rng = np.random.default_rng(1)
    discrete = rng.integers(0, 3, size=(4, 200, 2)).astype(float)
    shifted = rng.normal(size=(4, 200, 2)) + np.arange(4)[:, None, None]
    widened = rng.normal(size=(4, 200, 2)) * (1 + np.arange(4))[:, None, None]  # equal means: R-hat of the folded
    draws = np.concatenate([discrete, shifted, widened], axis=2)
    diagnostics = function_diagnostics(draws)
    for name, expected in by_arviz(arviz, draws).items():
        np.testing.assert_allclose(getattr(diagnostics, name), expected, rtol=1e-10, err_msg=name)
    assert np.all(diagnostics.rhat[2:] > 1.1)


def test_moments_pool_chains():
    draws = np.random.default_rng(0).normal(size=(3, 50, 2, 2))
    diagnostics = function_diagnostics(draws)
    flat = draws.reshape(150, 4)
    np.testing.assert_allclose(diagnostics.mean, flat.mean(axis=0))
    np.testing.assert_allclose(diagnostics.sd, flat.std(axis=0, ddof=1))
    assert diagnostics.names == ("f[0, 0]", "f[0, 1]", "f[1, 0]", "f[1, 1]")
    assert (diagnostics.num_chains, diagnostics.num_draws) == (3, 50)


def test_summary_names_the_worst_point():
    draws = autoregression(0.0, 4, 400, 3)
    draws[0, :, 1] += 2.0
    diagnostics = function_diagnostics(draws, names=["left", "gap", "right"])
    assert diagnostics.max_rhat == diagnostics.rhat[1] > 1.05
    assert diagnostics.min_ess == min(diagnostics.ess_bulk[1], diagnostics.ess_tail[1])
    np.testing.assert_array_equal(diagnostics.converged, [True, False, True])
    text = str(diagnostics)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["R-hat"].endswith("gap") and f"{diagnostics.max_rhat:.3f}" in rows["R-hat"]
    assert rows["ESS bulk"].endswith("gap") and f"{diagnostics.ess_bulk.min():.0f}" in rows["ESS bulk"]
    assert "2 of 3 points" in text


def test_many_chains_need_more_draws_to_converge():
    draws = autoregression(0.0, 8, 40, 1)  # about 320 effective draws, 400 needed
    assert not function_diagnostics(draws).converged.any()


def test_a_dict_gives_one_point_per_entry():
    rng = np.random.default_rng(0)
    draws = {"f": rng.normal(size=(2, 20, 2)), "sigma": rng.normal(size=(2, 20))}
    diagnostics = function_diagnostics(draws)
    assert diagnostics.names == ("f[0]", "f[1]", "sigma")
    assert diagnostics.mean[2] == pytest.approx(draws["sigma"].mean())
    assert diagnostics.rhat[2] == pytest.approx(function_diagnostics(draws["sigma"]).rhat[0])


def test_one_chain_is_compared_by_halves():
    rng = np.random.default_rng(0)
    still, drifting = rng.normal(size=(1, 400, 1)), rng.normal(size=(1, 400, 1))
    drifting[:, 200:] += 3.0
    diagnostics = function_diagnostics(np.concatenate([still, drifting], axis=2))
    assert diagnostics.rhat[0] < 1.02 and diagnostics.rhat[1] > 1.5
    assert "one chain" in str(diagnostics)


def test_a_function_that_never_varies_is_called_collapsed():
    draws = autoregression(0.0, 4, 50, 3)
    draws[..., 1] = 0.1
    with pytest.warns(UserWarning, match=r"same in every draw at 1 of 3 points \(first f\[1\]\)"):
        diagnostics = function_diagnostics(draws)
    assert np.isnan([diagnostics.rhat[1], diagnostics.ess_bulk[1], diagnostics.mcse_mean[1]]).all()
    assert diagnostics.mean[1] == pytest.approx(0.1) and diagnostics.sd[1] == pytest.approx(0.0)
    assert np.isfinite(diagnostics.rhat[[0, 2]]).all()
    assert np.isnan(diagnostics.max_rhat) and np.isnan(diagnostics.min_ess)
    assert not diagnostics.converged[1]
    assert "collapsed" in str(diagnostics)


def test_rounding_noise_is_not_variation():
    draws = np.float32(100.0) + np.zeros((2, 50, 1), np.float32)
    draws[0, ::2] = np.nextafter(np.float32(100.0), np.float32(200.0))
    with pytest.warns(UserWarning, match="same in every draw"):
        assert np.isnan(function_diagnostics(draws).rhat).all()


def test_everything_collapsed_still_prints():
    with pytest.warns(UserWarning, match="same in every draw at 2 of 2"):
        text = str(function_diagnostics(np.ones((2, 10, 2))))
    assert "nan" in text and "0 of 2 points" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_draws_give_nan_at_their_points_only(bad):
    draws = autoregression(0.0, 4, 50, 3)
    clean = function_diagnostics(draws)
    draws[2, 7, 2] = bad
    with pytest.warns(UserWarning, match=r"NaN or infinite in some draw at 1 of 3 points \(first f\[2\]\)"):
        diagnostics = function_diagnostics(draws)
    assert np.isnan([diagnostics.mean[2], diagnostics.sd[2], diagnostics.rhat[2]]).all()
    np.testing.assert_array_equal(diagnostics.rhat[:2], clean.rhat[:2])


def test_a_chain_that_never_moves_is_named():
    draws = autoregression(0.0, 3, 50, 2)
    draws[1] = 0.3
    with pytest.warns(UserWarning, match="never moves in chain 1 "):
        diagnostics = function_diagnostics(draws)
    assert diagnostics.max_rhat > 1.05


def test_a_chain_that_moves_elsewhere_is_not_called_stuck():
    draws = autoregression(0.0, 3, 50, 2)
    draws[1, :, 0] = 0.3
    assert function_diagnostics(draws).notes == ()  # a warning would be an error


def test_chains_stuck_apart_have_infinite_rhat():
    draws = np.broadcast_to(np.arange(3.0)[:, None, None], (3, 20, 1))
    with pytest.warns(UserWarning, match="never moves in chain 0, 1, 2"):
        assert function_diagnostics(draws).max_rhat > 1e6


def test_blocks_do_not_change_the_numbers():
    draws = autoregression(0.5, 4, 1000, 600)  # 2.4 million numbers: three blocks
    whole, part = function_diagnostics(draws), function_diagnostics(draws[..., 400:])
    np.testing.assert_allclose(whole.ess_bulk[400:], part.ess_bulk)
    np.testing.assert_allclose(whole.rhat[400:], part.rhat)


@pytest.mark.slow
def test_a_thousand_points_take_seconds():
    draws = autoregression(0.5, 4, 1000, 1000)
    start = time.process_time()
    function_diagnostics(draws)
    assert time.process_time() - start < 20.0


@pytest.mark.parametrize(
    ("draws", "names", "message"),
    [
        (np.zeros(10), None, r"shape \[chains, draws, ...\]"),
        (np.zeros((4, 10, 0)), None, "not be empty"),
        (np.zeros((10, 3, 2)), None, "axes swapped"),
        ({"f": np.zeros((2, 10)), "g": np.zeros((2, 11))}, None, "agree in chains and draws"),
        ({"f": np.zeros((2, 10))}, ["f"], "labeled by its keys"),
        ({}, None, "empty dict"),
        (np.zeros((2, 10, 3)), ["a", "b"], "names has 2 labels, f has 3 points"),
    ],
)
def test_bad_input_is_named(draws, names, message):
    with pytest.raises(ValueError, match=message):
        function_diagnostics(draws, names=names)


def test_text_is_a_type_error():
    with pytest.raises(TypeError, match="f must hold real numbers"):
        function_diagnostics(np.full((2, 10), "a"))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_parameter_of_a_likelihood_is_judged(name):
    """A function that enters the data by any of them is not left out."""

    def parameters(given):
        sites = {"y": {"type": "sample", "fn": LIKELIHOODS[name](*given), "is_observed": True}}
        return likelihood_parameters(sites, {})

    given = jnp.array([0.4, 0.7]), jnp.array([0.5, 0.8])
    for slopes in zip(*(jax.tree.leaves(parts) for parts in jax.jacobian(parameters)(given).values()), strict=True):
        assert any(np.any(slope != 0) for slope in slopes)


def test_parameters_of_a_likelihood_have_their_names():
    for fn, names in (
        (dist.StudentT(4.0, jnp.zeros(2), 1.0), ["y.df", "y.loc", "y.scale"]),
        (dist.Normal(jnp.zeros(2), 1.0).to_event(1), ["y.loc", "y.scale"]),
        (dist.Categorical(logits=jnp.zeros(3)), ["y.logits"]),
    ):
        assert list(likelihood_parameters({"y": {"type": "sample", "fn": fn, "is_observed": True}}, {})) == names


def test_draws_of_all_chains_taken_for_chains_are_warned_of():
    """``fs.predict`` returns [S, N, 1], which would be S chains of N draws."""
    chains = np.random.default_rng(0).normal(size=(4, 100, 30)) + 5.0 * np.arange(4)[:, None, None]
    draws = chains.reshape(400, 30, 1)
    with pytest.warns(UserWarning, match=r"400 chains of 30 draws.*f.reshape\(num_chains, -1"):
        function_diagnostics(draws)
    assert function_diagnostics(draws.reshape(4, -1, *draws.shape[1:])).max_rhat > 2.0
