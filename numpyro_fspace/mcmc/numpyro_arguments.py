"""Arguments of a model for runs by NumPyro's own loop."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_fspace.model.data.arguments import split_arrays, with_rows
from numpyro_fspace.model.programs.cache import content_key


class NumPyroArguments:
    """The arguments of the last run of a driver by NumPyro's loop, which tells arrays by their identity.

    NumPyro would take True for 1, and an array that was changed in place for the same, and would use its programs
    again, also for other numbers of draws.
    """

    def __init__(self):
        self._last: Any = None
        self._rows: dict = {}  # the last run's NumPy arrays by place, as the model gets them

    def prepared(self, mcmc, args: tuple, kwargs: dict):
        """``(args, kwargs)`` for the model, with ``x[rows]`` for NumPy arrays; drops programs of other ones."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        structure, others = split_arrays((args, kwargs))[1]
        numbers = mcmc.num_warmup, mcmc.num_samples, mcmc.thinning  # which programs of NumPyro's kernels depend on
        arguments = content_key((structure, others, [leaf for leaf in leaves if isinstance(leaf, np.ndarray)], numbers))
        if arguments != self._last:
            self._last, self._rows, mcmc._cache = arguments, {}, {}
        if hasattr(mcmc.sampler, "_init_fn"):  # else HMC vectorizes anew what it has vectorized for its last run
            mcmc.sampler._init_fn = None
        leaves = [
            self._rows.setdefault(i, with_rows(a)) if isinstance(a, np.ndarray) else a for i, a in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, leaves)
