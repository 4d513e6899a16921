"""One table of mistakes: each is refused before anything is computed, naming what is wrong and what to do."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from flax import nnx
from models import NOISE, POINTS, Independent, X, Y, line, linear, random_points
from numpyro import handlers
from numpyro.infer import NUTS, init_to_value
from scipy import sparse
from support.tiers import some
from tinygp.kernels import Custom, DotProduct, ExpSquared, Polynomial
from tinygp.transforms import Cholesky, Linear, Subspace

import numpyro_fspace as fs
from numpyro_fspace.model.checks.arguments import not_finite
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.priors.tolerance import tolerant_factor

KEY = jax.random.key(0)
DEEP = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)])
EMBEDDING = nn.Sequential([nn.Embed(9, 1), lambda h: h[:, 0]])
LEVELS = np.arange(9.0)[:, None]
DRAWS = {"w": jnp.ones((3, 2))}
TIMES = np.float64(1.6e9) + np.arange(8.0)[:, None]
WRONG = 3.0


def start(kernel, *data, num_warmup=4, init_params=None, **kwargs):
    """What ``MCMC.run`` does first, up to the compilation."""
    data = data or (X, Y)
    return jax.eval_shape(lambda key: kernel.init(key, num_warmup, init_params, data, kwargs), KEY)


def start_model(model, *data, **kwargs):
    return start(fs.SGHMC(model), *data, **kwargs)


def with_site(make):
    """The linear model with one more site, made by ``make()``."""

    def model(x, y=None):
        make()
        linear()(x, y)

    return model


def column_model(x, y=None):
    """y of shape [N, 1] under a likelihood [N]."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(line(w)(x), NOISE), obs=None if y is None else y[:, None])


GRID = np.linspace(-1.0, 1.0, 20)[:, None]


def gp_network(module=DEEP, prior=None, points=GRID, name="net", **settings):
    """What ``fs.gp_network`` does in a model."""
    prior = fs.GPPrior(ExpSquared(1.0)) if prior is None else prior
    return lambda: handlers.seed(lambda: fs.gp_network(name, module, prior, points, **settings), KEY)()


TWO = np.repeat(X, 2, axis=1)


def points_for_two(module, points):
    """A ``gp_network`` of two inputs, evaluated at some, whose points have another number."""
    return lambda: handlers.seed(lambda: fs.gp_network("net", module, gp(), points)(TWO), KEY)()


def two_inputs(points):
    """A model of a network of two inputs with a functional prior at the points."""

    def model(x, y):
        f = fs.functional_prior("f", fs.random_module("net", nn.Dense(1), input_shape=2), gp(), points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)

    return model


def in_minibatches(inputs, targets):
    """The linear model in a plate of minibatches: ``inputs`` and ``targets`` take their rows from all."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("rows", 8, subsample_size=4) as rows:
            numpyro.sample("y", dist.Normal(line(w)(inputs(x, rows)), NOISE), obs=targets(y, rows))

    return model


def all_of(array, rows):
    return array


def at(array, rows):
    return array[rows]


def in_plate(make):
    def model():
        with numpyro.plate("rows", 3):
            make()

    return lambda: handlers.seed(model, KEY)()


def in_rows(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(line(w)(x), NOISE), obs=y)


def apart(distance):
    """The draws of two chains, of which one is far from the data."""
    draws = np.concatenate([np.zeros(20), np.full(20, distance)])

    def model(y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal()), 1.0), obs=y)

    return fs.Posterior(model, {"mu": draws}, num_chains=2, args=(np.ones(5),))


def local_model(x, y=None):
    linear()(x, y)
    with numpyro.plate("rows", 8, subsample_size=2):
        numpyro.sample("z", dist.Normal())


def hardly(x1, x2):
    """Of positive variance, but not a covariance."""
    return jnp.cos(9.0 * (x1 - x2.T)) - 0.9 * jnp.cos(x1 - x2.T)


def indefinite(x1, x2):
    return -jnp.ones((len(x1), len(x2)))


def network(module=None, **settings):
    def model(x, y=None):
        settings.setdefault("input_shape", (1,))
        f = fs.random_module("net", module or nn.Dense(1), **settings)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)

    return model


def prior_model(prior=None, points=POINTS, fn=None, **settings):
    """Only the statement itself, with the linear network [M] as fn."""
    fn = line(jnp.ones(2)) if fn is None else fn
    return lambda: fs.functional_prior("f", fn, Independent() if prior is None else prior, points, **settings)


def evaluate(prior, points, outputs=None):
    """The functional prior's density, of values [M] or [M, K]."""
    fn = line(jnp.ones(2)) if outputs is None else lambda x: jnp.zeros((len(x), outputs))
    model = with_site(lambda: fs.functional_prior("f", fn, prior, points))
    return start(fs.fSGHMC(model))


class NoSupport(dist.Distribution):
    def log_prob(self, value):
        return -(value**2)


class Odd(dist.constraints.Constraint):
    def __call__(self, x):
        return x > 0


class NoBijection(NoSupport):
    support = Odd()


def zero_inflated_normal():
    numpyro.sample("a", dist.ZeroInflatedDistribution(dist.Normal(), gate=0.5))


def scaled(x, y=None):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal().expand([2]))
    numpyro.sample("y", dist.Normal(line(w)(x), s), obs=y)


class Sampler:
    def sample(self, key, x, sample_shape=()):
        return jnp.zeros((*sample_shape, len(x)))


class Returning(Sampler):
    def __init__(self, value):
        self.value = value

    def log_prob(self, x, f):
        return self.value


class NotSummed(Sampler):
    def log_prob(self, x, f):
        return dist.Normal().log_prob(f)


def not_a_number():
    y = Y.copy()
    y[3] = np.nan
    return y


def twice(x, y=None):
    numpyro.sample("w", dist.Normal())
    numpyro.sample("w", dist.Normal())


def short():
    return fs.MCMC(fs.SGHMC(linear()), num_warmup=4, num_samples=4, progress_bar=False)


def gp(**settings):
    return fs.GPPrior(ExpSquared(1.0), **settings)


def nuts(points):
    return NUTS(linear(points)).init(KEY, 1, None, (X, Y), {})


# A table, one case a row: the formatter would break each into several lines.
CASES = [
    # ---- the sampler's settings
    ("model not callable", lambda: fs.SGHMC({"w": 1}), TypeError, "model must be a NumPyro model.*got dict"),
    ("step_size 0", lambda: fs.SGHMC(linear(), step_size=0.0), ValueError, "step_size=0.0 must be positive"),
    ("step_size < 0", lambda: fs.SGLD(linear(), step_size=-1e-3), ValueError, "step_size=-0.001 must be positive"),
    ("step_size NaN", lambda: fs.SGLD(linear(), step_size=float("nan")), ValueError, "step_size=nan"),
    ("step_size infinite", lambda: fs.SGLD(linear(), step_size=float("inf")), ValueError, "step_size=inf .*finite"),
    ("step_size text", lambda: fs.SGLD(linear(), step_size="auto"), TypeError, "step_size must be a positive number"),
    ("step_size array", lambda: fs.SGLD(linear(), step_size=np.ones(2)), TypeError, "step_size must be a positive"),
    ("schedule negative", lambda: fs.SGLD(linear(), step_size=lambda t: -1.0), ValueError, r"step_size\(0\)=-1"),
    ("schedule no args", lambda: fs.SGLD(linear(), step_size=lambda: 1.0), TypeError, r"step_size\(0\) failed"),
    ("num_steps 0", lambda: fs.SGHMC(linear(), num_steps=0), ValueError, "num_steps=0 must be at least 1"),
    ("num_steps float", lambda: fs.SGHMC(linear(), num_steps=2.0), TypeError, "num_steps must be an integer"),
    ("num_steps bool", lambda: fs.SGLD(linear(), num_steps=True), TypeError, "num_steps must be an integer"),
    ("friction 0", lambda: fs.SGHMC(linear(), friction=0.0), ValueError, "friction=0.0 must be positive"),
    ("friction NaN", lambda: fs.SGHMC(linear(), friction=float("nan")), ValueError, "friction=nan"),
    ("temperature < 0", lambda: fs.SGHMC(linear(), temperature=-1), ValueError, "temperature=-1 must be positive"),
    ("temperature 0", lambda: fs.SGLD(linear(), temperature=0), ValueError, "temperature=0 must be positive"),
    ("integrator", lambda: fs.SGHMC(linear(), integrator="leapfrog"), ValueError, "'leapfrog'.*'baoab', 'euler'"),
    ("refresh_every", lambda: fs.SGHMC(linear(), refresh_every=3), ValueError, "refresh_every=3 must divide num_steps=20"),
    ("refresh_every 0", lambda: fs.SGHMC(linear(), refresh_every=0), ValueError, "refresh_every=0 must be at least 1"),
    ("resample text", lambda: fs.SGHMC(linear(), resample_momentum="yes"), TypeError, "resample_momentum must be True"),
    ("preconditioner", lambda: fs.SGHMC(linear(), preconditioner="rms"), TypeError, "fs.preconditioners.*'rms'"),
    ("preconditioner uncalled", lambda: fs.SGLD(linear(), preconditioner=fs.preconditioners.identity), TypeError,
     "must come from fs.preconditioners"),
    ("warm start in per cent", lambda: fs.SGHMC(linear(), warmup=fs.Warmup(warm_start=30)), ValueError,
     "warm_start=30 must be a fraction"),
    ("warm start downwards", lambda: fs.SGHMC(linear(), warmup=fs.Warmup(learning_rate=-0.01)), ValueError,
     "learning_rate=-0.01 must be positive"),
    ("warmup number", lambda: fs.SGHMC(linear(), warmup=0.3), TypeError, "warmup must be a fs.Warmup"),
    ("diagonal zero", lambda: fs.preconditioners.diagonal([1.0, 0.0]), ValueError, r"diagonal\(scale\).*positive"),
    ("diagonal NaN", lambda: fs.preconditioners.diagonal(np.nan), ValueError, r"diagonal\(scale\).*positive"),
    ("diagonal matrix", lambda: fs.preconditioners.diagonal(np.eye(2)), ValueError, r"diagonal\(scale\): scale=[\s\S]*or a vector"),
    ("diagonal length", lambda: start(fs.SGLD(linear(), preconditioner=fs.preconditioners.diagonal([1.0] * 3))),
     ValueError, r"diagonal\(scale\).*shape \(3,\).*has 2 unconstrained"),
    ("no warm-up", lambda: start(fs.SGHMC(linear()), num_warmup=0), ValueError, "num_warmup=0.*give step_size"),
    # ---- where chains start
    ("init_params name", lambda: start(fs.SGLD(linear()), init_params={"v": np.ones(2)}), ValueError,
     r"init_params.*\['w'\], got \['v'\]"),
    ("init_params shape", lambda: start(fs.SGLD(linear()), init_params={"w": np.ones(3)}), ValueError,
     r"init_params\['w'\] has shape \(3,\)"),
    ("init_params array", lambda: start(fs.SGLD(linear()), init_params=np.ones(2)), ValueError,
     "init_params must be a dict.*got ndarray"),
    ("init_params per chain", lambda: fs.SGLD(linear()).init(jax.random.split(KEY, 2), 1, {"w": np.ones((2, 3))},
                                                           (X, Y), {}),
     ValueError, r"init_params\['w'\] has shape \(3,\) per chain"),
    # ---- data
    ("data NaN", lambda: start_model(linear(), X, not_a_number()), ValueError, "argument 1 .*1 NaN.*mask"),
    ("data infinite", lambda: start_model(linear(), X * np.inf, Y), ValueError, "argument 0 .*NaN or infinite"),
    ("data empty", lambda: start_model(linear(), X[:0], Y[:0]), ValueError, r"argument 0 of run is empty \(shape \(0, 1"),
    ("data text", lambda: start_model(linear(), X, np.array(["a"] * 8)), TypeError, "argument 1 .*encode it as numbers"),
    ("data objects", lambda: start_model(linear(), X, np.array([None] * 8)), TypeError, "argument 1 .*dtype object"),
    ("data too large", lambda: start_model(linear(), X.astype(float) * 1e300, Y), ValueError, "float64.*Standardize"),
    ("timestamps", lambda: start_model(linear(), TIMES, Y), ValueError, "argument 0 .*float32.*Standardize"),
    ("keyword NaN", lambda: start(fs.SGLD(linear()), X, y=not_a_number()), ValueError, "argument 'y' .*NaN"),
    ("a network as model", lambda: fs.SGHMC(nn.Dense(1)), TypeError, "got Dense, a network of flax.*fs.random_module"),
    ("an nnx network", lambda: fs.SGHMC(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), TypeError, "got Linear, a network of flax"),
    ("y missing", lambda: start_model(linear(), X), ValueError, r"no observed site.*targets"),
    ("y None", lambda: start_model(linear(), X, None), ValueError, r"no observed site.*y=None"),
    ("y column", lambda: start_model(column_model), ValueError, r"'y' has shape \(8, 1\).*shape \(8,\).*squeeze"),
    ("y column of JAX", lambda: start_model(column_model, X, jnp.asarray(Y)), ValueError, r"'y' has shape \(8, 1\)"),
    ("y short", lambda: start_model(linear(), X, Y[:5]), (ValueError, TypeError), "shape"),
    ("B > N", lambda: start_model(linear(batch=9)), ValueError, "subsample_size=9 must lie between 1 and .*8"),
    ("B = 0", lambda: start_model(linear(batch=0)), ValueError, "subsample_size=0 must lie between 1 and .*8"),
    *[
        (f"minibatches, {name}", lambda model=model: start_model(model), ValueError,
         r"plate 'rows' takes minibatches of 4 of its 8 rows.*'y' in it.*\(8,\), of all rows.*as rows: and x\[rows\], y\[rows\]")
        for name, model in {"all rows": in_minibatches(all_of, all_of), "all x": in_minibatches(all_of, at), "all y": in_minibatches(at, all_of)}.items()
    ],
    ("minibatches, NUTS", lambda: fs.MCMC(NUTS(in_minibatches(all_of, at)), num_warmup=1, num_samples=1).run(KEY, X, Y),
     ValueError, "plate 'rows' takes minibatches of 4 of its 8 rows"),
    *[
        (f"data on disk, {name}", lambda model=model: start_model(model, fs.OnDemand(X), Y), ValueError,
         r"^OnDemand\(.*is on disk.*subsample_size=B\) as rows: and x\[rows\].*numpyro.subsample.*x\[:\]")
        for name, model in {
            "subsample": in_minibatches(lambda x, rows: numpyro.subsample(x, event_dim=1), at),
            "jnp.take": in_minibatches(lambda x, rows: jnp.take(x, rows, axis=0), at),
            "operator": in_minibatches(lambda x, rows: jnp.ones(1) * x, at),
            "all rows": network(),
            "observation": lambda x, y: numpyro.sample("x", dist.Normal(numpyro.sample("a", dist.Normal()), 1.0), obs=x),
        }.items()
    ],
    # ---- the model
    ("functional prior missing", lambda: start(fs.fSGHMC(linear())), ValueError,
     r"fSGHMC needs .*functional_prior.*fs\.SGHMC\."),
    ("functional prior missing, SGLD", lambda: start(fs.fSGLD(linear())), ValueError,
     r"fSGLD needs .*functional_prior.*fs\.SGLD\."),
    ("model seeded", lambda: start_model(handlers.seed(linear(), KEY)), ValueError, "handlers.seed.*bare model"),
    ("partial of seeded", lambda: start_model(functools.partial(handlers.seed(linear(), KEY))), ValueError, "bare model"),
    ("discrete latent", lambda: start_model(with_site(lambda: numpyro.sample("k", dist.Bernoulli(0.5)))), ValueError,
     "'k' is discrete.*Marginalize"),
    ("param site", lambda: start_model(with_site(lambda: numpyro.param("a", 1.0))), ValueError,
     "param site 'a'.*Give it a prior"),
    ("local latent", lambda: start_model(local_model), ValueError, "'z' lies inside the subsampled plate 'rows'"),
    ("no latent", lambda: start_model(lambda x, y: numpyro.sample("y", dist.Normal(x[:, 0], 1.0), obs=y)), ValueError,
     "no latent site"),
    # ---- functional_prior
    ("scale 0", prior_model(scale=0.0), ValueError, "scale=0.0 must be a positive"),
    ("scale < 0", prior_model(scale=-1.0), ValueError, "'f'.*scale=-1.0 must be a positive"),
    ("scale NaN", prior_model(scale=float("nan")), ValueError, "scale=nan must be a positive finite"),
    ("scale vector", prior_model(scale=np.ones(2)), ValueError, "scale=.*must be a positive finite number"),
    ("scale text", prior_model(scale="1"), ValueError, "scale='1' must be a positive finite number"),
    ("fn an array", prior_model(fn=WRONG), TypeError, "fn must be a function.*got float"),
    ("prior a number", prior_model(prior=WRONG), TypeError, r"float is not a prior.*log_prob\(x, f\)"),
    ("prior without log_prob", prior_model(prior=Sampler()), TypeError, r"Sampler is not a prior: it lacks .*log_prob\(x, f\)"),
    ("prior not summed", lambda: evaluate(NotSummed(), POINTS), ValueError, r"must return a real number.*float32\[3\]"),
    *[
        (f"log_prob {value!r}", lambda value=value: evaluate(Returning(value), POINTS), ValueError, f"must return a real number.*returned {text}")
        for value, text in ((None, "None"), ("a", "'a'"), (1j, "1j"), ((1.0, 2.0), r"\(1.0, 2.0\)"))
    ],
    ("prior a class", prior_model(prior=fs.GPPrior), TypeError, "got the class GPPrior: call it"),
    ("points [M]", prior_model(points=POINTS[:, 0]), ValueError, r"points must have shape \[M, D\].*points\[:, None\]"),
    ("points rank 3", prior_model(points=POINTS[None]), ValueError, r"points must have shape \[M, D\], got \[1, 3, 1\]"),
    ("points empty", prior_model(points=POINTS[:0]), ValueError, "points must hold at least one point"),
    ("points NaN", prior_model(points=POINTS * np.nan), ValueError, "points holds NaN"),
    ("points None", prior_model(points=None), TypeError, "points must be an array"),
    ("points text", prior_model(points="grid"), TypeError, "points must be an array"),
    *[
        (f"own sampler {value!r}", lambda value=value: evaluate(Independent(), lambda key: value), (TypeError, ValueError), rf"points\(key\) .*{text}")
        for value, text in ((None, "got None"), ("a", "got str"), ([[np.nan]], "NaN"), ([[1j]], "complex"))
    ],
    ("own sampler of two arrays", lambda: evaluate(Independent(), lambda key: (jax.random.normal(key, (3, 1)), 1)), TypeError, r"points\(key\) must be one array"),
    *[
        (f"network draw {value!r}", lambda value=value: fs.priors.NetworkPrior(lambda key, x: value, KEY).sample(KEY, POINTS), TypeError, rf"draw\(key, x\).*{text}")
        for value, text in ((None, "got NoneType"), ("a", "encode it as numbers"), ((1.0, 2.0), "got tuple"))
    ],
    ("own sampler [M]", lambda: evaluate(Independent(), lambda key: jnp.zeros(3)), ValueError, r"return shape \[M, D\]"),
    ("random points, NUTS", lambda: nuts(random_points()), ValueError, r"Freeze the points: points=fs\.measurement\.fixed"),
    ("gp_network, name", gp_network(name="a/b"), ValueError, "gp_network: name='a/b'"),
    ("gp_network, not a network", gp_network(3), TypeError, r"gp_network\('net'\): module is a int"),
    ("gp_network, class", gp_network(nn.Dense), TypeError, r"gp_network\('net'\).*this is a class"),
    ("gp_network, kernel", gp_network(prior=ExpSquared(1.0)), TypeError, r"got ExpSquared.*fs\.GPPrior\(kernel\)"),
    ("gp_network, no covariance", gp_network(prior=fs.GPPrior(hardly)), RuntimeWarning, "kernel is not a covariance"),
    ("gp_network, small tolerance", lambda: tolerant_factor(fs.GPPrior(hardly), GRID, 1e-4), ValueError,
     r"plus \(tolerance · sd\)² .* is not positive definite.*larger \(tolerance · sd\)²"),
    ("gp_network, random points", gp_network(points=fs.measurement.uniform(0.0, 1.0, 3)), ValueError, "must be fixed"),
    ("gp_network, points [M]", gp_network(points=POINTS[:, 0]), ValueError, r"pass points\[:, None\]"),
    ("gp_network, points of an argument", lambda: jax.jit(lambda x: gp_network(points=x)())(GRID),
     ValueError, r"the points are not known when the model is compiled: .*points = fs.measurement.fixed\(x_train\)"),
    ("gp_network, points NaN", gp_network(points=POINTS * np.nan), ValueError, "points holds NaN"),
    *[
        (f"gp_network, {kind}, points of {size}", points_for_two(module, points), ValueError,
         rf"the points have {size}.*\[M, 2\], such as fs.measurement.space_filling\(\[-2, -2\], \[2, 2\], 100\)")
        for kind, module in (("linen", DEEP), ("nnx", nnx.Linear(2, 1, rngs=nnx.Rngs(0))))
        for points, size in ((GRID, "1 number each"), (np.ones((5, 3)), "3 numbers each"))
    ],
    *[
        (f"functional_prior, points of {size}", lambda points=points: start(fs.fSGHMC(two_inputs(points)), TWO, Y), ValueError,
         rf"functional_prior\('f'\): the points have {size}.*input_shape=\(2,\).*space_filling\(\[-2, -2\]")
        for points, size in ((POINTS, "1 number each"), (fs.measurement.uniform([0.0] * 3, [1.0] * 3, 4), "3 numbers each"))
    ],
    ("gp_network, input_shape", gp_network(input_shape=(2, 2)), ValueError, "point has 1 numbers.*needs 4"),
    ("gp_network, softplus", gp_network(nn.Sequential([DEEP, nn.softplus])), ValueError, "not affine in any.*likelihood"),
    ("gp_network, outputs", gp_network(nn.Dense(3)), ValueError, r"3 output\(s\) and the prior num_outputs=None"),
    ("gp_network, variance 0", gp_network(prior=fs.GPPrior(0.0 * ExpSquared(1.0))), ValueError, "deviation.*positive"),
    ("gp_network, hidden_scale", gp_network(hidden_scale=-1.0), ValueError, "hidden_scale=-1.0 must be positive"),
    ("gp_network, tolerance", gp_network(tolerance="small"), TypeError, "tolerance must be a positive number"),
    ("gp_network, no key", lambda: fs.gp_network("net", DEEP, gp(), GRID), RuntimeError, "needs a random key"),
    ("gp_network, plate", in_plate(gp_network()), ValueError, "Create the network outside of plates"),
    (
        "gp_network, linear in a plate",
        in_plate(gp_network(nn.Dense(1), hidden_scale=1.0, tolerance=0.1, prior=fs.GPPrior(DotProduct()))),
        ValueError,
        r"'net\.last_layer' has a value of shape \(3, 2, 1\).*outside of plates",
    ),
    (
        "gp_network, embedding between integers",
        gp_network(EMBEDDING, points=POINTS + 0.5),
        ValueError,
        "takes integers.*whole numbers",
    ),
    (
        "gp_network, embedding of reals",
        lambda: handlers.seed(lambda: fs.gp_network("net", EMBEDDING, gp(), LEVELS)(1.5 * LEVELS), KEY)(),
        ValueError,
        r"x is float.*x\.astype\(int\)",
    ),
    ("K for one output", lambda: evaluate(gp(), POINTS, outputs=2), ValueError, "num_outputs=2"),
    ("K mismatch", lambda: evaluate(gp(num_outputs=3), POINTS, outputs=2), ValueError, "num_outputs"),
    ("negative kernel", lambda: evaluate(fs.GPPrior(indefinite, nugget=0.1), POINTS), ValueError,
     "The process has the variance -1 at x, because its kernel is not a covariance"),
    # ---- priors
    ("nugget 0", lambda: gp(nugget=0.0), ValueError, "nugget must be positive"),
    ("nugget < 0", lambda: gp(nugget=-1e-3), ValueError, "nugget must be positive"),
    ("kernel a class", lambda: fs.GPPrior(ExpSquared), TypeError, "kernel must be a tinygp kernel instance"),
    ("kernel a number", lambda: fs.GPPrior(1.0), TypeError, "kernel must be a tinygp kernel"),
    ("kernel list", lambda: fs.GPPrior([ExpSquared(), ExpSquared()], num_outputs=3), ValueError,
     "is a list of 2 kernels but num_outputs=3"),
    ("num_outputs 0", lambda: gp(num_outputs=0), ValueError, "num_outputs must be a positive integer"),
    ("mean length", lambda: gp(mean=np.ones(3), num_outputs=2), ValueError, "mean has shape .* num_outputs=2"),
    ("df 0", lambda: fs.priors.StudentTPrior(ExpSquared(), 0.0), ValueError, "df must be positive"),
    ("noise 0", lambda: gp().condition(X, Y, 0.0), ValueError, "noise_variance must be positive"),
    ("x [N]", lambda: gp().log_prob(X[:, 0], Y), ValueError, r"x must have shape \[M, D\].*x\[:, None\]"),
    ("f length", lambda: gp().log_prob(X, Y[:3]), ValueError, r"f must have shape \[8\].*got \[3\]"),
    ("fit_gp tiny x", lambda: fs.fit_gp(None, 1e-38 * X, Y), ValueError, "x gives the kernel a lengthscale of .*e-3.*standardize x"),
    ("fit_gp huge y", lambda: fs.fit_gp(None, X, 1e19 * Y), ValueError, "y gives the kernel a variance of .*e.3.*standardize y"),
    ("fit_gp y", lambda: fs.fit_gp(None, X, Y[:3]), ValueError, "y must have shape"),
    # ---- measurement
    ("uniform low ≥ high", lambda: fs.measurement.uniform(1.0, 1.0, 3), ValueError, "low must be below high"),
    ("uniform shapes", lambda: fs.measurement.uniform([0.0] * 2, [1.0] * 3, 3), ValueError, r"low and high.*\[D\]"),
    ("uniform num 0", lambda: fs.measurement.uniform(0.0, 1.0, 0), ValueError, "num=0 must be at least 1"),
    ("subset num", lambda: fs.measurement.subset(X, 9), ValueError, "num=9 exceeds the 8 rows"),
    ("perturb scale", lambda: fs.measurement.perturb(X, 0.0, 3), ValueError, "scale must be positive"),
    ("union inputs", lambda: fs.measurement.union(X, np.ones((3, 2))), ValueError, r"number of inputs D, got \[1, 2\]"),
    ("union empty", lambda: fs.measurement.union(), ValueError, "at least one sampler"),
    # ---- networks
    ("input_shape 0", lambda: start_model(network(input_shape=0)), ValueError, "input_shape=0 must be the shape of one"),
    ("input_shape text", lambda: start_model(network(input_shape="1")), ValueError, "input_shape='1'"),
    ("x of another width", lambda: start_model(network(), np.ones((8, 3), np.float32), Y), ValueError,
     r"input_shape=\(1,\)"),
    ("x [N] to a network", lambda: start_model(network(), X[:, 0], Y), ValueError, r"pass x\[:, None\]"),
    ("prior lacks a weight", lambda: start_model(network(prior={"kernel": dist.Normal()})), ValueError,
     r"missing \['bias'\]"),
    ("prior has an unknown", lambda: start_model(network(prior={"W": dist.Normal()})), ValueError, r"unknown \['W'\]"),
    ("prior of a weight a number", lambda: start_model(network(prior=1.0)), TypeError, "is a float; give a NumPyro"),
    ("name with slash", lambda: fs.random_module("a/b", nn.Dense(1), input_shape=1), ValueError, "name='a/b'"),
    ("network a number", lambda: start_model(network(module=WRONG)), TypeError, "float"),
    ("fan_in 0", lambda: fs.fan_in(0.0), ValueError, "scale=0.0 must be positive"),
    # ---- after the run
    ("key a number", lambda: fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1).run(0, X, Y), TypeError,
     "rng_key must be a random key.*got 0"),
    ("key of floats", lambda: fs.predict(DRAWS, X, X, model=linear()), TypeError, "key must be a random key.*float32"),
    ("init_params dates", lambda: start(fs.SGLD(linear()), init_params={"w": np.full(2, "2000-01-01", "datetime64[D]")}),
     TypeError, r"init_params\['w'\] holds dates"),
    ("init_params None", lambda: start(fs.SGLD(linear()), init_params={"w": None}), TypeError, r"init_params\['w'\].*None"),
    ("complex y", lambda: start_model(linear(), X, Y + 0j), TypeError, "argument 1 of run is complex.*'y' is complex.*np.abs"),
    ("complex x", lambda: start_model(linear(), jnp.asarray(X + 1j), Y), TypeError, r"argument 0 .*complex \(complex64\)"),
    ("complex points", lambda: fs.measurement.fixed(X + 0j), TypeError, "x must be .*real numbers, got complex64: pass"),
    ("complex points, traced", lambda: jax.jit(lambda x: fs.measurement.fixed(x)(KEY))(X + 0j), TypeError, "got complex64"),
    ("predict complex", lambda: fs.predict(DRAWS, KEY, X + 1j, model=linear()), TypeError, "argument 0 of predict is complex"),
    ("points for several keys", lambda: fs.measurement.uniform(-1.0, 1.0, 3)(jax.random.split(KEY, 3)), ValueError,
     r"key must be one random key, got several \(shape \(3,\)\)"),
    ("draws of dates", lambda: fs.predict({"w": np.zeros((3, 2), "M8[D]")}, KEY, X, model=linear()), TypeError,
     "samples.* holds dates"),
    ("list of rows", lambda: start_model(lambda x, y: slope(x, y, rows=3), [1.0] * 8, Y), TypeError,
     "argument 0 of run is a list.*np.asarray"),
    ("keys as values", lambda: gp().log_prob(X, jax.random.split(KEY, 8)), TypeError, "f holds random keys"),
    ("points in seconds", lambda: fs.measurement.fixed(TIMES), ValueError, "x is float64.*float32.*Standardize"),
    ("pool in seconds", lambda: fs.measurement.subset(TIMES, 2), ValueError, "x is float64.*Standardize"),
    ("box in seconds", lambda: fs.measurement.uniform(1.6e9, 1.6e9 + 60.0, 3), ValueError, "box from low to high is float64"),
    ("noise below rounding", lambda: fs.measurement.perturb(1e8 + 1e5 * X, 0.5, 3), ValueError, "x with its noise"),
    ("source in seconds", lambda: fs.OnDemand(TIMES), ValueError, "source of OnDemand.*is float64.*Standardize"),
    ("source of whole seconds", lambda: fs.OnDemand(TIMES.astype(int), dtype="float32"), ValueError, "is int64.*Standardize"),
    ("density of NaN", lambda: gp().log_prob(X, not_a_number()), ValueError, "f holds NaN"),
    ("density of NaN, Student", lambda: fs.priors.StudentTPrior(ExpSquared(), 3.0).log_prob(X, not_a_number()), ValueError, "f holds NaN"),
    ("fit_gp parameter 0", lambda: fs.fit_gp(Polynomial(order=2), X, Y), ValueError,
     "sigma of the kernel Polynomial .*must be positive, got 0"),
    ("fit_gp parameter < 0", lambda: fs.fit_gp(2.0 * ExpSquared(-1.0), X, Y), ValueError, "scale of the kernel ExpSquared"),
    ("zero-inflated prior", lambda: start_model(with_site(lambda: numpyro.sample("a", dist.ZeroInflatedPoisson(0.3, 2.0)))),
     ValueError, "'a' is discrete"),
    ("bare assertion", lambda: start_model(with_site(zero_inflated_normal)), ValueError,
     "in line .* of .*test_bad_inputs.py, numpyro.sample..a.*discrete.py, assert support.is_discrete"),
    ("no bijection", lambda: start_model(with_site(lambda: numpyro.sample("a", NoBijection()))), ValueError,
     "latent site 'a' has the support .*no transform from the reals.*NoBijection"),
    ("integers that do not fit", lambda: start(fs.SGLD(linear()), X, np.full(8, 3_000_000_000)), ValueError,
     "int64 and JAX would cut it to int32.*it holds 3000000000"),
    ("dates", lambda: start(fs.SGLD(linear()), X, np.full(8, "2000-01-01", "datetime64[D]")), TypeError,
     r"argument 1 .*dates \(dtype datetime64\[D\]\); encode it as numbers, such as days"),
    ("durations", lambda: start_model(linear(), np.arange(8)[:, None].astype("timedelta64[s]"), Y), TypeError,
     "argument 0 .*durations.*days"),
    ("masked array", lambda: start_model(linear(), X, np.ma.masked_greater(Y, 0.0)), TypeError, "argument 1 .*mask would be lost"),
    ("bfloat16 NaN", lambda: start_model(linear(), X, jnp.asarray(not_a_number(), jnp.bfloat16)), ValueError, "argument 1 .*1 NaN"),
    ("predict dates", lambda: fs.predict(DRAWS, KEY, np.full((8, 1), "2000-01-01", "datetime64[s]"), model=linear()),
     TypeError, "argument 0 of predict holds dates"),
    ("predict NaN", lambda: fs.predict(DRAWS, KEY, X * np.nan, model=linear()), ValueError, "argument 0 of predict holds 8 NaN"),
    ("distribution without support", lambda: start_model(with_site(lambda: numpyro.sample("a", NoSupport()))), ValueError,
     "'a' has no support: give NoSupport one, such as support"),
    ("start outside", lambda: start(fs.SGHMC(scaled, init_strategy=init_to_value(values={"s": -1.0}))), ValueError,
     "start of the site 's'.*outside of its support.*-1"),
    ("start outside, under fHMC", lambda: start(fs.fHMC(scaled, init_strategy=init_to_value(values={"s": -1.0}))), ValueError,
     "start of the site 's'.*outside of its support.*-1"),
    ("start shape", lambda: start(fs.SGHMC(linear(), init_strategy=init_to_value(values={"w": np.ones(3)}))), ValueError,
     r"start of the site 'w'.*shape \(3,\), but the site has \(2,\)"),
    ("more keys than chains", lambda: fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1).run(jax.random.split(KEY, 3), X, Y),
     ValueError, r"rng_key has shape \[3\], and num_chains=1: pass one key"),
    ("left out", lambda: fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1).run(KEY, X, Y, extra_fields=("~w",)),
     ValueError, 'write "~z.w"'),
    ("left out unknown", lambda: fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1).run(KEY, X, Y, extra_fields=("~z.v",)),
     ValueError, r"\['v'\] are no latent sites of the model, which has \['w'\]"),
    ("network NaN at the start", lambda: fs.MCMC(fs.SGHMC(network(nn.Sequential([nn.Dense(4), lambda h: jnp.log(-jnp.abs(h)), nn.Dense(1)]))),
                                                 num_warmup=2, num_samples=2, progress_bar=False).run(KEY, X, Y),
     ValueError, "log density is nan where 1 of 1 chains start.*'y' is not finite"),
    ("fMALA step", lambda: fs.fMALA(linear(), step_size=float("nan")), ValueError, "step_size=nan must be positive"),
    ("fHMC acceptance", lambda: fs.fHMC(linear(), target_accept_prob=2), ValueError, "target_accept_prob=2 must be between 0 and 1"),
    ("fHMC of a distribution", lambda: fs.fHMC(dist.Normal()), TypeError, "model must be a NumPyro model.*got Normal"),
    ("lists as draws", lambda: fs.Posterior(linear(), {"w": [[1.0, 2.0]]}), TypeError, "must be an array of draws.*np.asarray"),
    ("stats of other draws", lambda: fs.Posterior(linear(), DRAWS, stats={"diverging": np.zeros(2, bool)}), ValueError,
     "a value for each of the 3 draws"),
    ("stats None", lambda: fs.Posterior(linear(), DRAWS, stats=None), TypeError, "stats must be a dict, got None"),
    ("to_arviz shape", lambda: fs.to_arviz(fs.Posterior(linear(), {"w": np.ones((3, 5))}, args=(X, Y))), ValueError,
     r"draws of 'w' have shape \(5,\), but the model has \(2,\)"),
    ("to_arviz observed", lambda: fs.to_arviz(fs.Posterior(linear(), DRAWS | {"y": np.ones((3, 2))}, args=(X, Y))), ValueError,
     "draws of 'y', which the model observes.*leave 'y' out"),
    ("points without a key", lambda: fs.measurement.uniform(-1, 1, 5)(0), TypeError, "key must be a random key.*got 0"),
    ("points in too many dimensions", lambda: fs.measurement.space_filling(-np.ones(30000), np.ones(30000), 3), ValueError,
     "at most 21201 inputs, got 30000.*perturb"),
    ("too many points", lambda: fs.measurement.uniform(-1, 1, 2**62), ValueError, "num=.*more than"),
    ("diagonal of a dict", lambda: fs.preconditioners.diagonal({"s": 1.0}), TypeError, "scale must be a positive number or a vector"),
    ("fit_gp without targets", lambda: fs.fit_gp(None, X, np.zeros((8, 0))), ValueError, "y must hold at least one target"),
    ("fit_gp of a number", lambda: fs.fit_gp(None, X, 3.0), ValueError, r"y must hold .* as \[N\] or \[N, K\], got shape \[\]"),
    ("fit_svgp without targets", lambda: fs.baselines.fit_svgp(None, X, np.zeros((8, 0)), key=KEY), ValueError, "y must hold at least one"),
    ("fit_svgp of a number", lambda: fs.baselines.fit_svgp(None, X, 3.0, key=KEY), ValueError, r"y must hold .* got shape \[\]"),
    ("negative reference", lambda: fs.plot_functions(X, np.ones((3, 8)), reference=(Y, -np.ones(8))), ValueError, "negative standard deviation"),
    ("functions_at nothing", lambda: fs.MCMC(fs.SGHMC(linear()), functions_at=X[:0]), ValueError, "functions_at must hold at least one row"),
    ("predict without model", lambda: fs.predict(DRAWS, KEY, X), TypeError, "pass model="),
    ("predict a list", lambda: fs.predict([DRAWS], KEY, X), TypeError, "MCMC object, a Posterior or a dict.*got list"),
    ("predict ragged", lambda: fs.predict(DRAWS | {"v": jnp.ones(2)}, KEY, X, model=linear()), ValueError,
     "same leading axis"),
    ("predict zero draws", lambda: fs.predict({k: v[:0] for k, v in DRAWS.items()}, KEY, X, model=linear()), ValueError,
     "samples holds no draws"),
    ("predict no draws", lambda: fs.predict({}, KEY, X, model=linear()), ValueError, "draws"),
    ("predict before run", lambda: fs.predict(fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1), KEY, X),
     ValueError, "call run first"),
    ("to_arviz before run", lambda: fs.to_arviz(fs.MCMC(fs.SGLD(linear()), num_warmup=1, num_samples=1)), ValueError,
     "call run first"),
    ("predict batch_size 0", lambda: fs.predict(DRAWS, KEY, X, model=linear(), batch_size=0), ValueError, "batch_size=0"),
    ("decompose input_batch_size", lambda: fs.decompose(DRAWS, X, model=linear(), input_batch_size=0), ValueError,
     "input_batch_size=0 must be at least 1"),
    ("decompose batch_size", lambda: fs.decompose(DRAWS, X, model=linear(), batch_size=0), ValueError,
     "batch_size=0 must be at least 1"),
    ("predict input_batch_size", lambda: fs.predict(DRAWS, KEY, X, model=linear(), input_batch_size=1.5), TypeError,
     "input_batch_size must be an integer"),
    ("predict several keys", lambda: fs.predict(DRAWS, jax.random.split(KEY, 3), X, model=linear()), ValueError,
     r"key must be one random key, got several \(shape \(3,\)\): pass key\[0\]"),
    ("network prior float num_draws", lambda: fs.priors.NetworkPrior(lambda k, x: x, KEY, num_draws=2.5), TypeError, "num_draws must be an integer"),
    ("network prior key", lambda: fs.priors.NetworkPrior(lambda k, x: x, 0), TypeError, "key must be a random key.*got 0"),
    ("GP sample key", lambda: gp().sample(0, POINTS), TypeError, "key must be a random key.*got 0"),
    ("svgp column", lambda: fs.baselines.fit_svgp(Subspace(2, ExpSquared()), np.ones((30, 2)), np.arange(30.0), key=KEY), ValueError,
     "the kernel uses input 2 of x"),
    ("Student sample keys", lambda: fs.priors.StudentTPrior(ExpSquared(1.0), 4.0).sample(jax.random.split(KEY), POINTS), ValueError,
     "key must be one random key"),
    ("ensemble key", lambda: fs.baselines.ensemble(linear(), 0, X, Y), TypeError, "key must be a random key.*got 0"),
    ("laplace key", lambda: fs.baselines.laplace(linear(), 0, X, Y), TypeError, "key must be a random key.*got 0"),
    ("masked labels", lambda: fs.dirichlet_targets(np.ma.masked_equal([0, 1, 2], 1), 3), TypeError, "labels is a masked array"),
    ("start complex", lambda: start(fs.SGHMC(linear()), init_params={"w": 1j * np.ones(2)}), TypeError, r"init_params\['w'\] is complex"),
    ("start NaN", lambda: fs.MCMC(fs.SGHMC(linear()), num_warmup=4, num_samples=4, progress_bar=False).run(
        KEY, X, Y, init_params={"w": np.array([np.nan, 0.0])}), ValueError, "log density is nan where 1 of 1 chains start"),
    ("predict complex inputs", lambda: fs.predict(DRAWS, KEY, X, model=linear(POINTS), inputs=X + 1j), TypeError, "inputs is complex"),
    ("functions_at NaN", lambda: fs.MCMC(fs.SGHMC(linear()), functions_at=X * np.nan), ValueError, "functions_at holds NaN"),
    ("functions_at masked", lambda: fs.MCMC(fs.SGHMC(linear()), functions_at={"f": np.ma.masked_greater(X, 0.0)}), TypeError,
     "functions_at is a masked array"),
    ("functions_at complex", lambda: fs.MCMC(fs.SGHMC(linear()), functions_at=X + 1j), TypeError, "functions_at .*got complex"),
    ("GP sample shape", lambda: gp().sample(KEY, POINTS, 5), TypeError, r"sample_shape must be a tuple of integers, such as \(5,\), got 5"),
    ("GP sample negative shape", lambda: gp().sample(KEY, POINTS, (-1,)), TypeError, "sample_shape must be a tuple"),
    ("network sample shape", lambda: fs.priors.NetworkPrior(lambda k, x: x, KEY).sample(KEY, POINTS, "a"), TypeError, "sample_shape must"),
    ("GP mean NaN", lambda: gp(mean=lambda x: x * np.nan).log_prob(POINTS, np.zeros(3)), ValueError, "prior mean holds NaN"),
    ("scales of other inputs", lambda: fs.GPPrior(Linear(np.ones(2), ExpSquared())).log_prob(POINTS, np.zeros(3)), ValueError,
     "kernel has scales of 2 inputs .*x has 1: pass x with 2 columns"),
    ("input out of range", lambda: fs.GPPrior(2.0 * Subspace(1, ExpSquared())).log_prob(POINTS, np.zeros(3)), ValueError,
     "kernel uses input 1 of x .*but x has 1"),
    ("scales of a part", lambda: fs.GPPrior(2.0 * Subspace(0, Linear(np.ones(2), ExpSquared()))).log_prob(np.ones((3, 2)), np.zeros(3)),
     ValueError, "kernel has scales of 2 inputs .*x has 1"),
    ("posterior of other inputs", lambda: gp().condition(np.ones((4, 2)), np.ones(4), 0.1).moments(POINTS), ValueError,
     "x has 1 columns, but the data of this posterior have 2"),
    ("posterior no dict", lambda: fs.Posterior(linear(), [1.0]), TypeError, "samples must be a dict of draws by site, got list"),
    ("posterior chains", lambda: fs.Posterior(linear(), DRAWS, num_chains=2), ValueError, "3 draws, which num_chains=2 cannot share"),
    ("to_arviz masked", lambda: fs.to_arviz(fs.Posterior(linear(), DRAWS, args=(X, np.ma.masked_greater(Y, 0.0)))), TypeError,
     "argument 1 of to_arviz is a masked array"),
    ("predict several raw keys", lambda: fs.predict(DRAWS, jnp.zeros((3, 2), jnp.uint32), X, model=linear()), ValueError,
     "key must be one random key"),
    ("predict unconstrained", lambda: fs.predict(DRAWS | {"s": jnp.array([0.1, -0.7, 0.3])}, KEY, X, model=scaled), ValueError,
     r"1 of 3 draws of 's' lie outside of its support.*-0.7 to 0.3.*unconstrained"),
    ("kernel of text", lambda: evaluate(fs.GPPrior(ExpSquared("1")), POINTS), TypeError, "kernel fails .*parameters must be numbers"),
    ("kernel of a list", lambda: evaluate(fs.GPPrior(ExpSquared([1.0])), POINTS), TypeError, "kernel fails .*parameters must be numbers"),
    ("kernel of an array", lambda: evaluate(fs.GPPrior(ExpSquared(np.ones(2))), POINTS), ValueError,
     r"kernel fails at x with 1 inputs .*transforms.Linear\(1 / lengthscale, kernel\)"),
    ("kernel of complex numbers", lambda: evaluate(fs.GPPrior(ExpSquared(1j)), POINTS), TypeError, "kernel returns complex"),
    ("kernel that returns a number", lambda: evaluate(fs.GPPrior(lambda a, b: 1.0), POINTS), ValueError,
     r"kernel must return shape \[3, 3\], got \[\]"),
    ("kernel of variance 0", lambda: evaluate(fs.GPPrior(0.0 * ExpSquared(1.0)), POINTS), ValueError, "covariance at x plus nugget is zero"),
    ("kernel beyond the range", lambda: fs.GPPrior(1e300 * ExpSquared(1.0)).sample(KEY, POINTS), ValueError,
     r"standard deviations of .* to 1e\+150, beyond the range of float32"),
    ("kernel below the range", lambda: evaluate(fs.GPPrior(1e-300 * ExpSquared(1.0)), POINTS), ValueError, "beyond the range of float32"),
    ("nugget NaN", lambda: gp(nugget=np.nan), ValueError, "nugget must be finite, got nan"),
    ("fixed points None", lambda: fs.measurement.fixed(None), TypeError, "x must be an array of real numbers, got None"),
    ("fit_gp y beyond the range", lambda: fs.fit_gp(None, X, Y.astype(float) * 1e300), ValueError, "y reaches .*e.299.*standardize y"),
    ("predict unknown function", lambda: fs.predict(DRAWS, KEY, X, model=linear(POINTS), inputs={"g": X}), ValueError,
     r"inputs: \['g'\] are no functions of the model; it has \['f'\]"),
    ("kernel of NumPy", lambda: evaluate(fs.GPPrior(Custom(lambda a, b: np.exp(-np.sum((a - b) ** 2)))), POINTS), TypeError,
     "kernel is traced by JAX, so that it must be written with jax.numpy"),
    ("kernel with a condition", lambda: evaluate(fs.GPPrior(Custom(lambda a, b: 1.0 if a[0] > b[0] else 2.0)), POINTS), TypeError,
     "without conditions on values"),
    ("kernel of None", lambda: evaluate(fs.GPPrior(lambda a, b: None), POINTS), TypeError, "kernel must return an array of numbers, got None"),
    ("kernel that fails", lambda: evaluate(fs.GPPrior(lambda a, b: 1 / 0), POINTS), ValueError,
     r"kernel fails at x with 1 inputs \(ZeroDivisionError: division by zero\)"),
    ("mean that fails", lambda: evaluate(gp(mean=lambda x: 1 / 0), POINTS), ValueError, "mean function fails .*division by zero"),
    ("mean of None", lambda: evaluate(gp(mean=lambda x: None), POINTS), TypeError, "mean function must return an array of numbers, got None"),
    ("mean without arguments", lambda: evaluate(gp(mean=lambda: 1.0), POINTS), TypeError, "mean function fails .*It takes x"),
    ("model without its data", lambda: fs.predict(DRAWS, KEY, model=linear()), TypeError, r"missing a required argument: 'x'.*the model is \w+\(x"),
    ("model with other names", lambda: fs.predict(DRAWS, KEY, X, z=1, model=linear()), TypeError, "unexpected keyword argument 'z'"),
    ("model twice a name", lambda: start(fs.SGHMC(twice)), ValueError, "Two sites of the model are named 'w'"),
    ("model of text", lambda: fs.Posterior("model", DRAWS), TypeError, "model must be the NumPyro model of the draws"),
    ("posterior of numbers", lambda: fs.Posterior(linear(), {1: np.ones(3)}), TypeError, r"by name of site, got the names \[1\]"),
    ("draws of another shape", lambda: fs.predict(DRAWS | {"s": np.ones((3, 2))}, KEY, X, model=scaled), ValueError,
     r"draws of 's' have shape \(2,\), but the model has \(\)"),
    ("from_prior number", lambda: fs.predict(DRAWS, KEY, X, model=linear(), from_prior=3), TypeError, "from_prior must be a list of names"),
    ("to_arviz inputs NaN", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), inputs=X * np.nan), ValueError,
     "'inputs' of to_arviz holds 8 NaN"),
    ("to_arviz probes", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), num_probes=-1), ValueError, "num_probes=-1"),
    ("to_arviz coords", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), coords=3), TypeError, "coords must be a dict"),
    ("to_arviz coords of keys", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), dims={"y": ["d"]}, coords={"d": KEY}), TypeError,
     "coords: those of 'd' must be a list or an array"),
    ("load None", lambda: fs.Posterior.load(None, linear()), TypeError, "path must be the name of a file, got None"),
    ("postprocess_fn", lambda: fs.MCMC(fs.SGHMC(linear()), postprocess_fn=3), TypeError, "postprocess_fn must be a function"),
    ("chain_method", lambda: fs.MCMC(fs.SGHMC(linear()), chain_method="x"), ValueError, "chain_method='x' is unknown"),
    ("extra_fields text", lambda: short().run(KEY, X, Y, extra_fields="potential_energy"), TypeError, "extra_fields must be a tuple of names"),
    ("extra_fields unknown", lambda: short().run(KEY, X, Y, extra_fields=("energy",)), ValueError, "'energy' is no field of SGHMC's state: .*potential_energy"),
    ("init_strategy", lambda: fs.SGHMC(linear(), init_strategy=3), TypeError, "init_strategy must be one of NumPyro's"),
    ("model is a distribution", lambda: start(fs.SGHMC(dist.Normal())), TypeError, "model must be a NumPyro model"),
    ("prior class", lambda: start(fs.SGHMC(network(prior=dist.Normal))), TypeError, "prior is the class Normal; make one"),
    ("plot no draws", lambda: fs.plot_functions(X, None), (TypeError, ValueError), r"f_draws must"),
    ("plot reference", lambda: fs.plot_functions(X, np.ones((3, 8)), reference=Y), TypeError, "reference must be a Gaussian process, or a pair"),
    ("plot level", lambda: fs.plot_functions(X, np.ones((3, 8)), level="a"), TypeError, "level must be a positive number"),
    ("plot axes", lambda: fs.plot_functions(X, np.ones((3, 8)), ax=3), TypeError, "ax must be Matplotlib's axes"),
    ("rmse shapes", lambda: fs.metrics.rmse(Y, Y[:3]), ValueError, r"mean|shape"),
    ("coverage shapes", lambda: fs.metrics.coverage(Y, np.ones((8, 3))), ValueError, r"shape \[S, 8\]"),
    ("coverage level", lambda: fs.metrics.coverage(Y, np.ones((3, 8)), level=90), ValueError, "level.*0.9"),
    ("ece logits", lambda: fs.metrics.ece(np.ones((3, 2)), [0, 1, 1]), ValueError, "softmax"),
    ("data set unknown", lambda: fs.datasets.load_uci("iris"), ValueError, "'iris'.*yacht"),
    ("split out of range", lambda: fs.datasets.load_uci("yacht", 20), ValueError, "split=20 is out of range.*0 to 19"),
    ("split float", lambda: fs.datasets.load_uci("yacht", 1.5), TypeError, "split must be an integer"),
    ("kernel that is not symmetric", lambda: evaluate(fs.GPPrior(lambda a, b: ExpSquared()(a, b) * (1 + 0.3 * a)), POINTS), ValueError,
     r"kernel is not symmetric at x: k\(x, x'\) and k\(x', x\) differ"),
    ("tolerance below rounding", gp_network(tolerance=1e-8), ValueError, "tolerance=1e-08 is below 1.21e-05, the smallest"),
    ("functional prior of a dict", lambda: start(fs.fSGHMC(with_site(prior_model(fn=lambda x: {"mean": x[:, 0]}, points=POINTS)))), ValueError,
     r"functional_prior\('f'\): its function must return one array \[M\] or \[M, K\], got {'mean': \(\d+,\)}"),
    ("network of a dict", lambda: start(fs.SGHMC(lambda x: fs.random_module("f", nn.Dense(1), input_shape=1)(x)), {"a": X}), TypeError, r"x is a dict with the keys \['a'\], where one array is needed"),
    ("predict a model", lambda: fs.predict(linear(POINTS), KEY, X), TypeError, r"got function\. .*prior .*numpyro\.infer\.Predictive\(model"),
    ("Predictive of a model", lambda: fs.Predictive(linear(POINTS)), TypeError, r"got function\. .*prior .*numpyro\.infer\.Predictive\(model"),
    ("predict no rows", lambda: fs.predict(DRAWS, KEY, X[:0], model=in_rows), ValueError, "argument 0 of predict is empty"),
    ("predict inputs number", lambda: fs.predict(DRAWS, KEY, X, model=linear(POINTS), inputs=5.0), ValueError, r"inputs must be an array \[N, D\]"),
    ("predict inputs None", lambda: fs.predict(DRAWS, KEY, X, model=linear(POINTS), inputs={"f": None}), ValueError,
     r"inputs\['f'\] must be an array \[N, D\]"),
    ("predict three integers", lambda: fs.predict(DRAWS, np.arange(3, dtype=np.uint32), X, model=linear(POINTS)), TypeError,
     r"key must be a random key, .*uint32, of shape \(3,\)"),
    ("fit_gp key", lambda: fs.fit_gp(None, X, Y, max_points=3, key=3), TypeError, "key must be a random key.*got 3"),
    ("to_arviz dims text", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), dims={"y": "row"}), TypeError,
     "dims: 'y' must have a list of names of dimensions, got 'row'"),
    ("to_arviz dims too many", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), dims={"y": ["a", "b"]}), ValueError,
     "dims: 'y' has 1 dimensions after chain and draw, got 2 names"),
    ("to_arviz dims taken", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), dims={"y": ["chain"]}), ValueError,
     r"dims: \['chain'\] of 'y' are the dimensions of the draws"),
    ("decompose key", lambda: fs.decompose(DRAWS, KEY, X, model=linear(POINTS)), TypeError, "decompose takes no random key"),
    ("lpd masked", lambda: fs.metrics.lpd(np.ma.masked_array([[-1.0], [5.0]], [[0], [1]])), TypeError, "log_lik must be a real .*mask would be lost"),
    ("lpd dates", lambda: fs.metrics.lpd(np.array([["2020-01-01"]], "datetime64[D]")), TypeError, "log_lik must be a real .*dates"),
    ("kernel with two factors", lambda: evaluate(fs.GPPrior(Cholesky(np.array([1.0, 2.0]), ExpSquared())), POINTS), ValueError,
     r"scales of 2 inputs \(tinygp.transforms.Cholesky\), but x has 1"),
    ("frozen complex", gp_network(DEEP, frozen={"layers_0.kernel": np.full((1, 4), 1j)}), TypeError, "holds complex numbers"),
    ("uniform too wide", lambda: fs.measurement.uniform(-3e38, 3e38, 3), ValueError, "too wide for float32"),
    ("to_arviz no rows", lambda: fs.to_arviz(fs.Posterior(linear(POINTS), DRAWS, args=(X, Y)), inputs=X[:0]), ValueError,
     r"inputs has no rows \(shape \(0, 1\)\)"),
    ("toy data, key", lambda: fs.datasets.extrapolation(0), TypeError, "key must be a random key.*got 0"),
    ("two moons, keys", lambda: fs.datasets.two_moons(jax.random.split(KEY)), ValueError, "key must be one random key"),
    ("stacking not finite", lambda: fs.diagnostics.stack_chains(apart(1e30)), ValueError, r"not finite in draws of the chains \[1\]"),
    ("diagnostics rank", lambda: fs.diagnostics.function_diagnostics(Y), ValueError, r"\[chains, draws, \.\.\.\].*f\[None\]"),
]  # fmt: skip


#: Mistakes that take a second or more to be found.
LONG = {
    "gp_network, linen, points of 1 number each",
    "gp_network, linen, points of 3 numbers each",
    "gp_network, embedding of reals",
    "network NaN at the start",
    "start NaN",
    "to_arviz coords of keys",
}


@pytest.mark.parametrize(
    "call, error, message",
    [pytest.param(*case[1:], marks=pytest.mark.slow) if case[0] in LONG else case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_table_is_long_and_its_names_are_unique():
    names = [case[0] for case in CASES]
    assert len(names) >= 120 and len(set(names)) == len(names)


def test_good_inputs_pass():
    """The helpers of the table do not fail by themselves."""
    assert start(fs.SGHMC(linear())).z["w"].shape == (2,)
    assert (
        start(fs.fSGLD(linear(random_points()), preconditioner=fs.preconditioners.diagonal([1.0, 2.0]))).z["w"].size
        == 2
    )
    start(fs.SGHMC(linear()), X.astype(np.float64) * 1e3, Y.astype(np.float64))
    start(fs.SGHMC(linear(batch=8)))
    start_model(network(prior={"kernel": dist.Normal(), "bias": fs.fan_in()}))
    evaluate(gp(num_outputs=2), POINTS, outputs=2)
    assert ModelPotential(linear(POINTS), (X, Y), key=KEY).latents == ["w"]


@pytest.mark.parametrize("values", [[np.inf, -np.inf], [1.0, np.nan], [-np.inf, 0.0]])
def test_infinities_that_cancel_are_found(values):
    num = np.sum(~np.isfinite(values))
    assert f"holds {num} NaN or infinite" in not_finite((np.array(values, np.float32),), {}, "run")


def test_large_data_whose_sum_overflows_are_accepted():
    assert not_finite((np.full(9, 3e38, np.float32),), {}, "run") is None


# ---- observations ------------------------------------------------------------------------------------------


def classes(x, y=None):
    f = fs.random_module("f", nn.Dense(3), input_shape=1)
    numpyro.sample("y", dist.Categorical(logits=f(x)), obs=y)


def counts(x, y=None):
    f = fs.random_module("f", nn.Dense(1), input_shape=1)
    numpyro.sample("y", dist.Poisson(jnp.exp(f(x)[:, 0])), obs=y)


@pytest.mark.parametrize(
    ("model", "y", "message"),
    [
        (classes, jnp.array([1, 2, 3, 3]), "holds 2 values that its likelihood gives no density, 3.*numbered from 0"),
        (counts, jnp.array([0.0, 1.5, 2.0, 3.0]), "holds 1 values.*1.5"),
    ],
)
def test_observations_outside_the_support(model, y, message):
    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), jnp.ones((4, 1)), y)


def test_a_likelihood_need_not_know_its_support():
    class Own(dist.Distribution):
        def log_prob(self, value):
            return -0.5 * value**2

    def model(y):
        numpyro.sample("w", dist.Normal())
        numpyro.sample("y", Own((3,)), obs=y)

    start(fs.SGHMC(model), jnp.ones(3))


@pytest.mark.slow
def test_what_is_masked_may_be_outside_the_support():
    def model(x, y):
        with numpyro.handlers.mask(mask=y >= 0):
            classes(x, y)

    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.ones((4, 1)), jnp.array([-1, 0, 1, 2]))


@pytest.mark.slow
def test_one_likelihood_for_all_observations():
    def model(y):
        numpyro.sample("y", dist.Normal(0.0, numpyro.sample("s", dist.HalfNormal(1.0))), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=100, num_samples=300, progress_bar=False)
    mcmc.run(jax.random.key(0), 0.5 * jax.random.normal(jax.random.key(1), (200,)))
    assert 0.4 < float(mcmc.get_samples()["s"].mean()) < 0.6


def test_a_table_of_numbers_is_looked_into():
    class Table:
        def to_numpy(self):
            return np.array([[1.0], [np.nan]])

        def __array__(self, dtype=None, copy=None):
            return self.to_numpy()

    assert not_finite((Table(),), {}, "run").startswith("positional argument 0 of run holds 1 NaN")


def test_draws_at_the_ends_of_their_support_are_let_through():
    """Where rounding puts them; and where the ends depend on another site."""

    def model(x, y=None):
        numpyro.sample("a", dist.Uniform(0.1, 0.3).expand([2]))
        numpyro.sample("s", dist.LogNormal().expand([2]).to_event(1))
        width = numpyro.sample("width", dist.HalfNormal())
        numpyro.sample("inside", dist.Uniform(0.0, width))
        numpyro.sample("y", dist.Normal(jnp.zeros(len(x)), width), obs=y)

    ends = {"a": [[0.1, 0.2], [0.3, 0.3]], "s": np.zeros((2, 2)), "width": [0.0, np.inf], "inside": [9.0, 9.0]}
    ends = {k: np.asarray(v, np.float32) for k, v in ends.items()}
    with pytest.warns(RuntimeWarning, match=r"infinite where the posterior draws of \['width'\] are"):
        assert fs.predict(ends, KEY, X, model=model)["y"].shape == (2, 8)
    for name, value in {"a": 0.301, "s": -1e-3}.items():
        outside = ends | {name: np.where(ends[name] == ends[name][1, 0], np.float32(value), ends[name])}
        with pytest.raises(ValueError, match=f"draws of '{name}' lie outside"):
            fs.predict(outside, KEY, X, model=model)


def test_predictions_that_are_nan_are_said():
    draws = {"w": jnp.array([[1.0, 2.0], [np.nan, 0.0], [0.0, 1.0]])}
    with pytest.warns(RuntimeWarning, match=r"\['y'\] are NaN in 1 of 3 draws: the posterior draws of \['w'\] are"):
        fs.predict(draws, KEY, X, model=linear())

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]))
        numpyro.sample("y", dist.Normal(jnp.sqrt(w[0]), 1.0, validate_args=False), obs=y)

    with pytest.warns(RuntimeWarning, match=r"\['y'\] are NaN in 2 of 3 draws: the model gives NaN"):
        fs.predict({"w": jnp.array([[1.0, 0], [-1.0, 0], [-2.0, 0]])}, KEY, X, model=model)


def test_draws_under_other_names():
    draws = {"g.kernel": jnp.ones((5, 1, 3)), "g.bias": jnp.ones((5, 3))}
    with pytest.raises(ValueError, match=r"'g.bias', 'g.kernel'.*would come from the prior"):
        fs.predict(draws, jax.random.key(0), jnp.ones((4, 1)), model=classes)


# ---- what users bring ----------------------------------------------------------------------------------------


def slope(x, y=None, rows=None):
    """y = w x + N(0, .1²), with x and y as they are or the rows of a plate."""
    w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(x), subsample_size=rows) as chosen:
        x, y = (x, y) if rows is None else (x[chosen], y[chosen])
        numpyro.sample("y", dist.Normal(w * jnp.asarray(x), 0.1), obs=y)


def mean_of(model, *data, kernel=fs.SGHMC, site="w", **settings):
    mcmc = fs.MCMC(kernel(model, **settings), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(1), *data)
    return np.asarray(mcmc.get_samples()[site]).mean(0)


LINE = np.linspace(-1.0, 1.0, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "y",
    [
        pd.Series(0.7 * LINE, index=np.arange(30)[::-1]),
        (0.7 * LINE).astype(">f8"),
        (0.7 * LINE).astype(np.longdouble),
        jnp.asarray(0.7 * LINE, jnp.bfloat16),
        np.ma.masked_array(0.7 * LINE),
    ],
    ids=["Series", "big-endian", "longdouble", "bfloat16", "no mask"],
)
def test_observations_of_other_kinds_are_taken(y):
    assert mean_of(slope, LINE, y) == pytest.approx(0.7, abs=0.05)


@pytest.mark.slow
def test_a_series_is_an_observation_whose_noise_is_unknown():
    """The scale of the noise is looked for in the program of the model, whose values are arrays."""

    def noisy(x, y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(numpyro.sample("slope", dist.Normal()) * x, sd), obs=y)

    y = 0.7 * LINE + 0.1 * np.sin(50.0 * LINE)
    means = [mean_of(noisy, LINE, one, site="slope") for one in (y, pd.Series(y, index=np.arange(30)[::-1]))]
    assert means[0] == pytest.approx(means[1], rel=1e-4) and means[0] == pytest.approx(0.7, abs=0.1)


@pytest.mark.parametrize("kind", [np.asarray, pd.DataFrame])
def test_errors_of_checks_do_not_blame_a_table(kind):
    """The same errors as with an array."""

    def of_table(x, y):
        slopes = numpyro.sample("slope", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(jnp.asarray(x) @ slopes)), obs=y)

    x = kind(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"The observation 'y' has shape \(4, 1\)"):
        mean_of(of_table, x, np.ones((4, 1)))
    with pytest.raises(ValueError, match="The observation 'y' holds 4 values that its likelihood gives no density"):
        mean_of(of_table, x, np.full(4, 0.5))


def test_a_plate_of_another_size_than_its_rows_is_named():
    def of_ten(x, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("rows", 10):
            numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)

    posterior = fs.Posterior(of_ten, {"slope": np.ones(3, np.float32)}, args=(LINE[:10],))
    with pytest.raises(ValueError, match=r"'y' has the shape \(4,\) inside of the plate 'rows' of size 10.*x\.shape"):
        fs.predict(posterior, jax.random.key(0), LINE[:4])


def test_columns_in_another_order_give_a_warning():
    def of_table(x):
        slopes = numpyro.sample("slope", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.asarray(x) @ slopes, 0.1))

    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    posterior = fs.Posterior(of_table, {"slope": np.ones((3, 2), np.float32)}, args=(table,))
    key = jax.random.key(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.predict(posterior, key, table)
        fs.predict(posterior, key, table.to_numpy()[:1])
    with pytest.warns(RuntimeWarning, match=r"has the columns \['b', 'a'\].*in the order \['a', 'b'\]"):
        fs.predict(posterior, key, table[["b", "a"]])
    with pytest.warns(RuntimeWarning, match="rename them"):
        fs.decompose(posterior, table.rename(columns={"b": "c"}))


def test_a_table_that_the_model_cannot_compute_with_is_named():
    with pytest.raises(TypeError, match=r"argument 1 of run is a pandas Series.*\.to_numpy\(\)"):
        mean_of(lambda x, y: slope(x, y, rows=5), LINE, pd.Series(LINE))
    with pytest.raises(TypeError, match="argument 1 of run holds dates"):
        mean_of(slope, LINE, pd.Series(pd.date_range("2020-01-01", periods=30)))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.fHMC, fs.fMALA, NUTS])
def test_kernels_with_a_metropolis_test_take_rows_of_numpy_arrays(kernel):
    def model(x, y):
        if kernel is not NUTS:
            fs.functional_prior("f", lambda x: x[:, 0], Independent(), POINTS)
        slope(x, y, rows=len(x))

    assert mean_of(model, LINE.astype(">f4"), 0.7 * LINE, kernel=kernel) == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize("kernel", [fs.SGHMC, fs.fHMC, NUTS])
def test_a_run_refuses_masked_values(kernel):
    """By whichever way they come: what the mask hides never becomes data."""
    y = np.ma.masked_greater(0.7 * LINE, 0.5)
    mcmc = fs.MCMC(kernel(slope), num_warmup=4, num_samples=4, progress_bar=False)
    with pytest.raises(TypeError, match=r"positional argument 1 of run .*mask would be lost.*filled"):
        mcmc.run(KEY, LINE, y)
    with pytest.raises(TypeError, match=r"argument 'y' of run .*mask would be lost.*filled"):
        mcmc.run(KEY, LINE, y=y)
    with pytest.raises(TypeError, match="mask would be lost"):
        split_arrays((LINE, y))


def test_sparse_matrices_are_named():
    def model(x, y):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)
        f = fs.functional_prior("f", f, Independent(), POINTS)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)

    line = sparse.csr_matrix(LINE[:, None])
    with pytest.raises(TypeError, match=r"argument 0 of run is sparse \(csr_matrix\): pass .toarray\(\)"):
        mean_of(model, line, LINE)
    with pytest.raises(TypeError, match=r"argument 1 of run is sparse .*pass .toarray\(\)"):
        mean_of(slope, LINE, line)


GAPS = np.where(np.arange(30) % 7 == 3, np.nan, 0.7 * LINE)


def imputed(x, y):
    w, is_seen = numpyro.sample("w", dist.Normal()), ~jnp.isnan(y)
    with handlers.mask(mask=is_seen):
        numpyro.sample("y", dist.Normal(w * jnp.asarray(x), 0.1), obs=jnp.where(is_seen, y, 0.0))


def imputed_rows(x, y):
    w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(x), subsample_size=6) as rows, handlers.mask(mask=~jnp.isnan(jnp.asarray(y)[rows])):
        numpyro.sample("y", dist.Normal(w * x[rows], 0.1), obs=jnp.nan_to_num(y[rows]))


@pytest.mark.slow
@pytest.mark.parametrize("model", [imputed, imputed_rows])
def test_nan_that_the_model_handles_is_let_through(model):
    assert mean_of(model, LINE, GAPS) == pytest.approx(0.7, abs=0.05)


def late(x, y):
    """Without NaN in the density, and with NaN in its gradient."""
    w = numpyro.sample("w", dist.Normal())
    numpyro.factor("likelihood", jnp.nansum(-50.0 * (jnp.asarray(y) - w * jnp.asarray(x)) ** 2))


@pytest.mark.parametrize("model", [slope, late, lambda x, y: slope(x, y, rows=6)], ids=["obs", "gradient", "rows"])
def test_nan_that_reaches_the_density_or_its_gradient_is_refused(model):
    with pytest.raises(ValueError, match=r"argument 1 of run holds 4 NaN.*before it computes anything"):
        start_model(model, LINE, GAPS)


class Density(dist.Distribution):
    """A normal law without a sampler."""

    support, arg_constraints = dist.constraints.real, {}

    def log_prob(self, value):
        return -0.5 * value**2


@pytest.mark.slow
@pytest.mark.parametrize("prior", [Density(), Density().expand([2]), Density().mask(True)], ids=["one", "two", "mask"])
def test_a_law_without_a_sampler_is_a_prior(prior):
    def model(x, y):
        w = numpyro.sample("w", prior)
        numpyro.sample("y", dist.Normal(jnp.sum(w) * jnp.asarray(x), 0.1), obs=y)

    assert np.sum(mean_of(model, LINE, 0.7 * LINE)) == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize("values", [{"w": 1, "s": 1.0}, {"w": [1, 2], "s": np.int64(1)}, {"s": jnp.float32(0.5)}])
def test_chains_may_start_at_python_numbers(values):
    params = start(fs.SGHMC(scaled, init_strategy=init_to_value(values=values))).z
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {"w": ((2,), np.float32), "s": ((), np.float32)}


@pytest.mark.parametrize(
    ("law", "y"),
    [((2,), (500, 2)), ((), (7, 3)), ((5, 1), (5, 4)), ((4,), (4,))],
    ids=["rows", "one", "columns", "same"],
)
def test_a_law_of_many_observations_is_taken(law, y):
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal()) * jnp.ones(law), 1.0), obs=y)

    start_model(model, np.ones(y, np.float32))


@pytest.mark.parametrize(
    ("law", "y"), [((8,), (8, 1)), ((8, 1), (8,)), ((8,), (1,)), ((8,), ()), ((8,), (8, 2))], ids=str
)
def test_observations_that_would_count_twice_are_refused(law, y):
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal()) * jnp.ones(law), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"'y' has shape .* broadcast against each other"):
        start_model(model, np.ones(y, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([list, tuple], 1))
def test_observations_may_be_a_list(kind):
    assert mean_of(slope, LINE, kind(0.7 * LINE)) == pytest.approx(0.7, abs=0.05)


# ---- rows that an array does not have ------------------------------------------------------------------------


def paired(x, y, size=8, batch=None, take=lambda x, y, rows: (x[rows], y[rows])):
    """A plate of ``size`` rows, which are taken from x and y."""
    w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("rows", size, subsample_size=batch) as rows:
        x, y = take(jnp.asarray(x), jnp.asarray(y), rows)
        numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)


WAYS = {
    "rows": lambda x, y, rows: (x[rows], y[rows]),
    "column": lambda x, y, rows: (x[:, None][rows, 0], y[rows]),
    "take": lambda x, y, rows: (jnp.take(x, rows), jnp.take(y, rows)),
    "vmap": lambda x, y, rows: jax.vmap(lambda row: (x[row], y[row]))(rows),
    "jit": jax.jit(lambda x, y, rows: (x[rows], y[rows])),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_plate_longer_than_its_data_is_refused(way, batch, make):
    model, x = functools.partial(paired, batch=batch, take=WAYS[way]), make(X[:, 0])
    start_model(model, x, make(Y))
    with pytest.raises(ValueError, match=r"plate 'rows' \(sites: 'y'\) has 8 rows.*has 7 along axis 0"):
        start_model(model, x, make(Y[:7]))


@pytest.mark.parametrize("batch", [None, 2])
def test_the_short_array_is_named(batch):
    with pytest.raises(ValueError, match=r"'rows'.* 8 rows.*positional argument 0 of shape \[5\]"):
        start_model(functools.partial(paired, batch=batch), X[:5, 0], Y)


def test_predict_and_others_refuse_it_too():
    def model(x, y=None):
        fs.functional_prior("f", lambda x: x[:, 0], Independent(), POINTS)
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("rows", 8) as rows:
            numpyro.sample("y", dist.Normal(w * x[rows, 0], 0.1), obs=None if y is None else y[rows])

    text = "plate 'rows' .*has 8 rows"
    with pytest.raises(ValueError, match=text):
        fs.predict({"w": jnp.ones(3)}, KEY, X[:5], model=model)
    for short in (lambda *data: start(fs.fHMC(model), *data), lambda *data: fs.baselines.ensemble(model, KEY, *data)):
        with pytest.raises(ValueError, match=text):
            short(X, Y[:5])


def grouped(groups, y, batch=None):
    with numpyro.plate("groups", 4):
        w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("rows", len(y), subsample_size=batch) as rows:
        numpyro.sample("y", dist.Normal(w[groups[rows]], 0.1), obs=y[rows])


@pytest.mark.parametrize("batch", [None, 2])
def test_groups_numbered_from_one_warn(batch):
    model = functools.partial(grouped, batch=batch)
    with pytest.warns(RuntimeWarning, match=r"rows 1 to 4 of an array of shape \[4\], which has 0 to 3.*from 0"):
        start_model(model, 1 + np.arange(8) // 2, Y)


@pytest.mark.filterwarnings("error")
def test_rows_that_there_are_pass():
    neighbors = {
        "before": (8, lambda x, y, rows: (y[rows - 1], y[rows])),
        "after": (7, lambda x, y, rows: (y[rows], y[rows + 1])),
        "clipped": (8, lambda x, y, rows: (y[rows], y.at[rows + 1].get(mode="clip"))),
        "reversed": (8, lambda x, y, rows: (x[7 - rows], y[-rows])),
    }
    for size, take in neighbors.values():
        for batch in (None, 3):
            start_model(functools.partial(paired, size=size, batch=batch, take=take), X[:, 0], Y)
    for batch in (None, 2):
        start_model(functools.partial(grouped, batch=batch), np.arange(8) // 2, Y)


def test_two_plates_and_large_ones():
    def model(y):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("a", 50, 5, dim=-2) as a, numpyro.plate("b", 30, 3, dim=-1) as b:
            numpyro.sample("y", dist.Normal(w, 0.1), obs=y[a[:, None], b])

    start_model(model, np.zeros((50, 30), np.float32))
    for shape, text in (((49, 30), "'a'.* 50 .*49 along axis 0"), ((50, 29), "'b'.* 30 .*29 along axis 1")):
        with pytest.raises(ValueError, match=text):
            start_model(model, np.zeros(shape, np.float32))
    many = np.zeros(2**22, np.float32)
    start_model(functools.partial(paired, size=len(many), batch=10), many, many)
    with pytest.raises(ValueError, match=r"'rows'.* 4194304 .*4194303"):
        start_model(functools.partial(paired, size=len(many), batch=10), many, many[1:])


# ---- values that a compiled program does not know ------------------------------------------------------------


READING = {
    "unique": lambda g: len(np.unique(g)),
    "int": lambda g: int(g.max()) + 1,
    "if": lambda g: 3 if g.sum() > 0 else 4,
    "range": lambda g: len(range(g[1] + 2)),
    "rows": lambda g: len(g[g == 0]),
    "float": lambda g: round(float(g.mean())) + 2,
}


@pytest.mark.parametrize("how", READING)
def test_reading_an_argument_is_explained(how):
    def model(x, y, groups):
        with numpyro.plate("groups", READING[how](groups)):
            w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w[groups], 1.0), obs=y)

    groups = np.arange(8) % 3
    with pytest.raises(TypeError, match=r"argument 'groups' of run: the model reads its values.*partial") as raised:
        start(fs.SGLD(model), X, Y, groups=jnp.asarray(groups))
    assert isinstance(raised.value.__cause__, TypeError | IndexError)
    assert "positional" not in str(raised.value)
    start(fs.SGLD(functools.partial(model, groups=groups)), X, Y)


def test_reading_an_argument_in_predict_is_explained():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w * np.asarray(x), 1.0), obs=y)

    with pytest.raises(TypeError, match="positional argument 0 of predict: the model reads its values"):
        fs.predict({"w": jnp.ones(3)}, KEY, X[:, 0], model=model)


@pytest.mark.parametrize("read", [float, lambda a: a if a > 0 else -a, np.exp], ids=["float", "if", "numpy"])
def test_reading_a_sampled_value_is_explained(read):
    def model(y):
        numpyro.sample("y", dist.Normal(read(numpyro.sample("a", dist.Normal())), 1.0), obs=y)

    with pytest.raises(TypeError, match="reads the value of a sampled site"):
        start_model(model, Y)


def test_an_error_of_the_model_is_not_taken_for_another():
    """The description of its arguments reads small arrays of JAX, which fails within a program unless NumPy does so."""

    def model(x, scales, y):
        f = fs.random_module("net", nn.Dense(1), input_shape=3)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], scales[0]), obs=y)

    with pytest.raises(ValueError, match=r"x has shape .* but input_shape=\(3,\)"):
        start_model(model, jnp.zeros((4, 2)), jnp.array([0.1, 0.2]), jnp.zeros(4))
    gp, texts = fs.GPPrior(ExpSquared(0.5), nugget=jnp.array(0.1)), []
    jax.jit(lambda: texts.append(repr(gp)))()
    assert texts == [repr(gp)]


# ---- rounding ------------------------------------------------------------------------------------------------


def test_what_float32_holds_passes():
    """Years, days since 1970, single points, NaN and infinite values that are left to where rows are loaded."""
    years = np.linspace(1950.0, 2020.0, 40)[:, None]
    for points in (years, TIMES[:1], TIMES - TIMES[0], TIMES.astype(np.float32)):
        fs.measurement.fixed(points)
    fs.measurement.uniform(1950.0, 2020.0, 3)
    fs.measurement.perturb(years, 0.1, 3)
    for source in (19_000.0 + np.arange(10**5) / 1440, np.full(5, np.nan), np.full(5, 1e300), TIMES.astype(int)):
        fs.OnDemand(source)
    with jax.enable_x64(True):
        assert np.ptp(fs.measurement.fixed(TIMES).pool) == 7.0
        assert np.ptp(fs.OnDemand(TIMES)[np.array([0, 7])]) == 7.0


def test_densities_of_traced_nan_are_nan():
    assert np.isnan(jax.jit(lambda f: gp().log_prob(X, f))(not_a_number()))


def test_rows_that_an_array_lacks_are_refused_at_every_run():
    """Also by a kernel and a driver that have refused them before."""

    def model(y):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("rows", 40) as rows:
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[rows])

    mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=10, num_samples=10, progress_bar=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="The plate 'rows'"):
            mcmc.run(jax.random.key(0), jnp.ones(20))
    predictive = fs.Predictive({"a": jnp.ones(3)}, model=model)
    for _ in range(2):
        with pytest.raises(ValueError, match="The plate 'rows'"):
            predictive(jax.random.key(0), jnp.ones(20))
