"""``quick_jit``: jit for programs that cost more to compile than to run."""

from __future__ import annotations

import functools

import jax

#: Each is used where this version of XLA knows it; together they compile small programs six times faster on a CPU.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@functools.cache
def known_options():
    """The options that XLA accepts here."""

    def is_known(name):
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: OPTIONS[name]}).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in OPTIONS.items() if is_known(name)}


def quick_jit(fn, *, is_busy=False):
    """``jax.jit`` with the compiler's optimizations off, or nearly so for programs that are busy for a second."""
    options = dict(known_options())
    if is_busy and "xla_backend_optimization_level" in options:
        options["xla_backend_optimization_level"] = 1
    return jax.jit(fn, compiler_options=options)
