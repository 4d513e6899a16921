"""The V- and M-stages of ``FVIMC``, which fit a guide and sample weights. T-stages are in ``transformation``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import one_line
from numpyro_fspace.model.checks.model import checked_model
from numpyro_fspace.model.linearized import function_of, linearize
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.variational.elbo import FunctionalELBO, GuidedModel
from numpyro_fspace.variational.pushforward import as_normal
from numpyro_fspace.variational.transformation import compose

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from numpyro_fspace.variational.bijections import Fitted


class VStage(NamedTuple):
    """Result of a V-stage.

    Attributes:
        losses: negative bound at every step [num_updates].
        params: the guide's parameters after the last step.
    """

    losses: Float[np.ndarray, " U"]
    params: dict

    def __repr__(self) -> str:
        return one_line(self)


class MStage(NamedTuple):
    """Result of an M-stage.

    Attributes:
        potential_energy: negative log density (up to a constant) of every draw [S].
        samples: the latent values of the draws, by site.
        x: points [M, D] at which the T-stage evaluates the functions.
        functions: F_k∘…∘F_1∘f(x) of every draw [S, M, K], without the bijection that the T-stage adds.
    """

    potential_energy: Float[np.ndarray, " S"]
    samples: dict
    x: Float[Array, "M D"]
    functions: Float[Array, "S M K"]

    def __repr__(self) -> str:
        return one_line(self)


class FVIMCResult(NamedTuple):
    """Result of ``FVIMC.run``.

    Attributes:
        params: the guide's parameters after the last V-stage.
        bijections: F_1, …, F_k, the last one outermost.
        stages: a ``VStage``, ``MStage`` or ``TStage`` for every stage, in order.
    """

    params: dict
    bijections: tuple[Fitted, ...]
    stages: tuple

    def __repr__(self) -> str:
        return one_line(self)


class StageELBO(FunctionalELBO):
    """The bound of a V-stage, in which the function is F∘f.

    If the divergence needs a Gaussian distribution, ``FunctionalELBO`` linearizes F∘f as a whole. If the divergence is
    estimated from draws, F is applied to the linearized network.
    """

    def __init__(self, divergence, num_particles, bijections):
        super().__init__(divergence, num_particles=num_particles)
        self.bijections = bijections

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        if not self.linearized:
            model = linearize(model, guide.median(param_map))
        model = compose(model, self.bijections)
        return super().loss_with_mutable_state(rng_key, param_map, model, guide, *args, **kwargs)


def check_model_and_guide(key, svi, args, kwargs) -> None:
    """Raise for a model or a guide that the stages cannot use. The guide starts as in ``svi.run`` with this key."""
    with checked_model(svi.model, args, kwargs):
        potential = ModelPotential(svi.model, args, kwargs, key=key)
        potential.check_data()
    names = list(potential.functional_priors)
    if len(names) != 1:
        raise ValueError(
            f"FVIMC transforms the one function under a fs.functional_prior, but the model declares {len(names)} "
            f"({names}). Add one, or merge them into one function with several outputs."
        )
    params = None
    if hasattr(svi.guide, "get_posterior"):
        params = svi.get_params(svi.init(key, *args, **kwargs))
    if params is None or as_normal(svi.guide.get_posterior(params)) is None:
        raise TypeError(
            f"guide returned a {type(svi.guide).__name__}, but FVIMC needs a guide whose posterior is normal over the "
            "flat latent values: guide=fs.variational.guides.mean_field, or "
            "functools.partial(fs.variational.guides.low_rank, rank=...)."
        )
    GuidedModel(svi.model, svi.guide, params, jax.random.key(0), args=args, kwargs=kwargs, needs_normal=True)


def sample_functions(key, mcmc, model, guided, num_points: int, *, args, kwargs) -> MStage:
    """Run ``mcmc`` from a draw of the guide and evaluate the function of ``model`` at some measurement points."""
    key_start, key_chain, key_points = jax.random.split(key, 3)
    ((name, site),) = guided.functions.items()
    start = guided.unpack(guided.draw(key_start))
    mcmc.run(key_chain, *args, init_params=start, extra_fields=("potential_energy",), **kwargs)
    x, samples = _some_points(site["fn"].points, key_points, num_points), mcmc.get_samples()

    def values(draw):
        return function_of(model, name, args, kwargs, draw)(x).reshape(len(x), -1)

    functions = jax.jit(lambda draws: jax.lax.map(values, draws, batch_size=64))(samples)
    return MStage(np.asarray(mcmc.get_extra_fields()["potential_energy"]), samples, x, functions)


def _some_points(sampler, key, num: int):
    """At most ``num`` distinct points at random; random points are drawn repeatedly until there are enough."""
    key_draws, key_subset = jax.random.split(key)
    first = sampler(key_draws)
    draws = [first]
    if sampler.is_random:
        draws += [sampler(jax.random.fold_in(key_draws, i)) for i in range(1, -(-num // len(first)))]
    x = np.unique(np.concatenate(draws), axis=0)
    return jnp.asarray(x[np.asarray(jax.random.permutation(key_subset, len(x))[:num])])
