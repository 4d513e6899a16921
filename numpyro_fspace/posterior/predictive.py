"""``Predictive`` and ``predict``: the calls that return draws at new inputs, made by ``function_draws.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from numpyro_fspace._checks import check_count, check_key
from numpyro_fspace.model.checks.arguments import checked_arguments, known_values
from numpyro_fspace.model.entry_point import entry_point
from numpyro_fspace.posterior.function_draws import Evaluator
from numpyro_fspace.posterior.posterior import Posterior, as_posterior
from numpyro_fspace.posterior.prediction_warnings import warn_of_columns, warn_of_nan, warn_of_predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, ArrayLike, Float, Key
    from numpyro.infer import MCMC


class Predictive:
    """Draws of functions and observations, as ``fs.predict``, compiled once for all calls with inputs of one shape.

    It is used like ``numpyro.infer.Predictive``: settings come first, then a call with a key and the model's arguments.

    Args:
        source: an ``MCMC`` object that has run, a ``fs.Posterior``, or a dict of posterior draws [S, …] by site (then
            ``model`` is needed).
        model: the model; that of ``source`` if None.
        inputs: where functions are evaluated, as for ``fs.predict``.
        batch_size: draws evaluated together, as for ``fs.predict``.
        input_batch_size: rows evaluated together, as for ``fs.predict``.
        from_prior: names of latent sites that come from the prior, as for ``fs.predict``.

    Raises:
        TypeError: ``source`` is none of these, or the model is missing.
        ValueError: ``source`` has no draws, or kept functions in place of weights.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> predictive = fs.Predictive({"slope": jax.numpy.ones(5)}, model=model)
        >>> predictive(jax.random.key(0), jax.numpy.ones(3))["y"].shape
        (5, 3)
        >>> predictive(jax.random.key(1), jax.numpy.zeros(3))["y"].shape  # compiles nothing
        (5, 3)
    """

    @entry_point
    def __init__(
        self,
        source: MCMC | Posterior | dict,
        *,
        model: Callable | None = None,
        inputs: Float[ArrayLike, "N D"] | dict | None = None,
        batch_size: int | None = None,
        input_batch_size: int | None = None,
        from_prior: Sequence[str] = (),
    ):
        if input_batch_size is not None:
            check_count(input_batch_size, "input_batch_size")
        from_prior = (from_prior,) if isinstance(from_prior, str) else from_prior
        if not isinstance(from_prior, list | tuple | set) or not all(isinstance(name, str) for name in from_prior):
            raise TypeError(f"from_prior must be a list of names of latent sites, got {from_prior!r}.")
        from_prior = tuple(from_prior)
        self._evaluator = Evaluator(as_posterior(source, model, from_prior), from_prior)
        for leaf in jax.tree.leaves(inputs):
            if np.iscomplexobj(leaf):
                raise TypeError(f"inputs is complex ({np.asarray(leaf).dtype}): pass real numbers.")
        self._inputs = inputs
        self._sizes = {"batch_size": batch_size, "input_batch_size": input_batch_size}

    @entry_point
    def __call__(self, key: Key[Array, ""], *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """One draw of each function and observation for each posterior draw.

        Args:
            key: random key of the observations and of sites from the prior.
            args, kwargs: the model's arguments at the new inputs, without targets.

        Returns:
            A dict of NumPy arrays [S, N] or [S, N, K]; see ``fs.predict``, also for the errors.
        """
        check_key(key, "key", single=True)
        evaluator, inputs = self._evaluator, self._inputs
        posterior, given = evaluator.posterior, {} if inputs is None else {"inputs": inputs}
        warn_of_columns(posterior, args, kwargs)
        known = known_values(posterior.model, args, kwargs, "predict")
        with checked_arguments(args, kwargs | given, "predict") as trouble, known:
            draws = evaluator.draws(key, (args, kwargs), inputs, **self._sizes)
            bad = [k for k, v in draws.items() if trouble is not None and not np.isfinite(v).all()]
            if bad:
                raise ValueError(f"{bad} are not finite.")
        warn_of_nan(draws, posterior.samples)
        warn_of_predictions(draws, posterior.num_chains, lambda: evaluator.structure(args, kwargs))
        return draws

    def __repr__(self) -> str:
        return f"Predictive({self._evaluator.posterior!r})"


@entry_point
def predict(
    source: MCMC | Posterior | dict,
    key: Key[Array, ""],
    *args: Any,
    model: Callable | None = None,
    inputs: Float[ArrayLike, "N D"] | dict | None = None,
    batch_size: int | None = None,
    input_batch_size: int | None = None,
    from_prior: Sequence[str] = (),
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    """Draws of functions and observations at new inputs, one for each posterior draw.

    A ``RuntimeWarning`` says if predictions are NaN, or if two or more chains of at least 200 draws each have not
    converged in them (R-hat above 1.05). ``fs.Predictive`` gives the same draws, and compiles the model once for
    several calls.

    Args:
        source: an ``MCMC`` object that has run, a ``fs.Posterior`` (of ``fs.svi_posterior``, of a checkpoint, …), or a
            dict of posterior draws [S, …] by site (then ``model`` is needed).
        key: random key of the observations and of sites from the prior.
        *args: the model's arguments at the new inputs, without targets (``predict(mcmc, key, x_new)``).
        model: the model; that of ``source`` if None.
        inputs: where functions are evaluated: an array [N, D], or a dict of arrays by name of function. If None, each
            is evaluated where the model first calls it or, if that is random, at the first array argument.
        batch_size: draws evaluated together; chosen to bound memory if None.
        input_batch_size: rows evaluated together. If None, all rows, unless they make an array of more than 2²⁵ numbers
            at one draw, as a thousand images do in a convolutional network. Rows are then evaluated in batches, if the
            values of each row depend on that row alone, which is tested at one draw. Every argument with as many rows
            as the longest of ``inputs`` is divided alike.
        from_prior: names of latent sites that are drawn from the prior, given the other sites, and not taken from the
            posterior draws: the latent values of new rows, for example. The whole site is drawn, also for rows that
            were observed. All other latent sites must be among the draws.
        **kwargs: the model's keyword arguments. Give an argument of the model by position if its name is one of those
            above.

    Returns:
        A dict of NumPy arrays [S, N] or [S, N, K]: functions by the name of their ``gp_network``, ``functional_prior``
        or ``random_module``, new observations, deterministic sites, and the sites that ``from_prior`` names. Chains are
        concatenated.

    Raises:
        TypeError: ``source`` is none of these, the model is missing, or ``key`` is not a random key.
        ValueError: ``source`` has no draws, kept functions in place of weights, lacks latent sites of the model or has
            draws outside of the bounds of one; ``key`` is several keys; ``inputs`` names no function of the model, or
            ``from_prior`` no latent site; ``input_batch_size`` is given and the values of a row depend on other rows.
            Errors of the model itself are raised unchanged.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.1), obs=y)
        >>> draws = {"slope": jax.numpy.ones(5)}
        >>> fs.predict(draws, jax.random.key(0), jax.numpy.ones((3, 1)), model=model)["y"].shape
        (5, 3)
    """
    check_key(key, "key", single=True)
    sizes = {"batch_size": batch_size, "input_batch_size": input_batch_size}
    predictive = Predictive(source, model=model, inputs=inputs, from_prior=from_prior, **sizes)
    return predictive(key, *args, **kwargs)
