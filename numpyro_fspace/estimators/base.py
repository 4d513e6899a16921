"""What ``fs.Regressor`` and ``fs.Classifier`` share: standardization, the trained process, sampling, evaluation."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_fspace._checks import check_count, not_numbers, times
from numpyro_fspace.estimators.gp_kernels import KERNELS, ard_kernel, by_products
from numpyro_fspace.estimators.network_model import NetworkModel
from numpyro_fspace.mcmc import MCMC, fSGHMC, fSGLD
from numpyro_fspace.posterior import Posterior, Predictive
from numpyro_fspace.priors import GPFit, GPPrior, fit_gp, median_start

METHODS: dict[str, Callable] = {"fsghmc": fSGHMC, "fsgld": fSGLD}
#: Rows on which the Gaussian process is trained at most, its steps of Adam and their rate.
MAX_TRAINING, GP_STEPS, GP_RATE = 500, 200, 0.1
#: All rows are used in each gradient up to this number of rows; beyond it, minibatches of this size.
FULL_BATCH, BATCH = 3000, 500
#: New inputs are evaluated in numbers of rows that are a power of two times this one, so that few programs are
#: compiled, and the values of a row do not depend on how many others there are.
ROWS = 256


def validated(estimator, *data, **settings):
    """X, or X and y, as scikit-learn checks them, which would lose the mask of masked values and count dates."""
    for name, array in zip("Xy", data, strict=False):
        if np.ma.is_masked(array):
            raise TypeError(f"{name} {not_numbers(array)}.")
        if isinstance(array, list | tuple | np.ndarray):
            with contextlib.suppress(ValueError):  # rows of different lengths, which scikit-learn refuses
                if wrong := times(np.asarray(array)):
                    raise TypeError(f"{name} {wrong}.")
        types = getattr(array, "dtypes", getattr(array, "dtype", None))
        if any(getattr(one, "kind", "") in ("m", "M") for one in (types if hasattr(types, "__iter__") else [types])):
            raise TypeError(f"{name} holds dates or durations: encode them as numbers, such as days since the first.")
    return validate_data(estimator, *data, dtype=np.float64, **settings)


@dataclass(kw_only=True, eq=False, repr=False)
class NetworkEstimator(BaseEstimator):
    """Base of the estimators; see ``fs.Regressor`` for the settings."""

    # scikit-learn reads the settings from the signature of __init__
    widths: tuple[int, ...] = (50, 50)
    kernel: str = "auto"
    num_points: int = 300
    method: str = "fsghmc"
    num_warmup: int = 200
    num_samples: int = 200
    num_chains: int = 2
    batch_size: int | None = None
    random_state: int | np.random.RandomState | None = None
    progress: bool = False

    @property
    def model(self) -> NetworkModel:
        """The NumPyro model that was sampled, of ``standardize(X)`` and standardized targets or classes 0 to K - 1."""
        check_is_fitted(self)
        return cast(NetworkModel, self.posterior_.model)

    def standardize(self, X) -> np.ndarray:
        """Inputs as the model takes them, [N, D]: X minus the training mean, divided by the standard deviation."""
        check_is_fitted(self)
        return self._scaled(validated(self, X, reset=False))

    def _scaled(self, X):
        with np.errstate(over="ignore"):
            x = ((X - self.x_mean_) / self.x_scale_).astype(jax.dtypes.canonicalize_dtype(float))
        if not np.isfinite(x).all():
            row, column = np.argwhere(~np.isfinite(x))[0]
            raise ValueError(
                f"X[{row}, {column}]={X[row, column]:.2g} is so far from the training rows, whose mean is "
                f"{self.x_mean_[column]:.2g} and whose standard deviation {self.x_scale_[column]:.2g}, that {x.dtype} "
                "does not hold the ratio: correct the value, or leave the row out."
            )
        return x

    def fit(self, X, y):
        """Train the process and sample the network.

        Args:
            X: inputs [N, D].
            y: targets [N] or [N, K] of a regression, or labels [N] of a classification.

        Returns:
            The estimator. If ``fit`` raises an error or is interrupted, all previous results but ``mcmc_`` stay.
        """
        self._check_settings()
        before = dict(vars(self))
        try:
            return self._fit(X, y)
        except BaseException:
            begun = {k: v for k, v in vars(self).items() if k == "mcmc_"}
            vars(self).clear()
            vars(self).update(before | begun)
            raise

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    @abstractmethod
    def _fit(self, X, y):
        """``fit``, which may end early."""

    def _check_settings(self):
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; choose from {', '.join(METHODS)}.")
        if self.kernel not in ("auto", *KERNELS):
            raise ValueError(f"kernel={self.kernel!r} is unknown; choose from auto, {', '.join(KERNELS)}.")
        widths = self.widths if isinstance(self.widths, list | tuple) else ()
        if not widths or not all(isinstance(width, int | np.integer) and width > 0 for width in widths):
            raise ValueError(f"widths={self.widths!r} must be positive whole numbers, such as (50, 50).")
        whole = ["num_points", "num_warmup", "num_samples", "num_chains"]
        for name in whole if self.batch_size is None else [*whole, "batch_size"]:
            if not isinstance(getattr(self, name), int | np.integer) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number of at least 1.")

    def _prepare(self, X, targets) -> tuple:
        """``(x, key, settings)``: standardized inputs, a key, and the settings of the model.

        Trains the Gaussian process on ``targets`` [N, K], of which the mean is zero.
        """
        self.x_mean_, self.x_scale_ = mean_and_spread(X)
        x = self._scaled(X)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        key_rows, key_gp, key = jax.random.split(jax.random.key(seed), 3)
        self.gp_, kernel = train_gp(x, targets, kernel=self.kernel, key=key_gp, progress=self.progress)
        distinct = np.unique(x, axis=0, return_index=True)[1]
        order = np.asarray(jax.random.permutation(key_rows, len(distinct)))[: self.num_points]
        batch = self.batch_size if self.batch_size is not None else BATCH if len(x) > FULL_BATCH else None
        settings = {
            "kernel": kernel,
            "variance": float(self.gp_.params["variance"]),
            "lengthscale": np.asarray(self.gp_.params["lengthscale"]),
            "widths": tuple(self.widths),
            "batch_size": None if batch is None or batch >= len(x) else batch,
        }
        return x, x[np.sort(distinct[order])], key, settings

    def _sample(self, model: NetworkModel, key, x, y, **settings):
        """Draw from the posterior of the model."""
        side_by_side = self.num_chains > 1 and jax.local_device_count() >= self.num_chains
        self.mcmc_ = MCMC(
            METHODS[self.method](model, **settings),
            num_warmup=self.num_warmup,
            num_samples=self.num_samples,
            num_chains=self.num_chains,
            chain_method="parallel" if side_by_side else "vectorized",
            progress_bar=self.progress,
        )
        self.mcmc_.run(key, x, y, extra_fields=("potential_energy", "step_size", "temperature"))
        samples = {k: np.asarray(v) for k, v in self.mcmc_.get_samples().items()}
        self._set_posterior(Posterior(model, samples, num_chains=self.num_chains, args=(x, y)))
        return self

    def _set_posterior(self, posterior: Posterior):
        self.posterior_ = posterior
        self._predictive = Predictive(posterior)

    def _functions(self, X) -> dict[str, np.ndarray]:
        """Draws [S, N, K] of the functions by name at inputs X [N, D], in units of the model."""
        x, num = self.standardize(X), ROWS
        while num < len(x):
            num *= 2
        padded = np.concatenate([x, np.broadcast_to(x[:1], (num - len(x), x.shape[1]))])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "At these inputs R-hat", RuntimeWarning)  # fit has warned
            found = self._predictive(jax.random.key(0), padded)
        return {name: found[name][:, : len(x)].astype(float) for name in ("f", "log_noise") if name in found}

    def _random_draws(self, num: int | None, random_state) -> tuple:
        """Numbers of ``num`` posterior draws at random (without repetition where there are enough), and a generator."""
        generator = np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))
        size = len(next(iter(self.posterior_.samples.values())))
        num = size if num is None else num
        check_count(num, "num")
        return generator.choice(size, num, replace=num > size), generator

    def __getstate__(self):
        """The fitted estimator without its sampler and compiled programs, which cannot be pickled."""
        state = dict(super().__getstate__())
        return {k: v for k, v in state.items() if k not in ("mcmc_", "_predictive")}

    def __setstate__(self, state):
        super().__setstate__(state)
        if "posterior_" in state:
            self._set_posterior(state["posterior_"])


def mean_and_spread(values) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations [D] of columns, 1 for constant ones, of numbers of any size."""
    size = np.abs(values).max(0)
    size = np.where(size > 0, size, 1.0)
    parts = values / size
    return size * parts.mean(0), np.where(np.ptp(parts, 0) > 0, size * parts.std(0), 1.0)


def train_gp(x, y, *, kernel: str, key, progress: bool = False) -> tuple[GPFit, str]:
    """The Gaussian process with the named kernel, or with that of the largest marginal likelihood for ``"auto"``.

    Args:
        x: standardized inputs [N, D]; at most 500 random rows are used.
        y: targets [N, K] with mean zero; the outputs share kernel and noise.
        kernel: a name in ``KERNELS``, or ``"auto"``.
        key: of the random rows.
        progress: whether to show a bar for each kernel.

    Returns:
        The trained process, and the name of its kernel.
    """
    y = y[:, 0] if y.shape[1] == 1 else y
    settings = {"num_steps": GP_STEPS, "learning_rate": GP_RATE, "max_points": MAX_TRAINING, "key": key}
    settings["progress"] = progress
    start = median_start(x, y if y.ndim == 2 else y[:, None])
    names = KERNELS if kernel == "auto" else (kernel,)
    found = {name: fit_gp(partial(by_products, name), x, y, params=start, **settings) for name in names}
    best = min(found, key=lambda name: np.nanmin(found[name].losses))
    fit = found[best]
    return replace(fit, prior=GPPrior(ard_kernel(best, fit.params), num_outputs=fit.prior.num_outputs)), best
