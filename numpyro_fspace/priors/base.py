"""The protocol of priors over functions, and checks of their arguments."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key

    from numpyro_fspace.priors.cholesky import AnyArray

#: Advice for complex numbers.
REAL_CURE = "pass np.abs(a), or np.stack([a.real, a.imag], -1)"


@runtime_checkable
class FunctionalPrior(Protocol):
    """A prior over functions, defined by the distribution of the values f(x) at any finite set of inputs.

    Any object with these two methods is a prior; there is no base class to inherit from. Values have the shape that the
    function under the prior returns: [M, K] for K outputs, or [M] for a single one.

    A prior whose ``log_prob(x, f)`` is c - rᵀ r / 2, with r affine in f, may define a third method beside it,
    ``gaussian_residuals(x, f)``, which returns r [n] and the constant c. The kernels can then integrate a network's
    last layer out.
    """

    def log_prob(self, x: Float[Array, "M D"], f: Float[Array, "M K"]) -> Float[Array, ""]:
        """log p(f(x)) of all values together, a scalar that is differentiable in f."""

    def sample(
        self, key: Key[Array, ""], x: Float[Array, "M D"], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*S M K"]:
        """Draws of f(x), [*sample_shape, M, K] or [*sample_shape, M]."""


def check_prior(prior) -> FunctionalPrior:
    """Return ``prior`` if it has the methods of a prior over functions.

    Raises:
        TypeError: ``prior`` is a class, or lacks ``log_prob`` or ``sample``.

    Example:
        >>> check_prior(3.0)
        Traceback (most recent call last):
        TypeError: float is not a prior: it lacks the methods log_prob(x, f), sample(key, x, sample_shape).
    """
    if isinstance(prior, type):
        raise TypeError(f"prior must be an instance, got the class {prior.__name__}: call it first.")
    methods = {"log_prob": "log_prob(x, f)", "sample": "sample(key, x, sample_shape)"}
    missing = [text for name, text in methods.items() if not callable(getattr(prior, name, None))]
    if missing:
        raise TypeError(f"{type(prior).__name__} is not a prior: it lacks the methods {', '.join(missing)}.")
    return prior


def has_residuals(prior) -> bool:
    """Whether a prior has ``gaussian_residuals`` of its own ``log_prob``, not of one that is overridden."""
    defining = [vars(kind) for kind in type(prior).__mro__ if {"log_prob", "gaussian_residuals"} & vars(kind).keys()]
    of_both = bool(defining) and {"log_prob", "gaussian_residuals"} <= defining[0].keys()
    return of_both and "log_prob" not in vars(prior)


def as_real(value, name: str) -> AnyArray:
    """``value`` as a float64 NumPy array; a traced array stays traced, and its integers become floats.

    Raises:
        TypeError: not an array of real numbers (dates, text, a mask).
        ValueError: NaN or infinity among concrete values.
    """
    if value is None:
        raise TypeError(f"{name} must be an array of real numbers, got None.")
    traced = is_traced(value)
    try:
        array = jnp.asarray(value) if traced else as_numbers(value, name)
    except (TypeError, ValueError) as error:
        wanted, got = "one array" if traced else "an array of real numbers", type(value).__name__
        raise TypeError(f"{name} must be {wanted}, got {got}: {error}") from None
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be an array of real numbers, got {array.dtype}: {REAL_CURE}.")
    if traced:
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)
    array = np.array(array, np.float64)  # a copy, so that later changes of the user's array change nothing
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} holds NaN or infinity: drop or impute those rows."
            if array.ndim
            else f"{name} must be finite, got {array}."
        )
    return array


def as_inputs(x, name: str = "x") -> Float[AnyArray, "M D"]:
    """Checked inputs [M, D]: a float64 NumPy array if they are concrete, unchanged if they are traced.

    Raises:
        TypeError: not an array of real numbers.
        ValueError: not two-dimensional, empty, or with NaN among concrete values.
    """
    x = as_real(x, name)
    if x.ndim != 2:
        cure = f": for one input pass {name}[:, None]" if x.ndim == 1 else ""
        raise ValueError(f"{name} must have shape [M, D], got {list(x.shape)}{cure}.")
    if 0 in x.shape:
        raise ValueError(f"{name} must hold at least one point and one input, got shape {list(x.shape)}.")
    return x


def as_values(f, num_points: int, num_outputs: int | None, name: str = "f") -> Float[AnyArray, "M K"]:
    """Values of a function at M points as floats [M, K]; both [M] and [M, 1] are accepted if num_outputs is None.

    Raises:
        ValueError: the shape does not fit the points or the prior's ``num_outputs``, or the values have no density.
    """
    if f is None or isinstance(f, tuple | dict):
        raise TypeError(f"{name} must be one array, got {type(f).__name__}.")
    f = as_numbers(f, name)
    if jnp.issubdtype(f.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got {f.dtype}: {REAL_CURE}.")
    if not isinstance(f, jax.core.Tracer) and not np.isfinite(f).all():
        raise ValueError(f"{name} holds NaN or infinity, which have no density.")
    f = f.astype(jnp.promote_types(f.dtype, jnp.float32))  # integers and half precision become float32
    kept = jax.dtypes.canonicalize_dtype(f.dtype)
    if not is_traced(f) and f.size and np.abs(f).max() > np.sqrt(jnp.finfo(kept).max):
        raise ValueError(f"{name} reaches {np.abs(f).max():.2g}, whose square is beyond {kept}: standardize {name}.")
    if num_outputs is None and f.shape in [(num_points,), (num_points, 1)]:
        return f.reshape(num_points, 1)
    if num_outputs is not None and f.shape == (num_points, num_outputs):
        return f
    wanted = [num_points] if num_outputs is None else [num_points, num_outputs]
    cure = ""
    if f.ndim == 2 and f.shape[0] == num_points:
        cure = f" (build the prior with num_outputs={f.shape[1]} for functions with {f.shape[1]} outputs)"
    elif f.shape == (num_points,):
        cure = f" (pass {name}[:, None], or build the prior without num_outputs)"
    raise ValueError(
        f"{name} must have shape {wanted}, because x holds {num_points} points and the prior has "
        f"num_outputs={num_outputs}; got {list(f.shape)}{cure}."
    )


def as_positive(value, name: str, ndim: int = 0) -> Float[AnyArray, "*shape"]:
    """A positive float, or array of at most ``ndim`` dimensions; traced values pass unchecked.

    Raises:
        ValueError: zero, negative, or of too many dimensions.
    """
    value = as_real(value, name)
    if value.ndim > ndim:
        raise ValueError(f"{name} must have at most {ndim} dimensions, got shape {list(value.shape)}.")
    if not is_traced(value) and not (value > 0).all():
        raise ValueError(f"{name} must be positive, got {value.min():g}.")
    return value


def deprecated_law(self, x):
    """The old name of the method ``marginal``."""
    warnings.warn("prior.law(x) is now prior.marginal(x); the old name goes in 0.3.", DeprecationWarning, stacklevel=2)
    return self.marginal(x)
