"""The scales of a network's weights for which it represents a Gaussian process best, at given points and between them.

Given its hidden weights, a network under ``gp_network`` is a Gaussian process whose covariance is known in closed form.
It is compared with the declared covariance at the points, half-way to their nearest neighbors, and half-way between
random pairs of them. Of the scales of the hidden weights and tolerances whose error is nearly the smallest, those with
the largest tolerance are chosen, and of these the scale with the smallest error.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_fspace._checks import warn
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.model.last_layer.find_last_layer import LastLayer
from numpyro_fspace.model.last_layer.prior_mismatch import compare, missing_variance
from numpyro_fspace.model.networks.weight_priors import FanIn, sample_weights
from numpyro_fspace.model.programs.cache import keep
from numpyro_fspace.priors.cholesky import warn_of_indefinite
from numpyro_fspace.priors.gp_prior import NO_SHARE
from numpyro_fspace.priors.kernel_params import spreads
from numpyro_fspace.priors.tolerance import amplitude
from numpyro_fspace.priors.tracing import computed, is_traced

#: Candidates.
HIDDEN_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.5, 8.0, 11.0, 16.0, 22.0)
TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1)
#: Values if the covariance is traced (its kernel has random parameters).
DEFAULT_HIDDEN_SCALE, DEFAULT_TOLERANCE = 2.0, 0.01
#: Candidates with an error up to (1 + ``SLACK``) times the smallest plus ``MIN_SLACK`` are nearly optimal. Among them
#: the largest tolerance is chosen, because its equations are better conditioned.
SLACK, MIN_SLACK = 0.1, 0.004
#: Number of draws of the hidden weights; maximum numbers of places of each kind and of parts that are compared.
NUM_DRAWS, NUM_PLACES, NUM_PARTS = 4, 60, 8
#: If one factorization takes more multiplications than this, half of the draws are used.
MAX_PRODUCTS = 2e7
#: Without a warning: largest relative error of the covariance at the points, and between them.
MAX_ERROR, MAX_ERROR_BETWEEN = 0.1, 0.5
#: Without a warning: largest variance between the points, given the values at them, that the network lacks.
MAX_MISSING = 0.05
#: What to do about features that make too little of the process, also if hidden weights are fixed numbers.
WIDEN = (
    "Widen the last hidden layer (one of sines and cosines needs the fewest units), give a periodic process sines and "
    "cosines of time as inputs, give the layers biases, give the kernel a larger lengthscale, or pass neither "
    "hidden_scale nor tolerance."
)
OTHER_LAYERS = "leave more hidden layers random (frozen), add a random layer, or take another trained network"
FROZEN = (
    "Frozen layers keep the features that they were trained for: give the kernel a larger lengthscale, "
    f"{OTHER_LAYERS}, with features that vary more at the points and more of them; pass neither hidden_scale nor "
    "tolerance."
)
#: Caches of the results of searches and of the warnings that were given.
_CHOSEN: dict = {}
_WARNED: dict = {}


class Scales(NamedTuple):
    """Scales of a network's weights, and how accurately the network represents the process with them.

    Attributes:
        hidden: s; the hidden weights are N(0, s²/fan-in).
        tolerance: τ, in units of the process's standard deviation.
        last_layer: c; before the correction, the last layer is N(0, c²/fan-in) times the variance of the process. With
            this c the mean variance of the network at the points is that of the process.
        share: share of the variance of the process at the points that the features can represent. Of a sum of kernels
            or several outputs this is that of the worst part, as are the errors.
        error: root mean square error of the covariance at the points, relative to its root mean square.
        error_between: the same at places between the points.
        missing: mean variance of the process between the points, given its values at them, less that of the network, in
            units of the process's variance. A posterior with little noise is too certain there by as much.
    """

    hidden: float
    tolerance: float
    last_layer: float
    share: float = 1.0
    error: float = 0.0
    error_between: float = 0.0
    missing: float = 0.0


def find_scales(
    name, layer: LastLayer, prior, x, rows_of, *, hidden_scale, tolerance, is_frozen: bool = False
) -> Scales:
    """The scales of a network under ``prior`` at the points x [M, D].

    The search runs once per process for the same network, covariance and arguments. If the kernel has random
    parameters, s and τ have default values, and only c is computed.

    Args:
        name: name of the function, for warnings.
        layer: the network.
        prior: the Gaussian process.
        x: the points as inputs of the prior.
        rows_of: the function from points [A, D] to inputs of the network [A, ...].
        hidden_scale, tolerance: given numbers, or None to choose them.
        is_frozen: whether hidden weights are fixed numbers, for warnings.

    Raises:
        ValueError: the features of the network at the points are all zero, or not finite.

    Warns:
        RuntimeWarning: the network cannot represent the process, at the points or between them.
    """
    is_random, is_unknown = is_traced(amplitude(prior, x)), is_traced((x, hidden_scale, tolerance))
    if is_random or is_unknown:
        hidden_scale = DEFAULT_HIDDEN_SCALE if hidden_scale is None else hidden_scale
        tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
    if is_unknown:
        return Scales(hidden_scale, tolerance, 1.0)
    rows = np.asarray(rows_of(np.asarray(x)))
    settings = f"{layer.program}, {rows.shape}, {hidden_scale}, {tolerance}, {jnp.result_type(float)}"

    def search():
        points = np.asarray(x)
        if not is_random and prior.exact:  # otherwise the search would blame the network for the kernel
            warn_of_indefinite(prior._covariance(points))
        places = _places(points, np.random.default_rng(0), only_points=layer.network.takes_integers)
        parts = None if is_random else _correlations(prior, points, np.concatenate([points, *places]))
        if parts is not None and not len(parts[1]):
            raise ValueError(
                f"gp_network({name!r}): the prior has no covariance at the points that {points.dtype} represents: "
                "rescale x together with the lengthscale, or the kernel's variance."
            )
        digest = blake2b(settings.encode() + points.tobytes() + rows.tobytes())
        digest.update(b"" if parts is None else b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
        key = digest.digest()
        if key not in _CHOSEN:
            keep(_CHOSEN, key, _search(layer, parts, points, places, rows_of, hidden_scale, tolerance))
        return (np.array(_CHOSEN[key]),)

    found = search() if is_random else prior._memory.once((f"scales of {settings}", x), search)
    scales = Scales(*map(float, found[0]))
    if not np.isfinite(scales.last_layer):
        raise ValueError(
            f"gp_network({name!r}): the network's features at the points are all zero, or not finite, for hidden "
            f"weights of the scales {HIDDEN_SCALES if hidden_scale is None else hidden_scale}: check the output of the "
            "network at the points, and the units of the points."
        )
    _warn(name, layer, scales, is_frozen)
    return scales


def _search(layer, parts, x, places, rows_of, hidden_scale, tolerance) -> Scales:
    """The best candidate; without ``parts`` of the process, the first one, for which only c is computed."""
    inputs = np.asarray(rows_of(np.concatenate([x, *places])))
    hiddens = HIDDEN_SCALES if hidden_scale is None else (float(hidden_scale),)
    size = min(len(x), layer.num_features)
    num_draws = NUM_DRAWS if size * len(x) ** 2 <= MAX_PRODUCTS else NUM_DRAWS // 2

    def draws(hidden):
        keys = jax.random.split(jax.random.key(0), num_draws)
        return jax.lax.map(lambda key: _drawn_features(layer, inputs, hidden, key), keys)

    features_of, tried = computed(draws, 1.0), []
    assert features_of is not None  # because the network's program holds no traced values
    for hidden in hiddens:
        features = np.asarray(features_of(hidden), np.float64) * layer.typical_scale()
        size = float(np.sqrt(np.mean(np.sum(features[:, : len(x)] ** 2, -1))))
        if not 0 < size < np.inf or not np.isfinite(features).all():
            tried.append(Scales(hidden, DEFAULT_TOLERANCE, np.nan, 0.0, np.inf, np.inf))
            continue
        taus = TOLERANCES if tolerance is None else (float(tolerance),)
        if parts is None:
            tried.append(Scales(hidden, taus[0], 1.0 / size))
            continue
        compared = compare(features / size, parts, len(x), len(places[0]), taus)
        tried += [Scales(hidden, tau, 1.0 / size, *one) for tau, one in zip(taus, compared, strict=True)]
    least = min(scales.error + scales.error_between for scales in tried)
    good = [scales for scales in tried if scales.error + scales.error_between <= (1 + SLACK) * least + MIN_SLACK]
    if not good:  # no candidate has finite features
        return tried[0]
    largest = max(scales.tolerance for scales in good)
    best = min((s for s in good if s.tolerance == largest), key=lambda scales: scales.error + scales.error_between)
    if parts is None:
        return best
    features = best.last_layer * np.asarray(features_of(best.hidden), np.float64) * layer.typical_scale()
    return best._replace(missing=missing_variance(features, parts, len(x), len(places[0]), best.tolerance))


def _places(x, rng, *, only_points=False):
    """Some of the points, places half-way to nearest neighbors, and places half-way between random pairs."""
    some = x[np.sort(rng.permutation(len(x))[:NUM_PLACES])]
    if only_points or len(x) == 1:
        return some, x[:0], x[:0]
    width = spreads(x)
    unit, near = x / width, []
    for one in some / width:
        distance = np.sum((unit - one) ** 2, -1)
        near.append(x[np.argmin(np.where(distance > 0, distance, np.inf))])
    pairs = x[rng.integers(0, len(x), (2, NUM_PLACES))]
    return some, 0.5 * (some + np.array(near)), pairs.mean(0)


def _correlations(prior, x, everywhere) -> tuple[np.ndarray, np.ndarray]:
    """The covariances [J, A, A] of the parts of a process at all places, and the shares [J] of the parts.

    The parts are the summands of each output. Their covariances are in units of their mean variance at the points, and
    their shares are those of this variance in that of the output. Equal parts count once; of many the roughest remain.
    """
    parts: dict[bytes, tuple[np.ndarray, float]] = {}
    for summands in prior.summands():
        found, variances = zip(*(_outputs(part, x, everywhere) for part in summands), strict=True)
        shares = np.array(variances) / np.sum(variances, 0)
        for covariance, share in zip(np.stack(found)[shares > NO_SHARE], shares[shares > NO_SHARE], strict=True):
            parts.setdefault(blake2b(covariance.tobytes() + share.tobytes()).digest(), (covariance, share))
    chosen = list(parts.values())
    if len(chosen) > NUM_PARTS:  # the roughest has the smallest correlations
        chosen = sorted(chosen, key=lambda part: np.linalg.norm(part[0]))[:NUM_PARTS]
    return np.array([covariance for covariance, _ in chosen]), np.array([share for _, share in chosen])


def _outputs(prior, x, everywhere):
    """Covariances of some outputs at all places [K, A, A], in units of their mean variances at the points [K]."""
    covariance = np.asarray(prior._covariance(everywhere), np.float64)
    num = len(everywhere)
    if covariance.shape[-1] != num:
        width = covariance.shape[-1] // num
        blocks = covariance.reshape(num, width, num, width)
        covariance = np.stack([blocks[:, k, :, k] for k in range(width)])
    variance = np.diagonal(covariance[:, : len(x), : len(x)], axis1=-2, axis2=-1).mean(-1)
    return covariance / np.where(variance > 0, variance, 1.0)[:, None, None], variance


def _drawn_features(layer, inputs, scale, key):
    """The features at all places, [A, H], of hidden weights that are drawn at this scale."""
    with handlers.block(), function_hook(), handlers.seed(rng_seed=key):
        hidden = sample_weights("weight", layer.network, dict.fromkeys(layer.hidden, FanIn(scale)))
    return layer.features(hidden, inputs)


def _warn(name, layer, scales, is_frozen):
    """Warn if the network cannot represent the process, once for each name and network."""
    if scales.error > MAX_ERROR:
        message = (
            f"the network's {layer.num_features} features make {max(scales.share, 0.0):.0%} of the process's variance "
            "at the points (of a sum of kernels: of the summand that they follow worst), so that its covariance "
            f"differs from the process's there by {scales.error:.0%} (root mean square). "
            f"{FROZEN if is_frozen else WIDEN}"
        )
    elif scales.error_between > MAX_ERROR_BETWEEN:
        message = (
            f"between the points the network's covariance differs from the process's by {scales.error_between:.0%}: "
            "the points are too sparse for its lengthscale, or the hidden layers are too narrow. Give more points "
            f"(with one input at most a lengthscale apart), or {OTHER_LAYERS if is_frozen else 'wider layers'}."
        )
    elif scales.missing > MAX_MISSING:
        message = (
            "between the points, given its values at them, the process still varies by "
            f"{scales.missing**0.5:.0%} of its standard deviation more than the network, which is smooth "
            "there: the posterior will be too certain between the points. Give points closer together, among them the "
            "inputs of the data, or a smoother kernel."
        )
    else:
        return
    if (name, scales, layer.program) not in _WARNED:
        keep(_WARNED, (name, scales, layer.program), True)
        warn(f"gp_network({name!r}): {message}")
