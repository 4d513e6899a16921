"""``fs.Regressor``: regression with a network under a trained Gaussian process, in scikit-learn's protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
from scipy.special import ndtr, ndtri
from sklearn.base import RegressorMixin

from numpyro_fspace.estimators.base import MAX_TRAINING, NetworkEstimator, mean_and_spread, validated
from numpyro_fspace.estimators.network_model import RegressionModel
from numpyro_fspace.estimators.varying_noise import fit_noise
from numpyro_fspace.posterior.uncertainty_decomposition import Decomposition

#: Halvings of the interval that holds a quantile.
NUM_HALVINGS = 40
NOISES = ("auto", "constant", "varying")
#: ``noise="auto"`` takes noise that varies from this number of rows and this gain of the evidence (in nats) on.
MIN_VARYING, MIN_GAIN = 100, 5.0
#: A spread of y whose square float64 holds, with room for the square of its inverse.
SMALLEST, LARGEST = 1e-150, 1e150


@dataclass(kw_only=True, eq=False, repr=False)
class Regressor(RegressorMixin, NetworkEstimator):
    r"""Bayesian regression with a network whose functions have the distribution of a trained Gaussian process.

    ``fit`` standardizes inputs and targets, trains a Gaussian process with a lengthscale per input by marginal
    likelihood on up to 500 rows, and samples the NumPyro model ``estimator.model``: a ``fs.gp_network`` with that
    process at up to ``num_points`` training rows, and a noise with a prior around the trained one
    (``fs.estimators.RegressionModel``). The noise may vary with the inputs: then its logarithm is a second network with
    a process of its own, and both processes are trained together by a variational bound on the evidence.

    The estimator follows scikit-learn's protocol: it works in a ``Pipeline``, in ``cross_val_score`` and in a search of
    parameters. The defaults are for a table of about a thousand rows in about a minute; for results to publish raise
    ``num_warmup``, ``num_samples`` and ``num_chains``, and read
    ``print(fs.report(estimator.mcmc_, *estimator.posterior_.args))``. ``fit`` warns of doubtful draws.

    Args:
        noise: ``"constant"``; ``"varying"``, a function of the inputs; or ``"auto"``, which is ``"varying"`` if there
            are at least 100 rows and varying noise raises the evidence by at least 5 nats.
        widths: hidden widths of the network.
        kernel: ``"squared_exponential"``, ``"matern52"``, or ``"auto"``, the one with the larger marginal likelihood.
        num_points: maximum number of training rows that are points at which the network has the process's distribution.
        method: the sampler, ``"fsghmc"`` (``fs.fSGHMC``) or ``"fsgld"`` (``fs.fSGLD``).
        num_warmup: number of warm-up draws of each chain.
        num_samples: number of draws of each chain that are kept.
        num_chains: number of chains, which run side by side.
        batch_size: rows of a minibatch; None uses all rows in each gradient up to 3000 rows, and 500 beyond.
        random_state: seed, a ``numpy.random.RandomState``, or None.
        progress: whether to show a progress bar.

    Attributes:
        posterior_: the draws with their model, a ``fs.Posterior``.
        mcmc_: the ``fs.MCMC`` that has run (not kept by ``pickle``).
        gp_: the trained Gaussian process with constant noise, a result of ``fs.fit_gp``, in standardized units.
        noise_: ``"constant"`` or ``"varying"``, which noise the model has.
        x_mean_, x_scale_, y_mean_, y_scale_: means and standard deviations of inputs [D] and targets [K].
        n_features_in_, feature_names_in_: as in all of scikit-learn.

    Raises:
        TypeError: for masked values, dates and durations.
        ValueError: in ``fit``, for settings out of range, for data that scikit-learn refuses (missing values, text) and
            for a spread of y whose square float64 cannot represent; in all other methods, for inputs so far from the
            training rows that single precision cannot represent them.
        ImportError: scikit-learn 1.6 or newer is missing.

    Example:
        >>> import numpy as np, numpyro_fspace as fs
        >>> X = np.linspace(-2, 2, 40)[:, None]
        >>> y = np.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(0).normal(size=40)
        >>> estimator = fs.Regressor(
        ...     num_warmup=20, num_samples=20, num_chains=1, random_state=0
        ... ).fit(X, y)
        >>> mean, sd = estimator.predict(X, return_std=True)
        >>> estimator.predict_quantiles(X, (0.05, 0.95)).shape
        (40, 2)
    """

    noise: str = "constant"

    def _fit(self, X, y):
        if self.noise not in NOISES:
            raise ValueError(f"noise={self.noise!r} is unknown; choose from {', '.join(NOISES)}.")
        X, y = validated(self, X, y, y_numeric=True, multi_output=True, ensure_min_samples=2)
        y = np.asarray(y, float)
        self._is_flat = y.ndim == 1
        y = y[:, None] if self._is_flat else y
        self.y_mean_, self.y_scale_ = mean_and_spread(y)
        _check_squares(self.y_scale_)
        targets = (y - self.y_mean_) / self.y_scale_
        x, points, key, settings = self._prepare(X, targets)
        settings |= self._noise(x, targets, settings, key)
        model = RegressionModel(points, num_outputs=y.shape[1], **settings)
        targets = targets[:, 0] if y.shape[1] == 1 else targets
        return self._sample(model, key, x, targets.astype(x.dtype))

    def _noise(self, x, targets, settings, key) -> dict:
        """The settings of the model's noise; with noise that varies those of the mean's process too."""
        constant = {"noise": math.sqrt(float(self.gp_.noise_variance))}
        self.noise_ = "constant"
        if self.noise == "constant" or (self.noise == "auto" and len(x) < MIN_VARYING):
            return constant
        rows = np.asarray(jax.random.permutation(key, len(x)))[:MAX_TRAINING]
        fit = fit_noise(settings["kernel"], self.gp_.params, constant["noise"] ** 2, x[rows], targets[rows])
        if self.noise == "auto" and fit.gain < MIN_GAIN:
            return constant
        self.noise_ = "varying"
        return {
            "variance": float(fit.params["variance"]),
            "lengthscale": fit.params["lengthscale"],
            "noise": fit.noise,
            "log_noise_variance": float(fit.noise_params["variance"]),
            "log_noise_lengthscale": fit.noise_params["lengthscale"],
        }

    def predict(self, X, return_std: bool = False):
        """The predictive mean.

        Args:
            X: inputs [N, D].
            return_std: whether to return also the standard deviation of new targets, noise included.

        Returns:
            The mean [N] or [N, K]; with ``return_std`` the mean and the standard deviation.
        """
        parts = self._parts(X)
        return (parts.mean, np.sqrt(parts.total)) if return_std else parts.mean

    def decompose(self, X) -> Decomposition:
        """Epistemic and aleatoric variance of new targets, [N] or [N, K], in squared units of y; see ``fs.decompose``.

        Args:
            X: inputs [N, D].
        """
        return self._parts(X)

    def _parts(self, X) -> Decomposition:  # for predict too, which an overridden decompose must not change
        f, sigma = self._mean_and_noise(X)
        square = self.y_scale_**2
        aleatoric = square * (sigma**2).mean(0)
        flat = (lambda a: a[:, 0]) if self._is_flat else np.array
        parts = (self.y_mean_ + self.y_scale_ * f.mean(0), square * f.var(0), aleatoric)
        return Decomposition("variance", *map(flat, parts))

    def predict_quantiles(self, X, quantiles=(0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the predictive distribution, an equal mixture of the draws' normal distributions.

        Args:
            X: inputs [N, D].
            quantiles: Q levels between 0 and 1.

        Returns:
            An array [N, Q], or [N, K, Q] for several targets.
        """
        levels = np.atleast_1d(np.asarray(quantiles, float))
        if levels.ndim != 1 or not levels.size or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"quantiles={quantiles!r} must be numbers between 0 and 1, such as (0.05, 0.5, 0.95).")
        f, sigma = self._mean_and_noise(X)
        found = []
        for level in levels:
            each = f + ndtri(level) * sigma  # the draws' own quantiles, between which that of their mixture lies
            a, b = each.min(0), each.max(0)
            for _ in range(NUM_HALVINGS):
                middle = 0.5 * (a + b)
                below = ndtr((middle - f) / sigma).mean(0) < level
                a, b = np.where(below, middle, a), np.where(below, b, middle)
            found.append(self._in_units(0.5 * (a + b)))
        return np.stack(found, -1)

    def sample(self, X, num: int | None = 1, *, noise: bool = True, random_state=None) -> np.ndarray:
        """Draws of new targets, or of functions.

        Args:
            X: inputs [N, D].
            num: number of draws; None means one for each posterior draw, in random order.
            noise: whether to add the noise of the targets.
            random_state: seed, a ``numpy.random.RandomState``, or None.

        Returns:
            An array [num, N] or [num, N, K], in units of y.
        """
        f, sigma = self._mean_and_noise(X)
        rows, generator = self._random_draws(num, random_state)
        f = f[rows]
        if noise:
            f = f + sigma[rows] * generator.normal(size=f.shape)
        return self._in_units(f)

    def _mean_and_noise(self, X):
        """Draws of f and of the standard deviation of the noise, [S, N, K] each, in units of the model."""
        found = self._functions(X)
        f, model = found["f"], self.posterior_.model
        if "log_noise" in found:
            return f, model.noise * np.exp(found["log_noise"])
        sigma = np.asarray(self.posterior_.samples["sigma"], float)  # [S] or [S, K]
        return f, np.broadcast_to(sigma.reshape(len(sigma), 1, -1), f.shape)

    def _in_units(self, values):
        """Values [..., K] of the model in units of y, [...] for one target."""
        values = self.y_mean_ + self.y_scale_ * values
        return values[..., 0] if self._is_flat else values

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _check_squares(scale):
    """A spread whose square, the variance of predictions, float64 does not hold is refused."""
    bad = scale[~((scale > SMALLEST) & (scale < LARGEST))]
    if len(bad):
        raise ValueError(
            f"y has a standard deviation of {bad[0]:.2g}, whose square float64 does not hold: give y / {bad[0]:.0e}, "
            "and multiply the predictions by that number."
        )
