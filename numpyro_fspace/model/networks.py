"""Networks with random weights: every weight array becomes a site of the NumPyro model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

from numpyro_fspace._checks import as_numbers, check_positive
from numpyro_fspace.model.engine import current_engine
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.model.network_adapters import Network, read_network
from numpyro_fspace.model.sites import base_distribution, note

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FanIn", "Flat", "fan_in", "flat", "init_to_network", "random_function", "random_module"]


@dataclasses.dataclass(frozen=True)
class Flat:
    """Marks weights whose prior is Lebesgue measure; made by ``flat``."""


@dataclasses.dataclass(frozen=True)
class FanIn:
    """Marks weights whose prior is normal with variance ``scale²`` / fan-in; made by ``fan_in``."""

    scale: Any


def flat() -> Flat:
    """The papers' prior on weights, p(w) ∝ 1: none at all, so that a functional prior stands alone.

    It is improper. With Lebesgue measure on w the law of f is the functional posterior only if w ↦ f is a
    bijection; real networks have flat directions along which the weights drift away without end, and f is
    free between fixed measurement points. Prefer the default of ``random_module`` unless you replicate. It
    cannot be sampled, so there are no prior predictive draws.

    Returns:
        A value for ``random_module``'s ``prior``, or for one weight in a dict of priors.

    Example:
        >>> flat()
        Flat()

    Reference: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural
    networks*.
    """
    return Flat()


def fan_in(scale: float = 1.0) -> FanIn:
    """The default prior on weights, w ~ N(0, scale² / fan-in): every layer passes on the size of its input.

    The fan-in of a weight array is the number of inputs of one output: the product of all axes but the last
    (flax, pairs) or but the first (equinox). That is too many where several axes are outputs (queries, keys and values
    of flax's attention, ``DenseGeneral``): give those a prior of their own by a dict. Biases, one-dimensional weights
    and embeddings count as fan-in 1. One-dimensional weights that start at one everywhere (any weights that do, of a
    network that is built already), other than biases, and those called ``scale`` (norm layers) get N(1, scale²).

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


def random_module(
    name: str,
    module: Any,
    *,
    input_shape: int | tuple[int, ...],
    prior: dist.Distribution | Mapping | Callable | Flat | FanIn | None = None,
) -> Callable:
    """A network with random weights, f(x; w) with w ~ prior, inside a NumPyro model.

    Every weight array is one ``numpyro.sample`` site, ``"{name}.{path}"`` with the path joined by dots
    (``net.Dense_0.kernel``, ``net.layers.1.weight``). The model targets exactly the prior written here, times
    whatever else the model holds; ``functional_prior`` multiplies it, it does not replace it.

    Four kinds of network are understood:

    * a flax linen module, whose weights need not exist yet;
    * a flax nnx module, already built; state that a call does not change (frozen statistics) stays as it is;
    * an equinox module of a *single* example, already built; it is mapped over the leading axis of x, and its
      inexact JAX arrays are the weights (hold a constant as a NumPy array to keep it one);
    * a pair ``(init, apply)`` of functions ``init(key, input_shape) -> weights`` and ``apply(weights, x)``
      with x [M, *input_shape]. An ``init`` that returns ``(output_shape, weights)``, as stax does, will do.

    Chains start from the network's own initializer under ``init_to_network``. Each weight array is drawn by a
    key of its own. A module already built no longer knows its initializer, so its present values are
    shuffled: to start from trained weights use ``numpyro.infer.init_to_value``.

    Args:
        name: prefix of the sites; no "/", which ArviZ refuses.
        module: the network.
        input_shape: shape of ONE input, without batch: ``(D,)``, or D for short.
        prior: None for ``fan_in()``; ``fan_in(scale)``; ``flat()``; a distribution for every weight; a dict
            from every path to one of these; or a function ``(path, shape)`` to one of these. Distributions
            are expanded to the weight's shape. A weight with a ``dist.Delta`` prior is a constant, a deterministic
            site.

    Returns:
        f, a function of x [M, *input_shape] to what the network gives, [M, K] say.

    Raises:
        ValueError: for an input_shape the network cannot take, a network with state (batch statistics,
            dropout) or without weights, a dict with missing or unknown paths, a prior that does not fit a
            weight's shape, or a call inside a plate; f raises it for x of another shape.
        TypeError: for a network or a prior of another kind.
        RuntimeError: outside of a model that has a random key.

    Example:
        >>> import flax.linen as nn
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = random_module("net", net, input_shape=(1,))
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)
    """
    _check_name(name)
    shape = _check_input_shape(input_shape)
    network = read_network(name, module, shape)
    priors = _prior_of_each(name, network, prior)
    units = network.units() if any(isinstance(p, FanIn) for p in priors.values()) else set()
    weights = {path: _sample(f"{name}.{path}", path, network, priors[path], path in units) for path in network.weights}

    def f(x):
        x = jnp.asarray(as_numbers(x, f"random_module({name!r}): x"))
        if x.ndim != 1 + len(shape) or x.shape[1:] != shape:
            raise ValueError(_explain_inputs(name, x.shape, shape))
        return network.apply(weights, x)

    f = current_engine().function(name, f, is_network=True)
    note("network", name, f, tuple(weights))
    return f


def random_function(module: Any, *, input_shape: int | tuple[int, ...], prior=None) -> Callable:
    """The draw of a network's random function: what ``random_module`` puts into a model, outside of one.

    Args:
        module, input_shape, prior: as for ``random_module``; the prior must be proper.

    Returns:
        ``draw(key, x [M, *input_shape])``, the values at x of the function that the key draws: the argument of
        ``fs.priors.NetworkPrior``.

    Raises:
        ValueError, TypeError: as for ``random_module``; an improper prior.

    Example:
        >>> import flax.linen as nn, jax
        >>> draw = random_function(nn.Dense(1), input_shape=2, prior=fan_in(3.0))
        >>> draw(jax.random.key(0), jax.numpy.ones((5, 2))).shape
        (5, 1)
    """

    def with_function(key, use):
        with handlers.block(), function_hook(), handlers.seed(rng_seed=key):  # no function of a model around it
            return use(random_module("network", module, input_shape=input_shape, prior=prior))

    def draw(key, x):
        return with_function(key, lambda f: f(x))

    try:
        jax.eval_shape(lambda key: with_function(key, lambda _: None), jax.random.key(0))
    except NotImplementedError as error:
        raise ValueError(
            "random_function: prior is improper (fs.model.flat()), and nothing can be drawn from it."
        ) from error
    return draw


def init_to_network(site: dict | None = None):
    """Start chains from the networks' own initializers, everything else from its prior median.

    A NumPyro init strategy: ``NUTS(model, init_strategy=fs.model.init_to_network)``. Sites without a network behind
    them, and weights whose prior does not live on the whole real line, fall back to
    ``numpyro.infer.init_to_median`` (and that to ``init_to_uniform`` where the prior cannot be sampled).

    Args:
        site: a message of NumPyro, or None for the strategy itself.

    Returns:
        The initial value of the site.

    Example:
        >>> init_to_network().func is init_to_network
        True
    """
    if site is None:
        return functools.partial(init_to_network)
    init = site["infer"].get("fspace", {}).get("init") if site["type"] == "sample" else None
    if init is None or site["value"] is not None:
        return init_to_median(site, num_samples=15)
    return init(site["kwargs"]["rng_key"])


def _check_name(name):
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"random_module: name={name!r} must be a non-empty string without '/', such as 'net'.")


def _check_input_shape(input_shape) -> tuple[int, ...]:
    shape = (input_shape,) if isinstance(input_shape, int | np.integer) else input_shape
    sizes_ok = isinstance(shape, tuple | list) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in shape
    )
    if not sizes_ok:
        raise ValueError(
            f"input_shape={input_shape!r} must be the shape of one input without the batch: a tuple of "
            "positive integers such as (D,), or the integer D."
        )
    return tuple(int(n) for n in shape)


def _explain_inputs(name, got, shape):
    sizes = ", ".join(["M", *map(str, shape)])
    cure = f"pass an array [{sizes}]."
    if len(got) == 1 and shape == (1,):
        cure = "pass x[:, None]."
    elif got == shape:
        cure = "this is a single input; pass x[None]."
    return f"random_module({name!r}): x has shape {got} but input_shape={shape} asks for [{sizes}]; {cure}"


def _prior_of_each(name, network: Network, prior) -> dict:
    """The prior of every weight, by path, still to be expanded."""
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
        chosen = {path: prior(path, tuple(leaf.shape)) for path, leaf in network.weights.items()}
    else:
        chosen = dict.fromkeys(paths, FanIn(1.0) if prior is None else prior)
    for path, law in chosen.items():
        if not isinstance(law, dist.Distribution | Flat | FanIn):
            raise TypeError(
                f"random_module({name!r}): the prior of {path!r} is a {type(law).__name__}; give a NumPyro "
                "distribution, fs.fan_in(scale) or fs.model.flat()."
            )
    return chosen


def _sample(site, path, network: Network, prior, is_unit):
    """Sample one weight array and check that it has the shape the network asks for."""
    shape = tuple(network.weights[path].shape)
    typical = 1 / math.sqrt(1 if is_unit else network.fan_in(path))
    if isinstance(prior, FanIn):
        law = dist.Normal(float(is_unit), prior.scale * typical)
    else:
        law = dist.ImproperUniform(constraints.real, (), shape) if isinstance(prior, Flat) else prior
    hints: dict[str, Any] = {"init": None, "scale": None}
    if isinstance(getattr(law.support, "base_constraint", law.support), type(constraints.real)):
        hints = {"init": functools.partial(network.draw, path), "scale": _length_scale(law, typical)}
    expanded = _expand(site, law, shape)
    if isinstance(base_distribution(law), dist.Delta):  # a constant is no random variable: no sampler could move it
        return numpyro.deterministic(site, expanded.mean.astype(network.weights[path].dtype))
    try:
        value = numpyro.sample(site, expanded, infer={"fspace": hints})
    except NotImplementedError as error:
        raise NotImplementedError(
            f"The prior of {site!r} cannot be sampled (fs.model.flat() is improper). Start a chain with "
            "init_strategy=fs.model.init_to_network, or give a proper prior such as fs.fan_in()."
        ) from error
    except AssertionError as error:
        if str(error):
            raise
        raise RuntimeError(
            f"The site {site!r} needs a random key: call random_module inside a model that runs under MCMC, "
            "Predictive, SVI or numpyro.handlers.seed."
        ) from error
    if jnp.shape(value) != shape:
        raise ValueError(
            f"The site {site!r} has a value of shape {jnp.shape(value)}, but the network needs {shape}. "
            "Call random_module outside of plates, and substitute values of that shape."
        )
    return value


def _expand(site, law, shape):
    if law.support.is_discrete:
        raise ValueError(f"The prior of {site!r} is discrete; weights need a continuous one.")
    batch = shape[: len(shape) - law.event_dim]
    try:
        if law.event_dim > len(shape) or batch + law.event_shape != shape:
            raise ValueError("its event does not match")
        return law.expand(batch).to_event()
    except ValueError as error:
        raise ValueError(
            f"The prior of {site!r} has batch_shape={law.batch_shape} and event_shape={law.event_shape}, "
            f"which do not expand to the weight's shape {shape}: {error}."
        ) from error


def _length_scale(law, typical):
    """The prior's standard deviation if it is normal and known, else the fan-in's guess."""
    law = base_distribution(law)
    known = isinstance(law, dist.Normal) and not isinstance(law.scale, jax.core.Tracer)
    return law.scale if known else typical
