"""Checks of single arguments, and objects in one line of text. They use nothing else of the package."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import numbers
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

#: Numbers of a random key that is no typed array: of JAX's threefry and rbg generators.
RAW_KEY_SIZES = (2, 4)
#: Arrays of at most so many numbers are shown by their values.
MAX_SHOWN = 4


def check_positive(value, name: str):
    """``value`` must be a positive, finite number."""
    if isinstance(value, jax.core.Tracer):
        return
    is_number = isinstance(value, int | float | np.number | jax.Array | np.ndarray) and not isinstance(value, bool)
    if not is_number or jnp.ndim(value) != 0:
        raise TypeError(f"{name} must be a positive number, got {value!r}.")
    if not 0 < float(value) < np.inf:
        raise ValueError(f"{name}={value} must be positive and finite.")


def check_not_negative(value, name: str):
    """``value`` must be 0 or a positive number."""
    if isinstance(value, int | float | np.number) and value == 0:
        return
    try:
        check_positive(value, name)
    except ValueError:
        raise ValueError(f"{name}={value} must not be negative, and finite.") from None


def check_count(value, name: str, minimum: int = 1):
    """``value`` must be an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer ≥ {minimum}, got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}.")


def check_choice(value, name: str, choices):
    """``value`` must be one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.")


def check_key(key, name: str, *, single: bool = False):
    """``key`` must be a random key, or several unless ``single``, as JAX makes them."""
    is_array = isinstance(key, np.ndarray | jax.Array)
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = is_array and key.dtype == np.uint32 and key.ndim and key.shape[-1] in RAW_KEY_SIZES
    if not is_typed and not is_raw:
        given = f"an array of {key.dtype}, of shape {key.shape}" if is_array else repr(key)
        raise TypeError(f"{name} must be a random key, such as jax.random.key(0), got {given}.")
    if single and (key.ndim if is_typed else key.ndim - 1):
        raise ValueError(f"{name} must be one random key, got several (shape {key.shape}): pass {name}[0].")


#: Where flax and equinox define their layers, which are no models.
NETWORKS = ("flax.linen.", "flax.nnx.nn.", "flax.nnx.helpers", "equinox.nn.")


def check_is_model(model):
    """``model`` must be a callable that is no distribution."""
    from numpyro.distributions import Distribution

    if not callable(model) or isinstance(model, Distribution):
        raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}.")
    if type(model).__module__.startswith(NETWORKS):
        raise TypeError(
            f"model must be a NumPyro model, got {type(model).__name__}, a network of {type(model).__module__}: write "
            "a function of the data that calls fs.random_module or fs.gp_network with this network, and numpyro.sample."
        )


def check_kernel(sampler):
    """What ``MCMC`` samples with must be a kernel, which has the model."""
    from numpyro.infer.mcmc import MCMCKernel

    is_class = isinstance(sampler, type)
    if not is_class and hasattr(sampler, "sample_field"):
        return
    name = sampler.__name__ if is_class else type(sampler).__name__
    if is_class and issubclass(sampler, MCMCKernel):
        raise TypeError(f"sampler is the class {name}: give it the model, MCMC({name}(model), ...).")
    if hasattr(sampler, "run"):
        raise TypeError(f"sampler must be a kernel, such as fs.SGHMC(model). {name} runs by itself: call its own run.")
    raise TypeError(
        f"sampler must be a kernel, got {sampler!r}: for a model write fs.MCMC(fs.SGHMC(model), ...), or "
        "fs.MCMC(fs.fSGHMC(model), ...) if it declares a functional prior."
    )


def check_sampling(key, sample_shape):
    """``key`` must be one random key, and ``sample_shape`` a tuple of integers that are not negative."""
    check_key(key, "key", single=True)
    sizes = sample_shape if isinstance(sample_shape, tuple | list) else None
    if sizes is None or not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
        raise TypeError(f"sample_shape must be a tuple of integers, such as (5,), got {sample_shape!r}.")


def check_step_size(step_size):
    """None (found in warm-up), a positive number, or a schedule that starts with one."""
    if step_size is None:
        return
    if not callable(step_size):
        check_positive(step_size, "step_size")
        return
    try:
        first = step_size(0)
    except Exception as error:
        raise TypeError(
            "step_size is callable but step_size(0) failed; give a number or an optax schedule "
            f"(a function of the gradient step): {error}"
        ) from error
    check_positive(first, "step_size(0)")


def warn(message: str):
    """Give a ``RuntimeWarning`` at the line outside of the package that the call came from."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("numpyro_fspace."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def as_numbers(value, name: str):
    """``value`` as an array of numbers that JAX takes; arrays of JAX, traced ones too, unchanged.

    Raises:
        TypeError: dates, durations, text, random keys, other objects, masked values, sparse matrices, dicts.
    """
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} holds random keys, where numbers are needed.")
    if isinstance(value, dict):
        raise TypeError(f"{name} is a dict with the keys {list(value)}, where one array is needed: pass an entry.")
    if isinstance(value, jax.Array) or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(value)
    if is_sparse(value):
        raise TypeError(f"{name} is sparse ({type(value).__name__}): pass .toarray().")
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except jax.errors.JAXTypeError:
        getattr(value, "__jax_array__", None)  # in a program, data on disk raise an error that names the cure
        raise
    if array.dtype == object and all(isinstance(part, numbers.Number | None) for part in array.ravel()):
        array = array.astype(np.float64)  # None is NaN
    trouble = not_numbers(array)
    if trouble is not None:
        raise TypeError(f"{name} {trouble}.")
    return native(array)


def native(array):
    """A NumPy array as JAX takes it: of the machine's byte order, and at most 64 bits; anything else unchanged.

    Raises:
        TypeError: for masked values, which would become data.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        return array
    if isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array):
            raise TypeError(f"An array {not_numbers(array)}.")
        array = array.data
    dtype = array.dtype.newbyteorder("=")
    narrow = {np.dtype(np.longdouble): np.float64, np.dtype(np.clongdouble): np.complex128}
    return array.astype(narrow.get(dtype, dtype), copy=False)


def is_table(value) -> bool:
    """Whether ``value`` is another library's array, a pandas Series say, which NumPy reads and JAX does not."""
    return hasattr(value, "__array__") and not isinstance(value, type | np.ndarray | np.generic | jax.Array)


def is_sparse(value) -> bool:
    """Whether ``value`` is a sparse matrix of SciPy's, which NumPy does not read."""
    return hasattr(value, "toarray") and not isinstance(value, type | np.ndarray | jax.Array)


def not_numbers(array: np.ndarray) -> str | None:
    """What is wrong with an array that does not hold numbers, and the cure; None if it does."""
    if np.ma.is_masked(array):
        return "is a masked array, whose mask would be lost: drop the masked rows, or give them values with .filled()"
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    return times(array) or (None if is_number else f"has dtype {array.dtype}; encode it as numbers first")


def times(array: np.ndarray) -> str | None:
    """What is wrong with an array that holds dates or durations, and the cure; None if it holds none."""
    parts = array.ravel() if array.dtype == object else ()
    if array.dtype.kind == "M" or any(isinstance(part, datetime.date | np.datetime64) for part in parts):
        return (
            f"holds dates (dtype {array.dtype}); encode it as numbers, such as days: "
            '(x - x[0]) / np.timedelta64(1, "D") with x = np.asarray(x, "datetime64[s]")'
        )
    if array.dtype.kind == "m" or any(isinstance(part, datetime.timedelta | np.timedelta64) for part in parts):
        return f'holds durations (dtype {array.dtype}); encode it as numbers, such as days: x / np.timedelta64(1, "D")'
    return None


def renamed_argument(old: str, new: str):
    """A function that takes its argument ``new`` by the name of version 0.1 too, and warns."""

    def decorate(fn):
        @functools.wraps(fn)
        def wrapped(*args, **kwargs):
            if old in kwargs:
                warnings.warn(
                    f"{fn.__name__}: the argument {old}= is now {new}=; the old name goes in 0.3.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return fn(*args, **kwargs)

        return wrapped

    return decorate


def one_line(obj) -> str:
    """``Name(setting=value, ...)``: the fields of an object, or the arguments it was made with that are attributes.

    Classes use it as their ``__repr__``. Settings that are None are left out. Long arrays are shown by type and shape,
    and functions by name, so that the text is one line and the same in every process.
    """
    if hasattr(obj, "_fields"):
        names = obj._fields
    elif dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj) if field.repr]
    else:
        names = list(inspect.signature(type(obj)).parameters)
    values = {name: getattr(obj, name, None) for name in names}
    settings = [f"{name}={shown(value)}" for name, value in values.items() if value is not None]
    return f"{type(obj).__name__}({', '.join(settings)})"


def shown(value) -> str:
    """A setting in one line without memory addresses."""
    if isinstance(value, np.ndarray | jax.Array):
        is_known = not isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, np.number)
        if is_known and value.ndim <= 1 and value.size <= MAX_SHOWN:
            text = ", ".join(f"{number:.6g}" for number in np.asarray(value).ravel().tolist())
            return f"[{text}]" if value.ndim else text
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, functools.partial):
        keywords = [f", {name}={shown(part)}" for name, part in value.keywords.items()]
        return f"partial({', '.join(map(shown, (value.func, *value.args)))}{''.join(keywords)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {shown(part)}' for name, part in value.items())}}}"
    if type(value) in (list, tuple):
        text = ", ".join(map(shown, value))
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    is_record = hasattr(value, "_fields") or dataclasses.is_dataclass(value)
    if is_record and not type(value).__module__.startswith("numpyro_fspace."):  # a tinygp kernel, say
        return one_line(value)
    return " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).split())
