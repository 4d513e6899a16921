"""Effect handlers that give a model its randomness, rows of plates and other functions; the lock of a model's runs."""

from __future__ import annotations

import functools
import sys
import threading

import jax
import jax.numpy as jnp
from numpyro.handlers import block
from numpyro.primitives import Messenger

from numpyro_fspace._checks import as_numbers
from numpyro_fspace.model.data.minibatches import minibatch
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.sites import base_distribution, is_functional_prior

_LOCK = threading.RLock()


def one_at_a_time(fn):
    """``fn``, which runs a model, in one thread at a time: NumPyro has one stack of effect handlers for all threads.

    Of a compiled function this is its first call, by which it is traced.
    """

    @functools.wraps(fn)
    def alone(*args, **kwargs):
        with _LOCK:
            return fn(*args, **kwargs)

    return alone


class fresh_draws(Messenger):
    """Gives a model the randomness of one evaluation: minibatch indices, measurement points, other keys.

    Args:
        fn: the model.
        key: the key of this evaluation; each site that needs randomness gets its own split of it.

    After the model has run, ``log_functional_prior`` is the sum of its functional log priors, ``num_own_keys`` the
    number of keys that the model itself requested (``numpyro.prng_key``), and ``has_random_points`` whether a
    functional prior requested one.
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
        convert_observation(msg)
        if msg["type"] == "plate" and msg["value"] is None:
            msg["value"] = minibatch(self.next_key(), *msg["args"], name=msg["name"])
        elif msg["type"] == "prng_key" and msg["value"] is None:
            hidden = _hidden_site()
            if hidden is not None:
                raise ValueError(
                    f"numpyro.handlers.block hides the latent site {hidden!r}: it would be drawn from its prior anew "
                    "at every step, whatever the data are. Remove block. To hold the site fixed use "
                    "numpyro.handlers.condition, and for random numbers independent of the data numpyro.prng_key()."
                )
            msg["value"] = self.next_key()
            self.num_own_keys += 1

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and is_functional_prior(msg) and msg["fn"].has_density:
            self._priors.append((1.0 if msg["scale"] is None else msg["scale"], msg["fn"]))
            self.num_own_keys -= msg["fn"].points.is_random
            self.has_random_points |= msg["fn"].points.is_random

    @property
    def log_functional_prior(self):
        return sum((scale * distribution.log_factor for scale, distribution in self._priors), start=jnp.zeros(()))


class given_last_layers(Messenger):
    """Runs a model with the last layers of some ``gp_network`` functions computed from white parameters.

    These last layers then have no latent sites. After the run, ``given`` holds the ``LastLayerPrior`` of each, and its
    part of the white parameters, by name.

    Args:
        fn: the model.
        white: white parameters of these last layers together, in the order of the program.
        names: the names of these networks.
    """

    def __init__(self, fn, white, names):
        super().__init__(fn)
        self.white, self.names, self.given = white, names, {}

    def __enter__(self):
        self.given = {}
        return super().__enter__()

    def process_message(self, msg):
        if msg["type"] == "last_layer" and msg["value"] is None and msg["name"] in self.names:
            distribution, start = msg["distribution"](), sum(part.size for _, part in self.given.values())
            part = self.white[start : start + distribution.size]
            self.given[msg["name"]] = distribution, part
            msg["value"] = distribution.last_layer(part)


class given_standardized(Messenger):
    """Runs a model with some latent sites of normal priors N(m, s²) at the values m + s w.

    Args:
        fn: the model.
        white: w in the shape of each site, by name.
    """

    def __init__(self, fn, white):
        super().__init__(fn)
        self.white = white

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["value"] is None and msg["name"] in self.white:
            normal = base_distribution(msg["fn"])
            msg["value"] = normal.loc + normal.scale * self.white[msg["name"]]


class given_rows(Messenger):
    """Runs a model with the given rows, of any number, as the minibatch of every subsampled plate.

    Args:
        fn: the model.
        rows: their numbers, or a function of the size of a plate and that of its minibatch that returns them.
    """

    def __init__(self, fn, rows):
        super().__init__(fn)
        self.rows = rows

    def process_message(self, msg):
        convert_observation(msg)
        if msg["type"] == "plate" and msg["value"] is None:  # NumPyro gives the plates without minibatches their rows
            rows = self.rows(*msg["args"]) if callable(self.rows) else self.rows
            msg["args"], msg["value"] = (msg["args"][0], len(rows)), rows


class full_plates(given_rows):
    """Runs a model with every plate at its full size, whatever its ``subsample_size``."""

    def __init__(self, fn=None):
        super().__init__(fn, lambda size, batch: jnp.arange(size))


def parts_of_plates(fn, part, num_parts: int):
    """A model with consecutive rows as the minibatch of every subsampled plate.

    Args:
        fn: the model.
        part: position of the rows; 0 means the first rows, ``num_parts`` the last ones.
        num_parts: largest ``part``, at most 2¹⁵.
    """

    def rows(size, batch):
        whole, rest = divmod(size - batch, num_parts)  # (size - batch) · part may exceed 32 bits
        return whole * part + rest * part // num_parts + jnp.arange(batch)

    return given_rows(fn, rows)


class without_data(Messenger):
    """Runs a model without the log densities of observations and factors, except the Jacobians of constrained sites.

    NumPyro adds the Jacobian of a site "a" as a factor "_a_log_det" while it processes the site. Scopes add prefixes.
    """

    latest = ""

    def process_message(self, msg):
        if msg["type"] != "sample" or is_functional_prior(msg):
            return
        if not msg["is_observed"]:
            self.latest = msg["name"]
        elif not msg["name"].endswith(f"_{self.latest}_log_det"):
            msg["fn"] = msg["fn"].mask(False)


class array_observations(Messenger):
    """Runs a model with its observations as arrays."""

    def process_message(self, msg):
        convert_observation(msg)


def convert_observation(msg):
    """Convert a site's observation (a list, a pandas Series, an array in another byte order) to an array for JAX."""
    value = msg["value"]
    if msg["type"] == "sample" and isinstance(value, OnDemand):
        raise value.refused()
    is_given = hasattr(value, "__array__") or isinstance(value, list | tuple | range | str | bytes)
    if msg["type"] == "sample" and is_given:
        msg["value"] = as_numbers(msg["value"], f"The observation {msg['name']!r}")


class own_keys(Messenger):
    """Counts, as ``num``, the keys that a model itself requests (``numpyro.prng_key``).

    ``hidden`` holds the names of the sites that ``numpyro.handlers.block`` hides and that are drawn with such keys. The
    dict ``given`` may hold the key of such a site by name.
    """

    def __init__(self, given=None):
        super().__init__()
        self.num, self.hidden, self.given = 0, [], given or {}

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            name = _hidden_site()
            self.num += 1
            self.hidden += [] if name is None else [name]
            msg["value"] = self.given.get(name, msg["value"])


def _hidden_site() -> str | None:
    """The site hidden by ``block`` for which a key is being requested; None if there is none."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not block.process_message.__code__:
        frame = frame.f_back
    site = frame.f_locals["msg"] if frame.f_code is block.process_message.__code__ else {}
    return site["name"] if site.get("type") == "sample" else None


class function_hook(Messenger):
    """While active, ``functional_prior(name, fn, …)`` uses ``replace(name, fn, values)`` instead of ``fn``.

    With several hooks, the innermost replaces first. A hook without ``replace`` hides the function from outer hooks.
    ``observed`` and ``params`` hold the values of observed sites and of parameters so far, by name.

    Args:
        replace: takes the name, the function, and the values of the latent sites so far; None replaces nothing.
        density: whether the log density of functions is included; otherwise it is 0.
        networks: whether the functions of ``random_module`` are replaced too.
        points: whether functional priors draw their measurement points under any engine.
    """

    def __init__(self, replace=None, *, density=True, networks=False, points=False):
        super().__init__()
        self.replace, self.density, self.networks, self.points = replace, density, networks, points
        self.values, self.observed, self.params = {}, {}, {}

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"] and not is_functional_prior(msg):
            self.values[msg["name"]] = msg["value"]
        elif msg["type"] == "sample" and not is_functional_prior(msg):
            self.observed[msg["name"]] = msg["value"]
        elif msg["type"] == "param":
            self.params[msg["name"]] = msg["value"]
