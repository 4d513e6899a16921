"""Bijections of function values, y = F(x, f): pointwise, with inverses and derivatives in closed form.

Each is an object with ``init(key, x, y) -> params``, ``forward(params, x, f)``, ``inverse(params, x, y)`` and
``log_det(params, x, f)`` = log|∂y/∂f| at every value. x is [M, D]; f and y are [..., M, K], with any leading axes of
draws. The log density of a draw changes by the sum of ``log_det`` over its values. There is one scale per output; the
biases b(x) are networks of the inputs and do not enter the determinant.

**Ranges.** Tanh and sigmoid are bounded, so a value beyond the bounds has no inverse. ``cover(params, x, y)`` therefore
sets the range to the largest ``|y - b(x)|`` of given draws plus a margin, whatever the other parameters are. Where tanh
is within 2e-6 of ±1 (beyond ``TAIL``) it is continued by its tangent. F then maps the real line onto itself, and every
value has a density. Beyond the range the log density is very low and never NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._checks import check_choice, check_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float, Key

#: |t| beyond which tanh(t) is continued by its tangent. At this point tanh is within 2e-6 of ±1.
TAIL = 7.0
#: tanh and its derivative at ``TAIL``.
END, END_SLOPE = math.tanh(TAIL), math.cosh(TAIL) ** -2
#: Smallest and initial distance between the ends of the range and the draws, relative to the largest |y - b(x)|.
MARGIN, INITIAL_MARGIN = 1e-3, 2.0


def _bias_network(hidden: tuple[int, ...], num_outputs: int):
    """b(x): a tanh network that starts at 0."""
    from flax import linen as nn

    layers = [layer for width in hidden for layer in (nn.Dense(width), nn.tanh)]
    return nn.Sequential([*layers, nn.Dense(num_outputs, kernel_init=nn.initializers.zeros)])


@dataclass(frozen=True)
class Bijection(ABC):
    """Base class of the bijections, with biases b(x) that are networks of the standardized inputs.

    Args:
        hidden: widths of the networks' hidden layers.

    Raises:
        ValueError, TypeError: a width is not a positive integer.
    """

    hidden: tuple[int, ...] = (100, 100)

    def __post_init__(self):
        for width in self.hidden:
            check_count(width, "hidden")

    @abstractmethod
    def init(self, key: Key[Array, ""], x: Float[Array, "M D"], y: Float[Array, "S M K"]) -> dict:
        """Parameters at which F is close to the identity on the draws y."""

    def cover(self, params: dict, x: Float[Array, "M D"], y: Float[Array, "S M K"]) -> dict:
        """``params`` with a range that contains the draws y."""
        return params

    @abstractmethod
    def forward(self, params: dict, x: Float[Array, "M D"], f: Float[Array, "... M K"]) -> Float[Array, "... M K"]:
        """y = F(x, f)."""

    @abstractmethod
    def inverse(self, params: dict, x: Float[Array, "M D"], y: Float[Array, "... M K"]) -> Float[Array, "... M K"]:
        """f with F(x, f) = y."""

    @abstractmethod
    def log_det(self, params: dict, x: Float[Array, "M D"], f: Float[Array, "... M K"]) -> Float[Array, "... M K"]:
        """log|∂F(x, f)/∂f| of every value."""

    def _inputs(self, x):
        flat = x.reshape(len(x), -1)
        return {"mean": flat.mean(0), "scale": jnp.where(jnp.ptp(flat, 0) > 0, flat.std(0), 1.0)}

    def _init_bias(self, key, x, num_outputs):
        return _bias_network(self.hidden, num_outputs).init(key, x.reshape(len(x), -1))["params"]

    def _bias(self, params, name, x, num_outputs):
        inputs = jax.lax.stop_gradient(params["inputs"])
        standard = (x.reshape(len(x), -1) - inputs["mean"]) / inputs["scale"]
        return _bias_network(self.hidden, num_outputs).apply({"params": params[name]}, standard)


@dataclass(frozen=True)
class Linear(Bijection):
    r"""y = (f - b(x)) / a with a > 0 and b a network with the hidden widths ``hidden``. It starts at the identity.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, y = jnp.ones((3, 1)), jnp.ones((5, 3, 1))
        >>> bijection = Linear()
        >>> params = bijection.init(jax.random.key(0), x, y)
        >>> float(abs(bijection.inverse(params, x, y) - y).max())
        0.0

    Reference: M. Wu, J. Xuan, J. Lu (2025), *Bridging the gap between variational inference and stochastic gradient
    MCMC in function space*, eq. 7.
    """

    def init(self, key, x, y):
        num_outputs = y.shape[-1]
        return {
            "inputs": self._inputs(x),
            "log_a": jnp.zeros(num_outputs, y.dtype),
            "bias": self._init_bias(key, x, num_outputs),
        }

    def forward(self, params, x, f):
        return (f - self._bias(params, "bias", x, f.shape[-1])) * jnp.exp(-params["log_a"])

    def inverse(self, params, x, y):
        return y * jnp.exp(params["log_a"]) + self._bias(params, "bias", x, y.shape[-1])

    def log_det(self, params, x, f):
        return jnp.broadcast_to(-params["log_a"], f.shape)


class _Bounded(Bijection):
    """y = r tanh(t) + c(x) with t = rate · e^log_slope · f (+ a bias) and the half range r."""

    rate: ClassVar[float]
    outer: ClassVar[str]  # name of c
    inner: ClassVar[str | None] = None

    def cover(self, params, x, y):
        reach = jnp.max(jnp.abs(y - self._bias(params, self.outer, x, y.shape[-1])), (0, 1))
        return params | {"reach": jnp.maximum(reach, 100.0 * jnp.finfo(y.dtype).tiny)}

    def forward(self, params, x, f):
        u = _squash(self._inside(params, x, f))
        return _half_range(params) * u + self._bias(params, self.outer, x, f.shape[-1])

    def inverse(self, params, x, y):
        t = _unsquash((y - self._bias(params, self.outer, x, y.shape[-1])) / _half_range(params))
        shift = 0.0 if self.inner is None else self._bias(params, self.inner, x, y.shape[-1])
        return (t - shift) / self.rate * jnp.exp(-params["log_slope"])

    def log_det(self, params, x, f):
        log_slope = params["log_slope"] + math.log(self.rate)
        return log_slope + jnp.log(_half_range(params)) + _log_slope(self._inside(params, x, f))

    def _inside(self, params, x, f):
        t = self.rate * f * jnp.exp(params["log_slope"])
        return t if self.inner is None else t + self._bias(params, self.inner, x, f.shape[-1])


@dataclass(frozen=True)
class Tanh(_Bounded):
    r"""y = a₂ tanh(a₁ f + b₁(x)) + b₂(x) with a₁, a₂ > 0 and networks b₁, b₂ with the hidden widths ``hidden``.

    It starts close to the identity, with a range three times as wide as the draws. a₂ is learned as a margin around the
    draws, which is at least a thousandth of the largest ``|y - b₂(x)|`` (see ``cover``).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, y = jnp.ones((3, 1)), jnp.linspace(-1.0, 1.0, 15).reshape(5, 3, 1)
        >>> bijection = Tanh()
        >>> params = bijection.init(jax.random.key(0), x, y)
        >>> bool(abs(bijection.forward(params, x, y) - y).max() < 0.05)
        True

    Reference: as for :class:`Linear`, eq. 8.
    """

    rate, outer, inner = 1.0, "outer", "inner"

    def init(self, key, x, y):
        num_outputs = y.shape[-1]
        key_inner, key_outer = jax.random.split(key)
        low, high = jnp.min(y, (0, 1)), jnp.max(y, (0, 1))
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        half = jnp.where(half > 0, half, 1.0)
        slope = 1.0 / ((1.0 + INITIAL_MARGIN) * half)
        params = {
            "inputs": self._inputs(x),
            "log_slope": jnp.log(slope),
            "log_margin": jnp.full(num_outputs, math.log(INITIAL_MARGIN - MARGIN), y.dtype),
            "reach": half,
            "inner": self._init_bias(key_inner, x, num_outputs),
            "outer": self._init_bias(key_outer, x, num_outputs),
        }
        last = f"layers_{2 * len(self.hidden)}"
        params["inner"][last]["bias"] = -middle * slope
        params["outer"][last]["bias"] = middle
        return params


@dataclass(frozen=True)
class Sigmoid(_Bounded):
    r"""y = a₂ σ(a₁ f) + b(x), σ(t) = 1/(1 + e⁻ᵗ), with a₁, a₂ > 0 and b a network with the hidden widths ``hidden``.

    It is computed as (a₂/2) tanh(a₁ f/2) + c(x), where the network c(x) = b(x) + a₂/2 is the middle of the range. It
    starts close to the identity, with a range around 0 three times as wide as the draws.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, y = jnp.ones((3, 1)), jnp.linspace(-1.0, 1.0, 15).reshape(5, 3, 1)
        >>> bijection = Sigmoid()
        >>> params = bijection.init(jax.random.key(0), x, y)
        >>> bool(abs(bijection.forward(params, x, y) - y).max() < 0.05)
        True

    Reference: as for :class:`Linear`, eq. 9.
    """

    rate, outer = 0.5, "middle"

    def init(self, key, x, y):
        num_outputs = y.shape[-1]
        reach = jnp.max(jnp.abs(y), (0, 1))
        reach = jnp.where(reach > 0, reach, 1.0)
        return {
            "inputs": self._inputs(x),
            "log_slope": jnp.log(2.0 / ((1.0 + INITIAL_MARGIN) * reach)),
            "log_margin": jnp.full(num_outputs, math.log(INITIAL_MARGIN - MARGIN), y.dtype),
            "reach": reach,
            "middle": self._init_bias(key, x, num_outputs),
        }


class Fitted(NamedTuple):
    """A bijection with its parameters."""

    bijection: Bijection
    params: Any

    def forward(self, x, f):
        return self.bijection.forward(self.params, x, f)

    def inverse(self, x, y):
        return self.bijection.inverse(self.params, x, y)

    def log_det(self, x, f):
        return self.bijection.log_det(self.params, x, f)


BIJECTIONS: dict[str, Callable[[], Bijection]] = {"linear": Linear, "tanh": Tanh, "sigmoid": Sigmoid}


def as_bijections(bijections) -> dict[str, Bijection]:
    """Candidates by name, from names and objects.

    Raises:
        ValueError: a name is unknown, or there is no candidate.
        TypeError: a candidate is neither a name nor a bijection.
    """
    bijections = (bijections,) if isinstance(bijections, str | Bijection) else tuple(bijections)
    if not bijections:
        raise ValueError(f"bijections is empty; choose among {', '.join(map(repr, BIJECTIONS))}.")
    named = {}
    for candidate in bijections:
        if isinstance(candidate, str):
            check_choice(candidate, "bijections", BIJECTIONS)
            candidate = BIJECTIONS[candidate]()
        if not isinstance(candidate, Bijection):
            names = ", ".join(map(repr, BIJECTIONS))
            raise TypeError(f"bijections must be names ({names}) or objects, got {candidate!r}.")
        name = type(candidate).__name__.lower()
        while name in named:
            name += "'"
        named[name] = candidate
    return named


def _half_range(params):
    """a₂ of tanh, a₂/2 of the sigmoid."""
    return params["reach"] * (1.0 + MARGIN + jnp.exp(params["log_margin"]))


def _squash(t):
    """tanh, continued by its tangent for |t| > ``TAIL``."""
    inside = jnp.clip(t, -TAIL, TAIL)
    return jnp.tanh(inside) + (t - inside) * END_SLOPE


def _unsquash(u):
    """The inverse of ``_squash``."""
    inside = jnp.clip(u, -END, END)
    return jnp.arctanh(inside) + (u - inside) / END_SLOPE


def _log_slope(t):
    """log of the derivative of ``_squash``."""
    size = jnp.minimum(jnp.abs(t), TAIL)
    return 2.0 * (math.log(2.0) - size - jax.nn.softplus(-2.0 * size))
