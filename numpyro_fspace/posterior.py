"""``Posterior``: draws of a model's latent values with the model that they belong to, whatever made them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC, Predictive

from numpyro_fspace.infer.mcmc import warn_of_trouble
from numpyro_fspace.validate import check_count
from numpyro_fspace.variational.elbo import FunctionalELBO
from numpyro_fspace.variational.linearise import linearise

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Posterior", "as_posterior", "svi_posterior"]


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws of the latent values of a model, and what ``fs.predict`` and ``fs.to_arviz`` need beside them.

    Attributes:
        model: the NumPyro model, with the functions of this posterior (linearised ones, say).
        samples: draws by site, [S, …], chains one after the other.
        num_chains: in how many chains; 1 for independent draws.
        args, kwargs: the arguments that the model was fitted to.
        stats: fields of the draws, [S, …] each, such as ``diverging``.
    """

    model: Callable
    samples: dict
    num_chains: int = 1
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)

    def __post_init__(self):
        sizes = {k: jnp.shape(v)[0] if jnp.ndim(v) else None for k, v in self.samples.items()}
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ValueError(f"Every array of draws must have the same leading axis [S, …], got {sizes}.")


def as_posterior(source, model: Callable | None = None) -> Posterior:
    """The posterior behind an ``MCMC`` object, a dict of draws or a ``Posterior``; warns if a run was in trouble."""
    if isinstance(source, Posterior):
        return source
    if isinstance(source, MCMC):
        if source.last_state is None:
            raise ValueError("The MCMC object has no draws yet: call run first.")
        warn_of_trouble(source)
        stats = {k: np.asarray(v) for k, v in source.get_extra_fields().items() if not isinstance(v, dict | tuple)}
        model = source.sampler.model if model is None else model
        return Posterior(model, source.get_samples(), source.num_chains, source._args, source._kwargs, stats)
    if not isinstance(source, dict):
        raise TypeError(
            f"source must be an MCMC object, a Posterior or a dict of posterior draws, got {type(source).__name__}."
        )
    if model is None:
        raise TypeError("A dict of draws needs the model: pass model=.")
    return Posterior(model, source)


def svi_posterior(svi, params: dict, key, *args: Any, num_samples: int = 1000, **kwargs: Any) -> Posterior:
    """Draws from what NumPyro's ``SVI`` has fitted.

    If the loss is a ``fs.FunctionalELBO`` whose divergence speaks of the linearised network, so does the posterior's
    model: that process is what was fitted (``fs.linearise``).

    Args:
        svi: NumPyro's ``SVI`` object.
        params: what it found, ``svi.run(...).params`` or ``svi.get_params(state)``.
        key: of the draws.
        *args: the arguments of the run.
        num_samples: S.
        **kwargs: the keyword arguments of the run.

    Returns:
        A :class:`Posterior` for ``fs.predict`` and ``fs.to_arviz``.

    Raises:
        ValueError, TypeError: num_samples is not a positive integer.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, optax, tinygp
        >>> from numpyro.infer import SVI
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        ...     f = fs.functional_prior("f", lambda x: w * x[:, 0], gp, x)
        ...     numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> svi = SVI(model, fs.guides.mean_field(model), optax.adam(0.05), loss=fs.FunctionalELBO())
        >>> result = svi.run(jax.random.key(0), 100, x, x[:, 0], progress_bar=False)
        >>> posterior = fs.svi_posterior(svi, result.params, jax.random.key(1), x, x[:, 0], num_samples=50)
        >>> fs.predict(posterior, jax.random.key(2), x)["f"].shape
        (50, 10)
    """
    check_count(num_samples, "num_samples")
    guide = svi.guide
    model = handlers.substitute(svi.model, data=params)  # the values of its ``numpyro.param`` sites
    if hasattr(guide, "sample_posterior"):
        samples = guide.sample_posterior(key, params, sample_shape=(num_samples,))
    else:
        samples = Predictive(guide, params=params, num_samples=num_samples)(key, *args, **kwargs)
    if isinstance(svi.loss, FunctionalELBO) and svi.loss.linearised:
        model = linearise(model, guide.median(params))
    return Posterior(model, jax.tree.map(np.asarray, samples), args=args, kwargs=kwargs)
