"""What the programs of a run depend on besides the model and its data: known when the run begins, and then fixed."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Hashable

import jax

__all__ = ["Plan", "one_at_a_time"]

_LOCK = threading.RLock()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a draw depends on besides the chain's state and the model's arguments.

    It is part of the type of a state, as the shapes of its arrays are, so that JAX does not use a program that was
    compiled for another plan.

    Attributes:
        num_warmup: draws of warm-up.
        largest_array: numbers in the largest array that the model computes.
        settings: what tells the kernel's settings from others; None in a state that was pickled.
        contents: what tells the contents of NumPy arrays from others, where they are constants of the program.
    """

    num_warmup: int
    largest_array: int
    settings: Hashable = None
    contents: Hashable = None

    def __reduce__(self):
        return Plan, (self.num_warmup, self.largest_array)


def one_at_a_time(fn):
    """``fn``, which runs a model, in one thread at a time: NumPyro has one stack of effect handlers for all threads.

    Of a compiled function this is its first call, by which it is traced.
    """

    @functools.wraps(fn)
    def alone(*args, **kwargs):
        with _LOCK:
            return fn(*args, **kwargs)

    return alone
