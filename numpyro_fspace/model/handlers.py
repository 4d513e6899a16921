"""Effect handlers: the randomness, the rows and the functions with which an engine of ours runs a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.model.sites import is_functional_prior

__all__ = [
    "fresh_draws",
    "full_plates",
    "function_hook",
    "given_rows",
    "minibatch",
    "own_keys",
    "take_observation",
    "without_data",
]


class fresh_draws(Messenger):
    """Gives a model the randomness of one evaluation: minibatch indices, measurement points, other keys.

    Args:
        fn: the model.
        key: the key of this evaluation; each site that asks gets its own split of it.

    After the model has run, ``log_functional_prior`` holds the sum of its functional log priors, ``num_own_keys`` the
    number of keys that the model asked for itself (``numpyro.prng_key``), ``has_random_points`` whether a functional
    prior asked for one.
    """

    def __init__(self, fn, key):
        super().__init__(fn)
        self.key = key
        self.num_own_keys, self.has_random_points = 0, False
        self._priors = []

    def next_key(self):
        self.key, key = jax.random.split(self.key)
        return key

    def process_message(self, msg):
        take_observation(msg)
        if msg["type"] == "plate" and msg["value"] is None:
            msg["value"] = minibatch(self.next_key(), *msg["args"], name=msg["name"])
        elif msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = self.next_key()
            self.num_own_keys += 1

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and is_functional_prior(msg) and msg["fn"].has_density:
            self._priors.append((1.0 if msg["scale"] is None else msg["scale"], msg["fn"]))
            self.num_own_keys -= msg["fn"].points.is_random
            self.has_random_points |= msg["fn"].points.is_random

    @property
    def log_functional_prior(self):
        return sum((scale * law.log_factor for scale, law in self._priors), start=jnp.zeros(()))


class full_plates(Messenger):
    """Runs a model with every plate at its full size, whatever its ``subsample_size``."""

    def process_message(self, msg):
        take_observation(msg)
        if msg["type"] == "plate" and msg["value"] is None:
            size = msg["args"][0]
            msg["args"], msg["value"] = (size, size), jnp.arange(size)


class given_rows(Messenger):
    """Runs a model with these rows in place of the minibatch of every subsampled plate, however many they are."""

    def __init__(self, fn, rows):
        super().__init__(fn)
        self.rows = rows

    def process_message(self, msg):
        size, batch = msg["args"] if msg["type"] == "plate" else (0, None)
        if msg["type"] == "plate" and msg["value"] is None and batch not in (None, size):
            msg["args"], msg["value"] = (size, len(self.rows)), self.rows


class without_data(Messenger):
    """Runs a model whose observations and factors do not count."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"] and not is_functional_prior(msg):
            msg["fn"] = msg["fn"].mask(False)


def take_observation(msg):
    """Make an array of JAX's numbers of a site's observation: of a pandas Series, say, or of a file's byte order."""
    if msg["type"] == "sample" and hasattr(msg["value"], "__array__"):
        msg["value"] = as_numbers(msg["value"], f"The observation {msg['name']!r}")


def minibatch(key, size: int, batch_size: int, *, name: str = "plate"):
    """``batch_size`` distinct indices below ``size``: one from each of ``batch_size`` strata, in O(batch_size).

    The strata are a partition of the indices into runs of equal length (to within one), turned by a random
    angle, so that each index has the same chance and gradients are unbiased. Their variance is that of
    drawing without replacement if the order of the data says nothing, and smaller if neighbors are alike.

    Raises:
        ValueError: unless 1 ≤ batch_size ≤ size.

    Reference: W. G. Cochran (1977), *Sampling techniques*, chapter 5.
    """
    if not 1 <= batch_size <= size:
        raise ValueError(f"plate {name!r}: subsample_size={batch_size} must lie between 1 and the plate's size {size}.")
    edges = np.arange(batch_size + 1) * size // batch_size
    key_angle, key_rows = jax.random.split(key)
    widths = np.diff(edges)
    # Rounding may prefer some rows of a stratum by one part in 10⁷; turned, every index still has the same chance.
    places = (jax.random.uniform(key_rows, (batch_size,), jnp.float32) * widths).astype(int)
    rows = edges[:-1] + jnp.minimum(places, widths - 1)
    return (rows + jax.random.randint(key_angle, (), 0, size)) % size


class own_keys(Messenger):
    """Counts, as ``num``, the keys that a model asks for itself (``numpyro.prng_key``)."""

    num = 0

    def process_message(self, msg):
        self.num += msg["type"] == "prng_key"


class function_hook(Messenger):
    """While active, ``functional_prior(name, fn, …)`` speaks of ``replace(name, fn, values)`` in place of ``fn``.

    Of several hooks the innermost replaces first; one that replaces nothing shields the function from those around it.

    Args:
        replace: takes the name, the function, and the values of the latent sites so far; None replaces nothing.
        density: whether the log density of functions counts; False puts 0 in its place.
        networks: whether the functions of ``random_module`` are replaced too.
        points: whether functional priors draw their measurement points, whoever runs the model.
    """

    def __init__(self, replace=None, *, density=True, networks=False, points=False):
        super().__init__()
        self.replace, self.density, self.networks, self.points = replace, density, networks, points
        self.values = {}

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"] and not is_functional_prior(msg):
            self.values[msg["name"]] = msg["value"]
