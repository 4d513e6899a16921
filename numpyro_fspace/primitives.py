"""``functional_prior``: the NumPyro primitive that puts a prior over functions on a network.

The statement adds log P0(fn(X_M)) to the model's density. It is a factor, so it must be there for every
engine that evaluates a density (our kernels, HMC/NUTS, SVI, ``log_density``) and absent where NumPyro and
ArviZ list observations (``Predictive``, ``log_likelihood``, ``observed_data``), which a bare
``numpyro.factor`` is not. Which of the two is asked for can be read off the stack of effect handlers:

====================================  =====================================  =========================
who runs the model                    sign on the stack                      the site becomes
====================================  =====================================  =========================
our kernels                           ``fresh_draws``                        a sample site, not observed
HMC, NUTS: the potential              ``substitute``, unconstrained values   a sample site
SVI                                   ``replay``                             a sample site, observed
``log_density``, ``log_likelihood``   ``substitute`` of data                 a sample site, not observed
``Predictive``                        ``mask(False)``, anywhere              a note in the trace
initialisation, ArviZ, plain traces   none of these                          a note in the trace
====================================  =====================================  =========================

A *note* is a site of type ``"functional_prior"``, which no engine of NumPyro counts. "Not observed" keeps
it out of ``log_likelihood``, which shares its stack with ``log_density``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers, prng_key
from numpyro.distributions import constraints
from numpyro.infer.util import _unconstrain_params
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack, plate

from numpyro_fspace.measurement import as_points
from numpyro_fspace.priors import check_prior

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import ArrayLike, Float

    from numpyro_fspace.measurement import PointSampler
    from numpyro_fspace.priors import FunctionalPrior

__all__ = [
    "FunctionalPriorSite",
    "fresh_draws",
    "full_plates",
    "function_hook",
    "functional_prior",
    "given_rows",
    "hooked",
    "is_functional_prior",
    "minibatch",
    "note",
]


class FunctionalPriorSite(dist.Distribution):
    """The law attached to a ``functional_prior`` site: an empty value whose log density is the prior's.

    Attributes:
        fn: the network, a function of inputs [M, D].
        prior: the prior over functions.
        points: the sampler of measurement points.
        x: the measurement points [M, D] of this evaluation, or None in a note.
        log_factor: scale · log P0(fn(x)); None in a note, and where random points have no key, which is an error
            only for those who ask for the density (``log_likelihood`` does not).
        scale: the factor on the log prior.
    """

    support = constraints.real_vector
    pytree_aux_fields = ("fn", "prior", "points", "x")
    pytree_data_fields = ("log_factor", "scale")

    def __init__(self, fn, prior, points, x=None, log_factor=None, scale=1.0):
        self.fn, self.prior, self.points, self.x, self.log_factor = fn, prior, points, x, log_factor
        self.scale = scale
        super().__init__(batch_shape=(), event_shape=(0,), validate_args=False)

    def sample(self, key, sample_shape=()):
        return jnp.zeros((*sample_shape, 0))

    def log_prob(self, value):
        if self.log_factor is None:
            raise ValueError(
                "functional_prior: the measurement points are random and there is no key to draw them. Run the model "
                "under numpyro.handlers.seed, or freeze the points: "
                "points=fs.measurement.fixed(points(jax.random.key(0)))."
            )
        return self.log_factor


class fresh_draws(Messenger):
    """Gives a model the randomness of one evaluation: minibatch indices, measurement points, other keys.

    Args:
        fn: the model.
        key: the key of this evaluation; each site that asks gets its own split of it.

    After the model has run, ``log_functional_prior`` holds the sum of its functional log priors.
    """

    def __init__(self, fn, key):
        super().__init__(fn)
        self.key = key
        self.log_functional_prior = jnp.zeros(())

    def next_key(self):
        self.key, key = jax.random.split(self.key)
        return key

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            msg["value"] = minibatch(self.next_key(), *msg["args"], name=msg["name"])
        elif msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = self.next_key()

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and is_functional_prior(msg) and msg["fn"].log_factor is not None:
            scale = 1.0 if msg["scale"] is None else msg["scale"]
            self.log_functional_prior = self.log_functional_prior + scale * msg["fn"].log_prob(msg["value"])


class full_plates(Messenger):
    """Runs a model with every plate at its full size, whatever its ``subsample_size``."""

    def process_message(self, msg):
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


def minibatch(key, size: int, batch_size: int, *, name: str = "plate"):
    """``batch_size`` distinct indices below ``size``: one from each of ``batch_size`` strata, in O(batch_size).

    The strata are a partition of the indices into runs of equal length (to within one), turned by a random
    angle, so that each index has the same chance and gradients are unbiased. Their variance is that of
    drawing without replacement if the order of the data says nothing, and smaller if neighbours are alike.

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


class function_hook(Messenger):
    """While active, ``functional_prior(name, fn, …)`` speaks of ``replace(name, fn, values)`` in place of ``fn``.

    Of several hooks the innermost replaces first; one that replaces nothing shields the function from those around it.

    Args:
        replace: takes the name, the function, and the values of the latent sites so far; None replaces nothing.
        density: whether the log density of functions counts; False puts 0 in its place.
        networks: whether the functions of ``random_module`` are replaced too.
    """

    def __init__(self, replace=None, *, density=True, networks=False):
        super().__init__()
        self.replace, self.density, self.networks, self.values = replace, density, networks, {}

    def postprocess_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"] and not is_functional_prior(msg):
            self.values[msg["name"]] = msg["value"]


def _hooks():
    return [handler for handler in _PYRO_STACK if isinstance(handler, function_hook)]


def hooked(name, fn, *, is_network=False):
    """``fn`` as the hooks around it replace it."""
    for hook in reversed(_hooks()):
        if hook.replace is None:
            break
        if hook.networks or not is_network:
            fn = hook.replace(name, fn, dict(hook.values))
    return fn


def is_functional_prior(site) -> bool:
    """Whether a trace's site was made by ``functional_prior``."""
    return isinstance(site.get("fn"), FunctionalPriorSite)


def functional_prior(
    name: str,
    fn: Callable,
    prior: FunctionalPrior,
    points: PointSampler | Callable | Float[ArrayLike, "M D"],
    *,
    scale: Float[ArrayLike, ""] = 1.0,
) -> Callable:
    r"""Put a prior over functions on ``fn``, inside a NumPyro model.

    .. math:: \log p \mathrel{+}= \text{scale} \cdot \log P_0\big(f(X_M)\big)

    **Law.** With fixed points the model's density is p(y | f) · P0(f(X_M)) · p0(w): a product of the
    functional prior at X_M and whatever prior the weights have. With random points our kernels draw X_M at
    each gradient step and the chain targets exp(log-likelihood + log p0(w) + E[log P0(f(X_M))]), whose
    strength grows with the number of points M; ``scale`` tempers it. The term is never rescaled by a data
    plate.

    Args:
        name: name of the site.
        fn: function of inputs [M, D] to values [M] or [M, K], such as ``random_module`` returns.
        prior: a functional prior (``fs.GPPrior``, ``fs.StudentTPrior``, …): any object with
            ``log_prob(x, f)`` and ``sample(key, x, sample_shape)``.
        points: measurement points: an array [M, D] (fixed), a sampler of ``fs.measurement``, or any
            callable of a key that returns [M, D].
        scale: factor on the log prior, positive.

    Returns:
        ``fn``, unchanged (its linearisation in a model that ``fs.linearise`` made).

    Raises:
        ValueError: for a scale that is not positive and finite; for random points under an engine that
            needs a fixed density (HMC, NUTS, …); for a prior whose ``log_prob`` returns no scalar.
        TypeError: for a ``prior`` or ``points`` of the wrong kind.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tinygp, flax.linen as nn
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.3))
        >>> points = fs.measurement.uniform(-1.0, 1.0, 40)
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = fs.random_module("net", net, input_shape=(1,))
        ...     f = fs.functional_prior("f", f, gp, points)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)

    References: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural
    networks*, eq. 6 and 9.
    """
    if not callable(fn):
        raise TypeError(f"functional_prior({name!r}): fn must be a function of inputs [M, D], got {type(fn).__name__}.")
    check_prior(prior)
    points = as_points(points)
    _check_scale(name, scale)
    if not _PYRO_STACK:
        return fn
    fn = hooked(name, fn)
    if not _density_is_wanted():
        note("functional_prior", name, FunctionalPriorSite(fn, prior, points, scale=scale))
        return fn
    key = _measurement_key(name, points)
    if points.is_random and key is None:
        _factor(name, FunctionalPriorSite(fn, prior, points, scale=scale))
        return fn
    x, law, where = _drawn(prior, points, key)
    if not all(hook.density for hook in _hooks()):
        _factor(name, FunctionalPriorSite(fn, prior, points, x, jnp.zeros(()), scale))
        return fn
    with handlers.block():
        log_prob = jnp.asarray(law.log_prob(where, fn(x)))
    if log_prob.ndim:
        raise ValueError(
            f"functional_prior({name!r}): prior.log_prob(x, f) must return a number, the log density of all values "
            f"together; {type(prior).__name__} returned shape {log_prob.shape}."
        )
    _factor(name, FunctionalPriorSite(fn, prior, points, x, scale * log_prob, scale))
    return fn


def _drawn(prior, points, key):
    """Points x, and a law with what it calls them: the prior and x, or its table and their rows in a finite pool."""
    rows = points.rows(key) if points.is_random else None
    table = None if rows is None or not hasattr(prior, "tabulated") else prior.tabulated(points.pool)
    if table is None:
        x = points(key)
        return x, prior, x
    return points.pool[rows], table, rows[:, None]


def _check_scale(name, scale):
    if isinstance(scale, jax.core.Tracer):
        return
    is_number = isinstance(scale, int | float | np.number | np.ndarray | jax.Array) and jnp.ndim(scale) == 0
    if not (is_number and 0 < float(scale) < float("inf")):
        raise ValueError(f"functional_prior({name!r}): scale={scale!r} must be a positive finite number.")


def _density_is_wanted() -> bool:
    """Whether somebody up the stack sums log densities (see the module's table)."""
    if any(isinstance(handler, handlers.mask) and handler.mask is False for handler in _PYRO_STACK):
        return False
    for handler in _PYRO_STACK:
        if isinstance(handler, fresh_draws | handlers.replay | _unconstrain_params):
            return True
        if isinstance(handler, handlers.substitute) and handler.data is not None:
            return True
    return False


def _measurement_key(name, points):
    """A key for random points, None if there is none or need of none; an error if the engine would freeze one set."""
    if not points.is_random:
        return None
    kinds = [type(handler) for handler in _PYRO_STACK]
    if fresh_draws not in kinds and _unconstrain_params in kinds:
        outer = kinds[: kinds.index(_unconstrain_params)]
        if handlers.seed not in outer:
            raise ValueError(
                f"functional_prior({name!r}): the measurement points are random, but this engine (HMC, NUTS, "
                "…) needs a density that does not change. Freeze them: "
                "points=fs.measurement.fixed(points(jax.random.key(0))); or sample with fs.fSGHMC or fs.fSGLD."
            )
    return prng_key()


def note(kind: str, name: str, fn):
    """Leave a site of type ``kind`` in the trace, which handlers can read and no engine of NumPyro counts."""
    if _PYRO_STACK:
        apply_stack({"type": kind, "name": name, "fn": fn, "value": jnp.zeros((0,))})


def _is_observed_there() -> bool:
    """Whether the site must pass for observed: to SVI's guides, and to init strategies, which skip it then."""
    for handler in _PYRO_STACK:
        is_substitute = isinstance(handler, handlers.substitute) and not isinstance(handler, _unconstrain_params)
        if isinstance(handler, handlers.replay) or (is_substitute and handler.data is None):
            return True
    return False


def _factor(name, law):
    apply_stack(
        {
            "type": "sample",
            "name": name,
            "fn": law,
            "args": (),
            "kwargs": {"rng_key": None, "sample_shape": ()},
            "value": jnp.zeros((0,)),
            "scale": None,
            "is_observed": _is_observed_there(),
            "intermediates": [],
            "cond_indep_stack": [],
            "infer": {
                "is_auxiliary": True,
                "block_plates": [h.name for h in _PYRO_STACK if isinstance(h, plate)],
            },
        }
    )
