"""Networks with random weights: every weight array becomes a site of the NumPyro model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.model.inference_engine import current_engine
from numpyro_fspace.model.networks.adapters import read_network
from numpyro_fspace.model.networks.frozen_weights import freeze
from numpyro_fspace.model.networks.weight_priors import FanIn, Flat, fan_in, flat, prior_of_each, sample_weights
from numpyro_fspace.model.sites import note

__all__ = ["FanIn", "Flat", "InputsError", "fan_in", "flat", "random_function", "random_module"]


def random_module(
    name: str,
    module: Any,
    *,
    input_shape: int | tuple[int, ...],
    prior: dist.Distribution | Mapping | Callable | Flat | FanIn | None = None,
    frozen: Mapping | None = None,
) -> Callable:
    """A network with random weights, f(x; w) with w ~ prior, inside a NumPyro model.

    Every weight array is one ``numpyro.sample`` site, ``"{name}.{path}"`` with a dotted path (``net.Dense_0.kernel``,
    ``net.layers.1.weight``). The density of the model includes exactly the prior given here. ``functional_prior``
    multiplies this prior; it does not replace it.

    A network is one of the following:

    * a flax linen module, whose weights need not exist yet;
    * a flax nnx module that is already built; state that a call does not change (frozen statistics) is kept;
    * an equinox module of a *single* example that is already built; it is mapped over the leading axis of x, and its
      floating-point arrays are the weights (NumPy's too, so name an array that is a constant in ``frozen``);
    * a pair ``(init, apply)`` of functions ``init(key, input_shape) -> weights`` and ``apply(weights, x)``
      with x [M, *input_shape]. ``init`` may also return ``(output_shape, weights)``, as in stax.

    Under ``init_to_network`` chains start from the network's own initializer, with a separate key for each weight
    array. A module that is already built does not know its initializer, so its present values are shuffled. To start
    from trained weights use ``numpyro.infer.init_to_value``.

    With ``frozen`` the network is partly Bayesian: these weights are constants, which have no sites, and the others are
    random. ``{path: w for path, w in fs.model.weights_by_path(trained).items() if not path.startswith("head")}`` leaves
    the layer ``head`` of a trained network random.

    Args:
        name: prefix of the sites; no "/", which ArviZ refuses.
        module: the network.
        input_shape: shape of ONE input, without batch: ``(D,)``, or D for short.
        prior: None for ``fan_in()``; ``fan_in(scale)``; ``flat()``; a distribution for every weight; a dict
            from every path to one of these; or a function ``(path, shape)`` to one of these. Distributions
            are expanded to the weight's shape. A weight with a ``dist.Delta`` prior is a constant and becomes a
            deterministic site.
        frozen: weights that are fixed numbers, by path or nested as in flax; None fixes none. ``prior`` is then that of
            the other weights. Pass large arrays as an argument of the model: otherwise programs hold them as constants.

    Returns:
        f, a function from x [M, *input_shape] to the network's output, for example [M, K].

    Raises:
        ValueError: the network does not accept input_shape, has state (batch statistics, dropout) or has no weights; a
            dict of priors has missing or unknown paths; a prior or frozen numbers do not fit the shape of a weight; all
            weights are frozen; the call is inside a plate. f raises it if x has another shape.
        TypeError: module is not a network, or prior is not a prior of weights.
        RuntimeError: the call is not inside a model with a random key.

    Example:
        >>> import flax.linen as nn
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = random_module("net", net, input_shape=(1,))
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)
    """
    check_name(name)
    shape = check_input_shape(input_shape)
    network = freeze(f"random_module({name!r})", read_network(name, module, shape), frozen)
    weights = sample_weights(name, network, prior_of_each(name, network, prior))

    def f(x):
        x = jnp.asarray(as_numbers(x, f"random_module({name!r}): x"))
        check_inputs(name, x, shape)
        return network.apply(weights, x)

    f = current_engine().function(name, f, is_network=True)
    note("network", name, f, tuple(weights))
    return f


def random_function(module: Any, *, input_shape: int | tuple[int, ...], prior=None, frozen=None) -> Callable:
    """Draws of a network's random function outside of a model, with the priors of ``random_module``.

    Args:
        module, input_shape, prior, frozen: as for ``random_module``; the prior must be proper.

    Returns:
        ``draw(key, x [M, *input_shape])``, the values at x of the function that belongs to the key. It is the argument
        of ``fs.priors.NetworkPrior``.

    Raises:
        ValueError, TypeError: as for ``random_module``, and for an improper prior.

    Example:
        >>> import flax.linen as nn, jax
        >>> draw = random_function(nn.Dense(1), input_shape=2, prior=fan_in(3.0))
        >>> draw(jax.random.key(0), jax.numpy.ones((5, 2))).shape
        (5, 1)
    """

    def with_function(key, use):
        with handlers.block(), function_hook(), handlers.seed(rng_seed=key):  # hidden from any outer model
            return use(random_module("network", module, input_shape=input_shape, prior=prior, frozen=frozen))

    def draw(key, x):
        return with_function(key, lambda f: f(x))

    try:
        jax.eval_shape(lambda key: with_function(key, lambda _: None), jax.random.key(0))
    except NotImplementedError as error:
        raise ValueError(
            "random_function: prior is improper (fs.model.flat()) and cannot be sampled; give a proper prior such as "
            "fs.fan_in()."
        ) from error
    return draw


def check_name(name, maker: str = "random_module"):
    """Raise a ValueError for a name that no site can have."""
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{maker}: name={name!r} must be a non-empty string without '/', such as 'net'.")


def check_input_shape(input_shape) -> tuple[int, ...]:
    """The shape of one input as a tuple of integers."""
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


class InputsError(ValueError):
    """Inputs have another shape than a network's."""


def numbers(size: int) -> str:
    """How many numbers each point has, in words."""
    return f"{size} number{'' if size == 1 else 's'} each"


def points_of(size: int) -> str:
    """What to write for points of ``size`` numbers each."""
    corners = (f"[{', '.join([side] * size)}]" if size <= 3 else f"[{side}] * {size}" for side in ("-2", "2"))
    return f"points [M, {size}], such as fs.measurement.space_filling({', '.join(corners)}, 100) or rows of the data"


def of_points(shape) -> str:
    """Where a network's input shape (D,) comes from if points have given it, and the cure if it is wrong."""
    size = 3 if shape == (2,) else 2
    return (
        f": the points have {numbers(shape[0])}. Give points with as many as the network takes (with {size} inputs "
        f"{points_of(size)}), or the input_shape of a point if inputs are no vectors."
    )


def check_inputs(name, x, shape, maker: str = "random_module", *, by_points: bool = False):
    """Raise an ``InputsError`` for inputs that are not [M, *shape], that of points if ``by_points``."""
    if x.shape[1:] == shape and x.ndim:
        return
    if by_points and x.ndim == 2 and x.shape != shape:
        raise InputsError(
            f"{maker}({name!r}): x has shape {x.shape}, and the points have {numbers(shape[0])}: give "
            f"{points_of(x.shape[1])}, or pass an array x [N, {shape[0]}]."
        )
    sizes = ", ".join(["M", *map(str, shape)])
    cure = f"pass an array [{sizes}]."
    if x.ndim == 1 and shape == (1,):
        cure = "pass x[:, None]."
    elif x.shape == shape:
        cure = "this is a single input; pass x[None]."
    raise InputsError(f"{maker}({name!r}): x has shape {x.shape} but input_shape={shape} needs [{sizes}]; {cure}")
