"""``run_model``: one run of a NumPyro model with given values, rows and functions, recorded in a trace."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import jax.numpy as jnp
from numpyro import handlers

from numpyro_fspace.model.arguments import with_rows
from numpyro_fspace.model.handlers import full_plates as with_full_plates
from numpyro_fspace.model.handlers import function_hook, given_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Array, ArrayLike, Int, Key

__all__ = ["run_model"]


def run_model(
    model: Callable,
    args: tuple = (),
    kwargs: Mapping | None = None,
    *,
    key: Key[Array, ""] | None = None,
    substitute: Mapping | Callable | None = None,
    full_plates: bool = True,
    rows: Int[ArrayLike, " B"] | None = None,
    hook: Callable | None = None,
    networks: bool = False,
    points: bool = False,
    density: bool = False,
    isolated: bool = False,
) -> dict:
    """The trace of a model that runs once.

    Args:
        model: a NumPyro model.
        args, kwargs: its arguments.
        key: of what the model draws; None if the model brings its own randomness.
        substitute: values of its ``sample`` sites by name; or a function of a site that returns the value or None, such
            as an init strategy of NumPyro.
        full_plates: whether every plate has its full size, whatever its ``subsample_size``.
        rows: the minibatch of every subsampled plate, in place of the full size.
        hook: ``hook(name, fn, values)`` replaces each function under a functional prior; see ``function_hook``.
        networks: whether the hook replaces networks too.
        points: whether functional priors draw their measurement points, as where their density is wanted.
        density: whether functional priors, where an engine wants their density, compute it; else it is 0.
        isolated: hides the run from effect handlers around it, and its functions from their hooks.

    Returns:
        The sites by name.
    """
    args, kwargs = with_rows((tuple(args), dict(kwargs or {})))
    if substitute is not None and not callable(substitute):
        model = _with_values(model, substitute)
    if rows is not None:
        model = given_rows(model, jnp.asarray(rows))
    elif full_plates:
        model = with_full_plates(model)
    if key is not None:
        model = handlers.seed(model, key)
    if callable(substitute):  # outside of ``seed``, as init strategies draw with the keys of sites
        model = handlers.substitute(model, substitute_fn=substitute)
    with ExitStack() as around:
        if isolated:
            around.enter_context(handlers.block())
            around.enter_context(function_hook(None))
        around.enter_context(function_hook(hook or _same_function, density=density, networks=networks, points=points))
        return handlers.trace(model).get_trace(*args, **kwargs)


def _with_values(model, values):
    """The model with its sample sites, and no others, at these values."""
    return handlers.substitute(
        model, substitute_fn=lambda site: values.get(site["name"]) if site["type"] == "sample" else None
    )


def _same_function(name, fn, values):
    del name, values
    return fn
