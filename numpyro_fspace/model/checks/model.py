"""The checks that a model passes before an inference method runs it."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import jax
import numpy as np
import numpyro

from numpyro_fspace.model.checks.arguments import checked_arguments, named_leaves
from numpyro_fspace.model.checks.indices import NUM_PARTS, check_indices, has_negatives, plates_of
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.handlers import parts_of_plates
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.potential import ModelPotential


@contextmanager
def checked_model(model, args: tuple, kwargs: dict, init_strategy=init_to_network, *, plates: bool = True):
    """A context for the first evaluation of a model, after which the method can run it with these arguments.

    Errors within it name the argument that causes them (``checked_arguments``). Its end raises an error if rows of a
    plate are missing in an array (unless ``plates`` is False, for a caller that looks for them itself), and, if the
    arguments hold NaN or infinite values, if these reach the gradient.

    Raises:
        TypeError, ValueError: naming what is wrong, and the cure.
    """
    with checked_arguments(args, kwargs, model=model) as trouble:
        yield
        if plates:
            check_plates(model, args, kwargs, init_strategy)
        if trouble is not None:
            check_gradient(model, args, kwargs, init_strategy)


def check_gradient(model, args, kwargs, init_strategy):
    """Raise a ValueError if the gradient of log prior and log likelihood of all data is not finite at the start."""
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        potential = ModelPotential(model, args, kwargs, key=key, init_strategy=init_strategy)
        with numpyro.validation_enabled(False):  # validation would warn of NaN that the model masks later
            gradient = jax.jit(lambda z: potential.data_gradient(z, key))(potential.init_params())
        if not all(np.isfinite(part).all() for part in jax.tree.leaves(gradient)):
            raise ValueError("The gradient of the log density is not finite where the chain starts.")


def check_plates(model, args, kwargs, init_strategy):
    """Raise a ValueError if the rows of a plate are read from an array with fewer rows (see ``check_indices``)."""
    plates: dict = {}
    arrays, _, join = split_arrays((args, kwargs))

    def evaluate(key, part, arrays):
        args, kwargs = join(arrays)
        parts = parts_of_plates(model, part, NUM_PARTS)
        plates.update(plates_of(ModelPotential(parts, args, kwargs, key=key, init_strategy=init_strategy).trace))

    arguments, given, inputs = named_leaves(args, kwargs), (jax.random.key(0), 0), (None, None)
    program = jax.make_jaxpr(lambda key, part: evaluate(key, part, arrays))(*given)
    if has_negatives(arguments):  # JAX converts those that it knows without a trace
        with suppress(jax.errors.JAXTypeError, ValueError):  # the model reads its arguments
            program, inputs = jax.make_jaxpr(evaluate)(*given, arrays), (None, None, *arrays)
    check_indices(program, inputs, plates, arguments, part=1)
