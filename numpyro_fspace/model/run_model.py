"""``run_model``: one run of a NumPyro model with given values, rows and functions, recorded in a trace."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_fspace.model.data.arguments import check_model, describe, with_rows
from numpyro_fspace.model.handlers import array_observations, function_hook, given_rows
from numpyro_fspace.model.handlers import full_plates as with_full_plates
from numpyro_fspace.model.sites import base_distribution, zeros_if_not_drawable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Array, ArrayLike, Int, Key


def run_model(
    model: Callable,
    args: tuple = (),
    kwargs: Mapping | None = None,
    *,
    key: Key[Array, ""] | None = None,
    substitute: Mapping | Callable | None = None,
    full_plates: bool = True,
    rows: Int[ArrayLike, " B"] | Callable | None = None,
    hook: Callable | None = None,
    networks: bool = False,
    points: bool = False,
    density: bool = False,
    isolated: bool = False,
) -> dict:
    """The trace of one run of a model.

    Args:
        model: a NumPyro model.
        args, kwargs: its arguments.
        key: for the random numbers of the model; None if the model brings its own randomness.
        substitute: values of its ``sample`` sites by name; or a function of a site that returns its value or None, such
            as an init strategy of NumPyro.
        full_plates: whether every plate has its full size, whatever its ``subsample_size``.
        rows: the minibatch of every subsampled plate, or a function of the size of a plate and that of its minibatch
            that returns it, instead of the full size.
        hook: ``hook(name, fn, values)`` replaces each function under a functional prior; see ``function_hook``.
        networks: whether the hook replaces networks too.
        points: whether functional priors draw their measurement points, as under engines that need a density.
        density: whether functional priors compute their density if the engine needs it; otherwise it is 0.
        isolated: whether to hide the run from outer effect handlers, and its functions from outer hooks.

    Returns:
        The sites by name.

    Raises:
        TypeError: the model is no function, or does not take these arguments. Errors of the model itself get a note
            with the shapes of the arguments.
        ValueError: two sites have one name.
    """
    args, kwargs = with_rows((tuple(args), dict(kwargs or {})))
    check_model(model, args, kwargs)
    if substitute is not None and not callable(substitute):
        model = handlers.substitute(model, substitute_fn=partial(_value, substitute))
    if rows is not None:
        model = given_rows(model, rows if callable(rows) else jnp.asarray(rows))
    elif full_plates:
        model = with_full_plates(model)
    else:
        model = array_observations(model)
    if key is not None:
        model = handlers.seed(model, key)
    if callable(substitute):  # outside of ``seed``, because init strategies draw with the keys of sites
        model = handlers.substitute(model, substitute_fn=substitute)
    with ExitStack() as around:
        if isolated:
            around.enter_context(handlers.block())
            around.enter_context(function_hook(None))
        replace = hook or (lambda name, fn, values: fn)
        around.enter_context(function_hook(replace, density=density, networks=networks, points=points))
        try:
            return handlers.trace(model).get_trace(*args, **kwargs)
        except Exception as error:
            if isinstance(error, AssertionError) and "unique names" in str(error):
                twice = str(error).rpartition("got ")[2].partition(" ")[0].strip("`")
                raise ValueError(
                    f"Two sites of the model are named {twice!r}: give each network, prior and site a name of its own."
                ) from error
            note = f"The arguments of the model: {describe(args, kwargs)}."
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


def _value(values, site):
    """The value given to a sample site; zeros for observations that have no data and cannot be drawn."""
    if site["type"] != "sample":
        return None
    if site["name"] in values:
        return values[site["name"]]
    is_improper = isinstance(base_distribution(site["fn"]), dist.ImproperUniform)
    return None if site["is_observed"] or is_improper else zeros_if_not_drawable(site)
