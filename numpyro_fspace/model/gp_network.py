r"""``gp_network``: a network whose values at given points have the distribution of a Gaussian process.

A network that is linear in its last layer is :math:`g(x) + \varphi_v(x)^\top a` with features φ_v of the hidden weights
v. Given v everything is Gaussian, so the last layer can be drawn such that the network has the distribution of a
Gaussian process of mean zero at the points X_M for every v, up to what the features cannot span there
(``last_layer/given_features.py``): draw a₀ from the last layer's own prior and f̃ from the process, and correct a₀ by
the ridge regression of the difference,

.. math:: a = a_0 + A \Phi^\top S_\tau^{-1} (\tilde f + \tau e_1 - g - \Phi a_0 - \tau e),
    \qquad S_\tau = \Phi A \Phi^\top + \tau^2 I,

with Φ = φ_v(X_M), a₀ ~ N(0, A), and e, e₁ ~ N(0, I). Then g + Φa + r has the distribution of f̃ + τe₁, exactly, for
every v, where the residual r = f̃ + τe₁ - g - Φa is what the features leave out: noise of about τ, and the part that
they cannot span. If the process has a mean, it is added to the network.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_fspace._checks import as_numbers, check_positive
from numpyro_fspace.model.inference_engine import current_engine
from numpyro_fspace.model.last_layer.find_last_layer import find_last_layer
from numpyro_fspace.model.last_layer.given_features import LastLayerPrior, last_layer_given
from numpyro_fspace.model.last_layer.hidden_scale import find_scales
from numpyro_fspace.model.last_layer.input_units import units_of
from numpyro_fspace.model.measurement import as_points
from numpyro_fspace.model.networks.adapters import read_network
from numpyro_fspace.model.networks.frozen_weights import freeze
from numpyro_fspace.model.networks.random_module import check_input_shape, check_inputs, check_name, of_points
from numpyro_fspace.model.networks.weight_priors import FanIn, sample_array, sample_weights
from numpyro_fspace.model.sites import last_layer, note
from numpyro_fspace.priors.cholesky import as_columns, as_rows
from numpyro_fspace.priors.gaussian_base import GaussianProcess
from numpyro_fspace.priors.tolerance import amplitude as amplitude_of
from numpyro_fspace.priors.tolerance import tolerant_factor
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import ArrayLike, Float

    from numpyro_fspace.model.measurement import PointSampler


#: The smallest tolerance, in units of the rounding error and for each √M. The condition number of the ridge regression
#: is about √M/τ, and the series that ``ridge.py`` needs fail for larger ones.
MIN_TOLERANCE, MIN_POINTS = 16.0, 40


def gp_network(
    name: str,
    module: Any,
    prior: GaussianProcess,
    points: PointSampler | Float[ArrayLike, "M D"],
    *,
    input_shape: int | tuple[int, ...] | None = None,
    hidden_scale: float | None = None,
    tolerance: float | None = None,
    frozen: Mapping | None = None,
) -> Callable:
    r"""A random network whose values at the points have the Gaussian process's distribution.

    .. math::
        f(x) &= m(x) + g(x) + \varphi_v(x)^\top a, \\
        a &= a_0 + A \Phi^\top S^{-1} \big(L z - g - \Phi a_0 - \tau e\big), \quad
        S = \Phi A \Phi^\top + \tau^2 I

    Here m and k are the mean and the kernel of the process, φ_v are the features with hidden weights v, g is the output
    if the last layer a is zero, a₀ ~ N(0, A) is that layer's own prior, Φ = φ_v(X_M), and z, e are standard normal. A
    is diagonal, proportional to 1/fan-in, and gives f the process's mean variance at X_M.

    **Distribution.** The hidden weights v have the prior of ``fs.fan_in(s)``. For every v, f(X_M) = m(X_M) + L z - r
    with m(X_M) + L z ~ N(m, k(X_M, X_M) + τ²I). The remainder r is noise of about τ and what the features cannot
    represent. Between the points the network follows its own prior given its values at the points. This is a generative
    model without factors, so prior predictive draws, NUTS, SVI, minibatches and the kernels of this package work as for
    any NumPyro model. In contrast, ``functional_prior`` *multiplies* the prior of all weights by the density of the
    process.

    **Units.** A network with inputs of shape (D,) receives (x - mean of X_M) / unit. The unit of each input is
    proportional to the lengthscale of the process along it, and scaled such that the points have a mean square of one.
    A network receives x unchanged if it takes integers, or if, before its first weights, it translates its inputs (to
    standardize them) or computes features of them (sines of the time of year). Scale such features to a mean square of
    about one.

    **Sites.** There is one site ``"{name}.{path}"`` for each array of hidden weights, and there are three sites with
    standard normal priors: ``"{name}.values"`` z [M, K], the values of the process at the points, whitened by the
    factor L Lᵀ = k(X_M, X_M) + τ²I; ``"{name}.last_layer"`` A^(-1/2) a₀ [H, K]; and ``"{name}.residual"`` e [M, K], for
    K outputs and H weights of the last layer for each.

    Args:
        name: name of the function and prefix of the sites.
        module: a network as for ``random_module`` whose output, [M] or [M, K], is affine in its last layer.
        prior: a Gaussian prior, such as ``fs.GPPrior`` (including one with ``fs.priors.Helmholtz``) or a conditioned
            one. f gets its moments without nugget. It must have as many outputs as the network. If its kernel has
            random parameters, compiled programs (samplers, ``fs.predict``) take hidden_scale=2, tolerance=0.01 and the
            standard deviations of the points as units; outside of ``jax.jit`` all three depend on the parameters.
        points: X_M, an array [M, D] or fixed points of ``fs.measurement`` (``space_filling``, ``fixed``). With one
            input they should be at most a lengthscale apart; with several inputs use rows of the data.
        input_shape: shape of one input; None means that of a point, (D,).
        hidden_scale: s. None chooses s and τ together, from a fixed set of pairs. Of the pairs whose error of the
            covariance, at the points and between them, is nearly the smallest, it takes those with the largest τ, and
            of these the pair with the smallest error.
        tolerance: τ in units of the process's standard deviation at the points; None chooses it in the same way.
        frozen: hidden weights that are fixed numbers, as for ``random_module``, known when the model is compiled (no
            arguments of the model); the last layer must not be among them.
            The network then gets x unchanged and not in the units above, because it may have been trained so.

    Returns:
        f, a function of x [N, *input_shape] to the network's output [N] or [N, K].

    Raises:
        TypeError: the prior is not Gaussian; hidden_scale or tolerance is no number.
        ValueError: the points are random, or not known when the model is compiled; points and input_shape differ in
            size; the process has no variance; the output of the network is not affine in its last layer; the last
            layer is frozen; the network computes in less than float32; the numbers of outputs differ; hidden_scale or
            tolerance is not positive, or tolerance is too small for the precision; and as for ``random_module``.

    Warns:
        RuntimeWarning: the network cannot represent the process at the points (it is too narrow or too smooth), or
            between them (the points are too sparse, or the process is rougher there than the network).

    Example:
        >>> import flax.linen as nn, jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
        >>> points = fs.measurement.space_filling(-1.0, 1.0, 20)
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = fs.gp_network("f", net, gp, points)
        ...     numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)
        >>> predictive = numpyro.infer.Predictive(model, num_samples=4)
        >>> draws = predictive(jax.random.key(0), points.pool)
        >>> draws["y"].shape
        (4, 20)

    References: J. Wilson et al. (2021), *Pathwise conditioning of Gaussian processes*, for the correction a - a₀.
    """
    check_name(name, "gp_network")
    if not isinstance(prior, GaussianProcess):
        raise TypeError(
            f"gp_network({name!r}): prior must be Gaussian, got {type(prior).__name__}. For a kernel write "
            "fs.GPPrior(kernel). Priors that are not Gaussian multiply the network's own: fs.functional_prior."
        )
    if hidden_scale is not None:
        check_positive(hidden_scale, "hidden_scale")
    x_points = _fixed_points(name, points)
    if tolerance is not None:
        check_positive(tolerance, "tolerance")
        factor = MIN_TOLERANCE * max(len(x_points), MIN_POINTS) ** 0.5
        smallest = factor * float(jnp.finfo(jnp.result_type(float)).eps)
        if not is_traced(tolerance) and tolerance < smallest:
            raise ValueError(
                f"gp_network({name!r}): tolerance={tolerance} is below {smallest:.3g}, the smallest for which the last "
                f"layer can be computed in {jnp.result_type(float)}: leave it None, or enable float64."
            )
    shape = check_input_shape(x_points.shape[1] if input_shape is None else input_shape)
    if math.prod(shape) != x_points.shape[1]:
        raise ValueError(
            f"gp_network({name!r}): a point has {x_points.shape[1]} numbers, but input_shape={shape} needs "
            f"{math.prod(shape)}: give points [M, {math.prod(shape)}], which are flattened inputs of the network, or "
            "the input_shape of a point."
        )
    network = read_network(name, module, shape, "gp_network", of_points(shape) if input_shape is None else None)
    network = freeze(f"gp_network({name!r})", network, frozen)
    layer = _last_layer(name, network, shape, frozen, x_points)
    if layer.num_outputs != (prior.num_outputs or 1):
        raise ValueError(
            f"gp_network({name!r}): the network has {layer.num_outputs} output(s) and the prior "
            f"num_outputs={prior.num_outputs}: make them equal."
        )
    has_units = len(shape) == 1 and not (network.takes_integers or layer.makes_features) and frozen is None
    amplitude = amplitude_of(prior, x_points)
    is_random = is_traced(amplitude)
    to_units = units_of(prior, x_points, is_random=is_random) if has_units else lambda x: x

    def rows_of(points):
        return to_units(_network_inputs(name, points, shape, network))

    rows = rows_of(x_points)
    if not is_random and not (np.isfinite(amplitude) & (amplitude > 0)).all():
        raise ValueError(
            f"gp_network({name!r}): the standard deviation of the process at the points is {amplitude}, but must be "
            "positive: give the kernel a positive, finite variance there."
        )
    given = {"hidden_scale": hidden_scale, "tolerance": tolerance}
    chosen = find_scales(name, layer, prior, x_points, rows_of, **given, is_frozen=bool(frozen))
    hidden = sample_weights(name, network, dict.fromkeys(layer.hidden, FanIn(chosen.hidden)))
    num_points, num_outputs = len(x_points), layer.num_outputs
    factor = tolerant_factor(prior, x_points, chosen.tolerance)
    scale = chosen.last_layer * layer.typical_scale()
    features = layer.features(hidden, rows)
    features = features * jnp.asarray(scale, features.dtype)
    amplitude = jnp.asarray(amplitude, features.dtype)
    center = -layer.offset(hidden, rows) / amplitude

    def distribution():
        is_joint = factor.shape[-1] != num_points
        units = jnp.tile(amplitude, num_points)[:, None] if is_joint else amplitude[: factor.shape[0], None, None]
        roots = jnp.asarray(factor.cholesky, features.dtype) / units
        return LastLayerPrior(features, chosen.tolerance, roots, center)

    def draw():
        white = {
            "last_layer": _white(f"{name}.last_layer", (layer.num_features, num_outputs)),
            "values": _white(f"{name}.values", (num_points, num_outputs)),
            "residual": _white(f"{name}.residual", (num_points, num_outputs)),
        }
        values = as_rows(factor.color(as_columns(white["values"], factor.shape)), num_points)
        white["values"] = values / amplitude
        return last_layer_given(features, chosen.tolerance, center, **white)

    size = layer.num_features * num_outputs
    last = amplitude * jnp.asarray(scale, features.dtype)[:, None] * last_layer(name, draw, distribution)

    def f(x):
        x = jnp.asarray(as_numbers(x, f"gp_network({name!r}): x"))
        check_inputs(name, x, shape, "gp_network", by_points=input_shape is None)
        if network.takes_integers and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"gp_network({name!r}): the network takes integers, but x is {x.dtype}: x.astype(int).")
        values = layer.output(hidden, last, to_units(x))
        if prior.has_zero_mean:
            return values
        mean = prior._mean(x.reshape(len(x), -1).astype(jnp.result_type(float)))
        return values + jnp.asarray(mean, values.dtype).reshape(values.shape)

    f = current_engine().function(name, f, is_network=True)
    about = {"prior": prior, "last_layer_size": size, "points": _network_inputs(name, x_points, shape, network)}
    note("network", name, f, (*layer.hidden, *LastLayerPrior.sites), **about)
    return f


def _last_layer(name, network, shape, frozen, x_points):
    """The last layer of a network of which some weights may be frozen."""
    try:
        layer = find_last_layer(f"gp_network({name!r})", network, shape, x_points)
    except ValueError as error:
        if frozen is None:
            raise
        raise ValueError(f"{error} Weights that are frozen are constants here: leave the last layer random.") from error
    if layer.program is None:
        raise ValueError(
            f"gp_network({name!r}): the {'frozen weights' if frozen is not None else 'constants of the network'} are "
            "not known when the model is compiled: they are an argument of the model, or JAX computes them within it, "
            "so that the scales cannot be chosen. Make them outside of the model and let it close over them."
        )
    return layer


def _fixed_points(name, points):
    """The points as an array [M, D]."""
    points = as_points(points)
    if points.is_random or points.constant is None:
        raise ValueError(
            f"gp_network({name!r}): the points must be fixed, because the distribution is exact only at these points: "
            "use fs.measurement.space_filling(low, high, num), rows of the data, or points(jax.random.key(0)) made "
            "outside of the model. For random points use fs.functional_prior."
        )
    if is_traced(points.constant):
        raise ValueError(
            f"gp_network({name!r}): the points are not known when the model is compiled: they are an argument of the "
            "model, so that predictions would have other points than the run, or JAX computes them within the model. "
            "Make them outside of the model, points = fs.measurement.fixed(x_train), or with NumPy."
        )
    return points.constant


def _network_inputs(name, x_points, shape, network):
    """The points in the shape and type of the network's inputs."""
    if not network.takes_integers:
        return x_points.reshape(len(x_points), *shape)
    rows = np.asarray(x_points).reshape(len(x_points), *shape)
    if (rows % 1 != 0).any():
        raise ValueError(
            f"gp_network({name!r}): the network takes integers, but the points hold other numbers: give points that "
            "are whole numbers."
        )
    return rows.astype(jnp.result_type(int))


def _white(site, shape):
    return sample_array(site, dist.Normal(0.0, 1.0).expand(shape).to_event(), shape, {})
