"""The sites of a trace, including those of ``functional_prior`` and ``random_module``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.primitives import apply_stack

from numpyro_fspace.model._numpyro import active_handlers, mask_of


class FunctionalPriorSite(dist.Distribution):
    """The distribution of a ``functional_prior`` site: an empty value whose log density is the prior's.

    Attributes:
        fn: the network, a function of inputs [M, D].
        prior: the prior over functions.
        points: the sampler of measurement points.
        x: the measurement points [M, D] of this evaluation, or None if there are none (a note, a static mask).
        log_factor: scale · log P0(fn(x)), a number or a function that computes it at the first access. None in a note,
            and for random points without a key, which is an error only if the density is needed (``log_likelihood``
            does not need it).
        scale: the factor on the log prior.
        one_pass: the function that is evaluated at x and at the data together, if there is one.
        residuals: computes r, affine in fn(x), and a constant c with ``log_factor`` = c - rᵀ r / 2; None unless the
            prior has them, and of a masked site.
    """

    support = constraints.real_vector
    pytree_aux_fields = ("fn", "prior", "points", "x", "one_pass")
    pytree_data_fields = ("scale",)
    _log_factor = residuals = None  # of a site that was rebuilt from its fields

    def __init__(self, fn, prior, points, x=None, log_factor=None, scale=1.0, one_pass=None, residuals=None):
        self.fn, self.prior, self.points, self.x, self.scale = fn, prior, points, x, scale
        self._log_factor, self.one_pass, self.residuals = log_factor, one_pass, residuals
        super().__init__(batch_shape=(), event_shape=(0,), validate_args=False)

    @property
    def log_factor(self):
        if callable(self._log_factor):
            self._log_factor = self._log_factor()
        return self._log_factor

    @property
    def has_density(self) -> bool:
        """Whether there is a ``log_factor``."""
        return self._log_factor is not None

    def sample(self, key, sample_shape=()):
        return jnp.zeros((*sample_shape, 0))

    def mask(self, mask):
        """This site with a mask (a bool, under ``numpyro.handlers.mask``), which says whether the prior counts."""
        if jnp.ndim(mask):
            raise ValueError(f"functional_prior: a mask must be one bool, got one of shape {jnp.shape(mask)}.")
        log_factor = (lambda: jnp.where(mask, self.log_factor, 0.0)) if self.has_density else None
        scale = jnp.where(mask, self.scale, 0.0)
        return FunctionalPriorSite(self.fn, self.prior, self.points, self.x, log_factor, scale, self.one_pass)

    def log_prob(self, value):
        if not self.has_density:
            raise ValueError(
                "functional_prior: the measurement points are random and there is no key to draw them. Run the model "
                "under numpyro.handlers.seed, or freeze the points: "
                "points=fs.measurement.fixed(points(jax.random.key(0)))."
            )
        return self.log_factor


def is_functional_prior(site) -> bool:
    """Whether a site of a trace was made by ``functional_prior``."""
    return isinstance(site.get("fn"), FunctionalPriorSite)


def base_distribution(distribution):
    """The distribution inside masks, expansions and ``to_event``."""
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        distribution = distribution.base_dist
    return distribution


def is_drawable(site) -> bool:
    """Whether values of a site can be drawn: its distribution has a method ``sample``, unlike an improper prior's."""
    kind = type(base_distribution(site["fn"]))
    own = kind.sample is not dist.Distribution.sample or kind.__call__ is not dist.Distribution.__call__
    return is_functional_prior(site) or own


def zeros_if_not_drawable(site):
    """Zeros for a site from which nothing can be drawn; None for any other."""
    return None if is_drawable(site) else jnp.zeros(site["fn"].shape())


def parameters_of(distribution) -> list:
    """The numbers and arrays that a distribution holds; those of a class that is no tree of JAX are its attributes."""
    try:
        return jax.tree.leaves(distribution)
    except (TypeError, ValueError):
        return jax.tree.leaves({k: v for k, v in vars(distribution).items() if isinstance(v, jax.Array | np.ndarray)})


def counted(site):
    """Which numbers of a site's value count in its density; masks and scales of 0 leave the others out."""
    distribution, shape = site["fn"], jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())

    def over_events(values, event_dim):
        return jnp.reshape(values, jnp.shape(values) + (1,) * event_dim)

    known = jnp.ones(shape, bool)
    if site["scale"] is not None:
        known &= over_events(site["scale"], distribution.event_dim) != 0
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        if isinstance(distribution, dist.MaskedDistribution):
            known &= over_events(mask_of(distribution), distribution.event_dim)
        distribution = distribution.base_dist
    return known


def is_masked(distribution) -> bool:
    """Whether ``numpyro.handlers.mask``, or the distribution's own mask, leaves values out."""
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution):
        distribution = distribution.base_dist
    return isinstance(distribution, dist.MaskedDistribution)


def has_point_mass(distribution) -> bool:
    """Whether a distribution is a Delta or contains one (transformed, masked, truncated, in a mixture)."""
    if isinstance(distribution, dist.Delta):
        return True
    parts = [
        part
        for value in vars(distribution).values()
        for part in (value if isinstance(value, list | tuple) else [value])
    ]
    return any(has_point_mass(part) for part in parts if isinstance(part, dist.Distribution))


def weights_of(trace) -> tuple[str, ...]:
    """The names of the weights of a trace's networks, those of NumPyro's own modules too.

    If a reparametrization replaces a weight, which makes it a deterministic site, those of its replacements too.
    """
    ours = tuple(f"{k}.{path}" for k, s in trace.items() if s["type"] == "network" for path in s["weights"])
    names = ours + module_weights(trace)
    replaced = _replaced(trace, names)
    return names + tuple(k for k in trace if k.startswith(replaced) and k not in names)


def _replaced(trace, names) -> tuple[str, ...]:
    """What the names of sites begin with that take the place of reparametrized ones."""
    return tuple(f"{k}_" for k in names if k in trace and trace[k]["type"] == "deterministic")


def weights_by_network(trace) -> dict[str, tuple[str, ...]]:
    """The latent weights of each ``random_module`` and ``gp_network``, by name, in the order of the program."""
    latent = latent_sites(trace)

    def weights(name):
        own = tuple(f"{name}.{path}" for path in trace[name]["weights"])
        replaced = _replaced(trace, own)
        return tuple(k for k in latent if k in own or k.startswith(replaced))

    return {name: weights(name) for name, site in trace.items() if site["type"] == "network"}


def module_weights(trace) -> tuple[str, ...]:
    """The names of the weights of NumPyro's ``random_flax_module``, ``random_nnx_module`` and ``random_eqx_module``.

    They are the sample sites ``"{name}/{path}"`` beside a param site ``"{name}$params"``; "/" may be another divider.
    """
    modules = [k.removesuffix("$params") for k, s in trace.items() if s["type"] == "param" and k.endswith("$params")]
    samples = [k for k, s in trace.items() if s["type"] == "sample"]
    return tuple(k for k in samples for name in modules if k.startswith(name) and k[len(name) :][:1] in ("/", ".", ":"))


def latent_sites(trace) -> dict:
    """The latent sites of a trace, by name, without functional priors."""
    samples = {k: s for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    return {k: s for k, s in samples.items() if not is_functional_prior(s)}


def observed_sites(trace, *, factors: bool = False, weights: bool = False) -> dict:
    """The sites of a trace that have data under a likelihood, by name, without functional priors.

    Args:
        trace: the trace of a model.
        factors: whether ``numpyro.factor`` sites are included.
        weights: whether weights of networks that ``numpyro.handlers.condition`` fixes are included.
    """
    observed = {k: s for k, s in trace.items() if s["type"] == "sample" and s["is_observed"]}
    names = () if weights else weights_of(trace)
    return {
        k: s
        for k, s in observed.items()
        if not (is_functional_prior(s) or (not factors and s["infer"].get("is_auxiliary")) or k in names)
    }


def active_functional_priors(trace) -> dict:
    """The ``functional_prior`` sites of a trace that have measurement points; those under a static mask have none."""
    return {k: s for k, s in trace.items() if is_functional_prior(s) and s["fn"].x is not None}


def subsampled_plates(trace) -> dict:
    """(N, B) of every plate of a trace with B < N rows per minibatch, by name."""
    plates = {k: s["args"] for k, s in trace.items() if s["type"] == "plate"}
    return {k: (size, batch) for k, (size, batch) in plates.items() if batch not in (None, size)}


def note(kind: str, name: str, fn, weights: tuple[str, ...] = (), **more):
    """Leave a site of type ``kind`` in the trace, which handlers can read and NumPyro's engines ignore.

    ``weights`` are the names of the sites on which ``fn`` depends, without the prefix ``name`` and its dot. ``more``
    holds further entries of the site.
    """
    if active_handlers():
        apply_stack({"type": kind, "name": name, "fn": fn, "weights": weights, "value": jnp.zeros((0,)), **more})


def last_layer(name: str, draw, distribution):
    """``draw()``, or the last layer that ``given_last_layers`` computes from white parameters.

    Args:
        name: name of the network, whose own site replaces this one in a trace.
        draw: draws the last layer [H, K] from latent sites of the model.
        distribution: returns the ``LastLayerPrior`` of the layer.
    """
    if not active_handlers():
        return draw()
    message = {"type": "last_layer", "name": name, "fn": draw, "args": (), "kwargs": {}, "value": None}
    return apply_stack(message | {"distribution": distribution})["value"]
