"""Weights for chains that have not converged, by how well each predicts (stacking)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fspace._checks import is_table
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.posterior.function_draws import log_likelihood
from numpyro_fspace.posterior.posterior import Posterior, as_posterior

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpyro.infer import MCMC

#: A larger Pareto shape makes the leave-one-out density of a point unreliable.
PARETO_LIMIT = 0.7
#: A smaller gain in the log predictive density of all data says nothing.
SMALL_GAIN = 4.0
#: Iterations for the weights, and the gain of the mean log density at which they end.
MAX_ITERATIONS, GAIN = 20_000, 1e-9


@dataclass(frozen=True, repr=False)
class Stacking:
    """Weights of chains, and a posterior in which each has that share; ``print`` it for a table.

    Attributes:
        weights: weights of the chains, which sum to one, [C].
        elpd: leave-one-out log predictive density of the data (a sum over points) under each chain alone, [C]; for
            held-out data the log predictive density.
        elpd_equal: the same under all chains with equal weights, which is the usual mixture.
        elpd_stacked: the same under the chains with ``weights``, which maximize it.
        gain_error: standard error of ``elpd_stacked - elpd_equal``.
        unreliable: share of the points whose leave-one-out density under a chain is unreliable (Pareto shape above
            0.7), [C].
        posterior: draws of the chains in proportion to their weights, together as many as one chain has.
    """

    weights: Float[np.ndarray, " C"]
    elpd: Float[np.ndarray, " C"]
    elpd_equal: float
    elpd_stacked: float
    gain_error: float
    unreliable: Float[np.ndarray, " C"]
    posterior: Posterior

    def __str__(self) -> str:
        lines = [f"{'chain':>5}{'weight':>9}{'elpd':>12}{'unreliable':>12}"]
        rows = enumerate(zip(self.weights, self.elpd, self.unreliable, strict=True))
        lines += [f"{i:>5}{w:>9.3f}{elpd:>12.1f}{100 * bad:>10.0f} %" for i, (w, elpd, bad) in rows]
        lines.append(f"elpd {self.elpd_equal:.1f} with equal weights, {self.elpd_stacked:.1f} with these.")
        if self.elpd_stacked - self.elpd_equal < max(SMALL_GAIN, 2 * self.gain_error):
            lines.append("The gain is small: equal weights, all draws of the run, are as good.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Stacking(weights={np.round(self.weights, 3).tolist()})"

    def _repr_pretty_(self, printer, cycle):
        """What notebooks show: the table."""
        printer.text(str(self))


@entry_point
def stack_chains(source: MCMC | Posterior, *args: Any, **kwargs: Any) -> Stacking:
    r"""Weights for chains that have not converged, by their leave-one-out predictions or by those of held-out data.

    If chains sample different modes, the share of a mode depends on where the chains started, not on its probability.
    Stacking weights chains by how well they predict together,

    .. math:: \max_w \sum_n \log \sum_c w_c\, p_c(y_n \mid y_{-n}), \qquad w_c \ge 0, \quad \sum_c w_c = 1,

    where Pareto-smoothed importance sampling (``arviz.loo``) estimates the leave-one-out densities p_c of each chain.
    For data with rows that the run did not have (held-out rows) p_c is the mean density of y_n over the draws of the
    chain. The result is a predictive distribution, not the posterior. If chains have converged, the objective hardly
    depends on w: the weights may then be anything, and the table says that the gain is small.

    Args:
        source: an ``MCMC`` object that has run several chains, or a ``fs.Posterior`` of several chains.
        *args: the arguments of the model with the targets, of the run (the default) or of held-out rows. Those of a
            ``Posterior`` that does not know the arguments of its run count as the run's.
        **kwargs: the keyword arguments of the model.

    Returns:
        A :class:`Stacking`; ``fs.predict(stacking.posterior, key, x_new)`` predicts with it.

    Raises:
        ValueError: a single chain, a chain of fewer than 10 draws, a model without observations, or a log-likelihood
            that is not finite.
        ImportError: ArviZ is missing.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(y=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> y = rng.normal(size=50)
        >>> draws = np.repeat([0.0, 5.0], 200) + 0.1 * rng.normal(size=400)
        >>> posterior = fs.Posterior(model, {"mean": draws}, num_chains=2, args=(y,))
        >>> fs.diagnostics.stack_chains(posterior).weights.round(2).tolist()
        [1.0, 0.0]

    Reference: Y. Yao, A. Vehtari, A. Gelman (2022), *Stacking for non-mixing Bayesian computations: the curse and
    blessing of multimodal posteriors*.
    """
    posterior = as_posterior(source)
    if not args and not kwargs:
        args, kwargs = posterior.args, posterior.kwargs
    num_chains, num_draws = posterior.num_chains, len(next(iter(posterior.samples.values()))) // posterior.num_chains
    if num_chains < 2:
        raise ValueError("stack_chains weights several chains and got one: run with num_chains=4, say.")
    if num_draws < 10:
        raise ValueError(f"stack_chains needs 10 draws of each chain or more, got {num_draws}.")
    pointwise = [np.asarray(v).reshape(len(v), -1) for v in log_likelihood(posterior, args, kwargs).values()]
    if not pointwise:
        raise ValueError("stack_chains: the model has no observed site with these arguments; give it the targets.")
    by_draw = np.concatenate(pointwise, 1).astype(np.float64)
    by_draw = by_draw[:, (by_draw != 0).any(0)]  # without points that a mask leaves out
    bad = [i for i, chain in enumerate(np.split(by_draw, num_chains)) if not np.isfinite(chain).all()]
    if bad:
        raise ValueError(
            f"stack_chains: the log-likelihood is not finite in draws of the chains {bad} (from 0 on): leave these "
            "chains out of the draws, or check the model and its targets for NaN."
        )
    densities_of = _mean_densities if _are_new(posterior, args, kwargs) else _loo
    found = [densities_of(chain) for chain in np.split(by_draw, num_chains)]
    points = np.stack([densities for densities, _ in found])
    unreliable = np.array([np.mean(shapes > PARETO_LIMIT) for _, shapes in found])
    weights = _stacked(points)
    equal = np.full(num_chains, 1 / num_chains)
    as_equal, stacked = (logsumexp(points, 0, b=w[:, None]) for w in (equal, weights))  # of mixtures of the chains
    rows = _rows(weights, num_draws)
    drawn = replace(posterior, samples={k: v[rows] for k, v in posterior.samples.items()}, num_chains=1, stats={})
    return Stacking(
        weights,
        points.sum(1),
        float(as_equal.sum()),
        float(stacked.sum()),
        float(np.sqrt(len(stacked)) * np.std(stacked - as_equal)),
        unreliable,
        drawn,
    )


def _are_new(posterior: Posterior, args, kwargs) -> bool:
    """Whether numbers among the arguments have rows that are in none of the run's, as far as these are known."""
    old, new = _rows_of((posterior.args, posterior.kwargs)), _rows_of((args, kwargs))
    return bool(old) and not all(any(rows <= known for known in old) for rows in new)


def _rows_of(given) -> list[set[bytes]]:
    """The rows of each array of numbers; masks and random keys are left out."""
    leaves = [np.asarray(a) if is_table(a) else a for a in jax.tree.leaves(given)]
    arrays = [a for a in leaves if np.ndim(a) and jnp.issubdtype(a.dtype, jnp.number)]
    return [{row.tobytes() for row in np.asarray(a, np.float64)} for a in arrays]


def _mean_densities(chain: Float[np.ndarray, "S N"]) -> tuple[np.ndarray, np.ndarray]:
    """Logs of the mean densities of the points over a chain, [N], and zeros in place of Pareto shapes, [N]."""
    return logsumexp(chain, axis=0) - np.log(len(chain)), np.zeros(chain.shape[1])


def _loo(chain: Float[np.ndarray, "S N"]) -> tuple[np.ndarray, np.ndarray]:
    """Leave-one-out log densities of the points under a chain, [N], and Pareto shapes, [N]."""
    try:
        import arviz as az
    except ImportError as error:
        raise ImportError('stack_chains needs ArviZ: pip install "numpyro_fspace[arviz]".') from error
    groups: Any = {
        "posterior": {"draw_number": np.arange(float(len(chain)))[None]},
        "log_likelihood": {"y": chain[None]},
    }
    is_new = int(az.__version__.split(".")[0]) >= 1
    data = az.from_dict(groups) if is_new else az.from_dict(**groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Pareto shapes, which are reported
        scale = {} if is_new else {"scale": "log"}  # whatever the user's rcParams say
        found = az.loo(data, pointwise=True, reff=1.0, **scale)
    densities = found.elpd_i if is_new else found.loo_i
    return np.asarray(densities).ravel(), np.asarray(found.pareto_k).ravel()


def _stacked(points: Float[np.ndarray, "C N"]) -> Float[np.ndarray, " C"]:
    """The weights of the largest mean log density, by the expectation-maximization steps of a mixture."""
    densities = np.exp(points - points.max(0))
    weights = np.full(len(points), 1 / len(points))
    last = -np.inf
    for _ in range(MAX_ITERATIONS):
        mixed = weights @ densities
        value = np.mean(np.log(mixed))
        if value - last < GAIN:
            break
        last, weights = value, weights * np.mean(densities / mixed, 1)
    return weights / weights.sum()


def _rows(weights, num_draws: int) -> np.ndarray:
    """``num_draws`` rows of all draws: of each chain as many as its weight says, evenly spaced."""
    wanted = weights * num_draws
    counts = np.floor(wanted).astype(int)
    most = np.argsort(counts - wanted, kind="stable")[: num_draws - counts.sum()]
    counts[most] += 1
    return np.concatenate(
        [c * num_draws + (np.arange(count) * num_draws) // max(count, 1) for c, count in enumerate(counts)]
    )
