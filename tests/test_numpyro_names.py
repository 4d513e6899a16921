"""The private names of NumPyro that the package uses are there, mean what we take them for, and are missed aloud."""

from __future__ import annotations

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoGuideList, AutoNormal
from numpyro.infer.util import potential_energy

import numpyro_fspace as fs
from numpyro_fspace.model import _numpyro

TOP = Path(__file__).parents[1]


def test_active_handlers_are_listed_from_the_outermost():
    seed, block = handlers.seed(rng_seed=0), handlers.block()
    with seed, block:
        assert _numpyro.active_handlers() == (seed, block)
    assert _numpyro.active_handlers() == ()


def test_the_potential_of_numpyro_is_recognized():
    seen = []

    def model():
        seen.append([_numpyro.is_unconstraining(one) for one in _numpyro.active_handlers()])
        numpyro.sample("z", dist.Normal())

    potential_energy(model, (), {}, {"z": jnp.zeros(())})
    assert any(seen[-1])
    handlers.seed(handlers.substitute(model, data={"z": 0.0}), 0)()
    assert not any(seen[-1])


def test_rows_of_a_plate():
    with handlers.seed(rng_seed=0), numpyro.plate("data", 5, subsample_size=2) as rows:
        assert _numpyro.plate_rows(_numpyro.active_handlers()[-1]) is rows


def test_mask_of_a_distribution():
    mask = jnp.array([True, False])
    assert _numpyro.mask_of(dist.Normal(jnp.zeros(2)).mask(mask)) is mask


def test_flat_values_of_a_guide():
    def model():
        numpyro.sample("b", dist.Normal().expand([2]))
        numpyro.sample("a", dist.Normal())

    guide = fs.variational.guides.mean_field(model)
    SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO()).init(jax.random.key(0))
    sites = _numpyro.flat_to_sites(guide)(jnp.arange(3.0))
    assert {name: value.shape for name, value in sites.items()} == {"a": (), "b": (2,)}


def test_parts_of_a_list_of_guides():
    guide, part = AutoGuideList(lambda: None), AutoNormal(lambda: None)
    guide.append(part)
    assert list(_numpyro.parts_of(guide)) == [part]


@pytest.mark.parametrize("is_forward", [False, True])
def test_the_mode_of_differentiation(is_forward):
    assert _numpyro.is_forward_mode(NUTS(lambda: None, forward_mode_differentiation=is_forward)) == is_forward


def test_an_attribute_that_is_missing_is_named():
    with pytest.raises(AttributeError, match=r"has no AutoNormal\._unpack_latent"):
        _numpyro.flat_to_sites(AutoNormal(lambda: None))


def test_a_name_that_is_missing_is_named(monkeypatch):
    monkeypatch.delattr("numpyro.primitives._PYRO_STACK")
    spec = importlib.util.spec_from_file_location("without", _numpyro.__file__)
    with pytest.raises(ImportError, match=r"_PYRO_STACK.*Install another version"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_cure_names_the_versions_of_the_distribution():
    (needed,) = [
        d
        for d in tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["dependencies"]
        if d.startswith("numpyro")
    ]
    assert f"'{needed}'" in Path(_numpyro.__file__).read_text()


def test_private_names_of_numpyro_stay_in_one_module():
    private = re.compile(r"numpyro\.\S* import .*\b_[a-zA-Z]\w*|\b_PYRO_STACK\b|\._unpack_latent\b|\._indices\b")
    files = [
        p
        for folder in ("model", "posterior", "variational", "baselines", "priors")
        for p in (TOP / "numpyro_fspace" / folder).rglob("*.py")
        if p.name != "_numpyro.py"
    ]
    lines = [line for path in files for line in path.read_text().splitlines() if "numpyro_fspace" not in line]
    assert [line for line in lines if private.search(line)] == []


def test_private_attributes_of_numpyro_are_those_listed():
    source = "".join(path.read_text() for path in (TOP / "numpyro_fspace").rglob("*.py"))
    used = set(re.findall(r"\.(_[a-z]\w*)", source)) | set(re.findall(r"def (_[a-z]\w*)\(self", source))
    shared = {"_model", "_sample_fn"}  # of the kernels of this package too
    for owner in (HMC, MCMC):
        private = re.findall(r"(?:self\.|def )(_[a-z]\w*)", inspect.getsource(owner))
        assert used & set(private) - shared == set(_numpyro.MEMBERS[owner.__name__])
