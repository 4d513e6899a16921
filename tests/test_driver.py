"""``fs.MCMC`` as a driver: NumPyro's draws, a bar that informs, and nothing lost when it is stopped."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import pytest
from models import POINTS, X, Y, linear, random_points
from numpyro.infer import NUTS

import numpyro_fspace as fs
from numpyro_fspace.infer import mcmc as driver
from numpyro_fspace.infer.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEY = jax.random.key(3)


#: A kernel that compiles fast: nothing to calibrate, no control variates.
PLAIN = {"step_size": 0.05, "preconditioner": fs.preconditioners.prior_scale(), "control_variates": False}


def make(cls=fs.MCMC, *, num_chains=2, num_warmup=25, num_samples=34, options=PLAIN, **settings):
    kernel = fs.fSGHMC(linear(random_points(), batch=4), num_steps=3, **options)
    settings = {"chain_method": "vectorized", "progress_bar": False} | settings
    return cls(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, **settings)


def finished(*args, fields=("potential_energy", "warmup.step_size", "control"), **settings):
    mcmc = make(*args, **settings)
    mcmc.run(KEY, X, Y, extra_fields=fields)
    return mcmc


@pytest.mark.parametrize("num_chains, thinning, options", [(1, 1, PLAIN), (3, 2, {})])
def test_draws_are_those_of_numpyros_driver(num_chains, thinning, options):
    """Fields, names inside fields and trees among them too."""
    settings = {"num_chains": num_chains, "thinning": thinning, "options": options}
    ours, theirs = (finished(c, **settings) for c in (fs.MCMC, numpyro.infer.MCMC))
    for group in (True, False):
        for read in ("get_samples", "get_extra_fields"):
            a, b = (getattr(mcmc, read)(group_by_chain=group) for mcmc in (ours, theirs))
            assert jax.tree.structure(a) == jax.tree.structure(b)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.shape == y.shape and x.dtype == y.dtype
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert int(np.ravel(ours.last_state.i)[0]) == 59


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(driver, "is_watched", lambda: True)


def with_bar(**settings):
    mcmc = make(num_warmup=60, num_samples=90, **settings)
    mcmc.progress_bar = True  # NumPyro turns it off under continuous integration
    return mcmc


@pytest.mark.parametrize("num_chains", [1, 2])
def test_the_bar_says_what_the_chains_do(watched, capsys, monkeypatch, num_chains):
    monkeypatch.setattr("numpyro_fspace.infer.progress.INTERVAL", 0.0)  # the smallest parts
    mcmc = with_bar(num_chains=num_chains)
    mcmc.run(KEY, X, Y)
    text = capsys.readouterr().err
    assert "warm-up" in text and "sample: 100%" in text and "150/150" in text
    last = text.split("\r")[-1]
    assert all(word in last for word in (", U ", "step 0.", "T "))
    assert ("R-hat of f" in last) == (num_chains > 1)
    plain = make(num_warmup=60, num_samples=90, num_chains=num_chains)
    plain.run(KEY, X, Y)
    np.testing.assert_allclose(mcmc.get_samples()["w"], plain.get_samples()["w"], rtol=1e-4, atol=1e-4)


def test_logs_are_silent(capsys):
    with_bar().run(KEY, X, Y)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_draws_of_an_interrupted_run_are_kept(watched, monkeypatch, capsys):
    """Ctrl-C in the 60th draw of sampling, thinned by two: thirty draws are there, those of the whole run."""
    update, parts = Progress.update, []

    def interrupted(self, done, state, functions=None):
        update(self, done, state, functions)
        self.size = 10
        parts.append(done)
        if self.done >= 120:
            raise KeyboardInterrupt

    whole = make(num_warmup=60, num_samples=90, thinning=2)
    whole.run(KEY, X, Y)
    monkeypatch.setattr(Progress, "update", interrupted)
    mcmc = with_bar(thinning=2)
    with pytest.raises(KeyboardInterrupt):
        mcmc.run(KEY, X, Y)
    kept, drawn = (m.get_samples(group_by_chain=True)["w"] for m in (mcmc, whole))
    assert kept.shape == (2, 30, 2) and len(parts) > 5
    np.testing.assert_allclose(kept, drawn[:, :30], rtol=1e-4, atol=1e-4)
    assert fs.predict(mcmc, KEY, X)["f"].shape == (60, 8)


def test_what_it_does_not_do_itself_is_numpyros():
    """Continued runs, warm-up by itself, other kernels, excluded sites."""
    mcmc = make(num_chains=1)
    mcmc.warmup(KEY, X, Y)
    mcmc.run(KEY, X, Y)
    assert mcmc.get_samples()["w"].shape == (34, 2)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, X, Y)
    assert int(mcmc.last_state.i) == 25 + 34 + 34
    without = finished(fields=("~z.w",))
    assert "w" not in without.get_samples()
    nuts = fs.MCMC(NUTS(linear(POINTS)), num_warmup=10, num_samples=10, progress_bar=False)
    nuts.run(KEY, X, Y)
    assert nuts.get_samples()["w"].shape == (10, 2)
