"""Priors of the weights of networks (``flat``, ``fan_in``), and the sites of weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_fspace._checks import check_positive
from numpyro_fspace.model.networks.adapters import Network
from numpyro_fspace.model.sites import base_distribution


@dataclasses.dataclass(frozen=True)
class Flat:
    """Marks weights whose prior is Lebesgue measure; made by ``flat``."""


@dataclasses.dataclass(frozen=True)
class FanIn:
    """Marks weights whose prior is normal with variance ``scale²`` / fan-in; made by ``fan_in``."""

    scale: Any


def flat() -> Flat:
    """The prior p(w) ∝ 1 of Wu et al. (2024), which leaves a functional prior as the only prior.

    It is improper. The distribution of f is then the functional posterior only if w ↦ f is a bijection. Real networks
    have flat directions, along which the weights drift without bound, and f is unconstrained between fixed measurement
    points. Prefer the default of ``random_module`` except for replications. This prior cannot be sampled, so there are
    no prior predictive draws.

    Returns:
        A value for ``random_module``'s ``prior``, or for one weight in a dict of priors.

    Example:
        >>> flat()
        Flat()

    Reference: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural networks*.
    """
    return Flat()


def fan_in(scale: float = 1.0) -> FanIn:
    """The default prior of weights, w ~ N(0, scale² / fan-in), under which layers preserve the scale of their inputs.

    The fan-in of a weight array is the number of inputs of one output: the product of all axes except the last (flax,
    pairs) or except the first (equinox). This is too large if several axes are outputs (queries, keys and values of
    flax's attention, ``DenseGeneral``) or copies (``nn.vmap``, ``nn.scan``): give those arrays their own priors in a
    dict. Biases, one-dimensional weights and embeddings have fan-in 1. Weights called ``scale`` (norm layers) get
    N(1, scale²), and so do one-dimensional weights other than biases that are initially one everywhere (of any
    dimension if the network is already built).

    Args:
        scale: standard deviation of a weight times the square root of its fan-in; may be a random variable.

    Returns:
        A value for ``random_module``'s ``prior``, or for one weight in a dict of priors.

    Raises:
        ValueError, TypeError: scale is not a positive number.

    Example:
        >>> fan_in(3.0)
        FanIn(scale=3.0)
    """
    check_positive(scale, "scale")
    return FanIn(scale)


def prior_of_each(name, network: Network, prior) -> dict:
    """The prior of every weight array by path, not yet expanded to its shape."""
    paths = list(network.weights)
    if isinstance(prior, Mapping):
        missing, unknown = [p for p in paths if p not in prior], [p for p in prior if p not in paths]
        if missing or unknown:
            raise ValueError(
                f"random_module({name!r}): prior must give every weight a prior; missing {missing}, unknown "
                f"{unknown}. The weights are {paths}."
            )
        chosen = {path: prior[path] for path in paths}
    elif callable(prior) and not isinstance(prior, dist.Distribution):
        if isinstance(prior, type):
            raise TypeError(
                f"random_module({name!r}): prior is the class {prior.__name__}; make one, {prior.__name__}(...)."
            )
        chosen = {path: prior(path, tuple(leaf.shape)) for path, leaf in network.weights.items()}
    else:
        chosen = dict.fromkeys(paths, FanIn(1.0) if prior is None else prior)
    for path, distribution in chosen.items():
        if not isinstance(distribution, dist.Distribution | Flat | FanIn):
            raise TypeError(
                f"random_module({name!r}): the prior of {path!r} is a {type(distribution).__name__}; give a NumPyro "
                "distribution, fs.fan_in(scale) or fs.model.flat()."
            )
    return chosen


def sample_weights(prefix, network: Network, priors: dict) -> dict:
    """Sample the weight arrays of the ``priors``, by path; their sites are called ``"{prefix}.{path}"``."""
    units = network.units([path for path, prior in priors.items() if isinstance(prior, FanIn)])
    return {path: _sample_weight(f"{prefix}.{path}", path, network, p, path in units) for path, p in priors.items()}


def _sample_weight(site, path, network, prior, is_unit):
    """Sample one weight array; a constant (a Delta prior) becomes a deterministic site."""
    shape = tuple(network.weights[path].shape)
    typical = 1 / math.sqrt(1 if is_unit else network.fan_in(path))
    if isinstance(prior, FanIn):
        distribution = dist.Normal(float(is_unit), prior.scale * typical)
    else:
        distribution = dist.ImproperUniform(constraints.real, (), shape) if isinstance(prior, Flat) else prior
    hints: dict[str, Any] = {"init": None, "scale": None}
    if isinstance(getattr(distribution.support, "base_constraint", distribution.support), type(constraints.real)):
        hints = {"init": functools.partial(network.draw, path), "scale": _length_scale(distribution, typical)}
    expanded = _expand(site, distribution, shape)
    if isinstance(base_distribution(distribution), dist.Delta):
        return numpyro.deterministic(site, expanded.mean.astype(network.weights[path].dtype))
    return sample_array(site, expanded, shape, hints)


def sample_array(site, distribution, shape, hints):
    """Sample a latent site, and check that no plate or substituted value changes its shape."""
    try:
        value = numpyro.sample(site, distribution, infer={"fspace": hints})
    except NotImplementedError as error:
        raise NotImplementedError(
            f"The prior of {site!r} cannot be sampled (fs.model.flat() is improper). Start a chain with "
            "init_strategy=fs.model.init_to_network, or give a proper prior such as fs.fan_in()."
        ) from error
    except AssertionError as error:
        if str(error):
            raise
        raise RuntimeError(
            f"The site {site!r} needs a random key: create the network inside a model that runs under MCMC, "
            "Predictive, SVI or numpyro.handlers.seed."
        ) from error
    if isinstance(value, list | tuple):
        raise TypeError(f"The site {site!r} has the value {value!r}: give an array, such as np.asarray({value!r}).")
    if jnp.shape(value) != shape:
        raise ValueError(
            f"The site {site!r} has a value of shape {jnp.shape(value)}, but the network needs {shape}. "
            "Create the network outside of plates, and substitute values of that shape."
        )
    return value


def _expand(site, distribution, shape):
    if distribution.support.is_discrete:
        raise ValueError(f"The prior of {site!r} is discrete; weights need a continuous one.")
    batch = shape[: len(shape) - distribution.event_dim]
    try:
        if distribution.event_dim > len(shape) or batch + distribution.event_shape != shape:
            raise ValueError("its event does not match")
        return distribution.expand(batch).to_event()
    except ValueError as error:
        raise ValueError(
            f"The prior of {site!r} has batch_shape={distribution.batch_shape} and "
            f"event_shape={distribution.event_shape}, which do not expand to the weight's shape {shape}: {error}."
        ) from error


def _length_scale(distribution, typical):
    """The prior standard deviation if the prior is normal and concrete, otherwise ``typical``."""
    distribution = base_distribution(distribution)
    known = isinstance(distribution, dist.Normal) and not isinstance(distribution.scale, jax.core.Tracer)
    return distribution.scale if known else typical
