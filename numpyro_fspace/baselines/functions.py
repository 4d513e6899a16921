"""The functions that a model declares (``functional_prior``, ``random_module``), recorded or with replaced values."""

from __future__ import annotations

import jax

from numpyro_fspace.model.run_model import run_model

__all__ = ["declared_functions", "run_with_outputs"]


def declared_functions(model, args, kwargs, values) -> dict:
    """The declared functions of a model by name, given its latent values."""
    functions = {}

    def keep(name, fn, _):
        functions[name] = fn
        return fn

    run_model(model, args, kwargs, key=jax.random.key(0), substitute=values, hook=keep, networks=True)
    return functions


def run_with_outputs(model, args, kwargs, values, outputs=None):
    """``(trace, calls)`` of a run, where ``calls`` lists the calls of declared functions as (name, x, value).

    If ``outputs`` are given, the calls return these in order instead of the functions' values. A function under a
    functional prior calls its network. Both calls are listed, the network first, whose output is then replaced.
    """
    calls = []

    def record(name, fn, _):
        def recorded(x):
            value = fn(x)
            calls.append((name, x, value))
            return value if outputs is None else outputs[len(calls) - 1].reshape(value.shape)

        return recorded

    settings = {"hook": record, "networks": True, "points": True}
    return run_model(model, args, kwargs, key=jax.random.key(0), substitute=values, **settings), calls
