"""Checks of a model's arguments before long computations."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.primitives import plate

from numpyro_fspace._checks import is_sparse, is_table, native, not_numbers
from numpyro_fspace.model.checks.sites import all_rows
from numpyro_fspace.model.data.arguments import with_rows
from numpyro_fspace.model.float32_rounding import lost_to_rounding
from numpyro_fspace.model.handlers import full_plates


def _is_concrete_array(x) -> bool:
    return isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_array(x) -> bool:
    return isinstance(x, np.ndarray | jax.Array)


@contextmanager
def checked_arguments(args: tuple, kwargs: dict, of: str = "run", *, model=None):
    """A context for the first evaluation of a model, in which errors of the model name the argument that causes them.

    Arrays among the arguments must hold numbers, must not be empty in a run, and must not change in JAX's precision.
    The context yields the message of ``not_finite`` about NaN and infinite values, or None. The caller evaluates the
    model and raises a ValueError if such values reach its density. This error, other errors of the model, and errors
    from reading the values of traced arrays (``known_values``) become errors that name the argument.

    Raises:
        TypeError, ValueError: the message names the argument, what is wrong with it, and the cure.
    """
    for name, leaf in named_leaves(args, kwargs):
        if _is_concrete_array(leaf):
            _check_array(name, leaf, of)
        elif is_table(leaf) and np.asarray(leaf).dtype.kind in "biuf":
            _check_array(name, np.asarray(leaf), of)
    trouble = not_finite(args, kwargs, of)
    try:
        with known_values(model, args, kwargs, of):
            yield trouble
    except Exception as error:
        if trouble is not None and isinstance(error, ValueError):
            raise ValueError(trouble) from error
        for name, leaf in named_leaves(args, kwargs):
            if _is_concrete_array(leaf) and not leaf.size:
                raise ValueError(
                    f"{name} of {of} is empty (shape {leaf.shape}), and the model fails with it "
                    f"({type(error).__name__}: {error})."
                ) from error
            if is_sparse(leaf) or (is_table(leaf) and (not_numbers(np.asarray(leaf)) or not _is_of_package(error))):
                raise TypeError(f"{name} of {of} {_describe_table(leaf)} ({type(error).__name__}: {error})") from error
            if np.iscomplexobj(leaf):
                raise TypeError(
                    f"{name} of {of} is complex ({np.asarray(leaf).dtype}), and the model fails where it computes with "
                    f"it ({type(error).__name__}: {error}). Pass real numbers: np.abs(a), or "
                    "np.stack([a.real, a.imag], -1)."
                ) from error
        for name, given in arguments_of(args, kwargs).items():
            parts = jax.tree.leaves(given) if isinstance(given, list | tuple) else [given]
            if isinstance(given, list | tuple | range | str | bytes | set) and not any(map(_is_array, parts)):
                raise TypeError(
                    f"{name} of {of} is a {type(given).__name__}, and the model fails where it computes with it "
                    f"({type(error).__name__}: {error}): pass an array of numbers, np.asarray(...)."
                ) from error
        if (message := _describe_plate(error)) is not None:
            raise ValueError(message) from error
        if isinstance(error, AssertionError) and not str(error):
            raise ValueError(_describe_assertion(error)) from error
        raise


def _is_of_package(error) -> bool:
    """Whether a check of this package raised an error by itself; its message then says what is wrong."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.__cause__ is None and frame.f_globals.get("__name__", "").startswith("numpyro_fspace.")


def _describe_plate(error) -> str | None:
    """The message for an error of NumPyro about a site whose rows are not those of a plate; None for others."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is plate.process_message.__code__ and isinstance(error, ValueError):
            inner, site = frame.f_locals["self"], frame.f_locals["msg"]
            shape = getattr(site.get("fn"), "batch_shape", ())
            if inner.subsample_size < inner.size in shape:
                return all_rows(inner.name, inner.size, inner.subsample_size, f"the site {site['name']!r}", shape)
            if "Incompatible shapes" in str(error) and inner.size == inner.subsample_size:
                return (
                    f"The site {site['name']!r} has the shape {shape} inside of the plate {inner.name!r} of size "
                    f"{inner.size}. Give the plate the size of its data, numpyro.plate({inner.name!r}, x.shape[0])."
                )
    return None


def _describe_assertion(error) -> str:
    """The condition of a bare ``assert``, and the line of the model that led to it."""
    *outer, last = traceback.extract_tb(error.__traceback__)
    packages = tuple(str(Path(str(file)).parent) for file in (jax.__file__, np.__file__, numpyro.__file__, __file__))
    own = [frame for frame in outer if not frame.filename.startswith(packages)]
    line = f" in line {own[-1].lineno} of {own[-1].filename}, {own[-1].line}" if own else ""
    return f"The model fails{line}: it breaks a rule of {last.filename}, {last.line}"


#: Errors that JAX raises if Python reads the value of a traced array.
_UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextmanager
def known_values(model, args: tuple, kwargs: dict, of: str):
    """A context for compiled evaluations of ``model``, in which JAX's errors about traced values name their cause.

    Raises:
        TypeError: the message names the arguments or sites whose values the model reads, and the cure.
    """
    try:
        yield
    except _UNKNOWN as error:
        if model is None:
            raise
        raise TypeError(_describe_read_values(model, args, kwargs, of)) from error


def _describe_read_values(model, args, kwargs, of) -> str:
    """Names the arguments whose values a model reads: those for which it fails if they alone are traced."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if np.ndim(leaf) and _is_concrete_array(leaf)]

    # As NumPy arrays, because results of JAX operations are traced even if the operands are not.
    known = [np.asarray(leaf) if i in arrays else leaf for i, leaf in enumerate(leaves)]

    def fails(chosen):
        def evaluate(key, values):
            given = iter(values)
            filled = [next(given) if i in chosen else leaf for i, leaf in enumerate(known)]
            args, kwargs = with_rows(jax.tree.unflatten(structure, filled))
            handlers.trace(handlers.seed(full_plates(model), key)).get_trace(*args, **kwargs)

        try:
            jax.eval_shape(evaluate, jax.random.key(0), [native(leaves[i]) for i in chosen])
        except _UNKNOWN:
            return True
        except Exception:
            return False
        return False

    if fails([]):
        return (
            "The model reads the value of a sampled site, or of a result that JAX computes (float(a), if a > 0, "
            "x[a > 0], np.exp(a)). It is not known in a compiled program: use jax.numpy, jnp.where or jax.lax.cond."
        )
    ids = {id(leaf): name for name, leaf in named_leaves(args, kwargs)}
    names = list(dict.fromkeys(ids[id(leaves[i])] for i in [i for i in arrays if fails([i])] or arrays))
    its = "their" if len(names) > 1 else "its"
    return (
        f"{' and '.join(names)} of {of}: the model reads {its} values, as in int(x.max()), "
        "len(np.unique(x)), x[x > 0] or if x.sum() > 0. In a compiled program arrays among the arguments are traced, "
        "and their values are not known. Compute such numbers outside of the model and pass them as Python numbers, or "
        "bind the array to the model, functools.partial(model, x=np.asarray(x))."
    )


def _describe_table(table) -> str:
    """What may be wrong with a table or sparse matrix with which a model fails."""
    if is_sparse(table):
        return f"is sparse ({type(table).__name__}): pass .toarray()."
    trouble = not_numbers(np.asarray(table))
    if trouble is not None:
        return f"{trouble}."
    kind = f"{type(table).__module__.split('.')[0]} {type(table).__name__}"
    return f"is a {kind}, and the model fails where it computes with it: pass its numbers, .to_numpy()."


def check_masks(args: tuple, kwargs: dict, of: str = "run"):
    """No argument may hold masked values, because they would become data.

    Raises:
        TypeError: the message names the argument and the cure.
    """
    for name, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
            raise TypeError(f"{name} of {of} {not_numbers(leaf)}.")


def not_finite(args: tuple, kwargs: dict, of: str) -> str | None:
    """A message about the first argument that holds NaN or infinite values; None if there is none."""
    for name, leaf in named_leaves(args, kwargs):
        is_inexact = _is_concrete_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if not (is_inexact or isinstance(leaf, float) or is_table(leaf)):
            continue
        values = np.asanyarray(leaf)
        if not jnp.issubdtype(values.dtype, jnp.inexact):  # a table of something else
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            total = values.sum()  # takes a third of the time of a test of every value
        bad = 0 if np.isfinite(total) else int(np.sum(~np.isfinite(values)))
        if bad:
            return (
                f"{name} of {of} holds {bad} NaN or infinite values; drop those rows, impute them, or replace them by "
                "any number and leave it out of the likelihood with numpyro.handlers.mask. (A model may also replace "
                "them itself, by jnp.where before it computes anything from them.)"
            )
    return None


def named_leaves(args, kwargs):
    """The leaves of a model's arguments, each with the name of its argument."""
    return [(name, leaf) for name, tree in arguments_of(args, kwargs).items() for leaf in jax.tree.leaves(tree)]


def arguments_of(args: tuple, kwargs: Mapping) -> dict:
    """The arguments of a model by what messages call them."""
    positional = {f"positional argument {i}": value for i, value in enumerate(args)}
    return positional | {f"argument {name!r}": value for name, value in kwargs.items()}


def _check_array(name, array, of):
    if array.size == 0 and of == "run":
        raise ValueError(f"{name} of {of} is empty (shape {array.shape}).")
    if array.size == 0 or not isinstance(array, np.ndarray):
        return
    trouble = not_numbers(array)
    if trouble is not None:
        raise TypeError(f"{name} of {of} {trouble}.")
    array = native(array)
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and not np.array_equal(array, array.astype(kept)):
        raise ValueError(
            f"{name} of {of} is {array.dtype} and JAX would cut it to {kept}, which changes it (it holds "
            f'{array.max()}). Pass it as float, or call jax.config.update("jax_enable_x64", True) first.'
        )
    trouble = lost_to_rounding(array) if array.dtype == np.float64 else None
    if trouble is not None:
        raise ValueError(f"{name} of {of} {trouble}.")
