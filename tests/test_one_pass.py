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
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.inference_engine import current_engine
from numpyro_fspace.model.joint_evaluation import matching_rows
from numpyro_fspace.model.potential import ModelPotential

X = jnp.linspace(-1.0, 1.0, 7)[:, None]
Y = jnp.sin(3.0 * X[:, 0])
POINTS = jnp.array([[-2.0], [0.3], [1.7]])
KEY = jax.random.key(1)
W = jnp.array([[0.3, -1.0, 0.7, 0.2]])
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=0.1)


class Network:
    """A function of one hidden layer that remembers the shapes of its inputs, and whether it was being compiled."""

    def __init__(self, weights):
        self.weights, self.shapes, self.is_compiled = weights, [], False

    def __call__(self, x):
        self.shapes.append(x.shape)
        self.is_compiled = isinstance(x, jax.core.Tracer)
        return jnp.tanh(x @ self.weights[:, :3]).sum(-1) + self.weights[0, 3]


def at_data(f, x):
    return f(x)


def twice(f, x):
    return 0.5 * (f(x) + f(x))


def row_by_row(f, x):
    return jax.lax.map(lambda row: f(row[None])[0], x)


def vectorized(f, x):
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
    return jax.jit(jax.value_and_grad(potential, has_aux=True))({"w": W}, key)


def in_two_passes(monkeypatch):
    def engine():
        return current_engine()._replace(visits_data=False)

    monkeypatch.setattr("numpyro_fspace.model.functional_priors.current_engine", engine)


@pytest.mark.parametrize("use", some([at_data, twice, row_by_row, vectorized, in_float16, in_numpy, nowhere], 3))
@pytest.mark.parametrize("points", [POINTS, fs.measurement.uniform(-2.0, 2.0, 4)], ids=["fixed", "random"])
@pytest.mark.parametrize("num_priors", [1, pytest.param(2, marks=pytest.mark.slow)])
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
    networks: list[Network] = []
    model = make(at_data, fs.measurement.fixed(POINTS), networks=networks)
    potential = ModelPotential(model, (X, Y), key=jax.random.key(0))
    potential({"w": W}, KEY)  # computes what a mesh without devices cannot compute
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, ("chains", "data"), axis_types=axis_types)):
        jax.make_jaxpr(jax.value_and_grad(potential, has_aux=True))({"w": W}, KEY)
    assert networks[-1].shapes[0] == (rows, 1)


def test_who_wants_no_density_of_all_evaluates_no_more_than_was_asked_for():
    networks: list[Network] = []
    model, draws = make(at_data, networks=networks), {"w": jnp.zeros((2, 1, 4))}
    log_likelihood(model, draws, X, Y)
    fs.predict(draws, jax.random.key(0), X, model=model)
    assert {shape for network in networks for shape in network.shapes} == {(7, 1)}
    networks.clear()
    log_density(model, (X, Y), {}, {"w": jnp.zeros((1, 4))})
    assert networks[-1].shapes == [(7, 1), (3, 1)]


ROWS = np.array([4, 0, 6])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_are_found_whatever_their_order_and_number(dtype):
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(dtype)
    x[7] = x[3]
    numbers = np.array([3, 49, 3, 0])
    points = jnp.asarray(x[numbers])
    found = matching_rows(points, x)
    np.testing.assert_array_equal(np.float32(x[found]), points)
    assert list(matching_rows(points.at[1, 2].add(1e-6), x) >= 0) == [True, False, True, True]
    assert list(matching_rows(x, x[:49]) >= 0) == [True] * 49 + [False]
    x[1] = np.nan
    assert list(matching_rows(jnp.asarray(x[:3]), x)) == [0, -1, 2]
    assert matching_rows(points, x[:0]).tolist() == [-1] * 4
    images = x.reshape(50, 3, 1)
    np.testing.assert_array_equal(matching_rows(images[[5, 2]], images), [5, 2])


SAMPLERS = {
    "fixed": X[ROWS],
    "drawn": fs.measurement.subset(X[ROWS], 2),
    "some fixed": jnp.concatenate([POINTS[:2], X[ROWS]]),
    "some drawn": fs.measurement.union(fs.measurement.uniform(-2.0, 2.0, 2), X[ROWS]),
}
pooled = pytest.mark.parametrize(
    ("points", "num_others"), list(zip(SAMPLERS.values(), [0, 0, 2, 2], strict=True)), ids=list(SAMPLERS)
)


@pooled
@pytest.mark.parametrize("num_priors", some([1, 2], 1))
def test_points_among_the_data_cost_no_pass(points, num_others, num_priors, monkeypatch):
    networks: list[Network] = []
    found = evaluated(make(at_data, points, num_priors, networks), KEY)
    # What one prior puts before the data hides from another that they are the data: all five of its points come along.
    num_more = num_others + 5 * (num_priors - 1) if num_others else 0
    assert networks[-1].shapes == [(7 + num_more, 1)]
    in_two_passes(monkeypatch)
    apart = evaluated(make(at_data, points, num_priors), KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, apart)


def draws_of(mcmc, x):
    """Draws at data ``x``."""
    mcmc.run(jax.random.key(2), x, Y)
    return mcmc.get_samples()["w"]


def driver(model, kind=fs.MCMC):
    kernel = fs.fSGHMC(model, step_size=0.05, num_steps=4)
    return kind(kernel, num_warmup=0, num_samples=10, progress_bar=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
@pooled
def test_a_run_knows_which_of_its_data_the_points_are(points, num_others, monkeypatch):
    """Where data are arguments of the compiled program; and it asks again if they are others of the same shape."""
    networks: list[Network] = []
    mcmc = driver(make(at_data, points, networks=networks))
    moved = X.at[ROWS].set(X[ROWS] + 0.1)
    turned = X[::-1]
    found = {}
    for name, x in [("same", X), ("moved", moved), ("turned", turned), ("again", X)]:
        networks.clear()
        found[name] = draws_of(mcmc, x)
        compiled = [network.shapes for network in networks if network.is_compiled]
        num_checks = 1 if num_others else 0  # what looks at the data before the run puts the others before them too
        assert (compiled.count([(7 + num_others, 1)]) > num_checks) == (name == "same")
    np.testing.assert_array_equal(found["same"], found["again"])
    of_numpyro = draws_of(driver(make(at_data, points), numpyro.infer.MCMC), X)
    np.testing.assert_allclose(found["same"], of_numpyro, rtol=1e-4, atol=1e-5)
    in_two_passes(monkeypatch)
    apart = driver(make(at_data, points))
    for name, x in [("same", X), ("moved", moved), ("turned", turned)]:
        np.testing.assert_allclose(found[name], draws_of(apart, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_data_in_another_order_use_the_same_program():
    mcmc = driver(make(at_data, X[ROWS]))
    for x in (X, X[::-1], jnp.roll(X, 2)):
        draws_of(mcmc, x)
    assert len(mcmc._loops) == 1
    draws_of(mcmc, X.at[0].add(0.1))
    assert len(mcmc._loops) == 2


def latent_inputs(x, y=None):
    """The points are where the latent inputs begin."""
    f = fs.functional_prior("f", Network(numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2))), GP, X)
    inputs = numpyro.sample("z", dist.Normal(x, 0.5).to_event(2))
    numpyro.sample("y", dist.Normal(f(inputs), 0.3).to_event(1), obs=y)


def latent_points(x, y=None):
    points = numpyro.sample("z", dist.Normal().expand([7, 1]).to_event(2))
    f = fs.functional_prior("f", Network(numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2))), GP, points)
    numpyro.sample("y", dist.Normal(f(x), 0.3).to_event(1), obs=y)


def shuffled_points(x, y=None):
    """Others each time that the model is traced."""
    weights = numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2))
    f = fs.functional_prior("f", Network(weights), GP, np.asarray(X)[RNG.permutation(7)[:3]])
    numpyro.sample("y", dist.Normal(f(x), 0.3).to_event(1), obs=y)


def shuffled_data(x, y=None):
    weights = numpyro.sample("w", dist.Normal().expand([1, 4]).to_event(2))
    f = fs.functional_prior("f", Network(weights), GP, np.asarray(X)[ROWS])
    numpyro.sample("y", dist.Normal(f(x[RNG.permutation(7)]), 0.3).to_event(1), obs=y)


RNG = np.random.default_rng(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:init_to_value:RuntimeWarning")  # two of the models have no z
@pytest.mark.parametrize("model", [latent_inputs, latent_points, shuffled_points, shuffled_data])
def test_what_is_equal_when_a_run_begins_may_differ_later(model, monkeypatch):
    start = numpyro.infer.init_to_value(values={"z": X, "w": W})

    def draws():
        global RNG
        RNG = np.random.default_rng(0)
        kernel = fs.fSGHMC(model, step_size=0.05, num_steps=4, init_strategy=start)
        mcmc = fs.MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
        mcmc.run(jax.random.key(2), np.asarray(X), Y)
        return mcmc.get_samples()

    found = draws()
    in_two_passes(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, draws())


def test_missing_inputs_are_no_points(monkeypatch):
    """Points that are yet to be drawn are no rows of NaN, which a function may well take."""
    x = X.at[2].set(jnp.nan)

    def use(f, _):
        return f(x)

    class Filled(Network):
        def __call__(self, x):
            return super().__call__(jnp.nan_to_num(x))

    monkeypatch.setitem(globals(), "Network", Filled)
    model = make(use, fs.measurement.uniform(-2.0, 2.0, 4))
    found = evaluated(model, KEY)
    in_two_passes(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, evaluated(model, KEY))


def test_a_sampler_of_ones_own_is_not_taken_at_its_word(monkeypatch):
    def points(key):
        return jax.random.uniform(key, (4, 1))

    points.num_points = 3  # type: ignore[attr-defined]
    model = make(at_data, fs.measurement.union(X[ROWS], points))
    found = evaluated(model, KEY)
    in_two_passes(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, evaluated(model, KEY))


def test_a_first_call_without_rows(monkeypatch):
    def use(f, x):
        return jnp.concatenate([f(x[:0]), f(x)])

    found = evaluated(make(use, X[ROWS]), KEY)
    in_two_passes(monkeypatch)
    apart = evaluated(make(use, X[ROWS]), KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, apart)


@pytest.mark.slow
def test_two_functions_of_one_name_in_two_scopes_have_points_of_their_own(monkeypatch):
    networks: list[Network] = []
    parts = [make(at_data, points, networks=networks) for points in (X[ROWS], X[::2], POINTS)]

    def model(x, y=None):
        for name, part in zip("abc", parts, strict=True):
            with numpyro.handlers.scope(prefix=name):
                part(x, y)

    def draws():
        mcmc = driver(model)
        mcmc.run(jax.random.key(2), X, Y)
        return mcmc.get_samples()

    found = draws()
    compiled = [network.shapes for network in networks if network.is_compiled]
    assert [[(7, 1)], [(7, 1)], [(10, 1)]] in [compiled[i : i + 3] for i in range(len(compiled))]
    in_two_passes(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, draws())
