"""``functional_prior``: the NumPyro primitive that puts a prior over functions on a network."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers, prng_key
from numpyro.primitives import apply_stack

from numpyro_fspace._checks import shown
from numpyro_fspace.model.inference_engine import current_engine
from numpyro_fspace.model.joint_evaluation import OnePass
from numpyro_fspace.model.measurement import as_points
from numpyro_fspace.model.sites import FunctionalPriorSite, note
from numpyro_fspace.priors import check_prior
from numpyro_fspace.priors.base import has_residuals

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import ArrayLike, Float

    from numpyro_fspace.model.measurement import PointSampler
    from numpyro_fspace.priors import FunctionalPrior


def functional_prior(
    name: str,
    fn: Callable,
    prior: FunctionalPrior,
    points: PointSampler | Callable | Float[ArrayLike, "M D"],
    *,
    scale: Float[ArrayLike, ""] = 1.0,
) -> Callable:
    r"""Put a prior over functions on ``fn``, inside a NumPyro model.

    .. math:: \log p \mathrel{+}= \text{scale} \cdot \log P_0\big(f(X_M)\big)

    **Target.** With fixed points the density of the model is p(y | f) · P0(f(X_M))^scale · p0(w), the product of the
    likelihood, the functional prior at X_M and the prior of the weights. With random points the samplers of this
    package draw X_M at each gradient step and target exp(log-likelihood + log p0(w) + scale · E[log P0(f(X_M))]). The
    last term grows with the number of points M; ``scale`` tempers it. Plates never rescale it, and NumPyro's
    ``Predictive`` ignores it.

    Args:
        name: name of the site.
        fn: function of inputs [M, D] to values [M] or [M, K], such as the result of ``random_module``. Its value at an
            input must depend only on that input. Samplers evaluate it at X_M and at the data in one pass. Points need
            no further evaluation if they are rows of an argument that the model passes to ``fn`` unchanged.
        prior: a functional prior (``fs.GPPrior``, ``fs.priors.StudentTPrior``, …), that is any object with
            ``log_prob(x, f)`` and ``sample(key, x, sample_shape)``.
        points: measurement points: an array [M, D] (fixed), a sampler of ``fs.measurement``, or a callable of a key
            that returns [M, D].
        scale: factor on the log prior, positive.

    Returns:
        ``fn``, or its linearization in a model made by ``fs.variational.linearize``. Under a sampler, its first call
        also evaluates ``fn`` at X_M.

    Raises:
        ValueError: scale is not positive and finite; the points are random under an engine that needs a fixed density
            (HMC, NUTS, …); ``prior.log_prob`` does not return a scalar.
        TypeError: ``fn`` is no function, or ``prior`` or ``points`` has the wrong type.

    Example:
        >>> import flax.linen as nn, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.3))
        >>> points = fs.measurement.uniform(-1.0, 1.0, 40)
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = fs.random_module("net", net, input_shape=(1,))
        ...     f = fs.functional_prior("f", f, gp, points)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)

    References: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural
    networks*, eq. 6 and 9.
    """
    if not callable(fn):
        raise TypeError(f"functional_prior({name!r}): fn must be a function of inputs [M, D], got {type(fn).__name__}.")
    check_prior(prior)
    points = as_points(points)
    _check_scale(name, scale)
    engine = current_engine()
    if not engine.is_running:
        return fn
    fn = engine.function(name, fn)
    if not engine.wants_density:
        note("functional_prior", name, FunctionalPriorSite(fn, prior, points, scale=scale))
        return fn
    key = None
    if points.is_random:
        if engine.freezes_points:
            raise ValueError(
                f"functional_prior({name!r}): the measurement points are random, but this engine (HMC, NUTS, …) needs "
                "a density that does not change. Freeze the points: "
                "points=fs.measurement.fixed(points(jax.random.key(0))); or sample with fs.fSGHMC or fs.fSGLD."
            )
        key = prng_key()
        if key is None:
            _factor(name, FunctionalPriorSite(fn, prior, points, scale=scale), engine)
            return fn
    x, at_points, where, known, rows = draw_points(prior, points, key)
    if not engine.wants_prior:
        _factor(name, FunctionalPriorSite(fn, prior, points, x, jnp.zeros(()), scale), engine)
        return fn
    one_pass = OnePass(fn, x, known, rows, name=name)

    def log_factor():
        with handlers.block():
            log_prob = at_points.log_prob(where, one_pass.values())
        is_number = isinstance(log_prob, numbers.Real | np.ndarray | jax.Array) and jnp.ndim(log_prob) == 0
        if not is_number or jnp.iscomplexobj(log_prob):
            raise ValueError(
                f"functional_prior({name!r}): prior.log_prob(x, f) must return a real number, the log density of all "
                f"values together; {type(prior).__name__} returned {shown(log_prob)}."
            )
        return scale * jnp.asarray(log_prob)

    def residuals():
        r, constant = at_points.gaussian_residuals(where, one_pass.values())
        return jnp.sqrt(scale) * r, scale * constant

    is_quadratic = has_residuals(at_points)
    site = FunctionalPriorSite(fn, prior, points, x, log_factor, scale, one_pass, residuals if is_quadratic else None)
    _factor(name, site, engine)
    return one_pass if engine.visits_data else fn


def draw_points(prior, points, key):
    """``(x, prior, where, known, rows)``: the points x, whose log density is ``prior.log_prob(where, f)``.

    If the prior can be tabulated on the pool of the points, ``prior`` is the table and ``where`` are row numbers;
    otherwise ``where`` is x. ``known`` and ``rows`` are the arguments ``known`` and ``drawn`` of ``OnePass``.
    """
    rows = points.rows(key) if points.is_random else None
    if rows is None:
        x = points(key)
        return x, prior, x, points.constant, None
    x, table = points.pool[rows], prior.tabulated(points.pool) if hasattr(prior, "tabulated") else None
    at_points, where = (prior, x) if table is None else (table, rows[:, None])
    return x, at_points, where, points.pool, rows


def _check_scale(name, scale):
    if isinstance(scale, jax.core.Tracer):
        return
    is_number = isinstance(scale, int | float | np.number | np.ndarray | jax.Array) and jnp.ndim(scale) == 0
    if not (is_number and 0 < float(scale) < float("inf")):
        raise ValueError(f"functional_prior({name!r}): scale={scale!r} must be a positive finite number.")


def _factor(name, site, engine):
    apply_stack(
        {
            "type": "sample",
            "name": name,
            "fn": site,
            "args": (),
            "kwargs": {"rng_key": None, "sample_shape": ()},
            "value": jnp.zeros((0,)),
            "scale": None,
            "is_observed": engine.marks_observed,
            "intermediates": [],
            "cond_indep_stack": [],
            "infer": {"is_auxiliary": True, "block_plates": list(engine.plates)},
        }
    )
