"""The density at the measurement points comes out of the pass over the data: same value, fewer passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro.infer.util import log_density, log_likelihood

import numpyro_fspace as fs
from numpyro_fspace.potential import ModelPotential

X = jnp.linspace(-1.0, 1.0, 7)[:, None]
Y = jnp.sin(3.0 * X[:, 0])
POINTS = jnp.array([[-2.0], [0.3], [1.7]])
KEY = jax.random.key(1)
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=0.1)


class Network:
    """A function of one hidden layer that remembers the shapes of its inputs."""

    def __init__(self, weights):
        self.weights, self.shapes = weights, []

    def __call__(self, x):
        self.shapes.append(x.shape)
        return jnp.tanh(x @ self.weights[:, :3]).sum(-1) + self.weights[0, 3]


def at_data(f, x):
    return f(x)


def twice(f, x):
    return 0.5 * (f(x) + f(x))


def row_by_row(f, x):
    return jax.lax.map(lambda row: f(row[None])[0], x)


def vectorised(f, x):
    return jax.vmap(lambda row: f(row[None])[0])(x)


def in_float16(f, x):
    return f(x.astype(jnp.float16)).astype(jnp.float32)


def in_numpy(f, x):
    return f(np.asarray(X))


def nowhere(f, x):
    return jnp.zeros(len(x))


def make(use, points=POINTS, num_priors=1, networks=None):
    def model(x, y=None):
        weights = numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2))
        f = Network(weights)
        if networks is not None:
            networks.append(f)
        for i in range(num_priors):
            f = fs.functional_prior(f"f{i}", f, GP, points)
        numpyro.sample("y", dist.Normal(use(f, x), 0.3).to_event(1), obs=y)

    return model


def evaluated(model, key, x=X):
    """U, the functional prior's share of it, and the gradient."""
    potential = ModelPotential(model, (x, Y), key=jax.random.key(0))
    z = {"w": jnp.array([[0.3, -1.0, 0.7, 0.2]])}
    return jax.jit(jax.value_and_grad(potential, has_aux=True))(z, key)


def in_two_passes(monkeypatch):
    monkeypatch.setattr("numpyro_fspace.primitives._goes_through_all_data", lambda: False)


@pytest.mark.parametrize("use", [at_data, twice, row_by_row, vectorised, in_float16, in_numpy, nowhere])
@pytest.mark.parametrize("points", [POINTS, fs.measurement.uniform(-2.0, 2.0, 4)], ids=["fixed", "random"])
@pytest.mark.parametrize("num_priors", [1, 2])
def test_the_density_and_its_gradient_are_those_of_two_passes(use, points, num_priors, monkeypatch):
    model = make(use, points, num_priors)
    found = evaluated(model, KEY)
    in_two_passes(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, evaluated(model, KEY))
    assert abs(found[0][1]) > 0.1


def passes(**settings):
    """Shapes of what the network sees in one evaluation of the potential."""
    networks: list[Network] = []
    evaluated(make(networks=networks, **settings), KEY)
    return networks[-1].shapes


def test_number_of_passes(monkeypatch):
    assert passes(use=at_data) == [(10, 1)]
    assert passes(use=twice) == [(10, 1), (7, 1)]
    assert passes(use=at_data, num_priors=2) == [(13, 1)]
    assert passes(use=in_float16) == [(7, 1), (3, 1)]
    assert passes(use=nowhere) == [(3, 1)]
    in_two_passes(monkeypatch)
    assert passes(use=at_data) == [(7, 1), (3, 1)]


@pytest.mark.parametrize("is_argument", [True, False])
def test_points_that_are_the_data_are_seen_once(is_argument, monkeypatch):
    networks: list[Network] = []

    def model(x, y=None):
        f = Network(numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2)))
        networks.append(f)
        f = fs.functional_prior("f", f, GP, x if is_argument else X)
        numpyro.sample("y", dist.Normal(f(x), 0.3).to_event(1), obs=y)

    found = jax.jit(lambda x: evaluated(model, KEY, x))(X) if is_argument else evaluated(model, KEY)
    assert networks[-1].shapes == [(7, 1)]
    in_two_passes(monkeypatch)
    apart = evaluated(make(at_data, X), KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, apart)


@pytest.mark.parametrize(("sizes", "rows"), [((1, 1), 10), ((1, 2), 7)])
def test_rows_on_several_devices_stay_there(sizes, rows):
    seen = []

    def density(x):
        networks: list[Network] = []
        evaluated(make(at_data, networks=networks), KEY, x)
        seen.extend(networks[-1].shapes)
        return x

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, ("chains", "data"))):
        jax.make_jaxpr(density)(X)
    assert seen[0] == (rows, 1)


def test_who_wants_no_density_of_all_evaluates_no_more_than_was_asked_for():
    networks: list[Network] = []
    model, draws = make(at_data, networks=networks), {"w": jnp.zeros((2, 1, 4))}
    log_likelihood(model, draws, X, Y)
    fs.predict(draws, jax.random.key(0), X, model=model)
    assert {shape for network in networks for shape in network.shapes} == {(7, 1)}
    networks.clear()
    log_density(model, (X, Y), {}, {"w": jnp.zeros((1, 4))})
    assert networks[-1].shapes == [(7, 1), (3, 1)]
