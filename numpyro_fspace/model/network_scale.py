"""The scales of a network's weights with which it follows a Gaussian process, at given points and between them.

Given its hidden weights, a network under ``gp_network`` is a Gaussian process whose covariance is known in closed form.
It is compared with the declared one at the points, half-way to their nearest neighbors, and half-way between random
pairs of them: the scale of the hidden weights and the tolerance with the smallest error are chosen.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_fspace.model.arguments import frozen
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.model.weight_priors import FanIn, sample_weight
from numpyro_fspace.priors._cholesky import is_traced

if TYPE_CHECKING:
    from numpyro_fspace.model.last_layer import LastLayer

__all__ = ["Scales", "find_scales"]

#: What is tried.
HIDDEN_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.5)
TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1)
#: What is taken where the covariance is not known in numbers (its kernel has random parameters).
DEFAULT_HIDDEN_SCALE, DEFAULT_TOLERANCE = 2.0, 0.01
#: Draws of the hidden weights, places of each kind where covariances are compared, and outputs.
NUM_DRAWS, NUM_PLACES, NUM_OUTPUTS = 6, 80, 4
#: Smallest share of the prior's variance at the points, and largest relative error of the covariance between them.
LEAST_SHARE, MAX_ERROR = 0.8, 0.5


class Scales(NamedTuple):
    """Scales of a network's weights, and how well the network follows the process with them.

    Attributes:
        hidden: s, the hidden weights are N(0, s²/fan-in).
        tolerance: τ, in units of the process's standard deviation.
        last_layer: the last layer is N(0, c²/fan-in) times the process's variance before it is corrected; with this c
            its mean variance at the points is that of the process.
        share: share of the process's variance at the points that the features can make.
        error: root mean square error of the covariance at the points, relative to that of the covariance.
        error_between: the same at places between the points.
    """

    hidden: float
    tolerance: float
    last_layer: float
    share: float = 1.0
    error: float = 0.0
    error_between: float = 0.0


def find_scales(name, layer: LastLayer, prior, x, rows, *, hidden_scale, tolerance) -> Scales:
    """The scales of a network under ``prior`` at the points x [M, D], which the network takes as ``rows`` [M, ...].

    Args:
        name: the function's name, for warnings.
        layer: the network.
        prior: the Gaussian process.
        x, rows: the points as the prior takes them and as the network does.
        hidden_scale, tolerance: numbers that are given, or None where they are chosen.

    Warns:
        RuntimeWarning: the network cannot follow the process, at the points or between them.
    """
    if is_traced((x, hidden_scale, tolerance)) or is_traced(prior._covariance(x)):
        hidden = DEFAULT_HIDDEN_SCALE if hidden_scale is None else hidden_scale
        return Scales(hidden, DEFAULT_TOLERANCE if tolerance is None else tolerance, 1.0)
    program = jax.make_jaxpr(layer.features)(
        {path: jnp.zeros(layer.network.weights[path].shape) for path in layer.hidden}, rows[:2]
    )
    signature = str((str(program), frozen(list(program.consts)), layer.paths, hidden_scale, tolerance))
    with jax.ensure_compile_time_eval():
        (found,) = prior._memory.once(
            (f"scales of {signature}", x, np.shape(rows)),
            lambda: (np.array(_search(layer, prior, np.asarray(x), rows.shape[1:], hidden_scale, tolerance)),),
        )
    scales = Scales(*map(float, found))
    _warn(name, layer, scales)
    return scales


def _search(layer, prior, x, shape, hidden_scale, tolerance) -> Scales:
    rng = np.random.default_rng(0)
    places = _places(x, rng)
    everywhere = np.concatenate([x, *places])
    covariances = _correlations(prior, x, everywhere)
    draw = jax.jit(_drawn_features(layer, jnp.asarray(everywhere.reshape(-1, *shape), float)))
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    tried = []
    for hidden in HIDDEN_SCALES if hidden_scale is None else (hidden_scale,):
        features = np.asarray(jax.lax.map(lambda key, s=hidden: draw(key, s), keys), np.float64)
        features = features * layer.typical_scale()
        size = float(np.sqrt(np.mean(np.sum(features[:, : len(x)] ** 2, -1))))
        for tau in TOLERANCES if tolerance is None else (tolerance,):
            share, error, between = _compare(features / size, covariances, len(x), len(places[0]), tau)
            tried.append(Scales(hidden, tau, 1.0 / size, share, error, between))
    return min(tried, key=lambda scales: scales.error + scales.error_between)


def _places(x, rng):
    """Some of the points, places half-way to nearest neighbors, and places half-way between random pairs."""
    some = x[np.sort(rng.permutation(len(x))[:NUM_PLACES])]
    if len(x) == 1:
        return some, x[:0], x[:0]
    width = x.std(0)
    unit = x / np.where(width > 0, width, 1.0)
    near = []
    for one in some / np.where(width > 0, width, 1.0):
        distance = np.sum((unit - one) ** 2, -1)
        near.append(x[np.argmin(np.where(distance > 0, distance, np.inf))])
    pairs = x[rng.integers(0, len(x), (2, NUM_PLACES))]
    return some, 0.5 * (some + np.array(near)), pairs.mean(0)


def _correlations(prior, x, everywhere):
    """Covariances of some outputs at all places [K, A, A], in units of their mean variance at the points."""
    covariance = np.asarray(prior._covariance(everywhere), np.float64)
    num = len(everywhere)
    if covariance.shape[-1] != num:
        width = covariance.shape[-1] // num
        blocks = covariance.reshape(num, width, num, width)
        covariance = np.stack([blocks[:, k, :, k] for k in range(width)])
    covariance = covariance[:NUM_OUTPUTS]
    variance = np.diagonal(covariance[:, : len(x), : len(x)], axis1=-2, axis2=-1).mean(-1)
    return covariance / variance[:, None, None]


def _drawn_features(layer, inputs):
    """The features at all places, [A, H], as a function of a key and the scale of the hidden weights."""

    def draw(key, scale):
        with handlers.block(), function_hook(), handlers.seed(rng_seed=key):
            units = layer.network.units()
            hidden = {
                path: sample_weight(f"weight.{path}", path, layer.network, FanIn(scale), path in units)
                for path in layer.hidden
            }
        return layer.features(hidden, inputs)

    return draw


def _compare(features, covariances, num_points, num_same, tau):
    """``(share, error at the points, error between them)`` for features [S, A, H]."""
    shares, errors, between = [], [], []
    judged = slice(num_points, None)
    for psi in features:
        left, values, right = np.linalg.svd(psi[:num_points], full_matrices=False)
        shrunk, gain = values**2 / (values**2 + tau**2), values / (values**2 + tau**2)
        there = psi[judged]
        own, turned = there @ there.T, there @ right.T
        for covariance in covariances:
            projected = left.T @ covariance[:num_points, :num_points] @ left
            inner = np.outer(gain, gain) * projected + np.diag(tau**2 * gain**2 - shrunk)
            wanted = covariance[judged, judged]
            wrong = own + turned @ inner @ turned.T - wanted
            shares.append(np.sum(shrunk * np.diagonal(projected)) / np.trace(covariance[:num_points, :num_points]))
            errors.append(_relative(wrong[:num_same, :num_same], wanted[:num_same, :num_same]))
            between.append(_relative(wrong[num_same:, num_same:], wanted[num_same:, num_same:]))
    return float(np.mean(shares)), *(float(np.sqrt(np.mean(np.square(e)))) for e in (errors, between))


def _relative(wrong, wanted):
    return np.linalg.norm(wrong) / np.linalg.norm(wanted) if wanted.size else 0.0


def _warn(name, layer, scales):
    if scales.share < LEAST_SHARE:
        warnings.warn(
            f"gp_network({name!r}): the network's {layer.num_features} features make {scales.share:.0%} of the "
            "process's variance at the points, and cannot follow it there. Widen the last hidden layer, or give the "
            "kernel a larger lengthscale.",
            RuntimeWarning,
            stacklevel=4,
        )
    elif scales.error_between > MAX_ERROR:
        warnings.warn(
            f"gp_network({name!r}): between the points the network's covariance differs from the process's by "
            f"{scales.error_between:.0%}: the points are too sparse for its lengthscale, or the hidden layers too "
            "narrow. Give more points (in one input at most a lengthscale apart), or wider layers.",
            RuntimeWarning,
            stacklevel=4,
        )
