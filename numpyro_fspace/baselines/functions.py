"""The functions that a model declares (``functional_prior``, ``random_module``): recorded and exchanged."""

from __future__ import annotations

import jax
from numpyro import handlers

from numpyro_fspace.model.arguments import with_rows
from numpyro_fspace.model.handlers import full_plates, function_hook

__all__ = ["declared_functions", "run_with_outputs"]


def _trace(model, args, kwargs, values, replace):
    """Trace at ``values``, all plates full, with ``replace(name, fn)`` in place of every declared function."""
    args, kwargs = with_rows((args, kwargs))
    run = handlers.seed(handlers.substitute(full_plates(model), data=values), jax.random.key(0))
    with function_hook(lambda name, fn, _: replace(name, fn), density=False, networks=True):
        return handlers.trace(run).get_trace(*args, **kwargs)


def declared_functions(model, args, kwargs, values) -> dict:
    """The declared functions of a model by name, given its latent values."""
    found = {}

    def keep(name, fn):
        found[name] = fn
        return fn

    _trace(model, args, kwargs, values, keep)
    return found


def run_with_outputs(model, args, kwargs, values, outputs=None):
    """``(trace, calls)`` of a run: the calls of declared functions as (name, x, value).

    With ``outputs`` the calls give these, one after the other, whatever the functions are. A function under a
    functional prior calls its network, which is listed first and counts for nothing then.
    """
    calls = []

    def record(name, fn):
        def recorded(x):
            value = fn(x)
            calls.append((name, x, value))
            return value if outputs is None else outputs[len(calls) - 1].reshape(value.shape)

        return recorded

    return _trace(model, args, kwargs, values, record), calls
