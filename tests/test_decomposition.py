"""``fs.decompose``: both parts of the uncertainty against closed forms."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_fspace as fs

X = np.linspace(-1.0, 2.0, 5).astype(np.float32)
DRAWS = {"slope": np.random.default_rng(0).normal(1.0, 0.5, 40).astype(np.float32)}


def posterior(likelihood):
    """Draws of a slope, under a model whose likelihood is ``likelihood(slope, x)``."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", likelihood(slope, x), obs=y)

    return fs.Posterior(model, DRAWS)


SLOPES = DRAWS["slope"].astype(float)[:, None]
#: Likelihoods, and their mean and variance [S, N] in NumPy.
NUMBERS = {
    "constant noise": (lambda a, x: dist.Normal(a * x, 0.3), SLOPES * X, 0.09 + 0 * SLOPES * X),
    "heteroscedastic": (
        lambda a, x: dist.Normal(a * x, jax.numpy.exp(0.5 * a * x)),
        SLOPES * X,
        np.exp(SLOPES * X),
    ),
    "heavy tails": (lambda a, x: dist.StudentT(4.0, a * x, 0.3), SLOPES * X, 2 * 0.09 + 0 * SLOPES * X),
    "counts": (lambda a, x: dist.Poisson(jax.numpy.exp(a * x)), np.exp(SLOPES * X), np.exp(SLOPES * X)),
    "masked": (lambda a, x: dist.Normal(a * x, 0.3).mask(x > 0), SLOPES * X, 0.09 + 0 * SLOPES * X),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_variance_by_the_law_of_total_variance(name):
    likelihood, mean, variance = NUMBERS[name]
    parts = fs.decompose(posterior(likelihood), X)
    assert parts.kind == "variance"
    np.testing.assert_allclose(parts.mean, mean.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.epistemic, mean.var(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.aleatoric, variance.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.total, mean.var(0) + variance.mean(0), rtol=1e-4, atol=1e-6)


def test_the_sum_is_the_variance_of_predictions(key):
    """20 000 draws of y, whose variance has a standard error of about 1.5 %."""
    draws = {"slope": jax.random.normal(key, (20_000,))}
    source = fs.Posterior(posterior(NUMBERS["heavy tails"][0]).model, draws)
    predicted = fs.predict(source, key, X)["y"].var(0)
    np.testing.assert_allclose(fs.decompose(source, X).total, predicted, rtol=0.1)


def test_several_outputs():
    scale = np.array([0.1, 0.2], np.float32)
    joint = posterior(lambda a, x: dist.Normal(a * x[:, None] * scale * 10, scale).to_event(1))
    parts = fs.decompose(joint, X)
    np.testing.assert_allclose(parts.aleatoric, np.tile(scale**2, (5, 1)), rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, (SLOPES * X).var(0)[:, None] * [1.0, 4.0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parameter", ["logits", "probs"])
def test_entropy_of_classes(parameter):
    def categorical(a, x):
        logits = jax.numpy.stack([a * x, -x, 0 * x], -1)
        return dist.Categorical(**{parameter: logits if parameter == "logits" else jax.nn.softmax(logits)})

    parts = fs.decompose(posterior(categorical), X)
    logits = np.stack(np.broadcast_arrays(SLOPES * X, -X, 0 * X), -1)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = stats.entropy(probabilities, axis=-1).mean(0)
    total = stats.entropy(probabilities.mean(0), axis=-1)
    assert parts.kind == "entropy"
    np.testing.assert_allclose(parts.mean, probabilities.mean(0), rtol=1e-4)
    np.testing.assert_allclose(parts.aleatoric, expected, rtol=1e-4)
    np.testing.assert_allclose(parts.epistemic, total - expected, atol=1e-5)
    assert parts.epistemic[3:].min() > 0.01


def test_two_draws_that_are_certain_and_disagree():
    """The mutual information is log 2, the expected entropy 0; and nothing is NaN at probabilities of 0."""

    def model(x, y=None):
        p = numpyro.sample("p", dist.Uniform())
        numpyro.sample("y", dist.Bernoulli(probs=p * jax.numpy.ones(len(x))), obs=y)

    parts = fs.decompose({"p": np.array([0.0, 1.0], np.float32)}, X, model=model)
    np.testing.assert_allclose(parts.mean, np.full((5, 2), 0.5))
    np.testing.assert_allclose(parts.epistemic, np.full(5, np.log(2.0)))
    np.testing.assert_allclose(parts.aleatoric, np.zeros(5))


def test_several_observed_sites_need_a_name():
    def model(x, y=None, z=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.3), obs=y)
            numpyro.sample("z", dist.Poisson(jax.numpy.exp(slope * x[:, 0])), obs=z)

    with pytest.raises(ValueError, match=r"site=None, but the observed sites of the model are \['y', 'z'\]"):
        fs.decompose(DRAWS, X[:, None], model=model)
    with pytest.raises(ValueError, match="site='w'"):
        fs.decompose(DRAWS, X[:, None], model=model, site="w")
    np.testing.assert_allclose(
        fs.decompose(DRAWS, X[:, None], model=model, site="z").aleatoric, np.exp(SLOPES * X).mean(0), rtol=1e-4
    )


@pytest.mark.slow
def test_batches_of_rows_give_the_same():
    from flax import linen as nn

    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)(x).squeeze(-1)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    draws = numpyro.infer.Predictive(model, num_samples=8)(jax.random.key(0), X[:, None])
    draws = {k: v for k, v in draws.items() if k.startswith("net.")}
    whole = fs.decompose(draws, X[:, None], model=model)
    parts = fs.decompose(draws, X[:, None], model=model, input_batch_size=2, batch_size=3)
    assert parts.epistemic.shape == (5,)
    np.testing.assert_allclose(parts.epistemic, whole.epistemic, rtol=1e-5)


@pytest.mark.parametrize(
    "law, words",
    [
        (lambda a, x: dist.Cauchy(a * x, 0.3), "'y' .Cauchy. is not finite in 40 of 40 draws"),
        (lambda a, x: dist.StudentT(2.0, a * x, 0.3), "variance of 'y' .StudentT. is not finite"),
        (lambda a, x: dist.LeftCensoredDistribution(dist.Normal(a * x, 0.3), x > 0), "LeftCensoredDistribution"),
    ],
)
def test_likelihoods_without_moments_are_named(law, words):
    with pytest.raises(ValueError, match=words):
        fs.decompose(posterior(law), X)


def chained(x, first=None, second=None):
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("data", x.shape[0]):
        first = numpyro.sample("first", dist.Normal(slope * x, 1.0), obs=first)
        numpyro.sample("second", dist.Normal(first, 0.1), obs=second)


def test_moments_that_depend_on_what_the_model_draws_are_refused():
    """Given the first observation the second has its likelihood's moments; without it they are of a random one."""
    source = fs.Posterior(chained, DRAWS, args=(X, X, X))
    with pytest.raises(ValueError, match="'second' depends on values that the model draws itself"):
        fs.decompose(source, X, site="second")
    given = fs.decompose(source, X, first=X, site="second")
    np.testing.assert_allclose(given.mean, X, rtol=1e-6)
    np.testing.assert_allclose(given.epistemic, 0.0, atol=1e-12)


def test_angles_have_no_variance():
    """NumPyro's variance of the von Mises distribution is the circular one, and its mean that of angles."""
    with pytest.raises(ValueError, match="VonMises, whose mean and variance are not known"):
        fs.decompose(posterior(lambda a, x: dist.VonMises(a * x, 1.0)), X)


def test_models_that_index_their_latent_values_and_take_keys_in_vain():
    """Draws of NumPy under traced rows of a plate, and a random key that does not reach the moments."""

    def model(x, group, y=None):
        effects = numpyro.sample("effects", dist.Normal().expand([2]).to_event(1))
        start = (0, 0.0, jax.random.normal(numpyro.prng_key()))
        _, shift, _ = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1.0, c[2] + 1.0), start)
        with numpyro.plate("data", len(x)) as rows:
            numpyro.sample("y", dist.Normal(effects[group[rows]] * x[rows] + shift, 1.0), obs=y)

    draws = {"effects": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)}
    group = np.array([0, 1, 0, 1, 1])
    parts = fs.decompose(draws, X, group, model=model)
    np.testing.assert_allclose(parts.mean, draws["effects"].mean(0)[group] * X + 3.0, rtol=1e-5)
    with pytest.raises(ValueError, match=r"The draws lack the latent sites \['first'\]"):
        fs.decompose(DRAWS, X, model=chained, second=X)
