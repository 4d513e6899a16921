"""``decompose``: the part of a prediction's uncertainty that more data would reduce, and the part that stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.special import entr

from numpyro_fspace._checks import check_count, one_line
from numpyro_fspace.model.checks.arguments import checked_arguments
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.model.programs.jaxpr_analysis import sources
from numpyro_fspace.model.sites import base_distribution
from numpyro_fspace.posterior.arrays import is_key
from numpyro_fspace.posterior.completeness import check_complete
from numpyro_fspace.posterior.function_draws import Evaluator, is_output
from numpyro_fspace.posterior.posterior import Posterior, as_posterior
from numpyro_fspace.posterior.prediction_warnings import warn_of_columns, warn_of_predictions
from numpyro_fspace.posterior.row_independence import Evaluation

CATEGORICAL = (dist.CategoricalProbs, dist.CategoricalLogits)
BERNOULLI = (dist.BernoulliProbs, dist.BernoulliLogits)


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """The uncertainty of predictions in two parts.

    Attributes:
        kind: ``"variance"``, or for classes ``"entropy"`` (in nats).
        mean: the predictive mean, [N] or [N, K]; for classes their predictive probabilities, [N, K] (K = 2 for
            ``Bernoulli``).
        epistemic: variance over draws of the mean, in the shape of ``mean``; for classes the mutual information of
            class and parameters, [N].
        aleatoric: mean over draws of the variance of the likelihood; for classes of the entropy of the class.
    """

    kind: str
    mean: np.ndarray
    epistemic: np.ndarray
    aleatoric: np.ndarray

    __repr__ = one_line

    @property
    def total(self) -> np.ndarray:
        """The variance or entropy of the predictive distribution, the sum of both parts."""
        return self.epistemic + self.aleatoric


@entry_point
def decompose(
    source: MCMC | Posterior | dict,
    *args: Any,
    model: Callable | None = None,
    site: str | None = None,
    batch_size: int | None = None,
    input_batch_size: int | None = None,
    **kwargs: Any,
) -> Decomposition:
    r"""Epistemic and aleatoric uncertainty of new observations.

    For numbers, by the law of total variance over the posterior draws θ of all latent sites,

    .. math:: \mathrm{Var}[y] = \underbrace{\mathrm{Var}_\theta\, E[y \mid \theta]}_{\text{epistemic}}
              + \underbrace{E_\theta \mathrm{Var}[y \mid \theta]}_{\text{aleatoric}}.

    Moments given θ are those of the model's own likelihood at the inputs, in closed form. The noise may depend on the
    inputs, and targets may be counts or have heavy tails. For classes (``Categorical``, ``Bernoulli``) with
    probabilities p given θ and entropy H,

    .. math:: H[E_\theta p] = \underbrace{H[E_\theta p] - E_\theta H[p]}_{\text{epistemic: mutual information}}
              + \underbrace{E_\theta H[p]}_{\text{aleatoric: expected entropy}}.

    Nothing is drawn at random: the same draws give the same numbers. The epistemic part is that under the model; it
    does not include the doubt whether the model is right. A ``RuntimeWarning`` says if chains have not converged at
    these inputs, as for ``fs.predict``.

    Args:
        source: an ``MCMC`` object that has run, a ``fs.Posterior``, or a dict of draws [S, …] by site (then ``model``
            is needed).
        *args: the model's arguments at the new inputs, without targets (``decompose(mcmc, x_new)``).
        model: the model; that of ``source`` if None.
        site: the name of the observed site; needed if the model has several.
        batch_size: draws evaluated together, as for ``fs.predict``.
        input_batch_size: rows evaluated together, as for ``fs.predict``.
        **kwargs: the model's keyword arguments.

    Returns:
        A ``Decomposition``: ``mean``, ``epistemic``, ``aleatoric`` and ``total`` at the N inputs.

    Raises:
        TypeError: as for ``fs.predict``, or the first argument is a random key.
        ValueError: as for ``fs.predict``; several observed sites and no ``site``; a ``site`` that is not one of them; a
            likelihood without mean or variance (``Cauchy``), or one that depends on values that the model draws.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> draws = {"slope": jax.numpy.array([1.0, 3.0])}
        >>> parts = fs.decompose(draws, jax.numpy.array([0.0, 2.0]), model=model)
        >>> parts.epistemic.round(2).tolist(), parts.aleatoric.round(2).tolist()
        ([0.0, 4.0], [0.01, 0.01])

    Reference: Depeweg et al. (2018), *Decomposition of uncertainty in Bayesian deep learning*.
    """
    if input_batch_size is not None:
        check_count(input_batch_size, "input_batch_size")
    evaluator = _Moments(as_posterior(source, model), site)
    posterior = evaluator.posterior
    if args and is_key(args[0]):
        raise TypeError("decompose takes no random key, as nothing is drawn: decompose(mcmc, x_new).")
    warn_of_columns(posterior, args, kwargs)
    sizes = {"batch_size": batch_size, "input_batch_size": input_batch_size}
    with checked_arguments(args, kwargs, "decompose", model=posterior.model):
        evaluator.check_known(args, kwargs)
        found = evaluator.draws(jax.random.key(0), (args, kwargs), None, **sizes)
    for name, values in found.items():
        if not np.isfinite(values).all():
            bad = np.sum(~np.isfinite(values).reshape(len(values), -1).all(1))
            raise ValueError(
                f"decompose: the {name} of {evaluator.site!r} ({evaluator.law}) is not finite in {bad} of "
                f"{len(values)} draws: the likelihood has none (heavy tails), or the model gives NaN there."
            )
    center = found["probabilities" if "probabilities" in found else "mean"]
    warn_of_predictions({evaluator.site: center}, posterior.num_chains, lambda: evaluator.structure(args, kwargs))
    if "probabilities" in found:
        return of_classes(center)
    epistemic, aleatoric = center.var(0, dtype=float), found["variance"].mean(0, dtype=float)
    return Decomposition("variance", center.mean(0, dtype=float), epistemic, aleatoric)


def of_classes(probabilities) -> Decomposition:
    """The parts of the entropy, of draws of probabilities [S, …, K]."""
    p = np.maximum(np.asarray(probabilities, float), 0.0)  # 1 - p may be a negative rounding error
    mean, expected = p.mean(0), entr(p).sum(-1).mean(0)
    return Decomposition("entropy", mean, np.maximum(entr(mean).sum(-1) - expected, 0.0), expected)


class _Moments(Evaluator):
    """Mean and variance, or probabilities, of one observed site at each draw.

    Args:
        posterior: the draws and their model.
        site: the name of the site; None is the only one.
    """

    def __init__(self, posterior: Posterior, site: str | None):
        super().__init__(posterior)
        self._asked, self.site, self.law = site, "", ""

    def check_known(self, args, kwargs):
        """The moments must be known given a draw of the latent sites."""
        check_complete(self.posterior, args, kwargs, dict)
        arrays, _, join = split_arrays((args, kwargs))
        draw = {k: jnp.asarray(v[0]) for k, v in self.posterior.samples.items()}

        def moments(values):
            return self._evaluation({}, draw, values["key"], *join(arrays), None).values

        keys = [{"key": jax.random.key(i)} for i in range(2)]
        random = [k for k, used in sources(moments, keys[0]).items() if used]
        if random:  # or perhaps: a program may take a key and not use it
            first, second = (jax.jit(moments)(key) for key in keys)
            random = [k for k in random if not np.array_equal(first[k], second[k], equal_nan=True)]
        if random:
            raise ValueError(
                f"decompose: the {random[0]} of {self.site!r} depends on values that the model draws itself, such as "
                "another observed site without its targets or numpyro.prng_key(), so that it is not known given the "
                "parameters. Pass the targets of the other sites (decompose(mcmc, x_new, y_other=...)), or take draws "
                "of the site from fs.predict."
            )

    def _evaluation(self, plates, draw, key, *given) -> Evaluation:
        trace, weights, has_own_noise = self._traced(plates, draw, key, given)
        sites = [k for k, s in trace.items() if s["type"] == "sample" and is_output(s, draw, weights)]
        if self._asked not in sites and (self._asked is not None or len(sites) != 1):
            raise ValueError(f"decompose: site={self._asked!r}, but the observed sites of the model are {sites}.")
        self.site = sites[0] if self._asked is None else self._asked
        law = trace[self.site]["fn"]
        self.law = type(base_distribution(law)).__name__
        return Evaluation(_moments(self.site, law), {}, has_own_noise)


def _moments(name: str, law: dist.Distribution) -> dict:
    base = base_distribution(law)
    if isinstance(base, CATEGORICAL + BERNOULLI):
        p = base.probs if isinstance(base, CATEGORICAL) else jnp.stack([1.0 - base.probs, base.probs], -1)
        return {"probabilities": jnp.broadcast_to(p, (*law.batch_shape, *law.event_shape, p.shape[-1]))}
    try:
        if isinstance(base, dist.VonMises):  # of whose angles NumPyro gives the circular variance
            raise NotImplementedError
        mean, variance = law.mean, law.variance
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"decompose: {name!r} is a {type(base).__name__}, whose mean and variance are not known. Give the "
            "likelihood that it is made of in its place."
        ) from error
    shape = (*law.batch_shape, *law.event_shape)
    return {"mean": jnp.broadcast_to(mean, shape), "variance": jnp.broadcast_to(variance, shape)}
