"""Models a NumPyro user would write, each with data that it could have made: name -> ``Case``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import nnx
from numpyro import handlers
from tinygp import kernels

import numpyro_fspace as fs

RNG = np.random.default_rng(0)
N = 30
X = np.sort(RNG.uniform(-1.0, 1.0, N)).astype(np.float32)[:, None]
TRUTH = np.sin(3.0 * X[:, 0]).astype(np.float32)
NOISE, MORE_NOISE = RNG.normal(size=(2, N)).astype(np.float32)
GROUPS = np.arange(N) % 3
POINTS = np.linspace(-1.2, 1.2, 15, dtype=np.float32)[:, None]
GP = fs.GPPrior(kernels.ExpSquared(0.6), nugget=0.01)


@dataclass(frozen=True)
class Case:
    """A model, its data, and what is expected of it.

    Attributes:
        model: a NumPyro model of ``*data``.
        data: its arguments; the last is what is observed.
        functions: the names of its functions.
        num_draws: draws of each of two chains, and as many of warm-up, that it takes for them to meet.
    """

    model: Callable
    data: tuple
    functions: tuple = ("f",)
    num_draws: int = 300


def mlp(name="net", outputs=1, prior=None):
    network = nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(outputs)])
    return fs.random_module(name, network, input_shape=(1,), prior=prior or fs.fan_in(2.0))


def column(f):
    return lambda x: f(x)[..., 0]


def two_heads(x, y=None):
    """Mean and log noise, two outputs of one network under two independent processes."""
    prior = fs.GPPrior(kernels.ExpSquared(0.6), nugget=0.01, num_outputs=2, mean=jnp.array([0.0, -2.0]))
    f = fs.functional_prior("f", mlp(outputs=2), prior, POINTS)
    with numpyro.plate("data", len(x)):
        mean, log_noise = f(x).T
        numpyro.sample("y", dist.Normal(mean, jnp.exp(log_noise)), obs=y)


def student_t_noise(x, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    df = numpyro.sample("df", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.StudentT(df, f(x)[:, 0], scale), obs=y)


def poisson_counts(x, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + f(x)[:, 0])), obs=y)


def negative_binomial_counts(x, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 0.5))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(1.0 + f(x)[:, 0]), concentration), obs=y)


def random_lengthscale(x, y=None):
    """A process whose lengthscale is learned with the weights."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(0.6), 0.3))
    gp = fs.GPPrior(kernels.ExpSquared(lengthscale), nugget=0.01)
    f = fs.functional_prior("f", mlp(), gp, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)


def several_outputs(x, y=None):
    """Two outputs whose noise is correlated."""
    f = fs.functional_prior(
        "f", mlp(outputs=2), fs.GPPrior(kernels.ExpSquared(0.6), nugget=0.01, num_outputs=2), POINTS
    )
    scale = numpyro.sample("scale", dist.HalfNormal(0.5).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.MultivariateNormal(f(x), scale_tril=scale[:, None] * root), obs=y)


def noise_by_group(x, group, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    typical = numpyro.sample("typical", dist.Normal(-1.5, 0.5))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    with numpyro.plate("groups", 3):
        log_noise = numpyro.sample("log_noise", dist.Normal(typical, spread))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], jnp.exp(log_noise[group])), obs=y)


def mixture_of_experts(x, y=None):
    experts, gate = mlp("experts", outputs=3), mlp("gate", outputs=3, prior=fs.fan_in(1.0))
    f = fs.functional_prior("f", lambda x: (experts(x) * jax.nn.softmax(gate(x))).sum(-1), GP, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x), 0.2), obs=y)


IMAGES = RNG.normal(size=(N, 6, 6, 1)).astype(np.float32)
BRIGHTNESS = IMAGES[:, :3].mean((1, 2, 3))


CONVOLUTIONS = nn.Sequential([nn.Conv(3, (3, 3)), nn.tanh, lambda h: h.reshape(*h.shape[:-3], -1), nn.Dense(1)])
DRAW = fs.model.random_function(CONVOLUTIONS, input_shape=(6, 6, 1))
IMAGE_PRIOR = fs.priors.NetworkPrior(lambda key, x: DRAW(key, x.reshape(-1, 6, 6, 1)), jax.random.key(0), num_draws=200)


def convolutions(x, y=None):
    """Images as the network wants them, flat for the process: its prior is the law of such a network."""
    f = fs.random_module("net", CONVOLUTIONS, input_shape=(6, 6, 1))
    fs.functional_prior("f", lambda x: f(x.reshape(-1, 6, 6, 1)), IMAGE_PRIOR, IMAGES[:10].reshape(10, -1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)


class Residual(eqx.Module):
    """x ↦ readout(h + layer(tanh h)), h = lift x."""

    lift: eqx.nn.Linear
    layer: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.lift, self.layer = eqx.nn.Linear(1, 8, key=keys[0]), eqx.nn.Linear(8, 8, key=keys[1])
        self.readout = eqx.nn.Linear(8, 1, key=keys[2])

    def __call__(self, x):
        h = self.lift(x)
        return self.readout(jnp.tanh(h + self.layer(jnp.tanh(h))))


def equinox_residual(x, y=None):
    f = fs.random_module("net", Residual(jax.random.key(0)), input_shape=(1,), prior=fs.fan_in(2.0))
    f = fs.functional_prior("f", f, GP, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)


def nnx_network(x, y=None):
    rngs = nnx.Rngs(0)
    network = nnx.Sequential(nnx.Linear(1, 10, rngs=rngs), jnp.tanh, nnx.Linear(10, 1, rngs=rngs))
    f = fs.random_module("net", network, input_shape=(1,), prior=fs.fan_in(2.0))
    f = fs.functional_prior("f", f, GP, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)


def two_priors(x, y=None):
    """A smooth trend plus a wiggle, a process on each."""
    trend = fs.functional_prior("trend", column(mlp("slow")), fs.GPPrior(kernels.ExpSquared(2.0), nugget=0.01), POINTS)
    rough = fs.GPPrior(0.3**2 * kernels.ExpSquared(0.2), nugget=0.01)
    wiggle = fs.functional_prior("wiggle", column(mlp("fast")), rough, POINTS)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(trend(x) + wiggle(x), 0.2), obs=y)


def additive(x, y=None):
    """A generalized additive model: a process on one of two networks, weights' priors alone on the other."""
    first = fs.functional_prior("first", column(mlp("a")), GP, POINTS)
    second = column(mlp("b", prior=fs.fan_in(1.0)))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=3.0 * (first(x[:, :1]) + second(x[:, 1:]))), obs=y)


def noisy_inputs(x, y=None):
    """Errors in variables: where f is evaluated is itself unknown."""
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    with numpyro.plate("data", len(x)):
        true = numpyro.sample("true", dist.Normal(x[:, 0], 0.05))
        numpyro.sample("y", dist.Normal(f(true[:, None])[:, 0], 0.2), obs=y)


def missing_outputs(x, seen, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    with numpyro.plate("data", len(x)), handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)


def ordered_classes(x, y=None):
    f = fs.functional_prior("f", mlp(), GP, POINTS)
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(dist.Normal(0.0, 1.0).expand([2]).to_event(1), dist.transforms.OrderedTransform()),
    )
    with numpyro.plate("data", len(x), subsample_size=20):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.OrderedLogistic(4.0 * f(xb)[:, 0], cuts), obs=yb)


PAIR = np.concatenate([X, RNG.permutation(X)], 1)
SEEN = np.arange(N) % 4 != 0
Y = TRUTH + 0.2 * NOISE
CASES = {
    "heteroscedastic": Case(two_heads, (X, TRUTH + 0.3 * np.exp(X[:, 0]) * NOISE), num_draws=1500),
    "student_t": Case(student_t_noise, (X, np.where(np.arange(N) == 7, 5.0, Y).astype(np.float32))),
    "poisson": Case(poisson_counts, (X, RNG.poisson(np.exp(1.0 + TRUTH)))),
    "negative_binomial": Case(negative_binomial_counts, (X, RNG.negative_binomial(3, 3 / (3 + np.exp(1.0 + TRUTH))))),
    "random_lengthscale": Case(random_lengthscale, (X, Y)),
    "several_outputs": Case(several_outputs, (X, np.stack([Y, TRUTH**2 + 0.2 * MORE_NOISE], 1))),
    "noise_by_group": Case(noise_by_group, (X, GROUPS, TRUTH + np.array([0.1, 0.2, 0.4])[GROUPS] * NOISE)),
    "mixture_of_experts": Case(mixture_of_experts, (X, Y)),
    "convolutions": Case(convolutions, (IMAGES, 3.0 * BRIGHTNESS + 0.2 * NOISE), ("net",)),
    "equinox_residual": Case(equinox_residual, (X, Y)),
    "nnx": Case(nnx_network, (X, Y)),
    "two_priors": Case(two_priors, (X, Y), ("trend", "wiggle")),
    "additive": Case(additive, (PAIR, (RNG.uniform(size=N) < 1 / (1 + np.exp(-3 * TRUTH))).astype(int)), ("first",)),
    "noisy_inputs": Case(noisy_inputs, (X, Y)),
    "missing_outputs": Case(missing_outputs, (X, SEEN, np.where(SEEN, Y, 100.0).astype(np.float32))),
    "ordered_classes": Case(ordered_classes, (X, np.digitize(TRUTH, [-0.5, 0.5]))),
}
